"""The value and the losses as operators of torch, with their backward: see ``value.py``, and ``ops`` for
how k and lam are given. Only values have a derivative in k and lam."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._maths.operator import Operator
from ..._types import Completion, Reduction
from .._fused.rows import cotangents, requires_grad
from .._rows.arguments import Number, Rows, is_transformed
from .._rows.differentiable import from_state
from . import state
from .ops import given, sum_to
from .state import NUMBERS, either

_COMPLETIONS: tuple[Completion | None, ...] = (None, "spread", "best")
_REDUCTIONS: tuple[Reduction, ...] = ("mean", "sum", "none")

_TARGETS = "Tensor? t, Tensor? weight, int completion, float smoothing, int ignored, int reduction"
_ASKED = f"{NUMBERS}, int op, float exponent, {_TARGETS}"
_library = torch.library.Library("sparsetopk", "FRAGMENT")
_library.define(f"rows_value(Tensor x, {_ASKED}) -> (Tensor, Tensor, Tensor)")
_library.define(
    f"rows_value_backward(Tensor x, Tensor g, Tensor state, Tensor scale, {_ASKED}, bool in_k,"
    " bool in_lam) -> (Tensor, Tensor, Tensor)"
)
_VALUE = (None, None, 0, 0.0, 0, 2)  # no targets, and no sum


def takes(rows: Rows, operator: Operator, *others: object) -> bool:
    """Whether there is a kernel for the rows, nobody asks for more than a backward, and the targets and
    weights of a loss are where the rows are."""
    return (
        state.takes_short(rows.x, rows.n, operator)
        and not is_transformed()
        and all(v.device == rows.x.device for v in others if isinstance(v, Tensor))
    )


def takes_loss(
    rows: Rows, k: Number, lam: Number, operator: Operator, *others: Tensor | None
) -> bool:
    """The same for a loss, whose only derivative is that in x."""
    if not takes(rows, operator, *others):
        return False
    return not (torch.is_grad_enabled() and requires_grad(k, lam, *others))


def value(rows: Rows, k: Number, lam: Number, operator: Operator) -> Tensor:
    """f(x, 1_k) of every row (m), for checked arguments that it ``takes``."""
    numbers = (*given(rows, k), *given(rows, lam))
    x = rows.data.contiguous()
    return torch.ops.sparsetopk.rows_value(x, *numbers, *operator[:2], *_VALUE)[0]


def loss(
    rows: Rows,
    t: Tensor,
    k: Number,
    lam: Number,
    operator: Operator,
    completion: Completion | None,
    reduction: Reduction,
    smoothing: float,
    ignored: int,
    weight: Tensor | None,
) -> Tensor:
    """The losses (m) for labels (m) or weights (m, n), or their sum or mean."""
    numbers = (*given(rows, k), *given(rows, lam))
    t = (t.view(torch.uint8) if t.dtype == torch.bool else t).contiguous()
    weight = None if weight is None else weight.contiguous()
    chosen = _COMPLETIONS.index(completion), float(smoothing), ignored, _REDUCTIONS.index(reduction)
    x = rows.data.contiguous()
    return torch.ops.sparsetopk.rows_value(x, *numbers, *operator[:2], t, weight, *chosen)[0]


def _launchable(asked: tuple[Any, ...]) -> tuple[Any, ...]:
    """k, lam, the operator and the targets as ``launch`` takes them."""
    from . import launch

    k, k_number, lam, lam_number, op, exponent, *targets = asked
    operator = Operator(op, exponent)
    return either(k, k_number), either(lam, lam_number), operator, launch.Loss(*targets)


def _value(x: Tensor, *asked: Any) -> tuple[Tensor, Tensor, Tensor]:
    from . import launch

    return launch.value(x, *_launchable(asked))


def _value_backward(
    x: Tensor, g: Tensor, state: Tensor, scale: Tensor, *asked: Any
) -> tuple[Tensor, Tensor, Tensor]:
    from . import launch

    *asked, in_k, in_lam = asked  # type: ignore[assignment]
    options = {"in_k": in_k, "in_lam": in_lam}
    return launch.value_backward(x, g, state, scale, *_launchable(tuple(asked)), **options)


def _value_meta(x: Tensor, *asked: Any) -> tuple[Tensor, Tensor, Tensor]:
    op, exponent, _, _, completion, _, _, reduction = asked[4:]
    solved = state.meta(x, Operator(op, exponent), 2 if completion == 2 else 1)
    reduced = reduction != 2
    return x.new_empty(() if reduced else x.shape[0]), solved, solved.new_empty(1 if reduced else 0)


def _backward_meta(
    x: Tensor, g: Tensor, state: Tensor, scale: Tensor, *asked: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dk, dlam = (state.new_empty(x.shape[0] if wanted else 0) for wanted in asked[-2:])
    return torch.empty_like(x), dk, dlam


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, k, ctx.k_number, lam, ctx.lam_number, op, exponent, t, weight, *ctx.chosen = inputs
    ctx.operator = op, exponent
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, k, lam, t, weight, *output[1:])


def _differentiate(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    x, k, lam, t, weight, solved, scale = ctx.saved_tensors
    in_x, in_k, _, in_lam, *_ = ctx.needs_input_grad
    if torch.is_grad_enabled():
        inputs = x, either(k, ctx.k_number), either(lam, ctx.lam_number)
        live = _live_value(ctx, solved) if t is None else _live_loss(ctx, t, weight)
        dx, dk, dlam = cotangents(live, inputs, g, (in_x, in_k, in_lam))
    else:
        numbers = k, ctx.k_number, lam, ctx.lam_number
        dx, dk, dlam = torch.ops.sparsetopk.rows_value_backward(
            x, g, solved, scale, *numbers, *ctx.operator, t, weight, *ctx.chosen, in_k, in_lam
        )
        dk, dlam = sum_to(dk, k if in_k else None), sum_to(dlam, lam if in_lam else None)
    return (dx, dk, None, dlam, *[None] * 9)


def _live_value(ctx: Any, solved: Tensor) -> Any:
    """The value in ordinary operations."""

    def live(x: Tensor, k: Number, lam: Number) -> Tensor:
        rows, may_be_hard = Rows("x", x, 1), isinstance(lam, Tensor) or lam == 0
        numbers = rows.per_row(k), rows.per_row(lam)
        at = from_state(rows, *numbers, solved, Operator(*ctx.operator), may_be_hard)
        return rows.restore_scalars(at.value())

    return live


def _live_loss(ctx: Any, t: Tensor, weight: Tensor | None) -> Any:
    """The loss in ordinary operations."""
    from .._functions.losses import composed

    completion, smoothing, ignored, reduction = ctx.chosen

    def live(x: Tensor, k: Number, lam: Number) -> Tensor:
        asked = _COMPLETIONS[completion], _REDUCTIONS[reduction], smoothing, ignored, weight
        return composed(Rows("x", x, 1), t, k, lam, Operator(*ctx.operator), *asked).to(x.dtype)

    return live


_library.impl("rows_value", _value, "CompositeExplicitAutograd")
_library.impl("rows_value_backward", _value_backward, "CompositeExplicitAutograd")
_library.impl("rows_value", _value_meta, "Meta")
_library.impl("rows_value_backward", _backward_meta, "Meta")
torch.library.register_autograd(
    "sparsetopk::rows_value", _differentiate, setup_context=_save, lib=_library
)
