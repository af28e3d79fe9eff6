"""The top-k family from a solved threshold: the output, and its derivatives in x, k and lam.

With a = x or |x|, t_i = (a_i - pivot)/lam + delta and v = pivot - lam delta, the block (the entries that
are neither 0 nor selected whole) shares what the entries above it leave of k. The pivot is a constant;
delta moves with x, k and lam.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .blocks import Blocks
from .operator import MAGNITUDE, SIGN, Count, Operator
from .scalars import lone_response
from .threshold import State

Array = Any
Sums = Callable[..., list[Array]]
"""``sums([values, ...], linear=False)``: the sum (..., 1) of each over whole rows; flags are counted."""


def lam_floor(xp: Any, dtype: Any, operator: Operator) -> float:
    """The least lam that slopes are taken with: below, S'/lam could overflow in the dtype of x."""
    return 4.0 * max(1.0, operator.exponent) / float(xp.finfo(dtype).max)


class Split(NamedTuple):
    """What becomes of every row (..., 1) and entry (..., n), given the state: constants."""

    pivot: Array
    invalid: Array  # rows that are NaN
    hard: Array | None  # rows with lam = 0; None if there can be none
    soft: Array  # rows that have a threshold
    relaxed: Array  # rows in which lam plays a part
    crowd: Array  # how many entries at +inf share k, as they are more than k; else 0
    inside: Array  # the entries of the block
    above: Array  # those selected whole, which stand alone
    pinned: Array  # entries of a block whose threshold is held at 0
    taken: Array  # how many are above
    size: Array  # how many are inside

    @classmethod
    def of(
        cls,
        xp: Any,
        a: Array,
        k: Count,
        lam: Array,
        state: State,
        operator: Operator,
        sums: Sums,
        may_be_hard: bool,
    ) -> Split:
        pivot, delta = state
        hard = lam == 0 if may_be_hard else None
        soft = xp.isfinite(pivot) if hard is None else xp.isfinite(pivot) & ~hard
        everything = pivot == -xp.inf
        relaxed = (soft | everything | (pivot == xp.inf)) & (lam > 0)  # k = 0 still has an R(0)
        crowd = xp.where(pivot == xp.inf, delta, 0.0)
        if hard is not None:
            crowd = xp.where(hard, 0.0, crowd)
        origin, delta = xp.where(soft, pivot, 0.0), xp.where(soft, delta, 0.0)
        lam = xp.where(relaxed, lam, 1.0)
        t = (a - origin) / lam + delta
        taking_part = soft & (t > operator.reg(xp).zero)
        reached = _is_whole(xp, t, lam, State(origin, delta), operator)
        above = (taking_part & reached) | (everything & (a > -xp.inf))
        held = xp.zeros_like(soft)
        if operator.op == SIGN:
            held = soft & (pivot == 0) & (state.delta == 0)
            taking_part = taking_part | held
        inside = taking_part & ~above
        taken, size = sums([above, inside])
        # If as much of k is left as there are entries in the block, rounding alone makes it a block, and
        # its entries are whole.
        whole = k.whole - taken >= size
        if operator.op == SIGN:
            whole = whole & ~held
        above, inside = above | (inside & whole), inside & ~whole
        taken, size = xp.where(whole, taken + size, taken), xp.where(whole, 0, size)
        return cls(
            pivot=pivot,
            invalid=xp.isnan(pivot),
            hard=hard,
            soft=soft,
            relaxed=relaxed,
            crowd=crowd,
            inside=inside,
            above=above,
            pinned=held & inside,
            taken=taken,
            size=size,
        )


