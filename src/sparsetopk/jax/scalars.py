"""The scalar functions of the operators in XLA operations: what regularizers.py and phis.py have.

Where a function is the root of an equation, or steep, its derivative is a rule of its own, written with
the function itself: so there are derivatives of every order, forward and reverse.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .._types import PhiName

# Iterations of Newton's method from the convex side of a root, from where it cannot leave; 8 to 10
# are enough wherever it is used.
_NEWTON = 12


def smallest(dtype: Any) -> float:
    """A number whose inverse, and the square of that, are finite in the dtype of a computation.

    Slopes that are unbounded at 0 (p > 2) are taken here for all arguments that are nearer to it.
    """
    return 1e-140 if dtype == jnp.float64 else 1e-18


@jax.custom_jvp
def unsigned_zero(y: Array) -> Array:
    """y with 0 for -0; an entry that is 0 moves like any other (``y + 0.0`` XLA would leave out)."""
    return jnp.where(y == 0, 0.0, y)


@unsigned_zero.defjvp
def _unsigned_zero_jvp(at: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return unsigned_zero(at[0]), tangents[0]


def _newton(step: Callable[[Array], Array], start: Array) -> Array:
    return jax.lax.fori_loop(0, _NEWTON, lambda _, c: step(c), start)


def _size_power(t: Array, e: float) -> Array:
    """|t|^e, by products where that is possible: XLA's power is slow."""
    size = jnp.abs(t)
    if e == 1.0:
        return size
    if e == 2.0:
        return t * t
    if e == 3.0:
        return size * t * t
    if e == 0.5:
        return jnp.sqrt(size)
    return size**e


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _power(t: Array, e: float) -> Array:
    """sign(t) |t|^e."""
    if e == 1.0:
        return t
    if e == 2.0:
        return t * jnp.abs(t)
    if e == 3.0:
        return t * t * t
    return jnp.sign(t) * _size_power(t, e)


