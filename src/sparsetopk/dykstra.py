"""Dykstra's alternating projections (Algorithm 1 of the paper), for p = 2.

The monotone cone is the intersection of C1 = {v_1 >= v_2, v_3 >= v_4, ...} and
C2 = {v_2 >= v_3, v_4 >= v_5, ...}; projecting onto either averages pairs. Run on its increments,
the algorithm is coordinate ascent in the dual (Tibshirani, 2017), with an affine update.

The paper prints the linear term <v, w> in both of its steps, which solves the problem with 2w; here
it enters once.
"""

from __future__ import annotations

import numpy as np

from ._types import Array
from .isotonic import Isotonic, ascend
from .solution import Solution, StoppingRule

# The iterations needed grow as n^2 at large lam; 100,000 are enough for n = 256.
RULE = StoppingRule(tol=1e-12, max_iter=100_000)


def solve(problem: Isotonic, rule: StoppingRule = RULE) -> Solution:
    """Project onto C1 and C2 in turn. The stopping rule is that of ``ascend``."""
    # Stationarity for p = 2: h_i d_i = b_i + alpha_{i-1} - alpha_i.
    if problem.unconstrained_phi.name == "identity":
        b, h = problem.w, np.ones_like(problem.w)
    else:
        b, h = problem.w * problem.s, 1.0 + problem.lam * problem.w
    step = 1.0 / (1.0 / h[:, :-1] + 1.0 / h[:, 1:])

    def response(alpha: Array) -> Array:
        return (b + alpha[:, :-1] - alpha[:, 1:]) / h

    def update(alpha: Array, pairs: slice) -> Array:
        d = response(alpha)
        slack = problem.gap - d[:, :-1] + d[:, 1:]  # (v_i - v_{i+1})/lam
        return np.maximum(alpha[:, 1:-1] - step * slack, 0.0)[:, pairs.start - 1 :: 2]

    return ascend(problem, update, response, "dykstra", rule)
