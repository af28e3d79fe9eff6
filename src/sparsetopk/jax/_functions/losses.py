"""The value f_{phi,R}(x, 1_k) of the relaxed top-k on JAX arrays, and its Fenchel-Young loss."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..._checks import check_class_weights, check_exponent, check_loss, check_phi
from ..._maths import value as _value
from ..._maths.operator import MASK, TWO_SIDED, Count, Operator
from ..._types import Axes, Axis, Completion, PhiName, Reduction
from .._rows import namespace as xp
from .._rows.arguments import (
    AxisName,
    Number,
    Rows,
    check_float_array,
    check_k_and_lam,
    compute_dtype,
    exact,
    is_hard,
    is_readable,
    row_length,
)
from .._rows.compiled import compiled, scalars
from .._rows.losses import (
    LossSetting,
    Targets,
    are_indices,
    fenchel_young,
    target_loss,
    value_of_rows,
)
from .._rows.promotion import promoting
from .._rows.threshold import TopKSetting


def topk_value(
    x: Array,
    k: Number,
    lam: Number = 0.1,
    *,
    p: float = 2.0,
    two_sided: bool = False,
    phi: PhiName = "identity",
    axis: Axis = -1,
    axis_name: AxisName = None,
) -> Array:
    r"""The optimal value of the relaxed top-k problem, one per row.

    .. math:: f_{\phi,R}(x, 1_k) = \max_y \langle x, y \rangle - f_\phi^*(y, 1_k) - R(y)

    It is convex in x, and its gradient in x is the operator itself: ``topk_mask`` for phi =
    "identity", ``topk_mag(debias=False)`` for "half_square", ``topk_sign`` for "abs"; in k it is phi at
    the threshold, in lam -R(y)/lam. Padded (-inf) entries take no part; ``lam = 0`` gives the sum of
    the k largest phi(x_i). ``axis_name`` is as in ``topk_mask``.

    >>> topk_value(jnp.array([3.0, 1.0, -1.0]), k=2, lam=0.0)
    Array(4., dtype=float32)
    """
    kind = Operator(check_phi(phi, two_sided), check_exponent(p))
    rows = Rows.of("x", x, axis, many=True)
    check_k_and_lam(rows, k, lam, row_length(rows, axis_name))
    if rows.x.size == 0 and axis_name is None:
        return rows.x.sum(axis=rows.axis)
    setting = TopKSetting(kind, is_hard(lam), axis_name)
    return _evaluate(rows.x, exact(k), lam, rows.axis, setting)


@compiled("axis", "setting", results=scalars)
def _evaluate(x: Array, k: Array | Count, lam: Array, axis: Axes, setting: TopKSetting) -> Array:
    rows = Rows("x", x, axis)
    x = rows.data.astype(compute_dtype(x))
    return rows.restore_scalars(value_of_rows(x, *rows.split(k), rows.per_row(lam), setting))


def topk_loss(
    logits: Array,
    targets: Array,
    k: Number,
    lam: Number = 30.0,
    *,
    p: float = 2.0,
    two_sided: bool = False,
    completion: Completion | None = "spread",
    reduction: Reduction = "mean",
    axis: int = -1,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    weight: Array | None = None,
    axis_name: AxisName = None,
) -> Array:
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

    ``axis_name`` names the mesh axes over which the classes are sharded, inside ``shard_map``: class
    indices count those of the whole row, other targets and ``weight`` are sharded as the logits are.

    >>> topk_loss(jnp.array([[5.0, 1.0, 0.0]]), jnp.array([0]), k=2, lam=1.0, completion="best")
    Array(0., dtype=float32)
    """
    check_loss(completion, reduction, label_smoothing, ignore_index)
    rows, e = Rows.of("logits", logits, axis), check_exponent(p)
    n = row_length(rows, axis_name)
    check_k_and_lam(rows, k, lam, n)
    targets = _check_targets(targets, rows, n, ignore_index)
    if weight is not None:
        weight = check_float_array("weight", weight)
        check_class_weights(weight.shape, rows.n)
    if completion is not None:
        _check_completion(completion, rows, targets, k)
    setting = TopKSetting(Operator(TWO_SIDED if two_sided else MASK, e), is_hard(lam), axis_name)
    options = LossSetting(setting, completion, label_smoothing, ignore_index)
    return _loss(rows.x, targets, exact(k), lam, weight, rows.axis, options, reduction)


def _check_targets(targets: object, rows: Rows, n: int, ignored: int) -> Array:
    """Targets for rows of n classes, of which there may be a part here."""
    if not isinstance(targets, (Array, np.ndarray)) or jnp.iscomplexobj(targets):
        got = targets.dtype if isinstance(targets, (Array, np.ndarray)) else repr(targets)
        raise TypeError(
            "targets must be an array of integer class indices, or of booleans or floats in the shape "
            f"of logits, got {got}"
        )
    shape = rows.x.shape
    if are_indices(targets):
        without = tuple(size for i, size in enumerate(shape) if i != rows.axis)
        if targets.shape != without:
            raise ValueError(
                f"targets must have shape {without} when they are class indices (that of logits "
                f"without axis {rows.axis}), got {targets.shape}"
            )
        _check_values(targets, 0, n - 1, f"targets must be class indices in [0, {n})", ignored)
    elif targets.shape != shape:
        raise ValueError(f"targets must have the shape of logits, {shape}, got {targets.shape}")
    else:
        _check_values(targets, 0, 1, "targets must be in [0, 1]")
    return jnp.asarray(targets)


