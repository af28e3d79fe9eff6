"""The scalar functions of the operators: the response S of a regulariser R, phi, and what T follows.

With R(y) = lam sum_i r(y_i) and ``t`` in units of ``lam``, the response ``S(t) = (r*)'(t)`` maps the
distance of an entry to its threshold to the entry's output: ``y_i = S((x_i - u_i) / lam)``
(Proposition 2 of the paper).

Where a function is the root of an equation, or steep, its derivative is a rule of its own, written with
the function itself: so there are derivatives of every order where the framework has them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

Array = Any
PhiName = Literal["identity", "half_square", "abs", "exp"]

# Iterations of Newton's method from the convex side of a root, from where it cannot leave; 8 to 10
# are enough wherever it is used.
_NEWTON = 12
# And these of the two-sided response, from where it starts: three in float32, five in float64.
_STEPS = 6


def smallest(xp: Any, x: Array) -> float:
    """A number whose inverse, and the square of that, are finite in the dtype of a computation.

    Slopes that are unbounded at 0 (p > 2) are taken here for all arguments that are nearer to it.
    """
    return 1e-140 if xp.finfo(x.dtype).bits == 64 else 1e-18


def inverse(xp: Any, x: Array) -> Array:
    """1/x, whose derivative has no need of 1/x^2, which may be infinite."""

    def slope(y: Array, _: Any, tangents: Any) -> Array:
        return -(y * tangents[0]) * y

    return xp.with_derivative(lambda x: 1.0 / x, slope)(x)


def _newton(xp: Any, step: Any, start: Array) -> Array:
    return xp.repeat(_NEWTON, lambda _, c: step(c), start)


def _size_power(xp: Any, t: Array, e: float) -> Array:
    """|t|^e, by products where that is possible: a power is slow."""
    size = xp.abs(t)
    if e == 1.0:
        return size
    if e == 2.0:
        return t * t
    if e == 3.0:
        return size * t * t
    if e == 0.5:
        return xp.sqrt(size)
    return size**e


def _power(xp: Any, t: Array, e: float) -> Array:
    """sign(t) |t|^e."""
    if e == 1.0:
        return t
    if e == 2.0:
        return t * xp.abs(t)
    if e == 3.0:
        return t * t * t
    value = lambda t: xp.sign(t) * _size_power(xp, t, e)  # noqa: E731
    slope = lambda _, at, moved: _power_slope(xp, at[0], e) * moved[0]  # noqa: E731
    return xp.with_derivative(value, slope)(t)


def _power_slope(xp: Any, t: Array, e: float) -> Array:
    """e |t|^(e-1), finite; what is at 0, where it may have a kink, is a constant."""
    if e == 1.0:
        return xp.ones_like(t)
    least = smallest(xp, t)
    flat = xp.abs(t) < least
    at_zero = 0.0 if e > 1.0 else e * least ** (e - 1.0)
    return xp.where(flat, at_zero, e * _size_power(xp, xp.where(flat, 1.0, t), e - 1.0))


@dataclass(frozen=True)
class PNorm:
    """``r(y) = |y|^p / p``, whose response is ``S(t) = sign(t) |t|^(q-1)`` with 1/p + 1/q = 1."""

    xp: Any
    exponent: float  # q - 1

    #: S(t) for t at or below this is no longer selected: ``response(zero) == 0``.
    zero = 0.0

    @property
    def p(self) -> float:
        return 1.0 + 1.0 / self.exponent

    def response(self, t: Array) -> Array:
        """S(t)."""
        return _power(self.xp, t, self.exponent)

    def slope(self, t: Array) -> Array:
        """S'(t)."""
        return _power_slope(self.xp, t, self.exponent)

    def response_and_slope(self, t: Array) -> tuple[Array, Array]:
        return self.response(t), self.slope(t)

    def inverse(self, y: Array) -> Array:
        """``S^-1(y) = r'(y) = sign(y) |y|^(p-1)``."""
        return _power(self.xp, y, 1.0 / self.exponent)

    def penalty(self, y: Array) -> Array:
        """r(y)."""
        return _size_power(self.xp, y, self.p) / self.p

    def conjugate(self, t: Array) -> Array:
        """``r*(t) = |t|^q / q``."""
        return _size_power(self.xp, t, self.exponent + 1.0) / (self.exponent + 1.0)


