"""Relaxed linear programs over the permutahedron P(w), for any w.

``x`` and ``w`` have the same length n along the axis; w may come in any order, and broadcasts
against x from a single vector of length n (or from any shape that broadcasts to that of x). Each
operator has ``*_jvp``, ``*_vjp`` and ``*_jacobian`` as in ``operators``. An infinite or NaN
entry makes its row NaN. The default strength is lam = 1 here, and 0.1 for top-k, whose outputs are at
most 1 whatever n is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike

from .._cached import cached_property
from .._checks import check_along, check_exponent, check_phi, check_solver
from .._maths.blocks import Blocks
from .._maths.isotonic import SolvedBlocks, blocks_of
from .._maths.isotonic import permutahedron_value as value_of_blocks
from .._maths.operator import OF_PHI, Operator
from .._maths.response import lam_floor
from .._maths.scalars import Phi
from .._types import Array, Bools, FloatArray, Ints, IsotonicSolver, PhiName, SolverOptions
from . import namespace as xp
from .arguments import Rows, as_real_array, check_lam
from .hard import descending_order, ranks
from .isotonic import solve_isotonic


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


def broadcast_weights(rows: Rows, w: ArrayLike, phi: PhiName) -> Rows:
    """w as rows in the shape of x, nonnegative if phi asks for it; a vector lies along the axis."""
    w_rows = _along(rows, "w", w)
    if phi != "identity" and (w_rows.data < 0).any():
        raise ValueError(
            "w must be nonnegative unless phi='identity', got "
            f"{np.nanmin(w_rows.data):g} with phi={phi!r}"
        )
    return w_rows


def _along(rows: Rows, name: str, w: ArrayLike) -> Rows:
    """w, or a direction of it, as rows in the shape of x."""
    array = as_real_array(name, w)
    check_along(name, array.shape, rows.shape, rows.axes[0])
    if array.ndim == 1:
        array = array.reshape([-1 if i == rows.axis else 1 for i in range(len(rows.shape))])
    return Rows.of(name, np.broadcast_to(array, rows.shape), rows.axis)


@dataclass(frozen=True)
class PermutahedronProblem:
    """Rows x and w (m, n) with lam (m, 1), and what is asked of them."""

    rows: Rows
    w_rows: Rows
    lam: Array
    phi_name: PhiName
    exponent: float
    solver: IsotonicSolver
    options: SolverOptions

    @property
    def phi(self) -> Phi:
        return Phi(xp, self.phi_name)

    @cached_property
    def invalid(self) -> Bools:
        """Rows (m, 1) whose result is NaN."""
        finite = np.isfinite(self.rows.data) & np.isfinite(self.w_rows.data)
        return np.asarray(~finite.all(axis=-1, keepdims=True))

    @property
    def _nan(self) -> Array:
        return np.where(self.invalid, np.nan, 0.0)

    @cached_property
    def x(self) -> Array:
        """The rows, with 0 for those that are invalid and |x| for even phi."""
        x = np.where(self.invalid, 0.0, self.rows.data)
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
    def solved(self) -> SolvedBlocks:
        """Of the relaxed rows; in hard ones every entry stands alone beside its weight."""
        w = np.where(self.invalid, 0.0, self.w_rows.data)
        order, w_order = descending_order(self.x), descending_order(w)
        paired = np.take_along_axis(w_order, ranks(order), axis=-1)
        index = np.broadcast_to(np.arange(self.x.shape[-1]), self.x.shape)
        found = SolvedBlocks(np.zeros_like(self.x), index.copy(), paired)
        soft = ~self.hard[:, 0]
        if self.x[soft].size:
            part = solve_isotonic(
                self.x[soft],
                w[soft],
                self.lam[soft],
                self.phi_name,
                self.exponent,
                self.solver,
                self.options,
            )
            for whole, rows in zip(found, part, strict=True):
                whole[soft] = rows
        return found

    @cached_property
    def w_paired(self) -> Array:
        """The LMO of the permutahedron at phi(x)."""
        w = np.where(self.invalid, 0.0, self.w_rows.data)
        return np.take_along_axis(w, self.solved.paired, axis=-1)

    @cached_property
    def blocks(self) -> Blocks:
        operator = Operator(OF_PHI[self.phi_name], self.exponent)
        reg, phi = operator.reg(xp), operator.phi(xp)
        lam, floor = np.where(self.hard, 1.0, self.lam), lam_floor(xp, self.rows.dtype, operator)
        with xp.quiet():
            d, block, _ = self.solved
            return blocks_of(reg, phi, self.x, self.w_paired, lam, d, block, floor)

    @cached_property
    def y(self) -> Array:
        """y_{phi,R}(x, w) as rows; for lam = 0 phi'(x) times the LMO."""
        with xp.quiet():
            hard = self.phi.prime(self.x) * self.w_paired
            return self.sign * np.where(self.hard, hard, self.blocks.y()) + self._nan + 0.0

    def tangent(self, dx: Array | None, dw: Array | None, dlam: Array | None) -> Array:
        """Of y; for lam = 0 the derivative in x is that of phi', the one in w is phi'(x)."""
        with xp.quiet():
            da = None if dx is None else self.sign * dx
            paired = None if dw is None else _gather(dw, self.solved.paired)
            dweight = None if paired is None else xp.block_sum(paired, self.solved.block)
            moved = self.blocks.tangent(da, dweight, dlam).y
            hard = np.zeros_like(moved)
            if da is not None:
                hard = hard + self.phi.curvature(self.x, self.w_paired) * da
            if paired is not None:
                hard = hard + self.phi.prime(self.x) * paired
            return self.sign * np.where(self.hard, hard, moved) + self._nan + 0.0

    def cotangent(self, g: Array) -> tuple[Array, Array, Array]:
        """Of x and w (m, n), and of lam (m, 1)."""
        with xp.quiet():
            g = self.sign * g
            found = self.blocks.cotangent(g)
            dx = np.where(self.hard, self.phi.curvature(self.x, self.w_paired) * g, found.x)
            dw = np.where(self.hard, self.phi.prime(self.x) * g, found.weight)
            dlam = np.where(self.hard, 0.0, xp.total(found.lam))
            (dw,) = xp.unsort(self.solved.paired, dw)
            return self.sign * dx + self._nan + 0.0, dw + self._nan, dlam + self._nan

    def value(self) -> Array:
        """f_{phi,R}(x, w) = R*(x - u) + sum_i w_i phi(u_i), (m, 1); for lam = 0, f_phi(x, w)."""
        with xp.quiet():
            hard = xp.total(self.w_paired * self.phi.value(self.x))
            soft = value_of_blocks(self.blocks, self.x, self.w_paired)
            return np.where(self.hard, hard, soft) + self._nan

    def matrices(self, columns: Array) -> FloatArray:
        """(n, m, n), a tangent for every j, as dy_i behind the leading axes of x, and j."""
        columns = np.broadcast_to(columns, (self.rows.n, *self.rows.data.shape))
        return self.rows.restore_matrices(np.moveaxis(columns, 0, -1))

    @property
    def basis(self) -> Array:
        return np.eye(self.rows.n)[:, None, :]


