# mypy: ignore-errors
"""The top-k family backward, for rows in registers: x and g are read once, dx and what is wanted of dk
and dlam written. The formulas are those of csrc/output.hpp."""

from __future__ import annotations

import triton
import triton.language as tl

from .rows import (
    arguments,
    hard_mask,
    lone,
    lone_slopes,
    output,
    places,
    read,
    rounded,
    settled,
    split_entries,
    state_at,
)
from .scalars import MAGNITUDE, is_even, largest


@triton.jit
def block_rule(
    size, left, total, of_g, sum_g, mass, pinned, lam, OP: tl.constexpr, DEBIAS: tl.constexpr
):
    """From sums over the block, of S', S' g, g and S: the mean that its cotangents lose, whether it is a
    single entry, the slope of that alone, what it leaves of b, and dk."""
    B: tl.constexpr = 1.0 if OP == MAGNITUDE and DEBIAS else 0.0
    curvature = 0.0 * left
    prime = 1.0 + curvature
    moves = ~pinned
    if OP == MAGNITUDE:
        # A block that nothing is left for is one by rounding alone, and v does not move with it.
        moves = left > 0
        curvature = tl.where(moves, left, 0.0)
        of_g += lam * B * sum_g
        # sum_i S(t_i) = v left is precise also where v is tiny
        prime = mass / tl.where(moves, left, 1.0)
    steep = total + lam * curvature
    steep_or_1 = tl.where((steep > 0) & moves, steep, 1.0)
    mean = tl.where((steep > 0) & moves, of_g, 0.0) / steep_or_1
    single = (size == 1) & moves
    alone = tl.where(steep > 0, curvature * ((total + lam * B) / steep_or_1), 0.0)
    rest = 0.0 - alone  # b - alone, of which a large lam would leave no digits
    if B == 1.0:
        rest = total * (1.0 - curvature) / steep_or_1
    dk = tl.where((left > 0) & (left < size.to(left.dtype)), prime * mean, 0.0)
    return mean, single, alone, rest, dk


@triton.jit
def block_moves(rho, g, mean, lam):
    """How the block moves: S'(t)/lam (g - mean), finite."""
    return tl.minimum(rho / lam[:, None], largest(rho.dtype) * 1e-6) * (g - mean[:, None])


@triton.jit
def _of_block(
    t, y, slope, g, inside, size, left, pinned, lam, OP: tl.constexpr, DEBIAS: tl.constexpr
):
    """What the block gives: dx of its entries, dk and dlam of the row.

    dx_i = b g_i + S'(t_i)/lam (g_i - mean), with b = 1 for the debiased magnitude and else 0. An entry
    that is the block alone feels the curvature of phi alone.
    """
    B: tl.constexpr = 1.0 if OP == MAGNITUDE and DEBIAS else 0.0
    rho = tl.where(inside, slope, 0.0)
    g = tl.where(inside, g, 0.0)
    total = tl.sum(rho, 1)
    of_g = tl.sum(rho * g, 1)
    sum_g = tl.sum(g, 1)
    mass = tl.sum(tl.where(inside, y, 0.0), 1)
    mean, single, alone, rest, dk = block_rule(
        size, left, total, of_g, sum_g, mass, pinned, lam, OP, DEBIAS
    )
    moved = block_moves(rho, g, mean, lam)
    dlam = -tl.sum(tl.where(inside, moved * t, 0.0), 1)
    dx = tl.where(single[:, None], alone[:, None] * g, B * g + moved)
    only_t = tl.sum(tl.where(inside & single[:, None], t, 0.0), 1)
    dlam = tl.where(single, sum_g * only_t * rest, dlam)
    return dx, dk, dlam


@triton.jit
def _relaxed(
    a, g, k, frac, lam, pivot, delta, OP: tl.constexpr, E: tl.constexpr, DEBIAS: tl.constexpr
):
    """dx without the sign of x, dk and dlam where lam > 0; how many entries are in the block."""
    d = lone(a, lam, DEBIAS, OP, E)
    t, y, slope, inside, above, pinned = split_entries(a, pivot, delta, lam, OP, E)
    inside, above, size, taken = settled(inside, above, pinned, k)
    lam = tl.where(lam > 0, lam, 1.0)
    left = (k - taken).to(a.dtype) + frac
    in_block, dk, dlam = _of_block(t, y, slope, g, inside, size, left, pinned, lam, OP, DEBIAS)
    dx = tl.where(inside, in_block, 0.0)
    if OP == MAGNITUDE:
        above = above | ((pivot == float("-inf"))[:, None] & (a > float("-inf")))
        if DEBIAS:
            dx = tl.where(above, g, dx)
        else:
            in_x, in_lam = lone_slopes(d, lam, OP, E)
            dx = tl.where(above, in_x * g, dx)
            dlam += tl.sum(tl.where(above, in_lam * g, 0.0), 1)
    crowd = tl.where(pivot == float("inf"), delta, 0.0)
    shared = tl.sum(tl.where((crowd > 0)[:, None] & (a == float("inf")), g, 0.0), 1)
    return dx, dk + shared / tl.maximum(crowd, 1.0), dlam, size


