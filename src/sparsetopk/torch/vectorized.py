"""The threshold of top-k in ordinary torch operations: for every device, and for any operator.

A fixed number of passes over all rows at once: nothing waits for the device, nothing is sorted, and
the memory is a few times that of x. (On the CPU, where there is nothing to wait for, ``stop_early``
leaves out the passes that change nothing.) The equation is that of ``sparsetopk.threshold``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .scalars import PHIS, Phi, PNorm, Regularizer, TwoSidedPNorm, lone_response

# The operators by the numbers that the compiled core gives them; it does not have the last.
MASK, MAGNITUDE, SIGN, TWO_SIDED, EXP = range(5)

# Newton steps or bisections; rows that are done stay where they are.
_PASSES = 64
_INTEGERS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def regularizer(op: int, exponent: float) -> Regularizer:
    return TwoSidedPNorm(exponent) if op == TWO_SIDED else PNorm(exponent)


def phi_of(op: int) -> Phi:
    names = {MAGNITUDE: "half_square", SIGN: "abs", EXP: "exp"}
    return PHIS[names.get(op, "identity")]  # type: ignore[index]


def row_sum(values: Tensor) -> Tensor:
    """(m, n) to (m, 1); flags are counted."""
    return values.sum(dim=-1, keepdim=True)


def key_of(x: Tensor) -> Tensor:
    """Integers in the order of the floats."""
    bits = (x + 0.0).view(_INTEGERS[x.dtype])  # -0 becomes 0
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits)


def float_of(key: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of ``key_of``."""
    key = key.to(_INTEGERS[dtype])
    return torch.where(key < 0, key ^ torch.iinfo(key.dtype).max, key).view(dtype)


def order_statistic(x: Tensor, i: Tensor) -> Tensor:
    """x_[i], the i-th largest entry of each row (m, n), for i (m, 1) in 1..n.

    Bit by bit, the largest key that at least i entries reach: one pass of counting for each bit of
    the dtype, whatever the distribution.
    """
    keys = key_of(x)
    info = torch.iinfo(keys.dtype)
    positive = row_sum(keys >= 0) >= i
    found = torch.where(positive, 0, info.min).to(keys.dtype)
    for bit in reversed(range(info.bits - 1)):
        trial = found | (1 << bit)
        found = torch.where(row_sum(keys >= trial) >= i, trial, found)
    return float_of(found, x.dtype)


def solve(
    x: Tensor, k: Tensor, lam: Tensor, op: int, exponent: float, *, stop_early: bool = False
) -> Tensor:
    """The state (m, 2) = (pivot, delta) of rows x (m, n), n > 0, for k and lam (m, 1).

    v = pivot - lam delta is the threshold, and t_i = (a_i - pivot)/lam + delta with a = x or |x| the
    argument of the response. Rows that have no such threshold:

    - (NaN, 0): a NaN, an infinity that has no meaning, or a bad k or lam;
    - (-inf, 0): every candidate is selected, nothing is relaxed;
    - (inf, 0): k = 0;
    - (inf, c): c > k entries are +inf and share k;
    - lam = 0: (x_[ceil k], what is left for the entries equal to it).

    The computation is in the dtype of k and lam.
    """
    phi = phi_of(op)
    invalid = row_sum(~x.isfinite() if phi.even else x.isnan()) > 0
    invalid = invalid | ~((k >= 0) & (k <= x.shape[-1]) & (lam >= 0) & (lam < torch.inf))
    x = torch.where(invalid, 0.0, x)
    k = torch.where(invalid, 0.0, k)
    hard = lam == 0
    lam = torch.where(invalid | hard, 1.0, lam)
    a = x.abs() if phi.even else x
    count = row_sum(a > -torch.inf)
    k = torch.minimum(k, count.to(k.dtype))
    shared = row_sum(a == torch.inf)

    boundary = order_statistic(a, k.ceil().clamp_min(1.0).to(torch.int64))
    pivot = _next(a, boundary, k)
    a, boundary, pivot = (value.to(k.dtype) for value in (a, boundary, pivot))
    left = k - row_sum(a > boundary)

    problem = Problem(a, k, lam, regularizer(op, exponent), phi, stop_early)
    everything = k >= count if op != SIGN else torch.zeros_like(hard)
    rows = Special(k, hard, invalid, everything, shared)
    return rows.state(*problem.find(pivot, boundary), boundary, left)


