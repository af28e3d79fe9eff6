# mypy: ignore-errors
"""Backward of rows that no program holds alone: sums over the block in a first launch, and dx in a
second. The cotangent is read where it counts, x twice."""

from __future__ import annotations

import triton
import triton.language as tl

from .backward import block_moves, block_rule, cotangent
from .long import cut_mask, found, output_of_chunk, place, report, state_of
from .rows import arguments, keys, lone, lone_slopes, rounded, selected, settled, split_entries
from .scalars import MAGNITUDE, is_even, largest
from .solve import count_of

SUMS = 12  # over the entries of a row, see sums_kernel
_SUMS = tl.constexpr(SUMS)


@triton.jit
def _at_infinity(a, pivot, delta):
    """The entries that share k."""
    return ((pivot == float("inf")) & (delta > 0))[:, None] & (a == float("inf"))


@triton.jit
def _added(values):
    return tl.sum(values.to(tl.float64), 1)


@triton.jit(do_not_specialize=["m", "chunks", "programs", "k_bits", "lam_bits"])
def sums_kernel(
    x_ptr, g_ptr, starts_ptr, k_ptr, lam_ptr, state_ptr, table_ptr, m, n, chunks, programs, k_stride,
    lam_stride, k_bits, lam_bits,
    K_TENSOR: tl.constexpr, LAM_TENSOR: tl.constexpr, OP: tl.constexpr, E: tl.constexpr,
    DEBIAS: tl.constexpr, TIMES: tl.constexpr, T: tl.constexpr, TABLE: tl.constexpr, D: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) + tl.arange(0, 1)
    _k, _frac, lam, _valid = arguments(
        k_ptr, lam_ptr, k_stride, lam_stride, k_bits, lam_bits, row, m, n, K_TENSOR, LAM_TENSOR, D
    )
    pivot, delta, _cut = state_of(state_ptr, row, D)
    used = tl.where(lam > 0, lam, 1.0)
    zero = tl.zeros([1], tl.float64)
    size, taken, total, of_g, sum_g, mass = zero, zero, zero, zero, zero, zero
    moved_t, moved_gt, only_t, of_lone, if_lone, shared = zero, zero, zero, zero, zero, zero
    none = 0.0 * used
    for chunk in range(tl.program_id(0), chunks, programs):
        pointers, _, there = place(x_ptr, starts_ptr, row, chunk, n, T, TABLE, CHUNK)
        x = tl.load(pointers, mask=there, other=0.0).to(D)
        a = keys(x, there, OP)
        d = lone(a, lam, DEBIAS, OP, E)
        t, y, slope, inside, above, _ = split_entries(a, pivot, delta, lam, OP, E)
        crowd = _at_infinity(a, pivot, delta)
        counts = inside | crowd
        if OP == MAGNITUDE and not DEBIAS:
            counts = counts | selected(a, above, pivot)
        of, _, _ = place(g_ptr, starts_ptr, row, chunk, n, T, TABLE, CHUNK)
        g = cotangent(x, tl.load(of, mask=there & counts, other=0.0).to(D), OP, TIMES)
        rho = tl.where(inside, slope, 0.0)
        inner = tl.where(inside, g, 0.0)
        at = tl.where(inside, t, 0.0)
        size += count_of(inside).to(tl.float64)
        taken += count_of(above).to(tl.float64)
        total += tl.sum(rho, 1).to(tl.float64)
        of_g += _added(rho * inner)
        sum_g += _added(inner)
        mass += tl.sum(tl.where(inside, y, 0.0), 1).to(tl.float64)
        # What a move of the mean, and of g, does to dlam.
        moved_t += _added(block_moves(rho, tl.full(at.shape, 1.0, D), none, used) * at)
        moved_gt += _added(block_moves(rho, inner, none, used) * at)
        only_t += tl.sum(at, 1).to(tl.float64)
        shared += tl.sum(tl.where(crowd, g, 0.0), 1).to(tl.float64)
        if OP == MAGNITUDE and not DEBIAS:
            lone_g = lone_slopes(d, used, OP, E)[1] * g
            of_lone += _added(tl.where(selected(a, above, pivot), lone_g, 0.0))
            if_lone += _added(tl.where(inside, lone_g, 0.0))
    report(table_ptr, row, 0, programs, size, _SUMS)
    report(table_ptr, row, 1, programs, taken, _SUMS)
    report(table_ptr, row, 2, programs, total, _SUMS)
    report(table_ptr, row, 3, programs, of_g, _SUMS)
    report(table_ptr, row, 4, programs, sum_g, _SUMS)
    report(table_ptr, row, 5, programs, mass, _SUMS)
    report(table_ptr, row, 6, programs, moved_t, _SUMS)
    report(table_ptr, row, 7, programs, moved_gt, _SUMS)
    report(table_ptr, row, 8, programs, only_t, _SUMS)
    report(table_ptr, row, 9, programs, of_lone, _SUMS)
    report(table_ptr, row, 10, programs, shared, _SUMS)
    report(table_ptr, row, 11, programs, if_lone, _SUMS)


