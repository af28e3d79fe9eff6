"""One row of the magnitude operator that is spread over many tensors: the passes over it.

Every pass looks at the tensors one after the other and returns a few numbers, added up over all of
them (or the extremes of them); no pass needs two tensors at once, and the size of what it returns does
not depend on theirs. ``CompiledPasses`` and ``TorchPasses`` are the same passes by the compiled core,
for plain CPU tensors, and in torch operations; ``GroupPasses`` are those of all processes of a group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..._cached import cached_property
from ..._core import native
from ..._core.layout import BLOCK_SUMS, BUCKETS, FEWEST, ITEMSIZES, PIECE
from ..._maths.operator import MAGNITUDE, Operator
from ..._maths.scalars import Phi, PNorm, lone_response
from ..._types import Array, Ints
from .._fused.kernels import DTYPES, address
from .._rows.arguments import Rows
from .._rows.differentiable import from_state, local_sums, unknown_sums
from .._rows.namespace import LOOKS_ALWAYS as xp
from .groups import Shared

_CHUNK = 1 << 16  # entries of a piece, for the core
_LONG = 1 << 24  # a row from this length on is written past the caches
_LARGE_CHUNK = 1 << 20  # and in torch operations, where every call has its price
_FEW = 0.02  # the share of the entries that may be copied, in torch operations
_STEEPEST = 1e280  # keeps products of slopes finite, for any lam > 0


class State(NamedTuple):
    """The threshold v = pivot - lam delta; ``vectorized.state_of`` says what infinite pivots mean."""

    pivot: float
    delta: float


class Spread(NamedTuple):
    """A row with its settings, solved."""

    exponent: float
    debias: bool
    k: float
    lam: float
    state: State

    @property
    def v(self) -> float:
        return self.state.pivot - self.lam * self.state.delta

    @property
    def top(self) -> float:
        """The t from which on an entry is selected whole: S(top) = v; an entry at 0 never is."""
        return max(float(np.float64(max(self.v, 0.0)) ** (1.0 / self.exponent)), 5e-324)

    @property
    def has_threshold(self) -> bool:
        return self.lam > 0 and math.isfinite(self.state.pivot)


class Bounds(NamedTuple):
    """Sizes |x|: what is undecided, and the bracket of the boundary inside it."""

    low: float
    high: float
    lo: float
    hi: float


class Counts(NamedTuple):
    over: int  # entries above the undecided ones, which are left out from now on
    over_hi: int  # entries above the bracket
    from_lo: int  # entries from its lower end on
    invalid: int  # more than 0 if there is a NaN or an infinity


class BlockSums(NamedTuple):
    """Sums over the block, with rho = S'(t) and g the cotangent of y times the sign of x; then what the
    entries that are selected whole add up to."""

    rho: float
    rho_g: float
    rho_t: float
    rho_g_t: float
    g: float
    size: float
    whole: float  # how many entries are selected whole,
    whole_in_lam: float  # and what these add to the cotangent of lam


@dataclass(frozen=True)
class Block:
    """On the block dx_i = b g_i + rho_i/lam (g_i - mean), b = 1 if debiased; ``alone`` g_i for a single
    entry."""

    mean: float
    alone: float
    single: bool
    dk: float
    dlam: float

    @classmethod
    def of(cls, row: Spread, sums: BlockSums) -> Block:
        lam, b = row.lam, float(row.debias)
        curvature = row.k - sums.whole
        total = sums.rho + lam * curvature
        mean = (sums.rho_g + lam * b * sums.g) / total if total > 0 else 0.0
        alone = curvature * (sums.rho + lam * b) / total if total > 0 else 0.0
        dlam = (mean * sums.rho_t - sums.rho_g_t) / lam
        if sums.size == 1:
            t = sums.rho_t / sums.rho if sums.rho > 0 else 0.0
            # b - alone, in which a large lam would leave no digits of the difference
            rest = sums.rho * (1.0 - curvature) / total if b > 0 and total > 0 else -alone
            dlam = sums.g * t * rest
        # v, from sum_B S(t_i) = v (k - whole) with S(t) = t S'(t)/e: precise also where v is tiny
        v = sums.rho_t / (row.exponent * curvature) if curvature > 0 else row.v
        dk = v * mean if 0 < curvature < sums.size else 0.0
        return cls(mean, alone, sums.size == 1, dk, dlam + sums.whole_in_lam)


class Passes(Protocol):
    def gather(self, bounds: Bounds, few: bool) -> Counts:
        """Keep what is undecided, and count.

        If that is likely to be few entries, and those above will be selected as they are, the output
        is written on the way.
        """

    def histogram(self, first: int, last: int, shift: int) -> Ints:
        """Of the kept entries, the numbers with bits in first + [j, j + 1) 2^shift, up to ``last``."""

    def neighbours(self, cut: float) -> tuple[float, float]:
        """Of the kept entries, the smallest from the cut on and the largest below it."""

    def masses(self, row: Spread) -> tuple[float, float, float]:
        """Over the kept entries: sums of S(t) and of S'(t) in the block, and the number above it."""

    def at_pivot(self, pivot: float) -> Array:
        """How many entries of every piece are equal to the pivot."""

    def apply(self, row: Spread, left: Array) -> None:
        """Write y. For lam = 0, ``left`` is the mass for the entries of each piece at the pivot."""

    def block_sums(self, row: Spread) -> BlockSums:
        """What the cotangents need to know of the whole row."""

    def cotangents(self, row: Spread, sums: BlockSums, left: Array) -> float:
        """Write dx. Returns what a row without a threshold adds to the cotangent of lam."""


