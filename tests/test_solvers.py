"""All solvers find the same optimum, and know when they have not."""

import os

import numpy as np
import pytest
from hypothesis import Phase, assume, example, given, settings
from hypothesis import strategies as some

import sparsetopk as st
from scalars import PHIS, PNorm, TwoSidedPNorm, operator_of, state_in_numpy
from scalars import relaxed as solved_rows
from sparsetopk import reference
from sparsetopk._core import _native as _core
from sparsetopk._numpy import namespace as xp
from sparsetopk._numpy.isotonic import solve_isotonic
from sparsetopk._numpy.solution import ByThreshold

THOROUGHNESS = 20 if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else 1
PHI_NAMES = ("identity", "half_square", "abs", "exp")
# Every operator family over the same inputs; a name, the function, and the phi of its optimum.
TOP_K = {"identity": st.topk_mask, "half_square": st.topk_mag, "abs": st.topk_sign}


def finite(low, high):
    return some.floats(low, high, allow_nan=False, width=64)


@some.composite
def rows(draw, max_n=32):
    """Entries of different kinds: smooth, with ties, at different scales, with zeros."""
    n = draw(some.integers(1, max_n))
    kind = draw(some.sampled_from(["floats", "integers", "gaussian"]))
    if kind == "gaussian":
        seed = draw(some.integers(0, 2**32 - 1))
        x = np.random.default_rng(seed).normal(size=n)
    else:
        entries = finite(-3, 3) if kind == "floats" else some.integers(-3, 3).map(float)
        x = np.array(draw(some.lists(entries, min_size=n, max_size=n)))
    x = x * draw(some.sampled_from([1.0, 1.0, 1e-3, 50.0]))
    return np.where(np.abs(x) < 1e-30, 0.0, x)  # the residual squares what it compares


def lams(low=-3.0, high=2.0):
    return finite(low, high).map(lambda e: 10.0**e)


def ks(n):
    return some.one_of(some.integers(0, n).map(float), finite(0, n))


def relaxed(phi, x, k, lam, p, **options):
    if phi == "half_square":
        options["debias"] = False
    return TOP_K[phi](x, k, lam, p=p, **options)


@given(some.data(), rows(), lams(), some.sampled_from([2.0, 1.5, 4 / 3, 1.2, 1.9]))
@settings(max_examples=400 * THOROUGHNESS)
def test_threshold_equals_pav(data, x, lam, p):
    k = data.draw(ks(x.size))
    for phi in TOP_K:
        y = relaxed(phi, x, k, lam, p)
        np.testing.assert_allclose(
            y, relaxed(phi, x, k, lam, p, solver="pav"), rtol=1e-9, atol=1e-9
        )
        w = reference.ones_k(k, x.size)
        assert reference.kkt_residual(y, x, w, lam, p, phi) < 1e-9


@given(some.data(), rows(), lams(), some.sampled_from([1.5, 4 / 3, 2.0, 1.2, 3.0]))
@settings(max_examples=200 * THOROUGHNESS)
def test_two_sided_masks_are_optimal(data, x, lam, p):
    k = data.draw(ks(x.size))
    y = st.topk_mask(x, k, lam, p=p, two_sided=True)
    # y near 1 is known to a rounding only, which the gradient of |1 - y|^p raises to the power p - 1
    tolerance = max(1e-9, np.finfo(float).eps ** (p - 1))
    w = reference.ones_k(k, x.size)
    assert reference.kkt_residual(y, x, w, lam, p, two_sided=True) < tolerance


OPERATORS = {  # what the compiled core knows
    "mask": (PNorm, "identity"),
    "magnitude": (PNorm, "half_square"),
    "sign": (PNorm, "abs"),
    "two-sided": (TwoSidedPNorm, "identity"),
}


def both(x, k, lam, p, operator):
    """The operator by the core and in NumPy."""
    regularizer, phi = OPERATORS[operator]
    arguments = (x, k, lam, operator_of(regularizer(p), phi))
    core, state = solved_rows(*arguments), state_in_numpy(*arguments)
    with xp.quiet():
        plain = type(core).of(xp, x, xp.split(k), lam, state, arguments[3], sums=xp.sums, floor=0.0)
    return ByThreshold(core).y, ByThreshold(plain).y


@given(some.data(), rows(), lams(-8, 8), some.sampled_from([2.0, 1.5, 4 / 3, 1.2, 3.0]))
@settings(max_examples=200 * THOROUGHNESS)
def test_the_core_equals_numpy(data, x, lam, p):
    k = np.array([[data.draw(ks(x.size))]])
    for operator in OPERATORS:
        core, plain = both(x[None], k, np.array([[lam]]), p, operator)
        np.testing.assert_allclose(core, plain, rtol=1e-9, atol=1e-9)


