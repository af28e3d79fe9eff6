"""Relaxed linear programs over the permutahedron P(w), for any w.

``x`` and ``w`` have the same length n along the axis; w may come in any order, and broadcasts
against x from a single vector of length n (or from any shape that broadcasts to that of x). Each
operator has ``*_jvp``, ``*_vjp`` and ``*_jacobian`` as in ``sparsetopk.operators``. An infinite or NaN
entry makes its row NaN. The default strength is lam = 1 here, and 0.1 for top-k, whose outputs are at
most 1 whatever n is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike

from ._cached import cached_property
from ._types import Array, Bools, FloatArray, Ints, IsotonicSolver, PhiName, SolverOptions
from .arguments import (
    Rows,
    as_real_array,
    check_lam,
    check_p,
    check_phi,
    check_solver,
)
from .hard import descending_order, ranks
from .phis import Phi
from .regularizers import PNorm
from .relaxed import RowProblem, solve_sorted
from .rowwise import block_sum, row_any, row_sum
from .solution import Linearization, Solution, linearize


class OrderingOptions(TypedDict, total=False):
    """The keyword arguments that all operators of this module share."""

    p: float
    axis: int
    solver: IsotonicSolver
    solver_options: SolverOptions | None


class PermutahedronOptions(OrderingOptions, total=False):
    """The keyword arguments of ``permutahedron``."""

    phi: PhiName


class PermutahedronCotangents(NamedTuple):
    """What the vector-Jacobian product returns, each in the shape of its argument."""

    x: FloatArray
    w: FloatArray
    lam: Array


def broadcast_weights(rows: Rows, w: ArrayLike, phi: Phi) -> Rows:
    """w as rows in the shape of x, nonnegative if phi asks for it; a vector lies along the axis."""
    w_rows = _along(rows, "w", w)
    if phi.name != "identity" and (w_rows.data < 0).any():
        raise ValueError(
            "w must be nonnegative unless phi='identity', got "
            f"{np.nanmin(w_rows.data):g} with phi={phi.name!r}"
        )
    return w_rows


def _along(rows: Rows, name: str, w: ArrayLike) -> Rows:
    """w, or a direction of it, as rows in the shape of x."""
    array = as_real_array(name, w)
    shape = array.shape
    if array.ndim == 1:
        array = array.reshape([-1 if i == rows.axis else 1 for i in range(len(rows.shape))])
    try:
        full = np.broadcast_to(array, rows.shape)
    except ValueError:
        full = None
    at = rows.axis - len(rows.shape)  # from the right, as broadcasting counts
    if full is None or array.ndim < -at or array.shape[at] != rows.n:
        raise ValueError(
            f"{name} must have length n={rows.n} along axis {rows.axis} of x and broadcast to its shape "
            f"{rows.shape}, got shape {shape}"
        )
    return Rows.of(name, full, rows.axis)


@dataclass(frozen=True)
class PermutahedronProblem(RowProblem):
    """Any w, as rows (m, n)."""

    reg: PNorm
    w_rows: Rows

    @cached_property
    def invalid(self) -> Bools:
        """Rows (m, 1) whose result is NaN."""
        return row_any(~np.isfinite(self.rows.data) | ~np.isfinite(self.w_rows.data))

    @cached_property
    def order(self) -> Ints:
        return descending_order(self.x)

    @cached_property
    def w_order(self) -> Ints:
        return descending_order(self.w_rows.data)

    @cached_property
    def paired(self) -> Ints:
        """The index of the entry of w that every entry of x is paired with: w_rank(x)."""
        return np.take_along_axis(self.w_order, ranks(self.order), axis=-1)

    @cached_property
    def w_paired(self) -> Array:
        """The LMO of the permutahedron at phi(x)."""
        w = np.where(self.invalid, 0.0, self.w_rows.data)
        return np.take_along_axis(w, self.paired, axis=-1)

    def _solve(self, rows: Bools) -> Solution:
        order, lam = self.order[rows], self.lam[rows]
        s = np.take_along_axis(self.x[rows], order, axis=-1)
        w = np.take_along_axis(self.w_paired[rows], order, axis=-1)
        solved = solve_sorted(s, w, lam, self.reg, self.phi, self.solver, self.options)
        return solved.scatter(order)

    @cached_property
    def y(self) -> Array:
        """y_{phi,R}(x, w) as rows; for lam = 0 phi'(x) times the LMO."""
        hard = self.phi.prime(self.x) * self.w_paired
        return self.sign * np.where(self.hard, hard, self.reg.response(self.solution.d))

    @cached_property
    def linearization(self) -> Linearization:
        """For lam = 0 the derivative in x is that of phi', the one in w is phi'(x)."""
        soft = linearize(self.solution, self.relaxing_lam, self.reg, self.phi)
        if not self.hard.any():
            return soft.signed(self.sign)
        curvature = 0.0 if self.phi.name == "abs" else self.phi.curvature(self.x, self.w_paired)
        return soft.hard(self.hard, curvature).signed(self.sign)

    def _w_blocks(self) -> tuple[Array, Ints]:
        """dy_i = factor_i * (sum of dw over block of i), with hard rows' entries alone."""
        linear = self.linearization
        alone = np.arange(self.x.shape[-1])
        factor = np.where(self.hard, self.sign * self.phi.prime(self.x), linear.in_weight)
        return factor, np.where(self.hard, alone, linear.block)

    def jvp_w(self, dw: Array) -> Array:
        factor, block = self._w_blocks()
        return factor * block_sum(np.take_along_axis(dw, self.paired, axis=-1), block)

    def vjp_w(self, dy: Array) -> Array:
        factor, block = self._w_blocks()
        out = np.empty_like(dy)
        np.put_along_axis(out, self.paired, block_sum(factor * dy, block), axis=-1)
        return out

    def dense_w(self) -> Array:
        """dy_i/dw_j, as (m, n, n)."""
        factor, block = self._w_blocks()
        w_block = np.empty_like(block)
        np.put_along_axis(w_block, self.paired, block, axis=-1)
        return np.where(block[:, :, None] == w_block[:, None, :], factor[:, :, None], 0.0)

    def value(self) -> Array:
        """f_{phi,R}(x, w) = R*(x - u) + sum_i w_i phi(u_i), (m, 1); for lam = 0, f_phi(x, w)."""
        with np.errstate(over="ignore", invalid="ignore"):
            hard = self.w_paired * self.phi.value(self.x)
            soft = self.relaxing_lam * self.reg.conjugate(self.solution.d)
            soft = soft + self.w_paired * self.phi.value(self.solution.u)
        return self.row_results(row_sum(np.where(self.hard, hard, soft)))


