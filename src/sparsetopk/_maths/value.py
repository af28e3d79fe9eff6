"""The value f_{phi,R}(x, 1_k) of the relaxed top-k, and what its Fenchel-Young loss subtracts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .operator import Count
from .response import Relaxed
from .scalars import PNorm, Regularizer

Array = Any


def topk_value(rows: Relaxed, hard_mask: Array | None = None) -> Array:
    """f_{phi,R}(x, 1_k), (..., 1), for the output that is not debiased."""
    xp, split, phi = rows.xp, rows.split, rows.operator.phi(rows.xp)
    total = rows.sums([_dual(rows) if isinstance(rows.blocks.reg, PNorm) else _primal(rows)])[0]
    total = total + xp.where(split.soft, rows.left * phi.value(rows.v), 0.0)
    if split.hard is not None:
        mask = rows.hard_mask() if hard_mask is None else hard_mask
        hard = rows.sums([mask * phi.value(xp.where(mask > 0, rows.entries(), 0.0))])[0]
        total = xp.where(split.hard, hard, total)
    infinite = (rows.sums([rows.x == xp.inf])[0] > 0) & ((rows.k.whole > 0) | (rows.k.frac > 0))
    return xp.where(split.invalid, xp.nan, xp.where(infinite, xp.inf, total))


def _dual(rows: Relaxed) -> Array:
    """R*(x - u) + sum_i w_i phi(u_i) over the entries, but for phi(v) of the block."""
    xp, split, blocks = rows.xp, rows.split, rows.blocks
    reg, phi, lam = blocks.reg, blocks.phi, rows.lam
    assert isinstance(reg, PNorm)
    if phi.straight:  # an entry that stands alone has y = 1
        top = xp.where(split.above & xp.isfinite(rows.entries()), rows.entries(), 0.0)
        top = top - lam * reg.penalty(xp.ones_like(lam))
    else:
        top = lam * reg.conjugate(blocks.d) + phi.value(xp.where(split.above, blocks.u, 0.0))
    inside = lam * reg.conjugate(rows.t)
    return xp.where(split.inside, inside, xp.where(split.above, top, 0.0))


def _primal(rows: Relaxed) -> Array:
    """<x, y> - R(y) - v y over the entries; v is taken in the block alone."""
    xp, split, reg = rows.xp, rows.split, rows.blocks.reg
    y = xp.where(split.inside, reg.response(rows.t), xp.astype(split.above, rows.t.dtype))
    x = xp.where(xp.isfinite(rows.entries()), rows.entries(), 0.0)
    inner = xp.where(split.inside, (x - rows.v) * y, x * y)
    return inner - xp.where(rows.entries() > -xp.inf, rows.lam * _penalty(xp, reg, y), 0.0)


def tangent(
    rows: Relaxed, y: Array, dx: Array | None, dk: Array | None, dlam: Array | None
) -> Array:
    """The tangent of the value: that of a saddle function at its saddle point, with the point held.

    In x it is the output y, in k phi(v), in lam -sum_i r(y_i).
    """
    xp, split = rows.xp, rows.split
    moved = xp.zeros_like(rows.lam)
    if dx is not None:
        moved = moved + rows.sums([y * dx], linear=True)[0]
    if dk is not None:
        moved = moved + xp.where(split.soft, rows.blocks.phi.value(rows.v), 0.0) * dk
    if dlam is not None:
        terms = xp.where(rows.entries() > -xp.inf, _penalty(xp, rows.blocks.reg, y), 0.0)
        moved = moved - xp.where(split.relaxed, rows.sums([terms])[0], 0.0) * dlam
    return moved


def _penalty(xp: Any, reg: Regularizer, y: Array) -> Array:
    """r(y). It has no second derivative at the ends, where y does not move."""
    at_end = (xp.abs(y) == 0) | (xp.abs(y) == 1)
    moving = reg.penalty(xp.where(at_end, 0.5, y))
    return xp.where(at_end, reg.penalty(xp.stop_gradient(y)), moving)


def inner(xp: Any, x: Array, t: Array) -> Array:
    """<x, t> per row, (..., 1), where 0 times an infinite logit is 0."""
    return xp.total(xp.where(t == 0, 0.0, x) * t)


def smoothed(xp: Any, x: Array, t: Array, share: float) -> Array:
    """(1 - share) t, and the rest of its sum evenly on the candidates."""
    candidate = x > -xp.inf
    count = xp.clip(xp.astype(xp.total(candidate), t.dtype), 1.0, None)
    return xp.where(candidate, (1.0 - share) * t + share * (xp.total(t) / count), t)


def row_weights(xp: Any, t: Array, weight: Array) -> Array:
    """What the loss of each row is multiplied by, (..., 1): the mean of the class weights (n) over its
    labels; 1 for a row without any."""
    labels = xp.total(t)
    mean = xp.total(t * weight) / xp.where(labels > 0, labels, 1.0)
    return xp.where(labels > 0, mean, 1.0)


def reduced(xp: Any, values: Array, weights: Array | None, count: int, reduction: str) -> Array:
    """The losses of ``count`` rows put together; rows with weight 0 do not count. The mean of no rows is
    NaN, and they have no gradient: it is divided by no 0."""
    if weights is not None:
        values = xp.where(weights == 0, 0.0, values * weights)
    if reduction == "none":
        return values
    total = values.sum()
    if reduction == "sum":
        return total
    if weights is None:
        return total / count
    weight = weights.sum()
    return xp.where(weight == 0, xp.nan, total / xp.where(weight == 0, 1.0, weight))


def filled(
    xp: Any, x: Array, t: Array, k: Count, lam: Array, reg: Regularizer
) -> tuple[Array, Array]:
    """t' (..., n), which fills t up to the sum of y among the candidates, and R(t') (..., 1)."""
    candidate = x > -xp.inf
    count = xp.total(candidate)
    asked = xp.astype(k.whole, t.dtype) + k.frac
    most = xp.where(k.whole >= count, xp.astype(count, t.dtype), asked)
    room = xp.where(candidate, 1.0 - t, 0.0)
    left = xp.total(room)
    t = t + room * (most - xp.total(t)) / xp.where(left > 0, left, 1.0)
    return t, xp.total(xp.where(candidate, lam * _penalty(xp, reg, t), 0.0))


def best(
    xp: Any,
    x: Array,
    t: Array,
    k: Count,
    lam: Array,
    reg: Regularizer,
    value: Callable[[Array, Count], Array],
) -> Array:
    """The best value with y = 1 on the labels, (..., 1): they are taken whole, and the rest is the
    top-(k - m) of what remains, whose ``value(x, k)`` is given."""
    others = value(xp.where(t > 0, -xp.inf, x), left_by_labels(xp, t, k))
    whole = xp.astype(xp.total(t > 0), lam.dtype) * lam * reg.penalty(xp.ones_like(lam))
    return inner(xp, x, t) - whole + others


def left_by_labels(xp: Any, t: Array, k: Count) -> Count:
    """The part of k that is for entries which are no labels."""
    return Count(xp.clip(k.whole - xp.total(t > 0), 0, None), k.frac)
