"""The top-k family by PAV or Dykstra: the permutahedron of w = 1_k, instead of one threshold."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from ..._maths.operator import Count, Operator
from ..._maths.topk_isotonic import Paired, or_nan, output, prepare
from ..._types import IsotonicSolver, SolverOptions
from .._rows import isotonic
from .._rows import namespace as xp
from .._rows.arguments import Number, Rows, exact
from .._rows.compiled import compiled, entries
from .._rows.isotonic import IsotonicSetting, respond
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
    x: Array, k: Array | Count, lam: Number, axis: int, kind: Operator, setting: IsotonicSetting
) -> tuple[Array, Array]:
    rows = Rows("x", x, axis)
    y, residual = _of_rows(rows.data, rows.split(k), rows.per_row(lam), kind, setting)
    return rows.restore(y), rows.unflatten(residual)


def _of_rows(
    x: Array, k: Count, lam: Array, kind: Operator, setting: IsotonicSetting
) -> tuple[Array, Array]:
    """y (..., n), and the residual of the solver (..., 1)."""
    rows = prepare(xp, x.astype(lam.dtype), k, lam, kind)
    solved, residual = isotonic.solve_blocks(rows.a, rows.w, rows.lam, setting)
    residual = jnp.where(rows.soft, residual, 0.0)
    valid = rows.valid
    if setting.rule is not None and not setting.rule.fixed_count:
        valid &= residual <= setting.rule.tol
    paired = Paired.of(xp, rows, solved)
    w = paired.live_w(xp, rows.k)
    y, d = respond(rows.a, w, rows.lam, solved.d, solved.block, setting)
    y = output(xp, rows, paired, kind, y, d)
    return or_nan(xp, rows, valid, unsigned_zero(y)), residual