@triton.jit
def _of_row(
    table_ptr, row, programs, k, frac, lam, pivot, delta, OP: tl.constexpr, DEBIAS: tl.constexpr,
    G: tl.constexpr,
):  # fmt: skip
    """What all entries of the block share, whether it is one by rounding alone, and dk and dlam, from
    the sums: in float64."""
    size = found(table_ptr, row, 0, programs, _SUMS, G)
    left = k.to(tl.float64) - found(table_ptr, row, 1, programs, _SUMS, G)
    sum_g = found(table_ptr, row, 4, programs, _SUMS, G)
    pinned = (pivot == 0) & is_even(OP)
    whole = (left >= size) & ~pinned
    left += frac.to(tl.float64)
    mean, single, alone, rest, dk = block_rule(
        size, left, found(table_ptr, row, 2, programs, _SUMS, G),
        found(table_ptr, row, 3, programs, _SUMS, G), sum_g,
        found(table_ptr, row, 5, programs, _SUMS, G), pinned, lam.to(tl.float64), OP, DEBIAS,
    )  # fmt: skip
    moved_t = found(table_ptr, row, 6, programs, _SUMS, G)
    dlam = mean * moved_t - found(table_ptr, row, 7, programs, _SUMS, G)
    only = found(table_ptr, row, 8, programs, _SUMS, G)
    dlam = tl.where(single, sum_g * only * rest, dlam)
    dlam = tl.where(whole, found(table_ptr, row, 11, programs, _SUMS, G), dlam)
    dlam += found(table_ptr, row, 9, programs, _SUMS, G)
    crowd = tl.where(pivot == float("inf"), delta, 0.0).to(tl.float64)
    dk += found(table_ptr, row, 10, programs, _SUMS, G) / tl.maximum(crowd, 1.0)
    return mean, single, alone, whole, dk, dlam


@triton.jit
def _parts(
    a, index, frac, lam, pivot, delta, cut, whole, OP: tl.constexpr, E: tl.constexpr,
    DEBIAS: tl.constexpr, RELAXED: tl.constexpr, HARD: tl.constexpr,
):  # fmt: skip
    """``lone``, S' and which entries are in the block and selected whole; the hard mask; and where the
    cotangent counts."""
    d, slope, mask = a, a, a
    inside = a != a
    above, counts = inside, inside
    if RELAXED:
        d = lone(a, lam, DEBIAS, OP, E)
        _, _, slope, inside, above, _ = split_entries(a, pivot, delta, lam, OP, E)
        inside, above = settled(inside, above, whole)
        counts = inside
        if OP == MAGNITUDE:
            above = selected(a, above, pivot)
            counts = counts | above
    if HARD:
        mask = cut_mask(a, index, pivot, cut, frac)
        if OP == MAGNITUDE:
            counts = counts | ((lam == 0)[:, None] & (mask > 0))
    return d, slope, inside, above, mask, counts


