# mypy: ignore-errors
"""The threshold of every row of a tile in registers: ``_maths/threshold.py`` in a program of its own.

A tile a (rows, entries) holds x, or |x|, in the dtype of the computation, and -inf where there is
nothing; what there is one of for a row is (rows,). A loop ends when all rows of the tile are done.

In the place of a tile the searches take one row in memory too, as a pointer and a count: what they ask
for are sums over the entries, counts, and the ends.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .scalars import (
    MAGNITUDE,
    SIGN,
    TWO_SIDED,
    alone,
    between,
    epsilon,
    from_key,
    is_even,
    is_steep,
    key,
    largest,
    next_float,
    normal_quantile,
    power,
    respond,
    tiny,
    zero_of,
)

_NEWTON_PASSES = tl.constexpr(24)  # that look for a pivot; after them bisection ends
_LIMIT = tl.constexpr(200)  # no loop comes near it
TILE = tl.constexpr(4096)  # of a row in memory


@triton.constexpr_function
def in_memory(a):
    return isinstance(a, (tuple, tl.tuple))


@triton.jit
def any_of(rows):
    return tl.max(rows.to(tl.int32), 0) > 0


@triton.jit
def count_of(flags):
    """How many entries of every row are set."""
    return tl.sum(flags.to(tl.int32), 1)


@triton.jit
def tile_of(a, start):
    """The entries of a row in memory from ``start`` on."""
    ptr, count = a
    at = start + tl.arange(0, TILE)
    return tl.load(ptr + at, mask=at < count, other=float("-inf"))[None, :]


@triton.jit
def count_from(a, level):
    """How many entries reach a level."""
    if in_memory(a):
        count = tl.zeros_like(level).to(tl.int32)
        for start in range(0, a[1], TILE):
            count += count_of(tile_of(a, start) >= level[:, None])
    else:
        count = count_of(a >= level[:, None])
    return count


@triton.jit
def ends_from(a, level):
    """The smallest entry that reaches a level, and the largest; inf and -inf if there is none."""
    if in_memory(a):
        lo = tl.full(level.shape, float("inf"), level.dtype)
        hi = tl.full(level.shape, float("-inf"), level.dtype)
        for start in range(0, a[1], TILE):
            part = tile_of(a, start)
            reached = part >= level[:, None]
            lo = tl.minimum(lo, tl.min(tl.where(reached, part, float("inf")), 1))
            hi = tl.maximum(hi, tl.max(tl.where(reached, part, float("-inf")), 1))
    else:
        reached = a >= level[:, None]
        lo = tl.min(tl.where(reached, a, float("inf")), 1)
        hi = tl.max(tl.where(reached, a, float("-inf")), 1)
    return lo, hi


@triton.jit
def _sums(a, pivot, delta, v, inv, OP: tl.constexpr, E: tl.constexpr):
    """``tile_sums`` of a tile, or of a row in memory: in float64 then, as it may be long."""
    if in_memory(a):
        mass = tl.zeros_like(pivot).to(tl.float64)
        total = tl.zeros_like(mass)
        taken = tl.zeros_like(pivot).to(tl.int32)
        for start in range(0, a[1], TILE):
            more, slope, whole = tile_sums(tile_of(a, start), pivot, delta, v, inv, OP, E)
            mass += more.to(tl.float64)
            total += slope.to(tl.float64)
            taken += whole
        mass = mass.to(pivot.dtype)
        total = total.to(pivot.dtype)
    else:
        mass, total, taken = tile_sums(a, pivot, delta, v, inv, OP, E)
    return mass, total, taken


@triton.jit
def tile_sums(a, pivot, delta, v, inv, OP: tl.constexpr, E: tl.constexpr):
    """Over the block, S(t) and S'(t); and how many entries are selected whole."""
    ZERO: tl.constexpr = zero_of(OP)
    t = (a - pivot[:, None]) * inv[:, None] + delta[:, None]
    y, slope = respond(t, OP, E)
    reached = y >= v[:, None] if OP == MAGNITUDE else t >= 1.0
    inside = (t > ZERO) & ~reached
    whole = (t > ZERO) & reached
    mass = tl.sum(tl.where(inside, y, 0.0), 1)
    if E == 1.0:  # the slope is a count: two counts in one sum
        both = tl.sum(tl.where(inside, 1, tl.where(whole, 65536, 0)), 1)
        total = (both & 65535).to(a.dtype) * (0.5 if OP == TWO_SIDED else 1.0)
        taken = both >> 16
    else:
        total = tl.sum(tl.where(inside, slope, 0.0), 1)
        taken = count_of(whole)
    return mass, total, taken


