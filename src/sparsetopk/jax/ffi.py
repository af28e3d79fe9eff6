"""The compiled core inside XLA, on CPU. None of these calls has a derivative.

Leading axes are rows, whatever their number: so a batch is more rows, and where they are sharded every
device solves its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..core import native

_HANDLERS: Mapping[str, object] = {} if native is None else native.xla_handlers()

for _name, _handler in _HANDLERS.items():
    jax.ffi.register_ffi_target(_name, _handler, platform="cpu")

_Call = Callable[..., tuple[Array, ...]]


def available() -> bool:
    """Whether the core was built with these calls."""
    return bool(_HANDLERS)


def threshold(
    x: Array, whole: Array, frac: Array, lam: Array, *, op: int, exponent: float, debias: bool
) -> tuple[Array, ...]:
    """y, pivot and delta (see csrc/problem.hpp) of x (..., n), with k = whole + frac and lam (..., 1).

    frac and lam are float32 or float64, and pivot and delta have the dtype of lam; whole is int32, so
    that no count is rounded.
    """
    rule = "... n, ... o, ... o, ... o -> ... n, ... o, ... o"
    return _by_rows(_threshold, rule, op, exponent, debias)(x, whole, frac, lam)


def pav(x: Array, w: Array, lam: Array, *, phi: int, exponent: float) -> tuple[Array, ...]:
    """d, block and paired (see csrc/isotonic.hpp) of x and w (..., n) with lam (..., 1).

    All three are float32, or all are float64; d is too, and block and paired are int32.
    """
    return _by_rows(_pav, "... n, ... n, ... o -> ... n, ... n, ... n", phi, exponent)(x, w, lam)


def _threshold(op: int, exponent: float, debias: bool, *arrays: Array) -> tuple[Array, ...]:
    x, *_, lam = arrays
    entry, row = _types(*arrays)
    y, state = entry.update(dtype=x.dtype), row.update(dtype=lam.dtype)
    call = jax.ffi.ffi_call("sparsetopk_threshold", (y, state, state))
    return call(*arrays, op=np.int32(op), exponent=np.float64(exponent), debias=np.bool_(debias))


def _pav(phi: int, exponent: float, *arrays: Array) -> tuple[Array, ...]:
    entry, _ = _types(*arrays)
    d, index = entry.update(dtype=arrays[0].dtype), entry.update(dtype=jnp.int32)
    call = jax.ffi.ffi_call("sparsetopk_pav", (d, index, index))
    return call(*arrays, phi=np.int32(phi), exponent=np.float64(exponent))


def _types(*arrays: Array) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """What has one number per entry and what has one per row, sharded and varying as the arrays are."""

    def combine(*arrays: Array) -> tuple[Array, Array]:
        first, *others = (array.astype(jnp.float32) for array in arrays)
        entry = sum(others, first)
        return entry, entry.sum(-1, keepdims=True)

    return jax.eval_shape(combine, *arrays)


@lru_cache
def _by_rows(call: _Call, rule: str, *attributes: Any) -> _Call:
    """``call(*attributes, *arrays)``, which takes any number of leading axes, and only those sharded.

    To XLA a custom call is a black box: it would gather its arguments on every device.
    """
    solve = partial(call, *attributes)

    @custom_vmap
    def batched(*arrays: Array) -> tuple[Array, ...]:
        return _partitioned(solve, rule)(*arrays)

    @batched.def_vmap
    def _(size: int, is_batched: Sequence[bool], *arrays: Array) -> tuple[Any, Any]:
        found = batched(
            *(
                array if leads else jnp.broadcast_to(array, (size, *array.shape))
                for array, leads in zip(arrays, is_batched, strict=True)
            )
        )
        return found, (True,) * len(found)

    return batched


def _partitioned(solve: _Call, rule: str) -> _Call:
    def rows(mesh: Mesh, arguments: Sequence[Any]) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*arguments[0].sharding.spec[:-1], None))

    def infer(mesh: Mesh, arguments: Sequence[Any], results: Sequence[Any]) -> Any:
        return (rows(mesh, arguments),) * len(results)

    def partition(mesh: Mesh, arguments: Sequence[Any], results: Sequence[Any]) -> Any:
        place = rows(mesh, arguments)
        return mesh, solve, (place,) * len(results), (place,) * len(arguments)

    call = custom_partitioning(solve)
    call.def_partition(
        partition,
        infer_sharding_from_operands=infer,
        sharding_rule=rule,
        need_replication_factors=("n",),
    )
    return call
