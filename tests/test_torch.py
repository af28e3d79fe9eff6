"""What is torch's own: transforms, tracing, devices, dtypes, modules. Values and derivatives are
tested with the case table, over both front-ends."""

import copy
import pickle

import numpy as np
import pytest

from cases import CASES, MAGNITUDES, ROWS, Case
from launches import Counting, Holding
from test_derivatives import AT

torch = pytest.importorskip("torch")

import sparsetopk.torch as st
from sparsetopk._checks import check_exponent
from sparsetopk._maths import threshold
from sparsetopk._maths.operator import MAGNITUDE, MASK, SIGN, TWO_SIDED, Operator
from sparsetopk.torch import nn
from sparsetopk.torch._fused import rows as fused
from sparsetopk.torch._rows import arguments
from sparsetopk.torch._rows.namespace import LOOKS_ALWAYS, LOOKS_NEVER
from sparsetopk.torch._solvers import ops, ordered, steep, vectorized

F64 = torch.float64
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
# One case of every kind that has code of its own, for what takes long.
FEW = [
    Case("topk_mask", {"p": 1.5}),
    Case("topk_mask", {"p": 4 / 3, "two_sided": True}),
    Case("topk", {}),
    Case("topk_mag", {"p": 2.0}),
    Case("topk_mag", {"p": 1.5, "debias": False}),
    Case("topk_sign", {"p": 2.0}),
]


def gaussian(*shape, seed=0, dtype=F64):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).to(dtype)


def live(*values):
    return tuple(torch.tensor(v, dtype=F64, requires_grad=True) for v in values)


# derivatives


