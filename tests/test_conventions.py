"""The conventions: ties, k and lam at their ends, padding, infinities, NaN, shifts, limits."""

import itertools

import numpy as np
import pytest

import sparsetopk
import sparsetopk as st
from cases import CASES, MAGNITUDES, MASKS, PRODUCTS, SIGNS, TWO_SIDED, Case, stacked
from frontends import needs_solver
from sparsetopk import _core as core

ALL_MASKS = [*MASKS, *TWO_SIDED]
PADDED = [*ALL_MASKS, *PRODUCTS]
INF = np.inf


def gaussian(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


# hard operators


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_hard_operators_are_those_of_numpy(axis):
    x = gaussian(6, 7)
    order = np.argsort(-x, axis=axis, kind="stable")
    np.testing.assert_array_equal(st.argsort(x, axis=axis), order)
    np.testing.assert_array_equal(st.sort(x, axis=axis), np.take_along_axis(x, order, axis))
    np.testing.assert_array_equal(st.rank(x, axis=axis), np.argsort(order, axis=axis) + 1)
    ascending = st.sort(x, descending=False, axis=axis)
    np.testing.assert_array_equal(ascending, np.sort(x, axis=axis))
    np.testing.assert_array_equal(
        st.rank(x, descending=False, axis=axis), np.argsort(np.argsort(x, axis=axis), axis=axis) + 1
    )


def test_the_example_of_the_paper(st):
    x = np.array([1.0, -3.0, 2.0])  # x_3 >= x_1 >= x_2, |x_2| >= |x_3| >= |x_1|
    np.testing.assert_array_equal(st.argsort(x), [2, 0, 1])
    np.testing.assert_array_equal(st.sort(x), [2, 1, -3])
    np.testing.assert_array_equal(st.rank(x), [2, 3, 1])
    np.testing.assert_array_equal(st.topk_mask(x, 2, lam=0), [1, 0, 1])
    np.testing.assert_array_equal(st.topk(x, 2, lam=0), [1, 0, 2])
    np.testing.assert_array_equal(st.topk_mag(x, 2, lam=0), [0, -3, 2])
    np.testing.assert_array_equal(st.topk_sign(x, 2, lam=0), [0, -1, 1])


def test_hard_operators_take_batches(st):
    x = gaussian(5, 9)
    expected = (st.rank(x) <= 3).astype(float)
    np.testing.assert_array_equal(st.topk_mask(x, 3, lam=0), expected)
    np.testing.assert_array_equal(st.topk(x, 3, lam=0), x * expected)
    np.testing.assert_array_equal(st.topk_mag(x, 3, lam=0), x * (st.rank(np.abs(x)) <= 3))


def test_the_lowest_index_wins_a_hard_tie(st):
    x = [1.0, 2.0, 1.0, 1.0, 2.0]
    np.testing.assert_array_equal(st.topk_mask(x, 3, lam=0), [1, 1, 0, 0, 1])
    np.testing.assert_array_equal(st.topk_mask(x, 3.25, lam=0), [1, 1, 0.25, 0, 1])
    np.testing.assert_array_equal(st.rank(x), [3, 1, 4, 5, 2])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_hard_derivatives(st, case: Case):
    x, k = gaussian(5, 7), np.full((5, 1), 2.5)
    y = case.function(st)(x, k, lam=0)
    kept = sparsetopk.topk_mask(np.abs(x) if case.phi != "identity" else x, k, lam=0)
    vjp = case.function(st, "_vjp")(x, k, 0 * k, dy=np.ones_like(x))
    identity = case.operator in ("topk", "topk_mag")
    np.testing.assert_array_equal(vjp.x, kept if identity else 0 * kept)
    np.testing.assert_array_equal(vjp.k, 0)
    np.testing.assert_array_equal(vjp.lam, 0)
    np.testing.assert_array_equal(np.count_nonzero(y, axis=-1), 3)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_hard_and_relaxed_rows_may_be_mixed(st, case: Case):
    x, dy = gaussian(2, 4, 7)
    lam, k = np.array([[0.0], [0.3], [0.0], [2.0]]), np.array([[1], [2], [3], [4]])
    y = case.function(st)(x, k, lam)
    jacobian = case.function(st, "_jacobian")(x, k, lam)
    vjp = case.function(st, "_vjp")(x, k, lam, dy=dy)
    for i in range(4):
        at = x[i : i + 1], k[i : i + 1], lam[i : i + 1]
        np.testing.assert_array_equal(y[i], case.function(st)(*at)[0])
        np.testing.assert_array_equal(jacobian[i], case.function(st, "_jacobian")(*at)[0])
        for part, row in zip(vjp, case.function(st, "_vjp")(*at, dy=dy[i : i + 1]), strict=True):
            np.testing.assert_allclose(part[i], row[0], atol=1e-14)


# ties, ends of k


@pytest.mark.parametrize("case", ALL_MASKS, ids=str)
def test_relaxed_ties_share_equally(st, case: Case):
    xs = np.array([[1.0] * 3 + [-50.0] * 5, [3.3] * 8])
    y = case.function(st)(*stacked(itertools.product(xs, [2], [1e-8, 0.3, 5.0])))
    np.testing.assert_allclose(y[:3], [[2 / 3] * 3 + [0] * 5] * 3, atol=1e-14)
    np.testing.assert_allclose(y[3:], 0.25)


# For p = 1.2 what is fractional may be as small as a rounding.
@pytest.mark.parametrize("case", [c for c in CASES if c.p != 1.2], ids=str)
def test_the_derivative_in_k_is_zero_where_nothing_is_fractional(st, case: Case):
    """At a whole k, also if rounding leaves the entry at the boundary just below its ceiling."""
    n = 7
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, 3000, n))
    k, lam = rng.integers(1, n, size=(3000, 1)), 10 ** rng.uniform(-3, 0, size=(3000, 1))
    jvp = case.function(sparsetopk, "_jvp")(x, k, lam, dk=np.ones_like(k))
    found = case.function(st, "_vjp")(x, k, lam, dy=dy).k[:, 0]
    np.testing.assert_allclose(found, (jvp * dy).sum(axis=-1), rtol=1e-6, atol=1e-9)
    assert (found == 0).sum() > 300


