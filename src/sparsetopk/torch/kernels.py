"""The compiled kernels of the top-k family on contiguous CPU rows, by address."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..core import native
from .vectorized import MAGNITUDE, MASK, SIGN, TWO_SIDED

DTYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
_CLOSED_FORMS = (1.0, 2.0, 3.0)


class Operator(NamedTuple):
    """What the kernels are told about the operator."""

    op: int
    exponent: float
    debias: bool


def has(operator: Operator) -> bool:
    """Whether there is a kernel for the operator."""
    return native is not None and (
        operator.op in (MASK, MAGNITUDE, SIGN)
        or (operator.op == TWO_SIDED and operator.exponent in _CLOSED_FORMS)
    )


def forward(
    x: Tensor, k: Tensor, k_stride: int, lam: Tensor, lam_stride: int, operator: Operator
) -> tuple[Tensor, Tensor]:
    """The output, and the state (m, 2); k and lam are float64, with stride 0 if one serves all rows."""
    n = x.shape[-1]
    m = x.numel() // n
    y, state = torch.empty_like(x), x.new_empty((m, 2), dtype=torch.float64)
    native.threshold_forward(
        *operator,
        DTYPES[x.dtype],
        m,
        n,
        n,
        x.data_ptr(),
        k.data_ptr(),
        k_stride,
        lam.data_ptr(),
        lam_stride,
        state.data_ptr(),
        y.data_ptr(),
        torch.get_num_threads(),
    )
    return y, state


def backward(
    x: Tensor,
    g: Tensor,
    state: Tensor,
    k: Tensor,
    k_stride: int,
    lam: Tensor,
    lam_stride: int,
    operator: Operator,
    in_k: bool,
    in_lam: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The cotangents of x, and of k and lam (m) where they are wanted."""
    n = x.shape[-1]
    m = x.numel() // n
    dx = torch.empty_like(x)
    dk = state.new_empty(m) if in_k else None
    dlam = state.new_empty(m) if in_lam else None
    native.threshold_backward(
        *operator,
        DTYPES[x.dtype],
        m,
        n,
        n,
        x.data_ptr(),
        k.data_ptr(),
        k_stride,
        lam.data_ptr(),
        lam_stride,
        state.data_ptr(),
        g.data_ptr(),
        dx.data_ptr(),
        0 if dk is None else dk.data_ptr(),
        0 if dlam is None else dlam.data_ptr(),
        torch.get_num_threads(),
    )
    return dx, dk, dlam


def loss(
    x: Tensor,
    t: Tensor | None,
    ignored: int,
    spread: bool,
    k: Tensor,
    k_stride: int,
    lam: Tensor,
    lam_stride: int,
    operator: Operator,
) -> tuple[Tensor, Tensor, int, float]:
    """y - t, f(x, 1_k) - <x, t> of every row (m) in float64, how many rows count, and their sum.

    ``t`` are labels (m) in int64, weights (m, n) in float64, or nothing; with ``spread``, labels are
    filled up to a sum of k, and R(t) is added. A label that is no class is reported by the number
    -1 - row.
    """
    n = x.shape[-1]
    m = x.numel() // n
    residual, values = torch.empty_like(x), x.new_empty(m, dtype=torch.float64)
    state = values.new_empty((m, 2))
    labels = t is not None and t.dtype == torch.int64
    address = 0 if t is None else t.data_ptr()
    count, total = native.threshold_loss(
        *operator,
        DTYPES[x.dtype],
        m,
        n,
        n,
        x.data_ptr(),
        k.data_ptr(),
        k_stride,
        lam.data_ptr(),
        lam_stride,
        state.data_ptr(),
        address if labels else 0,
        ignored,
        spread,
        0 if labels else address,
        residual.data_ptr(),
        values.data_ptr(),
        torch.get_num_threads(),
    )
    return residual, values, count, total


def select(y: Tensor, capacity: int) -> Tensor:
    """The indices (m, capacity) of the entries of y (m, n) with the largest magnitudes, in order."""
    m, n = y.shape
    indices = y.new_empty((m, capacity), dtype=torch.int64)
    native.select_slots(DTYPES[y.dtype], m, n, y.data_ptr(), capacity, indices.data_ptr())
    return indices
