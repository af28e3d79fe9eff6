# mypy: ignore-errors
"""Rows that no program holds alone: each is looked at by many, and no number of it by the host.

1. ``sample_kernel``: a window around the threshold, from a sample of the row.
2. ``gather_kernel``: whether the threshold is in it; what is undecided is copied. First read of x.
3. ``gather_kernel`` again, only of rows that the sample misled about, with the rest as the window.
4. ``solve_kernel``: the state, by the searches of ``solve`` over what was copied.
5. ``apply_kernel``: second read of x, and y.

A row is contiguous, or lies in pieces at a table of addresses (TABLE); a chunk is what a program takes
at a time. What programs find of a row is added up in float64 by whoever needs it, in one order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rows import arguments, finish, keys, relaxed_output, rounded
from .scalars import MAGNITUDE, SIGN, is_even, largest, next_float, respond, zero_of
from .solve import (
    TILE,
    any_of,
    as_state,
    bracket,
    count_from,
    count_of,
    hard_threshold,
    search,
    solve,
    specials,
    tile_sums,
)

_SIGMAS = tl.constexpr(4.5)  # how far a sample is trusted
FACTS = 10  # what is found of a row, see _look
_FACTS = tl.constexpr(FACTS)


@triton.jit
def place(
    ptr, starts_ptr, row, chunk, n, T: tl.constexpr, TABLE: tl.constexpr, CHUNK: tl.constexpr
):
    """Where the entries of a chunk are, (1, CHUNK), their numbers in the row, and which there are."""
    col = tl.arange(0, CHUNK)[None, :]
    if TABLE:
        start = tl.load(starts_ptr + chunk)
        base = tl.multiple_of(tl.load(ptr + chunk).to(tl.pointer_type(T)), 16)
        there = col < tl.load(starts_ptr + chunk + 1) - start
    else:
        start = (0 * row + chunk)[:, None].to(tl.int64) * CHUNK
        base = ptr + row[:, None].to(tl.int64) * n + start
        there = col < n - start
    return base + col, start + col, there


@triton.jit
def total_of(table_ptr, row, fact, programs, FACTS_: tl.constexpr, G: tl.constexpr):
    """What all programs of a row found, one behind the other."""
    at = tl.arange(0, G)[None, :]
    base = table_ptr + (row.to(tl.int64)[:, None] * FACTS_ + fact) * programs
    return tl.load(base + at, mask=at < programs, other=0.0)


@triton.jit
def found(table_ptr, row, fact, programs, FACTS_: tl.constexpr, G: tl.constexpr):
    return tl.sum(total_of(table_ptr, row, fact, programs, FACTS_, G), 1)


@triton.jit
def report(table_ptr, row, fact, programs, value, FACTS_: tl.constexpr):
    at = (row.to(tl.int64) * FACTS_ + fact) * programs + tl.program_id(0)
    tl.store(table_ptr + at, value.to(tl.float64))


@triton.jit
def _sampled(
    x_ptr, starts_ptr, row, n, chunks, T: tl.constexpr, TABLE: tl.constexpr, D: tl.constexpr,
    S: tl.constexpr,
):  # fmt: skip
    """One entry of each of S parts of a row, at a place that no pattern in x has; and how many."""
    j = tl.arange(0, S).to(tl.int64)[None, :]
    size = tl.minimum(n, S)
    mixed = (j * 2654435761) & 0x7FFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 739982445) & 0x7FFFFFFF
    at = j * n // size + (mixed ^ (mixed >> 12)) % tl.maximum(n // size, 1)
    there = j < size
    at = tl.where(there, at, 0)
    if TABLE:
        lo = tl.zeros_like(at)  # the last chunk that starts at or before an entry
        hi = lo + chunks - 1
        left = chunks
        while left > 0:
            middle = (lo + hi + 1) >> 1
            before = tl.load(starts_ptr + middle) <= at
            lo = tl.where(before, middle, lo)
            hi = tl.where(before, hi, middle - 1)
            left = left >> 1
        base = tl.load(x_ptr + lo).to(tl.pointer_type(T))
        pointer = base + (at - tl.load(starts_ptr + lo))
    else:
        pointer = x_ptr + row[:, None].to(tl.int64) * n + at
    return tl.load(pointer, mask=there, other=0.0).to(D), there, size


@triton.jit
def _outermost(OP: tl.constexpr, D: tl.constexpr):
    return 0.0 if is_even(OP) else -largest(D)


@triton.jit(do_not_specialize=["m", "chunks", "k_bits", "lam_bits"])
def sample_kernel(
    x_ptr, starts_ptr, k_ptr, lam_ptr, window_ptr, copied_ptr, m, n, chunks, k_stride, lam_stride,
    k_bits, lam_bits,
    K_TENSOR: tl.constexpr, LAM_TENSOR: tl.constexpr, OP: tl.constexpr, E: tl.constexpr,
    RELAXED: tl.constexpr, HARD: tl.constexpr, T: tl.constexpr, TABLE: tl.constexpr, D: tl.constexpr,
    S: tl.constexpr,
):  # fmt: skip
    """The lower end of the window by one program, the upper by another: the threshold of the sample for
    as many more, or fewer, as chance may have it."""
    side = tl.program_id(1)
    row = tl.program_id(0) + tl.arange(0, 1)
    x, there, size = _sampled(x_ptr, starts_ptr, row, n, chunks, T, TABLE, D, S)
    k, frac, lam, _valid = arguments(
        k_ptr, lam_ptr, k_stride, lam_stride, k_bits, lam_bits, row, m, n, K_TENSOR, LAM_TENSOR, D
    )
    share = (k.to(tl.float64) + frac) / n
    margin = _SIGMAS * tl.sqrt(tl.maximum(share * (1.0 - share), 0.0) * size) + 2.0
    wanted = tl.where(side == 0, tl.ceil(share * size + margin), tl.floor(share * size - margin))
    wanted = tl.minimum(tl.maximum(wanted, 0.0), size).to(tl.int32)
    a = keys(x, there, OP)
    bad = count_of(x != x) > 0
    pivot, delta, _ = solve(a, wanted, 0.0 * lam, lam, bad, size, OP, E, RELAXED, HARD)
    limit = largest(D)
    least = _outermost(OP, D)
    v = tl.where(pivot != pivot, tl.where(side == 0, least, limit), pivot - lam * delta)
    v = tl.where(side == 0, next_float(v, -2), next_float(v, 2))
    tl.store(window_ptr + 2 * row + side, tl.minimum(tl.maximum(v, least), limit))
    tl.store(copied_ptr + 2 * row + side, 0)


@triton.jit
def _look(
    a, lo, hi, lam, OP: tl.constexpr, E: tl.constexpr, RELAXED: tl.constexpr, HARD: tl.constexpr
):
    """Of a tile, for thresholds at both ends of the window: the mass of the block and how many are
    selected whole; and which entries are undecided between them."""
    zero = 0.0 * lam
    mass_lo, mass_hi = zero, zero
    taken_lo, taken_hi = zero.to(tl.int32), zero.to(tl.int32)
    undecided = a != a
    if RELAXED:
        inv = 1.0 / tl.where(lam > 0, lam, 1.0)
        mass_lo, _, taken_lo = tile_sums(a, lo, zero, lo, inv, OP, E)
        mass_hi, _, taken_hi = tile_sums(a, hi, zero, hi, inv, OP, E)
        t = (a - hi[:, None]) * inv[:, None]
        reached = respond(t, OP, E)[0] >= hi[:, None] if OP == MAGNITUDE else t >= 1.0
        starts = (a - lo[:, None]) * inv[:, None] > zero_of(OP)
        undecided = starts & ~((t > zero_of(OP)) & reached)
    if HARD:
        hard = lam == 0
        from_lo = a >= lo[:, None]
        # Infinite entries are in the window too where it has no upper end.
        over_hi = (a > hi[:, None]) & (hi < largest(a.dtype))[:, None]
        taken_lo = tl.where(hard, count_of(from_lo), taken_lo)
        taken_hi = tl.where(hard, count_of(over_hi), taken_hi)
        mass_lo = tl.where(hard, 0.0, mass_lo)
        mass_hi = tl.where(hard, 0.0, mass_hi)
        undecided = tl.where(hard[:, None], from_lo & ~over_hi, undecided)
    return mass_lo, taken_lo, mass_hi, taken_hi, undecided


@triton.jit
def _excess(mass, taken, v, k, frac, OP: tl.constexpr):
    """By how much a threshold v takes more than k."""
    if OP == MAGNITUDE:
        v = v.to(tl.float64)
        mass = tl.where(mass > 0, mass / tl.where(v > 0, v, 1.0), 0.0)
    return mass + (taken - k.to(tl.float64) - frac.to(tl.float64))


@triton.jit
def _judge(
    table_ptr, window_ptr, row, programs, k, frac, lam, OP: tl.constexpr, E: tl.constexpr,
    G: tl.constexpr,
):  # fmt: skip
    """Whether the threshold is in the window of the sample; and else the one that it is in."""
    lo = tl.load(window_ptr + 2 * row)
    hi = tl.load(window_ptr + 2 * row + 1)
    at_lo = _excess(
        found(table_ptr, row, 0, programs, _FACTS, G), found(table_ptr, row, 1, programs, _FACTS, G),
        lo, k, frac, OP,
    )  # fmt: skip
    at_hi = _excess(
        found(table_ptr, row, 2, programs, _FACTS, G), found(table_ptr, row, 3, programs, _FACTS, G),
        hi, k, frac, OP,
    )  # fmt: skip
    hard = lam == 0
    # Hard: a_[ceil k] is looked for, which is above hi if no fewer than k are.
    below = at_lo < 0
    above = tl.where(hard, at_hi >= 0, at_hi > 0)
    bottom = 0.0 - tl.max(total_of(table_ptr, row, 8, programs, _FACTS, G), 1)
    top = tl.max(total_of(table_ptr, row, 9, programs, _FACTS, G), 1)
    return lo, hi, below, above, bottom.to(lo.dtype), top.to(lo.dtype)


@triton.jit
def _second_window(
    table_ptr, window_ptr, row, programs, k, frac, lam, OP: tl.constexpr, E: tl.constexpr,
    G: tl.constexpr,
):  # fmt: skip
    """The window or, where it was wrong, what is left of the row outside of it; whether it was wrong,
    and the finite ends of the row."""
    lo, hi, below, above, bottom, top = _judge(
        table_ptr, window_ptr, row, programs, k, frac, lam, OP, E, G
    )
    hard = lam == 0
    least, most = bracket(bottom, top, tl.where(hard, 1.0, lam), OP, E)
    if OP == SIGN:
        least = 0.0 * least
    least = tl.where(hard, bottom, least)
    most = tl.where(hard, largest(lam.dtype), most)
    misled = below | above
    return (
        tl.where(misled, tl.where(below, least, tl.minimum(hi, most)), lo),
        tl.where(misled, tl.where(below, tl.maximum(lo, least), most), hi),
        misled, bottom, top,
    )  # fmt: skip


@triton.jit
def _copy(a, index, flags, room_ptr, copy_ptr, index_ptr, row, n, HARD: tl.constexpr):
    """What is set, to wherever there is room among the copies of a row; of hard rows with its number."""
    number_ = count_of(flags)
    if any_of(number_ > 0):
        first = tl.atomic_add(room_ptr, number_)
        to = first[:, None] + tl.cumsum(flags.to(tl.int32), 1) - flags.to(tl.int32)
        to = row[:, None].to(tl.int64) * n + to
        tl.store(copy_ptr + to, a, mask=flags)
        if HARD:
            tl.store(index_ptr + to, index.to(tl.int32), mask=flags)


@triton.jit(do_not_specialize=["m", "chunks", "programs", "k_bits", "lam_bits"])
def gather_kernel(
    x_ptr, starts_ptr, k_ptr, lam_ptr, window_ptr, copied_ptr, table_ptr, again_ptr, copy_ptr, index_ptr,
    m, n, chunks, programs, k_stride, lam_stride, k_bits, lam_bits,
    K_TENSOR: tl.constexpr, LAM_TENSOR: tl.constexpr, OP: tl.constexpr, E: tl.constexpr,
    RELAXED: tl.constexpr, HARD: tl.constexpr, T: tl.constexpr, TABLE: tl.constexpr, D: tl.constexpr,
    AGAIN: tl.constexpr, G: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A program reads every so many chunks, copies what is undecided to wherever there is room, and
    reports what it found. AGAIN: only where the first time has shown the window to be wrong."""
    row = tl.program_id(1) + tl.arange(0, 1)
    k, frac, lam, _valid = arguments(
        k_ptr, lam_ptr, k_stride, lam_stride, k_bits, lam_bits, row, m, n, K_TENSOR, LAM_TENSOR, D
    )
    last = chunks
    if AGAIN:
        lo, hi, misled, _, _ = _second_window(
            table_ptr, window_ptr, row, programs, k, frac, lam, OP, E, G
        )
        last = tl.where(any_of(misled), chunks, 0)
    else:
        lo = tl.load(window_ptr + 2 * row)
        hi = tl.load(window_ptr + 2 * row + 1)
    zero = tl.zeros([1], tl.float64)
    mass_lo, mass_hi = zero, zero
    taken_lo, taken_hi = zero, zero
    bad, infinite, candidates, positive = zero, zero, zero, zero
    limit = largest(D)
    bottom_ = tl.full([1], limit, D)
    top_ = tl.full([1], -limit, D)
    for chunk in range(tl.program_id(0), last, programs):
        pointers, index, there = place(x_ptr, starts_ptr, row, chunk, n, T, TABLE, CHUNK)
        x = tl.load(pointers, mask=there, other=0.0).to(D)
        a = keys(x, there, OP)
        more = _look(a, lo, hi, lam, OP, E, RELAXED, HARD)
        mass_lo += more[0].to(tl.float64)
        taken_lo += more[1].to(tl.float64)
        mass_hi += more[2].to(tl.float64)
        taken_hi += more[3].to(tl.float64)
        if not AGAIN:
            finite = (a >= -limit) & (a <= limit)
            bottom_ = tl.minimum(bottom_, tl.min(tl.where(finite, a, limit), 1))
            top_ = tl.maximum(top_, tl.max(tl.where(finite, a, -limit), 1))
            bad += count_of(x != x).to(tl.float64)
            infinite += count_of(a == float("inf")).to(tl.float64)
            candidates += count_of(a > float("-inf")).to(tl.float64)
            positive += count_of(a > 0).to(tl.float64)
        room_ptr = copied_ptr + 2 * row + (1 if AGAIN else 0)
        _copy(a, index, more[4], room_ptr, copy_ptr, index_ptr, row, n, HARD)
    to_ptr = again_ptr if AGAIN else table_ptr
    report(to_ptr, row, 0, programs, mass_lo, _FACTS)
    report(to_ptr, row, 1, programs, taken_lo, _FACTS)
    report(to_ptr, row, 2, programs, mass_hi, _FACTS)
    report(to_ptr, row, 3, programs, taken_hi, _FACTS)
    if not AGAIN:
        report(to_ptr, row, 4, programs, bad, _FACTS)
        report(to_ptr, row, 5, programs, infinite, _FACTS)
        report(to_ptr, row, 6, programs, candidates, _FACTS)
        report(to_ptr, row, 7, programs, positive, _FACTS)
        report(to_ptr, row, 8, programs, 0.0 - bottom_, _FACTS)
        report(to_ptr, row, 9, programs, top_, _FACTS)


