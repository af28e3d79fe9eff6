"""Relaxed linear programs over the permutahedron P(w) on JAX arrays, for any w; sorting and ranking.

Common to all of them:

- ``lam >= 0`` is a number or an array that broadcasts against x with length 1 along ``axis``;
  ``lam = 0`` is the hard operator. There are derivatives of every order in x, w and lam.
- ``p > 1``; ``solver`` is "pav" or "dykstra" (p = 2), with ``solver_options`` as in NumPy.
- The output has the shape and dtype of x. An infinite or NaN entry makes its row NaN, but for padding
  (-inf) in ``soft_sort`` and ``soft_rank``; so does a bad lam or w whose value cannot be read at once
  (traced, or on another device than the CPU).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..._checks import check_along, check_exponent, check_phi, check_size, check_solver
from ..._maths import dykstra, padding
from ..._maths.operator import Operator
from ..._types import IsotonicSolver, PhiName, SolverOptions
from .._rows import namespace as xp
from .._rows.arguments import Number, Rows, check_lam, check_number, compute_dtype, is_readable
from .._rows.compiled import compiled, entries, scalars
from .._rows.isotonic import IsotonicSetting
from .._rows.lam import choose_rank_lam as choose_rank_lam_of_rows
from .._rows.permuted import Relaxed, y_of


def setting_of(
    x: Array, p: float, phi: PhiName, solver: IsotonicSolver, options: SolverOptions | None
) -> IsotonicSetting:
    """What is asked of the rows of x, checked."""
    exponent = check_exponent(p)
    operator = Operator(check_phi(phi), exponent)
    options = check_solver(solver, ("pav", "dykstra"), options, operator)
    floor = 2.0 / float(jnp.finfo(x.dtype).max)
    if solver == "pav":
        return IsotonicSetting(phi, exponent, floor)
    rule = dykstra.RULE.given(**options)
    rounding = 8.0 * float(jnp.finfo(compute_dtype(x)).eps)
    return IsotonicSetting(phi, exponent, floor, rule.at_least(rounding))


def checked(setting: IsotonicSetting, result: Array, residual: Array) -> Array:
    """The result, if the solver met its rule or that cannot be read."""
    if setting.rule is not None and is_readable(residual):
        found = np.asarray(residual)
        setting.rule.check("dykstra", found <= setting.rule.tol, found)
    return result


# Beside the result these give the residual of the solver.
def _solved(*at: Any) -> tuple[Any, Any]:
    return entries(*at), entries(*at)


@compiled("axis", "setting", results=_solved)
def _y(x: Array, w: Array, lam: Number, axis: int, setting: IsotonicSetting) -> tuple[Array, Array]:
    rows = Rows("x", x, axis)
    y, residual = y_of(rows.data, _along(rows, w), rows.per_row(lam), setting)
    return rows.restore(y), rows.unflatten(residual)


@compiled("axis", "setting", results=lambda *at: (scalars(*at), entries(*at)))
def _value(
    x: Array, w: Array, lam: Number, axis: int, setting: IsotonicSetting
) -> tuple[Array, Array]:
    rows = Rows("x", x, axis)
    relaxed = Relaxed.of(rows.data, _along(rows, w), rows.per_row(lam), setting)
    return rows.restore_scalars(relaxed.value()), rows.unflatten(relaxed.residual)


@compiled("axis", "setting", "descending", results=_solved)
def _sorted(
    x: Array, lam: Number, axis: int, setting: IsotonicSetting, descending: bool
) -> tuple[Array, Array]:
    rows = Rows("x", x, axis)
    lam = rows.per_row(lam)

    # What is looked up in x again keeps nothing else.
    @jax.checkpoint
    def problem(x: Array, lam: Array) -> tuple[Array, Array]:
        return padding.sorting(xp, x.astype(lam.dtype), lam, setting.exponent, descending)[:2]

    @jax.checkpoint
    def padded(y: Array, x: Array, first: Array) -> Array:
        there = padding.places(xp, x)
        return jnp.where(there | jnp.isnan(first), y, -jnp.inf)  # a row that is NaN stays one

    rho, w = problem(rows.data, lam)
    y, residual = y_of(rho, w, lam, setting)
    y = padded(y, rows.data, jax.lax.stop_gradient(y[..., :1]))
    return rows.restore(y), rows.unflatten(residual)


@compiled("axis", "setting", "descending", results=_solved)
def _ranked(
    x: Array, lam: Number, axis: int, setting: IsotonicSetting, descending: bool
) -> tuple[Array, Array]:
    rows = Rows("x", x, axis)
    lam = rows.per_row(lam)

    @jax.checkpoint  # what is looked up in x again keeps nothing else
    def objective(x: Array, lam: Array) -> Array:
        return padding.ranking(xp, x.astype(lam.dtype), lam, setting.exponent, descending)

    z = objective(rows.data, lam)
    y, residual = y_of(z, _rho(rows), lam, setting)
    return rows.restore(y), rows.unflatten(residual)


def _rho(rows: Rows) -> Array:
    """(n, ..., 1) for every row; not in the dtype of x: float16 has no 2049."""
    rho = jnp.arange(rows.n, 0, -1, dtype=compute_dtype(rows.x))
    return jnp.broadcast_to(rho, rows.data.shape)


def _along(rows: Rows, w: Array) -> Array:
    """Checked w as rows (..., n); a vector lies along the axis."""
    if w.ndim == 1:
        return jnp.broadcast_to(w, rows.data.shape)
    return jnp.moveaxis(jnp.broadcast_to(w, rows.x.shape), rows.axis, -1)


def _check_lam(rows: Rows, lam: Number) -> None:
    check_number("lam", lam)
    rows.check_shape("lam", lam)
    check_lam(lam)


def _check_weights(rows: Rows, w: object, phi: PhiName) -> Array:
    if not isinstance(w, (Array, np.ndarray)):
        raise TypeError(f"w must be an array of real numbers, got {type(w).__name__}")
    if w.dtype == bool or jnp.issubdtype(w.dtype, jnp.complexfloating):
        raise TypeError(f"w must be an array of real numbers, got an array of dtype {w.dtype}")
    check_along("w", w.shape, rows.x.shape, rows.axes[0])
    if phi != "identity" and is_readable(w) and (np.asarray(w) < 0).any():
        raise ValueError(
            f"w must be nonnegative unless phi='identity', got {np.nanmin(np.asarray(w)):g} "
            f"with phi={phi!r}"
        )
    return jnp.asarray(w)


def permutahedron(
    x: Array,
    w: Array,
    lam: Number = 1.0,
    *,
    p: float = 2.0,
    phi: PhiName = "identity",
    axis: int = -1,
    solver: IsotonicSolver = "pav",
    solver_options: SolverOptions | None = None,
) -> Array:
    r"""The relaxed linear program over the permutahedron P(w), Proposition 2 of the paper.

    .. math:: y_{\phi,R}(x, w) = \arg\max_y \langle x, y \rangle - f_\phi^*(y, w) - R(y), \qquad
              R(y) = \frac{\lambda}{p} \sum_i |y_i|^p

    For phi = "identity" that is :math:`\max_{y \in P(w)} \langle x, y \rangle - R(y)`. ``lam = 0``
    gives the linear maximisation oracle, times phi'(x). w comes in any order, as a vector of length n
    or as anything that broadcasts to the shape of x; it must be nonnegative unless phi is the identity.

    >>> permutahedron(jnp.array([3.0, 1.0, 0.875]), jnp.array([2.0, 1.0, 0.0]), lam=0.5).round(4)
    Array([2.   , 0.625, 0.375], dtype=float32)
    """
    rows = Rows.of("x", x, axis)
    setting = setting_of(rows.x, p, phi, solver, solver_options)
    w = _check_weights(rows, w, phi)
    _check_lam(rows, lam)
    if rows.x.size == 0:
        return rows.x
    return checked(setting, *_y(rows.x, w, lam, rows.axis, setting))


def permutahedron_value(
    x: Array,
    w: Array,
    lam: Number = 1.0,
    *,
    p: float = 2.0,
    phi: PhiName = "identity",
    axis: int = -1,
    solver: IsotonicSolver = "pav",
    solver_options: SolverOptions | None = None,
) -> Array:
    """f_{phi,R}(x, w), the optimal value of ``permutahedron``, one per row.

    Convex in x; its gradient in x is ``permutahedron(x, w, ...)``. ``lam = 0`` gives f_phi(x, w), for
    instance the sum of the k largest entries for w = 1_k, or the OWL norm for phi = "abs".
    """
    rows = Rows.of("x", x, axis)
    setting = setting_of(rows.x, p, phi, solver, solver_options)
    w = _check_weights(rows, w, phi)
    _check_lam(rows, lam)
    if rows.x.size == 0:
        return rows.x.sum(axis=rows.axis)
    return checked(setting, *_value(rows.x, w, lam, rows.axis, setting))


def soft_sort(
    x: Array,
    lam: Number = 1.0,
    *,
    p: float = 2.0,
    descending: bool = True,
    axis: int = -1,
    solver: IsotonicSolver = "pav",
    solver_options: SolverOptions | None = None,
) -> Array:
    r"""Relaxed sort (Blondel et al., 2020), with any p.

    .. math:: \arg\max_{y \in P(x)} \langle \rho, y \rangle - R(y), \qquad \rho = (n, \dots, 1)

    ``lam = 0`` is the hard sort; lam -> infinity gives the mean of x everywhere. Padding (-inf) comes
    last, in either direction, and moves nothing.

    >>> soft_sort(jnp.array([0.1, 0.9, 0.5]), lam=0.1)
    Array([0.9, 0.5, 0.1], dtype=float32)
    """
    rows = Rows.of("x", x, axis)
    setting = setting_of(rows.x, p, "identity", solver, solver_options)
    _check_lam(rows, lam)
    if rows.x.size == 0:
        return rows.x
    return checked(setting, *_sorted(rows.x, lam, rows.axis, setting, bool(descending)))


def soft_rank(
    x: Array,
    lam: Number = 1.0,
    *,
    p: float = 2.0,
    descending: bool = True,
    axis: int = -1,
    solver: IsotonicSolver = "pav",
    solver_options: SolverOptions | None = None,
) -> Array:
    r"""Relaxed rank, from 1; rank 1 is the largest entry, or the smallest if not ``descending``.

    .. math:: \arg\max_{y \in P(\rho)} \langle -x, y \rangle - R(y), \qquad \rho = (n, \dots, 1)

    ``lam = 0`` is the hard rank; lam -> infinity gives (n+1)/2 everywhere. Padding (-inf) ranks last,
    in either direction, and moves nothing: it shares the ranks after those of the m other entries.

    >>> soft_rank(jnp.array([0.1, 0.9, 0.5]), lam=0.1)
    Array([3., 1., 2.], dtype=float32)
    """
    rows = Rows.of("x", x, axis)
    setting = setting_of(rows.x, p, "identity", solver, solver_options)
    _check_lam(rows, lam)
    if rows.x.size == 0:
        return rows.x
    return checked(setting, *_ranked(rows.x, lam, rows.axis, setting, bool(descending)))


def choose_rank_lam(
    x: Array,
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
    does, it is the scale of the row. It has no derivative, and
    the dtype in which the operators compute: float32, or float64 for such x.

    >>> choose_rank_lam(jnp.array([0.1, 0.9, 0.5, 0.6]), size=2).round(1)  # 0.9, 0.6 and 0.5 share
    Array([0.2], dtype=float32)
    """
    rows, size = Rows.of("x", x, axis), check_size(size)
    setting = setting_of(rows.x, p, "identity", "pav", None)
    if rows.x.size == 0:
        return jnp.ones(rows.per_row_shape, dtype=compute_dtype(rows.x))
    return _choose(rows.x, rows.axis, setting, size, bool(descending))


@compiled("axis", "setting", "size", "descending", results=entries)
def _choose(x: Array, axis: int, setting: IsotonicSetting, size: float, descending: bool) -> Array:
    rows = Rows("x", jax.lax.stop_gradient(x), axis)
    lam = choose_rank_lam_of_rows(rows.data.astype(compute_dtype(x)), setting, size, descending)
    return rows.unflatten(lam)
