"""The value f_{phi,R}(x, 1_k) of the relaxed top-k on JAX arrays, and its Fenchel-Young loss."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.custom_derivatives import SymbolicZero

from ..._checks import check_choice, check_exponent
from ..._maths import value as _value
from ..._maths.operator import MASK, OF_PHI, TWO_SIDED, Count, Operator
from ..._maths.threshold import State
from ..._types import Completion, PhiName, Reduction
from .._rows import namespace as xp
from .._rows.arguments import (
    Number,
    Rows,
    check_k_and_lam,
    compute_dtype,
    exact,
    is_hard,
    is_readable,
)
from .._rows.compiled import compiled, scalars
from .._rows.promotion import promoting
from .._rows.threshold import Setting, hard_mask, relaxed, solve


def topk_value(
    x: Array,
    k: Number,
    lam: Number = 0.1,
    *,
    p: float = 2.0,
    two_sided: bool = False,
    phi: PhiName = "identity",
    axis: int = -1,
) -> Array:
    r"""The optimal value of the relaxed top-k problem, one per row.

    .. math:: f_{\phi,R}(x, 1_k) = \max_y \langle x, y \rangle - f_\phi^*(y, 1_k) - R(y)

    It is convex in x, and its gradient in x is the operator itself: ``topk_mask`` for phi =
    "identity", ``topk_mag(debias=False)`` for "half_square", ``topk_sign`` for "abs"; in k it is phi at
    the threshold, in lam -R(y)/lam. Padded (-inf) entries take no part; ``lam = 0`` gives the sum of
    the k largest phi(x_i).

    >>> topk_value(jnp.array([3.0, 1.0, -1.0]), k=2, lam=0.0)
    Array(4., dtype=float32)
    """
    check_choice("phi", phi, OF_PHI)
    if two_sided and phi != "identity":
        raise ValueError(f"phi must be 'identity' when two_sided=True, got {phi!r}")
    rows, e = Rows.of("x", x, axis), check_exponent(p)
    check_k_and_lam(rows, k, lam)
    if rows.x.size == 0:
        return rows.x.sum(axis=rows.axis)
    setting = Setting(Operator(TWO_SIDED if two_sided else OF_PHI[phi], e), is_hard(lam))
    return _evaluate(rows.x, exact(k), lam, rows.axis, setting)


@compiled("axis", "setting", results=scalars)
def _evaluate(x: Array, k: Array | Count, lam: Array, axis: int, setting: Setting) -> Array:
    rows = Rows("x", x, axis)
    x = rows.data.astype(compute_dtype(x))
    return rows.restore_scalars(value(x, *rows.split(k), rows.per_row(lam), setting))


@partial(jax.custom_jvp, nondiff_argnums=(4,))
def value(x: Array, whole: Array, frac: Array, lam: Array, setting: Setting) -> Array:
    """f_{phi,R}(x, 1_k), (..., 1), for rows x (..., n) in the dtype of lam."""
    _, pivot, delta = solve(x, whole, frac, lam, setting)
    rows = relaxed(x, Count(whole, frac), lam, State(pivot, delta), setting)
    return _value.value(rows, hard_mask(rows, setting))


@partial(value.defjvp, symbolic_zeros=True)
@promoting
def _value_jvp(
    setting: Setting, at: tuple[Array, ...], tangents: tuple[Any, ...]
) -> tuple[Array, Array]:
    x, whole, frac, lam = at
    dx, _, dk, dlam = (None if isinstance(d, SymbolicZero) else d for d in tangents)
    y, pivot, delta = solve(x, whole, frac, lam, setting)
    rows = relaxed(x, Count(whole, frac), lam, State(pivot, delta), setting)
    return value(x, whole, frac, lam, setting), _value.tangent(rows, y, dx, dk, dlam)


def topk_loss(
    logits: Array,
    targets: Array,
    k: Number,
    lam: Number = 1.0,
    *,
    p: float = 2.0,
    two_sided: bool = False,
    completion: Completion | None = "spread",
    reduction: Reduction = "mean",
    axis: int = -1,
) -> Array:
    r"""Fenchel-Young loss of the relaxed top-k mask, over the classes on ``axis``.

    .. math:: \ell(x, t) = f_{\phi,R}(x, 1_k) - \langle x, t \rangle, \qquad \nabla_x \ell = y(x) - t

    ``targets`` are class indices (integers, the shape of ``logits`` without the axis) or weights in
    [0, 1] in the shape of ``logits`` (one-hot, several labels, or soft).

    With k greater than the sum of t, as for one label and k > 1, t is not in P(1_k): the paper's loss
    (``completion=None``) then decreases without bound as all logits decrease together. Two
    completions are invariant to that shift, and nonnegative; they take at most k labels:

    - ``"spread"``, the default: t is filled up to a sum of k, evenly on the classes that are not labels
      (:math:`t'_i = t_i + (1 - t_i)(k - \sum t)/(n - \sum t)`), and R(t') is added. Convex.
    - ``"best"``: subtracts the best value that selects all the labels, whatever else it selects.
      Zero exactly when they are fully selected; not convex for k > 1; no soft targets.

    ``reduction`` is "mean", "sum" or "none".

    >>> topk_loss(jnp.array([[5.0, 1.0, 0.0]]), jnp.array([0]), k=2, completion="best")
    Array(0., dtype=float32)
    """
    check_choice("reduction", reduction, ("mean", "sum", "none"))
    rows, e = Rows.of("logits", logits, axis), check_exponent(p)
    check_k_and_lam(rows, k, lam)
    targets = _check_targets(targets, rows)
    if completion is not None:
        _check_completion(completion, rows, targets, k)
    setting = Setting(Operator(TWO_SIDED if two_sided else MASK, e), is_hard(lam))
    options = (rows.axis, setting, completion, reduction)
    return _loss(rows.x, targets, exact(k), lam, *options)


def _check_targets(targets: object, rows: Rows) -> Array:
    if not isinstance(targets, (Array, np.ndarray)) or jnp.iscomplexobj(targets):
        got = targets.dtype if isinstance(targets, (Array, np.ndarray)) else repr(targets)
        raise TypeError(
            "targets must be an array of integer class indices, or of booleans or floats in the shape "
            f"of logits, got {got}"
        )
    shape, n = rows.x.shape, rows.n
    if _are_indices(targets):
        without = (*shape[: rows.axis], *shape[rows.axis + 1 :])
        if targets.shape != without:
            raise ValueError(
                f"targets must have shape {without} when they are class indices (that of logits "
                f"without axis {rows.axis}), got {targets.shape}"
            )
        _check_values(targets, 0, n - 1, f"targets must be class indices in [0, {n})")
    elif targets.shape != shape:
        raise ValueError(f"targets must have the shape of logits, {shape}, got {targets.shape}")
    else:
        _check_values(targets, 0, 1, "targets must be in [0, 1]")
    return jnp.asarray(targets)


def _are_indices(targets: Array | np.ndarray) -> bool:
    return bool(jnp.issubdtype(targets.dtype, jnp.integer))


def _check_values(values: Array | np.ndarray, low: int, high: int, message: str) -> None:
    if is_readable(values):
        read = np.asarray(values).astype(np.float64)
        bad = ~((read >= low) & (read <= high))
        if bad.any():
            raise ValueError(f"{message}, got {read[bad].flat[0]:g}")


def _check_completion(completion: Completion, rows: Rows, targets: Array, k: Number) -> None:
    check_choice("completion", completion, ("spread", "best"))
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
    """As ``_as_weights``, of targets whose values are there, also where logits are traced."""
    t = np.asarray(targets)
    if _are_indices(targets):
        return np.asarray(t[..., None] == np.arange(rows.n), dtype=np.float64)
    return np.moveaxis(t, rows.axis, -1).astype(np.float64)


def _as_weights(targets: Array, rows: Rows) -> Array:
    """Targets as rows (..., n) in [0, 1], in the dtype of the computation; NaN where they are not."""
    dtype = compute_dtype(rows.x)
    if _are_indices(targets):
        t, good = jax.nn.one_hot(targets, rows.n, dtype=dtype), targets[..., None]
        good = (good >= 0) & (good < rows.n)
    else:
        t = jnp.moveaxis(targets, rows.axis, -1).astype(dtype)
        good = ((t >= 0) & (t <= 1)).all(axis=-1, keepdims=True)
    return jnp.where(good, t, jnp.nan)


@partial(jax.jit, static_argnames=("axis", "setting", "completion", "reduction"))
def _loss(
    logits: Array,
    targets: Array,
    k: Array | Count,
    lam: Array,
    axis: int,
    setting: Setting,
    completion: Completion | None,
    reduction: Reduction,
) -> Array:
    loss = _losses(logits, targets, k, lam, axis, setting, completion)
    if reduction != "none":
        loss = loss.sum() if reduction == "sum" else loss.mean()
    return loss.astype(logits.dtype)


@compiled("axis", "setting", "completion", results=scalars)
def _losses(
    logits: Array,
    targets: Array,
    k: Array | Count,
    lam: Array,
    axis: int,
    setting: Setting,
    completion: Completion | None,
) -> Array:
    """Of every row, in the dtype of the computation."""
    rows = Rows("logits", logits, axis)
    t, lam = _as_weights(targets, rows), rows.per_row(lam)
    x = rows.data.astype(lam.dtype)
    if x.size == 0:
        return x.sum(axis=-1)
    return _fenchel_young(x, t, rows.split(k), lam, setting, completion).squeeze(-1)


def _fenchel_young(
    x: Array, t: Array, k: Count, lam: Array, setting: Setting, completion: Completion | None
) -> Array:
    """The loss of every row, (..., 1)."""
    reg = setting.kind.reg(xp)

    def of_top_k(x: Array, k: Count) -> Array:
        return value(x, *k, lam, setting)

    if completion == "best":
        return of_top_k(x, k) - _value.best(xp, x, t, k, lam, reg, of_top_k)
    added: Any = 0.0
    if completion == "spread":
        t, added = _value.filled(xp, x, t, k, lam, reg)
    return of_top_k(x, k) - _value.inner(xp, x, t) + added
