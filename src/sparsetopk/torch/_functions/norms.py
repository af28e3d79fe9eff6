"""Norms and entropies around the permutahedron, on tensors: f_phi and its conjugate."""

from __future__ import annotations

import torch  # noqa: F401 (the examples use it)
from torch import Tensor

from ..._maths.norms import conjugate_of_top_k
from ..._maths.scalars import Phi
from ..._types import PhiName
from .._rows.arguments import Number, Rows, check_k, check_number, compute_dtype, is_plain
from .._rows.namespace import LOOKS_ALWAYS as xp
from .._solvers.vectorized import split
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
    return _conjugate_of_top_k(y, k, dim, "half_square")


def support_negentropy(y: Tensor, k: Number, *, dim: int = -1) -> Tensor:
    r"""k-support negentropy.

    .. math:: \min_{z \in [0,1]^n,\ \sum_i z_i = k}\ \sum_i y_i \log(y_i / z_i)

    Infinite where y has a negative entry. For k = 1 it is s log(s) with s = sum(y), which is 0 on the
    simplex; for k = n it is the negentropy, sum_i y_i log(y_i).

    >>> support_negentropy(torch.tensor([0.5, 0.5, 0.0]), k=1)
    tensor(0.)
    """
    return _conjugate_of_top_k(y, k, dim, "exp")


def _conjugate_of_top_k(y: Tensor, k: Number, dim: int, phi: PhiName) -> Tensor:
    rows = Rows.of("y", y, dim)
    check_number("k", k)
    rows.check_shape("k", k)
    check_k(k, rows.n, isinstance(k, Tensor) and is_plain(k))
    values, k_rows = rows.data.to(compute_dtype(y)), rows.per_row(k)
    if rows.x.numel() == 0:
        return rows.restore_scalars(values.sum(dim=-1, keepdim=True) + 0.0 * k_rows)
    return rows.restore_scalars(conjugate_of_top_k(xp, values, split(k_rows), Phi(xp, phi)))
