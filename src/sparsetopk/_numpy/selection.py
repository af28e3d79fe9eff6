"""Top-k as a fixed number of slots (values and indices), and the lam that leaves so many fractional."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .. import _core as core
from .._checks import check_axes, check_exponent, check_magnitude, check_positive_int
from .._maths import select
from .._maths.operator import MAGNITUDE, MASK, TWO_SIDED, Operator
from .._maths.response import Relaxed
from .._maths.select import (
    Window,
    check_slots,
    default_capacity,
    flat,
    hard_first,
    least_lam,
)
from .._types import Array, Axis, FloatArray
from . import namespace as xp
from .arguments import Rows
from .hard import descending_order
from .operators import topk_mag, topk_mask
from .relaxed import TopKProblem


class Selection(NamedTuple):
    """The nonzero entries of a relaxed top-k, in slots along the axis."""

    values: FloatArray
    indices: NDArray[np.int64]
    dropped: FloatArray


class StraightThroughSelection(NamedTuple):
    """The hard top-k in slots, followed by the entries that compete with it."""

    values: FloatArray
    indices: NDArray[np.int64]
    dropped: FloatArray
    selected: NDArray[np.bool_]  # whether a slot is of the hard selection


@overload
def topk_select(
    x: ArrayLike,
    k: ArrayLike,
    lam: ArrayLike = 0.1,
    *,
    p: float = 2.0,
    two_sided: bool = False,
    magnitude: bool = False,
    axis: int | None = -1,
    where: ArrayLike | None = None,
    largest: bool = True,
    capacity: int | None = None,
    straight_through: Literal[False] = False,
) -> Selection: ...


@overload
def topk_select(
    x: ArrayLike,
    k: ArrayLike,
    lam: ArrayLike = 0.1,
    *,
    p: float = 2.0,
    two_sided: bool = False,
    magnitude: bool = False,
    axis: int | None = -1,
    where: ArrayLike | None = None,
    largest: bool = True,
    capacity: int | None = None,
    straight_through: Literal[True],
) -> StraightThroughSelection: ...


def topk_select(
    x: ArrayLike,
    k: ArrayLike,
    lam: ArrayLike = 0.1,
    *,
    p: float = 2.0,
    two_sided: bool = False,
    magnitude: bool = False,
    axis: int | None = -1,
    where: ArrayLike | None = None,
    largest: bool = True,
    capacity: int | None = None,
    straight_through: bool = False,
) -> Selection | StraightThroughSelection:
    """The nonzero entries of ``topk_mask(x)``, or with ``magnitude=True`` of ``topk_mag(x)``.

    Returns values and indices with ``capacity`` slots along the axis. Indices increase strictly, so
    that scattering the values back is safe; unused slots have value 0. A row with more nonzeros than
    slots keeps the largest; ``dropped`` is the sum of the magnitudes left out, one per row. The
    default capacity is ``min(n, ceil(k) + max(8, ceil(k/4)))``; it must be given if k is an array.

    The derivative of the values is that of the operator at the indices. ``where`` and ``largest`` are
    as in ``topk_mask``; with ``axis=None`` the slots are one row, and indices count entries of x in
    their order.

    With ``straight_through=True`` the first ceil(k) slots are the hard selection, with the value 1 (or
    x), and those after them the entries that compete with it, with the value 0; indices increase in
    each part. All have the relaxed derivative, and ``selected`` says which slots are of the first part:
    fewer if a row has fewer than k candidates, the rest being -inf. Each of the ceil(k) must have a
    slot; ``dropped`` is what the relaxed operator gives to entries without a slot.

    >>> selection = topk_select([3.0, -1.0, 1.0, 0.95], k=2, capacity=3)
    >>> selection.values, selection.indices
    (array([1.  , 0.75, 0.25]), array([0, 2, 3]))
    """
    check_magnitude(magnitude, two_sided, largest)
    if axis is None:
        x, where, k, lam = flat(np, x, where, k, lam)
        axis = 0
    check_axes("x", np.shape(x), axis, many=False)
    if magnitude:
        y = topk_mag(x, k, lam, p=p, axis=axis, where=where)
    else:
        y = topk_mask(x, k, lam, p=p, two_sided=two_sided, axis=axis, where=where, largest=largest)
    hard_rows = np.ndim(lam) == 0 and bool(lam == 0)
    capacity = _check_capacity(capacity, k, y.shape[axis], straight_through, hard_rows)
    if not straight_through:
        return _in_slots(y, y, capacity, axis)
    x = np.asarray(x)
    scores = np.abs(x) if magnitude else x
    hard = topk_mask(scores, k, 0.0, axis=axis, where=where, largest=largest)
    return _hard_first(y, hard, x * hard if magnitude else hard, capacity, axis)


def _hard_first(
    y: FloatArray, hard: FloatArray, value: FloatArray, capacity: int, axis: int
) -> StraightThroughSelection:
    """Slots of ``value``, that of the hard selection, for what competes in y."""
    _, indices, dropped = _in_slots(y, hard_first(xp, hard, y), capacity, axis)
    # The hard selection first, and each part in the order of the indices.
    order = np.argsort(np.take_along_axis(hard, indices, axis) <= 0, axis=axis, kind="stable")
    indices = np.take_along_axis(indices, order, axis)
    selected = np.take_along_axis(hard, indices, axis) > 0
    values = np.where(selected, np.take_along_axis(value, indices, axis), 0.0)
    values = np.where(np.isnan(np.expand_dims(dropped, axis)), np.nan, values)
    return StraightThroughSelection(values.astype(y.dtype), indices, dropped, selected)


def _check_capacity(
    capacity: int | None, k: ArrayLike, n: int, straight_through: bool, hard: bool
) -> int:
    if capacity is None:
        if np.ndim(k):
            raise ValueError(
                f"capacity must be given when k is an array, got k of shape {np.shape(k)}"
            )
        return default_capacity(float(np.asarray(k)), n, hard)
    if n:
        check_positive_int("capacity", capacity, at_most=n)
    if straight_through and np.size(k):
        check_slots(capacity, float(np.max(k)), n)
    return capacity


def _in_slots(y: FloatArray, by: FloatArray, capacity: int, axis: int) -> Selection:
    """The entries of y that are largest in magnitude by another array."""
    size, key = (np.moveaxis(np.abs(v), axis, -1) for v in (y, by))
    # A row of NaN sorts like any other: its slots are NaN.
    kept = np.sort(descending_order(key.astype(np.float64))[..., :capacity], axis=-1)
    indices = np.moveaxis(kept, -1, axis).astype(np.int64)
    values = np.take_along_axis(y, indices, axis=axis)
    left_out = size.astype(np.float64)
    np.put_along_axis(left_out, kept, 0.0, axis=-1)
    dropped = np.where(np.isnan(values).any(axis=axis), np.nan, left_out.sum(axis=-1))
    with np.errstate(over="ignore"):
        return Selection(values, indices, dropped.astype(y.dtype))


def choose_lam(
    x: ArrayLike,
    k: ArrayLike,
    fractional: int = 8,
    *,
    p: float = 2.0,
    two_sided: bool = False,
    magnitude: bool = False,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    largest: bool = True,
) -> Array:
    """The smallest lam, per row, that leaves at least ``fractional`` entries between 0 and 1.

    The number of fractional entries increases with lam from none (the hard operator) to n, and it is
    what a choice of lam decides: how many entries compete, and so receive a gradient. The result has
    length 1 along the axis and can be given as ``lam`` to ``topk_mask`` or, with ``magnitude=True``, to
    ``topk_mag``; for ``topk_sign`` take ``choose_lam(abs(x), ...)``. Where no lam can do it (k = 0,
    k = n), it is the scale of the row. At most n entries are asked for. ``axis``, ``where`` and
    ``largest`` are as in ``topk_mask``.

    Where so many entries are equal at the boundary, as happens in 16 bits, any lam leaves them
    fractional, and the smallest has slopes 1/lam beyond any use: clip it to what the entries are apart.

    >>> x = np.linspace(0.0, 1.0, 101)
    >>> lam = choose_lam(x, k=10, fractional=8)
    >>> y = topk_mask(x, k=10, lam=lam)
    >>> int(np.sum((y > 0) & (y < 1)))
    8
    """
    check_magnitude(magnitude, two_sided, largest)
    op = MAGNITUDE if magnitude else TWO_SIDED if two_sided else MASK
    rows, operator = Rows.of("x", x, axis, many=True), Operator(op, check_exponent(p))
    if not largest:
        rows = replace(rows, data=-rows.data)
    if where is not None:
        absent = 0.0 if magnitude else -np.inf
        rows = replace(rows, data=np.where(rows.flags("where", where), rows.data, absent))
    problem = TopKProblem.of(rows, k, 1.0, operator)
    fractional = min(check_positive_int("fractional", fractional), rows.n)
    if rows.data.size == 0:
        return rows.unflatten(np.ones_like(problem.k))
    if problem.is_compiled:
        least = least_lam(xp, problem.k.dtype)
        lam = core.choose_lam(operator, rows.data, problem.k, fractional, least, rows.dtype)
        return rows.unflatten(lam)
    bad = ~np.isfinite(rows.data) if magnitude else np.isnan(rows.data)
    invalid = bad.any(axis=-1, keepdims=True)
    data = np.where(invalid, 0.0, np.abs(rows.data) if magnitude else rows.data)
    s = -np.sort(-data, axis=-1)
    with xp.quiet():
        window = Window.of(xp, s, xp.split(problem.k), fractional)
        inside = replace(rows, data=window.s)

        def relax(lam: Array) -> Relaxed:
            k = window.k.whole + window.k.frac
            return replace(problem, rows=inside, k=k, lam=lam).relaxed

        lam = select.choose_lam(xp, window, operator, fractional, relax, rows.dtype)
    return rows.unflatten(np.where(invalid, np.nan, lam))