class Special(NamedTuple):
    """Which rows have no threshold, as ``solve`` says; (m, 1)."""

    k: Tensor
    hard: Tensor
    invalid: Tensor
    everything: Tensor
    infinite: Tensor  # how many entries are +inf

    def state(self, pivot: Tensor, delta: Tensor, boundary: Tensor, left: Tensor) -> Tensor:
        """The state (m, 2), given that of the others and what lam = 0 needs."""
        k, everything, crowded = self.k, self.everything, self.infinite > self.k
        # From the special to the more special: what comes later overrides.
        pivot = torch.where(everything, -torch.inf, pivot)
        pivot = torch.where((k == 0) | crowded, torch.inf, pivot)
        delta = torch.where(everything | (k == 0), 0.0, delta)
        infinite = torch.where(k > 0, self.infinite.to(delta.dtype), 0.0)
        delta = torch.where(crowded, infinite, delta)
        usual = ~everything & (k > 0)
        pivot = torch.where(self.hard & usual, boundary, pivot)
        delta = torch.where(self.hard & usual, left, delta)
        pivot = torch.where(self.invalid, torch.nan, pivot)
        return torch.cat([pivot, torch.where(self.invalid, 0.0, delta)], dim=-1)


def _next(a: Tensor, boundary: Tensor, k: Tensor) -> Tensor:
    """x_[floor k + 1], given x_[ceil k]; -inf if there is none."""
    reached = a >= boundary
    below = torch.where(reached, -torch.inf, a).amax(dim=-1, keepdim=True)
    return torch.where(row_sum(reached) > k.floor(), boundary, below)


