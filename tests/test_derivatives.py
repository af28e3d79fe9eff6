"""Closed-form derivatives against central differences, and against each other, for every case."""

import itertools

import numpy as np
import pytest

import sparsetopk as st
from cases import CASES, MAGNITUDES, MASKS, SIGNS, TWO_SIDED, Case, stacked
from frontends import NumpyFrontend, needs_solver
from sparsetopk import _core as core
from sparsetopk.reference import numerical_jacobian

# Inputs that keep a margin from the kinks: no entry enters or leaves the block within the step.
SMOOTH = {
    "pooled": (np.array([1.7, 0.2, 0.31, -0.65, 0.08, -1.3, 0.9]), 3.0, 0.6),
    "real k": (np.array([-0.4, 1.1, 0.93, 0.85, -2.0, 0.1, 0.2]), 2.4, 0.5),
    "large lam": (np.array([-0.4, 1.1, 0.93, 0.85, -2.0, 0.1, 0.2]), 2.0, 25.0),
    "lonely fraction": (np.array([3.0, 2.0, 1.0, -0.4, 0.3, -0.2, 0.1]), 2.5, 0.2),
}
STEP = 1e-6
AT = stacked(SMOOTH.values())


def central(f, at, moved):
    """Central differences of f at rows x, k and lam, along tangents of these; all in one call."""
    signs = np.array([1.0, -1.0]).reshape(2, 1, 1)
    ends = (
        np.concatenate(np.asarray(v) + signs * STEP * d) for v, d in zip(at, moved, strict=True)
    )
    ahead, behind = np.split(f(*ends), 2)
    return (ahead - behind) / (2 * STEP)


def tolerance(analytic):
    """Central differences in float64: rounding over the step, relative to the derivative."""
    return 1e-6 * max(1.0, np.abs(analytic).max())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_derivatives_equal_central_differences(st, case: Case):
    """In every entry of x, and in k and lam: each row once for each of these."""
    (m, n), directions = AT[0].shape, AT[0].shape[1] + 2
    at = tuple(np.repeat(v, directions, axis=0) for v in AT)
    basis = np.tile(np.eye(directions), (m, 1))
    moved = basis[:, :n], basis[:, n : n + 1], basis[:, n + 1 :]
    numerical = central(case.function(st), at, moved).reshape(m, directions, n)
    jvp = case.function(st, "_jvp")(*at, dx=moved[0], dk=moved[1], dlam=moved[2])
    jacobian = case.function(st, "_jacobian")(*AT)
    for expected, found, in_x in zip(
        numerical, jvp.reshape(m, directions, n), jacobian, strict=True
    ):
        for i in range(directions):
            atol = tolerance(expected[:n] if i < n else expected[i])
            np.testing.assert_allclose(found[i], expected[i], rtol=0, atol=atol)
        np.testing.assert_allclose(in_x.T, expected[:n], rtol=0, atol=tolerance(expected[:n]))


