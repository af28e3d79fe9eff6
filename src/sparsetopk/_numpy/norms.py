"""Norms and entropies around the permutahedron: the unregularised f_phi and its conjugate."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from .._checks import check_phi
from .._maths.norms import conjugate_of_top_k
from .._maths.scalars import Phi
from .._types import Array, Bools, FloatArray, PhiName
from . import namespace as xp
from .arguments import Rows, check_k
from .polytope import broadcast_weights, permutahedron_value

# Membership in a polytope is decided up to the rounding of the sums that define it.
_ROUNDING = 1e-12


def owl_norm(x: ArrayLike, w: ArrayLike, *, axis: int = -1) -> FloatArray:
    r"""Ordered weighted lasso norm, :math:`\sum_i w_i |x|_{[i]}` with w >= 0 in decreasing order.

    >>> float(owl_norm([1.0, -3.0, 2.0], w=[1.0, 0.5, 0.0]))
    4.0
    """
    return permutahedron_value(x, w, lam=0.0, phi="abs", axis=axis)


def half_sq_support_norm(y: ArrayLike, k: ArrayLike, *, axis: int = -1) -> FloatArray:
    r"""Half the squared k-support norm.

    .. math:: \frac12 \min_{z \in [0,1]^n,\ \sum_i z_i = k}\ \sum_i y_i^2 / z_i

    It equals :math:`\frac12 \|y\|^2` for vectors with at most k nonzeros, and is the largest convex
    function that does (Argyriou et al., 2012). k may be real; k = 0 gives infinity unless y = 0.

    >>> float(half_sq_support_norm([3.0, 0.0, -4.0], k=2))
    12.5
    """
    return _conjugate_of_top_k(y, k, "half_square", axis)


def support_negentropy(y: ArrayLike, k: ArrayLike, *, axis: int = -1) -> FloatArray:
    r"""k-support negentropy.

    .. math:: \min_{z \in [0,1]^n,\ \sum_i z_i = k}\ \sum_i y_i \log(y_i / z_i)

    Infinite where y has a negative entry. For k = 1 it is s log(s) with s = sum(y), which is 0 on the
    simplex; for k = n it is the negentropy, sum_i y_i log(y_i).

    >>> float(support_negentropy([0.5, 0.5, 0.0], k=1))
    0.0
    """
    return _conjugate_of_top_k(y, k, "exp", axis)


def _conjugate_of_top_k(y: ArrayLike, k: ArrayLike, phi: PhiName, axis: int) -> FloatArray:
    rows = Rows.of("y", y, axis)
    k_rows = xp.split(check_k(rows.per_row("k", k), rows.n))
    with xp.quiet():
        return rows.restore_scalars(conjugate_of_top_k(xp, rows.data, k_rows, Phi(xp, phi)))


def conjugate(
    y: ArrayLike, w: ArrayLike, *, phi: PhiName = "identity", axis: int = -1
) -> FloatArray:
    r"""The conjugate of f_phi in its first argument, Proposition 3 of the paper.

    .. math:: f_\phi^*(y, w) = \min_{z \in P(w)} \sum_i z_i \phi^*(y_i / z_i)

    For "identity" it is the indicator of P(w), for "abs" that of the unit ball of the dual OWL norm
    (0 inside, infinity outside, up to rounding). w must be nonnegative unless phi is the identity.
    """
    rows = Rows.of("y", y, axis)
    check_phi(phi)
    w_rows = broadcast_weights(rows, w, phi)
    w_sorted = -np.sort(-w_rows.data, axis=-1)
    return rows.restore_scalars(_conjugate(rows.data, w_sorted, Phi(xp, phi)))


def _conjugate(y: Array, w: Array, phi: Phi) -> Array:
    """Row by row, for w in decreasing order; (m, 1)."""
    invalid = _any(np.isnan(y) | ~np.isfinite(w))
    size = np.where(np.isfinite(y), np.abs(y) if phi.even else y, 0.0)
    size, w = -np.sort(-size, axis=-1), np.where(np.isfinite(w), w, 0.0)
    if phi.name in ("identity", "abs"):
        value = _indicator(size, w, equal_sums=phi.name == "identity")
    else:
        with xp.quiet():
            value = np.array([_divergence(*row, phi) for row in zip(size, w, strict=True)])
        value = value.reshape(-1, 1)
    outside = np.isinf(y) | ((y < 0) & (phi.name == "exp"))
    value = np.where(_any(outside), np.inf, value)
    return np.where(invalid, np.nan, value)


def _any(flags: Bools) -> Bools:
    return np.asarray(flags.any(axis=-1, keepdims=True))


def _indicator(y: Array, w: Array, equal_sums: bool) -> Array:
    """0 where the sorted y is majorised by w: no partial sum above that of w."""
    excess = np.cumsum(y, axis=-1) - np.cumsum(w, axis=-1)
    slack = _ROUNDING * xp.total(np.abs(y) + np.abs(w))
    inside = ~_any(excess > slack)
    if equal_sums:
        inside &= ~_any(np.abs(excess[:, -1:]) > slack)
    return np.where(inside, 0.0, np.inf)


def _divergence(y: Array, w: Array, phi: Phi) -> float:
    """min_{z in P(w)} sum_i z_i phi*(y_i/z_i), for y >= 0 and w >= 0 in decreasing order.

    In the dual this is isotonic: on a block B all y_i/z_i are equal to Y_B/W_B, the sums over the
    block, and these ratios decrease; the blocks are the faces of the least concave majorant of the
    partial sums of y over those of w, the same for every phi.
    """
    blocks: list[tuple[float, float]] = []
    for mass, weight in zip(y.tolist(), w.tolist(), strict=True):
        while blocks and blocks[-1][0] * weight < mass * blocks[-1][1]:
            left_mass, left_weight = blocks.pop()
            mass, weight = left_mass + mass, left_weight + weight
        blocks.append((mass, weight))
    masses, weights = np.array(blocks, dtype=np.float64).reshape(-1, 2).T
    if np.any((weights == 0) & (masses > 0)):
        return np.inf
    ratio = masses / np.where(weights > 0, weights, 1.0)
    return float(np.sum(weights * phi.conjugate(ratio)))
