"""Top-k as a fixed number of slots (values and indices), and the lam that leaves so many fractional."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..._checks import check_axes, check_exponent, check_magnitude, check_positive_int
from ..._maths import select
from ..._maths.operator import MAGNITUDE, MASK, TWO_SIDED, Count, Operator
from ..._maths.response import Relaxed
from ..._maths.select import Window, check_slots, default_capacity, flat, hard_first
from ..._maths.threshold import State
from ..._types import Axes, Axis
from .._rows import namespace as xp
from .._rows.arguments import (
    AxisName,
    Number,
    Rows,
    check_k_and_lam,
    check_where,
    compute_dtype,
    exact,
)
from .._rows.calls import RowCall
from .._rows.compiled import compiled, entries, scalars
from .._rows.threshold import TopKSetting, relaxed, solve_topk
from .._solvers.plain import row_sums
from .operators import Entries, topk_mag, topk_mask


class Selection(NamedTuple):
    """The nonzero entries of a relaxed top-k, in slots along the axis."""

    values: Array
    indices: Array
    dropped: Array


class StraightThroughSelection(NamedTuple):
    """The hard top-k in slots, followed by the entries that compete with it."""

    values: Array
    indices: Array
    dropped: Array
    selected: Array  # whether a slot is of the hard selection


@overload
def topk_select(
    x: Array,
    k: Number,
    lam: Number = 0.1,
    *,
    p: float = 2.0,
    two_sided: bool = False,
    magnitude: bool = False,
    axis: int | None = -1,
    where: Array | None = None,
    largest: bool = True,
    capacity: int | None = None,
    straight_through: Literal[False] = False,
    axis_name: AxisName = None,
) -> Selection: ...


@overload
def topk_select(
    x: Array,
    k: Number,
    lam: Number = 0.1,
    *,
    p: float = 2.0,
    two_sided: bool = False,
    magnitude: bool = False,
    axis: int | None = -1,
    where: Array | None = None,
    largest: bool = True,
    capacity: int | None = None,
    straight_through: Literal[True],
    axis_name: AxisName = None,
) -> StraightThroughSelection: ...


def topk_select(
    x: Array,
    k: Number,
    lam: Number = 0.1,
    *,
    p: float = 2.0,
    two_sided: bool = False,
    magnitude: bool = False,
    axis: int | None = -1,
    where: Array | None = None,
    largest: bool = True,
    capacity: int | None = None,
    straight_through: bool = False,
    axis_name: AxisName = None,
) -> Selection | StraightThroughSelection:
    """The nonzero entries of ``topk_mask(x)``, or with ``magnitude=True`` of ``topk_mag(x)``.

    Returns values and indices (int32) with ``capacity`` slots along the axis. Indices increase
    strictly, so that scattering the values back is safe; unused slots have value 0. A row with more
    nonzeros than slots keeps the largest; ``dropped`` is the sum of the magnitudes left out, one per
    row. The default capacity is ``min(n, ceil(k) + max(8, ceil(k/4)))``; it must be given if k is an
    array. It is static: the shapes of the result do not depend on values.

    The derivative of the values is that of the operator at the indices. ``where`` and ``largest`` are
    as in ``topk_mask``; with ``axis=None`` the slots are one row, and indices count entries of x in
    their order.

    With ``straight_through=True`` the first ceil(k) slots are the hard selection, with the value 1 (or
    x), and those after them the entries that compete with it, with the value 0; indices increase in
    each part. All have the relaxed derivative, and ``selected`` says which slots are of the first part:
    fewer if a row has fewer than k candidates, the rest being -inf. Each of the ceil(k) must have a
    slot; ``dropped`` is what the relaxed operator gives to entries without a slot.

    With an ``axis_name`` of a mesh, over which rows are sharded along ``axis``, every device has slots
    for its own entries, and indices into its shard.

    >>> topk_select(jnp.array([3.0, -1.0, 1.0, 0.95]), k=2, capacity=3).indices
    Array([0, 2, 3], dtype=int32)
    """
    check_magnitude(magnitude, two_sided, largest)
    if axis is None:
        x, where, k, lam = flat(jnp, x, where, k, lam)
        axis = 0
    check_axes("x", np.shape(x), axis, many=False)
    mask = partial(topk_mask, axis=axis, where=where, axis_name=axis_name, largest=largest)
    if magnitude:
        y = topk_mag(x, k, lam, p=p, axis=axis, where=where, axis_name=axis_name)
    else:
        y = mask(x, k, lam, p=p, two_sided=two_sided)
    rows = Rows.of("y", y, axis)
    hard_rows = isinstance(lam, (int, float)) and lam == 0
    capacity = _capacity(capacity, k, rows.n, hard_rows)
    if not straight_through:
        return _select(y, rows.axis, capacity)
    if not isinstance(k, jax.core.Tracer) and np.size(k):
        check_slots(capacity, float(np.max(k)), rows.n)
    x, k = lax.stop_gradient(x), lax.stop_gradient(k) if isinstance(k, Array) else k
    hard = mask(jnp.abs(x) if magnitude else x, k, 0.0)
    return _select_straight(y, hard, x * hard if magnitude else hard, exact(k), rows.axis, capacity)


def _capacity(capacity: int | None, k: Number, n: int, hard: bool) -> int:
    if capacity is not None:
        return check_positive_int("capacity", capacity, at_most=n) if n else capacity
    if isinstance(k, (Array, np.ndarray)):
        raise ValueError(f"capacity must be given when k is an array, got k of shape {k.shape}")
    return default_capacity(float(k), n, hard)


def _places(*at: Any) -> Any:
    whole: Any = entries(*at)
    return Selection(whole, whole, scalars(*at))  # type: ignore[arg-type]


@compiled("axis", "capacity", results=_places)
def _select(y: Array, axis: int, capacity: int) -> Selection:
    rows = Rows("y", y, axis)
    data = rows.data
    indices, lost = select_slots(lax.stop_gradient(data), capacity)
    values = jnp.take_along_axis(data, indices, axis=-1)
    dropped = _left_out(data, lost, y.dtype)
    return Selection(rows.unflatten(values), rows.unflatten(indices), dropped)


def _left_out(y: Array, lost: Array, dtype: Any) -> Array:
    """The sum of the magnitudes that are in no slot; NaN for a row that is."""
    size = jnp.where(lost, jnp.abs(y), 0.0).astype(compute_dtype(y))
    return jnp.where(jnp.isnan(y).any(axis=-1), jnp.nan, size.sum(axis=-1)).astype(dtype)


def _straight_places(*at: Any) -> Any:
    whole, _, dropped = _places(*at)
    return StraightThroughSelection(whole, whole, dropped, whole)


@compiled("axis", "capacity", results=_straight_places)
def _select_straight(
    y: Array, hard: Array, value: Array, k: Array | Count, axis: int, capacity: int
) -> StraightThroughSelection:
    """Slots of ``value``, that of the hard selection, with the derivative of y."""
    rows = Rows("y", y, axis)
    data, hard, value = (Rows("y", v, axis).data for v in (y, hard, value))
    indices, lost = select_slots(hard_first(xp, hard, lax.stop_gradient(data)), capacity)
    # The hard selection first, and each part in the order of the indices.
    selected = jnp.take_along_axis(hard, indices, axis=-1) > 0
    order = jnp.argsort(~selected, axis=-1, stable=True)
    indices, selected = (jnp.take_along_axis(v, order, axis=-1) for v in (indices, selected))
    value, live = (jnp.take_along_axis(v, indices, axis=-1) for v in (value, data))
    value = jnp.where(selected, value, 0.0).astype(y.dtype) + (live - lax.stop_gradient(live))
    if capacity < rows.n:  # a k that is bad makes its row NaN
        whole, frac = rows.split(k)
        value = jnp.where(whole + (frac > 0) > capacity, jnp.nan, value)
    indices, selected = rows.unflatten(indices), rows.unflatten(selected)
    dropped = _left_out(data, lost, y.dtype)
    return StraightThroughSelection(rows.unflatten(value), indices, dropped, selected)


def select_slots(y: Array, capacity: int) -> tuple[Array, Array]:
    """The indices (..., capacity) of the entries of rows (..., n) that are largest in magnitude, in
    order, and flags of the entries that have no slot.

    Of equal ones, as are the zeros that fill the slots, the lowest index comes first. NaN is like 0.
    """
    if capacity == 0 or capacity == y.shape[-1]:
        index = jnp.arange(capacity, dtype=jnp.int32)
        return jnp.broadcast_to(index, (*y.shape[:-1], capacity)), jnp.zeros(y.shape, dtype=bool)
    (indices,) = _slots(y, capacity=capacity)
    size = _size(y)
    kept = jnp.take_along_axis(size, indices, axis=-1)
    least = kept.min(axis=-1, keepdims=True)
    last = jnp.where(kept == least, indices, -1).max(axis=-1, keepdims=True)
    index = jnp.arange(y.shape[-1], dtype=jnp.int32)
    return indices, (size < least) | ((size == least) & (index > last))


def _size(y: Array) -> Array:
    return jnp.where(jnp.isnan(y), 0.0, jnp.abs(y))


def _slots_in_xla(y: Array, capacity: int) -> tuple[Array]:
    return (jnp.sort(lax.top_k(_size(y), capacity)[1], axis=-1),)


_slots = RowCall(
    "select",
    lambda y, capacity: [(capacity, jnp.int32)],
    _slots_in_xla,
    lambda y, capacity: {},
)


def choose_lam(
    x: Array,
    k: Number,
    fractional: int = 8,
    *,
    p: float = 2.0,
    two_sided: bool = False,
    magnitude: bool = False,
    axis: Axis = -1,
    where: Array | None = None,
    largest: bool = True,
) -> Array:
    """The smallest lam, per row, that leaves at least ``fractional`` entries between 0 and 1.

    The number of fractional entries increases with lam from none (the hard operator) to n, and it is
    what a choice of lam decides: how many entries compete, and so receive a gradient. The result has
    length 1 along the axis and can be given as ``lam`` to ``topk_mask`` or, with ``magnitude=True``, to
    ``topk_mag``; for ``topk_sign`` take ``choose_lam(abs(x), ...)``. Where no lam can do it (k = 0,
    k = n), it is the scale of the row. At most n entries are asked for. It has no derivative, and the
    dtype in which the operators compute: float32, or float64 for such x. ``axis``, ``where`` and
    ``largest`` are as in ``topk_mask``.

    >>> x = jnp.linspace(0.0, 1.0, 101)
    >>> y = topk_mask(x, k=10, lam=choose_lam(x, k=10, fractional=8))
    >>> int(((y > 0) & (y < 1)).sum())
    8
    """
    check_magnitude(magnitude, two_sided, largest)
    rows, e = Rows.of("x", x, axis, many=True), check_exponent(p)
    if where is not None:
        where = check_where(where, rows.x.shape)
    scores = Entries(largest, 0.0 if magnitude else -math.inf).scores(rows.x, where)
    check_k_and_lam(rows, k, 1.0)
    fractional = min(check_positive_int("fractional", fractional), rows.n)
    if rows.x.size == 0:
        return jnp.ones(rows.per_row_shape, dtype=compute_dtype(rows.x))
    operator = Operator(MAGNITUDE if magnitude else TWO_SIDED if two_sided else MASK, e)
    most = None if isinstance(k, (Array, np.ndarray)) else math.ceil(k)
    return _choose(scores, exact(k), rows.axis, operator, fractional, most)


@compiled("axis", "operator", "fractional", "most", results=entries)
def _choose(
    x: Array, k: Array | Count, axis: Axes, operator: Operator, fractional: int, most: int | None
) -> Array:
    rows = Rows("x", lax.stop_gradient(x), axis)
    split = Count(*map(lax.stop_gradient, rows.split(k)))
    x, even = rows.data, operator.phi(xp).even
    a = jnp.abs(x) if even else x
    count = rows.n if most is None else min(rows.n, most + fractional + 1)
    s = lax.top_k(jnp.where(jnp.isnan(a), 0.0, a), count)[0]
    window = Window.of(xp, s, rows.n, split, fractional)
    setting = TopKSetting(operator, False)

    def relax(lam: Array) -> Relaxed:
        _, pivot, delta = solve_topk(window.s, *window.k, lam, setting)
        return relaxed(window.s, window.k, lam, State(pivot, delta), setting)

    lam = select.choose_lam(xp, window, operator, fractional, relax, x.dtype)
    bad = ~jnp.isfinite(x) if even else jnp.isnan(x)
    invalid = (row_sums(bad)[0] > 0) | ~split.is_valid(rows.n)
    return rows.unflatten(jnp.where(invalid, jnp.nan, lam))
