"""The top-k in magnitude over many arrays together, which may be sharded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import NamedSharding

from ..._checks import check_exponent
from ..._maths import threshold
from ..._maths.operator import MAGNITUDE, Count, Operator
from ..._maths.response import Relaxed, lam_floor
from ..._maths.threshold import State
from .._rows.arguments import (
    AxisName,
    Number,
    Rows,
    check_float_array,
    check_k,
    check_lam,
    check_number,
    compute_dtype,
    exact,
    is_hard,
)
from .._rows.compiled import explicit_axes, sharding
from .._rows.pieces import SPREAD, Pieces, Spread
from .._rows.promotion import promoting
from .operators import straight, topk_mag


def topk_mag_multi(
    arrays: Sequence[Array],
    k: Number,
    lam: Number = 0.1,
    *,
    p: float = 2.0,
    debias: bool = True,
    straight_through: bool = False,
    axis_name: AxisName = None,
) -> list[Array]:
    """``topk_mag`` over all entries of many arrays together: one k, one threshold.

    The same as of the concatenation, cut up again, to rounding. Where there are several devices nothing
    is put together: each pass adds up a few numbers over all arrays and devices, and outputs are sharded
    as the arrays are. Arrays may differ in shape and dtype; ``k`` and ``lam`` are numbers or arrays with
    one entry, and have derivatives.

    Inside ``shard_map``, ``axis_name`` names the mesh axes over which arrays are sharded, and k counts
    the entries of all shards; an array that does not vary over one of these axes counts once. The
    lowest array and index wins a tie at ``lam = 0``.

    >>> topk_mag_multi([jnp.array([3.0, -0.1]), jnp.array([[-2.0, 0.2]])], k=2, lam=0.1)
    [Array([3., 0.], dtype=float32), Array([[-2.,  0.]], dtype=float32)]
    """
    parts = [check_float_array(f"arrays[{i}]", x) for i, x in enumerate(arrays)]
    if not parts:
        raise ValueError("arrays must have at least one array, got none")
    kind = Operator(MAGNITUDE, check_exponent(p), debias)
    names = (axis_name,) if isinstance(axis_name, str) else axis_name or ()
    n = Spread(tuple(parts), names).n
    for name, value in (("k", k), ("lam", lam)):
        check_number(name, value)
        if jnp.size(value) != 1:
            raise ValueError(f"{name} must have one entry, got shape {jnp.shape(value)}")
    check_k(k, n)
    check_lam(lam)
    if n == 0:
        return parts
    if not names and not any(map(_may_be_sharded, parts)):
        together = jnp.concatenate([x.reshape(-1) for x in parts])
        k, lam = (v.reshape(()) if jnp.ndim(v) else v for v in (k, lam))  # type: ignore[union-attr]
        y = topk_mag(together, k, lam, p=p, debias=debias, straight_through=straight_through)
        ends = list(accumulate(x.size for x in parts))[:-1]
        cut = zip(jnp.split(y, ends), parts, strict=True)
        return [v.reshape(x.shape).astype(x.dtype) for v, x in cut]
    relaxed = _evaluate(tuple(parts), exact(k), lam, _Setting(kind, is_hard(lam), names))
    if not straight_through:
        return list(relaxed)
    setting = _Setting(kind._replace(debias=False), True, names)
    return list(map(straight, _evaluate(tuple(parts), exact(k), 0.0, setting), relaxed))


def _may_be_sharded(x: Array) -> bool:
    """What is traced may be, if there are several devices."""
    if isinstance(x, jax.core.Tracer):
        return jax.device_count() > 1
    return not x.sharding.is_fully_replicated


class _Setting(NamedTuple):
    """What is static about a call."""

    kind: Operator
    hard: bool | None  # whether lam = 0; None if it may be
    axis_names: tuple[str, ...]


@partial(jax.jit, static_argnames="setting")
@promoting
def _evaluate(
    parts: tuple[Array, ...], k: Array | Count, lam: Array, setting: _Setting
) -> tuple[Array, ...]:
    places = [sharding(x) for x in parts]
    explicit = sorted({name for mesh, _ in places for name in explicit_axes(mesh)})
    if not explicit:
        return _of_pieces(parts, k, lam, setting)
    mesh = next(mesh for mesh, _ in places if explicit_axes(mesh))
    results = tuple(NamedSharding(mesh, jax.typeof(x).sharding.spec) for x in parts)
    anywhere = jax.sharding.auto_axes(
        partial(_of_pieces, setting=setting), axes=tuple(explicit), out_sharding=results
    )
    return anywhere(parts, k, lam)


def _of_pieces(
    parts: tuple[Array, ...], k: Array | Count, lam: Array, setting: _Setting
) -> tuple[Array, ...]:
    dtype = jnp.result_type(*map(compute_dtype, parts))
    row = Rows("x", jnp.zeros(1, dtype), 0)
    k, lam = jax.tree.map(lambda v: jnp.reshape(v, ()), (k, lam))
    y, _ = _solve(parts, *row.split(k), row.per_row(lam), setting)
    return y


def _relaxed(
    parts: tuple[Array, ...], k: Count, lam: Array, state: State, setting: _Setting
) -> Relaxed:
    """Solved, live."""
    spread = Spread(parts, setting.axis_names)
    floor = max(lam_floor(jnp, x.dtype, setting.kind) for x in parts)
    return Relaxed.of(
        SPREAD,
        Pieces(x.astype(lam.dtype) for x in parts),
        k,
        lam,
        State(lax.stop_gradient(state.pivot), state.delta),
        setting.kind,
        sums=spread.live_sums,
        floor=floor,
        may_be_hard=setting.hard is not False,
    )


def _hard_mask(rows: Relaxed, parts: tuple[Array, ...], setting: _Setting) -> Pieces | None:
    """Of a hard selection, if it may be one."""
    if rows.split.hard is None:
        return None
    tied = SPREAD.stop_gradient(rows.a) == rows.split.pivot
    return rows.hard_mask(Spread(parts, setting.axis_names).before(tied))


Solved = tuple[tuple[Array, ...], State]


@partial(jax.custom_jvp, nondiff_argnums=(4,))
def _solve(
    parts: tuple[Array, ...], whole: Array, frac: Array, lam: Array, setting: _Setting
) -> Solved:
    k, spread = Count(whole, frac), Spread(parts, setting.axis_names)
    state = threshold.state_of(SPREAD, spread, k, lam, setting.kind, setting.hard)
    rows = _relaxed(parts, k, lam, state, setting)
    return _like(parts, rows.y(_hard_mask(rows, parts, setting))), state


def _like(parts: tuple[Array, ...], y: Pieces) -> tuple[Array, ...]:
    """In the dtypes of the arrays, with 0 for -0."""
    return tuple(
        jnp.where(v == 0, 0.0, v).astype(x.dtype) for v, x in zip(y.parts, parts, strict=True)
    )


@partial(_solve.defjvp, symbolic_zeros=True)
@promoting
def _solve_jvp(setting: _Setting, at: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
    parts, whole, frac, lam = at
    y, state = _solve(*at, setting)
    dparts, _, dk, dlam = tangents
    moved = _tangent(setting, parts, Count(whole, frac), lam, state, dparts, dk, dlam)
    dy, ddelta = moved
    return (y, state), (dy, State(jnp.zeros_like(state.pivot), ddelta))


def _tangent(
    setting: _Setting,
    parts: tuple[Array, ...],
    k: Count,
    lam: Array,
    state: State,
    dparts: tuple[Any, ...],
    dk: Any,
    dlam: Any,
) -> tuple[tuple[Array, ...], Array]:
    still = all(isinstance(d, SymbolicZero) for d in dparts)
    dx = None
    if not still:
        dx = tuple(
            jnp.zeros_like(x) if isinstance(d, SymbolicZero) else d
            for x, d in zip(parts, dparts, strict=True)
        )
    numbers = [None if isinstance(d, SymbolicZero) else d for d in (dk, dlam)]

    @jax.checkpoint  # so that a backward keeps the arrays, and numbers
    def moved(parts: Any, k: Count, lam: Array, state: State, dx: Any, numbers: Any) -> Any:
        rows = _relaxed(parts, k, lam, state, setting)
        along = None if dx is None else Pieces(d.astype(lam.dtype) for d in dx)
        dk, dlam = numbers
        ddelta, dy = rows.tangent(along, dk, dlam, _hard_mask(rows, parts, setting))
        found = tuple(v.astype(x.dtype) for v, x in zip(dy.parts, parts, strict=True))
        return found, ddelta

    return moved(parts, k, lam, state, dx, numbers)
