# mypy: ignore-errors
"""The value f(x, 1_k) of every row, and the Fenchel-Young losses of the masks, for rows in registers.

Forward x is read once and nothing of its size written; backward x is read once more, and the gradient
written; where two problems are solved for a row, x is read for each. ``_maths/value.py`` has the
formulas. A row of a loss is f(x) - <x, t> + R(t') with weights t of the classes, in which "spread" fills
t up; "best" subtracts the best value that has y = 1 at the labels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rows import arguments, has_bad_entry, lone, output, places, read, split_entries
from .scalars import MAGNITUDE, TWO_SIDED, is_even, largest, power, respond
from .solve import count_of, solve

# What t is: none, labels, or weights of all classes.
NO_TARGETS, LABELS, WEIGHTS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# What is done with k - sum t, and what with the losses of the rows.
AS_IT_IS, SPREAD, BEST = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
MEAN, SUM, NONE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _penalty(y, OP: tl.constexpr, E: tl.constexpr):
    """r(y) for y >= 0."""
    P: tl.constexpr = 1.0 + 1.0 / E
    r = power(tl.maximum(y, 0.0), P)
    if OP == TWO_SIDED:
        r += power(tl.maximum(1.0 - y, 0.0), P)
    return r * (1.0 / P)


@triton.jit
def _phi(u, OP: tl.constexpr):
    return 0.5 * u * u if OP == MAGNITUDE else u


@triton.jit
def _terms(a, y, d, t, v, inside, above, lam, OP: tl.constexpr, E: tl.constexpr):
    """What every entry adds to f, but for the threshold's share, where lam > 0."""
    P: tl.constexpr = 1.0 + 1.0 / E
    lam = lam[:, None]
    finite = tl.where(tl.abs(a) < float("inf"), a, 0.0)
    if OP == MAGNITUDE:
        u, _ = respond(d, OP, E)
        whole = lam * d * u * (1.0 / (E + 1.0)) + 0.5 * u * u
    else:
        whole = finite - lam * (1.0 / P)
    if OP == TWO_SIDED:
        rest = tl.where(a > float("-inf"), lam * (-1.0 / P), 0.0)
        shared = (finite - v[:, None]) * y - lam * _penalty(y, OP, E)
    else:
        rest = tl.zeros_like(a)
        shared = lam * t * y * (1.0 / (E + 1.0))
    return tl.where(above, whole, tl.where(inside, shared, rest))


@triton.jit
def _of_row(
    a, k, frac, lam, pivot, delta, OP: tl.constexpr, E: tl.constexpr, RELAXED: tl.constexpr,
    HARD: tl.constexpr,
):  # fmt: skip
    """What f has for a row beside the terms of its entries; which entries are above the threshold."""
    of_row = 0.0 * lam
    whole = a != a
    finite = tl.abs(pivot) < float("inf")
    if RELAXED:
        _, _, _, _, above, _ = split_entries(a, pivot, delta, lam, OP, E)
        whole = _whole(a, above, lam, pivot)
        v = tl.where(finite, pivot - lam * delta, 0.0)
        left = (k - count_of(above)).to(a.dtype) + frac
        of_row = tl.where(finite & (lam > 0), left * _phi(v, OP), 0.0)
    if HARD:  # what is equal to the pivot has delta of k, all together
        of_ties = delta * _phi(tl.where(finite, pivot, 0.0), OP)
        of_row = tl.where(lam == 0, of_ties, of_row)
    selects = (k > 0) | (frac > 0)
    infinite = (count_of(a == float("inf")) > 0) & selects
    return tl.where(infinite, float("inf"), of_row), whole


@triton.jit
def _whole(a, above, lam, pivot):
    """The entries above the threshold, where lam > 0: also where every candidate is."""
    everything = (pivot == float("-inf")) & (lam > 0)
    return above | (everything[:, None] & (a > float("-inf")))


@triton.jit
def _of_entries(
    a, lam, pivot, delta, OP: tl.constexpr, E: tl.constexpr, RELAXED: tl.constexpr,
    HARD: tl.constexpr,
):  # fmt: skip
    """The terms of the entries, which with that of the row sum to f."""
    terms = tl.zeros_like(a)
    if RELAXED:
        used = tl.where(lam > 0, lam, 1.0)
        d = lone(a, used, False, OP, E)
        t, y, _, inside, above, _ = split_entries(a, pivot, delta, lam, OP, E)
        finite = tl.abs(pivot) < float("inf")
        v = tl.where(finite, pivot, 0.0) - used * tl.where(finite, delta, 0.0)
        terms = _terms(a, y, d, t, v, inside, _whole(a, above, lam, pivot), used, OP, E)
    if HARD:
        over = (a > pivot[:, None]) & (a < float("inf"))
        taken = _phi(tl.where(over, a, 0.0), OP)
        terms = tl.where((lam == 0)[:, None], taken, terms)
    return terms