@pytest.mark.parametrize("case", CASES, ids=str)
def test_first_and_second_derivatives(case: Case):
    """In x, k and lam, in reverse and forward mode; gradgradcheck goes backward twice. Along random
    directions: entry by entry the first derivatives are compared in ``test_derivatives``."""
    at, f = live(*AT), case.function(st)
    # a second difference of float64 loses two thirds of its digits
    assert torch.autograd.gradcheck(f, at, atol=1e-5, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(f, at, atol=1e-4, fast_mode=True)


@pytest.mark.parametrize("phi", ["identity", "half_square", "abs", "exp"])
@pytest.mark.parametrize("p", [2.0, 4 / 3, 3.0])
def test_derivatives_of_values(phi, p):
    f = lambda x, k, lam: st.topk_value(x, k, lam, p=p, phi=phi)  # noqa: E731
    assert torch.autograd.gradcheck(f, live(*AT), atol=1e-5, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(f, live(*AT), atol=1e-4, fast_mode=True)


@pytest.mark.parametrize("completion", [None, "spread", "best"])
@pytest.mark.parametrize("options", [{}, {"p": 4 / 3}, {"p": 1.5, "two_sided": True}], ids=str)
def test_derivatives_of_losses(completion, options):
    x, k, lam = live(gaussian(3, 6).numpy(), 2.6, 0.8)
    targets = torch.tensor([0, 5, 2])
    f = lambda *at: st.topk_loss(at[0], targets, *at[1:], completion=completion, **options)  # noqa: E731
    fast = {"fast_mode": bool(options)}  # along random directions, but for p = 2
    assert torch.autograd.gradcheck(f, (x, k, lam), atol=1e-5, check_forward_ad=True, **fast)
    assert torch.autograd.gradgradcheck(f, (x, k, lam), atol=1e-4, fast_mode=True)


def test_derivative_of_a_value_in_k_and_lam():
    """phi at the threshold, and -R(y)/lam."""
    x, k, lam = live([1.0, 0.6, 0.3, -1.0], 1.5, 0.8)
    y = st.topk_mask(x, k, lam).detach()
    in_k, in_lam = torch.autograd.grad(st.topk_value(x, k, lam), (k, lam))
    tau = x[1] - lam * y[1]  # 0 < y_1 < 1
    torch.testing.assert_close(in_k, tau.detach())
    torch.testing.assert_close(in_lam, -(y**2).sum() / 2)


@pytest.mark.parametrize("magnitude", [False, True])
def test_derivative_of_a_selection(magnitude):
    x = gaussian(3, 20).requires_grad_()
    selection = st.topk_select(x, 4, 0.5, magnitude=magnitude)
    assert (selection.values != 0).sum() > 12
    g = gaussian(*selection.values.shape, seed=1)
    y = (st.topk_mag if magnitude else st.topk_mask)(x, 4, 0.5)
    expected = torch.autograd.grad(y.gather(-1, selection.indices), x, g)[0]
    torch.testing.assert_close(torch.autograd.grad(selection.values, x, g)[0], expected)
    assert selection.indices.dtype == torch.int64


@pytest.mark.parametrize("case", CASES, ids=str)
def test_transforms_of_torch_func(case: Case):
    f = lambda x: case.function(st)(x, 2.5, 0.6)  # noqa: E731
    loss = lambda x: (f(x) ** 2).sum()  # noqa: E731
    x, dx = gaussian(3, 6), gaussian(3, 6, seed=1)
    leaf = x.clone().requires_grad_()
    y = f(leaf)
    gradient = torch.autograd.grad((y**2).sum(), leaf)[0]
    torch.testing.assert_close(torch.vmap(f)(x), y.detach())
    torch.testing.assert_close(torch.func.grad(loss)(x), gradient)
    torch.testing.assert_close(torch.vmap(torch.func.grad(loss))(x), gradient)
    jacobian = torch.vmap(torch.func.jacrev(f))(x)
    torch.testing.assert_close(torch.vmap(torch.func.jacfwd(f))(x), jacobian)
    expected = torch.einsum("mij,mj->mi", jacobian, dx)
    torch.testing.assert_close(torch.func.jvp(f, (x,), (dx,))[1], expected)
    expected = torch.einsum("mij,mi->mj", jacobian, dx)
    torch.testing.assert_close(torch.func.vjp(f, x)[1](dx)[0], expected)
    hessian = torch.autograd.functional.hessian(loss, x[0])
    torch.testing.assert_close(torch.func.hessian(loss)(x[0]), hessian)
    torch.testing.assert_close(torch.func.jacrev(torch.func.jacrev(loss))(x[0]), hessian)


@pytest.mark.parametrize("case", FEW, ids=str)
def test_vmap_over_k_and_lam(case: Case):
    f, x = case.function(st), gaussian(4, 6)
    k, lam = torch.tensor([1.0, 2.5, 0.0, 6.0], dtype=F64), torch.tensor([0.5, 0.0, 1.0, 2.0])
    expected = f(x, k[:, None], lam[:, None])
    torch.testing.assert_close(torch.vmap(f)(x, k, lam), expected)
    torch.testing.assert_close(torch.vmap(f, in_dims=(1, 0, 0))(x.T, k, lam), expected)
    each = torch.vmap(f, in_dims=(None, 0, None))(x[0], k, 0.5)
    torch.testing.assert_close(each, f(x[:1].expand(4, 6), k[:, None], 0.5))
    nested = torch.vmap(torch.vmap(f, in_dims=(None, 0, None)), in_dims=(None, None, 0))
    torch.testing.assert_close(nested(x[0], k, lam)[2, 1], f(x[0], k[1], lam[2]))


def test_k_and_lam_may_depend_on_x():
    x = gaussian(2, 6).requires_grad_()
    f = lambda x: st.topk_mask(x, 1 + torch.sigmoid(x.sum(-1, keepdim=True)), x.exp().mean())  # noqa: E731
    assert torch.autograd.gradcheck(f, x, atol=1e-5)
    assert torch.autograd.gradgradcheck(f, x, atol=1e-4)


def test_gradients_of_k_and_lam_have_their_shape_and_dtype():
    x = gaussian(2, 5, 3, dtype=torch.float32)
    k = torch.tensor([[[1.0]], [[2.0]]], dtype=torch.float16, requires_grad=True)
    lam = torch.tensor(0.5, dtype=torch.float32, requires_grad=True)
    st.topk_mask(x, k, lam, dim=1).pow(2).sum().backward()
    assert k.grad.shape == (2, 1, 1)
    assert k.grad.dtype == torch.float16
    assert lam.grad.shape == ()
    assert lam.grad.dtype == torch.float32


# tracing


@pytest.mark.parametrize("case", FEW, ids=str)
def test_tracing_keeps_one_graph(case: Case):
    compiled = torch.compile(case.function(st), fullgraph=True, backend="aot_eager")
    _compare(compiled, case.function(st))


@pytest.mark.slow
@pytest.mark.parametrize("case", [FEW[0], FEW[4]], ids=str)
def test_compiling(case: Case):
    _compare(torch.compile(case.function(st), fullgraph=True), case.function(st))


def _compare(compiled, f):
    at = live(gaussian(3, 7).numpy(), 2.5, [[0.3], [0.0], [2.0]])
    y, expected = compiled(*at), f(*at)
    torch.testing.assert_close(y, expected)
    g = gaussian(3, 7, seed=1)
    found, wanted = (torch.autograd.grad(v, at, g) for v in (y, expected))
    torch.testing.assert_close(found, wanted)


def test_tracing_the_rest():
    x = gaussian(3, 12)
    targets = torch.tensor([0, 4, 2])
    for f in (
        lambda x: st.topk_select(x, 2, 0.5, capacity=4),
        lambda x: st.topk_value(x, 2, 0.5, phi="exp"),
        lambda x: st.topk_loss(x, targets, 2, completion="best"),
        lambda x: torch.vmap(torch.func.grad(lambda x: st.topk(x, 2, 0.5).pow(2).sum()))(x),
        nn.TopKMag(2, torch.tensor(0.5), straight_through=True),
    ):
        compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), f(x))


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    module, x = nn.TopKMask(3, 0.2, p=1.5), gaussian(4, 9)
    batch = {"x": {0: torch.export.Dim("batch")}}
    exported = torch.export.export(module, (x,), dynamic_shapes=batch, strict=strict).module()
    other = gaussian(7, 9, seed=1)
    torch.testing.assert_close(exported(other), module(other))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_opcheck(dtype):
    k, lam = torch.tensor([[2.0], [3.5]], dtype=F64), torch.tensor([[0.1], [0.0]], dtype=F64)
    at = (gaussian(2, 6, dtype=dtype), k, lam, MASK, 1.0)
    torch.library.opcheck(torch.ops.sparsetopk.threshold.default, at)