@triton.jit
def _equation(a, pivot, delta, k, frac, lam, inv, OP: tl.constexpr, E: tl.constexpr):
    """sum_i z_i - k, which increases with delta; the step of Newton's method; what is left of k."""
    v = pivot - lam * delta
    mass, slope, taken = _sums(a, pivot, delta, v, inv, OP, E)
    left = (k - taken).to(lam.dtype) + frac
    share = mass
    target = left
    if OP == MAGNITUDE:
        slope += lam * left
        share = tl.where(mass > 0, mass / v, 0.0)
        target = left * v
    value = share - left
    step = tl.where(value == 0, 0.0, (target - mass) / slope)
    if E != 1.0 and OP != MAGNITUDE and OP != TWO_SIDED:
        # Newton's method on mass^(p-1): linear in delta for one entry, nearly for many
        ROOT: tl.constexpr = 1.0 / E
        bent = power(tl.maximum(left, 0.0) / tl.where(mass > 0, mass, 1.0), ROOT)
        step = tl.where((mass > 0) & (left > 0), (bent - 1.0) * mass * E / slope, step)
    # Where nothing is left, the mass must vanish, and S is flat where it does: a little further.
    gone = (mass > 0) & (left == 0)
    return value, tl.where(gone, -1.01 * E * mass / slope, step), left


@triton.jit
def nth(a, i, rows, guess):
    """a_[i], the i-th largest entry, in rows that have so many; from a guess, by interpolation of the
    counts and bisection. Done as soon as exactly i entries reach a number."""
    least = tl.full(guess.shape, -largest(guess.dtype), guess.dtype)
    lo, hi = ends_from(a, least)  # lo is reached by i or more
    over = tl.full(i.shape, 0, tl.int32)  # how many are above hi, at least; and from lo on
    upto = count_from(a, least)
    todo = rows & (lo < hi)
    trial = tl.minimum(tl.maximum(guess, lo), hi)
    passes = 0
    while any_of(todo) & (passes < _LIMIT):
        reached = count_from(a, trial)
        enough = reached >= i
        below = from_key(key(trial) - 1)
        lo = tl.where(todo & enough, trial, lo)
        upto = tl.where(todo & enough, reached, upto)
        hi = tl.where(todo & ~enough, below, hi)
        over = tl.where(todo & ~enough, reached, over)
        todo = todo & (reached != i) & (key(lo) < key(hi))
        low, high = key(lo), key(hi)
        middle = from_key((low >> 1) + (high >> 1) + ((low | high) & 1))
        share = (upto - i).to(lo.dtype) + 0.5
        between_counts = lo + (hi - lo) * (share / tl.maximum(upto - over, 1).to(lo.dtype))
        use = (between_counts > lo) & (between_counts <= hi) & (passes % 3 != 2) & (passes < 12)
        trial = tl.where(todo, tl.where(use, between_counts, middle), trial)
        passes += 1
    return ends_from(a, lo)[0]


@triton.jit
def finite_ends(a):
    """The smallest and the largest finite entry; 0 if there is none."""
    limit = largest(a.dtype)
    finite = (a >= -limit) & (a <= limit)
    lo = tl.min(tl.where(finite, a, float("inf")), 1)
    hi = tl.max(tl.where(finite, a, float("-inf")), 1)
    some = lo <= hi
    return tl.where(some, lo, 0.0), tl.where(some, hi, 0.0)


@triton.jit
def normal_guess(a, bottom, top, k, OP: tl.constexpr):
    """The place of a_[k] if the entries were Gaussian, in units that cannot overflow."""
    limit = largest(a.dtype)
    middle = 0.0 * bottom if is_even(OP) else 0.5 * bottom + 0.5 * top
    unit = tl.maximum(0.5 * top - 0.5 * bottom, tiny(a.dtype))
    unit = tl.maximum(unit, top) if is_even(OP) else unit
    finite = (a >= -limit) & (a <= limit)
    z = tl.where(finite, (a - middle[:, None]) / unit[:, None], 0.0)
    number = tl.maximum(count_of(finite), 1).to(a.dtype)
    mean = 0.0 * unit if is_even(OP) else tl.sum(z, 1) / number
    spread = tl.sqrt(tl.maximum(tl.sum(z * z, 1) / number - mean * mean, 0.0))
    share = k / number
    quantile = normal_quantile(0.5 * share if is_even(OP) else share)
    guess = middle + unit * (mean + spread * quantile)
    return tl.minimum(tl.maximum(guess, bottom), top)


