"""The compiled core inside XLA, on CPU: how its custom calls are lowered.

Leading axes are rows, whatever their number: so a batch is more rows, and where they are sharded every
device solves its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, count
from typing import Any

import jax
import jax.export
from jax.interpreters import mlir

from ..._core import native

_HANDLERS: Mapping[str, object] = {} if native is None else native.xla_handlers()

for _name, _handler in _HANDLERS.items():
    jax.ffi.register_ffi_target(_name, _handler, platform="cpu")
    jax.ffi.register_ffi_target_as_batch_partitionable(_name)


def available() -> bool:
    """Whether the core was built with these calls."""
    return bool(_HANDLERS)


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """What ``jax.export.export(..., disabled_checks=...)`` must be told for the CPU: that the calls of
    the compiled core will be there where the program runs, as they are where ``sparsetopk.jax`` of
    this version is imported. JAX itself guarantees that of its own calls alone.

    >>> f = jax.export.export(jax.jit(lambda x: x), disabled_checks=export_checks())
    """
    return [jax.export.DisabledSafetyCheck.custom_call(name) for name in _HANDLERS]


def lower(name: str, context: Any, *operands: Any, **attributes: Any) -> Sequence[Any]:
    """A call of the handler ``sparsetopk_<name>``, of arrays (..., any length)."""
    rule = jax.ffi.ffi_lowering(f"sparsetopk_{name}", extra_attributes=_by_rows(context))
    return rule(context, *operands, **attributes)


def _by_rows(context: Any) -> dict[str, Any] | None:
    """That rows may be shared out between devices: else XLA would gather all of them on every one."""
    shapes = [[v.shape for v in avals] for avals in (context.avals_in, context.avals_out)]
    batch = shapes[0][0][:-1]
    if not all(isinstance(size, int) for part in shapes for shape in part for size in shape):
        return None  # exported for any number of rows
    attributes = {"num_batch_dims": str(len(batch))}
    found = {"mhlo.frontend_attributes": mlir.ir_attribute(attributes)}
    shardy = jax.config.jax_use_shardy_partitioner  # type: ignore[attr-defined]
    if shardy:  # the partitioner before it needs the number alone
        found["sdy.sharding_rule"] = mlir.ir.Attribute.parse(_sharding_rule(batch, *shapes))
    return found


def _sharding_rule(batch: Sequence[int], *parts: Sequence[Sequence[int]]) -> str:
    """In the words of Shardy, all have the leading axes in common, and nothing else."""
    names = chain("ijklmnopqrstuvwxyz", (f"z_{i}" for i in count(1)))
    sizes = {name: size for size, name in zip(batch, names, strict=False)}
    common = list(sizes)

    def mapping(shape: Sequence[int]) -> str:
        own = next(names)
        sizes[own] = shape[-1]
        return f"[{', '.join([*common, own])}]"

    given, results = (f"({', '.join(map(mapping, shapes))})" for shapes in parts)
    factors = ", ".join(f"{name}={size}" for name, size in sizes.items())
    return f"#sdy.op_sharding_rule<{given}->{results} {{{factors}}}>"
