# mypy: ignore-errors
"""The top-k in slots, for rows in registers: x is read once, and the slots are written by the program
that has solved the row, for which it reads long rows again; backward x is read once more, with the
cotangents of the slots."""

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
from .scalars import is_even, largest
from .slots import ends_of, free_slots, number_of_hard, ranked, slots_of
from .solve import count_of, solve

_PART = tl.constexpr(2048)  # entries of a long row that are given slots at once


@triton.jit
def _size(
    a, hard, k, frac, lam, pivot, delta, T: tl.constexpr, OP: tl.constexpr, E: tl.constexpr,
    DEBIAS: tl.constexpr, STRAIGHT: tl.constexpr, RELAXED: tl.constexpr, HARD: tl.constexpr,
):  # fmt: skip
    """The output without its sign, for that of hard rows, of which straight through nothing is left:
    rounded, as ties are those of what is returned."""
    size = tl.zeros_like(a)
    if RELAXED:
        size = relaxed_output(a, k, frac, lam, pivot, delta, OP, E, DEBIAS)
    if HARD:
        size = tl.where((lam == 0)[:, None], 0.0 if STRAIGHT else hard, size)
    size = tl.where((pivot != pivot)[:, None], float("nan"), size)
    return rounded(size, T).to(a.dtype)


@triton.jit
def _store_indices(index_ptr, row, slot, start, capacity, BLOCK: tl.constexpr):
    col = tl.zeros_like(slot).to(tl.int64) + (start + tl.arange(0, BLOCK))[None, :]
    to = index_ptr + row.to(tl.int64)[:, None] * capacity
    tl.store(to + slot, col, mask=slot >= 0)


@triton.jit
def _store(value_ptr, index_ptr, row, slot, value, x, start, capacity, OP: tl.constexpr):
    """Values and indices of entries of the rows, which start there, to their slots."""
    if is_even(OP):
        value = tl.where(x < 0, 0.0 - value, value)
    to = value_ptr + row.to(tl.int64)[:, None] * capacity
    tl.store(to + slot, rounded(value, value_ptr.dtype.element_ty), mask=slot >= 0)
    _store_indices(index_ptr, row, slot, start, capacity, x.shape[1])


@triton.jit
def _store_rest(value_ptr, chosen_ptr, row, m, start, first, bad, capacity, BLOCK: tl.constexpr):
    """Straight through: the slots from ``first`` on are not of the hard selection, and worth nothing."""
    col = (start + tl.arange(0, BLOCK))[None, :]
    at = row.to(tl.int64)[:, None] * capacity + col
    there = (col < capacity) & (row < m)[:, None]
    rest = col >= first[:, None]
    tl.store(chosen_ptr + at, (~rest).to(tl.uint8), mask=there)
    nothing = tl.where(bad[:, None], float("nan"), tl.zeros(rest.shape, tl.float32))
    tl.store(value_ptr + at, nothing.to(value_ptr.dtype.element_ty), mask=there & rest)


@triton.jit
def _fill(
    to, row, m, start, x, a, there, given, solved, found, capacity, sums, OP: tl.constexpr,
    E: tl.constexpr, DEBIAS: tl.constexpr, STRAIGHT: tl.constexpr, RELAXED: tl.constexpr,
    HARD: tl.constexpr,
):  # fmt: skip
    """Writes the slots of the entries of rows from ``start`` on; adds up how many slots there are, and
    what is dropped."""
    value_ptr, index_ptr, chosen_ptr = to
    k, frac, lam = given
    pivot, delta, hard_pivot, hard_over = solved
    lo, hi, over, first = found
    of_hard, of_free, dropped = sums
    T: tl.constexpr = value_ptr.dtype.element_ty
    rank, slot, hard, of_hard = ranked(
        a, there, k, frac, lam, hard_pivot, hard_over, of_hard, OP, STRAIGHT, HARD
    )
    if STRAIGHT:
        _store(value_ptr, index_ptr, row, slot, hard, x, start, capacity, OP)
        _store_rest(
            value_ptr, chosen_ptr, row, m, start, first, pivot != pivot, capacity, x.shape[1]
        )
    size = _size(a, hard, k, frac, lam, pivot, delta, T, OP, E, DEBIAS, STRAIGHT, RELAXED, HARD)
    slot, of_free = free_slots(rank, lo, hi, over, capacity - first, first, of_free)
    dropped += tl.sum(tl.where((slot >= 0) | (rank != rank), 0.0, size), 1)
    if STRAIGHT:
        _store_indices(index_ptr, row, slot, start, capacity, x.shape[1])
    else:
        _store(value_ptr, index_ptr, row, slot, size, x, start, capacity, OP)
    return of_hard, of_free, dropped


