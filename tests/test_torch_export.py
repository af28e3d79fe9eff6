"""Models that leave: compiled by torch, exported, traced, and in ONNX Runtime."""

from __future__ import annotations

import io
import warnings

import pytest
import torch
from torch import nn

import sparsetopk.torch as st
from sparsetopk.torch._fused import isotonic as fused_isotonic


def gaussian(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class Forms(nn.Module):
    """Every hard operator, with k as a number, real, and one per row."""

    def __init__(self):
        super().__init__()
        per_row = torch.tensor([[2.0], [0.0], [6.0], [2.5]])
        self.parts = nn.ModuleList(
            make(k, 0.1, hard_eval=True, dim=dim)
            for make in (st.nn.TopKMask, st.nn.TopK, st.nn.TopKMag, st.nn.TopKSign)
            for k, dim in ((3, -1), (2.5, 0), (0, -1), (per_row, 1))
        )

    def forward(self, x):
        return [part(x) for part in self.parts]


def rows_with_ties():
    return gaussian(4, 6).mul(2).round()


@pytest.fixture(scope="module")
def exported():
    return torch.export.export(Forms().eval(), (rows_with_ties(),))


def names(graph):
    return {str(node.target) for node in graph.nodes if node.op == "call_function"}


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.as_tensor(a), b, rtol=0, atol=0, equal_nan=True)


INPUTS = {
    "ties": rows_with_ties,
    "others": lambda: gaussian(4, 6, seed=1),
    "padding": lambda: gaussian(4, 6).where(gaussian(4, 6, seed=2) > 0, -torch.inf),
    "infinite": lambda: gaussian(4, 6).where(gaussian(4, 6, seed=2) > 0, torch.inf),
    "nan": lambda: gaussian(4, 6).where(gaussian(4, 6, seed=3) < 1.5, torch.nan),
}


def test_exported_hard_operators_need_nothing_of_ours(exported):
    assert not any("sparsetopk" in name for name in names(exported.graph))
    again = exported.module()
    for make in INPUTS.values():
        assert_same(again(make()), Forms().eval()(make()))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_traced_hard_operators_need_nothing_of_ours():
    traced = torch.jit.trace(Forms().eval(), rows_with_ties(), check_trace=False)
    assert "sparsetopk::" not in str(traced.inlined_graph)
    for make in INPUTS.values():
        assert_same(traced(make()), Forms().eval()(make()))


def in_onnx_runtime(model, x, path):
    """The outputs of ONNX Runtime, and the types of the nodes."""
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, about itself
        program = torch.onnx.export(model, (x,), dynamo=True, verbose=False)
    program.save(path)
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name

    def run(x):
        return session.run(None, {name: x.numpy()})

    return run, {node.domain for node in program.model.graph}


@pytest.mark.slow
def test_hard_operators_in_onnx_runtime(exported, tmp_path):
    run, domains = in_onnx_runtime(exported, rows_with_ties(), tmp_path / "forms.onnx")
    assert domains == {""}
    for make in INPUTS.values():
        assert_same(run(make()), Forms().eval()(make()))


@pytest.mark.parametrize("f", [st.topk_mask, st.soft_rank], ids=["mask", "rank"])
def test_relaxed_operators_in_onnx_say_what_to_do(f, tmp_path):
    class Model(nn.Module):
        def forward(self, x):
            return f(x, 3)

    with pytest.raises(RuntimeError, match=r"lam=0, or hard_eval=True in eval\(\)"):
        in_onnx_runtime(Model(), gaussian(4, 6), tmp_path / "relaxed.onnx")


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("f", [st.topk_mask, st.soft_rank], ids=["mask", "rank"])
def test_relaxed_operators_in_the_older_onnx_exporter(f):
    class Model(nn.Module):
        def forward(self, x):
            return f(x, 3)

    with pytest.raises(RuntimeError, match=r"lam=0, or hard_eval=True in eval\(\)"):
        torch.onnx.export(Model(), (gaussian(4, 6),), io.BytesIO(), dynamo=False)


LABELS = torch.tensor([1, 2, 3, 0])


def operators(x, k, lam):
    return [
        st.topk_mask(x, 3, 0.5),
        st.topk_mask(x, k, 0.5, p=1.5, two_sided=True),
        st.topk(x, k, lam),
        st.topk_mag(x, k, lam, p=4 / 3),
        st.topk_sign(x, 2.5, lam, dim=0),
        st.topk_mag(x, 3, 0.0),
        st.topk_mask(x, 3, 0.5, straight_through=True),
        st.topk_select(x, k, lam, capacity=5).values,
    ]


