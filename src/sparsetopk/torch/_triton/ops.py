"""The kernels as operators of torch: eager, traced, exported and compiled, with their backward.

Rows x (m, n) are contiguous; k and lam are numbers, or tensors (1, 1) or (m, 1). A schema has no place
for both, so that each is a tensor or None, and a number beside it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._maths.operator import Operator
from .._fused.rows import cotangents
from .._rows.arguments import Number, Rows, is_transformed
from .._rows.differentiable import from_state
from .._rows.product import times
from . import state
from .state import NUMBERS, either

_OPERATOR = "int op, float exponent, bool debias, bool times"
_library = torch.library.Library("sparsetopk", "FRAGMENT")
_library.define(f"rows_forward(Tensor x, {NUMBERS}, {_OPERATOR}) -> (Tensor, Tensor)")
_library.define(
    f"rows_backward(Tensor x, Tensor g, Tensor state, {NUMBERS}, {_OPERATOR}, bool in_k, bool in_lam)"
    " -> (Tensor, Tensor, Tensor)"
)


def takes(rows: Rows, operator: Operator) -> bool:
    """Whether there is a kernel for the rows, and nobody asks for more than a backward."""
    served = state.is_served(rows.x)  # first, as it is part of every call
    return served and state.takes(rows.x, rows.n, operator) and not is_transformed()


def evaluate(rows: Rows, k: Number, lam: Number, operator: Operator, times: bool) -> Tensor:
    """The operator, or with ``times`` the mask times x, for checked arguments that it ``takes``."""
    x = rows.data.contiguous()
    numbers = (*given(rows, k), *given(rows, lam))
    y, _ = torch.ops.sparsetopk.rows_forward(x, *numbers, *operator, times)
    return rows.unflatten(y)


def given(rows: Rows, value: Number) -> tuple[Tensor | None, float]:
    """k or lam as the operators take it."""
    if not isinstance(value, Tensor):
        return None, float(value)
    if value.numel() == 1:
        return value.to(rows.x.device).reshape(1, 1), 0.0
    return rows.per_row(value, value.dtype).contiguous(), 0.0


def _forward(
    x: Tensor,
    k: Tensor | None,
    k_number: float,
    lam: Tensor | None,
    lam_number: float,
    op: int,
    exponent: float,
    debias: bool,
    times: bool,
) -> tuple[Tensor, Tensor]:
    from . import launch

    operator = Operator(op, exponent, debias)
    return launch.forward(x, either(k, k_number), either(lam, lam_number), operator, times=times)


def _backward(
    x: Tensor,
    g: Tensor,
    state: Tensor,
    k: Tensor | None,
    k_number: float,
    lam: Tensor | None,
    lam_number: float,
    op: int,
    exponent: float,
    debias: bool,
    times: bool,
    in_k: bool,
    in_lam: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from . import launch

    return launch.backward(
        x,
        g.contiguous(),
        state,
        either(k, k_number),
        either(lam, lam_number),
        Operator(op, exponent, debias),
        times=times,
        in_k=in_k,
        in_lam=in_lam,
    )


def _forward_meta(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), state.meta(x, Operator(*rest[4:7]))


def _backward_meta(
    x: Tensor, g: Tensor, state: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    m = x.shape[0]
    dk, dlam = (state.new_empty(m if wanted else 0) for wanted in rest[-2:])
    return torch.empty_like(x), dk, dlam


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, k, ctx.k_number, lam, ctx.lam_number, op, exponent, debias, ctx.times = inputs
    ctx.operator = Operator(op, exponent, debias)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # no zeros for the state
    ctx.save_for_backward(x, output[1], k, lam)


def _differentiate(ctx: Any, g: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    x, solved, k, lam = ctx.saved_tensors
    in_x, in_k, _, in_lam, *_ = ctx.needs_input_grad
    if torch.is_grad_enabled():
        dx, dk, dlam = _differentiable_backward(ctx, x, g, solved, k, lam, (in_x, in_k, in_lam))
    else:
        given = (k, ctx.k_number, lam, ctx.lam_number)
        dx, dk, dlam = torch.ops.sparsetopk.rows_backward(
            x, g, solved, *given, *ctx.operator, ctx.times, in_k, in_lam
        )
        dk, dlam = sum_to(dk, k if in_k else None), sum_to(dlam, lam if in_lam else None)
    return (dx, dk, None, dlam, None, None, None, None, None)


def sum_to(per_row: Tensor, like: Tensor | None) -> Tensor | None:
    """The cotangent of k or lam, from those of the rows; of None it is None."""
    if like is None:
        return None
    total = per_row.sum() if like.numel() == 1 else per_row
    return total.reshape(like.shape).to(like.dtype)


def _differentiable_backward(
    ctx: Any, x: Tensor, g: Tensor, state: Tensor, k: Tensor | None, lam: Tensor | None, wanted: Any
) -> tuple[Tensor | None, ...]:
    """The same in ordinary operations, with a graph."""

    def live(x: Tensor, k: Number, lam: Number) -> Tensor:
        rows = Rows("x", x, 1)
        may_be_hard = isinstance(lam, Tensor) or lam == 0
        solved = from_state(
            rows, rows.per_row(k), rows.per_row(lam), state[:, :2], ctx.operator, may_be_hard
        )
        y = rows.restore(solved.y())
        return times(x, y) if ctx.times else y

    k_and_lam = either(k, ctx.k_number), either(lam, ctx.lam_number)
    return cotangents(live, (x, *k_and_lam), g, wanted)


_library.impl("rows_forward", _forward, "CompositeExplicitAutograd")
_library.impl("rows_backward", _backward, "CompositeExplicitAutograd")
_library.impl("rows_forward", _forward_meta, "Meta")
_library.impl("rows_backward", _backward_meta, "Meta")
torch.library.register_autograd(
    "sparsetopk::rows_forward", _differentiate, setup_context=_save, lib=_library
)
