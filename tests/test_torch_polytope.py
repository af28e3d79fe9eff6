"""The permutahedron, sorting, ranking and the norms on tensors: NumPy's values, and every transform."""

import numpy as np
import pytest

import sparsetopk
from cases import PS

torch = pytest.importorskip("torch")

from sparsetopk import torch as st
from sparsetopk.torch._fused import isotonic as fused_isotonic

# Parts of torch still use what it deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")

PHI_NAMES = ("identity", "half_square", "abs", "exp")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LAMS = (0.0, 1e-3, 0.3, 3.0, 1e3)
# A name, the function of x, w and lam, and whether w is an argument of it.
OPERATORS = {
    "soft_sort": lambda module, x, w, lam, **options: module.soft_sort(x, lam, **options),
    "soft_rank": lambda module, x, w, lam, **options: module.soft_rank(x, lam, **options),
    "permutahedron": lambda module, x, w, lam, **options: module.permutahedron(
        x, w, lam, **options
    ),
}
SETTINGS = [
    *[("soft_rank", {"p": p}) for p in (2.0, 1.5)],
    *[("soft_sort", {"p": p}) for p in (2.0, 4 / 3)],
    *[("permutahedron", {"p": p, "phi": phi}) for phi in PHI_NAMES for p in (2.0, 1.5, 1.2)],
    ("permutahedron", {"p": 2.0, "phi": "half_square", "solver": "dykstra"}),
]
NAMES = [
    f"{name}({', '.join(f'{key}={str(value)[:6]}' for key, value in options.items())})"
    for name, options in SETTINGS
]


def tensors(dtype=torch.float64, shape=(3, 7)):
    """x and w away from ties and zeros, so that no derivative is taken at a kink."""
    rng = np.random.default_rng(7)
    x, w = rng.normal(size=shape), rng.uniform(0.1, 2.0, size=shape[-1])
    return torch.tensor(x, dtype=dtype), torch.tensor(w, dtype=dtype)


def close(tensor, array, dtype, slack=1.0):
    """Equal up to one rounding to the dtype of what is computed in float64."""
    eps = max(torch.finfo(dtype).eps, 1e-11) * slack
    array = np.asarray(array, dtype=np.float64)
    np.testing.assert_allclose(tensor.detach().double().numpy(), array, rtol=eps, atol=eps)


@pytest.fixture(params=["fused", "ordinary operations"])
def way(request, monkeypatch):
    if request.param != "fused":
        monkeypatch.setattr(fused_isotonic, "native", None)
    return request.param


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", PS)
@pytest.mark.parametrize("name", OPERATORS)
def test_values_are_those_of_numpy(name, p, dtype, way):
    x, w = tensors(dtype)
    x_, w_ = x.double().numpy(), w.double().numpy()
    for lam in LAMS:
        y = OPERATORS[name](st, x, w, lam, p=p)
        assert y.dtype == dtype
        close(y, OPERATORS[name](sparsetopk, x_, w_, lam, p=p), dtype)


@pytest.mark.parametrize("name", ["soft_sort", "soft_rank"])
def test_both_directions(name):
    x, _ = tensors()
    for descending in (True, False):
        y = getattr(st, name)(x, 0.3, descending=descending)
        close(y, getattr(sparsetopk, name)(x.numpy(), 0.3, descending=descending), x.dtype)


@pytest.mark.parametrize("phi", PHI_NAMES)
@pytest.mark.parametrize("p", PS)
def test_every_phi(phi, p):
    x, w = tensors()
    for lam in LAMS:
        y = st.permutahedron(x, w, lam, p=p, phi=phi)
        close(y, sparsetopk.permutahedron(x.numpy(), w.numpy(), lam, p=p, phi=phi), x.dtype)
        value = st.permutahedron_value(x, w, lam, p=p, phi=phi)
        expected = sparsetopk.permutahedron_value(x.numpy(), w.numpy(), lam, p=p, phi=phi)
        close(value, expected, x.dtype)


@pytest.mark.parametrize("phi", PHI_NAMES)
@pytest.mark.parametrize("p", PS)
def test_cotangents_are_those_of_numpy(phi, p, way):
    x, w = (t.requires_grad_() for t in tensors())
    g = torch.tensor(np.random.default_rng(1).normal(size=x.shape))
    for number in LAMS:
        lam = torch.tensor(number, dtype=torch.float64, requires_grad=True)
        y = st.permutahedron(x, w, lam, p=p, phi=phi)
        found = torch.autograd.grad(y, (x, w, lam), g)
        arrays = (t.detach().numpy() for t in (x, w, lam))
        expected = sparsetopk.permutahedron_vjp(*arrays, dy=g.numpy(), p=p, phi=phi)
        for mine, numpys in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, numpys, rtol=1e-7, atol=1e-9)


