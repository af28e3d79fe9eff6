# mypy: ignore-errors
"""Pool adjacent violators for p = 2, a row to every lane: as ``solve_stack`` of csrc/pav.hpp has it, in
float64.

A lane walks along its row with a stack of blocks in memory of its own, which no other lane looks at.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .solve import any_of

# phi by the numbers of ``_maths.isotonic.PHI_NAMES``: the identity is 0
HALF_SQUARE, ABS = tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _alone(s, w, lam, PHI: tl.constexpr):
    """d of an entry that shares its threshold with no other: d = w phi'(s - lam d)."""
    return w * s / (1.0 + lam * w) if PHI == HALF_SQUARE else w


@triton.jit
def _pooled(s, size, offset, weight, lam, PHI: tl.constexpr):
    """d of the first entry s of a block, from the sums of (s_i - s)/lam and of w over it."""
    curved = PHI == HALF_SQUARE
    return (s * weight - offset) / (size + lam * weight) if curved else (weight - offset) / size


@triton.jit(do_not_specialize=["m", "n"])
def pav_kernel(
    s_ptr, w_ptr, lam_ptr, order_ptr, w_order_ptr, first_ptr, stack_ptr, d_ptr, block_ptr, paired_ptr,
    m, n, w_stride, PHI: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """d, the first entry of the block and the partner in w of every entry, in the order of x, for rows
    that are sorted. A block on the stack has its first entry, and there x, delta, and the sums of
    (s_i - x)/lam and of w."""
    row = tl.program_id(0) * LANES + tl.arange(0, LANES)
    here = row < m
    base = row.to(tl.int64) * n
    lam = tl.load(lam_ptr + row, mask=here, other=1.0).to(tl.float64)
    top = tl.zeros_like(row)
    i = 0
    while i < n:
        s = tl.load(s_ptr + base + i, mask=here, other=0.0).to(tl.float64)
        weight = tl.load(w_ptr + row.to(tl.int64) * w_stride + i, mask=here, other=0.0).to(
            tl.float64
        )
        delta = _alone(s, weight, lam, PHI)
        offset = tl.zeros_like(s)
        first = tl.zeros_like(row) + i
        active = here & (top > 0)
        while any_of(active):
            at = stack_ptr + 4 * (base + top - 1)
            left = tl.load(first_ptr + base + top - 1, mask=active, other=0)
            origin = tl.load(at, mask=active, other=0.0)
            left_delta = tl.load(at + 1, mask=active, other=0.0)
            gap = (origin - s) / lam
            merge = active & (left_delta - delta > gap)  # the left threshold must be the higher one
            size = (i + 1 - first).to(tl.float64)
            both = tl.load(at + 2, mask=merge, other=0.0) + offset - size * gap
            total = tl.load(at + 3, mask=merge, other=0.0) + weight
            whole = (i + 1 - left).to(tl.float64)
            pooled = _pooled(origin, whole, both, total, lam, PHI)
            offset = tl.where(merge, both, offset)
            weight = tl.where(merge, total, weight)
            delta = tl.where(merge, pooled, delta)
            s = tl.where(merge, origin, s)
            first = tl.where(merge, left, first)
            top = tl.where(merge, top - 1, top)
            active = merge & (top > 0)
        at = stack_ptr + 4 * (base + top)
        tl.store(first_ptr + base + top, first, mask=here)
        tl.store(at, s, mask=here)
        tl.store(at + 1, delta, mask=here)
        tl.store(at + 2, offset, mask=here)
        tl.store(at + 3, weight, mask=here)
        top += 1
        i += 1
    i = n - 1
    while i >= 0:  # from the last entry, along the stack
        at = stack_ptr + 4 * (base + top - 1)
        first = tl.load(first_ptr + base + top - 1, mask=here, other=0)
        origin = tl.load(at, mask=here, other=0.0)
        delta = tl.load(at + 1, mask=here, other=0.0)
        s = tl.load(s_ptr + base + i, mask=here, other=0.0).to(tl.float64)
        d = (s - origin) / lam + delta
        block = first.to(tl.int64)
        if PHI == ABS:  # thresholds below 0 are moved to 0, where entries stand alone
            below = origin - lam * delta < 0
            d = tl.where(below, s / lam, d)
            block = tl.where(below, i, block)
        to = base + tl.load(order_ptr + base + i, mask=here, other=0)
        partner = tl.load(w_order_ptr + row.to(tl.int64) * w_stride + i, mask=here, other=0)
        tl.store(d_ptr + to, d.to(d_ptr.dtype.element_ty), mask=here)
        tl.store(block_ptr + to, block, mask=here)
        tl.store(paired_ptr + to, partner, mask=here)
        top = tl.where(first == i, top - 1, top)
        i -= 1
