"""Argument checks, in one place and one style: what must hold, and what came instead.

Every operator works on rows: the axis moves last, the other axes are flattened, the numbers become
float64. ``Rows`` does that, and puts results back into the shape and dtype of the input.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._maths.operator import EXP, OF_PHI, TWO_SIDED, Operator, exponent
from ._types import Array, FloatArray, PhiName, Solver, SolverOptions

_FLOATS = (np.float16, np.float32, np.float64)
_Name = TypeVar("_Name", bound=str)
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
        raise TypeError(f"{name} must be a real number or an array of them, got {_show(value)}")
    return array.astype(np.float64)


def _show(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of dtype {value.dtype} and shape {value.shape}"
    return repr(value)


@dataclass(frozen=True)
class Rows:
    """An array as rows (m, n) of float64, and the way back."""

    name: str  # of the argument, for errors
    data: Array
    shape: tuple[int, ...]  # of the array as it came
    axis: int
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, name: str, value: ArrayLike, axis: int) -> Rows:
        array = as_float_array(name, value)
        if isinstance(axis, bool) or not isinstance(axis, (int, np.integer)):
            raise TypeError(f"axis must be an int, got {axis!r}")
        if not -array.ndim <= axis < array.ndim:
            raise ValueError(
                f"axis must be in [{-array.ndim}, {array.ndim}) for {name} of shape {array.shape}, "
                f"got {axis}"
                if array.ndim
                else f"{name} must have at least one axis, got a scalar"
            )
        axis = int(axis) % array.ndim
        data = np.moveaxis(array, axis, -1).astype(np.float64)
        return cls(
            name,
            data.reshape(math.prod(data.shape[:-1]), data.shape[-1]),
            array.shape,
            axis,
            array.dtype,
        )

    @property
    def n(self) -> int:
        return self.shape[self.axis]

    @property
    def _leading(self) -> tuple[int, ...]:
        return (*self.shape[: self.axis], *self.shape[self.axis + 1 :])

    @property
    def _per_row(self) -> tuple[int, ...]:
        return (*self.shape[: self.axis], 1, *self.shape[self.axis + 1 :])

    def unflatten(self, rows: NDArray[_Scalar]) -> NDArray[_Scalar]:
        """(m, any length) back to the input's shape, with that length along the axis."""
        return np.moveaxis(rows.reshape((*self._leading, rows.shape[-1])), -1, self.axis)

    def restore(self, rows: Array) -> FloatArray:
        """As ``unflatten``, in the input's dtype."""
        with np.errstate(over="ignore"):
            return self.unflatten(rows).astype(self.dtype)

    def restore_scalars(self, rows: Array) -> FloatArray:
        """(m, 1) back to the input's shape without the axis."""
        with np.errstate(over="ignore"):
            return rows.reshape(self._leading).astype(self.dtype)

    def restore_matrices(self, matrices: Array) -> FloatArray:
        """(m, n, n) with the leading axes of the input in front."""
        with np.errstate(over="ignore"):
            return matrices.reshape((*self._leading, *matrices.shape[1:])).astype(self.dtype)

    def per_row(self, name: str, value: ArrayLike) -> Array:
        """A number, or an array that broadcasts with length 1 along the axis, as (m, 1)."""
        array = as_real_array(name, value)
        shape = self._per_row
        try:
            full = np.broadcast_to(array, shape)
        except ValueError:
            raise ValueError(
                f"{name} must be a number or broadcast to shape {shape} (that of {self.name} with "
                f"length 1 along axis {self.axis}), got shape {array.shape}"
            ) from None
        return full.reshape(-1, 1)

    def sum_to(self, rows: Array, like: ArrayLike) -> Array:
        """Undo ``per_row`` for a cotangent: sum (m, 1) over what was broadcast from ``like``."""
        shape = np.shape(like)
        full = rows.reshape(self._per_row)
        full = full.sum(axis=tuple(range(full.ndim - len(shape))))
        spread = tuple(i for i, length in enumerate(shape) if length == 1)
        return full.sum(axis=spread, keepdims=True)

    def tangent(self, name: str, value: ArrayLike) -> Array:
        """An array of the same shape, as rows."""
        array = as_real_array(name, value)
        if array.shape != self.shape:
            raise ValueError(f"{name} must have shape {self.shape}, got {array.shape}")
        return np.moveaxis(array, self.axis, -1).reshape(self.data.shape)


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


def check_p(p: float) -> float:
    if isinstance(p, bool) or not isinstance(p, (int, float, np.integer, np.floating)):
        raise TypeError(f"p must be a number, got {_show(p)}")
    if not 1 < p <= sys.float_info.max:
        raise ValueError(f"p must be finite and greater than 1, got {p}")
    return float(p)


def check_exponent(p: float) -> float:
    """1/(p - 1)."""
    return exponent(check_p(p))


def check_choice(name: str, value: _Name, choices: Collection[_Name]) -> _Name:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    return value


def check_phi(phi: PhiName, two_sided: bool = False) -> int:
    """The number of the operator that has it."""
    check_choice("phi", phi, OF_PHI)
    if two_sided and phi != "identity":
        raise ValueError(f"phi must be 'identity' when two_sided=True, got {phi!r}")
    return TWO_SIDED if two_sided else OF_PHI[phi]


def check_positive_int(name: str, value: object, at_most: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an int, got {_show(value)}")
    if value < 1 or (at_most is not None and value > at_most):
        bounds = "at least 1" if at_most is None else f"in [1, {at_most}]"
        raise ValueError(f"{name} must be {bounds}, got {value}")
    return int(value)


def check_solver(
    solver: Solver,
    solvers: Collection[Solver],
    options: SolverOptions | None,
    operator: Operator,
) -> SolverOptions:
    """That the solver is one of ``solvers`` and can do what is asked; its options."""
    check_choice("solver", solver, solvers)
    options = check_solver_options(options)
    if solver in ("threshold", "pav") and options:
        raise ValueError(
            f"solver_options must be empty for the exact solver {solver!r}, got {options}"
        )
    if solver == "threshold":
        return options
    if operator.op == TWO_SIDED:
        raise ValueError(f"solver must be 'threshold' when two_sided=True, got {solver!r}")
    if solver == "dykstra" and operator.exponent != 1.0:
        p = 1.0 + 1.0 / operator.exponent
        raise ValueError(f"p must be 2 for solver 'dykstra', got {p:g}; 'bca' takes any p")
    if solver == "dykstra" and operator.op == EXP:
        raise ValueError("phi must not be 'exp' for solver 'dykstra'; 'bca' takes any phi")
    return options


def check_solver_options(options: SolverOptions | None) -> SolverOptions:
    if options is None:
        return {}
    if not isinstance(options, dict):
        raise TypeError(f"solver_options must be a dict, got {options!r}")
    for key in options:
        check_choice("a key of solver_options", key, ("max_iter", "tol"))
    if "max_iter" in options:
        check_positive_int("solver_options['max_iter']", options["max_iter"])
    tol = options.get("tol", 0.0)
    real = isinstance(tol, (int, float, np.floating)) and not isinstance(tol, bool)
    if not (real and 0 <= tol < np.inf):
        raise ValueError(f"solver_options['tol'] must be a finite number >= 0, got {tol!r}")
    return options