def test_cotangents_in_low_precision(way):
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x, w = (t.requires_grad_() for t in tensors(dtype))
        g = torch.ones_like(x) * torch.arange(7, dtype=dtype)
        found = torch.autograd.grad(st.permutahedron(x, w, 0.5, p=1.5), (x, w), g)
        arrays = (t.detach().double().numpy() for t in (x, w))
        expected = sparsetopk.permutahedron_vjp(*arrays, 0.5, dy=g.double().numpy(), p=1.5)
        for mine, numpys in zip(found, expected, strict=False):
            assert mine.dtype == dtype
            close(mine, numpys, dtype, slack=10.0)


@pytest.mark.parametrize("f", [st.permutahedron, st.permutahedron_value], ids=["y", "value"])
@pytest.mark.parametrize("phi", PHI_NAMES)
@pytest.mark.parametrize("p", [2.0, 1.5, 4 / 3, 1.2])
def test_gradcheck(phi, p, f):
    x, w = (t.requires_grad_() for t in tensors(shape=(2, 4)))
    lam = torch.tensor([[0.3], [3.0]], dtype=torch.float64, requires_grad=True)

    def at(x, w, lam):
        return f(x, w, lam, p=p, phi=phi)

    # Entry by entry for p = 2, along random directions for the others, which go the same way.
    assert torch.autograd.gradcheck(at, (x, w, lam), check_forward_ad=True, fast_mode=p != 2)
    assert torch.autograd.gradgradcheck(at, (x, w, lam), check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.parametrize("name", ["soft_sort", "soft_rank"])
@pytest.mark.parametrize("p", [2.0, 4 / 3])
def test_gradcheck_of_sorting(name, p):
    x = tensors(shape=(2, 4))[0].requires_grad_()
    lam = torch.tensor([[0.3], [3.0]], dtype=torch.float64, requires_grad=True)

    def at(x, lam):
        return getattr(st, name)(x, lam, p=p)

    assert torch.autograd.gradcheck(at, (x, lam), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(at, (x, lam), check_fwd_over_rev=True)


@pytest.mark.parametrize("p", PS)
@pytest.mark.parametrize("phi", PHI_NAMES)
def test_the_gradient_of_the_value_is_the_operator(phi, p):
    x, w = tensors()
    x.requires_grad_()
    for lam in LAMS[1:]:
        value = st.permutahedron_value(x, w, lam, p=p, phi=phi)
        (gradient,) = torch.autograd.grad(value.sum(), x)
        y = st.permutahedron(x, w, lam, p=p, phi=phi).detach()
        torch.testing.assert_close(gradient, y, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("p", [2.0, 1.5, 4 / 3, 3.0])
@pytest.mark.parametrize("phi", PHI_NAMES)
def test_second_derivatives_of_the_value_without_weight(phi, p):
    """Where w = 0 the threshold of an entry is the entry, and moves with it."""
    x = torch.tensor([2.0, 1.0, 0.3, -0.5], dtype=torch.float64)
    w = torch.tensor([1.0, 0.5, 0.0, 0.0], dtype=torch.float64)

    def gradient(x):
        return torch.func.grad(lambda w: st.permutahedron_value(x, w, 0.5, p=p, phi=phi))(w)

    step = 1e-6 * torch.eye(4, dtype=torch.float64)
    differences = [(gradient(x + e) - gradient(x - e)) / 2e-6 for e in step]
    close(torch.func.jacrev(gradient)(x), torch.stack(differences, -1).numpy(), torch.float32)


@pytest.mark.parametrize(("name", "options"), SETTINGS, ids=NAMES)
def test_transforms(name, options):
    """torch.func against the Jacobian by autograd, row by row."""
    x, w = tensors()

    def f(x):
        return OPERATORS[name](st, x, w, 0.7, **options)

    def scalar(x):
        return (f(x) * torch.arange(1.0, 8.0, dtype=x.dtype)).sum()

    rows = [torch.autograd.functional.jacobian(f, row) for row in x]
    expected = torch.stack(rows)
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(torch.vmap(transform(f))(x), expected)
        torch.testing.assert_close(transform(f)(x[0]), expected[0])
    torch.testing.assert_close(torch.vmap(f)(x), f(x))
    torch.testing.assert_close(torch.vmap(f, in_dims=1, out_dims=1)(x.T.contiguous()), f(x).T)
    weights = torch.arange(1.0, 8.0, dtype=x.dtype)
    torch.testing.assert_close(torch.vmap(torch.func.grad(scalar))(x), weights @ expected)
    _, tangent = torch.func.jvp(f, (x[0],), (weights,))
    torch.testing.assert_close(tangent, expected[0] @ weights)
    hessian = torch.func.hessian(scalar)(x[0])
    torch.testing.assert_close(hessian, torch.autograd.functional.hessian(scalar, x[0]))
    if options["p"] == 1.5 and name == "soft_rank":
        assert hessian.abs().max() > 1e-3  # it would be 0 for p = 2


def test_vmap_over_w_and_lam():
    x, w = tensors()
    lams = torch.tensor([0.1, 1.0, 10.0], dtype=torch.float64)
    many = torch.vmap(lambda w, lam: st.permutahedron(x, w, lam))(
        torch.stack([w, 2 * w, w - 1]), lams
    )
    for y, w_, lam in zip(many, (w, 2 * w, w - 1), lams, strict=True):
        torch.testing.assert_close(y, st.permutahedron(x, w_, lam))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "backend"),
    [
        (*SETTINGS[0], "inductor"),
        *((*SETTINGS[i], "aot_eager") for i in (3, 7, 9, 12)),  # which compiles no C++
        (*SETTINGS[-1], "inductor"),
    ],
    ids=str,
)
def test_compile(name, options, backend):
    x, w = (t.requires_grad_() for t in tensors())

    def f(x, w, lam):
        return OPERATORS[name](st, x, w, lam, **options)

    lam = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    expected = f(x, w, lam)
    y = torch.compile(f, fullgraph=True, backend=backend)(x, w, lam)
    torch.testing.assert_close(y, expected)
    g = torch.randn_like(x)
    inputs = (x, lam) if name != "permutahedron" else (x, w, lam)
    for mine, plain in zip(
        torch.autograd.grad(y, inputs, g), torch.autograd.grad(expected, inputs, g), strict=True
    ):
        torch.testing.assert_close(mine, plain)


def test_export():
    class Rank(torch.nn.Module):
        def forward(self, x):
            return st.soft_rank(x, 0.3, p=1.5)

    x, _ = tensors(torch.float32)
    program = torch.export.export(Rank(), (x,))
    torch.testing.assert_close(program.module()(x), st.soft_rank(x, 0.3, p=1.5))


@pytest.mark.parametrize("phi", range(3))
def test_opcheck(phi):
    x, w = tensors()
    lam = torch.ones(3, 1, dtype=torch.float64)
    for weights in (w.reshape(1, -1), w.expand(3, -1)):
        arguments = (x.abs(), weights, lam, phi)
        torch.library.opcheck(torch.ops.sparsetopk.pav, (*arguments, 2.0))
        torch.library.opcheck(torch.ops.sparsetopk.dykstra, (*arguments, 1e-9, 50, False))


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("dim", [0, 1, 2, -2])
def test_every_dimension_and_layout(name, dim):
    x = torch.tensor(np.random.default_rng(3).normal(size=(3, 4, 5)))
    n = x.shape[dim]
    w = torch.linspace(2.0, -1.0, n, dtype=torch.float64)
    for layout in (x, x.transpose(0, 2).contiguous().transpose(0, 2), x.expand(3, 4, 5)[:, :, :]):
        y = OPERATORS[name](st, layout, w, 0.5, dim=dim)
        close(y, OPERATORS[name](sparsetopk, x.numpy(), w.numpy(), 0.5, axis=dim), x.dtype)


def test_weights_that_broadcast(way):
    x = torch.tensor(np.random.default_rng(3).normal(size=(2, 3, 4)), requires_grad=True)
    g = torch.tensor(np.random.default_rng(4).normal(size=(2, 3, 4)))
    for shape in ((4,), (3, 4), (1, 4), (2, 1, 4), (2, 3, 4)):
        w = torch.tensor(np.random.default_rng(5).normal(size=shape), requires_grad=True)
        y = st.permutahedron(x, w, 0.8)
        arrays = x.detach().numpy(), w.detach().numpy()
        close(y, sparsetopk.permutahedron(*arrays, 0.8), x.dtype)
        found = torch.autograd.grad(y, (x, w), g)
        expected = sparsetopk.permutahedron_vjp(*arrays, 0.8, dy=g.numpy())
        close(found[0], expected.x, x.dtype)
        close(found[1], expected.w, x.dtype)


@pytest.mark.parametrize("name", OPERATORS)
def test_lam_per_row_and_hard_rows(name, way):
    x, w = tensors()
    x.requires_grad_()
    lam = torch.tensor([[0.0], [0.5], [0.0]], dtype=torch.float64, requires_grad=True)
    y = OPERATORS[name](st, x, w, lam)
    expected = OPERATORS[name](sparsetopk, x.detach().numpy(), w.numpy(), lam.detach().numpy())
    close(y, expected, x.dtype)
    for part in torch.autograd.grad(y.sum(), (x, lam)):
        assert part.isfinite().all()


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        (name, bad)
        for name in OPERATORS
        for bad in (torch.nan, torch.inf, -torch.inf)
        # which is padding where entries are sorted or ranked
        if not (bad == -torch.inf and name in ("soft_sort", "soft_rank"))
    ],
)
def test_rows_that_are_not_finite(name, bad):
    x, w = tensors()
    spoilt = x.clone()
    spoilt[1, 2] = bad
    y = OPERATORS[name](st, spoilt.requires_grad_(), w, 0.5)
    assert y[1].isnan().all()
    torch.testing.assert_close(y[[0, 2]].detach(), OPERATORS[name](st, x, w, 0.5)[[0, 2]])
    (dx,) = torch.autograd.grad(y, spoilt, torch.ones_like(x))
    assert dx[[0, 2]].isfinite().all()
    assert dx[1].isnan().all()