def _is_whole(xp: Any, t: Array, lam: Array, state: State, operator: Operator) -> Array:
    """The entries whose response S(t) alone reaches phi'(v), the most that an entry can have."""
    reg, phi, (origin, delta) = operator.reg(xp), operator.phi(xp), state
    if phi.straight:  # in t: where S is flat, many t below 1 have an S that is rounded to 1
        return t >= 1.0
    level = phi.prime(origin - lam * delta)
    if operator.op == MAGNITUDE:
        # v may be tiny beside the pivot, and is then lost in rounding: what is over it by no more
        # than that stays in the block, which so is never left without a share of k.
        rounding = 16.0 * float(xp.finfo(lam.dtype).eps)
        level = xp.clip(level, 0.0, None) * (1.0 + rounding * max(1.0, operator.exponent))
        level = level + rounding * (xp.abs(origin) + lam * xp.abs(delta))
    # What is far over it would overflow, and a framework may take a derivative here, of inf: from the
    # largest numbers on, but for rounding, an entry is whole.
    info = xp.finfo(lam.dtype)
    most = float(info.max) * (1.0 - 256.0 * float(info.eps))
    far = most ** (1.0 / max(1.0, operator.exponent))
    level = xp.clip(level, None, most * (1.0 - 256.0 * float(info.eps)))
    return reg.response(xp.clip(t, reg.zero, far)) >= level


def _alone(
    xp: Any, a: Array, d: Array, lam: Array, split: Split, operator: Operator
) -> tuple[Array, Array]:
    """d of the entries that stand alone, and of all entries, given that of those in the block."""
    still, steep = xp.stop_gradient, operator.exponent != 1.0
    a_above = xp.where(split.above, a, 1.0)
    alone = lone_response(
        xp.where(split.inside, still(a), a_above) if steep else a_above,
        xp.ones_like(lam),
        lam,
        operator.reg(xp),
        operator.phi(xp),
    )
    if steep:  # in the block less than alone but for rounding, of which S makes more: y is in order
        d = d - still(xp.clip(d - alone, 0.0, None))
    return alone, xp.where(split.above, alone, d)


def hard_mask(
    xp: Any, a: Array, pivot: Array, k: Count, sums: Sums, before: Array | None = None
) -> Array:
    """1 above the pivot; what is left goes to the entries equal to it, the lowest index first.

    ``before`` is how many entries equal to the pivot come before each, if these are a part of a row.
    """
    tied = (a == pivot) & (a > -xp.inf)  # padding is never selected
    if before is None:
        before = xp.cumsum(tied, axis=-1) - xp.astype(tied, xp.int32)
    over = sums([a > pivot])[0]
    share = xp.clip(xp.astype(k.whole - over - before, k.frac.dtype) + k.frac, 0.0, 1.0)
    return xp.where(a > pivot, 1.0, xp.where(tied, share, 0.0))


def hard_output(xp: Any, x: Array, sign: Array | None, mask: Array, operator: Operator) -> Array:
    """The output for lam = 0: the mask, with the values or the signs of x."""
    if operator.op == MAGNITUDE:
        return xp.where(mask > 0, x * mask, 0.0)
    return mask if sign is None else sign * mask


