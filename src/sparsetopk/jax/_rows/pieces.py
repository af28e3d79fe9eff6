"""One row that is spread over many arrays, of any shapes, which may be sharded over devices.

``Pieces`` stand for the entries of the row wherever the maths says (..., n); what is one number of it is
an array (1,). Nothing is put together but sums: so nothing else moves between devices.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..._maths.operator import Count
from ..._maths.threshold import order_statistic
from . import namespace as xp
from .calls import alike, varying


class Pieces:
    """Arrays that are computed with as one: an operation is that on each."""

    shape = (None,)  # of no length that is known

    def __init__(self, parts: Iterable[Any]):
        self.parts = tuple(parts)

    @property
    def dtype(self) -> Any:
        return self.parts[0].dtype


def _unflattened(_: None, parts: Iterable[Any]) -> Pieces:
    return Pieces(parts)


jax.tree_util.register_pytree_node(Pieces, lambda v: (v.parts, None), _unflattened)


def lifted(f: Callable[..., Any]) -> Callable[..., Any]:
    """f on each of the arrays of its arguments that are pieces; the others are the same for all."""

    def on_each(*args: Any, **options: Any) -> Any:
        count = next((len(v.parts) for v in args if isinstance(v, Pieces)), None)
        if count is None:
            return f(*args, **options)
        every = ([v.parts[i] if isinstance(v, Pieces) else v for v in args] for i in range(count))
        return Pieces(f(*_alike(each), **options) for each in every)

    return on_each


def _alike(values: list[Any]) -> list[Any]:
    """Values that vary over the same mesh axes. A number of the row does so before it is one for every
    entry: so what goes back over these axes is a number too."""
    arrays = {i: v for i, v in enumerate(values) if isinstance(v, Array)}
    cast = dict(zip(arrays, alike(list(arrays.values())), strict=True))
    return [cast.get(i, v) for i, v in enumerate(values)]


_BINARY = ("add", "sub", "mul", "truediv", "pow", "and", "or", "lt", "le", "gt", "ge", "eq", "ne")


def _reversed(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b: f(b, a)


for _name in _BINARY:
    _operation = lifted(getattr(operator, f"{_name}_" if _name in ("and", "or") else _name))
    setattr(Pieces, f"__{_name}__", _operation)
    setattr(Pieces, f"__r{_name}__", _reversed(_operation))
for _name in ("neg", "invert"):
    setattr(Pieces, f"__{_name}__", lifted(getattr(operator, _name)))


class _Namespace:
    """That of the maths, for pieces too."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(xp, name)
        is_elementwise = callable(found) and name not in ("finfo", "iinfo", "repeat", "while_loop")
        return lifted(found) if is_elementwise else found

    @property
    def still(self) -> _Namespace:
        return self

    def broadcast_arrays(self, *arrays: Any) -> tuple[Any, ...]:
        return tuple(
            lifted(lambda *each, i=i: xp.broadcast_arrays(*each)[i])(*arrays)
            for i in range(len(arrays))
        )

    def with_derivative(self, f: Callable[..., Any], derivative: Callable[..., Any]) -> Any:
        return lifted(xp.with_derivative(f, derivative))


SPREAD = _Namespace()


@dataclass(frozen=True)
class Spread:
    """The row as ``threshold.Row`` asks for it; of ``axis_names``, an array is sharded over those that
    it varies over."""

    parts: tuple[Array, ...]
    axis_names: tuple[str, ...] = ()

    is_bracketed: ClassVar[bool] = False
    is_sorted: ClassVar[bool] = False

    @property
    def own(self) -> list[tuple[str, ...]]:
        """The axes over which each is sharded."""
        names = self.axis_names
        # With check_vma=False, nobody knows over which axes a value varies.
        if not names or not varying(lax.axis_index(names)):
            return [names for _ in self.parts]
        return [tuple(a for a in names if a in varying(part)) for part in self.parts]

    @property
    def n(self) -> int:
        sizes = zip(self.parts, self.own, strict=True)
        return sum(part.size * (lax.psum(1, own) if own else 1) for part, own in sizes)

    def _together(
        self,
        values: Sequence[Sequence[Array]],
        put: Callable[[Array, Array], Array],
        over: Callable[[Any, tuple[str, ...]], Any],
    ) -> list[Array]:
        """Numbers (1,) of the arrays put together: one collective for all arrays that are alike."""
        groups: dict[tuple[str, ...], list[Array]] = {}
        for own, found in zip(self.own, values, strict=True):
            known = groups.get(own)
            groups[own] = list(found) if known is None else list(map(put, known, found))
        totals = [over(group, own) if own else group for own, group in groups.items()]
        result = totals[0]
        for total in totals[1:]:
            result = list(map(put, result, total))
        return [v.reshape(1) for v in result]

    def sums(self, f: Callable[[Array], Sequence[Array]]) -> list[Array]:
        return self.totals([list(f(part)) for part in self.parts])

    def totals(self, values: Sequence[Sequence[Array]]) -> list[Array]:
        return self._together([list(map(_sum, each)) for each in values], operator.add, lax.psum)

    def ends(self, even: bool, k: Count, lam: Array) -> tuple[Array, Array]:
        def of_part(x: Array) -> list[Array]:
            a = jnp.abs(x) if even else x
            finite = jnp.isfinite(a)
            lows = jnp.where(finite, -a, -jnp.inf)
            return [v.astype(lam.dtype).max() for v in (lows, jnp.where(finite, a, -jnp.inf))]

        found = [of_part(part) for part in self.parts if part.size]
        low, high = self._together(found, jnp.maximum, lax.pmax) if found else (lam * 0, lam * 0)
        return jnp.where(jnp.isfinite(low), -low, 0.0), jnp.where(jnp.isfinite(high), high, 0.0)

    def nth(self, i: Array, dtype: Any, even: bool, wanted: Array) -> Array:
        return order_statistic(xp, self, i, dtype, even, wanted)

    def live_sums(self, values: Sequence[Any], linear: bool = False) -> list[Array]:
        """As ``response`` asks for them."""
        each = [[v.parts[i] for v in values] for i in range(len(self.parts))]
        return self.totals(each)

    def before(self, flags: Pieces) -> Pieces:
        """How many are set before each entry: arrays in their order, then shards, then entries."""
        earlier: Any = jnp.zeros(1, jnp.int32)
        found = []
        for part, own in zip(flags.parts, self.own, strict=True):
            count = _sum(part)
            own_earlier = jnp.zeros((), jnp.int32)
            if own:
                counts = lax.all_gather(count, own)
                first = jnp.arange(counts.shape[0]) < lax.axis_index(own)
                own_earlier, count = jnp.where(first, counts, 0).sum(), lax.psum(count, own)
            entries = jnp.cumsum(part.reshape(-1), dtype=jnp.int32).reshape(part.shape)
            found.append(entries - part + earlier + own_earlier)
            earlier = earlier + count
        return Pieces(found)


def _sum(values: Array) -> Array:
    return values.sum(dtype=jnp.int32 if values.dtype == jnp.bool_ else None)
