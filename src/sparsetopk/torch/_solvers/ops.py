"""The solvers as torch operators, for tracing, exporting and batching. None has a derivative: they are
called on detached tensors, and what they solve is written again in ordinary operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._maths.operator import Operator
from .._fused import kernels
from .._private import is_tracing
from .._triton import state
from . import vectorized

_library = torch.library.Library("sparsetopk", "DEF")
_library.define("threshold(Tensor x, Tensor k, Tensor lam, int op, float exponent) -> Tensor")


def threshold(
    x: Tensor, k: Tensor, lam: Tensor, op: int, exponent: float, hard: bool | None = None
) -> Tensor:
    """``vectorized.state_of``, for detached rows x (m, n) with k and lam (m, 1).

    On the CPU, and where there are kernels, a call of the operator, which tracers keep as it is;
    elsewhere the operations themselves, which they can fuse.
    """
    if not torch.compiler.is_compiling() and is_tracing():
        kernels.check_not_onnx()
    if x.device.type == "cpu" or state.takes(x, x.shape[-1], Operator(op, exponent)):
        return torch.ops.sparsetopk.threshold(x, k, lam, op, exponent)
    return vectorized.state_of(x, k, lam, op, exponent, hard=hard)


def _threshold(x: Tensor, k: Tensor, lam: Tensor, op: int, exponent: float) -> Tensor:
    if state.takes(x, x.shape[-1], Operator(op, exponent)):
        return state.solve(x, k, lam, op, exponent).to(k.dtype)
    return vectorized.state_of(x, k, lam, op, exponent)


def _threshold_cpu(x: Tensor, k: Tensor, lam: Tensor, op: int, exponent: float) -> Tensor:
    operator = Operator(op, exponent, False)
    if not kernels.has(operator) or x.numel() == 0:
        return vectorized.state_of(x, k, lam, op, exponent, stop_early=True)
    x, k, lam = (kernels.bare(v.contiguous()) for v in (x, k, lam))
    k_rows, lam_rows = (kernels.Numbers.of(v, x.shape[0]) for v in (k, lam))
    return kernels.forward(x, k_rows, lam_rows, operator)[1]


def _threshold_meta(x: Tensor, k: Tensor, lam: Tensor, op: int, exponent: float) -> Tensor:
    kernels.check_not_onnx()
    return k.new_empty((x.shape[0], 2))


def _threshold_vmap(
    info: Any, in_dims: tuple[Any, ...], x: Tensor, k: Tensor, lam: Tensor, op: int, exponent: float
) -> tuple[Tensor, int]:
    """The batch becomes more rows."""

    def batched(value: Tensor, dim: int | None) -> Tensor:
        if dim is None:
            return value.expand(info.batch_size, *value.shape)
        return value.movedim(dim, 0)

    x, k, lam = (batched(value, dim) for value, dim in zip((x, k, lam), in_dims[:3], strict=True))
    rows = x.shape[:2]
    x, k, lam = (value.reshape(rows[0] * rows[1], value.shape[-1]) for value in (x, k, lam))
    return torch.ops.sparsetopk.threshold(x, k, lam, op, exponent).reshape(*rows, 2), 0


_library.impl("threshold", _threshold, "CompositeExplicitAutograd")
_library.impl("threshold", _threshold_cpu, "CPU")
_library.impl("threshold", _threshold_meta, "Meta")
torch.library.register_vmap("sparsetopk::threshold", _threshold_vmap, lib=_library)
