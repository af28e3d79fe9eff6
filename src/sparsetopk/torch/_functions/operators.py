"""The relaxed top-k operators on tensors.

Common to all of them:

- ``k`` is a real number in [0, n] and ``lam >= 0``; each may be a tensor that broadcasts against x with
  length 1 along ``dim``, and may require gradients. ``lam = 0`` is the hard operator, where the lowest
  index wins a tie.
- ``p > 1``; 2, 3/2 and 4/3 have closed forms. ``solver`` is "threshold" (default), "pav" or "dykstra"
  (p = 2), with ``solver_options`` as in NumPy.
- ``dim`` may be several dimensions, or None for all of them: the top-k is then over all their entries.
  ``where`` is True where there is a candidate, and broadcasts to x; other entries are never selected,
  whatever they hold. ``largest=False`` selects the smallest, where +inf marks what is no candidate.
- ``straight_through=True`` gives the hard output with the derivative of the relaxed operator.
- The output has the shape, dtype and device of x. A NaN makes its row NaN; so does a bad k or lam whose
  value cannot be read at once (traced, or on another device than the CPU).
- With a ``group`` of processes, x is this rank's shard along ``dim`` of the rows, which may be empty; k
  and lam are the same on every rank. A ``DTensor`` that is sharded along ``dim`` has its group with it.
  Every rank calls the operator and runs its backward; the gradients of k and lam are whole on each. The
  lowest rank wins a tie. The solver is the threshold; first derivatives in reverse mode only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..._checks import check_choice, check_exponent, check_solver
from ..._maths.operator import MAGNITUDE, MASK, SIGN, TWO_SIDED, Operator
from ..._types import Solver, SolverOptions
from .._fused import kernels, operations, traced
from .._fused import rows as fused
from .._rows import hard
from .._rows.arguments import (
    Dim,
    Number,
    Rows,
    candidates,
    check_dim,
    check_float_tensor,
    check_k_and_lam,
    is_simple,
    over_dims,
    without_entries,
)
from .._rows.differentiable import relax, step_from
from .._rows.product import times, times_finite
from .._spread import sharded
from .._spread.groups import check_group
from .._triton import ops as on_gpu
from . import topk_isotonic

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class _Call(NamedTuple):
    """What is asked of x."""

    k: Number
    lam: Number
    operator: Operator
    dim: Dim  # an int, unless it is wrong
    group: ProcessGroup | None
    times_x: bool = False
    solver: Solver = "threshold"
    options: SolverOptions | None = None


def _operator(x: Tensor, call: _Call, straight_through: bool, largest: bool = True) -> Tensor:
    """An operator of the family; of -x, and negative where x is part of it, for the smallest."""
    if not largest:
        y = _operator(-check_float_tensor("x", x), call, straight_through)
        return 0.0 - y if call.times_x else y
    y = _by_route(x, call)
    if straight_through:
        hard_call = _Call(call.k, 0.0, call.operator, call.dim, call.group, call.times_x)
        hard = _by_route(x, hard_call).detach()
        y = torch.where(y == hard, y, hard + step_from(y))  # infinite entries have no step
    return y


def _by_route(x: Tensor, call: _Call) -> Tensor:
    """With its arguments checked."""
    k, lam, operator, dim, group, times_x, solver, options = call
    exact = solver == "threshold" and options is None
    if exact and group is None and is_simple(x, k, lam, dim):
        k, lam, rows = float(k), float(lam), Rows("x", x, x.ndim - 1, True)
        if fused.takes(rows, k, lam, operator) and not on_gpu.takes(rows, operator):
            y = fused.evaluate(rows, k, lam, operator)
            return times_finite(x, y) if times_x else y
    if hasattr(x, "placements"):  # a DTensor, as nothing else is
        return _on_shards(x, call)
    rows = Rows.of("x", x, dim)
    if (shared := check_group(group)) is not None:
        check_choice("solver, over a group,", solver, ("threshold",))
        y = sharded.evaluate(rows, k, lam, operator, shared)
        return times(x, y) if times_x else y
    check_k_and_lam(rows, k, lam)
    if not exact:
        check_solver(solver, ("threshold", "pav", "dykstra"), options, operator)
    if x.numel() == 0:
        return without_entries(x, k, lam)
    if solver != "threshold" and not (isinstance(lam, (int, float)) and lam == 0):
        y = rows.restore(topk_isotonic.evaluate(rows, k, lam, operator, solver, options))
        if isinstance(lam, Tensor):  # hard rows need no solver
            y = torch.where(lam == 0, _by_route(x, _Call(k, 0.0, operator, dim, None)), y)
        return times(x, y) if times_x else y
    if hard.takes(lam):
        y = hard.evaluate(rows, k, operator)
        return times(x, y) if times_x else y
    if on_gpu.takes(rows, operator):
        return on_gpu.evaluate(rows, k, lam, operator, times_x)
    if fused.takes(rows, k, lam, operator):
        y = fused.evaluate(rows, k, lam, operator)
        return times_finite(x, y) if times_x else y
    if kernels.has(operator) and traced.takes(x, k, lam):
        return traced.evaluate(rows, k, lam, operator, times_x)
    if operations.takes(rows, k, lam):
        y = operations.evaluate(rows, k, lam, operator)
        return times(x, y) if times_x else y
    y = relax(rows, k, lam, operator).y()
    return rows.restore(times(rows.data.to(y.dtype), y) if times_x else y)


def _on_shards(x: Any, call: _Call) -> Tensor:
    """Of a DTensor: each rank works on its shard, and the result is placed as x is."""
    from .._spread import dtensors  # which needs torch.distributed

    if call.group is not None:
        raise ValueError("group must be None for a DTensor, which has its own, got a group")
    group = dtensors.group_along(x, check_dim("x", x, call.dim), call.k, call.lam)
    return dtensors.placed(_by_route(x.to_local(), _Call(*call[:4], group, *call[5:])), x)


@over_dims
def topk_mask(
    x: Tensor,
    k: Number,
    lam: Number = 0.1,
    *,
    p: float = 2.0,
    two_sided: bool = False,
    largest: bool = True,
    dim: Dim = -1,
    where: Tensor | None = None,
    solver: Solver = "threshold",
    solver_options: SolverOptions | None = None,
    straight_through: bool = False,
    group: ProcessGroup | None = None,
) -> Tensor:
    r"""Relaxed top-k mask: entries in [0, 1] that sum to k, most of them exactly 0 or 1.

    .. math:: \max_{y \in [0,1]^n,\ \sum_i y_i = k} \langle x, y \rangle - R(y), \qquad
              R(y) = \frac{\lambda}{p} \sum_i |y_i|^p

    With ``two_sided=True``, R has :math:`|y_i|^p + |1 - y_i|^p` instead, and for 1 < p < 2 the mask
    is differentiable everywhere. -inf marks an entry that is not a candidate; +inf is always
    selected (more than k of them share k if lam > 0).

    >>> topk_mask(torch.tensor([3.0, 1.0, 0.95, -1.0], dtype=torch.float64), k=2, lam=0.1)
    tensor([1.0000, 0.7500, 0.2500, 0.0000], dtype=torch.float64)
    """
    operator = Operator(TWO_SIDED if two_sided else MASK, check_exponent(p))
    call = _Call(k, lam, operator, dim, group, False, solver, solver_options)
    return _operator(candidates(x, where, False, largest), call, straight_through, largest)


@over_dims
def topk(
    x: Tensor,
    k: Number,
    lam: Number = 0.1,
    *,
    p: float = 2.0,
    two_sided: bool = False,
    largest: bool = True,
    dim: Dim = -1,
    where: Tensor | None = None,
    solver: Solver = "threshold",
    solver_options: SolverOptions | None = None,
    straight_through: bool = False,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Relaxed top-k: ``x * topk_mask(x)``, with 0 at padded (-inf) entries.

    >>> topk(torch.tensor([3.0, 1.0, 0.95, -1.0], dtype=torch.float64), k=2, lam=0.1)
    tensor([3.0000, 0.7500, 0.2375, 0.0000], dtype=torch.float64)
    """
    operator = Operator(TWO_SIDED if two_sided else MASK, check_exponent(p))
    call = _Call(k, lam, operator, dim, group, True, solver, solver_options)
    return _operator(candidates(x, where, False, largest), call, straight_through, largest)


