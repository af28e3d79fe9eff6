"""One root finder for every scalar equation of the package, vectorised over independent problems."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ._types import Array, Bools

_EPS = float(np.finfo(np.float64).eps)


class ConvergenceError(RuntimeError):
    """A solver could not meet its stopping rule; the message says which rule and how far it got."""


class Root(NamedTuple):
    x: Array
    residual: Array  # |f(x)|
    converged: Bools  # the residual is met, or x is the root to float resolution

    def checked(self) -> Array:
        """x, if it is the root everywhere."""
        if not self.converged.all():
            worst = np.max(np.where(self.converged, 0.0, self.residual))
            raise ConvergenceError(f"a scalar equation still has a residual of {worst:.2e}")
        return self.x


def increasing_root(
    f: Callable[[Array], tuple[Array, Array]],
    lo: Array,
    hi: Array,
    *,
    start: Array | None = None,
    tol: float | Array = 0.0,
    unit: float | Array = 0.0,
    max_iter: int = 500,
) -> Root:
    """Root of an increasing f in [lo, hi], elementwise: Newton's method kept inside the bracket.

    ``f(x)`` returns the value and the Newton point (where the next iterate would be). A Newton
    point outside the bracket, or a bracket that three steps did not halve, gives way to the
    midpoint, so the bracket halves at least every four steps and nothing can hang.

    An element is done when ``|f| <= tol`` or when its bracket is a few roundings wide, of x or of
    ``unit`` if that is larger. The point with the smallest ``|f|`` is returned.
    """
    lo, hi = lo.copy(), hi.copy()
    x = np.clip(lo + (hi - lo) / 2 if start is None else start, lo, hi)
    best, residual = x, np.full(np.shape(x), np.inf)
    done = np.zeros(np.shape(x), dtype=bool)
    width = hi - lo
    for iteration in range(max_iter):
        value, newton = f(x)
        lo = np.where(value <= 0, x, lo)
        hi = np.where(value >= 0, x, hi)
        better = np.abs(value) < residual
        best = np.where(better, x, best)
        residual = np.where(better, np.abs(value), residual)

        rounding = _EPS * np.maximum(np.abs(x), unit)
        middle = lo + (hi - lo) / 2
        done = (
            done | (residual <= tol) | (hi - lo <= 4 * rounding) | (middle <= lo) | (middle >= hi)
        )
        if done.all():
            break
        # A step too small to move x: step a little further, over the root if it is that close. (A
        # small step alone proves nothing: at a point of infinite slope Newton does not move at all.)
        small = np.abs(newton - x) <= rounding
        newton = np.where(small, x - 2 * rounding * np.sign(value), newton)
        use_newton = (newton > lo) & (newton < hi)
        if iteration % 4 == 3:
            use_newton &= hi - lo <= width / 2
            width = hi - lo
        x = np.where(done, best, np.where(use_newton, newton, middle))
    return Root(best, residual, done)
