# mypy: ignore-errors
"""Pool adjacent violators, a row to every lane, in float64: as csrc/pav.hpp has it.

A lane has its blocks in memory of its own, which no other lane looks at. For p = 2, where a merge has a
closed form, it walks along its row with a stack of them; for other p it merges solved runs in pairs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .scalars import MAGNITUDE, alone, epsilon, power, power_slope
from .solve import any_of

# phi by the numbers of ``_maths.isotonic.PHI_NAMES``: the identity is 0
HALF_SQUARE, ABS, EXP = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_NEWTON = tl.constexpr(12)  # steps of Newton's method from the convex side of a root
_LIMIT = tl.constexpr(1200)  # of the steps for a threshold: bisection alone would take fewer


@triton.jit
def _load(ptr, at, rows):
    return tl.load(ptr + at, mask=rows, other=0.0).to(tl.float64)


@triton.jit
def _units(distance, root):
    """In units of lam, by the root of its inverse: that is finite and has all digits for every lam."""
    return (distance * root) * root


@triton.jit
def _alone(s, w, lam, PHI: tl.constexpr, E: tl.constexpr):
    """d of an entry that shares its threshold with no other: S(d) = w phi'(s - lam d)."""
    if PHI == HALF_SQUARE:  # d^e + (lam w) d = w s
        some = w > 0
        d = alone(tl.where(some, w * s, 0.0), tl.where(some, lam * w, 1.0), MAGNITUDE, E)
    elif PHI == EXP:
        d = tl.where(w > 0, tl.exp(_log_alone(s, tl.where(w > 0, w, 1.0), lam, E)), 0.0)
    else:
        size = power(tl.abs(w), 1.0 / E)
        d = tl.where(w < 0, 0.0 - size, size)
    return d


@triton.jit
def _log_alone(s, w, lam, E: tl.constexpr):
    """z with e z + lam exp(z) = log w + s - 1, as ``_maths.scalars._exp_root`` finds it."""
    shift = tl.log(lam / E)
    h = (tl.log(w) + s - 1.0) / E + shift
    z = tl.where(h > 1.0, tl.log(tl.maximum(h, 1.0)), h)
    for _ in range(_NEWTON):
        raised = tl.exp(z)
        z -= (z + raised - h) / (1.0 + raised)
    return z - shift


@triton.jit
def _pair(order_ptr, w_order_ptr, paired_ptr, base, w_base, i, here):
    """The i-th largest entry with the i-th largest of w."""
    to = base + tl.load(order_ptr + base + i, mask=here, other=0)
    partner = tl.load(w_order_ptr + w_base + i, mask=here, other=0)
    tl.store(paired_ptr + to, partner, mask=here)