@over_dims
def topk_mag(
    x: Tensor,
    k: Number,
    lam: Number = 0.1,
    *,
    p: float = 2.0,
    debias: bool = True,
    dim: Dim = -1,
    where: Tensor | None = None,
    solver: Solver = "threshold",
    solver_options: SolverOptions | None = None,
    straight_through: bool = False,
    group: ProcessGroup | None = None,
) -> Tensor:
    r"""Relaxed top-k in magnitude: keeps the k entries with the largest \|x_i\|, with their sign.

    .. math:: y^\star = \arg\max_y \langle x, y \rangle - \frac12 \|y\|_{k}^2 - R(y), \qquad
              u^\star = x - \nabla R(y^\star)

    with the squared k-support norm, :math:`\phi(x) = x^2/2` in the paper. ``debias=False`` returns
    :math:`y^\star`, the gradient of a convex function, which shrinks even clearly selected entries
    (by 1/(1+lam) for p = 2). ``debias=True`` returns :math:`y^\star + x - u^\star`: entries clearly
    selected are equal to x, and lam -> infinity gives the identity.

    Infinite entries make their row NaN.

    >>> topk_mag(torch.tensor([-3.0, 1.0, 0.95, 0.1], dtype=torch.float64), k=2, lam=0.1)
    tensor([-3.0000,  0.7857,  0.2357,  0.0000], dtype=torch.float64)
    """
    operator = Operator(MAGNITUDE, check_exponent(p), debias)
    call = _Call(k, lam, operator, dim, group, False, solver, solver_options)
    return _operator(candidates(x, where, True), call, straight_through)


@over_dims
def topk_sign(
    x: Tensor,
    k: Number,
    lam: Number = 0.1,
    *,
    p: float = 2.0,
    dim: Dim = -1,
    where: Tensor | None = None,
    solver: Solver = "threshold",
    solver_options: SolverOptions | None = None,
    straight_through: bool = False,
    group: ProcessGroup | None = None,
) -> Tensor:
    r"""Relaxed signed top-k mask: in [-1, 1], the sign of x on the k entries largest in magnitude.

    .. math:: \max_{y \in [-1,1]^n,\ \sum_i |y_i| \le k} \langle x, y \rangle - R(y)

    (:math:`\phi(x) = |x|` in the paper). Infinite entries make their row NaN.

    >>> topk_sign(torch.tensor([-3.0, 1.0, 0.95, 0.1], dtype=torch.float64), k=2, lam=0.1)
    tensor([-1.0000,  0.7500,  0.2500,  0.0000], dtype=torch.float64)
    """
    operator = Operator(SIGN, check_exponent(p))
    call = _Call(k, lam, operator, dim, group, False, solver, solver_options)
    return _operator(candidates(x, where, True), call, straight_through)
