"""From checked arguments to solved rows: what all the top-k operators have in common."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from .. import _core as core
from .._cached import cached_property
from .._checks import check_solver
from .._maths import threshold
from .._maths.isotonic import SolvedBlocks
from .._maths.operator import Operator
from .._maths.response import Relaxed, lam_floor
from .._maths.threshold import State
from .._maths.topk_isotonic import prepare
from .._types import Array, Bools, FloatArray, Solver, SolverOptions
from . import namespace as xp
from .arguments import Rows, check_k, check_lam
from .hard import hard_mask
from .isotonic import solve_isotonic
from .solution import ByBlocks, ByThreshold, Tangents, TopK


class TopKCotangents(NamedTuple):
    """What a vector-Jacobian product returns, each in the shape of its argument."""

    x: FloatArray
    k: Array
    lam: Array


@dataclass(frozen=True)
class TopKProblem:
    """Rows x (m, n) with k and lam (m, 1), and what is asked of them."""

    rows: Rows
    k: Array
    lam: Array
    operator: Operator
    solver: Solver = "threshold"
    options: SolverOptions | None = None

    @classmethod
    def of(
        cls,
        rows: Rows,
        k: ArrayLike,
        lam: ArrayLike,
        operator: Operator,
        solver: Solver = "threshold",
        options: SolverOptions | None = None,
    ) -> TopKProblem:
        lam_rows = check_lam(rows.per_row("lam", lam))
        solvers: Collection[Solver] = ("threshold", "pav", "dykstra", "bca")
        options = check_solver(solver, solvers, options, operator)
        k_rows = check_k(rows.per_row("k", k), rows.n)
        return cls(rows, k_rows, lam_rows, operator, solver, options)

    @property
    def is_compiled(self) -> bool:
        """Whether the core computes the output and its cotangents at once."""
        has = core.native is not None and self.operator.is_compiled
        return has and self.solver == "threshold" and self.rows.data.size > 0

    @cached_property
    def compiled(self) -> core.SolvedTopK:
        return core.solve_topk(self.operator, self.rows.data, self.k, self.lam)

    @cached_property
    def solved(self) -> TopK:
        """The rows with their derivatives; there must be at least one entry."""
        if self.solver == "threshold":
            return ByThreshold(self.relaxed)
        return self._by_blocks()

    @cached_property
    def relaxed(self) -> Relaxed:
        """From the threshold of every row."""
        x, k = self.rows.data, xp.split(self.k)
        if self.is_compiled:
            state = State(*np.split(self.compiled.state, 2, axis=-1))
        else:
            with xp.quiet():
                state = threshold.state_of(xp, xp.Whole(x), k, self.lam, self.operator)
        floor = lam_floor(xp, self.rows.dtype, self.operator)
        with xp.quiet():
            return Relaxed.of(xp, x, k, self.lam, state, self.operator, sums=xp.sums, floor=floor)

    def _by_blocks(self) -> ByBlocks:
        x, phi = self.rows.data, self.operator.phi(xp)
        with xp.quiet():
            rows = prepare(xp, x, xp.split(self.k), self.lam, self.operator)
        solved = _only(rows.soft[:, 0], rows.a, rows.w, rows.lam, self)
        masks = np.zeros_like(x)
        if (self.lam == 0).any():
            masks = hard_mask(np.abs(x) if phi.even else x, self.k)
        return ByBlocks(rows, solved, self.operator, masks, self.rows.dtype)


def _only(soft: Bools, a: Array, w: Array, lam: Array, problem: TopKProblem) -> SolvedBlocks:
    """The isotonic solution of the rows that are relaxed; the others have none."""
    operator, options = problem.operator, problem.options or {}
    index = np.broadcast_to(np.arange(a.shape[-1]), a.shape)
    found = SolvedBlocks(np.zeros_like(a), index.copy(), index.copy())
    if soft.any():
        part = solve_isotonic(
            a[soft],
            w[soft],
            lam[soft],
            operator.phi_name,
            operator.exponent,
            problem.solver,
            options,
        )
        for whole, rows in zip(found, part, strict=True):
            whole[soft] = rows
    return found


@dataclass(frozen=True)
class Evaluated:
    """An operator at one input, with k and lam as they came: its output and its derivatives.

    With ``times_x`` it is x times the output.
    """

    problem: (
        TopKProblem  # of the scores: x, -x for the smallest, and none where there is no candidate
    )
    k: ArrayLike
    lam: ArrayLike
    x: Array  # (m, n), with 0 where there is no candidate
    slope: Array | float = 1.0  # of the scores in x
    times_x: bool = False

    @cached_property
    def y(self) -> Array:
        """The output as rows (m, n)."""
        problem = self.problem
        if problem.rows.data.size == 0:
            return problem.rows.data
        y = problem.compiled.y if problem.is_compiled else problem.solved.y
        if not self.times_x:
            return y
        return np.where(y == 0, 0.0, self.x) * y  # 0 and not NaN for padding

    @property
    def _finite_x(self) -> Array:
        """An infinite x, padding or not, has no slope."""
        return np.where(np.isfinite(self.x), self.x, 0.0)

    def output(self) -> FloatArray:
        return self.problem.rows.restore(self.y + 0.0)

    def _tangent(self, tangents: Tangents) -> Array:
        dx = tangents[0]
        of_scores = None if dx is None else self.slope * dx
        dy = self.problem.solved.tangent((of_scores, *tangents[1:]))
        if self.times_x:
            with xp.quiet():
                dy = _bounded(self._finite_x * dy)
            if dx is not None:
                dy = dy + replace(self, times_x=False).y * dx
        return dy

    def jvp(self, dx: ArrayLike | None, dk: ArrayLike | None, dlam: ArrayLike | None) -> FloatArray:
        """dy = (dy/dx) dx + (dy/dk) dk + (dy/dlam) dlam."""
        rows = self.problem.rows
        tangents = (
            None if dx is None else rows.tangent("dx", dx),
            None if dk is None else rows.per_row("dk", dk),
            None if dlam is None else rows.per_row("dlam", dlam),
        )
        if rows.data.size == 0:
            return rows.restore(rows.data)
        return rows.restore_derivative(self._tangent(tangents) + 0.0)

    def vjp(self, dy: ArrayLike) -> TopKCotangents:
        problem, rows = self.problem, self.problem.rows
        g = rows.tangent("dy", dy)
        dx, dk, dlam = g, np.zeros_like(problem.k), np.zeros_like(problem.lam)
        if rows.data.size:
            with xp.quiet():
                of_y = _bounded(self._finite_x * g) if self.times_x else g
            solved = problem.compiled.vjp if problem.is_compiled else problem.solved.cotangent
            dx, dk, dlam = solved(of_y)
            dx = self.slope * dx
            if self.times_x:
                dx = dx + replace(self, times_x=False).y * g
        return TopKCotangents(
            rows.restore_derivative(dx + 0.0), rows.sum_to(dk, self.k), rows.sum_to(dlam, self.lam)
        )

    def jacobian(self) -> FloatArray:
        """dy_i/dx_j behind the leading axes of x: a tangent for every j."""
        rows = self.problem.rows
        basis = np.eye(rows.n)[:, None, :]
        dense = np.zeros((*rows.data.shape, rows.n))
        if rows.data.size:
            columns = np.broadcast_to(
                self._tangent((basis, None, None)), (rows.n, *rows.data.shape)
            )
            dense = np.moveaxis(columns, 0, -1)
        return rows.restore_matrices(dense)


def _bounded(values: Array) -> Array:
    """Sums and products of slopes stay finite."""
    return np.clip(values, -1e280, 1e280)
