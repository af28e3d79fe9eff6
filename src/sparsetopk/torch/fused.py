"""The top-k family by the compiled kernels: one pass forward, one backward, for plain CPU tensors.

The kernels take addresses. What they solved is saved as two numbers per row; where the backward is
itself differentiated, it is written again in ordinary operations.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .arguments import Number, Rows, is_plain
from .differentiable import from_state
from .vectorized import MAGNITUDE, MASK, SIGN, TWO_SIDED

try:
    from .. import _core
except ImportError:  # pragma: no cover - a platform without the compiled core
    _core = None  # type: ignore[assignment]

_DTYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
_CLOSED_FORMS = (1.0, 2.0, 3.0)


class Operator(NamedTuple):
    """What the kernels are told about the operator."""

    op: int
    exponent: float
    debias: bool


def takes(rows: Rows, k: Number, lam: Number, operator: Operator) -> bool:
    """Whether there is a kernel for the operator, and the tensors are such that it can be called."""
    return (
        not torch.compiler.is_compiling()
        and _core is not None
        and hasattr(_core, "threshold_forward")
        and (
            operator.op in (MASK, MAGNITUDE, SIGN)
            or (operator.op == TWO_SIDED and operator.exponent in _CLOSED_FORMS)
        )
        and is_plain(rows.x, k, lam)
    )


def evaluate(rows: Rows, k: Number, lam: Number, operator: Operator) -> Tensor:
    """The operator, for checked arguments."""
    if torch.is_grad_enabled() and (rows.x.requires_grad or _requires_grad(k, lam)):
        return _Fused.apply(rows.x, k, lam, rows.name, rows.dim, operator)  # type: ignore[no-untyped-call]
    return _forward(rows, k, lam, operator)[0]


def _requires_grad(*values: Number) -> bool:
    return any(isinstance(value, Tensor) and value.requires_grad for value in values)


@lru_cache(maxsize=1024)
def _constant(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _numbers(rows: Rows, value: Number) -> tuple[Tensor, int]:
    """float64 numbers that the caller keeps alive, and the stride between those of two rows."""
    if not isinstance(value, Tensor):
        return _constant(float(value)), 0
    value = value.detach()
    if value.numel() == 1:
        return value.to(torch.float64), 0
    return rows.per_row(value).contiguous(), 1


def _contiguous(x: Tensor, dim: int) -> Tensor:
    """The dimension last, and rows behind each other."""
    return (x if dim == x.ndim - 1 else x.movedim(dim, -1)).contiguous()


def _restore(rows: Rows, y: Tensor) -> Tensor:
    return y if rows.dim == y.ndim - 1 else y.movedim(-1, rows.dim)


def _forward(rows: Rows, k: Number, lam: Number, operator: Operator) -> tuple[Tensor, Tensor]:
    """The output, and the state (m, 2)."""
    x, n = _contiguous(rows.x.detach(), rows.dim), rows.n
    m = x.numel() // n
    y, state = torch.empty_like(x), x.new_empty((m, 2), dtype=torch.float64)
    (k_, k_stride), (lam_, lam_stride) = _numbers(rows, k), _numbers(rows, lam)
    _core.threshold_forward(
        *operator,
        _DTYPES[x.dtype],
        m,
        n,
        x.data_ptr(),
        k_.data_ptr(),
        k_stride,
        lam_.data_ptr(),
        lam_stride,
        y.data_ptr(),
        state.data_ptr(),
        torch.get_num_threads(),
    )
    return _restore(rows, y), state


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, k: Number, lam: Number, name: str, dim: int, operator: Operator
    ) -> Tensor:
        y, state = _forward(Rows(name, x, dim), k, lam, operator)
        ctx.save_for_backward(x, state, *(v for v in (k, lam) if isinstance(v, Tensor)))
        ctx.numbers = tuple(None if isinstance(v, Tensor) else v for v in (k, lam))
        ctx.name, ctx.dim, ctx.operator = name, dim, operator
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, state, *tensors = ctx.saved_tensors
        k, lam = (tensors.pop(0) if v is None else v for v in ctx.numbers)
        wanted = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():
            found = _differentiable_backward(
                x, k, lam, g, state, ctx.name, ctx.dim, ctx.operator, wanted
            )
        else:
            found = _backward(Rows(ctx.name, x, ctx.dim), k, lam, g, state, ctx.operator, wanted)
        return (*found, None, None, None)


def _backward(
    rows: Rows,
    k: Number,
    lam: Number,
    g: Tensor,
    state: Tensor,
    operator: Operator,
    wanted: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """The cotangents of x, k and lam."""
    x, g, n = _contiguous(rows.x, rows.dim), _contiguous(g, rows.dim), rows.n
    m = x.numel() // n
    dx = torch.empty_like(x)
    dk, dlam = (state.new_empty(m) if w else None for w in wanted[1:])
    (k_, k_stride), (lam_, lam_stride) = _numbers(rows, k), _numbers(rows, lam)
    _core.threshold_backward(
        *operator,
        _DTYPES[x.dtype],
        m,
        n,
        x.data_ptr(),
        g.data_ptr(),
        state.data_ptr(),
        k_.data_ptr(),
        k_stride,
        lam_.data_ptr(),
        lam_stride,
        dx.data_ptr(),
        0 if dk is None else dk.data_ptr(),
        0 if dlam is None else dlam.data_ptr(),
        torch.get_num_threads(),
    )
    return (_restore(rows, dx) if wanted[0] else None, rows.sum_to(dk, k), rows.sum_to(dlam, lam))


def _alias(value: Number) -> Number:
    return value.view_as(value) if isinstance(value, Tensor) else value


def _differentiable_backward(
    x: Tensor,
    k: Number,
    lam: Number,
    g: Tensor,
    state: Tensor,
    name: str,
    dim: int,
    operator: Operator,
    wanted: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """The same with a graph: k or lam may depend on x, so derivatives are taken at aliases."""
    x, k, lam = x.view_as(x), _alias(k), _alias(lam)
    rows, op = Rows(name, x, dim), operator.op
    may_be_hard = isinstance(lam, Tensor) or lam == 0
    solved = from_state(
        rows, rows.per_row(k), rows.per_row(lam), state, op, operator.exponent, may_be_hard
    )
    y = rows.restore(solved.magnitude(operator.debias) if op == MAGNITUDE else solved.mask())
    inputs = [v for v, w in zip((x, k, lam), wanted, strict=True) if w and isinstance(v, Tensor)]
    found = iter(torch.autograd.grad(y, inputs, g, create_graph=True))
    return tuple(next(found) if w else None for w in wanted)