@_power.defjvp
def _power_jvp(e: float, at: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return _power(at[0], e), _power_slope(at[0], e) * tangents[0]


def _power_slope(t: Array, e: float) -> Array:
    """e |t|^(e-1), finite."""
    if e == 1.0:
        return jnp.ones_like(t)
    if e < 1.0:
        t = jnp.maximum(jnp.abs(t), smallest(t.dtype))
    return e * _size_power(t, e - 1.0)


@dataclass(frozen=True)
class PNorm:
    """r(y) = |y|^p / p, whose response is S(t) = sign(t) |t|^(q-1); ``exponent`` is q - 1."""

    exponent: float
    zero = 0.0

    @property
    def p(self) -> float:
        return 1.0 + 1.0 / self.exponent

    def response(self, t: Array) -> Array:
        """S(t)."""
        return _power(t, self.exponent)

    def slope(self, t: Array) -> Array:
        """S'(t)."""
        return _power_slope(t, self.exponent)

    def response_and_slope(self, t: Array) -> tuple[Array, Array]:
        return self.response(t), self.slope(t)

    def inverse(self, y: Array) -> Array:
        """S^-1(y) = r'(y)."""
        return _power(y, 1.0 / self.exponent)

    def penalty(self, y: Array) -> Array:
        """r(y)."""
        return y * self.inverse(y) / self.p

    def conjugate(self, t: Array) -> Array:
        """r*(t) = |t|^q / q."""
        return t * self.response(t) / (self.exponent + 1.0)


@dataclass(frozen=True)
class TwoSidedPNorm:
    """r(y) = (|y|^p + |1 - y|^p) / p on [0, 1]; ``exponent`` is 1 / (p - 1) here too."""

    exponent: float
    zero = -1.0

    @property
    def p(self) -> float:
        return 1.0 + 1.0 / self.exponent

    def response(self, t: Array) -> Array:
        """S(t): 0 for t <= -1, 1 for t >= 1."""
        return _two_sided(t, self)

    def slope(self, t: Array) -> Array:
        """S'(t) = 1 / r''(S(t)); 0 outside [-1, 1]."""
        return self._slope_at(t, self.response(-jnp.abs(t)))

    def response_and_slope(self, t: Array) -> tuple[Array, Array]:
        y = self.smaller(t)
        return jnp.where(t > 0, 1.0 - y, y), self._slope_at(t, y)

    def smaller(self, t: Array) -> Array:
        """The smaller of S(t) and 1 - S(t), which keeps its relative precision."""
        return self._lower_half(-jnp.minimum(jnp.abs(t), 1.0))

    def _slope_at(self, t: Array, y: Array) -> Array:
        """S'(t), given the smaller of S(t) and 1 - S(t)."""
        y = jnp.maximum(y, smallest(t.dtype))
        e = 2.0 - self.p  # y^-e + (1-y)^-e, with no number that could overflow
        low, high = (y**e, (1.0 - y) ** e) if e > 0 else ((1.0 - y) ** -e, y**-e)
        slope = (low * high if e > 0 else 1.0) / ((self.p - 1.0) * (low + high))
        return jnp.where(jnp.abs(t) < 1.0, slope, 0.0)

    def _lower_half(self, t: Array) -> Array:
        """S(t) for t in [-1, 0]; regularizers.py says where the closed forms come from."""
        if self.exponent == 1.0:
            return (1.0 + t) / 2
        if self.exponent == 2.0:
            return 0.5 * ((1.0 - t) * (1.0 + t)) ** 2 / (1.0 - t * jnp.sqrt(2.0 - t * t))
        if self.exponent == 3.0:
            u = jnp.cbrt(2.0 + jnp.sqrt(4.0 + t**6))
            m = u - t * t / u
            total = 4.0 * (1.0 + t) * (1.0 - t + t * t) / (m * m - m * t + 4.0 * t * t)
            return (total / 2) ** 3
        return jnp.where(t <= -1.0, 0.0, self._root(t))

    def _root(self, t: Array) -> Array:
        """y in [0, 1/2] with y^(p-1) - (1-y)^(p-1) = t, by Newton's method from its convex side.

        In the smaller power of the two, c = y^(p-1) for p < 2 and c = (1-y)^(p-1) for p > 2, the slope
        is monotone, and between 1 and 2 up to its sign.
        """
        e = self.p - 1.0

        def step(c: Array) -> Array:
            root = c**self.exponent
            ratio = (root / (1.0 - root)) ** (1.0 - e)
            value = c - (1.0 - root) ** e + (-t if e < 1.0 else t)
            return jnp.clip(c - value / (1.0 + ratio), 0.0, 0.5**e if e < 1.0 else 1.0)

        y = _newton(step, jnp.full_like(t, 0.5**e)) ** self.exponent
        return y if e < 1.0 else 1.0 - y

    def inverse(self, y: Array) -> Array:
        """S^-1(y) = r'(y)."""
        return y ** (self.p - 1.0) - (1.0 - y) ** (self.p - 1.0)

    def penalty(self, y: Array) -> Array:
        """r(y)."""
        return (jnp.abs(y) ** self.p + jnp.abs(1.0 - y) ** self.p) / self.p


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _two_sided(t: Array, reg: TwoSidedPNorm) -> Array:
    y = reg.smaller(t)
    return jnp.where(t > 0, 1.0 - y, y)


@_two_sided.defjvp
def _two_sided_jvp(
    reg: TwoSidedPNorm, at: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
    return reg.response(at[0]), reg.slope(at[0]) * tangents[0]


Regularizer = PNorm | TwoSidedPNorm


@dataclass(frozen=True)
class Phi:
    """phi(u), phi'(u) and w phi''(u), for u >= 0 where phi is even."""

    name: PhiName
    even: bool
    value: Callable[[Array], Array]
    prime: Callable[[Array], Array]
    curvature: Callable[[Array, Array], Array]


def _finite_exp(u: Array) -> Array:
    return jnp.exp(jnp.minimum(u - 1.0, 709.7 if u.dtype == jnp.float64 else 88.7))


PHIS: dict[PhiName, Phi] = {
    "identity": Phi(
        "identity",
        False,
        value=lambda u: u,
        prime=jnp.ones_like,
        curvature=lambda u, w: jnp.zeros_like(u),
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
        value=jnp.abs,
        prime=jnp.ones_like,
        curvature=lambda u, w: jnp.zeros_like(u),
    ),
    "exp": Phi(
        "exp",
        False,
        value=lambda u: jnp.exp(u - 1.0),
        prime=_finite_exp,
        curvature=lambda u, w: w * _finite_exp(u),
    ),
}


def lone_response(s: Array, w: Array, lam: Array, reg: Regularizer, phi: Phi) -> Array:
    """d = (s - u)/lam for an entry that shares its threshold with no other: S(d) = w phi'(s - lam d).

    For even phi, ``s >= 0`` is expected; for all but the identity, ``w >= 0``.
    """
    s, w, lam = jnp.broadcast_arrays(s, w, lam)
    if phi.name in ("identity", "abs"):
        return reg.inverse(w)
    assert isinstance(reg, PNorm)
    if phi.name == "half_square":
        return _half_square_response(s, w, lam, reg)
    return _exp_response(s, w, lam, reg)


@partial(jax.custom_jvp, nondiff_argnums=(3,))
def _half_square_response(s: Array, w: Array, lam: Array, reg: PNorm) -> Array:
    """d >= 0 with d^(q-1) + lam w d = w s."""
    e, slope, target = reg.exponent, lam * w, w * s
    if e == 1.0:
        return target / (1.0 + slope)
    if e == 2.0:
        half = slope / 2
        scale = half + jnp.hypot(half, jnp.sqrt(target))
        return target / jnp.where(scale > 0, scale, 1.0)
    # In d for e > 1 and in d^e for e < 1 the left side is convex: Newton's method comes down from a
    # point above the root, at most twice as far from 0.
    if e < 1.0:
        return _above_root(jnp.ones_like(slope), slope, target, 1.0 / e) ** (1.0 / e)
    return _above_root(slope, jnp.ones_like(slope), target, e)


@_half_square_response.defjvp
def _half_square_response_jvp(
    reg: PNorm, at: tuple[Array, ...], tangents: tuple[Array, ...]
) -> tuple[Array, Array]:
    s, w, lam = at
    ds, dw, dlam = tangents
    d = _half_square_response(s, w, lam, reg)
    slope = reg.slope(d) + lam * w
    move = w * ds + (s - lam * d) * dw - w * d * dlam
    return d, jnp.where(slope > 0, move / jnp.where(slope > 0, slope, 1.0), 0.0)


def _above_root(linear: Array, power: Array, target: Array, e: float) -> Array:
    """c >= 0 with linear c + power c^e = target, for e > 1."""
    largest = jnp.finfo(target.dtype).max
    of_power = jnp.where(power > 0, target / jnp.where(power > 0, power, 1.0), largest)
    of_linear = jnp.where(linear > 0, target / jnp.where(linear > 0, linear, 1.0), largest)

    def step(c: Array) -> Array:
        value = (power * _size_power(c, e) - target) + linear * c
        slope = e * power * _size_power(c, e - 1.0) + linear
        move = jnp.where(slope > 0, value / jnp.where(slope > 0, slope, 1.0), 0.0)
        return jnp.maximum(c - jnp.maximum(move, 0.0), 0.0)

    return _newton(step, jnp.minimum(jnp.minimum(of_power, largest) ** (1.0 / e), of_linear))


@partial(jax.custom_jvp, nondiff_argnums=(3,))
def _exp_response(s: Array, w: Array, lam: Array, reg: PNorm) -> Array:
    """d >= 0 with d^(q-1) = w exp(s - lam d - 1); 0 where w = 0.

    Solved for the logarithm of d, e log d + lam d = log w + s - 1, where nothing overflows.
    """
    target = jnp.log(jnp.where(w > 0, w, 1.0)) + s - 1.0
    return jnp.where(w > 0, jnp.exp(_exp_root(target, lam, reg.exponent)), 0.0)


@_exp_response.defjvp
def _exp_response_jvp(
    reg: PNorm, at: tuple[Array, ...], tangents: tuple[Array, ...]
) -> tuple[Array, Array]:
    s, w, lam = at
    ds, dw, dlam = tangents
    d = _exp_response(s, w, lam, reg)
    relative = dw / jnp.where(w > 0, w, 1.0) + ds - d * dlam
    return d, jnp.where(w > 0, d * relative / (reg.exponent + lam * d), 0.0)


def _exp_root(target: Array, lam: Array, e: float) -> Array:
    """z with e z + lam exp(z) = target.

    Shifted by log(lam/e), it is log w with log w + w = h: the left side is convex in log w, and
    Newton's method starts close above the root.
    """
    shift = jnp.log(lam / e)
    h = target / e + shift

    def step(z: Array) -> Array:
        w = jnp.exp(z)
        return z - (z + w - h) / (1.0 + w)

    return _newton(step, jnp.where(h > 1.0, jnp.log(jnp.maximum(h, 1.0)), h)) - shift
