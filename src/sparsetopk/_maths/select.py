"""Top-k in slots, and the lam that leaves so many entries fractional."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from .operator import MAGNITUDE, Count, Operator
from .response import Relaxed

Array = Any

# The search for lam: by this factor up and down from the scale of the row, so often; then bisections
# of its logarithm.
STEP, STEPS, BISECTIONS = 16.0, 40, 30


def default_capacity(k: float, n: int, hard: bool = False) -> int:
    """k slots and, unless the top-k is hard, a quarter more, at least 8, for the entries that are shared
    at the boundary."""
    return min(n, max(1, math.ceil(k)) if hard else math.ceil(k) + max(8, math.ceil(k / 4)))


def check_slots(capacity: int, k: float, n: int) -> None:
    """That each of the ceil(k) entries that are selected straight through has a slot."""
    least = min(n, math.ceil(k))
    if capacity < least:
        raise ValueError(
            f"capacity must be at least ceil(k)={least} when straight_through=True, got {capacity}"
        )


def flat(xp: Any, x: Array, where: Array | None, *per_row: Any) -> tuple[Any, ...]:
    """x and ``where`` as one row, with k and lam as numbers of it."""
    shape = xp.shape(x)
    if where is not None:
        where = xp.broadcast_to(xp.asarray(where), shape).reshape(-1)
    numbers = (v if xp.ndim(v) == 0 else xp.asarray(v).reshape(-1) for v in per_row)
    return xp.asarray(x).reshape(-1), where, *numbers


def hard_first(xp: Any, hard: Array, y: Array) -> Array:
    """By what entries are given slots: all of the hard selection, then the largest of the others."""
    return xp.where(hard > 0, math.inf, abs(y))


class Window(NamedTuple):
    """The entries within ``fractional`` ranks of the boundary, in decreasing order, and k among them.

    Fewer than that many are open below the lam that is looked for: those outside are not among them.
    """

    s: Array
    k: Count

    @classmethod
    def of(cls, xp: Any, s: Array, k: Count, fractional: int) -> Window:
        """From the largest entries s of rows in decreasing order, enough of them."""
        length = xp.shorter(s.shape[-1], 2 * fractional + 2)
        last = k.whole + (k.frac > 0)
        first = xp.clip(last - fractional - 1, 0, s.shape[-1] - length)
        at = first + xp.index(s[..., :length])
        return cls(xp.take_along_axis(s, at, axis=-1), Count(k.whole - first, k.frac))


def least_lam(xp: Any, dtype: Any) -> float:
    """The search for lam stays above it, and below 1 over it."""
    return 1e-300 if xp.finfo(dtype).bits == 64 else 1e-36


def choose_lam(
    xp: Any,
    window: Window,
    operator: Operator,
    fractional: int,
    relax: Callable[[Array], Relaxed],
    dtype: Any,
    smallest: Callable[..., Array] | None = None,
) -> Array:
    """The smallest lam (..., 1) for which at least ``fractional`` entries of the window are fractional.

    ``relax(lam)`` solves the window; what is fractional is so in ``dtype``, that of x. ``smallest`` is
    another search than the one by bisection, with its arguments.
    """
    compute = window.k.frac.dtype
    eps = float(xp.finfo(compute).eps)
    if xp.finfo(dtype).bits < 64:  # whatever is computed here, the core solves such rows in float32
        eps = max(eps, 2.0**-23)
    margin = 64 * eps * xp.clip(xp.astype(window.k.whole, compute), 1.0, None)

    def enough(lam: Array) -> Array:
        solved = relax(lam)
        counted = solved.split.inside
        if operator.op != MAGNITUDE:
            y = solved.y()
            counted = counted & (y < 1 - margin)  # a rounding of the threshold must not decide
            y = xp.astype(y, dtype)
            counted = counted & (y > 0) & (y < 1)
        return xp.total(counted) >= fractional

    return (1 + 8 * eps) * (smallest or _smallest)(xp, enough, _scale(xp, window, operator))


def _scale(xp: Any, window: Window, operator: Operator) -> Array:
    """The scale of lam at the boundary, by the scaling laws.

    From the distance over the window, and not from the whole row, which may have outliers. For
    magnitude, lam g^(p-1) is such a distance, g the size at the boundary.
    """
    k = window.k
    s = xp.astype(window.s, k.frac.dtype)
    least, finite = least_lam(xp, s.dtype), xp.isfinite(s)  # padding is at no distance
    ends = (xp.largest(xp.where(finite, v, -xp.inf)) for v in (s, -s))
    high, minus_low = (xp.where(xp.isfinite(end), end, 0.0) for end in ends)
    distance = high / 2 + minus_low / 2
    if operator.op == MAGNITUDE:
        at = xp.clip(k.whole + (k.frac > 0) - 1, 0, s.shape[-1] - 1)
        g = xp.take_along_axis(s, at, axis=-1)
        distance = distance / xp.where(g > 0, g, 1.0) ** (1.0 / operator.exponent)
    return xp.clip(xp.where(distance > 0, distance, 1.0), least, 1.0 / least)


def choose_rank_lam(
    xp: Any, x: Array, size: float, exponent: float, blocks: Callable[[Array], Array]
) -> Array:
    """The smallest lam (..., 1) with which the blocks of the relaxed rank of rows x (..., n) have at
    least ``size`` entries on average; its scale in rows in which every lam does.

    ``blocks(lam)`` has the blocks, which only grow together as lam grows: the rank is a projection onto
    the base polytope of a function of cardinality alone. Padding (-inf) does not count.
    """
    eps = float(xp.finfo(x.dtype).eps)
    there = x != -xp.inf
    ones = xp.astype(there, x.dtype)
    count = xp.total(ones)
    ends = (xp.largest(xp.where(there, v, -xp.inf)) for v in (x, -x))
    high, minus_low = (xp.where(xp.isfinite(end), end, 0.0) for end in ends)
    distance = (high / 2 + minus_low / 2) / xp.clip(count, 1.0, None) ** (1.0 / exponent)
    least = least_lam(xp, x.dtype)
    scale = xp.clip(xp.where(distance > 0, distance, 1.0), least, 1.0 / least)

    def enough(lam: Array) -> Array:
        each = xp.block_sum(ones, blocks(lam))
        number = xp.total(ones / xp.clip(each, 1.0, None))
        # A sum of shares of blocks, with its rounding.
        return xp.clip(count, None, size) * number <= (1 + 1024 * eps) * count

    lam = (1 + 8 * eps) * _smallest(xp, enough, scale)
    return xp.where(lam < eps * scale, scale, lam)


class _Search(NamedTuple):
    lam: Array
    found: Array  # the last lam that was enough
    missed: Array  # the last that was not
    has_found: Array
    has_missed: Array
    steps: Array  # that were taken to find or miss the first; minus those between the two


def _smallest(xp: Any, enough: Callable[[Array], Array], scale: Array) -> Array:
    """The smallest lam for which ``enough`` holds, row by row; ``scale`` where none was found.

    A row goes up until it is enough, or down until it is not, and then halves what is between. All of
    it is one loop, so that a program has ``enough`` once.
    """
    least = least_lam(xp, scale.dtype)

    def is_busy(at: _Search) -> Array:
        between = at.has_found & at.has_missed
        return xp.where(between, at.steps > -BISECTIONS, at.steps < STEPS)

    def step(_: Any, at: _Search) -> _Search:
        busy, holds = is_busy(at), enough(at.lam)
        found = xp.where(busy & holds, at.lam, at.found)
        missed = xp.where(busy & ~holds, at.lam, at.missed)
        was_between = at.has_found & at.has_missed
        has_found, has_missed = at.has_found | (busy & holds), at.has_missed | (busy & ~holds)
        between = has_found & has_missed
        steps = xp.where(was_between, at.steps - 1, xp.where(between, 0, at.steps + 1))
        middle = xp.exp((xp.log(found) + xp.log(missed)) / 2)
        further = xp.clip(at.lam * xp.where(holds, 1.0 / STEP, STEP), least, 1.0 / least)
        lam = xp.where(between, middle, further)
        return _Search(
            xp.where(busy, lam, at.lam),
            found,
            missed,
            has_found,
            has_missed,
            xp.where(busy, steps, at.steps),
        )

    none = xp.zeros_like(scale, dtype=bool)
    first = _Search(scale, scale, scale, none, none, xp.zeros_like(scale))
    end = xp.while_loop(is_busy, step, first, STEPS + BISECTIONS)
    return xp.where(end.has_found, end.found, scale)