class CompiledPasses:
    """By the compiled core: flat and contiguous CPU tensors, one output and (or None) one g for each.

    While the threshold is looked for, the undecided entries are kept in the outputs; or, where they
    are few, beside them, so that the outputs can be written already.
    """

    def __init__(
        self, xs: list[Tensor], outs: list[Tensor], gs: list[Tensor | None] | None = None
    ) -> None:
        # for a g that is None
        self._zeros = torch.zeros(_CHUNK, dtype=torch.float64, device="cpu")
        self._alive = (xs, outs, gs)
        sizes = np.array([x.numel() for x in xs])
        pieces = -(-sizes // _CHUNK)
        tensor = np.repeat(np.arange(len(xs)), pieces)
        first = np.repeat(np.cumsum(pieces) - pieces, pieces)
        start = _CHUNK * (np.arange(len(tensor)) - first)
        table = self._table = np.zeros(len(tensor), dtype=PIECE)
        offset = start * np.array([x.element_size() for x in xs])[tensor]
        table["n"] = np.minimum(_CHUNK, sizes[tensor] - start)
        table["dtype"] = np.array([DTYPES[x.dtype] for x in xs])[tensor]
        table["x"] = np.array(_addresses(xs, xs))[tensor] + offset
        table["out"] = np.array(_addresses(outs, xs))[tensor] + offset
        if gs is not None:
            given = np.array([g is not None for g in gs])[tensor]
            zeros = address(self._zeros, torch.float64, _CHUNK)
            at = np.array(_addresses(gs, xs))[tensor]
            table["g"] = np.where(given, at + offset, zeros)
        n = int(sizes.sum())
        self._is_long = n >= _LONG
        # For a shorter row, waking a thread costs as much as it saves.
        threads = 1 if n < 2 * _CHUNK else torch.get_num_threads()
        self._pieces = (table.ctypes.data, len(table), threads)
        self._gathered = False

    def _with(self, row: Spread, *others: int) -> tuple[Any, ...]:
        return (*self._pieces, *row[:-1], *row.state, self._is_long, *others)

    @cached_property
    def _room(self) -> tuple[Tensor, Ints]:
        """Beside the outputs, less than 5 % of their size: entries, and positions of two bytes."""
        table = self._table
        sizes = ITEMSIZES[table["dtype"]] + 2
        room = -(-sizes * (table["n"] // FEWEST) // 64) * 64
        memory = torch.empty(int(room.sum()), dtype=torch.uint8, device="cpu")
        return memory, address(memory, torch.uint8, memory.numel()) + np.cumsum(room) - room

    def gather(self, bounds: Bounds, few: bool) -> Counts:
        self._gathered = True
        self._table["room"] = self._room[1] if few else 0
        return Counts(*native.pieces_gather(*self._pieces, *bounds, self._is_long))

    def histogram(self, first: int, last: int, shift: int) -> Ints:
        counts = np.empty(BUCKETS, dtype=np.int64)
        native.pieces_histogram(*self._pieces, first, last, shift, counts.ctypes.data)
        return counts

    def neighbours(self, cut: float) -> tuple[float, float]:
        return native.pieces_neighbours(*self._pieces, cut)

    def masses(self, row: Spread) -> tuple[float, float, float]:
        return native.pieces_masses(*self._with(row))

    def at_pivot(self, pivot: float) -> Array:
        if not self._gathered:
            self.gather(Bounds(pivot, pivot, pivot, pivot), few=False)
        counts = np.empty(len(self._table), dtype=np.int64)
        native.pieces_ties(*self._pieces, pivot, counts.ctypes.data)
        return counts.astype(np.float64)

    def apply(self, row: Spread, left: Array) -> None:
        self._table["left"] = left
        native.pieces_apply(*self._with(row))

    def block_sums(self, row: Spread) -> BlockSums:
        sums = np.empty(BLOCK_SUMS)
        native.pieces_block_sums(*self._with(row, sums.ctypes.data))
        return BlockSums(*sums.tolist())

    def cotangents(self, row: Spread, sums: BlockSums, left: Array) -> float:
        self._table["left"] = left
        total = np.array(sums)
        return native.pieces_cotangents(*self._with(row, total.ctypes.data))


def _addresses(values: Sequence[Tensor | None], xs: list[Tensor]) -> list[int]:
    """Of tensors that are as long as those of the row, and of the same dtypes."""
    return [address(v, x.dtype, x.numel()) for v, x in zip(values, xs, strict=True)]


def _on_cpu(values: Sequence[float], dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype, device="cpu")


class GroupPasses:
    """Over the shards of all ranks: each pass over those of this one, and a collective of its numbers.

    What every rank can do with its own shards is left to it: ``at_pivot`` and ``apply``.
    """

    def __init__(self, inner: Passes, shared: Shared) -> None:
        self._inner, self._shared = inner, shared
        self.at_pivot, self.apply = inner.at_pivot, inner.apply

    def _sum(self, values: Sequence[float], dtype: torch.dtype = torch.float64) -> list[Any]:
        found: list[Any] = self._shared.sum(_on_cpu(values, dtype)).tolist()
        return found

    def gather(self, bounds: Bounds, few: bool) -> Counts:
        return Counts(*self._sum(self._inner.gather(bounds, few), torch.int64))

    def histogram(self, first: int, last: int, shift: int) -> Ints:
        counts = self._inner.histogram(first, last, shift)
        return self._shared.sum(torch.from_numpy(counts)).numpy()

    def neighbours(self, cut: float) -> tuple[float, float]:
        above, below = self._inner.neighbours(cut)
        found = self._shared.largest(_on_cpu([-above, below], torch.float64))
        return -float(found[0]), float(found[1])

    def masses(self, row: Spread) -> tuple[float, float, float]:
        mass, slope, above = self._sum(self._inner.masses(row))
        return mass, slope, above

    def block_sums(self, row: Spread) -> BlockSums:
        sums = self._inner.block_sums(row)
        return BlockSums(*self._sum(sums)) if row.has_threshold else sums

    def cotangents(self, row: Spread, sums: BlockSums, left: Array) -> float:
        in_lam = self._inner.cotangents(row, sums, left)
        return in_lam if row.has_threshold else float(self._sum([in_lam])[0])


class TorchPasses:
    """In torch operations, a chunk at a time, on any device."""

    def __init__(
        self, xs: list[Tensor], outs: list[Tensor], gs: list[Tensor | None] | None = None
    ) -> None:
        self._xs = [chunk for x in xs for chunk in x.split(_LARGE_CHUNK)]
        self._outs = [chunk for out in outs for chunk in out.split(_LARGE_CHUNK)]
        self._gs: list[Tensor | None] = []
        for x, g in zip(xs, gs or (), strict=bool(gs)):
            chunks = x.split(_LARGE_CHUNK) if g is None else g.split(_LARGE_CHUNK)
            self._gs += [None if g is None else chunk for chunk in chunks]
        self._kept = self._xs
        self._few = _FEW * sum(x.numel() for x in xs)

    def gather(self, bounds: Bounds, few: bool) -> Counts:
        low, high, lo, hi = bounds
        over = over_hi = from_lo = invalid = undecided = 0
        for a in map(_sizes, self._xs):
            over += int((a > high).sum())
            over_hi += int((a > hi).sum())
            from_lo += int((a >= lo).sum())
            undecided += int(((a >= low) & (a <= high)).sum())
            invalid += int((~a.isfinite()).sum())
        if undecided > self._few:  # too many to copy: they are looked at where they are
            self._kept = self._xs
            return Counts(0, over_hi, from_lo, invalid)
        self._kept = [
            x[(a >= low) & (a <= high)]
            for x, a in zip(self._xs, map(_sizes, self._xs), strict=True)
        ]
        return Counts(over, over_hi, from_lo, invalid)

    def histogram(self, first: int, last: int, shift: int) -> Ints:
        counts = np.zeros(BUCKETS, dtype=np.int64)
        for a in map(_sizes, self._kept):
            bits = a.view(torch.int64)
            bits = bits[(bits >= first) & (bits <= last)]
            counts += torch.bincount((bits - first) >> shift, minlength=BUCKETS).cpu().numpy()
        return counts

    def neighbours(self, cut: float) -> tuple[float, float]:
        above, below = torch.inf, -torch.inf
        for a in map(_sizes, self._kept):
            if a.numel() > 0:
                above = min(above, float(torch.where(a >= cut, a, torch.inf).min()))
                below = max(below, float(torch.where(a < cut, a, -torch.inf).max()))
        return above, below

    def masses(self, row: Spread) -> tuple[float, float, float]:
        reg, mass, slope, over = PNorm(xp, row.exponent), 0.0, 0.0, 0.0
        for t in (_distances(row, a) for a in map(_sizes, self._kept)):
            inside = t[(t > 0) & (t < row.top)]
            mass += float(reg.response(inside).sum())
            slope += float(reg.slope(inside).sum())
            over += float((t >= row.top).sum())
        return mass, slope, over

    def at_pivot(self, pivot: float) -> Array:
        return np.array([float((_sizes(x) == pivot).sum()) for x in self._xs])

    def _each(self, left: Array) -> list[float]:
        return np.broadcast_to(left, len(self._xs)).tolist()

    def apply(self, row: Spread, left: Array) -> None:
        for x, out, mass in zip(self._xs, self._outs, self._each(left), strict=True):
            k, lam = (torch.full((1, 1), v, dtype=torch.float64, device=x.device) for v in row[2:4])
            if row.lam == 0 and math.isfinite(row.state.pivot):
                mask = _hard_mask(_sizes(x), row.state.pivot, mass)
                out.copy_(torch.where(mask > 0, x.to(mask.dtype) * mask, 0.0))
                continue
            operator, state = (
                Operator(MAGNITUDE, row.exponent, row.debias),
                k.new_tensor([row.state]),
            )
            rows, hard = Rows("x", x, 0), row.lam == 0
            sums = local_sums if hard else unknown_sums
            out.copy_(rows.restore(from_state(rows, k, lam, state, operator, hard, sums).y()))

    def block_sums(self, row: Spread) -> BlockSums:
        total = np.zeros(len(BlockSums._fields))
        if row.has_threshold:
            for x, g in zip(self._xs, self._gs, strict=True):
                total += _sums_of_chunk(row, x, g)
        return BlockSums(*total.tolist())

    def cotangents(self, row: Spread, sums: BlockSums, left: Array) -> float:
        in_lam = 0.0
        block = Block.of(row, sums) if row.has_threshold else None
        for x, g, out, mass in zip(self._xs, self._gs, self._outs, self._each(left), strict=True):
            if block is not None:
                dx = _cotangents_of_chunk(row, block, x, g)
            else:
                dx, part = _special_cotangents(row, x, g, mass)
                in_lam += part
            limit = torch.finfo(x.dtype).max
            out.copy_(dx.clamp(-limit, limit))
        return in_lam


def _sizes(x: Tensor) -> Tensor:
    """|x| in float64, in which all comparisons are exact."""
    return x.to(torch.float64).abs()


def _distances(row: Spread, a: Tensor) -> Tensor:
    return (a - row.state.pivot) / row.lam + row.state.delta


def _signed(x: Tensor, g: Tensor | None) -> Tensor:
    """g with the sign of x."""
    if g is None:
        return torch.zeros_like(x, dtype=torch.float64)
    return torch.where(x < 0, -g.to(torch.float64), g.to(torch.float64))


def _hard_mask(a: Tensor, pivot: float, left: float) -> Tensor:
    """1 above the pivot; what is left goes to the entries equal to it, the lowest index first."""
    tied = a == pivot
    share = (left - (tied.to(a.dtype).cumsum(dim=-1) - 1.0)).clamp(0.0, 1.0)
    return torch.where(a > pivot, 1.0, torch.where(tied, share, 0.0))


def _lone(row: Spread, a: Tensor) -> tuple[Tensor, Tensor]:
    """Derivatives in x and lam of an entry that is selected whole and not debiased."""
    one, lam = torch.ones_like(a[:1]), torch.full_like(a[:1], row.lam)
    d = lone_response(a, one, lam, PNorm(xp, row.exponent), Phi(xp, "half_square"))
    slope = PNorm(xp, row.exponent).slope(d)
    share = torch.where(slope < _STEEPEST, slope / (slope + row.lam), 1.0)
    return share, -d * share


def _sums_of_chunk(row: Spread, x: Tensor, g: Tensor | None) -> Array:
    a, g = _sizes(x), _signed(x, g)
    t = _distances(row, a)
    inside, whole = (t > 0) & (t < row.top), t >= row.top
    t, g_inside = t[inside], g[inside]
    rho = PNorm(xp, row.exponent).slope(t)
    in_lam = 0.0 if row.debias else float((g[whole] * _lone(row, a[whole])[1]).sum())
    sums = (rho, rho * g_inside, rho * t, rho * g_inside * t, g_inside)
    counts = (t.numel(), int(whole.sum()))
    return np.array([*(float(s.sum()) for s in sums), *counts, in_lam])


def _cotangents_of_chunk(row: Spread, block: Block, x: Tensor, g: Tensor | None) -> Tensor:
    a, g = _sizes(x), _signed(x, g)
    t = _distances(row, a)
    inside, whole = (t > 0) & (t < row.top), t >= row.top
    gain = (PNorm(xp, row.exponent).slope(torch.where(inside, t, 1.0)) / row.lam).clamp_max(
        _STEEPEST
    )
    in_block = block.alone * g if block.single else float(row.debias) * g + gain * (g - block.mean)
    of_whole = g if row.debias else g * _lone(row, torch.where(whole, a, 1.0))[0]
    dx = torch.where(inside, in_block, torch.where(whole, of_whole, 0.0))
    return torch.where(x < 0, 0.0 - dx, dx)


def _special_cotangents(
    row: Spread, x: Tensor, g: Tensor | None, left: float
) -> tuple[Tensor, float]:
    """dx, and what is added to the cotangent of lam, where the row has no threshold."""
    a, cotangent = _sizes(x), _signed(x, g)
    pivot = row.state.pivot
    if math.isnan(pivot):
        return torch.full_like(a, torch.nan), math.nan
    in_x, in_lam = torch.zeros_like(a), torch.zeros_like(a)
    if pivot == -math.inf:  # everything is selected
        in_x = torch.ones_like(a)
        if not (row.debias or row.lam == 0):
            in_x, in_lam = _lone(row, a)
    elif row.lam == 0:
        in_x = _hard_mask(a, pivot, left)
    dx = in_x * cotangent
    return torch.where(x < 0, 0.0 - dx, dx), float((in_lam * cotangent).sum())
