"""The top-k in slots as operators of torch, with their backward: see ``select.py``, and ``ops`` for how
k and lam are given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._maths.operator import MASK, Operator
from .._fused.rows import cotangents
from .._rows.arguments import Number, Rows, is_transformed
from .._rows.differentiable import from_state
from . import compute_dtype, state
from .ops import given, sum_to
from .state import NUMBERS, either

_ASKED = f"{NUMBERS}, int op, float exponent, bool debias, int capacity, bool straight"
_library = torch.library.Library("sparsetopk", "FRAGMENT")
_library.define(
    f"rows_select(Tensor x, {_ASKED}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "rows_select_backward(Tensor x, Tensor? g, Tensor? g_dropped, Tensor state, Tensor ends,"
    f" {_ASKED}, bool in_k, bool in_lam) -> (Tensor, Tensor, Tensor)"
)
_library.define("rows_slots(Tensor y, int capacity) -> Tensor")
_library.define(
    "rows_lam(Tensor x, Tensor? k, float k_number, int op, float exponent, int wanted) -> Tensor"
)


def takes(rows: Rows, operator: Operator) -> bool:
    """Whether there is a kernel for the rows, and nobody asks for more than a backward."""
    return state.takes_short(rows.x, rows.n, operator) and not is_transformed()


def takes_slots(y: Tensor) -> bool:
    """Whether the slots of given rows (m, n) are found by a kernel."""
    return state.takes_short(y, y.shape[-1], Operator(MASK, 1.0)) and not is_transformed()


def slots(y: Tensor, capacity: int) -> Tensor:
    """``select_slots``, which has no derivative."""
    return torch.ops.sparsetopk.rows_slots(y.contiguous(), capacity)


def evaluate(
    rows: Rows, k: Number, lam: Number, operator: Operator, capacity: int, straight: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values, indices, what is dropped and, straight through, which slots are of the hard selection, for
    checked arguments that it ``takes``."""
    numbers = (*given(rows, k), *given(rows, lam))
    x = rows.data.contiguous()
    found = torch.ops.sparsetopk.rows_select(x, *numbers, *operator, capacity, straight)
    values, indices, dropped, chosen = found[:4]
    chosen = rows.unflatten(chosen) if straight else chosen
    return rows.unflatten(values), rows.unflatten(indices), rows.restore_scalars(dropped), chosen


def choose_lam(rows: Rows, k: Number, operator: Operator, wanted: int) -> Tensor:
    """lam (m, 1), which has no derivative."""
    x = rows.data.contiguous()
    return torch.ops.sparsetopk.rows_lam(x, *given(rows, k), *operator[:2], wanted).unsqueeze(-1)


def _lam(
    x: Tensor, k: Tensor | None, k_number: float, op: int, exponent: float, wanted: int
) -> Tensor:
    from . import launch

    return launch.choose_lam(x, either(k, k_number), Operator(op, exponent), wanted)


def _lam_meta(x: Tensor, k: Any, k_number: float, op: int, exponent: float, wanted: int) -> Tensor:
    return x.new_empty(x.shape[0], dtype=compute_dtype(x.dtype, Operator(op, exponent)))


def _launchable(asked: Any) -> tuple[Any, ...]:
    k, k_number, lam, lam_number, op, exponent, debias, *slots = asked
    return either(k, k_number), either(lam, lam_number), Operator(op, exponent, debias), *slots


def _select(x: Tensor, *asked: Any) -> tuple[Tensor, ...]:
    from . import launch

    return launch.select(x, *_launchable(asked))


def _select_backward(
    x: Tensor, g: Tensor | None, g_dropped: Tensor | None, state: Tensor, ends: Tensor, *asked: Any
) -> tuple[Tensor, Tensor, Tensor]:
    from . import launch

    *asked, in_k, in_lam = asked  # type: ignore[assignment]
    g, g_dropped = (None if v is None else v.contiguous() for v in (g, g_dropped))
    return launch.select_backward(
        x, g, g_dropped, state, ends, *_launchable(asked), in_k=in_k, in_lam=in_lam
    )


