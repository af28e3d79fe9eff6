"""The outputs of the top-k family from a solved threshold, in ordinary operations on live tensors.

Values come from the solved state; derivatives in x, k and lam, to the second order, from a zero that
is added to the threshold and moves as its equation does (``scalars.implicit``). Which entries are in
the block and which are selected whole is decided once, on detached tensors; a saturated entry is a
constant. So every transform of torch works: reverse and forward mode, ``torch.func``, tracing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import ops
from .arguments import Number, Rows
from .scalars import Phi, Regularizer, implicit, lone_response, smallest
from .vectorized import SIGN, phi_of, regularizer, row_sum


def hard_mask(a: Tensor, pivot: Tensor, left: Tensor) -> Tensor:
    """1 above the pivot; what is left goes to the entries equal to it, the lowest index first."""
    tied = a == pivot
    before = tied.to(left.dtype).cumsum(dim=-1) - 1.0
    share = torch.where(tied, (left - before).clamp(0.0, 1.0), 0.0)
    return torch.where(a > pivot, 1.0, share)


@dataclass(frozen=True)
class Relaxed:
    """Solved rows: tensors are (m, n), or (m, 1) where there is one per row."""

    rows: Rows
    x: Tensor  # live, as are a, k, lam, t, v and left
    a: Tensor  # x, or |x| for even phi
    sign: Tensor | None  # what gives x back from a: 1 or -1
    k: Tensor
    lam: Tensor  # > 0: hard and invalid rows have a stand-in
    state: Tensor
    reg: Regularizer
    phi: Phi
    hard: Tensor | None  # rows with lam = 0; None if there can be none
    inside: Tensor  # the entries of the block
    above: Tensor  # those selected whole, which stand alone
    t: Tensor  # the argument of the response, in the block
    v: Tensor  # the threshold of the block
    left: Tensor  # the part of k that is left for the block
    nan: Tensor  # NaN in invalid rows, whose derivatives are NaN too; 0 times x elsewhere

    @property
    def pivot(self) -> Tensor:
        return self.state[:, :1]

    @property
    def delta(self) -> Tensor:
        return self.state[:, 1:]

    @property
    def invalid(self) -> Tensor:
        return self.pivot.isnan()

    @property
    def hard_mask(self) -> Tensor:
        """Of hard rows, a constant."""
        return hard_mask(self.a.detach(), self.pivot, self.delta)

    def response(self) -> Tensor:
        """S(t) in the block."""
        return self.reg.response(torch.where(self.inside, self.t, 0.5))

    def alone(self) -> Tensor:
        """d of the entries that are selected whole."""
        a = torch.where(self.above, self.a, 1.0)
        return lone_response(a, torch.ones_like(self.lam), self.lam, self.reg, self.phi)

    def signed(self, y: Tensor) -> Tensor:
        return y if self.sign is None else self.sign * y

    def mask(self) -> Tensor:
        """S(t), signed if phi is even: topk_mask and topk_sign."""
        y = torch.where(self.inside, self.response(), self.above.to(self.x.dtype))
        if not self.phi.even:  # more than k entries at +inf share k
            crowded = (self.a == torch.inf) & (self.delta > 0) & (self.pivot == torch.inf)
            share = self.k / torch.where(self.delta > 0, self.delta, 1.0)
            y = torch.where(crowded, share, y)
        if self.hard is not None:
            y = torch.where(self.hard, self.hard_mask, y)
        return torch.where(self.invalid, self.nan, self.signed(y) + 0.0)  # 0 and not -0

    def magnitude(self, debias: bool) -> Tensor:
        """topk_mag: y*, or y* + x - u* if debiased."""
        y = self.response()
        if debias:
            y, top = y + self.lam * self.t, self.x
        else:
            top = self.signed(self.reg.response(self.alone()))
        y = torch.where(self.inside, self.signed(y), torch.where(self.above, top, 0.0))
        if self.hard is not None:
            mask = self.hard_mask
            y = torch.where(self.hard, torch.where(mask > 0, self.x * mask, 0.0), y)
        return torch.where(self.invalid, self.nan, y)


def relax(rows: Rows, k: Number, lam: Number, op: int, exponent: float) -> Relaxed:
    """The rows, solved, for checked arguments; there must be at least one entry."""
    k_rows, lam_rows = rows.per_row(k), rows.per_row(lam)
    state = ops.threshold(rows.data.detach(), k_rows.detach(), lam_rows.detach(), op, exponent)
    may_be_hard = isinstance(lam, Tensor) or lam == 0
    return from_state(rows, k_rows, lam_rows, state, op, exponent, may_be_hard)


def from_state(
    rows: Rows, k: Tensor, lam: Tensor, state: Tensor, op: int, exponent: float, may_be_hard: bool
) -> Relaxed:
    """The rows for k and lam (m, 1), given their solved state."""
    reg, phi = regularizer(op, exponent), phi_of(op)
    x = rows.data.to(k.dtype)
    sign = torch.where(x < 0, -1.0, 1.0).to(x.dtype) if phi.even else None
    a = x if sign is None else x * sign
    pivot, delta = state[:, :1], state[:, 1:]
    hard = lam.detach() == 0 if may_be_hard else None
    soft = pivot.isfinite() if hard is None else pivot.isfinite() & ~hard
    everything = pivot == -torch.inf
    nan = (x + k + lam) * torch.where(pivot.isnan(), torch.nan, 0.0).to(x.dtype)
    nothing = (pivot == torch.inf) & (lam.detach() > 0)  # k = 0 still has an R(0)
    lam = torch.where(soft | everything | nothing, lam, 1.0)
    pivot, delta = torch.where(soft, pivot, 0.0), torch.where(soft, delta, 0.0)

    # What is where, and the values.
    a_now, lam_now = a.detach(), lam.detach()
    t = (a_now - pivot) / lam_now + delta
    v = pivot - lam_now * delta
    reached = reg.response(t.clamp_min(reg.zero)) >= phi.prime(v)
    taking_part = soft & (t > reg.zero)
    above = (taking_part & reached) | (everything & (a_now > -torch.inf))
    pinned = soft & (pivot == 0) if op == SIGN else torch.zeros_like(soft)
    inside = (taking_part | pinned) & ~above
    left = k - row_sum(above)
    # Where all of the block is selected whole, or nothing of it, it is one by rounding alone.
    is_fractional = (left > 0) & (left < row_sum(inside))
    left = torch.where(is_fractional, left, left.detach())
    if phi.name == "half_square":  # sum_B S(t_i) = v left: precise also where v is tiny
        mass = row_sum(torch.where(inside, reg.response(torch.where(inside, t, 0.0)), 0.0))
        mass = mass / torch.where(left > 0, left, 1.0).detach()
        v = torch.where((left > 0) & (mass < torch.inf), mass, v)

    # The same, live. Slopes are S'/lam: below a floor they would overflow in the dtype of x.
    floor = max(smallest(x.dtype), 4.0 * max(1.0, exponent) / torch.finfo(rows.x.dtype).max)
    distance = (torch.where(inside, a, pivot) - pivot) / lam.clamp_min(floor)
    t = torch.where(inside, t, 0.0) + (distance - distance.detach())
    v = v - (lam - lam_now) * delta

    def residual(move: Tensor) -> Tensor:
        mass = row_sum(torch.where(inside, reg.response(torch.where(inside, t + move, 0.5)), 0.0))
        return mass - left * phi.prime(v - lam * move)

    rise = row_sum(torch.where(inside, reg.slope(torch.where(inside, t.detach(), 0.5)), 0.0))
    slope = rise + lam_now * phi.curvature(v.detach(), left.detach())
    move = implicit(residual, torch.zeros_like(v), torch.where(pinned | ~soft, 0.0, slope))
    t, v = t + move, v - lam * move
    return Relaxed(rows, x, a, sign, k, lam, state, reg, phi, hard, inside, above, t, v, left, nan)