@pytest.mark.parametrize("solver", ["pav", "dykstra", "bca"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_solver_has_the_same_derivatives(st, case: Case, solver):
    needs_solver(st, solver)
    if case.two_sided or (case.p != 2 and solver == "dykstra"):
        with pytest.raises(ValueError, match=r"solver must be|p must be 2"):
            case.function(st)([0.0, 1.0], 1, solver=solver)
        return
    # block coordinate ascent converges slowly for a large lam
    at = stacked(row for row in SMOOTH.values() if solver != "bca" or row[2] < 10)
    vjp, dy = case.function(st, "_vjp"), np.tile(np.cos(np.arange(7)), (len(at[0]), 1))
    for one, other in zip(vjp(*at, dy=dy), vjp(*at, dy=dy, solver=solver), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_jvp_vjp_and_jacobian_agree(st, case: Case):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(2, 7, 3))
    k, lam = rng.uniform(1, 6, size=(2, 1, 3)), rng.uniform(0.05, 2, size=(1, 1, 3))
    dx, dy = rng.normal(size=(2, *x.shape))
    dk, dlam = rng.normal(size=k.shape), rng.normal(size=lam.shape)
    jacobian = case.function(st, "_jacobian")(x, k, lam, axis=1)
    assert jacobian.shape == (2, 3, 7, 7)
    jvp = case.function(st, "_jvp")(x, k, lam, dx=dx, axis=1)
    np.testing.assert_allclose(jvp, np.einsum("abij,ajb->aib", jacobian, dx), atol=1e-12)
    jvp = case.function(st, "_jvp")(x, k, lam, dx=dx, dk=dk, dlam=dlam, axis=1)
    vjp = case.function(st, "_vjp")(x, k, lam, dy=dy, axis=1)
    assert vjp.x.shape == x.shape
    assert vjp.k.shape == k.shape
    assert vjp.lam.shape == lam.shape
    inner = np.sum(vjp.x * dx) + np.sum(vjp.k * dk) + np.sum(vjp.lam * dlam)
    np.testing.assert_allclose(np.sum(dy * jvp), inner, rtol=1e-12, atol=1e-12)


def test_cotangents_of_numbers_are_numbers(st):
    x = np.random.default_rng(3).normal(size=(4, 7))
    scalar = st.topk_mask_vjp(x, 2, 0.5, dy=x)
    rows = st.topk_mask_vjp(x, np.full((4, 1), 2.0), np.full((4, 1), 0.5), dy=x)
    assert scalar.k.shape == scalar.lam.shape == ()
    np.testing.assert_allclose(scalar.k, rows.k.sum())
    np.testing.assert_allclose(scalar.lam, rows.lam.sum())


@pytest.mark.parametrize("case", [*MASKS, *TWO_SIDED], ids=str)
def test_mask_jacobian_is_symmetric_psd_with_zero_row_sums(st, case: Case):
    jacobian = case.function(st, "_jacobian")(*AT)
    np.testing.assert_allclose(jacobian, jacobian.swapaxes(1, 2), atol=1e-12)
    np.testing.assert_allclose(jacobian.sum(axis=-1), 0, atol=1e-12)
    assert np.linalg.eigvalsh(jacobian).min() > -1e-12


@pytest.mark.parametrize("case", [*MAGNITUDES, *SIGNS], ids=str)
def test_other_jacobians_are_symmetric_where_they_are_gradients(st, case: Case):
    jacobian = case.function(st, "_jacobian")(*AT)
    other = jacobian.swapaxes(1, 2)
    # the debiased operator is a gradient for p = 2 alone
    if case.options.get("debias") and case.p != 2:
        pooled = list(SMOOTH).index("pooled")
        assert not np.allclose(jacobian[pooled], other[pooled], atol=1e-6)
    else:
        np.testing.assert_allclose(jacobian, other, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_finite_at_kinks_and_ties(st, case: Case):
    xs = ([1.0, 1, 1, 0, 0, 0, 0], [0.0] * 7, [2.0, 1, 0, -1, -2, -3, -4])
    rows = stacked(itertools.product(xs, (0, 2, 3.5, 7), (1e-300, 1e-8, 1.0, 1e8)))
    for part in case.function(st, "_vjp")(*rows, dy=np.ones_like(rows[0])):
        assert np.isfinite(part).all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_without_the_core_are_finite_too(monkeypatch, case: Case):
    """Signs held at 0 had a slope of inf there, and 0 times that as the cotangent of lam."""
    monkeypatch.setattr(core, "native", None)
    test_gradients_are_finite_at_kinks_and_ties(NumpyFrontend(), case)


@pytest.mark.parametrize("p", [2.0, 1.5, 4 / 3])
def test_shares_do_not_depend_on_the_scale(st, p):
    x, c = np.array([0.5, 0.2, 0.1, -1.0]), 1e-285
    tiny = st.topk_mask_jvp(c * x, 1.5, c, p=p, dk=1.0)
    np.testing.assert_allclose(tiny, st.topk_mask_jvp(x, 1.5, 1.0, p=p, dk=1.0), rtol=1e-9)


PERMUTAHEDRON = [
    {"p": p, "phi": phi}
    for p in (2.0, 1.5, 4 / 3, 3.0)
    for phi in ("identity", "half_square", "abs", "exp")
]
X = np.array([1.3, 0.2, 0.31, -0.95, 0.08, -1.1])
W = np.array([0.9, 2.0, 0.1, 1.2, 0.3, 0.75])


@pytest.mark.parametrize("options", PERMUTAHEDRON, ids=lambda o: f"{o['phi']},p={o['p']:.3g}")
@pytest.mark.parametrize("lam", [0.2, 1.1])
def test_permutahedron_derivatives_equal_central_differences(options, lam):
    jvp = st.permutahedron_jvp
    in_x = numerical_jacobian(lambda x: st.permutahedron(x, W, lam, **options), X, STEP)
    in_w = numerical_jacobian(lambda w: st.permutahedron(X, w, lam, **options), W, STEP)
    jacobian = st.permutahedron_jacobian(X, W, lam, **options)
    np.testing.assert_allclose(jacobian, in_x, rtol=0, atol=tolerance(in_x))
    np.testing.assert_allclose(jacobian, jacobian.T, atol=1e-12)
    columns = [jvp(X, W, lam, dw=e, **options) for e in np.eye(6)]
    np.testing.assert_allclose(np.stack(columns, -1), in_w, rtol=0, atol=tolerance(in_w))
    f = lambda lam: st.permutahedron(X, W, lam, **options)  # noqa: E731
    in_lam = (f(lam + STEP) - f(lam - STEP)) / (2 * STEP)
    got = jvp(X, W, lam, dlam=1.0, **options)
    np.testing.assert_allclose(got, in_lam, rtol=0, atol=tolerance(in_lam))
    dy = np.cos(np.arange(6))
    vjp = st.permutahedron_vjp(X, W, lam, dy=dy, **options)
    np.testing.assert_allclose(vjp.x, dy @ jacobian, atol=1e-12)
    np.testing.assert_allclose(vjp.w, dy @ np.stack(columns, -1), atol=1e-12)
    np.testing.assert_allclose(vjp.lam, dy @ got, atol=1e-12)


def test_cotangents_of_shared_weights_are_summed_in_float64():
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, 4096, 6)).astype(np.float16)
    got = st.permutahedron_vjp(x, W, 0.5, dy=dy).w
    exact = st.permutahedron_vjp(x.astype(float), W, 0.5, dy=dy.astype(float)).w
    assert got.dtype == W.dtype
    np.testing.assert_allclose(got, exact)
    assert st.permutahedron_vjp(x, W.astype(np.float32), 0.5, dy=dy).w.dtype == np.float32


def test_permutahedron_weights_broadcast_and_sum_back():
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, 2, 6, 3))
    shared = st.permutahedron_vjp(x, W, 0.5, dy=dy, axis=1)
    full_w = np.broadcast_to(W[:, None], x.shape)
    full = st.permutahedron_vjp(x, full_w, 0.5, dy=dy, axis=1)
    assert shared.w.shape == (6,)
    np.testing.assert_allclose(shared.w, full.w.sum(axis=(0, 2)), atol=1e-12)
    column = st.permutahedron_vjp(x, W[:, None], 0.5, dy=dy, axis=1)
    assert column.w.shape == (6, 1)
    np.testing.assert_allclose(column.w[:, 0], shared.w, atol=1e-12)


