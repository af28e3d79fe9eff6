# mypy: ignore-errors
"""The top-k in slots, for rows in registers: x is read once, and the slots are written by the program
that has solved the row; backward x is read once more, with the cotangents of the slots."""

from __future__ import annotations

import triton
import triton.language as tl

from .backward import pulled_back
from .rows import (
    arguments,
    has_bad_entry,
    output,
    places,
    read,
    relaxed_output,
    rounded,
    state_at,
    store_numbers,
)
from .scalars import MAGNITUDE, is_even, largest
from .slots import ends_of, hard_slots, rank_of, slots_of
from .solve import solve


@triton.jit
def _free(
    a,
    there,
    k,
    frac,
    lam,
    pivot,
    taken,
    OP: tl.constexpr,
    STRAIGHT: tl.constexpr,
    HARD: tl.constexpr,
):
    """The rank of what is free to take a slot, and NaN of all else: straight through the hard selection
    has slots already, and what a hard row leaves is 0, in whatever order."""
    rank = rank_of(a, k, frac, lam, pivot, OP, HARD and not STRAIGHT)
    return tl.where(there & ~taken, rank, float("nan"))


@triton.jit
def _store_values(value_ptr, row, slot, value, x, capacity, OP: tl.constexpr):
    """To their slots."""
    if is_even(OP):
        value = tl.where(x < 0, 0.0 - value, value)
    to = value_ptr + row.to(tl.int64)[:, None] * capacity
    tl.store(to + slot, rounded(value, value_ptr.dtype.element_ty), mask=slot >= 0)


@triton.jit
def _store_indices(index_ptr, row, slot, capacity, BLOCK: tl.constexpr):
    col = tl.zeros_like(slot).to(tl.int64) + tl.arange(0, BLOCK)[None, :]
    to = index_ptr + row.to(tl.int64)[:, None] * capacity
    tl.store(to + slot, col, mask=slot >= 0)