@pytest.mark.parametrize("case", CASES, ids=str)
def test_k_zero_selects_nothing_and_k_n_everything(st, case: Case):
    """At any lam; but shrunk for magnitudes without debias and for signs."""
    lams = (0.0, 1e-8, 0.3, 1e8)
    x, k, lam = stacked(itertools.product(gaussian(3, 7), (0, 7), lams))
    none = k[:, 0] == 0
    y, jacobian = case.function(st)(x, k, lam), case.function(st, "_jacobian")(x, k, lam)
    np.testing.assert_array_equal(y[none], 0)
    np.testing.assert_array_equal(jacobian[none], 0)
    if case.phi == "identity":
        np.testing.assert_array_equal(y[~none], x[~none] if case.operator == "topk" else 1)
    elif case.options.get("debias"):
        np.testing.assert_array_equal(y[~none], x[~none])
    if case in ALL_MASKS:
        np.testing.assert_array_equal(jacobian[~none], 0)
    elif case.options.get("debias"):
        identity = np.broadcast_to(np.eye(7), jacobian[~none].shape)
        np.testing.assert_allclose(jacobian[~none], identity, atol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 7, 40])
@pytest.mark.parametrize("case", ALL_MASKS, ids=str)
def test_masks_are_masks(st, case: Case, n):
    rng = np.random.default_rng(n)
    x, k = rng.normal(size=(1000, n)), rng.uniform(0, n, size=(1000, 1))
    lam = 10.0 ** rng.uniform(-8, 8, size=(1000, 1))
    y = case.function(st)(x, k, lam)
    assert ((y >= 0) & (y <= 1)).all()
    # p > 2 is not Lipschitz: one rounding of the threshold moves the sum by its root
    atol = 1e-11 if case.p <= 2 or case.two_sided else 1e-6
    np.testing.assert_allclose(y.sum(axis=-1, keepdims=True), k, rtol=1e-12, atol=atol)
    assert (np.diff(np.take_along_axis(y, np.argsort(x), axis=-1)) >= -1e-12).all()


# padding and infinities


ONE_SIDED = [case for case in PADDED if not case.two_sided]


