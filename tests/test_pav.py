"""Pool adjacent violators, compiled and over arrays, and the argsort of the core, against plain Python
and NumPy."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

import sparsetopk as st
from cases import PS
from scalars import PHIS
from sparsetopk import reference
from sparsetopk._core import _native as _core
from sparsetopk._maths.operator import exponent
from sparsetopk._numpy import pav
from sparsetopk._numpy.hard import descending_order
from sparsetopk._numpy.isotonic import Isotonic
from sparsetopk._numpy.namespace import block_sum, bracketed_root
from test_solvers import PHI_NAMES, finite, lams, rows

THOROUGHNESS = 20 if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else 1

TINY = np.finfo(np.float64).tiny


def problem(x, w, lam, p, phi):
    """One row, sorted, with what its phi asks for."""
    if PHIS[phi].even:
        x = np.abs(x)
    if phi == "exp":
        x = np.clip(x, -20, 20)
    if phi != "identity":
        w = np.abs(w)
    w = np.where(np.abs(w) < 1e-30, 0.0, w)  # what is to the power p - 1 should not underflow
    s, w = -np.sort(-x)[None], -np.sort(-w)[None]
    return Isotonic(s, w, np.array([[lam]]), exponent(p), phi)


def by_loop(given):
    """d of one row, entry by entry: blocks (start, size, weight, delta = (s_start - g)/lam) on a stack,
    of which the last two are merged while the threshold g of the left one is the lower one."""
    s, w, lam = given.s[0], given.w[0], given.lam[0, 0]
    reg, phi, stack = given.reg, given.phi, []
    for i in range(s.size):
        stack.append((i, 1, w[i], given.alone[0, i]))
        while len(stack) > 1:
            (start, size, weight, delta), (right, length, more, other) = stack[-2:]
            gap = (s[start] - s[right]) / lam
            if delta - other <= gap:
                break
            t, total = (s[start : right + length] - s[start]) / lam, weight + more

            def equation(at, start=start, t=t, total=total):
                g = s[start] - lam * at
                value = reg.response(t + at).sum() - phi.prime(g) * total
                slope = reg.slope(t + at).sum() + lam * phi.curvature(g, total)
                return value, -value / slope, np.zeros_like(value)

            # The root may be any double, 0 among them: enough halvings of the bracket to reach it.
            ends = np.array([other + gap]), np.array([delta])
            root = bracketed_root(equation, *ends, limit=4 * 1200)[0]
            stack[-2:] = [(start, size + length, total, root)]
    start, size, _, delta = (np.array(v) for v in zip(*stack, strict=True))
    return (s - np.repeat(s[start], size)) / lam + np.repeat(delta, size)


def assert_equals_the_loop(given):
    plain = by_loop(given)
    response = given.reg.response
    scale = 1 + np.abs(response(plain)).max()
    d, first = pav._compiled(given)
    assert_blocks_are_sound(given, d, first)
    for found in (d, pav._in_arrays(given)[0]):
        np.testing.assert_allclose(
            response(found[0]), response(plain), rtol=1e-12, atol=1e-12 * scale
        )


def assert_blocks_are_sound(given, d, first):
    """Blocks are named by their first entry, thresholds decrease, and the equation of a block holds."""
    index = np.arange(d.shape[-1])
    starts = first[0] == index
    np.testing.assert_array_equal(first[0], np.maximum.accumulate(np.where(starts, index, 0)))
    u = given.s - given.lam * d
    rounding = 1e-14 * (np.abs(given.s).max() + given.lam[0, 0] * np.abs(d).max())
    assert np.diff(u[0]).max(initial=-np.inf) <= rounding
    joined = first[:, 1:] == first[:, :-1]
    phi = given.phi
    # Both sides of the equation carry the rounding of d, and the right one also that of u = s - lam d.
    left = (1 + given.reg.exponent) * np.abs(given.reg.response(d))
    right = np.abs(phi.prime(u) * given.w)
    of_u = phi.curvature(u, given.w) * (np.abs(given.s) + given.lam * np.abs(d))
    block = np.cumsum(np.pad(~joined, ((0, 0), (1, 0))), axis=-1)
    violation = block_sum(given.reg.response(d) - phi.prime(u) * given.w, block)
    assert np.abs(violation).max() <= 1e-14 * (left + right + of_u).sum() + TINY


@given(some.data(), rows(), lams(-8, 8), some.sampled_from(PS), some.sampled_from(PHI_NAMES))
@settings(max_examples=300 * THOROUGHNESS)
def test_equals_the_loop(data, x, lam, p, phi):
    entries = data.draw(some.sampled_from([finite(-3, 3), some.integers(-2, 2).map(float)]))
    w = np.array(data.draw(some.lists(entries, min_size=x.size, max_size=x.size)))
    assert_equals_the_loop(problem(x, w, lam, p, phi))


def long_rows(n=20_000):
    rng = np.random.default_rng(0)
    x = rng.normal(size=n)
    return {
        "gaussian": x,
        "cauchy": rng.standard_cauchy(size=n),
        "log-normal": np.exp(5 * x),
        "two-valued": np.where(x > 0.3, 1.0, -1.0),
        "constant": np.full(n, 0.7),
        "rounded": np.round(x, 1),
        "one outlier": np.append(x[1:], 1e8),
        "shifted": x + 1e5,
        "subnormal": 5e-324 * np.round(10 * x),
    }


@pytest.mark.parametrize("name", long_rows())
@pytest.mark.parametrize("phi", PHI_NAMES)
def test_long_rows_with_the_weights_of_a_rank(name, phi):
    """From nothing pooled to everything in one block."""
    x = long_rows()[name]
    n = x.size
    for lam in (1e-8, 1e-3, 1.0, 1e8):
        for p in (2.0, 1.5, 4 / 3):
            given = problem(x, np.arange(n, 0.0, -1.0) / n, lam, p, phi)
            assert_blocks_are_sound(given, *pav._compiled(given))


@pytest.mark.parametrize("phi", PHI_NAMES)
@pytest.mark.parametrize("p", PS)
def test_several_lengths(phi, p):
    """The core merges pieces whose lengths are powers of 2, and what is left over."""
    rng = np.random.default_rng(1)
    for n in (1, 2, 3, 7, 8, 9, 31, 63, 64, 65, 100):
        assert_equals_the_loop(problem(rng.normal(size=n), rng.normal(size=n), 1.0, p, phi))


@pytest.mark.parametrize("p", PS)
def test_a_huge_lam_pools_everything(p):
    given = problem(np.arange(1000.0), np.arange(1000.0), 1e12, p, "identity")
    d, first = pav._compiled(given)
    assert (first == 0).all()
    np.testing.assert_allclose(given.reg.response(d), 499.5, rtol=1e-6)


def test_the_core_truncates_for_abs():
    """By itself what the NumPy front-end leaves to Isotonic.finished."""
    rng = np.random.default_rng(2)
    given = problem(rng.normal(size=50), np.linspace(2.0, 1.0, 50), 0.5, 1.5, "abs")
    d, first = np.empty((1, 50)), np.empty((1, 50), dtype=np.int64)
    arrays = (given.s, given.w, given.lam, d, first)
    _core.solve_isotonic(2, given.reg.exponent, 1, 50, *(a.ctypes.data for a in arrays))
    expected, block = given.finished(*pav.solve_sorted(given))
    u = given.s - given.lam * expected
    assert (u > 1e-12).any()
    assert (np.abs(u) < 1e-12).any()
    assert (u > -1e-12).all()
    np.testing.assert_allclose(d, expected, rtol=1e-12)
    np.testing.assert_array_equal(np.diff(first) > 0, np.diff(block) > 0)


@pytest.mark.parametrize("phi", PHI_NAMES)
def test_extreme_numbers_end(phi):
    """Near the largest float and among the subnormal ones: no hang, and no NaN where w is moderate."""
    tiny, huge = 5e-324, 1e307
    for x in ([huge, 1.0, -huge], [3 * tiny, tiny, 0.0], [huge, huge / 2, tiny]):
        for lam in (tiny, 1e-308, 1.0, 1e300):
            for p in PS:
                given = problem(np.array(x), np.array([2.0, 1.0, 0.5]), lam, p, phi)
                with np.errstate(over="ignore"):
                    d, _ = pav._compiled(given)
                assert not np.isnan(d).any()


def test_arrays_stand_in_for_the_core(monkeypatch):
    x = np.random.default_rng(3).normal(size=(4, 30))
    compiled = [st.soft_rank(x, 0.3, p=p) for p in PS]
    monkeypatch.setattr("sparsetopk._numpy.pav.native", None)
    monkeypatch.setattr("sparsetopk._numpy.hard.native", None)
    for p, y in zip(PS, compiled, strict=True):
        np.testing.assert_allclose(st.soft_rank(x, 0.3, p=p), y, rtol=1e-10)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [0, 1, 5, 63, 64, 65, 5000])
def test_the_argsort_is_stable(dtype, n):
    rng = np.random.default_rng(0)
    kinds = {
        "gaussian": rng.normal(size=(3, n)),
        "ties": rng.integers(-2, 3, size=(3, n)),
        "zeros of both signs": np.where(rng.random(size=(3, n)) < 0.5, 0.0, -0.0),
        "wide": np.exp(15 * rng.normal(size=(3, n))) * rng.choice([-1, 1], size=(3, n)),
        "infinite": rng.choice([-np.inf, 0.0, np.inf, np.nan], size=(3, n)),
        "sorted": -np.sort(rng.normal(size=(3, n)), axis=-1),
    }
    for x in kinds.values():
        x = x.astype(dtype)
        order = np.empty(x.shape, dtype=np.int64)
        _core.argsort_descending(x.itemsize, 3, n, x.ctypes.data, order.ctypes.data)
        np.testing.assert_array_equal(order, np.argsort(-x, axis=-1, kind="stable"))


def test_the_order_of_any_shape_and_layout():
    x = np.random.default_rng(0).normal(size=(4, 5, 70)).swapaxes(0, 1)
    np.testing.assert_array_equal(descending_order(x), np.argsort(-x, axis=-1, kind="stable"))


def test_the_core_checks_what_it_can():
    with pytest.raises(ValueError, match=r"phi must be in \[0, 3\], got 4"):
        _core.solve_isotonic(4, 1.0, 0, 0, 0, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="itemsize must be 4 or 8, got 2"):
        _core.argsort_descending(2, 0, 0, 0, 0)


@pytest.mark.parametrize("p", PS)
def test_ranks_of_long_rows_are_optimal(p):
    x = np.random.default_rng(4).normal(size=300)
    y = st.soft_rank(x, 20.0, p=p)
    w = np.arange(300, 0.0, -1.0)
    assert reference.kkt_residual(y, -x, w, 20.0, p, "identity") < 1e-9
