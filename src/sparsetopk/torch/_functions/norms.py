"""Norms and entropies around the permutahedron, on tensors: f_phi and its conjugate."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._rows.arguments import Number, Rows, check_k, check_number, compute_dtype, is_plain
from .polytope import permutahedron_value


def owl_norm(x: Tensor, w: Tensor, *, dim: int = -1) -> Tensor:
    r"""Ordered weighted lasso norm, :math:`\sum_i w_i |x|_{[i]}` with w >= 0 in decreasing order.

    >>> owl_norm(torch.tensor([1.0, -3.0, 2.0]), w=torch.tensor([1.0, 0.5, 0.0]))
    tensor(4.)
    """
    return permutahedron_value(x, w, lam=0.0, phi="abs", dim=dim)


def half_sq_support_norm(y: Tensor, k: Number, *, dim: int = -1) -> Tensor:
    r"""Half the squared k-support norm.

    .. math:: \frac12 \min_{z \in [0,1]^n,\ \sum_i z_i = k}\ \sum_i y_i^2 / z_i

    It equals :math:`\frac12 \|y\|^2` for vectors with at most k nonzeros, and is the largest convex
    function that does (Argyriou et al., 2012). k may be real; k = 0 gives infinity unless y = 0.

    >>> half_sq_support_norm(torch.tensor([3.0, 0.0, -4.0]), k=2)
    tensor(12.5000)
    """
    rows = Rows.of("y", y, dim)
    size = rows.data.to(compute_dtype(y)).abs()
    return _conjugate_of_top_k(rows, size, k, lambda mean: mean * mean / 2)


def support_negentropy(y: Tensor, k: Number, *, dim: int = -1) -> Tensor:
    r"""k-support negentropy.

    .. math:: \min_{z \in [0,1]^n,\ \sum_i z_i = k}\ \sum_i y_i \log(y_i / z_i)

    Infinite where y has a negative entry. For k = 1 it is s log(s) with s = sum(y), which is 0 on the
    simplex; for k = n it is the negentropy, sum_i y_i log(y_i).

    >>> support_negentropy(torch.tensor([0.5, 0.5, 0.0]), k=1)
    tensor(0.)
    """
    rows = Rows.of("y", y, dim)
    size = rows.data.to(compute_dtype(y))
    tiny = torch.finfo(size.dtype).tiny  # the slope of y log(y) at 0 is finite so
    return _conjugate_of_top_k(rows, size, k, lambda mean: mean * torch.log(mean.clamp_min(tiny)))


def _conjugate_of_top_k(
    rows: Rows, y: Tensor, k: Number, conjugate: Callable[[Tensor], Tensor]
) -> Tensor:
    """min_{z in P(1_k)} sum_i z_i phi*(y_i/z_i) for y >= 0; infinite where an entry is not.

    z_i = min(y_i/g, 1): the largest entries stand alone, the others share what they leave of k.
    """
    check_number("k", k)
    rows.check_shape("k", k)
    check_k(k, rows.n, isinstance(k, Tensor) and is_plain(k))
    k_rows = rows.per_row(k)
    if rows.x.numel() == 0:
        return rows.restore_scalars(y.sum(dim=-1))
    outside = (y.isinf() | (y < 0)).any(dim=-1, keepdim=True)
    invalid = y.isnan().any(dim=-1, keepdim=True) | ~((k_rows >= 0) & (k_rows <= rows.n))
    s = torch.where(outside | invalid, 0.0, y).sort(dim=-1, descending=True).values
    whole = _whole(s.detach(), k_rows.detach())
    left = k_rows - whole.sum(dim=-1, keepdim=True)
    mass = torch.where(whole, 0.0, s).sum(dim=-1, keepdim=True)
    shared = left > 0
    left = torch.where(shared, left, 1.0)
    alone = torch.where(whole, conjugate(s), 0.0).sum(dim=-1, keepdim=True)
    rest = torch.where(shared, left * conjugate(mass / left), 0.0)
    value = alone + rest
    value = torch.where(outside | (~shared & (mass > 0)), torch.inf, value)
    nan = (y.sum(dim=-1, keepdim=True) + k_rows) * torch.where(invalid, torch.nan, 0.0).to(y.dtype)
    return rows.restore_scalars(torch.where(invalid, nan, value))


def _whole(s: Tensor, k: Tensor) -> Tensor:
    """Which entries of the sorted rows have z_i = 1: those at least the mean that is left for them."""
    left = k - torch.arange(s.shape[-1], dtype=k.dtype, device=k.device)
    tail = s.flip(-1).cumsum(dim=-1).flip(-1)
    alone = (left >= 1) & (s * left >= tail)
    return alone.to(torch.int64).cumprod(dim=-1).to(torch.bool)