@dataclass(frozen=True)
class TwoSidedPNorm:
    """``r(y) = (|y|^p + |1 - y|^p) / p`` on [0, 1], whose response is flat at both ends of [-1, 1].

    S^-1(y) = y^(p-1) - (1-y)^(p-1). For 1 < p < 2 the slope of S is continuous on the whole line,
    which is what makes the two-sided mask differentiable everywhere.
    """

    xp: Any
    exponent: float  # 1/(p - 1), here too
    zero = -1.0

    @property
    def p(self) -> float:
        return 1.0 + 1.0 / self.exponent

    def response(self, t: Array) -> Array:
        """S(t): 0 for t <= -1, 1 for t >= 1."""
        if self.exponent == 1.0:
            return (1.0 + self.xp.clip(t, -1.0, 1.0)) / 2
        still = replace(self, xp=self.xp.still)
        slope = lambda _, at, moved: still.slope(at[0]) * moved[0]  # noqa: E731
        return self.xp.with_derivative(lambda t: self._mirrored(t, self._smaller(t)), slope)(t)

    def slope(self, t: Array) -> Array:
        """S'(t) = 1 / r''(S(t)); 0 outside [-1, 1]."""
        return self._slope_at(t, self.response(-self.xp.abs(t)))

    def response_and_slope(self, t: Array) -> tuple[Array, Array]:
        y = self._smaller(t)
        return self._mirrored(t, y), self._slope_at(t, y)

    def inverse(self, y: Array) -> Array:
        """S^-1(y) = r'(y)."""
        return y ** (self.p - 1.0) - (1.0 - y) ** (self.p - 1.0)

    def penalty(self, y: Array) -> Array:
        """r(y)."""
        xp = self.xp
        return (xp.abs(y) ** self.p + xp.abs(1.0 - y) ** self.p) / self.p

    def _mirrored(self, t: Array, y: Array) -> Array:
        return self.xp.where(t > 0, 1.0 - y, y)

    def _smaller(self, t: Array) -> Array:
        """The smaller of S(t) and 1 - S(t), which keeps its relative precision."""
        return self._lower_half(-self.xp.clip(self.xp.abs(t), 0.0, 1.0))

    def _slope_at(self, t: Array, y: Array) -> Array:
        """S'(t), given the smaller of S(t) and 1 - S(t)."""
        xp, e = self.xp, 2.0 - self.p
        # For p < 2 the slope is as small as y^e there, and only its own slope is unbounded.
        y = xp.clip(y, smallest(xp, t) ** (2 if e > 0 else 1), 1.0)
        # y^-e + (1-y)^-e, with no number that could overflow
        low, high = (y**e, (1.0 - y) ** e) if e > 0 else ((1.0 - y) ** -e, y**-e)
        slope = (low * high if e > 0 else 1.0) / ((self.p - 1.0) * (low + high))
        return xp.where(xp.abs(t) < 1.0, slope, 0.0)

    def _lower_half(self, t: Array) -> Array:
        """S(t) for t in [-1, 0]."""
        xp = self.xp
        if self.exponent == 1.0:
            return (1.0 + t) / 2
        if self.exponent == 2.0:
            # (1 + t sqrt(2 - t^2)) / 2, with 1 - t^2 (2 - t^2) = (1 - t^2)^2 taken out.
            return 0.5 * ((1.0 - t) * (1.0 + t)) ** 2 / (1.0 - t * xp.sqrt(2.0 - t * t))
        if self.exponent == 3.0:
            # m = y^(1/3) + (1-y)^(1/3) solves m^3 + 3 t^2 m = 4; then y = ((m + t)/2)^3. For t < 0 the
            # sum cancels: m^3 + 3 t^2 m - 4 = (m + t)(...) - 4 (1 + t^3) gives m + t without it.
            u = (2.0 + xp.sqrt(4.0 + t**6)) ** (1 / 3)
            m = u - t * t / u
            total = 4.0 * (1.0 + t) * (1.0 - t + t * t) / (m * m - m * t + 4.0 * t * t)
            return (total / 2) ** 3
        return xp.where(t <= -1.0, 0.0, self._root(t))

    def _root(self, t: Array) -> Array:
        """y in [0, 1/2] with y^(p-1) - (1-y)^(p-1) = t, by Newton's method from its convex side.

        In the smaller power of the two, c = y^(p-1) for p < 2 and c = (1-y)^(p-1) for p > 2, the slope
        is monotone, and between 1 and 2 up to its sign.
        """
        xp, e = self.xp, self.p - 1.0

        def step(c: Array) -> Array:
            root = c**self.exponent
            ratio = (root / (1.0 - root)) ** (1.0 - e)
            value = c - (1.0 - root) ** e + (-t if e < 1.0 else t)
            return xp.clip(c - value / (1.0 + ratio), 0.0, 0.5**e if e < 1.0 else 1.0)

        # On that side are 1 + t and |t| too, which are close where y is next to 0.
        start = xp.clip(1.0 + t, None, 0.5**e) if e < 1.0 else xp.clip(-t, 0.5**e, None)
        y = xp.repeat(_STEPS, lambda _, c: step(c), start) ** self.exponent
        return y if e < 1.0 else 1.0 - y


