"""The solver kernel alone, as an operator of torch: the state of every row.

What is differentiated twice, forward or by ``torch.func`` is written in ordinary operations on top.
Nothing here imports Triton, which comes with the first call of a kernel.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from ..._maths.operator import EXP, Operator
from . import LONGEST, compute_dtype, is_long, longest_in_registers

Number = float | Tensor
"""k or lam: a number, or a tensor (1, 1) or (m, 1)."""

# A schema has no place for a number or a tensor: each is a tensor or None, with a number beside it.
NUMBERS = "Tensor? k, float k_number, Tensor? lam, float lam_number"

# The kernels need Triton 3.5, which comes with torch 2.9; an older torch has an older one.
_HAS_TRITON = importlib.util.find_spec("triton") is not None and torch.__version__ >= "2.9"
_library = torch.library.Library("sparsetopk", "FRAGMENT")
_library.define("rows_state(Tensor x, Tensor k, Tensor lam, int op, float exponent) -> Tensor")


def either(tensor: Tensor | None, number: float) -> Number:
    return number if tensor is None else tensor


def is_served(x: Tensor) -> bool:
    """Whether there are kernels for the device of x: CUDA, or ROCm, which has the same name."""
    return x.is_cuda and _HAS_TRITON


def takes(x: Tensor, n: int, operator: Operator) -> bool:
    """Whether there is a kernel for rows of n entries of x."""
    return is_served(x) and 0 < n <= LONGEST and x.numel() > 0 and operator.op != EXP


def takes_short(x: Tensor, n: int, operator: Operator) -> bool:
    """Whether there is a kernel that holds rows of n entries of x in registers."""
    return takes(x, n, operator) and n <= longest_in_registers(x.dtype, operator)


def solve(x: Tensor, k: Tensor, lam: Tensor, op: int, exponent: float) -> Tensor:
    """The state (m, 2) of rows x (m, n) for k and lam (m, 1), which there must be a kernel for."""
    rows = (v.contiguous() for v in (x, k, lam))
    return torch.ops.sparsetopk.rows_state(*rows, op, exponent)[:, :2]


def _state(x: Tensor, k: Tensor, lam: Tensor, op: int, exponent: float) -> Tensor:
    from . import launch

    return launch.forward(x, k, lam, Operator(op, exponent), write=False)[1]


def meta(x: Tensor, operator: Operator, problems: int = 1) -> Tensor:
    """A state that nobody has solved for; of so many problems a row. Of long rows it also says where
    hard ones are cut."""
    columns = 3 if is_long(x, operator) else 2 * problems
    return x.new_empty((x.shape[0], columns), dtype=compute_dtype(x.dtype, operator))


def _state_meta(x: Tensor, k: Tensor, lam: Tensor, op: int, exponent: float) -> Tensor:
    return meta(x, Operator(op, exponent))


_library.impl("rows_state", _state, "CompositeExplicitAutograd")
_library.impl("rows_state", _state_meta, "Meta")
