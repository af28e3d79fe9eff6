"""Every case of the table against the definitions, and against its own optimality conditions."""

import numpy as np
import pytest

from cases import CASES, ROWS, Case, stacked
from sparsetopk import reference


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_reference(st, case: Case):
    # For p > 2 the response is not Lipschitz: a rounded threshold costs the reference half its digits.
    atol = 1e-9 if case.p <= 2 or case.two_sided else 1e-6
    y = case.function(st)(*ROWS)
    np.testing.assert_allclose(y, case.references(*ROWS), rtol=1e-9, atol=atol)
    one = case.function(st)(np.array([0.3]), 0.5, 0.6)
    expected = case.references(*stacked([(np.array([0.3]), 0.5, 0.6)]))[0]
    np.testing.assert_allclose(one, expected, rtol=1e-9, atol=atol)


GRADIENTS = [c for c in CASES if c.operator != "topk" and not c.options.get("debias")]


@pytest.mark.parametrize("case", GRADIENTS, ids=str)
def test_is_optimal(st, case: Case):
    rng = np.random.default_rng(0)
    for y, x, k, lam in zip(case.function(st)(*ROWS), *ROWS, strict=True):
        at = (x, reference.ones_k(k[0], x.size), lam[0], case.p, case.phi, case.two_sided)
        assert reference.kkt_residual(y, *at) < 1e-12
        # and the residual can tell: a small change of y is no longer optimal
        moved = y + 1e-4 * rng.normal(size=y.size)
        assert reference.kkt_residual(moved, *at) > 1e-9


@pytest.mark.parametrize("case", CASES, ids=str)
def test_batches_rows_along_any_axis(st, case: Case):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 4, 5))
    k = rng.uniform(0, 4, size=(3, 1, 5))
    lam = rng.uniform(0.1, 1, size=(1, 5))  # broadcasts from the right
    y = case.function(st)(x, k, lam, axis=1)
    assert y.shape == x.shape
    for i in range(3):
        for j in range(5):
            row = case.function(st)(x[i, :, j], k[i, 0, j], lam[0, j])
            np.testing.assert_allclose(y[i, :, j], row, rtol=0, atol=1e-14)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_keeps_the_dtype_and_rounds_at_the_end(st, case: Case, dtype):
    x = np.random.default_rng(1).normal(size=(2, 30)).astype(dtype)
    y = case.function(st)(x, 5, 0.3)
    assert y.dtype == dtype
    exact = case.function(st)(x.astype(np.float64), 5, 0.3).astype(dtype)
    atol = st.roundings * np.finfo(dtype).eps
    np.testing.assert_allclose(y, exact, rtol=0, atol=atol)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_takes_views_lists_and_empty_arrays(st, case: Case):
    f = case.function(st)
    x = np.random.default_rng(2).normal(size=(6, 8))
    np.testing.assert_array_equal(f(x[::2, ::-2], 2, 0.3), f(x[::2, ::-2].copy(), 2, 0.3))
    np.testing.assert_array_equal(f(x.T, 2, 0.3, axis=0), f(x, 2, 0.3).T)
    np.testing.assert_array_equal(f(x[0].tolist(), 2, 0.3), f(x[0], 2, 0.3))
    assert f(np.empty((0, 5)), 2, 0.3).shape == (0, 5)
    assert f(np.empty((3, 0)), 0, 0.3).shape == (3, 0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_does_not_change_its_input(st, case: Case):
    x = np.random.default_rng(2).normal(size=(6, 8))
    before = x.copy()
    case.function(st)(x, 2, 0.3)
    case.function(st, "_vjp")(x, 2, 0.3, dy=x)
    np.testing.assert_array_equal(x, before)


def test_hand_computed_masks(st):
    np.testing.assert_allclose(st.topk_mask([1.0, 1.0, 1.0, 0.0], 2, 0.7), [2 / 3] * 3 + [0])
    np.testing.assert_allclose(st.topk_mask([3.0, 1.0, 0.95, -1.0], 2, 0.1), [1, 0.75, 0.25, 0])
    # p = 3/2: y = clip(t)^2; x = (0.5, 0), k = 1, lam = 1 gives t = (a, a - 0.5), a^2 + (a - 0.5)^2 = 1
    a = (1 + np.sqrt(7)) / 4
    np.testing.assert_allclose(st.topk_mask([0.5, 0.0], 1, 1.0, p=1.5), [a**2, (a - 0.5) ** 2])
    # two-sided p = 3/2 is symmetric: x = (t, -t), k = 1
    t = 0.3
    y = (1 + t * np.sqrt(2 - t**2)) / 2
    np.testing.assert_allclose(st.topk_mask([t, -t], 1, 1.0, p=1.5, two_sided=True), [y, 1 - y])


def test_two_sided_p2_is_the_mask_with_lam_doubled(st):
    x = np.random.default_rng(0).normal(size=(5, 20))
    np.testing.assert_allclose(
        st.topk_mask(x, 4.5, 0.3, two_sided=True), st.topk_mask(x, 4.5, 0.6), atol=1e-14
    )


@pytest.mark.parametrize("p", [2.0, 4 / 3])
def test_scaling_laws(st, p):
    x, c = np.random.default_rng(0).normal(size=20), 37.0
    np.testing.assert_allclose(
        st.topk_mask(c * x, 4, c * 0.3, p=p), st.topk_mask(x, 4, 0.3, p=p), atol=1e-13
    )
    np.testing.assert_allclose(
        st.topk_mag(c * x, 4, c ** (2 - p) * 0.3, p=p), c * st.topk_mag(x, 4, 0.3, p=p), rtol=1e-12
    )
