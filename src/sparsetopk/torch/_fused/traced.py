"""The kernels of the top-k family as torch operators, which compiled and exported graphs call as they
are: each for the CPU, and for shapes alone. A derivative is another operator; where that one is
differentiated, it is written in ordinary operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..._maths.operator import Operator
from .._rows import product
from .._rows.arguments import Number, Rows
from .._rows.product import times_finite
from . import kernels, rows
from .kernels import check_not_onnx

_library = torch.library.Library("sparsetopk", "FRAGMENT")
_NUMBERS = "Tensor? k, Tensor? lam, float k_number, float lam_number"
_ASKED = f"{_NUMBERS}, int dim, int op, float exponent, bool debias"
_library.define(f"relaxed(Tensor x, {_ASKED}, bool times_x) -> (Tensor, Tensor, Tensor)")
_library.define(
    f"relaxed_backward(Tensor x, Tensor g, Tensor state, Tensor mask, {_ASKED}, bool times_x, bool in_k,"
    " bool in_lam) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    f"loss(Tensor x, Tensor? t, {_ASKED}, int ignored, bool spread) -> (Tensor, Tensor)"
)
_library.define("select(Tensor y, int capacity) -> Tensor")


def takes(*values: object) -> bool:
    """Whether a graph of operators is made, and these are on the CPU. Transforms of ``torch.func`` and
    forward mode have derivatives that only ordinary operations give."""
    return (
        torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and all(value.is_cpu for value in values if isinstance(value, Tensor))
    )


def _asked(of: Rows, k: Number, lam: Number, operator: Operator) -> tuple[Any, ...]:
    """k and lam as tensors or numbers, and the rest, as the operators take them."""
    tensors = [
        value if isinstance(value, (Tensor, int, float)) else of.per_row(value)
        for value in (k, lam)
    ]
    k_tensor, lam_tensor = (value if isinstance(value, Tensor) else None for value in tensors)
    numbers = (0.0 if isinstance(value, Tensor) else float(value) for value in tensors)
    return k_tensor, lam_tensor, *numbers, of.dim, *operator


def evaluate(of: Rows, k: Number, lam: Number, operator: Operator, times_x: bool = False) -> Tensor:
    """The operator, for checked arguments, or x times it."""
    return torch.ops.sparsetopk.relaxed(of.x, *_asked(of, k, lam, operator), times_x)[0]


class _Asked:
    """What ``_asked`` made, unpacked again."""

    def __init__(
        self,
        x: Tensor,
        k: Tensor | None,
        lam: Tensor | None,
        k_number: float,
        lam_number: float,
        dim: int,
        *operator: Any,
    ) -> None:
        self.rows, self.operator = Rows("x", x, dim), Operator(*operator)
        self.k: Number = k_number if k is None else k
        self.lam: Number = lam_number if lam is None else lam

    def like_x(self) -> Tensor:
        """Uninitialised, laid out as the kernels leave it."""
        check_not_onnx()
        x = self.rows.x
        return rows.restore(self.rows, x.new_empty(rows.rows_last(x, self.rows.dim).shape))


def _relaxed(x: Tensor, *asked_and_times: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the state, and, where they differ, the mask."""
    *asked, times_x = asked_and_times
    it = _Asked(x, *asked)
    y, state = rows.forward(it.rows, it.k, it.lam, it.operator)
    return (times_finite(x, y), state, y) if times_x else (y, state, x.new_empty(0))


