"""Relaxed sorting and ranking (Blondel et al., 2020), with any p.

Both are linear programs over a permutahedron, relaxed by R: with rho = (n, n-1, ..., 1),
sort(x) = argmax_{y in P(x)} <rho, y> and rank(x) = argmax_{y in P(rho)} <-x, y>. The first moves
with x through the polytope, the second through the objective.
"""

from __future__ import annotations

from typing import NamedTuple, Unpack

import numpy as np
from numpy.typing import ArrayLike

from .._types import Array, FloatArray, IsotonicSolver, SolverOptions
from .arguments import Rows
from .polytope import (
    OrderingOptions,
    permutahedron,
    permutahedron_jacobian,
    permutahedron_jvp,
    permutahedron_problem,
    permutahedron_vjp,
)


class SortCotangents(NamedTuple):
    """What a vector-Jacobian product returns, each in the shape of its argument."""

    x: FloatArray
    lam: Array


def _rho(x: ArrayLike, axis: int, descending: bool = True) -> Array:
    """(n, ..., 1) along the axis, in the shape of x; (1, ..., n) if not descending.

    Always float64: float16 holds no integer above 2048.
    """
    rows = Rows.of("x", x, axis)
    rho = np.arange(rows.n, 0, -1) if descending else np.arange(1, rows.n + 1)
    return rows.unflatten(np.broadcast_to(rho.astype(np.float64), rows.data.shape))


def _cast(result: FloatArray, x: ArrayLike) -> FloatArray:
    return result.astype(np.asarray(x).dtype, copy=False)


def soft_sort(
    x: ArrayLike,
    lam: ArrayLike = 1.0,
    *,
    p: float = 2.0,
    descending: bool = True,
    axis: int = -1,
    solver: IsotonicSolver = "pav",
    solver_options: SolverOptions | None = None,
) -> FloatArray:
    r"""Relaxed sort.

    .. math:: \arg\max_{y \in P(x)} \langle \rho, y \rangle - R(y), \qquad \rho = (n, \dots, 1)

    ``lam = 0`` is the hard sort; lam -> infinity gives the mean of x everywhere.

    >>> soft_sort([0.1, 0.9, 0.5], lam=0.1)
    array([0.9, 0.5, 0.1])
    """
    rho = _rho(x, axis, descending)
    return _cast(
        permutahedron(rho, x, lam, p=p, axis=axis, solver=solver, solver_options=solver_options), x
    )


def soft_sort_jvp(
    x: ArrayLike,
    lam: ArrayLike = 1.0,
    *,
    dx: ArrayLike | None = None,
    dlam: ArrayLike | None = None,
    descending: bool = True,
    **options: Unpack[OrderingOptions],
) -> FloatArray:
    """Directional derivative of ``soft_sort`` along ``dx`` and ``dlam``."""
    axis = options.get("axis", -1)
    rho, direction = _rho(x, axis, descending), _direction(x, dx, axis)
    return _cast(permutahedron_jvp(rho, x, lam, dw=direction, dlam=dlam, **options), x)


def soft_sort_vjp(
    x: ArrayLike,
    lam: ArrayLike = 1.0,
    *,
    dy: ArrayLike,
    descending: bool = True,
    **options: Unpack[OrderingOptions],
) -> SortCotangents:
    """Cotangents of x and lam for the cotangent ``dy`` of ``soft_sort``."""
    rho = _rho(x, options.get("axis", -1), descending)
    cotangents = permutahedron_vjp(rho, x, lam, dy=dy, **options)
    return SortCotangents(_cast(cotangents.w, x), cotangents.lam)


def soft_sort_jacobian(
    x: ArrayLike,
    lam: ArrayLike = 1.0,
    *,
    descending: bool = True,
    **options: Unpack[OrderingOptions],
) -> FloatArray:
    """Dense Jacobian of ``soft_sort`` in x: its rows sum to 1."""
    rho = _rho(x, options.get("axis", -1), descending)
    problem = permutahedron_problem(rho, x, lam, **options)
    return _cast(problem.matrices(problem.tangent(None, problem.basis, None)), x)


def soft_rank(
    x: ArrayLike,
    lam: ArrayLike = 1.0,
    *,
    p: float = 2.0,
    descending: bool = True,
    axis: int = -1,
    solver: IsotonicSolver = "pav",
    solver_options: SolverOptions | None = None,
) -> FloatArray:
    r"""Relaxed rank, from 1; rank 1 is the largest entry, or the smallest if not ``descending``.

    .. math:: \arg\max_{y \in P(\rho)} \langle -x, y \rangle - R(y), \qquad \rho = (n, \dots, 1)

    ``lam = 0`` is the hard rank; lam -> infinity gives (n+1)/2 everywhere.

    >>> soft_rank([0.1, 0.9, 0.5], lam=0.1)
    array([3., 1., 2.])
    """
    z, _ = _rank_direction(x, axis, descending)
    return permutahedron(
        z, _rho(z, axis), lam, p=p, axis=axis, solver=solver, solver_options=solver_options
    )


def _rank_direction(x: ArrayLike, axis: int, descending: bool) -> tuple[ArrayLike, float]:
    """The objective of the linear program, and its derivative in x."""
    Rows.of("x", x, axis)  # says what is wrong with x before it is negated
    return (-np.asarray(x), -1.0) if descending else (x, 1.0)


def _direction(x: ArrayLike, dx: ArrayLike | None, axis: int) -> Array | None:
    """dx, checked under its own name."""
    rows = Rows.of("x", x, axis)
    return None if dx is None else rows.unflatten(rows.tangent("dx", dx))


def soft_rank_jvp(
    x: ArrayLike,
    lam: ArrayLike = 1.0,
    *,
    dx: ArrayLike | None = None,
    dlam: ArrayLike | None = None,
    descending: bool = True,
    **options: Unpack[OrderingOptions],
) -> FloatArray:
    """Directional derivative of ``soft_rank`` along ``dx`` and ``dlam``."""
    axis = options.get("axis", -1)
    z, sign = _rank_direction(x, axis, descending)
    direction = _direction(x, dx, axis)
    dz = None if direction is None else sign * direction
    return permutahedron_jvp(z, _rho(z, axis), lam, dx=dz, dlam=dlam, **options)


def soft_rank_vjp(
    x: ArrayLike,
    lam: ArrayLike = 1.0,
    *,
    dy: ArrayLike,
    descending: bool = True,
    **options: Unpack[OrderingOptions],
) -> SortCotangents:
    """Cotangents of x and lam for the cotangent ``dy`` of ``soft_rank``."""
    z, sign = _rank_direction(x, options.get("axis", -1), descending)
    rho = _rho(z, options.get("axis", -1))
    cotangents = permutahedron_vjp(z, rho, lam, dy=dy, **options)
    return SortCotangents(sign * cotangents.x, cotangents.lam)


def soft_rank_jacobian(
    x: ArrayLike,
    lam: ArrayLike = 1.0,
    *,
    descending: bool = True,
    **options: Unpack[OrderingOptions],
) -> FloatArray:
    """Dense Jacobian of ``soft_rank`` in x: symmetric, its rows sum to 0."""
    z, sign = _rank_direction(x, options.get("axis", -1), descending)
    rho = _rho(z, options.get("axis", -1))
    return sign * permutahedron_jacobian(z, rho, lam, **options)
