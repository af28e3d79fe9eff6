"""Rows of the top-k family in slots: solved and selected in one call on the CPU, elsewhere in two.

For a backward x, the indices and the state of every row are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

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


def _types(
    x: Array, whole: Array, frac: Array, lam: Array, setting: TopKSetting, capacity: int
) -> list[tuple[int, Any]]:
    number = (1, lam.dtype)
    return [(capacity, x.dtype), (capacity, jnp.int32), number, number, number]


# The arguments of the tangent: those of a solved row, its indices, and tangents of x, k and lam;
# ``moves`` says which of these there are.
_STATE = 6


def _tangent(*at: Array, setting: TopKSetting, moves: tuple[bool, ...]) -> tuple[Array, ...]:
    """Of the values, of what is left out, and of delta."""
    state, indices, given = at[:_STATE], at[_STATE], at[_STATE + 1 :]
    dy, ddelta = ROW_CALLS["tangent"](*state, *given, setting=setting, moves=moves)
    lost = _signs_left_out(state, indices, setting)
    dropped = (lost * dy).astype(ddelta.dtype).sum(axis=-1, keepdims=True)
    return take(dy, indices), dropped, ddelta


def _signs_left_out(state: Sequence[Array], indices: Array, setting: TopKSetting) -> Array:
    """The signs of the entries of y that have no slot, 0 for others; y is found again."""
    x, whole, frac, lam = state[:4]
    y = lax.stop_gradient(solve_topk(x, whole, frac, lam, setting).y)
    return jnp.where(_without_slot(y, indices), jnp.sign(y), 0.0).astype(y.dtype)


def _tangent_types(*at: Array, setting: TopKSetting, moves: Any) -> list[tuple[int, Any]]:
    x, lam, indices = at[0], at[3], at[_STATE]
    return [(indices.shape[-1], x.dtype), (1, lam.dtype), (1, lam.dtype)]


def _cotangent(*at: Array, setting: TopKSetting, drops: bool) -> list[Array]:
    """For cotangents of values, of what is left out if it ``drops``, and of delta if there is one."""
    state, (indices, of_values, of_dropped, *of_delta) = at[:_STATE], at[_STATE:]
    (g,) = jax.linear_transpose(lambda dy: take(dy, indices), state[0])(of_values)
    if drops:
        g = g + _signs_left_out(state, indices, setting) * of_dropped.astype(g.dtype)
    return ROW_CALLS["backward"](*state, g, *of_delta, setting=setting)


def _cotangent_types(*at: Array, setting: TopKSetting, drops: bool) -> list[tuple[int, Any]]:
    return [(at[0].shape[-1], at[0].dtype), (1, at[3].dtype), (1, at[3].dtype)]


def _cotangent_in_core(*at: Any, setting: TopKSetting, drops: bool) -> dict[str, Any] | None:
    with_delta = len(at) > _STATE + 3
    return None if with_delta else in_core(setting)


_select = RowCall("select", _types, _select_in_xla, lambda *at, setting, capacity: in_core(setting))
_move = RowCall("select_tangent", _tangent_types, _tangent)
_pull = RowCall("select_backward", _cotangent_types, _cotangent, _cotangent_in_core)


@_select.def_jvp
def _(at: Sequence[Array], tangents: Sequence[Any], setting: TopKSetting, capacity: int) -> Any:
    found = _select(*at, setting=setting, capacity=capacity)
    _, indices, _, *state = found
    given = [tangents[0], *tangents[2:]]
    moves = tuple(d is not None for d in given)
    moved = (d for d in given if d is not None)
    dvalues, ddropped, ddelta = _move(*at, *state, indices, *moved, setting=setting, moves=moves)
    return found, (dvalues, None, ddropped, None, ddelta)


@_move.def_transpose
def _(cotangents: Sequence[Any], at: Sequence[Array], setting: TopKSetting, moves: Any) -> Any:
    of_values, of_dropped, of_delta = cotangents
    x, lam, indices = at[0], at[3], at[_STATE]
    values = jnp.zeros(indices.shape, x.dtype) if of_values is None else of_values
    dropped = jnp.zeros_like(lam) if of_dropped is None else of_dropped
    with_delta = [] if of_delta is None else [of_delta]
    drops = of_dropped is not None
    found = _pull(*at, values, dropped, *with_delta, setting=setting, drops=drops)
    return [v for v, moved in zip(found, moves, strict=True) if moved]