@triton.jit
def _store_rest(value_ptr, chosen_ptr, row, m, first, bad, capacity, BLOCK: tl.constexpr):
    """Straight through: the slots from ``first`` on are not of the hard selection, and worth nothing."""
    col = tl.arange(0, BLOCK)[None, :]
    at = row.to(tl.int64)[:, None] * capacity + col
    there = (col < capacity) & (row < m)[:, None]
    rest = col >= first[:, None]
    tl.store(chosen_ptr + at, (~rest).to(tl.uint8), mask=there)
    nothing = tl.where(bad[:, None], float("nan"), tl.zeros(rest.shape, tl.float32))
    tl.store(value_ptr + at, nothing.to(value_ptr.dtype.element_ty), mask=there & rest)


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
    x, a = read(x_ptr, at, there, OP, D)
    k, frac, lam, valid = arguments(
        k_ptr, lam_ptr, k_stride, lam_stride, k_bits, lam_bits, row, m, n, K_TENSOR, LAM_TENSOR, D
    )
    invalid = has_bad_entry(x, there, OP) | ~valid
    if STRAIGHT:  # each of the hard selection must have a slot
        invalid = invalid | (k.to(D) + frac > capacity)
    pivot, delta, passes = solve(a, k, frac, lam, invalid, n, OP, E, RELAXED, HARD)
    row, _, there = places(m, n, ROWS, BLOCK, passes)
    store_numbers(state_ptr, row, m, 0, 2, pivot)
    store_numbers(state_ptr, row, m, 1, 2, delta)
    first = 0 * k
    if STRAIGHT:  # the hard selection is written at once, so that it is not held in registers
        hard_pivot, _, _ = solve(a, k, frac, 0.0 * lam, invalid, n, OP, E, False, True)
        store_numbers(ends_ptr, row, m, 2, 3, hard_pivot)
        slot, first, mask = hard_slots(a, hard_pivot, k, frac)
        value = a * mask if OP == MAGNITUDE else mask
        rank = _free(a, there, k, frac, lam, pivot, slot >= 0, OP, STRAIGHT, HARD)
        _store_values(value_ptr, row, slot, value, x, capacity, OP)
        _store_indices(index_ptr, row, slot, capacity, BLOCK)
        row, _, there = places(m, n, ROWS, BLOCK, tl.max(first, 0))
    else:
        rank = _free(a, there, k, frac, lam, pivot, there & False, OP, STRAIGHT, HARD)
    size = tl.zeros_like(a)
    if not STRAIGHT:
        size = output(a, k, frac, lam, pivot, delta, OP, E, DEBIAS, RELAXED, HARD)
    elif RELAXED:  # of what is free alone
        size = relaxed_output(rank, k, frac, lam, pivot, delta, OP, E, DEBIAS)
        if HARD:
            size = tl.where((lam > 0)[:, None], size, 0.0)
    size = rounded(size, value_ptr.dtype.element_ty).to(D)  # ties are those of what is returned
    lo, hi = ends_of(rank, size, capacity - first)
    slot = slots_of(rank, lo, hi, capacity - first, first)
    dropped = tl.sum(tl.where((slot >= 0) | (rank != rank), 0.0, size), 1)
    if STRAIGHT:
        _store_rest(value_ptr, chosen_ptr, row, m, first, pivot != pivot, capacity, BLOCK)
    else:
        _store_values(value_ptr, row, slot, size, x, capacity, OP)
    _store_indices(index_ptr, row, slot, capacity, BLOCK)
    dropped = tl.where(pivot == pivot, dropped, float("nan"))
    tl.store(dropped_ptr + row, rounded(dropped, dropped_ptr.dtype.element_ty), mask=row < m)
    store_numbers(ends_ptr, row, m, 0, 3, lo)
    store_numbers(ends_ptr, row, m, 1, 3, hi)


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
    x, a = read(x_ptr, at, there, OP, D)
    k, frac, lam, _valid = arguments(
        k_ptr, lam_ptr, k_stride, lam_stride, k_bits, lam_bits, row, m, n, K_TENSOR, LAM_TENSOR, D
    )
    pivot, delta = state_at(state_ptr, row, m)
    ends = ends_ptr + 3 * row.to(tl.int64)
    lo = tl.load(ends, mask=row < m, other=0.0)
    hi = tl.load(ends + 1, mask=row < m, other=0.0)
    hard = tl.full(x.shape, -1, tl.int32)
    first = 0 * k
    if STRAIGHT:
        hard_pivot = tl.load(ends + 2, mask=row < m, other=0.0)
        hard, first, _ = hard_slots(a, hard_pivot, k, frac)
    rank = _free(a, there, k, frac, lam, pivot, hard >= 0, OP, STRAIGHT, HARD)
    slot = tl.maximum(slots_of(rank, lo, hi, capacity - first, first), hard)
    g = tl.zeros_like(x)
    if IN_SLOTS:
        base = g_ptr + row.to(tl.int64)[:, None] * capacity
        g = tl.load(base + slot, mask=slot >= 0, other=0.0).to(D)
    if IN_DROPPED:
        size = output(a, k, frac, lam, pivot, delta, OP, E, DEBIAS, RELAXED, HARD)
        rest = tl.load(g_dropped_ptr + row, mask=row < m, other=0.0).to(D)[:, None]
        if is_even(OP):
            rest = tl.where(x < 0, 0.0 - rest, rest)
        g = tl.where((slot >= 0) | (size == 0), g, rest)
    dx, dk, dlam, after = pulled_back(
        x, a, g, k, frac, lam, state_ptr, row, m, largest(dx_ptr.dtype.element_ty), OP, E, DEBIAS,
        False, RELAXED, HARD, IN_LAM,
    )  # fmt: skip
    row, at, there = places(m, n, ROWS, BLOCK, after)
    tl.store(dx_ptr + at, rounded(dx, dx_ptr.dtype.element_ty), mask=there)
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
    rank = tl.where(there, size, float("nan"))
    room = capacity + tl.zeros_like(row)
    lo, hi = ends_of(rank, size, room)
    slot = slots_of(rank, lo, hi, room, 0 * room)
    _store_indices(index_ptr, row, slot, capacity, BLOCK)
