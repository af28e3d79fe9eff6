"""The top-k in magnitude over many arrays together, which may be sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
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
from .._rows.many import ManyRows
from .._rows.pieces import SPREAD, Pieces, Segment, Spread, cut, own_axes
from .._rows.promotion import promoting, saturated
from .._rows.spread_calls import EachCall, SpreadCall, one_by_one, zeros_for
from .._rows.threshold import ROW_CALLS, TopKSetting
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

    The same as of the concatenation, cut up again, to rounding. Where there are several devices each
    puts together what it has: each pass adds up a few numbers over all devices, and outputs are sharded
    as the arrays are. Arrays may differ in shape and dtype; ``k`` and ``lam`` are numbers or arrays with
    one entry, and have derivatives.

    Inside ``shard_map``, ``axis_name`` names the mesh axes over which arrays are sharded, and k counts
    the entries of all shards; an array that does not vary over one of these axes counts once. The
    lowest array, shard and index wins a tie at ``lam = 0``.

    >>> topk_mag_multi([jnp.array([3.0, -0.1]), jnp.array([[-2.0, 0.2]])], k=2, lam=0.1)
    [Array([3., 0.], dtype=float32), Array([[-2.,  0.]], dtype=float32)]
    """
    parts = [check_float_array(f"arrays[{i}]", x) for i, x in enumerate(arrays)]
    if not parts:
        raise ValueError("arrays must have at least one array, got none")
    kind = Operator(MAGNITUDE, check_exponent(p), debias)
    names = (axis_name,) if isinstance(axis_name, str) else axis_name or ()
    n = Spread.of(parts, own_axes(parts, names)).n
    _check_numbers(k, lam, n)
    if n == 0:
        return parts
    if not names and not any(map(_may_be_sharded, parts)):
        together = jnp.concatenate([x.reshape(-1) for x in parts])
        k, lam = (v.reshape(()) if jnp.ndim(v) else v for v in (k, lam))  # type: ignore[union-attr]
        y = topk_mag(together, k, lam, p=p, debias=debias, straight_through=straight_through)
        each = zip(cut(y, [x.size for x in parts]), parts, strict=True)
        return [v.reshape(x.shape).astype(x.dtype) for v, x in each]
    relaxed = _evaluate(tuple(parts), exact(k), lam, _Setting(kind, is_hard(lam), names))
    if not straight_through:
        return list(relaxed)
    setting = _Setting(kind._replace(debias=False), True, names)
    return list(map(straight, _evaluate(tuple(parts), exact(k), 0.0, setting), relaxed))


def topk_mag_each(
    parts: Sequence[Array],
    ks: Sequence[Number],
    lam: Number,
    *,
    p: float,
    straight_through: bool,
    axis_name: AxisName,
) -> list[Array]:
    """``topk_mag_multi`` of every array by itself, each with its own k: one program for all of them,
    where they may be sharded."""
    names = (axis_name,) if isinstance(axis_name, str) else axis_name or ()
    at = [i for i, x in enumerate(parts) if x.size]
    if len(at) < 2 or not (names or any(map(_may_be_sharded, parts))):
        options = {"p": p, "straight_through": straight_through, "axis_name": axis_name}
        each = zip(parts, ks, strict=True)
        return [topk_mag_multi([x], k, lam, **options)[0] for x, k in each]  # type: ignore[arg-type]
    kind, some = Operator(MAGNITUDE, check_exponent(p), True), tuple(parts[i] for i in at)
    for x, k, own in zip(parts, ks, own_axes(parts, names), strict=True):
        _check_numbers(k, lam, Spread.of([x], [own]).n)
    setting = _Setting(kind, is_hard(lam), names, True)
    count = _counts([ks[i] for i in at], jnp.result_type(*map(compute_dtype, some)))
    found = list(_evaluate(some, count, lam, setting))
    if straight_through:
        hard = setting._replace(kind=kind._replace(debias=False), hard=True)
        found = list(map(straight, _evaluate(some, count, 0.0, hard), found))
    of = dict(zip(at, found, strict=True))
    return [of.get(i, x) for i, x in enumerate(parts)]


def _counts(ks: Sequence[Number], dtype: Any) -> Count:
    """(L,)"""
    row = Rows("x", jnp.zeros(1, dtype), 0)
    each = [row.split(k.reshape(()) if isinstance(k, Array) else k) for k in ks]
    return Count(*map(jnp.concatenate, zip(*each, strict=True)))


