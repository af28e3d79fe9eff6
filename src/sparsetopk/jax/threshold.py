"""The top-k family from one threshold per row: values, and the one rule for all derivatives.

With a = x or |x|, t_i = (a_i - pivot)/lam + delta and v = pivot - lam delta, the block B (the entries
that are neither 0 nor selected whole) shares what the entries above it leave of k:

    sum_{i in B} S(t_i) = left phi'(v).

The pivot is a constant; delta moves with x, k and lam. ``solve`` has the rule for that, written with its
own outputs: so derivatives of every order follow, in forward and in reverse mode.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero

from . import ffi, plain
from .arguments import AxisName, Count
from .kinds import EXP, MAGNITUDE, MASK, SIGN, TWO_SIDED, Kind
from .plain import row_sum, row_sums, tangent_sum
from .scalars import lone_response, smallest, unsigned_zero


class Solved(NamedTuple):
    """The output (..., n) in the dtype of x, and the state (..., 1)."""

    y: Array
    pivot: Array
    delta: Array


class Setting(NamedTuple):
    """What is static about a call."""

    kind: Kind
    hard: bool | None  # whether the rows have lam = 0: all, none, or some may
    axis_name: AxisName = None


@partial(jax.custom_jvp, nondiff_argnums=(4,))
def solve(x: Array, whole: Array, frac: Array, lam: Array, setting: Setting) -> Solved:
    """The operator on rows x (..., n) for k = whole + frac and lam (..., 1); n > 0.

    On the CPU by the compiled core, elsewhere in XLA operations: what is lowered for decides.
    """
    kind = setting.kind
    closed = kind.op in (MASK, MAGNITUDE, SIGN) or (
        kind.op == TWO_SIDED and kind.exponent in (1, 2, 3)
    )
    if not (closed and ffi.available()) or setting.axis_name is not None:
        return solve_in_xla(x, whole, frac, lam, setting)
    in_core = partial(ffi.threshold, **kind._asdict())
    return Solved(
        *lax.platform_dependent(
            x, whole, frac, lam, cpu=in_core, default=lambda *at: tuple(_traced_once(*at, setting))
        )
    )


def solve_in_xla(x: Array, whole: Array, frac: Array, lam: Array, setting: Setting) -> Solved:
    state = plain.solve(x, Count(whole, frac), lam, setting.kind, setting.hard, setting.axis_name)
    block = Block.of(x, Count(whole, frac), lam, state.pivot, state.delta, setting)
    return Solved(block.y().astype(x.dtype), *state)


# Where it is not the branch that is taken, a trace for every call would cost more than all the rest.
_traced_once = jax.jit(solve_in_xla, static_argnames="setting")


class Block(NamedTuple):
    """What the state says about the rows. Live: x, a, k, lam, delta, left, t and v."""

    setting: Setting
    x: Array  # in the dtype of lam
    a: Array  # x, or |x| for even phi
    sign: Array | None  # what gives x back from a: 1 or -1
    k: Count
    lam: Array  # > 0: hard and invalid rows have a stand-in
    pivot: Array  # as it was solved
    delta: Array  # 0 in rows that are not relaxed
    crowd: Array  # how many entries at +inf share k, as they are more than k; else 0
    soft: Array  # rows that have a threshold
    hard: Array | None  # rows with lam = 0; None if there can be none
    inside: Array  # the entries of the block
    above: Array  # those selected whole, which stand alone
    left: Array  # the part of k that is left for the block
    t: Array  # the argument of the response, in the block
    v: Array  # the threshold of the block

    @classmethod
    def of(
        cls, x: Array, k: Count, lam: Array, pivot: Array, delta: Array, setting: Setting
    ) -> Block:
        phi, reg = setting.kind.phi, setting.kind.reg
        x = x.astype(lam.dtype)
        sign = jnp.where(x < 0, -1.0, 1.0).astype(x.dtype) if phi.even else None
        a = x if sign is None else x * sign
        pivot = lax.stop_gradient(pivot)
        hard = None if setting.hard is False else (lam == 0)
        soft = jnp.isfinite(pivot) if hard is None else jnp.isfinite(pivot) & ~hard
        everything = pivot == -jnp.inf
        crowd = jnp.where(pivot == jnp.inf, lax.stop_gradient(delta), 0.0)
        nothing = (pivot == jnp.inf) & (lam > 0)  # k = 0 still has an R(0)
        lam = jnp.where(soft | everything | nothing, lam, 1.0)
        origin, delta = jnp.where(soft, pivot, 0.0), jnp.where(soft, delta, 0.0)

        v = origin - lam * delta
        t = lax.stop_gradient((a - origin) / lam + delta)
        taking_part = soft & (t > reg.zero)
        level = lax.stop_gradient(phi.prime(v))
        if setting.kind.op == MAGNITUDE:
            # What is over v by rounding alone stays in the block, which so is never left without a
            # share of k.
            rounding = 16.0 * float(jnp.finfo(lam.dtype).eps)
            level = jnp.maximum(level, 0.0) * (1.0 + rounding * max(1.0, setting.kind.exponent))
            level = level + lax.stop_gradient(rounding * (abs(origin) + lam * abs(delta)))
        reached = reg.response(jnp.maximum(t, reg.zero)) >= level
        above = (taking_part & reached) | (everything & (a > -jnp.inf))
        pinned = soft & (pivot == 0) if setting.kind.op == SIGN else jnp.zeros_like(soft)
        inside = (taking_part | pinned) & ~above
        taken = row_sums(above, axis_name=setting.axis_name)[0]
        left = (k.whole - taken).astype(lam.dtype) + k.frac
        t = (jnp.where(inside, a, origin) - origin) / lam + delta
        t = jnp.where(inside, t, 0.5)
        return cls(
            setting, x, a, sign, k, lam, pivot, delta, crowd, soft, hard, inside, above, left, t, v
        )

    @property
    def kind(self) -> Kind:
        return self.setting.kind

    @property
    def invalid(self) -> Array:
        return jnp.isnan(self.pivot)

    @property
    def moving(self) -> Array:
        """Rows whose threshold moves: not if it ends at 0."""
        return self.soft & (self.pivot > 0) if self.kind.op == SIGN else self.soft

    def block_sum(self, values: Array) -> Array:
        return row_sum(jnp.where(self.inside, values, 0.0), self.setting.axis_name)

    def signed(self, y: Array) -> Array:
        return y if self.sign is None else self.sign * y

    def level(self) -> Array:
        """phi'(v); for x^2/2 from sum_B S(t_i) = v left, which is precise also where v is tiny."""
        if self.kind.op != MAGNITUDE:
            return self.kind.phi.prime(self.v)
        shared = self.left > 0
        mass = self.block_sum(self.kind.reg.response(self.t)) / jnp.where(shared, self.left, 1.0)
        return jnp.where(shared & (mass < jnp.inf), mass, self.v)

    def top(self, a: Array, lam: Array) -> Array:
        """What an entry that is selected whole becomes, without its sign."""
        kind = self.kind
        if kind.op == MAGNITUDE and kind.debias:
            return a
        if kind.op not in (MAGNITUDE, EXP):
            return jnp.ones_like(a)
        a = jnp.where(self.above, a, 1.0)
        return kind.reg.response(lone_response(a, jnp.ones_like(lam), lam, kind.reg, kind.phi))

    def shared(self, k: Array, y: Array) -> Array:
        """y, but for the entries at +inf that share k."""
        share = k / jnp.where(self.crowd > 0, self.crowd, 1.0)
        return jnp.where((self.a == jnp.inf) & (self.crowd > 0), share, y)

    def y(self) -> Array:
        """The output. Its derivatives are not those of this expression, but the rule of ``solve``."""
        kind = self.kind
        y = kind.reg.response(self.t)
        if kind.op == MAGNITUDE and kind.debias:
            y = y + self.lam * self.t
        y = jnp.where(self.inside, y, jnp.where(self.above, self.top(self.a, self.lam), 0.0))
        y = self.signed(self.shared(self.k.whole + self.k.frac, y))
        if self.hard is not None:
            y = jnp.where(self.hard, self._hard(), y)
        return jnp.where(self.invalid, jnp.nan, unsigned_zero(y))

    def hard_mask(self) -> Array:
        """1 above the pivot; what is left goes to the entries equal to it, the lowest index first."""
        tied = (self.a == self.pivot) & (self.a > -jnp.inf)  # padding is never selected
        before = _count_before(tied, self.setting.axis_name)
        left = self.k.whole - row_sums(self.a > self.pivot, axis_name=self.setting.axis_name)[0]
        share = jnp.clip((left - before).astype(self.k.frac.dtype) + self.k.frac, 0.0, 1.0)
        return jnp.where(self.a > self.pivot, 1.0, jnp.where(tied, share, 0.0))

    def _hard(self) -> Array:
        mask = self.hard_mask()
        if self.kind.op == MAGNITUDE:
            return jnp.where(mask > 0, self.x * mask, 0.0)
        return self.signed(mask)


