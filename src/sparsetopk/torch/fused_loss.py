"""The Fenchel-Young loss by the compiled kernel: one call gives the loss of every row and its gradient,
for plain CPU tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._types import Reduction
from . import fused, kernels
from .arguments import Number, Rows, is_plain
from .kernels import Operator


def takes(rows: Rows, k: Number, lam: Number, operator: Operator, *others: Tensor | None) -> bool:
    """Whether the kernel can be called, and no derivative but that in x is wanted."""
    return (
        fused.takes(rows, k, lam, operator)
        and is_plain(*others)
        and not (torch.is_grad_enabled() and fused.requires_grad(k, lam, *others))
    )


def evaluate(
    rows: Rows,
    t: Tensor,
    k: Number,
    lam: Number,
    operator: Operator,
    ignored: int,
    added: Tensor | None,
    weights: Tensor | None,
    reduction: Reduction,
) -> Tensor:
    """The reduced loss in float64 for labels (m) or weights (m, n) as targets, with a constant added to
    every row and a weight for each."""
    arguments = (k, lam, operator, ignored, added, weights, reduction)
    if torch.is_grad_enabled() and rows.x.requires_grad:
        return _Loss.apply(rows.x, rows.name, rows.dim, t, *arguments)  # type: ignore[no-untyped-call]
    return _forward(rows, t, *arguments)[0]


def reduce(
    values: Tensor, weights: Tensor | None, count: int | Tensor, reduction: Reduction
) -> tuple[Tensor, Tensor | float]:
    """The rows put together, and by what each was multiplied. Rows with weight 0 do not count."""
    if weights is not None:
        values = torch.where(weights == 0, 0.0, values * weights)
        count = weights.sum()
    if reduction == "none":
        return values, 1.0 if weights is None else weights
    total = values.sum()
    if reduction == "sum":
        return total, 1.0 if weights is None else weights
    if weights is None:  # no row: 0/0
        return total / count, 1.0 / count if count else torch.nan
    return total / count, weights / count


def _forward(
    rows: Rows,
    t: Tensor,
    k: Number,
    lam: Number,
    operator: Operator,
    ignored: int,
    added: Tensor | None,
    weights: Tensor | None,
    reduction: Reduction,
) -> tuple[Tensor, Tensor | float, Tensor]:
    """The loss, the factor of every row, and y - t."""
    x = fused.contiguous(rows.x.detach(), rows.dim)
    numbers = *fused.numbers(rows, k), *fused.numbers(rows, lam)
    residual, values, count = kernels.loss(x, t, ignored, *numbers, operator)
    if count < 0:
        raise ValueError(
            f"targets must be class indices in [0, {rows.n}), got {t[-1 - count].item():g}"
        )
    if added is not None:
        values += added
    return *reduce(values, weights, count, reduction), residual


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        name: str,
        dim: int,
        t: Tensor,
        k: Number,
        lam: Number,
        operator: Operator,
        ignored: int,
        *rest: Any,
    ) -> Tensor:
        loss, factor, residual = _forward(Rows(name, x, dim), t, k, lam, operator, ignored, *rest)
        ctx.save_for_backward(x, residual, t)
        ctx.name, ctx.dim, ctx.factor, ctx.ignored = name, dim, factor, ignored
        ctx.operator = k, lam, operator
        return loss

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, residual, t = ctx.saved_tensors
        rows = Rows(ctx.name, x, ctx.dim)
        if torch.is_grad_enabled():  # y - t again, of the live x
            y = fused.contiguous(fused.evaluate(rows, *ctx.operator), ctx.dim)
            residual = y - one_hot(t, y)
            if t.dtype == torch.int64:
                counted = (t != ctx.ignored).to(y.dtype)
                residual = residual * counted.reshape((*y.shape[:-1], 1))
        factor = g * ctx.factor
        if factor.ndim:
            factor = factor.reshape((*residual.shape[:-1], 1)).to(residual.dtype)
        return (fused.restore(rows, residual * factor), *(None,) * 10)


def one_hot(t: Tensor, like: Tensor) -> Tensor:
    """Labels (m) as weights in the shape of ``like``, which has the classes last; weights as they are."""
    if t.dtype == torch.int64:
        t = t.reshape(-1, 1) == torch.arange(like.shape[-1], device=t.device)
    return t.to(like.dtype).reshape(like.shape)
