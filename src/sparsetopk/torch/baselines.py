"""What the relaxed top-k in magnitude is compared with: hard, and dense by entropy.

All of them select along the last dimension, keep the shape and dtype of x, and can be given to
``prune`` as ``operator``. ``straight_through=True`` returns the hard selection, exactly k entries, with
the derivative of the relaxation; for the hard operator itself, with that of the identity.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._maths.root import increasing_root
from ._functions.operators import topk_mag
from ._rows.arguments import check_float_tensor, check_k, check_number
from ._rows.namespace import LOOKS_ALWAYS
from ._solvers.vectorized import row_sum


def hard_topk_mag(x: Tensor, k: float, *, straight_through: bool = False) -> Tensor:
    """x on the k entries with the largest magnitudes, 0 elsewhere: ``topk_mag`` with lam = 0.

    The derivative is 1 on what is kept and 0 elsewhere; straight through, it is 1 everywhere.
    """
    y = topk_mag(x, k, 0.0)
    return y.detach() + (x - x.detach()) if straight_through else y


def binary_entropy_topk_mag(
    x: Tensor, k: float, lam: float = 0.1, *, straight_through: bool = False
) -> Tensor:
    r"""x times the mask of \|x\| that binary entropy gives: dense, as no entry is ever 0 or 1.

    .. math:: \max_{y \in [0,1]^n,\ \sum_i y_i = k} \langle |x|, y \rangle
              - \lambda \sum_i y_i \log y_i + (1 - y_i) \log (1 - y_i)

    The solution is y_i = sigmoid((\|x_i\| - tau)/lam), with tau such that the sum is k.
    """
    n = _check(x, k, lam)
    mask = torch.ones_like(x) * (k / max(n, 1)) if k in (0, n) else _sigmoid_mask(x, k, lam)
    return _times(x, k, mask, straight_through)


def sinkhorn_topk_mag(
    x: Tensor, k: float, lam: float = 0.1, *, iterations: int = 100, straight_through: bool = False
) -> Tensor:
    r"""x times the mask of \|x\| by entropy-regularised optimal transport: dense.

    The n sizes are transported to two bins, of mass k and n - k:

    .. math:: \max_{\Gamma \ge 0,\ \Gamma 1 = 1,\ \Gamma^\top 1 = (k, n-k)} \sum_i |x_i| \Gamma_{i1}
              - \lambda \sum_{ij} \Gamma_{ij} \log \Gamma_{ij}

    by Sinkhorn's algorithm in the log domain, whose iterations are differentiated one by one. In the
    limit it is the mask of binary entropy; after finitely many iterations the sum is k only nearly.
    """
    n = _check(x, k, lam)
    if isinstance(iterations, bool) or not isinstance(iterations, int) or iterations < 1:
        raise ValueError(f"iterations must be an int and at least 1, got {iterations!r}")
    mask = torch.ones_like(x) * (k / max(n, 1)) if k in (0, n) else _sinkhorn(x, k, lam, iterations)
    return _times(x, k, mask, straight_through)


def _check(x: Tensor, k: float, lam: float) -> int:
    n = check_float_tensor("x", x).shape[-1]
    check_number("k", k)
    check_k(k, n, readable=False)
    if not 0 < lam < math.inf:
        raise ValueError(f"lam must be finite and greater than 0, got {lam}")
    return n


def _times(x: Tensor, k: float, mask: Tensor, straight_through: bool) -> Tensor:
    y = x * mask.to(x.dtype)
    return topk_mag(x, k, 0.0).detach() + (y - y.detach()) if straight_through else y


def _rows(x: Tensor) -> Tensor:
    """Sizes (m, n) in float64."""
    return x.abs().to(torch.float64).reshape(-1, x.shape[-1])


def _sigmoid_mask(x: Tensor, k: float, lam: float) -> Tensor:
    a = _rows(x)
    now, n = a.detach(), a.shape[-1]
    middle = lam * math.log(k / (n - k))

    def equation(tau: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = torch.sigmoid((now - tau) / lam)
        value = k - row_sum(y)
        return value, -lam * value / row_sum(y * (1 - y)), row_sum(y)

    lo, hi = (end - middle for end in now.aminmax(dim=-1, keepdim=True))
    start, rows = lo + (hi - lo) / 2, torch.ones_like(lo, dtype=torch.bool)
    tau = increasing_root(
        LOOKS_ALWAYS, equation, lo, hi, start=start, tol=1e-14, unit=hi - lo, rows=rows
    ).best
    y = torch.sigmoid((now - tau) / lam)
    slope = row_sum(y * (1 - y)) / lam
    # Two Newton steps from the root: each is right to one more order of derivatives.
    move = torch.zeros_like(tau)
    for _ in range(2):
        total = row_sum(torch.sigmoid((a - tau - move) / lam))
        move = move + (total - total.detach()) / slope
    return torch.sigmoid((a - tau - move) / lam).reshape(x.shape)


def _sinkhorn(x: Tensor, k: float, lam: float, iterations: int) -> Tensor:
    gain = torch.stack([_rows(x) / lam, torch.zeros_like(_rows(x))], dim=-1)
    n = gain.shape[1]
    mass = torch.tensor([k, n - k], dtype=gain.dtype, device=x.device).log()
    of_bins = gain.new_zeros((gain.shape[0], 1, 2))
    for _ in range(iterations):
        of_sizes = -torch.logsumexp(gain + of_bins, dim=2, keepdim=True)
        of_bins = mass - torch.logsumexp(gain + of_sizes, dim=1, keepdim=True)
    log_y = gain + of_bins - torch.logsumexp(gain + of_bins, dim=2, keepdim=True)
    return log_y[..., 0].exp().reshape(x.shape)
