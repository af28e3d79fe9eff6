"""The threshold of top-k from sorted rows, in a fixed and small number of torch operations.

Where the host may not look whether a search is done, it has as many passes as the worst row needs. So
it starts close: with a_[floor k + 1] as the pivot, delta is in an interval no longer than S is wide, and
how many entries are in the cells of a grid says which of its cells the root is in, up to a neighbour.
Then Newton's method takes a few steps. Where it leads out of the bracket, an entry becomes whole on the
way, and there is a kink: the next point is that kink, from which the root is reached along one piece.

The equation, with z_i = S(t_i)/phi'(v) up to 1, is sum_i z_i = k. It is solved in u: for straight phi
u = delta, and for x^2/2 it is v = pivot/(1 + u), in which p = 2 is linear between kinks; then neither v
nor delta loses digits to the other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._maths.operator import EXP, MAGNITUDE, SIGN, TWO_SIDED, Operator
from ..._maths.scalars import lone_response
from ..._maths.threshold import State
from .._rows.namespace import LOOKS_NEVER as xp
from .steep import SteepRows

# In float32; one more pass of Newton's method doubles the digits.
_LINEAR_PASSES, _PASSES, _CURVED_PASSES, _LAST_PASSES = 4, 8, 10, 2
_TWO_SIDED_PASSES, _FLAT_PASSES = 7, 11  # the latter for p < 4/3 and p > 2
_MORE_PASSES = 6  # for magnitudes with p < 4/3, where thresholds are many orders of magnitude apart
_FEWEST_CELLS, _MOST_CELLS = 16, 128


def takes(operator: Operator) -> bool:
    """Whether a few passes find its threshold: two-sided ones with p > 6 are steep in the middle."""
    return operator.op != EXP and (operator.op != TWO_SIDED or operator.exponent >= 0.2)


def state_of(x: Tensor, k: Tensor, lam: Tensor, operator: Operator, hard: bool | None) -> State:
    """``threshold.state_of`` of rows x (m, n), n > 0, for k and lam (m, 1)."""
    n, even = x.shape[-1], operator.phi(xp).even
    s = (x.abs() if even else x).to(lam.dtype).sort(dim=-1).values
    floor, top = k.floor(), s[:, -1:]
    # What is no number in [0, n] has no place either, and is found to be invalid.
    whole, last = floor.to(torch.int64), k.ceil().to(torch.int64)
    frac = (k - floor).to(lam.dtype)  # of a k that may be an integer
    sound = (k == k.clamp(0, n)) & (lam == lam.clamp(0, torch.finfo(lam.dtype).max))
    invalid = ~sound | (~top.isfinite() if even else top.isnan())
    nothing = k == 0
    end, rest = n - last.clamp(1, n), n - whole
    first = s.gather(-1, n - (whole + 1).clamp(1, n))
    empty = nothing | invalid
    # What is asked of the rows comes first, as the search overwrites them.
    if hard is not False:
        pivot = s.gather(-1, end)
        at_boundary = State(pivot, (whole - _number(s > pivot)).to(lam.dtype) + frac)
    if not even:
        crowded, crowd = first == torch.inf, _sum(s == torch.inf, lam.dtype)
    if operator.op != SIGN:  # the signed mask may take less than k
        everything = whole >= _number(s > -torch.inf)
        empty = empty | everything
    if hard is True:
        found = at_boundary
    elif operator.exponent < 1.0 and operator.op != TWO_SIDED:
        found = SteepRows(s, _counted(n, rest), rest, frac, lam, operator).find()
    else:
        found = _found(s, whole, rest, frac, lam, first, end, operator)
    if hard is not False:
        pairs = zip(at_boundary, found, strict=True)
        found = State(*(torch.where(lam == 0, one, other) for one, other in pairs))
    pivot, delta = found
    if not even:
        delta = torch.where(crowded, crowd, delta)
        pivot.masked_fill_(crowded, torch.inf)  # in place, as that is one launch
    if operator.op != SIGN:
        pivot.masked_fill_(everything, -torch.inf)
    pivot.masked_fill_(nothing, torch.inf).masked_fill_(invalid, torch.nan)
    return State(pivot, delta.masked_fill_(empty, 0.0))


def _found(
    s: Tensor,
    whole: Tensor,
    rest: Tensor,
    frac: Tensor,
    lam: Tensor,
    first: Tensor,
    end: Tensor,
    operator: Operator,
) -> State:
    """The state of ascending rows, which are overwritten, given a_[floor k + 1] and where a_[ceil k] is;
    (0, 0) where the threshold ends at 0, so that the signed mask takes less than k.

    Memory is what a search takes: rows are not held when there are others, measured from a pivot that is
    closer, nor what the passes do not ask for.
    """
    few = _few(s, whole, rest, frac, lam, operator)
    more = s, whole, rest, frac, lam, first, operator
    if operator.op == MAGNITUDE:
        curved, u, bracket = _Curved(s, (s - first).div_(lam), *more).start(end)
        u, bracket = curved.search(u, bracket)
        curved, u, bracket = curved.nearby(u, bracket)
        found = curved.found(u, bracket)
    else:
        straight, u, bracket = _Straight(s, (s - first).div_(lam), *more).start(end)
        found = straight.found(u, bracket)
    if few is None:
        return found
    pivot, delta = found
    pinned = few | (delta >= pivot / lam)
    return State(pivot.masked_fill_(pinned, 0.0), delta.masked_fill_(pinned, 0.0))


def _few(
    s: Tensor, whole: Tensor, rest: Tensor, frac: Tensor, lam: Tensor, operator: Operator
) -> Tensor | None:
    """The rows of which a threshold of 0 selects at most k, for even phi."""
    if operator.op == MAGNITUDE:
        return _number(s > 0) <= whole
    if operator.op != SIGN:
        return None
    share = operator.reg(xp).response((s / lam).clamp_(max=1.0))
    return _sum(share.sub_(_counted(s.shape[-1], rest))) <= frac


def _counted(n: int, rest: Tensor) -> Tensor:
    """1 for the floor(k) largest: compared with these one by one, sums keep their digits."""
    return (torch.arange(n, device=rest.device) >= rest).view(torch.int8)


def _number(flags: Tensor) -> Tensor:
    return flags.sum(dim=-1, keepdim=True)


def _sum(values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return values.sum(dim=-1, keepdim=True, dtype=dtype)


class _Bracket(NamedTuple):
    lo: Tensor
    hi: Tensor

    def narrowed(self, u: Tensor, below: Tensor) -> _Bracket:
        return _Bracket(torch.where(below, u, self.lo), torch.where(below, self.hi, u))

    @property
    def middle(self) -> Tensor:
        return torch.lerp(self.lo, self.hi, 0.5)


@dataclass(frozen=True)
class _Rows:
    """Rows in ascending order, measured from their pivots. Rows that have no threshold are in here too,
    and nobody looks at what becomes of them."""

    s: Tensor  # until ``r`` is written over it
    r: Tensor  # (s - pivot)/lam
    alone: Tensor  # for x^2/2, the u at which it becomes whole
    whole: Tensor
    rest: Tensor  # n - floor(k)
    frac: Tensor
    lam: Tensor
    pivot: Tensor
    operator: Operator

    @property
    def reg(self) -> Any:
        return self.operator.reg(xp)

    @property
    def _eps(self) -> float:
        return float(torch.finfo(self.lam.dtype).eps)

    @property
    def _grain(self) -> Tensor | float:
        """By how much t, where it is about 1, is moved by u."""
        return 1.0

    def _more(self, passes: int) -> int:
        """In float64, one."""
        return passes + int(self.lam.dtype == torch.float64)

    def _responses(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """z of every entry, its slope in u, and how far it is over its kink."""
        raise NotImplementedError

    def _kinks(self, i: Tensor) -> Tensor:
        """u at which the i-th entries become whole."""
        raise NotImplementedError

    def _middle(self, bracket: _Bracket) -> Tensor:
        return bracket.middle

    def _search(self, u: Tensor, bracket: _Bracket, passes: int) -> tuple[Tensor, _Bracket]:
        """The point with the smallest residual, as one more step may lead over a kink."""
        best, least = u, torch.full_like(u, torch.inf)
        for _ in range(passes):
            following, bracket, residual = self._pass(u, bracket)
            best, least = torch.where(residual < least, u, best), torch.minimum(residual, least)
            u = following
        return best, bracket

    def _pass(self, u: Tensor, bracket: _Bracket) -> tuple[Tensor, _Bracket, Tensor]:
        """The next u, and the residual at this one."""
        rounding = 4.0 * self._eps * self.operator.exponent
        z, slope, over = self._responses(u)
        above, near = over > rounding, over >= -rounding
        del over
        if self.operator.exponent > 3.0 and self.operator.op != TWO_SIDED:
            above = self._whole(z, above, near)
        taken, reached = _number(above), _number(near)
        mass = _sum(z.clamp_(max=1.0).masked_fill_(above, 0.0))
        del z
        slopes = slope.masked_fill_(above, 0.0)
        left = (self.whole - taken).to(mass.dtype) + self.frac
        value = mass - left
        below = value <= 0
        lo, hi = bracket = bracket.narrowed(u, below)
        step = self._newton(u, mass, left, slopes)
        target = u + step
        small = 2 * rounding * (self._grain + u.abs())
        still = (step.abs() <= small) | (value.abs() <= rounding * left)
        target = torch.where(still, torch.clamp(target, lo, hi), target)
        # Where nothing is left for the block, an entry that is whole should not be.
        within = (left > 0) & (target >= lo) & (target <= hi)
        kink = self._next_kink(below, taken, reached)
        other = torch.where((kink > lo) & (kink < hi), kink, self._middle(bracket))
        return torch.where(within, target, other), bracket, value.abs()

    def _whole(self, z: Tensor, above: Tensor, near: Tensor) -> Tensor:
        """Entries that are whole: also those that are so within rounding, where the others have less
        than these leave. For p next to 1, S is so flat that it may be less than the rounding of 1, and
        the root as far away as S is wide."""
        left = (self.whole - _number(near)).to(z.dtype) + self.frac
        return torch.where(_sum(z.masked_fill(near, 0.0)) < left, near, above)

    def _newton(self, u: Tensor, mass: Tensor, left: Tensor, slopes: Tensor) -> Tensor:
        e, slope = 1.0 / self.operator.exponent, _sum(slopes)
        step = (left - mass) / slope
        if e == 1.0:
            return step
        if self.operator.op == TWO_SIDED:
            size = _sum(slopes > 0, mass.dtype)
            return torch.where(left < size, self._two_sided_step(mass, left, size, slope), step)
        # On mass^(p-1): linear in delta for one entry, nearly for many. Where v is small beside the
        # pivot, it is the mass that is linear in u.
        power = (mass ** (1.0 - e) * left.clamp(min=0.0) ** e - mass) / (e * slope)
        return torch.where((mass > 0) & (u <= 1.0), power, step)

    def _two_sided_step(self, mass: Tensor, left: Tensor, size: Tensor, slope: Tensor) -> Tensor:
        """On S^-1 of the mean share, as S is flat at both ends: linear in delta for one entry and for
        ties, nearly for many."""
        rest = 2.0 - self.reg.p
        shares = torch.cat([mass, left], dim=-1) / size
        t, mean = self.reg.inverse(shares), shares[:, :1]
        steepness = (1.0 - rest) * (mean**-rest + (1.0 - mean) ** -rest) * slope
        return (t[:, 1:] - t[:, :1]) * size / steepness

    def _next_kink(self, below: Tensor, taken: Tensor, reached: Tensor) -> Tensor:
        """Of the first entry that is not whole yet, or of the last that is, on the way to the root."""
        n = self.r.shape[-1]
        return self._kinks(torch.where(below, n - 1 - reached, n - taken).clamp(0, n - 1))


class _Straight(_Rows):
    """With phi' = 1, where u is delta."""

    def start(self, end: Tensor) -> tuple[_Straight, Tensor, _Bracket]:
        """What the search starts with, given where a_[ceil k] is."""
        lo, hi = self._grid()
        hi = torch.minimum(hi, 1.0 - self.r.gather(-1, end))
        if self.operator.op == SIGN:
            hi = torch.minimum(hi, self.pivot / self.lam)
        lo = lo.clamp(min=self.reg.zero)
        return self._moved(_Bracket(lo, torch.maximum(hi, lo)))

    def found(self, u: Tensor, bracket: _Bracket) -> State:
        if self.operator.exponent == 1.0 and self.operator.op != TWO_SIDED:
            return State(self.pivot, self._linear_search(u, bracket))
        u, _ = self._search(u, bracket, self._more(self._passes))
        return State(self.pivot, u)

    @property
    def _passes(self) -> int:
        if self.operator.op != TWO_SIDED:
            return _PASSES
        # In float64 a k of a millionth asks for a second one more.
        passes = _TWO_SIDED_PASSES if 1.0 <= self.operator.exponent <= 3.0 else _FLAT_PASSES
        return self._more(passes)

    def _grid(self) -> tuple[Tensor, Tensor]:
        """Four cells of a grid for delta, of which the two in the middle have the root.

        With entries in cells of the same size, at their lower ends, and delta on the grid, the left side
        is a product of numbers of entries and a table of S; it is too small, and one cell on too large.
        A root that is on the grid is within, where Newton's method may come from either side.
        """
        reg, (m, n) = self.reg, self.r.shape
        cells = max(_FEWEST_CELLS, min(_MOST_CELLS, n // 4))
        width = 1.0 - reg.zero
        like: dict[str, Any] = {"dtype": self.r.dtype, "device": self.r.device}
        h = width / cells
        ends = torch.linspace(h - width, width, 2 * cells, **like).expand(m, -1).contiguous()
        more = (self.rest - torch.searchsorted(self.r.contiguous(), ends)).to(self.r.dtype)
        t = torch.linspace(reg.zero - width, 1.0 + width, 3 * cells + 1, **like)
        table = reg.response(t.clamp(reg.zero, 1.0)).diff().unfold(0, 2 * cells, 1)
        below = _sum(more @ table.T <= self.frac, self.r.dtype)
        lo = below * h + (reg.zero - 3 * h)
        return lo, lo + 4 * h

    def _moved(self, bracket: _Bracket) -> tuple[_Straight, Tensor, _Bracket]:
        """The same rows with a pivot in the middle of the bracket: the smaller delta, the more digits t
        has. Next to so large a pivot that this would be rounded, only entries are without an error."""
        rounding = 8.0 * self._eps * (1.0 + self.pivot.abs() / self.lam)
        u = bracket.middle
        moved, rounding = u * (rounding < 0.01), rounding.clamp(max=0.01)
        at = self.pivot - self.lam * moved
        ends = bracket.lo - moved - rounding, bracket.hi - moved + rounding
        r = self.s.sub_(at).div_(self.lam)
        return replace(self, s=r, r=r, alone=r, pivot=at), u - moved, _Bracket(*ends)

    def _kinks(self, i: Tensor) -> Tensor:
        return 1.0 - self.r.gather(-1, i)

    def _responses(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z, slope = self.reg.response_and_slope((self.r + u).clamp_(self.reg.zero, 1.0))
        t = self.r + u  # again, and not held beside S
        return z, slope.mul_(t > self.reg.zero), t.sub_(1.0)

    def _linear_search(self, u: Tensor, bracket: _Bracket) -> Tensor:
        """For p = 2: linear between kinks, in as few operations as it takes."""
        counted = _counted(self.r.shape[-1], self.rest)
        for _ in range(self._more(_LINEAR_PASSES)):
            t = self.r + u
            z = t.clamp(0.0, 1.0)
            size = _sum(t.eq_(z))  # in place, as memory is what these passes take
            value = _sum(z.sub_(counted)) - self.frac
            del t, z
            bracket = bracket.narrowed(u, value <= 0)
            target = torch.addcdiv(u, value, size, value=-1.0)
            within = target == torch.clamp(target, bracket.lo, bracket.hi)
            u = torch.where(within, target, bracket.middle)
        return u


class _Curved(_Rows):
    """With x^2/2 as phi, where v = pivot/(1 + u)."""

    def start(self, end: Tensor) -> tuple[_Curved, Tensor, _Bracket]:
        """What the search starts with, given where a_[ceil k] is."""
        t, v = self._whole_alone()
        # For the entry a, u = (pivot - v)/v with v = a - lam t: in these parts it has its digits where
        # lam is tiny beside the pivot too.
        over, room = self.pivot - self.s, t.mul_(self.lam)
        there = [each.gather(-1, end) for each in (over, room, v)]
        at = replace(self, alone=over.add_(room).div_(v).clamp_(max=self._largest / 8))
        del t, v, over, room
        hi = at.alone.gather(-1, end)
        # With what is at its upper end, a kink that may be looked at
        slack = ((there[0].abs() + there[1]) / there[2]).clamp(max=self._largest / 8)
        hi = (hi + 4.0 * self._eps * slack).clamp(min=0.0)
        bracket = _Bracket(torch.zeros_like(hi), hi)
        return at, self._start(bracket), bracket

    def search(self, u: Tensor, bracket: _Bracket) -> tuple[Tensor, _Bracket]:
        passes = self._more(_CURVED_PASSES + (_MORE_PASSES if self.operator.exponent > 3.0 else 0))
        return self._search(u, bracket, passes)

    def found(self, u: Tensor, bracket: _Bracket) -> State:
        """The state, given what is ``nearby``."""
        u, _ = self._search(u, bracket, _LAST_PASSES)
        return State(self.pivot, self.pivot / self.lam * (u / (1.0 + u)))

    @property
    def _largest(self) -> float:
        return float(torch.finfo(self.lam.dtype).max)

    @property
    def _grain(self) -> Tensor:
        return (self.lam / self.pivot).clamp(max=1.0)

    def _whole_alone(self) -> tuple[Tensor, Tensor]:
        """t and v = S(t) at which every entry becomes whole; v may be too small for its dtype."""
        one, tiny = torch.ones_like(self.lam), torch.finfo(self.lam.dtype).tiny
        t = lone_response(self.s, one, self.lam, self.reg, self.operator.phi(xp))
        return t, self.reg.response(t).clamp(min=tiny)

    def _start(self, bracket: _Bracket) -> Tensor:
        """Where v is far below the entries, t is s/lam, and the equation has a solution in closed form:
        sum_i min(S_i/v, 1) is the least, over j, of the sum with the lowest j entries as they are and
        the others whole. So v is the least of sum_{i <= j} S_i over what k leaves for these; where it is
        not far below, that is too large. Newton's method would meet kinks that are orders of magnitude
        apart one by one."""
        index = torch.arange(self.s.shape[-1], device=self.s.device)
        left = (index + 1 - self.rest).to(self.frac.dtype).add_(self.frac)
        mass = self.reg.response(self.s / self.lam).cumsum(dim=-1)
        v = torch.where(left > 0, mass.div_(left), torch.inf).amin(dim=-1, keepdim=True)
        u = torch.clamp(self.pivot / v - 1.0, *bracket)
        return torch.where(u > 1.0, u, self._middle(bracket))

    def _kinks(self, i: Tensor) -> Tensor:
        return self.alone.gather(-1, i)

    def _middle(self, bracket: _Bracket) -> Tensor:
        """By ratio, where the ends of v are far apart."""
        lo, hi = bracket
        ratio = (1.0 + lo).sqrt() * (1.0 + hi).sqrt() - 1.0
        return torch.where(hi > 1.0 + 2.0 * lo, torch.clamp(ratio, lo, hi), bracket.middle)

    def _responses(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        v, unit = self.pivot / (1.0 + u), self.pivot / self.lam
        t = (self.r + unit * (u / (1.0 + u))).clamp_(min=0.0)
        z, slope = self.reg.response_and_slope(t)
        z, inside = z / v, t > 0
        del t
        slope.mul_(unit / (v * (1.0 + u) ** 2)).add_(z / (1.0 + u)).mul_(inside)
        return z, slope, z - 1.0

    def nearby(self, u: Tensor, bracket: _Bracket) -> tuple[_Curved, Tensor, _Bracket]:
        """The same rows from this threshold as the pivot, unless it is next to the pivot anyway."""
        rounding = 8.0 * self._eps
        moves = 100.0 * rounding * (1.0 + u) < u
        at = torch.where(moves, self.pivot / (1.0 + u), self.pivot)
        ratio, move = at / self.pivot, (at - self.pivot) / self.pivot
        # (1 + u) ratio - 1, which cancels where v is far below the pivot: to eps, unless it is in parts
        # there, as it must be where v is close to the pivot and lam tiny beside it.
        ends = torch.cat([*bracket, u, self.alone], dim=-1)  # as one, in a quarter of the launches
        far = ratio < 0.5
        more = (1.0 + ends).mul_(torch.where(far, ratio, move))
        ends = more.add_(ends.masked_fill_(far, -1.0))
        lo, hi, u, alone = ends[:, :1], ends[:, 1:2], ends[:, 2:3], ends[:, 3:]
        margin = torch.where(moves, rounding, 0.0)
        r = self.s.sub_(at).div_(self.lam)
        rows = replace(self, s=r, r=r, alone=alone, pivot=at)
        return rows, u, _Bracket((lo - margin).clamp(min=-0.5), hi + margin)
