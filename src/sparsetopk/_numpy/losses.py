"""The value f_{phi,R}(x, 1_k) of the relaxed top-k, and the Fenchel-Young loss it generates."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from .._checks import check_choice, check_exponent, check_phi
from .._maths import value as _value
from .._maths.operator import MASK, TWO_SIDED, Count, Operator
from .._types import Array, Completion, FloatArray, PhiName, Reduction
from . import namespace as xp
from .arguments import Rows, as_real_array
from .relaxed import Evaluated, TopKProblem


def topk_value(
    x: ArrayLike,
    k: ArrayLike,
    lam: ArrayLike = 0.1,
    *,
    p: float = 2.0,
    two_sided: bool = False,
    phi: PhiName = "identity",
    axis: int = -1,
) -> FloatArray:
    r"""The optimal value of the relaxed top-k problem, one per row.

    .. math:: f_{\phi,R}(x, 1_k) = \max_y \langle x, y \rangle - f_\phi^*(y, 1_k) - R(y)

    It is convex in x, and its gradient in x is the operator itself: ``topk_mask`` for phi =
    "identity", ``topk_mag(debias=False)`` for "half_square", ``topk_sign`` for "abs". Padded (-inf)
    entries take no part; ``lam = 0`` gives the sum of the k largest phi(x_i).

    >>> float(topk_value([3.0, 1.0, -1.0], k=2, lam=0.0))
    4.0
    """
    rows, operator = Rows.of("x", x, axis), Operator(check_phi(phi, two_sided), check_exponent(p))
    return rows.restore_scalars(_value_of(TopKProblem.of(rows, k, lam, operator)))


def _value_of(problem: TopKProblem) -> Array:
    """f_{phi,R}(x, 1_k) as (m, 1)."""
    if problem.rows.data.size == 0:
        return np.zeros_like(problem.k)
    with xp.quiet():
        return _value.value(problem.relaxed)


class _Targets(NamedTuple):
    """Targets as rows (m, n) in [0, 1]."""

    t: Array
    are_labels: bool  # every entry is 0 or 1


def _targets(targets: ArrayLike, rows: Rows) -> _Targets:
    """Class indices in the shape of the logits without their last axis, or weights in [0, 1]."""
    array = np.asarray(targets)
    if array.dtype.kind in "iu":
        if array.shape != rows.shape[:-1]:
            raise ValueError(
                f"targets must have shape {rows.shape[:-1]} when they are class indices (that of "
                f"logits without the last axis), got {array.shape}"
            )
        bad = (array < 0) | (array >= rows.n)
        if bad.any():
            raise ValueError(
                f"targets must be class indices in [0, {rows.n}), got {array[bad].flat[0]}"
            )
        return _Targets((np.arange(rows.n) == array.reshape(-1, 1)).astype(np.float64), True)
    if array.dtype.kind not in "fb":
        raise TypeError(
            "targets must be integer class indices, or booleans or floats in the shape of logits, "
            f"got dtype {array.dtype}"
        )
    t = array.astype(np.float64)
    if t.shape != rows.shape:
        raise ValueError(f"targets must have the shape of logits, {rows.shape}, got {t.shape}")
    if not ((t >= 0) & (t <= 1)).all():
        raise ValueError(f"targets must be in [0, 1], got values from {np.min(t)} to {np.max(t)}")
    return _Targets(t.reshape(rows.data.shape), bool(np.isin(t, (0.0, 1.0)).all()))


class _Loss(NamedTuple):
    rows: Rows
    value: Array  # (m, 1)
    gradient: Array  # (m, n)


def _fenchel_young(
    logits: ArrayLike,
    targets: ArrayLike,
    k: ArrayLike,
    lam: ArrayLike,
    p: float,
    two_sided: bool,
    completion: Completion | None,
) -> _Loss:
    operator = Operator(TWO_SIDED if two_sided else MASK, check_exponent(p))
    problem = TopKProblem.of(Rows.of("logits", logits, -1), k, lam, operator)
    targets_ = _targets(targets, problem.rows)
    if completion is None:
        inner = _value.inner(xp, problem.rows.data, targets_.t)
        return _difference(problem, inner, targets_.t)
    check_choice("completion", completion, ("spread", "best"))
    excess = xp.total(targets_.t) - problem.k
    if (excess > 1e-6 * np.maximum(problem.k, 1.0)).any():  # beyond the rounding of soft targets
        worst = int(excess.argmax())
        raise ValueError(
            f"targets must have at most k labels (a sum of at most k) with completion={completion!r},"
            f" got {(excess + problem.k).flat[worst]:g} for k={problem.k.flat[worst]:g}"
        )
    if completion == "spread":
        return _spread(problem, targets_.t)
    if not targets_.are_labels:
        raise ValueError(
            "targets must be class indices or sets of labels (0 or 1) with completion='best', got "
            "soft targets"
        )
    return _best(problem, targets_.t)


def _difference(problem: TopKProblem, subtracted: Array, gradient: Array) -> _Loss:
    """f(x) minus another function of x, with its gradient."""
    with xp.quiet():  # an infinite logit among the labels
        value = _value_of(problem) - subtracted
        nan = np.where(np.isnan(problem.rows.data).any(axis=-1, keepdims=True), np.nan, 0.0)
        return _Loss(problem.rows, value + nan, _mask(problem) - gradient + nan)


def _mask(problem: TopKProblem) -> Array:
    return Evaluated(problem, problem.k, problem.lam).y


def _spread(problem: TopKProblem, t: Array) -> _Loss:
    """f(x) - <x, t'> + R(t'), where t' fills t up to the sum of y, among the candidates."""
    x, reg = problem.rows.data, problem.operator.reg(xp)
    with xp.quiet():
        t, penalty = _value.filled(xp, x, t, xp.split(problem.k), problem.lam, reg)
        return _difference(problem, _value.inner(xp, x, t) - penalty, t)