def losses(x, k, lam):
    return [
        st.topk_loss(x, LABELS, 3, ignore_index=2),
        st.topk_loss(x, LABELS, 3, completion="best", reduction="none"),
        st.topk_loss(x, LABELS, 3, completion="spread"),
        st.topk_loss(x, LABELS, 3, label_smoothing=0.1) + 0 * (k.sum() + lam),
    ]


class Recorder:
    """A backend that runs what it is given, and remembers the names of what it calls."""

    def __init__(self):
        self.forward, self.backward = set(), set()

    def __call__(self, module, inputs):
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.aot_autograd import make_boxed_func

        def keep(seen):
            def compiler(module, _):
                seen.update(names(module.graph))
                return make_boxed_func(module.forward)

            return compiler

        return aot_autograd(fw_compiler=keep(self.forward), bw_compiler=keep(self.backward))(
            module, inputs
        )


def gradients(f, inputs):
    """The outputs, and the gradient of each."""
    inputs = [value.detach().requires_grad_() for value in inputs]
    outputs = f(*inputs)
    gs = [torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view_as(y) for y in outputs]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, inputs, gs)]


@pytest.mark.parametrize("f", [operators, losses])
def test_compiled_graphs_call_the_kernels(f):
    torch._dynamo.reset()
    k, lam = torch.tensor([[2.0], [3.5], [1.0], [2.0]]), torch.tensor(0.5, dtype=torch.float64)
    recorder = Recorder()
    compiled = torch.compile(f, fullgraph=True, backend=recorder, dynamic=True)
    for x in (gaussian(4, 6), gaussian(4, 9, seed=1)):
        expected, found = gradients(f, (x, k, lam)), gradients(compiled, (x, k, lam))
        torch.testing.assert_close(found, expected)
    if f is operators:
        assert "sparsetopk.slots_forward.default" in recorder.forward
        assert "sparsetopk.relaxed_backward.default" in recorder.backward
    else:  # the whole loss is one operator, whatever the options
        ours = {name for name in recorder.forward if "sparsetopk" in name}
        assert ours == {"sparsetopk.topk_loss_forward.default"}
    assert "sparsetopk.threshold.default" not in recorder.forward


def orderings(x, lam):
    return [
        st.soft_rank(x, 0.5),
        st.soft_rank(x, lam, descending=False, p=1.5),
        st.soft_sort(x, lam),
        st.soft_sort(x, 2.0, descending=False, dim=0),
    ]


