"""Dykstra's alternating projections in XLA operations, for p = 2; see the NumPy module of that name.

Every sweep is parallel over the row. No derivative: see ``isotonic``.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from .._types import PhiName
from ..solution import StoppingRule
from .pav import block_ids, sort, truncate, unsort


def solve(
    x: Array, w: Array, lam: Array, phi: PhiName, rule: StoppingRule
) -> tuple[Array, Array, Array, Array]:
    """d, block and paired as ``pav.solve`` gives them, and the residual (..., 1), relative.

    Stops when no sweep moves a dual variable of a row by more than tol times the largest |y_i| of an
    entry alone, or by no more than rounding does; ``fixed_count`` takes exactly ``max_iter`` sweeps.
    """
    s, order = sort(x)
    w, w_order = sort(w)
    d, joined, residual = _project(s, w, lam, phi == "half_square", rule)
    edges = [(0, 0)] * (s.ndim - 1) + [(1, 0)]
    start = jnp.pad(~joined, edges, constant_values=True)
    if phi == "abs":
        d, start = truncate(s, lam, d, start, s - lam * d)
    d, block, paired = unsort(order, d, block_ids(start), w_order)
    return d, block, paired, residual


class _Ascent(NamedTuple):
    alpha: Array  # (..., n + 1); the first and the last stay 0
    moved: Array  # by the last sweep, (..., 1)
    sweeps: Array


def _project(
    s: Array, w: Array, lam: Array, curved: bool, rule: StoppingRule
) -> tuple[Array, Array, Array]:
    """d, which neighbours share a block, and the residual, for sorted rows."""
    # Stationarity for p = 2: h_i d_i = b_i + alpha_{i-1} - alpha_i.
    b, h = (w * s, 1.0 + lam * w) if curved else (w, jnp.ones_like(w))
    step = 1.0 / (1.0 / h[..., :-1] + 1.0 / h[..., 1:])
    gap = (s[..., :-1] - s[..., 1:]) / lam
    scale = _largest(b / h)
    enough = jnp.maximum(rule.tol * scale, jnp.finfo(s.dtype).eps * _largest(b))
    odd = jnp.arange(s.shape[-1] - 1) % 2 == 0

    def response(alpha: Array) -> Array:
        return (b + alpha[..., :-1] - alpha[..., 1:]) / h

    def update(alpha: Array, pairs: Array) -> Array:
        d = response(alpha)
        slack = gap - d[..., :-1] + d[..., 1:]  # (v_i - v_{i+1})/lam
        inner = alpha[..., 1:-1]
        free = jnp.maximum(inner - step * slack, 0.0)
        return alpha.at[..., 1:-1].set(jnp.where(pairs, free, inner))

    def sweep(at: _Ascent) -> _Ascent:
        alpha = update(update(at.alpha, odd), ~odd)
        return _Ascent(alpha, _largest(alpha - at.alpha), at.sweeps + 1)

    def goes_on(at: _Ascent) -> Array:
        more = at.sweeps < rule.max_iter
        return more if rule.fixed_count else more & (at.moved > enough).any()

    alpha = jnp.concatenate([jnp.zeros_like(s), jnp.zeros_like(lam)], axis=-1)
    first = _Ascent(alpha, jnp.full_like(lam, jnp.inf), jnp.int32(0))
    alpha, moved, _ = lax.while_loop(goes_on, sweep, first)
    return response(alpha), alpha[..., 1:-1] > 0, moved / jnp.where(scale > 0, scale, 1.0)


def _largest(values: Array) -> Array:
    return jnp.abs(values).max(axis=-1, keepdims=True)