# devices, dtypes, shapes


@pytest.mark.parametrize("case", FEW, ids=str)
def test_meta_tensors(case: Case):
    """They have no values: any attempt to wait for one, as on a GPU, is an error."""
    x = torch.empty(3, 5, 2, device="meta", dtype=torch.float16, requires_grad=True)
    k, lam = torch.empty(5, 1, device="meta"), torch.empty((), device="meta")
    y = case.function(st)(x, k, lam)
    assert (y.shape, y.dtype, y.device.type) == (x.shape, x.dtype, "meta")
    y.sum().backward()
    assert x.grad.shape == x.shape


def test_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(3, 5, dtype=torch.bfloat16, requires_grad=True)
        y = st.topk(x, torch.empty(3, 1), 0.1)
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        y.sum().backward()
        assert x.grad.shape == x.shape
        assert st.topk_select(x, 2).indices.shape == (3, 5)


def lipschitz(case: Case, dtype) -> bool:
    """Or one rounding of the threshold moves the sum by its root."""
    return case.p <= 2 or case.two_sided or dtype == F64


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (case, dtype)
        for case in CASES
        for dtype in (torch.float32, F64)
        if case.operator != "topk" and lipschitz(case, dtype)
    ],
    ids=str,
)
def test_the_solver_of_other_devices(case: Case, dtype):
    """A fixed number of passes, in float32 unless x is float64: the mass is k, to its rounding."""
    x, k, lam = (torch.tensor(v, dtype=dtype) for v in ROWS)
    op = {"half_square": MAGNITUDE, "abs": SIGN}.get(case.phi, MASK)
    op = TWO_SIDED if case.two_sided else op
    e = check_exponent(case.p)
    state = vectorized.state_of(x, k, lam, op, e)
    assert state.dtype == dtype
    reg, phi = Operator(op, e).reg(LOOKS_NEVER), Operator(op, e).phi(LOOKS_NEVER)
    pivot, delta = state[:, :1], state[:, 1:]
    a, v = x.abs() if phi.even else x, pivot - lam * delta
    response = reg.response(((a - pivot) / lam + delta).clamp_min(reg.zero))
    mass = torch.minimum(response, phi.prime(v)).sum(-1, keepdim=True)
    # t = (x - pivot)/lam + delta is rounded as delta and x/lam are, v = pivot - lam delta as pivot
    size = torch.maximum(a.abs().amax(-1, keepdim=True) / lam, pivot.abs()).clamp_min(1.0)
    atol = 32 * torch.finfo(dtype).eps * x.shape[-1] * size / min(1.0, case.p - 1)
    # at 0 everything that is not 0 is selected, or the mass is below k
    at_zero = (pivot == 0) & phi.even
    above = mass - k * phi.prime(v)
    assert (above <= torch.where(at_zero, 1e-6, atol)).all()
    assert (above >= torch.where(at_zero, -torch.inf, -atol)).all()