@dataclass(frozen=True)
class Problem:
    """Rows a = x or |x|, with lam > 0 and k at most the number of candidates.

    With ``total`` they are shards, and it gives the sums (m, 3) over whole rows from those over these.
    """

    a: Tensor
    k: Tensor
    lam: Tensor
    reg: Regularizer
    phi: Phi
    stop_early: bool
    total: Callable[[Tensor], Tensor] | None = None

    def find(self, pivot: Tensor, boundary: Tensor) -> tuple[Tensor, Tensor]:
        """pivot and delta; (0, 0) where the threshold of an even phi ends at 0."""
        pivot = torch.where(pivot.isfinite(), pivot, 0.0)
        if self.phi.even:
            pivot = torch.where(self.k >= self.a.shape[-1], 0.0, pivot)
        lo, hi = self._bracket(pivot, boundary)
        delta = self.root(pivot, lo, hi)
        if self.phi.even:
            pinned = (pivot == 0) | (delta >= pivot / self.lam)
            pivot, delta = torch.where(pinned, 0.0, pivot), torch.where(pinned, 0.0, delta)
        return pivot, delta

    def _bracket(self, pivot: Tensor, boundary: Tensor) -> tuple[Tensor, Tensor]:
        """The ends of delta; they are equal where the gap at the boundary is too wide to pool."""
        lo = torch.full_like(self.lam, self.reg.zero)
        apart = boundary == torch.inf
        boundary = torch.where(apart, pivot, torch.maximum(boundary, pivot))
        alone = lone_response(boundary, torch.ones_like(self.lam), self.lam, self.reg, self.phi)
        hi = alone - (boundary - pivot) / self.lam
        if self.phi.name == "abs":
            hi = torch.minimum(hi, pivot / self.lam)
        return lo, torch.where(apart, lo, torch.maximum(hi, lo))

    def root(self, pivot: Tensor, lo: Tensor, hi: Tensor) -> Tensor:
        """delta in [lo, hi]."""
        eps = torch.finfo(self.lam.dtype).eps
        return increasing_root(
            self._equation(pivot),
            lo,
            hi,
            start=hi if self.phi.name == "abs" else lo + (hi - lo) / 2,
            tol=4
            * eps
            * self.k.clamp_min(1.0).to(lo.dtype)
            * self.phi.prime(pivot - self.lam * hi),
            # For p > 2 a response is as steep as it likes near 0: every digit of delta counts.
            unit=torch.zeros_like(lo) if self._is_steep() else hi - lo,
            stop_early=self.stop_early,
        )

    def _is_steep(self) -> bool:
        return isinstance(self.reg, PNorm) and self.reg.exponent < 1.0

    def _equation(self, pivot: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """delta -> (left side minus right side, the Newton point)."""
        reg, phi, lam = self.reg, self.phi, self.lam
        powered = isinstance(reg, PNorm) and phi.name in ("identity", "abs") and reg.exponent != 1.0
        e = 1.0 / reg.exponent
        t = (self.a - pivot) / lam

        def equation(delta: Tensor) -> tuple[Tensor, Tensor]:
            d, v = t + delta, pivot - lam * delta
            response = reg.response(d.clamp_min(reg.zero))
            reached = response >= phi.prime(v)
            inside = (d > reg.zero) & ~reached
            whole = row_sum((d > reg.zero) & reached)
            mass = row_sum(torch.where(inside, response, 0.0))
            slope = row_sum(torch.where(inside, reg.slope(torch.where(inside, d, 0.0)), 0.0))
            if self.total is not None:
                sums = torch.cat([whole.to(torch.float64), mass, slope], dim=-1)
                whole, mass, slope = self.total(sums).split(1, dim=-1)
                mass, slope = mass.to(lam.dtype), slope.to(lam.dtype)
            left = (self.k - whole).to(lam.dtype)
            slope = slope + lam * phi.curvature(v, left)
            value = mass - left * phi.prime(v)
            step = value / slope
            if powered:  # Newton on mass^(p-1): linear in delta for one entry, nearly for many
                power = (mass - mass ** (1.0 - e) * left.clamp_min(0.0) ** e) / (e * slope)
                step = torch.where((mass > 0) & (left > 0), power, step)
            return value, delta - step

        return equation


def increasing_root(
    f: Callable[[Tensor], tuple[Tensor, Tensor]],
    lo: Tensor,
    hi: Tensor,
    *,
    start: Tensor,
    tol: Tensor,
    unit: Tensor,
    stop_early: bool,
) -> Tensor:
    """As ``sparsetopk.roots.increasing_root``, with a fixed number of passes."""
    eps = torch.finfo(lo.dtype).eps
    x = best = torch.minimum(torch.maximum(start, lo), hi)
    residual = torch.full_like(x, torch.inf)
    done = torch.zeros_like(x, dtype=torch.bool)
    width = hi - lo
    for i in range(_PASSES):
        value, newton = f(x)
        lo = torch.where(value <= 0, x, lo)
        hi = torch.where(value >= 0, x, hi)
        better = value.abs() < residual
        best = torch.where(better, x, best)
        residual = torch.where(better, value.abs(), residual)

        rounding = eps * torch.maximum(x.abs(), unit)
        middle = lo + (hi - lo) / 2
        done = done | (residual <= tol) | (hi - lo <= 4 * rounding)
        done = done | (middle <= lo) | (middle >= hi)
        if stop_early and bool(done.all()):
            break
        small = (newton - x).abs() <= rounding
        newton = torch.where(small, x - 2 * rounding * torch.sign(value), newton)
        use_newton = (newton > lo) & (newton < hi)
        if i % 4 == 3:
            use_newton = use_newton & (hi - lo <= width / 2)
            width = hi - lo
        x = torch.where(done, best, torch.where(use_newton, newton, middle))
    return best
