# mypy: ignore-errors
"""The top-k family backward, for rows in registers: x and g are read once, dx and what is wanted of dk
and dlam written. The formulas are those of csrc/output.hpp."""

from __future__ import annotations

import triton
import triton.language as tl

from .rows import (
    arguments,
    hard_mask,
    is_block_by_rounding,
    lone,
    lone_slopes,
    places,
    read,
    relaxed_output,
    rounded,
    selected,
    settled,
    split_entries,
    state_at,
)
from .scalars import MAGNITUDE, is_cheap, is_even, largest
from .solve import any_of


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
    inv = 1.0 / lam  # one division, where one for every entry would take registers
    return tl.minimum(rho * inv[:, None], largest(rho.dtype) * 1e-6) * (g - mean[:, None])


@triton.jit
def cotangent(x, g, OP: tl.constexpr, TIMES: tl.constexpr):
    """Of the output without its sign, and not yet multiplied by x."""
    if is_even(OP):
        g = tl.where(x < 0, 0.0 - g, g)
    if TIMES:
        g = tl.where(tl.abs(x) < float("inf"), x * g, 0.0)
    return g


@triton.jit
def _of_rows(
    a, g, k, frac, lam, pivot, delta, OP: tl.constexpr, E: tl.constexpr, DEBIAS: tl.constexpr
):
    """``block_rule`` of rows in registers; the sum of g over the block, whether it is one by rounding
    alone, and how many entries are above it."""
    _, y, slope, inside, above, pinned = split_entries(a, pivot, delta, lam, OP, E)
    whole, size, taken = is_block_by_rounding(inside, above, pinned, k)
    inside, above = settled(inside, above, whole)
    left = (k - taken).to(a.dtype) + frac
    rho = tl.where(inside, slope, 0.0)
    g = tl.where(inside, g, 0.0)
    sum_g = tl.sum(g, 1)
    mass = tl.sum(tl.where(inside, y, 0.0), 1)
    rule = block_rule(
        size, left, tl.sum(rho, 1), tl.sum(rho * g, 1), sum_g, mass, pinned, lam, OP, DEBIAS
    )
    return rule, sum_g, whole, taken


@triton.jit
def _in_lam(
    a, d, g, lam, pivot, delta, whole, rule, sum_g, OP: tl.constexpr, E: tl.constexpr,
    DEBIAS: tl.constexpr,
):  # fmt: skip
    """dlam of rows with lam > 0, for what ``_of_rows`` found."""
    mean, single, _, rest, _ = rule
    t, _, slope, inside, above, _ = split_entries(a, pivot, delta, lam, OP, E)
    inside, above = settled(inside, above, whole)
    moved = block_moves(tl.where(inside, slope, 0.0), tl.where(inside, g, 0.0), mean, lam)
    moved = tl.where(single[:, None], -1.0, moved)  # for the t of an entry that is the block alone
    dlam = -tl.sum(tl.where(inside, moved * t, 0.0), 1)
    dlam *= tl.where(single, sum_g * rest, 1.0)
    if OP == MAGNITUDE and not DEBIAS:
        _, in_lam = lone_slopes(d, lam, OP, E)
        dlam += tl.sum(tl.where(selected(a, above, pivot), in_lam * g, 0.0), 1)
    return dlam


@triton.jit
def _in_x(
    a, d, g, lam, pivot, delta, whole, rule, OP: tl.constexpr, E: tl.constexpr, DEBIAS: tl.constexpr
):
    """dx of rows with lam > 0 without the sign of x, for what ``_of_rows`` found.

    dx_i = b g_i + S'(t_i)/lam (g_i - mean), with b = 1 for the debiased magnitude and else 0. An entry
    that is the block alone feels the curvature of phi alone.
    """
    B: tl.constexpr = 1.0 if OP == MAGNITUDE and DEBIAS else 0.0
    mean, single, alone, _, _ = rule
    _, _, slope, inside, above, _ = split_entries(a, pivot, delta, lam, OP, E)
    inside, above = settled(inside, above, whole)
    moved = block_moves(slope, g, mean, lam)
    dx = tl.where(inside, tl.where(single[:, None], alone[:, None] * g, B * g + moved), 0.0)
    if OP == MAGNITUDE:
        above = selected(a, above, pivot)
        if DEBIAS:
            dx = tl.where(above, g, dx)
        else:
            in_x, _ = lone_slopes(d, lam, OP, E)
            dx = tl.where(above, in_x * g, dx)
    return dx


