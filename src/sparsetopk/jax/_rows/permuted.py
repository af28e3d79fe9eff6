"""Rows over the permutahedron: from x, w and lam to outputs, hard and invalid rows among them.

For phi = identity the core has it in one call each way. For a backward d and the blocks are kept, and
for that of w which of its entries an entry has; the rule for the derivatives is that of
``_maths.blocks``, written with d, which moves too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..._maths.isotonic import SolvedBlocks, blocks_of
from . import namespace as xp
from .calls import RowCall
from .isotonic import IsotonicSetting, keeping_solved, respond, solve_blocks, value_of_blocks
from .threshold import unsigned_zero


class Relaxed(NamedTuple):
    """Solved rows (..., n); live, but for what the solver found."""

    setting: IsotonicSetting
    a: Array  # x, or |x| for even phi; 0 in invalid rows
    w: Array  # each entry beside the one of x that it is paired with
    lam: Array  # > 0: hard and invalid rows have a stand-in
    sign: Array | None  # of x, for even phi
    solved: SolvedBlocks
    residual: Array  # of the solver
    soft: Array  # rows (..., 1) with lam > 0
    invalid: Array  # rows (..., 1) whose result is NaN
    nan: Array  # NaN in invalid rows, and so are their derivatives

    @classmethod
    def of(cls, x: Array, w: Array, lam: Array, setting: IsotonicSetting) -> Relaxed:
        phi = setting.phi
        x, w = x.astype(lam.dtype), w.astype(lam.dtype)
        bad = ~(jnp.isfinite(x) & jnp.isfinite(w))
        bad = bad if setting.phi_name == "identity" else bad | (w < 0)
        invalid = bad.any(axis=-1, keepdims=True) | ~((lam >= 0) & (lam < jnp.inf))
        soft = (lam > 0) & ~invalid
        sign = jnp.where(x < 0, -1.0, 1.0).astype(x.dtype) if phi.even else None
        a = jnp.where(invalid, 0.0, x if sign is None else x * sign)
        safe_lam = jnp.where(soft, jnp.maximum(lam, jnp.finfo(lam.dtype).tiny), 1.0)
        finite_w = jnp.where(invalid, 0.0, w)
        solved, residual = solve_blocks(a, finite_w, safe_lam, setting)
        residual = jnp.where(soft, residual, 0.0)
        if setting.rule is not None and not setting.rule.fixed_count:
            invalid |= residual > setting.rule.tol
        paired = jnp.take_along_axis(finite_w, solved.paired, axis=-1)
        nan = (x + w + lam) * jnp.where(invalid, jnp.nan, 0.0).astype(x.dtype)
        return cls(setting, a, paired, safe_lam, sign, solved, residual, soft, invalid, nan)

    @property
    def _at(self) -> tuple[Any, ...]:
        return self.a, self.w, self.lam, self.solved.d, self.solved.block, self.setting

    def y(self) -> Array:
        """y_{phi,R}(x, w); for lam = 0 phi'(x) times the LMO."""
        hard = self.setting.phi.prime(self.a) * self.w
        y = jnp.where(self.soft, respond(*self._at).y, hard)
        y = y if self.sign is None else self.sign * y
        return jnp.where(self.invalid, self.nan, unsigned_zero(y))

    def value(self) -> Array:
        """f_{phi,R}(x, w), (..., 1)."""
        hard = (self.setting.phi.value(self.a) * self.w).sum(axis=-1, keepdims=True)
        value = jnp.where(self.soft, value_of_blocks(*self._at), hard)
        return jnp.where(self.invalid, self.nan.sum(axis=-1, keepdims=True), value)


def y_of(x: Array, w: Array, lam: Array, setting: IsotonicSetting) -> tuple[Array, Array]:
    """y_{phi,R}(x, w) of rows x and w (..., n) with lam (..., 1), in the dtype of lam, and the residual
    of the solver (..., 1)."""
    if setting.phi_name == "identity" and setting.rule is None:
        y = _solve(x.astype(lam.dtype), w.astype(lam.dtype), lam, setting=setting)[0]
        return y, jnp.zeros_like(lam)

    @keeping_solved
    def result(x: Array, w: Array, lam: Array) -> tuple[Array, Array]:
        relaxed = Relaxed.of(x, w, lam, setting)
        return relaxed.y(), relaxed.residual

    return result(x, w, lam)


def _solve_in_xla(x: Array, w: Array, lam: Array, setting: IsotonicSetting) -> tuple[Array, ...]:
    """y, and what is kept of it: d, which is NaN in invalid rows, the blocks, and what is paired."""
    relaxed = Relaxed.of(x, w, lam, setting)
    d, block, paired = relaxed.solved
    return relaxed.y(), jnp.where(relaxed.invalid, jnp.nan, d), block, paired


