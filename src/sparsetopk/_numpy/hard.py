"""The hard operators that the paper starts from (section 3). Ties: the lowest index comes first."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .._core import native
from .._types import Array, FloatArray, Ints
from .arguments import Rows, as_float_array

_LONGEST_ROW = 2**32  # the compiled sort counts entries in 32 bits


def descending_order(x: Array) -> Ints:
    """The permutation that sorts the last axis in decreasing order, stable; NaN comes last."""
    n = x.shape[-1]
    if native is None or n >= _LONGEST_ROW:
        return np.argsort(-x, axis=-1, kind="stable")
    x, order = np.ascontiguousarray(x, dtype=np.float64), np.empty(x.shape, dtype=np.int64)
    rows = math.prod(x.shape[:-1])
    native.argsort_descending(x.itemsize, rows, n, x.ctypes.data, order.ctypes.data)
    return order


def ranks(order: Ints) -> Ints:
    """The inverse permutation: the position, from 0, of every entry in the sorted row."""
    out = np.empty_like(order)
    np.put_along_axis(out, order, np.broadcast_to(np.arange(order.shape[-1]), order.shape), axis=-1)
    return out


def ones_k(k: Array, n: int) -> Array:
    """1_k as rows (m, n): floor(k) ones, then the fraction of k, then zeros."""
    return np.clip(k - np.arange(n), 0.0, 1.0)


def hard_mask(x: Array, k: Array) -> Array:
    """Top-k mask of rows, lam = 0; -inf entries are no candidates."""
    k = np.minimum(k, np.sum(x > -np.inf, axis=-1, keepdims=True))
    return np.take_along_axis(ones_k(k, x.shape[-1]), ranks(descending_order(x)), axis=-1)


def _permutation(x: ArrayLike, axis: int, descending: bool, inverse: bool) -> NDArray[np.int64]:
    rows = Rows.of("x", x, axis)
    order = descending_order(rows.data if descending else -rows.data)
    return rows.unflatten(ranks(order) + 1 if inverse else order).astype(np.int64)


def argsort(x: ArrayLike, *, descending: bool = True, axis: int = -1) -> NDArray[np.int64]:
    """The permutation sigma, from 0, with x[sigma_1] >= ... >= x[sigma_n].

    >>> argsort([0.1, 0.9, 0.5])
    array([1, 2, 0])
    """
    return _permutation(x, axis, descending, inverse=False)


def sort(x: ArrayLike, *, descending: bool = True, axis: int = -1) -> FloatArray:
    """The entries of x in decreasing order.

    >>> sort([0.1, 0.9, 0.5])
    array([0.9, 0.5, 0.1])
    """
    order = argsort(x, descending=descending, axis=axis)
    return np.take_along_axis(as_float_array("x", x), order, axis=axis)


def rank(x: ArrayLike, *, descending: bool = True, axis: int = -1) -> NDArray[np.int64]:
    """The position of every entry in the sorted array, from 1; rank 1 is the largest.

    >>> rank([0.1, 0.9, 0.5])
    array([3, 1, 2])
    """
    return _permutation(x, axis, descending, inverse=True)
