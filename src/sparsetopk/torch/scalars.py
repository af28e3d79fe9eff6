"""The scalar functions of the operators in torch operations: what regularizers.py and phis.py have.

``response`` and ``lone_response`` may be differentiated twice, in reverse and in forward mode; the
others are evaluated on detached tensors, or are plain enough to be differentiated as they stand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .._types import PhiName

# Iterations of Newton's method from the convex side of a root, from where it cannot leave; 8 to 10
# are enough wherever it is used.
_NEWTON = 12


def smallest(dtype: torch.dtype) -> float:
    """A number whose inverse, and the square of that, are finite in the dtype of a computation.

    Slopes that are unbounded at 0 (p > 2) are taken here for all arguments that are nearer to it.
    """
    return 1e-140 if dtype == torch.float64 else 1e-18


def implicit(residual: Callable[[Tensor], Tensor], at: Tensor, slope: Tensor) -> Tensor:
    """A zero that carries the derivatives of the root of ``residual``, up to the second.

    ``at`` is the root, detached, and ``slope`` (0 where the root does not move) the derivative of the
    residual there. Each of the two Newton steps with that slope is right to one more order. Their
    values are taken out: the root is known better than a rounded residual can tell.
    """
    moving = slope > 0
    slope = torch.where(moving, slope, 1.0)
    move = torch.zeros_like(at)
    for _ in range(2):
        rest = residual(at + move)
        move = move - torch.where(moving, (rest - rest.detach()) / slope, 0.0)
    return move


def _power(t: Tensor, e: float) -> Tensor:
    """sign(t) |t|^e, with a finite slope at 0."""
    if e == 1.0:
        return t
    if e == 2.0:
        return t * t.abs()
    if e == 3.0:
        return t * t * t
    least = smallest(t.dtype)
    sign = torch.where(t < 0, -1.0, 1.0).to(t.dtype)
    size = t * sign
    near = size < least
    far = torch.where(near, 1.0, size) ** e
    constant = size.detach()
    linear = constant**e + e * least ** (e - 1.0) * (size - constant)
    return sign * torch.where(near, linear, far)


@dataclass(frozen=True)
class PNorm:
    """r(y) = |y|^p / p, whose response is S(t) = sign(t) |t|^(q-1); ``exponent`` is q - 1."""

    exponent: float
    zero = 0.0

    @property
    def p(self) -> float:
        return 1.0 + 1.0 / self.exponent

    def response(self, t: Tensor) -> Tensor:
        """S(t)."""
        return _power(t, self.exponent)

    def slope(self, t: Tensor) -> Tensor:
        """S'(t)."""
        if self.exponent == 1.0:
            return torch.ones_like(t)
        size = t.abs()
        if self.exponent < 1.0:
            size = size.clamp_min(smallest(t.dtype))
        return self.exponent * size ** (self.exponent - 1.0)

    def inverse(self, y: Tensor) -> Tensor:
        """S^-1(y) = r'(y)."""
        return _power(y, 1.0 / self.exponent)

    def penalty(self, y: Tensor) -> Tensor:
        """r(y)."""
        return y.abs() ** self.p / self.p

    def conjugate(self, t: Tensor) -> Tensor:
        """r*(t) = |t|^q / q."""
        q = self.exponent + 1.0
        return t.abs() ** q / q