@triton.jit
def bracket(bottom, top, lam, OP: tl.constexpr, E: tl.constexpr):
    """The ends of the threshold, one float further: what is added may be too small to count."""
    limit = largest(lam.dtype)
    if OP == MAGNITUDE:  # S(d) = u: precise also where it is tiny
        lo, _ = respond(alone(bottom, lam, OP, E), OP, E)
        lo = lo * (1.0 - 64.0 * epsilon(lam.dtype))
    else:
        lo = bottom - lam
    lo = next_float(tl.maximum(lo, 0.0 if is_even(OP) else -limit), -1)
    lo = tl.maximum(lo, 0.0) if is_even(OP) else lo
    hi = tl.minimum(top - lam * zero_of(OP), limit)
    return lo, next_float(hi, 1)


@triton.jit
def _narrow(lo, hi, lam, OP: tl.constexpr):
    """Whether every float in [lo, hi] is of the threshold's size, and within a few lam of it."""
    near = hi - lo <= 2.0 * lam
    if is_even(OP):
        near = near & (hi <= 16.0 * lo)
    return near


@triton.jit
def _find_pivot(a, k, frac, lam, inv, rows, lo, hi, v, small, OP: tl.constexpr, E: tl.constexpr):
    """By Newton's method or bisection, until the threshold is between two floats close together."""
    zero = 0.0 * lam
    last = zero  # what Newton's method adds to delta = 0 at the pivot v
    todo = rows
    passes = 0
    while any_of(todo) & (passes < _LIMIT):
        value, newton, _ = _equation(a, v, zero, k, frac, lam, inv, OP, E)
        lo = tl.where(todo & (value >= 0), v, lo)
        hi = tl.where(todo & (value <= 0), v, hi)
        last = tl.where(todo, newton, last)
        middle, adjacent = between(lo, hi)
        narrow = _narrow(lo, hi, lam, OP)
        move = -lam * newton
        step = tl.minimum(0.5 * lam, 0.5 * v) if is_even(OP) else 0.5 * lam
        # Newton's method comes from one side: one step that is longer ends on the other.
        short = ~narrow & (tl.abs(move) < step)
        target = v + tl.where(short, move + tl.where(value > 0, step, -step), move)
        use = (target > lo) & (target < hi) & (passes % 4 != 3) & (passes < _NEWTON_PASSES)
        near = small * v if OP == MAGNITUDE else small
        todo = todo & ~adjacent & ~(narrow & (tl.abs(newton) <= near))
        v = tl.where(todo, tl.where(use, target, middle), v)
        passes += 1
    return v, lo, hi, last, passes


@triton.jit
def _find_delta(
    a, k, frac, lam, inv, rows, pivot, lo, hi, x, unit, OP: tl.constexpr, E: tl.constexpr
):
    """``_maths/root.py`` on the equation: the delta in [lo, hi] with the smallest residual."""
    eps = epsilon(lam.dtype)
    tol = 4.0 * eps * (E if E > 1.0 or OP == TWO_SIDED else 1.0)
    if is_steep(OP, E):
        tol = 4.0 * eps
    x = tl.minimum(tl.maximum(x, lo), hi)
    best = x
    residual = tl.full(x.shape, float("inf"), x.dtype)
    met = ~rows
    done = ~rows
    width = hi - lo
    passes = 0
    while any_of(~done) & (passes < _LIMIT):
        value, newton, size = _equation(a, pivot, x, k, frac, lam, inv, OP, E)
        lo = tl.where(value <= 0, x, lo)
        hi = tl.where(value >= 0, x, hi)
        better = ~done & (tl.abs(value) <= residual)
        best = tl.where(better, x, best)
        residual = tl.where(better, tl.abs(value), residual)
        rounding = eps * tl.maximum(tl.abs(x), unit)
        middle = lo + (hi - lo) * 0.5
        done = done | met | (value == 0) | (hi - lo <= 4.0 * rounding)
        done = done | (middle <= lo) | (middle >= hi)
        met = (tl.abs(value) <= tol * size) | ((tl.abs(newton) <= 4.0 * rounding) & (size != 0))
        # A step too small to move x: a little further, over the root if it is that close.
        further = tl.where(value > 0, -2.0 * rounding, 2.0 * rounding)
        target = x + tl.where(tl.abs(newton) <= rounding, further, newton)
        use = (target > lo) & (target < hi)
        done = done | (met & ~use)
        slow = (passes % 4 == 3) & (hi - lo > 0.5 * width)
        width = tl.where((passes % 4 == 3) & (hi >= lo), hi - lo, width)
        x = tl.where(done, best, tl.where(use & ~slow, target, middle))
        passes += 1
    return best, passes