@triton.jit
def _cut(copies, index_ptr, boundary, left, n):
    """The number of the entry that gets what is left after whole ones, among those at the boundary, of
    which the first are selected; n if all are whole."""
    ptr, count = copies
    before = tl.floor(left).to(tl.int32)
    lo = tl.zeros_like(before)
    hi = lo + n
    todo = hi > lo
    while any_of(todo):
        middle = lo + ((hi - lo) >> 1)
        upto = tl.zeros_like(before)
        for start in range(0, count, TILE):
            at = start + tl.arange(0, TILE)
            a = tl.load(ptr + at, mask=at < count, other=float("-inf"))[None, :]
            i = tl.load(index_ptr + at, mask=at < count, other=0)[None, :]
            upto += count_of((a == boundary[:, None]) & (i <= middle[:, None]))
        enough = upto > before
        hi = tl.where(todo & enough, middle, hi)
        lo = tl.where(todo & ~enough, middle + 1, lo)
        todo = hi > lo
    return lo


@triton.jit
def _is_pinned(lo, at_lo, positive, k, OP: tl.constexpr):
    """Whether the threshold is 0: fewer magnitudes than k, or a signed mask that takes less than k."""
    pinned = k < 0
    if OP == MAGNITUDE:
        pinned = positive <= k
    if OP == SIGN:
        pinned = (lo == 0) & (at_lo <= 0)
    return pinned


