"""From tensors to launches: which block, how many rows and warps a program has, and the numbers k and
lam, which are tensors or are handed over by value."""

from __future__ import annotations

import contextlib
import struct
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._maths.operator import MAGNITUDE, Operator
from . import compute_dtype, is_long
from .backward import backward_kernel
from .forward import forward_kernel

Number = float | Tensor

# How many entries a program has if rows are short, and a thread.
_ENTRIES, _PER_THREAD = 2048, 16


class Shape(NamedTuple):
    """What a program takes."""

    block: int
    rows: int
    warps: int

    @classmethod
    def of(cls, n: int, operator: Operator, dtype: torch.dtype, mixed: bool) -> Shape:
        """For rows of n numbers that are computed with in this dtype; ``mixed`` if some rows may be hard
        and others relaxed."""
        block = max(16, triton.next_power_of_2(n))
        rows = max(1, _ENTRIES // block)
        is_light = dtype == torch.float32 and not (mixed or _needs_a_loop(operator))
        threads = block * rows // (_PER_THREAD if is_light else _PER_THREAD // 2)
        return cls(block, rows, min(32, max(4, threads // 32)))


def _needs_a_loop(operator: Operator) -> bool:
    """Whether an entry alone, or S itself, is the root of an equation, or a power: more registers."""
    if operator.op == MAGNITUDE and not operator.debias:
        return operator.exponent not in (1.0, 2.0)
    return operator.exponent not in (1.0, 2.0, 3.0)


class Given(NamedTuple):
    """k or lam as a kernel takes it: a pointer and a stride, or the bits of a float64."""

    pointer: Tensor
    stride: int
    bits: int
    is_tensor: bool

    @classmethod
    def of(cls, value: Number, instead: Tensor) -> Given:
        if isinstance(value, Tensor):
            return cls(value, 0 if value.numel() == 1 else 1, 0, True)
        return cls(instead, 0, struct.unpack("q", struct.pack("d", value))[0], False)


def device_of(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def _settings(
    x: Tensor, k: Given, lam: Given, lam_value: Number, operator: Operator
) -> dict[str, Any]:
    mixed, dtype = isinstance(lam_value, Tensor), compute_dtype(x.dtype, operator)
    shape = Shape.of(x.shape[1], operator, dtype, mixed)
    return {
        "K_TENSOR": k.is_tensor,
        "LAM_TENSOR": lam.is_tensor,
        "OP": operator.op,
        "E": operator.exponent,
        "DEBIAS": operator.debias,
        "RELAXED": mixed or lam_value != 0,
        "HARD": mixed or lam_value == 0,
        "D": tl.float64 if dtype == torch.float64 else tl.float32,
        "ROWS": shape.rows,
        "BLOCK": shape.block,
        "num_warps": shape.warps,
    }


def forward(
    x: Tensor,
    k: Number,
    lam: Number,
    operator: Operator,
    *,
    times: bool = False,
    write: bool = True,
    passes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The output and the state (m, 2), or (m, 3) of long rows, of contiguous rows x (m, n); y is empty
    unless it is to be written.

    k and lam are numbers, or contiguous tensors of one number or of m; ``times`` multiplies a mask by
    x, and ``passes`` (m) is told how often a row was looked at.
    """
    m, n = x.shape
    y = torch.empty_like(x if write else x[:0])
    if is_long(x, operator):
        from . import launch_long

        at = launch_long.Place.of(x)
        return y, launch_long.forward(at, k, lam, operator, y if write else None, times=times)
    state = x.new_empty((m, 2), dtype=compute_dtype(x.dtype, operator))
    of_k, of_lam = Given.of(k, state), Given.of(lam, state)
    settings = _settings(x, of_k, of_lam, lam, operator)
    with device_of(x):
        forward_kernel[(triton.cdiv(m, settings["ROWS"]),)](
            x,
            of_k.pointer,
            of_lam.pointer,
            y,
            state,
            state if passes is None else passes,
            m,
            n,
            of_k.stride,
            of_lam.stride,
            of_k.bits,
            of_lam.bits,
            TIMES=times,
            WRITE=write,
            COUNT=passes is not None,
            **settings,
        )
    return y, state


def backward(
    x: Tensor,
    g: Tensor,
    state: Tensor,
    k: Number,
    lam: Number,
    operator: Operator,
    *,
    times: bool = False,
    in_k: bool = False,
    in_lam: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The cotangents of x (m, n), and of k and lam (m), which are empty where they are not wanted."""
    m, n = x.shape
    dx = torch.empty_like(x)
    if is_long(x, operator):
        from . import launch_long

        at, wanted = launch_long.Place.of(x), {"in_k": in_k, "in_lam": in_lam}
        return dx, *launch_long.backward(at, g, state, k, lam, operator, dx, times=times, **wanted)
    dk, dlam = (state.new_empty(m if wanted else 0) for wanted in (in_k, in_lam))
    of_k, of_lam = Given.of(k, state), Given.of(lam, state)
    settings = _settings(x, of_k, of_lam, lam, operator)
    with device_of(x):
        backward_kernel[(triton.cdiv(m, settings["ROWS"]),)](
            x,
            g,
            of_k.pointer,
            of_lam.pointer,
            state,
            dx,
            dk,
            dlam,
            m,
            n,
            of_k.stride,
            of_lam.stride,
            of_k.bits,
            of_lam.bits,
            TIMES=times,
            IN_K=in_k,
            IN_LAM=in_lam,
            **settings,
        )
    return dx, dk, dlam