@pytest.mark.parametrize("case", FEW, ids=str)
def test_operators_as_other_devices_compute_them(case: Case, monkeypatch):
    at = (gaussian(4, 30, dtype=torch.float32), torch.tensor(5.5), torch.tensor(0.7))
    g = gaussian(4, 30, seed=1, dtype=torch.float32)

    def output_and_gradients():
        leaves = tuple(v.clone().requires_grad_() for v in at)
        y = case.function(st)(*leaves)
        return y.detach(), *torch.autograd.grad(y, leaves, g)

    expected = output_and_gradients()
    monkeypatch.setattr(arguments, "compute_dtype", lambda x: torch.float32)
    monkeypatch.setattr(ops, "threshold", vectorized.state_of)
    monkeypatch.setattr(fused, "takes", lambda *args: False)
    torch.testing.assert_close(output_and_gradients(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["topk_mask", "topk_sign", "topk_mag"])
def test_steep_slopes_are_finite_on_other_devices(name, dtype, monkeypatch):
    """For p > 2 that of an entry at 0 was inf, in float64."""
    monkeypatch.setattr(ops, "threshold", vectorized.state_of)
    monkeypatch.setattr(fused, "takes", lambda *args: False)
    for lam in (1e-300 if dtype == F64 else 1e-38, 1e-8, 1.0):
        x = torch.tensor([[1, 1, 1, 0, 0, 0, 0.0], [0.0] * 7], dtype=dtype, requires_grad=True)
        getattr(st, name)(x, 2.0, lam, p=3.0).sum().backward()
        assert x.grad.isfinite().all()


def rows_of_every_kind(m, n):
    """Also such as Newton's method does not like: clusters, scales far apart, and far from 0."""
    g = gaussian(m, n, seed=3, dtype=torch.float32)
    other = gaussian(m, n, seed=4, dtype=torch.float32)
    kinds = (g, g / other, 2.0 ** (-8 * other.abs()), other.round() + 1e-4 * g, g + 1000.0, g**9)
    return torch.cat(kinds)


@pytest.mark.parametrize("op", [MASK, SIGN])
@pytest.mark.parametrize("n", [20, 500])
def test_a_fixed_number_of_passes_is_enough(op, n):
    """On other devices p = 2 takes 4 passes in float32, and the sum is k to rounding."""
    x = rows_of_every_kind(300, n)
    m = len(x)
    k = torch.linspace(0.3, n - 2.0, m)[:, None]
    k[::2] = k[::2].ceil()
    lam = torch.logspace(-4, 2, m).flip(0)[:, None]
    lam = lam[torch.from_numpy(np.random.default_rng(0).permutation(m))]
    state = vectorized.state_of(x, k, lam, op, 1.0).double()
    a, lam = (x.abs() if op == SIGN else x).double(), lam.double()
    y = ((a - state[:, :1]) / lam + state[:, 1:]).clamp(0, 1)
    inside = ((y > 0) & (y < 1)).sum(-1, keepdim=True)
    off = (y.sum(-1, keepdim=True) - k).abs() / inside.clamp_min(1)
    if op == SIGN:  # at 0 it may take less
        off = torch.where(state[:, :1] == 0, 0.0, off)
    assert float(off.max()) <= 1e-6


@pytest.mark.parametrize("n", [20, 500])
@pytest.mark.parametrize("e", [1.0, 2.0, 5.0, 0.5, 0.2])
@pytest.mark.parametrize("op", [MASK, MAGNITUDE, TWO_SIDED])
def test_more_passes_change_nothing(op, e, n, monkeypatch):
    """Nobody looks on other devices whether a search is done."""
    x = rows_of_every_kind(100, n)
    m = len(x)
    k = torch.linspace(0.3, n - 2.0, m)[:, None]
    k[::2] = k[::2].ceil()
    lam = torch.logspace(-3, 1, m)[torch.from_numpy(np.random.default_rng(0).permutation(m))][
        :, None
    ]
    operator = Operator(op, e)
    reg, phi = operator.reg(LOOKS_NEVER), operator.phi(LOOKS_NEVER)

    def shares():
        pivot, delta = vectorized.state_of(x, k, lam, op, e).double().split(1, dim=-1)
        t = ((x.abs() if phi.even else x).double() - pivot) / lam.double() + delta
        v = (pivot - lam.double() * delta).clamp_min(1e-30)
        return (reg.response(t.clamp_min(reg.zero)) / phi.prime(v)).clamp(0.0, 1.0)

    found = shares()
    for name in (
        "_LINEAR_PASSES",
        "_PASSES",
        "_CURVED_PASSES",
        "_TWO_SIDED_PASSES",
        "_FLAT_PASSES",
    ):
        monkeypatch.setattr(ordered, name, 30)
    monkeypatch.setattr(steep, "_PASSES", 30)
    # S is e times as steep as t is, and lam may be small beside the pivot
    rounding = 2.0**-23 * max(e, 1.0) * (1 + x.abs().amax(-1, keepdim=True) / lam).clamp(max=1e4)
    assert ((found - shares()).abs() <= 16 * rounding).all()


@pytest.mark.parametrize(
    ("op", "e", "most"),
    [
        (MASK, 1.0, 3.3),
        (SIGN, 1.0, 3.3),
        (MASK, 2.0, 5.3),
        (MAGNITUDE, 1.0, 6.6),
        (MAGNITUDE, 2.0, 8.1),
        (TWO_SIDED, 2.0, 10.1),
    ],
)
def test_memory_of_a_search_from_sorted_rows(op, e, most):
    """In units of x, as docs/gpu.md says; and x is left as it is."""
    x = torch.randn(64, 4096)
    before, k, lam = x.clone(), torch.full((64, 1), 64.0), torch.full((64, 1), 0.1)
    with torch.no_grad(), Holding() as found:
        ordered.state_of(x, k, lam, Operator(op, e), False)
    assert found.peak <= most * x.nbytes
    assert torch.equal(x, before)


@pytest.mark.parametrize("e", [1 / 1.05, 0.5, 0.2, 1 / 19])
@pytest.mark.parametrize("op", [MASK, SIGN, MAGNITUDE])
def test_steep_responses_in_a_few_passes(op, e):
    """p > 2 in float64, against the search that looks whether it is done."""
    x = rows_of_every_kind(100, 40).double()
    m, operator = len(x), Operator(op, e)
    k = torch.linspace(0.3, 38.0, m, dtype=F64)[:, None]
    k[::2] = k[::2].ceil()
    lam = torch.logspace(-4, 2, m, dtype=F64)[
        torch.from_numpy(np.random.default_rng(0).permutation(m))
    ][:, None]
    found = vectorized.state_of(x, k, lam, op, e, hard=False)
    row, count = vectorized.Whole(x), vectorized.split(k)
    want = torch.cat(list(threshold.state_of(LOOKS_ALWAYS, row, count, lam, operator, False)), -1)
    a, reg = x.abs() if op != MASK else x, operator.reg(LOOKS_ALWAYS)
    y, other = (
        reg.response(((a - pivot) / lam + delta).clamp(0.0, None if op == MAGNITUDE else 1.0))
        for pivot, delta in (state.split(1, dim=-1) for state in (found, want))
    )
    # Entries over v are whole, and not looked at.
    y, other = (torch.minimum(v, a.clamp_min(0.0)) if op == MAGNITUDE else v for v in (y, other))
    soft = want[:, :1].isfinite()
    scale = other.amax(dim=-1, keepdim=True).clamp_min(1.0)
    assert torch.equal(found.isnan(), want.isnan())
    assert float(torch.where(soft, (y - other).abs() / scale, 0.0).max()) <= 1e-12


def test_launches_on_other_devices():
    """Counted on tensors without numbers, in float64 and without Triton; see test_other_device.py."""
    with Counting() as seen:
        st.topk_mask(torch.empty(64, 4096, device="meta"), 64, 0.1)
    assert sum(seen.counts.values()) <= 170
    assert seen.counts["sort"] == 1


def test_order_statistics():
    x = torch.cat(
        [gaussian(4, 50), torch.full((4, 3), torch.inf), -torch.full((4, 2), torch.inf)], 1
    )
    x = torch.cat(
        [x, torch.tensor([[0.0, -0.0, 5e-324, -5e-324, 1.7e308]], dtype=F64).expand(4, 5)], 1
    )
    for dtype in FLOATS:
        s = x.to(dtype).sort(dim=-1, descending=True).values
        for i in (1, 4, 30, 60):
            got = vectorized.Whole(x.to(dtype)).nth(torch.full((4, 1), i), dtype, False, None)
            torch.testing.assert_close(got, s[:, i - 1 : i], rtol=0, atol=0)


@pytest.mark.parametrize("op", [MASK, SIGN, MAGNITUDE])
@pytest.mark.parametrize("p", [1.05, 1.1, 1.3])
def test_thresholds_with_k_just_over_a_whole_number(op, p):
    """What is left for the block is less than the rounding of those that are whole, and S so flat that
    the threshold is far from where they become it."""
    rng = np.random.default_rng(6)
    for n in (3, 9, 40):
        x = torch.from_numpy(rng.normal(size=(3000, n))).half().float()
        k = rng.integers(1, n - 1, size=(3000, 1)) + 2.0 ** -rng.integers(10, 22, size=(3000, 1))
        k = torch.from_numpy(k).float()
        lam = torch.from_numpy(2.0 ** rng.integers(-3, 3, size=(3000, 1))).float()

        def threshold(dtype, x=x, k=k, lam=lam):
            rows = (v.to(dtype) for v in (x, k, lam))
            pivot, delta = vectorized.state_of(*rows, op, check_exponent(p)).double().split(1, -1)
            return pivot / lam.double() - delta

        error = (threshold(torch.float32) - threshold(F64)).abs().nan_to_num(0.0)
        assert float(error.max()) < 2e-4


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_dtypes(case: Case, dtype):
    """The result in the dtype of x, k and lam never in it; gradients finite for every lam."""
    x = gaussian(2, 300, dtype=dtype)
    y = case.function(st)(x, 70, 0.3)
    assert y.dtype == dtype
    exact = case.function(st)(x.to(F64), 70, 0.3)
    # rounded once, but for a product, and for t = (x - tau)/lam in the kernels
    atol = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(y.to(F64), exact, rtol=0, atol=atol)
    if case.p > 2:  # not Lipschitz: a slope may be larger than float16 can say
        return
    for lam in (1e-8, 1e-3, 1.0, 1e8):
        leaf = x.clone().requires_grad_()
        case.function(st)(leaf, 70, lam).sum().backward()
        assert leaf.grad.dtype == dtype
        assert leaf.grad.isfinite().all()


def test_counts_are_not_in_the_dtype_of_x():
    x = gaussian(1, 70_000, dtype=torch.bfloat16)
    y = st.topk_mask(x, 65_537, 1e-3)  # bfloat16 has 8 bits
    torch.testing.assert_close(y.to(F64).sum().item(), 65_537.0, atol=2.0, rtol=0)


def test_autocast():
    x = gaussian(4, 30, dtype=torch.float32)
    weight = gaussian(30, 30, dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = x @ weight
        y = st.topk(scores, 5, 0.3)
        loss = st.topk_loss(scores, torch.tensor([0, 1, 2, 3]), 5)
    assert scores.dtype == y.dtype == torch.bfloat16
    (y.float().sum() + loss).backward()
    assert weight.grad.isfinite().all()


@pytest.mark.parametrize("case", FEW, ids=str)
def test_strides_dims_and_empty_tensors(case: Case):
    f = case.function(st)
    x = gaussian(6, 8, 5)
    expected = f(x.movedim(1, -1).contiguous(), 2, 0.3).movedim(-1, 1)
    for view in (x, x.mT.contiguous().mT, x.flip(0).flip(0), x[:, :, ::1]):
        torch.testing.assert_close(f(view, 2, 0.3, dim=1), expected)
        torch.testing.assert_close(f(view, 2, 0.3, dim=-2), expected)
    torch.testing.assert_close(f(x[::2, :, 1::2], 2, 0.3, dim=1), expected[::2, :, 1::2])
    row = x[0, :, 0].requires_grad_()
    torch.testing.assert_close(f(row.detach().expand(3, 8), 2, 0.3)[1], f(row, 2, 0.3).detach())
    for shape, k in (((0, 5), 2), ((3, 0), 0), ((2, 0, 5), 3)):
        empty = torch.empty(shape, requires_grad=True)
        y = f(empty, k, 0.3)
        assert y.shape == shape
        y.sum().backward()
        assert empty.grad.shape == shape
    assert st.topk_value(torch.empty(0, 5), 2).shape == (0,)
    assert st.topk_select(torch.empty(0, 5), 2).values.shape == (0, 5)


def test_numbers_may_be_tensors_of_any_real_dtype():
    x = gaussian(3, 8)
    expected = st.topk_mask(x, 2, 0.5)
    for k in (
        torch.tensor(2),
        torch.tensor([2.0], dtype=torch.float16),
        np.int64(2),
        np.float32(2),
    ):
        torch.testing.assert_close(st.topk_mask(x, k, torch.tensor(0.5)), expected)
    parameter = torch.nn.Parameter(torch.tensor(0.5))
    torch.testing.assert_close(st.topk_mask(x, 2, parameter).detach(), expected)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.uint16, torch.bfloat16], ids=str)
