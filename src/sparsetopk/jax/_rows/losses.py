"""The value f_{phi,R}(x, 1_k) of rows, and their Fenchel-Young loss.

On the CPU each is one call of the core, for targets of any kind. For a backward the loss keeps its slope
in x, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero

from ..._maths import value as _value
from ..._maths.operator import MASK, TWO_SIDED, Count
from ..._maths.threshold import State
from ..._types import Completion
from .._solvers.plain import tangent_sum
from . import namespace as xp
from .arguments import AxisName, Rows, compute_dtype, row_length
from .calls import RowCall, derivative_of
from .promotion import promoting
from .threshold import TopKSetting, hard_mask, in_core, relaxed, solve_topk


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


class LossSetting(NamedTuple):
    """What is static about a loss."""

    of_value: TopKSetting
    completion: Completion | None
    label_smoothing: float
    ignored: int


def are_indices(targets: Array | np.ndarray) -> bool:
    return bool(jnp.issubdtype(targets.dtype, jnp.integer))


class Targets(NamedTuple):
    """In the dtype of the computation."""

    t: Array  # rows (..., n) in [0, 1]; NaN where they are not, or where an index is none
    counted: Array | None  # (..., 1): 0 for rows that are left out; None if none can be

    @classmethod
    def of(cls, targets: Array, rows: Rows, axis_name: AxisName, ignored: int) -> Targets:
        dtype, n = compute_dtype(rows.x), row_length(rows, axis_name)
        if not are_indices(targets):
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


def fenchel_young(
    x: Array, t: Array, k: Count, lam: Array, setting: LossSetting
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


def _target_loss_in_xla(
    x: Array, whole: Array, frac: Array, lam: Array, targets: Array, setting: LossSetting
) -> tuple[Array, Array]:
    """The loss and its slope, y - t, of rows."""
    rows = Rows("logits", x, x.ndim - 1)
    given = targets.squeeze(-1) if are_indices(targets) else targets
    t, counted = Targets.of(given, rows, None, setting.ignored)
    k, dtype = Count(whole, frac), x.dtype
    x = x.astype(t.dtype)
    if counted is not None:
        x = jnp.where(counted > 0, x, 0.0)  # whatever a row that is left out holds
    loss, compared = fenchel_young(x, t, k, lam, setting)
    slope = solve_topk(x, whole, frac, lam, setting.of_value).y - compared
    if setting.completion == "best":
        slope = slope - solve_topk(*_others(x, t, k), lam, setting.of_value).y
    if counted is not None:
        loss, slope = (jnp.where(counted > 0, v, 0.0) for v in (loss, slope))
    return loss, slope.astype(dtype)


def _others(x: Array, t: Array, k: Count) -> tuple[Array, Array, Array]:
    """The logits that are no labels, and the part of k that is for them."""
    rest = _value.left_by_labels(xp, t, k)
    return jnp.where(t > 0, -jnp.inf, x), rest.whole, rest.frac


# By the numbers of csrc/targets.hpp
_COMPLETIONS = (None, "spread", "best")


def _target_loss_in_core(*at: Any, setting: LossSetting) -> dict[str, Any] | None:
    given = in_core(setting.of_value)
    return given and {
        "op": given["op"],
        "exponent": given["exponent"],
        "ignored": np.int64(setting.ignored),
        "completion": np.int32(_COMPLETIONS.index(setting.completion)),
        "smoothing": np.float64(setting.label_smoothing),
    }


target_loss = RowCall(
    "target_loss",
    lambda x, *at, **_: [(1, at[2].dtype), (x.shape[-1], x.dtype)],
    _target_loss_in_xla,
    _target_loss_in_core,
)


@target_loss.def_jvp
def _(at: Sequence[Array], tangents: Sequence[Any], setting: LossSetting) -> Any:
    dx, *others = tangents
    if any(d is not None for d in others):  # in k, lam and t by the rules of what it is made of
        in_xla = partial(promoting(_target_loss_in_xla), setting=setting)
        return derivative_of(jax.checkpoint(in_xla))(at, tangents)
    loss, slope = target_loss(*at, setting=setting)
    # A backward keeps the slope in the dtype of x.
    wide = loss.dtype
    inner = jax.checkpoint(lambda *at: tangent_sum(at[0].astype(wide) * at[1].astype(wide)))
    moving = promoting(lambda x: _moving(x, at[1:], setting))
    _, dslope = jax.jvp(moving, (at[0],), (dx,))
    return (loss, slope), (inner(slope, dx), dslope.astype(slope.dtype))


def _moving(x: Array, others: Sequence[Array], setting: LossSetting) -> Array:
    """What moves as the slope does with x."""
    whole, frac, lam, targets = others
    y = solve_topk(x, whole, frac, lam, setting.of_value).y
    if setting.completion == "best":
        classes = jnp.arange(x.shape[-1], dtype=jnp.int32)
        labels = targets == classes if are_indices(targets) else targets
        rest = _others(x, labels, Count(whole, frac))
        y = y - solve_topk(*rest, lam, setting.of_value).y
    return jnp.where(targets == setting.ignored, 0.0, y) if are_indices(targets) else y
