"""Pool adjacent violators for any p, phi and w. It has no derivative: see ``isotonic`` for that.

On the CPU it is the compiled core, with its own sort. Elsewhere it is written in XLA operations, and
parallel over the row: neighbouring runs of entries that are solved are merged in pairs, all pairs at
once, so that log2(n) rounds do whatever the data are. A merge pools the last blocks of the left run and
the first ones of the right run around one threshold (csrc/pav.hpp says why), for which a few passes over
the row are enough: 40 to 60 of them in all for 200,000 entries. Nothing is larger than the rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..._maths.isotonic import PHI_NAMES, block_ids, truncate
from ..._maths.root import increasing_root
from ..._maths.scalars import Phi, PhiName, PNorm, lone_response
from .._rows import namespace as xp
from .._rows.calls import RowCall
from .plain import row_sums

# Longer rows are solved in pieces of about this length, and these are merged by a second loop: it can
# sum over a piece at once, the first one only over two neighbours at a time.
_PIECE = 32


def solve(
    x: Array, w: Array, lam: Array, phi: PhiName, exponent: float
) -> tuple[Array, Array, Array]:
    """d, block and paired for finite rows x (..., n), |x| for even phi, with w (..., n) and lam > 0
    (..., 1), all in the dtype of lam, each in the order of x: (x - u)/lam, the ids of the blocks, and
    the index of the entry of w that every entry is paired with.
    """
    d, block, paired = _solve(x, w, lam, phi=phi, exponent=exponent)
    return d, block, paired


def solve_in_xla(
    x: Array, w: Array, lam: Array, phi: PhiName, exponent: float
) -> tuple[Array, Array, Array]:
    """The same on any device."""
    s, order = xp.sort(x)
    w, w_order = xp.sort(w)
    # For |.| without v >= 0 it is the problem of the identity.
    unconstrained = Phi(xp, "identity" if phi == "abs" else phi)
    blocks = _pool(_Problem(s, w, lam, PNorm(xp, exponent), unconstrained))
    d, start = (s - blocks.origin) / lam + blocks.delta, blocks.start
    if phi == "abs":
        d, start = truncate(xp, s, lam, d, start, blocks.origin - lam * blocks.delta)
    d, block, paired = xp.unsort(order, d, block_ids(xp, start), w_order)
    return d, block, paired


def _in_core(*_: Any, phi: PhiName, exponent: float) -> dict[str, Any]:
    return {"phi": np.int32(PHI_NAMES.index(phi)), "exponent": np.float64(exponent)}


def _types(x: Array, *_: Array, phi: PhiName, exponent: float) -> list[tuple[int, Any]]:
    n = x.shape[-1]
    return [(n, x.dtype), (n, jnp.int32), (n, jnp.int32)]


_solve = RowCall(
    "pav", _types, jax.jit(solve_in_xla, static_argnames=("phi", "exponent")), _in_core
)


class _Problem(NamedTuple):
    """Sorted rows."""

    s: Array
    w: Array
    lam: Array
    reg: PNorm
    phi: Phi


class _Blocks(NamedTuple):
    """Of every entry: its block has the threshold origin - lam delta, and starts where s = origin."""

    origin: Array
    delta: Array
    start: Array  # whether the entry is the first of its block


def _pool(rows: _Problem) -> _Blocks:
    alone = lone_response(rows.s, rows.w, rows.lam, rows.reg, rows.phi)
    blocks = _Blocks(rows.s, alone, jnp.ones(rows.s.shape, bool))
    n = rows.s.shape[-1]
    pieces = -(-n // _PIECE)
    length = -(-n // pieces)
    blocks = _merge_all(rows, blocks, (pieces, length, 1))
    return blocks if pieces == 1 else _merge_all(rows, blocks, (1, pieces, length))


def _merge_all(rows: _Problem, blocks: _Blocks, shape: tuple[int, int, int]) -> _Blocks:
    """With rows split as ``shape`` says into groups of solved pieces, each group becomes one piece."""
    n, spare = rows.s.shape[-1], math.prod(shape) - rows.s.shape[-1]

    def split(values: Array, fill: float = 0.0) -> Array:
        edges = [(0, 0)] * (values.ndim - 1) + [(0, spare)]
        padded = jnp.pad(values, edges, constant_values=fill)
        return padded.reshape(*values.shape[:-1], *shape)

    def join(values: Array) -> Array:
        return values.reshape(*rows.s.shape[:-1], n + spare)[..., :n]

    pieces = rows._replace(s=split(rows.s), w=split(rows.w), lam=rows.lam[..., None, None])
    # At an infinite delta, padding is pooled with nothing.
    blocks = _Blocks(split(blocks.origin), split(blocks.delta, jnp.inf), split(blocks.start))
    levels = (shape[1] - 1).bit_length()
    blocks = lax.fori_loop(0, levels, lambda level, at: _merge(pieces, at, level), blocks)
    return _Blocks(*(join(values) for values in blocks))


class _Pairs(NamedTuple):
    """Pieces (..., number, length) in pairs of runs of 2^level pieces.

    What a pair has in common is (..., number, 1), the same for all of its pieces.
    """

    level: Array
    number: int

    @property
    def piece(self) -> Array:
        return jnp.arange(self.number, dtype=jnp.int32)

    @property
    def middle(self) -> Array:
        """The first piece of the run on the right, (number,)."""
        return (self.piece >> self.level | 1) << self.level

    @property
    def on_right(self) -> Array:
        return (self.piece >= self.middle)[:, None]

    def last_on_left(self, values: Array) -> Array:
        return jnp.take(values[..., -1:], self.middle - 1, axis=-2, mode="clip")

    def first_on_right(self, values: Array) -> Array:
        """Infinite if there is no such run."""
        found = jnp.take(values[..., :1], self.middle, axis=-2, mode="clip")
        return jnp.where((self.middle < self.number)[:, None], found, jnp.inf)

    def sums(self, *values: Array) -> list[Array]:
        """The sum of each over the pair; flags are counted.

        First over pieces, then over neighbours, over neighbouring twos, and so on: whatever the length,
        the rounding is that of a few terms, and all pieces of a pair find the very same number.
        """
        values = tuple(v.astype(jnp.int32) if v.dtype == bool else v for v in values)
        if values[0].shape[-1] > 1:
            values = tuple(row_sums(*values))

        def add(bit: Array, totals: list[Array]) -> list[Array]:
            other = (self.piece >> bit ^ 1) << bit
            there = (other < self.number)[:, None]
            parts = (jnp.take(total, other, axis=-2, mode="clip") for total in totals)
            return [
                total + jnp.where(there, part, 0) for total, part in zip(totals, parts, strict=True)
            ]

        return lax.fori_loop(0, self.level + 1, add, list(values))


def _merge(rows: _Problem, blocks: _Blocks, level: Array) -> _Blocks:
    """Where the last threshold on the left is below the first on the right, pool all blocks that a
    common one, pivot - lam z, passes."""
    s, lam = rows.s, rows.lam
    number, length = s.shape[-2:]
    pairs = _Pairs(level, number)
    pivot = pairs.first_on_right(s)
    # Thresholds as z, which increases along each run.
    z = blocks.delta - (blocks.origin - pivot) / lam
    lo, hi = pairs.first_on_right(z), pairs.last_on_left(z)
    violated = lo < hi

    def pooled(at: Array) -> Array:
        return jnp.where(pairs.on_right, (z < at) | (z <= lo), (z > at) | (z >= hi))

    root = _threshold(rows, pairs, pivot, pooled, lo, hi, violated)
    # By how many they are: the order of equal neighbours may be off by a rounding.
    before, after = pairs.sums(pooled(root) & ~pairs.on_right, pooled(root) & pairs.on_right)
    index = jnp.arange(number * length, dtype=jnp.int32).reshape(number, length)
    first = pairs.middle[:, None] * length - before
    inside = violated & (index >= first) & (index - first < before + after)
    flat = s.reshape(*s.shape[:-2], number * length)
    origin = jnp.take_along_axis(flat, first[..., 0], axis=-1, mode="clip")[..., None]
    return _Blocks(
        jnp.where(inside, origin, blocks.origin),
        jnp.where(inside, root + (origin - pivot) / lam, blocks.delta),
        jnp.where(inside, index == first, blocks.start),
    )


def _threshold(
    rows: _Problem,
    pairs: _Pairs,
    pivot: Array,
    pooled: Callable[[Array], Array],
    lo: Array,
    hi: Array,
    wanted: Array,
) -> Array:
    """z in [lo, hi] with sum S(t_i + z) = phi'(pivot - lam z) sum w_i over what it pools, where
    t_i = (s_i - pivot)/lam; the left side minus the right side increases with z."""
    s, w, lam, reg, phi = rows
    t, eps = (s - pivot) / lam, jnp.finfo(s.dtype).eps

    def linear(z: Array) -> tuple[Array, Array, Array]:
        """p = 2: the root is known as soon as it is known what it pools."""
        inside = pooled(z)
        offset, weight = jnp.where(inside, t, 0.0), jnp.where(inside, w, 0.0)
        offset, weight, size = pairs.sums(offset, weight, inside)
        size = size.astype(s.dtype)
        if phi.name == "identity":
            root = (weight - offset) / size
        else:
            root = (pivot * weight - offset) / (size + lam * weight)
        return z - root, root - z, jnp.zeros_like(z)

    def general(z: Array) -> tuple[Array, Array, Array]:
        inside = pooled(z)
        d = jnp.where(inside, t, 0.0) + z
        response, slope = (jnp.where(inside, v, 0.0) for v in (reg.response(d), reg.slope(d)))
        mass, terms, slope, weight = pairs.sums(
            response, jnp.abs(response), slope, jnp.where(inside, w, 0.0)
        )
        g = pivot - lam * z
        expected = phi.prime(g) * weight
        value, rounding = mass - expected, 4 * eps * (terms + jnp.abs(expected))
        step = -value / (slope + lam * phi.curvature(g, weight))
        return jnp.where(jnp.abs(value) <= rounding, 0.0, value), step, jnp.zeros_like(z)

    closed = reg.exponent == 1.0 and phi.name != "exp"
    return increasing_root(
        xp,
        linear if closed else general,
        lo,
        hi,
        start=lo + (hi - lo) / 2,
        tol=0.0,
        unit=jnp.zeros_like(lo),
        rows=wanted,
    ).best