@triton.jit
def _moved(
    g, d, slope, inside, above, mean, single, alone, lam, OP: tl.constexpr, E: tl.constexpr,
    DEBIAS: tl.constexpr,
):  # fmt: skip
    """dx of the entries of the block and, for magnitudes, of those that are selected whole."""
    B: tl.constexpr = 1.0 if OP == MAGNITUDE and DEBIAS else 0.0
    moved = block_moves(tl.where(inside, slope, 0.0), g, mean, lam)
    in_block = tl.where(single[:, None], alone[:, None] * g, B * g + moved)
    dx = tl.where(inside, in_block, 0.0)
    if OP == MAGNITUDE:
        if DEBIAS:
            dx = tl.where(above, g, dx)
        else:
            in_x, _ = lone_slopes(d, lam, OP, E)
            dx = tl.where(above, in_x * g, dx)
    return dx


@triton.jit(do_not_specialize=["m", "chunks", "programs", "k_bits", "lam_bits"])
def spread_kernel(
    x_ptr, g_ptr, starts_ptr, k_ptr, lam_ptr, state_ptr, table_ptr, dx_ptr, dk_ptr, dlam_ptr, m, n,
    chunks, programs, k_stride, lam_stride, k_bits, lam_bits,
    K_TENSOR: tl.constexpr, LAM_TENSOR: tl.constexpr, OP: tl.constexpr, E: tl.constexpr,
    DEBIAS: tl.constexpr, TIMES: tl.constexpr, RELAXED: tl.constexpr, HARD: tl.constexpr,
    IN_K: tl.constexpr, IN_LAM: tl.constexpr, T: tl.constexpr, TABLE: tl.constexpr, D: tl.constexpr,
    G: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) + tl.arange(0, 1)
    k, frac, lam, _valid = arguments(
        k_ptr, lam_ptr, k_stride, lam_stride, k_bits, lam_bits, row, m, n, K_TENSOR, LAM_TENSOR, D
    )
    pivot, delta, cut = state_of(state_ptr, row, D)
    bad = pivot != pivot
    hard = lam == 0
    used = tl.where(hard, 1.0, lam)
    if RELAXED:
        mean, single, alone, whole, dk, dlam = _of_row(
            table_ptr, row, programs, k, frac, used, pivot, delta, OP, DEBIAS, G
        )
        mean = mean.to(D)
        alone = alone.to(D)
    else:
        whole = hard
        dk, dlam = 0.0 * lam, 0.0 * lam
    limit = largest(T)
    for chunk in range(tl.program_id(0), chunks, programs):
        pointers, index, there = place(x_ptr, starts_ptr, row, chunk, n, T, TABLE, CHUNK)
        x = tl.load(pointers, mask=there, other=0.0).to(D)
        a = keys(x, there, OP)
        d, slope, inside, above, mask, counts = _parts(
            a, index, frac, lam, pivot, delta, cut, whole, OP, E, DEBIAS, RELAXED, HARD
        )
        if TIMES:
            y = output_of_chunk(
                a, index, k, frac, lam, pivot, delta, cut, OP, E, DEBIAS, RELAXED, HARD
            )
            counts = counts | (y != 0)
        of, _, _ = place(g_ptr, starts_ptr, row, chunk, n, T, TABLE, CHUNK)
        given = tl.load(of, mask=there & counts, other=0.0).to(D)
        g = cotangent(x, given, OP, TIMES)
        dx = tl.zeros_like(x)
        if RELAXED:
            dx = _moved(g, d, slope, inside, above, mean, single, alone, used, OP, E, DEBIAS)
        if HARD:
            of_hard = mask * g if OP == MAGNITUDE else tl.zeros_like(x)
            dx = tl.where(hard[:, None], of_hard, dx)
        if is_even(OP):
            dx = tl.where(x < 0, 0.0 - dx, dx)
        if TIMES:
            dx += y * given
        dx = tl.where(bad[:, None], float("nan"), tl.minimum(tl.maximum(dx, -limit), limit))
        to, _, _ = place(dx_ptr, starts_ptr, row, chunk, n, T, TABLE, CHUNK)
        tl.store(to, rounded(dx, T), mask=there)
    if tl.program_id(0) == 0:
        unless = tl.where(bad, float("nan"), 0.0)
        if IN_K:
            tl.store(dk_ptr + row, tl.where(hard | bad, unless, dk).to(D))
        if IN_LAM:
            tl.store(dlam_ptr + row, tl.where(hard | bad, unless, dlam).to(D))