@pytest.mark.parametrize(
    ("case", "solver"),
    [*((case, "threshold") for case in PADDED), *((case, "pav") for case in ONE_SIDED)],
    ids=str,
)
def test_padding_is_as_if_it_were_not_there(st, case: Case, solver):
    needs_solver(st, solver)
    x = np.array([0.4, -INF, 1.2, -INF, 0.9, -0.3, -INF])
    there = x > -INF
    f, vjp = case.function(st), case.function(st, "_vjp")
    at = stacked([(x, 2, 0.5), (x, 2.5, 3.0), (x, 1, 0.0), (x, 0, 1.0)])
    dy = np.tile(np.cos(np.arange(7.0)), (4, 1))
    # Without the padding, by NumPy: on JAX another length would be compiled. Front-ends add up in
    # another order, which costs a digit beside the same one with and without padding.
    less = at[0][:, there], *at[1:]
    plain = case.function(sparsetopk, "_vjp")(*less, dy=dy[:, there])
    y, padded = f(*at, solver=solver), vjp(*at, dy=dy, solver=solver)
    np.testing.assert_allclose(y[:, there], case.function(sparsetopk)(*less), atol=1e-13)
    np.testing.assert_array_equal(y[:, ~there], 0)
    np.testing.assert_allclose(padded.x[:, there], plain.x, atol=1e-12)
    np.testing.assert_array_equal(padded.x[:, ~there], 0)
    np.testing.assert_allclose(padded.k, plain.k, atol=1e-12)
    np.testing.assert_allclose(padded.lam, plain.lam, atol=1e-12)


@pytest.mark.parametrize("case", PADDED, ids=str)
def test_too_few_candidates_are_all_selected(st, case: Case):
    few, none = [0.4, -INF, 1.2] + [-INF] * 4, [-INF] * 7
    at = stacked(itertools.product(np.array([few, none]), [3], [0.0, 0.5]))
    y = case.function(st)(*at)
    expected = np.where(at[0] > -INF, at[0] if case.operator == "topk" else 1.0, 0.0)
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(case.function(st, "_vjp")(*at, dy=np.ones((4, 7))).k, 0)


@pytest.mark.parametrize(
    ("case", "solver"),
    [*((case, "threshold") for case in ALL_MASKS), *((case, "pav") for case in MASKS)],
    ids=str,
)
def test_plus_infinity_is_selected_or_shares(st, case: Case, solver):
    needs_solver(st, solver)
    x = np.array([INF, 0.3, 0.2, -INF, 0.1, -INF, -INF])
    crowded = np.array([INF, INF, 7.0, INF, -INF, -INF, -INF])
    at, dy = stacked([(x, 2, 0.5), (crowded, 2, 0.5)]), np.tile(np.arange(7.0), (2, 1))
    y = case.function(st)(*at, solver=solver)
    assert y[0, 0] == 1
    np.testing.assert_allclose(y[0, 1:], case.function(sparsetopk)(x[1:], 1, 0.5), atol=1e-14)
    np.testing.assert_allclose(y[1], [2 / 3, 2 / 3, 0, 2 / 3, 0, 0, 0])
    vjp = case.function(st, "_vjp")(*at, dy=dy, solver=solver)
    np.testing.assert_array_equal(vjp.x[1], 0)
    np.testing.assert_allclose(vjp.k[1], 4 / 3)  # the mean of dy over those that share


def test_infinities_beside_the_largest_floats(st):
    for solver in st.solvers[:2]:
        np.testing.assert_array_equal(st.topk_mask([INF, 1e308, 0.0], 1, solver=solver), [1, 0, 0])
        np.testing.assert_array_equal(
            st.topk_mask([-INF, -1e308, 0.0], 1, solver=solver), [0, 0, 1]
        )


def test_topk_of_infinities_has_finite_gradients(st):
    for part in st.topk_vjp([INF, INF, 0.0], 1, dy=[0.0, 0.0, 1.0]):
        assert np.isfinite(part).all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_nan_stays_in_its_row(st, case: Case):
    x = gaussian(3, 7)
    at = x.copy(), np.full((3, 1), 2.0), np.full((3, 1), 0.3)
    x[1, 2] = np.nan
    y = case.function(st)(x, *at[1:])
    assert np.isnan(y[1]).all()
    np.testing.assert_array_equal(y[[0, 2]], case.function(st)(*at)[[0, 2]])
    vjp = case.function(st, "_vjp")(x, *at[1:], dy=np.ones((3, 7)))
    assert np.isnan(vjp.x[1]).all()
    assert np.isnan(vjp.k[1]).all()
    assert np.isfinite(vjp.x[[0, 2]]).all()
    assert np.isfinite(vjp.k[[0, 2]]).all()
    assert np.isnan(case.function(st, "_jacobian")(x, *at[1:])[1]).all()


