# mypy: ignore-errors
"""The entries of a row in a fixed number of slots: which they are, and which has which.

It is decided forward, and said by two ends of a rank that outputs increase with and that is the same to
the last bit in any kernel: the outputs themselves might be contracted otherwise in another one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rows import hard_mask
from .scalars import MAGNITUDE
from .solve import any_of, count_of, nth


@triton.jit
def rank_of(a, k, frac, lam, pivot, OP: tl.constexpr, HARD: tl.constexpr):
    """x or |x| or, in a hard row, whose ties are broken, the output; NaN is below all numbers."""
    rank = a
    if HARD:
        mask = hard_mask(a, pivot, k, frac)
        if OP == MAGNITUDE:
            mask = tl.where(mask > 0, a * mask, 0.0)
        rank = tl.where((lam == 0)[:, None], mask, a)
    return tl.where(rank == rank, rank, float("-inf"))


@triton.jit
def ends_of(rank, size, room):
    """lo and hi such that of the free entries those above hi, and the first of those in [lo, hi], are
    the ``room`` with the largest sizes. What is not free has no rank: NaN."""
    size = tl.where(rank == rank, tl.where(size == size, size, 0.0), float("-inf"))
    rows = (count_of(size > 0) > room) & (room > 0)
    boundary = tl.zeros_like(tl.max(size, 1))
    if any_of(rows):
        guess = 0.5 * tl.max(tl.where(size > 0, size, 0.0), 1)
        boundary = tl.where(rows, nth(size, tl.maximum(room, 1), rows, guess), 0.0)
    lo = tl.min(tl.where(size >= boundary[:, None], rank, float("inf")), 1)
    small = (rank == rank) & (size <= boundary[:, None])
    hi = tl.max(tl.where(small, rank, float("-inf")), 1)
    return lo, tl.where(room > 0, hi, float("inf"))


@triton.jit
def _in_order(over, tied, share, first):
    """The slots, from ``first`` on, of the entries that are over and of so many that are tied, in the
    order of the row, and -1 of the others; how many slots these are, and how many ties are before an
    entry. Two counts are in one sum: a row has fewer than 2^16 entries."""
    own = tl.where(over, 65536, tied.to(tl.int32))
    total = tl.sum(own, 1)
    before = tl.cumsum(own, 1) - own
    ties = before & 65535
    left = tl.maximum(share - (total >> 16), 0)
    slot = (before >> 16) + tl.minimum(ties, left[:, None]) + first[:, None]
    slot = tl.where(over | (tied & (ties < left[:, None])), slot, -1)
    return slot, (total >> 16) + tl.minimum(total & 65535, left), ties


@triton.jit
def slots_of(rank, lo, hi, room, first):
    """The slots of the free entries with the largest sizes, for what ``ends_of`` found."""
    over = rank > hi[:, None]
    slot, _, _ = _in_order(over, (rank >= lo[:, None]) & ~over, room, first)
    return slot


@triton.jit
def hard_slots(a, pivot, k, frac):
    """The slots of the hard selection, how many they are, and its mask."""
    over = a > pivot[:, None]
    tied = (a == pivot[:, None]) & (a > float("-inf"))
    slot, number, ties = _in_order(over, tied, k + (frac > 0).to(tl.int32), 0 * k)
    left = (k - count_of(over))[:, None] - ties
    share = tl.minimum(left.to(a.dtype) + frac[:, None], 1.0)
    return slot, number, tl.where(over, 1.0, share)
