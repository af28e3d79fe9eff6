"""Relaxed sorting and ranking (Blondel et al., 2020), with any p.

Both are linear programs over a permutahedron, relaxed by R: with rho = (n, n-1, ..., 1),
sort(x) = argmax_{y in P(x)} <rho, y> and rank(x) = argmax_{y in P(rho)} <-x, y>. The first moves
with x through the polytope, the second through the objective. Padding (-inf) comes last in both, in
either direction, and moves nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Unpack

import numpy as np
from numpy.typing import ArrayLike

from .._checks import check_exponent, check_size
from .._maths import padding, select
from .._types import Array, Bools, FloatArray, IsotonicSolver, SolverOptions
from . import namespace as xp
from .arguments import Rows
from .isotonic import solve_isotonic
from .polytope import OrderingOptions, PermutahedronProblem, permutahedron_problem


class SortCotangents(NamedTuple):
    """What a vector-Jacobian product returns, each in the shape of its argument."""

    x: FloatArray
    lam: Array


class _Ordering(NamedTuple):
    """x as the weights of a linear program, or as its objective, times a sign."""

    problem: PermutahedronProblem
    is_weights: bool
    sign: float
    entries: Bools  # (m, n): those of x that are there
    places: Bools  # (m, n): those of the result that they take

    def output(self) -> FloatArray:
        problem = self.problem
        return problem.rows.restore(np.where(self.places | problem.invalid, problem.y, -np.inf))

    def _tangent(self, dx: Array | None, dlam: Array | None) -> Array:
        moved = None if dx is None else self.sign * np.where(self.entries, dx, 0.0)
        of_x, of_w = (None, moved) if self.is_weights else (moved, None)
        found = self.problem.tangent(of_x, of_w, dlam)
        return np.where(self.places | self.problem.invalid, found, 0.0)

    def jvp(self, dx: ArrayLike | None, dlam: ArrayLike | None) -> FloatArray:
        rows = self.problem.rows
        of_x = None if dx is None else rows.tangent("dx", dx)
        of_lam = None if dlam is None else rows.per_row("dlam", dlam)
        return rows.restore(self._tangent(of_x, of_lam))

    def vjp(self, dy: ArrayLike, lam: ArrayLike) -> SortCotangents:
        rows, invalid = self.problem.rows, self.problem.invalid
        g = np.where(self.places, rows.tangent("dy", dy), 0.0)
        of_x, of_w, of_lam = self.problem.cotangent(g)
        found = of_w if self.is_weights else self.sign * of_x
        found = np.where(self.entries | invalid, found, 0.0)
        return SortCotangents(rows.restore(found), rows.sum_to(of_lam, lam))

    def jacobian(self) -> FloatArray:
        return self.problem.matrices(self._tangent(self.problem.basis, None))


def _checked(
    x: ArrayLike, lam: ArrayLike, **options: Unpack[OrderingOptions]
) -> PermutahedronProblem:
    """x in the place of both arguments."""
    return permutahedron_problem(x, np.asarray(x), lam, **options)


def _sort(
    x: ArrayLike, lam: ArrayLike, descending: bool, **options: Unpack[OrderingOptions]
) -> _Ordering:
    problem = _checked(x, lam, **options)
    rows = problem.rows
    with xp.quiet():
        rho, w, there = padding.sorting(xp, rows.data, problem.lam, problem.exponent, descending)
    problem = replace(problem, rows=replace(rows, data=rho), w_rows=replace(rows, data=w))
    return _Ordering(problem, True, 1.0, rows.data != -np.inf, there)


def _rank(
    x: ArrayLike, lam: ArrayLike, descending: bool, **options: Unpack[OrderingOptions]
) -> _Ordering:
    problem = _checked(x, lam, **options)
    rows = problem.rows
    with xp.quiet():
        z = padding.ranking(xp, rows.data, problem.lam, problem.exponent, descending)
    rho = np.broadcast_to(np.arange(rows.n, 0.0, -1.0), rows.data.shape)
    problem = replace(problem, rows=replace(rows, data=z), w_rows=replace(rows, data=rho))
    there = np.ones(rows.data.shape, dtype=bool)
    sign = -1.0 if descending else 1.0
    return _Ordering(problem, False, sign, rows.data != -np.inf, there)


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

    ``lam = 0`` is the hard sort; lam -> infinity gives the mean of x everywhere. Padding (-inf) comes
    last, in either direction, and moves nothing.

    >>> soft_sort([0.1, 0.9, 0.5], lam=0.1)
    array([0.9, 0.5, 0.1])
    """
    return _sort(
        x, lam, descending, p=p, axis=axis, solver=solver, solver_options=solver_options
    ).output()


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
    return _sort(x, lam, descending, **options).jvp(dx, dlam)