def _slots(y: Tensor, capacity: int) -> Tensor:
    from . import launch

    return launch.slots(y, capacity)


def _select_meta(x: Tensor, *asked: Any) -> tuple[Tensor, ...]:
    op, exponent, _, capacity, straight = asked[4:]
    m, solved = x.shape[0], state.meta(x, Operator(op, exponent))
    indices = x.new_empty((m, capacity), dtype=torch.int64)
    chosen = x.new_empty((m, capacity) if straight else (0,), dtype=torch.bool)
    ends = solved.new_empty((m, 3))
    return x.new_empty((m, capacity)), indices, x.new_empty(m), chosen, solved, ends


def _backward_meta(
    x: Tensor, g: Any, g_dropped: Any, state: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dk, dlam = (state.new_empty(x.shape[0] if wanted else 0) for wanted in rest[-2:])
    return torch.empty_like(x), dk, dlam


def _slots_meta(y: Tensor, capacity: int) -> Tensor:
    return y.new_empty((y.shape[0], capacity), dtype=torch.int64)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, k, ctx.k_number, lam, ctx.lam_number, *ctx.asked = inputs
    _, indices, _, *others = output
    ctx.mark_non_differentiable(indices, *others)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, k, lam, indices, *others[1:])


def _differentiate(
    ctx: Any, g: Tensor | None, _: Any, g_dropped: Tensor | None, *rest: Any
) -> tuple[Tensor | None, ...]:
    x, k, lam, indices, solved, ends = ctx.saved_tensors
    in_x, in_k, _, in_lam, *_ = ctx.needs_input_grad
    if g is None and g_dropped is None:
        return (None,) * 10
    if torch.is_grad_enabled():
        inputs = x, either(k, ctx.k_number), either(lam, ctx.lam_number)
        live = _live(ctx, indices, solved, g, g_dropped)
        one = torch.ones_like(x[0, 0])
        dx, dk, dlam = cotangents(live, inputs, one, (in_x, in_k, in_lam))
    else:
        numbers = k, ctx.k_number, lam, ctx.lam_number
        dx, dk, dlam = torch.ops.sparsetopk.rows_select_backward(
            x, g, g_dropped, solved, ends, *numbers, *ctx.asked, in_k, in_lam
        )
        dk, dlam = sum_to(dk, k if in_k else None), sum_to(dlam, lam if in_lam else None)
    return (dx, dk, None, dlam, *[None] * 6)


def _live(
    ctx: Any, indices: Tensor, solved: Tensor, g: Tensor | None, g_dropped: Tensor | None
) -> Any:
    """<g, values> + <g_dropped, dropped> in ordinary operations."""

    def live(x: Tensor, k: Number, lam: Number) -> Tensor:
        rows, may_be_hard = Rows("x", x, 1), isinstance(lam, Tensor) or lam == 0
        numbers = rows.per_row(k), rows.per_row(lam)
        y = from_state(rows, *numbers, solved, Operator(*ctx.asked[:3]), may_be_hard).y()
        total = y.new_zeros(())
        if g is not None:
            total = total + (g * y.gather(-1, indices)).sum()
        if g_dropped is not None:
            total = total + (g_dropped * y.scatter(-1, indices, 0.0).abs().sum(dim=-1)).sum()
        return total.to(x.dtype)

    return live


_library.impl("rows_select", _select, "CompositeExplicitAutograd")
_library.impl("rows_select_backward", _select_backward, "CompositeExplicitAutograd")
_library.impl("rows_slots", _slots, "CompositeExplicitAutograd")
_library.impl("rows_lam", _lam, "CompositeExplicitAutograd")
_library.impl("rows_lam", _lam_meta, "Meta")
_library.impl("rows_select", _select_meta, "Meta")
_library.impl("rows_select_backward", _backward_meta, "Meta")
_library.impl("rows_slots", _slots_meta, "Meta")
torch.library.register_autograd(
    "sparsetopk::rows_select", _differentiate, setup_context=_save, lib=_library
)