@triton.jit
def _fill_again(
    x_ptr, to, row, m, n, start, given, solved, found, capacity, sums, OP: tl.constexpr,
    E: tl.constexpr, DEBIAS: tl.constexpr, STRAIGHT: tl.constexpr, RELAXED: tl.constexpr,
    HARD: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """The same of some entries, which are read again: so they are not held in registers beside all that
    becomes of them."""
    col = (start + tl.arange(0, _PART))[None, :]
    there = (row < m)[:, None] & (col < n)
    x, a = read(x_ptr, row.to(tl.int64)[:, None] * n + col, there, OP, D)
    return _fill(
        to, row, m, start, x, a, there, given, solved, found, capacity, sums, OP, E, DEBIAS, STRAIGHT,
        RELAXED, HARD,
    )  # fmt: skip


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
    hard_pivot = pivot
    if STRAIGHT:
        hard_pivot, _, passes = solve(a, k, frac, 0.0 * lam, invalid, n, OP, E, False, True)
        store_numbers(ends_ptr, row, m, 2, 3, hard_pivot)
    row, _, there = places(m, n, ROWS, BLOCK, passes)
    store_numbers(state_ptr, row, m, 0, 2, pivot)
    store_numbers(state_ptr, row, m, 1, 2, delta)
    hard_over = count_of(a > hard_pivot[:, None])
    rank, _, hard, seen = ranked(
        a, there, k, frac, lam, hard_pivot, hard_over, 0 * k, OP, STRAIGHT, HARD
    )
    first = number_of_hard(k, frac, hard_over, seen) if STRAIGHT else 0 * k
    T: tl.constexpr = value_ptr.dtype.element_ty
    size = _size(rank, hard, k, frac, lam, pivot, delta, T, OP, E, DEBIAS, STRAIGHT, RELAXED, HARD)
    lo, hi = ends_of(rank, size, capacity - first)
    store_numbers(ends_ptr, row, m, 0, 3, lo)
    store_numbers(ends_ptr, row, m, 1, 3, hi)
    to, given = (value_ptr, index_ptr, chosen_ptr), (k, frac, lam)
    solved = pivot, delta, hard_pivot, hard_over
    found = lo, hi, count_of(rank > hi[:, None]), first
    sums = 0 * k, 0 * k, 0.0 * lam
    if BLOCK <= _PART:
        sums = _fill(
            to, row, m, 0, x, a, there, given, solved, found, capacity, sums, OP, E, DEBIAS, STRAIGHT,
            RELAXED, HARD,
        )  # fmt: skip
    else:
        for start in range(0, n, _PART):
            sums = _fill_again(
                x_ptr, to, row, m, n, start, given, solved, found, capacity, sums, OP, E, DEBIAS,
                STRAIGHT, RELAXED, HARD, D,
            )  # fmt: skip
    dropped = tl.where(pivot == pivot, sums[2], float("nan"))
    tl.store(dropped_ptr + row, rounded(dropped, dropped_ptr.dtype.element_ty), mask=row < m)


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
    hard_pivot = tl.load(ends + 2, mask=row < m, other=0.0) if STRAIGHT else pivot
    hard_over = count_of(a > hard_pivot[:, None])
    rank, hard, _, seen = ranked(
        a, there, k, frac, lam, hard_pivot, hard_over, 0 * k, OP, STRAIGHT, HARD
    )
    first = number_of_hard(k, frac, hard_over, seen) if STRAIGHT else 0 * k
    slot = slots_of(rank, lo, hi, capacity - first, first)
    if STRAIGHT:
        slot = tl.maximum(slot, hard)
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
    _store_indices(index_ptr, row, slot, 0, capacity, BLOCK)
