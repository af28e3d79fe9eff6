"""The Triton kernels for rows that no program holds alone, under Triton's interpreter, against the
core. Blocks run one after another there: that they do not disturb each other is not shown."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", minversion="3.5")
st = pytest.importorskip("sparsetopk.torch")

import triton
import triton.language as tl

from interpreted import (  # noqa: F401
    DEVICE,
    assert_near,
    both,
    by_the_core,
    compile_all,
    interpreted,
    on_cpu,
)
from launches import launches
from sparsetopk._maths.operator import MAGNITUDE, MASK
from sparsetopk.torch._triton import launch, launch_long
from sparsetopk.torch._triton.long import _sampled
from test_triton import FUNCTIONS

inf, nan = float("inf"), float("nan")


def normal(m, n, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(m, n))).float()


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Rows are long from 1000 entries on, and what is made of them is in proportion."""
    monkeypatch.setattr(launch, "is_long", lambda x, _: x.shape[-1] > 1000)
    monkeypatch.setattr(launch_long, "_SAMPLE", 256)
    monkeypatch.setattr(launch_long, "CHUNK", 1024)


def rows(n):
    """Of every kind: k, lam and x; in some the sample is far from the row."""
    x = normal(14, n)
    k = torch.full((14, 1), n / 8 + 0.5, dtype=torch.float64)
    lam = torch.full((14, 1), 0.1, dtype=torch.float64)
    sampled = places_of(n)
    x[1, sampled] += 5.0  # the sample has nothing but large entries
    x[2, sampled] = -5.0  # and here nothing but small ones
    x[3] = torch.randint(0, 5, (n,)) / 4  # ties
    x[4, n // 3 :] = -inf
    x[5, n // 10 :] = -inf  # fewer candidates than k
    x[6, ::300] = inf
    x[7, ::3] = inf  # more than k: they share
    x[8, 1234] = nan
    x[9] = 0.25
    k[10], k[11] = 0.0, n
    k[12] = n // 5  # a whole k at a gap
    x[12, : n // 5] += 20.0
    k[13] = 2.0
    g = normal(14, n, 1)
    return x, k, lam, g


def places_of(n):
    """Where the kernels look first."""
    x = torch.arange(n, dtype=torch.float32, device=DEVICE).reshape(1, n)
    seen = torch.zeros(256, device=DEVICE)

    @triton.jit
    def look(x_ptr, seen_ptr, n, S: tl.constexpr):
        x, _, _ = _sampled(x_ptr, x_ptr, tl.arange(0, 1), n, 1, tl.float32, False, tl.float32, S)
        tl.store(seen_ptr + tl.arange(0, S)[None, :], x)

    look[(1,)](x, seen, n, S=256)
    return seen.long().cpu()


# A function, lam and which rows: a row takes a second under the interpreter.
QUICK = [("mask", 0.1, [1, 2, 3, 6, 7, 8, 12]), ("magnitude", 0.0, [2, 3])]
SLOW = [
    ("mask", 0.0, [3, 4, 7]),
    ("magnitude", 0.1, [1, 2, 12]),
    ("two-sided", 0.1, [0, 1, 2]),
    ("biased", 0.1, [1, 3, 9]),
    ("sign", 0.1, [2, 11]),
    ("topk", 0.1, [2, 6]),
]


@pytest.mark.parametrize(("name", "lam", "chosen"), [*QUICK, *SLOW])
def test_rows_of_every_kind(name, lam, chosen):
    """Hard rows exactly, also which of several equal entries; 0, 1, NaN and infinities are where the
    core has them, and derivatives in x, k and lam."""
    x, k, lam_rows, g = (v[chosen] for v in rows(3000))
    found, want = both(FUNCTIONS[name], x, k, torch.full_like(lam_rows, lam), g=g)
    for special in (0.0, 1.0, inf, -inf):
        assert torch.equal(found[0] == special, want[0] == special)
    if lam == 0:
        for a, b in zip(found, want, strict=True):
            assert_near(a, b, 0.0)
        return
    finite = [torch.where(v.isinf(), 0.0, v) for v in (found[0], want[0])]
    assert_near(*finite, 2e-6)
    for a, b in zip(found[1:], want[1:], strict=True):
        scale = b.double().abs().nan_to_num(0.0).amax(-1, keepdim=True).clamp_min(1.0)
        assert_near(a, b, 2e-5, scale)


@on_cpu
def test_the_sample_misleads_as_it_should():
    """Rows 1 and 2 above are solved by the second gathering, others by the first."""
    x, k, lam, _ = (v[:3] for v in rows(3000))
    seen = []
    gather = launch_long.gather_kernel

    class Spy:
        arg_names = gather.arg_names

        def __getitem__(self, grid):
            def run(*args, **settings):
                gather[grid](*args, **settings)
                seen.append(args[5].clone())  # how much was copied

            return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_long, "gather_kernel", spy := Spy())
        patch.setitem(launch_long.WARPS, spy, 8)
        st.topk_mask(x, k, lam)
    assert (seen[-1][:, 1] > 0).tolist() == [False, True, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("p", [2.0, 3.0])
def test_dtypes_and_p_above_2(dtype, p):
    x, g = normal(1, 3000).to(dtype), normal(1, 3000, 1).to(dtype)
    k, lam = (torch.full((), v, dtype=torch.float64) for v in (300.5, 0.1))
    found, want = both(lambda x, k, lam: st.topk_mask(x, k, lam, p=p), x, k, lam, g=g)
    assert found[0].dtype == found[1].dtype == dtype
    rounding = 1e-11 if dtype == torch.float64 else 1e-5 + 3 * torch.finfo(dtype).eps
    for a, b in zip(found, want, strict=True):
        assert_near(a, b, rounding, b.double().abs().max().clamp_min(1.0))


def pieces():
    """Tensors of all lengths, one of them not contiguous, one empty, one not aligned."""
    x = [normal(*shape, i) for i, shape in enumerate([(30, 40), (1, 7), (50, 31)])]
    return [*x, normal(20, 30, 9).T, torch.zeros(0), normal(1, 100, 10)[0, 1:]]


@pytest.mark.parametrize("lam", [0.1, 0.0])
@pytest.mark.parametrize("straight_through", [False, True])
def test_many_tensors_as_one_row(lam, straight_through):
    xs = pieces()
    k, lam = (torch.tensor(v, dtype=torch.float64) for v in (500.5, lam))

    def f(k, lam, *xs):
        return st.topk_mag_multi(xs, k, lam, straight_through=straight_through)

    def run(device="cpu"):
        live = [v.to(device, copy=True).requires_grad_() for v in (k, lam, *xs)]
        ys = f(*live)
        found = torch.autograd.grad(ys[:4], live, [y.detach().flip(0) for y in ys[:4]])
        return [v.cpu() for v in (*(y.detach() for y in ys), *found)]

    found = run(DEVICE)
    with by_the_core():
        want = run()
    for a, b in zip(found, want, strict=True):
        assert a.shape == b.shape
        if a.numel():
            assert_near(a, b, 2e-6, b.double().abs().max().clamp_min(1.0))


@on_cpu
def test_launches_and_no_read_by_the_host():
    counted = kernels_launched(lambda x: st.topk_mask(x, 100, 0.1), normal(2, 3000))
    assert counted == (["sample", "gather", "gather", "solve", "apply"], ["sums", "spread"])
    forward, backward = launches(lambda x: st.topk_mask(x, 64, 0.1), (2, 1 << 20))
    assert (forward, backward) == ({"rows_forward": 1}, {"rows_backward": 1})
    with pytest.MonkeyPatch.context() as patch:
        for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__"):
            patch.setattr(torch.Tensor, name, lambda *_: pytest.fail("the host reads a number"))
        many = kernels_launched(lambda x: st.topk_mag_multi([x, x], 100.0, 0.1)[0], normal(2, 3000))
    assert many == counted


def kernels_launched(f, x):
    """The names of the kernels, forward and backward, which are counted and not run."""
    names = []

    class Counted:
        def __init__(self, kernel):
            self.name, self.arg_names = kernel.__name__.removesuffix("_kernel"), kernel.arg_names

        def __getitem__(self, grid):
            return lambda *args, **settings: names.append(self.name)

    with pytest.MonkeyPatch.context() as patch:
        for kernel in list(launch_long.WARPS):
            counted = Counted(kernel)
            patch.setattr(launch_long, kernel.__name__, counted)
            patch.setitem(launch_long.WARPS, counted, 8)
        y = f(x.requires_grad_())
        forward, names[:] = list(names), []
        y.backward(torch.ones_like(y))
    return forward, names


def test_compiled():
    """Without spills, and each entry is read once in a launch, 16 bytes at a time where it is all read;
    a magnitude of many tensors, with the larger tables, is compiled too."""
    of_mask = [{"name": name, "arch": 90, "n": 1 << 20, "OP": MASK} for name in KERNELS]
    others = [
        {
            "name": "gather",
            "arch": 80,
            "n": 1 << 20,
            "OP": MAGNITUDE,
            "DEBIAS": True,
            "TABLE": True,
        },
        {"name": "apply", "arch": "gfx942", "n": 1 << 20, "OP": MASK},
    ]
    for request, found in zip(of_mask + others, compile_all(of_mask + others), strict=True):
        assert found["spills"] == 0, (request, found)
        if request in of_mask and request["name"] not in ("sample", "solve"):
            assert found["loads"].count(".128") == 4096 // (32 * 8) // 4, (request, found)


KERNELS = ("sample", "gather", "solve", "apply", "sums", "spread")
