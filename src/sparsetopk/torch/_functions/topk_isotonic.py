"""The top-k family by PAV or Dykstra: the permutahedron of w = 1_k, instead of one threshold."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._maths.operator import MAGNITUDE, Operator
from ..._types import IsotonicSolver, SolverOptions
from .._rows.arguments import Number, Rows
from .._rows.isotonic import relax
from .._rows.namespace import LOOKS_ALWAYS as xp
from .._solvers.vectorized import row_sum
from .polytope import Setting


def evaluate(
    rows: Rows,
    k: Number,
    lam: Number,
    operator: Operator,
    p: float,
    solver: IsotonicSolver,
    options: SolverOptions | None,
) -> Tensor:
    """The output as rows (m, n), for checked arguments; of rows with lam = 0, anything."""
    phi, n = operator.phi(xp), rows.n
    k_rows, lam_rows = rows.per_row(k), rows.per_row(lam)
    x = rows.data.to(lam_rows.dtype)
    bad = x.isnan() if not phi.even else ~x.isfinite()
    valid = ~bad.any(-1, keepdim=True) & (k_rows >= 0) & (k_rows <= n)
    valid = valid & (lam_rows >= 0) & (lam_rows < torch.inf)
    sign = torch.where(x < 0, -1.0, 1.0).to(x.dtype) if phi.even else None
    a = _candidates(torch.where(valid, x if sign is None else sign * x, 0.0), k_rows)
    k_rows = torch.where(valid, torch.minimum(k_rows, row_sum(a > -torch.inf)), 0.0)
    lam_rows = torch.where(valid & (lam_rows > 0), lam_rows, 1.0)
    a = _without_infinities(a, lam_rows)

    setting = Setting.of(p, phi.name, solver, options, rows.x, k, lam)
    rank = torch.arange(n, dtype=a.dtype, device=a.device)
    w = (k_rows.detach() - rank).clamp(0.0, 1.0)
    solved, failed = setting.solve(a.detach(), w, lam_rows.detach())
    valid = valid if failed is None else valid & ~failed
    w = w.gather(-1, solved.paired)
    size = xp.block_sum(torch.ones_like(w), solved.block)
    weight = xp.block_sum(w, solved.block)
    # k is the weight of the one block that is neither selected whole nor left out whole.
    boundary = solved.paired == k_rows.detach().floor().clamp_max(n - 1.0)
    shared = boundary & (weight > 0) & (weight < size)
    w = w + torch.where(shared, k_rows - k_rows.detach(), 0.0)

    floor = 2.0 / torch.finfo(rows.x.dtype).max
    blocks = relax(a, w, lam_rows, solved, setting.phi.name, setting.exponent, floor)
    y = blocks.y()
    if operator.op == MAGNITUDE:
        if operator.debias:
            y = torch.where(weight > 0, y + lam_rows * blocks.d(), 0.0)
            y = torch.where((size == 1) & (weight == 1), a, y)
        # Which of several zeros would be selected is open: only if all are do they have a slope.
        y = torch.where((x == 0) & (k_rows < n), 0.0, y)
    y = y if sign is None else sign * y
    nan = (x + k_rows + lam_rows) * torch.where(valid, 0.0, torch.nan).to(x.dtype)
    return torch.where(valid, y + 0.0, nan)  # invalid rows have invalid derivatives too


def _candidates(a: Tensor, k: Tensor) -> Tensor:
    """Where more than k entries are +inf, these tie and are the only candidates."""
    infinite = a == torch.inf
    overfull = row_sum(infinite) > k
    return torch.where(overfull, torch.where(infinite, 0.0, -torch.inf).to(a.dtype), a)


def _without_infinities(a: Tensor, lam: Tensor) -> Tensor:
    """Finite stand-ins for infinite entries, too far from the others to be pooled with them."""
    finite, limit = a.isfinite(), torch.finfo(a.dtype).max
    now, lam = a.detach(), lam.detach()
    some = finite.any(-1, keepdim=True)
    top = torch.where(finite, now, -limit).amax(-1, keepdim=True)
    bottom = torch.where(finite, now, limit).amin(-1, keepdim=True)
    top, bottom = torch.where(some, top, 0.0), torch.where(some, bottom, 0.0)
    above = (top + 2.0 * (lam + top.abs())).clamp_max(limit)
    below = (bottom - 2.0 * (lam + bottom.abs())).clamp_min(-limit)
    return torch.where(finite, a, torch.where(a > 0, above, below))