@triton.jit
def _is_no_class(t_ptr, row, m, n, ignored):
    """Rows whose label is neither a class nor ignored."""
    label = tl.load(t_ptr + row, mask=row < m, other=0)
    return (label != ignored) & ((label < 0) | (label >= n))


@triton.jit
def _targets(
    t_ptr, weight_ptr, row, at, there, x, m, n, k, frac, ignored, smoothing_bits, KIND: tl.constexpr,
    COMPLETION: tl.constexpr, SMOOTHED: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The weights t' of the classes, and that of the row."""
    weight = tl.full(row.shape, 1.0, x.dtype)
    col = tl.arange(0, BLOCK)
    if KIND == LABELS:
        label = tl.load(t_ptr + row, mask=row < m, other=0)
        counted = label != ignored
        is_class = (label >= 0) & (label < n)
        t = (col[None, :] == label[:, None]).to(x.dtype)
        t = tl.where(counted[:, None], t, 0.0)
        if WEIGHTED:
            weight = tl.load(weight_ptr + label, mask=is_class & (row < m), other=1.0).to(x.dtype)
        weight = tl.where(counted, weight, 0.0)
    else:
        t = tl.load(t_ptr + at, mask=there, other=0.0).to(x.dtype)
        if WEIGHTED:
            of_class = tl.load(weight_ptr + col, mask=col < n, other=0.0).to(x.dtype)
            total = tl.sum(t, 1)
            some = total > 0
            mean = tl.sum(t * of_class[None, :], 1) / tl.where(some, total, 1.0)
            weight = tl.where(some, mean, 1.0)
    candidate = there & (x > float("-inf"))
    count = count_of(candidate)
    if SMOOTHED:
        smoothing = smoothing_bits.to(tl.int64).to(tl.float64, bitcast=True).to(x.dtype)
        share = smoothing * (tl.sum(t, 1) / tl.maximum(count, 1).to(x.dtype))
        t = tl.where(candidate, (1.0 - smoothing) * t + share[:, None], t)
    if COMPLETION == SPREAD:
        room = tl.where(candidate, 1.0 - t, 0.0)
        left = tl.sum(room, 1)
        asked = tl.where(k >= count, count.to(x.dtype), k.to(x.dtype) + frac)
        missing = tl.maximum(asked - tl.sum(t, 1), 0.0) / tl.where(left > 0, left, 1.0)
        t += room * missing[:, None]
    return t, tl.where(row < m, weight, 0.0)


@triton.jit
def _others(a, t, k, frac, pivot):
    """What the labels leave: rows without them, and k less their number."""
    labels = count_of(t > 0)
    enough = (k >= labels) & (pivot == pivot)
    return (
        tl.where(t > 0, float("-inf"), a),
        tl.where(enough, k - labels, 0),
        tl.where(enough, frac, 0.0),
    )


@triton.jit
def _at(state_ptr, row, i: tl.constexpr, m, COMPLETION: tl.constexpr):
    """Where the i-th number of the state of a row is: there are two, or four for two solved rows."""
    return state_ptr + row.to(tl.int64) * (4 if COMPLETION == BEST else 2) + i


@triton.jit
def _solve_rest(
    state_ptr, row, m, n, a, t, whole, k, frac, lam, invalid, solved, OP: tl.constexpr,
    E: tl.constexpr, RELAXED: tl.constexpr, HARD: tl.constexpr,
):  # fmt: skip
    """The state of rows without their labels, and ``_of_row`` of these; how many passes it took."""
    # Where all labels are selected whole it is the same problem, and the loss exactly 0.
    same = count_of((t > 0) & ~whole) == 0
    rest, k, frac = _others(a, t, k, frac, solved[0])
    pivot, delta, passes = solve(rest, k, frac, lam, invalid | same, n, OP, E, RELAXED, HARD)
    pivot = tl.where(same, solved[0], pivot)
    delta = tl.where(same, solved[1], delta)
    tl.store(_at(state_ptr, row, 2, m, BEST), pivot, mask=row < m)
    tl.store(_at(state_ptr, row, 3, m, BEST), delta, mask=row < m)
    of_row, _ = _of_row(rest, k, frac, lam, pivot, delta, OP, E, RELAXED, HARD)
    return (pivot, delta), of_row, passes


@triton.jit
def _of_both(
    a, t, lam, solved, of_rest, OP: tl.constexpr, E: tl.constexpr, RELAXED: tl.constexpr,
    HARD: tl.constexpr,
):  # fmt: skip
    """The terms of rows less those of what their labels leave, and of the labels."""
    P: tl.constexpr = 1.0 + 1.0 / E
    rest = tl.where(t > 0, float("-inf"), a)
    terms = _of_entries(rest, lam, of_rest[0], of_rest[1], OP, E, RELAXED, HARD)
    terms = tl.where(t > 0, a - lam[:, None] * (1.0 / P), terms)
    return _of_entries(a, lam, solved[0], solved[1], OP, E, RELAXED, HARD) - terms


@triton.jit
def _store_value(value_ptr, part_ptr, row, m, value, weight, REDUCTION: tl.constexpr):
    if REDUCTION == NONE:
        tl.store(value_ptr + row, value.to(value_ptr.dtype.element_ty), mask=row < m)
    else:
        part = part_ptr + 2 * tl.program_id(0)
        tl.store(part, tl.sum(tl.where(row < m, value, 0.0), 0))
        tl.store(part + 1, tl.sum(weight, 0))


@triton.jit(do_not_specialize=["m", "k_bits", "lam_bits", "ignored", "smoothing_bits"])
def value_kernel(
    x_ptr, k_ptr, lam_ptr, t_ptr, weight_ptr, value_ptr, part_ptr, state_ptr, m, n, k_stride,
    lam_stride, k_bits, lam_bits, ignored, smoothing_bits,
    K_TENSOR: tl.constexpr, LAM_TENSOR: tl.constexpr, OP: tl.constexpr, E: tl.constexpr,
    RELAXED: tl.constexpr, HARD: tl.constexpr, KIND: tl.constexpr, COMPLETION: tl.constexpr,
    SMOOTHED: tl.constexpr, WEIGHTED: tl.constexpr, REDUCTION: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The value or the loss of every row or, if it is reduced, of the rows of a program, with the sum of
    their weights; and the state."""
    row, at, there = places(m, n, ROWS, BLOCK)
    x, a = read(x_ptr, at, there, OP, D)
    k, frac, lam, valid = arguments(
        k_ptr, lam_ptr, k_stride, lam_stride, k_bits, lam_bits, row, m, n, K_TENSOR, LAM_TENSOR, D
    )
    invalid = has_bad_entry(x, there, OP) | ~valid
    if KIND == LABELS:
        invalid = invalid | _is_no_class(t_ptr, row, m, n, ignored)
    weight = 0.0 * lam
    pivot, delta, _ = solve(a, k, frac, lam, invalid, n, OP, E, RELAXED, HARD)
    tl.store(_at(state_ptr, row, 0, m, COMPLETION), pivot, mask=row < m)
    tl.store(_at(state_ptr, row, 1, m, COMPLETION), delta, mask=row < m)
    # Only now, as the solver needs the registers.
    if KIND != NO_TARGETS:
        t, weight = _targets(
            t_ptr, weight_ptr, row, at, there, x, m, n, k, frac, ignored, smoothing_bits, KIND,
            COMPLETION, SMOOTHED, WEIGHTED, BLOCK,
        )  # fmt: skip
    of_row, whole = _of_row(a, k, frac, lam, pivot, delta, OP, E, RELAXED, HARD)
    if COMPLETION == BEST:
        solved, of_row_rest, passes = _solve_rest(
            state_ptr, row, m, n, a, t, whole, k, frac, lam, invalid, (pivot, delta), OP, E, RELAXED,
            HARD,
        )  # fmt: skip
        of_row -= of_row_rest
        # The second solver needs the registers of x, which is read again, as is t.
        row, at, there = places(m, n, ROWS, BLOCK, passes)
        x, a = read(x_ptr, at, there, OP, D)
        t, weight = _targets(
            t_ptr, weight_ptr, row, at, there, x, m, n, k, frac, ignored, smoothing_bits, KIND,
            COMPLETION, SMOOTHED, WEIGHTED, BLOCK,
        )  # fmt: skip
        terms = _of_both(a, t, lam, (pivot, delta), solved, OP, E, RELAXED, HARD)
    else:
        terms = _of_entries(a, lam, pivot, delta, OP, E, RELAXED, HARD)
        if KIND != NO_TARGETS:
            terms -= tl.where(t == 0, 0.0, x * t)
        if COMPLETION == SPREAD:
            terms += tl.where(there & (x > float("-inf")), lam[:, None] * _penalty(t, OP, E), 0.0)
    value = tl.where(invalid, float("nan"), tl.sum(terms, 1) + of_row)
    if KIND != NO_TARGETS:
        value = tl.where(weight == 0, 0.0, value * weight)
    _store_value(value_ptr, part_ptr, row, m, value, weight, REDUCTION)


@triton.jit
def total_kernel(
    part_ptr, loss_ptr, scale_ptr, count, REDUCTION: tl.constexpr, BLOCK: tl.constexpr
):
    """One program: the sum or the mean of what the others left, and what a gradient is multiplied by."""
    at = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float64)
    weight = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, count, BLOCK):
        there = first + at < count
        total += tl.load(part_ptr + 2 * (first + at), mask=there, other=0.0).to(tl.float64)
        weight += tl.load(part_ptr + 2 * (first + at) + 1, mask=there, other=0.0).to(tl.float64)
    size = tl.full((1,), 1.0, tl.float64)
    if REDUCTION == MEAN:
        size = tl.sum(weight, 0) + tl.zeros((1,), tl.float64)
    one = tl.arange(0, 1)
    # The mean of no rows is NaN, and these have no gradient.
    scale = tl.where(size == 0, 0.0, 1.0 / tl.where(size == 0, 1.0, size))
    loss = scale * tl.sum(total, 0)
    loss = tl.where(size == 0, float("nan"), loss).to(scale_ptr.dtype.element_ty)
    tl.store(loss_ptr + one, loss.to(loss_ptr.dtype.element_ty))
    tl.store(scale_ptr + one, scale.to(scale_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["m", "k_bits", "lam_bits", "ignored", "smoothing_bits"])
def value_backward_kernel(
    x_ptr, g_ptr, scale_ptr, k_ptr, lam_ptr, t_ptr, weight_ptr, state_ptr, dx_ptr, dk_ptr, dlam_ptr,
    m, n, g_stride, k_stride, lam_stride, k_bits, lam_bits, ignored, smoothing_bits,
    K_TENSOR: tl.constexpr, LAM_TENSOR: tl.constexpr, OP: tl.constexpr, E: tl.constexpr,
    RELAXED: tl.constexpr, HARD: tl.constexpr, KIND: tl.constexpr, COMPLETION: tl.constexpr,
    SMOOTHED: tl.constexpr, WEIGHTED: tl.constexpr, REDUCTION: tl.constexpr,
    IN_K: tl.constexpr, IN_LAM: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """g (y - t'); in k phi at the threshold, in lam -sum_i r(y_i), which only values are asked for."""
    row, at, there = places(m, n, ROWS, BLOCK)
    x, a = read(x_ptr, at, there, OP, D)
    k, frac, lam, _valid = arguments(
        k_ptr, lam_ptr, k_stride, lam_stride, k_bits, lam_bits, row, m, n, K_TENSOR, LAM_TENSOR, D
    )
    g = tl.load(g_ptr + row.to(tl.int64) * g_stride, mask=row < m, other=0.0).to(D)
    if REDUCTION == MEAN:
        g *= tl.load(scale_ptr).to(D)
    pivot = tl.load(_at(state_ptr, row, 0, m, COMPLETION), mask=row < m, other=float("inf"))
    delta = tl.load(_at(state_ptr, row, 1, m, COMPLETION), mask=row < m, other=0.0)
    y = output(a, k, frac, lam, pivot, delta, OP, E, False, RELAXED, HARD)
    if IN_K:
        soft = (tl.abs(pivot) < float("inf")) & (lam > 0)
        v = tl.where(soft, pivot - lam * delta, 0.0)
        tl.store(
            dk_ptr + row, tl.where(pivot == pivot, g * _phi(v, OP), float("nan")), mask=row < m
        )
    if IN_LAM:
        r = tl.sum(tl.where(a > float("-inf"), _penalty(y, OP, E), 0.0), 1)
        r = tl.where(pivot == pivot, tl.where(lam > 0, -g * r, 0.0), float("nan"))
        tl.store(dlam_ptr + row, r, mask=row < m)
    if is_even(OP):
        y = tl.where(x < 0, 0.0 - y, y)
    if COMPLETION == BEST:  # only y is held, and x read again
        row, at, there = places(m, n, ROWS, BLOCK, tl.max(count_of(y > 0), 0))
        x, a = read(x_ptr, at, there, OP, D)
    if KIND != NO_TARGETS:
        t, weight = _targets(
            t_ptr, weight_ptr, row, at, there, x, m, n, k, frac, ignored, smoothing_bits, KIND,
            COMPLETION, SMOOTHED, WEIGHTED, BLOCK,
        )  # fmt: skip
        if COMPLETION == BEST:
            rest, k_rest, frac_rest = _others(a, t, k, frac, pivot)
            pivot_rest = tl.load(_at(state_ptr, row, 2, m, COMPLETION), mask=row < m, other=0.0)
            delta_rest = tl.load(_at(state_ptr, row, 3, m, COMPLETION), mask=row < m, other=0.0)
            y -= output(
                rest, k_rest, frac_rest, lam, pivot_rest, delta_rest, OP, E, False, RELAXED, HARD
            )
        y -= t
        g *= weight
        y = tl.where((weight == 0)[:, None], 0.0, y)
    else:  # what is infinite does not move
        y = tl.where(tl.abs(x) == float("inf"), 0.0, y)
    limit = largest(dx_ptr.dtype.element_ty)
    dx = g[:, None] * y
    dx = tl.where(dx == dx, tl.minimum(tl.maximum(dx, -limit), limit), dx)
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=there)
