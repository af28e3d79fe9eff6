# mypy: ignore-errors
"""The entries of a row in a fixed number of slots: which they are, and which has which.

It is decided forward, and said by two ends of a rank that outputs increase with and that is the same to
the last bit in any kernel: the outputs themselves might be contracted otherwise in another one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .scalars import MAGNITUDE
from .solve import any_of, count_of, nth


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
def in_order(over, tied, left, seen):
    """The slots of the entries that are over and of so many that are tied, in the order of the row, and
    -1 of the others; how many ties are before an entry; and how many there are of both up to here, given
    how many came before: two counts in one number, as a row has fewer than 2^16 entries."""
    own = tl.where(over, 65536, tied.to(tl.int32))
    before = seen[:, None] + tl.cumsum(own, 1) - own
    ties = before & 65535
    slot = (before >> 16) + tl.minimum(ties, left[:, None])
    slot = tl.where(over | (tied & (ties < left[:, None])), slot, -1)
    return slot, ties, seen + tl.sum(own, 1)


@triton.jit
def free_slots(rank, lo, hi, over, room, first, seen):
    """The slots, from ``first`` on, of the free entries with the largest sizes, for what ``ends_of``
    found and the number of entries above hi; and ``seen`` as ``in_order`` has it."""
    above = rank > hi[:, None]
    tied = (rank >= lo[:, None]) & ~above
    slot, _, seen = in_order(above, tied, tl.maximum(room - over, 0), seen)
    return tl.where(slot >= 0, slot + first[:, None], -1), seen


@triton.jit
def slots_of(rank, lo, hi, room, first):
    """``free_slots`` of whole rows."""
    slot, _ = free_slots(rank, lo, hi, count_of(rank > hi[:, None]), room, first, 0 * first)
    return slot


@triton.jit
def left_for_ties(k, frac, over):
    """How many of the ties the hard selection has, if there are so many."""
    return tl.maximum(k + (frac > 0).to(tl.int32) - over, 0)


@triton.jit
def number_of_hard(k, frac, over, seen):
    """How many slots the hard selection has, for ``seen`` after a whole row."""
    return over + tl.minimum(seen & 65535, left_for_ties(k, frac, over))


@triton.jit
def hard_slots(a, pivot, k, frac, over, seen):
    """The slots of the hard selection and its mask, given how many entries of the row are above the
    pivot; and ``seen`` as ``in_order`` has it."""
    above = a > pivot[:, None]
    tied = (a == pivot[:, None]) & (a > float("-inf"))
    slot, ties, seen = in_order(above, tied, left_for_ties(k, frac, over), seen)
    share = ((k - over)[:, None] - ties).to(a.dtype) + frac[:, None]
    mask = tl.where(above, 1.0, tl.minimum(share, 1.0))
    return slot, tl.where(slot >= 0, mask, 0.0), seen


@triton.jit
def ranked(
    a, there, k, frac, lam, pivot, over, seen, OP: tl.constexpr, STRAIGHT: tl.constexpr,
    HARD: tl.constexpr,
):  # fmt: skip
    """The rank of what is free to take a slot, x or |x| or, in a hard row, whose ties are broken, the
    output; and NaN of all else, that is below all numbers: straight through the hard selection has slots
    already. Then these slots, the hard output, and ``seen``, for what ``hard_slots`` takes."""
    rank = a
    slot = tl.full(a.shape, -1, tl.int32)
    value = a
    if STRAIGHT or HARD:
        slot, value, seen = hard_slots(a, pivot, k, frac, over, seen)
        if OP == MAGNITUDE:
            value = tl.where(value > 0, a * value, 0.0)
        if STRAIGHT:
            there = there & (slot < 0)
        else:
            rank = tl.where((lam == 0)[:, None], value, a)
    rank = tl.where(rank == rank, rank, float("-inf"))
    return tl.where(there, rank, float("nan")), slot, value, seen
