"""Top-k as a fixed number of slots (values and indices), and the lam that leaves so many fractional."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..._checks import check_axes, check_exponent, check_magnitude, check_positive_int
from ..._maths.operator import MAGNITUDE, MASK, TWO_SIDED, Count, Operator
from ..._maths.select import check_slots, default_capacity, flat
from ..._types import Axes, Axis
from .._rows.arguments import (
    AxisName,
    Number,
    Rows,
    check_k_and_lam,
    check_where,
    compute_dtype,
    exact,
    few,
    is_hard,
)
from .._rows.compiled import compiled, entries, scalars
from .._rows.lam import choose_lam as lam_of_rows
from .._rows.slots import (
    StraightSlots,
    left_out,
    solve_in_slots,
    solve_straight_through,
    straight_slots,
    take,
)
from .._rows.slots import largest as slots_of_largest
from .._rows.threshold import TopKSetting
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
    operator = Operator(_op(magnitude, two_sided), check_exponent(p), magnitude)
    # In magnitude 0 stands for what is no candidate, which the hard selection must know from others.
    if axis_name is not None or (straight_through and magnitude and where is not None):
        options: Any = {"axis": axis, "where": where, "axis_name": axis_name}
        if not magnitude:
            options["largest"] = largest
        return _of_output(x, k, lam, operator, options, capacity, straight_through)
    rows = Rows.of("x", x, axis)
    check_k_and_lam(rows, k, lam)
    if where is not None:
        where = check_where(where, rows.x.shape)
    scores = _entries(magnitude, largest).scores(rows.x, where)
    return _of_scores(rows, scores, k, lam, operator, capacity, straight_through)


def _of_scores(
    rows: Rows,
    scores: Array,
    k: Number,
    lam: Number,
    operator: Operator,
    capacity: int | None,
    straight_through: bool,
) -> Selection | StraightThroughSelection:
    """The slots of checked arguments, solved and selected at once."""
    hard = is_hard(lam)
    capacity = _capacity(capacity, k, rows.n, hard is True and np.ndim(lam) == 0)
    if rows.x.size == 0:
        found = _select(scores, rows.axis, capacity)
        flags = jnp.zeros(found.indices.shape, dtype=bool)
        return _with_flags(found, flags) if straight_through else found
    setting = TopKSetting(operator, hard, most=few(k) if hard is True else None)
    if straight_through:
        _check_slots(capacity, k, rows.n)
        return _solve_straight(scores, exact(k), lam, rows.axis, setting, capacity, few(k))
    return _solve_and_select(scores, exact(k), lam, rows.axis, setting, capacity)


def _op(magnitude: bool, two_sided: bool) -> int:
    return MAGNITUDE if magnitude else TWO_SIDED if two_sided else MASK


def _entries(magnitude: bool, largest: bool) -> Entries:
    return Entries(bool(largest), 0.0 if magnitude else -math.inf)


def _of_output(
    x: Array,
    k: Number,
    lam: Number,
    operator: Operator,
    options: dict[str, Any],
    capacity: int | None,
    straight_through: bool,
) -> Selection | StraightThroughSelection:
    """The slots of a whole output of the operator."""
    magnitude, p = operator.op == MAGNITUDE, operator.p
    if magnitude:
        y = topk_mag(x, k, lam, p=p, **options)
    else:
        y = topk_mask(x, k, lam, p=p, two_sided=operator.op == TWO_SIDED, **options)
    rows = Rows.of("y", y, options["axis"])
    capacity = _capacity(capacity, k, rows.n, isinstance(lam, (int, float)) and lam == 0)
    if not straight_through:
        return _select(y, rows.axis, capacity)
    _check_slots(capacity, k, rows.n)
    x, k = lax.stop_gradient(x), lax.stop_gradient(k) if isinstance(k, Array) else k
    hard = topk_mask(jnp.abs(x) if magnitude else x, k, 0.0, **options)
    return _select_straight(y, hard, x * hard if magnitude else hard, exact(k), rows.axis, capacity)


def _check_slots(capacity: int, k: Number, n: int) -> None:
    if not isinstance(k, jax.core.Tracer) and np.size(k):
        check_slots(capacity, float(np.max(k)), n)


def _capacity(capacity: int | None, k: Number, n: int, hard: bool) -> int:
    if capacity is not None:
        return check_positive_int("capacity", capacity, at_most=n) if n else capacity
    if isinstance(k, (Array, np.ndarray)):
        raise ValueError(f"capacity must be given when k is an array, got k of shape {k.shape}")
    return default_capacity(float(k), n, hard)


def _places(*at: Any) -> Any:
    whole: Any = entries(*at)
    return Selection(whole, whole, scalars(*at))  # type: ignore[arg-type]


@compiled("axis", "setting", "capacity", results=_places)
def _solve_and_select(
    x: Array, k: Array | Count, lam: Array, axis: int, setting: TopKSetting, capacity: int
) -> Selection:
    rows = Rows("x", x, axis)
    slots = solve_in_slots(rows.data, *rows.split(k), rows.per_row(lam), setting, capacity)
    values, indices = (rows.unflatten(v) for v in slots[:2])
    return Selection(values, indices, rows.restore_scalars(slots.dropped))


@compiled("axis", "capacity", results=_places)
def _select(y: Array, axis: int, capacity: int) -> Selection:
    rows = Rows("y", y, axis)
    data = rows.data
    indices, lost = slots_of_largest(lax.stop_gradient(data), capacity)
    values, dropped = take(data, indices), left_out(data, lost, compute_dtype(data))
    return Selection(rows.unflatten(values), rows.unflatten(indices), rows.restore_scalars(dropped))


def _straight_places(*at: Any) -> Any:
    whole, _, dropped = _places(*at)
    return StraightThroughSelection(whole, whole, dropped, whole)


def _with_flags(found: Selection, selected: Array) -> StraightThroughSelection:
    return StraightThroughSelection(found.values, found.indices, found.dropped, selected)


def _straight_selection(rows: Rows, found: StraightSlots) -> StraightThroughSelection:
    values, indices, selected = (rows.unflatten(found[i]) for i in (0, 1, 3))
    dropped = rows.restore_scalars(found.dropped)
    return StraightThroughSelection(values, indices, dropped, selected)


@compiled("axis", "setting", "capacity", "most", results=_straight_places)
def _solve_straight(
    x: Array,
    k: Array | Count,
    lam: Array,
    axis: int,
    setting: TopKSetting,
    capacity: int,
    most: int | None,
) -> StraightThroughSelection:
    rows = Rows("x", x, axis)
    number = rows.per_row(lam)
    found = solve_straight_through(rows.data, *rows.split(k), number, setting, capacity, most)
    return _straight_selection(rows, found)


@compiled("axis", "capacity", results=_straight_places)
def _select_straight(
    y: Array, hard: Array, value: Array, k: Array | Count, axis: int, capacity: int
) -> StraightThroughSelection:
    """Slots of ``value``, that of the hard selection, with the derivative of y."""
    rows = Rows("y", y, axis)
    data, hard, value = (Rows("y", v, axis).data for v in (y, hard, value))
    whole, frac = rows.split(k)
    return _straight_selection(rows, straight_slots(data, hard, value, whole, frac, capacity))


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

    Where so many entries are equal at the boundary, as happens in 16 bits, any lam leaves them
    fractional, and the smallest has slopes 1/lam beyond any use: clip it to what the entries are apart.

    >>> x = jnp.linspace(0.0, 1.0, 101)
    >>> y = topk_mask(x, k=10, lam=choose_lam(x, k=10, fractional=8))
    >>> int(((y > 0) & (y < 1)).sum())
    8
    """
    check_magnitude(magnitude, two_sided, largest)
    rows = Rows.of("x", x, axis, many=True)
    operator = Operator(_op(magnitude, two_sided), check_exponent(p))
    if where is not None:
        where = check_where(where, rows.x.shape)
    scores = _entries(magnitude, largest).scores(rows.x, where)
    check_k_and_lam(rows, k, 1.0)
    fractional = min(check_positive_int("fractional", fractional), rows.n)
    if rows.x.size == 0:
        return jnp.ones(rows.per_row_shape, dtype=compute_dtype(rows.x))
    most = None if isinstance(k, (Array, np.ndarray)) else math.ceil(k)
    return _choose(scores, exact(k), rows.axis, operator, fractional, most)


@compiled("axis", "operator", "fractional", "most", results=entries)
def _choose(
    x: Array, k: Array | Count, axis: Axes, operator: Operator, fractional: int, most: int | None
) -> Array:
    rows = Rows("x", lax.stop_gradient(x), axis)
    k = Count(*map(lax.stop_gradient, rows.split(k)))
    return rows.unflatten(lam_of_rows(rows.data, k, operator, fractional, most))
