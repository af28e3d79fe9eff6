"""From checked arguments to solved rows: what all the top-k operators have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from . import bca, core, dykstra, pav, threshold
from ._cached import cached_property
from ._types import Array, Bools, FloatArray, Solver, SolverOptions
from .arguments import Rows, check_k, check_lam, check_solver
from .hard import descending_order, hard_mask, ones_k
from .isotonic import Isotonic
from .phis import Phi
from .regularizers import PNorm, Regularizer
from .rowwise import row_any, row_max, row_sum
from .solution import Linearization, Solution, linearize


class TopKCotangents(NamedTuple):
    """What a vector-Jacobian product returns, each in the shape of its argument."""

    x: FloatArray
    k: Array
    lam: Array


def solve_sorted(
    s: Array,
    w: Array,
    lam: Array,
    reg: Regularizer,
    phi: Phi,
    solver: Solver,
    options: SolverOptions,
) -> Solution:
    """The isotonic problem for s and w in decreasing order, by pav, dykstra or bca."""
    assert isinstance(reg, PNorm)  # check_solver has seen to it
    problem = Isotonic(s, w, lam, reg, phi)
    if solver == "pav":
        return pav.solve(problem)
    if solver == "dykstra":
        return dykstra.solve(problem, dykstra.RULE.given(**options))
    return bca.solve(problem, bca.RULE.given(**options))


@dataclass(frozen=True)
class RowProblem(ABC):
    """Rows x (m, n) with lam (m, 1), the regulariser and phi; a subclass says what w is."""

    rows: Rows
    lam: Array
    reg: Regularizer
    phi: Phi
    solver: Solver
    options: SolverOptions

    @property
    @abstractmethod
    def invalid(self) -> Bools:
        """Rows (m, 1) whose result is NaN."""

    @abstractmethod
    def _solve(self, rows: Bools) -> Solution:
        """The solution of the given rows (m,), which have lam > 0."""

    @cached_property
    def solution(self) -> Solution:
        """Of the relaxed rows; hard ones have a trivial one, which nobody looks at."""
        soft = ~self.hard[:, 0]
        if self.x.size and soft.all():
            return self._solve(soft)
        trivial = Solution.trivial(self.x)
        if self.x[soft].size == 0:
            return trivial
        return trivial.with_rows(soft, self._solve(soft))

    @cached_property
    def x(self) -> Array:
        """The rows, with 0 for those that are invalid and |x| for even phi."""
        x = self.rows.data
        if self.invalid.any():
            x = np.where(self.invalid, 0.0, x)
        return np.abs(x) if self.phi.even else x

    @cached_property
    def sign(self) -> Array:
        """What the result is multiplied with: the sign of x for even phi, with 1 for 0; else (1, 1)."""
        return np.where(self.rows.data < 0, -1.0, 1.0) if self.phi.even else np.ones((1, 1))

    @cached_property
    def hard(self) -> Bools:
        """Rows (m, 1) with lam = 0."""
        return self.lam == 0

    @cached_property
    def relaxing_lam(self) -> Array:
        """lam, with a stand-in for hard rows, whose relaxed solution nobody looks at."""
        return np.where(self.hard, 1.0, self.lam)

    def result(self, rows: Array) -> FloatArray:
        """(m, any length) in the shape and dtype of x; NaN for invalid rows, 0 for -0."""
        rows = rows + 0.0
        rows[self.invalid[:, 0]] = np.nan
        return self.rows.restore(rows)

    def row_results(self, rows: Array) -> Array:
        """(m, 1), with NaN for invalid rows."""
        return np.where(self.invalid, np.nan, rows)

    def matrices(self, dense: Array) -> FloatArray:
        """(m, n, n) behind the leading axes of x."""
        return self.rows.restore_matrices(np.where(self.invalid[:, :, None], np.nan, dense))


@dataclass(frozen=True)
class TopKProblem(RowProblem):
    """w = 1_k, with k (m, 1)."""

    k: Array

    @classmethod
    def of(
        cls,
        rows: Rows,
        k: ArrayLike,
        lam: ArrayLike,
        reg: Regularizer,
        phi: Phi,
        solver: Solver = "threshold",
        options: SolverOptions | None = None,
    ) -> TopKProblem:
        return cls(
            rows,
            check_lam(rows.per_row("lam", lam)),
            reg,
            phi,
            solver,
            check_solver(solver, ("threshold", "pav", "dykstra", "bca"), options, reg, phi),
            check_k(rows.per_row("k", k), rows.n),
        )

    @cached_property
    def invalid(self) -> Bools:
        """Rows (m, 1) whose result is NaN: infinite entries have a meaning unless phi is even."""
        x = self.rows.data
        return row_any(~np.isfinite(x) if self.phi.even else np.isnan(x))

    def fused(self, *, debias: bool = False) -> core.Solved | None:
        """The output straight from the compiled core, where it has the operator and the solver."""
        operator = core.operator(self.reg, self.phi, debias)
        if operator is None or self.solver != "threshold" or self.options or not self.x.size:
            return None
        return core.solve(operator, self.rows.data, self.k, self.lam)

    @cached_property
    def hard_mask(self) -> Array:
        return hard_mask(self.x, self.k)

    @cached_property
    def mask(self) -> Array:
        """S(d), or the hard mask where lam = 0: y for phi identity, |y| for phi = |.|."""
        soft = self.reg.response(self.solution.d)
        return np.where(self.hard, self.hard_mask, soft) if self.hard.any() else soft

    @cached_property
    def overfull(self) -> Bools:
        """Rows (m, 1) with more than k entries at +inf, which share k."""
        return row_sum(self.x == np.inf) > self.k

    def _solve(self, rows: Bools) -> Solution:
        x, k, lam = self._shared_x()[rows], self.k[rows], self.lam[rows]
        if self.solver == "threshold":
            rule = threshold.RULE.given(**self.options)
            return threshold.solve(x, k, lam, self.reg, self.phi, rule)
        k = np.minimum(k, row_sum(x > -np.inf))
        x = _without_infinities(x, lam)
        order = descending_order(x)
        s, w = np.take_along_axis(x, order, axis=-1), ones_k(k, x.shape[-1])
        solved = solve_sorted(s, w, lam, self.reg, self.phi, self.solver, self.options)
        return solved.scatter(order)

    def _shared_x(self) -> Array:
        """x; where more than k entries are +inf, these tie and are the only candidates."""
        if not self.overfull.any():
            return self.x
        return np.where(self.overfull, np.where(self.x == np.inf, 0.0, -np.inf), self.x)

    def linearize(self, *, debias: bool = False) -> Linearization:
        """Derivatives of the relaxed rows; where +inf entries share k, x does not move them."""
        result = linearize(self.solution, self.relaxing_lam, self.reg, self.phi, debias=debias)
        sign = self.sign
        if self.phi.name == "half_square":
            # Which of several zeros would be selected is open: only if all are do they have a slope.
            sign = np.where((self.x == 0) & (self.k < self.rows.n), 0.0, sign)
        result = result.signed(sign)
        if not self.overfull.any():
            return result
        return result.frozen_in_x(self.overfull)


def _without_infinities(x: Array, lam: Array) -> Array:
    """Finite stand-ins for infinite entries, too far from the others to be pooled with them."""
    finite = np.isfinite(x)
    if finite.all():
        return x
    limit = np.finfo(np.float64).max
    top = row_max(np.where(finite, x, -limit))
    bottom = -row_max(np.where(finite, -x, -limit))
    top, bottom = np.where(row_any(finite), top, 0.0), np.where(row_any(finite), bottom, 0.0)
    with np.errstate(over="ignore"):
        above = np.minimum(top + 2.0 * (lam + np.abs(top)), limit)
        below = np.maximum(bottom - 2.0 * (lam + np.abs(bottom)), -limit)
    return np.where(finite, x, np.where(x > 0, above, below))


@dataclass(frozen=True)
class Evaluated:
    """An operator at one input: its output, and its derivatives on demand."""

    problem: TopKProblem
    y: Array
    linearization: Callable[[], Linearization]
    k: ArrayLike
    lam: ArrayLike
    fused: core.Solved | None = None

    def output(self) -> FloatArray:
        return self.problem.result(self.y)

    def jvp(self, dx: ArrayLike | None, dk: ArrayLike | None, dlam: ArrayLike | None) -> FloatArray:
        """dy = (dy/dx) dx + (dy/dk) dk + (dy/dlam) dlam."""
        rows, linear = self.problem.rows, self.linearization()
        dy = np.zeros_like(self.y)
        if dx is not None:
            dy = dy + linear.jvp(rows.tangent("dx", dx))
        if dk is not None:
            dy = dy + linear.in_k * rows.per_row("dk", dk)
        if dlam is not None:
            dy = dy + linear.in_lam * rows.per_row("dlam", dlam)
        return self.problem.result(dy)

    def vjp(self, dy: ArrayLike) -> TopKCotangents:
        problem = self.problem
        g = problem.rows.tangent("dy", dy)
        if self.fused is not None:
            dx, in_k, in_lam = self.fused.vjp(g)
        else:
            linear = self.linearization()
            dx, in_k, in_lam = linear.vjp(g), row_sum(linear.in_k * g), row_sum(linear.in_lam * g)
        return TopKCotangents(
            problem.result(dx),
            problem.rows.sum_to(problem.row_results(in_k), self.k),
            problem.rows.sum_to(problem.row_results(in_lam), self.lam),
        )

    def jacobian(self) -> FloatArray:
        return self.problem.matrices(self.linearization().dense())