@pytest.mark.parametrize("name", ["soft_sort", "soft_rank"])
@pytest.mark.parametrize("p", [2.0, 4 / 3])
@pytest.mark.parametrize("descending", [True, False])
def test_sort_and_rank_derivatives(name, p, descending):
    f, options = getattr(st, name), {"p": p, "descending": descending}
    for lam in (0.3, 3.0):
        numerical = numerical_jacobian(lambda x, lam=lam: f(x, lam, **options), X, STEP)
        jacobian = getattr(st, name + "_jacobian")(X, lam, **options)
        np.testing.assert_allclose(jacobian, numerical, rtol=0, atol=tolerance(numerical))
        dx, dy = np.sin(np.arange(6)), np.cos(np.arange(6))
        jvp = getattr(st, name + "_jvp")(X, lam, dx=dx, **options)
        np.testing.assert_allclose(jvp, jacobian @ dx, atol=1e-12)
        vjp = getattr(st, name + "_vjp")(X, lam, dy=dy, **options)
        np.testing.assert_allclose(vjp.x, dy @ jacobian, atol=1e-12)
        in_lam = (f(X, lam + STEP, **options) - f(X, lam - STEP, **options)) / (2 * STEP)
        got = getattr(st, name + "_jvp")(X, lam, dlam=1.0, **options)
        np.testing.assert_allclose(got, in_lam, rtol=0, atol=tolerance(in_lam))
        np.testing.assert_allclose(vjp.lam, dy @ got, atol=1e-12)
