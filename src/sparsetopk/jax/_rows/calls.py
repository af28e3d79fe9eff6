"""Functions of rows as primitives of JAX: what is lowered for decides how they are computed.

By ``lax.platform_dependent`` every way is traced, whichever is taken; here only that one is, and that
when it is lowered. Arguments are arrays (..., any length) whose leading axes are the same; so are
results, and a batch is one more leading axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from .._solvers import ffi
from .promotion import promoting

Function = Callable[..., Sequence[Array]]
Types = Callable[..., Sequence[tuple[int, Any]]]
Attributes = Callable[..., dict[str, Any] | None]
Kernel = Callable[..., Function | None]

_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


class RowCall:
    """``plain(*arrays, **params)``, on the CPU by the compiled core where that has it, and elsewhere by
    a kernel where there is one.

    ``types(*arrays, **params)`` gives the lengths and dtypes of the results. ``in_core(*arrays,
    **params)`` gives the attributes of the core's call of that name, or None where it has none.
    ``in_kernel(platform, *arrays, **params)`` gives a function of arrays, or None where there is none.
    Derivatives are those of ``plain``, unless there is a rule for these.
    """

    def __init__(
        self,
        name: str,
        types: Types,
        plain: Function,
        in_core: Attributes | None = None,
        in_kernel: Kernel | None = None,
    ):
        plain = promoting(plain)
        self.primitive = Primitive(f"sparsetopk_{name}")
        self.primitive.multiple_results = True
        self.primitive.def_impl(
            lambda *at, **params: xla.apply_primitive(self.primitive, *at, **params)
        )
        self.primitive.def_abstract_eval(_typed(types))
        in_xla = mlir.lower_fun(plain, multiple_results=True)
        mlir.register_lowering(self.primitive, in_xla)
        for platform in _PLATFORMS:
            rule = in_xla
            if in_kernel is not None:
                rule = _in_kernel(platform, in_kernel, rule)
            if in_core is not None and platform == "cpu":
                rule = _in_core(name, in_core, rule)
            if rule is not in_xla:
                mlir.register_lowering(self.primitive, rule, platform=platform)
        batching.primitive_batchers[self.primitive] = self._batched
        ad.primitive_jvps[self.primitive] = derivative_of(plain)

    def __call__(self, *arrays: Array, **params: Any) -> list[Array]:
        return self.primitive.bind(*alike(arrays), **params)

    def _batched(self, arrays: Sequence[Array], axes: Sequence[Any], **params: Any) -> Any:
        size = next(v.shape[a] for v, a in zip(arrays, axes, strict=True) if a is not None)
        rows = [
            jnp.broadcast_to(v, (size, *v.shape)) if a is None else jnp.moveaxis(v, a, 0)
            for v, a in zip(arrays, axes, strict=True)
        ]
        found = self(*rows, **params)
        return found, [0] * len(found)

    def def_jvp(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """``rule(primals, tangents, **params)``; None is a tangent that is zero, here and in results."""

        def jvp(primals: Sequence[Array], tangents: Sequence[Any], **params: Any) -> Any:
            found, moved = rule(primals, [None if is_zero(d) else d for d in tangents], **params)
            zeros = (ad.Zero(jax.typeof(v).to_tangent_aval()) for v in found)
            return found, [z if d is None else d for z, d in zip(zeros, moved, strict=True)]

        ad.primitive_jvps[self.primitive] = jvp
        return rule

    def def_transpose(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """``rule(cotangents, constants, **params)`` gives the cotangents of the arguments that come
        after the constants, which the call is linear in; of results, None is zero."""

        def transpose(cotangents: Sequence[Any], *arguments: Any, **params: Any) -> Any:
            constants = [v for v in arguments if not ad.is_undefined_primal(v)]
            given = [None if is_zero(g) else g for g in cotangents]
            return [*(None for _ in constants), *rule(given, constants, **params)]

        ad.primitive_transposes[self.primitive] = transpose
        return rule


def is_zero(tangent: Any) -> bool:
    """As JAX or as rules say it."""
    return tangent is None or isinstance(tangent, ad.Zero)


def _typed(types: Types) -> Callable[..., Any]:
    def types_of(*arrays: Any, **params: Any) -> list[Any]:
        first = arrays[0]
        return [
            first.update(shape=(*first.shape[:-1], length), dtype=jnp.dtype(dtype), weak_type=False)
            for length, dtype in types(*arrays, **params)
        ]

    return types_of


def _in_core(name: str, attributes: Attributes, otherwise: Any) -> Any:
    def rule(context: Any, *operands: Any, **params: Any) -> Any:
        given = attributes(*context.avals_in, **params) if ffi.available() else None
        if given is None:
            return otherwise(context, *operands, **params)
        return ffi.lower(name, context, *operands, **given)

    return rule


def _in_kernel(platform: str, kernel: Kernel, otherwise: Any) -> Any:
    def rule(context: Any, *operands: Any, **params: Any) -> Any:
        served = _is_local(context) and not (platform != "tpu" and _is_exported(context))
        found = kernel(platform, *context.avals_in, **params) if served else None
        if found is None:
            return otherwise(context, *operands, **params)
        # A kernel knows of no mesh: nor do the types of what it is given.
        types = [jax.core.ShapedArray(v.shape, v.dtype) for v in context.avals_in]
        by_kernel = mlir.lower_fun(promoting(found), multiple_results=True)
        # Nor does it know of x64, if it has no need of it: its constants would be numbers of 64 bits.
        with jax.enable_x64(any(v.dtype == jnp.float64 for v in types)):
            return by_kernel(context.replace(avals_in=types), *operands)

    return rule


def _is_local(context: Any) -> bool:
    """Whether a device sees its own rows: those of an array that XLA is to share out it would gather
    for a kernel."""
    place = context.module_context.axis_context
    if isinstance(place, mlir.ShardingContext):
        return place.num_devices == 1
    if isinstance(place, mlir.SPMDAxisContext):
        return place.manual_axes | set(place.mesh.manual_axes) == set(place.mesh.axis_names)
    return True


def _is_exported(context: Any) -> bool:
    """Whether another version of JAX may run it: that it can run kernels for GPUs is not promised."""
    return bool(context.module_context.lowering_parameters.for_export)


def derivative_of(function: Function) -> Callable[..., Any]:
    """The derivative of what it computes in XLA operations."""

    def jvp(primals: Sequence[Array], tangents: Sequence[Any], **params: Any) -> Any:
        live = [i for i, d in enumerate(tangents) if not is_zero(d)]

        def of_live(*values: Array) -> list[Array]:
            at = dict(zip(live, values, strict=True))
            return list(function(*(at.get(i, v) for i, v in enumerate(primals)), **params))

        return jax.jvp(of_live, [primals[i] for i in live], [tangents[i] for i in live])

    return jvp


def varying(array: Array) -> frozenset[str]:
    """The mesh axes inside ``shard_map`` over which it varies."""
    type_of: Any = jax.typeof(array)
    found = type_of.vma if hasattr(type_of, "vma") else type_of.manual_axis_type.varying
    return frozenset(found)


def alike(arrays: Sequence[Array]) -> list[Array]:
    """Arrays that vary over the same mesh axes, as JAX makes the arguments of its own operations."""
    each = [varying(array) for array in arrays]
    every = frozenset().union(*each)
    return [
        lax.pcast(array, tuple(every - own), to="varying") if every - own else array
        for array, own in zip(arrays, each, strict=True)
    ]


def tangent_call(name: str, types: Types, function: Function) -> RowCall:
    """The derivative of ``function(*at, **params)`` as a call of ``at``, and of the tangents of what
    ``moves`` says: nothing of it is traced before it is lowered, or differentiated again."""

    def tangent(*arguments: Array, moves: tuple[bool, ...], **params: Any) -> list[Array]:
        at, given = arguments[: len(moves)], iter(arguments[len(moves) :])
        moved = [next(given) if live else None for live in moves]
        return list(derivative_of(function)(at, moved, **params)[1])

    call = RowCall(name, lambda *v, moves, **params: types(*v[: len(moves)], **params), tangent)

    @call.def_transpose
    def _(
        cotangents: Sequence[Any], at: Sequence[Array], moves: tuple[bool, ...], **params: Any
    ) -> list[Array]:
        like = [jnp.zeros_like(v) for v, live in zip(at, moves, strict=True) if live]
        linear = partial(promoting(tangent), *at, moves=moves, **params)
        found = jax.eval_shape(linear, *like)
        given = [
            jnp.zeros(v.shape, v.dtype) if g is None else g
            for g, v in zip(cotangents, found, strict=True)
        ]
        return list(jax.linear_transpose(linear, *like)(given))

    return call
