"""Norms and entropies around the permutahedron, on JAX arrays: f_phi and its conjugate."""

from __future__ import annotations

import jax.numpy as jnp  # noqa: F401 (the examples use it)
from jax import Array

from ..._maths.operator import Count
from ..._types import PhiName
from .._rows.arguments import Number, Rows, check_k, check_number, compute_dtype, exact
from .._rows.compiled import compiled, scalars
from .._rows.values import conjugate_of_rows
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
    return _conjugate_of_top_k(y, k, axis, "half_square")


def support_negentropy(y: Array, k: Number, *, axis: int = -1) -> Array:
    r"""k-support negentropy.

    .. math:: \min_{z \in [0,1]^n,\ \sum_i z_i = k}\ \sum_i y_i \log(y_i / z_i)

    Infinite where y has a negative entry. For k = 1 it is s log(s) with s = sum(y), which is 0 on the
    simplex; for k = n it is the negentropy, sum_i y_i log(y_i).

    >>> support_negentropy(jnp.array([0.5, 0.5, 0.0]), k=1)
    Array(0., dtype=float32)
    """
    return _conjugate_of_top_k(y, k, axis, "exp")


def _conjugate_of_top_k(y: Array, k: Number, axis: int, phi: PhiName) -> Array:
    rows = Rows.of("y", y, axis)
    check_number("k", k)
    rows.check_shape("k", k)
    check_k(k, rows.n)
    if rows.x.size == 0:
        return rows.x.sum(axis=rows.axis)
    return _evaluate(rows.x, exact(k), rows.axis, phi)


@compiled("axis", "phi", results=scalars)
def _evaluate(y: Array, k: Array | Count, axis: int, phi: PhiName) -> Array:
    rows = Rows("y", y, axis)
    values = rows.data.astype(compute_dtype(y))
    return rows.restore_scalars(conjugate_of_rows(values, rows.split(k), phi))
