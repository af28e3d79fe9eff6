"""Tensors whose memory is not what it seems: what the core is given, and when it is not called."""

from __future__ import annotations

import ast
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint

import sparsetopk.torch as st
from sparsetopk.torch._fused import kernels
from sparsetopk.torch._fused import rows as fused
from sparsetopk.torch._rows.arguments import is_simple

F64 = torch.float64


def gaussian(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype, device="cpu")


OTHER = gaussian(2, 8, seed=5)
LABELS = torch.tensor([1, 2, 3])
CALLS = {
    "mask": lambda x: st.topk_mask(x, 3, 0.5),
    "topk": lambda x: st.topk(x, 3, 0.5),
    "mag": lambda x: st.topk_mag(x, 3, 0.5),
    "general p": lambda x: st.topk_mask(x, 3, 0.5, p=1.7, two_sided=True),
    "pav": lambda x: st.topk_mask(x, 3, 0.5, solver="pav"),
    "select": lambda x: st.topk_select(x, 3, 0.5).values,
    "multi": lambda x: st.topk_mag_multi([OTHER.to(x.dtype), x], 5, 0.5)[1],
    "loss": lambda x: st.topk_loss(x, LABELS, 3),
    "best": lambda x: st.topk_loss(x, LABELS, 3, completion="best"),
    "value": lambda x: st.topk_value(x, 3, 0.5),
    "rank": lambda x: st.soft_rank(x, 0.5),
    "sort": lambda x: st.soft_sort(x, 0.5),
    "choose_lam": lambda x: st.choose_lam(x, 3),
}
call = pytest.mark.parametrize("f", CALLS.values(), ids=CALLS)
live_call = pytest.mark.parametrize(
    "f", [f for name, f in CALLS.items() if name != "choose_lam"], ids=[*CALLS][:-1]
)


def value_and_gradient(f, x):
    x = x.detach().requires_grad_()
    y = f(x)
    if y.requires_grad:
        y.backward(torch.cos(torch.arange(y.numel(), dtype=y.dtype, device="cpu")).view_as(y))
    return y.detach(), x.grad


def test_addresses_come_from_one_place():
    found = [
        (path.name, function.name)
        for path in Path(kernels.__file__).parent.glob("*.py")
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and node.attr == "data_ptr"
    ]
    assert found == [("kernels.py", "address"), ("kernels.py", "place")]


@pytest.mark.parametrize(
    "t",
    [
        torch.zeros(4, device="meta"),
        torch.zeros(4, dtype=F64),
        torch.zeros(5),
        torch.zeros(8)[::2],
        torch.zeros(4).as_subclass(type("Own", (torch.Tensor,), {})),
    ],
    ids=["device", "dtype", "length", "strides", "subclass"],
)
def test_an_address_is_that_of_what_the_core_expects(t):
    good = torch.zeros(4)
    assert kernels.address(good, torch.float32, 4) == good.data_ptr()
    with pytest.raises(ValueError, match=r"4 numbers of torch\.float32"):
        kernels.address(t, torch.float32, 4)


SIMPLE = gaussian(3, 8)
_SHRUNK = gaussian(3, 8)
_SHRUNK.untyped_storage().resize_(40)
with warnings.catch_warnings(action="ignore"):  # both are in beta
    _CSR, _NESTED = SIMPLE.to_sparse_csr(), torch.nested.nested_tensor([*SIMPLE])
NOT_SIMPLE = {
    "list": ([1.0, 2.0], 1, 0.1, -1),
    "subclass": (SIMPLE.as_subclass(type("Own", (torch.Tensor,), {})), 1, 0.1, -1),
    "meta": (SIMPLE.to("meta"), 1, 0.1, -1),
    "sparse": (SIMPLE.to_sparse(), 1, 0.1, -1),
    "csr": (_CSR, 1, 0.1, -1),
    "nested": (_NESTED, 1, 0.1, -1),
    "negative": (torch.complex(SIMPLE, SIMPLE).conj().imag[:1, :1], 1, 0.1, -1),
    "zeros never written": (torch._efficientzerotensor((3, 8)), 1, 0.1, -1),
    "strides": (SIMPLE.T, 1, 0.1, -1),
    "shrunk": (_SHRUNK, 1, 0.1, -1),
    "integers": (torch.ones(3, 8, dtype=torch.int32), 1, 0.1, -1),
    "scalar": (torch.tensor(1.0), 1, 0.1, -1),
    "empty": (torch.empty(3, 0), 0, 0.1, -1),
    "another dim": (SIMPLE, 1, 0.1, 0),
    "no dim": (SIMPLE, 1, 0.1, None),
    "k of tensors": (SIMPLE, torch.tensor(1.0), 0.1, -1),
    "k a bool": (SIMPLE, True, 0.1, -1),
    "k too large": (SIMPLE, 8.5, 0.1, -1),
    "k NaN": (SIMPLE, float("nan"), 0.1, -1),
    "hard": (SIMPLE, 1, 0.0, -1),
    "lam infinite": (SIMPLE, 1, float("inf"), -1),
    "lam a string": (SIMPLE, 1, "0.1", -1),
}


