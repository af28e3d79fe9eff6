"""Checks of arguments that are no arrays, for all front-ends: what must hold, and what came instead."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

import numpy as np

from ._maths.operator import EXP, OF_PHI, TWO_SIDED, Operator, exponent
from ._types import Completion, PhiName, Reduction, Solver, SolverOptions

_Name = TypeVar("_Name", bound=str)


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


def check_loss(
    completion: Completion | None,
    reduction: Reduction,
    label_smoothing: float,
    ignore_index: int,
) -> None:
    """The options of ``topk_loss``."""
    check_choice("reduction", reduction, ("mean", "sum", "none"))
    if completion is not None:
        check_choice("completion", completion, ("spread", "best"))
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be in [0, 1], got {label_smoothing}")
    if label_smoothing and completion == "best":
        raise ValueError(f"label_smoothing must be 0 with completion='best', got {label_smoothing}")
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index must be an int, got {ignore_index!r}")


def check_class_weights(shape: tuple[int, ...], n: int) -> None:
    if shape != (n,):
        raise ValueError(f"weight must have shape ({n},), one number per class, got {shape}")


def check_positive_int(name: str, value: object, at_most: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an int, got {show(value)}")
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