@triton.jit
def _emit(
    s_ptr, order_ptr, d_ptr, block_ptr, base, i, first, origin, delta, lam, here, PHI: tl.constexpr
):
    """d and block of the i-th largest entry, to where that is in x. Its block begins at ``first``, where
    s = origin, and has the threshold origin - lam delta."""
    s = _load(s_ptr, base + i, here)
    d = (s - origin) / lam + delta
    block = first.to(tl.int64)
    if PHI == ABS:  # thresholds below 0 are moved to 0, where entries stand alone
        below = origin - lam * delta < 0
        d = tl.where(below, s / lam, d)
        block = tl.where(below, i, block)
    to = base + tl.load(order_ptr + base + i, mask=here, other=0)
    tl.store(d_ptr + to, d.to(d_ptr.dtype.element_ty), mask=here)
    tl.store(block_ptr + to, block, mask=here)


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
    that are sorted and p = 2. A block on the stack has its first entry, and there x, delta, and the sums
    of (s_i - x)/lam and of w."""
    row = tl.program_id(0) * LANES + tl.arange(0, LANES)
    here = row < m
    base = row.to(tl.int64) * n
    w_base = row.to(tl.int64) * w_stride
    lam = tl.load(lam_ptr + row, mask=here, other=1.0).to(tl.float64)
    top = tl.zeros_like(row)
    i = 0
    while i < n:
        _pair(order_ptr, w_order_ptr, paired_ptr, base, w_base, i, here)
        s = _load(s_ptr, base + i, here)
        weight = _load(w_ptr, w_base + i, here)
        delta = _alone(s, weight, lam, PHI, 1.0)
        offset = tl.zeros_like(s)
        first = tl.zeros_like(row) + i
        active = here & (top > 0)
        while any_of(active):
            at = 4 * (base + top - 1)
            left = tl.load(first_ptr + base + top - 1, mask=active, other=0)
            origin = _load(stack_ptr, at, active)
            gap = (origin - s) / lam
            # The left threshold must be the higher one.
            merge = active & (_load(stack_ptr, at + 1, active) - delta > gap)
            size = (i + 1 - first).to(tl.float64)
            both = _load(stack_ptr, at + 2, merge) + offset - size * gap
            total = _load(stack_ptr, at + 3, merge) + weight
            pooled = _pooled(origin, (i + 1 - left).to(tl.float64), both, total, lam, PHI)
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
        first = tl.load(first_ptr + base + top - 1, mask=here, other=0)
        origin = _load(stack_ptr, 4 * (base + top - 1), here)
        delta = _load(stack_ptr, 4 * (base + top - 1) + 1, here)
        _emit(s_ptr, order_ptr, d_ptr, block_ptr, base, i, first, origin, delta, lam, here, PHI)
        top = tl.where(first == i, top - 1, top)
        i -= 1


@triton.jit
def _span(s_ptr, other_ptr, delta_ptr, total_ptr, base, start, middle, end, z, root, rows):
    """The blocks of [start, end) that a threshold at s_middle - lam z pools, where two runs meet at
    ``middle``: the first entry, the one after the last, and the sum of w."""
    pivot = _load(s_ptr, base + middle, rows)
    first = tl.load(other_ptr + base + middle - 1, mask=rows, other=0)
    after = tl.load(other_ptr + base + middle, mask=rows, other=0) + 1
    weight = _load(total_ptr, base + first, rows) + _load(total_ptr, base + middle, rows)
    active = rows & (first > start)
    while any_of(active):
        block = tl.load(other_ptr + base + first - 1, mask=active, other=0)
        gap = _units(_load(s_ptr, base + block, active) - pivot, root)
        active = active & (_load(delta_ptr, base + block, active) - gap > z)
        first = tl.where(active, block, first)
        weight += _load(total_ptr, base + block, active)
        active = active & (first > start)
    active = rows & (after < end)
    while any_of(active):
        gap = _units(_load(s_ptr, base + after, active) - pivot, root)
        active = active & (_load(delta_ptr, base + after, active) - gap < z)
        weight += _load(total_ptr, base + after, active)
        last = tl.load(other_ptr + base + after, mask=active, other=0)
        after = tl.where(active, last + 1, after)
        active = active & (after < end)
    return first, after, weight


@triton.jit
def _response(t, E: tl.constexpr):
    """S(t) and S'(t) for t >= 0, without a division where that can be."""
    if E >= 1.0:
        rest = power(t, E - 1.0)
        y = t * rest
        slope = E * rest
    else:
        y = power(t, E)
        slope = power_slope(t, y, E)
    return y, slope


@triton.jit
def _residual(
    s_ptr, base, first, after, weight, pivot, z, lam, root, rows, PHI: tl.constexpr, E: tl.constexpr
):
    """sum_i S(t_i + z) - phi'(pivot - lam z) sum_i w_i over a block, its slope in z, and the size of its
    terms."""
    mass = tl.zeros_like(z)
    slope = tl.zeros_like(z)
    size = tl.zeros_like(z)
    i = first
    active = rows & (i < after)
    while any_of(active):
        t = _units(_load(s_ptr, base + i, active) - pivot, root) + z
        y, rise = _response(tl.abs(t), E)
        mass += tl.where(active, tl.where(t < 0, 0.0 - y, y), 0.0)
        slope += tl.where(active, rise, 0.0)
        size += tl.where(active, y, 0.0)
        i += 1
        active = rows & (i < after)
    expected = weight
    if PHI == HALF_SQUARE:
        expected = weight * (pivot - lam * z)
        slope += lam * weight
    elif PHI == EXP:  # beyond the largest float only the sign matters
        expected = weight * tl.exp(tl.minimum(pivot - lam * z - 1.0, 709.7))
        slope += lam * expected
    return mass - expected, slope, size + tl.abs(expected)


