"""The relaxed top-k operators on JAX arrays.

Common to all of them:

- ``k`` is a real number in [0, n] and ``lam >= 0``; each may be an array that broadcasts against x with
  length 1 along ``axis``, traced or not. ``lam = 0`` is the hard operator, where the lowest index wins a
  tie. There are derivatives of every order in x, k and lam.
- ``p > 1``; 2, 3/2 and 4/3 have closed forms. ``solver`` is "threshold" (default), "pav" or "dykstra"
  (p = 2), with ``solver_options`` as in NumPy.
- ``axis`` may be several axes, as a tuple, or None for all: these make up one row.
- ``where`` is True where there is a candidate, and broadcasts to x; other entries are never selected,
  whatever they hold. ``largest=False`` is the same for -x: the k smallest.
- ``straight_through=True`` gives the hard output with the derivative of the relaxed operator.
- ``axis_name`` names the mesh axis, or axes, over which rows are sharded, inside ``shard_map``: then k
  counts entries of the whole row, and every shard gets its part of the result.
- The output has the shape and dtype of x. A NaN makes its row NaN; so does a bad k or lam whose value
  cannot be read at once (traced, or on another device than the CPU).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..._checks import check_exponent
from ..._maths.operator import MAGNITUDE, MASK, SIGN, TWO_SIDED, Count, Operator
from ..._types import Axes, Axis, Solver, SolverOptions
from .._rows import namespace as xp
from .._rows.arguments import (
    AxisName,
    Number,
    Rows,
    check_jax_solver,
    check_k_and_lam,
    check_where,
    exact,
    few,
    is_hard,
    row_length,
)
from .._rows.compiled import compiled, entries
from .._rows.threshold import TopKSetting, solve_topk, unsigned_zero
from . import topk_isotonic


class Entries(NamedTuple):
    """What a row is selected from, and what becomes of the selection."""

    largest: bool = True
    absent: float = -math.inf  # the score where there is no candidate
    times_x: bool = False  # whether the output is x times the selection

    def scores(self, x: Array, where: Array | None) -> Array:
        """x, or -x for the smallest."""
        scores = x if self.largest else -x
        return scores if where is None else jnp.where(where, scores, self.absent)

    def output(self, x: Array, where: Array | None, y: Array) -> Array:
        if not self.times_x:
            return y
        return _times(x if where is None else jnp.where(where, x, 0.0), y)


@compiled("axis", "setting", "entries_", results=entries)
def _evaluate(
    x: Array,
    where: Array | None,
    k: Array | Count,
    lam: Array,
    axis: Axes,
    setting: TopKSetting,
    entries_: Entries,
) -> Array:
    """By one threshold per row."""

    def output(x: Array) -> Array:
        rows = Rows("x", entries_.scores(x, where), axis)
        y = rows.restore(solve_topk(rows.data, *rows.split(k), rows.per_row(lam), setting).y)
        return entries_.output(x, where, y)

    # A product would keep the mask too: it is found again.
    return jax.checkpoint(output)(x) if entries_.times_x else output(x)


class _Call(NamedTuple):
    """An operator of the family, with its arguments checked."""

    rows: Rows
    where: Array | None
    k: Number
    kind: Operator
    p: float
    solver: Solver
    options: SolverOptions | None
    axis_name: AxisName
    entries: Entries

    @classmethod
    def of(
        cls,
        x: Array,
        k: Number,
        lam: Number,
        kind: Operator,
        *,
        p: float,
        axis: Axis,
        where: Array | None,
        solver: Solver,
        solver_options: SolverOptions | None,
        axis_name: AxisName,
        largest: bool = True,
        times_x: bool = False,
    ) -> _Call:
        rows = Rows.of("x", x, axis, many=True)
        check_k_and_lam(rows, k, lam, row_length(rows, axis_name))
        check_jax_solver(solver, solver_options, kind.op, p, axis_name)
        if where is not None:
            where = check_where(where, rows.x.shape)
        absent = 0.0 if kind.phi(xp).even else -math.inf
        found = Entries(bool(largest), absent, times_x)
        return cls(rows, where, k, kind, p, solver, solver_options, axis_name, found)

    def __call__(self, lam: Number, straight_through: bool) -> Array:
        y = self._relaxed(lam)
        if not straight_through:
            return y
        hard = self._replace(kind=self.kind._replace(debias=False))._relaxed(0.0)
        return straight(hard, y)

    def _relaxed(self, lam: Number) -> Array:
        (_, x, axis), hard = self.rows, is_hard(lam)
        if x.size == 0 and self.axis_name is None:
            return x
        if self.solver == "threshold" or hard is True:
            most = few(self.k) if hard is True else None
            setting = TopKSetting(self.kind, hard, self.axis_name, most)
            return _evaluate(x, self.where, exact(self.k), lam, axis, setting, self.entries)
        rows = Rows("x", self.entries.scores(x, self.where), axis)
        y = topk_isotonic.evaluate(rows, self.k, lam, self.kind, self.p, self.solver, self.options)
        if hard is None:  # hard rows need no solver
            mask = self.entries._replace(times_x=False)
            exactly = self._replace(entries=mask)._relaxed(0.0)
            y = jnp.where(jnp.asarray(lam) == 0, exactly, y)
        return self.entries.output(x, self.where, y)


def straight(hard: Array, relaxed: Array) -> Array:
    """The value of one and the derivative of the other; NaN where either is."""
    return _straight(lax.stop_gradient(hard), relaxed)


@jax.custom_jvp
def _straight(hard: Array, relaxed: Array) -> Array:
    return jnp.where(jnp.isnan(relaxed), relaxed, hard)


@_straight.defjvp
def _straight_jvp(at: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    return _straight(*at), tangents[1]


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
    axis: Axis = -1,
    where: Array | None = None,
    largest: bool = True,
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
    kind = Operator(TWO_SIDED if two_sided else MASK, check_exponent(p))
    call = _Call.of(
        x,
        k,
        lam,
        kind,
        p=p,
        axis=axis,
        where=where,
        solver=solver,
        solver_options=solver_options,
        axis_name=axis_name,
        largest=largest,
    )
    return call(lam, straight_through)


def topk(
    x: Array,
    k: Number,
    lam: Number = 0.1,
    *,
    p: float = 2.0,
    two_sided: bool = False,
    axis: Axis = -1,
    where: Array | None = None,
    largest: bool = True,
    solver: Solver = "threshold",
    solver_options: SolverOptions | None = None,
    straight_through: bool = False,
    axis_name: AxisName = None,
) -> Array:
    """Relaxed top-k: ``x * topk_mask(x)``, with 0 at padded (-inf) entries.

    >>> topk(jnp.array([3.0, 1.0, 0.5, -1.0]), k=2, lam=1.0)
    Array([3.   , 0.75 , 0.125, 0.   ], dtype=float32)
    """
    kind = Operator(TWO_SIDED if two_sided else MASK, check_exponent(p))
    call = _Call.of(
        x,
        k,
        lam,
        kind,
        p=p,
        axis=axis,
        where=where,
        solver=solver,
        solver_options=solver_options,
        axis_name=axis_name,
        largest=largest,
        times_x=True,
    )
    return call(lam, straight_through)


def topk_mag(
    x: Array,
    k: Number,
    lam: Number = 0.1,
    *,
    p: float = 2.0,
    debias: bool = True,
    axis: Axis = -1,
    where: Array | None = None,
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
    kind = Operator(MAGNITUDE, check_exponent(p), debias)
    call = _Call.of(
        x,
        k,
        lam,
        kind,
        p=p,
        axis=axis,
        where=where,
        solver=solver,
        solver_options=solver_options,
        axis_name=axis_name,
    )
    return call(lam, straight_through)


def topk_sign(
    x: Array,
    k: Number,
    lam: Number = 0.1,
    *,
    p: float = 2.0,
    axis: Axis = -1,
    where: Array | None = None,
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
    kind = Operator(SIGN, check_exponent(p))
    call = _Call.of(
        x,
        k,
        lam,
        kind,
        p=p,
        axis=axis,
        where=where,
        solver=solver,
        solver_options=solver_options,
        axis_name=axis_name,
    )
    return call(lam, straight_through)