def test_a_row_may_have_more_entries_than_the_dtype_of_k_has_numbers(dtype):
    x, k = gaussian(3, 259), torch.tensor(2).to(dtype)
    torch.testing.assert_close(st.topk_mask(x, k, 0.5), st.topk_mask(x, 2, 0.5))
    torch.testing.assert_close(st.topk_mag_multi([x], k, 0.5), st.topk_mag_multi([x], 2, 0.5))
    options = {"capacity": 9, "straight_through": True}
    found, expected = (st.topk_select(x, number, 0.5, **options).values for number in (k, 2))
    torch.testing.assert_close(found, expected)


def test_k_is_compared_with_n_itself():
    with pytest.raises(ValueError, match="n=259, got 260"):  # 259 in bfloat16 is 260
        st.topk_mask(gaussian(259), torch.tensor(260.0, dtype=torch.bfloat16))


# what cannot be read makes rows NaN


@pytest.mark.parametrize("case", FEW, ids=str)
def test_bad_k_or_lam_that_cannot_be_read_makes_its_row_nan(case: Case):
    x = gaussian(5, 6)
    k = torch.tensor([2.0, -1.0, 7.0, torch.nan, 2.0])
    lam = torch.tensor([0.5, 0.5, 0.5, 0.5, -1.0])
    y = torch.vmap(case.function(st))(x, k, lam)
    assert y[1:].isnan().all()
    torch.testing.assert_close(y[0], case.function(st)(x[0], 2, 0.5))