@triton.jit
def _store_state(state_ptr, row, pivot, delta, cut, D: tl.constexpr):
    tl.store(state_ptr + 3 * row, pivot)
    tl.store(state_ptr + 3 * row + 1, delta)
    if tl.float64 == D:
        bits = cut.to(tl.int64).to(tl.float64, bitcast=True)
    else:
        bits = cut.to(tl.float32, bitcast=True)
    tl.store(state_ptr + 3 * row + 2, bits)


@triton.jit
def _relaxed_threshold(
    copies, k, left, frac, lam, soft, pinned, flat, n, lo, hi, bottom, top, OP: tl.constexpr,
    E: tl.constexpr,
):  # fmt: skip
    """pivot and delta of a row with lam > 0: 0 if it is pinned, the lower end of the window if the
    equation is flat there, and else by a search in what was copied."""
    used = tl.where(soft, lam, 1.0)
    least, most = bracket(bottom, top, used, OP, E)
    lo_, hi_ = tl.maximum(lo, least), tl.minimum(hi, most)
    middle = 0.5 * lo_ + 0.5 * hi_
    rows = soft & ~pinned & ~flat
    few = tl.maximum(k.to(lam.dtype), 1.0) / n
    pivot, delta, _ = search(
        copies, left, frac, used, rows, copies[1], few, lo_, hi_, middle, middle, OP, E
    )
    pivot = tl.where(pinned, 0.0, tl.where(flat, lo, pivot))
    return pivot, tl.where(pinned | flat, 0.0, delta)


