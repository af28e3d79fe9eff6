"""The kernels of the top-k family as torch operators, which compiled and exported graphs call as they
are: each for the CPU, and for shapes alone. A derivative is another operator; where that one is
differentiated, it is written in ordinary operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._maths.operator import Operator
from .._private import in_forward_mode, is_transforming
from .._rows import product
from .._rows.arguments import Number, Rows, is_plain
from .._rows.product import times_finite
from . import kernels, rows
from .kernels import Numbers, check_not_onnx
from .registered import register

_library = torch.library.Library("sparsetopk", "FRAGMENT")
_NUMBERS = "Tensor? k, Tensor? lam, float k_number, float lam_number"
ASKED = f"{_NUMBERS}, int dim, int op, float exponent, bool debias"
_library.define(
    f"relaxed_backward(Tensor x, Tensor g, Tensor state, Tensor mask, {ASKED}, bool times_x, bool in_k,"
    " bool in_lam) -> (Tensor, Tensor, Tensor)"
)
_library.define("select(Tensor y, int capacity) -> Tensor")
_library.define(
    "slots_backward(Tensor y, Tensor at, Tensor? g, Tensor? of_dropped, int dim) -> Tensor"
)


def takes(*values: object) -> bool:
    """Whether a graph of operators is made, and these are on the CPU. Transforms of ``torch.func`` and
    forward mode have derivatives that only ordinary operations give."""
    return (
        torch.compiler.is_compiling()
        and not is_transforming()
        and not in_forward_mode()
        and all(value.is_cpu for value in values if isinstance(value, Tensor))
    )


def asked(of: Rows, k: Number, lam: Number, operator: Operator) -> tuple[Any, ...]:
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
    return torch.ops.sparsetopk.relaxed(of.x, *asked(of, k, lam, operator), times_x)[0]


class Asked:
    """What ``asked`` made, unpacked again."""

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


def _numbers(
    x: Tensor,
    k: Tensor | None,
    lam: Tensor | None,
    k_number: float,
    lam_number: float,
    dim: int,
    *operator: Any,
) -> tuple[Numbers, Numbers, Operator]:
    """The same as the kernels take it. (While a compiled graph runs, a call of a Python function costs
    more than elsewhere: there are few here and in what calls this.)"""
    if k is None and lam is None:
        return rows.constant(k_number), rows.constant(lam_number), Operator(*operator)
    of = Rows("x", x, dim)
    return (
        rows.numbers(of, k_number if k is None else k),
        rows.numbers(of, lam_number if lam is None else lam),
        Operator(*operator),
    )


def _relaxed(x: Tensor, *asked_and_times: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the state, and, where they differ, the mask."""
    *asked, times_x = asked_and_times
    dim = asked[4]
    y, state = kernels.forward(rows.contiguous(x, dim), *_numbers(x, *asked))
    if dim != x.ndim - 1:
        y = y.movedim(-1, dim)
    return (times_finite(x, y), state, y) if times_x else (y, state, x.new_empty(0))


