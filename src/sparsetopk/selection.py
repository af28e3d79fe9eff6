"""Top-k as a fixed number of slots (values and indices), and the lam that leaves so many fractional."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._types import Array, Bools, FloatArray
from .arguments import Rows, check_positive_int, regularizer
from .hard import descending_order
from .operators import topk_mag, topk_mask
from .phis import PHIS
from .relaxed import TopKProblem
from .rowwise import row_sum
from .threshold import order_statistic

# The search for lam: in steps of this factor, so many of them, within these bounds.
_STEP, _STEPS, _SMALLEST = 16.0, 40, 1e-300


class Selection(NamedTuple):
    """The nonzero entries of a relaxed top-k, in slots along the axis."""

    values: FloatArray
    indices: NDArray[np.int64]
    dropped: FloatArray


def default_capacity(k: float, n: int) -> int:
    """k slots and a quarter more, at least 8, for the entries that are shared at the boundary."""
    return min(n, math.ceil(k) + max(8, math.ceil(k / 4)))


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
    phi = PHIS["half_square" if magnitude else "identity"]
    problem = TopKProblem.of(Rows.of("x", x, axis), k, 1.0, regularizer(p, two_sided), phi)
    fractional = min(check_positive_int("fractional", fractional), problem.rows.n)

    margin = 64 * np.finfo(np.float64).eps * np.maximum(problem.k, 1.0)

    def enough(lam: Array) -> Bools:
        at = replace(problem, lam=lam)
        counted = at.solution.block == 0
        if not magnitude:  # what is fractional in the dtype of x
            counted = counted & (
                at.mask < 1 - margin
            )  # a rounding of the threshold must not decide
            y = at.mask.astype(problem.rows.dtype)
            counted = counted & (y > 0) & (y < 1)
        return row_sum(counted) >= fractional

    with np.errstate(over="ignore", under="ignore"):
        scale = _scale(problem, p, fractional)
        lam = (1 + 1e-9) * _smallest(enough, scale)
    return problem.rows.unflatten(problem.row_results(lam))


def _scale(problem: TopKProblem, p: float, fractional: int) -> Array:
    """The scale of lam that leaves ``fractional`` entries open, by the scaling laws.

    From the distance over so many entries to both sides of the boundary, and not from the whole row,
    which may have outliers. For magnitude, lam g^(p-1) is such a distance, g the size at the boundary.
    """
    x, n = problem.x, problem.rows.n
    limit = np.finfo(np.float64).max
    x = np.clip(x, -limit, limit)
    i = np.concatenate([problem.k - fractional, problem.k + fractional, problem.k], axis=-1)
    if x.size == 0:
        return np.ones_like(problem.k)
    stats = order_statistic(x, np.clip(np.ceil(i), 1, n).astype(np.intp))
    distance = stats[:, 0:1] / 2 - stats[:, 1:2] / 2
    if problem.phi.even:
        g = np.where(stats[:, 2:] > 0, stats[:, 2:], 1.0)
        distance = distance / g ** (p - 1.0)
    return np.clip(np.where(distance > 0, distance, 1.0), _SMALLEST, 1.0 / _SMALLEST)


def _smallest(enough: Callable[[Array], Bools], scale: Array) -> Array:
    """The smallest lam for which ``enough`` holds, row by row; ``scale`` where none was found."""
    found, missed = scale.copy(), scale.copy()
    for factor, looking_for in ((_STEP, True), (1.0 / _STEP, False)):
        lam = scale
        for _ in range(_STEPS):  # up until it is enough, down until it is not
            holds = enough(lam)
            found, missed = np.where(holds, lam, found), np.where(holds, missed, lam)
            if np.all(holds == looking_for):
                break
            lam = np.where(
                holds == looking_for, lam, np.clip(lam * factor, _SMALLEST, 1 / _SMALLEST)
            )
    possible = enough(found)
    lo, hi = np.log(np.minimum(missed, found)), np.log(found)
    for _ in range(30):
        middle = (lo + hi) / 2
        holds = enough(np.exp(middle))
        lo, hi = np.where(holds, lo, middle), np.where(holds, middle, hi)
    return np.where(possible, np.exp(hi), scale)
