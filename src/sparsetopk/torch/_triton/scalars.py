# mypy: ignore-errors
"""The scalar functions of the operators, on tiles in registers: as ``_maths/scalars.py`` and
csrc/kinds.hpp have them, of which this is a third writing."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from ..._maths import operator

MASK = tl.constexpr(operator.MASK)
MAGNITUDE = tl.constexpr(operator.MAGNITUDE)
SIGN = tl.constexpr(operator.SIGN)
TWO_SIDED = tl.constexpr(operator.TWO_SIDED)

_NEWTON = tl.constexpr(12)  # steps of Newton's method from the convex side of a root


@triton.constexpr_function
def is_even(op):
    """Whether the operator acts on |x|."""
    return op in (operator.MAGNITUDE, operator.SIGN)


@triton.constexpr_function
def zero_of(op):
    """The t at which an entry starts to be selected."""
    return -1.0 if op == operator.TWO_SIDED else 0.0


@triton.constexpr_function
def is_steep(op, e):
    """Whether S is as steep as it likes where it leaves 0, as for p > 2."""
    return e < 1.0 and op != operator.TWO_SIDED


@triton.constexpr_function
def is_cheap(op, e):
    """Whether S has a closed form."""
    return op != operator.TWO_SIDED or e in (1.0, 2.0, 3.0)


@triton.constexpr_function
def epsilon(dtype):
    return 2.0**-52 if dtype == tl.float64 else 2.0**-23


@triton.constexpr_function
def tiny(dtype):
    """The smallest normal number."""
    return 2.0**-1022 if dtype == tl.float64 else 2.0**-126


@triton.constexpr_function
def largest(dtype):
    """The largest finite number."""
    if dtype == tl.float64:
        return (2.0 - 2.0**-52) * 2.0**1023
    if dtype == tl.float16:
        return 65504.0
    bits = 7 if dtype == tl.bfloat16 else 23
    return (2.0 - 2.0**-bits) * 2.0**127


@triton.constexpr_function
def least(dtype):
    """Slopes that are unbounded at 0 are taken here for all arguments that are nearer to it."""
    return 1e-140 if dtype == tl.float64 else 1e-18


@triton.constexpr_function
def slope_at_zero(e, dtype):
    """For e < 1."""
    return e * (1e-140 if dtype == tl.float64 else 1e-18) ** (e - 1.0)


@triton.constexpr_function
def raised(base, e):
    return math.pow(base, e)


@triton.constexpr_function
def whole_part(e):
    return math.floor(e)


@triton.constexpr_function
def digits_of(whole):
    return whole.bit_length()


@triton.jit
def power(t, E: tl.constexpr):
    """t^e for t >= 0: the whole part of e by products, the rest by a root or a logarithm.

    A product of rounded products never decreases with t. exp2(e log2 t) is off by e |log2 t| roundings,
    and so puts neighbours out of order: for e = 5 by 3e-6 in float32.
    """
    WHOLE: tl.constexpr = whole_part(E)
    REST: tl.constexpr = E - WHOLE
    y = t
    if WHOLE == 0:
        y = tl.full(t.shape, 1.0, t.dtype)
    else:
        for i in tl.static_range(digits_of(WHOLE) - 2, -1, -1):
            y = y * y
            if (WHOLE >> i) & 1 == 1:
                y = y * t
    if REST == 0.5:
        y = y * tl.sqrt(t)
    elif REST > 0.0:
        root = tl.exp2(REST * tl.log2(tl.maximum(t, tiny(t.dtype))))
        y = tl.where(t > 0, y * root, 0.0)
    if E > 1.0:
        y = tl.minimum(y, largest(t.dtype))
    return y


@triton.jit
def power_slope(t, y, E: tl.constexpr):
    """e t^(e-1) for t >= 0 and y = t^e, finite."""
    if E == 1.0:
        slope = tl.full(t.shape, 1.0, t.dtype)
    elif E == 2.0:
        slope = 2.0 * t
    elif E == 3.0:
        slope = 3.0 * t * t
    elif E > 1.0:  # what y is made of, but for a product: a division would take more registers
        slope = tl.minimum(E * power(t, E - 1.0), largest(t.dtype))
    else:
        flat = t < least(t.dtype)
        at_zero = tl.full(t.shape, slope_at_zero(E, t.dtype), t.dtype)
        slope = tl.where(flat, at_zero, E * (y / tl.where(flat, 1.0, t)))
    return slope


@triton.jit
def cube_root(u):
    """For u > 0, with one step of Newton's method after what the hardware has."""
    c = tl.exp2(tl.log2(u) * (1.0 / 3.0))
    return c - (c - u / (c * c)) * (1.0 / 3.0)


