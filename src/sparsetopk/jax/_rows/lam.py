"""The lam of rows that leaves so many entries fractional, or makes blocks of such a size: by the core,
or by many solves."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..._maths import padding, select
from ..._maths.operator import Count, Operator
from ..._maths.response import Relaxed
from ..._maths.select import Window
from ..._maths.threshold import State
from .._solvers.plain import row_sums
from . import namespace as xp
from .calls import RowCall
from .isotonic import IsotonicSetting, solve_blocks
from .threshold import TopKSetting, relaxed, solve_topk


def choose_lam(x: Array, k: Count, operator: Operator, fractional: int, most: int | None) -> Array:
    """lam (..., 1) of rows x (..., n) with k (..., 1), of which none is above ``most``; n > 0."""
    return _choose(x, *k, operator=operator, fractional=fractional, most=most)[0]


def _choose_in_xla(
    x: Array, whole: Array, frac: Array, operator: Operator, fractional: int, most: int | None
) -> tuple[Array]:
    k, n, even = Count(whole, frac), x.shape[-1], operator.phi(xp).even
    a = jnp.abs(x) if even else x
    count = n if most is None else xp.shorter(n, most + fractional + 1)
    s = lax.top_k(jnp.where(jnp.isnan(a), 0.0, a), count)[0]
    window = Window.of(xp, s, k, fractional)
    setting = TopKSetting(operator, False)

    def relax(lam: Array) -> Relaxed:
        _, pivot, delta = solve_topk(window.s, *window.k, lam, setting)
        return relaxed(window.s, window.k, lam, State(pivot, delta), setting)

    lam = select.choose_lam(xp, window, operator, fractional, relax, x.dtype)
    bad = ~jnp.isfinite(x) if even else jnp.isnan(x)
    return (jnp.where((row_sums(bad)[0] > 0) | ~k.is_valid(n), jnp.nan, lam),)


def _in_core(
    x: Any, whole: Any, frac: Any, operator: Operator, fractional: int, most: int | None
) -> dict[str, Any] | None:
    if not operator.is_compiled:
        return None
    return {
        "op": np.int32(operator.op),
        "exponent": np.float64(operator.exponent),
        "fractional": np.int64(fractional),
        "least": np.float64(select.least_lam(xp, frac.dtype)),
    }


_choose = RowCall(
    "choose_lam", lambda x, whole, frac, **_: [(1, frac.dtype)], _choose_in_xla, _in_core
)


def choose_rank_lam(x: Array, setting: IsotonicSetting, size: float, descending: bool) -> Array:
    """lam (..., 1) with which the blocks of the relaxed ranks of rows x (..., n) have this size."""
    return _choose_rank(x, setting=setting, size=size, descending=descending)[0]


def _choose_rank_in_xla(
    x: Array, setting: IsotonicSetting, size: float, descending: bool
) -> tuple[Array]:
    invalid = (~jnp.isfinite(x) & (x != -jnp.inf)).any(axis=-1, keepdims=True)
    data = jnp.where(invalid, 0.0, x)
    rho = jnp.broadcast_to(jnp.arange(x.shape[-1], 0, -1, dtype=x.dtype), x.shape)

    def blocks(lam: Array) -> Array:
        z = padding.ranking(xp, data, lam, setting.exponent, descending)
        return solve_blocks(z, rho, lam, setting)[0].block

    lam = select.choose_rank_lam(xp, data, size, setting.exponent, blocks)
    return (jnp.where(invalid, jnp.nan, lam),)


def _rank_in_core(
    x: Any, setting: IsotonicSetting, size: float, descending: bool
) -> dict[str, Any]:
    return {
        "exponent": np.float64(setting.exponent),
        "size": np.float64(size),
        "descending": np.bool_(descending),
        "least": np.float64(select.least_lam(xp, x.dtype)),
    }


_choose_rank = RowCall(
    "choose_rank_lam", lambda x, **_: [(1, x.dtype)], _choose_rank_in_xla, _rank_in_core
)
