"""The hard operators (lam = 0) in operations that every exporter knows: a model that is hard when it is
deployed needs nothing of this package."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..._maths.operator import Count, Operator
from ..._maths.response import hard_mask, hard_output
from .._private import KNOWS_EXPORTS, is_exporting, is_tracing
from .._solvers.vectorized import split
from .arguments import Number, Rows
from .differentiable import local_sums
from .namespace import LOOKS_NEVER

_xp: Any = LOOKS_NEVER


def is_leaving() -> bool:
    """Whether a graph is made that may run elsewhere: exported, or traced by TorchScript."""
    if torch.compiler.is_compiling():
        return is_exporting() or not KNOWS_EXPORTS
    return is_tracing()


def takes(lam: Number) -> bool:
    """Whether the operator is hard, and its graph leaves."""
    return not isinstance(lam, Tensor) and lam == 0 and is_leaving()


def evaluate(rows: Rows, k: Number, operator: Operator) -> Tensor:
    """The operator for lam = 0 and a checked k; there must be at least one entry."""
    x, even = rows.x.movedim(rows.dim, -1), operator.phi(_xp).even
    signed = x.detach()
    a = signed.abs() if even else signed
    count, boundary = _boundary(a, k, rows.dim)
    sign = torch.where(signed < 0, -1.0, 1.0).to(x.dtype) if even else None
    mask = hard_mask(_xp, a, boundary, count, local_sums).to(x.dtype)
    bad = (~a.isfinite() if even else a.isnan()).any(dim=-1, keepdim=True) | boundary.isnan()
    y = torch.where(bad, torch.nan, hard_output(_xp, x, sign, mask, operator))
    return y.movedim(-1, rows.dim)


def _boundary(a: Tensor, k: Number, dim: int) -> tuple[Count, Tensor]:
    """k, and a_[ceil k] (..., 1): inf for k = 0, NaN where k is no number in [0, n]."""
    dtype = torch.float64 if a.dtype == torch.float64 else torch.float32
    if not isinstance(k, Tensor):
        count = Count(math.floor(k), a.new_full((), k - math.floor(k), dtype=dtype))
        if k == 0:
            return count, a.new_full((), torch.inf)
        return count, a.topk(math.ceil(k), sorted=False).values.amin(dim=-1, keepdim=True)
    k = k.detach().to(dtype=dtype, device=a.device)
    # The dimension of k has length 1, or is not there.
    k = (k.movedim(dim, -1) if k.ndim == a.ndim else k).expand(*a.shape[:-1], 1)
    last = (k.ceil().nan_to_num(0.0).to(torch.int64) - 1).clamp(0, a.shape[-1] - 1)
    found = a.sort(descending=True).values.gather(-1, last)
    found = torch.where(k == 0, torch.inf, found)
    return split(k), torch.where((k >= 0) & (k <= a.shape[-1]), found, torch.nan)
