"""The search for lam where the host may not look how far it is: of every row there are many copies, one
for each lam that is tried at once, so that a few rounds do what bisection does in seventy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._maths.operator import Count
from ..._maths.select import STEP, STEPS, Window, least_lam

_FEWEST, _MOST, _ENTRIES = 16, 4095, 1 << 18
_DIGITS = {torch.float32: 2e-7, torch.float64: 1e-9}


class Search(NamedTuple):
    """With so many copies of a row next to each other."""

    copies: int

    @classmethod
    def of(cls, x: Tensor, window: Window) -> Search:
        """As many as take no more memory than x, or little."""
        most = max(x.numel(), _ENTRIES) // window.s.numel()
        return cls(min(max(most, _FEWEST), _MOST))

    def repeated(self, window: Window) -> Window:
        s, whole, frac = (v.repeat_interleave(self.copies, dim=0) for v in (window.s, *window.k))
        return Window(s, Count(whole, frac))

    def smallest(self, xp: Any, enough: Callable[[Tensor], Tensor], scale: Tensor) -> Tensor:
        """The smallest lam (m, 1) for which ``enough`` holds, row by row; ``scale`` where none does.

        Up from the scale of the row, or down from it as long as there is enough; then between the last
        two, each time in as many parts as there are copies, and one.
        """
        scale = scale.unflatten(0, (-1, self.copies))[:, :1, 0]
        least = least_lam(xp, scale.dtype)
        index = torch.arange(self.copies, device=scale.device)

        def lam_at(z: Tensor) -> Tensor:
            return (scale * z.exp()).clamp(least, 1.0 / least)

        def first(z: Tensor, start: int) -> Tensor:
            """The first of the points z (m, copies) that is enough, seen from the one at ``start``."""
            holds = enough(lam_at(z).reshape(-1, 1)).view(z.shape)
            missed = torch.where(~holds & (index <= start), index, -1).amax(dim=-1, keepdim=True)
            above = torch.where(holds & (index > start), index, self.copies)
            return torch.where(missed < start, missed + 1, above.amin(dim=-1, keepdim=True))

        middle, reach = self.copies // 2, (STEPS - 1) * math.log(STEP)
        step = reach / middle
        at = first((index - middle) * step + torch.zeros_like(scale), middle)
        none, hi = at >= self.copies, (at - middle).to(scale.dtype) * step
        width = step * (at > 0).to(hi.dtype)  # else any lam is enough
        for _ in range(self._rounds(step, scale.dtype)):
            part = width / (self.copies + 1)
            points = hi - part * (self.copies - index)
            hi = hi - part * (self.copies - first(points, self.copies))
            width = part
        return torch.where(none, scale, lam_at(hi))

    def _rounds(self, width: float, dtype: torch.dtype) -> int:
        return math.ceil(math.log(width / _DIGITS[dtype]) / math.log(self.copies + 1))
