"""The value f_{phi,R}(x, 1_k) of the relaxed top-k, and the Fenchel-Young loss it generates."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike

from .._checks import check_class_weights, check_exponent, check_loss, check_phi
from .._maths import value as _value
from .._maths.operator import MASK, TWO_SIDED, Count, Operator
from .._types import Array, Axis, Completion, FloatArray, PhiName, Reduction
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
    axis: Axis = -1,
) -> FloatArray:
    r"""The optimal value of the relaxed top-k problem, one per row.

    .. math:: f_{\phi,R}(x, 1_k) = \max_y \langle x, y \rangle - f_\phi^*(y, 1_k) - R(y)

    It is convex in x, and its gradient in x is the operator itself: ``topk_mask`` for phi =
    "identity", ``topk_mag(debias=False)`` for "half_square", ``topk_sign`` for "abs". Padded (-inf)
    entries take no part; ``lam = 0`` gives the sum of the k largest phi(x_i).

    >>> float(topk_value([3.0, 1.0, -1.0], k=2, lam=0.0))
    4.0
    """
    rows = Rows.of("x", x, axis, many=True)
    operator = Operator(check_phi(phi, two_sided), check_exponent(p))
    return rows.restore_scalars(_value_of(TopKProblem.of(rows, k, lam, operator)))


def _value_of(problem: TopKProblem) -> Array:
    """f_{phi,R}(x, 1_k) as (m, 1)."""
    if problem.rows.data.size == 0:
        return np.zeros_like(problem.k)
    with xp.quiet():
        return _value.topk_value(problem.relaxed)


class _Targets(NamedTuple):
    """Targets as rows (m, n) in [0, 1]."""

    t: Array
    are_labels: bool  # every entry is 0 or 1
    counted: Array  # (m, 1): 1, or 0 for rows that are left out


def _targets(targets: ArrayLike, rows: Rows, ignored: int) -> _Targets:
    """Class indices in the shape of the logits without their axis, or weights in [0, 1]."""
    array = np.asarray(targets)
    if array.dtype.kind in "iu":
        if array.shape != rows.leading:
            raise ValueError(
                f"targets must have shape {rows.leading} when they are class indices (that of "
                f"logits without axis {rows.axis}), got {array.shape}"
            )
        counted = array.reshape(-1, 1) != ignored
        bad = ((array < 0) | (array >= rows.n)) & (array != ignored)
        if bad.any():
            raise ValueError(
                f"targets must be class indices in [0, {rows.n}), got {array[bad].flat[0]}"
            )
        labels = (np.arange(rows.n) == array.reshape(-1, 1)) & counted
        return _Targets(labels.astype(np.float64), True, counted.astype(np.float64))
    if array.dtype.kind not in "fb":
        raise TypeError(
            "targets must be integer class indices, or booleans or floats in the shape of logits, "
            f"got dtype {array.dtype}"
        )
    if array.shape != rows.shape:
        raise ValueError(f"targets must have the shape of logits, {rows.shape}, got {array.shape}")
    t = rows.tangent("targets", array.astype(np.float64))
    if not ((t >= 0) & (t <= 1)).all():
        raise ValueError(f"targets must be in [0, 1], got values from {np.min(t)} to {np.max(t)}")
    return _Targets(t, bool(np.isin(t, (0.0, 1.0)).all()), np.ones((len(t), 1)))


def _class_weights(weight: ArrayLike, n: int) -> Array:
    array = as_real_array("weight", weight)
    check_class_weights(array.shape, n)
    return array


class _Loss(NamedTuple):
    rows: Rows
    value: Array  # (m, 1)
    gradient: Array  # (m, n)
    weights: Array  # (m, 1): of each row in the mean or the sum


class LossOptions(TypedDict, total=False):
    """The keyword arguments of ``topk_loss``."""

    p: float
    two_sided: bool
    completion: Completion | None
    reduction: Reduction
    axis: int
    label_smoothing: float
    ignore_index: int
    weight: ArrayLike | None


def _evaluated(
    logits: ArrayLike,
    targets: ArrayLike,
    k: ArrayLike,
    lam: ArrayLike,
    *,
    p: float = 2.0,
    two_sided: bool = False,
    completion: Completion | None = "spread",
    reduction: Reduction = "mean",
    axis: int = -1,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    weight: ArrayLike | None = None,
) -> _Loss:
    check_loss(completion, reduction, label_smoothing, ignore_index)
    operator = Operator(TWO_SIDED if two_sided else MASK, check_exponent(p))
    rows = Rows.of("logits", logits, axis)
    t, are_labels, weights = _targets(targets, rows, ignore_index)
    # What rows that are left out hold must not matter, NaN among it.
    rows = replace(rows, data=np.where(weights > 0, rows.data, 0.0))
    problem = TopKProblem.of(rows, k, lam, operator)
    if weight is not None:
        weights = weights * _value.row_weights(xp, t, _class_weights(weight, rows.n))
    if completion is not None:
        _check_completion(completion, problem, t, are_labels)
    if label_smoothing:
        t = _value.smoothed(xp, rows.data, t, label_smoothing)
    value, gradient = _fenchel_young(problem, t, completion)
    return _Loss(rows, value, gradient, weights)


def _check_completion(
    completion: Completion, problem: TopKProblem, t: Array, are_labels: bool
) -> None:
    excess = xp.total(t) - problem.k
    if (excess > 1e-6 * np.maximum(problem.k, 1.0)).any():  # beyond the rounding of soft targets
        worst = int(excess.argmax())
        raise ValueError(
            f"targets must have at most k labels (a sum of at most k) with completion={completion!r},"
            f" got {(excess + problem.k).flat[worst]:g} for k={problem.k.flat[worst]:g}"
        )
    if completion == "best" and not are_labels:
        raise ValueError(
            "targets must be class indices or sets of labels (0 or 1) with completion='best', got "
            "soft targets"
        )


def _fenchel_young(
    problem: TopKProblem, t: Array, completion: Completion | None
) -> tuple[Array, Array]:
    if completion is None:
        return _difference(problem, _value.inner(xp, problem.rows.data, t), t)
    return _spread(problem, t) if completion == "spread" else _best(problem, t)


def _difference(problem: TopKProblem, subtracted: Array, gradient: Array) -> tuple[Array, Array]:
    """f(x) minus another function of x, (m, 1), with its gradient (m, n)."""
    with xp.quiet():  # an infinite logit among the labels
        value = _value_of(problem) - subtracted
        nan = np.where(np.isnan(problem.rows.data).any(axis=-1, keepdims=True), np.nan, 0.0)
        return value + nan, _mask(problem) - gradient + nan


def _mask(problem: TopKProblem) -> Array:
    return Evaluated(problem, problem.k, problem.lam, problem.rows.data).y


def _spread(problem: TopKProblem, t: Array) -> tuple[Array, Array]:
    """f(x) - <x, t'> + R(t'), where t' fills t up to the sum of y, among the candidates."""
    x, reg = problem.rows.data, problem.operator.reg(xp)
    with xp.quiet():
        t, penalty = _value.filled(xp, x, t, xp.split(problem.k), problem.lam, reg)
        return _difference(problem, _value.inner(xp, x, t) - penalty, t)


