"""The compiled core inside XLA, on CPU. None of these calls has a derivative.

Leading axes are rows, whatever their number: so a batch is more rows, and where they are sharded every
device solves its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..core import native

_HANDLERS: Mapping[str, object] = {} if native is None else native.xla_handlers()

for _name, _handler in _HANDLERS.items():
    jax.ffi.register_ffi_target(_name, _handler, platform="cpu")
    jax.ffi.register_ffi_target_as_batch_partitionable(_name)


def available() -> bool:
    """Whether the core was built with these calls."""
    return bool(_HANDLERS)


def threshold(
    x: Array, whole: Array, frac: Array, lam: Array, *, op: int, exponent: float, debias: bool
) -> tuple[Array, Array, Array]:
    """y, pivot and delta (see csrc/problem.hpp) of x (..., n), with k = whole + frac and lam (..., 1).

    frac and lam are float32 or float64, and pivot and delta have the dtype of lam; whole is int32, so
    that no count is rounded.
    """
    entry, row = _types(x, whole, frac, lam)
    results = (_like(entry, x.dtype), _like(row, lam.dtype), _like(row, lam.dtype))
    attributes = {"op": np.int32(op), "exponent": np.float64(exponent), "debias": debias}
    return _call("sparsetopk_threshold", results, (x, whole, frac, lam), attributes)


def _types(x: Array, *others: Array) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """What has one number per entry of x and one per row, sharded and varying as the arguments are."""

    def combine(*arrays: Array) -> tuple[Array, Array]:
        first, *rest = (a.astype(jnp.float32) for a in arrays)
        entry = sum(rest, first)
        return entry, entry.sum(-1, keepdims=True)

    return jax.eval_shape(combine, x, *others)


def _like(type_: jax.ShapeDtypeStruct, dtype: np.dtype[Any]) -> jax.ShapeDtypeStruct:
    return type_.update(dtype=dtype)


def _call(
    name: str,
    results: tuple[jax.ShapeDtypeStruct, ...],
    arrays: tuple[Array, ...],
    attributes: dict[str, Any],
) -> Any:
    return jax.ffi.ffi_call(name, results, vmap_method="broadcast_all")(*arrays, **attributes)
