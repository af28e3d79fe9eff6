"""Functions of arrays as one compiled call each, on a mesh of any kind.

Where the axes of a mesh are explicit, every operation says how its result is sharded, and many of those
that the maths is written in cannot: inside these functions the axes are automatic.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ..._types import Axes
from .promotion import promoting

Spec = tuple[Any, ...]
"""How an array is sharded, one entry for each of its axes."""


def entries(spec: Spec, axis: Axes) -> PartitionSpec:
    """Of a result that is sharded as the first argument is, of any length along the axis."""
    return PartitionSpec(*spec)


def scalars(spec: Spec, axis: Axes) -> PartitionSpec:
    """Of a result without the axis."""
    gone = axis if isinstance(axis, tuple) else (axis,)
    return PartitionSpec(*(name for i, name in enumerate(spec) if i not in gone))


def compiled(
    *static: str, results: Callable[[Spec, Axes], Any]
) -> Callable[[Callable[..., Any]], Any]:
    """jit of ``f(x, ..., axis, ...)``, whose ``results`` are sharded as x is, along other axes.

    Called outside of jit it is one compiled call, and not dozens.
    """

    def decorate(f: Callable[..., Any]) -> Any:
        f = promoting(f)
        names = tuple(inspect.signature(f).parameters)

        @partial(jax.jit, static_argnames=static, keep_unused=True)
        @wraps(f)
        def call(*args: Any, **options: Any) -> Any:
            given = dict(zip(names, args, strict=False)) | options
            x, axis = given[names[0]], given["axis"]
            mesh, spec = sharding(x)
            explicit = explicit_axes(mesh)
            if not explicit:
                return f(**given)
            if any(spec[i] is not None for i in (axis if isinstance(axis, tuple) else (axis,))):
                raise ValueError(
                    f"{names[0]} must not be sharded along axis {axis}, got {jax.typeof(x)}: reshard "
                    "it, or use axis_name inside shard_map where that is an argument"
                )
            places = jax.tree.map(
                partial(NamedSharding, mesh),
                results(spec, axis),
                is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
            )
            fixed = partial(f, **{name: given[name] for name in static})
            arrays = {name: v for name, v in given.items() if name not in static}
            anywhere = jax.sharding.auto_axes(
                lambda arrays: fixed(**arrays), axes=explicit, out_sharding=places
            )
            return anywhere(with_tangents_there(arrays))

        return call

    return decorate


def with_tangents_there(arrays: Any) -> Any:
    """Arrays on a mesh, whose tangents are on it too: outside of jit, where an array was on no mesh
    before one was set, those of JAX's copies are not, and nothing could be added to a gradient."""
    products = lambda v: v * 1 if jnp.issubdtype(v.dtype, jnp.floating) else v  # noqa: E731
    return jax.tree.map(products, arrays)


def sharding(x: Array) -> tuple[Any, Spec]:
    place = jax.typeof(x).sharding
    return place.mesh, tuple(place.spec)


def explicit_axes(mesh: Any) -> tuple[str, ...]:
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in kinds if kind == AxisType.Explicit)