@triton.jit
def _relaxed_from_entries(a, k, frac, lam, inv, rows, n, guess, OP: tl.constexpr, E: tl.constexpr):
    """With a_[floor k + 1] as the pivot: where S is steep at 0, only the distance to an entry has every
    digit that t needs."""
    limit = largest(lam.dtype)
    boundary = nth(a, tl.maximum(k + (frac > 0).to(tl.int32), 1), rows, guess)
    pivot = nth(a, tl.minimum(k + 1, n), rows, guess)
    pivot = tl.where((pivot >= -limit) & (pivot <= limit), pivot, 0.0)
    apart = ~((boundary >= -limit) & (boundary <= limit))
    boundary = tl.where(apart, pivot, tl.maximum(boundary, pivot))
    lo = 0.0 * lam
    hi = alone(boundary, lam, OP, E) - (boundary - pivot) * inv
    if OP == SIGN:
        hi = tl.minimum(hi, pivot * inv)
    hi = tl.where(apart, lo, tl.maximum(hi, lo))
    delta, passes = _find_delta(
        a, k, frac, lam, inv, rows, pivot, lo, hi, lo + (hi - lo) * 0.5, lo, OP, E
    )
    return pivot, delta, passes


@triton.jit
def _delta_ends(a, v, lo, hi, newton, k, lam, inv, OP: tl.constexpr, E: tl.constexpr):
    """The pivot, the ends of delta and a start, from where the search for the pivot ended.

    Either [lo, hi] is within a few lam: then the pivot is where Newton's method goes next, and delta
    has the same ends. Or no float is between them, and lam is smaller than their distance: then the
    block is at one of them, or there is none.
    """
    pivot = tl.minimum(tl.maximum(v - lam * newton, lo), hi)
    wider = (1.0 + 4.0 * epsilon(lam.dtype)) * inv
    from_delta = (pivot - hi) * wider
    to_delta = (pivot - lo) * wider
    _, adjacent = between(lo, hi)
    apart = adjacent & (hi - lo >= 2.0 * lam)
    pivot = tl.where(apart, hi, pivot)
    from_apart = 0.0 * lam
    to_apart = alone(tl.maximum(pivot, 0.0) if is_even(OP) else pivot, lam, OP, E)
    if OP == TWO_SIDED:
        at_lo = apart & (k >= count_from(a, hi))
        pivot = tl.where(at_lo, lo, pivot)
        from_apart = tl.where(at_lo, -1.0, from_apart)
        to_apart = tl.where(at_lo, 0.0, to_apart)
    from_delta = tl.where(apart, from_apart, from_delta)
    to_delta = tl.where(apart, to_apart, to_delta)
    start = tl.where(apart, 0.5 * (from_delta + to_delta), 0.0)
    return pivot, from_delta, to_delta, start


@triton.jit
def search(a, k, frac, lam, rows, n, few, lo, hi, start, guess, OP: tl.constexpr, E: tl.constexpr):
    """pivot and delta of the rows that are set, for lam > 0 and a threshold in [lo, hi] that is above 0
    where phi is even, from a start, and a guess of a_[k]; and how many passes it took.

    ``few`` is k of all n entries: with a larger delta, n of them lose more digits than k has. (Of a
    magnitude t is at most v where a mask has 1.)"""
    inv = 1.0 / lam
    if is_steep(OP, E):
        pivot, delta, passes = _relaxed_from_entries(a, k, frac, lam, inv, rows, n, guess, OP, E)
    else:
        v, lo, hi, newton, passes = _find_pivot(
            a, k, frac, lam, inv, rows, lo, hi, start, 8.0 * few, OP, E
        )
        pivot, from_delta, to_delta, start = _delta_ends(a, v, lo, hi, newton, k, lam, inv, OP, E)
        unit = tl.minimum(to_delta - from_delta, few * pivot if OP == MAGNITUDE else few)
        delta, more = _find_delta(
            a, k, frac, lam, inv, rows, pivot, from_delta, to_delta, start, unit, OP, E
        )
        passes += more
    if is_even(OP):
        pinned = delta >= pivot * inv
        pivot = tl.where(pinned, 0.0, pivot)
        delta = tl.where(pinned, 0.0, delta)
    return pivot, delta, passes


