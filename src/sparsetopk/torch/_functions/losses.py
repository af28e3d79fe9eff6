"""The value f_{phi,R}(x, 1_k) of the relaxed top-k on tensors, and its Fenchel-Young loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._checks import check_choice, check_class_weights, check_exponent, check_loss
from ..._maths import value as _value
from ..._maths.operator import MASK, OF_PHI, TWO_SIDED, Count, Operator
from ..._types import Completion, PhiName, Reduction
from .._fused import loss as fused_loss
from .._fused import rows as fused
from .._fused import traced
from .._fused.kernels import check_not_onnx
from .._fused.loss import Call, one_hot
from .._fused.registered import register
from .._rows.arguments import (
    Dim,
    Number,
    Rows,
    check_dense,
    check_float_tensor,
    check_k_and_lam,
    compute_dtype,
    is_plain,
    is_simple,
    is_simple_labels,
    over_dims,
    without_entries,
)
from .._rows.differentiable import relax
from .._rows.namespace import LOOKS_ALWAYS as xp
from .._solvers.vectorized import row_sum, split
from .._triton import losses as on_gpu


@over_dims
def topk_value(
    x: Tensor,
    k: Number,
    lam: Number = 0.1,
    *,
    p: float = 2.0,
    two_sided: bool = False,
    phi: PhiName = "identity",
    dim: Dim = -1,
) -> Tensor:
    r"""The optimal value of the relaxed top-k problem, one per row.

    .. math:: f_{\phi,R}(x, 1_k) = \max_y \langle x, y \rangle - f_\phi^*(y, 1_k) - R(y)

    It is convex in x, and its gradient in x is the operator itself: ``topk_mask`` for phi =
    "identity", ``topk_mag(debias=False)`` for "half_square", ``topk_sign`` for "abs"; in k it is phi at
    the threshold, in lam -R(y)/lam. Padded (-inf) entries take no part; ``lam = 0`` gives the sum of
    the k largest phi(x_i).

    >>> topk_value(torch.tensor([3.0, 1.0, -1.0]), k=2, lam=0.0)
    tensor(4.)
    """
    check_choice("phi", phi, OF_PHI)
    if two_sided and phi != "identity":
        raise ValueError(f"phi must be 'identity' when two_sided=True, got {phi!r}")
    rows, e = Rows.of("x", x, dim), check_exponent(p)
    check_k_and_lam(rows, k, lam)
    if x.numel() == 0:
        return without_entries(x, k, lam).sum(dim=rows.dim)
    operator = Operator(TWO_SIDED if two_sided else OF_PHI[phi], e)
    if on_gpu.takes(rows, operator):
        return rows.restore_scalars(on_gpu.value(rows, k, lam, operator))
    return rows.restore_scalars(relax(rows, k, lam, operator).value())


def topk_loss(
    logits: Tensor,
    targets: Tensor,
    k: Number,
    lam: Number = 30.0,
    *,
    p: float = 2.0,
    two_sided: bool = False,
    completion: Completion | None = "spread",
    reduction: Reduction = "mean",
    dim: int = -1,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    weight: Tensor | None = None,
) -> Tensor:
    r"""Fenchel-Young top-k loss over the classes along ``dim``.

    .. math:: \ell(x, t) = f_{\phi,R}(x, 1_k) - \langle x, t \rangle, \qquad \nabla_x \ell = y(x) - t

    ``targets`` are class indices (integers, the shape of ``logits`` without ``dim``) or weights in
    [0, 1] in the shape of ``logits`` (one-hot, several labels, or soft).

    ``lam`` is the unit of the logits: training ends with a label about lam above the others. With k
    above the sum of t the paper's loss (``completion=None``) falls without bound as all logits fall;
    two completions are invariant to that shift, and nonnegative, and take at most k labels:

    - ``"spread"``, the default: t is filled up to a sum of k, evenly on the classes that are not labels
      (:math:`t'_i = t_i + (1 - t_i)(k - \sum t)/(n - \sum t)`), and R(t') is added. Convex.
    - ``"best"``: subtracts the best value that selects all the labels, whatever else it selects.
      Zero exactly when they are fully selected; not convex for k > 1; no soft targets.

    The rest is as in ``torch.nn.functional.cross_entropy``, but that the classes are last by
    default; under autocast too, where the loss is in float32:

    - ``reduction`` is "mean", "sum" or "none". Rows whose class index is ``ignore_index`` have no loss
      and no gradient, and the mean is over the others.
    - ``label_smoothing`` takes this share of every target and spreads it evenly over the classes whose
      logit is not -inf.
    - ``weight`` has a number for every class: the loss of a row is multiplied by that of its label, or
      by :math:`\langle w, t \rangle / \sum t`, and the mean is the weighted one.

    >>> topk_loss(torch.tensor([[5.0, 1.0, 0.0]]), torch.tensor([0]), k=2, lam=1.0, completion="best")
    tensor(0.)
    """
    check_loss(completion, reduction, label_smoothing, ignore_index)
    operator = Operator(TWO_SIDED if two_sided else MASK, check_exponent(p), False)
    asked = _Asked(completion, reduction, label_smoothing, ignore_index, weight)
    if (call := _short_call(logits, targets, k, lam, dim, operator, asked)) is not None:
        return fused_loss.loss_of(logits, call)
    rows = _rows_of(logits, dim)
    check_k_and_lam(rows, k, lam)
    t = _targets(targets, rows)
    _check_weight(weight, rows.n)
    if on_gpu.takes_loss(rows, k, lam, operator, t, weight):
        loss = on_gpu.loss(rows, t, k, lam, operator, *asked)
        return _in_shape(rows, loss, reduction)
    if rows.x.numel() > 0 and fused_loss.takes_traced(rows, k, lam, operator, t, weight):
        numbers = traced.asked(rows, k, lam, operator)
        return torch.ops.sparsetopk.topk_loss(rows.x, t, *numbers, *asked)[0]
    return _in_shape(rows, composed(rows, t, k, lam, operator, *asked), reduction)


def _short_call(
    logits: Tensor,
    targets: Tensor,
    k: Number,
    lam: Number,
    dim: int,
    operator: Operator,
    asked: _Asked,
) -> Call | None:
    """What is asked in most calls, of labels, with its arguments checked: one call of the core gives the
    loss. None for any other."""
    completion, reduction, smoothing, ignored, weight = asked
    if weight is not None or smoothing or completion == "best" or reduction == "none":
        return None
    if not (is_simple(logits, k, lam, dim) and is_simple_labels(targets, logits)):
        return None
    if torch.is_autocast_enabled("cpu"):
        return None
    k, lam, rows = float(k), float(lam), Rows("logits", logits, logits.ndim - 1, True)
    if on_gpu.takes_loss(rows, k, lam, operator) or not fused_loss.takes(rows, k, lam, operator):
        return None
    if completion is not None:
        _check_one_label(completion, k)
    t = targets if targets.ndim == 1 else targets.reshape(-1)
    return Call(rows.dim, t, k, lam, operator, completion, ignored, None, None, reduction)


def _rows_of(logits: Tensor, dim: int) -> Rows:
    """The logits as rows; under autocast in float32, as those of other losses are."""
    rows = Rows.of("logits", logits, dim)
    if _is_autocast(logits) and logits.dtype != torch.float64:
        return Rows(rows.name, logits.float(), rows.dim)
    return rows


def composed(
    rows: Rows, t: Tensor, k: Number, lam: Number, operator: Operator, *asked: Any
) -> Tensor:
    """The loss by the compiled core, or in ordinary operations; ``asked`` is what ``_Asked`` has."""
    how = _Asked(*asked)
    fast = rows.x.numel() > 0 and fused_loss.takes(rows, k, lam, operator, t, how.weight)
    call = _call(rows, t, k, lam, operator, how, fast)
    if fast:
        return fused_loss.loss_of(rows.x, call)
    values = _values(rows, call)
    values = values if call.added is None else values + call.added
    return _value.reduced(xp, values, call.weights, len(values), how.reduction)


class _Asked(NamedTuple):
    """How targets are read and losses put together."""

    completion: Completion | None
    reduction: Reduction
    label_smoothing: float
    ignored: int
    weight: Tensor | None


def _in_shape(rows: Rows, loss: Tensor, reduction: Reduction) -> Tensor:
    return rows.restore_scalars(loss) if reduction == "none" else loss.to(rows.x.dtype)


def _call(
    rows: Rows, t: Tensor, k: Number, lam: Number, operator: Operator, asked: _Asked, fast: bool
) -> Call:
    """What is computed, for targets that are checked here; by the kernel, which takes labels as they
    are, or not."""
    completion, smoothing, ignored = asked.completion, asked.label_smoothing, asked.ignored
    as_labels = fast and t.dtype == torch.int64 and not smoothing
    weights = added = None
    if asked.weight is not None or completion == "best" or not as_labels:
        _check_labels(t, ignored, rows.n)
        weights = _row_weights(asked.weight, t, ignored)
    if completion is not None:
        _check_completion(completion, rows, t, k)
    if not as_labels:
        t = one_hot(t, rows.n, compute_dtype(rows.x))
        if smoothing:
            t = _value.smoothed(xp, rows.data, t, smoothing)
        if completion == "spread":
            k_rows, lam_rows, reg = split(rows.per_row(k)), rows.per_row(lam), operator.reg(xp)
            t, total = _value.filled(xp, rows.data, t, k_rows, lam_rows, reg)
            added, completion = total[:, 0], None
    return Call(rows.dim, t, k, lam, operator, completion, ignored, added, weights, asked.reduction)


def _is_autocast(x: Tensor) -> bool:
    """Whether autocast is on for the device of x; it does not know that of tensors without numbers."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def _targets(targets: object, rows: Rows) -> Tensor:
    """Labels (m) in int64, or weights (m, n), booleans or floats."""
    if not isinstance(targets, Tensor) or targets.is_complex():
        raise TypeError(
            "targets must be a tensor of integer class indices, or of booleans or floats in the shape "
            f"of logits, got {targets.dtype if isinstance(targets, Tensor) else repr(targets)}"
        )
    check_dense("targets", targets)
    shape = tuple(targets.shape)
    if not targets.is_floating_point() and targets.dtype != torch.bool:
        if shape != rows.leading:
            raise ValueError(
                f"targets must have shape {rows.leading} when they are class indices (that of logits "
                f"without dim {rows.dim}), got {shape}"
            )
        targets = targets if targets.ndim == 1 else targets.reshape(-1)
        return targets.to(torch.int64)
    if shape != tuple(rows.x.shape):
        raise ValueError(
            f"targets must have the shape of logits, {tuple(rows.x.shape)}, got {shape}"
        )
    _check_values(targets, lambda t: (t >= 0) & (t <= 1), "targets must be in [0, 1]")
    return rows.tangent(targets)


def _check_weight(weight: Tensor | None, n: int) -> None:
    if weight is not None:
        check_class_weights(tuple(check_float_tensor("weight", weight).shape), n)


def _check_values(values: Tensor, is_good: Callable[[Tensor], Tensor], message: str) -> None:
    if is_plain(values) and not bool((good := is_good(values)).all()):
        raise ValueError(f"{message}, got {values[~good].flatten()[0].item():g}")


def _check_labels(t: Tensor, ignored: int, n: int) -> None:
    if t.dtype == torch.int64:
        message = f"targets must be class indices in [0, {n})"
        _check_values(t, lambda t: ((t >= 0) & (t < n)) | (t == ignored), message)


def _row_weights(weight: Tensor | None, t: Tensor, ignored: int) -> Tensor | None:
    """What the loss of each row is multiplied by, (m); None for 1."""
    if t.dtype == torch.int64:
        counted = t != ignored
        if weight is None:
            return counted.to(torch.float64 if t.device.type == "cpu" else torch.float32)
        weight = weight.to(compute_dtype(weight))
        return torch.where(counted, weight[t.clamp(0, weight.shape[0] - 1)], 0.0)
    if weight is None:
        return None
    total = t.sum(dim=-1, dtype=compute_dtype(weight))
    weighted = (t.to(total.dtype) * weight.to(total.dtype)).sum(dim=-1)  # @ would be autocast
    return torch.where(total > 0, weighted / torch.where(total > 0, total, 1.0), 1.0)


def _check_completion(completion: Completion, rows: Rows, t: Tensor, k: Number) -> None:
    """That t has at most k labels and, for "best", nothing else."""
    if not is_plain(t, k) or rows.x.numel() == 0:
        return
    if t.dtype == torch.int64 and type(k) in (int, float):
        _check_one_label(completion, float(k))
        return
    with torch.no_grad():
        k_rows, labels = rows.per_row(k), t.dtype == torch.int64
        total = torch.ones_like(k_rows) if labels else row_sum(t.to(k_rows.dtype))
        excess = total - k_rows
        # beyond the rounding of soft targets
        if bool((excess > 1e-6 * k_rows.clamp_min(1.0)).any()):
            worst = int(excess.argmax())
            raise _too_many(completion, total[worst].item(), k_rows[worst].item())
        soft = completion == "best" and t.is_floating_point()
        if soft and not bool(((t == 0) | (t == 1)).all()):
            raise ValueError(
                "targets must be class indices or sets of labels (0 or 1) with completion='best', got "
                "soft targets"
            )


def _check_one_label(completion: Completion, k: float) -> None:
    """The same where every row has one label, and k is a number."""
    if 1.0 - k > 1e-6:
        raise _too_many(completion, 1.0, k)


def _too_many(completion: Completion, total: float, k: float) -> ValueError:
    return ValueError(
        "targets must have at most k labels (a sum of at most k) with "
        f"completion={completion!r}, got {total:g} for k={k:g}"
    )


def _values(rows: Rows, call: Call) -> Tensor:
    """f(x) - <x, t>, or with completion "best" f(x) minus the best value with the labels, (m)."""
    t, k, lam, operator = call.t, call.k, call.lam, call.operator
    if rows.x.numel() == 0:
        empty = Rows(rows.name, without_entries(rows.x, k, lam), rows.dim)
        return empty.data.to(t.dtype).sum(dim=-1)
    k_rows, lam_rows = rows.per_row(k), rows.per_row(lam)
    x = rows.data.to(lam_rows.dtype)

    def value(x: Tensor, k: Count) -> Tensor:
        others = Rows(rows.name, x, 1)
        return relax(others, k.whole.to(k.frac.dtype) + k.frac, lam_rows, operator).value()

    of_targets = _value.inner(xp, x, t)
    if call.completion == "best":
        reg = operator.reg(xp)
        of_targets = _value.best(xp, x, t, split(k_rows), lam_rows, reg, value)
    return (relax(rows, k, lam, operator).value() - of_targets)[:, 0]


# The whole loss as one operator, which compiled graphs call.
_library = torch.library.Library("sparsetopk", "FRAGMENT")
_library.define("topk_loss_backward(Tensor residual, Tensor factor, Tensor g, int dim) -> Tensor")


def _asked_again(x: Tensor, t: Tensor, *asked: Any) -> tuple[Rows, Call]:
    it = traced.Asked(x, *asked[:-5])
    rows = Rows("logits", x, it.rows.dim)
    return rows, _call(rows, t, it.k, it.lam, it.operator, _Asked(*asked[-5:]), True)


def _loss(x: Tensor, t: Tensor, *asked: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, y - t with the classes last, and the factors of the rows (m) in float64."""
    rows, call = _asked_again(x, t, *asked)
    loss, residual, factor, _ = fused_loss.forward(x, call)
    factors = torch.empty(len(call.t), dtype=torch.float64, device="cpu")
    factors = factors.copy_(factor) if isinstance(factor, Tensor) else factors.fill_(factor)
    return _in_shape(rows, loss, call.reduction), residual, factors


def _loss_shapes(x: Tensor, t: Tensor, *asked: Any) -> tuple[Tensor, Tensor, Tensor]:
    check_not_onnx()
    rows = traced.Asked(x, *asked[:-5]).rows
    loss = x.new_empty(rows.leading if _Asked(*asked[-5:]).reduction == "none" else ())
    residual = x.new_empty(fused.rows_last(x, rows.dim).shape)
    return loss, residual, x.new_empty(x.numel() // rows.n, dtype=torch.float64)


def _save_loss(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, t, k, lam, *ctx.rest, weight = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, t, k, lam, weight, *output[1:])


def _loss_derivative(ctx: Any, g: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    x, t, k, lam, weight, residual, factor = ctx.saved_tensors
    dim = ctx.rest[2]
    if g is None:
        dx = None
    elif torch.is_grad_enabled():
        rows, call = _asked_again(x, t, k, lam, *ctx.rest, weight)
        dx = _loss_backward(residual + fused_loss.moving(rows, call), factor, g, dim)
    else:
        dx = torch.ops.sparsetopk.topk_loss_backward(residual, factor, g, dim)
    return dx, *[None] * 14


def _loss_backward(residual: Tensor, factor: Tensor, g: Tensor, dim: int) -> Tensor:
    g = g.reshape(-1) if g.ndim else g
    return fused_loss.backward(Rows("logits", residual, dim), residual, factor, g)


def _loss_backward_shapes(residual: Tensor, factor: Tensor, g: Tensor, dim: int) -> Tensor:
    return fused.restore(Rows("logits", residual, dim), torch.empty_like(residual))


_library.impl("topk_loss_backward", _loss_backward, "CPU")
_library.impl("topk_loss_backward", _loss_backward_shapes, "Meta")
register(
    _library,
    "topk_loss",
    f"(Tensor x, Tensor t, {traced.ASKED}, str? completion, str reduction, float smoothing,"
    " int ignored, Tensor? weight) -> (Tensor, Tensor, Tensor)",
    _loss,
    _loss_shapes,
    _save_loss,
    _loss_derivative,
)