@triton.jit
def _relaxed(
    x, a, given, k, frac, lam, state_ptr, row, m, OP: tl.constexpr, E: tl.constexpr,
    DEBIAS: tl.constexpr, TIMES: tl.constexpr, IN_LAM: tl.constexpr,
):  # fmt: skip
    """dx, dk and dlam where lam > 0, and how many entries are above the block. What every step needs of
    an entry is computed in it, unless that takes a loop."""
    AGAIN: tl.constexpr = is_cheap(OP, E)
    lam = tl.where(lam > 0, lam, 1.0)
    d = lone(a, lam, DEBIAS, OP, E)
    pivot, delta = state_at(state_ptr, row, m)
    g = cotangent(x, given, OP, TIMES)
    rule, sum_g, whole, taken = _of_rows(a, g, k, frac, lam, pivot, delta, OP, E, DEBIAS)
    dk = rule[4]
    if not is_even(OP):  # for which an infinity has no meaning
        crowd = tl.where(pivot == float("inf"), delta, 0.0)
        shared = tl.sum(tl.where((crowd > 0)[:, None] & (a == float("inf")), g, 0.0), 1)
        dk += shared / tl.maximum(crowd, 1.0)
    dlam = 0.0 * lam
    if IN_LAM:
        pivot, delta = state_at(state_ptr, row, m, AGAIN)
        dlam = _in_lam(a, d, g, lam, pivot, delta, whole, rule, sum_g, OP, E, DEBIAS)
    pivot, delta = state_at(state_ptr, row, m, AGAIN)
    dx = _in_x(a, d, g, lam, pivot, delta, whole, rule, OP, E, DEBIAS)
    if is_even(OP):
        dx = tl.where(x < 0, 0.0 - dx, dx)
    if TIMES:
        pivot, delta = state_at(state_ptr, row, m, AGAIN)
        dx += relaxed_output(a, k, frac, lam, pivot, delta, OP, E, DEBIAS) * given
    return dx, dk, dlam, taken


@triton.jit
def pulled_back(
    x, a, g, k, frac, lam, state_ptr, row, m, limit, OP: tl.constexpr, E: tl.constexpr,
    DEBIAS: tl.constexpr, TIMES: tl.constexpr, RELAXED: tl.constexpr, HARD: tl.constexpr,
    IN_LAM: tl.constexpr,
):  # fmt: skip
    """dx, dk and dlam of rows, for the cotangent g of the output, and a number that ``places`` may come
    after; |dx| is at most ``limit``."""
    hard = lam == 0
    dx = tl.zeros_like(x)
    dk = 0.0 * lam
    dlam = dk
    after = 0 * k
    # Where there may be rows of both kinds, a program that has one row does what that asks for alone.
    if RELAXED:  # noqa: SIM102  (what is known when it is compiled comes first)
        if any_of(~hard) if HARD else True:
            dx, dk, dlam, after = _relaxed(
                x, a, g, k, frac, lam, state_ptr, row, m, OP, E, DEBIAS, TIMES, IN_LAM
            )
    pivot, _ = state_at(state_ptr, row, m)
    if HARD:
        if any_of(hard):
            slope = tl.zeros_like(x)  # masks have none
            if TIMES or OP == MAGNITUDE:
                slope = hard_mask(a, pivot, k, frac)
            dx = slope * g if x.shape[0] == 1 else tl.where(hard[:, None], slope * g, dx)
        dk = tl.where(hard, 0.0, dk)
        dlam = tl.where(hard, 0.0, dlam)
    bad = pivot != pivot
    dx = tl.where(bad[:, None], float("nan"), tl.minimum(tl.maximum(dx, -limit), limit))
    dk = tl.where(bad, float("nan"), dk)
    return dx, dk, tl.where(bad, float("nan"), dlam), tl.max(after, 0)


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
    dx, dk, dlam, after = pulled_back(
        x, a, g, k, frac, lam, state_ptr, row, m, largest(dx_ptr.dtype.element_ty), OP, E, DEBIAS,
        TIMES, RELAXED, HARD, IN_LAM,
    )  # fmt: skip
    row, at, there = places(m, n, ROWS, BLOCK, after)
    tl.store(dx_ptr + at, rounded(dx, dx_ptr.dtype.element_ty), mask=there)
    if IN_K:
        tl.store(dk_ptr + row, dk, mask=row < m)
    if IN_LAM:
        tl.store(dlam_ptr + row, dlam, mask=row < m)
