"""The threshold of top-k in ordinary XLA operations: for every device, and for rows that are sharded.

Nothing is sorted, and the memory is a few times that of x: passes over all rows at once, in loops that
stop when every row is done. The equation is that of ``sparsetopk.threshold``, the state that of
csrc/problem.hpp: v = pivot - lam delta is the threshold, t_i = (a_i - pivot)/lam + delta with a = x or
|x| the argument of the response. A first loop looks for a pivot within about lam of the threshold, a
second for delta, which keeps its digits whatever the size of the pivot.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.special import ndtri

from .arguments import AxisName, Count
from .kinds import SIGN, TWO_SIDED, Kind
from .scalars import PNorm, lone_response

_INTEGERS = {16: jnp.int16, 32: jnp.int32, 64: jnp.int64}


def _key(x: Array) -> Array:
    """Integers in the order of the floats."""
    bits = lax.bitcast_convert_type(x, _INTEGERS[jnp.finfo(x.dtype).bits])
    info = jnp.iinfo(bits.dtype)
    # -0 is 0, but what XLA takes for 0, a subnormal number, is not: bisection must move.
    return jnp.where(bits == info.min, 0, jnp.where(bits < 0, bits ^ info.max, bits))


def _from_key(key: Array, dtype: jnp.dtype) -> Array:
    bits = jnp.where(key < 0, key ^ jnp.iinfo(key.dtype).max, key)
    return lax.bitcast_convert_type(bits, dtype)


def row_sums(*values: Array, axis_name: AxisName = None) -> list[Array]:
    """The sum (..., 1) of each (..., n), over all shards; flags are counted.

    Every float is summed in one pass with integers, if need be with zeros: on the CPU, XLA's code for
    that is ten times faster than for a float alone, or two, that are computed on the way.
    """
    values = tuple(v.astype(jnp.int32) if v.dtype == jnp.bool_ else v for v in values)
    floats = [i for i, v in enumerate(values) if jnp.issubdtype(v.dtype, jnp.floating)]
    integers = [i for i in range(len(values)) if i not in floats]
    totals: dict[int, Array] = {}
    for group in [[*floats[:1], *integers], *([i] for i in floats[1:])]:
        operands = [values[i] for i in group]
        if len(operands) == 1:
            operands.append(jnp.zeros(operands[0].shape, jnp.int32))
        zeros = [jnp.zeros((), v.dtype) for v in operands]
        found = lax.reduce(operands, zeros, _add, (operands[0].ndim - 1,))
        found = lax.optimization_barrier(found)  # or a sum that is not used would go
        totals |= {i: total[..., None] for i, total in zip(group, found, strict=False)}
    results = [totals[i] for i in range(len(values))]
    return results if axis_name is None else lax.psum(results, axis_name)


def _add(some: list[Array], others: list[Array]) -> list[Array]:
    return [a + b for a, b in zip(some, others, strict=True)]


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def row_sum(values: Array, axis_name: AxisName = None) -> Array:
    """As ``row_sums``, of one array; this one has derivatives."""
    return row_sums(values, axis_name=axis_name)[0]


@row_sum.defjvp
def _row_sum_jvp(
    axis_name: AxisName, at: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
    return row_sum(at[0], axis_name), tangent_sum(tangents[0], axis_name)


def tangent_sum(values: Array, axis_name: AxisName = None) -> Array:
    """The same for a tangent, so that it can be transposed."""
    total = values.sum(axis=-1, keepdims=True)
    return total if axis_name is None else lax.psum(total, axis_name)


def _row_range(a: Array, axis_name: AxisName) -> tuple[Array, Array]:
    """The smallest and the largest finite entry; 0 if there is none."""
    key, finite = _key(a), jnp.isfinite(a)
    least = jnp.iinfo(key.dtype).min
    ends = [jnp.where(finite, ~key, least), jnp.where(finite, key, least)]
    larger = lambda some, others: list(map(jnp.maximum, some, others))  # noqa: E731
    ends = lax.reduce(ends, [jnp.array(least, key.dtype)] * 2, larger, (a.ndim - 1,))
    if axis_name is not None:
        ends = lax.pmax(ends, axis_name)
    low, high = (_from_key(k[..., None], a.dtype) for k in (~ends[0], ends[1]))
    return jnp.where(jnp.isfinite(low), low, 0.0), jnp.where(jnp.isfinite(high), high, 0.0)


def _between(lo: Array, hi: Array) -> tuple[Array, Array]:
    """The float in the middle of two as floats are counted, and whether there is none between them.

    So a bisection takes as many steps as the dtype has bits, whatever the scale.
    """
    low, high = _key(lo), _key(hi)
    middle = (low >> 1) + (high >> 1) + (low & high & 1)
    return _from_key(middle, lo.dtype), (middle <= low) | (high <= low)


def _next(x: Array, by: int) -> Array:
    """The finite float after x, or (``by`` = -1) before it."""
    limit = jnp.finfo(x.dtype).max
    return jnp.clip(_from_key(_key(x) + jnp.array(by, _key(x).dtype), x.dtype), -limit, limit)


def order_statistic(x: Array, i: Array, wanted: Array, axis_name: AxisName = None) -> Array:
    """x_[i], the i-th largest entry, for i (..., 1) in 1..n, in the rows that are ``wanted``.

    Bisection between floats: the largest that at least i entries reach.
    """
    keys = _key(x)
    info = jnp.iinfo(keys.dtype)
    i = i.astype(jnp.int32)

    def step(bit: Array, found: Array) -> Array:
        trial = found | (jnp.ones((), keys.dtype) << (info.bits - 2 - bit).astype(keys.dtype))
        return jnp.where(row_sum(keys >= trial, axis_name) >= i, trial, found)

    found = jnp.where(row_sum(keys >= 0, axis_name) >= i, 0, info.min).astype(keys.dtype)
    passes = jnp.where(wanted.any(), info.bits - 1, 0)
    if axis_name is not None:
        passes = lax.pmax(passes, axis_name)
    found = lax.fori_loop(0, passes, step, found)
    return _from_key(found, x.dtype)


class State(NamedTuple):
    """pivot and delta, (..., 1). Rows that have no such threshold:

    - (NaN, 0): a NaN, an infinity that has no meaning, or a bad k or lam;
    - (-inf, 0): every candidate is selected, nothing is relaxed;
    - (inf, 0): k = 0;
    - (inf, c): c > k entries are +inf and share k;
    - lam = 0: (x_[ceil k], what is left for the entries equal to it).
    """

    pivot: Array
    delta: Array


def solve(
    x: Array, k: Count, lam: Array, kind: Kind, hard: bool | None, axis_name: AxisName = None
) -> State:
    """The state of rows x (..., n) for k and lam (..., 1), in the dtype of lam.

    ``hard`` says whether the rows have lam = 0: all, none, or (None) some may.
    """
    phi, dtype = kind.phi, lam.dtype
    n = x.shape[-1] if axis_name is None else x.shape[-1] * lax.psum(1, axis_name)
    bad = ~jnp.isfinite(x) if phi.even else jnp.isnan(x)
    bad, count, infinite = row_sums(bad, x > -jnp.inf, x == jnp.inf, axis_name=axis_name)
    invalid = (bad > 0) | ~((lam >= 0) & (lam < jnp.inf))
    invalid |= ~(
        (k.whole >= 0) & (k.frac >= 0) & ((k.whole < n) | ((k.whole == n) & (k.frac == 0)))
    )
    a = jnp.where(invalid, 0, jnp.abs(x) if phi.even else x).astype(dtype)
    whole, frac = jnp.where(invalid, 0, k.whole), jnp.where(invalid, 0.0, k.frac)

    crowded = infinite - whole > frac
    nothing = (whole == 0) & (frac == 0)
    everything = (whole >= count) & ~nothing if kind.op != SIGN else jnp.zeros_like(invalid)
    special = invalid | crowded | nothing | everything

    state = State(jnp.zeros_like(lam), jnp.zeros_like(lam))
    k = Count(whole, frac)
    if hard is not True:
        soft = ~special & (lam > 0)
        problem = _Problem(a, k, jnp.where(soft, lam, 1.0), kind, axis_name)
        state = problem.find(soft)
    if hard is not False:
        rows = ~special & (lam == 0)
        last = whole + (frac > 0)
        boundary = order_statistic(a, jnp.clip(last, 1, jnp.maximum(count, 1)), rows, axis_name)
        left = (whole - row_sum(a > boundary, axis_name)).astype(dtype) + frac
        state = State(jnp.where(rows, boundary, state.pivot), jnp.where(rows, left, state.delta))
    # From the special to the more special: what comes later overrides.
    pivot = jnp.where(everything, -jnp.inf, state.pivot)
    pivot = jnp.where(nothing | crowded, jnp.inf, pivot)
    delta = jnp.where(special, 0.0, state.delta)
    delta = jnp.where(crowded & ~nothing, infinite.astype(dtype), delta)
    return State(jnp.where(invalid, jnp.nan, pivot), jnp.where(invalid, 0.0, delta))


class _Search(NamedTuple):
    """Where the threshold is looked for: it is in [lo, hi], and Newton's method is at v."""

    v: Array
    lo: Array
    hi: Array
    newton: Array  # what Newton's method adds to delta = 0 at the pivot v
    near: Array  # rows in which v may be the pivot
    passes: Array


