"""What published code gets wrong: each a test that passes here."""

import numpy as np
import pytest

import sparsetopk as st
from frontends import needs_solver

OPERATORS = ["topk_mask", "topk_mag", "topk_sign"]


@pytest.mark.parametrize("lam", [0.1, 1.0])
@pytest.mark.parametrize("solver", ["threshold", "pav"])
@pytest.mark.parametrize("p", [2.0, 4 / 3])
def test_no_gradient_where_nothing_competes(st, lam, solver, p):
    needs_solver(st, solver)
    """Blocks guessed from ties in v give [0, 0, -10, 0, 10] here."""
    x = [3.0, 2.0, 0.0, 0.0, 0.0]
    jacobian = st.topk_mask_jacobian(x, 2, lam, p=p, solver=solver)
    np.testing.assert_array_equal(jacobian, 0)


@pytest.mark.parametrize("p", [2.0, 1.5, 4 / 3])
@pytest.mark.parametrize("padding", [-1e9, -np.inf])
@pytest.mark.parametrize("solver", ["threshold", "pav"])
def test_padding(st, p, padding, solver):
    needs_solver(st, solver)
    """Raw-moment cubics give 3e14 with -1e9; -inf gives NaN."""
    x = np.array([0.3, 0.2, padding, 0.1, padding, padding])
    y = st.topk_mask(x, 2, 1.0, p=p, solver=solver)
    np.testing.assert_allclose(y[[0, 1, 3]], st.topk_mask(x[[0, 1, 3]], 2, 1.0, p=p), atol=1e-9)
    np.testing.assert_array_equal(y[[2, 4, 5]], 0)


def test_a_shift_of_1e5(st):
    """Off by 1.7 elsewhere."""
    x = np.random.default_rng(0).normal(size=100)
    for p in (2.0, 4 / 3):
        for solver in st.solvers[:2]:
            y = st.topk_mask(x + 1e5, 10, 0.1, p=p, solver=solver)
            np.testing.assert_allclose(y, st.topk_mask(x, 10, 0.1, p=p), atol=1e-9)


@pytest.mark.parametrize("p", [2.0, 1.5, 4 / 3, 3.0])
def test_lam_from_1e_minus_8_to_1e8(st, p):
    x = np.tile(5 * np.random.default_rng(0).normal(size=(3, 200)), (17, 1))
    k, lam = np.full((51, 1), 10), np.repeat(10.0 ** np.arange(-8, 9), 3)[:, None]
    for name in OPERATORS:
        f = getattr(st, name)
        one, other = (f(x, k, lam, p=p, solver=solver) for solver in st.solvers[:2])
        np.testing.assert_allclose(other, one, atol=1e-7, rtol=1e-7)
        if name == "topk_mask":
            for y in (one, other):
                np.testing.assert_allclose(y.sum(axis=-1), 10, atol=1e-6)
        for part in getattr(st, name + "_vjp")(x, k, lam, p=p, dy=np.ones_like(x)):
            assert np.isfinite(part).all()


def test_magnitude_with_p_4_3_and_the_lam_of_the_paper(st):
    """All zeros for lam below 4.6e-4 elsewhere, and NaN gradients wherever the output is zero."""
    x = np.random.default_rng(0).normal(size=(32, 30)) / 28
    y = st.topk_mag(x.ravel(), 96, 1e-4, p=4 / 3)
    assert 96 <= np.count_nonzero(y) <= 100
    vjp = st.topk_mag_vjp(x.ravel(), 96, 1e-4, p=4 / 3, dy=np.ones(960))
    assert np.isfinite(vjp.x).all()
    assert np.count_nonzero(vjp.x) >= 96


@pytest.mark.parametrize("name", ["soft_sort", "soft_rank"])
def test_inputs_scaled_by_1e_minus_10_keep_their_blocks(name):
    """An absolute tolerance on v merges all blocks at small scales."""
    x = np.array([0.3, 1.2, 1.1, -0.4, 0.9])
    # soft_rank is a function of x/lam; soft_sort scales with x at fixed rho/lam for p = 2
    lam = {"soft_sort": (0.5, 0.5e10), "soft_rank": (0.2, 0.2e-10)}[name]
    f, jacobian = getattr(st, name), getattr(st, name + "_jacobian")
    c = 1e-10
    if name == "soft_sort":
        np.testing.assert_allclose(f(c * x, lam[1]), c * f(x, lam[0]), rtol=1e-12)
        np.testing.assert_allclose(jacobian(c * x, lam[1]), jacobian(x, lam[0]), rtol=1e-12)
    else:
        np.testing.assert_allclose(f(c * x, lam[1]), f(x, lam[0]), rtol=1e-12)
        np.testing.assert_allclose(c * jacobian(c * x, lam[1]), jacobian(x, lam[0]), rtol=1e-6)


def test_magnitude_scaled_by_1e_minus_10(st):
    x, c = np.array([0.3, 1.15, 1.1, -0.4, 0.9]), 1e-10
    for solver in st.solvers[:3]:
        np.testing.assert_allclose(
            st.topk_mag(c * x, 2, 0.5, solver=solver), c * st.topk_mag(x, 2, 0.5), rtol=1e-9
        )
        np.testing.assert_allclose(
            st.topk_mag_jacobian(c * x, 2, 0.5, solver=solver),
            st.topk_mag_jacobian(x, 2, 0.5),
            rtol=1e-9,
            atol=1e-12,
        )


def test_p_3_is_finite(st):
    x = np.array([1.0, 0.8, 0.8, 0.1, 0.0])
    for f, vjp in ((st.topk_mask, st.topk_mask_vjp), (st.topk_mag, st.topk_mag_vjp)):
        assert np.isfinite(f(x, 2, 0.5, p=3.0)).all()
        assert np.isfinite(vjp(x, 2, 0.5, p=3.0, dy=np.ones(5)).x).all()
    np.testing.assert_allclose(st.topk_mask(x, 2, 0.5, p=3.0).sum(), 2)


def test_dykstra_gradient_is_that_of_its_blocks():
    """Blocks from the dual variables: right even where v has not converged to a tie."""
    x = np.random.default_rng(0).normal(size=60)
    for lam in (0.1, 1.0, 10.0):
        exact = st.topk_mask_jacobian(x, 12, lam)
        np.testing.assert_allclose(
            st.topk_mask_jacobian(x, 12, lam, solver="dykstra"), exact, atol=1e-9 / lam
        )