def long_rows(n=30_000):
    rng = np.random.default_rng(0)
    x = rng.normal(size=n)
    return {
        "gaussian": x,
        "cauchy": rng.standard_cauchy(size=n),
        "log-normal": np.exp(5 * x),
        "two-valued": np.where(x > 0.3, 1.0, -1.0),
        "constant": np.full(n, 0.7),
        "sorted": np.sort(x),
        "reversed": -np.sort(-x),
        "one outlier": np.append(x[1:], 1e8),
        "relu": np.maximum(x, 0.0),
        "rounded": np.round(x, 1),
        "integers": np.round(x),  # few values: a bracket of the sample, [0, 1], may not shrink
        "padded": np.where(x < -1, -np.inf, x),
    }


@pytest.mark.parametrize("lam", [1e-5, 0.1, 100.0])
@pytest.mark.parametrize("name", long_rows())
def test_the_core_equals_numpy_on_long_rows(name, lam):
    """Longer than its buffer: samples, counting passes, and entries that are not copied."""
    x = long_rows()[name][None]
    for k in (1.0, 64.0, 3000.5, 8676.0, 15_000.0):
        for operator, p in (("mask", 2.0), ("mask", 4 / 3), ("magnitude", 2.0), ("two-sided", 1.5)):
            if operator == "magnitude" and name == "padded":
                continue
            core, plain = both(x, np.array([[k]]), np.array([[lam]]), p, operator)
            np.testing.assert_allclose(core, plain, rtol=1e-9, atol=1e-9)


def test_the_core_checks_what_it_can():
    for op, dtype in ((7, 1), (0, 4), (-1, 1)):
        with pytest.raises(ValueError, match=rf"op must be in .* got {op} and {dtype}"):
            _core.threshold_forward(op, 1.0, False, dtype, 0, 1, 1, 0, 0, 1, 0, 1, 0, 0, 1)


@given(some.data(), rows(), lams())
@settings(max_examples=60 * THOROUGHNESS)
def test_dykstra_equals_threshold(data, x, lam):
    k = data.draw(ks(x.size))
    for phi in TOP_K:
        y = relaxed(phi, x, k, lam, 2.0, solver="dykstra")
        np.testing.assert_allclose(y, relaxed(phi, x, k, lam, 2.0), rtol=1e-6, atol=1e-6)
        w = reference.ones_k(k, x.size)
        assert reference.kkt_residual(y, x, w, lam, 2.0, phi) < 1e-6


@pytest.mark.slow
@given(some.data(), rows(), lams(-2, 0), some.sampled_from([2.0, 1.5, 4 / 3, 1.2]))
@settings(max_examples=25 * THOROUGHNESS, phases=[Phase.explicit, Phase.generate])
def test_bca_equals_threshold(data, x, lam, p):
    k = data.draw(ks(x.size))
    phi = data.draw(some.sampled_from(sorted(TOP_K)))
    y = relaxed(phi, x, k, lam, p, solver="bca")
    np.testing.assert_allclose(y, relaxed(phi, x, k, lam, p), rtol=1e-6, atol=1e-6)
    assert reference.kkt_residual(y, x, reference.ones_k(k, x.size), lam, p, phi) < 1e-6


@pytest.mark.parametrize(("solver", "p"), [("bca", 4 / 3), ("bca", 1.5), ("dykstra", 2.0)])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-6])
def test_outputs_that_are_tiny_beside_their_terms_are_solved_to_rounding(solver, p, scale):
    """For p = 4/3 y is x^3 for small x, less than 1e-12 of the rounding of terms as large as x."""
    x = scale * np.random.default_rng(0).normal(size=12)
    lam = 1.0 if solver == "bca" else 1e5
    y = st.topk_mag(x, 4, lam, p=p, debias=False, solver=solver)
    np.testing.assert_allclose(
        y, st.topk_mag(x, 4, lam, p=p, debias=False), rtol=1e-6, atol=1e-12 * scale
    )


@given(some.data(), rows(), lams(-2, 1.5), some.sampled_from([2.0, 1.5, 4 / 3, 1.2]))
@settings(max_examples=200 * THOROUGHNESS)
def test_pav_is_optimal_for_any_w_and_phi(data, x, lam, p):
    phi = data.draw(some.sampled_from(PHI_NAMES))
    if phi == "exp":
        x = np.clip(x, -20, 20)
    low = -2 if phi == "identity" else 0
    w = np.array(data.draw(some.lists(finite(low, 3), min_size=x.size, max_size=x.size)))
    y = st.permutahedron(x, w, lam, p=p, phi=phi)
    assert reference.kkt_residual(y, x, w, lam, p, phi) < 1e-9


