"""The Fenchel-Young loss by the compiled kernel: one call gives the loss of every row and its gradient,
for plain CPU tensors."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._maths.operator import Operator
from ..._maths.value import reduced
from ..._types import Completion, Reduction
from .._private import keeps_graph
from .._rows.arguments import Number, Rows, is_plain
from . import kernels, traced
from . import rows as fused


def takes(rows: Rows, k: Number, lam: Number, operator: Operator, *others: Tensor | None) -> bool:
    """Whether the kernel can be called, and no derivative but that in x is wanted."""
    if rows.simple and not others:
        return kernels.has(operator)
    return (
        kernels.has(operator)
        and is_plain(rows.x, k, lam, *others)
        and not (torch.is_grad_enabled() and fused.requires_grad(k, lam, *others))
    )


def takes_traced(
    rows: Rows, k: Number, lam: Number, operator: Operator, *others: Tensor | None
) -> bool:
    """The same where a graph is traced: whether the operator of the loss can stand in it."""
    return (
        kernels.has(operator)
        and traced.takes(rows.x, k, lam, *others)
        and not fused.requires_grad(k, lam, *others)
    )


class Call(NamedTuple):
    """What is asked besides x: all of it without a derivative."""

    dim: int
    t: Tensor  # labels (m), or weights (m, n)
    k: Number
    lam: Number
    operator: Operator
    completion: Completion | None  # "spread" with labels only
    ignored: int  # the label of rows that do not count
    added: Tensor | None  # to the loss of every row, (m)
    weights: Tensor | None  # of the rows, (m)
    reduction: Reduction


def loss_of(x: Tensor, call: Call) -> Tensor:
    """The reduced loss."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _Loss.apply(x, call)  # type: ignore[no-untyped-call]
    return forward(x, call).loss


class Found(NamedTuple):
    loss: Tensor
    residual: Tensor  # the gradient of every row, with the classes last, without a factor
    factor: Tensor | float
    applied: float  # but this one, which the residual has already


def _factor(weights: Tensor | None, count: int, reduction: Reduction) -> Tensor | float:
    """What the gradient of each row is multiplied by, for this reduction: 0 where no row counts."""
    if weights is not None:
        total = weights.sum() if reduction == "mean" else weights.new_ones(())
        return weights / total.masked_fill(total == 0, 1.0)
    if reduction == "mean":
        return 1.0 / count if count else 0.0
    return 1.0


def forward(x: Tensor, call: Call, applies: bool = False) -> Found:
    """The loss, the gradient of every row, and its factor, which the core ``applies`` where it can."""
    rows, t = Rows("logits", x, call.dim), call.t
    data = fused.contiguous(x, call.dim)
    k, lam = fused.numbers(rows, call.k), fused.numbers(rows, call.lam)
    spread, best = call.completion == "spread", call.completion == "best"
    # In 16 bits a gradient that is over the number of rows may be too small for a factor that follows.
    mean = applies and not best and call.weights is None and call.reduction == "mean"
    mean = mean and x.dtype.itemsize >= 4
    residual, found, count, total = kernels.loss(
        data, t.contiguous(), call.ignored, spread, k, lam, call.operator, mean
    )
    if count < 0:
        raise ValueError(
            f"targets must be class indices in [0, {rows.n}), got {t[-1 - count].item():g}"
        )
    factor, applied = _factor(call.weights, count, call.reduction), 1.0
    if mean and count:
        factor, applied = 1.0, 1.0 / count
    if call.added is None and not best and isinstance(factor, float) and call.reduction != "none":
        none = call.reduction == "mean" and not count  # the mean of no rows is NaN
        value = math.nan if none else applied * factor * total
        return Found(_scalar(x, value), residual, factor, applied)
    values = found[0].clone()
    if best:
        others = _others(rows, call)
        left = fused.numbers(others, _left(rows, call))
        y, of_others, _, _ = kernels.loss(
            others.x.contiguous(), None, 0, False, left, lam, call.operator
        )
        residual -= y.reshape(residual.shape)
        values += _ones(rows, call) - of_others[0]
    if call.added is not None:
        values += call.added
    loss = reduced(torch, values, call.weights, count, call.reduction)
    return Found(loss, residual, factor, applied)


