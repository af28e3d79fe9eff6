"""The compiled core, for NumPy arrays. The only module that calls it by array; tensors go by address.

Without it (no compiler where the package was built) ``native`` is None, and everything is computed in
NumPy or in torch operations.
"""

from __future__ import annotations

import os
import sysconfig
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
    _remedy = "Install a wheel, or a C++17 compiler and build again."
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        _remedy = "It is for Python with the GIL, and this is a free-threaded build."
    warnings.warn(
        "sparsetopk was installed without its compiled core: everything works, but much slower. "
        + _remedy,
        RuntimeWarning,
        stacklevel=2,
    )
else:
    layout.check(native.layout())

__all__ = ["THREADS", "SolvedTopK", "choose_lam", "native", "solve_topk"]


def _threads(text: str) -> int:
    if text.isascii() and text.isdigit() and 1 <= int(text) <= _MOST_THREADS:
        return int(text)
    warnings.warn(
        f"SPARSETOPK_THREADS must be a number from 1 to {_MOST_THREADS}, got {text!r}; 1 is used",
        RuntimeWarning,
        stacklevel=2,
    )
    return 1


_MOST_THREADS = 1024

#: How many threads NumPy calls may use; tensors use what torch allows.
THREADS = _threads(os.environ.get("SPARSETOPK_THREADS", "1"))

_FLOAT64 = layout.DTYPES["float64"]


class SolvedTopK(NamedTuple):
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


def solve_topk(operator: Operator, x: Array, k: Array, lam: Array) -> SolvedTopK:
    """The output and the thresholds of rows x (m, n) with k and lam (m, 1), in any state."""
    x, k, lam = (np.ascontiguousarray(array) for array in (x, k, lam))
    solved = SolvedTopK(operator, x, k, lam, np.empty_like(x), np.empty((x.shape[0], 2)))
    native.threshold_forward(*solved._arguments(solved.y))
    return solved


def choose_lam(
    operator: Operator, x: Array, k: Array, fractional: int, least: float, dtype: np.dtype[Any]
) -> Array:
    """The lam (m, 1) that leaves so many entries fractional in this dtype, that of x once."""
    x = np.ascontiguousarray(x, dtype.name)  # and in the order of bytes of the machine
    k, lam = np.ascontiguousarray(k), np.empty_like(k)
    at, of_k, to = (array.ctypes.data for array in (x, k, lam))
    number, (rows, n) = layout.DTYPES[x.dtype.name], x.shape
    native.choose_lam(
        *operator[:2], number, rows, n, n, at, of_k, 1, fractional, least, to, THREADS
    )
    return lam