@given(some.data(), rows(max_n=12), lams(-2, 1))
@settings(max_examples=60 * THOROUGHNESS)
def test_dykstra_equals_pav_for_any_w(data, x, lam):
    phi = data.draw(some.sampled_from(["identity", "half_square", "abs"]))
    low = -2 if phi == "identity" else 0
    w = np.array(data.draw(some.lists(finite(low, 3), min_size=x.size, max_size=x.size)))
    exact = st.permutahedron(x, w, lam, phi=phi)
    y = st.permutahedron(x, w, lam, phi=phi, solver="dykstra")
    np.testing.assert_allclose(y, exact, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@given(some.data(), rows(max_n=12), lams(-1.5, 0.5), some.sampled_from([2.0, 1.5, 4 / 3]))
@settings(max_examples=25 * THOROUGHNESS, phases=[Phase.explicit, Phase.generate])
def test_bca_equals_pav_for_any_w_and_phi(data, x, lam, p):
    assume(np.max(np.abs(x)) < 10)
    phi = data.draw(some.sampled_from(PHI_NAMES))
    low = -2 if phi == "identity" else 0
    w = np.array(data.draw(some.lists(finite(low, 3), min_size=x.size, max_size=x.size)))
    exact = st.permutahedron(x, w, lam, p=p, phi=phi)
    y = st.permutahedron(x, w, lam, p=p, phi=phi, solver="bca")
    np.testing.assert_allclose(y, exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("phi", PHI_NAMES)
@pytest.mark.parametrize("p", [2.0, 1.5, 4 / 3, 1.2])
def test_permutahedron_equals_the_reference(phi, p):
    rng = np.random.default_rng(5)
    for lam in (0.1, 1.0, 5.0):
        x = rng.normal(size=7)
        w = rng.uniform(0, 2, size=7) - (0.7 if phi == "identity" else 0)
        np.testing.assert_allclose(
            st.permutahedron(x, w, lam, p=p, phi=phi),
            reference.permutahedron(x, w, lam, p, phi),
            rtol=1e-8,
            atol=1e-8,
        )


def test_pav_returns_its_blocks():
    # identity, p = 2, lam = 1: v = s - w where that decreases; (2, 1.9) and (0.1, 0) are pooled
    s, w = np.array([[5.0, 2.0, 1.9, 0.1, 0.0]]), np.array([[4.0, 3.0, 2.0, 1.0, 0.0]])
    solution = solve_isotonic(s, w, np.array([[1.0]]), "identity", 1.0, "pav", {})
    expected_v = reference.isotonic(s[0], w[0], 1.0, 2.0, "identity")
    np.testing.assert_allclose((s - solution.d)[0], expected_v, atol=1e-12)
    same_v = np.isclose(np.diff(expected_v), 0, atol=1e-9)
    np.testing.assert_array_equal(np.diff(solution.block[0]) == 0, same_v)


@given(rows(), some.sampled_from([1e-10, 1e10]))
def test_blocks_do_not_depend_on_the_scale(x, c):
    s = -np.sort(-np.unique(x))[None]
    w = np.arange(s.size, 0.0, -1.0)[None]

    def solve(c):
        lam = np.array([[c * 0.3]])
        return solve_isotonic(c * s, w, lam, "identity", 1.0, "pav", {})

    scaled, plain = solve(c), solve(1.0)
    np.testing.assert_allclose(scaled.d, plain.d, rtol=1e-9, atol=1e-9)
    # thresholds that differ by more than rounding stay apart
    apart = -np.diff((s - 0.3 * plain.d)[0]) > 1e-12 * (1 + np.abs(s).max())
    assert (np.diff(scaled.block[0])[apart] > 0).all()


@pytest.mark.parametrize("solver", ["pav", "bca"])
def test_a_point_of_infinite_slope_is_no_solution(solver):
    """For p = 3 the midpoint of the bracket has d = 0, where Newton does not move."""
    y = st.permutahedron([3.0, 0.0], [2.0, -1.0], 1.0, p=3.0, solver=solver)
    golden = (1 + np.sqrt(5)) / 2  # sqrt(d) - sqrt(3 - d) = 1
    np.testing.assert_allclose(y, [golden, 1 - golden], atol=1e-9)


def test_exp_of_large_inputs():
    x, w = [690.0, 689.0, 0.0], [1.0, 1.0, 0.0]
    exact = st.permutahedron(x, w, 1.0, phi="exp")
    np.testing.assert_allclose(exact, [682.47, 681.48, 0], atol=0.01)
    np.testing.assert_allclose(st.permutahedron(x, w, 1.0, phi="exp", solver="bca"), exact)
    assert reference.kkt_residual(exact, np.array(x), np.array(w), 1.0, 2.0, "exp") < 1e-9
    np.testing.assert_allclose(st.topk_value([705.0], 1, 0.0, phi="exp"), np.exp(704.0))
    assert st.topk_value([1000.0], 1, 0.0, phi="exp") == np.inf


@pytest.mark.parametrize("solver", ["dykstra", "bca"])
def test_hard_rows_need_no_iterations(solver):
    x = np.random.default_rng(0).normal(size=256)
    options = {"solver": solver, "solver_options": {"max_iter": 1, "tol": 1e-12}}
    np.testing.assert_array_equal(st.soft_rank(x, 0.0, **options), st.rank(x))
    np.testing.assert_array_equal(st.topk_mask(1e-9 * x, 9, 0.0, **options), st.rank(x) <= 9)


@pytest.mark.parametrize("p", [1.01, 1.013, 1.02, 1.05])
def test_two_sided_masks_near_p_1(p):
    np.testing.assert_allclose(
        st.topk_mask([0.5, 0.2, -0.1], 1.5, 1e-12, p=p, two_sided=True), [1, 0.5, 0], atol=1e-12
    )
    x = np.random.default_rng(0).normal(size=(10, 8))
    y = st.topk_mask(x, 2.5, 0.5, p=p, two_sided=True)
    np.testing.assert_allclose(y.sum(axis=-1), 2.5, atol=1e-10)


def test_fixed_number_of_iterations_is_taken_and_not_judged():
    x = np.random.default_rng(0).normal(size=40)
    exact = st.topk_mask(x, 10, 10.0)
    errors = [
        np.abs(
            st.topk_mask(x, 10, 10.0, solver="dykstra", solver_options={"max_iter": m}) - exact
        ).max()
        for m in (1, 10, 100, 3000)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.1
    assert errors[-1] < 1e-6


@pytest.mark.parametrize(
    ("solver", "options"),
    [
        ("dykstra", {"max_iter": 10, "tol": 1e-12}),
        ("bca", {"max_iter": 10, "tol": 1e-12}),
    ],
)
def test_a_rule_that_is_not_met_is_an_error(solver, options):
    x = np.random.default_rng(0).normal(size=40)
    with pytest.raises(st.ConvergenceError, match=f"solver '{solver}' still has a residual of"):
        st.topk_mask(x, 10.5, 10.0, p=2.0, solver=solver, solver_options=options)


def test_the_published_dykstra_step_solves_another_problem():
    """With the linear term in both steps, as printed, Algorithm 1 projects for 2w."""
    x, w = np.array([1.0, 0.7, 0.6, 0.1]), np.array([1.0, 1.0, 0.0, 0.0])
    v, p, q = x.copy(), np.zeros(4), np.zeros(4)
    for _ in range(2000):
        y = _project_pairs(v + p - w, 0)
        p = v + p - y
        v_next = _project_pairs(y + q - w, 1)
        q = y + q - v_next
        v = v_next
    printed = x - v
    np.testing.assert_allclose(printed, st.permutahedron(x, 2 * w, 1.0), atol=1e-6)
    assert np.abs(printed - st.permutahedron(x, w, 1.0)).max() > 0.1


def _project_pairs(v, start):
    v = v.copy()
    for i in range(start, v.size - 1, 2):
        if v[i] < v[i + 1]:
            v[i : i + 2] = v[i : i + 2].mean()
    return v


@given(finite(-1.5, 1.5), some.sampled_from([1.1, 1.2, 4 / 3, 1.5, 1.7, 2.0, 2.5, 3.0]))
@example(-1.0, 1.5)
@example(1.0, 4 / 3)
@example(0.0, 1.2)
def test_two_sided_response_inverts_its_definition(t, p):
    reg = TwoSidedPNorm(p)
    with xp.quiet():
        y, mirrored = reg.response(np.array([t])), reg.response(np.array([-t]))
        low = reg.response(-np.abs(np.array([t])))  # the half where y keeps its relative precision
    assert 0 <= y[0] <= 1
    np.testing.assert_allclose(reg.inverse(low), -min(abs(t), 1.0), atol=1e-13)
    np.testing.assert_allclose(mirrored, 1 - y, atol=1e-15)


@given(
    finite(0.0, 50.0), finite(1e-6, 10.0), lams(-6, 6), some.sampled_from([2.0, 1.5, 4 / 3, 1.2])
)
def test_lone_entries_solve_their_equation(s, w, lam, p):
    from sparsetopk._maths.scalars import lone_response

    reg = PNorm(p)
    for phi in (PHIS["half_square"], PHIS["exp"]):
        d = lone_response(np.array([s]), np.array([w]), np.array([lam]), reg, phi)
        u = s - lam * d
        # compare in u: both sides are increasing or decreasing functions of it
        scale = w * phi.prime(np.array([s]))
        got, expected = reg.response(d), w * phi.prime(u)
        slack = 1e-14 * (scale + w * (1 + np.abs(s)) * (1 + expected / w))
        assert np.abs(got - expected) <= slack * (1 + lam)