def soft_sort_vjp(
    x: ArrayLike,
    lam: ArrayLike = 1.0,
    *,
    dy: ArrayLike,
    descending: bool = True,
    **options: Unpack[OrderingOptions],
) -> SortCotangents:
    """Cotangents of x and lam for the cotangent ``dy`` of ``soft_sort``."""
    return _sort(x, lam, descending, **options).vjp(dy, lam)


def soft_sort_jacobian(
    x: ArrayLike,
    lam: ArrayLike = 1.0,
    *,
    descending: bool = True,
    **options: Unpack[OrderingOptions],
) -> FloatArray:
    """Dense Jacobian of ``soft_sort`` in x: its rows sum to 1."""
    return _sort(x, lam, descending, **options).jacobian()


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

    ``lam = 0`` is the hard rank; lam -> infinity gives (n+1)/2 everywhere. Padding (-inf) ranks last,
    in either direction, and moves nothing: it shares the ranks after those of the m other entries.

    >>> soft_rank([0.1, 0.9, 0.5], lam=0.1)
    array([3., 1., 2.])
    """
    return _rank(
        x, lam, descending, p=p, axis=axis, solver=solver, solver_options=solver_options
    ).output()


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
    return _rank(x, lam, descending, **options).jvp(dx, dlam)


def soft_rank_vjp(
    x: ArrayLike,
    lam: ArrayLike = 1.0,
    *,
    dy: ArrayLike,
    descending: bool = True,
    **options: Unpack[OrderingOptions],
) -> SortCotangents:
    """Cotangents of x and lam for the cotangent ``dy`` of ``soft_rank``."""
    return _rank(x, lam, descending, **options).vjp(dy, lam)


def soft_rank_jacobian(
    x: ArrayLike,
    lam: ArrayLike = 1.0,
    *,
    descending: bool = True,
    **options: Unpack[OrderingOptions],
) -> FloatArray:
    """Dense Jacobian of ``soft_rank`` in x: symmetric, its rows sum to 0."""
    return _rank(x, lam, descending, **options).jacobian()


def choose_rank_lam(
    x: ArrayLike,
    size: float = 8.0,
    *,
    p: float = 2.0,
    descending: bool = True,
    axis: int = -1,
) -> Array:
    """The smallest lam, per row, with which the blocks of ``soft_rank`` have at least ``size`` entries
    on average.

    Entries of a block share their ranks, and only these have a gradient: with lam -> 0 every entry is
    a block of its own (but for ties), and as lam grows blocks grow together, until all is one. At most
    all entries of a row are asked for; padding (-inf) does not count. The result has length 1 along the
    axis and can be given as ``lam`` to ``soft_rank`` with the same p and direction; where every lam
    does, it is the scale of the row.

    >>> choose_rank_lam([0.1, 0.9, 0.5, 0.6], size=2).round(4)  # with which 0.9, 0.6, 0.5 share
    array([0.2333])
    """
    rows, e, size = Rows.of("x", x, axis), check_exponent(p), check_size(size)
    invalid = (~np.isfinite(rows.data) & (rows.data != -np.inf)).any(axis=-1, keepdims=True)
    data = np.where(invalid, 0.0, rows.data)
    if data.size == 0:
        return rows.unflatten(np.ones_like(invalid, dtype=float))
    rho = np.broadcast_to(np.arange(rows.n, 0.0, -1.0), data.shape)

    def blocks(lam: Array) -> Array:
        z = padding.ranking(xp, data, lam, e, descending)
        return solve_isotonic(z, rho, lam, "identity", e, "pav", {}).block

    with xp.quiet():
        lam = select.choose_rank_lam(xp, data, size, e, blocks)
    return rows.unflatten(np.where(invalid, np.nan, lam))