@triton.jit
def one(i):
    """1, which a compiler does not know. What is multiplied by it is computed in every step i of a loop:
    what does not change is computed before, and then held in registers beside what it is made of."""
    return 1.0 - i * 1e-30


@triton.jit
def _lower_root(t, E: tl.constexpr):
    """y in [0, 1/2] with y^(p-1) - (1-y)^(p-1) = -|t|, where |t| < 1: see TwoSidedPNorm._root; and
    y^(p-1), which is what is searched for."""
    P: tl.constexpr = 1.0 / E  # p - 1
    c = tl.full(t.shape, raised(0.5, P), t.dtype)
    for i in range(_NEWTON):
        size = tl.minimum(tl.abs(t * one(i)), 1.0)
        root = power(c, E)
        rest = 1.0 - root
        other = power(rest, P)
        if P < 1.0:  # the slope 1 + (root/rest)^(2-p) in what is there already, with one division
            step = (c - other + size) * rest / (rest + power(c, E - 1.0) * other)
            c = tl.minimum(tl.maximum(c - step, 0.0), raised(0.5, P))
        else:
            ratio = power(rest / tl.maximum(root, tiny(t.dtype)), P - 1.0)
            c = tl.minimum(tl.maximum(c - (c - other - size) / (1.0 + ratio), 0.0), 1.0)
    c = tl.where(tl.abs(t) >= 1.0, 0.0 if P < 1.0 else 1.0, c)
    y = power(c, E)
    return y if P < 1.0 else 1.0 - y, c


@triton.jit
def _lower_half(t, E: tl.constexpr):
    """S(-|t|) and S'(t) of the two-sided response; csrc/kinds.hpp has the closed forms."""
    if E == 1.0 or E == 2.0 or E == 3.0:
        t = -tl.minimum(tl.abs(t), 1.0)
    if E == 1.0:
        y = (1.0 + t) * 0.5
        slope = tl.full(t.shape, 0.5, t.dtype)
    elif E == 2.0:
        root = tl.sqrt(2.0 - t * t)
        rest = (1.0 - t) * (1.0 + t)
        other = 1.0 - t * root
        scale = rest / (root * other)
        y = 0.5 * rest * root * scale
        slope = other * scale
    elif E == 3.0:
        s = t * t
        u = cube_root(2.0 + tl.sqrt(4.0 + s * s * s))
        m = u - s / u
        a = 2.0 * (1.0 + t) * (1.0 - t + s) / (m * m - m * t + 4.0 * s)
        b = (m - t) * 0.5
        y = a * a * a
        slope = 3.0 * a * a * b * b / (a * a + b * b)
    else:
        y, c = _lower_root(t, E)
        F: tl.constexpr = 1.0 - 1.0 / E  # 2 - p
        if F > 0.0:
            low = power(c, E - 1.0)
            high = power(1.0 - y, F)
            slope = low * high * E / (low + high)
        else:
            at = tl.maximum(y, least(t.dtype))
            slope = E / (power(1.0 - at, -F) + power(at, -F))
    return y, slope


