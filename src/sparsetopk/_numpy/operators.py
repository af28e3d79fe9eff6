"""The relaxed top-k operators on NumPy arrays, with their derivatives in closed form.

Common to all of them:

- ``k`` is a real number in [0, n] and ``lam >= 0``; each may be an array that broadcasts against x
  with length 1 along the axis. ``lam = 0`` is the hard operator, where the lowest index wins a tie.
- ``p > 1``; 2, 3/2 and 4/3 have closed forms. ``solver`` is "threshold" (default), "pav",
  "dykstra" (p = 2) or "bca". ``solver_options={"max_iter": m}`` asks for exactly m iterations;
  with ``"tol"`` too the solver raises ``ConvergenceError`` if it is not met within them.
- ``axis`` may be several axes, as a tuple, or None for all: these make up one row.
- ``where`` is True where there is a candidate, and broadcasts to x; other entries are never selected,
  whatever they hold. ``largest=False`` is the same for -x: the k smallest.
- The output has the shape and dtype of x and is computed in float64. A NaN makes its row NaN.

Each operator has ``*_jvp`` (directions ``dx``, ``dk``, ``dlam``, those left out are zero), ``*_vjp``
(cotangent ``dy``; returns cotangents of x, k and lam, each in the shape of its argument) and
``*_jacobian`` (dy_i/dx_j in the last two axes, behind the other axes of x).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike

from .._checks import check_exponent
from .._maths.operator import MAGNITUDE, MASK, SIGN, TWO_SIDED, Operator
from .._types import Axis, FloatArray, Solver, SolverOptions
from . import namespace as xp
from .arguments import Rows
from .relaxed import Evaluated, TopKCotangents, TopKProblem


class SignOptions(TypedDict, total=False):
    """The keyword arguments of ``topk_sign``."""

    p: float
    axis: Axis
    where: ArrayLike | None
    solver: Solver
    solver_options: SolverOptions | None


class MaskOptions(SignOptions, total=False):
    """The keyword arguments of ``topk_mask`` and ``topk``."""

    two_sided: bool
    largest: bool


class MagOptions(SignOptions, total=False):
    """The keyword arguments of ``topk_mag``."""

    debias: bool


def _evaluated(
    x: ArrayLike,
    k: ArrayLike,
    lam: ArrayLike,
    operator: Operator,
    options: SignOptions,
    largest: bool = True,
) -> Evaluated:
    rows = Rows.of("x", x, options.get("axis", -1), many=True)
    solver, given = options.get("solver", "threshold"), options.get("solver_options")
    data, slope, scores = rows.data, 1.0 if largest else -1.0, rows.data if largest else -rows.data
    where = options.get("where")
    if where is None:
        problem = TopKProblem.of(replace(rows, data=scores), k, lam, operator, solver, given)
        return Evaluated(problem, k, lam, data, slope)
    there = rows.flags("where", where)
    scores = np.where(there, scores, 0.0 if operator.phi(xp).even else -np.inf)
    problem = TopKProblem.of(replace(rows, data=scores), k, lam, operator, solver, given)
    return Evaluated(problem, k, lam, np.where(there, data, 0.0), np.where(there, slope, 0.0))


def _exponent(options: SignOptions) -> float:
    return check_exponent(options.get("p", 2.0))


def _mask(
    x: ArrayLike, k: ArrayLike, lam: ArrayLike = 0.1, **options: Unpack[MaskOptions]
) -> Evaluated:
    op = TWO_SIDED if options.pop("two_sided", False) else MASK
    largest = options.pop("largest", True)
    return _evaluated(x, k, lam, Operator(op, _exponent(options)), options, largest)


def _topk(
    x: ArrayLike, k: ArrayLike, lam: ArrayLike = 0.1, **options: Unpack[MaskOptions]
) -> Evaluated:
    return replace(_mask(x, k, lam, **options), times_x=True)


def _mag(
    x: ArrayLike, k: ArrayLike, lam: ArrayLike = 0.1, **options: Unpack[MagOptions]
) -> Evaluated:
    debias = options.pop("debias", True)
    return _evaluated(x, k, lam, Operator(MAGNITUDE, _exponent(options), debias), options)


def _sign(
    x: ArrayLike, k: ArrayLike, lam: ArrayLike = 0.1, **options: Unpack[SignOptions]
) -> Evaluated:
    return _evaluated(x, k, lam, Operator(SIGN, _exponent(options)), options)


def topk_mask(
    x: ArrayLike,
    k: ArrayLike,
    lam: ArrayLike = 0.1,
    *,
    p: float = 2.0,
    two_sided: bool = False,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    largest: bool = True,
    solver: Solver = "threshold",
    solver_options: SolverOptions | None = None,
) -> FloatArray:
    r"""Relaxed top-k mask: entries in [0, 1] that sum to k, most of them exactly 0 or 1.

    .. math:: \max_{y \in [0,1]^n,\ \sum_i y_i = k} \langle x, y \rangle - R(y), \qquad
              R(y) = \frac{\lambda}{p} \sum_i |y_i|^p

    With ``two_sided=True``, R has :math:`|y_i|^p + |1 - y_i|^p` instead, and for 1 < p < 2 the mask
    is differentiable everywhere. -inf marks an entry that is not a candidate; +inf is always
    selected (more than k of them share k if lam > 0).

    >>> topk_mask([3.0, 1.0, 0.95, -1.0], k=2, lam=0.1)
    array([1.  , 0.75, 0.25, 0.  ])
    """
    return _mask(
        x,
        k,
        lam,
        p=p,
        two_sided=two_sided,
        axis=axis,
        where=where,
        largest=largest,
        solver=solver,
        solver_options=solver_options,
    ).output()


def topk_mask_jvp(
    x: ArrayLike,
    k: ArrayLike,
    lam: ArrayLike = 0.1,
    *,
    dx: ArrayLike | None = None,
    dk: ArrayLike | None = None,
    dlam: ArrayLike | None = None,
    **options: Unpack[MaskOptions],
) -> FloatArray:
    """Directional derivative of ``topk_mask`` along ``dx``, ``dk`` and ``dlam``."""
    return _mask(x, k, lam, **options).jvp(dx, dk, dlam)


def topk_mask_vjp(
    x: ArrayLike,
    k: ArrayLike,
    lam: ArrayLike = 0.1,
    *,
    dy: ArrayLike,
    **options: Unpack[MaskOptions],
) -> TopKCotangents:
    """Cotangents of x, k and lam for the cotangent ``dy`` of ``topk_mask``."""
    return _mask(x, k, lam, **options).vjp(dy)


def topk_mask_jacobian(
    x: ArrayLike, k: ArrayLike, lam: ArrayLike = 0.1, **options: Unpack[MaskOptions]
) -> FloatArray:
    """Dense Jacobian of ``topk_mask`` in x: symmetric, rows sum to 0."""
    return _mask(x, k, lam, **options).jacobian()


def topk(
    x: ArrayLike,
    k: ArrayLike,
    lam: ArrayLike = 0.1,
    *,
    p: float = 2.0,
    two_sided: bool = False,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    largest: bool = True,
    solver: Solver = "threshold",
    solver_options: SolverOptions | None = None,
) -> FloatArray:
    """Relaxed top-k: ``x * topk_mask(x)``, with 0 at padded (-inf) entries.

    >>> topk([3.0, 1.0, 0.95, -1.0], k=2, lam=0.1)
    array([3.    , 0.75  , 0.2375, 0.    ])
    """
    return _topk(
        x,
        k,
        lam,
        p=p,
        two_sided=two_sided,
        axis=axis,
        where=where,
        largest=largest,
        solver=solver,
        solver_options=solver_options,
    ).output()


def topk_jvp(
    x: ArrayLike,
    k: ArrayLike,
    lam: ArrayLike = 0.1,
    *,
    dx: ArrayLike | None = None,
    dk: ArrayLike | None = None,
    dlam: ArrayLike | None = None,
    **options: Unpack[MaskOptions],
) -> FloatArray:
    """Directional derivative of ``topk`` along ``dx``, ``dk`` and ``dlam``."""
    return _topk(x, k, lam, **options).jvp(dx, dk, dlam)


def topk_vjp(
    x: ArrayLike,
    k: ArrayLike,
    lam: ArrayLike = 0.1,
    *,
    dy: ArrayLike,
    **options: Unpack[MaskOptions],
) -> TopKCotangents:
    """Cotangents of x, k and lam for the cotangent ``dy`` of ``topk``."""
    return _topk(x, k, lam, **options).vjp(dy)


def topk_jacobian(
    x: ArrayLike, k: ArrayLike, lam: ArrayLike = 0.1, **options: Unpack[MaskOptions]
) -> FloatArray:
    """Dense Jacobian of ``topk`` in x."""
    return _topk(x, k, lam, **options).jacobian()


def topk_mag(
    x: ArrayLike,
    k: ArrayLike,
    lam: ArrayLike = 0.1,
    *,
    p: float = 2.0,
    debias: bool = True,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    solver: Solver = "threshold",
    solver_options: SolverOptions | None = None,
) -> FloatArray:
    r"""Relaxed top-k in magnitude: keeps the k entries with the largest \|x_i\|, with their sign.

    .. math:: y^\star = \arg\max_y \langle x, y \rangle - \frac12 \|y\|_{k}^2 - R(y), \qquad
              u^\star = x - \nabla R(y^\star)

    with the squared k-support norm, :math:`\phi(x) = x^2/2` in the paper. ``debias=False`` returns
    :math:`y^\star`, the gradient of a convex function, which shrinks even clearly selected entries
    (by 1/(1+lam) for p = 2). ``debias=True`` returns :math:`y^\star + x - u^\star`: entries clearly
    selected are equal to x, and lam -> infinity gives the identity.

    Infinite entries make their row NaN.

    >>> topk_mag([-3.0, 1.0, 0.95, 0.1], k=2, lam=0.1)
    array([-3.        ,  0.78571429,  0.23571429,  0.        ])
    """
    return _mag(
        x,
        k,
        lam,
        p=p,
        debias=debias,
        axis=axis,
        where=where,
        solver=solver,
        solver_options=solver_options,
    ).output()


def topk_mag_jvp(
    x: ArrayLike,
    k: ArrayLike,
    lam: ArrayLike = 0.1,
    *,
    dx: ArrayLike | None = None,
    dk: ArrayLike | None = None,
    dlam: ArrayLike | None = None,
    **options: Unpack[MagOptions],
) -> FloatArray:
    """Directional derivative of ``topk_mag`` along ``dx``, ``dk`` and ``dlam``."""
    return _mag(x, k, lam, **options).jvp(dx, dk, dlam)


def topk_mag_vjp(
    x: ArrayLike,
    k: ArrayLike,
    lam: ArrayLike = 0.1,
    *,
    dy: ArrayLike,
    **options: Unpack[MagOptions],
) -> TopKCotangents:
    """Cotangents of x, k and lam for the cotangent ``dy`` of ``topk_mag``."""
    return _mag(x, k, lam, **options).vjp(dy)


def topk_mag_jacobian(
    x: ArrayLike, k: ArrayLike, lam: ArrayLike = 0.1, **options: Unpack[MagOptions]
) -> FloatArray:
    """Dense Jacobian of ``topk_mag`` in x; symmetric for ``debias=False``."""
    return _mag(x, k, lam, **options).jacobian()


def topk_sign(
    x: ArrayLike,
    k: ArrayLike,
    lam: ArrayLike = 0.1,
    *,
    p: float = 2.0,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    solver: Solver = "threshold",
    solver_options: SolverOptions | None = None,
) -> FloatArray:
    r"""Relaxed signed top-k mask: in [-1, 1], the sign of x on the k entries largest in magnitude.

    .. math:: \max_{y \in [-1,1]^n,\ \sum_i |y_i| \le k} \langle x, y \rangle - R(y)

    (:math:`\phi(x) = |x|` in the paper). Infinite entries make their row NaN.

    >>> topk_sign([-3.0, 1.0, 0.95, 0.1], k=2, lam=0.1)
    array([-1.  ,  0.75,  0.25,  0.  ])
    """
    return _sign(
        x, k, lam, p=p, axis=axis, where=where, solver=solver, solver_options=solver_options
    ).output()


def topk_sign_jvp(
    x: ArrayLike,
    k: ArrayLike,
    lam: ArrayLike = 0.1,
    *,
    dx: ArrayLike | None = None,
    dk: ArrayLike | None = None,
    dlam: ArrayLike | None = None,
    **options: Unpack[SignOptions],
) -> FloatArray:
    """Directional derivative of ``topk_sign`` along ``dx``, ``dk`` and ``dlam``."""
    return _sign(x, k, lam, **options).jvp(dx, dk, dlam)


def topk_sign_vjp(
    x: ArrayLike,
    k: ArrayLike,
    lam: ArrayLike = 0.1,
    *,
    dy: ArrayLike,
    **options: Unpack[SignOptions],
) -> TopKCotangents:
    """Cotangents of x, k and lam for the cotangent ``dy`` of ``topk_sign``."""
    return _sign(x, k, lam, **options).vjp(dy)


def topk_sign_jacobian(
    x: ArrayLike, k: ArrayLike, lam: ArrayLike = 0.1, **options: Unpack[SignOptions]
) -> FloatArray:
    """Dense Jacobian of ``topk_sign`` in x: symmetric."""
    return _sign(x, k, lam, **options).jacobian()
