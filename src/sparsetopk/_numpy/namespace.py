# mypy: implicit-reexport
"""NumPy as the namespace that ``sparsetopk._maths`` is written over."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy import (  # noqa: F401
    abs,
    broadcast_arrays,
    cumsum,
    exp,
    finfo,
    floor,
    full_like,
    hypot,
    iinfo,
    inf,
    int32,
    isfinite,
    isnan,
    log,
    maximum,
    minimum,
    nan,
    ones_like,
    sign,
    sqrt,
    take_along_axis,
    where,
    zeros_like,
)

from .._maths.dykstra import ConvergenceError
from .._maths.operator import Count
from .._maths.root import LIMIT, increasing_root
from .._types import Array

still = sys.modules[__name__]


def quiet() -> np.errstate:
    """No warnings of overflow or 0/0: the maths expects these on the way, and looks at its results."""
    return np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore")


def astype(x: Any, dtype: Any) -> Any:
    return np.asarray(x).astype(dtype)


def clip(x: Any, low: Any, high: Any) -> Any:
    return np.clip(x, low, high)


def concat(arrays: Sequence[Any], axis: int) -> Any:
    return np.concatenate(arrays, axis=axis)


def total(x: Any) -> Any:
    return np.sum(x, axis=-1, keepdims=True)


def largest(x: Any) -> Any:
    """-inf for rows of length 0."""
    return np.max(x, axis=-1, keepdims=True, initial=-np.inf)


def pad_end(x: Any, by: int, fill: Any) -> Any:
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, by)], constant_values=fill)


def take(x: Any, at: Any, axis: int) -> Any:
    """Indices beyond the ends are those of the ends."""
    return np.take(x, at, axis=axis, mode="clip")


def index(x: Any) -> Any:
    return np.arange(x.shape[-1])


def sort(x: Any) -> tuple[Any, Any]:
    from .hard import descending_order  # which may be compiled

    order = descending_order(x)
    return np.take_along_axis(x, order, axis=-1), order


def unsort(order: Any, *values: Any) -> tuple[Any, ...]:
    def put(values: Any) -> Any:
        out = np.empty_like(values)
        np.put_along_axis(out, order, values, axis=-1)
        return out

    return tuple(map(put, values))


def block_sum(values: Any, block: Any) -> Any:
    """Rows (..., m, n) of values, for block ids (m, n) in [0, n]."""
    n, rows = values.shape[-1], int(np.prod(values.shape[:-1]))
    ids = np.broadcast_to(block, values.shape).reshape(rows, n) + (n + 1) * np.arange(rows)[:, None]
    sums = np.bincount(ids.ravel(), weights=values.ravel(), minlength=rows * (n + 1))
    return sums[ids].reshape(values.shape)


def bits(x: Any) -> Any:
    return np.ascontiguousarray(x).view(np.int64)


def from_bits(bits: Any, dtype: Any) -> Any:
    return bits.view(dtype)


def stop_gradient(x: Any) -> Any:
    return x


def with_derivative(f: Callable[..., Any], derivative: Callable[..., Any]) -> Callable[..., Any]:
    return f


def while_loop(
    busy: Callable[[Any], Any], step: Callable[[int, Any], Any], state: Any, limit: int
) -> Any:
    for i in range(limit):
        if not busy(state).any():
            break
        state = step(i, state)
    return state


def bit_length(n: int) -> int:
    return n.bit_length()


shorter = min


def repeat(count: int, step: Callable[[int, Any], Any], state: Any, when: Any | None = None) -> Any:
    for i in range(count):
        state = step(i, state)
    return state


def sums(values: Sequence[Any], linear: bool = False) -> list[Any]:
    """As ``response`` asks for them."""
    return [total(v) for v in values]


def split(k: Array) -> Count:
    """k in its two parts."""
    whole = np.floor(k)
    return Count(whole.astype(np.int64), k - whole)


@dataclass(frozen=True)
class Whole:
    """Rows (m, n); see ``threshold.Row``."""

    x: Array

    is_bracketed: ClassVar[bool] = False

    @property
    def n(self) -> int:
        return self.x.shape[-1]

    def sums(self, f: Callable[[Array], Sequence[Any]]) -> list[Any]:
        return sums(f(self.x))

    def ends(self, even: bool, k: Count, lam: Array) -> tuple[Array, Array]:
        a = np.abs(self.x) if even else self.x
        finite = np.isfinite(a)
        low, high = -largest(np.where(finite, -a, -np.inf)), largest(np.where(finite, a, -np.inf))
        return np.where(np.isfinite(low), low, 0.0), np.where(np.isfinite(high), high, 0.0)

    def nth(self, i: Any, dtype: Any, even: bool, wanted: Any) -> Array:
        a = np.abs(self.x) if even else self.x
        at = np.clip(a.shape[-1] - i, 0, a.shape[-1] - 1)
        return np.take_along_axis(np.partition(a, np.unique(at), axis=-1), at, axis=-1)


def bracketed_root(
    f: Callable[[Array], tuple[Array, Array, Array]],
    lo: Array,
    hi: Array,
    *,
    start: Array | None = None,
    limit: int = LIMIT,
) -> Array:
    """The root of an increasing f in [lo, hi] to float resolution, elementwise."""
    with quiet():
        start = lo + (hi - lo) / 2 if start is None else start
        unit, rows = np.zeros_like(lo), np.ones(lo.shape, dtype=bool)
        root = increasing_root(
            still, f, lo, hi, start=start, tol=0.0, unit=unit, rows=rows, limit=limit
        )
    if not root.done.all():
        worst = np.max(np.where(root.done, 0.0, root.residual))
        raise ConvergenceError(f"a scalar equation still has a residual of {worst:.2e}")
    return root.best