@triton.jit
def cotangent(x, g, OP: tl.constexpr, TIMES: tl.constexpr):
    """Of the output without its sign, and not yet multiplied by x."""
    if is_even(OP):
        g = tl.where(x < 0, 0.0 - g, g)
    if TIMES:
        g = tl.where(tl.abs(x) < float("inf"), x * g, 0.0)
    return g


@triton.jit
def pulled_back(
    x, a, g, k, frac, lam, pivot, delta, limit, OP: tl.constexpr, E: tl.constexpr,
    DEBIAS: tl.constexpr, TIMES: tl.constexpr, RELAXED: tl.constexpr, HARD: tl.constexpr,
):  # fmt: skip
    """dx, dk and dlam of rows, for the cotangent g of the output, and a number that ``places`` may come
    after; |dx| is at most ``limit``."""
    of_y = cotangent(x, g, OP, TIMES)
    hard = lam == 0
    if HARD and OP == MAGNITUDE:  # before all else, so that the mask is not held in registers
        of_y *= tl.where(hard[:, None], hard_mask(a, pivot, k, frac), 1.0)
    dx = tl.zeros_like(x)
    dk = 0.0 * lam
    dlam = dk
    size = 0 * k
    if RELAXED:
        dx, dk, dlam, size = _relaxed(a, of_y, k, frac, lam, pivot, delta, OP, E, DEBIAS)
    if HARD:
        dx = tl.where(hard[:, None], of_y if OP == MAGNITUDE else tl.zeros_like(x), dx)
        dk = tl.where(hard, 0.0, dk)
        dlam = tl.where(hard, 0.0, dlam)
    if is_even(OP):
        dx = tl.where(x < 0, 0.0 - dx, dx)
    if TIMES:
        dx += output(a, k, frac, lam, pivot, delta, OP, E, DEBIAS, RELAXED, HARD) * g
    bad = pivot != pivot
    dx = tl.where(bad[:, None], float("nan"), tl.minimum(tl.maximum(dx, -limit), limit))
    dk = tl.where(bad, float("nan"), dk)
    return dx, dk, tl.where(bad, float("nan"), dlam), tl.max(size, 0)


@triton.jit(do_not_specialize=["m", "k_bits", "lam_bits"])
def backward_kernel(
    x_ptr, g_ptr, k_ptr, lam_ptr, state_ptr, dx_ptr, dk_ptr, dlam_ptr, m, n, k_stride, lam_stride,
    k_bits, lam_bits,
    K_TENSOR: tl.constexpr, LAM_TENSOR: tl.constexpr, OP: tl.constexpr, E: tl.constexpr,
    DEBIAS: tl.constexpr, TIMES: tl.constexpr, RELAXED: tl.constexpr, HARD: tl.constexpr,
    IN_K: tl.constexpr, IN_LAM: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, at, there = places(m, n, ROWS, BLOCK)
    x, a = read(x_ptr, at, there, OP, D)
    g = tl.load(g_ptr + at, mask=there, other=0.0).to(D)
    k, frac, lam, _valid = arguments(
        k_ptr, lam_ptr, k_stride, lam_stride, k_bits, lam_bits, row, m, n, K_TENSOR, LAM_TENSOR, D
    )
    pivot, delta = state_at(state_ptr, row, m)
    dx, dk, dlam, size = pulled_back(
        x, a, g, k, frac, lam, pivot, delta, largest(dx_ptr.dtype.element_ty), OP, E, DEBIAS, TIMES,
        RELAXED, HARD,
    )  # fmt: skip
    row, at, there = places(m, n, ROWS, BLOCK, size)
    tl.store(dx_ptr + at, rounded(dx, dx_ptr.dtype.element_ty), mask=there)
    if IN_K:
        tl.store(dk_ptr + row, dk, mask=row < m)
    if IN_LAM:
        tl.store(dlam_ptr + row, dlam, mask=row < m)
