"""The threshold of sorted rows for p > 2, where S is as steep as it likes where it leaves 0.

Between two thresholds at which an entry comes in or becomes whole the left side of the equation is
smooth, and two searches over the sorted entries find such a piece: with n entries, in as many steps as n
has bits. There u is how far the threshold is below the lowest entry that is in, in units of lam: the
pivot is that entry, of which u is the t, with every digit, as S asks for. The left side is concave in u
and convex in u^e, whose tangents are therefore below and above the root; and of the powers of u one is
straight to the second order, on which Newton's method takes six steps, or one more in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..._maths.operator import MAGNITUDE, SIGN, Operator
from ..._maths.scalars import lone_response
from ..._maths.threshold import State
from .._rows.namespace import LOOKS_NEVER as xp

_PASSES = 6  # in float32


def _sum(values: Tensor) -> Tensor:
    return values.sum(dim=-1, keepdim=True)


@dataclass(frozen=True)
class SteepRows:
    """Rows in ascending order. Rows that have no threshold are in here too, and nobody looks at what
    becomes of them."""

    s: Tensor
    counted: Tensor  # 1 for the floor(k) largest
    rest: Tensor  # n - floor(k)
    frac: Tensor
    lam: Tensor
    operator: Operator

    @property
    def reg(self) -> Any:
        return self.operator.reg(xp)

    @property
    def _is_straight(self) -> bool:
        return self.operator.op != MAGNITUDE

    def find(self) -> State:
        """The state; (0, 0) where the threshold of an even phi ends at 0."""
        n = self.s.shape[-1]
        first = self._first(lambda i: self.s.gather(-1, i), lambda _: 0.0).clamp(max=n - 1)
        pivot = self.s.gather(-1, first)
        r, whole_at = (self.s - pivot) / self.lam, self._whole_alone()
        kinks = whole_at - r
        kinks = torch.where(kinks > 0, kinks, 0.0)
        whole = self._first(lambda _: pivot, lambda i: kinks.gather(-1, i))
        # To where the next entry comes in, or becomes whole.
        lo, hi = (kinks.gather(-1, i.clamp(0, n - 1)) for i in (whole, whole - 1))
        lo, hi = torch.where(whole < n, lo, 0.0), torch.where(whole > first, hi, torch.inf)
        enters = -r.gather(-1, (first - 1).clamp(min=0))
        hi = torch.minimum(hi, torch.where(first > 0, enters, torch.inf))
        index = torch.arange(n, device=self.s.device)
        outside = (index < first) | (index >= whole)
        left = (whole - self.rest).to(self.frac.dtype) + self.frac
        u = self._root(pivot, r.masked_fill_(outside, 1.0), outside, left, lo, hi)
        return self._pinned(pivot, u)

    def _whole_alone(self) -> Tensor:
        """The t at which every entry becomes whole."""
        one = torch.ones_like(self.lam)
        if self._is_straight:
            return one
        return lone_response(self.s, one, self.lam, self.reg, self.operator.phi(xp))

    def _first(
        self, pivot: Callable[[Tensor], Tensor], u: Callable[[Tensor], Tensor | float]
    ) -> Tensor:
        """The index of the first entry whose threshold, pivot - lam u, leaves at most k, as those of all
        after it do; n if there is none."""
        n = self.s.shape[-1]
        found = torch.zeros_like(self.rest)
        for bit in reversed(range(n.bit_length())):
            trial = found + (1 << bit)
            i = (trial - 1).clamp(max=n - 1)
            enough = self._excess(pivot(i), u(i)) <= self.frac
            # Padding has no excess, and is below all thresholds.
            found = torch.where(enough | (trial > n), found, trial)
        return found

    def _excess(self, pivot: Tensor, u: Tensor | float) -> Tensor:
        """What is selected, beyond floor(k): one by one, as sums so keep their digits."""
        t = ((self.s - pivot) / self.lam).add_(u).clamp_(min=0.0)
        if self._is_straight:
            z = t.clamp_(max=1.0).pow_(self.operator.exponent)
        else:
            v = (pivot - self.lam * u).clamp(min=torch.finfo(t.dtype).tiny)  # 0 but for rounding
            z = t.pow_(self.operator.exponent).div_(v).clamp_(max=1.0)
        return _sum(z.sub_(self.counted))

    def _root(
        self, pivot: Tensor, r: Tensor, outside: Tensor, left: Tensor, lo: Tensor, hi: Tensor
    ) -> Tensor:
        """u in [lo, hi], for r = (s - pivot)/lam of the entries in the block, and 1 of those outside."""
        e, curved = self.operator.exponent, not self._is_straight
        added = self.lam * left if curved else 0.0
        least, u, rounding = lo, self._start(lo, hi), 4.0 * float(torch.finfo(left.dtype).eps)
        for _ in range(_PASSES + int(u.dtype == torch.float64)):
            t = r + u
            mass, total, bend = self._sums(t, u, outside)
            missing = (left * pivot - added * u if curved else left) - mass
            steep = e * total + added * u
            # In u^q, the power in which the left side has no curvature here.
            q = 1.0 - (1.0 - e) * (e * bend / steep).clamp(0.0, 1.0)
            # Far above the root these cancel: a little further, as a bound must not be too close.
            lo = torch.maximum(lo, u * (1.0 - rounding + missing / steep))
            up = (1.0 + e * missing / steep).clamp(min=0.0) + rounding
            hi = torch.minimum(hi, u * up ** (1.0 / e))
            ratio = 1.0 + q * missing / steep
            target = torch.where(ratio > 0.5, u * ratio.clamp(min=0.5) ** (1.0 / q), hi)
            u = torch.where(steep > 0, torch.minimum(torch.maximum(target, lo), hi), u)
        u = torch.where(left > 0, u, least)  # where nothing is left, nothing is to be selected
        return self._from_zero(pivot, r, outside, left, u) if curved else u

    def _sums(self, t: Tensor, u: Tensor, outside: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Over the block, of S(t), and times u/t and (u/t)^2."""
        share = u / t
        z = t.pow_(self.operator.exponent).masked_fill_(outside, 0.0)
        return _sum(z), _sum(z.mul_(share)), _sum(z.mul_(share))

    def _from_zero(
        self, pivot: Tensor, r: Tensor, outside: Tensor, left: Tensor, u: Tensor
    ) -> Tensor:
        """For x^2/2, u where the threshold v is far below the pivot and had lost digits to it: one more
        step, in v."""
        v = pivot - self.lam * u
        at = (pivot - v) / self.lam
        mass, total, _ = self._sums(r + at, at, outside)
        slope = left * self.lam * at + self.operator.exponent * total
        better = v - (left * v - mass) / slope * self.lam * at
        moves = (slope > 0) & (better > 0) & (better < 0.5 * pivot)
        return torch.where(moves, (pivot - better) / self.lam, u)

    def _start(self, lo: Tensor, hi: Tensor) -> Tensor:
        e = self.operator.exponent
        middle = torch.lerp(lo**e, hi**e, 0.5) ** (1.0 / e)
        return torch.where(hi < torch.inf, torch.minimum(torch.maximum(middle, lo), hi), lo + 0.5)

    def _pinned(self, pivot: Tensor, u: Tensor) -> State:
        if self.operator.op == SIGN:
            share = self.reg.response((self.s / self.lam).clamp(max=1.0))
            pinned = (_sum(share - self.counted) <= self.frac) | (u >= pivot / self.lam)
        elif self.operator.op == MAGNITUDE:
            pinned = (_sum(self.s > 0) <= self.s.shape[-1] - self.rest) | (u >= pivot / self.lam)
        else:
            return State(pivot, u)
        return State(pivot.masked_fill(pinned, 0.0), u.masked_fill(pinned, 0.0))