def test_a_lam_that_cannot_be_read_makes_its_rows_nan():
    x, _ = tensors()
    lam = torch.tensor([[0.5], [-1.0], [torch.inf]], dtype=torch.float64)
    y = torch.vmap(st.soft_rank)(x, lam)
    np.testing.assert_array_equal(y.isnan().all(dim=-1), [False, True, True])
    assert y[0].isfinite().all()


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0,)])
def test_empty(shape):
    x = torch.zeros(shape, requires_grad=True)
    w = torch.zeros(shape[-1])
    for f in (st.soft_sort, st.soft_rank, lambda x: st.permutahedron(x, w)):
        assert f(x).shape == shape
    value = st.permutahedron_value(x, w)
    assert value.shape == shape[:-1]
    (value.sum() + st.soft_rank(x).sum()).backward()
    assert x.grad.shape == shape
    assert st.half_sq_support_norm(x, 0).shape == shape[:-1]


@pytest.mark.parametrize("name", OPERATORS)
def test_meta(name):
    x = torch.empty(3, 7, device="meta", dtype=torch.bfloat16)
    y = OPERATORS[name](st, x, torch.empty(7, device="meta"), 0.5)
    assert y.is_meta
    assert y.shape == x.shape
    assert y.dtype == x.dtype


@pytest.mark.parametrize("lam", [1e-8, 1e8])
@pytest.mark.parametrize("p", [2.0, 1.5, 4 / 3, 3.0])
def test_extreme_lam_and_shift(lam, p, way):
    x = torch.tensor(np.random.default_rng(0).normal(size=(2, 300)) + 1e5, requires_grad=True)
    for name in ("soft_sort", "soft_rank"):
        y = getattr(st, name)(x, lam, p=p)
        expected = getattr(sparsetopk, name)(x.detach().numpy(), lam, p=p)
        np.testing.assert_allclose(y.detach(), expected, rtol=1e-10)
        (dx,) = torch.autograd.grad(y, x, torch.arange(300.0, dtype=torch.float64).expand(2, -1))
        assert dx.isfinite().all()