def permutahedron_problem(
    x: ArrayLike,
    w: ArrayLike,
    lam: ArrayLike = 1.0,
    *,
    p: float = 2.0,
    phi: PhiName = "identity",
    axis: int = -1,
    solver: IsotonicSolver = "pav",
    solver_options: SolverOptions | None = None,
) -> PermutahedronProblem:
    rows = Rows.of("x", x, axis)
    checked = check_phi(phi)
    w_rows = broadcast_weights(rows, w, checked)
    lam_rows = check_lam(rows.per_row("lam", lam))
    reg = PNorm(check_p(p))
    options = check_solver(solver, ("pav", "dykstra", "bca"), solver_options, reg, checked)
    return PermutahedronProblem(rows, lam_rows, reg, checked, solver, options, w_rows)


def permutahedron(
    x: ArrayLike,
    w: ArrayLike,
    lam: ArrayLike = 1.0,
    *,
    p: float = 2.0,
    phi: PhiName = "identity",
    axis: int = -1,
    solver: IsotonicSolver = "pav",
    solver_options: SolverOptions | None = None,
) -> FloatArray:
    r"""The relaxed linear program over the permutahedron P(w), Proposition 2 of the paper.

    .. math:: y_{\phi,R}(x, w) = \arg\max_y \langle x, y \rangle - f_\phi^*(y, w) - R(y), \qquad
              R(y) = \frac{\lambda}{p} \sum_i |y_i|^p

    For phi = "identity" that is :math:`\max_{y \in P(w)} \langle x, y \rangle - R(y)`. ``lam = 0``
    gives the linear maximisation oracle, times phi'(x). w must be nonnegative unless phi is the
    identity.

    >>> permutahedron([3.0, 1.0, 0.9], w=[2.0, 1.0, 0.0], lam=0.5)
    array([2. , 0.6, 0.4])
    """
    problem = permutahedron_problem(
        x, w, lam, p=p, phi=phi, axis=axis, solver=solver, solver_options=solver_options
    )
    return problem.result(problem.y)