@pytest.mark.parametrize("given", NOT_SIMPLE.values(), ids=NOT_SIMPLE)
def test_whatever_has_to_be_checked_is_not_simple(given):
    assert not is_simple(*given)


def test_most_calls_are_simple():
    live = SIMPLE.clone().requires_grad_()
    for x in (SIMPLE, live, torch.nn.Parameter(SIMPLE), SIMPLE.to(torch.bfloat16), live * 2):
        assert is_simple(x, 1, 0.1, -1)
    with torch.autograd.forward_ad.dual_level():
        assert not is_simple(SIMPLE, 1, 0.1, -1)
    torch.func.vmap(lambda x: (assert_not_simple(x), x)[1])(SIMPLE)


def assert_not_simple(x):
    assert not is_simple(x, 1, 0.1, -1)
    assert not is_simple(SIMPLE, 1, 0.1, -1)  # a transform is at work


@call
@pytest.mark.parametrize(
    "context", [lambda: torch.device("meta"), lambda: Dtype(F64)], ids=["device", "dtype"]
)
def test_defaults_of_torch_change_nothing(f, context):
    x = gaussian(3, 8)
    expected = value_and_gradient(f, x)
    fused.constant.cache_clear()
    with context():
        found = value_and_gradient(f, x)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_modules_under_another_default_device():
    """In their first steps they look at lam, or move it."""
    modules = [
        st.nn.TopKMask(3, 0.5),
        st.nn.TokenSelector(k=3, dim=8, lam=0.5),
        st.nn.TopKMask(3, st.nn.RunningLam(target=4)),
    ]
    x = gaussian(40, 30, 8)
    for module in modules:
        with torch.device("meta"):
            module(x)


class Dtype:
    def __init__(self, dtype):
        self.dtype, self.before = dtype, torch.get_default_dtype()

    def __enter__(self):
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *_):
        torch.set_default_dtype(self.before)


def test_pruning_under_another_default_device():
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 4))
    with torch.device("meta"):
        st.prune.prune(model, 0.5, scope="global")
        y = model(gaussian(2, 6))
        state = model.state_dict()
        st.prune.report(model)
    y.sum().backward()
    assert y.device.type == "cpu"
    assert all(value.device.type == "cpu" for value in state.values())


class Own(torch.Tensor):
    """A subclass that changes nothing."""


@live_call
def test_subclasses(f):
    x = gaussian(3, 8)
    y, dx = value_and_gradient(f, x.as_subclass(Own))
    expected = value_and_gradient(f, x)
    torch.testing.assert_close(
        (y.as_subclass(torch.Tensor), dx.as_subclass(torch.Tensor)), expected
    )


def _in_another_process(x, queue):
    queue.put([f(x).numpy().tobytes() for f in (CALLS["mask"], CALLS["rank"])])


def share_with_another_process(way):
    context = torch.multiprocessing.get_context(way)
    x, queue = gaussian(3, 8).share_memory_(), context.SimpleQueue()
    process = context.Process(target=_in_another_process, args=(x, queue))
    process.start()
    assert queue.get() == [f(x).numpy().tobytes() for f in (CALLS["mask"], CALLS["rank"])]
    process.join()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_shared_tensors_in_other_processes(way):
    """Of a process of its own: where JAX has been used, as it may have been here, nobody should fork."""
    code = f"import test_torch_memory as t; t.share_with_another_process({way!r})"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, check=True)


@call
def test_deterministic_algorithms_and_dispatch_modes(f):
    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            return f(*args, **(kwargs or {}))

    x = gaussian(3, 8)
    expected = value_and_gradient(f, x)
    torch.use_deterministic_algorithms(True)
    try:
        torch.testing.assert_close(value_and_gradient(f, x), expected)
    finally:
        torch.use_deterministic_algorithms(False)
    with Mode():
        found = value_and_gradient(f, x)
    torch.testing.assert_close(found, expected)


