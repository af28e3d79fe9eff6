"""What the relaxed top-k is compared with: hard, and the differentiable ones of other papers.

All of them select along the last dimension and keep the shape and dtype of x. Those in magnitude can be
given to ``prune`` as ``operator``; ``straight_through=True`` returns the hard selection, exactly k
entries, with the derivative of the relaxation; for the hard operator itself, with that of the identity.
The others are masks. They are short, and made from the formulas of the papers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from .._maths.root import increasing_root
from ._functions.operators import topk_mag, topk_mask
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
    mask = _full(x, k, n) if k in (0, n) else _of_distribution(x.abs(), k, lam, _LOGISTIC)
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
    mask = _full(x, k, n) if k in (0, n) else _sinkhorn(x.abs(), k, lam, iterations)
    return _times(x, k, mask, straight_through)


def sinkhorn_mask(x: Tensor, k: float, lam: float = 0.1, *, iterations: int = 100) -> Tensor:
    """``sinkhorn_topk_mag`` of x itself, as a mask: entropic optimal transport (Xie et al., 2020)."""
    n = _check(x, k, lam)
    return _full(x, k, n) if k in (0, n) else _sinkhorn(x, k, lam, iterations).to(x.dtype)


def lapsum_mask(x: Tensor, k: float, lam: float = 0.1) -> Tensor:
    r"""The mask of LapSum (Struski et al., 2025): dense.

    y_i = F((x_i - tau)/lam) with F the distribution function of Laplace, and tau such that the sum is k.
    """
    n = _check(x, k, lam)
    return _full(x, k, n) if k in (0, n) else _of_distribution(x, k, lam, _LAPLACE).to(x.dtype)


def dftopk_mask(x: Tensor, k: int, lam: float = 0.1) -> Tensor:
    r"""The mask of DFTopK (Zhu et al., 2025): dense, and its sum is not k.

    y_i = sigmoid((x_i - theta)/lam), with theta in the middle of the k-th and the next entry.
    """
    n = _check(x, k, lam)
    if k in (0, n):
        return _full(x, k, n)
    theta = x.topk(int(k) + 1, dim=-1).values[..., -2:].mean(dim=-1, keepdim=True)
    return torch.sigmoid((x - theta) / lam)


def perturbed_mask(
    x: Tensor,
    k: int,
    lam: float = 0.1,
    *,
    samples: int = 100,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""The perturbed top-k (Cordonnier et al., 2021): the mean of hard masks of x + lam z, z normal.

    Its derivative is the estimate :math:`\frac{1}{\lambda} \mathrm{E}\, y(x + \lambda z)\, z^\top`, from
    the same samples.
    """
    _check(x, k, lam)
    noise = torch.randn((samples, *x.shape), generator=generator, dtype=x.dtype, device=x.device)
    return _Perturbed.apply(x, noise, k, lam)  # type: ignore[no-untyped-call]


def softmax_mask(
    x: Tensor,
    k: int,
    lam: float = 1.0,
    *,
    gumbel: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The hard mask, exactly k entries, with the derivative of k softmax(x/lam).

    With ``gumbel=True`` of x with Gumbel noise: a sample without replacement (Kool et al., 2019).
    """
    _check(x, k, lam)
    if gumbel:
        uniform = torch.rand(x.shape, generator=generator, dtype=x.dtype, device=x.device)
        tiny = torch.finfo(x.dtype).tiny
        x = x - lam * (-uniform.clamp_min(tiny).log()).clamp_min(tiny).log()
    soft = k * (x / lam).softmax(dim=-1)
    return topk_mask(x.detach(), k, 0.0) + (soft - soft.detach())


class _Perturbed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, noise: Tensor, k: int, lam: float) -> Tensor:
        masks = topk_mask(x + lam * noise, k, 0.0)
        ctx.save_for_backward(masks, noise)
        ctx.lam = lam
        return masks.mean(dim=0)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        masks, noise = ctx.saved_tensors
        return (
            ((masks * g).sum(dim=-1, keepdim=True) * noise).mean(dim=0) / ctx.lam,
            None,
            None,
            None,
        )


_Distribution = tuple[
    Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], Callable[[float], float]
]  # its function, its density, and the inverse of its function
_LOGISTIC: _Distribution = (
    torch.sigmoid,
    lambda u: torch.sigmoid(u) * torch.sigmoid(-u),
    lambda q: math.log(q / (1 - q)),
)
_LAPLACE: _Distribution = (
    lambda u: torch.where(u < 0, u.clamp(max=0).exp() / 2, 1 - (-u).clamp(max=0).exp() / 2),
    lambda u: (-u.abs()).exp() / 2,
    lambda q: math.log(2 * q) if q < 0.5 else -math.log(2 * (1 - q)),
)


def _full(x: Tensor, k: float, n: int) -> Tensor:
    """For k = 0 and k = n."""
    return torch.ones_like(x) * (k / max(n, 1))


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
    """(m, n) in float64."""
    return x.to(torch.float64).reshape(-1, x.shape[-1])


def _of_distribution(x: Tensor, k: float, lam: float, distribution: _Distribution) -> Tensor:
    """F((x - tau)/lam) for the tau of every row with which its sum is k, in float64."""
    function, density, inverse = distribution
    a = _rows(x)
    now, n = a.detach(), a.shape[-1]
    middle = lam * inverse(k / n)

    def equation(tau: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        u = (now - tau) / lam
        total = row_sum(function(u))
        value = k - total
        return value, -lam * value / row_sum(density(u)), total

    lo, hi = (end - middle for end in now.aminmax(dim=-1, keepdim=True))
    start, rows = lo + (hi - lo) / 2, torch.ones_like(lo, dtype=torch.bool)
    tau = increasing_root(
        LOOKS_ALWAYS, equation, lo, hi, start=start, tol=1e-14, unit=hi - lo, rows=rows
    ).best
    # In a gap of a thousand lam all densities are 0, and so is the derivative.
    slope = (row_sum(density((now - tau) / lam)) / lam).clamp_min(torch.finfo(torch.float64).tiny)
    # Two Newton steps from the root: each is right to one more order of derivatives.
    move = torch.zeros_like(tau)
    for _ in range(2):
        total = row_sum(function((a - tau - move) / lam))
        move = move + (total - total.detach()) / slope
    return function((a - tau - move) / lam).reshape(x.shape)


def _sinkhorn(x: Tensor, k: float, lam: float, iterations: int) -> Tensor:
    """With two bins, what is iterated is one number of a row: by how much the first is preferred."""
    gain = _rows(x) / lam
    prefers = gain.new_zeros((gain.shape[0], 1))
    for _ in range(iterations):
        at_first, at_second = logsigmoid(gain + prefers), logsigmoid(-gain - prefers)
        filled = at_first.logsumexp(1, keepdim=True) - at_second.logsumexp(1, keepdim=True)
        prefers = prefers + math.log(k / (gain.shape[1] - k)) - filled
    return (gain + prefers).sigmoid().reshape(x.shape)
