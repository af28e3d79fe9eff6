"""Checks of arrays, and the way between arrays and rows.

Every operator works on rows: the axis moves last, the other axes are flattened, the numbers become
float64. ``Rows`` does that, and puts results back into the shape and dtype of the input.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .._checks import check_axes, check_broadcast, check_flags, check_per_row, show
from .._types import Array, Axes, Axis, Bools, FloatArray

_FLOATS = (np.float16, np.float32, np.float64)
_Scalar = TypeVar("_Scalar", bound=np.generic)


def as_float_array(name: str, value: ArrayLike) -> FloatArray:
    try:
        array = np.asarray(value)
    except ValueError as error:  # a ragged list
        raise ValueError(f"{name} must be a rectangular array: {error}") from None
    if array.dtype.type not in _FLOATS:
        raise TypeError(
            f"{name} must be an array of dtype float16, float32 or float64, got {array.dtype}"
        )
    return array


def as_real_array(name: str, value: ArrayLike) -> Array:
    """float64, from any real numbers (k and lam may be integers)."""
    array = np.asarray(value)
    if array.dtype.kind not in "iuf":
        raise TypeError(f"{name} must be a real number or an array of them, got {show(value)}")
    return array.astype(np.float64)


@dataclass(frozen=True)
class Rows:
    """An array as rows (m, n) of float64, and the way back."""

    name: str  # of the argument, for errors
    data: Array
    shape: tuple[int, ...]  # of the array as it came
    axis: Axes
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, name: str, value: ArrayLike, axis: Axis, *, many: bool = False) -> Rows:
        """``many`` says whether several axes may make up a row."""
        array = as_float_array(name, value)
        axis = check_axes(name, array.shape, axis, many)
        rows = cls(name, np.empty(0), array.shape, axis, array.dtype)
        return replace(rows, data=rows.flatten(array).astype(np.float64))

    @property
    def axes(self) -> tuple[int, ...]:
        return self.axis if isinstance(self.axis, tuple) else (self.axis,)

    @property
    def n(self) -> int:
        return math.prod(self.shape[i] for i in self.axes)

    @property
    def leading(self) -> tuple[int, ...]:
        return tuple(size for i, size in enumerate(self.shape) if i not in self.axes)

    @property
    def _per_row(self) -> tuple[int, ...]:
        return tuple(1 if i in self.axes else size for i, size in enumerate(self.shape))

    def flatten(self, array: NDArray[_Scalar]) -> NDArray[_Scalar]:
        """An array of the input's shape as (m, n)."""
        last = tuple(range(-len(self.axes), 0))
        return np.moveaxis(array, self.axes, last).reshape(math.prod(self.leading), self.n)

    def unflatten(self, rows: NDArray[_Scalar]) -> NDArray[_Scalar]:
        """(m, any length) back to the input's shape, with that length along the axis; of several axes,
        n or 1."""
        lengths: tuple[int, ...] = (rows.shape[-1],)
        if len(self.axes) > 1:
            lengths = tuple(self.shape[i] if rows.shape[-1] == self.n else 1 for i in self.axes)
        last = tuple(range(-len(self.axes), 0))
        return np.moveaxis(rows.reshape((*self.leading, *lengths)), last, self.axes)

    def restore(self, rows: Array) -> FloatArray:
        """As ``unflatten``, in the input's dtype."""
        with np.errstate(over="ignore"):
            return self.unflatten(rows).astype(self.dtype)

    def restore_derivative(self, rows: Array) -> FloatArray:
        """The same for a derivative: as large as the dtype has it, where a slope is larger."""
        return self.restore(self._bounded(rows))

    def _bounded(self, values: Array) -> Array:
        limit = float(np.finfo(self.dtype).max)
        return np.clip(values, -limit, limit)

    def restore_scalars(self, rows: Array) -> FloatArray:
        """(m, 1) back to the input's shape without the axis."""
        with np.errstate(over="ignore"):
            return rows.reshape(self.leading).astype(self.dtype)

    def restore_matrices(self, matrices: Array) -> FloatArray:
        """(m, n, n) with the leading axes of the input in front."""
        matrices = self._bounded(matrices)
        with np.errstate(over="ignore"):
            return matrices.reshape((*self.leading, *matrices.shape[1:])).astype(self.dtype)

    def per_row(self, name: str, value: ArrayLike) -> Array:
        """A number, or an array that broadcasts with length 1 along the axis, as (m, 1)."""
        array = as_real_array(name, value)
        check_per_row(name, array.shape, self._per_row, self.name, f"axis {self.axis}")
        return np.broadcast_to(array, self._per_row).reshape(-1, 1)

    def sum_to(self, rows: Array, like: ArrayLike) -> Array:
        """Undo ``per_row`` for a cotangent: sum (m, 1) over what was broadcast from ``like``."""
        shape = np.shape(like)
        full = rows.reshape(self._per_row)
        full = full.sum(axis=tuple(range(full.ndim - len(shape))))
        spread = tuple(i for i, length in enumerate(shape) if length == 1)
        return full.sum(axis=spread, keepdims=True)

    def flags(self, name: str, value: ArrayLike) -> Bools:
        """Booleans that broadcast to the shape of the input, as rows."""
        array = np.asarray(value)
        check_flags(name, array.dtype == bool, show(value))
        check_broadcast(name, array.shape, self.shape)
        return self.flatten(np.broadcast_to(array, self.shape))

    def tangent(self, name: str, value: ArrayLike) -> Array:
        """An array of the same shape, as rows."""
        array = as_real_array(name, value)
        if array.shape != self.shape:
            raise ValueError(f"{name} must have shape {self.shape}, got {array.shape}")
        return self.flatten(array)


def check_k(k: Array, n: int) -> Array:
    bad = ~((k >= 0) & (k <= n))
    if bad.any():
        raise ValueError(f"k must be in [0, n] with n={n}, got {k[bad].flat[0]}")
    return k


def check_lam(lam: Array) -> Array:
    bad = ~((lam >= 0) & (lam < np.inf))
    if bad.any():
        raise ValueError(f"lam must be finite and at least 0, got {lam[bad].flat[0]}")
    return lam
