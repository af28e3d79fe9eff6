"""Top-k by one scalar per row: no sort, no isotonic problem.

For w = 1_k at most one block of the isotonic solution is pooled, the one around the k boundary.
Its threshold v solves one increasing equation,

    sum_i min(S((x_i - v)/lam), phi'(v)) = k phi'(v),

and every entry follows from v alone: those below it are left out, those whose response reaches
phi'(v) are selected whole and stand alone, the rest is the block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from . import core
from ._types import Array, Bools, Ints
from .phis import PHIS, Phi, lone_response
from .regularizers import PNorm, Regularizer
from .roots import increasing_root
from .rowwise import row_max, row_sum
from .solution import Solution, StoppingRule

RULE = StoppingRule(tol=1e-15, max_iter=500)


def order_statistic(x: Array, i: Ints) -> Array:
    """x_[i], the i-th largest entry of each row, for i (rows, m) in 1..n, by selection."""
    at = x.shape[-1] - i
    return np.take_along_axis(np.partition(x, np.unique(at), axis=-1), at, axis=-1)


def solve(
    x: Array,
    k: Array,
    lam: Array,
    reg: Regularizer,
    phi: Phi,
    rule: StoppingRule = RULE,
) -> Solution:
    """The solution for w = 1_k. x is (rows, n), n > 0; k and lam are (rows, 1), k real, lam > 0.

    For even phi give ``abs(x)``, finite. For the others -inf marks an entry that is not a candidate,
    and at most k entries are +inf. Where at most k candidates are left, all of them are selected.

    Stops when the two sides of the equation differ by at most tol * max(k, 1) * phi'(v), which for a
    mask is ``abs(sum(y) - k) <= tol * max(k, 1)``, or at the float resolution of v, always reached.
    """
    count = row_sum(x > -np.inf)
    problem = _Problem(x, np.minimum(k, count), lam, reg, phi)
    never: Bools = np.zeros(lam.shape, dtype=bool)
    everything: Bools = never if phi.name == "abs" else problem.k >= count
    pivot, delta = problem.find(rule)
    with np.errstate(over="ignore", invalid="ignore"):
        # A threshold at 0 can go no lower: the signed mask then takes fewer than k.
        pinned: Bools = delta >= pivot / lam if phi.name == "abs" else never
        d = np.where(pinned, x / lam, (x - pivot) / lam + delta)
        v = np.where(pinned, 0.0, pivot - lam * delta)
    return problem.solution(d, v, everything, pinned)


@dataclass(frozen=True)
class _Problem:
    """What ``solve`` is given, with k at most the number of candidates."""

    x: Array
    k: Array
    lam: Array
    reg: Regularizer
    phi: Phi

    def alone(self, x: Array) -> Array:
        """d of entries that are selected whole."""
        return lone_response(x, np.ones_like(self.lam), self.lam, self.reg, self.phi)

    def find(self, rule: StoppingRule) -> tuple[Array, Array]:
        """pivot and delta, by the compiled core if it knows the operator.

        The core has the default rule built in; any other goes to the iteration in NumPy.
        """
        operator = core.operator(self.reg, self.phi)
        if rule != RULE or operator is None:
            return self._find_in_numpy(rule)
        pivot, delta = np.split(core.solve(operator, self.x, self.k, self.lam).state, 2, axis=-1)
        # Rows in which nothing, or everything, is selected have no threshold.
        none, top = ~np.isfinite(pivot), row_max(self.x)
        pivot = np.where(none, np.where(np.isfinite(top), top, 0.0), pivot)
        return pivot, np.where(none, self.reg.zero, delta)

    def _find_in_numpy(self, rule: StoppingRule) -> tuple[Array, Array]:
        lam, reg, phi = self.lam, self.reg, self.phi
        pivot, lo, hi = self.bracket()
        with np.errstate(over="ignore", invalid="ignore"):
            root = increasing_root(
                self.equation(pivot),
                lo,
                hi,
                start=hi if phi.name == "abs" else None,  # where the constraint v >= 0 binds
                tol=rule.tol * np.maximum(self.k, 1.0) * phi.prime(pivot - lam * hi),
                # For p > 2 a response is as steep as it likes near 0: every digit of delta counts.
                unit=0.0 if isinstance(reg, PNorm) and reg.p > 2 else hi - lo,
                max_iter=rule.max_iter,
            )
        rule.check("threshold", root.converged, root.residual)
        return pivot, root.x

    def bracket(self) -> tuple[Array, Array, Array]:
        """The pivot x_[floor k + 1] and the ends of delta = (pivot - v)/lam.

        The threshold lies between the pivot (p-norm; lam above it if two-sided) and the threshold
        that x_[ceil k] has when it stands alone. Where these cross, the gap between the two entries
        is too wide to pool them, and the lower end, which selects exactly k entries, is the answer.
        """
        k, lam, n = self.k, self.lam, self.x.shape[-1]
        i = np.concatenate([np.minimum(np.floor(k) + 1, n), np.clip(np.ceil(k), 1, n)], axis=-1)
        pivot, boundary = np.split(order_statistic(self.x, i.astype(np.intp)), 2, axis=-1)
        everything = (pivot == -np.inf) | (k >= n)
        pivot = np.where(pivot > -np.inf, pivot, 0.0)
        if self.phi.even:
            pivot = np.where(k >= n, 0.0, pivot)  # x_[n + 1] = 0: the threshold is never below
        boundary = np.maximum(boundary, pivot)
        lo = np.full_like(lam, self.reg.zero)
        with np.errstate(over="ignore"):
            hi = self.alone(boundary) - (boundary - pivot) / lam
            if self.phi.name == "abs":
                hi = np.minimum(hi, pivot / lam)
        return pivot, lo, np.where((k > 0) & ~everything, np.maximum(hi, lo), lo)

    def split(self, d: Array, v: Array) -> tuple[Array, Bools, Bools]:
        """The response of every entry, which ones are in the block, which are selected whole."""
        with np.errstate(over="ignore"):
            response = self.reg.response(np.maximum(d, self.reg.zero))
        reached = response >= self.phi.prime(v)
        taking_part = d > self.reg.zero
        return response, taking_part & ~reached, taking_part & reached

    def equation(self, pivot: Array) -> Callable[[Array], tuple[Array, Array]]:
        """delta -> (left side minus right side, the Newton point), with v = pivot - lam * delta.

        Distances are taken in units of lam from an entry at the boundary: a common shift of x, or a
        tiny lam, then costs no precision.
        """
        reg, lam = self.reg, self.lam
        # The constraint v >= 0 of |.| is in the bracket; above it |v| = v.
        phi = PHIS["identity"] if self.phi.name == "abs" else self.phi
        e = 1.0 / reg.exponent if isinstance(reg, PNorm) and phi.name == "identity" else 1.0
        t = (self.x - pivot) / lam

        def equation(delta: Array) -> tuple[Array, Array]:
            d = t + delta
            v = pivot - lam * delta
            response, inside, above = self.split(d, v)
            left = self.k - row_sum(above)
            mass = row_sum(np.where(inside, response, 0.0))
            slope = row_sum(np.where(inside, reg.slope(np.where(inside, d, 0.0)), 0.0))
            slope = slope + lam * phi.curvature(v, left)
            value = mass - left * phi.prime(v)
            with np.errstate(divide="ignore", invalid="ignore"):
                step = value / slope
                if e != 1.0:
                    # Newton on mass^(p-1): linear in delta for one entry, and nearly for many.
                    power = (mass - mass ** (1.0 - e) * left**e) / (e * slope)
                    step = np.where((mass > 0) & (left > 0), power, step)
            return value, delta - step

        return equation

    def solution(self, d: Array, v: Array, everything: Bools, pinned: Bools) -> Solution:
        """One block, with the weight that is left for it; every other entry stands alone."""
        x, reg = self.x, self.reg
        response, inside, above = self.split(d, v)
        above |= everything & (x > -np.inf)
        inside = (inside | pinned) & ~above
        left = self.k - row_sum(above)
        with np.errstate(over="ignore", invalid="ignore"):
            mass = row_sum(np.where(inside, response, 0.0))
            residual = np.abs(mass - left * self.phi.prime(v))
        d_above = self.alone(np.where(above, x, 0.0))
        u_above = x - self.lam * d_above
        if self.phi.name == "half_square":
            u_above = reg.response(
                d_above
            )  # S(d) = u, sum_B S(d_i) = v * left: precise also if tiny
            with np.errstate(over="ignore"):
                mean = mass / np.where(left > 0, left, 1.0)
            v = np.where((left > 0) & (mean < np.inf), mean, v)
        weight = left / np.maximum(row_sum(inside), 1.0)
        return Solution(
            d=np.where(above, d_above, np.where(inside, d, reg.zero)),
            u=np.where(above, u_above, np.where(inside, v, x)),
            weight=np.where(above, 1.0, np.where(inside, weight, 0.0)),
            block=np.where(inside & ~pinned, 0, 1 + np.arange(x.shape[-1])),
            residual=np.where(everything | pinned, 0.0, residual),
        )
