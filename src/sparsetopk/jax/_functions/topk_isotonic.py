"""The top-k family by PAV or Dykstra: the permutahedron of w = 1_k, instead of one threshold."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from ..._maths.operator import MAGNITUDE, Count, Operator
from ..._types import IsotonicSolver, SolverOptions
from .._rows import isotonic
from .._rows import namespace as xp
from .._rows.arguments import Number, Rows, exact
from .._rows.compiled import compiled, entries
from .._rows.isotonic import Setting, respond
from .._rows.threshold import unsigned_zero
from .polytope import checked, setting_of


def evaluate(
    rows: Rows,
    k: Number,
    lam: Number,
    kind: Operator,
    p: float,
    solver: IsotonicSolver,
    options: SolverOptions | None,
) -> Array:
    """The output in the shape of x, for checked arguments; of rows with lam = 0, anything."""
    setting = setting_of(rows.x, p, kind.phi_name, solver, options)
    return checked(setting, *_evaluate(rows.x, exact(k), lam, rows.axis, kind, setting))


@compiled("axis", "kind", "setting", results=lambda *at: (entries(*at), entries(*at)))
def _evaluate(
    x: Array, k: Array | Count, lam: Number, axis: int, kind: Operator, setting: Setting
) -> tuple[Array, Array]:
    rows = Rows("x", x, axis)
    y, residual = _of_rows(rows.data, rows.split(k), rows.per_row(lam), kind, setting)
    return rows.restore(y), rows.unflatten(residual)


def _of_rows(
    x: Array, k: Count, lam: Array, kind: Operator, setting: Setting
) -> tuple[Array, Array]:
    """y (..., n), and the residual of the solver (..., 1)."""
    phi, n, (whole, frac) = kind.phi(xp), x.shape[-1], k
    x = x.astype(lam.dtype)
    bad = ~jnp.isfinite(x) if phi.even else jnp.isnan(x)
    valid = (whole >= 0) & (frac >= 0) & ((whole < n) | ((whole == n) & (frac == 0)))
    valid = valid & ~bad.any(axis=-1, keepdims=True) & (lam >= 0) & (lam < jnp.inf)
    soft = valid & (lam > 0)
    sign = jnp.where(x < 0, -1.0, 1.0).astype(x.dtype) if phi.even else None
    a = jnp.where(valid, x if sign is None else sign * x, 0.0)
    a, k = _candidates(a, Count(jnp.where(valid, whole, 0), jnp.where(valid, frac, 0.0)))
    given_lam, lam = lam, jnp.where(soft, jnp.maximum(lam, jnp.finfo(lam.dtype).tiny), 1.0)
    a = _without_infinities(a, lam)

    w = (k.whole - jnp.arange(n, dtype=jnp.int32)).astype(lam.dtype) + lax.stop_gradient(k.frac)
    w = jnp.clip(w, 0.0, 1.0)
    solved, residual = isotonic.solve(a, w, lam, setting)
    residual = jnp.where(soft, residual, 0.0)
    if setting.rule is not None and not setting.rule.fixed_count:
        valid &= residual <= setting.rule.tol
    w = jnp.take_along_axis(w, solved.paired, axis=-1)
    size, weight = xp.block_sum(jnp.ones_like(w), solved.block), xp.block_sum(w, solved.block)
    # k is the weight of the one block that is neither selected whole nor left out whole.
    boundary = solved.paired == jnp.minimum(k.whole, n - 1)
    shared = boundary & (weight > 0) & (weight < size)
    w = w + jnp.where(shared, k.frac - lax.stop_gradient(k.frac), 0.0)

    y, d = respond(a, w, lam, solved.d, solved.block, setting)
    if kind.op == MAGNITUDE:
        if kind.debias:
            y = jnp.where(weight > 0, y + lam * d, 0.0)
            y = jnp.where((size == 1) & (weight == 1), a, y)
        # Which of several zeros would be selected is open: only if all are do they have a slope.
        y = jnp.where((x == 0) & (k.whole < n), 0.0, y)
    y = y if sign is None else sign * y
    # Invalid rows have invalid derivatives too.
    nan = (x + frac + given_lam) * jnp.where(valid, 0.0, jnp.nan).astype(x.dtype)
    return jnp.where(valid, unsigned_zero(y), nan), residual


def _candidates(a: Array, k: Count) -> tuple[Array, Count]:
    """Where more than k entries are +inf, these tie and are the only candidates; and k, at most the
    number of candidates."""
    infinite = a == jnp.inf
    overfull = _count(infinite) - k.whole > k.frac
    a = jnp.where(overfull, jnp.where(infinite, 0.0, -jnp.inf).astype(a.dtype), a)
    candidates = _count(a > -jnp.inf)
    frac = jnp.where(k.whole < candidates, k.frac, 0.0)
    return a, Count(jnp.minimum(k.whole, candidates), frac)


def _count(flags: Array) -> Array:
    return flags.sum(axis=-1, keepdims=True, dtype=jnp.int32)


def _without_infinities(a: Array, lam: Array) -> Array:
    """Finite stand-ins for infinite entries, too far from the others to be pooled with them."""
    finite, limit = jnp.isfinite(a), jnp.finfo(a.dtype).max
    now, lam = lax.stop_gradient(a), lax.stop_gradient(lam)
    some = finite.any(axis=-1, keepdims=True)
    top = jnp.where(finite, now, -limit).max(axis=-1, keepdims=True)
    bottom = jnp.where(finite, now, limit).min(axis=-1, keepdims=True)
    top, bottom = jnp.where(some, top, 0.0), jnp.where(some, bottom, 0.0)
    above = jnp.minimum(top + 2.0 * (lam + jnp.abs(top)), limit)
    below = jnp.maximum(bottom - 2.0 * (lam + jnp.abs(bottom)), -limit)
    return jnp.where(finite, a, jnp.where(a > 0, above, below))
