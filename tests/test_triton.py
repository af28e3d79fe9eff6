"""The Triton kernels, under Triton's interpreter, against the core; and compiled for GPUs that are not
here. The interpreter has neither the hardware's division and powers, nor its threads."""

from __future__ import annotations

import numpy as np
import pytest

from cases import CASES, INPUTS
from test_batches import KINDS, PS, Batch, batch, function, options

torch = pytest.importorskip("torch")
pytest.importorskip("triton", minversion="3.5")
st = pytest.importorskip("sparsetopk.torch")

from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from interpreted import DEVICE, assert_near, both, compile_all, interpreted, on_cpu  # noqa: F401
from launches import launches
from sparsetopk._maths.operator import EXP, MAGNITUDE, MASK, SIGN, TWO_SIDED, Operator
from sparsetopk.torch import _bench as bench
from sparsetopk.torch._triton import is_long, state

inf, nan = float("inf"), float("nan")


def of_table(case):
    """All inputs of the table as rows, and a cotangent."""
    chosen = [v for v in INPUTS.values() if v[0].size == 9]
    x = torch.tensor(np.stack([x for x, _, _ in chosen]), dtype=torch.float32)
    k, lam = (torch.tensor([[v[i]] for v in chosen], dtype=torch.float64) for i in (1, 2))
    g = torch.from_numpy(np.random.default_rng(1).normal(size=x.shape)).float()
    return case.function(st), x, k, lam, g


def in_the_rest(case):
    """Other p are in ``test_twenty_thousand_rows`` too."""
    return pytest.param(case, marks=[] if case.p in (2.0, 1.5, 3.0) else pytest.mark.slow)


@pytest.mark.parametrize("case", [in_the_rest(case) for case in CASES], ids=str)
def test_case_table(case):
    f, x, k, lam, g = of_table(case)
    found, want = both(f, x, k, lam, g=g)
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1.0)
    e = max(1.0, 1 / (case.p - 1))
    assert_near(found[0], want[0], 2e-6, scale)
    # Slopes are S'(t)/lam, and S' rises by e^2 at most over the t of a rounding.
    steep = scale * (1 + 1 / lam)
    for a, b in zip(found[1:], want[1:], strict=True):
        assert_near(a, b, 2e-6 * e * e, steep * g.abs().sum(-1, keepdim=True))


# The core does not have the two-sided mask for any p: torch operations would take a minute.
BATCHES = [(kind, p) for kind in KINDS for p in PS if (kind, p) != ("two-sided", 1.2)]


@pytest.mark.parametrize(("kind", "p"), BATCHES)
def test_twenty_thousand_rows(kind, p):
    """Over all kinds: 1,100 of each."""
    at = Batch(*(v[:1100] for v in batch(kind, p, 33)))
    x, k, lam, g = (torch.from_numpy(v) for v in at)
    f = lambda x, k, lam: function(st, kind)(x, k, lam, **options(kind, p))  # noqa: E731
    found, want = both(f, x.float(), k, lam, g=g.float())
    e = max(1.0, 1 / (p - 1))
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1.0)
    assert_near(found[0], want[0], 2e-6, scale * max(1.0, e / 3))
    steep = scale * (1 + 1 / lam) * g.abs().sum(-1, keepdim=True)
    assert_near(found[1], want[1], 2e-6 * e * e, steep)
    # In k and lam the derivative jumps where a whole k meets a gap: rounding decides on which side.
    rows = k[:, 0] == 5.5
    for a, b in zip(found[2:], want[2:], strict=True):
        assert_near(a[rows], b[rows], 2e-6 * e * e, steep[rows])


HARD_ROWS = torch.tensor(
    [
        [1.0, 1.0, 1.0, 0.0, 0.0, -1.0, 1.0, 0.5],
        [3.0, 3.0, 2.0, 2.0, 2.0, 2.0, -5.0, 1e30],
        [0.0, -0.0, 0.0, -0.0, 0.0, 0.0, 0.0, 0.0],
        [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0, -8.0],
        [1e-40, -1e-40, 1.0, 1.0, 2.0, -2.0, 2.0, 1e-45],
    ]
)
FUNCTIONS = {
    "mask": lambda x, k, lam: st.topk_mask(x, k, lam),
    "two-sided": lambda x, k, lam: st.topk_mask(x, k, lam, p=1.5, two_sided=True),
    "topk": lambda x, k, lam: st.topk(x, k, lam),
    "magnitude": lambda x, k, lam: st.topk_mag(x, k, lam),
    "biased": lambda x, k, lam: st.topk_mag(x, k, lam, debias=False),
    "sign": lambda x, k, lam: st.topk_sign(x, k, lam),
}
every_function = pytest.mark.parametrize("f", FUNCTIONS.values(), ids=FUNCTIONS)


