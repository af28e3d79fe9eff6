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
def ends_of(rank, size, free, room):
    """lo and hi such that of the free entries those above hi, and the first of those in [lo, hi], are
    the ``room`` with the largest sizes."""
    size = tl.where(free, size, float("-inf"))
    rows = (count_of(size > 0) > room) & (room > 0)
    boundary = tl.zeros_like(tl.max(size, 1))
    if any_of(rows):
        guess = 0.5 * tl.max(tl.where(size > 0, size, 0.0), 1)
        boundary = tl.where(rows, nth(size, tl.maximum(room, 1), rows, guess), 0.0)
    lo = tl.min(tl.where(size >= boundary[:, None], rank, float("inf")), 1)
    hi = tl.max(tl.where(free & (size <= boundary[:, None]), rank, float("-inf")), 1)
    return lo, tl.where(room > 0, hi, float("inf"))


@triton.jit
def kept_of(rank, lo, hi, free, room):
    """Which of the free entries have a slot."""
    over = free & (rank > hi[:, None])
    tied = free & (rank >= lo[:, None]) & ~over
    left = room - count_of(over)
    upto = tl.cumsum(tied.to(tl.int32), 1)
    return over | (tied & (upto <= left[:, None]))


@triton.jit
def slot_of(kept, first):
    """The slot of every entry that is kept, where those of a row begin at ``first``."""
    return tl.cumsum(kept.to(tl.int32), 1) - 1 + first[:, None]