# straight-through


@pytest.mark.parametrize("case", FEW, ids=str)
def test_straight_through(case: Case):
    f, x = case.function(st), gaussian(4, 9).requires_grad_()
    y = f(x, 3, 0.7, straight_through=True)
    assert torch.equal(y, f(x, 3, 0.0))
    relaxed = f(x, 3, 0.7)
    assert not torch.equal(relaxed, y)
    g = gaussian(4, 9, seed=1)
    expected = torch.autograd.grad(relaxed, x, g)[0]
    torch.testing.assert_close(torch.autograd.grad(y, x, g)[0], expected)


def test_straight_through_beside_infinities():
    x = torch.tensor([torch.inf, 1.0, 0.9, -torch.inf], requires_grad=True)
    y = st.topk(x, 2, 0.5, straight_through=True)
    assert torch.equal(y, torch.tensor([torch.inf, 1.0, 0.0, 0.0]))
    g = torch.tensor([3.0, 1.0, -2.0, 1.0])
    expected = torch.autograd.grad(st.topk(x, 2, 0.5), x, g)[0]
    assert expected[0] == 3
    torch.testing.assert_close(torch.autograd.grad(y, x, g)[0], expected)


# modules


MODULES = [
    (nn.TopKMask(2, 0.5, p=1.5), st.topk_mask, {"p": 1.5}),
    (nn.TopK(2, 0.5, two_sided=True), st.topk, {"two_sided": True}),
    (nn.TopKMag(2, 0.5, debias=False), st.topk_mag, {"debias": False}),
    (nn.TopKSign(2, 0.5, dim=0), st.topk_sign, {"dim": 0}),
]


@pytest.mark.parametrize(("module", "f", "options"), MODULES, ids=lambda v: type(v).__name__)
def test_modules_are_the_functions(module, f, options):
    x = gaussian(4, 6)
    expected = f(x, 2, 0.5, **options)
    for same in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(same(x), expected)
    assert not list(module.parameters())
    assert repr(module).startswith(f"{type(module).__name__}(k=2, lam=0.5, p=")


def test_modules_keep_tensors_and_train_parameters():
    lam = torch.nn.Parameter(torch.tensor(0.5))
    module = nn.TopKMag(torch.tensor([[2.0], [3.0]]), lam, straight_through=True)
    assert sorted(module.state_dict()) == ["k", "lam"]
    assert list(module.parameters()) == [lam]
    module = pickle.loads(pickle.dumps(module))
    module(gaussian(2, 6)).pow(2).sum().backward()
    assert module.lam.grad != 0
    assert "k=Tensor(2, 1), lam=Parameter()" in repr(module)
    assert module.double().k.dtype == F64


