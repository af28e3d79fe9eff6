"""Which operator is differentiable where: the table of the README, measured."""

import numpy as np
import pytest

STEP = 1e-7


def one_sided_derivatives(f, a):
    """Derivatives of f(a), a scalar to an array, from the left and from the right."""
    return (f(a) - f(a - STEP)) / STEP, (f(a + STEP) - f(a)) / STEP


def moved(x, a):
    """Rows x with a in the place of their first entry."""
    return np.concatenate([a[:, None], x[:, 1:]], axis=1)


def crossings(st, x, k, lam, options, span=3.0, points=801):
    """Where, as the first entry of a row x moves, an entry of the mask reaches 0 or 1 or leaves it: by
    bisection. For rows x (m, n) and k (m, 1): all of these, and of which row each is."""

    def state(a, row):
        y = st.topk_mask(moved(x[row], a), k[row], lam, **options)
        return np.where(y <= 0, 0, np.where(y >= 1, 2, 1))

    row = np.repeat(np.arange(len(x)), points)
    grid = (x[:, :1] + np.linspace(-span, span, points)).ravel()
    states = state(grid, row)
    crossed = (states[1:] != states[:-1]).any(axis=1) & (row[1:] == row[:-1])
    lo, hi, before = grid[:-1][crossed], grid[1:][crossed], states[:-1][crossed]
    row = row[:-1][crossed]
    for _ in range(45):
        middle = (lo + hi) / 2
        same = (state(middle, row) == before).all(axis=1)
        lo, hi = np.where(same, middle, lo), np.where(same, hi, middle)
    return hi, row


def test_the_one_sided_mask_is_not_differentiable_at_saturation(st):
    """x = (a, 0.3, 0.2, -0.5), k = 2, lam = 1, p = 4/3: at a = 0.45947 dy_1/da falls from 1.67 to 0."""
    x = lambda a: np.array([a, 0.3, 0.2, -0.5])  # noqa: E731
    f = lambda a: st.topk_mask(x(a), 2, 1.0, p=4 / 3)[0]  # noqa: E731
    at = [
        a
        for a in crossings(st, x(0.45)[None], np.array([[2]]), 1.0, {"p": 4 / 3}, 0.1, 201)[0]
        if abs(a - 0.45947) < 1e-4
    ]
    assert len(at) == 1
    left, right = one_sided_derivatives(f, at[0])
    np.testing.assert_allclose(left, 1.6705, atol=1e-3)
    np.testing.assert_allclose(right, 0, atol=1e-6)
    before = st.topk_mask_jacobian(x(at[0] - 1e-6), 2, 1.0, p=4 / 3)[0, 0]
    after = st.topk_mask_jacobian(x(at[0] + 1e-6), 2, 1.0, p=4 / 3)[0, 0]
    np.testing.assert_allclose([before, after], [1.6705, 0], atol=1e-3)


def test_magnitude_is_not_differentiable_at_saturation(st):
    """x = (a, 1, 0.9, 0.3), k = 2, lam = 0.5, p = 4/3: at a = 1.04531 from 2.739 to 0.813."""
    jacobian = lambda a: st.topk_mag_jacobian(  # noqa: E731
        [a, 1.0, 0.9, 0.3], 2, 0.5, p=4 / 3, debias=False
    )[0, 0]
    np.testing.assert_allclose(jacobian(1.0453), 2.739, atol=2e-3)
    np.testing.assert_allclose(jacobian(1.0454), 0.813, atol=2e-3)


@pytest.mark.parametrize("p", [2.0, 1.5, 4 / 3])
def test_debiased_magnitude_is_not_differentiable_where_an_entry_leaves_zero(st, p):
    """The slope of the entry that enters jumps from 0 to (1 + D)(1 - dg/da), at least 1 - dg/da."""
    x = lambda a: np.array([1.5, 1.2, 1.1, a])  # noqa: E731
    lo, hi = 0.2, 1.1
    while hi - lo > 1e-13:
        middle = (lo + hi) / 2
        lo, hi = (lo, middle) if st.topk_mag(x(middle), 2, 0.5, p=p)[3] > 0 else (middle, hi)
    f = lambda a: st.topk_mag(x(a), 2, 0.5, p=p)[3]  # noqa: E731
    left, right = one_sided_derivatives(f, hi)
    assert abs(left) < 1e-6
    assert right > 0.5


