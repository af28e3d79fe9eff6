"""The compiled core inside XLA, on CPU. None of these calls has a derivative.

Leading axes are rows, whatever their number: so a batch is more rows, and where they are sharded every
device solves its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from string import ascii_lowercase
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..._core import native

_HANDLERS: Mapping[str, object] = {} if native is None else native.xla_handlers()

for _name, _handler in _HANDLERS.items():
    jax.ffi.register_ffi_target(_name, _handler, platform="cpu")

_Results = tuple[Array, Array, Array]


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
    return _by_rows(_threshold, op, exponent, debias)(x, whole, frac, lam)


def pav(x: Array, w: Array, lam: Array, *, phi: int, exponent: float) -> tuple[Array, Array, Array]:
    """d, block and paired (see csrc/isotonic.hpp) of x and w (..., n) with lam (..., 1).

    All three are float32, or all are float64; d is too, and block and paired are int32.
    """
    return _by_rows(_pav, phi, exponent)(x, w, lam)


def _threshold(op: int, exponent: float, debias: bool, *arrays: Array) -> _Results:
    x, *_, lam = arrays
    entry, row = _types(*arrays)
    results = (entry.update(dtype=x.dtype), *2 * (row.update(dtype=lam.dtype),))
    call = jax.ffi.ffi_call("sparsetopk_threshold", results)
    y, pivot, delta = call(
        *arrays, op=np.int32(op), exponent=np.float64(exponent), debias=np.bool_(debias)
    )
    return y, pivot, delta


def _pav(phi: int, exponent: float, *arrays: Array) -> _Results:
    entry, _ = _types(*arrays)
    results = (entry.update(dtype=arrays[0].dtype), *2 * (entry.update(dtype=jnp.int32),))
    call = jax.ffi.ffi_call("sparsetopk_pav", results)
    d, block, paired = call(*arrays, phi=np.int32(phi), exponent=np.float64(exponent))
    return d, block, paired


def _types(*arrays: Array) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """What has one number per entry and what has one per row, sharded and varying as the arrays are."""

    def combine(*arrays: Array) -> tuple[Array, Array]:
        first, *others = (array.astype(jnp.float32) for array in arrays)
        entry = sum(others, first)
        return entry, entry.sum(-1, keepdims=True)

    return jax.eval_shape(combine, *arrays)


@lru_cache
def _by_rows(solve: Callable[..., _Results], *attributes: Any) -> Callable[..., _Results]:
    """``solve(*attributes, *arrays)`` for arrays (..., any), with a batch as one more leading axis."""

    @custom_vmap
    def batched(*arrays: Array) -> _Results:
        return _sharded(partial(solve, *attributes), len(arrays))(*arrays)

    @batched.def_vmap
    def _(size: int, is_batched: Sequence[bool], *arrays: Array) -> tuple[_Results, Any]:
        rows = (
            array if leads else jnp.broadcast_to(array, (size, *array.shape))
            for array, leads in zip(arrays, is_batched, strict=True)
        )
        return batched(*rows), (True, True, True)

    return batched


def _sharded(solve: Callable[..., _Results], arguments: int) -> Callable[..., _Results]:
    """``solve`` where each device has some of the rows.

    To XLA the call is a black box, for which it would gather all rows on every device.
    """

    def rows(mesh: Mesh, arrays: Sequence[Any]) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*arrays[0].sharding.spec[:-1], None))

    def infer(mesh: Mesh, arrays: Sequence[Any], results: Sequence[Any]) -> Any:
        return (rows(mesh, arrays),) * len(results)

    def partition(mesh: Mesh, arrays: Sequence[Any], results: Sequence[Any]) -> Any:
        place = rows(mesh, arrays)
        return mesh, solve, (place,) * len(results), (place,) * len(arrays)

    # All have the leading axes in common, and nothing else: "... a, ... b -> ... c".
    axes = [f"... {letter}" for letter in ascii_lowercase[: arguments + 3]]
    rule = f"{', '.join(axes[:arguments])} -> {', '.join(axes[arguments:])}"
    call = custom_partitioning(solve)
    # The rule is for Shardy; the partitioner before it, which can still be chosen, infers.
    call.def_partition(partition, infer_sharding_from_operands=infer, sharding_rule=rule)
    return call