@pytest.mark.parametrize("bad", [INF, -INF, np.nan])
def test_infinities_make_rows_nan_where_they_have_no_meaning(bad):
    x = gaussian(3, 5)
    x[1, 2] = bad
    operators = [case.function(st) for case in (*MAGNITUDES, *SIGNS)]
    results = [f(x, 2, 0.3) for f in operators]
    results += [st.permutahedron(x, np.ones(5)), st.permutahedron(gaussian(3, 5), x)]
    if bad != -INF:  # which is padding there
        results += [st.soft_sort(x), st.soft_rank(x)]
    for y in results:
        assert np.isnan(y[1]).all()
        assert np.isfinite(y[[0, 2]]).all()


# precision


@pytest.mark.parametrize("case", ALL_MASKS, ids=str)
def test_a_common_shift_changes_nothing_beyond_rounding(st, case: Case):
    x = (gaussian(50) + 1e5).astype(np.float32)
    y = case.function(st)(x, 5, 0.1)
    exact = case.function(st)(x.astype(np.float64) - 1e5, 5, 0.1)
    atol = 1e-7 if case.p <= 2 or case.two_sided else 1e-5
    np.testing.assert_allclose(y, exact, atol=atol)


@pytest.mark.parametrize("case", ALL_MASKS, ids=str)
def test_small_lam_keeps_the_sum(st, case: Case):
    x = (5 * gaussian(1000)).astype(np.float32)
    np.testing.assert_allclose(case.function(st)(x, 10, 1e-5).sum(), 10, atol=1e-5)


@pytest.mark.parametrize("debias", [True, False])
@pytest.mark.parametrize("p", [2.0, 1.5, 1.2])
def test_the_largest_magnitude_without_the_core(p, debias, monkeypatch):
    """Where it is selected whole its S(t) overflows, and its threshold is above half of the largest
    number."""
    monkeypatch.setattr(core, "native", None)
    x = np.array([[1.7e308, 5e-324, 0.0, -1e-300, 2.0]])
    y = sparsetopk.topk_mag(x, 1, 1e-8, p=p, debias=debias)
    np.testing.assert_allclose(y, x * [1, 0, 0, 0, 0], rtol=2e-8)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_extreme_numbers_are_no_problem(st, case: Case):
    # for p > 2 the argument of the response to x is a power above 1 of x
    tiny, huge = 5e-324, 1.7e308 if case.p <= 2 or case.phi == "identity" else 1e100
    xs = (
        [huge, -huge, huge / 2, 0.0, 1.0],
        [3 * tiny, 2 * tiny, tiny, 0.0, -tiny],
        [huge, tiny, 0.0, -1e-300, 2.0],
    )
    lams = (1e-300, 1e-8, 1.0, 1e8, 1e300)
    at = stacked(itertools.product(xs, (1, 2.5, 4), lams))
    y = case.function(st)(*at)
    assert np.isfinite(y).all()
    if case in ALL_MASKS:
        atol = 1e-12 if case.p <= 2 or case.two_sided else 1e-6
        np.testing.assert_allclose(y.sum(axis=-1, keepdims=True), at[1], atol=atol)


@pytest.mark.parametrize("case", [c for c in ALL_MASKS if c.p <= 2], ids=str)
def test_slopes_in_float16_leave_room(case: Case, monkeypatch):
    """Entries that share have slopes of 1/lam: they are taken with a lam that float16 can show, with
    room for sums of them, and are not cut at the largest number."""
    monkeypatch.setattr(sparsetopk._core, "native", None)
    x = np.array([1.0, 1.0, 0.5], dtype=np.float16)
    slopes = np.abs(case.function(sparsetopk, "_jacobian")(x, 1, 1e-7))
    assert 0 < slopes.max() <= np.finfo(np.float16).max / 4


# limits


@pytest.mark.parametrize("case", CASES, ids=str)
def test_small_lam_is_hard(st, case: Case):
    x = gaussian(4, 30)
    y, hard = case.function(st)(x, 7, 1e-10), case.function(st)(x, 7, 0.0)
    # without debias, T(a) is below a by lam a^(p-1)
    np.testing.assert_allclose(y, hard, atol=1e-8)


DEBIASED = [case for case in MAGNITUDES if case.options["debias"]]