@triton.jit
def relaxed_threshold(a, k, frac, lam, rows, n, OP: tl.constexpr, E: tl.constexpr):
    """pivot and delta of the rows that are set, for lam > 0; and how many passes it took."""
    bottom, top = finite_ends(a)
    guess = normal_guess(a, bottom, top, k.to(a.dtype) + frac, OP)
    pinned = rows & False
    if OP == SIGN:
        at_zero, _, _ = _equation(a, 0.0 * lam, 0.0 * lam, k, frac, lam, 1.0 / lam, OP, E)
        pinned = at_zero <= 0
    if OP == MAGNITUDE:
        pinned = count_of(a > 0) <= k
    few = tl.maximum(k.to(a.dtype), 1.0) / n
    lo, hi = bracket(bottom, top, lam, OP, E)
    start = guess if OP == TWO_SIDED else guess - 0.5 * lam
    start = tl.minimum(tl.maximum(tl.maximum(start, bottom), lo), hi)
    pivot, delta, passes = search(
        a, k, frac, lam, rows & ~pinned, n, few, lo, hi, start, guess, OP, E
    )
    return tl.where(pinned, 0.0, pivot), tl.where(pinned, 0.0, delta), passes


@triton.jit
def hard_threshold(a, k, frac, rows, guess):
    """a_[ceil k] and what is left for the entries equal to it, of the rows that are set."""
    boundary = nth(a, tl.maximum(k + (frac > 0).to(tl.int32), 1), rows, guess)
    over = count_from(a, from_key(key(boundary) + 1))
    return boundary, (k - over).to(frac.dtype) + frac


@triton.jit
def specials(k, frac, invalid, infinite, count, OP: tl.constexpr):
    """Rows without a threshold, by the number of entries that are infinite and that are candidates:
    more of the former than k, nothing selected, everything selected."""
    crowded = (infinite - k).to(frac.dtype) > frac
    nothing = (k == 0) & (frac == 0)
    everything = (k >= count) & ~nothing
    if OP == SIGN:  # it may take less than k
        everything = everything & False
    return crowded, nothing, everything, invalid | crowded | nothing | everything


@triton.jit
def as_state(pivot, delta, invalid, infinite, crowded, nothing, everything):
    """See ``_maths.threshold.State``."""
    pivot = tl.where(everything, float("-inf"), pivot)
    pivot = tl.where(nothing | crowded, float("inf"), pivot)
    delta = tl.where(invalid | crowded | nothing | everything, 0.0, delta)
    delta = tl.where(crowded & ~nothing, infinite.to(delta.dtype), delta)
    return tl.where(invalid, float("nan"), pivot), tl.where(invalid, 0.0, delta)


@triton.jit
def solve(
    a, k, frac, lam, invalid, n, OP: tl.constexpr, E: tl.constexpr, RELAXED: tl.constexpr,
    HARD: tl.constexpr,
):  # fmt: skip
    """The state of every row, and how many passes it took. RELAXED and HARD say whether there may be
    rows with lam > 0 and with lam = 0."""
    # Where phi is even, rows with an infinity are invalid.
    infinite = 0 * k if is_even(OP) else count_of(a == float("inf"))
    count = count_of(a > float("-inf"))
    k = tl.where(invalid, 0, k)
    frac = tl.where(invalid, 0.0, frac)
    crowded, nothing, everything, special = specials(k, frac, invalid, infinite, count, OP)
    pivot = 0.0 * lam
    delta = pivot
    passes = 0
    if RELAXED:
        soft = ~special & (lam > 0)
        pivot, delta, passes = relaxed_threshold(
            a, k, frac, tl.where(soft, lam, 1.0), soft, n, OP, E
        )
    if HARD:
        rows = ~special & (lam == 0)
        if any_of(rows):
            bottom, top = finite_ends(a)
            guess = normal_guess(a, bottom, top, k.to(a.dtype) + frac, OP)
            boundary, left = hard_threshold(a, k, frac, rows, guess)
            pivot = tl.where(rows, boundary, pivot)
            delta = tl.where(rows, left, delta)
    pivot, delta = as_state(pivot, delta, invalid, infinite, crowded, nothing, everything)
    return pivot, delta, passes
