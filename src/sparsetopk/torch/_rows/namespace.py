"""torch as the namespace that ``sparsetopk._maths`` is written over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._private import in_forward_mode, is_tracing, is_transforming

_INTEGERS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
# As many passes as a loop takes that may not look whether it is done: more change nothing.
_UNSEEN = 88


class Namespace:
    """``look`` says after how many passes a loop may look whether it is done, for which the host waits
    for the device; 0 for never, as where tensors are traced."""

    inf, nan, int32 = torch.inf, torch.nan, torch.int32
    abs = staticmethod(torch.abs)
    broadcast_arrays = staticmethod(torch.broadcast_tensors)
    clip = staticmethod(torch.clip)
    exp = staticmethod(torch.exp)

    @staticmethod
    def finfo(dtype: torch.dtype) -> torch.finfo:
        return torch.finfo(dtype)  # which older compilers know by this name alone

    floor = staticmethod(torch.floor)
    full_like = staticmethod(torch.full_like)
    hypot = staticmethod(torch.hypot)
    iinfo = staticmethod(torch.iinfo)
    isfinite = staticmethod(torch.isfinite)
    isnan = staticmethod(torch.isnan)
    log = staticmethod(torch.log)
    maximum = staticmethod(torch.maximum)
    minimum = staticmethod(torch.minimum)
    ones_like = staticmethod(torch.ones_like)
    sign = staticmethod(torch.sign)
    sqrt = staticmethod(torch.sqrt)
    where = staticmethod(torch.where)
    zeros_like = staticmethod(torch.zeros_like)

    def __init__(self, look: int, still: Namespace | None = None) -> None:
        self.look = look
        self.still = still or _Still(look, self)

    @staticmethod
    def astype(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype)

    @staticmethod
    def total(x: Tensor) -> Tensor:
        return x.sum(dim=-1, keepdim=True)

    @staticmethod
    def largest(x: Tensor) -> Tensor:
        return x.amax(dim=-1, keepdim=True)

    @staticmethod
    def cumsum(x: Tensor, axis: int) -> Tensor:
        return x.cumsum(dim=axis)

    @staticmethod
    def index(x: Tensor) -> Tensor:
        return torch.arange(x.shape[-1], device=x.device)

    @staticmethod
    def concat(tensors: Sequence[Tensor], axis: int) -> Tensor:
        return torch.cat(list(tensors), dim=axis)

    @staticmethod
    def take_along_axis(x: Tensor, at: Tensor, axis: int) -> Tensor:
        return x.gather(axis, at)

    @staticmethod
    def sort(x: Tensor) -> tuple[Tensor, Tensor]:
        s, order = x.sort(dim=-1, descending=True, stable=True)
        return s, order

    @staticmethod
    def unsort(order: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        rank = order.argsort(dim=-1)
        return tuple(v.gather(-1, rank) for v in values)

    @staticmethod
    def block_sum(values: Tensor, block: Tensor) -> Tensor:
        return torch.zeros_like(values).scatter_add(-1, block, values).gather(-1, block)

    @staticmethod
    def bits(x: Tensor) -> Tensor:
        return x.view(_INTEGERS[x.dtype])

    @staticmethod
    def from_bits(bits: Tensor, dtype: torch.dtype) -> Tensor:
        return bits.to(_INTEGERS[dtype]).view(dtype)

    @staticmethod
    def stop_gradient(x: Tensor) -> Tensor:
        return x.detach()

    def with_derivative(self, f: Callable[..., Tensor], derivative: Callable[..., Tensor]) -> Any:
        """f, with a first derivative: ``live`` differentiates nothing twice."""

        def ruled(*args: Tensor) -> Tensor:
            at = [v.detach() for v in args]
            y = f(*at)
            if not needs_derivative(*args):
                return y
            return y + derivative(y, at, [v - w for v, w in zip(args, at, strict=True)])

        return ruled

    def while_loop(
        self,
        busy: Callable[[Any], Tensor],
        step: Callable[[Tensor, Any], Any],
        state: Any,
        limit: int,
    ) -> Any:
        for i in range(limit if self.look else min(limit, _UNSEEN)):
            if self.look and i % self.look == 0 and not bool(busy(state).any()):
                break
            state = step(torch.tensor(i, device=state[0].device), state)
        return state

    shorter = staticmethod(min)

    @staticmethod
    def repeat(
        count: int, step: Callable[[int, Any], Any], state: Any, when: Tensor | None = None
    ) -> Any:
        for i in range(count):
            state = step(i, state)
        return state


def needs_derivative(*values: Tensor) -> bool:
    """Whether somebody may ask for a derivative: of what is traced or transformed nobody knows."""
    if torch.compiler.is_compiling() or is_tracing() or is_transforming() or in_forward_mode():
        return True
    return torch.is_grad_enabled() and any(v.requires_grad for v in values)


class _Still(Namespace):
    """For constants: nothing has a derivative."""

    def with_derivative(self, f: Callable[..., Tensor], derivative: Callable[..., Tensor]) -> Any:
        return f


LOOKS_ALWAYS, LOOKS_SELDOM, LOOKS_NEVER = Namespace(1), Namespace(64), Namespace(0)