@triton.jit
def _threshold(
    s_ptr, other_ptr, delta_ptr, total_ptr, base, start, middle, end, lo, hi, z, lam, root, rows,
    PHI: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """z in [lo, hi] of what two runs pool, by Newton's method kept inside the bracket: a step that
    leaves it, or four that do not halve it, give way to bisection."""
    pivot = _load(s_ptr, base + middle, rows)
    best = z
    least = tl.full(z.shape, float("inf"), tl.float64)
    width = hi - lo
    todo = rows
    step = 0
    while any_of(todo) & (step < _LIMIT):
        first, after, weight = _span(
            s_ptr, other_ptr, delta_ptr, total_ptr, base, start, middle, end, z, root, todo
        )
        value, slope, size = _residual(
            s_ptr, base, first, after, weight, pivot, z, lam, root, todo, PHI, E
        )
        lo = tl.where(todo & (value <= 0), z, lo)
        hi = tl.where(todo & (value >= 0), z, hi)
        better = todo & (tl.abs(value) < least)
        best = tl.where(better, z, best)
        least = tl.where(better, tl.abs(value), least)
        rounding = epsilon(tl.float64) * tl.abs(z)
        half = lo + (hi - lo) * 0.5
        near = (hi - lo <= 4.0 * rounding) | (half <= lo) | (half >= hi)
        todo = todo & (value == value) & ~near & (least > 4.0 * epsilon(tl.float64) * size)
        move = value / slope
        # A step too small to move z goes a little further, over the root if it is that close.
        small = tl.abs(move) <= rounding
        move = tl.where(small, tl.where(value > 0, 2.0 * rounding, -2.0 * rounding), move)
        newton = (z - move > lo) & (z - move < hi)
        if step % 4 == 3:
            newton = newton & (hi - lo <= 0.5 * width)
            width = hi - lo
        z = tl.where(todo, tl.where(newton, z - move, half), z)
        step += 1
    return best


@triton.jit
def _merge(
    s_ptr, other_ptr, delta_ptr, total_ptr, base, start, middle, end, lam, root, here, PHI: tl.constexpr,
    E: tl.constexpr,
):  # fmt: skip
    """Two solved runs become one: where the last threshold on the left is below the first on the right,
    all blocks that a common one passes become one."""
    left = tl.load(other_ptr + base + middle - 1, mask=here, other=0)
    pivot = _load(s_ptr, base + middle, here)
    lo = _load(delta_ptr, base + middle, here)
    gap = _units(_load(s_ptr, base + left, here) - pivot, root)
    hi = _load(delta_ptr, base + left, here) - gap
    rows = here & (lo < hi)
    if any_of(rows):
        after = tl.load(other_ptr + base + middle, mask=rows, other=0) + 1
        share = (middle - left).to(tl.float64) / tl.maximum(after - left, 1).to(tl.float64)
        z = _threshold(
            s_ptr, other_ptr, delta_ptr, total_ptr, base, start, middle, end, lo, hi,
            lo + share * (hi - lo), lam, root, rows, PHI, E,
        )  # fmt: skip
        first, after, weight = _span(
            s_ptr, other_ptr, delta_ptr, total_ptr, base, start, middle, end, z, root, rows
        )
        gap = _units(_load(s_ptr, base + first, rows) - pivot, root)
        tl.store(other_ptr + base + first, after - 1, mask=rows)
        tl.store(other_ptr + base + after - 1, first, mask=rows)
        tl.store(total_ptr + base + first, weight, mask=rows)
        tl.store(delta_ptr + base + first, z + gap, mask=rows)


@triton.jit(do_not_specialize=["m", "n"])
def merge_kernel(
    s_ptr, w_ptr, lam_ptr, order_ptr, w_order_ptr, other_ptr, delta_ptr, total_ptr, d_ptr, block_ptr,
    paired_ptr, m, n, w_stride, PHI: tl.constexpr, E: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The same for any p and phi. A block has its last entry, delta and the sum of w where its first
    entry is, and its first entry where the last is."""
    row = tl.program_id(0) * LANES + tl.arange(0, LANES)
    here = row < m
    base = row.to(tl.int64) * n
    w_base = row.to(tl.int64) * w_stride
    lam = tl.load(lam_ptr + row, mask=here, other=1.0).to(tl.float64)
    root = tl.rsqrt(lam)
    i = 0
    while i < n:
        _pair(order_ptr, w_order_ptr, paired_ptr, base, w_base, i, here)
        w = _load(w_ptr, w_base + i, here)
        tl.store(other_ptr + base + i, tl.zeros_like(row) + i, mask=here)
        tl.store(total_ptr + base + i, w, mask=here)
        tl.store(
            delta_ptr + base + i, _alone(_load(s_ptr, base + i, here), w, lam, PHI, E), mask=here
        )
        i += 1
    width = 1
    while width < n:
        start = 0
        while start + width < n:
            end = tl.minimum(start + 2 * width, n)
            _merge(
                s_ptr, other_ptr, delta_ptr, total_ptr, base, start, start + width, end, lam, root,
                here, PHI, E,
            )  # fmt: skip
            start += 2 * width
        width *= 2
    i = 0
    first = tl.zeros_like(row)
    after = first
    while i < n:
        first = tl.where(after == i, i, first)
        after = tl.load(other_ptr + base + first, mask=here, other=0) + 1
        origin = _load(s_ptr, base + first, here)
        delta = _load(delta_ptr, base + first, here)
        _emit(s_ptr, order_ptr, d_ptr, block_ptr, base, i, first, origin, delta, lam, here, PHI)
        i += 1
