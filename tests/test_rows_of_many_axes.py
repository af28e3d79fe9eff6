"""``axis`` as a tuple or None, ``where`` and ``largest``: each is an operator on an array made anew."""

import numpy as np
import pytest

import sparsetopk

M, A, B = 40, 3, 5
_rng = np.random.default_rng(0)
X = _rng.normal(size=(A, M, B))
WHERE = _rng.random((A, M, B)) < 0.7
K, LAM = _rng.choice([2.0, 3.5, 0.0], size=(1, M, 1)), _rng.choice([0.0, 0.3], size=(1, M, 1))
DY = _rng.normal(size=X.shape)
OPERATORS = {
    "topk_mask": {},
    "topk": {"p": 1.5, "two_sided": True},
    "topk_mag": {},
    "topk_sign": {"p": 1.5},
}
HERE = ["numpy", "torch", "jax"]


def turned(x):
    """The rows of axes (2, 0), as (M, B A)."""
    return x.transpose(1, 2, 0).reshape(x.shape[1], -1)


def back(rows):
    return rows.reshape(M, B, A).transpose(2, 0, 1)


@pytest.mark.parametrize("st", HERE, indirect=True)
@pytest.mark.parametrize("name", OPERATORS)
def test_axes_where_and_largest(st, name):
    options = OPERATORS[name]
    smallest = {"largest": False} if name in ("topk_mask", "topk") else {}
    sign = -1.0 if smallest else 1.0
    # What is absent holds anything.
    x = np.where(WHERE, X, np.nan)
    y = getattr(st, name)(x, K, LAM, axis=(2, 0), where=WHERE, **smallest, **options)
    absent = 0.0 if name in ("topk_mag", "topk_sign") else -np.inf
    scores = turned(np.where(WHERE, sign * X, absent))
    at = (scores, turned(K), turned(LAM))
    plain = getattr(sparsetopk, name)(*at, **options)
    times = sign if name == "topk" else 1.0
    np.testing.assert_allclose(y, times * back(plain), rtol=1e-12, atol=1e-12)
    assert (y[~WHERE] == 0).all()
    dx, dk, dlam = getattr(st, name + "_vjp")(
        x, K, LAM, dy=DY, axis=(2, 0), where=WHERE, **smallest, **options
    )
    expected = getattr(sparsetopk, name + "_vjp")(*at, dy=times * turned(DY), **options)
    np.testing.assert_allclose(dx, np.where(WHERE, sign * back(expected.x), 0), atol=1e-11)
    np.testing.assert_allclose(turned(dk), expected.k, atol=1e-11)
    np.testing.assert_allclose(turned(dlam), expected.lam, atol=1e-10)
    along = (DY * WHERE, np.cos(K), np.sin(LAM))
    tangents = dict(zip(("dx", "dk", "dlam"), along, strict=True))
    moved = getattr(st, name + "_jvp")(
        x, K, LAM, **tangents, axis=(2, 0), where=WHERE, **smallest, **options
    )
    pulled = sum((v * t).sum() for v, t in zip((dx, dk, dlam), along, strict=True))
    np.testing.assert_allclose((DY * moved).sum(), pulled, rtol=1e-9)


@pytest.mark.parametrize("st", HERE, indirect=True)
def test_all_axes(st):
    y = st.topk_mask(X, 30, 0.3, axis=None)
    np.testing.assert_allclose(y.ravel(), sparsetopk.topk_mask(X.ravel(), 30, 0.3), atol=1e-14)
    np.testing.assert_allclose(y, st.topk_mask(X, 30, 0.3, axis=(0, 1, 2)))
    value = st.topk_value(X, 30, 0.3, axis=None)
    np.testing.assert_allclose(value, sparsetopk.topk_value(X.ravel(), 30, 0.3))
    np.testing.assert_allclose(
        st.topk_value(X, K, 0.3, axis=(2, 0)), sparsetopk.topk_value(turned(X), turned(K), 0.3)
    )
    values, indices, dropped = st.topk_select(X, 30, 0.1, axis=None, capacity=50)
    assert values.shape == (50,)
    assert dropped == 0
    np.testing.assert_allclose(values, st.topk_mask(X, 30, 0.1, axis=None).ravel()[indices])
    lam = st.choose_lam(X, 30, axis=None)
    assert lam.shape == (1, 1, 1)
    competing = st.topk_mask(X, 30, lam, axis=None)
    assert ((competing > 0) & (competing < 1)).sum() == 8


@pytest.mark.parametrize("st", HERE, indirect=True)
@pytest.mark.parametrize("straight_through", [False, True])
def test_selection_of_the_smallest_candidates(st, straight_through):
    options = {"capacity": 4, "straight_through": straight_through}
    found = st.topk_select(X, 2, 0.3, where=WHERE, largest=False, **options)
    expected = sparsetopk.topk_select(np.where(WHERE, -X, -np.inf), 2, 0.3, **options)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)
    lam = st.choose_lam(X, 1, 2, where=WHERE, largest=False)
    expected = sparsetopk.choose_lam(np.where(WHERE, -X, -np.inf), 1, 2)
    np.testing.assert_allclose(lam, expected, rtol=1e-6)


@pytest.mark.parametrize("solver", ["pav", "dykstra"])
@pytest.mark.parametrize("st", HERE, indirect=True)
def test_other_solvers(st, solver):
    options = {"where": WHERE, "largest": False, "axis": (2, 0)}
    y = st.topk(X, 2, LAM, solver=solver, **options)
    np.testing.assert_allclose(y, st.topk(X, 2, LAM, **options), atol=1e-5)


@pytest.mark.parametrize("st", ["numpy", "jax"], indirect=True)
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda st: st.topk_mask(X, 2, axis=(0, 3)), r"axis must be in \[-3, 3\)"),
        (lambda st: st.topk_mask(X, 2, axis=(0, -3)), r"axis must not name an axis twice"),
        (lambda st: st.topk_mask(X, 2, axis=()), r"axis must name at least one axis"),
        (lambda st: st.topk_mask(X, 2, axis=1.5), r"axis must be an int, a tuple of ints or None"),
        (lambda st: st.soft_rank(X, axis=(0, 1)), r"axis must be an int, got \(0, 1\)"),
        (lambda st: st.topk_mask(X, 2, where=X), r"where must be an array of booleans"),
        (lambda st: st.topk_mask(X, 2, where=WHERE[:2]), r"where must broadcast to the shape of x"),
        (
            lambda st: st.topk_select(X, 2, magnitude=True, largest=False),
            "largest must be True when magnitude=True",
        ),
    ],
)
def test_errors_name_the_argument(st, call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call(st)


def test_errors_of_torch_name_the_argument():
    torch = pytest.importorskip("torch")
    import sparsetopk.torch as st

    x, where = torch.from_numpy(X), torch.from_numpy(WHERE)
    for dim in (-1, None):
        with pytest.raises(TypeError, match="where must be an array of booleans"):
            st.topk_mask(x, 2, where=x, dim=dim)
        with pytest.raises(ValueError, match="where must broadcast to the shape of x"):
            st.topk_select(x, 2, where=where[:2], dim=dim)


def test_where_in_a_compiled_graph():
    torch = pytest.importorskip("torch")
    import sparsetopk.torch as st

    def f(x, where):
        return st.topk(x, 3, 0.3, where=where, dim=(0, 2), largest=False)

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    where, found = torch.from_numpy(WHERE), []
    for g in (f, compiled):
        x = torch.from_numpy(X).requires_grad_()
        y = g(x, where)
        found.append((y.detach(), torch.autograd.grad(y, x, torch.from_numpy(DY))[0]))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