def _best(problem: TopKProblem, t: Array) -> _Loss:
    """f(x) minus the best value with y = 1 on the labels."""
    x, k, reg = problem.rows.data, xp.split(problem.k), problem.operator.reg(xp)
    rest = []

    def value(x: Array, k: Count) -> Array:
        rows = replace(problem.rows, data=x)
        rest.append(replace(problem, rows=rows, k=k.whole + k.frac))
        return _value_of(rest[0])

    with xp.quiet():
        taken = _value.best(xp, x, t, k, problem.lam, reg, value)
    return _difference(problem, taken, np.where(t > 0, 1.0, _mask(rest[0])))


def topk_loss(
    logits: ArrayLike,
    targets: ArrayLike,
    k: ArrayLike,
    lam: ArrayLike = 1.0,
    *,
    p: float = 2.0,
    two_sided: bool = False,
    completion: Completion | None = "spread",
    reduction: Reduction = "mean",
) -> FloatArray:
    r"""Fenchel-Young top-k loss over the last axis.

    .. math:: \ell(x, t) = f_{\phi,R}(x, 1_k) - \langle x, t \rangle, \qquad \nabla_x \ell = y(x) - t

    ``targets`` are class indices (integers, the shape of ``logits`` without the last axis) or weights
    in [0, 1] in the shape of ``logits`` (one-hot, several labels, or soft).

    With k greater than the sum of t, as for one label and k > 1, t is not in P(1_k): the paper's loss
    (``completion=None``) then decreases without bound as all logits decrease together. Two
    completions are invariant to that shift, and nonnegative; they take at most k labels:

    - ``"spread"``, the default: t is filled up to a sum of k, evenly on the classes that are not labels
      (:math:`t'_i = t_i + (1 - t_i)(k - \sum t)/(n - \sum t)`), and R(t') is added. Convex.
    - ``"best"``: subtracts the best value that selects all the labels, whatever else it selects.
      Zero exactly when they are fully selected; not convex for k > 1; no soft targets.

    ``reduction`` is "mean", "sum" or "none".

    >>> float(topk_loss([[5.0, 1.0, 0.0]], [0], k=2, lam=1.0, completion="best"))
    0.0
    """
    check_choice("reduction", reduction, ("mean", "sum", "none"))
    loss = _fenchel_young(logits, targets, k, lam, p, two_sided, completion)
    if reduction == "none":
        return loss.rows.restore_scalars(loss.value)
    with np.errstate(invalid="ignore", over="ignore"):  # the mean of no rows is NaN
        total = loss.value.sum() / (loss.value.size if reduction == "mean" else 1)
        return np.asarray(total, dtype=loss.rows.dtype)


def topk_loss_vjp(
    logits: ArrayLike,
    targets: ArrayLike,
    k: ArrayLike,
    lam: ArrayLike = 1.0,
    *,
    dy: ArrayLike = 1.0,
    p: float = 2.0,
    two_sided: bool = False,
    completion: Completion | None = "spread",
    reduction: Reduction = "mean",
) -> FloatArray:
    """Cotangent of the logits for the cotangent ``dy`` of ``topk_loss``; its gradient for dy = 1."""
    check_choice("reduction", reduction, ("mean", "sum", "none"))
    loss = _fenchel_young(logits, targets, k, lam, p, two_sided, completion)
    shape = loss.rows.shape[:-1] if reduction == "none" else ()
    scale = as_real_array("dy", dy)
    if scale.shape not in ((), shape):
        raise ValueError(f"dy must be a number or have shape {shape}, got {scale.shape}")
    if reduction == "mean":
        scale = scale / max(loss.value.size, 1)
    per_row = np.broadcast_to(scale, loss.rows.shape[:-1]).reshape(-1, 1)
    return loss.rows.restore(per_row * loss.gradient)
