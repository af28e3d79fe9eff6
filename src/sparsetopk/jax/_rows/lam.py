"""The lam of rows that leaves so many entries fractional: by the core, or by many solves of a window."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..._maths import select
from ..._maths.operator import Count, Operator
from ..._maths.response import Relaxed
from ..._maths.select import Window
from ..._maths.threshold import State
from .._solvers.plain import row_sums
from . import namespace as xp
from .calls import RowCall
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
