"""Reductions over rows (m, n) and over blocks of a row; those over rows give (m, 1)."""

from __future__ import annotations

import numpy as np

from ._types import Array, Bools, Ints


def row_sum(values: Array | Bools) -> Array:
    return np.sum(values, axis=-1, keepdims=True, dtype=np.float64)


def row_any(flags: Bools) -> Bools:
    return np.asarray(np.any(flags, axis=-1, keepdims=True))


def row_max(values: Array) -> Array:
    """-inf for rows of length 0."""
    return np.max(values, axis=-1, keepdims=True, initial=-np.inf)


def block_sum(values: Array, block: Ints) -> Array:
    """For every entry the sum of ``values`` over its block (ids in [0, n]), as (m, n)."""
    rows, n = values.shape
    ids = block + (n + 1) * np.arange(rows)[:, None]
    sums = np.bincount(ids.ravel(), weights=values.ravel(), minlength=rows * (n + 1))
    return sums[ids]
