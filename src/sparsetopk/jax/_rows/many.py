"""Many rows of an array each, which may be sharded over devices: all of them in one array of blocks.

A block is a part of one row, and has the numbers of that row beside it (m, 1): so the maths of one row
is that of all, and a program for many arrays is no longer than for a few. Sums over blocks are put
together by rows, and then over devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..._maths.operator import Count
from .._solvers.plain import row_sums
from .pieces import Axes, Pieces, Segment, Spread, cut, shards
from .promotion import saturated

_WIDTH = 256  # of a block


class ManyRows(Spread):
    """As ``threshold.Row`` asks for them; ``parts`` has the array of blocks alone."""

    @classmethod
    def packed_of(cls, parts: Sequence[Array], own: Sequence[Axes], dtype: Any) -> ManyRows:
        """Of arrays that are sharded over these mesh axes, none of them empty."""
        segments = tuple(segment for (segment,) in Spread.of(parts, own).segments)
        return replace(cls((), (segments,)), parts=cls((), (segments,)).pack(parts, dtype).parts)

    @property
    def _rows(self) -> tuple[Segment, ...]:
        return self.segments[0]

    @cached_property
    def _counts(self) -> np.ndarray:
        """How many blocks every row has."""
        return np.array([-(-s.size // _WIDTH) for s in self._rows], np.int32)

    @cached_property
    def _row_of(self) -> np.ndarray:
        return np.repeat(np.arange(len(self._rows), dtype=np.int32), self._counts)

    @cached_property
    def _first(self) -> np.ndarray:
        """The first block of every row."""
        return np.cumsum(self._counts, dtype=np.int32) - self._counts

    @property
    def _filled(self) -> Array:
        """Which places of blocks have an entry."""
        sizes = np.array([s.size for s in self._rows])
        before = (np.arange(len(self._row_of)) - self._first[self._row_of]) * _WIDTH
        left = np.minimum(sizes[self._row_of] - before, _WIDTH).astype(np.int32)
        return jnp.arange(_WIDTH, dtype=jnp.int32) < left[:, None]

    def pack(self, parts: Sequence[Array], dtype: Any = None) -> Pieces:
        pieces: list[Array] = []
        for v, count in zip(parts, self._counts.tolist(), strict=True):
            v = v.reshape(-1).astype(dtype or v.dtype)
            left = count * _WIDTH - v.size
            pieces += [v, jnp.zeros(left, v.dtype)] if left else [v]
        return Pieces([jnp.concatenate(pieces).reshape(-1, _WIDTH)])

    def unpack(self, pieces: Pieces, pivot: Array) -> list[Array]:
        """In the shapes and dtypes that the arrays had; ``pivot`` is that of every block."""
        (values,), dtypes = pieces.parts, {s.dtype for s in self._rows}
        dtype = dtypes.pop() if len(dtypes) == 1 else values.dtype
        # As the result of a choice, as in ``Spread.unpack``.
        whole = lax.cond(
            jnp.isnan(pivot).all(),
            lambda v: (v * jnp.nan).astype(dtype),
            lambda v: saturated(v, dtype),
            values,
        ).reshape(-1)
        each = cut(whole, [s.size for s in self._rows], _WIDTH)
        return [
            saturated(v, s.dtype).reshape(s.shape) if s.dtype != dtype else v.reshape(s.shape)
            for v, s in zip(each, self._rows, strict=True)
        ]

    def of_blocks(self, numbers: Array) -> Array:
        """Numbers of every row, for every block (m, 1)."""
        return numbers[self._row_of][:, None]

    def of_rows(self, numbers: Array) -> Array:
        """The inverse."""
        return numbers[self._first, 0]

    @property
    def n(self) -> Any:
        """Of the row of every block."""
        sizes = [s.size * (lax.psum(1, s.own) if s.own else 1) for s in self._rows]
        return np.array(sizes, np.int32)[self._row_of][:, None]

    @property
    def _all_axes(self) -> Axes:
        return tuple(dict.fromkeys(a for s in self._rows for a in s.own))

    def sums(self, f: Callable[[Array], Sequence[Array]]) -> list[Array]:
        return self._put_together(row_sums(*self._masked(f(self.parts[0]))))

    def live_sums(self, values: Sequence[Any], linear: bool = False) -> list[Array]:
        each = self._masked([v.parts[0] for v in values])
        types = [jnp.int32 if v.dtype == bool else v.dtype for v in each]
        return self._put_together(
            [v.sum(axis=-1, keepdims=True, dtype=t) for v, t in zip(each, types, strict=True)]
        )

    def _masked(self, values: Sequence[Array]) -> list[Array]:
        filled = self._filled
        return [jnp.where(filled, v, jnp.zeros((), v.dtype)) for v in values]

    def _put_together(self, of_blocks: Sequence[Array]) -> list[Array]:
        """Sums of every block (m, 1) as those of its row, over all devices; counts among the floats
        where these hold them."""
        floats = [v.dtype for v in of_blocks if jnp.issubdtype(v.dtype, jnp.floating)]
        exact = floats and self.n.max() <= 2.0 ** jnp.finfo(floats[0]).nmant
        sums = [v.astype(floats[0]) if exact else v for v in of_blocks]
        kinds: dict[Any, list[int]] = {}
        for i, v in enumerate(sums):
            kinds.setdefault(v.dtype, []).append(i)
        totals = [
            self._over_blocks(jax.ops.segment_sum, jnp.concatenate([sums[i] for i in at], -1))
            for at in kinds.values()
        ]
        axes = self._all_axes
        if axes:
            if any(set(s.own) != set(axes) for s in self._rows):
                first = jnp.asarray(shards(axes, self._rows)[1])[lax.axis_index(axes)][:, None]
                totals = [jnp.where(first, v, jnp.zeros((), v.dtype)) for v in totals]
            totals = lax.psum(totals, axes)
        found: dict[int, Array] = {}
        for at, total in zip(kinds.values(), totals, strict=True):
            of_each = total[self._row_of]
            found |= {i: of_each[:, j, None] for j, i in enumerate(at)}
        return [found[i].astype(v.dtype) for i, v in enumerate(of_blocks)]

    def _over_blocks(self, put: Callable[..., Array], values: Array) -> Array:
        return put(values, self._row_of, num_segments=len(self._rows), indices_are_sorted=True)

    def ends(self, even: bool, k: Count, lam: Array) -> tuple[Array, Array]:
        a = jnp.abs(self.parts[0]) if even else self.parts[0]
        finite = jnp.isfinite(a) & self._filled
        each = [jnp.where(finite, v, -jnp.inf).astype(lam.dtype).max(-1) for v in (-a, a)]
        most = self._over_blocks(jax.ops.segment_max, jnp.stack(each, -1))
        most = lax.pmax(most, self._all_axes) if self._all_axes else most
        low, high = (self.of_blocks(most[:, i]) for i in range(2))
        return jnp.where(jnp.isfinite(low), -low, 0.0), jnp.where(jnp.isfinite(high), high, 0.0)

    def before(self, flags: Pieces) -> Pieces:
        """How many are set before each entry of its row: shards in their order, then entries."""
        here = flags.parts[0] & self._filled
        running = jnp.cumsum(here.reshape(-1), dtype=jnp.int32).reshape(here.shape)
        begin = jnp.pad(running[:, -1], (1, 0))[self._first]  # of all rows before
        end = running[self._first + self._counts - 1, -1]
        offset, axes = -begin, self._all_axes
        if axes:
            shard, first = shards(axes, self._rows)
            mine = jnp.asarray(shard)[lax.axis_index(axes)]
            each = lax.all_gather(end - begin, axes)
            offset += jnp.where(first & (shard < mine), each, 0).sum(axis=0, dtype=jnp.int32)
        return Pieces([running - here + self.of_blocks(offset)])