@dataclass(frozen=True)
class TwoSidedPNorm:
    """r(y) = (|y|^p + |1 - y|^p) / p on [0, 1]; ``exponent`` is 1 / (p - 1) here too."""

    exponent: float
    zero = -1.0

    @property
    def p(self) -> float:
        return 1.0 + 1.0 / self.exponent

    def response(self, t: Tensor) -> Tensor:
        """S(t): 0 for t <= -1, 1 for t >= 1."""
        t = t.clamp(-1.0, 1.0)
        if self.exponent == 1.0:
            return (1.0 + t) / 2
        # The smaller of y and 1 - y keeps its relative precision.
        upper = t > 0
        y = self._lower_half(torch.where(upper, -t, t))
        return torch.where(upper, 1.0 - y, y)

    def _lower_half(self, t: Tensor) -> Tensor:
        """S(t) for t in [-1, 0]; regularizers.py says where the closed forms come from."""
        if self.exponent == 2.0:
            return 0.5 * ((1.0 - t) * (1.0 + t)) ** 2 / (1.0 - t * torch.sqrt(2.0 - t * t))
        if self.exponent == 3.0:
            u = (2.0 + torch.sqrt(4.0 + t**6)) ** (1 / 3)
            m = u - t * t / u
            total = 4.0 * (1.0 + t) * (1.0 - t + t * t) / (m * m - m * t + 4.0 * t * t)
            return (total / 2) ** 3
        y = torch.where(t <= -1.0, 0.0, self._root(t.detach()))
        at = y.clamp_min(smallest(y.dtype))
        return y + implicit(lambda y: self.inverse(y) - t, at, self._curvature(at))

    def _root(self, t: Tensor) -> Tensor:
        """y in [0, 1/2] with y^(p-1) - (1-y)^(p-1) = t, by Newton's method from its convex side.

        In the smaller power of the two, c = y^(p-1) for p < 2 and c = (1-y)^(p-1) for p > 2, the slope
        is monotone, and between 1 and 2 up to its sign.
        """
        e = self.p - 1.0
        c = torch.full_like(t, 0.5**e)
        for _ in range(_NEWTON):
            root = c**self.exponent
            ratio = (root / (1.0 - root)) ** (1.0 - e)
            value = c - (1.0 - root) ** e + (-t if e < 1.0 else t)
            c = (c - value / (1.0 + ratio)).clamp(0.0, 0.5**e if e < 1.0 else 1.0)
        y = c**self.exponent
        return y if e < 1.0 else 1.0 - y

    def _curvature(self, y: Tensor) -> Tensor:
        """r''(y)."""
        return (self.p - 1.0) * (y ** (self.p - 2.0) + (1.0 - y) ** (self.p - 2.0))

    def slope(self, t: Tensor) -> Tensor:
        """S'(t) = 1 / r''(S(t)); 0 outside [-1, 1]."""
        return torch.where(t.abs() <= 1.0, 1.0 / self._curvature(self.response(-t.abs())), 0.0)

    def inverse(self, y: Tensor) -> Tensor:
        """S^-1(y) = r'(y)."""
        return y ** (self.p - 1.0) - (1.0 - y) ** (self.p - 1.0)

    def penalty(self, y: Tensor) -> Tensor:
        """r(y)."""
        return (y.abs() ** self.p + (1.0 - y).abs() ** self.p) / self.p


Regularizer = PNorm | TwoSidedPNorm


@dataclass(frozen=True)
class Phi:
    """phi'(u) and w phi''(u), for u >= 0 where phi is even."""

    name: PhiName
    even: bool
    value: Callable[[Tensor], Tensor]
    prime: Callable[[Tensor], Tensor]
    curvature: Callable[[Tensor, Tensor], Tensor]


def _finite_exp(u: Tensor) -> Tensor:
    return torch.exp((u - 1.0).clamp_max(709.7 if u.dtype == torch.float64 else 88.7))


PHIS: dict[PhiName, Phi] = {
    "identity": Phi(
        "identity",
        False,
        value=lambda u: u,
        prime=torch.ones_like,
        curvature=lambda u, w: torch.zeros_like(u),
    ),
    "half_square": Phi(
        "half_square",
        True,
        value=lambda u: u * u / 2,
        prime=lambda u: u,
        curvature=lambda u, w: w + 0.0 * u,
    ),
    # Entries that are held at the kink are pinned; whoever asks for a curvature leaves them out.
    "abs": Phi(
        "abs",
        True,
        value=torch.abs,
        prime=torch.ones_like,
        curvature=lambda u, w: torch.zeros_like(u),
    ),
    "exp": Phi(
        "exp",
        False,
        value=lambda u: torch.exp(u - 1.0),
        prime=_finite_exp,
        curvature=lambda u, w: w * _finite_exp(u),
    ),
}


