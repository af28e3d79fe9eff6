"""``soft_sort`` and ``soft_rank`` of rows with padding: the entries that are there, and nothing else."""

from functools import cache

import numpy as np
import pytest

import sparsetopk

M, N = 600, 9
_rng = np.random.default_rng(0)
X = _rng.normal(size=(M, N)) * 10.0 ** _rng.integers(-2, 3, size=(M, 1))
X[_rng.random((M, N)) < _rng.choice([0.0, 0.3, 0.8], size=(M, 1))] = -np.inf
X[:3] = -np.inf
THERE = ~np.isneginf(X)
LAM = _rng.choice([0.0, 0.1, 3.0, 1e3], size=(M, 1))
DY = _rng.normal(size=(M, N))
SETTINGS = [(2.0, True), (1.5, False), (3.0, True)]


@cache
def alone(name, p, descending):
    """Every row without its padding: values and cotangents, NaN elsewhere."""
    rank = name == "soft_rank"
    y, dx, dlam = np.full((M, N), np.nan), np.zeros((M, N)), np.zeros((M, 1))
    for i, there in enumerate(THERE):
        places = there if rank else np.arange(N) < there.sum()
        at, options = (X[i, there], LAM[i, 0]), {"p": p, "descending": descending}
        y[i, places] = getattr(sparsetopk, name)(*at, **options)
        found = getattr(sparsetopk, name + "_vjp")(*at, dy=DY[i, places], **options)
        dx[i, there], dlam[i] = found
    return y, dx, dlam


@pytest.mark.parametrize(("p", "descending"), SETTINGS)
@pytest.mark.parametrize("name", ["soft_sort", "soft_rank"])
def test_in_numpy(name, p, descending):
    options = {"p": p, "descending": descending}
    y, dx, dlam = alone(name, p, descending)
    found = getattr(sparsetopk, name)(X, LAM, **options)
    known = ~np.isnan(y)
    np.testing.assert_allclose(found[known], y[known], rtol=1e-12, atol=1e-12)
    check_padding(name, found, 1e-12)
    pulled = getattr(sparsetopk, name + "_vjp")(X, LAM, dy=np.where(known, DY, 0.0), **options)
    np.testing.assert_allclose(pulled.x, dx, rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(pulled.lam, dlam, rtol=1e-9, atol=1e-9)
    along = _rng.normal(size=(M, N))
    jacobian = getattr(sparsetopk, name + "_jacobian")(X, LAM, **options)
    moved = getattr(sparsetopk, name + "_jvp")(X, LAM, dx=along, **options)
    np.testing.assert_allclose(np.einsum("mij,mj->mi", jacobian, along), moved, atol=1e-9)
    np.testing.assert_allclose((DY * moved)[known].sum(), (dx * along).sum(), rtol=1e-9)
    assert (jacobian.swapaxes(1, 2)[~THERE] == 0).all()


def check_padding(name, y, atol):
    """It comes last: -inf in a sort; in a rank it shares, or has, the ranks that are left."""
    count = THERE.sum(axis=1, keepdims=True)
    if name == "soft_sort":
        np.testing.assert_array_equal(y == -np.inf, np.arange(N) >= count)
        return
    last = np.broadcast_to((count + 1 + N) / 2, (M, N))
    soft = ~THERE & (LAM > 0)
    np.testing.assert_allclose(y[soft], last[soft], atol=atol)
    assert (np.where(~THERE, y, np.inf).min(axis=1, keepdims=True) > count).all()


@pytest.mark.parametrize(("p", "descending"), SETTINGS)
@pytest.mark.parametrize("name", ["soft_sort", "soft_rank"])
@pytest.mark.parametrize("compiled", [False, True])
def test_in_torch(name, p, descending, compiled):
    torch = pytest.importorskip("torch")
    import sparsetopk.torch as st

    expected, dx, dlam = alone(name, p, descending)
    known = ~np.isnan(expected)
    f = lambda x, lam: getattr(st, name)(x, lam, p=p, descending=descending)  # noqa: E731
    if compiled:
        torch._dynamo.reset()
        f = torch.compile(f, backend="aot_eager", fullgraph=True)
    x, lam = (torch.tensor(v, requires_grad=True) for v in (X, LAM))
    y = f(x, lam)
    y.backward(torch.from_numpy(np.where(known, DY, 0.0)))
    found = y.detach().numpy()
    np.testing.assert_allclose(found[known], expected[known], rtol=1e-11, atol=1e-11)
    check_padding(name, found, 1e-11)
    np.testing.assert_allclose(x.grad.numpy(), dx, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(lam.grad.numpy(), dlam, rtol=1e-8, atol=1e-8)


# XLA operations take long to compile.
WAYS = [(*SETTINGS[0], "core"), (*SETTINGS[1], "core"), (*SETTINGS[0], "XLA operations")]


@pytest.mark.parametrize(("p", "descending", "way"), WAYS, indirect=["way"])
@pytest.mark.parametrize("name", ["soft_sort", "soft_rank"])
def test_in_jax(name, p, descending, way):
    jax = pytest.importorskip("jax")
    import sparsetopk.jax as sj

    expected, dx, dlam = alone(name, p, descending)
    known = ~np.isnan(expected)

    @jax.jit
    def value_and_slope(x, lam):
        f = lambda x, lam: getattr(sj, name)(x, lam, p=p, descending=descending)  # noqa: E731
        y, pull = jax.vjp(f, x, lam)
        return y, *pull(jax.numpy.asarray(np.where(known, DY, 0.0)))

    y, *found = map(np.asarray, value_and_slope(X, LAM))
    np.testing.assert_allclose(y[known], expected[known], rtol=1e-11, atol=1e-11)
    check_padding(name, y, 1e-11)
    np.testing.assert_allclose(found[0], dx, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found[1], dlam, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("solver", ["dykstra", "bca"])
def test_other_solvers(solver):
    soft = LAM[:, 0] == 3.0
    y = sparsetopk.soft_rank(X[soft], 3.0)
    found = sparsetopk.soft_rank(X[soft], 3.0, solver=solver)
    np.testing.assert_allclose(found, y, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_low_precision(dtype):
    x = np.array([0.5, -np.inf, 2.0, -3.0], dtype)
    np.testing.assert_allclose(sparsetopk.soft_rank(x, 0.5), [2, 4, 1, 3], atol=1e-2)
    assert sparsetopk.soft_rank(x, 0.5).dtype == dtype
    np.testing.assert_array_equal(sparsetopk.soft_sort(x, 0.0)[3], -np.inf)
    assert np.isnan(sparsetopk.soft_rank([0.5, np.inf, -np.inf], 0.5)).all()