class Relaxed(NamedTuple):
    """Solved rows. Where a framework differentiates, x, k, lam and delta carry derivatives, and so does
    all that is computed from them; what ``split`` has are constants."""

    xp: Any
    operator: Operator
    split: Split
    sums: Sums
    x: Array  # in the dtype of lam
    sign: Array | None  # what gives x back from a = |x|: 1 or -1; None where a = x
    k: Count
    lam: Array  # > 0: rows in which it plays no part have a stand-in
    left: Array  # the part of k that is left for the block
    t: Array  # the argument of the response, in the block
    v: Array  # the threshold of the block
    blocks: Blocks

    @classmethod
    def of(
        cls,
        xp: Any,
        x: Array,
        k: Count,
        lam: Array,
        state: State,
        operator: Operator,
        *,
        sums: Sums,
        floor: float,
        may_be_hard: bool = True,
        split: Split | None = None,
    ) -> Relaxed:
        """The rows x (..., n), in the dtype of lam; ``split`` if it is known already."""
        reg, phi, still = operator.reg(xp), operator.phi(xp), xp.stop_gradient
        sign = None
        if phi.even:
            sign = xp.astype(xp.where(still(x) < 0, -xp.ones_like(x), 1.0), x.dtype)
        a = x if sign is None else x * sign
        if split is None:
            constant = State(still(state.pivot), still(state.delta))
            split = Split.of(xp, still(a), k, still(lam), constant, operator, sums, may_be_hard)
        inside, above = split.inside, split.above
        lam = xp.where(split.relaxed, lam, 1.0)
        origin = xp.where(split.soft, split.pivot, 0.0)
        delta = xp.where(split.soft, state.delta, 0.0)
        t = xp.where(inside, (xp.where(inside, a, origin) - origin) / lam + delta, 0.5)
        v = origin - lam * delta
        left = xp.astype(k.whole - split.taken, lam.dtype) + k.frac

        def totals(values: list[Array], linear: bool = False) -> list[Array]:
            return sums([xp.where(inside, v, 0.0) for v in values], linear=linear)

        d = xp.where(inside, t, reg.zero)
        u = xp.where(inside, v, xp.where(xp.isfinite(a), a, 0.0))
        if not phi.straight:
            alone, d = _alone(xp, a, d, lam, split, operator)
            curved = phi.name == "half_square"
            u = xp.where(above, reg.response(alone) if curved else a - lam * alone, u)
            if curved:  # S(d) = u and sum_B S(t_i) = v left: precise also where they are tiny
                shared = still(left) > 0
                mass = totals([reg.response(t)])[0] / xp.where(shared, left, 1.0)
                u = xp.where(inside & shared & (mass < xp.inf), mass, u)
        blocks = Blocks.of(
            reg,
            phi,
            totals,
            lam=lam,
            d=d,
            u=u,
            weight=xp.where(inside, left, xp.astype(above, lam.dtype)),
            size=xp.astype(xp.where(inside, split.size, 1), lam.dtype),
            pinned=split.pinned,
            floor=floor,
            debias=operator.debias and operator.op == MAGNITUDE,
        )
        return cls(xp, operator, split, sums, x, sign, k, lam, left, t, v, blocks.with_digits())

    def entries(self) -> Array:
        """a, for what torch may compile: version 2.6 reads no property of a named tuple."""
        return self.x if self.sign is None else self.x * self.sign

    @property
    def a(self) -> Array:
        return self.entries()

    def signed(self, y: Array) -> Array:
        return y if self.sign is None else self.sign * y

    def hard_mask(self, before: Array | None = None) -> Array:
        """The mask of the rows with lam = 0; ``before`` is as in the function ``hard_mask``."""
        still = self.xp.stop_gradient
        k = Count(self.k.whole, still(self.k.frac))
        return hard_mask(self.xp, still(self.entries()), self.split.pivot, k, self.sums, before)

    def y(self, hard_mask: Array | None = None) -> Array:
        """The output; ``hard_mask`` is that of hard rows, if it is known already."""
        xp, split = self.xp, self.split
        y = self.blocks.y()
        if self.blocks.debias:
            # S(d) <= v but for rounding, by which y may be out of order.
            over = xp.stop_gradient(xp.clip(y - self.entries(), 0.0, None))
            y = xp.where(split.above, self.entries(), y - over)
        y = xp.where(split.inside | split.above, y, 0.0)
        y = self.signed(self._shared(xp.astype(self.k.whole, y.dtype) + self.k.frac, y))
        if split.hard is not None:
            mask = self.hard_mask() if hard_mask is None else hard_mask
            y = xp.where(split.hard, hard_output(xp, self.x, self.sign, mask, self.operator), y)
        return xp.where(split.invalid, xp.nan, y)

    def _shared(self, k: Array, y: Array) -> Array:
        """y, but for the entries at +inf that share k."""
        xp, crowd = self.xp, self.split.crowd
        share = k / xp.where(crowd > 0, crowd, 1.0)
        return xp.where((self.x == xp.inf) & (crowd > 0), share, y)

    def _is_fractional(self) -> Array:
        """Rows in which k moves the block: where all of it is selected whole, or nothing of it, it is a
        block by rounding alone."""
        left = self.xp.stop_gradient(self.left)
        return (left > 0) & (left < self.split.size)

    def tangent(
        self,
        dx: Array | None,
        dk: Array | None,
        dlam: Array | None,
        hard_mask: Array | None = None,
    ) -> tuple[Array, Array]:
        """The tangents of delta (..., 1) and of the output (..., n); None is zero."""
        xp, split = self.xp, self.split
        da = None if dx is None else self.signed(dx)
        dlam_used = None if dlam is None else xp.where(split.relaxed, dlam, 0.0)
        dweight = None
        if dk is not None:
            dweight = xp.where(split.inside & self._is_fractional(), dk, 0.0)
        moved = self.blocks.tangent(da, dweight, dlam_used)
        # delta = (pivot - v)/lam, of which the shift is the part with lam held
        ddelta = moved.shift
        if dlam_used is not None:
            delta = (xp.where(split.soft, split.pivot, 0.0) - self.v) / self.lam
            ddelta = ddelta - delta * dlam_used / xp.clip(self.lam, self.blocks.floor, None)
        ddelta = self._of_row(xp.where(split.soft, ddelta, 0.0))
        dy = xp.where(split.inside | split.above, moved.y, 0.0)
        if self.blocks.debias and da is not None:
            dy = xp.where(split.above, da, dy)
        elif self.blocks.debias:
            dy = xp.where(split.above, 0.0, dy)
        if dk is not None:
            dy = self._shared(dk, dy)
        dy = self.signed(dy)
        if split.hard is not None:
            dy = xp.where(split.hard, 0.0, dy)
            if self.operator.op == MAGNITUDE and dx is not None:
                mask = self.hard_mask() if hard_mask is None else hard_mask
                dy = dy + xp.where(split.hard, mask, 0.0) * dx
        return ddelta, xp.where(split.invalid, self._nan(dx, dk, dlam), dy)

    def _of_row(self, values: Array) -> Array:
        """What all entries of the block have in common, (..., 1); 0 for a row without a block."""
        if values.shape[-1] == 1:
            return values
        total = self.sums([self.xp.where(self.split.inside, values, 0.0)], linear=True)[0]
        return total / self.xp.clip(self.xp.astype(self.split.size, total.dtype), 1.0, None)

    def _nan(self, *tangents: Array | None) -> Array:
        """The tangents times NaN in invalid rows, whose derivatives are invalid too; 0 elsewhere."""
        factor = self.xp.where(self.split.invalid, self.xp.nan, self.xp.zeros_like(self.lam))
        return sum((d * factor for d in tangents if d is not None), self.xp.zeros_like(self.t))

    def cotangent(self, g: Array, hard_mask: Array | None = None) -> tuple[Array, Array, Array]:
        """The cotangents of x (..., n), and of k and lam (..., 1), for that of the output."""
        xp, split = self.xp, self.split
        of_y = self.signed(g)
        taking_part = split.inside | split.above
        found = self.blocks.cotangent(xp.where(taking_part, of_y, 0.0))
        dx, in_lam = found.x, found.lam
        if self.blocks.debias:
            dx = xp.where(split.above, of_y, dx)
            in_lam = xp.where(split.above, 0.0, in_lam)
        shared = xp.where((self.x == xp.inf) & (split.crowd > 0), of_y, 0.0)
        of_block = xp.where(split.inside, found.weight, 0.0)
        # The weight is that of the whole block: every entry of it has the same cotangent.
        dk, dlam, crowded = self.sums([of_block, xp.where(taking_part, in_lam, 0.0), shared])
        size = xp.clip(xp.astype(split.size, dk.dtype), 1.0, None)
        dk = xp.where(self._is_fractional(), dk / size, 0.0)
        dk = dk + crowded / xp.where(split.crowd > 0, split.crowd, 1.0)
        dx, dlam = xp.where(taking_part, dx, 0.0), xp.where(split.relaxed, dlam, 0.0)
        dx = self.signed(dx)
        if split.hard is not None:
            mask: Any = 0.0
            if self.operator.op == MAGNITUDE:
                mask = self.hard_mask() if hard_mask is None else hard_mask
            dx = xp.where(split.hard, mask * g, dx)
            dk, dlam = xp.where(split.hard, 0.0, dk), xp.where(split.hard, 0.0, dlam)
        nan = xp.where(split.invalid, xp.nan, xp.zeros_like(self.lam))
        return dx + nan, dk + nan, dlam + nan
