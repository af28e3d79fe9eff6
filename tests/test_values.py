"""Values, norms, conjugates and losses: the convex analysis of sections 4 and 5, as tests."""

import itertools

import numpy as np
import pytest
from scipy.optimize import linprog, minimize

import sparsetopk
import sparsetopk as st
from cases import CASES, ROWS, Case
from sparsetopk import reference
from sparsetopk.reference import numerical_jacobian

PHI_NAMES = ("identity", "half_square", "abs", "exp")


def gaussian(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def value_gradient(st, case: Case):
    """The value whose gradient in x is the operator of the case."""
    options = {"p": case.p}
    if case.two_sided:
        options["two_sided"] = True
    return lambda x, k, lam: st.topk_value(x, k, lam, phi=case.phi, **options)


GRADIENTS = [c for c in CASES if c.operator != "topk" and not c.options.get("debias")]


@pytest.mark.parametrize("case", GRADIENTS, ids=str)
def test_the_gradient_of_the_value_is_the_operator(st, case: Case):
    (x, k, lam), step = ROWS, 1e-5
    n = x.shape[1]
    moves = step * np.concatenate([np.eye(n), -np.eye(n)])
    at = (x[:, None] + moves, *(np.broadcast_to(v[:, None], (len(x), 2 * n, 1)) for v in (k, lam)))
    values = value_gradient(st, case)(*(v.reshape(-1, v.shape[-1]) for v in at)).reshape(-1, 2, n)
    numerical = (values[:, 0] - values[:, 1]) / (2 * step)
    y = case.function(st)(*ROWS)
    kink = (x == 0) & (case.phi == "abs")  # |x| is not differentiable in x at ties of 0
    np.testing.assert_allclose(numerical[~kink], y[~kink], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("case", GRADIENTS, ids=str)
def test_the_value_is_the_maximum(st, case: Case):
    """<x, y> - f*(y) - R(y) at the operator's y, and not more anywhere near it."""
    rng = np.random.default_rng(0)
    values, ys = value_gradient(st, case)(*ROWS), case.function(st)(*ROWS)
    for value, y, x, k, lam in zip(values, ys, *ROWS, strict=True):
        w = reference.ones_k(k[0], x.size)
        # towards other points of the polytope, which is convex
        towards = np.stack([rng.permutation(w) for _ in range(20)])
        towards = towards * np.sign(x if case.phi != "identity" else 1)
        near = np.concatenate([[y], y + 0.1 * (towards - y)])
        penalty = [reference.R(z, lam[0], case.p, case.two_sided) for z in near]
        objective = near @ x - sparsetopk.conjugate(near, w, phi=case.phi) - penalty
        np.testing.assert_allclose(objective[0], value, rtol=1e-9, atol=1e-9)
        assert (objective <= value + 1e-9).all()


def test_value_at_lam_zero_and_of_padding(st):
    x = np.array([3.0, -1.0, 2.0, -np.inf])
    assert st.topk_value(x, 2, 0.0) == 5
    for two_sided in (False, True):
        padded = st.topk_value(x, 2, 0.7, p=1.5, two_sided=two_sided)
        plain = st.topk_value(x[:3], 2, 0.7, p=1.5, two_sided=two_sided)
        np.testing.assert_allclose(padded, plain, rtol=1e-14)
    assert st.topk_value([np.inf, 1.0], 1, 0.5) == np.inf
    assert np.isnan(st.topk_value([np.nan, 1.0], 1, 0.5))
    assert st.topk_value([1.0, 2.0], 0, 0.25, two_sided=True) == -0.25  # -R(0)
    assert st.topk_value([-3.0, 1.0, 2.0], 2, 0.0, phi="half_square") == 6.5
    assert st.topk_value([-3.0, 1.0, 2.0], 2, 0.0, phi="abs") == 5
    assert st.topk_value(np.ones((2, 5, 3)), 2, axis=1).shape == (2, 3)


@pytest.mark.parametrize("phi", PHI_NAMES)
@pytest.mark.parametrize("p", [2.0, 4 / 3])
def test_permutahedron_value(phi, p):
    x, w = gaussian(6), np.array([2.0, 1.5, 1.0, 0.5, 0.2, 0.0])
    for lam in (0.3, 2.0):
        value = lambda x: np.atleast_1d(  # noqa: E731
            st.permutahedron_value(x, w, lam, p=p, phi=phi)  # noqa: B023
        )
        y = st.permutahedron(x, w, lam, p=p, phi=phi)
        np.testing.assert_allclose(numerical_jacobian(value, x)[0], y, rtol=1e-6, atol=1e-7)
        conjugate = float(st.conjugate(y, w, phi=phi))
        np.testing.assert_allclose(x @ y - conjugate - reference.R(y, lam, p), value(x)[0])
    ones = np.array([1.0, 1.0, 0.5, 0, 0, 0])
    np.testing.assert_allclose(
        st.permutahedron_value(x, ones, 0.3, p=p, phi=phi), st.topk_value(x, 2.5, 0.3, p=p, phi=phi)
    )


# norms


# SciPy before 1.16 warns of its own steps.
of_scipy = pytest.mark.filterwarnings("ignore:Values in x were outside bounds:RuntimeWarning")


@of_scipy
def test_half_squared_support_norm_is_the_minimum_over_z():
    for seed, k in itertools.product(range(4), (1, 2, 2.5, 4)):
        y = gaussian(5, seed=seed)
        bounds, total = [(1e-6, 1.0)] * 5, {"type": "eq", "fun": lambda z, k=k: z.sum() - k}
        found = minimize(
            lambda z, y=y: 0.5 * np.sum(y**2 / z),
            np.full(5, k / 5),
            jac=lambda z, y=y: -0.5 * y**2 / z**2,
            bounds=bounds,
            constraints=total,
            method="SLSQP",
            options={"ftol": 1e-14, "maxiter": 500},
        )
        np.testing.assert_allclose(st.half_sq_support_norm(y, k), found.fun, rtol=1e-6)


def test_half_squared_support_norm_of_sparse_vectors_and_its_ends():
    y = np.array([3.0, 0.0, -4.0, 0.0])
    assert st.half_sq_support_norm(y, 2) == st.half_sq_support_norm(y, 4) == 12.5
    np.testing.assert_allclose(st.half_sq_support_norm(y, 1), 0.5 * 7**2)
    assert st.half_sq_support_norm(y, 0) == np.inf
    assert st.half_sq_support_norm(0 * y, 0) == 0
    batch = gaussian(2, 5, 3)
    rows = st.half_sq_support_norm(batch, 2, axis=1)
    assert rows.shape == (2, 3)
    np.testing.assert_allclose(rows[1, 2], st.half_sq_support_norm(batch[1, :, 2], 2))


@of_scipy
def test_support_negentropy_is_the_minimum_over_z():
    for seed, k in itertools.product(range(4), (1, 2, 2.5)):
        y = np.random.default_rng(seed).dirichlet(np.ones(5))
        found = minimize(
            lambda z, y=y: np.sum(y * np.log(y / z)),
            np.full(5, k / 5),
            jac=lambda z, y=y: -y / z,
            bounds=[(1e-6, 1.0)] * 5,
            constraints={"type": "eq", "fun": lambda z, k=k: z.sum() - k},
            method="SLSQP",
            options={"ftol": 1e-14, "maxiter": 500},
        )
        np.testing.assert_allclose(st.support_negentropy(y, k), found.fun, atol=1e-6)
    assert st.support_negentropy([0.5, -0.1, 0.6], 2) == np.inf
    np.testing.assert_allclose(st.support_negentropy([1.0, 0.0, 0.0], 1), 0)
    # for k = 1 the constraint z <= 1 binds nowhere on the simplex: z = y
    np.testing.assert_allclose(st.support_negentropy([0.2, 0.3, 0.5], 1), 0, atol=1e-15)


def test_owl_norm():
    x, w = gaussian(3, 6), np.array([3.0, 2.0, 1.0, 0.5, 0.0, 0.0])
    expected = (-np.sort(-np.abs(x), axis=-1)) @ w
    np.testing.assert_allclose(st.owl_norm(x, w), expected)
    np.testing.assert_allclose(st.owl_norm(x, np.ones(6)), np.abs(x).sum(axis=-1))
    np.testing.assert_allclose(st.owl_norm(x, [1.0, 0, 0, 0, 0, 0]), np.abs(x).max(axis=-1))


@pytest.mark.parametrize("phi", PHI_NAMES)
def test_conjugate_is_a_conjugate(phi):
    """f(x) + f*(y) >= <x, y>, with equality for y a gradient of f at x (Proposition 3)."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        x, w = rng.normal(size=5), rng.uniform(0, 2, size=5)
        f = lambda x: float(st.permutahedron_value(x, w, 0.0, phi=phi))  # noqa: B023, E731
        y = st.permutahedron(x, w, 0.0, phi=phi)
        conjugate = float(st.conjugate(y, w, phi=phi))
        np.testing.assert_allclose(f(x) + conjugate, x @ y, atol=1e-12)
        other = rng.normal(size=5)
        assert f(other) + conjugate >= other @ y - 1e-12


def test_conjugates_of_identity_and_abs_are_indicators():
    w = np.array([2.0, 1.0, 0.0])
    inside, outside = [[1.0, 1.0, 1.0], [2.0, 0.0, 1.0]], [[2.1, 0.9, 0.0], [1.0, 1.0, 0.9]]
    np.testing.assert_array_equal(st.conjugate(inside, w), 0)
    np.testing.assert_array_equal(st.conjugate(outside, w), np.inf)
    np.testing.assert_array_equal(
        st.conjugate([[-1.0, 0.5, 0.0], [-2.0, 1.0, 0.0]], w, phi="abs"), 0
    )
    assert st.conjugate([2.0, -1.1, 0.0], w, phi="abs") == np.inf


@pytest.mark.parametrize("phi", PHI_NAMES)
def test_conjugates_of_what_is_not_finite(phi):
    assert st.conjugate([np.inf, 0.0], [1.0, 0.0], phi=phi) == np.inf
    assert st.conjugate([np.inf, -np.inf], [1.0, 0.0], phi=phi) == np.inf
    assert np.isnan(st.conjugate([1.0, 0.0], [np.inf, 0.0], phi=phi))
    assert np.isnan(st.conjugate([np.nan, 0.0], [1.0, 0.0], phi=phi))


def test_overflow_is_an_honest_infinity(st):
    assert st.topk_value([1e200, 0.0], 1, phi="half_square") == np.inf
    selection = st.topk_select(np.array([6e4, 6e4, 1, 2, 3], np.float16), 2, magnitude=True)
    assert selection.dropped == 0
    logits, targets = np.full((2, 3), 6e4, np.float16), np.array([0, 1])
    assert st.topk_loss(logits, targets, 3, reduction="sum", completion=None) == np.inf


def test_overflow_of_norms_and_jacobians():
    assert st.half_sq_support_norm([1e200, 0.0], 1) == np.inf
    # slopes are 1/lam, of a lam that is no smaller than what float16 can show
    jacobian = st.topk_mask_jacobian(np.array([1, 1, 0], np.float16), 1, 1e-6)
    assert np.isfinite(jacobian).all()
    assert np.abs(jacobian).max() > 1e3


@pytest.mark.parametrize("phi", ["half_square", "exp"])
@pytest.mark.parametrize("k", [1, 2])
def test_biconjugate_interpretation(phi, k):
    """Proposition 4: f*_phi(., 1_k) is the convex hull of sum_i phi*(y_i) on k-sparse vectors.

    The convex hull at y is the least mean of that function over convex combinations of k-sparse
    vectors that give y: a linear program over a grid of them.
    """
    n, grid = 3, np.linspace(0, 2.0, 21)
    phi_star = (
        (lambda y: y**2 / 2) if phi == "half_square" else (lambda y: y * np.log(y + (y == 0)))
    )
    points = {
        tuple(np.where(np.isin(np.arange(n), support), values, 0.0))
        for support in itertools.combinations(range(n), k)
        for values in itertools.product(grid, repeat=n)
    }
    atoms = np.array(sorted(points)).T
    cost = phi_star(atoms).sum(axis=0)
    for y in (np.array([0.5, 0.3, 0.2]), np.array([0.9, 0.1, 0.4]), np.array([0.0, 0.7, 0.2])):
        hull = linprog(
            cost,
            A_eq=np.vstack([atoms, np.ones(cost.size)]),
            b_eq=np.append(y, 1.0),
            method="highs",
        )
        exact = float(st.conjugate(y, reference.ones_k(k, n), phi=phi))
        # the grid leaves out atoms: it can only be above, by its resolution
        assert exact <= hull.fun + 1e-9
        np.testing.assert_allclose(hull.fun, exact, atol=3e-2)


def test_error_bound_of_section_5(st):
    """|topkmag_R(x) - topkmag(x)| <= lam |x|_inf once lam is small enough to pool nothing (p = 2)."""
    x, k = gaussian(900, 10), np.arange(900)[:, None] % 9 + 1
    size = -np.sort(-np.abs(x))
    at_k, beyond = (np.take_along_axis(size, i, axis=-1) for i in (k - 1, k))
    lam = 0.9 * (at_k / beyond - 1)  # singletons are in order while 1 + lam <= s_k / s_{k+1}
    error = np.abs(st.topk_mag(x, k, lam, debias=False) - st.topk_mag(x, k, 0.0))
    bound = lam / (1 + lam) * size[:, :1]  # attained, and below lam |x|_inf
    np.testing.assert_allclose(error.max(axis=-1, keepdims=True), bound)


# losses


@pytest.mark.parametrize("completion", [None, "spread", "best"])
@pytest.mark.parametrize("options", [{"p": 2.0}, {"p": 4 / 3}, {"p": 1.5, "two_sided": True}])
def test_loss_gradient(st, completion, options):
    logits, targets = gaussian(4, 6), np.array([0, 5, 2, 2])
    options, step = options | {"completion": completion}, 1e-6
    moves = step * np.concatenate([np.eye(6), -np.eye(6)])
    moved = (logits[:, None] + moves).reshape(-1, 6)
    losses = st.topk_loss(moved, np.repeat(targets, 12), 3, 0.8, reduction="none", **options)
    ahead, behind = losses.reshape(4, 2, 6).swapaxes(0, 1)
    numerical = (ahead - behind) / (2 * step)
    none = st.topk_loss(logits, targets, 3, 0.8, reduction="none", **options)
    assert none.shape == (4,)
    for reduction, scale in (("mean", 1 / 4), ("sum", 1.0)):
        gradient = st.topk_loss_vjp(logits, targets, 3, 0.8, reduction=reduction, **options)
        np.testing.assert_allclose(gradient, scale * numerical, atol=1e-6)
        loss = st.topk_loss(logits, targets, 3, 0.8, reduction=reduction, **options)
        np.testing.assert_allclose(loss, scale * none.sum())


def test_loss_is_value_minus_inner_product_with_gradient_y_minus_t(st):
    logits, targets = gaussian(4, 6), np.array([0, 5, 2, 2])
    one_hot = np.eye(6)[targets]
    paper = {"completion": None, "reduction": "none"}
    loss = st.topk_loss(logits, targets, 3, 0.8, **paper)
    expected = st.topk_value(logits, 3, 0.8) - np.sum(logits * one_hot, axis=-1)
    np.testing.assert_allclose(loss, expected)
    np.testing.assert_allclose(st.topk_loss(logits, one_hot, 3, 0.8, **paper), loss)
    gradient = st.topk_loss_vjp(logits, targets, 3, 0.8, **paper)
    np.testing.assert_allclose(gradient, st.topk_mask(logits, 3, 0.8) - one_hot)
    # k = 3 and one label: not invariant to a shift, and not bounded
    shifted = st.topk_loss(logits - 7.0, targets, 3, 0.8, **paper)
    np.testing.assert_allclose(shifted, loss - 7.0 * 2)


@pytest.mark.parametrize("completion", ["spread", "best"])
@pytest.mark.parametrize("two_sided", [False, True])
def test_completed_losses_are_nonnegative_and_shift_invariant(st, completion, two_sided):
    rng = np.random.default_rng(1)
    options = {"completion": completion, "reduction": "none", "two_sided": two_sided, "p": 1.5}
    logits, targets = rng.normal(size=(50, 6)), rng.integers(0, 6, size=50)
    loss = st.topk_loss(logits, targets, 3, 0.8, **options)
    assert (loss >= -1e-12).all()
    np.testing.assert_allclose(
        st.topk_loss(logits + 7.0, targets, 3, 0.8, **options), loss, atol=1e-12
    )
    labels = np.zeros((50, 6))
    labels[np.arange(50), targets] = labels[np.arange(50), (targets + 1) % 6] = 1.0
    assert (st.topk_loss(logits, labels, 3, 0.8, **options) >= -1e-12).all()


def test_best_is_zero_exactly_when_the_labels_are_selected(st):
    rng = np.random.default_rng(2)
    logits, targets = 2 * rng.normal(size=(200, 6)), rng.integers(0, 6, size=200)
    loss = st.topk_loss(logits, targets, 3, 0.5, completion="best", reduction="none")
    share = np.take_along_axis(st.topk_mask(logits, 3, 0.5), targets[:, None], axis=-1)[:, 0]
    assert 20 < (share == 1).sum() < 180
    np.testing.assert_allclose(loss[share == 1], 0, atol=1e-13)
    assert (loss[share < 1] > 0).all()


def test_spread_is_the_fenchel_young_loss_of_the_filled_target(st):
    logits, t = gaussian(6), np.array([1.0, 0, 0, 1, 0, 0])
    filled = np.array([1.0, 0.25, 0.25, 1, 0.25, 0.25])
    loss = st.topk_loss(logits, t, 3, 0.8)  # the default
    expected = st.topk_value(logits, 3, 0.8) - logits @ filled + reference.R(filled, 0.8, 2.0)
    np.testing.assert_allclose(loss, expected)
    gradient = st.topk_loss_vjp(logits, t, 3, 0.8)
    np.testing.assert_allclose(gradient, st.topk_mask(logits, 3, 0.8) - filled)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_soft_targets_may_sum_to_k_up_to_rounding(st, dtype):
    logits = gaussian(50, 7).astype(dtype)
    t = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    assert (t.astype(float).sum(axis=-1) > 1).any()
    assert (st.topk_loss(logits, t, 1, completion="spread", reduction="none") > -1e-6).all()


def test_losses_with_padding_and_empty_batches(st):
    logits = np.array([[1.0, -np.inf, 0.3, 0.2], [0.5, 0.1, -np.inf, 0.9]])
    kept = np.array([[1.0, 0.3, 0.2], [0.5, 0.1, 0.9]])
    for completion in (None, "spread", "best"):
        padded = st.topk_loss(logits, [2, 3], 2, 0.5, completion=completion, reduction="none")
        plain = st.topk_loss(kept, [1, 2], 2, 0.5, completion=completion, reduction="none")
        np.testing.assert_allclose(padded, plain, atol=1e-14)
        gradient = st.topk_loss_vjp(logits, [2, 3], 2, 0.5, completion=completion)
        assert np.isfinite(gradient).all()
    few = np.array([[1.0, 0.5, -np.inf, -np.inf]])  # two candidates for k = 3: both selected
    for completion in ("spread", "best"):
        np.testing.assert_allclose(st.topk_loss(few, [0], 3, completion=completion), 0, atol=1e-15)
        np.testing.assert_allclose(st.topk_loss_vjp(few, [0], 3, completion=completion), 0)
    none = np.empty((0, 5)), np.empty(0, dtype=int)
    assert st.topk_loss(*none, 2, reduction="sum") == 0
    assert np.isnan(st.topk_loss(*none, 2))
    assert st.topk_loss_vjp(*none, 2).shape == (0, 5)
