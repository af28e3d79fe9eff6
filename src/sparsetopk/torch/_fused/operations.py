"""The top-k family in ordinary operations, on devices that have no kernels: as few as it takes, with x
and two numbers per row kept for the backward."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._maths.operator import Operator
from .._private import is_tracing
from .._rows.arguments import Number, Rows, compute_dtype, is_ordinary, is_transformed
from .._rows.differentiable import from_state, is_hard, solved
from .._rows.namespace import LOOKS_NEVER as xp
from .rows import Way, requires_grad, with_backward


def takes(rows: Rows, k: Number, lam: Number) -> bool:
    """Whether nobody asks for more than a backward, as graphs and ``torch.func`` may."""
    if torch.compiler.is_compiling() or is_tracing() or is_transformed():
        return False
    return all(is_ordinary(v) for v in (rows.x, k, lam) if isinstance(v, Tensor))


def evaluate(rows: Rows, k: Number, lam: Number, operator: Operator) -> Tensor:
    """The operator, for checked arguments that it ``takes``; there must be at least one entry."""
    if torch.is_grad_enabled() and (rows.x.requires_grad or requires_grad(k, lam)):
        return with_backward(rows, k, lam, operator, Way(_forward, _backward))
    return _forward(rows, k, lam, operator)[0]


def _forward(rows: Rows, k: Number, lam: Number, operator: Operator) -> tuple[Tensor, Tensor]:
    hard = is_hard(lam)
    x, k_rows, lam_rows = (v.detach() for v in (rows.data, _count(rows, k), rows.per_row(lam)))
    state = solved(x, k_rows, lam_rows, operator, hard)
    if hard is False and operator.phi(xp).straight:
        y = _mask(x.to(lam_rows.dtype), k_rows, lam_rows, state, operator)
    else:
        rows = Rows(rows.name, rows.x.detach(), rows.dim)
        y = from_state(rows, k_rows, lam_rows, state, operator, hard is not False).y()
    return rows.restore(y), state


def _count(rows: Rows, k: Number) -> Tensor:
    """k (m, 1); an integer, if it is whole, in rows so long that float32 cannot count in them."""
    whole = not k.is_floating_point() if isinstance(k, Tensor) else float(k).is_integer()
    counts = rows.n > 1 << 24 and compute_dtype(rows.x) == torch.float32
    return rows.per_row(k, torch.int64 if counts and whole else None)


def _mask(x: Tensor, k: Tensor, lam: Tensor, state: Tensor, operator: Operator) -> Tensor:
    """``Relaxed.y`` for straight phi and lam > 0, without what derivatives need."""
    reg, even = operator.reg(xp), operator.phi(xp).even
    a, pivot, delta = x.abs() if even else x, state[:, :1], state[:, 1:]
    if not even:  # a pivot at +inf, with a number of entries there that share k
        delta = torch.where(pivot == torch.inf, k / delta.clamp(min=1.0) + reg.zero, delta)
    # An entry at the pivot may be infinite too: of +inf it has the share, of -inf nothing.
    t = torch.where(a == pivot, delta, (a - pivot) / lam + delta)
    y = reg.response(t.clamp(reg.zero, 1.0))
    return torch.where(x < 0, -y, y) if even else y


def _backward(
    rows: Rows,
    k: Number,
    lam: Number,
    g: Tensor,
    state: Tensor,
    operator: Operator,
    wanted: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    k_rows, lam_rows = _count(rows, k), rows.per_row(lam)
    may_be_hard = is_hard(lam) is not False
    at = from_state(rows, k_rows, lam_rows, state, operator, may_be_hard).at
    dx, dk, dlam = at.cotangent(rows.tangent(g).to(lam_rows.dtype))
    # A slope that the dtype of x cannot hold is its largest number; for p > 2, next to 0, none can.
    if dx.dtype != g.dtype or operator.exponent < 1.0:
        limit = torch.finfo(g.dtype).max
        dx = dx.clamp(-limit, limit)
    dk, dlam = (
        rows.sum_to(v, of) if w else None
        for v, of, w in zip((dk, dlam), (k, lam), wanted[1:], strict=True)
    )
    return rows.restore(dx) if wanted[0] else None, dk, dlam
