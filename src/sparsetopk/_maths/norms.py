"""The conjugate of the unregularised f_phi for w = 1_k: k-support norm and k-support negentropy."""

from __future__ import annotations

from typing import Any

from .operator import Count
from .scalars import Phi

Array = Any


def conjugate_of_top_k(xp: Any, y: Array, k: Count, phi: Phi) -> Array:
    """min_{z in P(1_k)} sum_i z_i phi*(y_i/z_i), (..., 1), for phi = x^2/2 or exp(x - 1).

    z_i = min(y_i/g, 1): the largest entries stand alone, the others share what they leave of k.
    Infinite where y is not in the domain, NaN where y or k is no number.
    """
    valid = k.is_valid(y.shape[-1]) & (xp.total(xp.isnan(y)) == 0)
    outside = ~xp.isfinite(y) if phi.even else ~xp.isfinite(y) | (y < 0)
    inside = xp.total(outside) == 0
    size = xp.where(inside & valid, xp.abs(y) if phi.even else y, 0.0)
    s = -xp.sort(-size)[0]  # increasing, so that what is left for an entry is a sum from the start
    alone = _alone(xp, xp.stop_gradient(s), Count(k.whole, xp.stop_gradient(k.frac)))
    left = xp.astype(k.whole - xp.total(alone), y.dtype) + k.frac
    mass = xp.total(xp.where(alone, 0.0, s))
    shared = left > 0
    left = xp.where(shared, left, 1.0)
    rest = xp.where(shared, left * phi.conjugate(mass / left), 0.0)
    value = xp.total(xp.where(alone, phi.conjugate(s), 0.0)) + rest
    value = xp.where(inside & (shared | (mass <= 0)), value, xp.inf)
    nan = (xp.total(y) + k.frac) * xp.astype(xp.where(valid, 0.0, xp.nan), y.dtype)
    return xp.where(valid, value, nan)  # invalid rows have invalid derivatives too


def _alone(xp: Any, s: Array, k: Count) -> Array:
    """Which entries of increasing rows have z_i = 1: those at least the mean that is left for them."""
    left = k.whole + 1 - s.shape[-1] + xp.index(s)
    fits = (left >= 1) & (s * (xp.astype(left, s.dtype) + k.frac) >= xp.cumsum(s, axis=-1))
    not_yet = xp.cumsum(~fits, axis=-1)
    return fits & (not_yet == xp.total(~fits))  # and so are all that are larger
