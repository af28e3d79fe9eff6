"""The isotonic problem that Propositions 5 and 6 reduce the operators to, as its solvers see it.

    min_{v_1 >= ... >= v_n}  sum_i R*(s_i - v_i) + w_i phi(v_i),   s and w sorted in decreasing order.

All of it is written in d_i = (s_i - v_i)/lam and in the gaps (s_i - s_{i+1})/lam instead of v, so
that neither a common shift of s nor a small lam costs precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .._maths import dykstra
from .._maths.isotonic import SolvedBlocks, block_ids, truncate
from .._maths.scalars import Phi, PhiName, PNorm, lone_response
from .._types import Array, Bools, Ints, Solver, SolverOptions
from . import namespace as xp
from .hard import descending_order, ranks


@dataclass(frozen=True)
class Isotonic:
    """s and w are (rows, n) in decreasing order, lam is (rows, 1); for even phi s is |x| sorted.

    w >= 0 unless phi is the identity. For phi = |.| the problem without v >= 0 is that of the
    identity, and its solution is truncated in the end.
    """

    s: Array
    w: Array
    lam: Array
    exponent: float
    phi_name: PhiName

    @property
    def reg(self) -> PNorm:
        return PNorm(xp, self.exponent)

    @property
    def phi(self) -> Phi:
        """Without the constraint v >= 0 of |.|."""
        return Phi(xp, "identity" if self.phi_name == "abs" else self.phi_name)

    @cached_property
    def gap(self) -> Array:
        """(s_i - s_{i+1})/lam, (rows, n-1)."""
        with xp.quiet():
            return -np.diff(self.s, axis=-1) / self.lam

    @cached_property
    def far(self) -> Array:
        """A d whose response is at least twice what an entry alone would have."""
        with xp.quiet():
            return lone_response(
                self.s, 2.0 * np.maximum(self.w, 0.0), self.lam, self.reg, Phi(xp, self.phi_name)
            )

    @cached_property
    def alone(self) -> Array:
        """d of every entry if it were the only one."""
        with xp.quiet():
            return lone_response(self.s, self.w, self.lam, self.reg, self.phi)

    def finished(self, d: Array, first: Bools) -> tuple[Array, Ints]:
        """d and ids of the blocks, from which entries are the first of a block."""
        if self.phi_name == "abs":
            with xp.quiet():
                d, first = truncate(xp, self.s, self.lam, d, first, self.s - self.lam * d)
        return d, block_ids(xp, first)


def solve_isotonic(
    x: Array,
    w: Array,
    lam: Array,
    phi: PhiName,
    exponent: float,
    solver: Solver,
    options: SolverOptions,
) -> SolvedBlocks:
    """Rows x (|x| for even phi) and w (m, n) in any order, with lam > 0 (m, 1)."""
    from . import bca, pav  # imported here, as they import this module

    if solver == "dykstra":
        rule = dykstra.RULE.given(**options)
        with xp.quiet():
            solved, residual = dykstra.solve_blocks(xp, x, w, lam, phi, rule)
        rule.check("dykstra", residual <= rule.tol, residual)
        return solved
    order, w_order = descending_order(x), descending_order(w)
    s, w = np.take_along_axis(x, order, axis=-1), np.take_along_axis(w, w_order, axis=-1)
    problem = Isotonic(s, w, lam, exponent, phi)
    if solver == "pav":
        d, first = pav.solve_sorted(problem)
    else:
        d, first = bca.solve_sorted(problem, bca.RULE.given(**options))
    d, block = problem.finished(d, first)
    paired = np.take_along_axis(w_order, ranks(order), axis=-1)
    d, block = xp.unsort(order, d, block)
    return SolvedBlocks(d, block, paired)
