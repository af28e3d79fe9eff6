# mypy: implicit-reexport
"""jax.numpy as the namespace that ``sparsetopk._maths`` is written over."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.numpy import (  # noqa: F401
    abs,
    broadcast_arrays,
    clip,
    exp,
    finfo,
    floor,
    full_like,
    hypot,
    iinfo,
    inf,
    int32,
    isfinite,
    isnan,
    log,
    maximum,
    minimum,
    nan,
    ones_like,
    sign,
    sqrt,
    take_along_axis,
    where,
    zeros_like,
)

from .promotion import promoting

_INTEGERS = {16: jnp.int16, 32: jnp.int32, 64: jnp.int64}
stop_gradient = lax.stop_gradient
still = sys.modules[__name__]  # a rule is differentiated as it is written


def astype(x: Array, dtype: Any) -> Array:
    return x.astype(dtype)


def cumsum(x: Array, axis: int) -> Array:
    return jnp.cumsum(x, axis=axis, dtype=jnp.int32 if x.dtype == bool else None)


def largest(x: Array) -> Array:
    return x.max(axis=-1, keepdims=True)


def pad_end(x: Array, by: int, fill: Any) -> Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, by)], constant_values=fill)


def take(x: Array, at: Array, axis: int) -> Array:
    """Indices beyond the ends are those of the ends."""
    return jnp.take(x, at, axis=axis, mode="clip")


def index(x: Array) -> Array:
    return jnp.arange(x.shape[-1], dtype=jnp.int32)


def bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, _INTEGERS[jnp.finfo(x.dtype).bits])


def from_bits(bits: Array, dtype: Any) -> Array:
    return lax.bitcast_convert_type(bits, dtype)


def with_derivative(f: Callable[..., Array], derivative: Callable[..., Array]) -> Any:
    """f, with a rule that is written with f itself: so there are derivatives of every order."""
    ruled = jax.custom_jvp(f)

    @ruled.defjvp
    @promoting
    def _(at: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
        y = ruled(*at)
        return y, derivative(y, at, tangents)

    return ruled


def while_loop(
    busy: Callable[[Any], Array], step: Callable[[Any, Any], Any], state: Any, limit: int
) -> Any:
    going = lambda at: busy(at[1]).any() & (at[0] < limit)  # noqa: E731
    move = lambda at: (at[0] + 1, step(*at))  # noqa: E731
    return lax.while_loop(going, move, (jnp.int32(0), state))[1]


def bit_length(n: Any) -> Any:
    """Of an array where n is not known until an exported program runs."""
    if isinstance(n, int):
        return n.bit_length()
    return 32 - lax.clz(jnp.asarray(n, dtype=jnp.int32))


shorter: Callable[[Any, Any], Any] = jax.core.min_dim


def repeat(
    count: Any, step: Callable[[Any, Any], Any], state: Any, when: Array | None = None
) -> Any:
    """``when`` says for which rows that is of use: where for none, it is not done."""
    times = count if when is None else jnp.where(when.any(), count, 0)
    return lax.fori_loop(0, times, step, state)


def total(x: Array) -> Array:
    return x.sum(axis=-1, keepdims=True, dtype=jnp.int32 if x.dtype == bool else None)


class _Sharded:
    """This namespace, with sums over rows that are sharded."""

    def __init__(self, axis_name: str | tuple[str, ...]):
        self.axis_name = axis_name

    def __getattr__(self, name: str) -> Any:
        return getattr(still, name)

    def total(self, x: Array) -> Array:
        return lax.psum(total(x), self.axis_name)


def over(axis_name: str | tuple[str, ...] | None) -> Any:
    return still if axis_name is None else _Sharded(axis_name)


def concat(arrays: list[Array], axis: int) -> Array:
    return jnp.concatenate(arrays, axis=axis)


def by_rows(f: Callable[..., Array], *arrays: Array) -> Array:
    """f of rows (n,), for each row of (..., n): where these are sharded, XLA sees that they stay."""
    for _ in range(arrays[0].ndim - 1):
        f = jax.vmap(f)
    return f(*arrays)


def block_sum(values: Array, block: Array) -> Array:
    """One term after the other: in float32 a block of a million terms of one sign costs four digits."""

    def of_row(values: Array, block: Array) -> Array:
        return jax.ops.segment_sum(values, block, num_segments=values.shape[-1])[block]

    return by_rows(of_row, values, block)


def sort(x: Array) -> tuple[Array, Array]:
    index = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    s, order = lax.sort((-x, index), num_keys=1)
    return -s, order


def unsort(order: Array, *values: Array) -> tuple[Array, ...]:
    def ranks(order: Array) -> Array:
        index = jnp.arange(order.size, dtype=order.dtype)
        return jnp.zeros_like(order).at[order].set(index, unique_indices=True)

    rank = by_rows(ranks, order)
    return tuple(jnp.take_along_axis(v, rank, axis=-1) for v in values)
