"""The outputs of the top-k family from a solved threshold, in ordinary operations on live tensors.

Which entries are in the block and which are selected whole is decided once, on constants, and the
values are constants too. Derivatives to the second order come from the rule of ``_maths``: with a step
h = x - x' from the constants x', which is 0 and carries the derivative,

    f(x) = f(x') + J(x' + h/2) h + O(h^3).

So every transform of torch works: reverse and forward mode, ``torch.func``, tracing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._maths import value as _value
from ..._maths.operator import Count, Operator
from ..._maths.response import Relaxed, Sums, lam_floor
from ..._maths.threshold import State
from .._private import is_tracing
from .._solvers import ops
from .._solvers.vectorized import row_sum, split
from .arguments import Number, Rows, is_transformed
from .namespace import LOOKS_ALWAYS, needs_derivative

_xp: Any = LOOKS_ALWAYS  # no loop is left in what is done here


def step_from(live: Tensor) -> Tensor:
    """A zero that carries the derivative of a tensor; infinite entries do not move."""
    moving = torch.where(live.isinf(), 0.0, live)
    return moving - moving.detach()


def local_sums(values: list[Tensor], linear: bool = False) -> list[Tensor]:
    return [row_sum(v) for v in values]


def unknown_sums(values: list[Tensor], linear: bool = False) -> list[Tensor]:
    """For rows x that are a piece of a row, whose counts say nothing of it. Of these y is right, and
    nothing else."""
    return [v.new_full((*v.shape[:-1], 1), torch.inf, dtype=torch.float64) for v in values]


class Live(NamedTuple):
    """Solved rows at constants, and the steps of x, k and lam from there, or None."""

    at: Relaxed
    middle: Relaxed  # half a step further
    steps: tuple[Tensor, Tensor, Tensor] | None

    @classmethod
    def of(
        cls,
        x: Tensor,
        k: Tensor,
        lam: Tensor,
        state: Tensor,
        operator: Operator,
        dtype: torch.dtype,
        may_be_hard: bool = True,
        sums: Sums = local_sums,
    ) -> Live:
        """Rows x (m, n), k and lam (m, 1), of their dtype, and their state; ``dtype`` is that of the
        result."""
        floor = lam_floor(_xp, dtype, operator)

        def relaxed(
            x: Tensor, k: Count, lam: Tensor, delta: Tensor, like: Relaxed | None
        ) -> Relaxed:
            return Relaxed.of(
                _xp,
                x,
                k,
                lam,
                State(state[:, :1], delta),
                operator,
                sums=sums,
                floor=floor,
                may_be_hard=may_be_hard,
                split=None if like is None else like.split,
            )

        count = split(k.detach())
        x_now, lam_now, delta = x.detach(), lam.detach(), state[:, 1:]
        at = relaxed(x_now, count, lam_now, delta, None)
        if not needs_derivative(x, k, lam):
            return cls(at, at, None)
        steps = dx, dk, dlam = step_from(x), step_from(k), step_from(lam)
        ddelta, _ = at.tangent(dx, dk, dlam)
        half = Count(count.whole, count.frac + dk / 2)
        lam_half = torch.where(lam_now.isfinite(), lam_now, 0.0) + dlam / 2
        middle = relaxed(x_now + dx / 2, half, lam_half, delta + ddelta / 2, at)
        return cls(at, middle, steps)

    def y(self) -> Tensor:
        """The output (m, n)."""
        y = self.at.y() + 0.0  # 0 and not -0
        if self.steps is None:
            return y
        return y + self.middle.tangent(*self.steps)[1]

    def value(self) -> Tensor:
        """f_{phi,R}(x, 1_k), (m, 1)."""
        value = _value.topk_value(self.at)
        if self.steps is None:
            return value
        y = self.at.y() + self.at.tangent(*self.steps)[1] / 2
        y = torch.where(self.at.split.invalid, 0.0, y)
        moved = _value.tangent(self.middle, y, *self.steps)
        return value + moved


def relax(rows: Rows, k: Number, lam: Number, operator: Operator) -> Live:
    """The rows, solved, for checked arguments; there must be at least one entry."""
    k_rows, lam_rows = rows.per_row(k), rows.per_row(lam)
    hard = is_hard(lam)
    state = solved(rows.data.detach(), k_rows.detach(), lam_rows.detach(), operator, hard)
    return from_state(rows, k_rows, lam_rows, state, operator, hard is not False)


def is_hard(lam: Number) -> bool | None:
    """Whether rows have lam = 0; None where some may."""
    return None if isinstance(lam, Tensor) else lam == 0


def solved(x: Tensor, k: Tensor, lam: Tensor, operator: Operator, hard: bool | None) -> Tensor:
    """The state of rows x (m, n) for k and lam (m, 1), all detached."""
    return ops.threshold(x, k, lam, operator.op, operator.exponent, hard=hard)


def from_state(
    rows: Rows,
    k: Tensor,
    lam: Tensor,
    state: Tensor,
    operator: Operator,
    may_be_hard: bool,
    sums: Sums = local_sums,
) -> Live:
    """The rows for k and lam (m, 1), given their solved state."""
    x = rows.data.to(lam.dtype)
    if x.dtype != rows.x.dtype and x.requires_grad and not is_transformed() and not is_tracing():
        # As the kernels do: a slope that the dtype of x cannot hold is its largest number.
        limit = torch.finfo(rows.x.dtype).max
        x.register_hook(lambda g: g.clamp(-limit, limit))
    return Live.of(x, k, lam, state, operator, rows.x.dtype, may_be_hard, sums)
