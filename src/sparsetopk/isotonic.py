"""The isotonic problem that Propositions 5 and 6 reduce the operators to, as its solvers see it.

    min_{v_1 >= ... >= v_n}  sum_i R*(s_i - v_i) + w_i phi(v_i),   s and w sorted in decreasing order.

All of it is written in d_i = (s_i - v_i)/lam and in the gaps (s_i - s_{i+1})/lam instead of v, so
that neither a common shift of s nor a small lam costs precision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ._types import Array, Bools, Ints
from .phis import PHIS, Phi, lone_response
from .regularizers import PNorm
from .rowwise import block_sum, row_max
from .solution import Solution, StoppingRule


@dataclass(frozen=True)
class Isotonic:
    """s and w are (rows, n) in decreasing order, lam is (rows, 1); for even phi s is |x| sorted.

    w >= 0 unless phi is the identity. For phi = |.| the problem without v >= 0 is that of the
    identity, and its solution is truncated in the end (Nemeth & Nemeth, 2012).
    """

    s: Array
    w: Array
    lam: Array
    reg: PNorm
    phi: Phi

    @property
    def unconstrained_phi(self) -> Phi:
        return PHIS["identity"] if self.phi.name == "abs" else self.phi

    @cached_property
    def gap(self) -> Array:
        """(s_i - s_{i+1})/lam, (rows, n-1)."""
        with np.errstate(over="ignore"):
            return -np.diff(self.s, axis=-1) / self.lam

    @cached_property
    def far(self) -> Array:
        """A d whose response is at least twice what an entry alone would have."""
        return lone_response(self.s, 2.0 * np.maximum(self.w, 0.0), self.lam, self.reg, self.phi)

    @cached_property
    def alone(self) -> Array:
        """d of every entry if it were the only one."""
        return lone_response(self.s, self.w, self.lam, self.reg, self.unconstrained_phi)

    def solution(self, d: Array, joined: Bools, residual: Array) -> Solution:
        """From d and from which neighbours (i, i+1) share a block, (rows, n-1)."""
        block = block_ids(joined)
        u = self.s - self.lam * d
        if (
            self.phi.name == "half_square"
        ):  # sum_B S(d_i) = u sum_B w_i gives u even where it is tiny
            weight = block_sum(self.w, block)
            mass = block_sum(self.reg.response(d), block)
            u = np.where(weight > 0, mass / np.where(weight > 0, weight, 1.0), u)
        solution = Solution(d, u, self.w, block, residual)
        return self._truncate(solution) if self.phi.name == "abs" else solution

    def _truncate(self, solution: Solution) -> Solution:
        """v = max(v, 0); what is moved to 0 stands alone there, whatever its weight was."""
        below = solution.u < 0
        first = np.diff(solution.block, axis=-1, prepend=-1) > 0
        with np.errstate(over="ignore"):
            d = np.where(below, self.s / self.lam, solution.d)
        return Solution(
            d,
            np.where(below, 0.0, solution.u),
            np.where(below, 1.0, solution.weight),
            np.cumsum(below | first, axis=-1, dtype=np.intp) - 1,
            solution.residual,
        )


def block_ids(joined: Bools) -> Ints:
    """Ids 0, 1, ... of the blocks, from which neighbours (i, i+1) are joined."""
    return np.cumsum(np.pad(~joined, ((0, 0), (1, 0))), axis=-1, dtype=np.intp)


def ascend(
    problem: Isotonic,
    update: Callable[[Array, slice], Array],
    response: Callable[[Array], Array],
    solver: str,
    rule: StoppingRule,
) -> Solution:
    """Block coordinate ascent in the dual of the isotonic problem (appendix of the paper).

    alpha_i >= 0 is the multiplier of v_i >= v_{i+1}. Those with odd i are independent of each
    other (they make up the set C1), and so are those with even i (C2): ``update(alpha, pairs)``
    maximises over all of one kind at once. ``response(alpha)`` is the d that goes with alpha.

    A constraint that is not active ends with alpha_i = 0 exactly: blocks are read off from that.
    Stops when a sweep moves no alpha by more than tol times the largest |y_i| of an entry alone, and
    gives up when they move by no more than the rounding of |w_i phi'(s_i)|.
    """
    rows, n = problem.s.shape
    alpha = np.zeros((rows, n + 1))  # alpha_0 = alpha_n = 0 belong to no constraint
    scale = row_max(np.abs(problem.reg.response(problem.alone)))
    terms = np.abs(problem.w * problem.unconstrained_phi.prime(problem.s))
    rounding = np.finfo(np.float64).eps * row_max(terms)
    tol = rule.tol * scale
    moved = np.zeros((rows, 1))
    for _ in range(rule.max_iter):
        before = alpha.copy()
        for first in (1, 2):
            pairs = slice(first, n, 2)
            alpha[:, pairs] = update(alpha, pairs)
        moved = row_max(np.abs(alpha - before))
        if not rule.fixed_count and np.all(moved <= np.maximum(tol, rounding)):
            break
    residual = moved / np.where(scale > 0, scale, 1.0)
    rule.check(solver, moved <= tol, residual)
    return problem.solution(response(alpha), alpha[:, 1:-1] > 0, residual)
