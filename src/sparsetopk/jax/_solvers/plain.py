"""Sums over rows in XLA operations: of one array, or over the shards of many devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..._maths.operator import Count
from ..._maths.threshold import from_key, key, order_statistic
from .._rows import namespace as xp
from .._rows.arguments import AxisName


def row_sums(*values: Array, axis_name: AxisName = None) -> list[Array]:
    """The sum (..., 1) of each (..., n), over all shards; flags are counted.

    Every float is summed in one pass with integers, if need be with zeros: on the CPU, XLA's code for
    that is ten times faster than for a float alone, or two, that are computed on the way.
    """
    values = tuple(v.astype(jnp.int32) if v.dtype == jnp.bool_ else v for v in values)
    floats = [i for i, v in enumerate(values) if jnp.issubdtype(v.dtype, jnp.floating)]
    integers = [i for i in range(len(values)) if i not in floats]
    totals: dict[int, Array] = {}
    for group in [[*floats[:1], *integers], *([i] for i in floats[1:])]:
        operands = [values[i] for i in group]
        if len(operands) == 1:
            operands.append(jnp.zeros(operands[0].shape, jnp.int32))
        zeros = [jnp.zeros((), v.dtype) for v in operands]
        found = lax.reduce(operands, zeros, _add, (operands[0].ndim - 1,))
        found = lax.optimization_barrier(found)  # or a sum that is not used would go
        totals |= {i: total[..., None] for i, total in zip(group, found, strict=False)}
    results = [totals[i] for i in range(len(values))]
    return results if axis_name is None else lax.psum(results, axis_name)


def _add(some: list[Array], others: list[Array]) -> list[Array]:
    return [a + b for a, b in zip(some, others, strict=True)]


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def row_sum(values: Array, axis_name: AxisName = None) -> Array:
    """As ``row_sums``, of one array; this one has derivatives."""
    return row_sums(values, axis_name=axis_name)[0]


@row_sum.defjvp
def _row_sum_jvp(
    axis_name: AxisName, at: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
    return row_sum(at[0], axis_name), tangent_sum(tangents[0], axis_name)


def tangent_sum(values: Array, axis_name: AxisName = None) -> Array:
    """The same for a tangent, so that it can be transposed."""
    total = values.sum(axis=-1, keepdims=True)
    return total if axis_name is None else lax.psum(total, axis_name)


@dataclass(frozen=True)
class Shards:
    """Rows (..., n), of which each device of ``axis_name`` may have a part; see ``threshold.Row``."""

    x: Array
    axis_name: AxisName = None
    most: int | None = None  # only so many of the largest entries are asked for

    is_bracketed: ClassVar[bool] = False

    @property
    def n(self) -> int:
        length = self.x.shape[-1]
        return length if self.axis_name is None else length * lax.psum(1, self.axis_name)

    def sums(self, f: Callable[[Array], Sequence[Array]]) -> list[Array]:
        return row_sums(*f(self.x), axis_name=self.axis_name)

    def ends(self, even: bool, k: Count, lam: Array) -> tuple[Array, Array]:
        return _row_range(jnp.abs(self.x) if even else self.x, self.axis_name)

    def nth(self, i: Array, dtype: Any, even: bool, wanted: Array) -> Array:
        n = self.x.shape[-1]
        if self.most is None or self.axis_name is not None or not isinstance(n, int):
            return order_statistic(xp, self, i, dtype, even, wanted)
        a = (jnp.abs(self.x) if even else self.x).astype(dtype)
        largest, _ = lax.top_k(a, min(self.most, n))
        return jnp.take_along_axis(largest, i - 1, axis=-1)


def sums_over(axis_name: AxisName) -> Callable[..., list[Array]]:
    """As ``response`` asks for them: with derivatives, and of tangents such that they transpose."""

    def sums(values: Sequence[Array], linear: bool = False) -> list[Array]:
        if linear:
            return [tangent_sum(v, axis_name) for v in values]
        return [row_sum(v, axis_name) for v in values]

    return sums


def _row_range(a: Array, axis_name: AxisName) -> tuple[Array, Array]:
    """The smallest and the largest finite entry; 0 if there is none."""
    key_of, finite = key(xp, a), jnp.isfinite(a)
    least = jnp.iinfo(key_of.dtype).min
    ends = [jnp.where(finite, ~key_of, least), jnp.where(finite, key_of, least)]
    larger = lambda some, others: list(map(jnp.maximum, some, others))  # noqa: E731
    ends = lax.reduce(ends, [jnp.array(least, key_of.dtype)] * 2, larger, (a.ndim - 1,))
    if axis_name is not None:
        ends = lax.pmax(ends, axis_name)
    low, high = (from_key(xp, k[..., None], a.dtype) for k in (~ends[0], ends[1]))
    return jnp.where(jnp.isfinite(low), low, 0.0), jnp.where(jnp.isfinite(high), high, 0.0)
