"""The nonlinearities phi of the paper's framework: f_phi(x, w) = max_{z in P(w)} <phi(x), z>.

The identity gives masks, sorting and ranking; x^2/2 top-k in magnitude; |x| signed masks;
exp(x-1) the k-support negentropy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ._types import Array, PhiName
from .regularizers import PNorm, Regularizer
from .roots import increasing_root

# Near the largest float; beyond it only the sign of a residual matters to a solver.
_LARGEST_EXPONENT = 709.7


def _exp(u: Array) -> Array:
    with np.errstate(over="ignore"):
        return np.exp(u - 1.0)


def _finite_exp(u: Array) -> Array:
    return np.exp(np.minimum(u - 1.0, _LARGEST_EXPONENT))


def _half_square(u: Array) -> Array:
    with np.errstate(over="ignore"):
        return u * u / 2


@dataclass(frozen=True)
class Phi:
    name: PhiName
    even: bool  # phi(x) = phi(-x): the operator acts on |x| and gives the sign back
    value: Callable[[Array], Array]
    prime: Callable[[Array], Array]  # phi'(u), for u >= 0 where phi is even
    curvature: Callable[[Array, Array], Array]  # w phi''(u)
    conjugate: Callable[[Array], Array] | None  # phi*(y) where it is finite-valued


PHIS: dict[PhiName, Phi] = {
    "identity": Phi(
        "identity",
        False,
        value=lambda u: u,
        prime=np.ones_like,
        curvature=lambda u, w: np.zeros_like(u),
        conjugate=None,
    ),
    "half_square": Phi(
        "half_square",
        True,
        value=_half_square,
        prime=lambda u: u,
        curvature=lambda u, w: w + 0.0 * u,
        conjugate=_half_square,
    ),
    # |u| has a kink at 0: an entry held there is pinned, which an infinite curvature expresses.
    "abs": Phi(
        "abs",
        True,
        value=np.abs,
        prime=np.ones_like,
        curvature=lambda u, w: np.where((u <= 0) & (w > 0), np.inf, 0.0),
        conjugate=None,
    ),
    "exp": Phi(
        "exp",
        False,
        value=_exp,
        prime=_finite_exp,
        curvature=lambda u, w: w * _finite_exp(u),
        conjugate=lambda y: y * np.log(np.where(y > 0, y, 1.0)),
    ),
}


def lone_response(s: Array, w: Array, lam: Array, reg: Regularizer, phi: Phi) -> Array:
    """d = (s - u)/lam for an entry that shares its threshold with no other.

    u minimises R*(s - u) + w phi(u) on the real line, that is S(d) = w phi'(s - lam d). For even
    phi, ``s >= 0`` is expected; for all but the identity, ``w >= 0``.
    """
    if phi.name in ("identity", "abs"):
        return reg.inverse(np.broadcast_to(w, np.broadcast_shapes(np.shape(w), np.shape(s))))
    assert isinstance(reg, PNorm)
    if phi.name == "half_square":
        return _half_square_response(s, w, lam, reg)
    return _exp_response(s, w, lam, reg)


def _half_square_response(s: Array, w: Array, lam: Array, reg: PNorm) -> Array:
    """d >= 0 with d^(q-1) + lam w d = w s."""
    slope, target = lam * w, w * s
    if reg.exponent == 1.0:
        return target / (1.0 + slope)
    if reg.exponent == 2.0:
        half = slope / 2
        scale = half + np.hypot(half, np.sqrt(target))
        return target / np.where(scale > 0, scale, 1.0)
    e = reg.exponent

    def equation(d: Array) -> tuple[Array, Array]:
        value = d**e + slope * d - target
        return value, d - value / (e * d ** (e - 1.0) + slope)

    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        hi = np.minimum(target ** (1.0 / e), np.where(slope > 0, target / slope, np.inf))
        hi = np.minimum(hi, np.finfo(np.float64).max)
        return increasing_root(equation, np.zeros_like(hi), hi, start=hi).checked()


def _exp_response(s: Array, w: Array, lam: Array, reg: PNorm) -> Array:
    """d >= 0 with d^(q-1) = w exp(s - lam d - 1); 0 where w = 0.

    Solved for the exponent of d: e log d + lam d = log w + s - 1, where nothing overflows.
    """
    e = reg.exponent
    w, s, lam = np.broadcast_arrays(w, s, lam)
    target = np.log(np.where(w > 0, w, 1.0)) + s - 1.0

    def equation(log_d: Array) -> tuple[Array, Array]:
        linear = lam * np.exp(log_d)
        value = e * log_d + linear - target
        return value, log_d - value / (e + linear)

    # Both terms on the left increase, so the sign at d = 1 tells on which side of it the root lies.
    above = target > lam
    with np.errstate(over="ignore"):
        cap = np.where(above, np.log(np.maximum(target / lam, 1.0)), 0.0)
    hi = np.minimum(target / e, cap)
    lo = np.where(above, 0.0, (target - lam) / e)
    log_d = increasing_root(equation, lo, hi, start=hi).checked()
    return np.where(w > 0, np.exp(log_d), 0.0)