def test_tiny_lam_in_low_precision_has_finite_slopes(way):
    for dtype in DTYPES:
        x = torch.tensor([0.3, 0.3, 0.3, -1.0], dtype=dtype, requires_grad=True)
        (dx,) = torch.autograd.grad(st.soft_rank(x, 1e-45)[0], x)
        assert dx.isfinite().all()


def test_ties_share_and_their_blocks_carry_the_slope(way):
    x = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64, requires_grad=True)
    y = st.soft_rank(x, 0.1)
    close(y, [1.5, 1.5, 3.0], x.dtype)
    (dx,) = torch.autograd.grad(y[0], x)
    close(dx, [-5.0, 5.0, 0.0], x.dtype)


def test_flat_blocks_give_no_nan(way):
    """p < 2, tied entries whose weights cancel: nothing moves with x, and w is shared."""
    x = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    w = torch.tensor([1.0, -1.0], dtype=torch.float64, requires_grad=True)
    y = st.permutahedron(x, w, 1.0, p=1.5)
    dx, dw = torch.autograd.grad(y[0], (x, w))
    close(dx, [0.0, 0.0], x.dtype)
    close(dw, [0.5, 0.5], x.dtype)


@pytest.mark.parametrize("phi", PHI_NAMES[:3])
def test_dykstra_equals_pav(phi):
    x, w = (t.requires_grad_() for t in tensors())
    g = torch.ones_like(x) * torch.arange(7.0, dtype=x.dtype)
    for lam in (0.1, 2.0):
        exact = st.permutahedron(x, w, lam, phi=phi)
        y = st.permutahedron(x, w, lam, phi=phi, solver="dykstra")
        torch.testing.assert_close(y, exact, rtol=1e-8, atol=1e-8)
        for mine, pavs in zip(
            torch.autograd.grad(y, (x, w), g), torch.autograd.grad(exact, (x, w), g), strict=True
        ):
            torch.testing.assert_close(mine, pavs, rtol=1e-6, atol=1e-6)


