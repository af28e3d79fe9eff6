"""The Fenchel-Young loss by the compiled kernel: one call gives the loss of every row and its gradient,
for plain CPU tensors."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._types import Reduction
from . import fused, kernels
from .arguments import Number, Rows, is_plain
from .kernels import Operator


def takes(rows: Rows, k: Number, lam: Number, operator: Operator, *others: Tensor | None) -> bool:
    """Whether the kernel can be called, and no derivative but that in x is wanted."""
    return (
        kernels.has(operator)
        and is_plain(rows.x, k, lam, *others)
        and not (torch.is_grad_enabled() and fused.requires_grad(k, lam, *others))
    )


class Call(NamedTuple):
    """What is asked besides x: all of it without a derivative."""

    name: str
    dim: int
    t: Tensor  # labels (m), or weights (m, n)
    k: Number
    lam: Number
    operator: Operator
    ignored: int  # the label of rows that do not count
    added: Tensor | None  # to the loss of every row, (m)
    weights: Tensor | None  # of the rows, (m)
    reduction: Reduction


def evaluate(x: Tensor, call: Call) -> Tensor:
    """The reduced loss."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _Loss.apply(x, call)  # type: ignore[no-untyped-call]
    return _forward(x, call)[0]


def reduce(values: Tensor, weights: Tensor | None, count: int, reduction: Reduction) -> Tensor:
    """The losses (m) of the rows put together; rows with weight 0 do not count."""
    if weights is not None:
        values = torch.where(weights == 0, 0.0, values * weights)
    if reduction == "none":
        return values
    total = values.sum()
    if reduction == "sum":
        return total
    return total / (count if weights is None else weights.sum())


def _factor(weights: Tensor | None, count: int, reduction: Reduction) -> Tensor | float:
    """By what the rows are multiplied then; in the mean of no rows by 0/0."""
    if weights is not None:
        return weights / weights.sum() if reduction == "mean" else weights
    if reduction == "mean":
        return 1.0 / count if count else math.nan
    return 1.0


def _forward(x: Tensor, call: Call) -> tuple[Tensor, Tensor | float, Tensor]:
    """The loss, the factor of every row, and y - t with the classes last."""
    rows, t, added, weights = Rows(call.name, x, call.dim), call.t, call.added, call.weights
    data = fused.contiguous(x.detach(), call.dim)
    numbers = *fused.numbers(rows, call.k), *fused.numbers(rows, call.lam)
    residual, values, count, total = kernels.loss(
        data, t.contiguous(), call.ignored, *numbers, call.operator
    )
    if count < 0:
        raise ValueError(
            f"targets must be class indices in [0, {rows.n}), got {t[-1 - count].item():g}"
        )
    factor = _factor(weights, count, call.reduction)
    if added is None and isinstance(factor, float) and call.reduction != "none":
        return x.new_full((), factor * total), factor, residual
    if added is not None:
        values += added
    return reduce(values, weights, count, call.reduction), factor, residual


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Call) -> Tensor:
        loss, ctx.factor, residual = _forward(x, call)
        ctx.save_for_backward(x, residual)
        ctx.call = call
        return loss

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        x, residual = ctx.saved_tensors
        rows = Rows(ctx.call.name, x, ctx.call.dim)
        last = not torch._C._autograd._get_current_graph_task_keep_graph() and is_plain(g)
        if torch.is_grad_enabled():
            residual, last = _live_residual(rows, ctx.call), False
        wide = torch.float64 if residual.dtype == torch.float64 else torch.float32
        factor = (g.to(wide) * ctx.factor).to(wide)
        if factor.ndim:
            factor = factor.reshape((*residual.shape[:-1], 1))
        if last:  # nobody will ask for y - t again
            return fused.restore(rows, residual.mul_(factor)), None
        return fused.restore(rows, (residual * factor).to(residual.dtype)), None


def _live_residual(rows: Rows, call: Call) -> Tensor:
    """y - t once more, with a derivative in x."""
    y = fused.contiguous(fused.evaluate(rows, call.k, call.lam, call.operator), call.dim)
    residual = y - one_hot(call.t, rows.n, y.dtype).reshape(y.shape)
    if call.t.dtype != torch.int64:
        return residual
    return residual * (call.t != call.ignored).reshape((*y.shape[:-1], 1))


def one_hot(t: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Labels (m) as weights (m, n), all 0 for one that is no class; weights as they are."""
    if t.dtype == torch.int64:
        t = t.reshape(-1, 1) == torch.arange(n, device=t.device)
    return t.to(dtype)