def _relaxed_shapes(x: Tensor, *asked_and_times: Any) -> tuple[Tensor, Tensor, Tensor]:
    *asked, times_x = asked_and_times
    it = _Asked(x, *asked)
    state = x.new_empty((x.numel() // it.rows.n, 2), dtype=torch.float64)
    mask = it.like_x() if times_x else x.new_empty(0)
    return torch.empty_like(x + mask) if times_x else it.like_x(), state, mask


def _backward(
    x: Tensor, g: Tensor, state: Tensor, mask: Tensor, *asked_and_wanted: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *asked, times_x, in_k, in_lam = asked_and_wanted
    it = _Asked(x, *asked)
    of_x, of_y = product.cotangents(x, mask, g) if times_x else (None, g)
    wanted = True, in_k, in_lam
    found = rows.backward(it.rows, it.k, it.lam, of_y, state, it.operator, wanted)
    dx, dk, dlam = (x.new_empty(0) if d is None else d for d in found)
    return dx if of_x is None else dx.add_(of_x), dk, dlam


def _backward_shapes(
    x: Tensor, g: Tensor, state: Tensor, mask: Tensor, *asked_and_wanted: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *asked, _, in_k, in_lam = asked_and_wanted
    it = _Asked(x, *asked)
    dk, dlam = (
        torch.empty_like(value, memory_format=torch.contiguous_format)
        if wanted and isinstance(value, Tensor)
        else x.new_empty(0)
        for value, wanted in ((it.k, in_k), (it.lam, in_lam))
    )
    return it.like_x(), dk, dlam


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, k, lam, *ctx.rest = inputs
    ctx.save_for_backward(x, k, lam, *output[1:])


def _derivative(ctx: Any, g: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    x, k, lam, state, mask = ctx.saved_tensors
    wanted = ctx.needs_input_grad[:3]
    *rest, times_x = ctx.rest
    if torch.is_grad_enabled():
        found = _differentiable(x, k, lam, g, state, rest, times_x, wanted)
    else:
        found = torch.ops.sparsetopk.relaxed_backward(
            x, g, state, mask, k, lam, *ctx.rest, *wanted[1:]
        )
    return (*(d if w else None for d, w in zip(found, wanted, strict=True)), *[None] * 7)


def _differentiable(
    x: Tensor,
    k: Tensor | None,
    lam: Tensor | None,
    g: Tensor,
    state: Tensor,
    rest: list[Any],
    times_x: bool,
    wanted: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """The cotangents of x, k and lam with a graph."""
    it = _Asked(x, k, lam, *rest)
    if not times_x:
        return rows.differentiable_backward(it.rows, it.k, it.lam, g, state, it.operator, wanted)

    def live(x: Tensor, k: Number, lam: Number) -> Tensor:
        return product.times(x, evaluate(it.rows._replace(x=x), k, lam, it.operator))

    return rows.cotangents(live, (x, it.k, it.lam), g, wanted)


_library.impl("relaxed", _relaxed, "CPU")
_library.impl("relaxed", _relaxed_shapes, "Meta")
_library.impl("relaxed_backward", _backward, "CPU")
_library.impl("relaxed_backward", _backward_shapes, "Meta")
torch.library.register_autograd(
    "sparsetopk::relaxed", _derivative, setup_context=_save, lib=_library
)


def loss(
    of: Rows,
    t: Tensor | None,
    k: Number,
    lam: Number,
    operator: Operator,
    ignored: int,
    spread: bool,
) -> Tensor:
    """f(x, 1_k) - <x, t> of every row (m), as ``kernels.loss``, with a derivative in x."""
    asked = _asked(of, k, lam, operator)
    return torch.ops.sparsetopk.loss(of.x, t, *asked, ignored, spread)[1]


def _loss(x: Tensor, t: Tensor | None, *asked: Any) -> tuple[Tensor, Tensor]:
    *asked, ignored, spread = asked  # type: ignore[assignment]
    it = _Asked(x, *asked)
    numbers = *rows.numbers(it.rows, it.k), *rows.numbers(it.rows, it.lam)
    t = None if t is None else t.contiguous()
    data = rows.contiguous(x, it.rows.dim)
    residual, values, count, _ = kernels.loss(data, t, ignored, spread, *numbers, it.operator)
    if count < 0:
        raise ValueError(
            f"targets must be class indices in [0, {it.rows.n}), got {t[-1 - count].item():g}"  # type: ignore[index]
        )
    return rows.restore(it.rows, residual), values


def _loss_shapes(x: Tensor, t: Tensor | None, *asked: Any) -> tuple[Tensor, Tensor]:
    it = _Asked(x, *asked[:-2])
    return it.like_x(), x.new_empty(x.numel() // it.rows.n, dtype=torch.float64)


def _save_loss(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, t, k, lam, *ctx.rest = inputs
    ctx.save_for_backward(x, t, k, lam, output[0])


def _loss_derivative(ctx: Any, _: Tensor, g: Tensor) -> tuple[Tensor | None, ...]:
    x, t, k, lam, residual = ctx.saved_tensors
    *rest, ignored, _ = ctx.rest
    it = _Asked(x, k, lam, *rest)
    factor = g.reshape(it.rows.leading).unsqueeze(it.rows.dim)
    if torch.is_grad_enabled():  # y moves with x, and t does not
        y = evaluate(it.rows, it.k, it.lam, it.operator)
        if t is not None and t.dtype == torch.int64:
            y = y * (t != ignored).reshape(factor.shape)
        residual = residual + (y - y.detach())
    return (residual * factor).to(x.dtype), *[None] * 11


_library.impl("loss", _loss, "CPU")
_library.impl("loss", _loss_shapes, "Meta")
torch.library.register_autograd(
    "sparsetopk::loss", _loss_derivative, setup_context=_save_loss, lib=_library
)


def select(y: Tensor, capacity: int) -> Tensor:
    """``kernels.select``, which has no derivative."""
    return torch.ops.sparsetopk.select(y, capacity)


def _select(y: Tensor, capacity: int) -> Tensor:
    return kernels.select(y.contiguous(), capacity)


def _select_shapes(y: Tensor, capacity: int) -> Tensor:
    return y.new_empty((y.shape[0], capacity), dtype=torch.int64)


_library.impl("select", _select, "CPU")
_library.impl("select", _select_shapes, "Meta")
