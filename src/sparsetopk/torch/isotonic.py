"""The operators over the permutahedron from solved blocks, in ordinary operations on live tensors.

On a block B with threshold g, sum_B S((x_i - g)/lam) = phi'(g) sum_B w_i. Values come from the solver;
derivatives in x, w and lam, to the second order, from a zero that is added to g and moves as that
equation does (``scalars.implicit``), with sums over blocks. Which entries share a block is decided once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .scalars import Phi, PNorm, implicit, smallest


class Solved(NamedTuple):
    """What a solver found, detached; all are (m, n) in the order of x."""

    d: Tensor  # (x - u)/lam
    block: Tensor
    paired: Tensor  # the index of the entry of w that an entry of x is paired with


def block_sum(values: Tensor, block: Tensor) -> Tensor:
    """For every entry the sum of ``values`` over its block."""
    return torch.zeros_like(values).scatter_add(-1, block, values).gather(-1, block)


@dataclass(frozen=True)
class Blocks:
    """Solved rows of x (|x| for even phi), paired with w: all live, (m, n), and lam > 0 (m, 1)."""

    x: Tensor
    w: Tensor
    lam: Tensor
    reg: PNorm
    phi: Phi
    d: Tensor  # the argument of the response
    u: Tensor  # detached
    weight: Tensor  # the sum of w over the block
    size: Tensor
    whole: Tensor  # where y is phi'(u) weight/size, to be written so

    def y(self) -> Tensor:
        """S(d)."""
        return torch.where(
            self.whole,
            self.phi.prime(self.u) * self.weight / self.size,
            self.reg.response(self.d),
        )

    def value(self) -> Tensor:
        """lam r*(d) + w phi(u); for an entry with y = w that is x w - lam r(w)."""
        q = self.reg.exponent + 1.0
        u = self.x - self.lam * self.d
        u = self.u + (u - u.detach())
        value = self.lam * self.d * self.reg.response(self.d) / q + self.w * self.phi.value(u)
        if self.phi.name not in ("identity", "abs"):
            return value
        penalty = self.w * self.reg.inverse(self.w) / self.reg.p
        alone = self.whole & (self.size == 1)
        return torch.where(alone, self.x * self.w - self.lam * penalty, value)


def relax(
    x: Tensor, w: Tensor, lam: Tensor, solved: Solved, reg: PNorm, phi: Phi, floor: float
) -> Blocks:
    """The blocks with their derivatives. ``floor`` bounds lam where 1/lam is a slope."""
    d, block, _ = solved
    x_now, w_now, lam_now = x.detach(), w.detach(), lam.detach()
    size = block_sum(torch.ones_like(d), block)
    weight = block_sum(w, block)
    weight_now = weight.detach()
    u = x_now - lam_now * d
    pinned = d >= x_now / lam_now if phi.name == "abs" else torch.zeros_like(d, dtype=torch.bool)
    if phi.name == "abs":
        u = torch.where(pinned, 0.0, u)
    if phi.name == "half_square":  # sum_B S(d_i) = u sum_B w_i: precise also where u is tiny
        mass = block_sum(reg.response(d), block)
        u = torch.where(weight_now > 0, mass / torch.where(weight_now > 0, weight_now, 1.0), u)
    total = block_sum(reg.slope(d), block) + lam_now * phi.curvature(u, weight_now)
    alone, straight = size == 1, phi.name in ("identity", "abs")
    whole = ((total <= 0) | alone if straight else total <= 0) & ~pinned

    distance = ((x - x_now) + lam_now * d) / lam.clamp_min(max(floor, smallest(lam.dtype)))
    t = d + (distance - distance.detach())
    at = torch.zeros_like(d)

    def of_block(move: Tensor) -> Tensor:
        return phi.prime(u + lam * move) * weight - block_sum(reg.response(t - move), block)

    live = t - implicit(of_block, at, torch.where(whole | pinned, 0.0, total))
    if not straight:  # an entry alone: the same without the cancellation in t - move

        def of_entry(move: Tensor) -> Tensor:
            threshold = (x - x_now) - (lam * (d + move) - lam_now * d)
            return reg.response(d + move) - w * phi.prime(u + threshold)

        lone = d + implicit(of_entry, at, torch.where(alone & (w_now > 0), total, 0.0))
        live = torch.where(alone & (w_now > 0), lone, live)
    # Without weight y = 0 and u = x, wherever x goes.
    live = torch.where((total <= 0) & (weight_now == 0), d, live)
    return Blocks(x, w, lam, reg, phi, live, u, weight, size, whole)