def permutahedron_jvp(
    x: ArrayLike,
    w: ArrayLike,
    lam: ArrayLike = 1.0,
    *,
    dx: ArrayLike | None = None,
    dw: ArrayLike | None = None,
    dlam: ArrayLike | None = None,
    **options: Unpack[PermutahedronOptions],
) -> FloatArray:
    """Directional derivative of ``permutahedron`` along ``dx``, ``dw`` and ``dlam``."""
    problem = permutahedron_problem(x, w, lam, **options)
    rows, linear = problem.rows, problem.linearization
    dy = np.zeros_like(problem.x)
    if dx is not None:
        dy = dy + linear.jvp(rows.tangent("dx", dx))
    if dw is not None:
        if np.shape(dw) != np.shape(w):
            raise ValueError(f"dw must have the shape of w, {np.shape(w)}, got {np.shape(dw)}")
        dy = dy + problem.jvp_w(_along(rows, "dw", dw).data)
    if dlam is not None:
        dy = dy + linear.in_lam * rows.per_row("dlam", dlam)
    return problem.result(dy)


def permutahedron_vjp(
    x: ArrayLike,
    w: ArrayLike,
    lam: ArrayLike = 1.0,
    *,
    dy: ArrayLike,
    **options: Unpack[PermutahedronOptions],
) -> PermutahedronCotangents:
    """Cotangents of x, w and lam for the cotangent ``dy`` of ``permutahedron``."""
    problem = permutahedron_problem(x, w, lam, **options)
    rows, linear = problem.rows, problem.linearization
    g = rows.tangent("dy", dy)
    in_lam = row_sum(linear.in_lam * g)
    return PermutahedronCotangents(
        problem.result(linear.vjp(g)),
        _sum_to_weights(rows, problem.row_results(problem.vjp_w(g)), w),
        rows.sum_to(problem.row_results(in_lam), lam),
    )


def _sum_to_weights(rows: Rows, dw: Array, w: ArrayLike) -> FloatArray:
    """Undo the broadcast of w: sum rows over what it was repeated along, in the dtype of w."""
    array = np.asarray(w)
    dtype = array.dtype if array.dtype.kind == "f" else np.dtype(np.float64)
    if array.ndim == 1:
        return dw.sum(axis=0).astype(dtype)
    full = rows.unflatten(dw)
    full = full.sum(axis=tuple(range(full.ndim - array.ndim)))
    repeated = tuple(i for i, length in enumerate(array.shape) if length == 1 != full.shape[i])
    return full.sum(axis=repeated, keepdims=True).astype(dtype)


def permutahedron_jacobian(
    x: ArrayLike,
    w: ArrayLike,
    lam: ArrayLike = 1.0,
    **options: Unpack[PermutahedronOptions],
) -> FloatArray:
    """Dense Jacobian of ``permutahedron`` in x: symmetric."""
    problem = permutahedron_problem(x, w, lam, **options)
    return problem.matrices(problem.linearization.dense())


def permutahedron_value(
    x: ArrayLike,
    w: ArrayLike,
    lam: ArrayLike = 1.0,
    *,
    p: float = 2.0,
    phi: PhiName = "identity",
    axis: int = -1,
    solver: IsotonicSolver = "pav",
    solver_options: SolverOptions | None = None,
) -> FloatArray:
    """f_{phi,R}(x, w), the optimal value of ``permutahedron``, one per row.

    Convex in x; its gradient in x is ``permutahedron(x, w, ...)``. ``lam = 0`` gives f_phi(x, w), for
    instance the sum of the k largest entries for w = 1_k, or the OWL norm for phi = "abs".
    """
    problem = permutahedron_problem(
        x, w, lam, p=p, phi=phi, axis=axis, solver=solver, solver_options=solver_options
    )
    return problem.rows.restore_scalars(problem.value())


def lmo(x: ArrayLike, w: ArrayLike, *, axis: int = -1) -> FloatArray:
    """Linear maximisation oracle of the permutahedron, argmax_{y in P(w)} <x, y> = w_rank(x).

    >>> lmo([0.1, 0.9, 0.5], w=[2.0, 1.0, 0.0])
    array([0., 2., 1.])
    """
    return permutahedron(x, w, lam=0.0, axis=axis)
