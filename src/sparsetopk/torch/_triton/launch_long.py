"""From tensors to launches, for rows that no program holds alone: contiguous, or in pieces."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._maths.operator import Operator
from . import compute_dtype
from .launch import Given, Number, device_of
from .long import FACTS, apply_kernel, gather_kernel, sample_kernel, solve_kernel
from .long_backward import SUMS, spread_kernel, sums_kernel

CHUNK = 4096
_SAMPLE = 8192
WARPS = {
    sample_kernel: 16,
    gather_kernel: 8,
    solve_kernel: 8,
    apply_kernel: 8,
    sums_kernel: 8,
    spread_kernel: 8,
}
_PROGRAMS = 1024  # as many are kept busy, over all rows
_TYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


class Place(NamedTuple):
    """Where rows are: ``data`` holds them, or the address of every chunk of a single row."""

    data: Tensor
    starts: Tensor  # the number of the first entry of every chunk, and of the last, plus 1
    m: int
    n: int
    chunks: int
    dtype: torch.dtype
    is_table: bool

    @classmethod
    def of(cls, x: Tensor) -> Place:
        m, n = x.shape
        return cls(x, x, m, n, triton.cdiv(n, CHUNK), x.dtype, False)

    @property
    def programs(self) -> int:
        return min(self.chunks, max(1, _PROGRAMS // self.m))


class _Call(NamedTuple):
    """What all kernels of an operator are told."""

    k: Given
    lam: Given
    settings: dict[str, Any]
    sizes: tuple[int, ...]
    bits: tuple[int, ...]

    @classmethod
    def of(cls, at: Place, k: Number, lam: Number, operator: Operator, instead: Tensor) -> _Call:
        of_k, of_lam = Given.of(k, instead), Given.of(lam, instead)
        settings = {
            "K_TENSOR": of_k.is_tensor,
            "LAM_TENSOR": of_lam.is_tensor,
            "OP": operator.op,
            "E": operator.exponent,
            "DEBIAS": operator.debias,
            "RELAXED": of_lam.is_tensor or lam != 0,
            "HARD": of_lam.is_tensor or lam == 0,
            "T": _TYPES[at.dtype],
            "TABLE": at.is_table,
            "D": _TYPES[instead.dtype],
            "G": triton.next_power_of_2(at.programs),
            "CHUNK": CHUNK,
            "S": _SAMPLE // 2 if instead.dtype == torch.float64 else _SAMPLE,
        }
        bits = (of_k.stride, of_lam.stride, of_k.bits, of_lam.bits)
        return cls(of_k, of_lam, settings, (at.m, at.n, at.chunks, at.programs), bits)

    def only(self, kernel: Any, **more: Any) -> dict[str, Any]:
        """The settings that a kernel has, of these and others."""
        found = {k: v for k, v in (self.settings | more).items() if k in kernel.arg_names}
        return found | {"num_warps": WARPS[kernel]}


def forward(
    at: Place, k: Number, lam: Number, operator: Operator, y: Tensor | None, *, times: bool = False
) -> Tensor:
    """Writes the output to y, rows or the addresses of chunks, unless it is None; the state (m, 3)."""
    data, (m, n) = at.data, (at.m, at.n)
    dtype = compute_dtype(at.dtype, operator)
    state = data.new_empty((m, 3), dtype=dtype)
    call = _Call.of(at, k, lam, operator, state)
    copied = data.new_empty((m, 2), dtype=torch.int32)
    window, copies = data.new_empty((m, 2), dtype=dtype), data.new_empty((m, n), dtype=dtype)
    index = data.new_empty((m, n) if call.settings["HARD"] else 0, dtype=torch.int32)
    table, again = data.new_empty((2, m, FACTS, at.programs), dtype=torch.float64)
    given = (call.k.pointer, call.lam.pointer)
    x, many = (data, at.starts), (at.programs, m)
    with device_of(data):
        sample_kernel[(m, 2)](
            *x, *given, window, copied, *call.sizes[:3], *call.bits,
            **call.only(sample_kernel),
        )  # fmt: skip
        for second in (False, True):
            gather_kernel[many](
                *x, *given, window, copied, table, again, copies, index, *call.sizes, *call.bits,
                **call.only(gather_kernel, AGAIN=second),
            )  # fmt: skip
        solve_kernel[(m,)](
            *given, window, copied, table, again, copies, index, state, m, n, at.programs, *call.bits,
            **call.only(solve_kernel),
        )  # fmt: skip
        if y is not None:
            apply_kernel[many](
                *x, *given, state, y, *call.sizes, *call.bits,
                **call.only(apply_kernel, TIMES=times),
            )  # fmt: skip
    return state


def backward(
    at: Place,
    g: Tensor,
    state: Tensor,
    k: Number,
    lam: Number,
    operator: Operator,
    dx: Tensor,
    *,
    times: bool = False,
    in_k: bool = False,
    in_lam: bool = False,
) -> tuple[Tensor, Tensor]:
    """Writes the cotangent of x to dx, rows or the addresses of chunks as g; those of k and lam (m)."""
    dk, dlam = (state.new_empty(at.m if wanted else 0) for wanted in (in_k, in_lam))
    call = _Call.of(at, k, lam, operator, state)
    table = state.new_empty((at.m, SUMS, at.programs), dtype=torch.float64)
    inputs = (at.data, g, at.starts, call.k.pointer, call.lam.pointer, state, table)
    many = (at.programs, at.m)
    with device_of(state):
        if call.settings["RELAXED"]:
            sums_kernel[many](
                *inputs, *call.sizes, *call.bits, **call.only(sums_kernel, TIMES=times)
            )
        spread_kernel[many](
            *inputs, dx, dk, dlam, *call.sizes, *call.bits,
            **call.only(spread_kernel, TIMES=times, IN_K=in_k, IN_LAM=in_lam),
        )  # fmt: skip
    return dk, dlam
