"""Argument checks for JAX arrays, and the way between an array and rows; the style is that of NumPy's.

A value is looked at only where it is there: Python numbers, NumPy arrays, and arrays on the CPU that
are not traced. Elsewhere a bad k or lam makes its rows NaN (the solvers see to it).
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..._checks import (
    check_axes,
    check_broadcast,
    check_exponent,
    check_flags,
    check_per_row,
    check_solver,
)
from ..._maths.operator import Count, Operator
from ..._types import Axes, Axis, Solver, SolverOptions

Number = float | Array | np.ndarray
"""k and lam: one for all rows, or an array that broadcasts with length 1 along the axis."""

AxisName = str | tuple[str, ...] | None
"""The mesh axes over which rows are sharded, inside ``shard_map``."""

_FLOATS = ("float16", "bfloat16", "float32", "float64")


def is_readable(*values: object) -> bool:
    """Whether the numbers in all the values can be looked at without waiting for a device."""
    return all(_is_readable(value) for value in values)


def _is_readable(value: object) -> bool:
    if isinstance(value, jax.core.Tracer):
        return False
    if isinstance(value, Array):
        return value.is_fully_addressable and all(d.platform == "cpu" for d in value.devices())
    return True


def compute_dtype(x: Array) -> Any:
    """float64 for float64, else float32: as JAX users expect of arrays in 16 bits."""
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def _show(value: object) -> str:
    if isinstance(value, (Array, np.ndarray)):
        return f"an array of dtype {value.dtype} and shape {tuple(value.shape)}"
    return repr(value)


def check_float_array(name: str, value: object) -> Array:
    if not isinstance(value, (Array, np.ndarray)):
        raise TypeError(f"{name} must be a jax.Array or a NumPy array, got {_show(value)}")
    if str(value.dtype) not in _FLOATS:
        raise TypeError(
            f"{name} must be an array of dtype float16, bfloat16, float32 or float64, got {value.dtype}"
        )
    return jnp.asarray(value)


def check_number(name: str, value: object) -> None:
    """That it is a real number, or an array of them."""
    if isinstance(value, (Array, np.ndarray)):
        good = jnp.issubdtype(value.dtype, jnp.integer) or str(value.dtype) in _FLOATS
    else:
        good = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not good:
        raise TypeError(f"{name} must be a real number or an array of them, got {_show(value)}")


def check_k(k: Number, n: int) -> None:
    if is_readable(k) and isinstance(n, int):  # which it is not where any length is exported
        values = np.asarray(k, dtype=np.float64)
        bad = ~((values >= 0) & (values <= n))
        if bad.any():
            got = values[bad].flat[0] if values.ndim else k
            raise ValueError(f"k must be in [0, n] with n={n}, got {got}")


def check_lam(lam: Number) -> None:
    if is_readable(lam):
        values = np.asarray(lam, dtype=np.float64)
        bad = ~((values >= 0) & (values < np.inf))
        if bad.any():
            got = values[bad].flat[0] if values.ndim else lam
            raise ValueError(f"lam must be finite and at least 0, got {got}")


def check_jax_solver(
    solver: Solver, options: SolverOptions | None, op: int, p: float, axis_name: AxisName
) -> SolverOptions:
    """That the solver can do what is asked; its options."""
    if axis_name is not None and solver != "threshold":
        raise ValueError(f"solver must be 'threshold' with axis_name, got {solver!r}")
    solvers: Collection[Solver] = ("threshold", "pav", "dykstra")
    return check_solver(solver, solvers, options, Operator(op, check_exponent(p)))


class Rows(NamedTuple):
    """An array with its axis moved last, as rows (..., n) in its own dtype, and the way back."""

    name: str  # of the argument, for errors
    x: Array  # as it came
    axis: Axes

    @classmethod
    def of(cls, name: str, value: object, axis: Axis, *, many: bool = False) -> Rows:
        """``many`` says whether several axes may make up a row."""
        x = check_float_array(name, value)
        return cls(name, x, check_axes(name, x.shape, axis, many))

    @property
    def axes(self) -> tuple[int, ...]:
        return self.axis if isinstance(self.axis, tuple) else (self.axis,)

    @property
    def n(self) -> int:
        return math.prod(self.x.shape[i] for i in self.axes)

    @property
    def per_row_shape(self) -> tuple[int, ...]:
        return tuple(1 if i in self.axes else size for i, size in enumerate(self.x.shape))

    @property
    def data(self) -> Array:
        """(..., n)."""
        return self.flatten(self.x)

    def flatten(self, x: Array) -> Array:
        """An array of the input's shape, or of one number per row, as (..., n) or (..., 1)."""
        moved = jnp.moveaxis(x, self.axes, self._last)
        first = len(moved.shape) - len(self.axes)
        return moved.reshape(*moved.shape[:first], math.prod(moved.shape[first:]))

    @property
    def _last(self) -> tuple[int, ...]:
        return tuple(range(-len(self.axes), 0))

    def unflatten(self, rows: Array) -> Array:
        """(..., any length) back to the input's shape, with that length along the axis; of several
        axes, n or 1."""
        if len(self.axes) > 1:
            shape = self.x.shape if rows.shape[-1] == self.n else self.per_row_shape
            rows = rows.reshape(*rows.shape[:-1], *(shape[i] for i in self.axes))
        return jnp.moveaxis(rows, self._last, self.axes)

    def restore(self, rows: Array) -> Array:
        """As ``unflatten``, in the input's dtype."""
        return self.unflatten(rows).astype(self.x.dtype)

    def restore_scalars(self, rows: Array) -> Array:
        """(..., 1) back to the input's shape without the axis."""
        return rows.squeeze(-1).astype(self.x.dtype)

    def check_shape(self, name: str, value: Number) -> None:
        """That an array broadcasts with length 1 along the axis."""
        check_per_row(name, np.shape(value), self.per_row_shape, self.name, f"axis {self.axis}")

    def per_row(self, value: Number) -> Array:
        """A checked k or lam as (..., 1), in the dtype of the computation."""
        value = jnp.asarray(value, dtype=compute_dtype(self.x))
        return self.flatten(jnp.broadcast_to(value, self.per_row_shape))

    def split(self, k: Number | Count) -> Count:
        """A checked k in its two parts, per row."""
        k = k if isinstance(k, Count) else exact(k)
        if not isinstance(k, Count):
            k = _parts(k, jnp.floor(jax.lax.stop_gradient(k)))
        whole = jnp.broadcast_to(jnp.asarray(k.whole, dtype=jnp.int32), self.per_row_shape)
        return Count(self.flatten(whole), self.per_row(k.frac))