def _best(problem: TopKProblem, t: Array) -> tuple[Array, Array]:
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
    lam: ArrayLike = 30.0,
    *,
    p: float = 2.0,
    two_sided: bool = False,
    completion: Completion | None = "spread",
    reduction: Reduction = "mean",
    axis: int = -1,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    weight: ArrayLike | None = None,
) -> FloatArray:
    r"""Fenchel-Young top-k loss over the classes along ``axis``.

    .. math:: \ell(x, t) = f_{\phi,R}(x, 1_k) - \langle x, t \rangle, \qquad \nabla_x \ell = y(x) - t

    ``targets`` are class indices (integers, the shape of ``logits`` without the axis) or weights in
    [0, 1] in the shape of ``logits`` (one-hot, several labels, or soft).

    ``lam`` is the unit of the logits: training ends with a label about lam above the others. With k
    above the sum of t the paper's loss (``completion=None``) falls without bound as all logits fall;
    two completions are invariant to that shift, and nonnegative, and take at most k labels:

    - ``"spread"``, the default: t is filled up to a sum of k, evenly on the classes that are not labels
      (:math:`t'_i = t_i + (1 - t_i)(k - \sum t)/(n - \sum t)`), and R(t') is added. Convex.
    - ``"best"``: subtracts the best value that selects all the labels, whatever else it selects.
      Zero exactly when they are fully selected; not convex for k > 1; no soft targets.

    The rest is as in PyTorch's cross-entropy, but that the classes are last by default:

    - ``reduction`` is "mean", "sum" or "none". Rows whose class index is ``ignore_index`` have no loss
      and no gradient, and the mean is over the others.
    - ``label_smoothing`` takes this share of every target and spreads it evenly over the classes whose
      logit is not -inf.
    - ``weight`` has a number for every class: the loss of a row is multiplied by that of its label, or
      by :math:`\langle w, t \rangle / \sum t`, and the mean is the weighted one.

    >>> float(topk_loss([[5.0, 1.0, 0.0]], [0], k=2, lam=1.0, completion="best"))
    0.0
    """
    rows, values, _, weights = _evaluated(
        logits,
        targets,
        k,
        lam,
        p=p,
        two_sided=two_sided,
        completion=completion,
        reduction=reduction,
        axis=axis,
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
        weight=weight,
    )
    with xp.quiet():  # the mean of no rows is NaN
        loss = _value.reduced(xp, values, weights, len(values), reduction)
        return rows.restore_scalars(loss) if reduction == "none" else loss.astype(rows.dtype)


def topk_loss_vjp(
    logits: ArrayLike,
    targets: ArrayLike,
    k: ArrayLike,
    lam: ArrayLike = 30.0,
    *,
    dy: ArrayLike = 1.0,
    **options: Unpack[LossOptions],
) -> FloatArray:
    """Cotangent of the logits for the cotangent ``dy`` of ``topk_loss``; its gradient for dy = 1."""
    rows, _, gradient, weights = _evaluated(logits, targets, k, lam, **options)
    reduction = options.get("reduction", "mean")
    shape = rows.leading if reduction == "none" else ()
    scale = as_real_array("dy", dy)
    if scale.shape not in ((), shape):
        raise ValueError(f"dy must be a number or have shape {shape}, got {scale.shape}")
    with xp.quiet():
        weight = weights.sum() if reduction == "mean" else 1.0
        share = weights / (
            weight if weight != 0 else 1.0
        )  # where no row counts none has a gradient
        per_row = np.broadcast_to(scale, rows.leading).reshape(-1, 1) * share
    return rows.restore(np.where(weights == 0, 0.0 * per_row, per_row * gradient))
