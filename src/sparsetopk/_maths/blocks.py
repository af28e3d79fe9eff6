"""Entries in blocks that share a threshold: the response y, and the one rule for its derivatives.

On a block B with the threshold g, with d_i = (x_i - g)/lam,

    sum_{i in B} S(d_i) = phi'(g) sum_{i in B} w_i,   y_i = S(d_i).

Differentiating, with c = phi''(g) sum_B w_i and all sums over B,

    dg = (sum_j S'(d_j) (dx_j - d_j dlam) - lam phi'(g) sum_j dw_j) / (sum_j S'(d_j) + lam c),

and dd_i = (dx_i - d_i dlam - dg)/lam, dy_i = S'(d_i) dd_i (Proposition 7 of the paper, for any lam).
Top-k has one block in a row, whose other entries stand alone; the permutahedron may have many.

``totals([values, ...], linear=True)`` is asked for where values are tangents: a framework may have a
faster sum that it cannot transpose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .scalars import Phi, Regularizer, inverse

Array = Any


class Moved(NamedTuple):
    """How y and d move, and the shift: what d gains as the threshold of its block moves, -dg/lam."""

    y: Array
    d: Array
    shift: Array


class Cotangents(NamedTuple):
    x: Array
    weight: Array  # of the block that an entry is in
    lam: Array  # of every entry: to be summed over the row


class Blocks(NamedTuple):
    """Solved entries (..., n): each has its own numbers, and beside them those of the block it is in."""

    xp: Any
    reg: Regularizer
    phi: Phi
    totals: Callable[..., list[Array]]  # sums over the block of an entry, if it is not alone
    lam: Array
    floor: float  # the least lam that slopes, which are S'/lam, are taken with
    debias: bool  # whether the output is y + lam d
    d: Array
    u: Array  # the threshold
    weight: Array  # the sum of w over the block
    size: Array
    slope: Array  # S'(d)
    steepness: Array  # the slope of the equation of the block, in d
    alone: Array
    pinned: Array  # held at the kink of |.|, where no threshold moves
    whole: Array  # where y is computed as phi'(u) weight/size, and not as S(d)

    @classmethod
    def of(
        cls,
        reg: Regularizer,
        phi: Phi,
        totals: Callable[..., list[Array]],
        *,
        lam: Array,
        d: Array,
        u: Array,
        weight: Array,
        size: Array,
        pinned: Array,
        floor: float,
        debias: bool = False,
    ) -> Blocks:
        xp = reg.xp
        slope, alone = reg.slope(d), size == 1
        steepness = xp.where(alone, slope, totals([slope])[0]) + lam * phi.curvature(u, weight)
        flat = steepness <= 0
        whole = (flat | alone if phi.straight else flat) & ~pinned
        return cls(
            xp=xp,
            reg=reg,
            phi=phi,
            totals=totals,
            lam=lam,
            floor=floor,
            debias=debias,
            d=d,
            u=u,
            weight=weight,
            size=size,
            slope=slope,
            steepness=steepness,
            alone=alone,
            pinned=pinned,
            whole=whole,
        )

    def with_digits(self) -> Blocks:
        """For top-k: what an entry alone has is its weight, unless that is lost in rounding. Beside
        others that lack so little that they count as whole, S(d) has the digits."""
        if not self.phi.straight:
            return self
        far = self.d - self.reg.zero > 64.0 * float(self.xp.finfo(self.d.dtype).eps)
        lost = self.alone & (self.steepness > 0) & (self.weight == 0) & far
        return self._replace(whole=self.whole & ~lost)

    def y(self) -> Array:
        """S(d), or the debiased S(d) + lam d."""
        xp = self.xp
        y = xp.where(
            self.whole, self.phi.prime(self.u) * self.weight / self.size, self.reg.response(self.d)
        )
        return y + self.lam * self.d if self.debias else y

    def _moves(self) -> tuple[Array, Array]:
        """Whether the equation of the block has a slope to divide by, and 1 over that slope."""
        xp = self.xp
        moves = self.steepness > 16.0 * float(xp.finfo(self.steepness.dtype).tiny)
        return moves, inverse(xp, xp.where(moves, self.steepness, 1.0))

    def _per_lam(self) -> Array:
        """1/lam."""
        return inverse(self.xp, self.xp.clip(self.lam, self.floor, None))

    def _share(self) -> Array:
        """The share of an entry in the slope of its block, by which it moves the threshold. In a flat
        block, which moves as a whole, all entries have the same share."""
        moves, inverse = self._moves()
        return self.xp.where(moves, self.slope * inverse, 1.0 / self.size)

    def tangent(self, dx: Array | None, dweight: Array | None, dlam: Array | None) -> Moved:
        """For tangents of x, of the weight of an entry's block, and of lam; None is zero."""
        xp, (moves, inverse) = self.xp, self._moves()
        # d_i = (x_i - g)/lam, first with g held
        distance = xp.zeros_like(self.d) if dx is None else dx
        if dlam is not None:
            distance = distance - self.d * dlam
        held = distance * self._per_lam()
        shift = -self.totals([self._share() * held], linear=True)[0]
        # For an entry that stands alone, dd times the steepness: in terms that do not cancel.
        lone = self.phi.curvature(self.u, self.weight) * distance
        of_whole: Any = 0.0
        if dweight is not None:
            added = self.phi.prime(self.u) * dweight
            shift = shift + xp.where(moves, added * inverse, 0.0)
            lone, of_whole = lone + added, added / self.size
        shift = xp.where(self.pinned, 0.0, shift)
        dd = xp.where(self.alone & ~self.pinned, xp.where(moves, lone * inverse, 0.0), held + shift)
        dy = xp.where(self.whole, of_whole, self.slope * dd)
        if self.debias:
            dy = self._debiased(dy, dx, distance, shift, of_whole * self.size)
        return Moved(dy, dd, shift)

    def _debiased(
        self, dy: Array, dx: Array | None, distance: Array, shift: Array, added: Array | float
    ) -> Array:
        """dy + d(lam d), where lam d = x - g: without d dlam, which cancels, and is as large as x where
        lam is."""
        xp, (moves, inverse) = self.xp, self._moves()
        held = xp.zeros_like(distance) if dx is None else dx
        rest = 1.0 - self.phi.curvature(self.u, self.weight)
        lone = (self.slope + self.lam) * added - self.slope * rest * distance
        lone = held + xp.where(moves, lone * inverse, dy - distance)
        return xp.where(self.alone & ~self.pinned, lone, dy + held + self.lam * shift)

    def cotangent(self, g: Array) -> Cotangents:
        """The transpose of ``tangent``, for the cotangent g of y."""
        xp, (moves, inverse) = self.xp, self._moves()
        of_whole = xp.where(self.whole, g, 0.0)
        of_d = xp.where(self.whole, 0.0, self.slope * g)
        of_s = of_d
        if self.debias:
            of_d = of_d + self.lam * g
        in_block = ~self.alone & ~self.pinned
        shift, flat = self.totals([xp.where(in_block, of_d, 0.0), of_whole])
        held = xp.where(self.alone & ~self.pinned, 0.0, of_d)
        held = held - xp.where(in_block, self._share() * shift, 0.0)
        lone = xp.where(self.alone & ~self.pinned & moves, of_d * inverse, 0.0)
        per_lam, curvature = self._per_lam(), self.phi.curvature(self.u, self.weight)
        dx = held * per_lam + curvature * lone
        added = lone + xp.where(in_block & moves, shift * inverse, 0.0)
        added = added + xp.where(self.alone, of_whole, flat) / self.size
        over = -dx  # b g - dx
        if self.debias:  # the g in it cancels, which leaves no digits where lam is large
            of_block = (xp.where(in_block, self._share() * shift, 0.0) - of_s) * per_lam
            of_lone = xp.where(moves, of_s * (1.0 - curvature) * inverse, g)
            over = xp.where(self.alone & ~self.pinned, of_lone, of_block)
        # Held at 0, an entry has d = 0, and a slope that may be beyond the largest number.
        most = float(xp.finfo(over.dtype).max)
        in_lam = self.d * xp.clip(over, -most, most)
        return Cotangents(dx, self.phi.prime(self.u) * added, in_lam)