def _relaxed_shapes(x: Tensor, *asked_and_times: Any) -> tuple[Tensor, Tensor, Tensor]:
    *asked, times_x = asked_and_times
    it = Asked(x, *asked)
    state = x.new_empty((x.numel() // it.rows.n, 2), dtype=torch.float64)
    mask = it.like_x() if times_x else x.new_empty(0)
    return torch.empty_like(x + mask) if times_x else it.like_x(), state, mask


def _backward(
    x: Tensor, g: Tensor, state: Tensor, mask: Tensor, *asked_and_wanted: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *asked, times_x, in_k, in_lam = asked_and_wanted
    of_x, of_y = product.cotangents(x, mask, g) if times_x else (None, g)
    k, lam, dim = asked[0], asked[1], asked[4]
    each, last = _numbers(x, *asked), rows.contiguous(x, dim)
    dx, *found = kernels.backward(last, rows.contiguous(of_y, dim), state, *each, in_k, in_lam)
    if dim != x.ndim - 1:
        dx = dx.movedim(-1, dim)
    summed = map(Rows("x", x, dim).sum_to, found, (k, lam))
    dk, dlam = (x.new_empty(0) if d is None else d for d in summed)
    return dx if of_x is None else dx.add_(of_x), dk, dlam


def _backward_shapes(
    x: Tensor, g: Tensor, state: Tensor, mask: Tensor, *asked_and_wanted: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *asked, _, in_k, in_lam = asked_and_wanted
    it = Asked(x, *asked)
    dk, dlam = (
        torch.empty_like(value, memory_format=torch.contiguous_format)
        if wanted and isinstance(value, Tensor)
        else x.new_empty(0)
        for value, wanted in ((it.k, in_k), (it.lam, in_lam))
    )
    return it.like_x(), dk, dlam


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, k, lam, *ctx.rest = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # no zeros for the state
    ctx.save_for_backward(x, k, lam, *output[1:])


def _derivative(ctx: Any, g: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if g is None:
        return (None,) * (len(ctx.rest) + 3)
    x, k, lam, state, mask = ctx.saved_tensors
    wanted = ctx.needs_input_grad[:3]
    *rest, times_x = ctx.rest
    if torch.is_grad_enabled():
        found = _differentiable(x, k, lam, g, state, rest, times_x, wanted)
    else:
        found = torch.ops.sparsetopk.relaxed_backward(
            x, g, state, mask, k, lam, *ctx.rest, *wanted[1:]
        )
    return (
        *(d if w else None for d, w in zip(found, wanted, strict=True)),
        *[None] * len(ctx.rest),
    )


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
    it = Asked(x, k, lam, *rest)
    if not times_x:
        return rows.differentiable_backward(it.rows, it.k, it.lam, g, state, it.operator, wanted)

    def live(x: Tensor, k: Number, lam: Number) -> Tensor:
        return product.times(x, evaluate(Rows("x", x, it.rows.dim), k, lam, it.operator))

    return rows.cotangents(live, (x, it.k, it.lam), g, wanted)


_library.impl("relaxed_backward", _backward, "CPU")
_library.impl("relaxed_backward", _backward_shapes, "Meta")
register(
    _library,
    "relaxed",
    f"(Tensor x, {ASKED}, bool times_x) -> (Tensor, Tensor, Tensor)",
    _relaxed,
    _relaxed_shapes,
    _save,
    _derivative,
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


def slots(y: Tensor, capacity: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """The entries of y with the largest magnitudes along the dimension, their indices, and the sum of
    the magnitudes of the others, with the derivative of both."""
    return torch.ops.sparsetopk.slots(y, capacity, dim)


def dropped(y: Tensor, slots: Tensor) -> Tensor:
    """The sum of the magnitudes that are in no slot, (m, 1); NaN for a row that is."""
    kept = y.gather(-1, slots)
    if is_plain(y) and y.detach().count_nonzero() == kept.detach().count_nonzero():
        return kept.clamp(0, 0).abs().sum(dim=-1, keepdim=True)  # 0 with a derivative of 0, or NaN
    rest = y.scatter(-1, slots, 0.0).abs().sum(dim=-1, keepdim=True)
    return torch.where(kept.detach().isnan().any(dim=-1, keepdim=True), torch.nan, rest)


def _slots(y: Tensor, capacity: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    of = Rows("y", y, dim)
    at = kernels.select(of.data.contiguous(), capacity)
    values, indices = of.unflatten(of.data.gather(-1, at)), of.unflatten(at)
    return values.contiguous(), indices.contiguous(), of.restore_scalars(dropped(of.data, at))


def _slots_shapes(y: Tensor, capacity: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    of = Rows("y", y, dim)
    values = y.new_empty((*y.shape[:dim], capacity, *y.shape[dim + 1 :]))
    return values, torch.empty_like(values, dtype=torch.int64), y.new_empty(of.leading)


def _slots_backward(
    y: Tensor, at: Tensor, g: Tensor | None, of_dropped: Tensor | None, dim: int
) -> Tensor:
    if of_dropped is None:
        dy = torch.zeros_like(y, memory_format=torch.contiguous_format)
    else:
        dy = (y.sign() * of_dropped.unsqueeze(dim)).contiguous()
    return dy.scatter_(dim, at, torch.zeros_like(at, dtype=y.dtype) if g is None else g)


def _save_slots(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    y, _, ctx.dim = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(y, output[1])


def _slots_derivative(
    ctx: Any, g: Tensor | None, _: Any, of_dropped: Tensor | None
) -> tuple[Any, ...]:
    once = not torch.is_grad_enabled()  # else in operations: linear in the cotangents alone
    backward: Any = torch.ops.sparsetopk.slots_backward if once else _slots_backward
    return backward(*ctx.saved_tensors, g, of_dropped, ctx.dim), None, None


_library.impl("slots_backward", _slots_backward, "CPU")
_library.impl("slots_backward", lambda y, *_: y.new_empty(y.shape), "Meta")
register(
    _library,
    "slots",
    "(Tensor y, int capacity, int dim) -> (Tensor, Tensor, Tensor)",
    _slots,
    _slots_shapes,
    _save_slots,
    _slots_derivative,
)
