"""The operators over the permutahedron from solved blocks: values, and the one rule for all derivatives.

On a block B with the threshold g, with d_i = (x_i - g)/lam,

    sum_{i in B} S(d_i) = phi'(g) sum_{i in B} w_i,   y_i = S(d_i).

``respond`` has the rule for how y and d move with x, w and lam, written with its own outputs and with
sums over blocks: so derivatives of every order follow, in forward and in reverse mode, in O(n).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero

from .._types import PhiName
from ..solution import StoppingRule
from . import dykstra, pav
from .pav import by_rows
from .scalars import PHIS, Phi, PNorm, smallest


class Setting(NamedTuple):
    """What is static about a call."""

    phi_name: PhiName
    exponent: float
    floor: float  # of lam, where 1/lam is a slope
    rule: StoppingRule | None = None  # of dykstra; None for pav

    @property
    def phi(self) -> Phi:
        return PHIS[self.phi_name]

    @property
    def reg(self) -> PNorm:
        return PNorm(self.exponent)

    @property
    def straight(self) -> bool:
        """Whether an entry alone has y = w."""
        return self.phi_name in ("identity", "abs")


class Solved(NamedTuple):
    """What a solver found, (..., n) in the order of x, and its residual (..., 1). No derivatives."""

    d: Array  # (x - u)/lam
    block: Array
    paired: Array  # the index of the entry of w that an entry of x is paired with
    residual: Array


def solve(x: Array, w: Array, lam: Array, setting: Setting) -> Solved:
    """Finite rows x (..., n), |x| for even phi, and w (..., n), with lam > 0 (..., 1)."""
    x, w, lam = (lax.stop_gradient(v) for v in (x, w, lam))
    if setting.rule is not None:
        return Solved(*dykstra.solve(x, w, lam, setting.phi_name, setting.rule))
    found = pav.solve(x, w, lam, setting.phi_name, setting.exponent)
    return Solved(*found, jnp.zeros_like(lam))


def block_sum(values: Array, block: Array) -> Array:
    """For every entry the sum of ``values`` over its block, one term after the other: in float32 a
    block of a million terms of one sign costs four digits."""

    def of_row(values: Array, block: Array) -> Array:
        return jax.ops.segment_sum(values, block, num_segments=values.shape[-1])[block]

    return by_rows(of_row, values, block)


class Response(NamedTuple):
    """Live, (..., n)."""

    y: Array
    d: Array


@partial(jax.custom_jvp, nondiff_argnums=(5,))
def respond(x: Array, w: Array, lam: Array, d: Array, block: Array, setting: Setting) -> Response:
    """y and d of solved rows x, |x| for even phi, each entry beside the w that it is paired with."""
    y = setting.reg.response(d)
    if setting.exponent != 1.0:  # for p = 2 that is precise, and no block is flat
        blocks = _Blocks.of(x, w, lam, d, block, setting)
        y = jnp.where(blocks.whole, setting.phi.prime(blocks.u) * blocks.weight / blocks.size, y)
    return Response(y, d)


class _Blocks(NamedTuple):
    """Of every entry: itself, and its block. Live: x, w, lam and what depends on them."""

    setting: Setting
    lam: Array
    d: Array
    block: Array
    u: Array
    slope: Array  # S'(d)
    weight: Array  # the sum of w over the block
    size: Array
    total: Array  # the slope of the equation of the block, in d
    alone: Array
    pinned: Array  # held at the kink of |.|
    whole: Array  # where y is phi'(u) weight/size, to be written so

    @classmethod
    def of(
        cls, x: Array, w: Array, lam: Array, d: Array, block: Array, setting: Setting
    ) -> _Blocks:
        phi, reg = setting.phi, setting.reg
        size, weight = block_sum(jnp.ones_like(d), block), block_sum(w, block)
        u = x - lam * d
        pinned = jnp.zeros(d.shape, bool)
        if setting.phi_name == "abs":
            pinned = lam * d >= x * (1.0 - 4.0 * jnp.finfo(x.dtype).eps)
            u = jnp.where(pinned, 0.0, u)
        if setting.phi_name == "half_square":  # precise also where u is tiny
            shared = weight > 0
            mass = block_sum(reg.response(d), block)
            u = jnp.where(shared, mass / jnp.where(shared, weight, 1.0), u)
        flat = d == 0  # the slope may have a kink there
        slope = jnp.where(flat, reg.slope(jnp.zeros_like(d)), reg.slope(jnp.where(flat, 1.0, d)))
        total = block_sum(slope, block) + lam * phi.curvature(u, weight)
        alone = size == 1
        whole = ((total <= 0) | (alone & setting.straight)) & ~pinned
        return cls(setting, lam, d, block, u, slope, weight, size, total, alone, pinned, whole)

    def move(self, dx: Array | None, dw: Array | None, dlam: Array | None) -> Response:
        """The tangents of y and d; None is a tangent of zero."""
        phi, moves = self.setting.phi, self.total > 0
        total = jnp.where(moves, self.total, 1.0)
        lam = jnp.maximum(self.lam, max(self.setting.floor, smallest(self.lam.dtype)))
        # d_i = (x_i - g)/lam, first with g held
        distance = jnp.zeros_like(self.d) if dx is None else dx
        if dlam is not None:
            distance = distance - self.d * dlam
        held = distance / lam
        # A flat block moves as a whole.
        share = jnp.where(moves, self.slope / total, 1.0 / self.size)
        dd = held - block_sum(share * held, self.block)
        # The same for an entry alone, free of cancellation.
        lone = phi.curvature(self.u, self.weight) * distance
        if dw is not None:
            added = phi.prime(self.u) * block_sum(dw, self.block)
            dd = dd + jnp.where(moves, added / total, 0.0)
            lone = lone + added
        dd = jnp.where(self.alone, jnp.where(moves, lone / total, 0.0), dd)
        dd = jnp.where(self.pinned, held, dd)
        dy = jnp.where(self.whole, 0.0 if dw is None else added / self.size, self.slope * dd)
        return Response(dy, dd)


@partial(respond.defjvp, symbolic_zeros=True)
def _respond_jvp(
    setting: Setting, at: tuple[Array, ...], tangents: tuple[Any, ...]
) -> tuple[Response, Response]:
    x, w, lam, _, block = at
    found = respond(*at, setting)
    blocks = _Blocks.of(x, w, lam, found.d, block, setting)
    return found, blocks.move(*_known(tangents))


def _known(tangents: tuple[Any, ...]) -> list[Array | None]:
    """Those of x, w and lam."""
    return [None if isinstance(d, SymbolicZero) else d for d in tangents[:3]]


@partial(jax.custom_jvp, nondiff_argnums=(5,))
def value(x: Array, w: Array, lam: Array, d: Array, block: Array, setting: Setting) -> Array:
    """R*(x - u) + sum_i w_i phi(u_i), (..., 1), for what ``respond`` takes."""
    phi, reg = setting.phi, setting.reg
    blocks = _Blocks.of(x, w, lam, d, block, setting)
    terms = lam * reg.conjugate(d) + w * phi.value(blocks.u)
    if setting.straight:  # an entry with y = w
        alone = x * w - lam * reg.penalty(w)
        terms = jnp.where(blocks.whole & blocks.alone, alone, terms)
    return terms.sum(axis=-1, keepdims=True)


@partial(value.defjvp, symbolic_zeros=True)
def _value_jvp(
    setting: Setting, at: tuple[Array, ...], tangents: tuple[Any, ...]
) -> tuple[Array, Array]:
    """Its gradient in x is y, in w phi(u), in lam -R(y)/lam."""
    x, w, lam, _, block = at
    y, d = respond(*at, setting)
    dx, dw, dlam = _known(tangents)
    moved = jnp.zeros_like(d)
    if dx is not None:
        moved = moved + y * dx
    if dw is not None:
        u = _Blocks.of(x, w, lam, d, block, setting).u
        moved = moved + setting.phi.value(u) * dw
    if dlam is not None:
        moved = moved - setting.reg.penalty(y) * dlam
    return value(*at, setting), moved.sum(axis=-1, keepdims=True)
