"""One root finder for every scalar equation, over independent problems at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Array = Any

# Bisection alone would need fewer.
LIMIT = 300


class Root(NamedTuple):
    """Where the search for a root is; ``best`` has the smallest residual |f| so far."""

    x: Array
    lo: Array
    hi: Array
    best: Array
    residual: Array
    met: Array  # the residual is good enough: one more step is taken
    done: Array
    width: Array  # of the bracket, two steps ago or less
    stride: Array  # Newton's, two steps ago or less


def increasing_root(
    xp: Any,
    f: Callable[[Array], tuple[Array, Array, Array]],
    lo: Array,
    hi: Array,
    *,
    start: Array,
    tol: float,
    unit: Array,
    rows: Array,
    limit: int = LIMIT,
) -> Root:
    """Root of an increasing f in [lo, hi] where ``rows`` is set: Newton's method kept in the bracket.

    ``f(x)`` returns the value, the Newton step, and the size of what the value is a difference of, to
    which ``tol`` is relative. A Newton point outside the bracket gives way to the midpoint, and so does
    one after two steps that halved neither the bracket nor the Newton step (which comes from one side
    where it converges fast): so nothing can hang.

    An element is done one step after ``|f| <= tol size``, or when its bracket is a few roundings wide,
    of x or of ``unit`` if that is larger. The point with the smallest ``|f|`` is the answer.
    """
    eps = float(xp.finfo(lo.dtype).eps)

    def step(i: Any, at: Root) -> Root:
        value, newton, size = f(at.x)
        lo, hi = xp.where(value <= 0, at.x, at.lo), xp.where(value >= 0, at.x, at.hi)
        # Of points that are as good, the last is the nearest to the root.
        better = ~at.done & (xp.abs(value) <= at.residual)
        best = xp.where(better, at.x, at.best)
        residual = xp.where(better, xp.abs(value), at.residual)

        rounding = eps * xp.maximum(xp.abs(at.x), unit)
        middle = lo + (hi - lo) / 2
        # The step after the last is looked at too: it may lead over a kink, to a worse point.
        done = at.done | at.met | (value == 0)
        done = done | (hi - lo <= 4 * rounding) | (middle <= lo) | (middle >= hi)
        met = (xp.abs(value) <= tol * size) | ((xp.abs(newton) <= 4 * rounding) & (size != 0))
        # A step too small to move x: step a little further, over the root if it is that close. (A
        # small step alone proves nothing: at a point of infinite slope Newton does not move at all.)
        small = xp.abs(newton) <= rounding
        target = at.x + xp.where(small, -2 * rounding * xp.sign(value), newton)
        use_newton = (target > lo) & (target < hi)
        done = done | (met & ~use_newton)
        second, stride = i % 2 == 1, xp.abs(newton)
        slow = second & (hi - lo > at.width / 2) & (small | ~(stride <= at.stride / 2))
        width = xp.where(second & (hi >= lo), hi - lo, at.width)
        stride = xp.where(second, stride, at.stride)
        x = xp.where(done, best, xp.where(use_newton & ~slow, target, middle))
        return Root(x, lo, hi, best, residual, met, done, width, stride)

    start = xp.minimum(xp.maximum(start, lo), hi)
    unknown = xp.full_like(start, xp.inf)
    first = Root(start, lo, hi, start, unknown, ~rows, ~rows, hi - lo, hi - lo)
    return xp.while_loop(lambda at: ~at.done, step, first, limit)