# The arguments of the tangent: lam, d, the blocks and (if w moves) what is paired, and tangents of x, w
# and lam; ``moves`` says which of these there are.
_STATE = 4


def _tangent(*at: Array, setting: IsotonicSetting, moves: tuple[bool, ...]) -> tuple[Array, Array]:
    """Of y and of d."""
    (lam, d, block, paired), given = at[:_STATE], iter(at[_STATE:])
    dx, dw, dlam = (next(given) if moved else None for moved in moves)
    soft, invalid = lam > 0, jnp.isnan(d)
    d = jnp.where(invalid, 0.0, d)
    lam = jnp.where(soft, jnp.maximum(lam, jnp.finfo(lam.dtype).tiny), 1.0)
    # Derivatives ask for the weight of no block: phi' = 1.
    zeros, phi, reg = jnp.zeros_like(d), setting.phi, setting.reg
    blocks = blocks_of(reg, phi, lam * d, zeros, lam, d, block, setting.floor)
    dw = None if dw is None else jnp.take_along_axis(dw, paired, axis=-1)
    moved = blocks.tangent(dx, None if dw is None else xp.block_sum(dw, block), dlam)
    every: Array = sum((v for v in (dx, dw, dlam) if v is not None), zeros)
    dy = jnp.where(soft, moved.y, zeros if dw is None else dw)
    spoilt = jnp.where(invalid, jnp.nan, 0.0) * every  # also of its transpose no other entry is NaN
    return jnp.where(invalid, spoilt, dy), jnp.where(soft, moved.d, 0.0)


def _cotangent(*at: Array, setting: IsotonicSetting, in_w: bool) -> tuple[Array, ...]:
    """Of x, of w (of length 1 if it does not move) and of lam, for the cotangent of y, and of d if there
    is one."""
    (lam, d, *_), (g, *of_d) = at[:_STATE], at[_STATE:]
    zeros = jnp.zeros_like(d)
    tangent = partial(_tangent, *at[:_STATE], setting=setting, moves=(True, in_w, True))
    _, transpose = jax.vjp(tangent, zeros, *([zeros] if in_w else []), jnp.zeros_like(lam))
    dx, *dw, dlam = transpose((g, of_d[0] if of_d else zeros))
    return dx, dw[0] if in_w else jnp.zeros_like(lam), dlam


def _solved_types(x: Array, *_: Array, setting: IsotonicSetting) -> list[tuple[int, Any]]:
    n = x.shape[-1]
    return [(n, x.dtype), (n, x.dtype), (n, jnp.int32), (n, jnp.int32)]


def _tangent_types(*at: Array, setting: IsotonicSetting, moves: Any) -> list[tuple[int, Any]]:
    return [(at[1].shape[-1], at[1].dtype)] * 2


def _cotangent_types(*at: Array, setting: IsotonicSetting, in_w: bool) -> list[tuple[int, Any]]:
    n, dtype = at[1].shape[-1], at[1].dtype
    return [(n, dtype), (n if in_w else 1, dtype), (1, dtype)]


def _cotangent_in_core(*at: Any, setting: IsotonicSetting, in_w: bool) -> dict[str, Any] | None:
    with_d = len(at) > _STATE + 1
    given = {"exponent": np.float64(setting.exponent), "floor": np.float64(setting.floor)}
    return None if with_d else {**given, "in_w": np.bool_(in_w)}


_solve = RowCall(
    "permutahedron",
    _solved_types,
    _solve_in_xla,
    lambda *_, setting: {"exponent": np.float64(setting.exponent)},
)
_move = RowCall("permutahedron_tangent", _tangent_types, _tangent)
_pull = RowCall("permutahedron_backward", _cotangent_types, _cotangent, _cotangent_in_core)


@_solve.def_jvp
def _(at: Sequence[Array], tangents: Sequence[Any], setting: IsotonicSetting) -> Any:
    found = _solve(*at, setting=setting)
    _, d, block, paired = found
    moves = tuple(v is not None for v in tangents)
    state = at[2], d, block, paired if moves[1] else block
    dy, dd = _move(*state, *(v for v in tangents if v is not None), setting=setting, moves=moves)
    return found, (dy, dd, None, None)


@_move.def_transpose
def _(cotangents: Sequence[Any], at: Sequence[Array], setting: IsotonicSetting, moves: Any) -> Any:
    of_y, of_d = cotangents
    of_y = jnp.zeros_like(at[1]) if of_y is None else of_y
    with_d = [] if of_d is None else [of_d]
    found = _pull(*at, of_y, *with_d, setting=setting, in_w=moves[1])
    return [v for v, moved in zip(found, moves, strict=True) if moved]
