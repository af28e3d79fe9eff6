"""Block coordinate ascent in the dual: what Dykstra's algorithm becomes for any p and phi."""

from __future__ import annotations

import numpy as np

from ._types import Array, Ints
from .isotonic import Isotonic, ascend
from .roots import increasing_root
from .solution import Solution, StoppingRule

RULE = StoppingRule(tol=1e-12, max_iter=20_000)


def solve(problem: Isotonic, rule: StoppingRule = RULE) -> Solution:
    """Update odd and even multipliers in turn. The stopping rule is that of ``ascend``."""

    def response(alpha: Array) -> Array:
        at = np.arange(problem.s.shape[-1])
        return _response(problem, at, alpha[:, :-1] - alpha[:, 1:])

    def update(alpha: Array, pairs: slice) -> Array:
        left = np.arange(pairs.start, pairs.stop, pairs.step) - 1
        return _update(problem, left, alpha[:, left], alpha[:, left + 2])

    return ascend(problem, update, response, "bca", rule)


def _response(problem: Isotonic, at: Ints, c: Array) -> Array:
    """d with S(d) - w phi'(s - lam d) = c for the entries ``at``: stationarity in v_i."""
    s, w, lam = problem.s[:, at], problem.w[:, at], problem.lam
    reg, phi = problem.reg, problem.unconstrained_phi
    if phi.name == "identity":
        return reg.inverse(w + c)

    def equation(d: Array) -> tuple[Array, Array]:
        g = s - lam * d
        value = reg.response(d) - w * phi.prime(g) - c
        return value, d - value / (reg.slope(d) + lam * phi.curvature(g, w))

    lo = reg.inverse(np.minimum(c, 0.0))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        hi = reg.inverse(np.maximum(c + w * phi.prime(s), 0.0))
        hi = np.minimum(hi, np.maximum(reg.inverse(2.0 * np.maximum(c, 0.0)), problem.far[:, at]))
        return increasing_root(equation, lo, hi).checked()


def _update(problem: Isotonic, left: Ints, before: Array, after: Array) -> Array:
    """The alpha_i >= 0 between entries i = ``left`` and i + 1 that is optimal given its neighbours.

    alpha_i = 0 if the two are in order without it; else it makes them equal, which is the pooling
    subproblem of PAV on two entries.
    """
    reg, phi, lam = problem.reg, problem.unconstrained_phi, problem.lam
    gap, s = problem.gap[:, left], problem.s[:, left]
    w_left, w_right = problem.w[:, left], problem.w[:, left + 1]
    d_left = _response(problem, left, before)
    d_right = _response(problem, left + 1, -after)
    ordered = d_left - d_right <= gap
    gap = np.where(ordered, 0.0, gap)

    def equation(d: Array) -> tuple[Array, Array]:
        g = s - lam * d
        value = reg.response(d) + reg.response(d - gap)
        value = value - (w_left + w_right) * phi.prime(g) - before + after
        slope = reg.slope(d) + reg.slope(d - gap) + lam * phi.curvature(g, w_left + w_right)
        return value, d - value / slope

    lo = np.where(ordered, d_left, d_right + gap)
    with np.errstate(divide="ignore", invalid="ignore"):
        d = increasing_root(equation, lo, d_left).checked()
    alpha = before + w_left * phi.prime(s - lam * d) - reg.response(d)
    return np.where(ordered, 0.0, np.maximum(alpha, 0.0))
