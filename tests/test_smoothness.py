"""Which operator is differentiable where: the table of the README, measured."""

import numpy as np
import pytest

STEP = 1e-7


def one_sided_derivatives(f, a):
    """Derivatives of f(a), a scalar to an array, from the left and from the right."""
    return (f(a) - f(a - STEP)) / STEP, (f(a + STEP) - f(a)) / STEP


def jump(f, a):
    left, right = one_sided_derivatives(f, a)
    return np.abs(left - right).max()


def crossings(st, x, k, lam, options, index, span=3.0, points=801):
    """Where, as x[index] moves, an entry of the mask reaches 0 or 1 or leaves it: by bisection."""

    def state(a):
        rows = np.where(np.arange(x.size) == index, a[:, None], x)
        y = st.topk_mask(rows, k, lam, **options)
        return np.where(y <= 0, 0, np.where(y >= 1, 2, 1))

    grid = np.linspace(x[index] - span, x[index] + span, points)
    states = state(grid)
    crossed = (states[1:] != states[:-1]).any(axis=1)
    lo, hi, before = grid[:-1][crossed], grid[1:][crossed], states[:-1][crossed]
    for _ in range(45):
        middle = (lo + hi) / 2
        same = (state(middle) == before).all(axis=1)
        lo, hi = np.where(same, middle, lo), np.where(same, hi, middle)
    return hi


def test_the_one_sided_mask_is_not_differentiable_at_saturation(st):
    """x = (a, 0.3, 0.2, -0.5), k = 2, lam = 1, p = 4/3: at a = 0.45947 dy_1/da falls from 1.67 to 0."""
    x = lambda a: np.array([a, 0.3, 0.2, -0.5])  # noqa: E731
    f = lambda a: st.topk_mask(x(a), 2, 1.0, p=4 / 3)[0]  # noqa: E731
    at = [
        a
        for a in crossings(st, x(0.45), 2, 1.0, {"p": 4 / 3}, 0, 0.1, 201)
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


@pytest.mark.parametrize("options", TWO_SIDED, ids=lambda o: f"p={o['p']:.3g}")
@pytest.mark.parametrize("seed", range(6))
def test_two_sided_masks_are_differentiable_at_every_crossing(st, options, seed):
    rng = np.random.default_rng(seed)
    x, k, lam = rng.normal(size=6), rng.uniform(1, 5), 0.4
    found = crossings(st, x, k, lam, options, index=0)
    assert found.size
    move = lambda a: np.concatenate([[a], x[1:]])  # noqa: E731
    # S' vanishes at the ends like t^(1/(p-1) - 1): the difference over a step does so as slowly
    tolerance = 10 * (STEP / lam) ** min(1.0, 1 / (options["p"] - 1) - 1) / lam
    for a in found:
        assert jump(lambda a: st.topk_mask(move(a), k, lam, **options), a) < max(tolerance, 1e-5)
        near = [st.topk_mask_jacobian(move(a + e), k, lam, **options) for e in (-1e-9, 1e-9)]
        np.testing.assert_allclose(*near, atol=1e-3)


@pytest.mark.parametrize("seed", range(6))
def test_one_sided_masks_are_not(st, seed):
    rng = np.random.default_rng(seed)
    x, k, lam, options = rng.normal(size=6), rng.uniform(1.5, 5), 0.9, {"p": 4 / 3}
    move = lambda a: np.concatenate([[a], x[1:]])  # noqa: E731
    found = crossings(st, x, k, lam, options, index=0)
    jumps = [jump(lambda a: st.topk_mask(move(a), k, lam, **options), a) for a in found]
    assert max(jumps) > 0.1


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
    for _ in range(20):
        x, direction = rng.normal(size=(2, 8))
        path = x + np.linspace(0, 1, 2001)[:, None] * direction
        y = f(path, 3, 0.5, p=p)
        assert np.abs(np.diff(y, axis=0)).max() < 0.05
