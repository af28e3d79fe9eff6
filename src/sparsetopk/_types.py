"""Names for the types that the whole package uses."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._maths.scalars import PhiName

Array = NDArray[np.float64]
Ints = NDArray[np.intp]
Bools = NDArray[np.bool_]
FloatArray = NDArray[np.floating[Any]]
"""What the front-end returns: the floating dtype of its input."""

Axis = int | tuple[int, ...] | None
"""The axes that make up one row, in their order; None is all of them."""
Axes = int | tuple[int, ...]
"""The same, counted from the front."""

Solver = Literal["threshold", "pav", "dykstra", "bca"]
IsotonicSolver = Literal["pav", "dykstra", "bca"]
Completion = Literal["spread", "best"]
Reduction = Literal["mean", "sum", "none"]


class SolverOptions(TypedDict, total=False):
    """How long a solver works: to ``tol``, or (``max_iter`` alone) exactly so many iterations."""

    tol: float
    max_iter: int


__all__ = [
    "Array",
    "ArrayLike",
    "Axes",
    "Axis",
    "Bools",
    "Completion",
    "FloatArray",
    "Ints",
    "IsotonicSolver",
    "PhiName",
    "Reduction",
    "Solver",
    "SolverOptions",
]