def _check_numbers(k: Number, lam: Number, n: int) -> None:
    for name, value in (("k", k), ("lam", lam)):
        check_number(name, value)
        if jnp.size(value) != 1:
            raise ValueError(f"{name} must have one entry, got shape {jnp.shape(value)}")
    check_k(k, n)
    check_lam(lam)


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
    each: bool = False  # whether every array is a row of its own


@partial(jax.jit, static_argnames="setting")
@promoting
def _evaluate(
    parts: tuple[Array, ...], k: Array | Count, lam: Array, setting: _Setting
) -> tuple[Array, ...]:
    compute = _of_each if setting.each else _of_pieces
    places = [sharding(x) for x in parts]
    explicit = sorted({name for mesh, _ in places for name in explicit_axes(mesh)})
    if not explicit:
        return compute(parts, k, lam, setting)
    mesh = next(mesh for mesh, _ in places if explicit_axes(mesh))
    results = tuple(NamedSharding(mesh, jax.typeof(x).sharding.spec) for x in parts)
    anywhere = jax.sharding.auto_axes(
        partial(compute, setting=setting), axes=tuple(explicit), out_sharding=results
    )
    return anywhere(parts, k, lam)


def _of_pieces(
    parts: tuple[Array, ...], k: Array | Count, lam: Array, setting: _Setting
) -> tuple[Array, ...]:
    dtype = jnp.result_type(*map(compute_dtype, parts))
    row = Rows("x", jnp.zeros(1, dtype), 0)
    k, lam = jax.tree.map(lambda v: jnp.reshape(v, ()), (k, lam))
    numbers = (*row.split(k), row.per_row(lam))
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes and not setting.axis_names:
        return tuple(_MULTI.solve([parts], numbers, setting=setting)[0])
    spread = Spread.of(parts, own_axes(parts, setting.axis_names))
    # Where some axes are automatic nobody knows how what is here is sharded over these.
    if set(mesh.manual_axes) != set(mesh.axis_names):
        return _solve_inside(spread.parts, *numbers, _Local(setting, spread.segments))[0]
    packed = spread.packed(lambda segment: (segment.own, segment.dtype), dtype)
    y, state = _solve_inside(packed.parts, *numbers, _Local(setting, packed.segments))
    return tuple(packed.unpack(Pieces(y), state[0]))


def _of_each(parts: tuple[Array, ...], k: Any, lam: Array, setting: _Setting) -> tuple[Array, ...]:
    """For k (L,), one of every array."""
    dtype = jnp.result_type(*map(compute_dtype, parts))
    frac = jnp.asarray(k.frac, dtype)
    lams = jnp.broadcast_to(jnp.reshape(jnp.asarray(lam, dtype), ()), frac.shape)
    numbers = (jnp.asarray(k.whole, jnp.int32), frac, lams)
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes and not setting.axis_names:
        return tuple(_EACH.solve([parts], numbers, setting=setting)[0])
    if set(mesh.manual_axes) != set(mesh.axis_names):
        counts = [Count(*(v[i] for v in numbers[:2])) for i in range(len(parts))]
        one = setting._replace(each=False)
        return tuple(_of_pieces((x,), k, lam, one)[0] for x, k in zip(parts, counts, strict=True))
    own = own_axes(parts, setting.axis_names)
    found: dict[int, Array] = {}
    for axes in dict.fromkeys(own):  # what is sharded in the same way together
        at = [i for i, each in enumerate(own) if each == axes]
        row = ManyRows.packed_of([parts[i] for i in at], [axes] * len(at), dtype)
        of_blocks = [row.of_blocks(v[jnp.array(at)]) for v in numbers]
        local = _Local(setting, row.segments, ManyRows)
        y, state = _solve_inside(row.parts, *of_blocks, local)
        found |= dict(zip(at, row.unpack(Pieces(y), state[0]), strict=True))
    return tuple(found[i] for i in range(len(parts)))


# What is computed of a row, wherever its arrays are: these functions take it, other arrays along it, and
# numbers of it, and give arrays along it and numbers.
Found = tuple[Pieces, list[Array]]