TWO_SIDED = [{"p": p, "two_sided": True} for p in (1.5, 4 / 3, 1.2)]


def six_rows(least_k):
    draws = [np.random.default_rng(seed) for seed in range(6)]
    return (
        np.stack([rng.normal(size=6) for rng in draws]),
        np.array([[rng.uniform(least_k, 5)] for rng in draws]),
    )


def jumps(st, x, k, lam, options, at):
    """By how much the one-sided derivatives of the mask differ where the first entry is ``at``."""
    before, here, after = (
        st.topk_mask(moved(x, at + step), k, lam, **options) for step in (-STEP, 0.0, STEP)
    )
    return np.abs((here - before) - (after - here)).max(axis=-1) / STEP


@pytest.mark.parametrize("options", TWO_SIDED, ids=lambda o: f"p={o['p']:.3g}")
def test_two_sided_masks_are_differentiable_at_every_crossing(st, options):
    (x, k), lam = six_rows(1.0), 0.4
    found, row = crossings(st, x, k, lam, options)
    assert set(row) == set(range(6))
    # S' vanishes at the ends like t^(1/(p-1) - 1): the difference over a step does so as slowly
    tolerance = 10 * (STEP / lam) ** min(1.0, 1 / (options["p"] - 1) - 1) / lam
    assert jumps(st, x[row], k[row], lam, options, found).max() < max(tolerance, 1e-5)
    near = (
        st.topk_mask_jacobian(moved(x[row], found + e), k[row], lam, **options)
        for e in (-1e-9, 1e-9)
    )
    np.testing.assert_allclose(*near, atol=1e-3)


def test_one_sided_masks_are_not(st):
    (x, k), lam, options = six_rows(1.5), 0.9, {"p": 4 / 3}
    found, row = crossings(st, x, k, lam, options)
    largest = np.zeros(6)
    np.maximum.at(largest, row, jumps(st, x[row], k[row], lam, options, found))
    assert (largest > 0.1).all()


def test_the_smooth_recipe_for_magnitude_is_differentiable(st):
    """x * topk_mask(x^2, two_sided=True): the recipe of the docs."""
    x, options = np.array([0.0, 1.0, -0.95, 0.3, 0.8]), {"p": 1.5, "two_sided": True}
    move = lambda a: np.concatenate([[a], x[1:]])  # noqa: E731

    def largest_change_of_slope(points):
        rows = np.stack([move(a) for a in np.linspace(-1.6, 1.6, points)])
        dx = np.broadcast_to([1.0, 0, 0, 0, 0], rows.shape)
        mask = st.topk_mask(rows**2, 2, 0.2, **options)
        slopes = mask * dx + rows * st.topk_mask_jvp(rows**2, 2, 0.2, dx=2 * rows * dx, **options)
        return np.abs(np.diff(slopes, axis=0)).max()

    # a jump would not shrink with the grid
    assert largest_change_of_slope(16001) < 0.3 * largest_change_of_slope(4001)


@pytest.mark.parametrize("p", [2.0, 1.5, 4 / 3, 1.2])
@pytest.mark.parametrize("name", ["topk_mask", "topk", "topk_mag", "topk_sign"])
def test_relaxed_operators_are_continuous(st, name, p):
    f = getattr(st, name)
    rng = np.random.default_rng(0)
    x, direction = rng.normal(size=(2, 20, 1, 8))
    y = f(x + np.linspace(0, 1, 2001)[:, None] * direction, 3, 0.5, p=p)
    assert np.abs(np.diff(y, axis=1)).max() < 0.05