class _Problem(NamedTuple):
    """Rows a = x or |x| with lam > 0, of which some are to be solved."""

    a: Array
    k: Count
    lam: Array
    kind: Kind
    axis_name: AxisName

    def sums(self, *values: Array) -> list[Array]:
        return row_sums(*values, axis_name=self.axis_name)

    def find(self, rows: Array) -> State:
        """The state; (0, 0) where the threshold of an even phi ends at 0."""
        if self.kind.phi.even:
            pinned = self._pinned()
            rows &= ~pinned
        pivot, delta = self._delta(self._pivot(rows), rows)
        if self.kind.phi.even:
            pinned |= delta >= pivot / self.lam
            pivot, delta = jnp.where(pinned, 0.0, pivot), jnp.where(pinned, 0.0, delta)
        return State(pivot, delta)

    def _pinned(self) -> Array:
        """Rows that leave a part of k at the threshold 0."""
        if self.kind.op == SIGN:
            zero = jnp.zeros_like(self.lam)
            return self.equation(zero, zero)[0] <= 0
        return self.sums(self.a > 0)[0] <= self.k.whole

    def equation(self, pivot: Array, delta: Array) -> tuple[Array, Array, Array]:
        """Left side minus right side, which increases with delta; the Newton step; the right side."""
        reg, phi, lam = self.kind.reg, self.kind.phi, self.lam
        t, v = (self.a - pivot) / lam + delta, pivot - lam * delta
        response, slope = reg.response_and_slope(jnp.maximum(t, reg.zero))
        reached = response >= phi.prime(v)
        inside = (t > reg.zero) & ~reached
        linear = isinstance(reg, PNorm) and reg.exponent == 1.0
        slope = inside if linear else jnp.where(inside, slope, 0.0)
        mass, slope, taken = self.sums(
            jnp.where(inside, response, 0.0), slope, (t > reg.zero) & reached
        )
        left = (self.k.whole - taken).astype(lam.dtype) + self.k.frac
        slope = slope.astype(lam.dtype) + lam * phi.curvature(v, left)
        # As sum_i z_i - k, whose size tells how far it is from the solution; for x^2/2 the difference
        # mass - left v would vanish with v.
        value = jnp.where(mass > 0, mass / phi.prime(v), 0.0) - left
        step = jnp.where(value == 0, 0.0, (left * phi.prime(v) - mass) / slope)
        e = 1.0 / reg.exponent
        if isinstance(reg, PNorm) and phi.name in ("identity", "abs") and e != 1.0:
            # Newton on mass^(p-1): linear in delta for one entry, nearly for many
            power = (mass - mass ** (1.0 - e) * jnp.maximum(left, 0.0) ** e) / (e * slope)
            step = jnp.where((mass > 0) & (left > 0), -power, step)
        # The same where nothing is left: the mass must vanish, and S is flat where it does. A little
        # further, so that rounding leaves no entry at t > 0 with an S(t) that underflows.
        step = jnp.where((mass > 0) & (left == 0), -1.01 * mass / (e * slope), step)
        return value, step, left

    def _pivot(self, rows: Array) -> _Search:
        """By Newton's method or bisection, until the threshold is between two floats close together."""
        lo, hi, start = self._bracket()
        # With a larger delta, n entries t lose more digits than k has.
        small = 8.0 * jnp.maximum(self.k.whole.astype(lo.dtype), 1.0) / self.a.shape[-1]

        def step(at: _Search) -> _Search:
            value, newton, _ = self.equation(at.v, jnp.zeros_like(at.v))
            lo = jnp.where(~at.near & (value >= 0), at.v, at.lo)
            hi = jnp.where(~at.near & (value <= 0), at.v, at.hi)
            middle, adjacent = _between(lo, hi)
            narrow = self._narrow(lo, hi)
            near = at.near | adjacent | (narrow & (jnp.abs(newton) <= small))
            move, least = -self.lam * newton, 0.5 * self.lam
            if self.kind.phi.even:
                least = jnp.minimum(least, 0.5 * at.v)
            # Newton's method comes from one side: one step that is longer ends on the other.
            short = ~narrow & (jnp.abs(move) < least)
            target = at.v + jnp.where(short, move + least * jnp.sign(value), move)
            use_newton = (target > lo) & (target < hi) & (at.passes % 4 != 3)
            v = jnp.where(near, at.v, jnp.where(use_newton, target, middle))
            newton = jnp.where(at.near, at.newton, newton)
            return _Search(v, lo, hi, newton, near, at.passes + 1)

        first = _Search(start, lo, hi, jnp.zeros_like(start), ~rows, jnp.int32(0))
        return lax.while_loop(lambda at: ~at.near.all() & (at.passes < _LIMIT), step, first)

    def _narrow(self, lo: Array, hi: Array) -> Array:
        """Whether every float in [lo, hi] is of the threshold's size, and within a few lam of it."""
        narrow = hi - lo <= 2.0 * self.lam
        return narrow & (hi <= 16.0 * lo) if self.kind.phi.even else narrow

    def _bracket(self) -> tuple[Array, Array, Array]:
        """The ends of the threshold, and a guess: its place if the entries were Gaussian."""
        reg, phi, a, lam = self.kind.reg, self.kind.phi, self.a, self.lam
        bottom, top = _row_range(a, self.axis_name)
        lone = lone_response(bottom, jnp.ones_like(lam), lam, reg, phi)
        lo = jnp.zeros_like(lam) if phi.even else bottom - lam * lone
        limit = jnp.finfo(a.dtype).max
        # One float further: what is added may be too small to count, or be rounded.
        lo = lo if phi.even else _next(jnp.maximum(lo, -limit), -1)
        hi = _next(jnp.minimum(top - lam * reg.zero, limit), 1)

        # In units that cannot overflow; around the middle, so that a common shift costs no digits.
        middle = jnp.zeros_like(lam) if phi.even else bottom / 2 + top / 2
        unit = jnp.maximum(top / 2 - bottom / 2, jnp.finfo(lam.dtype).tiny)
        finite = jnp.isfinite(a)
        z = jnp.where(finite, (a - middle) / unit, 0.0)
        count, first, second = self.sums(finite, z, z * z)
        count = jnp.maximum(count.astype(lam.dtype), 1.0)
        mean = jnp.zeros_like(lam) if phi.even else first / count
        spread = unit * jnp.sqrt(jnp.maximum(second / count - mean * mean, 0.0))
        share = (self.k.whole.astype(lam.dtype) + self.k.frac) / count
        share = jnp.clip(share, jnp.finfo(lam.dtype).tiny, 1.0)
        z = -ndtri(share / 2 if phi.even else share)
        guess = middle + unit * mean + spread * z - (0.5 * lam if reg.zero == 0 else 0.0)
        guess = jnp.where(jnp.isnan(guess), bottom, jnp.clip(guess, bottom, top))
        return lo, hi, jnp.clip(guess, lo, hi)

    def _delta(self, at: _Search, rows: Array) -> State:
        # The smaller delta, the more digits t has: the pivot is where Newton's method goes next.
        pivot = jnp.clip(at.v - self.lam * at.newton, at.lo, at.hi)
        # The ends are in units of lam: a little wider, as they are rounded.
        wider = 1.0 + 4.0 * jnp.finfo(pivot.dtype).eps
        lo, hi = ((pivot - end) * wider / self.lam for end in (at.hi, at.lo))
        _, adjacent = _between(at.lo, at.hi)
        apart = adjacent & (at.hi - at.lo >= 2.0 * self.lam)
        # No float between the ends, and lam is smaller than their distance: the block is at one of
        # them, or there is none, and the other is far away in units of lam.
        at_lo = jnp.zeros_like(apart)
        if self.kind.op == TWO_SIDED:
            reached = self.sums(self.a >= at.hi)[0]
            at_lo = apart & (self.k.whole >= reached)
        pivot = jnp.where(apart, jnp.where(at_lo, at.lo, at.hi), pivot)
        alone = lone_response(
            jnp.maximum(pivot, 0.0) if self.kind.phi.even else pivot,
            jnp.ones_like(pivot),
            self.lam,
            self.kind.reg,
            self.kind.phi,
        )
        zero = self.kind.reg.zero
        lo = jnp.where(apart, jnp.where(at_lo, zero, 0.0), lo)
        hi = jnp.where(apart, jnp.where(at_lo, 0.0, alone), hi)
        start = jnp.where(apart, (lo + hi) / 2, 0.0)
        return State(pivot, self._root(pivot, lo, hi, start, rows))

    def _root(self, pivot: Array, lo: Array, hi: Array, start: Array, rows: Array) -> Array:
        eps = jnp.finfo(self.lam.dtype).eps
        count = jnp.maximum(self.k.whole.astype(self.lam.dtype), 1.0)
        steepest = self.kind.exponent if isinstance(self.kind.reg, PNorm) else 1.0
        return increasing_root(
            lambda delta: self.equation(pivot, delta),
            lo,
            hi,
            start=start,
            tol=4 * float(eps) * max(1.0, steepest),
            # What n entries with this error add up to is lost in k. For p > 2 a response is as steep as
            # it likes near 0: every digit of delta counts.
            unit=jnp.zeros_like(lo)
            if steepest < 1.0
            else jnp.minimum(hi - lo, count / self.a.shape[-1]),
            rows=rows,
        )


