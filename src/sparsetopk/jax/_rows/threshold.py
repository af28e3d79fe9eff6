"""The top-k family on rows: solved by the core or in XLA operations, and the one rule for derivatives.

``solve_topk`` has the rule of ``_maths.response``, written with its own outputs: so derivatives of every
order follow, in forward and in reverse mode. For reverse mode x and the state of every row are kept, and
nothing else; the compiled core and the kernels for GPUs and TPUs have that too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero

from ..._maths import threshold
from ..._maths.operator import Count, Operator
from ..._maths.response import Relaxed, lam_floor
from ..._maths.threshold import State
from .._pallas import kernels, takes
from .._solvers.plain import Shards, row_sums, sums_over
from . import namespace as xp
from .arguments import AxisName
from .calls import RowCall, alike
from .promotion import promoting, saturated


class SolvedTopK(NamedTuple):
    """The output (..., n) in the dtype of x, and the state (..., 1)."""

    y: Array
    pivot: Array
    delta: Array


class TopKSetting(NamedTuple):
    """What is static about a call."""

    kind: Operator
    hard: bool | None  # whether the rows have lam = 0: all, none, or some may
    axis_name: AxisName = None
    most: int | None = None  # no k is above this, where all rows are hard and that is known


def solve_topk(x: Array, whole: Array, frac: Array, lam: Array, setting: TopKSetting) -> SolvedTopK:
    """The operator on rows x (..., n) for k = whole + frac and lam (..., 1); n > 0.

    On the CPU by the compiled core, on GPUs and TPUs by a kernel, elsewhere in XLA operations: what is
    lowered for decides.
    """
    if setting.axis_name is not None:
        return _solve_over_shards(x, whole, frac, lam, setting)
    return SolvedTopK(*_solve(x, whole, frac, lam, setting=setting))


def solve_in_xla(
    x: Array, whole: Array, frac: Array, lam: Array, setting: TopKSetting
) -> SolvedTopK:
    k, shards = Count(whole, frac), Shards(x, setting.axis_name, setting.most)
    state = threshold.state_of(xp, shards, k, lam, setting.kind, setting.hard)
    solved = relaxed(x, k, lam, state, setting)
    y = solved.y(hard_mask(solved, setting))
    return SolvedTopK(unsigned_zero(y).astype(x.dtype), *state)


def relaxed(
    x: Array,
    k: Count,
    lam: Array,
    state: State,
    setting: TopKSetting,
    sums: Callable[..., list[Array]] | None = None,
) -> Relaxed:
    """Solved rows, whose x, k, lam and delta carry derivatives."""
    return Relaxed.of(
        xp,
        x.astype(lam.dtype),
        k,
        lam,
        State(lax.stop_gradient(state.pivot), state.delta),
        setting.kind,
        sums=sums or sums_over(setting.axis_name),
        floor=lam_floor(xp, x.dtype, setting.kind),
        may_be_hard=setting.hard is not False,
    )


@jax.custom_jvp
def unsigned_zero(y: Array) -> Array:
    """y with 0 for -0; an entry that is 0 moves like any other (``y + 0.0`` XLA would leave out)."""
    return jnp.where(y == 0, 0.0, y)


@unsigned_zero.defjvp
def _unsigned_zero_jvp(at: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return unsigned_zero(at[0]), tangents[0]


def hard_mask(solved: Relaxed, setting: TopKSetting) -> Array | None:
    """Of rows with lam = 0, if there may be any: over shards, those of lower index come first."""
    if solved.split.hard is None:
        return None
    tied = (lax.stop_gradient(solved.a) == solved.split.pivot) & (solved.x > -jnp.inf)
    return solved.hard_mask(_count_before(tied, setting.axis_name))


def _count_before(flags: Array, axis_name: AxisName) -> Array:
    """How many are set before each entry of a row."""
    before = jnp.cumsum(flags, axis=-1, dtype=jnp.int32) - flags
    if axis_name is None:
        return before
    counts = lax.all_gather(row_sums(flags)[0], axis_name)  # in the order of the shards
    earlier = jnp.arange(counts.shape[0]) < lax.axis_index(axis_name)
    return before + jnp.tensordot(earlier.astype(jnp.int32), counts, 1)


@partial(jax.custom_jvp, nondiff_argnums=(4,))
def _solve_over_shards(
    x: Array, whole: Array, frac: Array, lam: Array, setting: TopKSetting
) -> SolvedTopK:
    return solve_in_xla(x, whole, frac, lam, setting)


@partial(_solve_over_shards.defjvp, symbolic_zeros=True)
@promoting
def _over_shards_jvp(
    setting: TopKSetting, at: tuple[Array, ...], tangents: tuple[Any, ...]
) -> tuple[SolvedTopK, SolvedTopK]:
    solved = _solve_over_shards(*at, setting)
    moved = [None if isinstance(d, SymbolicZero) else d for d in tangents]
    found = _tangent((*at, *solved[1:]), [moved[0], *moved[2:]], setting)
    return solved, SolvedTopK(found[0].astype(at[0].dtype), jnp.zeros_like(solved.pivot), found[1])


def _tangent(
    state: Sequence[Array], tangents: Sequence[Array | None], setting: TopKSetting
) -> tuple[Array, Array]:
    """Of y, in the dtype of lam, and delta, at x, whole, frac, lam, pivot and delta.

    For tangents of x, k and lam, or None.
    """
    dx, dk, dlam = tangents
    axis_name, sums = setting.axis_name, None
    if axis_name is not None:
        # Numbers of a row vary with the shards before each is one for every entry of a shard: so what
        # goes back over the shards are numbers too.
        state = alike(state)
        dk, dlam = (None if d is None else alike([state[0], d])[1] for d in (dk, dlam))
        sums = _varying_sums(state[0], axis_name)
    x, whole, frac, lam, pivot, delta = state
    rows = relaxed(x, Count(whole, frac), lam, State(pivot, delta), setting, sums)
    dx = None if dx is None else dx.astype(lam.dtype)
    ddelta, dy = rows.tangent(dx, dk, dlam, hard_mask(rows, setting))
    return dy, ddelta if axis_name is None else lax.pmean(ddelta, axis_name)


def _varying_sums(x: Array, axis_name: AxisName) -> Callable[..., list[Array]]:
    """Over all shards, as numbers that vary as x does."""
    plain = sums_over(axis_name)
    return lambda values, linear=False: [alike([x, v])[1] for v in plain(values, linear)]


# As calls: their first arguments are x, whole, frac and lam, and those of the derivatives have the state
# next. ``moves`` says which of x, k and lam do.
_STATE = 6


@partial(jax.jit, static_argnames=("setting", "moves"))
def _tangent_in_xla(
    *at: Array, setting: TopKSetting, moves: tuple[bool, ...]
) -> tuple[Array, Array]:
    given = iter(at[_STATE:])
    moved = [next(given) if moved else None for moved in moves]
    dy, ddelta = _tangent(at[:_STATE], moved, setting)
    return saturated(dy, at[0].dtype), ddelta


@partial(jax.jit, static_argnames="setting")
def _cotangent_in_xla(*at: Array, setting: TopKSetting) -> tuple[Array, ...]:
    """The transpose of the tangent, for the cotangent of y, and of delta if there is one."""
    (x, _, frac, lam, _, delta), (g, *of_delta) = at[:_STATE], at[_STATE:]
    tangent = partial(_tangent_in_xla, *at[:_STATE], setting=setting, moves=(True,) * 3)
    _, transpose = jax.vjp(tangent, jnp.zeros_like(x, lam.dtype), *map(jnp.zeros_like, (frac, lam)))
    dx, *others = transpose((g, of_delta[0] if of_delta else jnp.zeros_like(delta)))
    return saturated(dx, x.dtype), *others


def _in_core(*at: Any, setting: TopKSetting) -> dict[str, Any] | None:
    with_delta = len(at) > _STATE + 1
    return None if with_delta else in_core(setting)


def in_core(setting: TopKSetting) -> dict[str, Any] | None:
    """The operator as the attributes of a call of the core, if that has it."""
    kind = setting.kind
    if not kind.is_compiled:
        return None
    return {
        "op": np.int32(kind.op),
        "exponent": np.float64(kind.exponent),
        "debias": np.bool_(kind.debias),
    }


def _solved_types(x: Array, *at: Array, setting: TopKSetting) -> list[tuple[int, Any]]:
    return [(x.shape[-1], x.dtype), (1, at[2].dtype), (1, at[2].dtype)]


def _tangent_types(*at: Array, setting: TopKSetting, moves: Any) -> list[tuple[int, Any]]:
    return _solved_types(*at, setting=setting)[:2]


def _in_kernel(platform: str, *at: Any, setting: TopKSetting) -> Callable[..., Any] | None:
    """One kernel for the output and the state, and one for the cotangents."""
    with_delta = len(at) > _STATE + 1
    if with_delta or not takes(platform, at[0]):
        return None
    compute = kernels.forward if len(at) < _STATE else kernels.backward
    return partial(compute, setting=setting, platform=platform)


_solve = RowCall(
    "threshold",
    _solved_types,
    jax.jit(solve_in_xla, static_argnames="setting"),
    _in_core,
    _in_kernel,
)
_move = RowCall("threshold_tangent", _tangent_types, _tangent_in_xla)
_pull = RowCall("threshold_backward", _solved_types, _cotangent_in_xla, _in_core, _in_kernel)


@_solve.def_jvp
def _(at: Sequence[Array], tangents: Sequence[Any], setting: TopKSetting) -> Any:
    solved = _solve(*at, setting=setting)
    given = [tangents[0], *tangents[2:]]
    moves = tuple(d is not None for d in given)
    state = (*at, *solved[1:])
    dy, ddelta = _move(*state, *(d for d in given if d is not None), setting=setting, moves=moves)
    return solved, (dy, None, ddelta)


@_move.def_transpose
def _(cotangents: Sequence[Any], state: Sequence[Array], setting: TopKSetting, moves: Any) -> Any:
    g, of_delta = cotangents
    g = jnp.zeros_like(state[0]) if g is None else g
    found = _pull(*state, g, *([] if of_delta is None else [of_delta]), setting=setting)
    return [v for v, moved in zip(found, moves, strict=True) if moved]


ROW_CALLS = {"solve": _solve, "tangent": _move, "backward": _pull}
