"""The top-k family on NVIDIA's and AMD's GPUs: Triton kernels, in one launch forward and one backward.

``ops`` has them as operators of torch, ``state`` the solver alone; neither imports anything that is not
there without Triton, and the kernels are imported with the first call. A row is held in registers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..._maths.operator import TWO_SIDED, Operator


def compute_dtype(x: Tensor, operator: Operator) -> torch.dtype:
    """What rows are computed in: float32, unless x is wider, or p > 2, where S is as steep as it likes
    and a rounding of its argument costs half of all digits."""
    is_steep = operator.exponent < 1 and operator.op != TWO_SIDED
    return torch.float64 if x.dtype == torch.float64 or is_steep else torch.float32


def longest(x: Tensor, operator: Operator) -> int:
    """The length up to which rows stay in registers."""
    return 8192 if compute_dtype(x, operator) == torch.float64 else 16384