Regularizer = PNorm | TwoSidedPNorm


@dataclass(frozen=True)
class Phi:
    """phi of the framework f_phi(x, w) = max_{z in P(w)} <phi(x), z>.

    The identity gives masks, sorting and ranking; "half_square" x^2/2, top-k in magnitude; "abs" |x|,
    signed masks; "exp" exp(x-1), the k-support negentropy.
    """

    xp: Any
    name: PhiName

    @property
    def even(self) -> bool:
        """phi(x) = phi(-x): the operator acts on |x| and gives the sign back."""
        return self.name in ("half_square", "abs")

    @property
    def straight(self) -> bool:
        """Whether phi' = 1 (for u > 0): an entry that stands alone has y = w."""
        return self.name in ("identity", "abs")

    def value(self, u: Array) -> Array:
        """phi(u)."""
        if self.name == "half_square":
            return u * u / 2
        if self.name == "exp":
            return self.xp.exp(u - 1.0)
        return u if self.name == "identity" else self.xp.abs(u)

    def prime(self, u: Array) -> Array:
        """phi'(u), for u >= 0 where phi is even; finite."""
        if self.straight:
            return self.xp.ones_like(u)
        return u if self.name == "half_square" else self._finite_exp(u)

    def curvature(self, u: Array, w: Array) -> Array:
        """w phi''(u). Entries that are held at the kink of |.| are pinned, which is not in here."""
        if self.straight:
            return self.xp.zeros_like(u)
        return w + 0.0 * u if self.name == "half_square" else w * self._finite_exp(u)

    def conjugate(self, y: Array) -> Array:
        """phi*(y) for y >= 0, of x^2/2 and exp(x-1)."""
        if self.name == "half_square":
            return y * y / 2
        tiny = float(self.xp.finfo(y.dtype).tiny)  # so the slope of y log(y) at 0 is finite
        return y * self.xp.log(self.xp.clip(y, tiny, None))

    def _finite_exp(self, u: Array) -> Array:
        # Near the largest float; beyond it only the sign of a residual matters to a solver.
        most = 709.7 if self.xp.finfo(u.dtype).bits == 64 else 88.7
        return self.xp.exp(self.xp.clip(u - 1.0, None, most))


def lone_response(s: Array, w: Array, lam: Array, reg: Regularizer, phi: Phi) -> Array:
    """d = (s - u)/lam for an entry that shares its threshold with no other.

    u minimises R*(s - u) + w phi(u) on the real line, that is S(d) = w phi'(s - lam d). For even
    phi, ``s >= 0`` is expected; for all but the identity, ``w >= 0``.
    """
    s, w, lam = reg.xp.broadcast_arrays(s, w, lam)
    if phi.straight:
        return reg.inverse(w)
    assert isinstance(reg, PNorm)
    if phi.name == "exp":
        return _exp_response(s, w, lam, reg)
    if reg.exponent == 1.0:
        return w * s / (1.0 + lam * w)
    return _half_square_response(s, w, lam, reg)


