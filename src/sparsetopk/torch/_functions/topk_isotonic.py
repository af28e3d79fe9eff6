"""The top-k family by PAV or Dykstra: the permutahedron of w = 1_k, instead of one threshold."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._maths.operator import Operator
from ..._maths.topk_isotonic import Paired, or_nan, output, prepare
from ..._types import IsotonicSolver, SolverOptions
from .._rows.arguments import Number, Rows
from .._rows.isotonic import relax
from .._rows.namespace import LOOKS_ALWAYS as xp
from .._solvers.vectorized import split
from .polytope import IsotonicSetting


def evaluate(
    rows: Rows,
    k: Number,
    lam: Number,
    operator: Operator,
    solver: IsotonicSolver,
    options: SolverOptions | None,
) -> Tensor:
    """The output as rows (m, n), for checked arguments; of rows with lam = 0, anything."""
    lam_rows = rows.per_row(lam)
    x = rows.data.to(lam_rows.dtype)
    at = prepare(xp, x, split(rows.per_row(k)), lam_rows, operator)
    setting = IsotonicSetting.of(operator.p, operator.phi_name, solver, options, rows.x, k, lam)
    solved, failed = setting.solve(at.a.detach(), at.w, at.lam.detach())
    paired = Paired.of(xp, at, solved)
    floor = 2.0 / torch.finfo(rows.x.dtype).max
    w = paired.live_w(xp, at.k)
    blocks = relax(at.a, w, at.lam, solved, setting.phi.name, setting.exponent, floor)
    y = output(xp, at, paired, operator, blocks.y(), blocks.d())
    return or_nan(xp, at, at.valid if failed is None else at.valid & ~failed, y + 0.0)
