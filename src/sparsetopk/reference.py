"""Definitions, slow and obvious, in float64: what every front-end and solver is tested against.

One row at a time, plain bisection, no closed form but the ones of the paper's text. Nothing here is
shared with the solvers: S comes from bisection on the derivative of R, isotonic solutions from the
min-max formula over all intervals, Jacobians of any function from central differences.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ._types import Array, Bools, PhiName

_BISECTIONS = 200


def _bisect(f: Callable[[Array], Array], lo: Array, hi: Array) -> Array:
    """Root of an increasing f, elementwise."""
    for _ in range(_BISECTIONS):
        middle = (lo + hi) / 2
        if np.all((middle <= lo) | (middle >= hi)):  # no float between them
            break
        below = f(middle) < 0
        lo, hi = np.where(below, middle, lo), np.where(below, hi, middle)
    return (lo + hi) / 2


def grad_R(y: Array, lam: float, p: float, two_sided: bool = False) -> Array:
    """The gradient of R(y) = (lam/p) sum |y_i|^p, two-sided with + (lam/p) sum |1 - y_i|^p."""
    gradient = lam * np.sign(y) * np.abs(y) ** (p - 1)
    return gradient - lam * np.abs(1 - y) ** (p - 1) if two_sided else gradient


def R(y: Array, lam: float, p: float, two_sided: bool = False) -> float:
    other = np.abs(1 - y) ** p if two_sided else 0.0
    return float(np.sum(np.abs(y) ** p + other) * lam / p)


def phi_value(u: Array, phi: PhiName) -> Array:
    values = {"identity": u, "half_square": u**2 / 2, "abs": np.abs(u), "exp": np.exp(u - 1)}
    return values[phi]


def phi_prime(u: Array, phi: PhiName) -> Array:
    """phi'(u), for u >= 0 where phi is even."""
    values = {"identity": 0 * u + 1, "half_square": u, "abs": 0 * u + 1, "exp": np.exp(u - 1)}
    return values[phi]


def ones_k(k: float, n: int) -> Array:
    """1_k: floor(k) ones, the fraction of k, zeros."""
    return np.clip(k - np.arange(n), 0.0, 1.0)


def lmo_value(x: Array, w: Array) -> float:
    """max_{y in P(w)} <x, y>, by sorting both (Proposition 1)."""
    return float(np.sort(x) @ np.sort(w))


def topk_mask(x: Array, k: float, lam: float, p: float = 2.0, two_sided: bool = False) -> Array:
    """y_i = S((x_i - tau)/lam) with sum_i y_i = k, both found by bisection; x finite, lam > 0."""

    def y_of(tau: float) -> Array:
        # y_i maximises (x_i - tau) y - r(y) on [0, 1]
        slope = lambda y: grad_R(y, lam, p, two_sided) - (x - tau)  # noqa: E731
        return _bisect(slope, np.zeros_like(x), np.ones_like(x))

    lo, hi = np.min(x) - 2 * lam, np.max(x) + 2 * lam
    tau = _bisect(lambda tau: np.array(k - y_of(float(tau)).sum()), np.array(lo), np.array(hi))
    return y_of(float(tau))


def isotonic(s: Array, w: Array, lam: float, p: float, phi: PhiName) -> Array:
    """argmin over v_1 >= ... >= v_n of sum_i R*(s_i - v_i) + w_i phi(v_i), by the min-max formula:

    v_i = min_{a <= i} max_{b >= i} g(a, b), where g(a, b) solves the problem with v constant on a..b.
    """
    n = s.size
    exponent = 1 / (p - 1)
    span = np.max(np.abs(s)) + lam * max(1.0, np.max(np.abs(w))) ** (p - 1) + 1.0
    g = np.zeros((n, n))
    for a in range(n):
        for b in range(a, n):
            block, weight = s[a : b + 1], w[a : b + 1].sum()

            def derivative(v: Array, block: Array = block, weight: float = weight) -> Array:
                t = (block - v) / lam
                return weight * phi_prime(v, phi) - np.sum(np.sign(t) * np.abs(t) ** exponent)

            g[a, b] = _bisect(derivative, np.array(-span), np.array(span))
    return np.array([min(g[a, i:].max() for a in range(i + 1)) for i in range(n)])


