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


# ------------------------------------------------------------------------------------ straight through


def competing_rows(m=2000, n=33):
    """Rows with one k each, some real, some above the number of entries that are not padding."""
    rng = np.random.default_rng(5)
    x, k = rng.normal(size=(m, n)), rng.choice([0.0, 1.0, 3.0, 4.5, 9.0], size=(m, 1))
    kept = rng.choice([0, 2, 7, n, n, n], size=(m, 1))
    return np.where(rng.random((m, n)).argsort(axis=-1) < kept, x, -np.inf), k


def by_definition(y, hard, capacity):
    """Row by row: the hard selection, then the largest of the rest, by index; what has no slot."""
    rows = []
    for b, c in zip(y, hard, strict=True):
        first = [i for i in range(len(b)) if c[i] > 0]
        others = sorted((i for i in range(len(b)) if not c[i] > 0), key=lambda i: (-abs(b[i]), i))
        slots = [*first, *sorted(others[: capacity - len(first)])]
        rest = sum(abs(b[i]) for i in range(len(b)) if i not in slots)
        rows.append((slots, [c[i] for i in slots], [c[i] > 0 for i in slots], rest))
    return tuple(np.array(each) for each in zip(*rows, strict=True))


@pytest.mark.parametrize("options", [{}, {"p": 1.5, "two_sided": True}])
def test_straight_through_slots_by_definition(st, options):
    x, k = competing_rows()
    y, hard = (st.topk_mask(x, k, lam, **options) for lam in (0.7, 0.0))
    found = st.topk_select(x, k, 0.7, capacity=11, straight_through=True, **options)
    slots, values, selected, dropped = by_definition(y, hard, 11)
    np.testing.assert_array_equal(found.indices, slots)
    np.testing.assert_array_equal(found.values, values)
    np.testing.assert_array_equal(found.selected, selected)
    np.testing.assert_allclose(found.dropped, dropped, atol=1e-12)
    assert (dropped > 0.1).any()
    candidates = (x > -np.inf).sum(axis=-1)
    np.testing.assert_array_equal(
        found.selected.sum(axis=-1), np.minimum(np.ceil(k[:, 0]), candidates)
    )
    first = np.arange(11) < found.selected.sum(axis=-1, keepdims=True)
    np.testing.assert_array_equal(found.selected, first)


@pytest.mark.parametrize("axis", [0, 1])
def test_straight_through_by_magnitude(st, axis):
    x = gaussian(21, 19)
    x[0, 0] = 0.0
    found = st.topk_select(
        x, 3.5, 0.7, magnitude=True, axis=axis, capacity=12, straight_through=True
    )
    back = np.zeros_like(x)
    np.put_along_axis(back, found.indices, found.values, axis=axis)
    np.testing.assert_array_equal(back, st.topk_mag(x, 3.5, 0.0, axis=axis))
    assert (found.selected.sum(axis=axis) == 4).all()
    everything = st.topk_select(
        x, x.shape[axis], 0.7, magnitude=True, axis=axis, straight_through=True
    )
    assert everything.selected.all()  # also the entry that is 0


def test_straight_through_of_bad_rows_and_k(st):
    x = np.array([[1.0, np.nan, 3.0, 2.0], [1.0, 2.0, 3.0, 4.0]])
    found = st.topk_select(x, 2, 0.5, capacity=3, straight_through=True)
    np.testing.assert_array_equal(np.isnan(found.values).all(axis=-1), [True, False])
    np.testing.assert_array_equal(np.isnan(found.dropped), [True, False])
    assert st.topk_select(x[:0], 2, straight_through=True).selected.shape == (0, 4)
    none = st.topk_select(np.full((2, 5), -np.inf), 2, 0.5, straight_through=True)
    assert not none.selected.any()
    assert not none.values.any()
    message = r"capacity must be at least ceil\(k\)=3 when straight_through=True, got 2"
    for k in (2.5, np.array([[1.0], [2.5]])):
        with pytest.raises(ValueError, match=message):
            st.topk_select(x, k, capacity=2, straight_through=True)
    with pytest.raises(ValueError, match=r"k must be in \[0, n\] with n=4, got 5"):
        st.topk_select(x, 5, straight_through=True)


