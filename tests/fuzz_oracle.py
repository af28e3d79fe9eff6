"""What the fuzzer holds the package against: bisection of the optimality conditions, many rows at once.

It shares nothing with the package. In float64, and with enough digits: the threshold of a row is found
as its distance to one of the entries, by bisection over all floats there are, so that neither a common
shift nor a tiny lam costs any. The derivatives are the closed forms of docs/maths.md.

An answer comes with what a computation may be off by: it is the answer at thresholds a few roundings
away, so that what is steep or ill-conditioned has room where it is so, and nowhere else.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

KINDS = ("mask", "two-sided", "sign", "magnitude", "debiased")
LARGEST = np.finfo(np.float64).max


class Rows(NamedTuple):
    """Rows x (m, n), each with its k and lam (m, 1), a cotangent of y, and tangents of all three."""

    x: np.ndarray
    k: np.ndarray
    lam: np.ndarray
    g: np.ndarray
    dx: np.ndarray
    dk: np.ndarray
    dlam: np.ndarray


class Answer(NamedTuple):
    y: np.ndarray
    x: np.ndarray  # the cotangents
    k: np.ndarray
    lam: np.ndarray


class Bounds(NamedTuple):
    """The answer, how far from it a computation may be, and rows where its derivatives jump close by."""

    answer: Answer
    slack: Answer
    jumps: np.ndarray
    mass: np.ndarray  # the part of k that is shared


def total(values):
    return values.sum(-1, keepdims=True)


def from_key(key):
    """The float64 numbers in their order, as integers."""
    return np.where(key < 0, key ^ np.int64(2**63 - 1), key).view(np.float64)


def to_key(x):
    bits = np.ascontiguousarray(x, np.float64).view(np.int64)
    return np.where(bits < 0, bits ^ np.int64(2**63 - 1), bits)


def bisect(lo, hi, is_below):
    """Over the floats between two, as they are counted: exact after 64 steps, whatever the scale."""
    lo, hi = to_key(lo), to_key(hi)
    for _ in range(64):
        middle = (lo >> 1) + (hi >> 1) + (lo & hi & 1)
        below = is_below(from_key(middle))
        lo, hi = np.where(below, middle, lo), np.where(below, hi, middle)
    return from_key(hi)


class Curve(NamedTuple):
    """S, its slope and its inverse."""

    p: float
    two_sided: bool

    @property
    def zero(self):
        return -1.0 if self.two_sided else 0.0

    @property
    def e(self):
        """1/(p - 1); a whole number where p was meant so and rounded, as in 1.1 or 4/3."""
        e = 1 / (self.p - 1)
        return round(e) if abs(e - round(e)) < 1e-12 * e else e

    def __call__(self, t):
        e = self.e
        if not self.two_sided:
            t = np.maximum(t, 0.0)
            y = t**e
            return y, np.where(t > 0, e * y / np.where(t > 0, t, 1.0), 0.0)
        away = np.minimum(np.abs(t), 1.0)
        y = self._half(away)
        rest = 2 - self.p
        with np.errstate(divide="ignore"):
            slope = e / (np.where(y > 0, y, 1.0) ** -rest + (1 - y) ** -rest)
        slope = np.where((y > 0) & (away < 1), slope, 0.0)
        return np.where(t > 0, 1 - y, y), slope

    def _half(self, away):
        """y in [0, 1/2] with y^(p-1) - (1-y)^(p-1) = -away, by Newton's method."""
        a = 1 / self.e
        if a == 1:
            return (1 - away) / 2
        if a < 1:  # in c = y^(p-1), where the slope is between 1 and 2
            c = np.minimum(1 - away, 0.5**a)
            for _ in range(14):
                y = c**self.e
                slope = 1 + (y / (1 - y)) ** (1 - a)
                c = np.clip(c - (c - (1 - y) ** a + away) / slope, 0.0, 0.5**a)
            return c**self.e
        with np.errstate(divide="ignore"):
            y = np.minimum(-np.expm1(np.log(away) / a), 0.5)
        for _ in range(14):
            slope = a * (y ** (a - 1) + (1 - y) ** (a - 1))
            y = np.clip(y - (y**a - (1 - y) ** a + away) / slope, 0.0, 0.5)
        return y

    def inverse(self, y):
        return np.asarray(y, np.float64) ** (1 / self.e)


