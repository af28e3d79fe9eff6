"""Norms and entropies around the permutahedron, on JAX arrays: f_phi and its conjugate."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from ..._maths.operator import Count
from .._rows.arguments import Number, Rows, check_k, check_number, compute_dtype, exact
from .._rows.compiled import compiled, scalars
from .polytope import permutahedron_value


def owl_norm(x: Array, w: Array, *, axis: int = -1) -> Array:
    r"""Ordered weighted lasso norm, :math:`\sum_i w_i |x|_{[i]}` with w >= 0 in decreasing order.

    >>> owl_norm(jnp.array([1.0, -3.0, 2.0]), w=jnp.array([1.0, 0.5, 0.0]))
    Array(4., dtype=float32)
    """
    return permutahedron_value(x, w, lam=0.0, phi="abs", axis=axis)


def half_sq_support_norm(y: Array, k: Number, *, axis: int = -1) -> Array:
    r"""Half the squared k-support norm.

    .. math:: \frac12 \min_{z \in [0,1]^n,\ \sum_i z_i = k}\ \sum_i y_i^2 / z_i

    It equals :math:`\frac12 \|y\|^2` for vectors with at most k nonzeros, and is the largest convex
    function that does (Argyriou et al., 2012). k may be real; k = 0 gives infinity unless y = 0.

    >>> half_sq_support_norm(jnp.array([3.0, 0.0, -4.0]), k=2)
    Array(12.5, dtype=float32)
    """
    return _conjugate_of_top_k(y, k, axis, entropy=False)


def support_negentropy(y: Array, k: Number, *, axis: int = -1) -> Array:
    r"""k-support negentropy.

    .. math:: \min_{z \in [0,1]^n,\ \sum_i z_i = k}\ \sum_i y_i \log(y_i / z_i)

    Infinite where y has a negative entry. For k = 1 it is s log(s) with s = sum(y), which is 0 on the
    simplex; for k = n it is the negentropy, sum_i y_i log(y_i).

    >>> support_negentropy(jnp.array([0.5, 0.5, 0.0]), k=1)
    Array(0., dtype=float32)
    """
    return _conjugate_of_top_k(y, k, axis, entropy=True)


def _conjugate_of_top_k(y: Array, k: Number, axis: int, entropy: bool) -> Array:
    rows = Rows.of("y", y, axis)
    check_number("k", k)
    rows.check_shape("k", k)
    check_k(k, rows.n)
    if rows.x.size == 0:
        return rows.x.sum(axis=rows.axis)
    return _evaluate(rows.x, exact(k), rows.axis, entropy)


@compiled("axis", "entropy", results=scalars)
def _evaluate(y: Array, k: Array | Count, axis: int, entropy: bool) -> Array:
    rows = Rows("y", y, axis)
    values = rows.data.astype(compute_dtype(y))
    return rows.restore_scalars(_least(values, *rows.split(k), entropy))


def _least(y: Array, whole: Array, frac: Array, entropy: bool) -> Array:
    """min_{z in P(1_k)} sum_i z_i phi*(y_i/z_i), (..., 1), for phi = x^2/2 or exp(x - 1).

    z_i = min(y_i/g, 1): the largest entries stand alone, the others share what they leave of k.
    """
    n = y.shape[-1]
    outside = (jnp.isinf(y) | (y < 0 if entropy else False)).any(axis=-1, keepdims=True)
    valid = (whole >= 0) & (frac >= 0) & ((whole < n) | ((whole == n) & (frac == 0)))
    invalid = jnp.isnan(y).any(axis=-1, keepdims=True) | ~valid
    size = jnp.where(outside | invalid, 0.0, y if entropy else jnp.abs(y))
    s = jnp.sort(size, axis=-1, descending=True)
    alone = _alone(lax.stop_gradient(s), Count(whole, lax.stop_gradient(frac)))
    left = (whole - alone.sum(axis=-1, keepdims=True, dtype=jnp.int32)).astype(y.dtype) + frac
    mass = jnp.where(alone, 0.0, s).sum(axis=-1, keepdims=True)
    shared = left > 0
    left = jnp.where(shared, left, 1.0)
    rest = jnp.where(shared, left * _conjugate(mass / left, entropy), 0.0)
    total = jnp.where(alone, _conjugate(s, entropy), 0.0).sum(axis=-1, keepdims=True) + rest
    total = jnp.where(outside | (~shared & (mass > 0)), jnp.inf, total)
    nan = (y.sum(axis=-1, keepdims=True) + frac) * jnp.where(invalid, jnp.nan, 0.0).astype(y.dtype)
    return jnp.where(invalid, nan, total)


def _conjugate(mean: Array, entropy: bool) -> Array:
    """phi*."""
    if entropy:  # the slope of y log(y) at 0 is finite so
        return mean * jnp.log(jnp.maximum(mean, jnp.finfo(mean.dtype).tiny))
    return mean * mean / 2


def _alone(s: Array, k: Count) -> Array:
    """Which entries of the sorted rows have z_i = 1: those at least the mean that is left for them."""
    left = k.whole - jnp.arange(s.shape[-1], dtype=jnp.int32)
    tail = lax.cumsum(s, axis=s.ndim - 1, reverse=True)
    alone = (left >= 1) & (s * (left.astype(s.dtype) + k.frac) >= tail)
    return lax.cummin(alone.astype(jnp.int32), axis=s.ndim - 1) == 1