def _half_square_response(s: Array, w: Array, lam: Array, reg: PNorm) -> Array:
    """d >= 0 with d^(q-1) + lam w d = w s."""
    xp = reg.xp

    def value(s: Array, w: Array, lam: Array) -> Array:
        return _half_square_root(xp, lam * w, w * s, reg.exponent)

    def derivative(d: Array, at: Any, moved: Any) -> Array:
        s, w, lam = at
        ds, dw, dlam = moved
        slope = reg.slope(d) + lam * w
        move = w * ds + (s - lam * d) * dw - w * d * dlam
        return xp.where(slope > 0, move / xp.where(slope > 0, slope, 1.0), 0.0)

    return xp.with_derivative(value, derivative)(s, w, lam)


def _half_square_root(xp: Any, slope: Array, target: Array, e: float) -> Array:
    """d >= 0 with d^e + slope d = target >= 0."""
    if e == 2.0:
        half = slope / 2
        scale = half + xp.hypot(half, xp.sqrt(target))
        return target / xp.where(scale > 0, scale, 1.0)
    # In d for e > 1 and in d^e for e < 1 the left side is convex: Newton's method comes down from a
    # point above the root, at most twice as far from 0.
    if e < 1.0:
        return _above_root(xp, xp.ones_like(slope), slope, target, 1.0 / e) ** (1.0 / e)
    return _above_root(xp, slope, xp.ones_like(slope), target, e)


def _above_root(xp: Any, linear: Array, power: Array, target: Array, e: float) -> Array:
    """c >= 0 with linear c + power c^e = target, for e > 1."""
    limit = float(xp.finfo(target.dtype).max)
    of_power = xp.where(power > 0, target / xp.where(power > 0, power, 1.0), limit)
    of_linear = xp.where(linear > 0, target / xp.where(linear > 0, linear, 1.0), limit)

    def step(c: Array) -> Array:
        value = (power * _size_power(xp, c, e) - target) + linear * c
        slope = e * power * _size_power(xp, c, e - 1.0) + linear
        move = xp.where(slope > 0, value / xp.where(slope > 0, slope, 1.0), 0.0)
        return xp.clip(c - xp.where(move > 0, move, 0.0), 0.0, None)

    return _newton(xp, step, xp.minimum(xp.clip(of_power, None, limit) ** (1.0 / e), of_linear))


def _exp_response(s: Array, w: Array, lam: Array, reg: PNorm) -> Array:
    """d >= 0 with d^(q-1) = w exp(s - lam d - 1); 0 where w = 0.

    Solved for the logarithm of d, e log d + lam d = log w + s - 1, where nothing overflows.
    """
    xp, e = reg.xp, reg.exponent

    def value(s: Array, w: Array, lam: Array) -> Array:
        target = xp.log(xp.where(w > 0, w, 1.0)) + s - 1.0
        return xp.where(w > 0, xp.exp(_exp_root(xp, target, lam, e)), 0.0)

    def derivative(d: Array, at: Any, moved: Any) -> Array:
        _, w, lam = at
        ds, dw, dlam = moved
        relative = dw / xp.where(w > 0, w, 1.0) + ds - d * dlam
        return xp.where(w > 0, d * relative / (e + lam * d), 0.0)

    return xp.with_derivative(value, derivative)(s, w, lam)


def _exp_root(xp: Any, target: Array, lam: Array, e: float) -> Array:
    """z with e z + lam exp(z) = target.

    Shifted by log(lam/e), it is log w with log w + w = h: the left side is convex in log w, and
    Newton's method starts close above the root.
    """
    shift = xp.log(lam / e)
    h = target / e + shift

    def step(z: Array) -> Array:
        w = xp.exp(z)
        return z - (z + w - h) / (1.0 + w)

    start = xp.where(h > 1.0, xp.log(xp.clip(h, 1.0, None)), h)
    return _newton(xp, step, start) - shift
