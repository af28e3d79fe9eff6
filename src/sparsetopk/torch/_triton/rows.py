# mypy: ignore-errors
"""Rows in registers: how they, k and lam are read, and what becomes of every entry given the state."""

from __future__ import annotations

import triton
import triton.language as tl

from .scalars import (
    MAGNITUDE,
    SIGN,
    alone,
    epsilon,
    is_even,
    largest,
    power_slope,
    respond,
    tiny,
    zero_of,
)
from .solve import any_of, count_of


@triton.jit
def places(m, n, ROWS: tl.constexpr, BLOCK: tl.constexpr, after=0):
    """The rows of this program, where its entries are, and which of them there are.

    ``after`` is a number below 2^20 that is known only then: so places are computed again, where they
    would be held in registers all the way from where they were first. Short rows have room for them.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if ROWS == 1:
        row += after >> 20
    col = tl.arange(0, BLOCK)
    at = row.to(tl.int64)[:, None] * n + col[None, :]
    return row, at, (row < m)[:, None] & (col < n)[None, :]


@triton.jit
def arguments(
    k_ptr, lam_ptr, k_stride, lam_stride, k_bits, lam_bits, row, m, n, K_TENSOR: tl.constexpr,
    LAM_TENSOR: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """k in two parts and lam of rows, and whether they are valid. After the last row k is 0."""
    k, frac, k_valid = split(number(k_ptr, k_bits, k_stride, row, m, K_TENSOR), n, D)
    lam, lam_valid = in_range(number(lam_ptr, lam_bits, lam_stride, row, m, LAM_TENSOR), D)
    return (
        tl.where(row < m, k, 0), tl.where(row < m, frac, 0.0), lam,
        (k_valid & lam_valid) | (row >= m),
    )  # fmt: skip


@triton.jit
def state_at(state_ptr, row, m, AGAIN: tl.constexpr = False):
    """pivot and delta of the rows, as the forward left them. AGAIN: a compiler must not know that they
    are what they were, so that what follows from them is computed again, and not held in registers."""
    at = state_ptr + 2 * row.to(tl.int64)
    pivot = tl.load(at, mask=row < m, other=float("inf"), volatile=AGAIN)
    delta = tl.load(at + 1, mask=row < m, other=0.0)
    return pivot, delta


@triton.jit
def store_numbers(ptr, row, m, i: tl.constexpr, OF: tl.constexpr, number):
    """The i-th of so many numbers of every row."""
    tl.store(ptr + OF * row.to(tl.int64) + i, number, mask=row < m)


@triton.jit
def keys(x, there, OP: tl.constexpr):
    """x or |x|, and -inf where there is nothing."""
    a = tl.abs(x) if is_even(OP) else x
    return tl.where(there, a, float("-inf"))


@triton.jit
def read(x_ptr, at, there, OP: tl.constexpr, D: tl.constexpr):
    """x, and x or |x|, which is no second tile in registers: what is not there is not told apart later,
    but is -inf at once, or NaN for |x|, which no comparison holds for."""
    x = tl.load(x_ptr + at, mask=there, other=float("nan") if is_even(OP) else float("-inf")).to(D)
    return x, tl.abs(x) if is_even(OP) else x


@triton.jit
def has_bad_entry(x, there, OP: tl.constexpr):
    """Rows with a NaN, or with an infinity that has no meaning."""
    bad = x != x
    if is_even(OP):
        bad = bad | (tl.abs(x) == float("inf"))
    return count_of(bad & there) > 0


@triton.jit
def number(ptr, bits, stride, row, m, TENSOR: tl.constexpr):
    """k or lam of the rows: from a tensor, or from the bits of a float64 that all rows share."""
    if TENSOR:
        value = tl.load(ptr + row.to(tl.int64) * stride, mask=row < m, other=0)
        value = value.to(tl.float64) if ptr.dtype.element_ty.is_int() else value
        value = value if value.dtype == tl.float64 else value.to(tl.float32)
    else:
        value = bits.to(tl.int64).to(tl.float64, bitcast=True) + tl.zeros_like(row).to(tl.float64)
    return value


@triton.jit
def split(k, n, D: tl.constexpr):
    """floor(k), the rest, and whether k is in [0, n]."""
    valid = (k >= 0) & (k <= n)
    k = tl.where(valid, k, 0.0)
    floor = tl.floor(k)
    return floor.to(tl.int32), (k - floor).to(D), valid


@triton.jit
def in_range(lam, D: tl.constexpr):
    """lam as a number whose inverse is finite, 0 if it is 0, and whether it is valid."""
    valid = (lam >= 0) & (lam < float("inf"))
    used = tl.minimum(tl.maximum(lam, tiny(D)), largest(D)).to(D)
    return tl.where(valid & (lam > 0), used, 0.0), valid


@triton.jit
def split_entries(a, pivot, delta, lam, OP: tl.constexpr, E: tl.constexpr):
    """t, S(t) and S'(t); which entries are in the block, and which above it; rows held at 0.

    For rows with a threshold, and lam > 0; elsewhere nothing is in the block or above.
    """
    ZERO: tl.constexpr = zero_of(OP)
    limit = largest(a.dtype)
    soft = (pivot >= -limit) & (pivot <= limit) & (lam > 0)
    lam = tl.where(soft, lam, 1.0)
    pivot = tl.where(soft, pivot, 0.0)
    delta = tl.where(soft, delta, 0.0)
    inv = 1.0 / lam
    t = (a - pivot[:, None]) * inv[:, None] + delta[:, None]
    y, slope = respond(t, OP, E)
    if OP == MAGNITUDE:
        # v may be tiny beside the pivot, and is then lost in rounding: what is over it by no more than
        # that stays in the block, which so is never left without a share of k.
        rounding = 16.0 * epsilon(a.dtype)
        level = tl.maximum(pivot - lam * delta, 0.0) * (1.0 + rounding * (E if E > 1.0 else 1.0))
        level += rounding * (tl.abs(pivot) + lam * tl.abs(delta))
        reached = y >= level[:, None]
    else:
        reached = t >= 1.0
    starts = soft[:, None] & (t > ZERO)
    above = starts & reached
    pinned = soft & False
    inside = starts & ~reached
    if OP == SIGN:
        pinned = soft & (pivot == 0)
        inside = inside | (pinned[:, None] & (a >= 0) & ~above)
    return t, y, slope, inside, above, pinned


@triton.jit
def is_block_by_rounding(inside, above, pinned, k):
    """Rows that have as much of k left as there are entries in the block, which so are whole; how many
    entries the block has, and how many are above it, as ``settled`` leaves them."""
    both = tl.sum(tl.where(inside, 1, tl.where(above, 65536, 0)), 1)  # two counts in one sum
    size, taken = both & 65535, both >> 16
    whole = (k - taken >= size) & ~pinned
    return whole, tl.where(whole, 0, size), tl.where(whole, taken + size, taken)


@triton.jit
def settled(inside, above, whole):
    """The entries of the block, and those above it, of which the whole ones are."""
    return inside & ~whole[:, None], above | (inside & whole[:, None])


@triton.jit
def selected(a, above, pivot):
    """The entries that are selected whole: also where every candidate is."""
    return above | ((pivot == float("-inf"))[:, None] & (a > float("-inf")))


@triton.jit
def hard_mask(a, pivot, k, frac):
    """1 above the pivot; what is left goes to the entries equal to it, the lowest index first."""
    over = a > pivot[:, None]
    tied = (a == pivot[:, None]) & (a > float("-inf"))
    before = tl.cumsum(tied.to(tl.int32), 1) - tied.to(tl.int32)
    share = (k - count_of(over))[:, None] - before
    share = tl.minimum(tl.maximum(share.to(a.dtype) + frac[:, None], 0.0), 1.0)
    return tl.where(over, 1.0, tl.where(tied, share, 0.0))


@triton.jit
def lone(a, lam, DEBIAS: tl.constexpr, OP: tl.constexpr, E: tl.constexpr):
    """The t of every entry if it is selected whole, for magnitudes that are not debiased; else nothing.

    It may take a loop, and comes first: what is held in registers during a loop adds up.
    """
    d = a
    if OP == MAGNITUDE and not DEBIAS:
        d = alone(a, tl.where(lam > 0, lam, 1.0)[:, None], OP, E)
    return d


@triton.jit
def whole_output(a, d, DEBIAS: tl.constexpr, OP: tl.constexpr, E: tl.constexpr):
    """What an entry that is selected whole becomes, for lam > 0 and d = ``lone``."""
    if OP == MAGNITUDE:
        y = a
        if not DEBIAS:
            y, _ = respond(d, OP, E)
            y = tl.minimum(y, tl.maximum(a, 0.0))
    else:
        y = tl.full(a.shape, 1.0, a.dtype)
    return y


@triton.jit
def relaxed_output(
    a, k, frac, lam, pivot, delta, OP: tl.constexpr, E: tl.constexpr, DEBIAS: tl.constexpr
):
    """The output without its sign, where lam > 0."""
    d = lone(a, lam, DEBIAS, OP, E)
    t, inner, _, inside, above, _ = split_entries(a, pivot, delta, lam, OP, E)
    if OP == MAGNITUDE and DEBIAS:
        inner = tl.minimum(inner + lam[:, None] * t, a)  # S(t) <= v but for rounding
    above = selected(a, above, pivot)
    y = tl.where(above, whole_output(a, d, DEBIAS, OP, E), tl.where(inside, inner, 0.0))
    if not is_even(OP):  # for which an infinity has no meaning
        crowd = tl.where(pivot == float("inf"), delta, 0.0)
        shared = (k.to(a.dtype) + frac) / tl.maximum(crowd, 1.0)
        y = tl.where((crowd > 0)[:, None] & (a == float("inf")), shared[:, None], y)
    return y


@triton.jit
def output(
    a, k, frac, lam, pivot, delta, OP: tl.constexpr, E: tl.constexpr, DEBIAS: tl.constexpr,
    RELAXED: tl.constexpr, HARD: tl.constexpr,
):  # fmt: skip
    """The output without its sign."""
    y = tl.zeros_like(a)
    if RELAXED:
        y = relaxed_output(a, k, frac, lam, pivot, delta, OP, E, DEBIAS)
    if HARD:
        hard = lam == 0
        if any_of(hard):
            mask = hard_mask(a, pivot, k, frac)
            if OP == MAGNITUDE:
                mask = tl.where(mask > 0, a * mask, 0.0)
            # Of one row y is not held beside its mask.
            y = mask if a.shape[0] == 1 else tl.where(hard[:, None], mask, y)
    return tl.where((pivot != pivot)[:, None], float("nan"), y)


@triton.jit
def rounded(y, T: tl.constexpr):
    """In the dtype of what is stored; from float64 to 16 bits in two steps, as the interpreter knows
    no other."""
    if y.dtype == tl.float64 and tl.float64 != T:
        y = y.to(tl.float32)
    return y.to(T)


@triton.jit
def finish(y, x, OP: tl.constexpr, TIMES: tl.constexpr):
    """The output with its sign, or times x."""
    if is_even(OP):
        y = tl.where(x < 0, 0.0 - y, y)
    if TIMES:
        y = tl.where(y != 0, x * y, 0.0) + 0.0  # 0 and not -0
    return y


@triton.jit
def lone_slopes(d, lam, OP: tl.constexpr, E: tl.constexpr):
    """Derivatives in x and lam of a magnitude that is selected whole and not debiased, d = ``lone``."""
    y, _ = respond(d, OP, E)
    slope = power_slope(d, y, E)
    in_x = slope / (slope + lam[:, None])
    return in_x, -d * in_x
