"""Top-k by one scalar per row: no sort, no isotonic problem.

For w = 1_k at most one block of the isotonic solution is pooled, the one around the k boundary. Its
threshold v solves one increasing equation,

    sum_i min(S((a_i - v)/lam), phi'(v)) = k phi'(v),   a = x, or abs(x) for even phi,

and every entry follows from v alone: those below it are left out, those whose response reaches phi'(v)
are selected whole and stand alone, the rest is the block.

Passes over all rows at once, in loops that stop when every row is done. A first loop looks for a pivot
within about lam of the threshold, a second for delta in v = pivot - lam delta, which keeps its digits
whatever the size of the pivot. What a pass needs of a row are sums over its entries, and nothing else:
whoever calls says how they are formed (``Row``), over one array, over many, or over many machines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from .operator import MAGNITUDE, SIGN, TWO_SIDED, Count, Operator
from .root import increasing_root
from .scalars import PNorm, lone_response

Array = Any

# Newton steps that look for a pivot; after them bisection ends in as many steps as a float has bits.
_NEWTON_PASSES = 24


class Row(Protocol):
    """The entries of every row, wherever they are."""

    @property
    def n(self) -> int:
        """How many there are in a row, over all its parts."""

    @property
    def is_bracketed(self) -> bool:
        """Whether ``ends`` are close to the boundary: no guess is better then."""

    def sums(self, f: Callable[[Array], Sequence[Array]]) -> list[Array]:
        """The sums (..., 1) over the row of each of f(x); flags are counted."""

    def ends(self, even: bool, k: Count, lam: Array) -> tuple[Array, Array]:
        """Finite numbers around a_[ceil k], such as the smallest and the largest finite a; 0 if there is
        none."""

    def nth(self, i: Array, dtype: Any, even: bool, wanted: Array) -> Array:
        """a_[i], the i-th largest entry, for i (..., 1) in 1..n, in the rows that are ``wanted``."""


class State(NamedTuple):
    """pivot and delta, (..., 1). Rows that have no threshold pivot - lam delta:

    - (NaN, 0): a NaN, an infinity that has no meaning, or a bad k or lam;
    - (-inf, 0): every candidate is selected, nothing is relaxed;
    - (inf, 0): k = 0;
    - (inf, c): c > k entries are +inf and share k;
    - lam = 0: (x_[ceil k], what is left for the entries equal to it).
    """

    pivot: Array
    delta: Array


def key(xp: Any, x: Array) -> Array:
    """Integers in the order of the floats."""
    bits = xp.bits(x)
    info = xp.iinfo(bits.dtype)
    # -0 is 0, but what a processor may take for 0, a subnormal number, is not: bisection must move.
    return xp.where(bits == info.min, 0, xp.where(bits < 0, bits ^ info.max, bits))


def from_key(xp: Any, key: Array, dtype: Any) -> Array:
    """The inverse of ``key``."""
    return xp.from_bits(xp.where(key < 0, key ^ xp.iinfo(key.dtype).max, key), dtype)


def _between(xp: Any, lo: Array, hi: Array) -> tuple[Array, Array]:
    """The float in the middle of two as floats are counted, and whether there is none between them.

    So a bisection takes as many steps as the dtype has bits, whatever the scale.
    """
    low, high = key(xp, lo), key(xp, hi)
    middle = (low >> 1) + (high >> 1) + (low & high & 1)
    return from_key(xp, middle, lo.dtype), (middle <= low) | (high <= low)


def _next(xp: Any, x: Array, by: int) -> Array:
    """The finite float after x, or (``by`` = -1) before it."""
    limit = float(xp.finfo(x.dtype).max)
    return xp.clip(from_key(xp, key(xp, x) + by, x.dtype), -limit, limit)


def order_statistic(xp: Any, row: Row, i: Array, dtype: Any, even: bool, wanted: Array) -> Array:
    """``Row.nth`` by counting: bit by bit, the largest key that at least i entries reach."""

    def keys(x: Array) -> Array:
        return key(xp, xp.astype(xp.abs(x) if even else x, dtype))

    start = key(xp, xp.astype(xp.zeros_like(i), dtype))
    info = xp.iinfo(start.dtype)
    one = start * 0 + 1

    def step(bit: Any, found: Array) -> Array:
        trial = found | (one << (info.bits - 2 - bit))
        reached = row.sums(lambda x: [keys(x) >= trial])[0]
        return xp.where(reached >= i, trial, found)

    found = xp.where(row.sums(lambda x: [keys(x) >= 0])[0] >= i, start, start + info.min)
    return from_key(xp, xp.repeat(info.bits - 1, step, found, when=wanted), dtype)


def state_of(
    xp: Any, row: Row, k: Count, lam: Array, operator: Operator, hard: bool | None = None
) -> State:
    """The state of rows for k and lam (..., 1), in the dtype of lam; n > 0.

    ``hard`` says whether the rows have lam = 0: all, none, or (None) some may.
    """
    even, dtype = operator.phi(xp).even, lam.dtype
    bad, count, infinite = row.sums(
        lambda x: [~xp.isfinite(x) if even else xp.isnan(x), x > -xp.inf, x == xp.inf]
    )
    invalid = (bad > 0) | ~((lam >= 0) & (lam < xp.inf)) | ~k.is_valid(row.n)
    whole, frac = xp.where(invalid, 0, k.whole), xp.where(invalid, 0.0, k.frac)
    k = Count(whole, frac)

    crowded = infinite - whole > frac
    nothing = (whole == 0) & (frac == 0)
    everything = (whole >= count) & ~nothing
    if operator.op == SIGN:  # the signed mask may take less than k
        everything = xp.zeros_like(everything)
    special = invalid | crowded | nothing | everything

    state = State(xp.zeros_like(lam), xp.zeros_like(lam))
    if hard is not True:
        soft = ~special & (lam > 0)
        problem = _Problem(xp, row, k, xp.where(soft, lam, 1.0), operator)
        state = problem.find(soft)
    if hard is not False:
        rows = ~special & (lam == 0)
        last = xp.clip(whole + (frac > 0), 1, None)
        boundary = row.nth(last, dtype, even, rows)
        over = row.sums(lambda x: [xp.astype(xp.abs(x) if even else x, dtype) > boundary])[0]
        left = xp.astype(whole - over, dtype) + frac
        state = State(xp.where(rows, boundary, state.pivot), xp.where(rows, left, state.delta))
    # From the special to the more special: what comes later overrides.
    pivot = xp.where(everything, -xp.inf, state.pivot)
    pivot = xp.where(nothing | crowded, xp.inf, pivot)
    delta = xp.where(special, 0.0, state.delta)
    delta = xp.where(crowded & ~nothing, xp.astype(infinite, dtype), delta)
    return State(xp.where(invalid, xp.nan, pivot), xp.where(invalid, 0.0, delta))


class _Search(NamedTuple):
    """Where the threshold is looked for: it is in [lo, hi], and Newton's method is at v."""

    v: Array
    lo: Array
    hi: Array
    # Where Newton's method goes from v. It is computed in the loop, once: a compiler that computes it
    # again elsewhere, and fuses the product and the difference in one of the places, has two pivots.
    next: Array
    near: Array  # rows in which that may be the pivot