@call
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_traced_graphs_hold_for_other_inputs(f):
    traced = torch.jit.trace(f, gaussian(3, 8), check_trace=False)
    for seed in (1, 2):
        x = gaussian(3, 8, seed=seed)
        torch.testing.assert_close(traced(x), f(x))


@live_call
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_traced_graphs_have_derivatives_though_nothing_asked_for_one(f):
    """What is traced may be trained, or asked for a gradient of its input, later."""
    traced = torch.jit.trace(f, gaussian(3, 8, dtype=F64), check_trace=False)
    x = gaussian(3, 8, seed=1, dtype=F64)
    torch.testing.assert_close(value_and_gradient(traced, x), value_and_gradient(f, x))


@live_call
def test_negative_views(f):
    x = gaussian(3, 8)
    negative = torch._neg_view(-x)
    assert negative.is_neg()
    for a, b in zip(value_and_gradient(f, negative), value_and_gradient(f, x), strict=True):
        torch.testing.assert_close(a, b)


def test_negative_views_as_k_lam_and_cotangent():
    x, minus = gaussian(3, 8), torch.tensor(-0.5, dtype=F64)
    lam = torch.complex(torch.zeros((), dtype=F64), minus).conj().imag
    torch.testing.assert_close(st.topk_mask(x, 3, lam), st.topk_mask(x, 3, 0.5))
    torch.testing.assert_close(st.soft_rank(x, lam), st.soft_rank(x, 0.5))
    k = torch._neg_view(torch.tensor(-3.0, dtype=F64))
    torch.testing.assert_close(st.topk_mask(x, k, 0.5), st.topk_mask(x, 3, 0.5))
    for f in (CALLS["mask"], CALLS["multi"], CALLS["rank"]):
        x.requires_grad_()
        g = gaussian(3, 8, seed=1)
        (expected,) = torch.autograd.grad(f(x), x, g)
        (found,) = torch.autograd.grad(f(x), x, torch._neg_view(-g))
        torch.testing.assert_close(found, expected)


@call
def test_zeros_that_were_never_written(f):
    x = torch._efficientzerotensor((3, 8))
    torch.testing.assert_close(f(x), f(torch.zeros(3, 8)))


@call
def test_memory_that_is_gone_is_an_error(f):
    x = gaussian(3, 8)
    x.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="memory"):
        f(x)


@call
@pytest.mark.parametrize("make", [lambda x: x, lambda x: x.T.contiguous().T], ids=["rows", "T"])
def test_memory_that_is_gone_in_part_is_an_error(f, make):
    x = make(gaussian(3, 8))
    x.untyped_storage().resize_(4 * 24 - 1)
    with pytest.raises(ValueError, match=r"memory for its entries, .* 95 bytes"):
        f(x)


def test_numbers_whose_memory_is_gone_are_an_error():
    for name in ("k", "lam"):
        numbers = {"k": torch.tensor(3.0), "lam": torch.tensor(0.5)}
        numbers[name].untyped_storage().resize_(0)
        with pytest.raises(ValueError, match=f"{name} must have memory"):
            st.topk_mask(gaussian(3, 8), **numbers)


@live_call
def test_batched_cotangents(f):
    x = gaussian(3, 8, dtype=F64)
    one_by_one = torch.autograd.functional.jacobian(f, x)
    at_once = torch.autograd.functional.jacobian(f, x, vectorize=True)
    torch.testing.assert_close(at_once, one_by_one)


def test_batched_cotangents_of_k_and_lam():
    inputs = [gaussian(3, 8, dtype=F64), torch.tensor(2.5, dtype=F64), torch.tensor(0.5, dtype=F64)]
    inputs = [v.requires_grad_() for v in inputs]
    for f in (
        st.topk_mask,
        lambda x, k, lam: tuple(st.topk_mag_multi([x, 2 * x], k, lam)),
        lambda x, k, lam: st.soft_sort(k * x, lam),
    ):
        assert torch.autograd.gradcheck(f, inputs, check_batched_grad=True)