@every_function
def test_hard_rows_are_those_of_the_core_exactly(f):
    """With every k in one call, and with one k for all."""
    k = torch.tensor([0, 1, 3, 3.5, 7.25, 8]).repeat_interleave(5)[:, None]
    x, g = HARD_ROWS.repeat(6, 1), torch.arange(240.0).reshape(30, 8)
    of_rows = both(lambda x: f(x, k.to(x.device), 0.0), x, g=g)
    of_all = both(lambda x: f(x, 3.5, 0.0), x[:5], g=g[:5])
    for found, want in (of_rows, of_all):
        for a, b in zip(found, want, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("p", [2.0, 1.5])
def test_ties_of_two_sided_masks_that_are_barely_whole_have_no_slopes(p):
    """Of a grid, with a step below the boundary that is 2 lam but for rounding: as much of k is left as
    there are entries in the block, which rounding alone makes one. ``test_magnitude_derivatives`` has
    magnitudes."""
    rng, k = np.random.default_rng(1), 17
    a = -np.sort(-rng.integers(64, 128, size=(5000, 34)) / 32.0, axis=-1)
    chosen = (a[:, k - 2] == a[:, k - 1]) & (a[:, k - 1] - a[:, k] == 1 / 32)
    x = torch.from_numpy(rng.permuted(a[chosen][:64], axis=-1)).float()
    lam = float(np.float32((1 - 1e-5) / 32)) / 2
    g = torch.from_numpy(rng.normal(size=x.shape)).float()
    f = lambda x: st.topk_mask(x, k, lam, p=p, two_sided=True)  # noqa: E731
    (y, dx), want = both(f, x, g=g)
    assert_near(y, want[0], 2e-6)
    assert not dx.any()
    assert not want[1].any()


def special_rows():
    x = torch.from_numpy(np.random.default_rng(3).normal(size=(9, 40))).float()
    x[0, 3] = nan
    x[1, ::2] = -inf
    x[2, :3] = inf
    x[3, :20] = inf
    x[4, 3:] = -inf
    x[5] = -inf
    x[6] = 0.25  # ties share
    x[7, :10] = 0.0
    return x


@every_function
@pytest.mark.parametrize("k", [0.0, 5.0, 5.5, 40.0])
def test_infinities_padding_and_ties(f, k):
    """Exactly 0, 1, NaN and infinite where the core has it so; ties have equal outputs."""
    x = special_rows()
    k, lam = (torch.full((9, 1), v, dtype=torch.float64) for v in (k, 0.1))
    lam[8] = 0.0  # a hard row among the others
    g = torch.from_numpy(np.random.default_rng(4).normal(size=x.shape)).float()
    found, want = both(f, x, k, lam, g=g)
    for special in (0.0, 1.0, inf, -inf):
        assert torch.equal(found[0] == special, want[0] == special)
    finite = [torch.where(v.isinf(), 0.0, v) for v in (found[0], want[0])]
    assert_near(*finite, 2e-6)
    assert (found[0][6] == found[0][6, 0]).all()
    for a, b in zip(found[1:], want[1:], strict=True):
        assert_near(a, b, 1e-5, 10.0)


@on_cpu
@every_function
def test_a_bad_k_or_lam_makes_its_row_nan(f):
    x = torch.from_numpy(np.random.default_rng(5).normal(size=(8, 12))).float()
    k = torch.tensor([[3.0], [-1.0], [12.5], [nan], [inf], [3.0], [3.0], [3.0]])
    lam = torch.tensor([[0.1]] * 5 + [[-0.1], [inf], [nan]])
    with pytest.MonkeyPatch.context() as patch:  # as where values cannot be read
        patch.setattr("sparsetopk.torch._rows.arguments.is_plain", lambda *_: False)
        y = f(x, k, lam)
    assert y[1:].isnan().all()
    assert torch.equal(y[:1], f(x[:1], 3.0, 0.1))


@every_function
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes(f, dtype):
    x = torch.from_numpy(np.random.default_rng(6).normal(size=(20, 100))).to(dtype)
    g = torch.from_numpy(np.random.default_rng(7).normal(size=(20, 100))).to(dtype)
    k, lam = (torch.full((), v, dtype=torch.float64) for v in (10.5, 0.1))
    found, want = both(f, x, k, lam, g=g)
    eps = torch.finfo(dtype).eps
    assert found[0].dtype == found[1].dtype == dtype
    for a, b in zip(found, want, strict=True):
        # The core rounds a mask, and its cotangent, before it is multiplied by x or after.
        rounding = 1e-11 if dtype == torch.float64 else 1e-5 + 3 * eps
        assert_near(a, b, rounding, b.double().abs().max().clamp_min(1.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_p_above_2_in_half_precision(dtype):
    """Computed in float64, and rounded to 16 bits."""
    x = torch.from_numpy(np.random.default_rng(6).normal(size=(20, 100))).to(dtype)
    found, want = both(lambda x: st.topk_mask(x, 10.5, 0.1, p=3.0), x, g=x.flip(0))
    for a, b in zip(found, want, strict=True):
        assert_near(a, b, 3 * torch.finfo(dtype).eps, b.double().abs().max().clamp_min(1.0))


@pytest.mark.parametrize("n", [1, 2, 5000, 16384])
@pytest.mark.parametrize("op", ["mask", "magnitude"])
def test_lengths(op, n):
    """From one entry to as many as registers hold; numbers for k and lam."""
    x = torch.from_numpy(np.random.default_rng(n).normal(size=(2, n))).float()
    f, k = FUNCTIONS[op], min(n, max(1, n // 10)) - 0.5
    found, want = both(lambda x: f(x, k, 0.1), x, g=x.flip(-1))
    for a, b in zip(found, want, strict=True):
        assert_near(a, b, 2e-6, b.double().abs().max().clamp_min(1.0))


@pytest.mark.parametrize(
    ("scale", "shift", "lam"),
    [(1.0, 1000.0, 0.1), (1e6, 0.0, 0.1), (1e-6, 0.0, 1e-7), (5.0, 0.0, 1e-5), (1e37, 0.0, 1.0)],
)
def test_scales_and_shifts(scale, shift, lam):
    x = torch.from_numpy(np.random.default_rng(8).normal(size=(16, 300)) * scale + shift).float()
    for f in (FUNCTIONS["mask"], FUNCTIONS["two-sided"], FUNCTIONS["sign"]):
        found, want = both(lambda x, f=f: f(x, 10, lam), x, g=torch.ones_like(x))
        assert_near(found[0], want[0], 2e-6)
        assert float((found[0].abs().sum(-1) - want[0].abs().sum(-1)).abs().max()) < 1e-4


@pytest.mark.parametrize("p", [1.2, 1.1])
def test_powers_have_all_their_digits(p):
    """An exponential of a logarithm has lost 3e-6, and has put equal entries out of order by as much."""
    x = torch.logspace(-3, 0, 500).repeat(2, 1)
    # So large a k leaves the threshold at 0, and y is a power of x.
    (y, *_), _ = both(lambda x: st.topk_sign(x, 500, 1.0, p=p), x, g=torch.ones_like(x))
    want = x.double() ** round(1 / (p - 1))
    assert float(((y - want) / want).abs().max()) < 6e-7
    assert (y.diff() >= 0).all()


@on_cpu
def test_the_state_is_that_of_the_core():
    x = torch.from_numpy(np.random.default_rng(9).normal(size=(50, 60))).float()
    k, lam = torch.full((50, 1), 7.5), torch.full((50, 1), 0.1)
    for op, e in ((MASK, 1.0), (MASK, 3.0), (TWO_SIDED, 2.0), (MAGNITUDE, 1.0), (SIGN, 2.0)):
        found = state.solve(x, k, lam, op, e).double()
        want = torch.ops.sparsetopk.threshold(x, k.double(), lam.double(), op, e)
        v, other = ((s[:, 0] - 0.1 * s[:, 1]) for s in (found, want))
        assert_near(v, other, 1e-6)


def test_second_derivatives():
    x = torch.from_numpy(np.random.default_rng(10).normal(size=(3, 12))).double()

    def curvature(x, k, lam):
        y = st.topk_mag(x, k, lam, p=1.5)
        (dx,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
        return dx

    k, lam = (torch.tensor(v, dtype=torch.float64) for v in (3.5, 0.4))
    found, want = both(curvature, x, k, lam, g=torch.ones_like(x))
    for a, b in zip(found, want, strict=True):
        assert_near(a, b, 1e-9, b.abs().max().clamp_min(1.0))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_dimensions(dim):
    x = torch.from_numpy(np.random.default_rng(11).normal(size=(3, 4, 5))).float()
    shape = [1 if i == dim else n for i, n in enumerate(x.shape)]
    k = torch.linspace(0.5, 2.5, int(np.prod(shape)), dtype=torch.float64).reshape(shape)
    found, want = both(lambda x, k: st.topk_mask(x, k, 0.3, dim=dim), x, k, g=x.flip(0))
    for a, b in zip(found, want, strict=True):
        assert_near(a, b, 2e-6, 10.0)


@pytest.mark.slow
def test_what_bench_checks_first(monkeypatch):
    """``sparsetopk bench --device cuda`` compares float32 on the device with the core in float64."""
    monkeypatch.setattr(state, "is_served", lambda x: x.dtype == torch.float32)
    found = bench.check(DEVICE, 5000)
    assert [line["right"] for line in found] == [True] * len(bench.OPERATORS), found


@on_cpu
def test_operators_are_registered_as_torch_wants_them():
    x = torch.randn(4, 10, requires_grad=True)
    k, lam = torch.full((4, 1), 2.5, requires_grad=True), torch.full((1, 1), 0.2)
    operator = (MAGNITUDE, 1.0, True, False)
    torch.library.opcheck(
        torch.ops.sparsetopk.rows_forward.default, (x, k, 0.0, lam, 0.0, *operator)
    )
    torch.library.opcheck(
        torch.ops.sparsetopk.rows_state.default, (x.detach(), k.detach(), k.detach(), MASK, 2.0)
    )


@on_cpu
def test_compiles_into_one_operator_each_way():
    graphs = []

    def backend(graph, _):
        graphs.append([str(n.target) for n in graph.graph.nodes if n.op == "call_function"])
        return make_boxed_func(graph.forward)

    compiled = torch.compile(
        lambda x: st.topk_mask(x, 3, 0.5), fullgraph=True, backend=aot_autograd(fw_compiler=backend)
    )
    x = torch.randn(4, 10, requires_grad=True)
    y = compiled(x)
    y.backward(torch.ones_like(y))
    called = [[name for name in graph if name.startswith("sparsetopk")] for graph in graphs]
    assert called == [["sparsetopk.rows_forward.default"], ["sparsetopk.rows_backward.default"]]
    assert_near(y.detach(), st.topk_mask(x.detach(), 3, 0.5), 0.0)


@every_function
@pytest.mark.parametrize("lam", [0.0, 0.1])
def test_one_launch_each_way_and_no_read_by_the_host(f, lam):
    forward, backward = launches(lambda x: f(x, 64, lam), (64, 4096))
    assert forward == {"rows_forward": 1}
    assert backward == {"rows_backward": 1}


EVERY_OPERATOR = {
    **{name: lambda x, f=f: f(x, 5.5, 0.1) for name, f in FUNCTIONS.items()},
    "p > 2": lambda x: st.topk_mask(x, 5, 0.1, p=3.0),
    "straight through": lambda x: st.topk_mask(x, 5, 0.1, straight_through=True),
    "dim": lambda x: st.topk_mask(x, 3, 0.1, dim=0),
    "tensors": lambda x: st.topk_mask(x, x.detach()[:, :1], x.detach()[:, :1]),
    "many tensors": lambda x: st.topk_mag_multi([x, 2 * x], 100.0, 0.1)[0],
    "select": lambda x: st.topk_select(x, 5, 0.1, capacity=8).values,
    "values x": lambda x: st.topk_select(x, 5, 0.1, values="x").values,
    "value": lambda x: st.topk_value(x, 5, 0.1),
    "loss": lambda x: st.topk_loss(x, _labels(x), 5),
    "best": lambda x: st.topk_loss(x, _labels(x), 5, completion="best"),
    "smoothed": lambda x: st.topk_loss(x, _labels(x), 5, label_smoothing=0.1),
    "experts": lambda x: st.moe.expert_choice(x, 5).weights,
    "tokens": lambda x: st.moe.token_choice(x, 2, capacity=30).weights,
    "sort": lambda x: st.soft_sort(x, 1.0),
    "rank": lambda x: st.soft_rank(x, 1.0, p=1.5),
    "permutahedron": lambda x: st.permutahedron(x, x.detach(), 1.0, phi="exp"),
    "lam": lambda x: st.topk_mask(x, 5, st.choose_lam(x.detach(), 5)),
}


def _labels(x):
    return torch.zeros(len(x), dtype=torch.int64, device=x.device)


@pytest.mark.parametrize("n", [40, 20_000], ids=["short", "long"])
@pytest.mark.parametrize("name", EVERY_OPERATOR)
def test_what_a_cuda_graph_asks_for(name, n):
    """Tensors without numbers: no operator reads one by the host, waits for the device, or makes a
    tensor whose size depends on numbers, forward or backward. (Nothing can be captured here.)"""
    forward, backward = launches(EVERY_OPERATOR[name], (64, n))
    assert sum(forward.values()) > 0
    assert sum(backward.values()) > 0


def test_which_rows_are_long():
    x = torch.empty(2, 16385, device="meta")
    assert is_long(x, Operator(MASK, 1.0))
    assert not is_long(x[:, 1:], Operator(MASK, 1.0))
    assert is_long(x[:, :8193].double(), Operator(MASK, 1.0))
    assert is_long(x[:, :8193], Operator(MASK, 0.5))  # p > 2 is computed in float64
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "is_served", lambda x: True)
        assert not state.takes(x, (1 << 30) + 1, Operator(MASK, 1.0))
        assert not state.takes(x, 16385, Operator(EXP, 1.0))


# What is compiled: a name, the architecture and constants of the kernels.
OPERATORS = [
    {"OP": MASK},
    {"OP": MASK, "E": 3.0},
    {"OP": TWO_SIDED, "E": 2.0},
    {"OP": MAGNITUDE, "DEBIAS": True},
    {"OP": MAGNITUDE, "E": 3.0},
    {"OP": SIGN, "E": 2.0},
]
# S, or an entry alone, in a loop: more registers for an entry.
IN_A_LOOP = [{"OP": MAGNITUDE, "E": 5.0}, {"OP": TWO_SIDED, "E": 5.0}]
BOTH = {"K_TENSOR": True, "LAM_TENSOR": True, "HARD": True, "IN_K": True, "IN_LAM": True}


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_compiled_for_nvidia(name, arch):
    """Nothing spills up to 8192 entries, and each entry is read once (backward: with its cotangent)."""
    every = [*OPERATORS, *IN_A_LOOP]
    requests = [{"name": name, "arch": arch, "n": 8192, **chosen} for chosen in every]
    requests += [{"name": name, "arch": arch, "n": n, "OP": MASK} for n in (64, 1024)]
    both = [{"OP": MASK}, {"OP": MAGNITUDE, "DEBIAS": True}]
    both += [{"OP": MASK, "E": 5.0}, {"OP": SIGN, "E": 5.0}, {"OP": TWO_SIDED, "E": 2.0}]
    if name == "backward":  # forward it spills a few numbers on sm_90, as docs/gpu.md says
        both.append({"OP": TWO_SIDED, "E": 5.0})
        both += [{"OP": MAGNITUDE, "E": e} for e in (2.0, 3.0, 5.0)]
    requests += [{"name": name, "arch": arch, "n": 8192, **BOTH, **chosen} for chosen in both]
    for request, found in zip(requests, compile_all(requests), strict=True):
        assert found["spills"] == 0, (request, found)
        per_thread = found["block"] * found["rows"] // (32 * found["warps"])
        tensors = 1 if name == "forward" else 2
        assert found["loads"].count(".128") == tensors * per_thread // 4, (request, found)
        assert found["stores"].count(".128") == per_thread // 4, (request, found)


@pytest.mark.slow
def test_compiled_for_others():
    """Also what is not tuned for: Blackwell, and AMD's."""
    requests = [
        {"name": name, "arch": arch, "n": 4096, **chosen}
        for arch in (100, "gfx90a", "gfx942")
        for name in ("forward", "backward")
        for chosen in ({"OP": MASK}, {"OP": MAGNITUDE, "E": 2.0})
    ]
    requests += [
        {"name": "forward", "arch": 90, "n": 4096, "OP": MASK, "dtype": dtype}
        for dtype in ("float64", "float16", "bfloat16")
    ]
    for found in compile_all(requests):
        assert found["spills"] == 0
