"""The kernels, forward and backward, and how rows are shared out between their programs.

A program holds its rows whole, and computes what ``_rows.threshold`` does in XLA operations, by the same
functions of ``_maths``. x is read once and y written once; the backward reads x and the cotangent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..._maths import threshold
from ..._maths.operator import Count
from ..._maths.response import Relaxed, lam_floor
from ..._maths.threshold import State
from .._rows.promotion import promoting
from . import experimental
from .tiles import Tile, xp

if TYPE_CHECKING:
    from .._rows.threshold import TopKSetting

# How many entries a program has on a GPU if rows are short, and a thread; rows of a program on a TPU.
_ENTRIES, _PER_THREAD, _SUBLANES = 2048, 8, 8


class Shape(NamedTuple):
    """What a program takes."""

    rows: int
    block: int
    is_gpu: bool

    @classmethod
    def of(cls, n: int, platform: str) -> Shape:
        if platform == "tpu":
            return cls(_SUBLANES, n, False)
        block = max(16, 1 << (n - 1).bit_length())
        return cls(max(1, _ENTRIES // block), block, True)

    @property
    def options(self) -> Any:
        """What the compiler is told."""
        if not self.is_gpu:
            return experimental.tpu_options()
        threads = self.rows * self.block // _PER_THREAD
        return experimental.gpu_options(min(32, max(4, threads // 32)))


def _forward(
    tile: Tile, numbers: Sequence[Array], setting: TopKSetting, dtype: Any
) -> tuple[Array, ...]:
    """y, pivot and delta."""
    whole, frac, lam = numbers
    state = threshold.state_of(xp, tile, Count(whole, frac), lam, setting.kind, setting.hard)
    rows = _relaxed(tile, numbers, state, setting, dtype)
    y = rows.y(_hard_mask(tile, rows))
    return jnp.where(y == 0, 0.0, y), *state


def _backward(
    tile: Tile, numbers: Sequence[Array], g: Array, setting: TopKSetting, dtype: Any
) -> tuple[Array, ...]:
    """The cotangents of x, k and lam for that of y."""
    rows = _relaxed(tile, numbers[:3], State(*numbers[3:]), setting, dtype)
    dx, dk, dlam = rows.cotangent(g, _hard_mask(tile, rows))
    limit = float(jnp.finfo(dtype).max)
    return jnp.clip(dx, -limit, limit), dk, dlam


def _relaxed(
    tile: Tile, numbers: Sequence[Array], state: State, setting: TopKSetting, dtype: Any
) -> Relaxed:
    whole, frac, lam = numbers
    return Relaxed.of(
        xp,
        tile.x,
        Count(whole, frac),
        lam,
        state,
        setting.kind,
        sums=tile.totals,
        floor=lam_floor(xp, dtype, setting.kind),
        may_be_hard=setting.hard is not False,
    )


def _hard_mask(tile: Tile, rows: Relaxed) -> Array | None:
    """Of rows with lam = 0, if there may be any."""
    if rows.split.hard is None:
        return None
    pivot = rows.split.pivot
    tied = (rows.a == pivot) & (rows.x > -jnp.inf)
    over = tile.totals([rows.a > pivot])[0]
    return rows.hard_mask(tile.before(tied, rows.k.whole - over))


def forward(
    x: Array, whole: Array, frac: Array, lam: Array, *, setting: TopKSetting, platform: str
) -> list[Array]:
    """As ``_rows.threshold.solve_in_xla``, by one kernel."""
    compute = partial(_forward, setting=setting, dtype=x.dtype)
    return _call(compute, [x], [whole, frac, lam], platform)


def backward(*at: Array, setting: TopKSetting, platform: str) -> list[Array]:
    """As ``_rows.threshold._cotangent_in_xla`` without a cotangent of delta, by one kernel."""
    x, *numbers, g = at

    def compute(tile: Tile, numbers: Sequence[Array], g: Array) -> tuple[Array, ...]:
        return _backward(tile, numbers, g, setting, x.dtype)

    return _call(compute, [x, g], numbers, platform)


def _call(
    compute: Any, arrays: Sequence[Array], numbers: Sequence[Array], platform: str
) -> list[Array]:
    """``compute(tile, numbers, ...)`` of all rows: an array like the first, and two numbers per row."""
    first, dtype = arrays[0], numbers[1].dtype
    *batch, n = first.shape
    m = math.prod(batch)
    shape = Shape.of(n, platform)
    pl = experimental.pallas()

    def kernel(*refs: Any) -> None:
        inputs, outputs = refs[: len(arrays) + len(numbers)], refs[-3:]
        place = _Place(shape, m, n)
        rows = [place.read(ref).astype(dtype) for ref in inputs[: len(arrays)]]
        given = [place.read(ref) for ref in inputs[len(arrays) :]]
        found = promoting(compute)(Tile(rows[0], n), given, *rows[1:])
        for ref, values in zip(outputs, found, strict=True):
            place.write(ref, values)

    def block(length: int) -> Any:
        return pl.BlockSpec((shape.rows, length), lambda i: (i, jnp.int32(0)))

    found = pl.pallas_call(
        kernel,
        grid=(-(-m // shape.rows),),
        in_specs=[*(block(shape.block) for _ in arrays), *(block(1) for _ in numbers)],
        out_specs=[block(shape.block), block(1), block(1)],
        out_shape=[
            jax.core.ShapedArray((m, n), first.dtype),
            *(jax.core.ShapedArray((m, 1), dtype) for _ in range(2)),
        ],
        compiler_params=shape.options,
        interpret=platform == "cpu",  # for tests: Pallas has no other way there
        name="sparsetopk",
    )(*(v.reshape(m, v.shape[-1]) for v in (*arrays, *numbers)))
    return [v.reshape(*batch, v.shape[-1]) for v in found]


class _Place(NamedTuple):
    """Where a program is: what is beyond the m rows of n entries is neither read nor written."""

    shape: Shape
    m: int
    n: int

    def read(self, ref: Any) -> Array:
        """0 where there is nothing."""
        inside = self._inside(ref.shape)
        if inside is None:
            return ref[...]
        zero = jnp.zeros((), ref.dtype)
        if self.shape.is_gpu:
            return experimental.masked_load(ref, inside, zero)
        return jnp.where(inside, ref[...], zero)

    def write(self, ref: Any, values: Array) -> None:
        inside = self._inside(ref.shape) if self.shape.is_gpu else None
        if inside is None:
            ref[...] = values.astype(ref.dtype)
        else:
            experimental.masked_store(ref, values.astype(ref.dtype), inside)

    def _inside(self, shape: tuple[int, int]) -> Array | None:
        """None if all of it is."""
        flags = None
        if self.m % self.shape.rows:
            first = experimental.pallas().program_id(0) * self.shape.rows
            flags = lax.broadcasted_iota(jnp.int32, shape, 0) + first < self.m
        if shape[1] > max(1, self.n):
            columns = lax.broadcasted_iota(jnp.int32, shape, 1) < self.n
            flags = columns if flags is None else flags & columns
        return flags
