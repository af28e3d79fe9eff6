# mypy: ignore-errors
"""The top-k family forward, for rows in registers: x is read once, y and two numbers a row written."""

from __future__ import annotations

import triton
import triton.language as tl

from .rows import arguments, finish, has_bad_entry, output, places, read, rounded, store_numbers
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
    x, a = read(x_ptr, at, there, OP, D)
    k, frac, lam, valid = arguments(
        k_ptr, lam_ptr, k_stride, lam_stride, k_bits, lam_bits, row, m, n, K_TENSOR, LAM_TENSOR, D
    )
    invalid = has_bad_entry(x, there, OP) | ~valid
    pivot, delta, passes = solve(a, k, frac, lam, invalid, n, OP, E, RELAXED, HARD)
    row, at, there = places(m, n, ROWS, BLOCK, passes)
    store_numbers(state_ptr, row, m, 0, 2, pivot)
    store_numbers(state_ptr, row, m, 1, 2, delta)
    if WRITE:
        y = output(a, k, frac, lam, pivot, delta, OP, E, DEBIAS, RELAXED, HARD)
        y = finish(y, x, OP, TIMES)
        tl.store(y_ptr + at, rounded(y, y_ptr.dtype.element_ty), mask=there)
    if COUNT:
        tl.store(passes_ptr + row, passes + 0 * row, mask=row < m)