def _parts(k: Any, floor: Any) -> Count:
    """k and the floor of k, as they are or in the parts."""
    if jnp.issubdtype(k.dtype, jnp.integer):
        return Count(k, jnp.zeros(()))
    return Count(floor, k - floor)


def exact(k: Number) -> Array | Count:
    """k as it may be traced: what is not yet an array in two parts, before float64 becomes float32."""
    if isinstance(k, Array):
        return k
    k = np.asarray(k)
    if k.dtype.kind == "f":
        k = k.astype(np.float64)
    return _parts(k, np.floor(k))


def row_length(rows: Rows, axis_name: AxisName) -> int:
    """n, over all shards."""
    return rows.n if axis_name is None else rows.n * jax.lax.psum(1, axis_name)


def check_k_and_lam(rows: Rows, k: Number, lam: Number, n: int | None = None) -> None:
    check_number("k", k)
    check_number("lam", lam)
    rows.check_shape("k", k)
    rows.check_shape("lam", lam)
    check_k(k, rows.n if n is None else n)
    check_lam(lam)


def is_hard(lam: Number) -> bool | None:
    """Whether rows have lam = 0: all, none, or (None) some may.

    A jax.Array is never read for that: what is traced does not depend on what a device holds.
    """
    if isinstance(lam, Array):
        return None
    hard = np.asarray(lam) == 0
    return True if hard.all() else None if hard.any() else False


def few(k: Number) -> int | None:
    """A small number that no k is above, if one is known while tracing.

    One of few, as programs are compiled for each.
    """
    if isinstance(k, Array):
        return None
    most = float(np.max(k, initial=0.0))
    return next((bound for bound in (1, 4, 16) if most <= bound), None)


def check_where(where: object, shape: tuple[int, ...]) -> Array:
    are_booleans = isinstance(where, (Array, np.ndarray)) and where.dtype == jnp.bool_
    check_flags("where", are_booleans, _show(where))
    flags = jnp.asarray(where)
    check_broadcast("where", flags.shape, shape)
    return flags
