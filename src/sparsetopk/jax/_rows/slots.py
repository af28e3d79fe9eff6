"""Rows of the top-k family in slots: solved and selected in one call on the CPU, elsewhere in two.

For a backward x, the indices and the state of every row are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..._maths.operator import MAGNITUDE, MASK, Operator
from ..._maths.select import hard_first
from . import namespace as xp
from .calls import RowCall
from .threshold import ROW_CALLS, TopKSetting, in_core, solve_topk


class SlotsOfRows(NamedTuple):
    """Of rows (..., n): values and indices (..., capacity), and the magnitudes left out (..., 1)."""

    values: Array
    indices: Array
    dropped: Array


def solve_in_slots(
    x: Array, whole: Array, frac: Array, lam: Array, setting: TopKSetting, capacity: int
) -> SlotsOfRows:
    """The largest entries, in magnitude, of the operator on rows x (..., n); n > 0."""
    found = _select(x, whole, frac, lam, setting=setting, capacity=capacity)
    return SlotsOfRows(*found[:3])


class StraightSlots(NamedTuple):
    """The same with the hard selection first, and flags (..., capacity) of its slots."""

    values: Array
    indices: Array
    dropped: Array
    selected: Array


def solve_straight_through(
    x: Array,
    whole: Array,
    frac: Array,
    lam: Array,
    setting: TopKSetting,
    capacity: int,
    most: int | None,
) -> StraightSlots:
    """The hard selection, and what competes with it; no k is above ``most``, if that is known."""
    values, indices, dropped, _, _, selected = _select_straight(
        x, whole, frac, lam, setting=setting, capacity=capacity, most=most
    )
    return StraightSlots(values, indices, dropped, selected)


def straight_slots(
    y: Array, hard: Array, value: Array, whole: Array, frac: Array, capacity: int
) -> StraightSlots:
    """Slots of ``value``, that of the hard selection, with the derivative of y, in rows (..., n)."""
    indices, lost = largest(hard_first(xp, hard, lax.stop_gradient(y)), capacity)
    # The hard selection first, and each part in the order of the indices.
    selected = take(hard, indices) > 0
    order = jnp.argsort(~selected, axis=-1, stable=True)
    indices, selected = take(indices, order), take(selected, order)
    value, live = take(value, indices), take(y, indices)
    value = jnp.where(selected, value, 0.0).astype(y.dtype) + (live - lax.stop_gradient(live))
    if capacity < y.shape[-1]:  # a k that is bad makes its row NaN
        value = jnp.where(whole + (frac > 0) > capacity, jnp.nan, value)
    return StraightSlots(value, indices, left_out(y, lost, frac.dtype), selected)


def largest(y: Array, capacity: int) -> tuple[Array, Array]:
    """The indices (..., capacity) of the entries of rows (..., n) that are largest in magnitude, in
    order, and flags of the entries that have no slot.

    Of equal ones, as are the zeros that fill the slots, the lowest index comes first. NaN is like 0.
    """
    if capacity == 0 or capacity == y.shape[-1]:
        index = jnp.arange(capacity, dtype=jnp.int32)
        return jnp.broadcast_to(index, (*y.shape[:-1], capacity)), jnp.zeros(y.shape, dtype=bool)
    (indices,) = _largest(y, capacity=capacity)
    return indices, _without_slot(y, indices)


def _without_slot(y: Array, indices: Array) -> Array:
    size = _size(y)
    kept = take(size, indices)
    least = kept.min(axis=-1, keepdims=True)
    last = jnp.where(kept == least, indices, -1).max(axis=-1, keepdims=True)
    index = jnp.arange(y.shape[-1], dtype=jnp.int32)
    return (size < least) | ((size == least) & (index > last))


def take(values: Array, indices: Array) -> Array:
    return jnp.take_along_axis(values, indices, axis=-1, mode="promise_in_bounds")


def left_out(y: Array, lost: Array, dtype: Any) -> Array:
    """The sum (..., 1) of the magnitudes that are in no slot; NaN for a row that is."""
    size = jnp.where(lost, jnp.abs(y), 0.0).astype(dtype).sum(axis=-1, keepdims=True)
    return jnp.where(jnp.isnan(y).any(axis=-1, keepdims=True), jnp.nan, size)


def _size(y: Array) -> Array:
    return jnp.where(jnp.isnan(y), 0.0, jnp.abs(y))


def _largest_in_xla(y: Array, capacity: int) -> tuple[Array]:
    return (jnp.sort(lax.top_k(_size(y), capacity)[1], axis=-1),)


_largest = RowCall(
    "largest",
    lambda y, capacity: [(capacity, jnp.int32)],
    _largest_in_xla,
    lambda y, capacity: {},
)


def _select_in_xla(
    x: Array, whole: Array, frac: Array, lam: Array, setting: TopKSetting, capacity: int
) -> tuple[Array, ...]:
    y, *state = solve_topk(x, whole, frac, lam, setting)
    indices, lost = largest(y, capacity)
    return take(y, indices), indices, left_out(y, lost, lam.dtype), *state


def _straight_in_xla(
    x: Array,
    whole: Array,
    frac: Array,
    lam: Array,
    setting: TopKSetting,
    capacity: int,
    most: int | None,
) -> tuple[Array, ...]:
    y, *state = solve_topk(x, whole, frac, lam, setting)
    magnitude, mask = (
        setting.kind.op == MAGNITUDE,
        TopKSetting(Operator(MASK, 1.0), True, most=most),
    )
    scores = jnp.abs(x) if magnitude else x
    hard = solve_topk(scores, whole, frac, jnp.zeros_like(lam), mask).y
    found = straight_slots(y, hard, x * hard if magnitude else hard, whole, frac, capacity)
    return *found[:3], *state, found.selected


def _types(x: Array, *at: Array, setting: TopKSetting, capacity: int) -> list[tuple[int, Any]]:
    number = (1, at[2].dtype)
    return [(capacity, x.dtype), (capacity, jnp.int32), number, number, number]


def _straight_types(
    x: Array, *at: Array, setting: TopKSetting, capacity: int, most: int | None
) -> list[tuple[int, Any]]:
    of_slots = _types(x, *at, setting=setting, capacity=capacity)
    return [*of_slots, (capacity, jnp.bool_)]


# The arguments of the tangent: those of a solved row, its indices, and tangents of x, k and lam;
# ``moves`` says which of these there are. Slots that are ``straight`` through need not be those of the
# largest entries.
_STATE = 6


def _tangent(
    *at: Array, setting: TopKSetting, straight: bool, moves: tuple[bool, ...]
) -> tuple[Array, ...]:
    """Of the values, of what is left out, and of delta."""
    state, indices, given = at[:_STATE], at[_STATE], at[_STATE + 1 :]
    dy, ddelta = ROW_CALLS["tangent"](*state, *given, setting=setting, moves=moves)
    lost = _signs_left_out(state, indices, setting, straight)
    dropped = (lost * dy).astype(ddelta.dtype).sum(axis=-1, keepdims=True)
    return take(dy, indices), dropped, ddelta


def _signs_left_out(
    state: Sequence[Array], indices: Array, setting: TopKSetting, straight: bool
) -> Array:
    """The signs of the entries of y that have no slot, 0 for others; y is found again."""
    x, whole, frac, lam = state[:4]
    y = lax.stop_gradient(solve_topk(x, whole, frac, lam, setting).y)
    lost = _in_no_slot(y, indices) if straight else _without_slot(y, indices)
    return jnp.where(lost, jnp.sign(y), 0.0).astype(y.dtype)


def _in_no_slot(y: Array, indices: Array) -> Array:
    """The same for any slots."""

    def of_row(y: Array, indices: Array) -> Array:
        return jnp.ones(y.shape, dtype=bool).at[indices].set(False, mode="promise_in_bounds")

    return xp.by_rows(of_row, y, indices)


def _tangent_types(
    *at: Array, setting: TopKSetting, straight: bool, moves: Any
) -> list[tuple[int, Any]]:
    x, lam, indices = at[0], at[3], at[_STATE]
    return [(indices.shape[-1], x.dtype), (1, lam.dtype), (1, lam.dtype)]


def _cotangent(*at: Array, setting: TopKSetting, straight: bool, drops: bool) -> list[Array]:
    """For cotangents of values, of what is left out if it ``drops``, and of delta if there is one."""
    state, (indices, of_values, of_dropped, *of_delta) = at[:_STATE], at[_STATE:]
    (g,) = jax.linear_transpose(lambda dy: take(dy, indices), state[0])(of_values)
    if drops:
        lost = _signs_left_out(state, indices, setting, straight)
        g = g + lost * of_dropped.astype(g.dtype)
    return ROW_CALLS["backward"](*state, g, *of_delta, setting=setting)


def _cotangent_types(*at: Array, setting: TopKSetting, **_: bool) -> list[tuple[int, Any]]:
    return [(at[0].shape[-1], at[0].dtype), (1, at[3].dtype), (1, at[3].dtype)]


def _cotangent_in_core(*at: Any, setting: TopKSetting, **_: bool) -> dict[str, Any] | None:
    with_delta = len(at) > _STATE + 3
    return None if with_delta else in_core(setting)


_select = RowCall("select", _types, _select_in_xla, lambda *at, setting, capacity: in_core(setting))
_select_straight = RowCall(
    "select_straight",
    _straight_types,
    _straight_in_xla,
    lambda *at, setting, capacity, most: in_core(setting),
)
_move = RowCall("select_tangent", _tangent_types, _tangent)
_pull = RowCall("select_backward", _cotangent_types, _cotangent, _cotangent_in_core)


@_select.def_jvp
def _(at: Sequence[Array], tangents: Sequence[Any], setting: TopKSetting, capacity: int) -> Any:
    found = _select(*at, setting=setting, capacity=capacity)
    return found, _moved(at, found, tangents, setting, straight=False)


@_select_straight.def_jvp
def _(at: Sequence[Array], tangents: Sequence[Any], setting: TopKSetting, **options: Any) -> Any:
    found = _select_straight(*at, setting=setting, **options)
    return found, (*_moved(at, found, tangents, setting, straight=True), None)


def _moved(
    at: Sequence[Array],
    found: Sequence[Array],
    tangents: Sequence[Any],
    setting: TopKSetting,
    straight: bool,
) -> tuple[Array | None, ...]:
    """The tangents of values, indices, what is left out, pivot and delta."""
    _, indices, _, *state = found[:5]
    given = [tangents[0], *tangents[2:]]
    moves = tuple(d is not None for d in given)
    arguments = (*at, *state, indices, *(d for d in given if d is not None))
    values, dropped, delta = _move(*arguments, setting=setting, straight=straight, moves=moves)
    return values, None, dropped, None, delta


@_move.def_transpose
def _(
    cotangents: Sequence[Any],
    at: Sequence[Array],
    setting: TopKSetting,
    straight: bool,
    moves: Any,
) -> Any:
    of_values, of_dropped, of_delta = cotangents
    x, lam, indices = at[0], at[3], at[_STATE]
    values = jnp.zeros(indices.shape, x.dtype) if of_values is None else of_values
    dropped = jnp.zeros_like(lam) if of_dropped is None else of_dropped
    given = (*at, values, dropped, *([] if of_delta is None else [of_delta]))
    drops = of_dropped is not None
    found = _pull(*given, setting=setting, straight=straight, drops=drops)
    return [v for v, moved in zip(found, moves, strict=True) if moved]
