"""The top-k family on NVIDIA's and AMD's GPUs: Triton kernels, in one launch forward and one backward,
or five and two for rows that are longer than the registers of a program.

``ops`` has them as operators of torch, ``state`` the solver alone; neither imports anything that is not
there without Triton, and the kernels are imported with the first call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..._maths.operator import TWO_SIDED, Operator

LONGEST = 1 << 30
"""The length up to which rows have kernels."""


def compute_dtype(dtype: torch.dtype, operator: Operator) -> torch.dtype:
    """What rows are computed in: float32, unless they are wider, or p > 2, where S is as steep as it
    likes and a rounding of its argument costs half of all digits."""
    is_steep = operator.exponent < 1 and operator.op != TWO_SIDED
    return torch.float64 if dtype == torch.float64 or is_steep else torch.float32


def longest_in_registers(dtype: torch.dtype, operator: Operator) -> int:
    """The length up to which one program holds a row."""
    return 8192 if compute_dtype(dtype, operator) == torch.float64 else 16384


def is_long(x: Tensor, operator: Operator) -> bool:
    """Whether rows (m, n) are too long for the registers of one program."""
    return x.shape[-1] > longest_in_registers(x.dtype, operator)
