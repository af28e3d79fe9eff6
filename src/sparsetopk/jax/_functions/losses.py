"""The value f_{phi,R}(x, 1_k) of the relaxed top-k on JAX arrays, and its Fenchel-Young loss."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero

from ..._checks import check_class_weights, check_exponent, check_loss, check_phi
from ..._maths import value as _value
from ..._maths.operator import MASK, TWO_SIDED, Count, Operator
from ..._maths.threshold import State
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
from .._rows.calls import RowCall, derivative_of
from .._rows.compiled import compiled, scalars
from .._rows.promotion import promoting
from .._rows.threshold import TopKSetting, hard_mask, in_core, relaxed, solve_topk
from .._solvers.plain import tangent_sum


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


@partial(jax.custom_jvp, nondiff_argnums=(4,))
def value_of_rows(x: Array, whole: Array, frac: Array, lam: Array, setting: TopKSetting) -> Array:
    """f_{phi,R}(x, 1_k), (..., 1), for rows x (..., n) in the dtype of lam."""
    if setting.axis_name is not None:
        return _value_in_xla(x, whole, frac, lam, setting)[0]
    return _value_call(x, whole, frac, lam, setting=setting)[0]


def _value_in_xla(
    x: Array, whole: Array, frac: Array, lam: Array, setting: TopKSetting
) -> tuple[Array]:
    _, pivot, delta = solve_topk(x, whole, frac, lam, setting)
    rows = relaxed(x, Count(whole, frac), lam, State(pivot, delta), setting)
    return (_value.topk_value(rows, hard_mask(rows, setting)),)


def _value_in_core(*at: Any, setting: TopKSetting) -> dict[str, Any] | None:
    """Of masks, whose output the core makes a loss of."""
    given = in_core(setting) if setting.kind.op in (MASK, TWO_SIDED) else None
    return given and {name: given[name] for name in ("op", "exponent")}


_value_call = RowCall(
    "value", lambda x, *at, setting: [(1, at[2].dtype)], _value_in_xla, _value_in_core
)


@partial(value_of_rows.defjvp, symbolic_zeros=True)
@promoting
def _value_jvp(
    setting: TopKSetting, at: tuple[Array, ...], tangents: tuple[Any, ...]
) -> tuple[Array, Array]:
    x, whole, frac, lam = at
    dx, _, dk, dlam = (None if isinstance(d, SymbolicZero) else d for d in tangents)
    y, pivot, delta = solve_topk(x, whole, frac, lam, setting)
    value = value_of_rows(x, whole, frac, lam, setting)
    if dx is not None and dk is None and dlam is None:  # what rows are made of has no part in it
        return value, tangent_sum(y * dx, setting.axis_name)
    rows = relaxed(x, Count(whole, frac), lam, State(pivot, delta), setting)
    return value, _value.tangent(rows, y, dx, dk, dlam)


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
    options = _LossSetting(setting, completion, label_smoothing, ignore_index)
    return _loss(rows.x, targets, exact(k), lam, weight, rows.axis, options, reduction)


class _LossSetting(NamedTuple):
    """What is static about a loss."""

    of_value: TopKSetting
    completion: Completion | None
    label_smoothing: float
    ignored: int


def _check_targets(targets: object, rows: Rows, n: int, ignored: int) -> Array:
    """Targets for rows of n classes, of which there may be a part here."""
    if not isinstance(targets, (Array, np.ndarray)) or jnp.iscomplexobj(targets):
        got = targets.dtype if isinstance(targets, (Array, np.ndarray)) else repr(targets)
        raise TypeError(
            "targets must be an array of integer class indices, or of booleans or floats in the shape "
            f"of logits, got {got}"
        )
    shape = rows.x.shape
    if _are_indices(targets):
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


def _are_indices(targets: Array | np.ndarray) -> bool:
    return bool(jnp.issubdtype(targets.dtype, jnp.integer))


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
    if _are_indices(targets):
        return np.asarray(t[..., None] == np.arange(rows.n), dtype=np.float64)
    return np.moveaxis(t, rows.axis, -1).astype(np.float64)


class _Targets(NamedTuple):
    """In the dtype of the computation."""

    t: Array  # rows (..., n) in [0, 1]; NaN where they are not, or where an index is none
    counted: Array | None  # (..., 1): 0 for rows that are left out; None if none can be

    @classmethod
    def of(cls, targets: Array, rows: Rows, axis_name: AxisName, ignored: int) -> _Targets:
        dtype, n = compute_dtype(rows.x), row_length(rows, axis_name)
        if not _are_indices(targets):
            t = jnp.moveaxis(targets, rows.axis, -1).astype(dtype)
            good = (t >= 0) & (t <= 1)
            return cls(jnp.where(_everywhere(good, axis_name), t, jnp.nan), None)
        index = targets[..., None]
        counted = index != ignored
        good = (index >= 0) & (index < n) | ~counted
        first = 0 if axis_name is None else lax.axis_index(axis_name) * rows.n
        classes = first + jnp.arange(rows.n, dtype=jnp.int32)
        t = (counted & (index == classes)).astype(dtype)
        return cls(jnp.where(good, t, jnp.nan), counted.astype(dtype))


def _everywhere(flags: Array, axis_name: AxisName) -> Array:
    """Whether they are set in the whole row, (..., 1)."""
    return xp.over(axis_name).total(~flags) == 0


@partial(jax.jit, static_argnames=("axis", "setting", "reduction"))
@promoting
def _loss(
    logits: Array,
    targets: Array,
    k: Array | Count,
    lam: Array,
    weight: Array | None,
    axis: int,
    setting: _LossSetting,
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
    setting: _LossSetting,
) -> tuple[Array, Array]:
    """Of every row, and its weight, in the dtype of the computation."""
    plain = setting.completion != "best" and not setting.label_smoothing
    if plain and _are_indices(targets) and setting.of_value.axis_name is None and logits.size:
        return _of_labels(logits, targets, k, lam, weight, axis, setting)
    of_rows = partial(_of_rows, axis=axis, setting=setting)
    # A backward keeps the logits, and not what is made of them.
    return jax.checkpoint(of_rows)(logits, targets, k, lam, weight)


def _of_labels(
    logits: Array,
    labels: Array,
    k: Array | Count,
    lam: Array,
    weight: Array | None,
    axis: int,
    setting: _LossSetting,
) -> tuple[Array, Array]:
    """The same for class indices: the loss and its slope are one call; a backward keeps the slope."""
    rows, wide = Rows("logits", logits, axis), labels.dtype.itemsize == 8
    labels = labels[..., None].astype(jnp.int64 if wide else jnp.int32)
    lam, static = rows.per_row(lam), setting._asdict()
    del static["label_smoothing"]
    loss, _ = _label_loss(rows.data, *rows.split(k), lam, labels, **static)
    counted = (labels != setting.ignored).astype(lam.dtype)
    if weight is not None:
        is_class = (labels >= 0) & (labels < rows.n)
        found = weight.astype(lam.dtype)[jnp.clip(labels, 0, rows.n - 1)]
        counted = jnp.where(counted == 0, 0.0, jnp.where(is_class, found, jnp.nan))
    return loss.squeeze(-1), counted.squeeze(-1)


def _label_loss_in_xla(
    x: Array,
    whole: Array,
    frac: Array,
    lam: Array,
    labels: Array,
    of_value: TopKSetting,
    completion: Completion | None,
    ignored: int,
) -> tuple[Array, Array]:
    """The loss and its slope, y - t, of rows."""
    rows = Rows("logits", x, x.ndim - 1)
    t, counted = _Targets.of(labels.squeeze(-1), rows, None, ignored)
    assert counted is not None
    k, dtype = Count(whole, frac), x.dtype
    x = jnp.where(counted > 0, x.astype(t.dtype), 0.0)  # whatever a row that is left out holds
    loss, t = _fenchel_young(x, t, k, lam, _LossSetting(of_value, completion, 0.0, ignored))
    slope = (solve_topk(x, whole, frac, lam, of_value).y - t).astype(dtype)
    return jnp.where(counted > 0, loss, 0.0), jnp.where(counted > 0, slope, 0.0)


def _label_loss_in_core(
    *at: Any, of_value: TopKSetting, completion: Completion | None, ignored: int
) -> dict[str, Any] | None:
    given = in_core(of_value)
    return given and {
        "op": given["op"],
        "exponent": given["exponent"],
        "ignored": np.int64(ignored),
        "spread": np.bool_(completion == "spread"),
    }


_label_loss = RowCall(
    "label_loss",
    lambda x, *at, **_: [(1, at[2].dtype), (x.shape[-1], x.dtype)],
    _label_loss_in_xla,
    _label_loss_in_core,
)


@_label_loss.def_jvp
def _(at: Sequence[Array], tangents: Sequence[Any], **static: Any) -> Any:
    dx, *others = tangents
    if any(d is not None for d in others):  # in k and lam by the rules of what it is made of
        return derivative_of(promoting(_label_loss_in_xla))(at, tangents, **static)
    loss, slope = _label_loss(*at, **static)
    x, whole, frac, lam, labels = at
    dtype, setting = loss.dtype, static["of_value"]
    # A backward keeps the slope in the dtype of x.
    inner = jax.checkpoint(lambda *at: tangent_sum(at[0].astype(dtype) * at[1].astype(dtype)))
    moved = inner(slope, dx)
    _, dy = jax.jvp(lambda x: solve_topk(x, whole, frac, lam, setting).y, (x,), (dx,))
    return (loss, slope), (moved, jnp.where(labels == static["ignored"], 0.0, dy).astype(x.dtype))


def _of_rows(
    logits: Array,
    targets: Array,
    k: Array | Count,
    lam: Array,
    weight: Array | None,
    axis: int,
    setting: _LossSetting,
) -> tuple[Array, Array]:
    rows, axis_name = Rows("logits", logits, axis), setting.of_value.axis_name
    t, counted = _Targets.of(targets, rows, axis_name, setting.ignored)
    lam, x = rows.per_row(lam), rows.data.astype(t.dtype)
    weights = jnp.ones_like(lam) if counted is None else counted
    if counted is not None:
        x = jnp.where(counted > 0, x, 0.0)  # whatever a row that is left out holds
    if weight is not None:
        found = _value.row_weights(xp.over(axis_name), t, weight.astype(t.dtype))
        weights = jnp.where(weights == 0, 0.0, found)
    if x.size == 0:
        return x.sum(axis=-1), weights.squeeze(-1)
    loss, _ = _fenchel_young(x, t, rows.split(k), lam, setting)
    return loss.squeeze(-1), weights.squeeze(-1)


def _fenchel_young(
    x: Array, t: Array, k: Count, lam: Array, setting: _LossSetting
) -> tuple[Array, Array]:
    """The loss of every row, (..., 1), and what x is compared with."""
    reg, whole = setting.of_value.kind.reg(xp), xp.over(setting.of_value.axis_name)

    def of_top_k(x: Array, k: Count) -> Array:
        return value_of_rows(x, *k, lam, setting.of_value)

    if setting.completion == "best":
        return of_top_k(x, k) - _value.best(whole, x, t, k, lam, reg, of_top_k), t
    if setting.label_smoothing:
        t = _value.smoothed(whole, x, t, setting.label_smoothing)
    added: Any = 0.0
    if setting.completion == "spread":
        t, added = _value.filled(whole, x, t, k, lam, reg)
    return of_top_k(x, k) - _value.inner(whole, x, t) + added, t