def torch_gradients(select, operator, x, k, magnitude):
    """Of a random sum of the slots, in x, k and lam; and what the relaxed operator has there."""
    torch = pytest.importorskip("torch")
    at = [torch.tensor(v, requires_grad=True) for v in (x, k, np.full_like(k, 0.7))]
    found = select(*at, magnitude=magnitude)
    g = torch.from_numpy(gaussian(*found.values.shape, seed=3))
    got = torch.autograd.grad((found.values * g).sum(), at)
    y = operator(*at)
    want = torch.autograd.grad(y, at, torch.zeros_like(y).scatter(-1, found.indices, g))
    return found, zip(got, want, strict=True)


@pytest.mark.parametrize("magnitude", [False, True])
def test_straight_through_has_the_relaxed_gradient_in_torch(magnitude):
    torch = pytest.importorskip("torch")
    import sparsetopk.torch as st

    x, k = competing_rows()
    x = np.where(np.isinf(x), 0.01, x) if magnitude else x
    operator = st.topk_mag if magnitude else st.topk_mask
    options = {"capacity": 11, "straight_through": True}

    def select(x, k, lam, magnitude):
        return st.topk_select(x, k, lam, magnitude=magnitude, **options)

    eager, pairs = torch_gradients(select, operator, x, k, magnitude)
    for got, want in pairs:
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    found = eager
    if not magnitude:  # one graph is enough
        compiled = torch.compile(select, fullgraph=True, backend="aot_eager")
        found, pairs = torch_gradients(compiled, operator, x, k, magnitude)
        for got, want in pairs:
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    batched = torch.vmap(lambda x, k: select(x, k, 0.7, magnitude))(*map(torch.tensor, (x, k)))
    # Which index fills a slot that is hardly used is up to rounding.
    used = st.topk_mask(torch.tensor(x), torch.tensor(k), 0.7).gather(-1, eager.indices) > 1e-9
    for each in (found, batched):
        torch.testing.assert_close(each.values, eager.values, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(each.dropped, eager.dropped, rtol=1e-9, atol=1e-9)
        assert (each.selected == eager.selected).all()
        assert magnitude or ((each.indices == eager.indices) | ~used).all()
    too_many = torch.vmap(lambda x: st.topk_select(x, torch.tensor(12.0), **options).values)
    assert too_many(torch.randn(2, 33)).isnan().all()


@pytest.mark.parametrize("magnitude", [False, True])
def test_straight_through_has_the_relaxed_gradient_in_jax(magnitude):
    jax = pytest.importorskip("jax")
    import sparsetopk.jax as st

    x, k = competing_rows()
    x = np.where(np.isinf(x), 0.01, x) if magnitude else x
    operator = st.topk_mag if magnitude else st.topk_mask
    options = {"magnitude": magnitude, "capacity": 11, "straight_through": True}
    at = tuple(jax.numpy.asarray(v) for v in (x, k, np.full_like(k, 0.7)))
    g = jax.numpy.asarray(gaussian(len(x), 11, seed=3))

    @jax.jit
    def both(*at):
        found, pull = jax.vjp(lambda *at: st.topk_select(*at, **options).values, *at)
        indices = st.topk_select(*at, **options).indices
        y, relaxed = jax.vjp(operator, *at)
        dy = jax.numpy.zeros_like(y).at[jax.numpy.arange(len(y))[:, None], indices].set(g)
        return found, pull(g), relaxed(dy)

    found, got, want = both(*at)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10)
    each = jax.vmap(lambda *row: st.topk_select(*row, **options).values)(*at)
    np.testing.assert_array_equal(each, found)
    too_many = jax.jit(lambda x, k: st.topk_select(x, k, capacity=11, straight_through=True).values)
    assert np.isnan(too_many(at[0], jax.numpy.asarray(12.0))).all()


def test_padding_does_not_set_the_scale_of_lam(st):
    """Next to the boundary, too: the search must not begin at the largest of floats."""
    x = np.array([[0.5, 0.2, -1.0, -np.inf, 0.1], [0.5, -np.inf, -np.inf, -np.inf, -np.inf]])
    lam = st.choose_lam(x, 1, 2)
    np.testing.assert_allclose(lam[0], st.choose_lam(x[0, [0, 1, 2, 4]], 1, 2), rtol=1e-6)
    assert 0 < lam[1, 0] < 10