class Parts(NamedTuple):
    """What an answer is made of: S and S' in the block, what k leaves for it, the slope of the equation,
    phi'(v), and the parts of the derivative in lam."""

    s: np.ndarray
    rho: np.ndarray
    left: np.ndarray
    flat: np.ndarray
    prime: np.ndarray | float
    whole_lam: np.ndarray
    share: np.ndarray


class Solved(NamedTuple):
    """t of every entry and v of its row, at the threshold."""

    t: np.ndarray
    v: np.ndarray


class Oracle:
    """One kind of operator on some rows."""

    def __init__(self, kind: str, p: float, rows: Rows) -> None:
        self.kind, self.rows = kind, rows
        self.curve = Curve(p, kind == "two-sided")
        self.curved = kind in ("magnitude", "debiased")
        even = self.curved or kind == "sign"
        self.sign = np.where(rows.x < 0, -1.0, 1.0) if even else np.ones_like(rows.x)
        self.a = rows.x * self.sign
        self.n = rows.x.shape[-1]
        self.s = -np.sort(-self.a, axis=-1)
        nonzero = total(self.a > 0) if self.curved else self.n
        self.nothing = rows.k == 0
        self.everything = (rows.k >= nonzero) & ~self.nothing & (kind != "sign")
        self.pinned = np.zeros_like(self.nothing)
        if kind == "sign":
            self.over = self._excess(Solved(self.a / rows.lam, 0 * rows.lam))  # at a threshold of 0
            self.pinned = self.over <= 0
        self.alone = self._alone(self.a) if self.curved else np.ones_like(self.a)

    def _alone(self, a):
        """d with S(d) + lam d = a."""
        lam, reach = self.rows.lam, np.minimum(a / self.rows.lam, self.curve.inverse(a))
        return bisect(0 * a, reach, lambda d: self.curve(d)[0] + lam * d < a)

    def _top(self, v):
        """The t from which on an entry is selected whole."""
        return self.curve.inverse(v) if self.curved else np.ones_like(v)

    def _excess(self, at):
        """sum_i min(S(t_i), phi'(v)) - k phi'(v), over phi'(v)."""
        top = self._top(at.v)
        inside = (at.t > self.curve.zero) & (at.t < top)
        mass = total(np.where(inside, self.curve(np.where(inside, at.t, 0.0))[0], 0.0))
        left = self.rows.k - total(at.t >= top)
        return np.where(mass > 0, mass / (at.v if self.curved else 1.0), 0.0) - left

    def _from(self, pivot, delta):
        away = (self.a - pivot) / self.rows.lam
        return Solved(away + delta, pivot - self.rows.lam * delta)

    def _near(self, pivot):
        """The threshold as its distance to the pivot."""
        far = np.full_like(pivot, LARGEST / 4)
        most = np.minimum(pivot / self.rows.lam, far) if self.curved else far
        is_below = lambda delta: self._excess(self._from(pivot, delta)) < 0  # noqa: E731
        return self._from(pivot, bisect(-far, most, is_below))

    def solve(self):
        """Where k entries are whole and the others 0, in the middle between them."""
        rows, at = self.rows, np.minimum(np.floor(self.rows.k), self.n - 1).astype(int)
        pivot = np.take_along_axis(self.s, at, axis=-1)
        found = self._near(pivot)
        if self.curve.p > 2:  # S is steep at 0: every digit of the t that is nearest to it counts
            nearest = np.argmin(np.abs(found.t - self.curve.zero), axis=-1)[:, None]
            found = self._near(np.take_along_axis(self.a, nearest, axis=-1))
        if self.curved:  # tiny beside the entries, v has its digits only by itself
            small = bisect(
                0 * pivot,
                pivot,
                lambda v: self._excess(Solved((self.a - v) / rows.lam, v)) > 0,
            )
            use = small < pivot / 1024
            t = np.where(use, (self.a - small) / rows.lam, found.t)
            found = Solved(t, np.where(use, small, found.v))
        self.gap = self._gap()
        middle = self._from(pivot, self.curve.zero - self.gap / 2)
        hard = self.gap >= 0
        t = np.where(hard, middle.t, found.t)
        v = np.where(hard, middle.v, found.v)
        t = np.where(self.pinned, self.a / rows.lam, t)
        return Solved(t, np.where(self.pinned, 0.0, v))

    def _gap(self):
        """Between what the k-th entry and the one after it ask of a threshold, if k is whole; in t."""
        k = np.clip(self.rows.k, 1, max(self.n - 1, 1)).astype(int)
        last, after = (
            np.take_along_axis(self.s, np.minimum(i, self.n - 1), -1) for i in (k - 1, k)
        )
        top = self._alone(last) if self.curved else 1.0
        gap = (last - after) / self.rows.lam - top + self.curve.zero
        return np.where((self.rows.k == k) & (self.rows.k < self.n), gap, -1.0)

    def answer(self, at):
        """y and its derivatives, for thresholds that need not be the right ones; and the block."""
        rows, lam, k = self.rows, self.rows.lam, self.rows.k
        top = self._top(at.v)
        above = at.t >= top
        inside = ((at.t > self.curve.zero) | self.pinned) & ~above
        # Where k leaves something over, an entry at 0 stays there.
        taken = (self.a > 0) | (rows.k >= self.n) if self.curved else np.ones_like(above)
        above, inside = above & taken | self.everything & taken, inside & ~self.everything
        above, inside = above & ~self.nothing, inside & ~self.nothing
        t = np.where(inside, at.t, 0.0)
        s, rho = (np.where(inside, value, 0.0) for value in self.curve(t))
        if self.curve.p >= 2:  # held at 0, an entry has the slope of S there
            rho = np.where(
                inside & self.pinned & (t == 0), 1.0 if self.curve.p == 2 else 1e290, rho
            )
        g = self.sign * rows.g
        left, size = k - total(above), total(inside)
        b = 1.0 if self.kind == "debiased" else 0.0
        whole, whole_x, whole_lam = np.ones_like(s), np.zeros_like(s), np.zeros_like(s)
        if self.kind == "debiased":
            whole, whole_x = self.a, np.ones_like(s)
        elif self.curved:
            whole, slope = self.curve(self.alone)
            at_zero = 0.0 if self.curve.e > 1 else 1.0 if self.curve.e == 1 else 1e290
            slope = np.where(self.alone > 0, slope, at_zero)
            whole_x = slope / (slope + lam)
            whole_lam = -self.alone * whole_x
        y = np.where(above, whole, np.where(inside, s + b * lam * t, 0.0))

        flat = total(rho) + (lam * np.maximum(left, 0.0) if self.curved else 0.0)
        moves = (flat > 0) & ~self.pinned
        flat = np.where(moves, flat, 1.0)
        mean = np.where(moves, total((rho + b * lam * inside) * g) / flat, 0.0)
        share = np.where(moves, total(rho * t) / flat, 0.0)
        dx = rho / lam * (g - mean) + b * inside * g
        if not self.curved:
            dx = np.where((size == 1) & ~self.pinned, 0.0, dx)
        fractional = (left > 0) & (left < size) & ~self.pinned
        # v, as what is shared says it: where t is off by roundings, so is it.
        prime = np.where(left > 0, total(s) / np.where(left > 0, left, 1.0), at.v)
        prime = prime if self.curved else 1.0
        dk = np.where(fractional, prime * mean, 0.0)
        of_lam = np.where(inside, -rho / lam * (t - share) + b * share, 0.0)
        of_lam = np.where((size == 1) & ~self.pinned & (not self.curved), 0.0, of_lam)
        dlam = total(g * np.where(above, whole_lam, of_lam))
        dx = np.where(above, whole_x * g, dx)
        found = Answer(self.sign * y, self.sign * dx, dk, dlam)
        return found, inside, above, Parts(s, rho, left, flat, prime, whole_lam, share)

    def terms(self, at, found, inside, above, parts, of_t):
        """What each of the answers is a sum or a difference of: roundings are relative to that.

        Of the cotangents these are the terms of the closed forms in ``answer``, with absolute values
        in the place of signs, so that what cancels there has room here; and no others. In that of lam
        every t counts as what it is rounded by, if that is more: t - share has the roundings of either.
        """
        lam, g = self.rows.lam, np.abs(self.rows.g)
        b = 1.0 if self.kind == "debiased" else 0.0
        rho, flat, prime, whole_lam, share = parts.rho, *parts[3:]
        mean = np.where(self.pinned, 0.0, total((rho + b * lam * inside) * g) / flat)
        dx = np.where(inside, rho / lam * (g + mean) + b * g, np.abs(found.x))
        sizes = np.abs(at.t) + np.abs(share) + of_t
        dlam = np.where(inside, rho / lam * sizes * (g + mean) + b * g * np.abs(share), 0.0)
        dlam = dlam + np.where(above, np.abs(g * whole_lam), 0.0)
        dk = np.where(mean > 0, mean * prime, 0.0)
        return Answer(np.abs(found.y), dx, dk, total(dlam))

    def bounds(self, eps: float, rounding: float, unsolved: float = 0.0) -> Bounds:
        """For a computation with this precision, whose results are rounded to ``rounding``, and which
        solves the equation of masks to ``unsolved`` of k."""
        rows, at = self.rows, self.solve()
        answer, inside, above, parts = self.answer(at)
        of_t = self._of_t(eps, at, inside)
        of_row = self._of_row(eps, at, inside, parts, of_t, unsolved)
        # S(t) = t^e and S'(t) have e roundings for each relative one of t, and one of their own.
        relative = eps * (1 + self.curve.e)
        terms = self.terms(at, answer, inside, above, parts, of_t / eps)
        slack = [relative * v + rounding * np.abs(a) for v, a in zip(terms, answer, strict=True)]
        by_slopes = self._of_slopes(at, inside, parts, of_t)
        slack = [d + more for d, more in zip(slack, by_slopes, strict=True)]
        # Where the k-th entry and the next are just so far apart that nothing is shared, derivatives
        # jump: rounding may put either of them on the other side.
        width = 4 * (of_t + of_row).max(-1, keepdims=True)
        jumps = (self.gap >= 0) & (self.gap <= width)
        slack[0] = slack[0] + np.where(jumps, self._across(eps, width), 0.0)
        if self.kind == "sign":  # so they do where entries just add up to k with a threshold of 0
            rounded = total(parts.rho * of_t) + eps * np.maximum(rows.k, total(parts.s))
            jumps = jumps | (np.abs(self.over) <= rounded)
        if (
            self.curve.p > 2
        ):  # as docs/maths.md says, no closer to 0 are slopes told from each other
            least = 1e-130 if eps < 1e-10 else 1e-17
            near = inside & (at.t - self.curve.zero < least)
            near = near | (above & (self.alone < least))
            jumps = jumps | near.any(-1, keepdims=True)
        # The answers at thresholds to either side, with every t off to that side too: what is steep has
        # room there, and where an entry enters or leaves the block, its derivatives jump. Twice that, as
        # the changes at the ends may be less than those between them.
        for sign in (1, -1):
            t = at.t + sign * (of_t + of_row)
            v = np.maximum(at.v - sign * rows.lam * of_row, 0 * at.v) if self.curved else at.v
            other, also_inside, also_above, _ = self.answer(Solved(t, v))
            jumps = jumps | ((inside != also_inside) | (above != also_above)).any(-1, keepdims=True)
            slack = [d + 2 * np.abs(o - a) for d, o, a in zip(slack, other, answer, strict=True)]
        return Bounds(answer, Answer(*slack), jumps, total(parts.s))

    def _of_slopes(self, at, inside, parts, of_t):
        """What cotangents may be off by as every t is rounded by itself, and with it its slope.

        Below, all t are moved to one side, which leaves a mean over the block where it is. To the first
        order a slope rho_i moves the mean by (g_i - mean)/flat, and the sum in lam by that times
        (t_i - share): no signs are known, and the sizes add up. Next to -1, where the two-sided S is
        flat, rho is relative to 1 + t, which has few digits: with 96 entries at 1 + t = 1e-4, by long
        double, one rounding of each t moves dk by 7e-13 of itself, and this oracle is off by as much.
        """
        lam, b = self.rows.lam, 1.0 if self.kind == "debiased" else 0.0
        rho, flat, prime, share = parts.rho, parts.flat, parts.prime, parts.share
        ends = [self.curve(np.where(inside, at.t + s * of_t, 0.0))[1] for s in (1, -1)]
        off = np.where(inside, np.maximum(*(np.abs(end - rho) for end in ends)), 0.0)
        g = self.sign * self.rows.g
        mean = np.where(self.pinned, 0.0, total((rho + b * lam * inside) * g) / flat)
        each = off * np.abs(g - mean) / flat
        of_mean = np.where(self.pinned, 0.0, total(each))
        in_lam = total(each * np.abs(at.t - share)) * flat / lam
        dk = np.where(of_mean > 0, prime * of_mean, 0.0)
        return Answer(0.0, rho / lam * of_mean, dk, in_lam)

    def _across(self, eps, width):
        """How much of y an entry may have that a gap of no more than rounding leaves without any.

        The gap is (last - next)/lam - top, and top is rounded: closed by that, the next entries have a t
        of no more than the width. And they have no more together than what the k-th entry is off by,
        which is phi'(v) in so many roundings: for p > 2 that is less than S of the width.
        """
        k = np.clip(self.rows.k, 1, self.n).astype(int)
        prime = 1.0
        if self.curved:
            prime = self.curve(self._alone(np.take_along_axis(self.s, k - 1, -1)))[0]
        share = np.minimum(self.curve(self.curve.zero + width)[0], eps * prime)
        b = self.rows.lam if self.kind == "debiased" else 0.0
        return share + b * np.minimum(width, self.curve.inverse(share))

    def _of_t(self, eps, at, inside):
        """How far each t may be off by itself, with the right threshold.

        t = (a - pivot)/lam + delta, where the pivot is an entry of the block, or the threshold: then the
        parts are no larger than the range of t in the block, which of masks is 1. In magnitude a
        threshold by itself is rounded by eps v, and from an entry, by eps of what the block reaches:
        whichever is less. With the threshold held at 0, t = a/lam is one division. For p > 2, where S is
        as steep as it likes, the pivot must be the entry next to the threshold: a - pivot is no larger
        than lam t for all the others, and every t has its digits; but it is a number of its format, and
        where that has none so small (y^(p-1) = 1e-48 for p = 6, y = 1e-9) y is known to S of its least.
        """
        size = np.abs(at.t)
        most = np.where(inside, size, 0.0).max(-1, keepdims=True)
        if self.curved:
            most = most + np.minimum(self._top(np.abs(at.v)), np.abs(at.v) / self.rows.lam)
        else:
            most = most + 1.0
        if self.is_steep:
            most = size
        least = 2.0**-1022 if eps < 1e-10 else 2.0**-126
        return eps * np.where(self.pinned, size, most) + least

    def _of_row(self, eps, at, inside, parts, of_t, unsolved):
        """How far the threshold may be off, in units of lam: what the equation lacks, over its slope.

        The equation is a sum over the row. That of masks has the roundings of k, which are those that
        its sum is promised to have; in magnitude those of what is shared, as k less a whole number is
        exact. And all of its t are off: but their errors are shared by the row, so that a threshold that
        feels its curvature (lam left) more than the entries of the block hardly moves with them.
        Where S is flat the slope says nothing: S(t + d) - S(t) >= S(d) for a convex S does. A concave
        one, for p > 2, is the less steep the further one goes: then two bounds hold, in which the lowest
        entry makes up for all that is missing, or every entry for as much as the highest does.
        """
        s, rho, left = parts[:3]
        left = np.maximum(left, 0.0)
        prime = np.abs(at.v) if self.curved else 1.0
        missing = eps * np.maximum(self.rows.k, 1.0) + unsolved * self.rows.k
        if self.curved:
            missing = eps * np.maximum(total(s), left * prime)
        steepness = total(rho) + (self.rows.lam * left if self.curved else 0.0)
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            by_slope = np.where(steepness > 0, missing / steepness, np.inf)
            by_t = np.where(steepness > 0, total(rho * of_t) / steepness, 0.0)
        found = np.minimum(by_slope, self.curve.inverse(missing))
        if self.is_steep:
            size = total(inside)
            low = np.where(inside, s, np.inf).min(-1, keepdims=True)
            high, part = s.max(-1, keepdims=True), missing / np.maximum(size, 1)
            one, all_ = (
                self.curve.inverse(y + add) - self.curve.inverse(y)
                for y, add in ((low, missing), (high, part))
            )
            found = np.where(size > 0, np.minimum(one, all_), found)
        return np.where(self.pinned, 0.0, by_t + found)

    @property
    def is_steep(self) -> bool:
        """Whether S has no bound on its slope where it leaves 0."""
        return self.curve.p > 2 and not self.curve.two_sided
