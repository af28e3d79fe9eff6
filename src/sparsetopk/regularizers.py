"""The regularisers R(y) = lam * sum_i r(y_i) and the scalar functions that follow from them.

With ``t`` in units of ``lam``, the response ``S(t) = (r*)'(t)`` maps the distance of an entry to
its threshold to the entry's output: ``y_i = S((x_i - u_i) / lam)`` (Proposition 2 of the paper).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ._types import Array
from .roots import increasing_root

# For p > 2 the slope of S is unbounded at 0; arguments nearer to 0 than this share its slope,
# which keeps every product of two slopes finite.
_STEEPEST = 1e-140


def exponent(p: float) -> float:
    """q - 1 = 1 / (p - 1), with the rounding of p = 3/2 and p = 4/3 taken out."""
    exponent = 1.0 / (p - 1.0)
    nearest = round(exponent)
    return float(nearest) if abs(exponent - nearest) < 1e-12 * exponent else exponent


@dataclass(frozen=True)
class PNorm:
    """``r(y) = |y|^p / p``, whose response is ``S(t) = sign(t) |t|^(q-1)`` with 1/p + 1/q = 1."""

    p: float

    #: S(t) for t at or below this is no longer selected: ``response(zero) == 0``.
    zero = 0.0

    @property
    def exponent(self) -> float:
        """q - 1."""
        return exponent(self.p)

    def response(self, t: Array) -> Array:
        """S(t)."""
        if self.exponent == 1.0:
            return t
        if self.exponent == 2.0:
            return t * np.abs(t)
        if self.exponent == 3.0:
            return t * t * t
        return np.sign(t) * np.abs(t) ** self.exponent

    def slope(self, t: Array) -> Array:
        """S'(t)."""
        if self.exponent == 1.0:
            return np.ones_like(t)
        size = np.abs(t)
        if self.exponent < 1.0:
            size = np.maximum(size, _STEEPEST)
        return self.exponent * size ** (self.exponent - 1.0)

    def inverse(self, y: Array) -> Array:
        """``S^-1(y) = r'(y) = sign(y) |y|^(p-1)``."""
        if self.exponent == 1.0:
            return y
        return np.sign(y) * np.abs(y) ** (1.0 / self.exponent)

    def penalty(self, y: Array) -> Array:
        """r(y)."""
        return np.abs(y) ** self.p / self.p

    def conjugate(self, t: Array) -> Array:
        """``r*(t) = |t|^q / q``."""
        q = self.exponent + 1.0
        return np.abs(t) ** q / q


@dataclass(frozen=True)
class TwoSidedPNorm:
    """``r(y) = (|y|^p + |1 - y|^p) / p`` on [0, 1], whose response is flat at both ends of [-1, 1].

    S^-1(y) = y^(p-1) - (1-y)^(p-1). For 1 < p < 2 the slope of S is continuous on the whole line,
    which is what makes the two-sided mask differentiable everywhere.
    """

    p: float
    zero = -1.0

    def response(self, t: Array) -> Array:
        """S(t), with S(t) = 0 for t <= -1 and S(t) = 1 for t >= 1."""
        t = np.clip(t, -1.0, 1.0)
        if self.p == 2.0:
            return (1.0 + t) / 2
        exponent = PNorm(self.p).exponent
        # Solve for the smaller of y and 1 - y, which keeps its relative precision.
        low = -np.abs(t)
        if exponent == 2.0:
            y = self._lower_half_3_2(low)
        elif exponent == 3.0:
            y = self._lower_half_4_3(low)
        else:
            y = self._lower_half(low)
        y = np.where(low <= -1.0, 0.0, y)
        return np.where(t <= 0, y, 1.0 - y)

    @staticmethod
    def _lower_half_3_2(t: Array) -> Array:
        # (1 + t sqrt(2 - t^2)) / 2, with 1 - t^2 (2 - t^2) = (1 - t^2)^2 taken out.
        return 0.5 * ((1.0 - t) * (1.0 + t)) ** 2 / (1.0 - t * np.sqrt(2.0 - t * t))

    @staticmethod
    def _lower_half_4_3(t: Array) -> Array:
        # m = y^(1/3) + (1-y)^(1/3) solves m^3 + 3 t^2 m = 4; then y = ((m + t)/2)^3. For t < 0 the sum
        # cancels: m^3 + 3 t^2 m - 4 = (m + t)(...) - 4 (1 + t^3) gives m + t without it.
        u = np.cbrt(2.0 + np.sqrt(4.0 + t**6))
        m = u - t * t / u
        total = 4.0 * (1.0 + t) * (1.0 - t + t * t) / (m * m - m * t + 4.0 * t * t)
        return (total / 2) ** 3

    def _lower_half(self, t: Array) -> Array:
        e = self.p - 1.0

        def in_power(c: Array) -> tuple[Array, Array]:  # c = y^(p-1): slope in [1, 2] for p < 2
            y = c ** (1.0 / e)
            value = c - (1.0 - y) ** e - t
            return value, c - value / (1.0 + (y / (1.0 - y)) ** (1.0 - e))

        def in_y(y: Array) -> tuple[Array, Array]:
            value = y**e - (1.0 - y) ** e - t
            return value, y - value / (e * (y ** (e - 1.0) + (1.0 - y) ** (e - 1.0)))

        lo = np.zeros_like(t)
        if self.p < 2:
            return np.asarray(increasing_root(in_power, lo, lo + 0.5**e).checked() ** (1.0 / e))
        return increasing_root(in_y, lo, lo + 0.5).checked()

    def slope(self, t: Array) -> Array:
        """S'(t) = 1 / ((p-1) (y^(p-2) + (1-y)^(p-2))) with y = S(t); 0 outside [-1, 1]."""
        y = self.response(-np.abs(t))  # the slope is even, and so 1 - y keeps its digits
        with np.errstate(divide="ignore"):
            curvature = (self.p - 1.0) * (y ** (self.p - 2.0) + (1.0 - y) ** (self.p - 2.0))
        return np.where(np.abs(t) <= 1.0, 1.0 / curvature, 0.0)

    def inverse(self, y: Array) -> Array:
        """S^-1(y) = r'(y)."""
        return y ** (self.p - 1.0) - (1.0 - y) ** (self.p - 1.0)

    def penalty(self, y: Array) -> Array:
        """r(y)."""
        return (np.abs(y) ** self.p + np.abs(1.0 - y) ** self.p) / self.p


Regularizer = PNorm | TwoSidedPNorm
