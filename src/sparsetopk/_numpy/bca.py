"""Block coordinate ascent in the dual: what Dykstra's algorithm becomes for any p and phi."""

from __future__ import annotations

import numpy as np

from .._maths.dykstra import StoppingRule, residual
from .._types import Array, Bools, Ints
from . import namespace as xp
from .isotonic import Isotonic
from .namespace import bracketed_root, largest, quiet

RULE = StoppingRule(tol=1e-12, max_iter=20_000)


def solve_sorted(problem: Isotonic, rule: StoppingRule = RULE) -> tuple[Array, Bools]:
    """d, and which entries are the first of their block (appendix of the paper).

    alpha_i >= 0 is the multiplier of v_i >= v_{i+1}. Those with odd i are independent of each other, and
    so are those with even i: all of one kind are updated at once. A constraint that is not active ends
    with alpha_i = 0 exactly: blocks are read off from that.

    Stops when a sweep moves no alpha by more than tol times the largest abs(y_i) of an entry alone, or
    by no more than the rounding of abs(w_i phi'(s_i)).
    """
    rows, n = problem.s.shape
    alpha = np.zeros((rows, n + 1))  # alpha_0 = alpha_n = 0 belong to no constraint
    scale = largest(np.abs(problem.reg.response(problem.alone)))
    terms = np.abs(problem.w * problem.phi.prime(problem.s))
    rounding = np.finfo(np.float64).eps * largest(terms)
    moved = np.zeros((rows, 1))
    for _ in range(rule.max_iter):
        before = alpha.copy()
        for first in (0, 1):
            left = np.arange(first, n - 1, 2)
            alpha[:, left + 1] = _update(problem, left, alpha[:, left], alpha[:, left + 2])
        moved = largest(np.abs(alpha - before))
        if not rule.fixed_count and np.all(moved <= np.maximum(rule.tol * scale, rounding)):
            break
    missed = residual(xp, moved, scale, rounding)
    rule.check("bca", missed <= rule.tol, missed)
    d = _response(problem, np.arange(n), alpha[:, :-1] - alpha[:, 1:])
    return d, np.pad(alpha[:, 1:-1] <= 0, ((0, 0), (1, 0)), constant_values=True)


def _response(problem: Isotonic, at: Ints, c: Array) -> Array:
    """d with S(d) - w phi'(s - lam d) = c for the entries ``at``: stationarity in v_i."""
    s, w, lam = problem.s[:, at], problem.w[:, at], problem.lam
    reg, phi = problem.reg, problem.phi
    if phi.name == "identity":
        return reg.inverse(w + c)

    def equation(d: Array) -> tuple[Array, Array, Array]:
        g = s - lam * d
        value = reg.response(d) - w * phi.prime(g) - c
        step = -value / (reg.slope(d) + lam * phi.curvature(g, w))
        return value, step, np.zeros_like(value)

    lo = reg.inverse(np.minimum(c, 0.0))
    with quiet():
        hi = reg.inverse(np.maximum(c + w * phi.prime(s), 0.0))
        hi = np.minimum(hi, np.maximum(reg.inverse(2.0 * np.maximum(c, 0.0)), problem.far[:, at]))
    return bracketed_root(equation, lo, hi)


def _update(problem: Isotonic, left: Ints, before: Array, after: Array) -> Array:
    """The alpha_i >= 0 between entries i = ``left`` and i + 1 that is optimal given its neighbours.

    alpha_i = 0 if the two are in order without it; else it makes them equal, which is the pooling
    subproblem of PAV on two entries.
    """
    reg, phi, lam = problem.reg, problem.phi, problem.lam
    gap, s = problem.gap[:, left], problem.s[:, left]
    w_left, w_right = problem.w[:, left], problem.w[:, left + 1]
    d_left = _response(problem, left, before)
    d_right = _response(problem, left + 1, -after)
    ordered = d_left - d_right <= gap
    gap = np.where(ordered, 0.0, gap)

    def equation(d: Array) -> tuple[Array, Array, Array]:
        g = s - lam * d
        value = reg.response(d) + reg.response(d - gap)
        value = value - (w_left + w_right) * phi.prime(g) - before + after
        slope = reg.slope(d) + reg.slope(d - gap) + lam * phi.curvature(g, w_left + w_right)
        return value, -value / slope, np.zeros_like(value)

    lo = np.where(ordered, d_left, d_right + gap)
    d = bracketed_root(equation, lo, d_left)
    alpha = before + w_left * phi.prime(s - lam * d) - reg.response(d)
    return np.where(ordered, 0.0, np.maximum(alpha, 0.0))
