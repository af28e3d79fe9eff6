"""The relaxed top-k operators on JAX arrays.

Common to all of them:

- ``k`` is a real number in [0, n] and ``lam >= 0``; each may be an array that broadcasts against x with
  length 1 along ``axis``, traced or not. ``lam = 0`` is the hard operator, where the lowest index wins a
  tie. There are derivatives of every order in x, k and lam.
- ``p > 1``; 2, 3/2 and 4/3 have closed forms. ``solver`` is "threshold" (default), "pav" or "dykstra"
  (p = 2), with ``solver_options`` as in NumPy.
- ``straight_through=True`` gives the hard output with the derivative of the relaxed operator.
- ``axis_name`` names the mesh axis, or axes, over which rows are sharded, inside ``shard_map``: then k
  counts entries of the whole row, and every shard gets its part of the result.
- The output has the shape and dtype of x. A NaN makes its row NaN; so does a bad k or lam whose value
  cannot be read at once (traced, or on another device than the CPU).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..._checks import check_exponent
from ..._maths.operator import MAGNITUDE, MASK, SIGN, TWO_SIDED, Count, Operator
from ..._types import Solver, SolverOptions
from .._rows.arguments import (
    AxisName,
    Number,
    Rows,
    check_jax_solver,
    check_k_and_lam,
    exact,
    is_hard,
    row_length,
)
from .._rows.compiled import compiled, entries
from .._rows.threshold import Setting, solve, unsigned_zero
from . import topk_isotonic


@compiled("axis", "setting", "times_x", results=entries)
def _evaluate(
    x: Array, k: Array | Count, lam: Array, axis: int, setting: Setting, times_x: bool
) -> Array:
    """By one threshold per row."""
    rows = Rows("x", x, axis)
    y = rows.restore(solve(rows.data, *rows.split(k), rows.per_row(lam), setting).y)
    return _times(x, y) if times_x else y


def _relaxed(
    x: Array,
    k: Number,
    lam: Number,
    p: float,
    op: int,
    axis: int,
    solver: Solver,
    options: SolverOptions | None,
    axis_name: AxisName,
    *,
    debias: bool = False,
    times_x: bool = False,
) -> Array:
    """An operator of the family, with its arguments checked."""
    rows = Rows.of("x", x, axis)
    kind = Operator(op, check_exponent(p), debias)
    check_k_and_lam(rows, k, lam, row_length(rows, axis_name))
    check_jax_solver(solver, options, op, p, axis_name)
    if rows.x.size == 0 and axis_name is None:
        return rows.x
    hard = is_hard(lam)
    if solver != "threshold" and hard is not True:
        y = topk_isotonic.evaluate(rows, k, lam, kind, p, solver, options)
        if hard is None:  # hard rows need no solver
            exactly = _relaxed(x, k, 0.0, p, op, axis, "threshold", None, None, debias=debias)
            y = jnp.where(jnp.asarray(lam) == 0, exactly, y)
        return _times(rows.x, y) if times_x else y
    setting = Setting(kind, hard, axis_name)
    return _evaluate(rows.x, exact(k), lam, rows.axis, setting, times_x)


def _straight_through(hard: Array, relaxed: Array) -> Array:
    """The value of one and the derivative of the other, also beside infinities."""
    hard = lax.stop_gradient(hard)
    return jnp.where(jnp.isinf(hard), hard, hard + (relaxed - lax.stop_gradient(relaxed)))


@jax.checkpoint  # what a backward needs is x and the mask
def _times(x: Array, mask: Array) -> Array:
    """x * mask, with 0 for padding; the mask has no slope beside an infinite x."""
    product = unsigned_zero(jnp.where(jnp.isfinite(x), x, 0.0) * mask)
    infinite = jnp.where(x == jnp.inf, x, 0.0) * lax.stop_gradient(mask)
    return jnp.where((x == jnp.inf) & (mask > 0), infinite, product)


def topk_mask(
    x: Array,
    k: Number,
    lam: Number = 0.1,
    *,
    p: float = 2.0,
    two_sided: bool = False,
    axis: int = -1,
    solver: Solver = "threshold",
    solver_options: SolverOptions | None = None,
    straight_through: bool = False,
    axis_name: AxisName = None,
) -> Array:
    r"""Relaxed top-k mask: entries in [0, 1] that sum to k, most of them exactly 0 or 1.

    .. math:: \max_{y \in [0,1]^n,\ \sum_i y_i = k} \langle x, y \rangle - R(y), \qquad
              R(y) = \frac{\lambda}{p} \sum_i |y_i|^p

    With ``two_sided=True``, R has :math:`|y_i|^p + |1 - y_i|^p` instead, and for 1 < p < 2 the mask
    is differentiable everywhere. -inf marks an entry that is not a candidate; +inf is always
    selected (more than k of them share k if lam > 0).

    >>> topk_mask(jnp.array([3.0, 1.0, 0.5, -1.0]), k=2, lam=1.0)
    Array([1.  , 0.75, 0.25, 0.  ], dtype=float32)
    """
    op = TWO_SIDED if two_sided else MASK
    y = _relaxed(x, k, lam, p, op, axis, solver, solver_options, axis_name)
    if straight_through:
        y = _straight_through(_relaxed(x, k, 0.0, p, op, axis, "threshold", None, axis_name), y)
    return y


def topk(
    x: Array,
    k: Number,
    lam: Number = 0.1,
    *,
    p: float = 2.0,
    two_sided: bool = False,
    axis: int = -1,
    solver: Solver = "threshold",
    solver_options: SolverOptions | None = None,
    straight_through: bool = False,
    axis_name: AxisName = None,
) -> Array:
    """Relaxed top-k: ``x * topk_mask(x)``, with 0 at padded (-inf) entries.

    >>> topk(jnp.array([3.0, 1.0, 0.5, -1.0]), k=2, lam=1.0)
    Array([3.   , 0.75 , 0.125, 0.   ], dtype=float32)
    """
    op = TWO_SIDED if two_sided else MASK
    y = _relaxed(x, k, lam, p, op, axis, solver, solver_options, axis_name, times_x=True)
    if straight_through:
        hard = _relaxed(x, k, 0.0, p, op, axis, "threshold", None, axis_name, times_x=True)
        y = _straight_through(hard, y)
    return y


def topk_mag(
    x: Array,
    k: Number,
    lam: Number = 0.1,
    *,
    p: float = 2.0,
    debias: bool = True,
    axis: int = -1,
    solver: Solver = "threshold",
    solver_options: SolverOptions | None = None,
    straight_through: bool = False,
    axis_name: AxisName = None,
) -> Array:
    r"""Relaxed top-k in magnitude: keeps the k entries with the largest \|x_i\|, with their sign.

    .. math:: y^\star = \arg\max_y \langle x, y \rangle - \frac12 \|y\|_{k}^2 - R(y), \qquad
              u^\star = x - \nabla R(y^\star)

    with the squared k-support norm, :math:`\phi(x) = x^2/2` in the paper. ``debias=False`` returns
    :math:`y^\star`, the gradient of a convex function, which shrinks even clearly selected entries
    (by 1/(1+lam) for p = 2). ``debias=True`` returns :math:`y^\star + x - u^\star`: entries clearly
    selected are equal to x, and lam -> infinity gives the identity.

    Infinite entries make their row NaN.

    >>> topk_mag(jnp.array([-3.0, 1.0, 0.95, 0.1]), k=2, lam=0.1)  # doctest: +ELLIPSIS
    Array([-3. ...,  0.785... ,  0.235...,  0. ...], dtype=float32)
    """
    y = _relaxed(x, k, lam, p, MAGNITUDE, axis, solver, solver_options, axis_name, debias=debias)
    if straight_through:
        hard = _relaxed(x, k, 0.0, p, MAGNITUDE, axis, "threshold", None, axis_name)
        y = _straight_through(hard, y)
    return y


def topk_sign(
    x: Array,
    k: Number,
    lam: Number = 0.1,
    *,
    p: float = 2.0,
    axis: int = -1,
    solver: Solver = "threshold",
    solver_options: SolverOptions | None = None,
    straight_through: bool = False,
    axis_name: AxisName = None,
) -> Array:
    r"""Relaxed signed top-k mask: in [-1, 1], the sign of x on the k entries largest in magnitude.

    .. math:: \max_{y \in [-1,1]^n,\ \sum_i |y_i| \le k} \langle x, y \rangle - R(y)

    (:math:`\phi(x) = |x|` in the paper). Infinite entries make their row NaN.

    >>> topk_sign(jnp.array([-3.0, 1.0, 0.5, 0.1]), k=2, lam=1.0)
    Array([-1.  ,  0.75,  0.25,  0.  ], dtype=float32)
    """
    y = _relaxed(x, k, lam, p, SIGN, axis, solver, solver_options, axis_name)
    if straight_through:
        y = _straight_through(_relaxed(x, k, 0.0, p, SIGN, axis, "threshold", None, axis_name), y)
    return y
