"""jax.numpy inside a Pallas kernel, as the namespace that ``sparsetopk._maths`` is written over; and
rows that a kernel holds whole.

Compilers of kernels know a part of what XLA does: loops carry no flags, flags are counted in floats
(which is exact for rows that a kernel can hold), and nothing is differentiated here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..._maths.operator import Count
from ..._maths.threshold import order_statistic
from .._rows import namespace


class Namespace:
    """``_rows.namespace``, but for what is written here."""

    def __getattr__(self, name: str) -> Any:
        return getattr(namespace, name)

    @property
    def still(self) -> Namespace:
        return self

    @staticmethod
    def stop_gradient(x: Array) -> Array:
        return x

    @staticmethod
    def with_derivative(f: Callable[..., Array], _: Callable[..., Array]) -> Callable[..., Array]:
        return f

    @staticmethod
    def sign(x: Array) -> Array:
        # lax.sign is lowered for a TPU only where one is.
        above, below = (jnp.asarray(v, x.dtype) for v in (1, -1))
        return jnp.where(x > 0, above, jnp.where(x < 0, below, jnp.zeros_like(x)))

    @staticmethod
    def while_loop(
        busy: Callable[[Any], Array], step: Callable[[Any, Any], Any], state: Any, limit: int
    ) -> Any:
        leaves, tree = jax.tree.flatten(state)
        are_flags = [v.dtype == bool for v in leaves]

        def packed(state: Any) -> list[Array]:
            return [v.astype(jnp.int32) if v.dtype == bool else v for v in jax.tree.leaves(state)]

        def state_of(packed: Sequence[Array]) -> Any:
            pairs = zip(packed, are_flags, strict=True)
            return jax.tree.unflatten(tree, [v != 0 if is_flag else v for v, is_flag in pairs])

        def going(at: Any) -> Array:
            return any_of(busy(state_of(at[1]))) & (at[0] < limit)

        def move(at: Any) -> Any:
            return at[0] + jnp.int32(1), packed(step(at[0], state_of(at[1])))

        return state_of(lax.while_loop(going, move, (jnp.int32(0), packed(state)))[1])

    @staticmethod
    def repeat(
        count: int, step: Callable[[Any, Any], Any], state: Any, when: Array | None = None
    ) -> Any:
        times = jnp.int32(count)
        if when is not None:
            times = jnp.where(any_of(when), times, jnp.int32(0))
        return lax.fori_loop(jnp.int32(0), times, step, state)


xp = Namespace()


def any_of(flags: Array) -> Array:
    return _as_floats(flags, jnp.float32).max() > 0


def _as_floats(flags: Array, dtype: Any) -> Array:
    one = jnp.ones((), dtype)
    return jnp.where(flags, one, 0 * one)


@dataclass(frozen=True)
class Tile:
    """Rows (rows, block), of which the first n entries are there; see ``threshold.Row``."""

    x: Array
    n: int

    is_bracketed: ClassVar[bool] = False

    @property
    def index(self) -> Array:
        return lax.broadcasted_iota(jnp.int32, self.x.shape, 1)

    def totals(self, values: Sequence[Array], linear: bool = False) -> list[Array]:
        """The sum (rows, 1) of each; flags are counted."""
        return [self._total(v) for v in values]

    def _total(self, values: Array) -> Array:
        floats = _as_floats(values, self.x.dtype) if values.dtype == bool else values
        floats = self._inside(floats, 0.0)
        total = floats.sum(axis=-1, keepdims=True)
        return total.astype(jnp.int32) if values.dtype == bool else total

    def _inside(self, values: Array, otherwise: float) -> Array:
        if self.n == self.x.shape[-1]:
            return values
        return jnp.where(self.index < self.n, values, jnp.asarray(otherwise, values.dtype))

    def sums(self, f: Callable[[Array], Sequence[Array]]) -> list[Array]:
        return self.totals(f(self.x))

    def ends(self, even: bool, k: Count, lam: Array) -> tuple[Array, Array]:
        a = jnp.abs(self.x) if even else self.x
        finite = jnp.isfinite(a)
        low = self._inside(jnp.where(finite, a, jnp.inf), jnp.inf).min(axis=-1, keepdims=True)
        high = self._inside(jnp.where(finite, a, -jnp.inf), -jnp.inf).max(axis=-1, keepdims=True)
        return jnp.where(low <= high, low, 0.0), jnp.where(low <= high, high, 0.0)

    def nth(self, i: Array, dtype: Any, even: bool, wanted: Array) -> Array:
        return order_statistic(xp, self, i, dtype, even, wanted)

    def before(self, flags: Array, count: Array) -> Array:
        """For each entry, ``count`` (rows, 1) plus -1, 0 or 1: whether fewer, as many or more flags than
        that are set before it, where its own is. By the place of the next one, which is found bit by
        bit: not every compiler has a running sum."""
        bits = self.x.shape[-1].bit_length()  # beyond the last entry, if there is no next one

        def step(i: Any, found: Array) -> Array:
            trial = found | (jnp.int32(1) << (bits - 1 - i))
            fewer = self._total(flags & (self.index < trial)) <= count
            return jnp.where(fewer, trial, found)

        place = xp.repeat(bits, step, jnp.zeros_like(count))
        return count + xp.sign(self.index - place)