def test_dykstra_keeps_its_rule():
    x = torch.tensor(np.random.default_rng(0).normal(size=(2, 40)))
    numpys = sparsetopk.soft_rank(x.numpy(), 10.0, solver="dykstra", solver_options={"max_iter": 5})
    close(st.soft_rank(x, 10.0, solver="dykstra", solver_options={"max_iter": 5}), numpys, x.dtype)
    options = {"solver": "dykstra", "solver_options": {"max_iter": 5, "tol": 1e-12}}
    with pytest.raises(sparsetopk.ConvergenceError, match="solver 'dykstra' still has a residual"):
        st.soft_rank(x, 10.0, **options)
    assert torch.vmap(lambda x: st.soft_rank(x, 10.0, **options))(x).isnan().all()


def test_without_the_compiled_core(monkeypatch):
    x, w = tensors()
    expected = [st.permutahedron(x, w, 0.5, p=p, phi=phi) for p in PS for phi in PHI_NAMES]
    for module in (
        "sparsetopk._numpy.pav",
        "sparsetopk._numpy.hard",
        "sparsetopk.torch._solvers.pav",
    ):
        monkeypatch.setattr(f"{module}.native", None)
    monkeypatch.setattr(fused_isotonic, "native", None)
    found = [st.permutahedron(x, w, 0.5, p=p, phi=phi) for p in PS for phi in PHI_NAMES]
    torch.testing.assert_close(found, expected)


def test_long_rows(way):
    """Longer than the short rows that are sorted by comparing."""
    x = torch.tensor(np.random.default_rng(0).normal(size=(2, 5000)), dtype=torch.float32)
    x.requires_grad_()
    for lam in (1e-3, 1.0):
        y = st.soft_rank(x, lam)
        numpys = sparsetopk.soft_rank(x.detach().double().numpy(), lam)
        close(y, numpys, torch.float32)
        g = torch.tensor(np.random.default_rng(1).normal(size=x.shape), dtype=torch.float32)
        (dx,) = torch.autograd.grad(y, x, g)
        arrays = x.detach().double().numpy(), lam
        expected = sparsetopk.soft_rank_vjp(*arrays, dy=g.double().numpy()).x
        scale = np.abs(expected).max()
        np.testing.assert_allclose(dx / scale, expected / scale, atol=1e-6)


@pytest.mark.parametrize("k", [0, 0.4, 1, 2.5, 3, 7])
def test_norms_are_those_of_numpy(k):
    rng = np.random.default_rng(0)
    for y in (rng.normal(size=(5, 7)), np.round(rng.normal(size=(5, 7))), np.zeros((5, 7))):
        tensor = torch.tensor(y)
        close(
            st.half_sq_support_norm(tensor, k), sparsetopk.half_sq_support_norm(y, k), tensor.dtype
        )
        for values in (y, np.abs(y)):
            found = st.support_negentropy(torch.tensor(values), k)
            close(found, sparsetopk.support_negentropy(values, k), tensor.dtype)
        w = np.linspace(2.0, 0.0, 7)
        close(st.owl_norm(tensor, torch.tensor(w)), sparsetopk.owl_norm(y, w), tensor.dtype)


