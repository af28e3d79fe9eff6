# mypy: ignore-errors
"""The top-k in slots, for rows in registers: x is read once, and the slots are written by the program
that has solved the row; backward x is read once more, with the cotangents of the slots."""

from __future__ import annotations

import triton
import triton.language as tl

from .backward import pulled_back
from .rows import hard_mask, has_bad_entry, in_range, keys, number, output, places, split
from .scalars import MAGNITUDE, is_even, largest
from .slots import ends_of, kept_of, rank_of, slot_of
from .solve import count_of, solve


@triton.jit
def _free(a, there, pivot, k, frac, capacity, STRAIGHT: tl.constexpr):
    """Straight through: the hard selection. Then what is free to take the slots that it leaves, and how
    many these are."""
    chosen = there & False
    mask = tl.zeros_like(a)
    room = capacity + 0 * k
    if STRAIGHT:
        mask = hard_mask(a, pivot, k, frac)
        chosen = there & (mask > 0)
        room -= count_of(chosen)
    return mask, chosen, there & ~chosen, room


@triton.jit(do_not_specialize=["m", "k_bits", "lam_bits", "capacity"])
def select_kernel(
    x_ptr, k_ptr, lam_ptr, value_ptr, index_ptr, chosen_ptr, dropped_ptr, state_ptr, ends_ptr, m, n,
    k_stride, lam_stride, k_bits, lam_bits, capacity,
    K_TENSOR: tl.constexpr, LAM_TENSOR: tl.constexpr, OP: tl.constexpr, E: tl.constexpr,
    DEBIAS: tl.constexpr, STRAIGHT: tl.constexpr, RELAXED: tl.constexpr, HARD: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Values and indices of the slots (m, capacity), what is dropped (m), the state, and three numbers
    more that say which entries have a slot. STRAIGHT: the hard selection comes first."""
    row, at, there = places(m, n, ROWS, BLOCK)
    x = tl.load(x_ptr + at, mask=there, other=0.0).to(D)
    k, frac, k_valid = split(number(k_ptr, k_bits, k_stride, row, m, K_TENSOR), n, D)
    lam, lam_valid = in_range(number(lam_ptr, lam_bits, lam_stride, row, m, LAM_TENSOR), D)
    a = keys(x, there, OP)
    invalid = (has_bad_entry(x, OP) | ~k_valid | ~lam_valid) & (row < m)
    if STRAIGHT:  # each of the hard selection must have a slot
        invalid = invalid | ((k.to(D) + frac > capacity) & (row < m))
    k = tl.where(row < m, k, 0)
    frac = tl.where(row < m, frac, 0.0)
    pivot, delta, _ = solve(a, k, frac, lam, invalid, n, OP, E, RELAXED, HARD)
    hard_pivot = pivot
    if STRAIGHT:
        hard_pivot, _, _ = solve(a, k, frac, 0.0 * lam, invalid, n, OP, E, False, True)
    size = output(a, k, frac, lam, pivot, delta, OP, E, DEBIAS, RELAXED, HARD)
    size = size.to(value_ptr.dtype.element_ty).to(D)  # ties are those of what is returned
    mask, chosen, free, room = _free(a, there, hard_pivot, k, frac, capacity, STRAIGHT)
    rank = rank_of(a, k, frac, lam, pivot, OP, HARD)
    lo, hi = ends_of(rank, tl.where(size == size, size, 0.0), free, room)
    kept = kept_of(rank, lo, hi, free, room)
    slot = slot_of(kept, capacity - room)
    value = size
    if STRAIGHT:
        slot = tl.where(chosen, slot_of(chosen, 0 * room), slot)
        value = tl.where((pivot != pivot)[:, None], float("nan"), mask)
        if OP == MAGNITUDE:
            value *= tl.where(mask > 0, a, 0.0)
    if is_even(OP):
        value = tl.where(x < 0, 0.0 - value, value)
    to = row.to(tl.int64)[:, None] * capacity + slot
    taken = (kept | chosen) & there
    tl.store(value_ptr + to, value.to(value_ptr.dtype.element_ty), mask=taken)
    col = tl.arange(0, BLOCK).to(tl.int64)[None, :] + tl.zeros_like(to)
    tl.store(index_ptr + to, col, mask=taken)
    if STRAIGHT:
        tl.store(chosen_ptr + to, chosen.to(tl.uint8), mask=taken)
    dropped = tl.sum(tl.where(taken | ~there, 0.0, size), 1)
    dropped = tl.where(pivot == pivot, dropped, float("nan"))
    tl.store(dropped_ptr + row, dropped.to(dropped_ptr.dtype.element_ty), mask=row < m)
    tl.store(state_ptr + 2 * row.to(tl.int64), pivot, mask=row < m)
    tl.store(state_ptr + 2 * row.to(tl.int64) + 1, delta, mask=row < m)
    tl.store(ends_ptr + 3 * row.to(tl.int64), lo, mask=row < m)
    tl.store(ends_ptr + 3 * row.to(tl.int64) + 1, hi, mask=row < m)
    tl.store(ends_ptr + 3 * row.to(tl.int64) + 2, hard_pivot, mask=row < m)


@triton.jit(do_not_specialize=["m", "k_bits", "lam_bits", "capacity"])
def select_backward_kernel(
    x_ptr, g_ptr, g_dropped_ptr, k_ptr, lam_ptr, state_ptr, ends_ptr, dx_ptr, dk_ptr, dlam_ptr, m, n,
    k_stride, lam_stride, k_bits, lam_bits, capacity,
    K_TENSOR: tl.constexpr, LAM_TENSOR: tl.constexpr, OP: tl.constexpr, E: tl.constexpr,
    DEBIAS: tl.constexpr, STRAIGHT: tl.constexpr, RELAXED: tl.constexpr, HARD: tl.constexpr,
    IN_SLOTS: tl.constexpr, IN_DROPPED: tl.constexpr, IN_K: tl.constexpr, IN_LAM: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As the backward of the output, with a cotangent that is that of the slots, and of what is dropped
    elsewhere. IN_SLOTS and IN_DROPPED say which of them there are."""
    row, at, there = places(m, n, ROWS, BLOCK)
    x = tl.load(x_ptr + at, mask=there, other=0.0).to(D)
    k, frac, _ = split(number(k_ptr, k_bits, k_stride, row, m, K_TENSOR), n, D)
    lam, _ = in_range(number(lam_ptr, lam_bits, lam_stride, row, m, LAM_TENSOR), D)
    pivot = tl.load(state_ptr + 2 * row.to(tl.int64), mask=row < m, other=float("inf"))
    delta = tl.load(state_ptr + 2 * row.to(tl.int64) + 1, mask=row < m, other=0.0)
    lo = tl.load(ends_ptr + 3 * row.to(tl.int64), mask=row < m, other=0.0)
    hi = tl.load(ends_ptr + 3 * row.to(tl.int64) + 1, mask=row < m, other=0.0)
    hard_pivot = tl.load(ends_ptr + 3 * row.to(tl.int64) + 2, mask=row < m, other=0.0)
    a = keys(x, there, OP)
    _, chosen, free, room = _free(a, there, hard_pivot, k, frac, capacity, STRAIGHT)
    kept = kept_of(rank_of(a, k, frac, lam, pivot, OP, HARD), lo, hi, free, room)
    slot = slot_of(kept, capacity - room)
    if STRAIGHT:
        slot = tl.where(chosen, slot_of(chosen, 0 * room), slot)
    taken = (kept | chosen) & there
    g = tl.zeros_like(x)
    if IN_SLOTS:
        where = row.to(tl.int64)[:, None] * capacity + slot
        g = tl.load(g_ptr + where, mask=taken, other=0.0).to(D)
    if IN_DROPPED:
        size = output(a, k, frac, lam, pivot, delta, OP, E, DEBIAS, RELAXED, HARD)
        rest = tl.load(g_dropped_ptr + row, mask=row < m, other=0.0).to(D)[:, None]
        if is_even(OP):
            rest = tl.where(x < 0, 0.0 - rest, rest)
        g = tl.where(taken | (size == 0), g, rest)
    dx, dk, dlam = pulled_back(
        x, a, g, k, frac, lam, pivot, delta, largest(dx_ptr.dtype.element_ty), OP, E, DEBIAS, False,
        RELAXED, HARD,
    )  # fmt: skip
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=there)
    if IN_K:
        tl.store(dk_ptr + row, dk, mask=row < m)
    if IN_LAM:
        tl.store(dlam_ptr + row, dlam, mask=row < m)


@triton.jit(do_not_specialize=["m", "capacity"])
def slots_kernel(
    y_ptr, index_ptr, m, n, capacity, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """The indices of the entries of each row with the largest magnitudes, in order."""
    row, at, there = places(m, n, ROWS, BLOCK)
    y = tl.load(y_ptr + at, mask=there, other=0.0).to(D)
    size = tl.where(y == y, tl.abs(y), 0.0)
    room = capacity + tl.zeros_like(row)
    lo, hi = ends_of(size, size, there, room)
    kept = kept_of(size, lo, hi, there, room)
    to = row.to(tl.int64)[:, None] * capacity + slot_of(kept, 0 * room)
    col = tl.arange(0, BLOCK).to(tl.int64)[None, :] + tl.zeros_like(to)
    tl.store(index_ptr + to, col, mask=kept & there)