@triton.jit(do_not_specialize=["m", "programs", "k_bits", "lam_bits"])
def solve_kernel(
    k_ptr, lam_ptr, window_ptr, copied_ptr, table_ptr, again_ptr, copy_ptr, index_ptr, state_ptr, m, n,
    programs, k_stride, lam_stride, k_bits, lam_bits,
    K_TENSOR: tl.constexpr, LAM_TENSOR: tl.constexpr, OP: tl.constexpr, E: tl.constexpr,
    RELAXED: tl.constexpr, HARD: tl.constexpr, D: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """The state of a row, and the number of the entry at which a hard row is cut, as the bits of a
    float."""
    r = tl.program_id(0)
    row = r + tl.arange(0, 1)
    k, frac, lam, valid = arguments(
        k_ptr, lam_ptr, k_stride, lam_stride, k_bits, lam_bits, row, m, n, K_TENSOR, LAM_TENSOR, D
    )
    lo, hi, misled, bottom, top = _second_window(
        table_ptr, window_ptr, row, programs, k, frac, lam, OP, E, G
    )
    from_ptr = table_ptr
    copied = tl.load(copied_ptr + 2 * r)
    if any_of(misled):
        from_ptr = again_ptr
        copied = tl.load(copied_ptr + 2 * r + 1)
    mass_lo = found(from_ptr, row, 0, programs, _FACTS, G)
    taken_lo = found(from_ptr, row, 1, programs, _FACTS, G)
    taken_hi = found(from_ptr, row, 3, programs, _FACTS, G)
    at_lo = _excess(mass_lo, taken_lo, lo, k, frac, OP)
    infinite = found(table_ptr, row, 5, programs, _FACTS, G).to(tl.int32)
    candidates = found(table_ptr, row, 6, programs, _FACTS, G).to(tl.int32)
    positive = found(table_ptr, row, 7, programs, _FACTS, G).to(tl.int32)
    bad = found(table_ptr, row, 4, programs, _FACTS, G) > 0
    if is_even(OP):
        bad = bad | (infinite > 0)
    invalid = bad | ~valid
    k = tl.where(invalid, 0, k)
    frac = tl.where(invalid, 0.0, frac)
    crowded, nothing, everything, special = specials(k, frac, invalid, infinite, candidates, OP)
    copies = (copy_ptr + r.to(tl.int64) * n, copied)
    left = k - taken_hi.to(tl.int32)  # for what was copied
    pivot = 0.0 * lam
    delta = pivot
    cut = tl.zeros_like(k) + n
    if RELAXED:
        pinned = _is_pinned(lo, at_lo, positive, k, OP)
        # No entry is fractional at the lower end, and as many as k are whole: so it is as good as any.
        flat = (at_lo == 0) & (mass_lo == 0)
        soft = ~special & (lam > 0)
        pivot, delta = _relaxed_threshold(
            copies, k, left, frac, lam, soft, pinned, flat, n, lo, hi, bottom, top, OP, E
        )
    if HARD:
        cut = tl.where(nothing, 0, cut)
        # Also of more infinite entries than k the first are selected.
        rows = ~(invalid | nothing | everything) & (lam == 0)
        if any_of(rows):
            boundary, rest = hard_threshold(copies, left, frac, rows, 0.5 * lo + 0.5 * hi)
            pivot = tl.where(rows, boundary, pivot)
            delta = tl.where(rows, rest, delta)
            if any_of((count_from(copies, boundary) - left).to(D) > frac):
                cut = _cut(copies, index_ptr + r.to(tl.int64) * n, boundary, rest, n)
    pivot, delta = as_state(pivot, delta, invalid, infinite, crowded, nothing, everything)
    _store_state(state_ptr, row, pivot, delta, cut, D)


@triton.jit
def state_of(state_ptr, row, D: tl.constexpr):
    """pivot, delta and the cut of a row."""
    bits = tl.load(state_ptr + 3 * row + 2)
    cut = bits.to(tl.int64 if tl.float64 == D else tl.int32, bitcast=True)
    return tl.load(state_ptr + 3 * row), tl.load(state_ptr + 3 * row + 1), cut.to(tl.int64)


@triton.jit
def cut_mask(a, index, pivot, cut, frac):
    """1 above the pivot, and for the entries equal to it before the cut; what is left at the cut."""
    tied = (a == pivot[:, None]) & (a > float("-inf"))
    mask = tl.where(index < cut[:, None], 1.0, tl.where(index == cut[:, None], frac[:, None], 0.0))
    return tl.where(a > pivot[:, None], 1.0, tl.where(tied, mask.to(a.dtype), 0.0))


@triton.jit
def output_of_chunk(
    a, index, k, frac, lam, pivot, delta, cut, OP: tl.constexpr, E: tl.constexpr, DEBIAS: tl.constexpr,
    RELAXED: tl.constexpr, HARD: tl.constexpr,
):  # fmt: skip
    """``rows.output``, where ties are decided by their numbers in the row."""
    y = tl.zeros_like(a)
    if RELAXED:
        y = relaxed_output(a, k, frac, lam, pivot, delta, OP, E, DEBIAS)
    if HARD:
        mask = cut_mask(a, index, pivot, cut, frac)
        if OP == MAGNITUDE:
            mask = tl.where(mask > 0, a * mask, 0.0)
        y = tl.where((lam == 0)[:, None], mask, y)
    return tl.where((pivot != pivot)[:, None], float("nan"), y)


@triton.jit(do_not_specialize=["m", "chunks", "programs", "k_bits", "lam_bits"])
def apply_kernel(
    x_ptr, starts_ptr, k_ptr, lam_ptr, state_ptr, y_ptr, m, n, chunks, programs, k_stride, lam_stride,
    k_bits, lam_bits,
    K_TENSOR: tl.constexpr, LAM_TENSOR: tl.constexpr, OP: tl.constexpr, E: tl.constexpr,
    DEBIAS: tl.constexpr, TIMES: tl.constexpr, RELAXED: tl.constexpr, HARD: tl.constexpr,
    T: tl.constexpr, TABLE: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) + tl.arange(0, 1)
    k, frac, lam, _valid = arguments(
        k_ptr, lam_ptr, k_stride, lam_stride, k_bits, lam_bits, row, m, n, K_TENSOR, LAM_TENSOR, D
    )
    pivot, delta, cut = state_of(state_ptr, row, D)
    for chunk in range(tl.program_id(0), chunks, programs):
        pointers, index, there = place(x_ptr, starts_ptr, row, chunk, n, T, TABLE, CHUNK)
        x = tl.load(pointers, mask=there, other=0.0).to(D)
        a = keys(x, there, OP)
        y = output_of_chunk(a, index, k, frac, lam, pivot, delta, cut, OP, E, DEBIAS, RELAXED, HARD)
        y = finish(y, x, OP, TIMES)
        to, _, _ = place(y_ptr, starts_ptr, row, chunk, n, T, TABLE, CHUNK)
        tl.store(to, rounded(y, T), mask=there)