def _scalar(x: Tensor, value: float) -> Tensor:
    """One number like x: in half the time where it surely fits, as what overflows is not filled in."""
    if x.dtype.itemsize >= 4 and abs(value) < 1e38:
        return x.new_full((), value)
    return torch.tensor(value, dtype=x.dtype, device="cpu")


def _labels(t: Tensor) -> Tensor | float:
    """How many there are in each row, (m, 1)."""
    return 1.0 if t.dtype == torch.int64 else t.sum(dim=-1, keepdim=True)


def _left(rows: Rows, call: Call) -> Tensor:
    """The part of k that the labels leave to others, (m, 1)."""
    return (rows.per_row(call.k) - _labels(call.t)).clamp_min(0.0)


def _ones(rows: Rows, call: Call) -> Tensor:
    """R of the labels alone, (m)."""
    p = 1.0 + 1.0 / call.operator.exponent
    return (_labels(call.t) * rows.per_row(call.lam) / p)[:, 0]


def _others(rows: Rows, call: Call) -> Rows:
    """The logits (m, n) with padding in the place of labels."""
    if call.t.dtype == torch.int64:
        at = call.t.clamp(0, rows.n - 1).unsqueeze(-1)  # also for rows that are ignored
        return Rows(rows.name, rows.data.scatter(-1, at, -torch.inf), 1)
    return Rows(rows.name, torch.where(call.t > 0, -torch.inf, rows.data), 1)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Call) -> Tensor:
        loss, residual, ctx.factor, ctx.applied = forward(x, call, True)
        ctx.save_for_backward(x, residual)
        ctx.call = call
        return loss

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        x, residual = ctx.saved_tensors
        rows, factor = Rows("logits", x, ctx.call.dim), ctx.factor
        last = is_plain(g) and not keeps_graph()  # y - t is not needed again, and its memory serves
        if torch.is_grad_enabled():
            residual, last = residual + ctx.applied * moving(rows, ctx.call), False
        elif last and not g.ndim and type(factor) is float:  # in most calls 1
            factor *= g.item()
            found = residual if factor == 1.0 else residual.mul_(factor)
            return fused.restore(rows, found), None
        return backward(rows, residual, factor, g, last), None


def backward(rows: Rows, residual: Tensor, factor: Any, g: Tensor, last: bool = False) -> Tensor:
    """The cotangent of x, given that of the loss; in the place of the residual where it is the last."""
    wide = torch.float64 if residual.dtype == torch.float64 else torch.float32
    factor = (g.to(wide) * factor).to(wide)
    if factor.ndim:
        factor = factor.reshape((*residual.shape[:-1], 1))
    found = residual.mul_(factor) if last else (residual * factor).to(residual.dtype)
    return fused.restore(rows, found)


def moving(rows: Rows, call: Call) -> Tensor:
    """A zero that moves with x as y - t does, with the classes last."""
    y = fused.contiguous(fused.evaluate(rows, call.k, call.lam, call.operator), call.dim)
    if call.completion == "best":
        left, lam = _left(rows, call), rows.per_row(call.lam)
        others = fused.evaluate(_others(rows, call), left, lam, call.operator)
        y = y - others.reshape(y.shape)
    if call.t.dtype == torch.int64:
        y = y * (call.t != call.ignored).reshape((*y.shape[:-1], 1))
    return y - y.detach()


def one_hot(t: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Labels (m) as weights (m, n), all 0 for one that is no class; weights as they are."""
    if t.dtype == torch.int64:
        t = t.reshape(-1, 1) == torch.arange(n, device=t.device)
    return t.to(dtype)