class _Problem(NamedTuple):
    """Rows with lam > 0, of which some are to be solved."""

    xp: Any
    row: Row
    k: Count
    lam: Array
    operator: Operator

    @property
    def _even(self) -> bool:
        return self.operator.phi(self.xp).even

    @property
    def _count(self) -> Array:
        """floor(k), at least 1."""
        return self.xp.clip(self.xp.astype(self.k.whole, self.lam.dtype), 1.0, None)

    def sums(self, f: Callable[[Array], Sequence[Array]]) -> list[Array]:
        """Over a = x or |x|, in the dtype of lam."""
        xp, even, dtype = self.xp, self._even, self.lam.dtype
        return self.row.sums(lambda x: f(xp.astype(xp.abs(x) if even else x, dtype)))

    def find(self, rows: Array) -> State:
        """The state; (0, 0) where the threshold of an even phi ends at 0."""
        xp = self.xp
        pinned = self._pinned() if self._even else xp.zeros_like(rows)
        rows = rows & ~pinned
        if self._steepest < 1.0:
            pivot, delta = self._from_entries(rows)
        else:
            pivot, delta = self._delta(self._pivot(rows), rows)
        if not self._even:
            return State(pivot, delta)
        pinned = pinned | (delta >= pivot / self.lam)
        return State(xp.where(pinned, 0.0, pivot), xp.where(pinned, 0.0, delta))

    @property
    def _steepest(self) -> float:
        """The exponent of S where it leaves 0; below 1, for p > 2, S is as steep as it likes there."""
        reg = self.operator.reg(self.xp)
        return reg.exponent if isinstance(reg, PNorm) else 1.0

    def _from_entries(self, rows: Array) -> State:
        """With a_[floor k + 1] as the pivot, which is within lam of the threshold.

        Where S is steep at 0, entries next to the threshold need every digit of t, which only the
        distance to an entry gives.
        """
        xp, lam = self.xp, self.lam
        whole, frac = self.k
        last = xp.clip(whole + (frac > 0), 1, None)
        boundary = self.row.nth(last, lam.dtype, self._even, rows)
        pivot = self.row.nth(xp.clip(whole + 1, None, self.row.n), lam.dtype, self._even, rows)
        pivot = xp.where(xp.isfinite(pivot), pivot, 0.0)
        apart = ~xp.isfinite(boundary)
        boundary = xp.where(apart, pivot, xp.maximum(boundary, pivot))
        lo = xp.zeros_like(lam)
        hi = self._alone(boundary) - (boundary - pivot) / lam
        if self.operator.op == SIGN:
            hi = xp.minimum(hi, pivot / lam)
        hi = xp.where(apart, lo, xp.maximum(hi, lo))
        delta = self._root(pivot, lo, hi, lo + (hi - lo) / 2, rows)
        return self._from_nearest(State(pivot, delta), rows)

    def _from_nearest(self, at: State, rows: Array) -> State:
        """The same threshold, measured from the entry that is nearest to it: of an entry at t = 1e-16, S
        is 0.03 for p = 12. With that entry as the pivot its t is delta, and has all its digits."""
        xp, lam = self.xp, self.lam

        def distance(a: Array) -> Array:
            return (a - at.pivot) / lam + at.delta

        over = self.sums(lambda a: [distance(a) > 0])[0]
        above, below = (
            self.row.nth(xp.clip(i, 1, self.row.n), lam.dtype, self._even, rows)
            for i in (over, over + 1)
        )
        above, below = (xp.where(xp.isfinite(a), a, at.pivot) for a in (above, below))
        nearer = xp.abs(distance(below)) < xp.abs(distance(above))
        pivot = xp.where(nearer, below, above)
        t = distance(pivot)
        rounding = 256.0 * float(xp.finfo(lam.dtype).eps) * (xp.abs(at.delta) + xp.abs(t))
        return State(pivot, self._root(pivot, t - rounding, t + rounding, t, rows))

    def _pinned(self) -> Array:
        """Rows that leave a part of k at the threshold 0."""
        if self.operator.op == SIGN:
            zero = self.xp.zeros_like(self.lam)
            return self.equation(zero, zero)[0] <= 0
        return self.sums(lambda a: [a > 0])[0] <= self.k.whole

    def equation(self, pivot: Array, delta: Array) -> tuple[Array, Array, Array]:
        """Left side minus right side, which increases with delta; the Newton step; the right side."""
        xp, lam = self.xp, self.lam
        reg, phi = self.operator.reg(xp), self.operator.phi(xp)
        v = pivot - lam * delta
        linear = isinstance(reg, PNorm) and reg.exponent == 1.0

        def terms(a: Array) -> list[Array]:
            t = (a - pivot) / lam + delta
            response, slope = reg.response_and_slope(xp.clip(t, reg.zero, None))
            reached = t >= 1.0 if phi.straight else response >= phi.prime(v)
            inside = (t > reg.zero) & ~reached
            slope = inside if linear else xp.where(inside, slope, 0.0)
            return [xp.where(inside, response, 0.0), slope, (t > reg.zero) & reached]

        mass, slope, taken = self.sums(terms)
        left = xp.astype(self.k.whole - taken, lam.dtype) + self.k.frac
        slope = xp.astype(slope, lam.dtype) + lam * phi.curvature(v, left)
        # As sum_i z_i - k, whose size tells how far it is from the solution; for x^2/2 the difference
        # mass - left v would vanish with v.
        value = xp.where(mass > 0, mass / phi.prime(v), 0.0) - left
        step = xp.where(value == 0, 0.0, (left * phi.prime(v) - mass) / slope)
        e = 1.0 / reg.exponent
        if isinstance(reg, PNorm) and phi.straight and e != 1.0:
            # Newton on mass^(p-1): linear in delta for one entry, nearly for many
            power = (mass - mass ** (1.0 - e) * xp.clip(left, 0.0, None) ** e) / (e * slope)
            step = xp.where((mass > 0) & (left > 0), -power, step)
        # The same where nothing is left: the mass must vanish, and S is flat where it does. A little
        # further, so that rounding leaves no entry at t > 0 with an S(t) that underflows.
        step = xp.where((mass > 0) & (left == 0), -1.01 * mass / (e * slope), step)
        return value, step, left

    def _pivot(self, rows: Array) -> _Search:
        """By Newton's method or bisection, until the threshold is between two floats close together."""
        xp = self.xp
        lo, hi, start = self._bracket()
        # With a larger delta, n entries t lose more digits than k has.
        small = 8.0 * self._count / self.row.n
        # In float64 there are digits to spare, and where passes are collectives none is to be lost.
        precise = self.row.is_bracketed and xp.finfo(lo.dtype).bits == 64

        def step(i: Any, at: _Search) -> _Search:
            value, newton, _ = self.equation(at.v, xp.zeros_like(at.v))
            lo = xp.where(~at.near & (value >= 0), at.v, at.lo)
            hi = xp.where(~at.near & (value <= 0), at.v, at.hi)
            middle, adjacent = _between(xp, lo, hi)
            narrow = self._narrow(lo, hi)
            near = at.near | adjacent | (narrow & (xp.abs(newton) <= small))
            near = near | narrow if precise else near
            move, least = -self.lam * newton, 0.5 * self.lam
            if self._even:
                least = xp.minimum(least, 0.5 * at.v)
            # Newton's method comes from one side: one step that is longer ends on the other.
            short = ~narrow & (xp.abs(move) < least)
            target = at.v + xp.where(short, move + least * xp.sign(value), move)
            by_newton = (i % 4 != 3) & (i < _NEWTON_PASSES)
            use_newton = (target > lo) & (target < hi) & by_newton
            v = xp.where(near, at.v, xp.where(use_newton, target, middle))
            ahead = xp.minimum(xp.maximum(at.v + move, lo), hi)
            return _Search(v, lo, hi, xp.where(at.near, at.next, ahead), near)

        first = _Search(start, lo, hi, start, ~rows)
        limit = _NEWTON_PASSES + xp.finfo(lo.dtype).bits
        return xp.while_loop(lambda at: ~at.near, step, first, limit)

    def _narrow(self, lo: Array, hi: Array) -> Array:
        """Whether all of [lo, hi] is of the threshold's size, and as close as its block is wide."""
        narrow = hi - lo <= 2.0 * self._reach(hi)
        return narrow & (hi <= 16.0 * lo) if self._even else narrow

    def _reach(self, v: Array) -> Array:
        """How far over a threshold near v entries are selected whole: lam, but for magnitudes."""
        if self.operator.op != MAGNITUDE:
            return self.lam
        return self.lam * self._alone(self.xp.clip(v, 0.0, None))

    def _alone(self, a: Array) -> Array:
        xp = self.xp
        one = xp.ones_like(self.lam)
        return lone_response(a, one, self.lam, self.operator.reg(xp), self.operator.phi(xp))

    def _bracket(self) -> tuple[Array, Array, Array]:
        """The ends of the threshold, and a guess: its place if the entries were Gaussian."""
        xp, lam, even = self.xp, self.lam, self._even
        zero = self.operator.reg(xp).zero
        bottom, top = (xp.astype(end, lam.dtype) for end in self.row.ends(even, self.k, lam))
        limit = float(xp.finfo(lam.dtype).max)
        # What an entry at the lower end has as its threshold if it stands alone. One float further: what
        # is added may be too small to count, or be rounded.
        alone = self._alone(bottom)
        lo = bottom - lam * alone
        if self.operator.op == MAGNITUDE:  # S(d) = u: precise also where it is tiny
            lo = self.operator.reg(xp).response(alone) * (
                1.0 - 64.0 * float(xp.finfo(lo.dtype).eps)
            )
        lo = _next(xp, xp.clip(lo, 0.0 if even else -limit, None), -1)
        lo = xp.clip(lo, 0.0, None) if even else lo
        hi = _next(xp, xp.clip(top - lam * zero, None, limit), 1)

        if self.row.is_bracketed:
            return lo, hi, xp.minimum(xp.maximum(bottom / 2 + top / 2, lo), hi)
        guess = self._normal_guess(bottom, top)
        return lo, hi, xp.minimum(xp.maximum(guess, lo), hi)

    def _normal_guess(self, bottom: Array, top: Array) -> Array:
        xp, lam, even = self.xp, self.lam, self._even
        # In units that cannot overflow; around the middle, so that a common shift costs no digits.
        middle = xp.zeros_like(lam) if even else bottom / 2 + top / 2
        unit = xp.clip(top / 2 - bottom / 2, float(xp.finfo(lam.dtype).tiny), None)

        def moments(a: Array) -> list[Array]:
            finite = xp.isfinite(a)
            z = xp.where(finite, (a - middle) / unit, 0.0)
            return [finite, z, z * z]

        count, first, second = self.sums(moments)
        count = xp.clip(xp.astype(count, lam.dtype), 1.0, None)
        mean = xp.zeros_like(lam) if even else first / count
        spread = unit * xp.sqrt(xp.clip(second / count - mean * mean, 0.0, None))
        share = (xp.astype(self.k.whole, lam.dtype) + self.k.frac) / count
        z = _normal_quantile(xp, share / 2 if even else share)
        one_sided = self.operator.reg(xp).zero == 0
        guess = middle + unit * mean + spread * z - (0.5 * lam if one_sided else 0.0)
        return xp.where(xp.isnan(guess), bottom, xp.minimum(xp.maximum(guess, bottom), top))

    def _delta(self, at: _Search, rows: Array) -> State:
        """The pivot and delta, from where the search ended.

        Either the bracket is within a few lam: then the pivot is where Newton's method goes next, as
        the smaller delta, the more digits t has, and delta is bracketed by the same ends. Or there is
        no float between the ends, and lam is smaller than their distance: then the block is at one of
        them, or there is none, and the other is far away in units of lam.
        """
        xp, lam = self.xp, self.lam
        pivot = at.next
        # The ends are in units of lam: a little wider, as they are rounded.
        wider = 1.0 + 4.0 * float(xp.finfo(pivot.dtype).eps)
        lo, hi = ((pivot - end) * wider / lam for end in (at.hi, at.lo))
        _, adjacent = _between(xp, at.lo, at.hi)
        apart = adjacent & (at.hi - at.lo >= 2.0 * self._reach(at.hi))
        at_lo = emptied = xp.zeros_like(apart)
        if self.operator.op == TWO_SIDED:
            over = self.sums(lambda a: [a >= at.hi])[0]
            at_lo = apart & (self.k.whole >= over)
            emptied = at_lo & (self.k.whole == over) & (self.k.frac == 0)
        pivot = xp.where(apart, xp.where(at_lo, at.lo, at.hi), pivot)
        alone = self._alone(xp.clip(pivot, 0.0, None) if self._even else pivot)
        zero = xp.full_like(lo, self.operator.reg(xp).zero)
        lo = xp.where(apart, xp.where(at_lo, zero, 0.0), lo)
        # Of what has nothing left S ends at 0 exactly, so flat there that a search would stop before.
        hi = xp.where(apart, xp.where(at_lo, xp.where(emptied, zero, 0.0), alone), hi)
        start = xp.where(apart, (lo + hi) / 2, 0.0)
        return State(pivot, self._root(pivot, lo, hi, start, rows))

    def _root(self, pivot: Array, lo: Array, hi: Array, start: Array, rows: Array) -> Array:
        xp, steepest = self.xp, self._steepest
        # What n entries with this error add up to is lost in k. For p > 2 a response is as steep as it
        # likes near 0: every digit of delta counts.
        unit = xp.zeros_like(lo)
        if steepest >= 1.0:
            unit = xp.minimum(hi - lo, self._count / self.row.n)
            if self.operator.op == MAGNITUDE:  # t is no larger than of an entry that stands alone
                unit = xp.minimum(unit, self._alone(xp.clip(pivot, 0.0, None)))
        return increasing_root(
            xp,
            lambda delta: self.equation(pivot, delta),
            lo,
            hi,
            start=start,
            tol=4 * float(xp.finfo(lo.dtype).eps) * max(1.0, steepest),
            unit=unit,
            rows=rows,
        ).best


def _normal_quantile(xp: Any, share: Array) -> Array:
    """z that a standard normal variable exceeds with this probability, to 5e-4 (Hastings, 1955)."""
    upper = share > 0.5
    tail = xp.clip(xp.where(upper, 1.0 - share, share), float(xp.finfo(share.dtype).tiny), None)
    t = xp.sqrt(-2.0 * xp.log(tail))
    top = 2.515517 + t * (0.802853 + t * 0.010328)
    z = t - top / (1.0 + t * (1.432788 + t * (0.189269 + t * 0.001308)))
    return xp.where(upper, -z, z)