def lone_response(s: Tensor, w: Tensor, lam: Tensor, reg: Regularizer, phi: Phi) -> Tensor:
    """d = (s - u)/lam for an entry that shares its threshold with no other: S(d) = w phi'(s - lam d).

    For even phi, ``s >= 0`` is expected; for all but the identity, ``w >= 0``.
    """
    if phi.name in ("identity", "abs"):
        return reg.inverse(w.expand(torch.broadcast_shapes(w.shape, s.shape)))
    assert isinstance(reg, PNorm)
    if phi.name == "half_square":
        return _half_square_response(s, w, lam, reg)
    return _exp_response(s, w, lam, reg)


def _half_square_response(s: Tensor, w: Tensor, lam: Tensor, reg: PNorm) -> Tensor:
    """d >= 0 with d^(q-1) + lam w d = w s."""
    if reg.exponent == 1.0:
        return w * s / (1.0 + lam * w)
    d = _half_square_root((lam * w).detach(), (w * s).detach(), reg.exponent)
    slope = reg.slope(d) + (lam * w).detach()
    return d + implicit(lambda d: reg.response(d) + lam * w * d - w * s, d, slope)


def _half_square_root(slope: Tensor, target: Tensor, e: float) -> Tensor:
    """d >= 0 with d^e + slope d = target >= 0."""
    if e == 2.0:
        half = slope / 2
        scale = half + torch.hypot(half, torch.sqrt(target))
        return target / torch.where(scale > 0, scale, 1.0)
    # In d for e > 1 and in d^e for e < 1 the left side is convex: Newton's method comes down from a
    # point above the root, at most twice as far from 0.
    if e < 1.0:
        return _above_root(torch.ones_like(slope), slope, target, 1.0 / e) ** (1.0 / e)
    return _above_root(slope, torch.ones_like(slope), target, e)


def _above_root(linear: Tensor, power: Tensor, target: Tensor, e: float) -> Tensor:
    """c >= 0 with linear c + power c^e = target, for e > 1."""
    largest = torch.finfo(target.dtype).max
    of_power = torch.where(power > 0, target / power, largest).clamp_max(largest) ** (1.0 / e)
    of_linear = torch.where(linear > 0, target / linear, largest)
    c = torch.minimum(of_power, of_linear)
    for _ in range(_NEWTON):
        value = (power * c**e - target) + linear * c
        slope = e * power * c ** (e - 1.0) + linear
        step = torch.where(slope > 0, value / slope, 0.0)
        c = (c - torch.where(step > 0, step, 0.0)).clamp_min(0.0)
    return c


def _exp_response(s: Tensor, w: Tensor, lam: Tensor, reg: PNorm) -> Tensor:
    """d >= 0 with d^(q-1) = w exp(s - lam d - 1); 0 where w = 0.

    Solved for the logarithm of d, e log d + lam d = log w + s - 1, where nothing overflows.
    """
    e = reg.exponent
    w, s, lam = torch.broadcast_tensors(w, s, lam)
    target = torch.log(torch.where(w > 0, w, 1.0)) + s - 1.0
    log_d = _exp_root(target.detach(), lam.detach(), e)
    slope = e + lam.detach() * torch.exp(log_d)
    move = implicit(lambda log_d: e * log_d + lam * torch.exp(log_d) - target, log_d, slope)
    return torch.where(w > 0, torch.exp(log_d + move), 0.0)


def _exp_root(target: Tensor, lam: Tensor, e: float) -> Tensor:
    """z with e z + lam exp(z) = target.

    Shifted by log(lam/e), it is log w with log w + w = h: the left side is convex in log w, and
    Newton's method starts close above the root.
    """
    shift = torch.log(lam / e)
    h = target / e + shift
    z = torch.where(h > 1.0, torch.log(h.clamp_min(1.0)), h)
    for _ in range(_NEWTON):
        w = torch.exp(z)
        z = z - (z + w - h) / (1.0 + w)
    return z - shift