def test_gradcheck_of_norms():
    y = tensors()[0].requires_grad_()
    k = torch.tensor(2.3, dtype=torch.float64, requires_grad=True)
    w = torch.linspace(2.0, 0.1, 7, dtype=torch.float64, requires_grad=True)
    for f in (st.half_sq_support_norm, lambda y, k: st.support_negentropy(y.abs(), k)):
        assert torch.autograd.gradcheck(f, (y, k), check_forward_ad=True)
        assert torch.autograd.gradgradcheck(f, (y, k))
    assert torch.autograd.gradcheck(st.owl_norm, (y, w), check_forward_ad=True)


def test_norms_where_nothing_is_finite():
    y = torch.tensor([[1.0, torch.nan, 0.0], [1.0, torch.inf, 0.0], [1.0, 0.5, 0.0]])
    for f in (st.half_sq_support_norm, st.support_negentropy):
        value = f(y, 2)
        assert value[0].isnan()
        assert value[1] == torch.inf
        assert value[2].isfinite()
    zero = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(st.support_negentropy(zero, 2), zero)
    assert gradient.isfinite().all()


def test_errors_name_the_argument():
    x, w = tensors()
    with pytest.raises(TypeError, match=r"w must be a tensor of real numbers, got list"):
        st.permutahedron(x, [1.0, 2.0])
    with pytest.raises(ValueError, match=r"w must have length n=7 along dim 1 .* got shape \(6,\)"):
        st.permutahedron(x, w[:6])
    with pytest.raises(ValueError, match=r"w must be nonnegative unless phi='identity', got -1"):
        st.permutahedron(x, torch.full((7,), -1.0), phi="abs")
    with pytest.raises(ValueError, match=r"lam must be finite and at least 0, got -1"):
        st.soft_rank(x, -1.0)
    with pytest.raises(ValueError, match="solver must be one of 'pav', 'dykstra', got 'bca'"):
        st.soft_sort(x, solver="bca")
    with pytest.raises(ValueError, match="p must be 2 for solver 'dykstra'"):
        st.soft_sort(x, p=1.5, solver="dykstra")
    with pytest.raises(ValueError, match=r"dim must be in \[-2, 2\)"):
        st.soft_rank(x, dim=2)
    with pytest.raises(TypeError, match=r"x must be a tensor of dtype .* got int64"):
        st.soft_rank(torch.arange(3))


def _sorted_ways(n):
    """Rows that the sort goes about differently: in any order, with ties, close together, in order."""
    torch.manual_seed(n)
    x = torch.randn(n)
    return {
        "normal": x,
        "ties": (2 * x).round(),
        "close": 1 + x.abs() / 1e5,
        "mostly 0": x.relu() * (x > 1),
        "in order": x.sort(descending=True).values,
    }


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 1023, 1024, 1025, 32767, 32768, 70001])
def test_rows_of_any_length_are_those_of_float64_on_any_number_of_threads(n):
    """At the lengths where the sort changes; all threads sort a single row, one each several."""
    x = torch.stack(list(_sorted_ways(n).values()))
    lam = torch.tensor([[0.01], [10.0], [1e-3], [1.0], [float(n)]])
    g = torch.randn(x.shape)
    calls = {
        "rank": lambda x: st.soft_rank(x, lam.to(x.dtype)),
        "sort": lambda x: st.soft_sort(x, lam.to(x.dtype)),
        "program": lambda x: st.permutahedron(x, x[0].detach(), lam.to(x.dtype)),
    }

    def run(f, x):
        x = x.clone().requires_grad_()
        y = f(x)
        return y.detach(), torch.autograd.grad(y, x, g.to(x.dtype))[0]

    def rows_alone(name, x):
        f = {"rank": st.soft_rank, "sort": st.soft_sort}[name]
        return torch.cat([f(x[i : i + 1], lam[i : i + 1]) for i in range(len(x))])

    before = torch.get_num_threads()
    try:
        for name, f in calls.items():
            torch.set_num_threads(1)
            y, dx = run(f, x)
            exact, exact_dx = run(f, x.double())
            unit = 2 * torch.finfo(torch.float32).eps
            torch.testing.assert_close(
                y.double(), exact, rtol=unit, atol=unit * x.abs().max().item()
            )
            scale = (unit * g.abs().max() / lam).double()
            assert ((dx - exact_dx).abs() <= scale + unit * exact_dx.abs()).all(), name
            torch.set_num_threads(2)
            again, again_dx = run(f, x)
            assert torch.equal(y, again), name
            assert torch.equal(dx, again_dx), name
            if name != "program":
                assert torch.equal(y, rows_alone(name, x)), name
    finally:
        torch.set_num_threads(before)
