"""Checks of arguments that are no arrays, for all front-ends: what must hold, and what came instead."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TypeAlias, TypeVar

import numpy as np

from ._maths.operator import EXP, OF_PHI, TWO_SIDED, Operator, exponent
from ._types import Axes, Axis, Completion, PhiName, Reduction, Solver, SolverOptions

_Name = TypeVar("_Name", bound=str)
Shape: TypeAlias = Sequence[int]
_AXIS_WORDS = {"axis": "axis", "dim": "dimension"}


def show(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of dtype {value.dtype} and shape {value.shape}"
    return repr(value)


def check_p(p: float) -> float:
    if isinstance(p, bool) or not isinstance(p, (int, float, np.integer, np.floating)):
        raise TypeError(f"p must be a number, got {show(p)}")
    # The largest float, which the compiler of torch 2.6 cannot read where Python has it.
    if not 1 < p <= 1.7976931348623157e308:
        raise ValueError(f"p must be finite and greater than 1, got {p}")
    return float(p)


def check_exponent(p: float) -> float:
    """1/(p - 1)."""
    if type(p) is float and p == 2.0:  # most calls, which should be short
        return 1.0
    return exponent(check_p(p))


def check_axes(
    name: str, shape: tuple[int, ...], axis: Axis, many: bool, word: str = "axis"
) -> Axes:
    """The axis of an array, counted from the front; of several that make up one row, all of them.

    ``many`` says whether there may be several: None is all of them.
    """
    ndim = len(shape)
    if many and axis is None:
        axis = tuple(range(ndim))
    given = axis if many and isinstance(axis, tuple) else (axis,)
    for i in given:
        if isinstance(i, bool) or not isinstance(i, (int, np.integer)):
            kinds = "an int, a tuple of ints or None" if many else "an int"
            raise TypeError(f"{word} must be {kinds}, got {axis!r}")
        if not -ndim <= i < ndim:
            raise ValueError(
                f"{word} must be in [{-ndim}, {ndim}) for {name} of shape {shape}, got {i}"
                if ndim
                else f"{name} must have at least one {_AXIS_WORDS[word]}, got a scalar"
            )
    found = tuple(int(i) % ndim for i in given)  # type: ignore[arg-type]
    if len(set(found)) < len(found):
        raise ValueError(f"{word} must not name an axis twice, got {axis}")
    if not found:
        raise ValueError(
            f"{word} must name at least one axis, got {axis!r}"
            if ndim
            else f"{name} must have at least one {_AXIS_WORDS[word]}, got a scalar"
        )
    return found if len(found) > 1 else found[0]


def check_flags(name: str, are_booleans: bool, got: str) -> None:
    if not are_booleans:
        raise TypeError(f"{name} must be an array of booleans, got {got}")


def _broadcasts(given: Shape, shape: Shape) -> bool:
    pairs = zip(reversed(given), reversed(shape), strict=False)
    return len(given) <= len(shape) and all(size in (1, full) for size, full in pairs)


def check_broadcast(name: str, given: Shape, shape: Shape) -> None:
    """That an array broadcasts to a shape."""
    if not _broadcasts(given, shape):
        raise ValueError(f"{name} must broadcast to the shape of x, {shape}, got shape {given}")


def check_per_row(name: str, given: Shape, shape: Shape, of: str, where: str) -> None:
    """That there is a number for each row of ``of``, or fewer that broadcast; ``shape`` has length 1
    along its axis, which ``where`` names."""
    if not _broadcasts(given, shape):
        raise ValueError(
            f"{name} must be a number or broadcast to shape {tuple(shape)} (that of {of} with "
            f"length 1 along {where}), got shape {tuple(given)}"
        )


def check_along(name: str, given: Shape, shape: Shape, axis: int, word: str = "axis") -> None:
    """That an array is a vector along the axis of x, or has its length there and broadcasts to x."""
    at, n = axis - len(shape), shape[axis]  # from the right, as broadcasting counts
    fits = len(given) == 1 and given[0] == n
    if len(given) > 1:
        fits = len(given) >= -at and given[at] == n and _broadcasts(given, shape)
    if not fits:
        raise ValueError(
            f"{name} must have length n={n} along {word} {axis} of x and broadcast to its shape "
            f"{tuple(shape)}, got shape {tuple(given)}"
        )


def check_magnitude(magnitude: bool, two_sided: bool, largest: bool) -> None:
    """What goes together with a selection by magnitude."""
    if magnitude and two_sided:
        raise ValueError("two_sided must be False when magnitude=True, got True")
    if magnitude and not largest:
        raise ValueError("largest must be True when magnitude=True, got False")


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


def check_loss(
    completion: Completion | None,
    reduction: Reduction,
    label_smoothing: float,
    ignore_index: int,
) -> None:
    """The options of ``topk_loss``."""
    check_choice("reduction", reduction, ("mean", "sum", "none"))
    if completion is not None and completion not in ("spread", "best"):
        raise ValueError(f"completion must be 'spread', 'best' or None, got {completion!r}")
    if isinstance(label_smoothing, str):
        raise TypeError(f"label_smoothing must be a number, got {label_smoothing!r}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be in [0, 1], got {label_smoothing}")
    if label_smoothing and completion == "best":
        raise ValueError(f"label_smoothing must be 0 with completion='best', got {label_smoothing}")
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index must be an int, got {ignore_index!r}")


def check_class_weights(shape: tuple[int, ...], n: int) -> None:
    if shape != (n,):
        raise ValueError(f"weight must have shape ({n},), one number per class, got {shape}")


def check_size(size: object) -> float:
    """Of blocks, on average."""
    if isinstance(size, bool) or not isinstance(size, (int, float)):
        raise TypeError(f"size must be a number, got {size!r}")
    if not 1 <= size < math.inf:
        raise ValueError(f"size must be finite and at least 1, got {size}")
    return float(size)


def check_positive_int(name: str, value: object, at_most: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an int, got {show(value)}")
    # An array that is exported may have a length that is not known yet.
    limit = at_most if isinstance(at_most, int) else None
    if value < 1 or (limit is not None and value > limit):
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
        raise ValueError(f"p must be 2 for solver 'dykstra', got {p:g}; 'pav' takes any p")
    if solver == "dykstra" and operator.op == EXP:
        raise ValueError("phi must not be 'exp' for solver 'dykstra'; 'pav' takes any phi")
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
