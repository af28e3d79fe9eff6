"""The threshold of top-k in ordinary torch operations: for every device, and for any operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ..._maths import threshold
from ..._maths.operator import Count, Operator
from .._rows.namespace import LOOKS_ALWAYS, LOOKS_NEVER
from . import ordered


def row_sum(values: Tensor) -> Tensor:
    """(m, n) to (m, 1); flags are counted."""
    return values.sum(dim=-1, keepdim=True)


@dataclass(frozen=True)
class Whole:
    """Rows (m, n) that are all here; see ``threshold.Row``."""

    x: Tensor
    _order: list[Tensor] = field(default_factory=list)  # sorted once, when it is asked for

    is_bracketed: ClassVar[bool] = False

    @property
    def n(self) -> int:
        return self.x.shape[-1]

    def sums(self, f: Callable[[Tensor], Sequence[Tensor]]) -> list[Tensor]:
        return [row_sum(v) for v in f(self.x)]

    def ends(self, even: bool, k: Count, lam: Tensor) -> tuple[Tensor, Tensor]:
        a = self.x.abs() if even else self.x
        finite = a.isfinite()
        low = torch.where(finite, a, torch.inf).amin(dim=-1, keepdim=True)
        high = torch.where(finite, a, -torch.inf).amax(dim=-1, keepdim=True)
        return torch.where(low.isfinite(), low, 0.0), torch.where(high.isfinite(), high, 0.0)

    def nth(self, i: Tensor, dtype: torch.dtype, even: bool, wanted: Tensor) -> Tensor:
        return self._ordered(dtype, even).gather(-1, i - 1)

    def _ordered(self, dtype: torch.dtype, even: bool) -> Tensor:
        """a in descending order."""
        if self._order:
            return self._order[0]
        a = (self.x.abs() if even else self.x).to(dtype)
        self._order.append(a.sort(dim=-1, descending=True).values)
        return self._order[0]


def split(k: Tensor) -> Count:
    """k (m, 1) in its two parts, of which the second is live; what is no number is invalid. Integers are
    for rows in which float32 cannot count."""
    if not k.is_floating_point():
        return Count(k, torch.zeros_like(k, dtype=torch.float32))
    floor = k.detach().floor().nan_to_num(-1.0).clamp(-1.0, 2.0**62)
    return Count(floor.to(torch.int64), k - floor)


def state_of(
    x: Tensor,
    k: Tensor,
    lam: Tensor,
    op: int,
    exponent: float,
    *,
    hard: bool | None = None,
    stop_early: bool = False,
) -> Tensor:
    """The state (m, 2) of rows x (m, n), n > 0, for k and lam (m, 1), and ``hard``: see
    ``threshold.state_of``.

    Nothing waits for the device, unless ``stop_early`` leaves out the passes that change nothing.
    """
    operator = Operator(op, exponent)
    if ordered.takes(operator):
        state = ordered.state_of(x, k, lam, operator, hard)
    else:
        xp = LOOKS_ALWAYS if stop_early else LOOKS_NEVER
        state = threshold.state_of(xp, Whole(x), split(k), lam, operator, hard)
    return torch.cat(list(state), dim=-1)
