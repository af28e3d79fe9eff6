"""The value f_{phi,R}(x, 1_k) of the relaxed top-k on tensors, and its Fenchel-Young loss."""

from __future__ import annotations

import torch
from torch import Tensor

from .._types import Completion, PhiName, Reduction
from ..arguments import check_choice
from .arguments import Number, Rows, check_exponent, check_k_and_lam, is_plain
from .differentiable import Relaxed, relax
from .scalars import PHIS, PNorm
from .vectorized import EXP, MAGNITUDE, MASK, SIGN, TWO_SIDED, row_sum

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
        return x.sum(dim=dim)
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


def _targets(targets: object, rows: Rows) -> tuple[Tensor, bool]:
    """Targets as rows (m, n) in [0, 1], and whether they are known to be labels, 0 or 1.

    Class indices in the shape of the logits without their last dimension, or weights in [0, 1].
    """
    if not isinstance(targets, Tensor) or targets.is_complex():
        raise TypeError(
            "targets must be a tensor of integer class indices, or of booleans or floats in the shape "
            f"of logits, got {targets.dtype if isinstance(targets, Tensor) else repr(targets)}"
        )
    shape, n = tuple(rows.x.shape), rows.n
    if not targets.is_floating_point() and targets.dtype != torch.bool:
        if tuple(targets.shape) != shape[:-1]:
            raise ValueError(
                f"targets must have shape {shape[:-1]} when they are class indices (that of logits "
                f"without the last dimension), got {tuple(targets.shape)}"
            )
        _check_values(
            targets, (targets >= 0) & (targets < n), f"targets must be class indices in [0, {n})"
        )
        classes = torch.arange(n, device=targets.device)
        return (classes == targets.reshape(-1, 1)).to(rows.data.dtype), True
    if tuple(targets.shape) != shape:
        raise ValueError(
            f"targets must have the shape of logits, {shape}, got {tuple(targets.shape)}"
        )
    _check_values(targets, (targets >= 0) & (targets <= 1), "targets must be in [0, 1]")
    return targets.reshape(rows.data.shape), targets.dtype == torch.bool


def _check_values(values: Tensor, good: Tensor, message: str) -> None:
    if is_plain(values) and not bool(good.all()):
        raise ValueError(f"{message}, got {values[~good].flatten()[0].item():g}")


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
) -> Tensor:
    r"""Fenchel-Young top-k loss over the last dimension.

    .. math:: \ell(x, t) = f_{\phi,R}(x, 1_k) - \langle x, t \rangle, \qquad \nabla_x \ell = y(x) - t

    ``targets`` are class indices (integers, the shape of ``logits`` without the last dimension) or
    weights in [0, 1] in the shape of ``logits`` (one-hot, several labels, or soft).

    With k greater than the sum of t, as for one label and k > 1, t is not in P(1_k): the paper's loss
    (``completion=None``) then decreases without bound as all logits decrease together. Two
    completions are invariant to that shift, and nonnegative:

    - ``"spread"``: t is filled up to a sum of k, evenly on the classes that are not labels
      (:math:`t'_i = t_i + (1 - t_i)(k - \sum t)/(n - \sum t)`), and R(t') is added. Convex.
    - ``"best"``: subtracts the best value that selects all the labels, whatever else it selects.
      Zero exactly when they are fully selected; not convex for k > 1; no soft targets.

    ``reduction`` is "mean", "sum" or "none".

    >>> topk_loss(torch.tensor([[5.0, 1.0, 0.0]]), torch.tensor([0]), k=2, completion="best")
    tensor(0.)
    """
    check_choice("reduction", reduction, ("mean", "sum", "none"))
    rows, e = Rows.of("logits", logits, -1), check_exponent(p)
    check_k_and_lam(rows, k, lam)
    t, are_labels = _targets(targets, rows)
    if completion is not None:
        _check_completion(completion, rows, t, are_labels, k)
    if logits.numel() == 0:
        loss = row_sum(rows.data)
    else:
        op = TWO_SIDED if two_sided else MASK
        loss = _fenchel_young(rows, t, k, lam, op, e, completion)
    if reduction == "none":
        return rows.restore_scalars(loss)
    return (loss.sum() if reduction == "sum" else loss.mean()).to(logits.dtype)


def _check_completion(
    completion: Completion, rows: Rows, t: Tensor, are_labels: bool, k: Number
) -> None:
    check_choice("completion", completion, ("spread", "best"))
    if not is_plain(t, k):
        return
    with torch.no_grad():
        total, k_rows = row_sum(t.to(torch.float64)), rows.per_row(k)
        excess = total - k_rows
        if bool(
            (excess > 1e-6 * k_rows.clamp_min(1.0)).any()
        ):  # beyond the rounding of soft targets
            worst = int(excess.argmax())
            raise ValueError(
                "targets must have at most k labels (a sum of at most k) with "
                f"completion={completion!r}, got {total[worst].item():g} for "
                f"k={k_rows[worst].item():g}"
            )
        if completion == "best" and not are_labels and not bool(((t == 0) | (t == 1)).all()):
            raise ValueError(
                "targets must be class indices or sets of labels (0 or 1) with completion='best', got "
                "soft targets"
            )


def _inner(x: Tensor, t: Tensor) -> Tensor:
    """<x, t> per row, (m, 1), where 0 times an infinite logit is 0."""
    return row_sum(torch.where(t == 0, 0.0, x) * t)


def _fenchel_young(
    rows: Rows,
    t: Tensor,
    k: Number,
    lam: Number,
    op: int,
    e: float,
    completion: Completion | None,
) -> Tensor:
    """The loss of every row, (m, 1)."""
    solved = relax(rows, k, lam, op, e)
    t = t.to(solved.x.dtype)
    if completion is None:
        subtracted = _inner(solved.x, t)
    elif completion == "spread":
        subtracted = _spread(solved, t, rows.per_row(lam))
    else:
        subtracted = _best(solved, t, rows.per_row(lam), op, e)
    return _value(solved) - subtracted


def _spread(solved: Relaxed, t: Tensor, lam: Tensor) -> Tensor:
    """<x, t'> - R(t'), where t' fills t up to the sum of y, among the candidates."""
    candidate = solved.x > -torch.inf
    k = torch.minimum(solved.k, row_sum(candidate).to(t.dtype))
    room = torch.where(candidate, 1.0 - t, 0.0)
    left = row_sum(room)
    t = t + room * (k - row_sum(t)) / torch.where(left > 0, left, 1.0)
    # R has no second derivative at the ends, where t' does not move.
    at_end = (t == 0) | (t == 1)
    moving = solved.reg.penalty(torch.where(at_end, 0.5, t))
    penalty = torch.where(at_end, solved.reg.penalty(t.detach()), moving)
    return _inner(solved.x, t) - row_sum(torch.where(candidate, lam * penalty, 0.0))


def _best(solved: Relaxed, t: Tensor, lam: Tensor, op: int, e: float) -> Tensor:
    """The best value with y = 1 on the labels: they are taken whole, and the rest is the top-(k - m)
    of what remains."""
    mass = row_sum(t)
    x = torch.where(t > 0, -torch.inf, solved.x)
    rows = Rows(solved.rows.name, x, 1)
    others = _value(relax(rows, (solved.k - mass).clamp_min(0.0), lam, op, e))
    return _inner(solved.x, t) - mass * lam * solved.reg.penalty(torch.ones_like(lam)) + others