def permutahedron(
    x: Array, w: Array, lam: float, p: float = 2.0, phi: PhiName = "identity"
) -> Array:
    """y_{phi,R}(x, w) through Propositions 5 and 6: sort, solve, truncate, unsort, gradient of R*."""
    even = phi in ("half_square", "abs")
    size = np.abs(x) if even else x
    order = np.argsort(-size, kind="stable")
    weights = -np.sort(-w)
    # |.| is solved as the identity, with v >= 0 imposed afterwards.
    v = isotonic(size[order], weights, lam, p, "identity" if phi == "abs" else phi)
    u = np.empty_like(v)
    u[order] = np.maximum(v, 0) if even else v
    t = (size - u) / lam
    y = np.sign(t) * np.abs(t) ** (1 / (p - 1))
    return np.sign(x) * y if even else y


def kkt_residual(
    y: Array,
    x: Array,
    w: Array,
    lam: float,
    p: float = 2.0,
    phi: PhiName = "identity",
    two_sided: bool = False,
) -> float:
    """How far y is from optimal for max_y <x, y> - f_phi*(y, w) - R(y); 0 at the optimum.

    The optimality condition is that y is a subgradient of f_phi(., w) at u = x - grad R(y). For the
    identity that is y in P(w) and <u, y> = max_{y' in P(w)} <u, y'>; for |.| the same with the
    dual OWL ball; else y = phi'(u) z with z in P(w) and <phi(u), z> maximal. The residual is the
    largest violation of either, relative to the size of what is compared.
    """
    gradient = grad_R(y, lam, p, two_sided)
    u = x - gradient
    scale = 1.0 + np.max(np.abs(w))
    if phi == "identity":
        centre = np.median(u)  # the optimality gap does not depend on a shift of u
        gap = lmo_value(u - centre, w) - (u - centre) @ y
        size = np.max(np.abs(u - centre)) + np.max(np.abs(gradient))
        return max(_outside(y, w, equal_sums=True) / scale, _relative(gap, size * scale))
    if phi == "abs":
        gap = lmo_value(np.abs(u), w) - u @ y
        size = np.max(np.abs(x))
        return max(_outside(np.abs(y), w, equal_sums=False) / scale, _relative(gap, size * scale))
    size = np.abs(u) if phi == "half_square" else u
    prime, value = phi_prime(size, phi), phi_value(size, phi)
    largest = np.max(np.abs(x)) if phi == "half_square" else np.max(prime)
    # For x^2/2, z = y/u is known no better than u, which is a difference of x and grad R(y): where u
    # is small against x, z may be anything, as it is where u = 0, and y has to be as small.
    free = prime <= (1e-6 * largest if phi == "half_square" else 0.0)
    too_large = np.max(np.abs(y[free]) - 2e-6 * largest * np.max(w), initial=0.0)
    z = _complete(np.abs(y), prime, w, free)
    gap = lmo_value(value, w) - value @ z
    outside = _outside(z, w, equal_sums=True) * np.max(prime)
    return max(
        _relative(outside, largest * scale),
        _relative(gap, largest * (largest if phi == "half_square" else 1.0) * scale),
        _relative(too_large, largest),
    )


def _complete(y: Array, prime: Array, w: Array, free: Bools) -> Array:
    """z = y/phi'(u); what is left of sum(w) is shared among the entries where z is free."""
    z = y / np.where(free, 1.0, prime)
    left = w.sum() - z[~free].sum()
    return np.where(free, left / max(free.sum(), 1), z)


def _outside(y: Array, w: Array, equal_sums: bool) -> float:
    """How far y is outside P(w): the largest excess of a partial sum, and the gap of the totals."""
    excess = np.cumsum(-np.sort(-y)) - np.cumsum(-np.sort(-w))
    total = abs(excess[-1]) if equal_sums else 0.0
    return float(max(np.max(excess), total, 0.0))


def _relative(value: float | Array, size: float) -> float:
    return abs(float(value)) / (size if size > 0 else 1.0)


def numerical_jacobian(f: Callable[[Array], Array], x: Array, step: float = 1e-6) -> Array:
    """Central differences: column j is df/dx_j."""
    basis = np.eye(x.size) * step
    columns = [(f(x + e) - f(x - e)) / (2 * step) for e in basis]
    return np.stack(columns, axis=-1)
