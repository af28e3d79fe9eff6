"""Operators of torch.library with a derivative, made for graphs that call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library

from .rows import requires_grad


def register(
    library: Library,
    name: str,
    schema: str,
    on_cpu: Callable[..., Any],
    shapes: Callable[..., Any],
    save: Callable[..., None],
    derivative: Callable[..., Any],
) -> None:
    """Define ``name`` with the derivative that ``save`` and ``derivative`` make, as
    ``torch.library.register_autograd`` would.

    What a compiled graph calls is ``name_forward``, which knows of no derivative. With
    ``register_autograd`` it would be the operator itself, and every call would go through Python once
    more to learn that no derivative is wanted: 7 microseconds of 19 on a short row.
    """
    inner = f"{name}_forward"
    for each in (name, inner):
        library.define(f"{each}{schema}")
        library.impl(each, on_cpu, "CPU")
        library.impl(each, shapes, "Meta")
    forward = getattr(torch.ops.sparsetopk, inner).default

    def apply(ctx: Any, *inputs: Any) -> Any:
        output = forward(*inputs)
        save(ctx, inputs, output)
        return output

    static = {"forward": staticmethod(apply), "backward": staticmethod(derivative)}
    function: Any = type(f"Derivative_{name}", (torch.autograd.Function,), static)

    def with_derivative(*inputs: Any) -> Any:
        wanted = torch.is_grad_enabled() and requires_grad(*inputs)
        return (function.apply if wanted else forward)(*inputs)

    library.impl(name, with_derivative, "Autograd")