def test_the_search_for_lam_is_one_node():
    torch._dynamo.reset()

    def f(x):
        return [st.soft_rank(x, st.choose_rank_lam(x, 3, p=1.5), p=1.5)]

    recorder = Recorder()
    compiled = torch.compile(f, fullgraph=True, backend=recorder, dynamic=True)
    for x in (gaussian(4, 6), gaussian(4, 9, seed=1)):
        torch.testing.assert_close(gradients(compiled, [x]), gradients(f, [x]))
    assert "sparsetopk.rank_lam.default" in recorder.forward
    torch.library.opcheck(torch.ops.sparsetopk.rank_lam.default, (x, 3.0, 1.5, True, 1))
    torch.library.opcheck(torch.ops.sparsetopk.rank_lam.default, (x, 3.0, 2.0, False, 0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_compiled_ranks_are_solved_once(dtype, monkeypatch):
    torch._dynamo.reset()
    solved, native = [], fused_isotonic.native

    class Counted:
        permutahedron_backward = staticmethod(native.permutahedron_backward)

        @staticmethod
        def permutahedron_forward(*asked):
            solved.append(asked)
            return native.permutahedron_forward(*asked)

    lam = torch.tensor([[0.5], [3.0], [1.0], [2.0]], dtype=torch.float64)
    compiled = torch.compile(orderings, fullgraph=True, backend="aot_eager", dynamic=True)
    monkeypatch.setattr(fused_isotonic, "native", Counted)
    for x in (gaussian(4, 6).to(dtype), gaussian(4, 9, seed=1).to(dtype)):
        expected = gradients(orderings, (x, lam))
        solved.clear()
        torch.testing.assert_close(gradients(compiled, (x, lam)), expected)
        assert len(solved) == 4
    x[1, 2:5] = -torch.inf  # padding is solved in another way

    def finite(f):
        return lambda x, lam: [torch.where(y.isfinite(), y, 0.0) for y in f(x, lam)]

    found, expected = (gradients(finite(f), (x, lam)) for f in (compiled, orderings))
    torch.testing.assert_close(found, expected)


def test_padding_and_infinities_in_compiled_graphs():
    torch._dynamo.reset()

    def f(x):
        return [st.topk(x, 3, 0.5)]

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for name in ("ties", "padding", "infinite", "nan"):
        expected, found = (gradients(g, [INPUTS[name]()]) for g in (f, compiled))
        torch.testing.assert_close(found, expected, equal_nan=True)


def test_operators_have_shapes_and_derivatives():
    x = gaussian(3, 8, dtype=torch.float64).requires_grad_()
    k = torch.tensor([[2.0], [3.5], [1.0]], dtype=torch.float64, requires_grad=True)
    lam = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    for times_x in (False, True):
        for k_, lam_ in ((None, None), (k, lam)):
            asked = (x, k_, lam_, 3.0, 0.5, 1, 0, 1.0, False, times_x)
            torch.library.opcheck(torch.ops.sparsetopk.relaxed.default, asked)
        f = lambda *a: torch.ops.sparsetopk.relaxed(*a, 3.0, 0.5, 1, 0, 1.0, False, times_x)[0]  # noqa: E731, B023
        assert torch.autograd.gradcheck(f, (x, k, lam))
        assert torch.autograd.gradgradcheck(f, (x, k, lam))
    t = torch.tensor([1, 2, 3])
    for completion, reduction in ((None, "mean"), ("spread", "sum"), ("best", "none")):
        asked = (x, t, None, None, 3.0, 0.5, 1, 0, 1.0, False, completion, reduction, 0.0, 2, None)
        g = lambda x: torch.ops.sparsetopk.topk_loss(x, *asked[1:])[0]  # noqa: E731, B023
        assert torch.autograd.gradcheck(g, (x,))
        assert torch.autograd.gradgradcheck(g, (x,))
    torch.library.opcheck(torch.ops.sparsetopk.topk_loss.default, asked)
    torch.library.opcheck(torch.ops.sparsetopk.select.default, (x.detach(), 5))
    torch.library.opcheck(torch.ops.sparsetopk.slots.default, (x, 5, 1))
    torch.library.opcheck(torch.ops.sparsetopk.slots.default, (x, 2, 0))
    for rank, saves in ((True, True), (False, True), (True, False)):
        for lam_ in (None, lam):
            asked = (x, lam_, 0.5, 2.0, True, 1, rank, saves)
            torch.library.opcheck(torch.ops.sparsetopk.ordered.default, asked)
    h = lambda x: torch.ops.sparsetopk.slots(x, 5, 1)[::2]  # noqa: E731
    assert torch.autograd.gradcheck(h, (x,))


@pytest.mark.parametrize("training", [True, False])
def test_exported_modules_can_be_saved(training):
    model = nn.Sequential(nn.Linear(6, 9), st.nn.TopKMag(3, 0.2)).train(training)
    rows = ({0: torch.export.Dim("rows")},)
    exported = torch.export.export(model, (gaussian(4, 6),), dynamic_shapes=rows)
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    again = torch.export.load(file).module()
    for x in (gaussian(1, 6), gaussian(7, 6, seed=1)):
        torch.testing.assert_close(again(x), model(x))


AGAIN = {
    "mask": lambda x: st.topk_mask(x, 2, 0.5),
    "topk": lambda x: st.topk(x, 2, 0.5),
    "select": lambda x: st.topk_select(x, 2, 0.5, capacity=4).values,
    "loss": lambda x: st.topk_loss(x, torch.arange(1, 4), 3),
    "rank": lambda x: st.soft_rank(x, 2.0),
    "sort": lambda x: st.soft_sort(x, 2.0),
}


@pytest.mark.parametrize("name", AGAIN)
def test_exported_operators_have_the_derivatives_of_eager_ones(name):
    """To the second order, and in float64 to its last digits."""

    class Call(nn.Module):
        def forward(self, x):
            return AGAIN[name](x)

    x = gaussian(3, 5, dtype=torch.float64)
    exported = torch.export.export(Call(), (x,)).module()
    found = []
    for f in (AGAIN[name], exported):
        live = x.clone().requires_grad_()
        first = torch.autograd.grad((f(live) ** 3).sum(), live, create_graph=True)[0]
        second = torch.autograd.grad((first * x.cos()).sum(), live)[0]
        found.append((first.detach(), second))
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)