SPECIAL = {
    "sparse": lambda: gaussian(3, 8).to_sparse(),
    "csr": lambda: gaussian(3, 8).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([gaussian(3), gaussian(2)]),
    "jagged": lambda: torch.nested.nested_tensor([gaussian(3), gaussian(2)], layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore:.*(beta state|prototype)")
@pytest.mark.parametrize("make", SPECIAL.values(), ids=SPECIAL)
def test_tensors_of_other_layouts_are_refused(make):
    x, bad = gaussian(3, 8), make()
    for name, refused in (
        ("x", lambda: st.topk_mask(bad, 3)),
        ("k", lambda: st.topk_mask(x, bad)),
        ("lam", lambda: st.soft_sort(x, bad)),
        ("w", lambda: st.permutahedron(x, bad)),
        ("logits", lambda: st.topk_loss(bad, LABELS, 3)),
        ("targets", lambda: st.topk_loss(x, bad, 3)),
        (r"tensors\[1\]", lambda: st.topk_mag_multi([x, bad], 3)),
    ):
        with pytest.raises(TypeError, match=f"^{name} must be a dense tensor"):
            refused()


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)], ids=str)
def test_empty_tensors_give_gradients_to_all(shape):
    x = torch.zeros(shape, requires_grad=True)
    k = torch.zeros(shape[0], 1, requires_grad=True)
    lam = torch.ones((), requires_grad=True)
    labels = torch.zeros(shape[0], dtype=torch.int64)
    w = torch.ones(shape[1], requires_grad=True)
    for y, inputs in (
        (st.topk_mask(x, k, lam), (x, k, lam)),
        (st.topk_mag(x, k, lam), (x, k, lam)),
        (st.topk_value(x, k, lam), (x, k, lam)),
        (st.topk_loss(x, labels, k, lam, ignore_index=0), (x, k, lam)),
        (st.soft_rank(x, lam), (x, lam)),
        (st.soft_sort(x, lam), (x, lam)),
        (st.permutahedron(x, w, lam), (x, w, lam)),
        (st.permutahedron_value(x, w, lam), (x, w, lam)),
    ):
        for found, v in zip(torch.autograd.grad(y.nansum(), inputs), inputs, strict=True):
            torch.testing.assert_close(found, torch.zeros_like(v))


def test_many_empty_tensors_give_a_gradient_to_k():
    k = torch.zeros(1, 1, requires_grad=True)
    (y,) = st.topk_mag_multi([torch.zeros(0)], k)
    assert y.shape == (0,)
    assert torch.equal(torch.autograd.grad(y.sum(), k)[0], torch.zeros(1, 1))


@pytest.mark.slow
def test_an_import_brings_neither_the_compiler_nor_hooks():
    code = (
        "import sys, torch, sparsetopk.torch; from torch.optim import optimizer as o; "
        "print('torch._dynamo' in sys.modules, len(o._global_optimizer_post_hooks)); "
        "sparsetopk.torch.prune.prune(torch.nn.Linear(3, 2)); "
        "print(len(o._global_optimizer_post_hooks))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "0", "1"]


ALONG = {
    "mask": lambda x, dim: st.topk_mask(x, 2, 0.5, dim=dim),
    "topk": lambda x, dim: st.topk(x, 2, 0.5, dim=dim),
    "mag": lambda x, dim: st.topk_mag(x, 2, 0.5, dim=dim),
    "select": lambda x, dim: st.topk_select(x, 2, 0.5, dim=dim).values,
    "value": lambda x, dim: st.topk_value(x, 2, 0.5, dim=dim),
    "rank": lambda x, dim: st.soft_rank(x, 0.5, dim=dim),
    "sort": lambda x, dim: st.soft_sort(x, 0.5, dim=dim),
}


@pytest.mark.parametrize("name", ALONG)
def test_outputs_may_be_changed_in_place(name):
    """Autograd lets nobody do that to a view that was made inside of a function, or to an input that
    comes back."""
    for dim in (-1, 0, 1):
        f = lambda x: ALONG[name](x, dim)  # noqa: E731, B023
        changed = value_and_gradient(lambda x: f(x).mul_(2.0), gaussian(3, 4, 5))  # noqa: B023
        expected = value_and_gradient(lambda x: 2.0 * f(x), gaussian(3, 4, 5))  # noqa: B023
        torch.testing.assert_close(changed, expected)


@live_call
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(f, reentrant):
    def checkpointed(x):
        return torch.utils.checkpoint.checkpoint(f, x, use_reentrant=reentrant)

    x = gaussian(3, 8)
    torch.testing.assert_close(value_and_gradient(checkpointed, x), value_and_gradient(f, x))


def test_many_tensors_without_data():
    x = torch.empty(3, 4, device="meta", requires_grad=True)
    y, z = st.topk_mag_multi([x, torch.empty(5, device="meta")], 3, 0.5)
    assert (y.shape, z.shape) == ((3, 4), (5,))
    assert torch.autograd.grad(y.sum(), x)[0].is_meta
