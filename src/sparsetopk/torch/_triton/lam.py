# mypy: ignore-errors
"""The smallest lam that leaves so many entries fractional, for rows in registers: x is read once, and
the row solved again for every lam that is tried. ``_maths/select.py`` says how they are tried."""

from __future__ import annotations

import triton
import triton.language as tl

from ..._maths import select
from .rows import has_bad_entry, number, places, read, split, split_entries
from .scalars import MAGNITUDE, epsilon, power
from .solve import any_of, count_of, finite_ends, normal_guess, nth, relaxed_threshold

_STEP = tl.constexpr(select.STEP)
_STEPS = tl.constexpr(select.STEPS)
_BISECTIONS = tl.constexpr(select.BISECTIONS)


@triton.constexpr_function
def _least(dtype):
    return 1e-300 if dtype == tl.float64 else 1e-36


@triton.jit
def _scale(a, k, frac, n, first, length, rows, OP: tl.constexpr, E: tl.constexpr):
    """The scale of lam, from the distance over the finite entries of the window, which has ``length``
    entries from ``first`` on."""
    count = count_of(a > float("-inf"))
    upper = tl.maximum(first, count_of(a == float("inf"))) + 1
    lower = tl.minimum(first + length, count)
    some = rows & (upper <= lower)
    bottom, top = finite_ends(a)
    guess = normal_guess(a, bottom, top, k.to(a.dtype) + frac, OP)
    distance = 0.5 * nth(a, upper, some, guess) - 0.5 * nth(a, lower, some, guess)
    distance = tl.where(some, distance, 0.0)
    if OP == MAGNITUDE:
        last = tl.maximum(k + (frac > 0).to(tl.int32), 1)
        size = nth(a, last, rows & (last <= count), guess)
        distance /= power(tl.where((size > 0) & (last <= count), size, 1.0), 1.0 / E)
    distance = tl.where(distance > 0, distance, 1.0)
    return tl.minimum(tl.maximum(distance, _least(a.dtype)), 1.0 / _least(a.dtype))


@triton.jit
def _window(last, wanted, n, K_TENSOR: tl.constexpr):
    """Which of the sorted entries are looked at: the first, and how many."""
    length = tl.minimum(n, 2 * wanted + 2)
    most = n  # of a number k, the window ends soon after it
    if not K_TENSOR:
        most = tl.minimum(n, last + wanted + 1)
        length = tl.minimum(length, most)
    return tl.minimum(tl.maximum(last - wanted - 1, 0), most - length), length


@triton.jit
def _enough(
    a, k, frac, lam, rows, n, wanted, margin, X: tl.constexpr, OP: tl.constexpr, E: tl.constexpr
):
    """Whether so many entries are fractional, also when they are rounded to X, the dtype of x."""
    pivot, delta, _ = relaxed_threshold(a, k, frac, lam, rows, n, OP, E)
    _, y, _, counted, _, _ = split_entries(a, pivot, delta, lam, OP, E)
    if OP != MAGNITUDE:
        counted = counted & (y < 1.0 - margin[:, None])
        rounded = y.to(X).to(a.dtype)
        counted = counted & (rounded > 0) & (rounded < 1)
    return rows & (count_of(counted) >= wanted)


@triton.jit(do_not_specialize=["m", "k_bits", "wanted"])
def lam_kernel(
    x_ptr, k_ptr, lam_ptr, m, n, k_stride, k_bits, wanted,
    K_TENSOR: tl.constexpr, OP: tl.constexpr, E: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, at, there = places(m, n, ROWS, BLOCK)
    x, a = read(x_ptr, at, there, OP, D)
    k, frac, k_valid = split(number(k_ptr, k_bits, k_stride, row, m, K_TENSOR), n, D)
    invalid = has_bad_entry(x, there, OP) | ~k_valid
    X: tl.constexpr = x_ptr.dtype.element_ty
    last = k + (frac > 0).to(tl.int32)
    first, length = _window(last, wanted, n, K_TENSOR)
    eps = epsilon(D) if tl.float64 == X else 2.0**-23
    margin = 64.0 * eps * tl.maximum((k - first).to(D), 1.0)
    # Where k or the entries leave no threshold, no lam is found.
    infinite = count_of(a == float("inf"))
    special = ((infinite - k).to(D) > frac) | (last == 0) | (k >= count_of(a > float("-inf")))
    rows = (row < m) & ~invalid & ~special
    scale = _scale(a, k, frac, n, first, length, (row < m) & ~invalid, OP, E)
    lam = scale
    found = scale
    missed = scale
    up = rows  # until it is enough
    down = rows & False  # until it is not
    holds = rows & False
    ever = holds
    step = 0
    while any_of(up | down) & (step < 2 * _STEPS):
        holds = _enough(a, k, frac, lam, rows, n, wanted, margin, X, OP, E)
        walking = up | down
        ever = ever | (walking & holds)
        found = tl.where(walking & holds, lam, found)
        missed = tl.where(walking & ~holds, lam, missed)
        # From where it was enough at once, the way down; else the last that was not is known.
        turn = up & holds & (lam == scale)
        down = (down & holds) | turn
        up = up & ~holds
        least = _least(D)
        further = tl.where(down, lam / _STEP, lam * _STEP)
        further = tl.minimum(tl.maximum(further, least), 1.0 / least)
        ends = further == lam
        lam = tl.where(up | down, further, lam)
        up = up & ~ends
        down = down & ~ends
        step += 1
    lo = tl.log2(tl.minimum(missed, found))
    hi = tl.log2(found)
    step = 0
    while step < _BISECTIONS:
        middle = 0.5 * (lo + hi)
        holds = _enough(a, k, frac, tl.exp2(middle), rows & ever, n, wanted, margin, X, OP, E)
        lo = tl.where(holds, lo, middle)
        hi = tl.where(holds, middle, hi)
        step += 1
    lam = (1.0 + 8.0 * eps) * tl.where(ever, tl.exp2(hi), scale)
    tl.store(lam_ptr + row, tl.where(invalid, float("nan"), lam), mask=row < m)
