"""x times its mask: ``topk`` from ``topk_mask``."""

from __future__ import annotations

import torch
from torch import Tensor


def times(x: Tensor, mask: Tensor) -> Tensor:
    """x * mask, with 0 for padding; the mask has no slope beside an infinite x."""
    product = torch.where(x.isfinite(), x, 0.0) * mask + 0.0  # 0 and not -0
    return torch.where((x == torch.inf) & (mask > 0), x * mask.detach(), product)


def times_finite(x: Tensor, mask: Tensor) -> Tensor:
    """The same in two passes if every entry is finite, as their sum tells."""
    if not x.detach().sum().isfinite():
        return times(x, mask)
    return torch.addcmul(x.new_zeros(()), x, mask)  # 0 and not -0


def cotangents(x: Tensor, mask: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Those of x and of the mask."""
    if x.sum().isfinite():
        return mask * g, x * g
    finite = x.isfinite()
    moves = finite | ((x == torch.inf) & (mask > 0))
    return torch.where(moves, mask * g, 0.0), torch.where(finite, x, 0.0) * g
