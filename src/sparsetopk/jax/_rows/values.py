"""Values of rows with their gradients, one call of the core each: those of the permutahedron, and the
conjugate of the top-k without a regulariser.

For a backward the gradient is kept. Derivatives of it are those of the maths.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..._maths.isotonic import PHI_NAMES
from ..._maths.norms import conjugate_of_top_k
from ..._maths.operator import Count
from ..._maths.scalars import Phi, PhiName
from .._solvers.plain import tangent_sum
from . import namespace as xp
from .calls import RowCall, derivative_of, tangent_call
from .isotonic import IsotonicSetting, keeping_solved
from .permuted import Relaxed
from .promotion import promoting


def permutahedron_value(x: Array, w: Array, lam: Array, setting: IsotonicSetting) -> Array:
    """f_{phi,R}(x, w) of rows, (..., 1), solved by PAV."""
    at = (v.astype(lam.dtype) for v in (x, w))
    return _value(*at, lam, setting=setting)[0]


def _value_in_xla(x: Array, w: Array, lam: Array, setting: IsotonicSetting) -> tuple[Array, Array]:
    """And y."""
    relaxed = Relaxed.of(x, w, lam, setting)
    return relaxed.value(), relaxed.y()


def _value_types(x: Array, w: Array, lam: Array, setting: IsotonicSetting) -> list[tuple[int, Any]]:
    return [(1, x.dtype), (x.shape[-1], x.dtype)]


def _value_in_core(*_: Any, setting: IsotonicSetting) -> dict[str, Any]:
    phi = np.int32(PHI_NAMES.index(setting.phi_name))
    return {"phi": phi, "exponent": np.float64(setting.exponent)}


_value = RowCall("permutahedron_value", _value_types, _value_in_xla, _value_in_core)
_value_tangent = tangent_call("permutahedron_value_tangent", _value_types, _value_in_xla)


@_value.def_jvp
def _(at: Sequence[Array], tangents: Sequence[Any], setting: IsotonicSetting) -> Any:
    dx, *others = tangents
    if any(d is not None for d in others):
        in_xla = keeping_solved(promoting(partial(_value_in_xla, setting=setting)))
        return derivative_of(in_xla)(at, tangents)
    value, y = _value(*at, setting=setting)
    dy = _value_tangent(*at, dx, setting=setting, moves=(True, False, False))[1]
    return (value, y), (tangent_sum(y * dx), dy)


def conjugate_of_rows(y: Array, k: Count, phi: PhiName) -> Array:
    """min_{z in P(1_k)} sum_i z_i phi*(y_i/z_i), (..., 1)."""
    return _conjugate(y, *k, phi=phi)[0]


def _conjugate_in_xla(
    y: Array, whole: Array, frac: Array, phi: PhiName
) -> tuple[Array, Array, Array]:
    """And its derivatives in y and k."""

    def value(y: Array, frac: Array) -> Array:
        return conjugate_of_top_k(xp, y, Count(whole, frac), Phi(xp, phi))

    found, pull = jax.vjp(value, y, frac)
    return found, *pull(jnp.ones_like(found))


def _conjugate_types(y: Array, whole: Array, frac: Array, phi: PhiName) -> list[tuple[int, Any]]:
    return [(1, y.dtype), (y.shape[-1], y.dtype), (1, y.dtype)]


_conjugate = RowCall(
    "conjugate",
    _conjugate_types,
    _conjugate_in_xla,
    lambda *_, phi: {"phi": np.int32(PHI_NAMES.index(phi))},
)
_conjugate_tangent = tangent_call("conjugate_tangent", _conjugate_types, _conjugate_in_xla)


@_conjugate.def_jvp
def _(at: Sequence[Array], tangents: Sequence[Any], phi: PhiName) -> Any:
    dy, _, dk = tangents
    value, in_y, in_k = _conjugate(*at, phi=phi)
    moved: Any = 0.0
    moved = moved if dy is None else moved + tangent_sum(in_y * dy)
    moved = moved if dk is None else moved + in_k * dk
    moves, given = (dy is not None, False, dk is not None), (d for d in (dy, dk) if d is not None)
    _, *others = _conjugate_tangent(*at, *given, phi=phi, moves=moves)
    return (value, in_y, in_k), (moved, *others)
