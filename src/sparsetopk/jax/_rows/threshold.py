"""The top-k family on rows: solved by the core or in XLA operations, and the one rule for derivatives.

``solve`` has the rule of ``_maths.response``, written with its own outputs: so derivatives of every
order follow, in forward and in reverse mode.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero

from ..._maths import threshold
from ..._maths.operator import Count, Operator
from ..._maths.response import Relaxed, lam_floor
from ..._maths.threshold import State
from .._solvers import ffi
from .._solvers.plain import Shards, row_sums, sums_over
from . import namespace as xp
from .arguments import AxisName


class Solved(NamedTuple):
    """The output (..., n) in the dtype of x, and the state (..., 1)."""

    y: Array
    pivot: Array
    delta: Array


class Setting(NamedTuple):
    """What is static about a call."""

    kind: Operator
    hard: bool | None  # whether the rows have lam = 0: all, none, or some may
    axis_name: AxisName = None


@partial(jax.custom_jvp, nondiff_argnums=(4,))
def solve(x: Array, whole: Array, frac: Array, lam: Array, setting: Setting) -> Solved:
    """The operator on rows x (..., n) for k = whole + frac and lam (..., 1); n > 0.

    On the CPU by the compiled core, elsewhere in XLA operations: what is lowered for decides.
    """
    kind = setting.kind
    if not (kind.is_compiled and ffi.available()) or setting.axis_name is not None:
        return solve_in_xla(x, whole, frac, lam, setting)
    in_core = partial(ffi.threshold, **kind._asdict())
    return Solved(
        *lax.platform_dependent(
            x, whole, frac, lam, cpu=in_core, default=lambda *at: tuple(_traced_once(*at, setting))
        )
    )


def solve_in_xla(x: Array, whole: Array, frac: Array, lam: Array, setting: Setting) -> Solved:
    k, shards = Count(whole, frac), Shards(x, setting.axis_name)
    state = threshold.solve(xp, shards, k, lam, setting.kind, setting.hard)
    solved = relaxed(x, k, lam, state, setting)
    y = solved.y(hard_mask(solved, setting))
    return Solved(unsigned_zero(y).astype(x.dtype), *state)


# Where it is not the branch that is taken, a trace for every call would cost more than all the rest.
_traced_once = jax.jit(solve_in_xla, static_argnames="setting")


def relaxed(x: Array, k: Count, lam: Array, state: State, setting: Setting) -> Relaxed:
    """Solved rows, live."""
    return Relaxed.of(
        xp,
        x.astype(lam.dtype),
        k,
        lam,
        State(lax.stop_gradient(state.pivot), state.delta),
        setting.kind,
        sums=sums_over(setting.axis_name),
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


def hard_mask(solved: Relaxed, setting: Setting) -> Array | None:
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


@partial(solve.defjvp, symbolic_zeros=True)
def _solve_jvp(
    setting: Setting, at: tuple[Array, ...], tangents: tuple[Any, ...]
) -> tuple[Solved, Solved]:
    x, whole, frac, lam = at
    solved = solve(x, whole, frac, lam, setting)
    moved = [
        None if isinstance(d, SymbolicZero) else d.astype(lam.dtype)
        for d in (tangents[0], tangents[2], tangents[3])
    ]
    return solved, _tangent(x, Count(whole, frac), lam, solved, moved, setting)


@partial(jax.jit, static_argnames="setting")
def _tangent(
    x: Array, k: Count, lam: Array, solved: Solved, tangents: list[Any], setting: Setting
) -> Solved:
    """Of the solution, for tangents of x, k and lam, or None."""
    rows = relaxed(x, k, lam, State(solved.pivot, solved.delta), setting)
    dx, dk, dlam = tangents
    ddelta, dy = rows.tangent(dx, dk, dlam, hard_mask(rows, setting))
    return Solved(dy.astype(x.dtype), jnp.zeros_like(solved.pivot), ddelta)
