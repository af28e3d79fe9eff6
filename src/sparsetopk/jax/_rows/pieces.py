"""One row that is spread over many arrays, of any shapes, which may be sharded over devices.

``Pieces`` stand for the entries of the row wherever the maths says (..., n); what is one number of it is
an array (1,). Between devices nothing is put together but sums: so nothing else moves.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..._maths.operator import Count
from ..._maths.threshold import order_statistic
from . import namespace as xp
from .calls import RowCall, alike, varying
from .promotion import saturated


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


Axes = tuple[str, ...]


def own_axes(parts: Sequence[Array], axis_names: Axes) -> list[Axes]:
    """Of the mesh axes inside ``shard_map``, those over which each array is sharded."""
    if not axis_names or not varying(lax.axis_index(axis_names)):
        # With check_vma=False, nobody knows over which axes a value varies.
        return [axis_names for _ in parts]
    return [tuple(a for a in axis_names if a in varying(part)) for part in parts]


class Segment(NamedTuple):
    """What an array of a row was before arrays were put together."""

    order: int  # its place among all of them
    shape: tuple[int, ...]
    dtype: Any
    own: Axes  # the mesh axes over which it is sharded

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Spread:
    """The row as ``threshold.Row`` asks for it."""

    parts: tuple[Array, ...]
    segments: tuple[tuple[Segment, ...], ...]  # that each is made of

    is_bracketed: ClassVar[bool] = False

    @classmethod
    def of(cls, parts: Sequence[Array], own: Sequence[Axes] | None = None) -> Spread:
        """Arrays as they are."""
        each = zip(parts, own or [() for _ in parts], strict=True)
        found = (Segment(i, v.shape, v.dtype, axes) for i, (v, axes) in enumerate(each))
        return cls(tuple(parts), tuple((segment,) for segment in found))

    def packed(self, by: Callable[[Segment], Any], dtype: Any) -> Spread:
        """Arrays of one device put together where they have the same key, in this dtype: so a program
        for many of them is no longer than for a few. Those that are sharded alike come one after the
        other."""
        groups: dict[Any, list[Segment]] = {}
        for segment in sorted((segment for (segment,) in self.segments), key=lambda s: s.own):
            groups.setdefault(by(segment), []).append(segment)
        row = replace(self, segments=tuple(map(tuple, groups.values())))
        return replace(row, parts=row.pack([v.astype(dtype) for v in self.parts]).parts)

    def pack(self, parts: Sequence[Array]) -> Pieces:
        """Other arrays in the shapes of these."""
        each = ([parts[s.order].reshape(-1) for s in of] for of in self.segments)
        return Pieces(map(jnp.concatenate, each))

    def unpack(self, pieces: Pieces, pivot: Array) -> list[Array]:
        """The inverse, in the dtypes that the arrays had; NaN where the pivot is."""
        found: dict[int, Array] = {}
        # As the result of a choice they are computed once, before they are cut up: else XLA compiles
        # (and runs) the whole computation anew for every array.
        for piece, of in zip(pieces.parts, self.segments, strict=True):
            dtypes = {s.dtype for s in of}
            dtype = dtypes.pop() if len(dtypes) == 1 else piece.dtype
            whole = lax.cond(
                jnp.isnan(pivot[0]),
                lambda v, to=dtype: (v * jnp.nan).astype(to),
                lambda v, to=dtype: saturated(v, to),
                piece,
            )
            for s, v in zip(of, cut(whole, [s.size for s in of]), strict=True):
                v = v.reshape(s.shape)
                found[s.order] = v if s.dtype == dtype else saturated(v, s.dtype)
        return [found[i] for i in range(len(found))]

    @property
    def n(self) -> int:
        sizes = (s.size * (lax.psum(1, s.own) if s.own else 1) for of in self.segments for s in of)
        return sum(sizes)

    @property
    def _axes(self) -> list[Axes]:
        """The mesh axes over which any of what an array is made of is sharded."""
        return [tuple(dict.fromkeys(a for s in of for a in s.own)) for of in self.segments]

    def _counted(self, values: Sequence[Array], of: Sequence[Segment], axes: Axes) -> list[Array]:
        """With 0 for entries that another device counts, which has them too."""
        if all(set(s.own) == set(axes) for s in of):
            return list(values)
        first = jnp.asarray(shards(axes, of)[1])[lax.axis_index(axes)]
        runs = [list(run) for _, run in groupby(range(len(of)), key=lambda i: of[i].own)]
        sizes = [sum(of[i].size for i in run) for run in runs]
        counted = _repeated([first[run[0]] for run in runs], sizes)
        return [jnp.where(counted, v, jnp.zeros((), v.dtype)) for v in values]

    def _together(
        self,
        values: Sequence[Sequence[Array]],
        put: Callable[[Array, Array], Array],
        over: Callable[[Any, tuple[str, ...]], Any],
    ) -> list[Array]:
        """Numbers (1,) of the arrays put together: one collective for all arrays that are alike."""
        groups: dict[tuple[str, ...], list[Array]] = {}
        for own, found in zip(self._axes, values, strict=True):
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
        each = map(self._counted, values, self.segments, self._axes)
        return self._together([list(map(_sum, v)) for v in each], operator.add, lax.psum)

    def ends(self, even: bool, k: Count, lam: Array) -> tuple[Array, Array]:
        def of_part(x: Array) -> list[Array]:
            a = jnp.abs(x) if even else x
            finite = jnp.isfinite(a)
            lows = jnp.where(finite, -a, -jnp.inf)
            ends = lows, jnp.where(finite, a, -jnp.inf)
            return [v.astype(lam.dtype).max(initial=-jnp.inf) for v in ends]

        low, high = self._together(list(map(of_part, self.parts)), jnp.maximum, lax.pmax)
        return jnp.where(jnp.isfinite(low), -low, 0.0), jnp.where(jnp.isfinite(high), high, 0.0)

    def nth(self, i: Array, dtype: Any, even: bool, wanted: Array) -> Array:
        return order_statistic(xp, self, i, dtype, even, wanted)

    def live_sums(self, values: Sequence[Any], linear: bool = False) -> list[Array]:
        """As ``response`` asks for them."""
        each = [[v.parts[i] for v in values] for i in range(len(self.parts))]
        return self.totals(each)

    def before(self, flags: Pieces) -> Pieces:
        """How many are set before each entry: arrays in their order, then shards, then entries."""
        running = [jnp.cumsum(v.reshape(-1), dtype=jnp.int32) for v in flags.parts]
        totals, shifts = [], []  # of all shards; from the running count to that of an array
        for count, axes, of in zip(running, self._axes, self.segments, strict=True):
            ends = jnp.take(jnp.pad(count, (1, 0)), np.array([0, *_ends(of)]))
            each = ends[1:] - ends[:-1]
            each = lax.all_gather(each, axes) if axes else each[None]
            shard, first = shards(axes, of)
            here = jnp.asarray(shard)[lax.axis_index(axes) if axes else 0]
            totals.append(jnp.where(first, each, 0).sum(axis=0))
            shifts.append(jnp.where(first & (shard < here), each, 0).sum(axis=0) - ends[:-1])
        order = np.argsort([s.order for of in self.segments for s in of])
        every = jnp.concatenate(totals)[order]
        offsets = (jnp.cumsum(every) - every)[np.argsort(order)] + jnp.concatenate(shifts)
        found, begin = [], 0
        for flag, count, of in zip(flags.parts, running, self.segments, strict=True):
            by = offsets[begin : begin + len(of)]
            begin += len(of)
            each = _repeated(list(by), [s.size for s in of])
            found.append((count + each).reshape(flag.shape) - flag)
        return Pieces(found)


def cut(whole: Array, sizes: Sequence[int], width: int = 1) -> list[Array]:
    """The arrays of these sizes that were put together in one, each from a multiple of ``width`` on.

    On the CPU by one call: to XLA every copy is a program of its own, that takes long to compile.
    """
    return _cut(whole, sizes=tuple(sizes), width=width)


def _cut_in_xla(whole: Array, sizes: tuple[int, ...], width: int) -> list[Array]:
    each = [(size, -size % width) for size in sizes]
    return lax.split(whole, [size for pair in each for size in pair], axis=-1)[::2]  # type: ignore[return-value]


_cut = RowCall(
    "cut",
    lambda whole, sizes, width: [(size, whole.dtype) for size in sizes],
    _cut_in_xla,
    lambda whole, sizes, width: {"width": np.int64(width)},
)


def _repeated(each: Sequence[Array], sizes: Sequence[int]) -> Array:
    """Every number as often as its size says."""
    return jnp.concatenate(list(map(jnp.broadcast_to, each, sizes)))


def _others(axes: Axes, segment: Segment) -> Axes:
    return tuple(a for a in axes if a not in segment.own)


def shards(axes: Axes, of: Sequence[Segment]) -> tuple[np.ndarray, np.ndarray]:
    """For every device along the axes and every array, which shard of it the device has, and whether it
    is the first to have it."""
    sizes = {a: lax.psum(1, a) for a in axes}
    place = np.arange(math.prod(sizes.values()))
    at = {}
    for a in reversed(axes):
        place, at[a] = np.divmod(place, sizes[a])
    shard, first = np.zeros((place.size, len(of)), int), np.ones((place.size, len(of)), bool)
    for i, segment in enumerate(of):
        for a in segment.own:
            shard[:, i] = shard[:, i] * sizes[a] + at[a]
        for a in _others(axes, segment):
            first[:, i] &= at[a] == 0
    return shard, first


def _ends(of: Sequence[Segment]) -> list[int]:
    return list(accumulate(s.size for s in of))


def _sum(values: Array) -> Array:
    return values.sum(dtype=jnp.int32 if values.dtype == jnp.bool_ else None)