@pytest.mark.parametrize("case", [*ALL_MASKS, *DEBIASED], ids=str)
def test_large_lam_is_uniform_or_the_identity(st, case: Case):
    x = gaussian(4, 30)
    y = case.function(st)(x, 7, 1e12)
    if case in ALL_MASKS:
        np.testing.assert_allclose(y, 7 / 30, rtol=1e-8)
    else:
        np.testing.assert_allclose(y, x, atol=1e-5)


@pytest.mark.parametrize("p", [2.0, 4 / 3])
@pytest.mark.parametrize("descending", [True, False])
def test_limits_of_sort_and_rank(p, descending):
    x = gaussian(3, 9)
    options = {"p": p, "descending": descending}
    np.testing.assert_allclose(
        st.soft_sort(x, 1e-9, **options), st.sort(x, descending=descending), atol=1e-7
    )
    np.testing.assert_allclose(
        st.soft_rank(x, 1e-9, **options), st.rank(x, descending=descending), atol=1e-7
    )
    np.testing.assert_array_equal(st.soft_sort(x, 0, **options), st.sort(x, descending=descending))
    np.testing.assert_array_equal(st.soft_rank(x, 0, **options), st.rank(x, descending=descending))
    mean = np.broadcast_to(x.mean(axis=-1, keepdims=True), x.shape)
    if p == 2:
        np.testing.assert_allclose(st.soft_sort(x, 1e9, **options), mean, atol=1e-7)
        np.testing.assert_allclose(st.soft_rank(x, 1e9, **options), 5.0, atol=1e-7)


def test_sort_and_rank_keep_precise_indices_in_float16():
    x = np.linspace(-1, 1, 3000).astype(np.float16)
    expected = st.soft_rank(x.astype(np.float64), 1e-3).astype(np.float16)
    np.testing.assert_array_equal(st.soft_rank(x, 1e-3), expected)
    np.testing.assert_array_equal(st.soft_sort(x, 0.0), np.sort(x)[::-1])


def test_zeros_have_the_derivative_of_what_they_are_part_of():
    x = np.array([0.0, 1.0, -2.0])
    np.testing.assert_allclose(st.topk_mag_jacobian(x, 3, 0.5), np.eye(3))
    np.testing.assert_allclose(st.topk_mag_jacobian(x, 3, 0.5, debias=False), np.eye(3) / 1.5)
    # fewer than k entries are selected at g = 0: y = x/lam there, zeros too
    np.testing.assert_allclose(st.topk_sign_jacobian([0.0, 0.1], 2, 1.0), np.eye(2))
    # at g > 0 a zero is far from being selected
    for solver in ("threshold", "pav"):
        jacobian = st.topk_sign_jacobian([0.0, 2.0, 1.9], 1, 0.5, solver=solver)
        np.testing.assert_allclose(jacobian, [[0, 0, 0], [0, 1, -1], [0, -1, 1]])
    np.testing.assert_allclose(
        st.permutahedron_jacobian([0.1, 0.0], [1.0, 0.5], 1.0, phi="abs"), np.eye(2)
    )
    # one zero among the others keeps its rank, and its weight, as it moves
    w = [1.0, 0.5, 0.25]
    np.testing.assert_allclose(
        st.permutahedron_jacobian(x, w, 0.5, phi="half_square")[0], [0.25 / (1 + 0.5 * 0.25), 0, 0]
    )
    for solver in ("threshold", "pav", "dykstra", "bca"):
        # with more zeros than are selected, which of them is open: none has a slope, by convention
        jacobian = st.topk_mag_jacobian([0.0, 3.0, 0.0, 0.0], 2, 0.5, solver=solver)
        np.testing.assert_allclose(jacobian, np.diag([0.0, 1, 0, 0]))
        jacobian = st.topk_mag_jacobian(x, 3, 0.5, solver=solver)
        np.testing.assert_allclose(jacobian, np.eye(3), atol=1e-12)


def test_lmo_is_a_permutation_of_w():
    x, w = gaussian(4, 6), gaussian(6, seed=1)
    y = st.lmo(x, w)
    np.testing.assert_array_equal(np.sort(y, axis=-1), np.broadcast_to(np.sort(w), (4, 6)))
    np.testing.assert_array_equal(y, np.take(-np.sort(-w), st.rank(x) - 1))
    np.testing.assert_array_equal(st.permutahedron(x, w, 0.0), y)