def _solve_row(
    row: Spread, _: Sequence[Pieces], numbers: Sequence[Array], setting: _Setting
) -> Found:
    whole, frac, lam = numbers
    state = threshold.state_of(SPREAD, row, Count(whole, frac), lam, setting.kind, setting.hard)
    rows = _relaxed(row, (*numbers, *state), setting)
    y = rows.y(_hard_mask(rows, row))
    return _like(row, SPREAD.where(y == 0, 0.0, y)), list(state)


def _relaxed(row: Spread, numbers: Sequence[Array], setting: _Setting) -> Relaxed:
    """Solved, live."""
    whole, frac, lam, pivot, delta = numbers
    return Relaxed.of(
        SPREAD,
        Pieces(x.astype(lam.dtype) for x in row.parts),
        Count(whole, frac),
        lam,
        State(lax.stop_gradient(pivot), delta),
        setting.kind,
        sums=row.live_sums,
        floor=max(lam_floor(jnp, s.dtype, setting.kind) for of in row.segments for s in of),
        may_be_hard=setting.hard is not False,
    )


def _hard_mask(rows: Relaxed, row: Spread) -> Pieces | None:
    """Of a hard selection, if it may be one."""
    if rows.split.hard is None:
        return None
    return rows.hard_mask(row.before(SPREAD.stop_gradient(rows.a) == rows.split.pivot))


def _like(row: Spread, values: Pieces) -> Pieces:
    """In the dtypes of the arrays."""
    return Pieces(saturated(v, x.dtype) for v, x in zip(values.parts, row.parts, strict=True))


# Those of a row that is solved have its state after k and lam.
_STATE = 5


def _move_row(
    row: Spread,
    along: Sequence[Pieces],
    numbers: Sequence[Array],
    setting: _Setting,
    moves: tuple[bool, ...],
) -> Found:
    """For tangents of x, k and lam, of which ``moves`` says which there are."""
    rows, given = _relaxed(row, numbers[:_STATE], setting), iter(numbers[_STATE:])
    dx = Pieces(d.astype(rows.lam.dtype) for d in along[0].parts) if along else None
    dk, dlam = (next(given) if moved else None for moved in moves[1:])
    ddelta, dy = rows.tangent(dx, dk, dlam, _hard_mask(rows, row))
    moved = zip(dy.parts, row.parts, strict=True)
    return Pieces(d.astype(x.dtype) for d, x in moved), [ddelta]


def _pull_row(
    row: Spread, along: Sequence[Pieces], numbers: Sequence[Array], setting: _Setting
) -> Found:
    rows = _relaxed(row, numbers, setting)
    g = Pieces(v.astype(rows.lam.dtype) for v in along[0].parts)
    dx, dk, dlam = rows.cotangent(g, _hard_mask(rows, row))
    return _like(row, dx), [dk, dlam]


def _pull_with_delta(
    row: Spread, along: Sequence[Pieces], numbers: Sequence[Array], setting: _Setting
) -> Found:
    """Where delta has a cotangent too, as in second derivatives."""
    *numbers, of_delta = numbers
    lam = numbers[2]

    def tangent(dx: Pieces, dk: Array, dlam: Array) -> Found:
        return _move_row(row, [dx], [*numbers, dk, dlam], setting, (True,) * 3)

    zeros = Pieces(jnp.zeros_like(x) for x in row.parts)
    _, transpose = jax.vjp(tangent, zeros, jnp.zeros_like(lam), jnp.zeros_like(lam))
    dx, dk, dlam = transpose((along[0], [of_delta]))
    return dx, [dk, dlam]


def _in_core(name: str) -> Callable[..., Found]:
    """The same where all of the row is here: on the CPU by the compiled core."""

    def call(
        row: Spread,
        along: Sequence[Pieces],
        numbers: Sequence[Array],
        setting: _Setting,
        **params: Any,
    ) -> Found:
        n = len(numbers) if name == "solve" else _STATE
        given = [
            jnp.concatenate([v.reshape(-1) for v in p.parts]) for p in (Pieces(row.parts), *along)
        ]
        found, *others = ROW_CALLS[name](
            given[0],
            *numbers[:n],
            *given[1:],
            *numbers[n:],
            setting=TopKSetting(setting.kind, setting.hard),
            **params,
        )
        parts = zip(cut(found, [x.size for x in row.parts]), row.parts, strict=True)
        return Pieces(v.reshape(x.shape).astype(x.dtype) for v, x in parts), others

    return call