def test_counts_keep_their_dtype():
    layer = st.nn.TopKMask(torch.tensor(257.0), st.nn.RunningLam(8, start=0.1)).bfloat16()
    assert layer.k.dtype == torch.float32
    assert layer.k == 257
    assert layer.lam.log_lam.dtype == torch.float64
    assert layer.to("meta").k.device.type == "meta"


def test_hard_eval():
    x = gaussian(4, 6)
    module = nn.TopKMask(2, 5.0, hard_eval=True)
    torch.testing.assert_close(module(x), st.topk_mask(x, 2, 5.0))
    torch.testing.assert_close(module.eval()(x), st.topk_mask(x, 2, 0.0))
    torch.testing.assert_close(module.train()(x), st.topk_mask(x, 2, 5.0))
    assert "hard_eval=True" in repr(module)
    soft = nn.TopKMask(2, 5.0).eval()
    torch.testing.assert_close(soft(x), st.topk_mask(x, 2, 5.0))


def test_loss_module():
    logits, targets = gaussian(4, 6), torch.tensor([0, 5, 2, 2])
    module = nn.TopKLoss(3, 0.8, completion="spread", reduction="none")
    expected = st.topk_loss(logits, targets, 3, 0.8, completion="spread", reduction="none")
    torch.testing.assert_close(copy.deepcopy(module)(logits, targets), expected)
    assert repr(module) == (
        "TopKLoss(k=3, lam=0.8, p=2.0, two_sided=False, completion=spread, dim=-1, reduction=none, "
        "label_smoothing=0.0, ignore_index=-100)"
    )


# errors


X = torch.tensor([[0.3, 0.1, -0.2], [1.0, 2.0, 3.0]])
FAMILY = [st.topk_mask, st.topk, st.topk_mag, st.topk_sign, st.topk_select, st.topk_value]
BAD = [
    ((X, -1), {}, ValueError, r"k must be in \[0, n\] with n=3, got -1"),
    ((X, torch.tensor([[1], [4]])), {}, ValueError, r"k must be in \[0, n\] with n=3, got 4"),
    ((X, float("nan")), {}, ValueError, r"k must be in \[0, n\] with n=3, got nan"),
    ((X, "2"), {}, TypeError, r"k must be a real number or a tensor of them, got '2'"),
    ((X, 1j), {}, TypeError, r"k must be a real number"),
    ((X, True), {}, TypeError, r"k must be a real number .* got True"),
    ((X, torch.tensor(True)), {}, TypeError, r"k must be .* got a tensor of dtype bool"),
    ((X, np.ones((2, 1))), {}, TypeError, r"k must be .* got ndarray of shape \(2, 1\)"),
    ((X, torch.ones(3)), {}, ValueError, r"k must be .* broadcast to shape \(2, 1\).*\(3,\)"),
    ((X, 1, -0.1), {}, ValueError, r"lam must be finite and at least 0, got -0.1"),
    ((X, 1, torch.tensor(torch.inf)), {}, ValueError, r"lam must be finite .* got inf"),
    ((X, 1, torch.ones(1, 2)), {}, ValueError, r"lam must be .* along dim 1\), got shape \(1, 2\)"),
    ((X, 1), {"p": 1.0}, ValueError, r"p must be finite and greater than 1, got 1.0"),
    ((X, 1), {"p": "2"}, TypeError, r"p must be a number, got '2'"),
    ((X.int(), 1), {}, TypeError, r"x must be a tensor of dtype float16.*, got int32"),
    ((X > 0, 1), {}, TypeError, r"x must be a tensor of dtype float16.*, got bool"),
    ((X.numpy(), 1), {}, TypeError, r"x must be a torch.Tensor, got ndarray of shape \(2, 3\)"),
    (([[1.0]], 1), {}, TypeError, r"x must be a torch.Tensor, got \[\[1.0\]\]"),
    ((X, 1), {"dim": 2}, ValueError, r"dim must be in \[-2, 2\) for x of shape \(2, 3\), got 2"),
    ((X, 1), {"dim": 0.0}, TypeError, r"dim must be an int, a tuple of ints or None, got 0.0"),
    ((X[0, 0], 1), {}, ValueError, r"x must have at least one dimension, got a scalar"),
    ((X[0, 0], 1), {"dim": None}, ValueError, r"x must have at least one dimension, got a scalar"),
]


@pytest.mark.parametrize("operator", FAMILY, ids=lambda f: f.__name__)
@pytest.mark.parametrize(("args", "options", "error", "message"), BAD)
def test_arguments_are_checked(operator, args, options, error, message):
    with pytest.raises(error, match=message):
        operator(*args, **options)