class _Root(NamedTuple):
    x: Array
    lo: Array
    hi: Array
    best: Array
    residual: Array
    met: Array  # rows whose residual is good enough: they take one more step
    done: Array
    width: Array
    passes: Array


def increasing_root(
    f: Callable[[Array], tuple[Array, Array, Array]],
    lo: Array,
    hi: Array,
    *,
    start: Array,
    tol: float,
    unit: Array,
    rows: Array,
) -> Array:
    """As ``sparsetopk.roots.increasing_root``, for ``f`` that gives its value, the Newton step and the
    size of what it is the difference of, to which ``tol`` is relative."""
    eps = jnp.finfo(lo.dtype).eps

    def step(at: _Root) -> _Root:
        value, newton, size = f(at.x)
        lo, hi = jnp.where(value <= 0, at.x, at.lo), jnp.where(value >= 0, at.x, at.hi)
        better = ~at.done & (jnp.abs(value) < at.residual)
        best = jnp.where(better, at.x, at.best)
        residual = jnp.where(better, jnp.abs(value), at.residual)

        rounding = eps * jnp.maximum(jnp.abs(at.x), unit)
        middle = lo + (hi - lo) / 2
        # The step after the last is looked at too: it may lead over a kink, to a worse point.
        done = at.done | at.met | (value == 0)
        done |= (hi - lo <= 4 * rounding) | (middle <= lo) | (middle >= hi)
        met = (jnp.abs(value) <= tol * size) | ((jnp.abs(newton) <= 4 * rounding) & (size != 0))
        small = jnp.abs(newton) <= rounding
        target = at.x + jnp.where(small, -2 * rounding * jnp.sign(value), newton)
        use_newton = (target > lo) & (target < hi)
        done |= met & ~use_newton
        fourth = at.passes % 4 == 3
        use_newton &= ~fourth | (hi - lo <= at.width / 2)
        width = jnp.where(fourth, hi - lo, at.width)
        x = jnp.where(done, best, jnp.where(use_newton, target, middle))
        return _Root(x, lo, hi, best, residual, met, done, width, at.passes + 1)

    start = jnp.clip(start, lo, hi)
    unknown = jnp.full_like(start, jnp.inf)
    first = _Root(start, lo, hi, start, unknown, ~rows, ~rows, hi - lo, jnp.int32(0))
    return lax.while_loop(lambda at: ~at.done.all() & (at.passes < _LIMIT), step, first).best


# Bisection alone would need fewer.
_LIMIT = 300