def _count_before(flags: Array, axis_name: AxisName) -> Array:
    """How many are set before each entry of a row."""
    before = jnp.cumsum(flags, axis=-1, dtype=jnp.int32) - flags
    if axis_name is None:
        return before
    counts = lax.all_gather(row_sums(flags)[0], axis_name)  # in the order of the shards
    earlier = jnp.arange(counts.shape[0]) < lax.axis_index(axis_name)
    return before + jnp.tensordot(earlier.astype(jnp.int32), counts, 1)


class _Tangents(NamedTuple):
    """Of a, k and lam, in the dtype of lam; None where it is zero."""

    a: Array | None
    k: Array | None
    lam: Array | None


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
    block = Block.of(x, k, lam, solved.pivot, solved.delta, setting)
    dx, dk, dlam = tangents
    moved = _Tangents(None if dx is None else block.signed(dx), dk, dlam)
    ddelta, dy = _move(block, moved, smallest_lam(x.dtype, setting.kind))
    dy = jnp.where(block.invalid, _invalid(block, moved), dy).astype(x.dtype)
    return Solved(dy, jnp.zeros_like(solved.pivot), ddelta)


def smallest_lam(dtype: Any, kind: Kind) -> float:
    """Below it, the slopes S'/lam could overflow in the dtype of x."""
    return 4.0 * max(1.0, kind.exponent) / float(jnp.finfo(dtype).max)