def _check_values(
    values: Array | np.ndarray, low: int, high: int, message: str, ignored: int | None = None
) -> None:
    if is_readable(values):
        read = np.asarray(values).astype(np.float64)
        bad = ~((read >= low) & (read <= high)) & (read != ignored)
        if bad.any():
            raise ValueError(f"{message}, got {read[bad].flat[0]:g}")


def _check_completion(completion: Completion, rows: Rows, targets: Array, k: Number) -> None:
    if not is_readable(targets, k) or rows.x.size == 0:
        return
    t = _read_weights(targets, rows)
    each = np.moveaxis(
        np.broadcast_to(np.asarray(k, dtype=np.float64), rows.per_row_shape), rows.axis, -1
    )
    excess = t.sum(axis=-1, keepdims=True) - each
    if (excess > 1e-6 * np.maximum(each, 1.0)).any():  # beyond the rounding of soft targets
        worst = excess.argmax()
        raise ValueError(
            "targets must have at most k labels (a sum of at most k) with "
            f"completion={completion!r}, got {t.sum(axis=-1).flat[worst]:g} for k={each.flat[worst]:g}"
        )
    if completion == "best" and not ((t == 0) | (t == 1)).all():
        raise ValueError(
            "targets must be class indices or sets of labels (0 or 1) with completion='best', got "
            "soft targets"
        )


def _read_weights(targets: Array, rows: Rows) -> np.ndarray:
    """Targets whose values are there as rows, also where logits are traced."""
    t = np.asarray(targets)
    if are_indices(targets):
        return np.asarray(t[..., None] == np.arange(rows.n), dtype=np.float64)
    return np.moveaxis(t, rows.axis, -1).astype(np.float64)


@partial(jax.jit, static_argnames=("axis", "setting", "reduction"))
@promoting
def _loss(
    logits: Array,
    targets: Array,
    k: Array | Count,
    lam: Array,
    weight: Array | None,
    axis: int,
    setting: LossSetting,
    reduction: Reduction,
) -> Array:
    loss, weights = _losses(logits, targets, k, lam, weight, axis, setting)
    return _value.reduced(xp, loss, weights, loss.size, reduction).astype(logits.dtype)


@compiled("axis", "setting", results=lambda *at: (scalars(*at), scalars(*at)))
def _losses(
    logits: Array,
    targets: Array,
    k: Array | Count,
    lam: Array,
    weight: Array | None,
    axis: int,
    setting: LossSetting,
) -> tuple[Array, Array]:
    """Of every row, and its weight, in the dtype of the computation."""
    if setting.of_value.axis_name is None and logits.size:
        return _of_targets(logits, targets, k, lam, weight, axis, setting)
    of_rows = partial(_of_rows, axis=axis, setting=setting)
    # A backward keeps the logits, and not what is made of them.
    return jax.checkpoint(of_rows)(logits, targets, k, lam, weight)


def _of_targets(
    logits: Array,
    targets: Array,
    k: Array | Count,
    lam: Array,
    weight: Array | None,
    axis: int,
    setting: LossSetting,
) -> tuple[Array, Array]:
    """The same with whole rows here: the loss and its slope are one call; a backward keeps the slope."""
    rows = Rows("logits", logits, axis)
    lam = rows.per_row(lam)
    if are_indices(targets):
        wide = targets.dtype.itemsize == 8
        targets = targets[..., None].astype(jnp.int64 if wide else jnp.int32)
    else:
        targets = jnp.moveaxis(targets, rows.axis, -1).astype(lam.dtype)
    loss, _ = target_loss(rows.data, *rows.split(k), lam, targets, setting=setting)
    weights = _row_weights(targets, weight, lam, rows.n, setting.ignored)
    return loss.squeeze(-1), weights.squeeze(-1)


def _row_weights(targets: Array, weight: Array | None, lam: Array, n: int, ignored: int) -> Array:
    """What the losses of rows are multiplied by, (..., 1)."""
    if not are_indices(targets):
        found = (
            None if weight is None else _value.row_weights(xp, targets, weight.astype(lam.dtype))
        )
        return jnp.ones_like(lam) if found is None else found
    counted = (targets != ignored).astype(lam.dtype)
    if weight is None:
        return counted
    is_class = (targets >= 0) & (targets < n)
    found = weight.astype(lam.dtype)[jnp.clip(targets, 0, n - 1)]
    return jnp.where(counted == 0, 0.0, jnp.where(is_class, found, jnp.nan))


def _of_rows(
    logits: Array,
    targets: Array,
    k: Array | Count,
    lam: Array,
    weight: Array | None,
    axis: int,
    setting: LossSetting,
) -> tuple[Array, Array]:
    rows, axis_name = Rows("logits", logits, axis), setting.of_value.axis_name
    t, counted = Targets.of(targets, rows, axis_name, setting.ignored)
    lam, x = rows.per_row(lam), rows.data.astype(t.dtype)
    weights = jnp.ones_like(lam) if counted is None else counted
    if counted is not None:
        x = jnp.where(counted > 0, x, 0.0)  # whatever a row that is left out holds
    if weight is not None:
        found = _value.row_weights(xp.over(axis_name), t, weight.astype(t.dtype))
        weights = jnp.where(weights == 0, 0.0, found)
    if x.size == 0:
        return x.sum(axis=-1), weights.squeeze(-1)
    loss, _ = fenchel_young(x, t, rows.split(k), lam, setting)
    return loss.squeeze(-1), weights.squeeze(-1)
