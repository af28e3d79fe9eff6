"""Selections in slots, and the lam that leaves so many entries fractional."""

import numpy as np
import pytest


def gaussian(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


@pytest.mark.parametrize("magnitude", [False, True])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_selection_scatters_back_to_the_operator(st, magnitude, axis):
    x = gaussian(9, 11, 10)
    selection = st.topk_select(x, 3, 0.5, magnitude=magnitude, axis=axis, capacity=9)
    y = (st.topk_mag if magnitude else st.topk_mask)(x, 3, 0.5, axis=axis)
    back = np.zeros_like(x)
    np.put_along_axis(back, selection.indices, selection.values, axis=axis)
    np.testing.assert_array_equal(back, y)
    assert (np.diff(selection.indices, axis=axis) > 0).all()
    np.testing.assert_array_equal(selection.dropped, 0)
    assert selection.dropped.shape == tuple(np.delete(x.shape, axis))


def test_selection_drops_the_smallest(st):
    y = st.topk_mask(np.array([1.0, 1.3, 1.2, 1.1]), 2, 1.0)
    selection = st.topk_select(np.array([1.0, 1.3, 1.2, 1.1]), 2, 1.0, capacity=2)
    np.testing.assert_array_equal(selection.indices, [1, 2])
    np.testing.assert_array_equal(selection.values, y[1:3])
    np.testing.assert_allclose(selection.dropped, y[0] + y[3])


@pytest.mark.parametrize(("capacity", "slope"), [(2, 1.0), (4, 0.0)])
def test_derivative_of_what_is_dropped(capacity, slope):
    """Also where nothing is, and where an entry is infinite."""
    torch = pytest.importorskip("torch")
    from sparsetopk.torch._functions.selection import in_slots

    y = torch.tensor([[0.25, -torch.inf, 0.5, 0.0, 0.125]], requires_grad=True)
    dropped = in_slots(y, capacity).dropped
    assert dropped.item() == (0.375 if slope else 0.0)
    (found,) = torch.autograd.grad(dropped.sum(), y)
    assert found.tolist() == [[slope, 0.0, 0.0, 0.0, slope]]


def test_default_capacity(st):
    x = gaussian(2, 100)
    assert st.topk_select(x, 3).values.shape == (2, 11)
    assert st.topk_select(x, 40.5).values.shape == (2, 41 + 11)
    assert st.topk_select(x, 98).values.shape == (2, 100)
    assert st.topk_select(x[:0], 3).values.shape == (0, 11)
    selection = st.topk_select(x, np.array([[3], [5]]), capacity=20)
    np.testing.assert_allclose(selection.values.sum(axis=-1), [3, 5])
    nan = st.topk_select(np.where(x > 2, np.nan, x), 3)
    bad = (x > 2).any(axis=-1)
    assert bad.any()
    np.testing.assert_array_equal(np.isnan(nan.values).all(axis=-1), bad)
    np.testing.assert_array_equal(np.isnan(nan.dropped), bad)


@pytest.mark.parametrize("options", [{}, {"p": 4 / 3}, {"p": 1.5, "two_sided": True}])
@pytest.mark.parametrize("fractional", [2, 8, 20])
def test_choose_lam_leaves_so_many_fractional(st, options, fractional):
    x = gaussian(5, 200) * np.array([[1e-6], [1.0], [1.0], [1e3], [1e9]])
    lam = st.choose_lam(x, 17, fractional, **options)
    assert lam.shape == (5, 1)
    y = st.topk_mask(x, 17, lam, **options)
    np.testing.assert_array_equal(((y > 0) & (y < 1)).sum(axis=-1), fractional)
    less = st.topk_mask(x, 17, 0.999 * lam, **options)
    assert (((less > 0) & (less < 1)).sum(axis=-1) < fractional).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_choose_lam_counts_in_the_dtype_of_x(st, dtype):
    x = gaussian(50, 300).astype(dtype)
    y = st.topk_mask(x, 10, st.choose_lam(x, 10, 8))
    count = ((y > 0) & (y < 1)).sum(axis=-1)
    assert (count >= 8).all()
    assert np.median(count) == 8


@pytest.mark.parametrize("p", [2.0, 4 / 3])
def test_choose_lam_for_magnitude(st, p):
    x = gaussian(4, 200) * np.array([[1e-6], [1.0], [1e3], [1e9]])
    lam = st.choose_lam(x, 17, 8, p=p, magnitude=True)
    y = st.topk_mag(x, 17, lam, p=p)
    moved = (y != 0) & (y != x)
    np.testing.assert_array_equal(moved.sum(axis=-1), 8)


def test_choose_lam_does_not_mind_outliers(st):
    x = gaussian(200)
    expected = st.choose_lam(x[1:], 17, 8)
    for outlier in (-3.4e38, -1.7e308, -np.inf):
        np.testing.assert_allclose(
            st.choose_lam(np.append(x[1:], outlier), 17, 8), expected, rtol=1e-6
        )
    high = np.append(x, 1e30)
    y = st.topk_mag(high, 17, st.choose_lam(high, 17, 8, p=4 / 3, magnitude=True), p=4 / 3)
    assert ((y != 0) & (y != high)).sum() == 8


@pytest.mark.parametrize("p", [3.0, 5.0])
def test_choose_lam_for_large_p(st, p):
    x = gaussian(50)
    y = st.topk_mask(x, 1, st.choose_lam(x, 1, 50, p=p), p=p)
    assert ((y > 0) & (y < 1)).all()


def test_choose_lam_is_positive_and_quiet(st):
    assert (st.choose_lam([5e-324, 0.0, 1e-323], 1, 2) > 0).all()
    assert np.isfinite(st.choose_lam([1.7e308, -1.7e308, 0.0], 1, 2)).all()
    assert np.isfinite(st.choose_lam(gaussian(20), 3, p=30.0, magnitude=True)).all()
    assert st.choose_lam(np.empty((2, 0)), 0).shape == (2, 1)


def test_choose_lam_for_signs(st):
    x = gaussian(3, 200) * np.array([[1e-3], [1.0], [1e3]])
    y = np.abs(st.topk_sign(x, 17, st.choose_lam(np.abs(x), 17, 8)))
    np.testing.assert_array_equal(((y > 0) & (y < 1)).sum(axis=-1), 8)


def test_choose_lam_where_no_lam_can(st):
    x = np.array([[1.0, 2.0, 4.0], [5.0, 5.0, 5.0], [0.0, np.nan, 1.0]])
    assert np.isfinite(st.choose_lam(x[:2], 3, 2)).all()
    assert np.isfinite(st.choose_lam(x[:2], 0, 2)).all()
    assert np.isnan(st.choose_lam(x, 1, 2)[2])
    assert (st.choose_lam(x[:2], 1, 2) > 0).all()
