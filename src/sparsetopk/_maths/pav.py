"""Pool adjacent violators (Best et al., 2000): exact for any p, phi and w; parallel over the row.

Neighbouring runs of entries that are solved are merged in pairs, all pairs at once, so that log2(n)
rounds do whatever the data are. A merge pools the last blocks of the left run and the first ones of the
right run around one threshold (csrc/pav.hpp says why), for which a few passes over the row are enough:
40 to 60 of them in all for 200,000 entries. Nothing is larger than the rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from .root import increasing_root
from .scalars import Phi, PNorm, lone_response

Array = Any

# Longer rows are solved in pieces of about this length, and these are merged by a second loop: it can
# sum over a piece at once, the first one only over two neighbours at a time.
_PIECE = 32


class Sorted(NamedTuple):
    """Rows s and w (..., n) in decreasing order, |x| for even phi, with lam > 0 (..., 1)."""

    s: Array
    w: Array
    lam: Array
    reg: PNorm
    phi: Phi  # without the constraint v >= 0 of |.|: that of the identity
    sums: Callable[..., list[Array]]  # of rows (..., n), each (..., 1)


class Pooled(NamedTuple):
    """Of every entry: its block has the threshold origin - lam delta, and starts where s = origin."""

    origin: Array
    delta: Array
    start: Array  # whether the entry is the first of its block

    def d(self, rows: Sorted) -> Array:
        return (rows.s - self.origin) / rows.lam + self.delta


def pool(rows: Sorted) -> Pooled:
    """The blocks: neighbours are merged while v increases from one to the next."""
    alone = lone_response(rows.s, rows.w, rows.lam, rows.reg, rows.phi)
    blocks = Pooled(rows.s, alone, rows.reg.xp.ones_like(rows.s, dtype=bool))
    n = rows.s.shape[-1]
    pieces = -(-n // _PIECE)
    # Where rows of any length are exported, n is no number, and all pieces have the full length.
    length = -(-n // pieces) if isinstance(n, int) else _PIECE
    blocks = _merge_all(rows, blocks, (pieces, length, 1))
    return blocks if pieces == 1 else _merge_all(rows, blocks, (1, pieces, length))


def _merge_all(rows: Sorted, blocks: Pooled, shape: tuple[int, int, int]) -> Pooled:
    """With rows split as ``shape`` says into groups of solved pieces, each group becomes one piece."""
    xp = rows.reg.xp
    n, spare = rows.s.shape[-1], math.prod(shape) - rows.s.shape[-1]

    def split(values: Array, fill: float = 0.0) -> Array:
        return xp.pad_end(values, spare, fill).reshape(*values.shape[:-1], *shape)

    def join(values: Array) -> Array:
        return values.reshape(*rows.s.shape[:-1], n + spare)[..., :n]

    pieces = rows._replace(s=split(rows.s), w=split(rows.w), lam=rows.lam[..., None, None])
    # At an infinite delta, padding is pooled with nothing.
    blocks = Pooled(split(blocks.origin), split(blocks.delta, xp.inf), split(blocks.start))
    levels = xp.bit_length(shape[1] - 1)
    blocks = xp.repeat(levels, lambda level, at: _merge(pieces, at, level), blocks)
    return Pooled(*(join(values) for values in blocks))


class _Pairs(NamedTuple):
    """Pieces (..., number, length) in pairs of runs of 2^level pieces.

    What a pair has in common is (..., number, 1), the same for all of its pieces.
    """

    rows: Sorted
    level: Any
    piece: Array  # 0, ..., number - 1

    @property
    def middle(self) -> Array:
        """The first piece of the run on the right, (number,)."""
        return ((self.piece >> self.level) | 1) << self.level

    @property
    def on_right(self) -> Array:
        return (self.piece >= self.middle)[:, None]

    def _take(self, values: Array, at: Array) -> Array:
        """Those of the pieces ``at``, or of the nearest piece that there is."""
        return self.rows.reg.xp.take(values, at, axis=-2)

    def last_on_left(self, values: Array) -> Array:
        return self._take(values[..., -1:], self.middle - 1)

    def first_on_right(self, values: Array) -> Array:
        """Infinite if there is no such run."""
        xp, found = self.rows.reg.xp, self._take(values[..., :1], self.middle)
        return xp.where((self.middle < self.piece.shape[0])[:, None], found, xp.inf)

    def sums(self, *values: Array) -> list[Array]:
        """The sum of each over the pair.

        First over pieces, then over neighbours, over neighbouring twos, and so on: whatever the length,
        the rounding is that of a few terms, and all pieces of a pair find the very same number.
        """
        xp, number = self.rows.reg.xp, self.piece.shape[0]
        if values[0].shape[-1] > 1:
            values = tuple(self.rows.sums(*values))

        def add(bit: Any, totals: list[Array]) -> list[Array]:
            other = ((self.piece >> bit) ^ 1) << bit
            there = (other < number)[:, None]
            return [total + xp.where(there, self._take(total, other), 0) for total in totals]

        return xp.repeat(self.level + 1, add, list(values))


def _merge(rows: Sorted, blocks: Pooled, level: Any) -> Pooled:
    """Where the last threshold on the left is below the first on the right, pool all blocks that a
    common one, pivot - lam z, passes."""
    xp, s, lam = rows.reg.xp, rows.s, rows.lam
    number, length = s.shape[-2:]
    pairs = _Pairs(rows, level, xp.index(s[..., 0]))
    pivot = pairs.first_on_right(s)
    # Thresholds as z, which increases along each run.
    z = blocks.delta - (blocks.origin - pivot) / lam
    lo, hi = pairs.first_on_right(z), pairs.last_on_left(z)
    violated = lo < hi

    def pooled(at: Array) -> Array:
        return xp.where(pairs.on_right, (z < at) | (z <= lo), (z > at) | (z >= hi))

    root = _threshold(pairs, pivot, pooled, lo, hi, violated)
    # The block is cut out by how many entries it has on either side, and not by comparing each of them
    # again: among equal neighbours that could leave a gap, by a rounding.
    sides = (pooled(root) & ~pairs.on_right, pooled(root) & pairs.on_right)
    before, after = pairs.sums(*(xp.astype(side, xp.int32) for side in sides))
    flat = s.reshape(*s.shape[:-2], number * length)
    index = xp.index(flat).reshape(number, length)
    first = pairs.middle[:, None] * length - before
    inside = violated & (index >= first) & (index - first < before + after)
    origin = xp.take_along_axis(flat, xp.clip(first[..., 0], 0, number * length - 1), axis=-1)
    origin = origin[..., None]
    return Pooled(
        xp.where(inside, origin, blocks.origin),
        xp.where(inside, root + (origin - pivot) / lam, blocks.delta),
        xp.where(inside, index == first, blocks.start),
    )


def _threshold(
    pairs: _Pairs,
    pivot: Array,
    pooled: Callable[[Array], Array],
    lo: Array,
    hi: Array,
    wanted: Array,
) -> Array:
    """z in [lo, hi] with sum S(t_i + z) = phi'(pivot - lam z) sum w_i over what it pools, where
    t_i = (s_i - pivot)/lam; the left side minus the right side increases with z."""
    s, w, lam, reg, phi, _ = pairs.rows
    xp = reg.xp
    t, eps = (s - pivot) / lam, float(xp.finfo(s.dtype).eps)

    def linear(z: Array) -> tuple[Array, Array, Array]:
        """p = 2: the root is known as soon as it is known what it pools."""
        inside = pooled(z)
        offset, weight = xp.where(inside, t, 0.0), xp.where(inside, w, 0.0)
        offset, weight, size = pairs.sums(offset, weight, xp.astype(inside, xp.int32))
        size = xp.astype(size, s.dtype)
        if phi.name == "identity":
            root = (weight - offset) / size
        else:
            root = (pivot * weight - offset) / (size + lam * weight)
        return z - root, root - z, xp.zeros_like(z)

    def general(z: Array) -> tuple[Array, Array, Array]:
        inside = pooled(z)
        d = xp.where(inside, t, 0.0) + z
        response, slope = (xp.where(inside, v, 0.0) for v in (reg.response(d), reg.slope(d)))
        mass, terms, slope, weight = pairs.sums(
            response, xp.abs(response), slope, xp.where(inside, w, 0.0)
        )
        g = pivot - lam * z
        expected = phi.prime(g) * weight
        value, rounding = mass - expected, 4 * eps * (terms + xp.abs(expected))
        step = -value / (slope + lam * phi.curvature(g, weight))
        return xp.where(xp.abs(value) <= rounding, 0.0, value), step, xp.zeros_like(z)

    closed = reg.exponent == 1.0 and phi.name != "exp"
    return increasing_root(
        xp,
        linear if closed else general,
        lo,
        hi,
        start=lo + (hi - lo) / 2,
        tol=0.0,
        unit=xp.zeros_like(lo),
        rows=wanted,
    ).best