@triton.jit
def respond(t, OP: tl.constexpr, E: tl.constexpr):
    """S(t) and S'(t), for any t that is not below ``zero_of``; of masks for t < 1, and S = 1 above."""
    if OP == TWO_SIDED:
        y, slope = _lower_half(t, E)
        y = tl.where(t > 0, 1.0 - y, y)
    else:
        if OP == MAGNITUDE:
            at = tl.minimum(tl.maximum(t, 0.0), largest(t.dtype))
        else:
            at = tl.minimum(tl.maximum(t, 0.0), 1.0)
        y = power(at, E)
        slope = power_slope(at, y, E)
    return y, slope


@triton.jit
def _alone_by_newton(a, lam, E: tl.constexpr):
    """d >= 0 with d^e + lam d = max(a, 0); in d for e > 1, in d^e for e < 1, from above the root."""
    F: tl.constexpr = E if E > 1.0 else 1.0 / E
    target = tl.maximum(a, 0.0)
    of_linear = target / lam if E > 1.0 else target
    of_power = power(target if E > 1.0 else tl.minimum(target / lam, largest(a.dtype)), 1.0 / F)
    c = tl.minimum(of_power, of_linear)
    for i in range(_NEWTON):
        target = tl.maximum(a * one(i), 0.0)
        raised_c = power(c, F)
        if E > 1.0:
            value = (raised_c - target) + lam * c
            slope = power_slope(c, raised_c, F) + lam
        else:
            value = (lam * raised_c - target) + c
            slope = lam * power_slope(c, raised_c, F) + 1.0
        c = tl.maximum(c - tl.maximum(value / slope, 0.0), 0.0)
    return c if E > 1.0 else power(c, F)


@triton.jit
def alone(a, lam, OP: tl.constexpr, E: tl.constexpr):
    """The t of an entry a that is selected whole and shares its threshold with no other; a < 0, and NaN,
    are taken for 0."""
    if OP != MAGNITUDE:
        d = tl.full(a.shape, 1.0, a.dtype)
    elif E == 1.0:
        d = tl.maximum(a, 0.0) / (1.0 + lam)
    elif E == 2.0:
        a = tl.maximum(a, 0.0)
        half = 0.5 * lam
        root = tl.sqrt(a)
        long = tl.maximum(tl.maximum(half, root), tiny(a.dtype))
        short = tl.minimum(half, root) / long
        d = a / (half + long * tl.sqrt(1.0 + short * short))
    else:
        d = _alone_by_newton(a, lam, E)
    return d


@triton.jit
def key(x):
    """Integers in the order of the floats."""
    if x.dtype == tl.float64:
        bits = x.to(tl.int64, bitcast=True)
        bits = tl.where(bits < 0, bits ^ 0x7FFFFFFFFFFFFFFF, bits)
    else:
        bits = x.to(tl.int32, bitcast=True)
        bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(bits == -1, 0, bits)  # -0 is 0


@triton.jit
def from_key(bits):
    if bits.dtype == tl.int64:
        x = tl.where(bits < 0, bits ^ 0x7FFFFFFFFFFFFFFF, bits).to(tl.float64, bitcast=True)
    else:
        x = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)
    return x


@triton.jit
def between(lo, hi):
    """The float in the middle of two as floats are counted, and whether there is none between."""
    low, high = key(lo), key(hi)
    middle = (low >> 1) + (high >> 1) + (low & high & 1)
    return from_key(middle), (middle <= low) | (high <= low)


@triton.jit
def next_float(x, by: tl.constexpr):
    """The finite float after x, or (-1) before it. The key is kept finite: after infinity comes NaN."""
    most = tl.full(x.shape, largest(x.dtype), x.dtype)
    return from_key(tl.minimum(tl.maximum(key(x) + by, key(-most)), key(most)))


@triton.jit
def normal_quantile(share):
    """z that a standard normal variable exceeds with this probability, to 5e-4 (Hastings, 1955)."""
    upper = share > 0.5
    tail = tl.maximum(tl.where(upper, 1.0 - share, share), 1e-30)
    t = tl.sqrt(-1.3862943611198906 * tl.log2(tail))
    top = 2.515517 + t * (0.802853 + t * 0.010328)
    z = t - top / (1.0 + t * (1.432788 + t * (0.189269 + t * 0.001308)))
    return tl.where(upper, -z, z)
