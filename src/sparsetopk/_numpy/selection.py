"""Top-k as a fixed number of slots (values and indices), and the lam that leaves so many fractional."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .._checks import check_exponent, check_positive_int
from .._maths import select
from .._maths.operator import MAGNITUDE, MASK, TWO_SIDED, Operator
from .._maths.response import Relaxed
from .._maths.select import Window, default_capacity
from .._types import Array, FloatArray
from . import namespace as xp
from .arguments import Rows
from .hard import descending_order
from .operators import topk_mag, topk_mask
from .relaxed import TopKProblem


class Selection(NamedTuple):
    """The nonzero entries of a relaxed top-k, in slots along the axis."""

    values: FloatArray
    indices: NDArray[np.int64]
    dropped: FloatArray


def topk_select(
    x: ArrayLike,
    k: ArrayLike,
    lam: ArrayLike = 0.1,
    *,
    p: float = 2.0,
    two_sided: bool = False,
    magnitude: bool = False,
    axis: int = -1,
    capacity: int | None = None,
) -> Selection:
    """The nonzero entries of ``topk_mask(x)``, or with ``magnitude=True`` of ``topk_mag(x)``.

    Returns values and indices with ``capacity`` slots along the axis. Indices increase strictly, so
    that scattering the values back is safe; unused slots have value 0. A row with more nonzeros than
    slots keeps the largest; ``dropped`` is the sum of the magnitudes left out, one per row. The
    default capacity is ``min(n, ceil(k) + max(8, ceil(k/4)))``; it must be given if k is an array.

    The derivative of the values is that of the operator at the indices.

    >>> selection = topk_select([3.0, -1.0, 1.0, 0.95], k=2, capacity=3)
    >>> selection.values, selection.indices
    (array([1.  , 0.75, 0.25]), array([0, 2, 3]))
    """
    if magnitude and two_sided:
        raise ValueError("two_sided must be False when magnitude=True, got True")
    if magnitude:
        y = topk_mag(x, k, lam, p=p, axis=axis)
    else:
        y = topk_mask(x, k, lam, p=p, two_sided=two_sided, axis=axis)
    n = y.shape[axis]
    if capacity is None:
        if np.ndim(k):
            raise ValueError(
                f"capacity must be given when k is an array, got k of shape {np.shape(k)}"
            )
        capacity = default_capacity(float(np.asarray(k)), n)
    elif n:
        check_positive_int("capacity", capacity, at_most=n)
    size = np.moveaxis(np.abs(y), axis, -1)
    # A row of NaN sorts like any other: its slots are NaN.
    kept = np.sort(descending_order(size)[..., :capacity], axis=-1)
    indices = np.moveaxis(kept, -1, axis).astype(np.int64)
    values = np.take_along_axis(y, indices, axis=axis)
    left_out = size.astype(np.float64)
    np.put_along_axis(left_out, kept, 0.0, axis=-1)
    dropped = np.where(np.isnan(values).any(axis=axis), np.nan, left_out.sum(axis=-1))
    with np.errstate(over="ignore"):
        return Selection(values, indices, dropped.astype(y.dtype))


def choose_lam(
    x: ArrayLike,
    k: ArrayLike,
    fractional: int = 8,
    *,
    p: float = 2.0,
    two_sided: bool = False,
    magnitude: bool = False,
    axis: int = -1,
) -> Array:
    """The smallest lam, per row, that leaves at least ``fractional`` entries between 0 and 1.

    The number of fractional entries increases with lam from none (the hard operator) to n, and it is
    what a choice of lam decides: how many entries compete, and so receive a gradient. The result has
    length 1 along the axis and can be given as ``lam`` to ``topk_mask`` or, with ``magnitude=True``, to
    ``topk_mag``; for ``topk_sign`` take ``choose_lam(abs(x), ...)``. Where no lam can do it (k = 0,
    k = n), it is the scale of the row. At most n entries are asked for.

    >>> x = np.linspace(0.0, 1.0, 101)
    >>> lam = choose_lam(x, k=10, fractional=8)
    >>> y = topk_mask(x, k=10, lam=lam)
    >>> int(np.sum((y > 0) & (y < 1)))
    8
    """
    if magnitude and two_sided:
        raise ValueError("two_sided must be False when magnitude=True, got True")
    op = MAGNITUDE if magnitude else TWO_SIDED if two_sided else MASK
    rows, operator = Rows.of("x", x, axis), Operator(op, check_exponent(p))
    problem = TopKProblem.of(rows, k, 1.0, operator)
    fractional = min(check_positive_int("fractional", fractional), rows.n)
    if rows.data.size == 0:
        return rows.unflatten(np.ones_like(problem.k))
    bad = ~np.isfinite(rows.data) if magnitude else np.isnan(rows.data)
    invalid = bad.any(axis=-1, keepdims=True)
    data = np.where(invalid, 0.0, np.abs(rows.data) if magnitude else rows.data)
    s = -np.sort(-data, axis=-1)
    with xp.quiet():
        window = Window.of(xp, s, rows.n, xp.split(problem.k), fractional)
        inside = replace(rows, data=window.s)

        def relax(lam: Array) -> Relaxed:
            k = window.k.whole + window.k.frac
            return replace(problem, rows=inside, k=k, lam=lam).relaxed

        lam = select.choose_lam(xp, window, operator, fractional, relax, rows.dtype)
    return rows.unflatten(np.where(invalid, np.nan, lam))
