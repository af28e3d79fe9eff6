"""The operators over the permutahedron on rows: solved, and the rules for all derivatives.

``respond`` and ``value_of_blocks`` have the rules of ``_maths``, written with their own outputs and with
sums over blocks: so derivatives of every order follow, in forward and in reverse mode, in O(n).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from ..._maths import dykstra, isotonic
from ..._maths.blocks import Blocks
from ..._maths.dykstra import StoppingRule
from ..._maths.isotonic import SolvedBlocks
from ..._maths.scalars import Phi, PhiName, PNorm
from .._solvers import pav
from . import namespace as xp
from .promotion import promoting


class IsotonicSetting(NamedTuple):
    """What is static about a call."""

    phi_name: PhiName
    exponent: float
    floor: float  # the least lam that slopes, which are S'/lam, are taken with
    rule: StoppingRule | None = None  # of dykstra; None for pav

    @property
    def phi(self) -> Phi:
        return Phi(xp, self.phi_name)

    @property
    def reg(self) -> PNorm:
        return PNorm(xp, self.exponent)


def solve_blocks(
    x: Array, w: Array, lam: Array, setting: IsotonicSetting
) -> tuple[SolvedBlocks, Array]:
    """Finite rows x (..., n), |x| for even phi, and w (..., n), with lam > 0 (..., 1); and the residual
    of the solver (..., 1)."""
    x, w, lam = (lax.stop_gradient(v) for v in (x, w, lam))
    if setting.rule is not None:
        return dykstra.solve_blocks(xp, x, w, lam, setting.phi_name, setting.rule)
    found = pav.solve_blocks(x, w, lam, setting.phi_name, setting.exponent)
    return SolvedBlocks(*(checkpoint_name(v, "solved") for v in found)), xp.zeros_like(lam)


# Of what is computed, a backward keeps what the solver found, and nothing else.
keeping_solved = partial(
    jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("solved")
)


def _blocks(
    x: Array, w: Array, lam: Array, d: Array, block: Array, setting: IsotonicSetting
) -> Blocks:
    return isotonic.blocks_of(setting.reg, setting.phi, x, w, lam, d, block, setting.floor)


class Response(NamedTuple):
    """y and d of every entry, (..., n), both with derivatives."""

    y: Array
    d: Array


@partial(jax.custom_jvp, nondiff_argnums=(5,))
def respond(
    x: Array, w: Array, lam: Array, d: Array, block: Array, setting: IsotonicSetting
) -> Response:
    """y and d of solved rows x, |x| for even phi, each entry beside the w that it is paired with."""
    if setting.exponent == 1.0:  # p = 2: S(d) is precise, and no block is flat
        return Response(setting.reg.response(d), d)
    return Response(_blocks(x, w, lam, d, block, setting).y(), d)


@partial(respond.defjvp, symbolic_zeros=True)
@promoting
def _respond_jvp(
    setting: IsotonicSetting, at: tuple[Array, ...], tangents: tuple[Any, ...]
) -> tuple[Response, Response]:
    x, w, lam, _, block = at
    found = respond(*at, setting)
    dx, dw, dlam = _known(tangents)
    dweight = None if dw is None else xp.block_sum(dw, block)
    moved = _blocks(x, w, lam, found.d, block, setting).tangent(dx, dweight, dlam)
    return found, Response(moved.y, moved.d)


def _known(tangents: tuple[Any, ...]) -> list[Array | None]:
    """The tangents of x, w and lam, with None for those that are zero."""
    return [None if isinstance(d, SymbolicZero) else d for d in tangents[:3]]


@partial(jax.custom_jvp, nondiff_argnums=(5,))
def value_of_blocks(
    x: Array, w: Array, lam: Array, d: Array, block: Array, setting: IsotonicSetting
) -> Array:
    """R*(x - u) + sum_i w_i phi(u_i), (..., 1), for what ``respond`` takes."""
    return isotonic.permutahedron_value(_blocks(x, w, lam, d, block, setting), x, w)


@partial(value_of_blocks.defjvp, symbolic_zeros=True)
@promoting
def _value_jvp(
    setting: IsotonicSetting, at: tuple[Array, ...], tangents: tuple[Any, ...]
) -> tuple[Array, Array]:
    x, w, lam, _, block = at
    y, d = respond(*at, setting)
    blocks = _blocks(x, w, lam, d, block, setting)
    return value_of_blocks(*at, setting), isotonic.value_tangent(blocks, y, *_known(tangents))
