# mypy: ignore-errors
"""The top-k family forward, for rows in registers: x is read once, y and two numbers a row written."""

from __future__ import annotations

import triton
import triton.language as tl

from .rows import finish, has_bad_entry, in_range, keys, number, output, places, rounded, split
from .solve import solve


@triton.jit(do_not_specialize=["m", "k_bits", "lam_bits"])
def forward_kernel(
    x_ptr, k_ptr, lam_ptr, y_ptr, state_ptr, passes_ptr, m, n, k_stride, lam_stride, k_bits, lam_bits,
    K_TENSOR: tl.constexpr, LAM_TENSOR: tl.constexpr, OP: tl.constexpr, E: tl.constexpr,
    DEBIAS: tl.constexpr, TIMES: tl.constexpr, RELAXED: tl.constexpr, HARD: tl.constexpr,
    WRITE: tl.constexpr, COUNT: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS rows of at most BLOCK entries, computed in the dtype D. TIMES multiplies a mask by x. WRITE
    and COUNT say whether y and the number of passes are wanted besides the state."""
    row, at, there = places(m, n, ROWS, BLOCK)
    x = tl.load(x_ptr + at, mask=there, other=0.0).to(D)
    k, frac, k_valid = split(number(k_ptr, k_bits, k_stride, row, m, K_TENSOR), n, D)
    lam, lam_valid = in_range(number(lam_ptr, lam_bits, lam_stride, row, m, LAM_TENSOR), D)
    a = keys(x, there, OP)
    # The rows after the last have no entries and k = 0.
    invalid = (has_bad_entry(x, OP) | ~k_valid | ~lam_valid) & (row < m)
    k = tl.where(row < m, k, 0)
    frac = tl.where(row < m, frac, 0.0)
    pivot, delta, passes = solve(a, k, frac, lam, invalid, n, OP, E, RELAXED, HARD)
    tl.store(state_ptr + 2 * row.to(tl.int64), pivot, mask=row < m)
    tl.store(state_ptr + 2 * row.to(tl.int64) + 1, delta, mask=row < m)
    if WRITE:
        y = output(a, k, frac, lam, pivot, delta, OP, E, DEBIAS, RELAXED, HARD)
        y = finish(y, x, OP, TIMES)
        tl.store(y_ptr + at, rounded(y, y_ptr.dtype.element_ty), mask=there)
    if COUNT:
        tl.store(passes_ptr + row, passes + 0 * row, mask=row < m)