@pytest.mark.parametrize("operator", FAMILY[:4], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"solver": "bca"}, r"solver must be one of 'threshold', 'pav', 'dykstra', got 'bca'"),
        ({"solver": "dykstra", "p": 1.5}, r"p must be 2 for solver 'dykstra', got 1.5"),
        ({"solver": "pav", "solver_options": {"tol": 1.0}}, r"solver_options must be empty"),
        ({"solver_options": {"steps": 3}}, r"a key of solver_options must be one of"),
    ],
)
def test_solvers_are_checked(operator, options, message):
    with pytest.raises(ValueError, match=message):
        operator(X, 1, **options)


T = torch.tensor
CALLS = {
    "two-sided phi": (
        lambda: st.topk_value(X, 1, two_sided=True, phi="abs"),
        r"phi must be 'identity' when two_sided=True, got 'abs'",
    ),
    "unknown phi": (lambda: st.topk_value(X, 1, phi="square"), r"phi must be one of"),
    "two-sided magnitude": (
        lambda: st.topk_select(X, 1, two_sided=True, magnitude=True),
        r"two_sided must be False when magnitude=True",
    ),
    "capacity of a tensor k": (
        lambda: st.topk_select(X, T([[1], [2]])),
        r"capacity must be given when k is a tensor, got k of shape \(2, 1\)",
    ),
    "capacity above n": (
        lambda: st.topk_select(X, 1, capacity=4),
        r"capacity must be in \[1, 3\], got 4",
    ),
    "fractional of 0": (lambda: st.choose_lam(X, 1, 0), r"fractional must be at least 1, got 0"),
    "targets out of range": (
        lambda: st.topk_loss(X, T([0, 3]), 2),
        r"targets must be class indices in \[0, 3\), got 3",
    ),
    "shape of indices": (
        lambda: st.topk_loss(X, T([0, 1, 2]), 2),
        r"targets must have shape \(2,\) when they are class indices .*, got \(3,\)",
    ),
    "shape of weights": (
        lambda: st.topk_loss(X, T([0.5, 0.5]), 2),
        r"targets must have the shape of logits, \(2, 3\), got \(2,\)",
    ),
    "weights above 1": (
        lambda: st.topk_loss(X, 2 * torch.eye(3)[:2], 2),
        r"targets must be in \[0, 1\], got 2",
    ),
    "soft targets for best": (
        lambda: st.topk_loss(X, torch.full((2, 3), 0.3), 2, completion="best"),
        r"targets must be class indices or sets of labels .*'best', got soft targets",
    ),
    "too many labels": (
        lambda: st.topk_loss(X, torch.ones(2, 3), 2, completion="spread"),
        r"targets must have at most k labels .* got 3 for k=2",
    ),
    "unknown completion": (
        lambda: st.topk_loss(X, T([0, 1]), 2, completion="fill"),
        r"completion must be 'spread', 'best' or None, got 'fill'",
    ),
    "unknown reduction": (
        lambda: st.topk_loss(X, T([0, 1]), 2, reduction="average"),
        r"reduction must be one of 'mean', 'sum', 'none', got 'average'",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(name):
    call, message = CALLS[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_targets_must_be_tensors():
    with pytest.raises(TypeError, match=r"targets must be a tensor of integer class indices"):
        st.topk_loss(X, [0, 1], 2)
    with pytest.raises(TypeError, match=r"logits must be a tensor of dtype float16"):
        st.topk_loss(X.int(), T([0, 1]), 2)


def test_the_operator_and_the_plain_solver_agree():
    x, k = gaussian(4, 40), torch.full((4, 1), 5.5, dtype=F64)
    for op, e in ((MASK, 3.0), (MAGNITUDE, 1.0), (SIGN, 2.0)):
        # each has a pivot of its own: what must agree is the threshold
        states = ops.threshold(x, k, 0.1 * k, op, e), vectorized.state_of(x, k, 0.1 * k, op, e)
        v = [pivot - 0.1 * k[:, 0] * delta for pivot, delta in (state.T for state in states)]
        torch.testing.assert_close(*v)


def test_magnitudes_of_zeros():
    """One of several zeros has no slope unless all are selected; see the NumPy test of the same."""
    jacobian = lambda x, k, **o: torch.func.jacrev(lambda x: st.topk_mag(x, k, 0.5, **o))(x)  # noqa: E731
    x = torch.tensor([0.0, 1.0, -2.0], dtype=F64)
    torch.testing.assert_close(jacobian(x, 3), torch.eye(3, dtype=F64))
    torch.testing.assert_close(jacobian(x, 3, debias=False), torch.eye(3, dtype=F64) / 1.5)
    x = torch.tensor([0.0, 3.0, 0.0, 0.0], dtype=F64)
    torch.testing.assert_close(jacobian(x, 2), torch.diag(torch.tensor([0.0, 1, 0, 0], dtype=F64)))
    x = torch.tensor([0.0, 0.1], dtype=F64)
    in_x = torch.func.jacrev(lambda x: st.topk_sign(x, 2, 1.0))(x)
    torch.testing.assert_close(in_x, torch.eye(2, dtype=F64))


@pytest.mark.parametrize("case", MAGNITUDES, ids=str)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_infinities_make_rows_nan_for_magnitudes(case: Case, bad):
    x = gaussian(3, 5)
    x[1, 2] = bad
    y = case.function(st)(x, 2, 0.3)
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()