def _gather(dw: Array, paired: Ints) -> Array:
    """Every entry of w, or a basis of them, beside its partner."""
    shape = np.broadcast_shapes(dw.shape, paired.shape)
    return np.take_along_axis(np.broadcast_to(dw, shape), np.broadcast_to(paired, shape), axis=-1)


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
    op = check_phi(phi)
    w_rows = broadcast_weights(rows, w, phi)
    lam_rows = check_lam(rows.per_row("lam", lam))
    e = check_exponent(p)
    options = check_solver(solver, ("pav", "dykstra", "bca"), solver_options, Operator(op, e))
    return PermutahedronProblem(rows, w_rows, lam_rows, phi, e, solver, options)


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
    return problem.rows.restore(problem.y)


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
    rows = problem.rows
    if dw is not None and np.shape(dw) != np.shape(w):
        raise ValueError(f"dw must have the shape of w, {np.shape(w)}, got {np.shape(dw)}")
    return rows.restore(
        problem.tangent(
            None if dx is None else rows.tangent("dx", dx),
            None if dw is None else _along(rows, "dw", dw).data,
            None if dlam is None else rows.per_row("dlam", dlam),
        )
    )


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
    rows = problem.rows
    dx, dw, dlam = problem.cotangent(rows.tangent("dy", dy))
    return PermutahedronCotangents(
        rows.restore(dx), _sum_to_weights(rows, dw, w), rows.sum_to(dlam, lam)
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
    return problem.matrices(problem.tangent(problem.basis, None, None))


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
