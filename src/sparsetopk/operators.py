"""The relaxed top-k operators on NumPy arrays, with their derivatives in closed form.

Common to all of them:

- ``k`` is a real number in [0, n] and ``lam >= 0``; each may be an array that broadcasts against x
  with length 1 along the axis. ``lam = 0`` is the hard operator, where the lowest index wins a tie.
- ``p > 1``; 2, 3/2 and 4/3 have closed forms. ``solver`` is "threshold" (default), "pav",
  "dykstra" (p = 2) or "bca". ``solver_options={"max_iter": m}`` asks for exactly m iterations;
  with ``"tol"`` too the solver raises ``ConvergenceError`` if it is not met within them.
- The output has the shape and dtype of x and is computed in float64. A NaN makes its row NaN.

Each operator has ``*_jvp`` (directions ``dx``, ``dk``, ``dlam``, those left out are zero), ``*_vjp``
(cotangent ``dy``; returns cotangents of x, k and lam, each in the shape of its argument) and
``*_jacobian`` (dy_i/dx_j in the last two axes, behind the other axes of x).
"""

from __future__ import annotations

from typing import TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike

from ._types import Array, FloatArray, Solver, SolverOptions
from .arguments import Rows, regularizer
from .phis import PHIS
from .relaxed import Evaluated, TopKCotangents, TopKProblem
from .solution import Linearization


class SignOptions(TypedDict, total=False):
    """The keyword arguments of ``topk_sign``."""

    p: float
    axis: int
    solver: Solver
    solver_options: SolverOptions | None


class MaskOptions(SignOptions, total=False):
    """The keyword arguments of ``topk_mask`` and ``topk``."""

    two_sided: bool


class MagOptions(SignOptions, total=False):
    """The keyword arguments of ``topk_mag``."""

    debias: bool


def _mask(
    x: ArrayLike,
    k: ArrayLike,
    lam: ArrayLike = 0.1,
    *,
    p: float = 2.0,
    two_sided: bool = False,
    axis: int = -1,
    solver: Solver = "threshold",
    solver_options: SolverOptions | None = None,
) -> Evaluated:
    reg, phi = regularizer(p, two_sided), PHIS["identity"]
    problem = TopKProblem.of(Rows.of("x", x, axis), k, lam, reg, phi, solver, solver_options)
    return _share_selected(problem, k, lam)


def _sign(
    x: ArrayLike,
    k: ArrayLike,
    lam: ArrayLike = 0.1,
    *,
    p: float = 2.0,
    axis: int = -1,
    solver: Solver = "threshold",
    solver_options: SolverOptions | None = None,
) -> Evaluated:
    reg, phi = regularizer(p), PHIS["abs"]
    problem = TopKProblem.of(Rows.of("x", x, axis), k, lam, reg, phi, solver, solver_options)
    return _share_selected(problem, k, lam)


def _share_selected(problem: TopKProblem, k: ArrayLike, lam: ArrayLike) -> Evaluated:
    def linearization() -> Linearization:
        return problem.linearize().hard(problem.hard, 0.0)

    fused = problem.fused()
    y = problem.sign * problem.mask if fused is None else fused.y
    return Evaluated(problem, y, linearization, k, lam, fused)


def _topk(
    x: ArrayLike, k: ArrayLike, lam: ArrayLike = 0.1, **options: Unpack[MaskOptions]
) -> Evaluated:
    mask = _mask(x, k, lam, **options)
    x_rows = mask.problem.x

    def linearization() -> Linearization:
        return mask.linearization().times_x(x_rows, mask.y)

    y = np.where(mask.y == 0, 0.0, x_rows) * mask.y  # 0 and not NaN for padding
    return Evaluated(mask.problem, y, linearization, k, lam)


def _mag(
    x: ArrayLike,
    k: ArrayLike,
    lam: ArrayLike = 0.1,
    *,
    p: float = 2.0,
    debias: bool = True,
    axis: int = -1,
    solver: Solver = "threshold",
    solver_options: SolverOptions | None = None,
) -> Evaluated:
    reg, phi = regularizer(p), PHIS["half_square"]
    problem = TopKProblem.of(Rows.of("x", x, axis), k, lam, reg, phi, solver, solver_options)

    def linearization() -> Linearization:
        hard = problem.hard_mask if problem.hard.any() else 0.0
        return problem.linearize(debias=debias).hard(problem.hard, hard)

    fused = problem.fused(debias=debias)
    y = _magnitudes(problem, debias) if fused is None else fused.y
    return Evaluated(problem, y, linearization, k, lam, fused)


def _magnitudes(problem: TopKProblem, debias: bool) -> Array:
    solution = problem.solution
    y = problem.reg.response(solution.d)
    if debias:
        selected = solution.alone & (solution.weight == 1)
        y = np.where(selected, problem.x, y + problem.relaxing_lam * solution.d)
    if problem.hard.any():
        y = np.where(problem.hard, problem.x * problem.hard_mask, y)
    return problem.sign * y


def topk_mask(
    x: ArrayLike,
    k: ArrayLike,
    lam: ArrayLike = 0.1,
    *,
    p: float = 2.0,
    two_sided: bool = False,
    axis: int = -1,
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
        x, k, lam, p=p, two_sided=two_sided, axis=axis, solver=solver, solver_options=solver_options
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
    axis: int = -1,
    solver: Solver = "threshold",
    solver_options: SolverOptions | None = None,
) -> FloatArray:
    """Relaxed top-k: ``x * topk_mask(x)``, with 0 at padded (-inf) entries.

    >>> topk([3.0, 1.0, 0.95, -1.0], k=2, lam=0.1)
    array([3.    , 0.75  , 0.2375, 0.    ])
    """
    return _topk(
        x, k, lam, p=p, two_sided=two_sided, axis=axis, solver=solver, solver_options=solver_options
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
    axis: int = -1,
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
        x, k, lam, p=p, debias=debias, axis=axis, solver=solver, solver_options=solver_options
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
    axis: int = -1,
    solver: Solver = "threshold",
    solver_options: SolverOptions | None = None,
) -> FloatArray:
    r"""Relaxed signed top-k mask: in [-1, 1], the sign of x on the k entries largest in magnitude.

    .. math:: \max_{y \in [-1,1]^n,\ \sum_i |y_i| \le k} \langle x, y \rangle - R(y)

    (:math:`\phi(x) = |x|` in the paper). Infinite entries make their row NaN.

    >>> topk_sign([-3.0, 1.0, 0.95, 0.1], k=2, lam=0.1)
    array([-1.  ,  0.75,  0.25,  0.  ])
    """
    return _sign(x, k, lam, p=p, axis=axis, solver=solver, solver_options=solver_options).output()


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
