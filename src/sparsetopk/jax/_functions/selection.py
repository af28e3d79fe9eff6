"""Top-k as a fixed number of slots (values and indices), and the lam that leaves so many fractional."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..._checks import check_exponent, check_positive_int
from ..._maths import select
from ..._maths.operator import MAGNITUDE, MASK, TWO_SIDED, Count, Operator
from ..._maths.response import Relaxed
from ..._maths.select import Window, default_capacity
from ..._maths.threshold import State
from .._rows import namespace as xp
from .._rows.arguments import Number, Rows, check_k_and_lam, compute_dtype, exact
from .._rows.threshold import Setting, relaxed, solve
from .._solvers.plain import Shards, row_sums
from .operators import topk_mag, topk_mask


class Selection(NamedTuple):
    """The nonzero entries of a relaxed top-k, in slots along the axis."""

    values: Array
    indices: Array
    dropped: Array


def topk_select(
    x: Array,
    k: Number,
    lam: Number = 0.1,
    *,
    p: float = 2.0,
    two_sided: bool = False,
    magnitude: bool = False,
    axis: int = -1,
    capacity: int | None = None,
) -> Selection:
    """The nonzero entries of ``topk_mask(x)``, or with ``magnitude=True`` of ``topk_mag(x)``.

    Returns values and indices (int32) with ``capacity`` slots along the axis. Indices increase
    strictly, so that scattering the values back is safe; unused slots have value 0. A row with more
    nonzeros than slots keeps the largest; ``dropped`` is the sum of the magnitudes left out, one per
    row. The default capacity is ``min(n, ceil(k) + max(8, ceil(k/4)))``; it must be given if k is an
    array. It is static: the shapes of the result do not depend on values.

    The derivative of the values is that of the operator at the indices.

    >>> topk_select(jnp.array([3.0, -1.0, 1.0, 0.95]), k=2, capacity=3).indices
    Array([0, 2, 3], dtype=int32)
    """
    _check_magnitude(magnitude, two_sided)
    if magnitude:
        y = topk_mag(x, k, lam, p=p, axis=axis)
    else:
        y = topk_mask(x, k, lam, p=p, two_sided=two_sided, axis=axis)
    rows = Rows.of("y", y, axis)
    return _select(y, rows.axis, _capacity(capacity, k, rows.n))


def _check_magnitude(magnitude: bool, two_sided: bool) -> None:
    if magnitude and two_sided:
        raise ValueError("two_sided must be False when magnitude=True, got True")


def _capacity(capacity: int | None, k: Number, n: int) -> int:
    if capacity is not None:
        return check_positive_int("capacity", capacity, at_most=n) if n else capacity
    if isinstance(k, (Array, np.ndarray)):
        raise ValueError(f"capacity must be given when k is an array, got k of shape {k.shape}")
    return default_capacity(float(k), n)


@partial(jax.jit, static_argnames=("axis", "capacity"))
def _select(y: Array, axis: int, capacity: int) -> Selection:
    rows = Rows("y", y, axis)
    data = rows.data
    indices, lost = select_slots(lax.stop_gradient(data), capacity)
    values = jnp.take_along_axis(data, indices, axis=-1)
    size = jnp.where(lost, jnp.abs(data), 0.0).astype(compute_dtype(y))
    dropped = jnp.where(jnp.isnan(data).any(axis=-1), jnp.nan, size.sum(axis=-1))
    return Selection(rows.unflatten(values), rows.unflatten(indices), dropped.astype(y.dtype))


def select_slots(y: Array, capacity: int) -> tuple[Array, Array]:
    """The indices (..., capacity) of the largest entries of rows (..., n), in order, and flags of the
    entries that have no slot."""
    kept = _largest(y, capacity)
    return _compact(kept, capacity), ~kept


def _largest(y: Array, capacity: int) -> Array:
    """Which entries of each row have the largest magnitudes, as many as there are slots.

    Of equal ones, as are the zeros that fill the slots, the lowest index comes first. NaN is like 0.
    """
    if y.size == 0:
        return jnp.zeros(y.shape, dtype=bool)
    size = jnp.where(jnp.isnan(y), 0.0, jnp.abs(y))
    full = row_sums(size > 0)[0] > capacity
    slots = jnp.full(full.shape, capacity, dtype=jnp.int32)
    boundary = Shards(size).nth(slots, size.dtype, False, full)
    boundary = jnp.where(full, boundary, 0.0)
    left = slots - row_sums(size > boundary)[0]
    tied = size == boundary
    return (size > boundary) | (tied & (jnp.cumsum(tied, axis=-1, dtype=jnp.int32) <= left))


def _compact(kept: Array, capacity: int) -> Array:
    """The indices of the kept entries, in order: flags with ``capacity`` set in each row."""
    slot = jnp.where(kept, jnp.cumsum(kept, axis=-1, dtype=jnp.int32) - 1, capacity)
    index = jnp.broadcast_to(jnp.arange(kept.shape[-1], dtype=jnp.int32), kept.shape)
    slots = jnp.zeros((*kept.shape[:-1], capacity), dtype=jnp.int32)
    put = lambda slots, slot, index: slots.at[slot].set(index, mode="drop")  # noqa: E731
    return jnp.vectorize(put, signature="(c),(n),(n)->(c)")(slots, slot, index)


def choose_lam(
    x: Array,
    k: Number,
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
    k = n), it is the scale of the row. At most n entries are asked for. It has no derivative, and the
    dtype in which the operators compute: float32, or float64 for such x.

    >>> x = jnp.linspace(0.0, 1.0, 101)
    >>> y = topk_mask(x, k=10, lam=choose_lam(x, k=10, fractional=8))
    >>> int(((y > 0) & (y < 1)).sum())
    8
    """
    _check_magnitude(magnitude, two_sided)
    rows, e = Rows.of("x", x, axis), check_exponent(p)
    check_k_and_lam(rows, k, 1.0)
    fractional = min(check_positive_int("fractional", fractional), rows.n)
    if rows.x.size == 0:
        return jnp.ones(rows.per_row_shape, dtype=compute_dtype(rows.x))
    operator = Operator(MAGNITUDE if magnitude else TWO_SIDED if two_sided else MASK, e)
    most = None if isinstance(k, (Array, np.ndarray)) else math.ceil(k)
    return _choose(rows.x, exact(k), rows.axis, operator, fractional, most)


@partial(jax.jit, static_argnames=("axis", "operator", "fractional", "most"))
def _choose(
    x: Array, k: Array | Count, axis: int, operator: Operator, fractional: int, most: int | None
) -> Array:
    rows = Rows("x", lax.stop_gradient(x), axis)
    split = Count(*map(lax.stop_gradient, rows.split(k)))
    x, even = rows.data, operator.phi(xp).even
    a = jnp.abs(x) if even else x
    count = rows.n if most is None else min(rows.n, most + fractional + 1)
    s = lax.top_k(jnp.where(jnp.isnan(a), 0.0, a), count)[0]
    window = Window.of(xp, s, rows.n, split, fractional)
    setting = Setting(operator, False)

    def relax(lam: Array) -> Relaxed:
        _, pivot, delta = solve(window.s, *window.k, lam, setting)
        return relaxed(window.s, window.k, lam, State(pivot, delta), setting)

    lam = select.choose_lam(xp, window, operator, fractional, relax, x.dtype)
    bad = ~jnp.isfinite(x) if even else jnp.isnan(x)
    invalid = (row_sums(bad)[0] > 0) | ~split.is_valid(rows.n)
    return rows.unflatten(jnp.where(invalid, jnp.nan, lam))