def _move(block: Block, moved: _Tangents, floor: float) -> tuple[Array, Array]:
    """The tangents of delta (..., 1) and of the output (..., n)."""
    kind, delta = block.kind, block.delta
    slope = jnp.where(block.inside, kind.reg.slope(block.t), 0.0)
    lam = jnp.maximum(block.lam, max(floor, smallest(block.lam.dtype)))
    # t_i = (a_i - pivot)/lam + delta, with delta held
    dt = jnp.zeros_like(block.t) if moved.a is None else moved.a / lam
    if moved.lam is not None:
        dt = dt - (block.t - delta) * moved.lam / lam

    # sum_B S(t_i) = left phi'(pivot - lam delta)
    curvature = kind.phi.curvature(block.v, block.left)
    excess = -tangent_sum(slope * dt, block.setting.axis_name)
    if moved.k is not None:
        # Where all of the block is selected whole, or nothing of it, it is one by rounding alone.
        size = row_sums(block.inside, axis_name=block.setting.axis_name)[0]
        is_fractional = (block.left > 0) & (block.left < size)
        excess = excess + jnp.where(is_fractional, block.level() * moved.k, 0.0)
    if moved.lam is not None:
        excess = excess - curvature * delta * moved.lam
    total = block.block_sum(slope) + block.lam * curvature
    moves = block.moving & (total > 0)
    ddelta = jnp.where(moves, excess / jnp.where(moves, total, 1.0), 0.0)
    return ddelta, _output_tangent(block, moved, slope, dt + ddelta)


def _output_tangent(block: Block, moved: _Tangents, slope: Array, dt: Array) -> Array:
    kind = block.kind
    dy = slope * dt
    if kind.op == MAGNITUDE and kind.debias:
        dy = dy + block.lam * dt
        if moved.lam is not None:
            dy = dy + block.t * moved.lam
    dy = jnp.where(block.inside, dy, 0.0)
    if kind.op in (MAGNITUDE, EXP):
        dy = dy + jnp.where(block.above, _top_tangent(block, moved), 0.0)
    if moved.k is not None:
        dy = block.shared(moved.k, dy)
    dy = block.signed(dy)
    if block.hard is not None:
        dy = jnp.where(block.hard, 0.0, dy)
        if kind.op == MAGNITUDE and moved.a is not None:
            dy = dy + jnp.where(block.hard, block.hard_mask(), 0.0) * block.signed(moved.a)
    return dy


def _top_tangent(block: Block, moved: _Tangents) -> Array:
    da = jnp.zeros_like(block.a) if moved.a is None else moved.a
    dlam = jnp.zeros_like(block.lam) if moved.lam is None else moved.lam
    return jax.jvp(block.top, (block.a, block.lam), (da, dlam))[1]


def _invalid(block: Block, moved: _Tangents) -> Array:
    """Invalid rows have invalid derivatives too; the factor is 0 elsewhere, as 0 NaN would be NaN."""
    factor = jnp.where(block.invalid, jnp.nan, 0.0).astype(block.lam.dtype)
    return sum((d * factor for d in moved if d is not None), jnp.zeros_like(block.a))
