"""Sorting and ranking rows in which entries at -inf are not there.

The entries that are there are sorted, or ranked, among themselves; padding comes last, in whichever
direction. A solver needs numbers: padding has finite ones, so far off that it shares no block with an
entry that is there, which are constants.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Array = Any


def ranking(xp: Any, x: Array, lam: Array, exponent: float, descending: bool) -> Array:
    """The objective z of argmax_{y in P(rho)} <z, y> - R(y), the relaxed rank of rows x (..., n).

    Padding has the largest, as far above all others as responses to 1 and to n are apart; it is tied.
    """
    z, padded = (-x if descending else x), x == -xp.inf
    top = _finite(xp, xp.largest(xp.where(padded, -xp.inf, xp.stop_gradient(z))))
    apart = 2.0 * xp.stop_gradient(lam) * _length(xp, x) ** (1.0 / exponent)
    return xp.where(padded, _bounded(xp, top + xp.abs(top) + 1.0 + apart), z)


class Sorting(NamedTuple):
    """argmax_{y in P(w)} <rho, y> - R(y), the relaxed sort of rows x (..., n)."""

    rho: Array
    w: Array
    there: Array  # places that an entry takes


def places(xp: Any, x: Array) -> Array:
    """Those that an entry of sorted rows takes: the first ones."""
    return xp.index(x) < xp.total(x != -xp.inf)


def sorting(xp: Any, x: Array, lam: Array, exponent: float, descending: bool) -> Sorting:
    """Padding is below the smallest entry, and has places at the end that rho keeps apart."""
    padded = x == -xp.inf
    size = _finite(xp, xp.largest(xp.where(padded, 0.0, xp.abs(xp.stop_gradient(x)))))
    low = _bounded(xp, -2.0 * size - 1.0)
    there = places(xp, x)
    place = xp.astype(xp.index(x), x.dtype)
    rho = _length(xp, x) - place if descending else place + 1.0
    apart = _inverse_response(xp, size, exponent) + _inverse_response(xp, -low, exponent)
    last = _bounded(xp, -2.0 * xp.stop_gradient(lam) * apart)
    return Sorting(xp.where(there, rho, last), xp.where(padded, low, x), there)


def _inverse_response(xp: Any, y: Array, exponent: float) -> Array:
    """S^-1(y) for y >= 0; y itself for p = 2."""
    return y if exponent == 1.0 else y ** (1.0 / exponent)


def _length(xp: Any, x: Array) -> Array:
    """n as an array, since in a graph that is traced for any length it is no number yet."""
    return xp.astype(xp.index(x)[-1:] + 1, x.dtype)


def _finite(xp: Any, x: Array) -> Array:
    """x, with 0 in the place of infinities, which rows without an entry have."""
    return xp.where(xp.abs(x) == xp.inf, 0.0, x)


def _bounded(xp: Any, x: Array) -> Array:
    limit = float(xp.finfo(x.dtype).max)
    return xp.clip(x, -limit, limit)