class _Calls(NamedTuple):
    """A solve, and its derivatives."""

    solve: SpreadCall
    move: SpreadCall
    pull: SpreadCall

    @classmethod
    def of(cls, kind: type[SpreadCall], name: str, pull_with_delta: Callable[..., Any]) -> _Calls:
        calls = cls(
            kind(name, _solve_row, _in_core("solve"), results=2),
            kind(f"{name}_tangent", _move_row, _in_core("tangent"), results=1),
            kind(f"{name}_backward", _pull_row, _in_core("backward"), results=2),
        )
        calls.solve.def_jvp(calls._jvp)
        calls.move.def_transpose(partial(calls._transpose, pull_with_delta))
        return calls

    def _jvp(
        self,
        parts: Sequence[Array],
        numbers: Sequence[Array],
        dparts: Sequence[Any],
        dnumbers: Sequence[Any],
        setting: _Setting,
    ) -> Any:
        y, state = self.solve([parts], numbers, setting=setting)
        _, *given = dnumbers
        moves = (any(d is not None for d in dparts), *(d is not None for d in given))
        along = [zeros_for(dparts, parts)] if moves[0] else []
        known = (*numbers, *state, *(d for d in given if d is not None))
        dy, (ddelta,) = self.move([parts, *along], known, setting=setting, moves=moves)
        return (y, state), (dy, [None, ddelta])

    def _transpose(
        self,
        pull_with_delta: Callable[..., Any],
        parts: Sequence[Array],
        state: Sequence[Array],
        g: Sequence[Any],
        of_numbers: Sequence[Any],
        setting: _Setting,
        moves: tuple[bool, ...],
    ) -> Any:
        along, (of_delta,) = zeros_for(g, parts), of_numbers
        if of_delta is None:
            dx, others = self.pull([parts, along], state, setting=setting)
        else:
            dx, others = pull_with_delta([parts, along], [*state, of_delta], setting=setting)
        given = [v for v, moved in zip(others, moves[1:], strict=True) if moved]
        return dx if moves[0] else [], given


def _of_one(sets: Sequence[Sequence[Array]], numbers: Sequence[Array], setting: _Setting) -> Any:
    parts, along = sets
    found, others = _pull_with_delta(Spread.of(parts), [Pieces(along)], numbers, setting)
    return list(found.parts), others


_MULTI = _Calls.of(SpreadCall, "multi", _of_one)
_EACH = _Calls.of(EachCall, "each", partial(one_by_one, _pull_with_delta))


class _Local(NamedTuple):
    """What is static about a call inside ``shard_map``."""

    setting: _Setting
    segments: tuple[tuple[Segment, ...], ...]
    kind: type[Spread] = Spread

    def row(self, parts: tuple[Array, ...]) -> Spread:
        return self.kind(parts, self.segments)


@partial(jax.custom_jvp, nondiff_argnums=(4,))
def _solve_inside(
    parts: tuple[Array, ...], whole: Array, frac: Array, lam: Array, local: _Local
) -> tuple[tuple[Array, ...], list[Array]]:
    y, state = _solve_row(local.row(parts), (), (whole, frac, lam), local.setting)
    return y.parts, state


@partial(_solve_inside.defjvp, symbolic_zeros=True)
@promoting
def _solve_inside_jvp(local: _Local, at: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
    parts, *numbers = at
    y, state = _solve_inside(*at, local)
    dparts, _, *given = tangents
    moved = [None if isinstance(d, SymbolicZero) else d for d in given]
    dparts = [None if isinstance(d, SymbolicZero) else d for d in dparts]
    moves = (any(d is not None for d in dparts), *(d is not None for d in moved))
    dx = tuple(zeros_for(dparts, parts)) if moves[0] else None

    @jax.checkpoint  # so that a backward keeps the arrays, and numbers
    def move(parts: tuple[Array, ...], known: list[Array], dx: Any) -> Any:
        along = [] if dx is None else [Pieces(dx)]
        dy, (ddelta,) = _move_row(local.row(parts), along, known, local.setting, moves)
        return dy.parts, ddelta

    known = [*numbers, *state, *(d for d in moved if d is not None)]
    dy, ddelta = move(parts, known, dx)
    return (y, state), (dy, [jnp.zeros_like(state[0]), ddelta])
