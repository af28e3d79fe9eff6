"""The compiled core, for NumPy arrays. The only module that calls it by array; tensors go by address.

Without it (no compiler where the package was built) ``native`` is None, and everything is computed in
NumPy or in torch operations.
"""

from __future__ import annotations

import os
import warnings
from typing import Any, NamedTuple

import numpy as np

from .._maths.operator import Operator
from .._types import Array
from . import layout

try:
    from . import _native as native
except ImportError:
    native = None  # type: ignore[assignment]
    warnings.warn(
        "sparsetopk was installed without its compiled core: everything works, but much slower. "
        "Install a wheel, or a C++17 compiler and build again.",
        RuntimeWarning,
        stacklevel=2,
    )
else:
    layout.check(native.layout())

__all__ = ["THREADS", "Solved", "native", "solve"]

#: How many threads NumPy calls may use; tensors use what torch allows.
THREADS = int(os.environ.get("SPARSETOPK_THREADS", "1"))

_FLOAT64 = layout.DTYPES["float64"]


class Solved(NamedTuple):
    """Rows (m, n) that the core has solved; see ``State`` in csrc/problem.hpp."""

    operator: Operator
    x: Array
    k: Array
    lam: Array
    y: Array
    state: Array  # (m, 2): pivot and delta

    def vjp(self, dy: Array) -> tuple[Array, Array, Array]:
        """The cotangents of x (m, n), and of k and lam (m, 1)."""
        dy, dx = np.ascontiguousarray(dy), np.empty_like(self.x)
        dk, dlam = np.empty_like(self.k), np.empty_like(self.lam)
        native.threshold_backward(*self._arguments(dy, dx, dk, dlam))
        return dx, dk, dlam

    def _arguments(self, *arrays: Array) -> tuple[Any, ...]:
        rows, n = self.x.shape
        addresses = (array.ctypes.data for array in arrays)
        x, k, lam, state = (a.ctypes.data for a in (self.x, self.k, self.lam, self.state))
        return (*self.operator, _FLOAT64, rows, n, n, x, k, 1, lam, 1, state, *addresses, THREADS)


def solve(operator: Operator, x: Array, k: Array, lam: Array) -> Solved:
    """The output and the thresholds of rows x (m, n) with k and lam (m, 1), in any state."""
    x, k, lam = (np.ascontiguousarray(array) for array in (x, k, lam))
    solved = Solved(operator, x, k, lam, np.empty_like(x), np.empty((x.shape[0], 2)))
    native.threshold_forward(*solved._arguments(solved.y))
    return solved
