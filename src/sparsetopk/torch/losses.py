"""The value f_{phi,R}(x, 1_k) of the relaxed top-k on tensors, and its Fenchel-Young loss."""

from __future__ import annotations

import torch
from torch import Tensor

from .._types import Completion, PhiName, Reduction
from ..arguments import check_choice
from . import fused_loss
from .arguments import (
    Number,
    Rows,
    check_dense,
    check_exponent,
    check_float_tensor,
    check_k_and_lam,
    compute_dtype,
    is_plain,
    without_entries,
)
from .differentiable import Relaxed, relax
from .fused_loss import Call, one_hot, reduce
from .kernels import Operator
from .scalars import PHIS, PNorm
from .vectorized import EXP, MAGNITUDE, MASK, SIGN, TWO_SIDED, regularizer, row_sum

_OPS: dict[PhiName, int] = {"identity": MASK, "half_square": MAGNITUDE, "abs": SIGN, "exp": EXP}


def topk_value(
    x: Tensor,
    k: Number,
    lam: Number = 0.1,
    *,
    p: float = 2.0,
    two_sided: bool = False,
    phi: PhiName = "identity",
    dim: int = -1,
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
    check_choice("phi", phi, PHIS)
    if two_sided and phi != "identity":
        raise ValueError(f"phi must be 'identity' when two_sided=True, got {phi!r}")
    rows, e = Rows.of("x", x, dim), check_exponent(p)
    check_k_and_lam(rows, k, lam)
    if x.numel() == 0:
        return without_entries(x, k, lam).sum(dim=dim)
    return rows.restore_scalars(
        _value(relax(rows, k, lam, TWO_SIDED if two_sided else _OPS[phi], e))
    )


def _value(solved: Relaxed) -> Tensor:
    """f_{phi,R}(x, 1_k) as (m, 1).

    It is the value of a saddle function at its saddle point: what moves there does so without effect
    to first order, and carries the second.
    """
    total = row_sum(_dual(solved) if isinstance(solved.reg, PNorm) else _primal(solved))
    left = torch.where(solved.pivot.isfinite(), solved.left, 0.0)
    total = total + left * solved.phi.value(solved.v)
    if solved.hard is not None:
        total = torch.where(solved.hard, _hard_value(solved), total)
    infinite = (row_sum(solved.a == torch.inf) > 0) & (solved.k > 0)
    total = torch.where(infinite, torch.inf, total)
    return torch.where(solved.invalid, row_sum(solved.nan), total)


def _dual(solved: Relaxed) -> Tensor:
    """R*(x - u) + sum_i w_i phi(u_i) over the entries, but for phi(v) of the block."""
    assert isinstance(solved.reg, PNorm)
    lam, d = solved.lam, solved.alone()
    u = torch.where(solved.above, solved.a, 0.0) - lam * d
    if solved.phi.name == "half_square":  # S(d) = u: precise also where it is tiny
        u = solved.reg.response(d)
    top = lam * solved.reg.conjugate(d) + solved.phi.value(u)
    block = lam * solved.reg.conjugate(torch.where(solved.inside, solved.t, 0.5))
    return torch.where(solved.inside, block, torch.where(solved.above, top, 0.0))


def _primal(solved: Relaxed) -> Tensor:
    """<x, y> - R(y) - v y over the entries; v is taken in the block alone."""
    y = torch.where(solved.inside, solved.response(), solved.above.to(solved.a.dtype))
    finite = solved.a.isfinite()
    x = torch.where(finite, solved.a, 0.0)
    inner = torch.where(solved.inside, (x - solved.v) * y, x * y)
    candidate = solved.a > -torch.inf
    penalty = solved.reg.penalty(torch.where(solved.inside, y, 0.5))
    saturated = solved.reg.penalty(torch.ones_like(solved.lam))  # of 0 as of 1
    penalty = solved.lam * torch.where(solved.inside, penalty, saturated)
    return inner - torch.where(candidate, penalty, 0.0)


def _hard_value(solved: Relaxed) -> Tensor:
    mask = solved.hard_mask
    return row_sum(mask * solved.phi.value(torch.where(mask > 0, solved.a, 0.0)))


def topk_loss(
    logits: Tensor,
    targets: Tensor,
    k: Number,
    lam: Number = 1.0,
    *,
    p: float = 2.0,
    two_sided: bool = False,
    completion: Completion | None = None,
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

    With k greater than the sum of t, as for one label and k > 1, t is not in P(1_k): the paper's loss
    (``completion=None``) then decreases without bound as all logits decrease together. Two
    completions are invariant to that shift, and nonnegative:

    - ``"spread"``: t is filled up to a sum of k, evenly on the classes that are not labels
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

    >>> topk_loss(torch.tensor([[5.0, 1.0, 0.0]]), torch.tensor([0]), k=2, completion="best")
    tensor(0.)
    """
    check_choice("reduction", reduction, ("mean", "sum", "none"))
    rows, e = Rows.of("logits", logits, dim), check_exponent(p)
    if torch.is_autocast_enabled(logits.device.type) and logits.dtype != torch.float64:
        logits = logits.float()
        rows = rows._replace(x=logits)
    check_k_and_lam(rows, k, lam)
    t = _targets(targets, rows)
    _check_options(rows, completion, label_smoothing, ignore_index, weight)
    operator = Operator(TWO_SIDED if two_sided else MASK, e, False)
    fast = logits.numel() > 0 and fused_loss.takes(rows, k, lam, operator, t, weight)
    as_labels = fast and t.dtype == torch.int64 and not label_smoothing
    weights = added = None
    if weight is not None or completion == "best" or not as_labels:
        _check_labels(t, ignore_index, rows.n)
        weights = _row_weights(weight, t, ignore_index)
    if completion is not None:
        _check_completion(completion, rows, t, k)
    if not as_labels:
        t = one_hot(t, rows.n, compute_dtype(logits))
        if label_smoothing:
            t = _smoothed(rows, t, label_smoothing)
        if completion == "spread":
            t, added = _filled(rows, t, k, lam, operator)
            completion = None
    if fast:
        call = Call(
            rows.dim, t, k, lam, operator, completion, ignore_index, added, weights, reduction
        )
        loss = fused_loss.evaluate(logits, call)
    else:
        values = _values(rows, t, k, lam, operator, completion)
        values = values if added is None else values + added
        loss = reduce(values, weights, len(values), reduction)
    if reduction == "none":
        return rows.restore_scalars(loss)
    return loss.to(logits.dtype)


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
    _check_values(targets, (targets >= 0) & (targets <= 1), "targets must be in [0, 1]")
    return rows.tangent(targets)


def _check_values(values: Tensor, good: Tensor, message: str) -> None:
    if is_plain(values) and not bool(good.all()):
        raise ValueError(f"{message}, got {values[~good].flatten()[0].item():g}")


def _check_labels(t: Tensor, ignored: int, n: int) -> None:
    if t.dtype == torch.int64:
        good = ((t >= 0) & (t < n)) | (t == ignored)
        _check_values(t, good, f"targets must be class indices in [0, {n})")


def _check_options(
    rows: Rows,
    completion: Completion | None,
    label_smoothing: float,
    ignore_index: int,
    weight: object,
) -> None:
    if completion is not None:
        check_choice("completion", completion, ("spread", "best"))
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be in [0, 1], got {label_smoothing}")
    if label_smoothing and completion == "best":
        raise ValueError(f"label_smoothing must be 0 with completion='best', got {label_smoothing}")
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index must be an int, got {ignore_index!r}")
    if weight is not None and tuple(check_float_tensor("weight", weight).shape) != (rows.n,):
        raise ValueError(
            f"weight must have shape ({rows.n},), one number per class, got {tuple(weight.shape)}"  # type: ignore[attr-defined]
        )


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


def _smoothed(rows: Rows, t: Tensor, share: float) -> Tensor:
    """(1 - share) t, and the rest of its sum evenly on the candidates."""
    candidate = rows.data > -torch.inf
    mean = row_sum(t) / row_sum(candidate).clamp_min(1).to(t.dtype)
    return torch.where(candidate, (1.0 - share) * t + share * mean, t)


def _check_completion(completion: Completion, rows: Rows, t: Tensor, k: Number) -> None:
    """That t has at most k labels and, for "best", nothing else."""
    if not is_plain(t, k):
        return
    with torch.no_grad():
        k_rows, labels = rows.per_row(k), t.dtype == torch.int64
        total = torch.ones_like(k_rows) if labels else row_sum(t.to(k_rows.dtype))
        excess = total - k_rows
        # beyond the rounding of soft targets
        if bool((excess > 1e-6 * k_rows.clamp_min(1.0)).any()):
            worst = int(excess.argmax())
            raise ValueError(
                "targets must have at most k labels (a sum of at most k) with "
                f"completion={completion!r}, got {total[worst].item():g} for "
                f"k={k_rows[worst].item():g}"
            )
        soft = completion == "best" and t.is_floating_point()
        if soft and not bool(((t == 0) | (t == 1)).all()):
            raise ValueError(
                "targets must be class indices or sets of labels (0 or 1) with completion='best', got "
                "soft targets"
            )


def _filled(
    rows: Rows, t: Tensor, k: Number, lam: Number, operator: Operator
) -> tuple[Tensor, Tensor]:
    """t' (m, n), which fills t up to the sum of y among the candidates, and R(t') (m)."""
    candidate = rows.data > -torch.inf
    most = torch.minimum(rows.per_row(k), row_sum(candidate).to(t.dtype))
    room = torch.where(candidate, 1.0 - t, 0.0)
    left = row_sum(room)
    t = t + room * (most - row_sum(t)) / torch.where(left > 0, left, 1.0)
    # R has no second derivative at the ends, where t' does not move.
    reg, at_end = regularizer(operator.op, operator.exponent), (t == 0) | (t == 1)
    moving = reg.penalty(torch.where(at_end, 0.5, t))
    penalty = torch.where(at_end, reg.penalty(t.detach()), moving)
    return t, torch.where(candidate, rows.per_row(lam) * penalty, 0.0).sum(dim=-1)


def _values(
    rows: Rows,
    t: Tensor,
    k: Number,
    lam: Number,
    operator: Operator,
    completion: Completion | None,
) -> Tensor:
    """f(x) - <x, t>, or with completion "best" f(x) minus the best value with the labels, (m)."""
    if rows.x.numel() == 0:
        empty = Rows(rows.name, without_entries(rows.x, k, lam), rows.dim)
        return empty.data.to(t.dtype).sum(dim=-1)
    solved = relax(rows, k, lam, operator.op, operator.exponent)
    inner = _inner(solved.x, t)
    if completion == "best":
        inner = inner + _others(solved, t, rows.per_row(lam), operator)
    return (_value(solved) - inner)[:, 0]


def _inner(x: Tensor, t: Tensor) -> Tensor:
    """<x, t> per row, (m, 1), where 0 times an infinite logit is 0."""
    return row_sum(torch.where(t == 0, 0.0, x) * t)


def _others(solved: Relaxed, t: Tensor, lam: Tensor, operator: Operator) -> Tensor:
    """The best value with y = 1 on the labels, but for their logits: they are taken whole, and the
    rest is the top-(k - m) of what remains."""
    mass = row_sum(t)
    rows = Rows(solved.rows.name, torch.where(t > 0, -torch.inf, solved.x), 1)
    rest = (solved.k - mass).clamp_min(0.0)
    others = _value(relax(rows, rest, lam, operator.op, operator.exponent))
    return others - mass * lam * solved.reg.penalty(torch.ones_like(lam))
