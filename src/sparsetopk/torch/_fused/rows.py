"""The top-k family by the compiled kernels: one pass forward, one backward, for plain CPU tensors.

The kernels take addresses. What they solved is saved as two numbers per row; where the backward is
itself differentiated, it is written again in ordinary operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._maths.operator import Operator
from .._rows.arguments import Number, Rows, is_ordinary, is_plain, is_transformed
from .._rows.differentiable import from_state
from . import kernels
from .kernels import Numbers


def takes(rows: Rows, k: Number, lam: Number, operator: Operator) -> bool:
    """Whether there is a kernel for the operator, and the tensors are such that it can be called."""
    return (rows.simple or is_plain(rows.x, k, lam)) and kernels.has(operator)


def evaluate(rows: Rows, k: Number, lam: Number, operator: Operator) -> Tensor:
    """The operator, for checked arguments."""
    x, simple = rows.x, rows.simple
    if torch.is_grad_enabled() and (x.requires_grad or (not simple and requires_grad(k, lam))):
        return with_backward(rows, k, lam, operator, _WAY)
    if simple:
        return kernels.output(x, constant(k), constant(lam), operator)
    x = contiguous(x, rows.dim)
    return _own(rows, kernels.output(x, numbers(rows, k), numbers(rows, lam), operator))


def requires_grad(*values: object) -> bool:
    # Part of every call: a loop takes a third of the time, and the type is asked for first.
    for value in values:
        if type(value) is not float and isinstance(value, Tensor) and value.requires_grad:
            return True
    return False


@lru_cache(maxsize=1024)
def constant(value: float) -> Numbers:
    """A k or lam that is one number for all rows."""
    return Numbers.of(torch.tensor(value, dtype=torch.float64, device="cpu"), None)


def numbers(rows: Rows, value: Number) -> Numbers:
    """A checked k or lam for the core."""
    if type(value) is float or not isinstance(value, Tensor):
        return constant(float(value))
    value = value.detach()
    if value.numel() == 1:
        return Numbers.of(value.to(torch.float64), None)
    return Numbers.of(rows.per_row(value).contiguous(), rows.x.numel() // rows.n)


def rows_last(x: Tensor, dim: int) -> Tensor:
    return x if dim == x.ndim - 1 else x.movedim(dim, -1)


def contiguous(x: Tensor, dim: int) -> Tensor:
    """The dimension last, and rows behind each other."""
    return rows_last(x, dim).contiguous()


def restore(rows: Rows, y: Tensor) -> Tensor:
    return y if rows.dim == y.ndim - 1 else y.movedim(-1, rows.dim)


def _own(rows: Rows, y: Tensor) -> Tensor:
    """As ``restore``, but no view to autograd, which would let nobody change it in place."""
    return y if rows.dim == y.ndim - 1 else y.movedim(-1, rows.dim).data


def forward(rows: Rows, k: Number, lam: Number, operator: Operator) -> tuple[Tensor, Tensor]:
    """The output, and the state (m, 2)."""
    x = contiguous(rows.x, rows.dim)
    y, state = kernels.forward(x, numbers(rows, k), numbers(rows, lam), operator)
    return _own(rows, y), state


class Way(NamedTuple):
    """How an operator is computed: ``forward`` and ``backward`` as they are here."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor | None, ...]]


def with_backward(rows: Rows, k: Number, lam: Number, operator: Operator, way: Way) -> Tensor:
    asked = rows.name, rows.dim, operator, way  # in one, as each argument costs
    return _Fused.apply(rows.x, k, lam, asked)  # type: ignore[no-untyped-call]


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, k: Number, lam: Number, asked: tuple[str, int, Operator, Way]
    ) -> Tensor:
        name, dim, operator, way = asked
        y, state = way.forward(Rows(name, x, dim), k, lam, operator)
        tensors = [v for v in (k, lam) if isinstance(v, Tensor)]
        ctx.save_for_backward(x, state, *tensors)
        ctx.numbers = (
            [None if isinstance(v, Tensor) else v for v in (k, lam)] if tensors else (k, lam)
        )
        ctx.asked = asked
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, state, *tensors = ctx.saved_tensors
        k, lam = ctx.numbers
        if tensors:
            k, lam = (tensors.pop(0) if v is None else v for v in (k, lam))
        name, dim, operator, way = ctx.asked
        once = not torch.is_grad_enabled() and is_ordinary(g) and not is_transformed()
        derivative = way.backward if once else differentiable_backward
        wanted = ctx.needs_input_grad[:3]
        return (*derivative(Rows(name, x, dim), k, lam, g, state, operator, wanted), None)


def backward(
    rows: Rows,
    k: Number,
    lam: Number,
    g: Tensor,
    state: Tensor,
    operator: Operator,
    wanted: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """The cotangents of x, k and lam."""
    x, g = contiguous(rows.x, rows.dim), contiguous(g, rows.dim)
    k_and_lam = numbers(rows, k), numbers(rows, lam)
    dx, dk, dlam = kernels.backward(x, g, state, *k_and_lam, operator, *wanted[1:])
    return (restore(rows, dx) if wanted[0] else None, rows.sum_to(dk, k), rows.sum_to(dlam, lam))


_WAY = Way(forward, backward)


def _alias(value: Number) -> Number:
    return value.view_as(value) if isinstance(value, Tensor) else value


def differentiable_backward(
    rows: Rows,
    k: Number,
    lam: Number,
    g: Tensor,
    state: Tensor,
    operator: Operator,
    wanted: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """The same with a graph, or for a g that is batched."""

    def live(x: Tensor, k: Number, lam: Number) -> Tensor:
        at = Rows(rows.name, x, rows.dim)
        k_rows, lam_rows = at.per_row(k), at.per_row(lam)
        may_be_hard = isinstance(lam, Tensor) or lam == 0
        return at.restore(from_state(at, k_rows, lam_rows, state, operator, may_be_hard).y())

    return cotangents(live, (rows.x, k, lam), g, wanted)


def cotangents(
    live: Callable[..., Tensor], inputs: Sequence[Number], g: Tensor, wanted: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Those of the inputs by autograd, with a graph if one is wanted. An input may depend on another
    one, so derivatives are taken at aliases."""
    graph = torch.is_grad_enabled()
    with torch.enable_grad():
        aliases = [_alias(v) for v in inputs]
        at = [v for v, w in zip(aliases, wanted, strict=True) if w]
        found = iter(torch.autograd.grad(live(*aliases), at, g, create_graph=graph))  # type: ignore[arg-type]
    return tuple(next(found) if w else None for w in wanted)
