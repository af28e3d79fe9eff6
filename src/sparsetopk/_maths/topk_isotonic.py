"""The top-k family by a solver of the isotonic problem: the permutahedron of w = 1_k."""

from __future__ import annotations

from typing import Any, NamedTuple

from .isotonic import SolvedBlocks
from .operator import MAGNITUDE, Count, Operator

Array = Any


class Prepared(NamedTuple):
    """Rows for a solver. Where a framework differentiates, all but w carry derivatives."""

    x: Array  # in the dtype of lam
    sign: Array | None  # of x, for even phi
    a: Array  # x or |x|, finite: infinite entries have stand-ins
    w: Array  # 1_k
    k: Count  # at most the number of candidates
    lam: Array  # > 0: rows that are not relaxed have a stand-in
    valid: Array  # rows (..., 1) whose result is not NaN
    soft: Array  # of these, the rows with lam > 0
    overfull: Array  # rows with more than k entries at +inf, which share k
    given: Array  # x + k + lam as they came, (..., n): NaN times this is an invalid row


def prepare(xp: Any, x: Array, k: Count, lam: Array, operator: Operator) -> Prepared:
    """Rows x (..., n) in the dtype of lam, k and lam (..., 1)."""
    even, n = operator.phi(xp).even, x.shape[-1]
    bad = ~xp.isfinite(x) if even else xp.isnan(x)
    valid = k.is_valid(n) & (xp.total(bad) == 0) & (lam >= 0) & (lam < xp.inf)
    soft = valid & (lam > 0)
    sign = xp.where(x < 0, -xp.ones_like(x), 1.0) if even else None
    a = xp.where(valid, x if sign is None else sign * x, 0.0)
    given = x + k.frac + lam
    k = Count(xp.where(valid, k.whole, 0), xp.where(valid, k.frac, 0.0))
    infinite = a == xp.inf
    overfull = xp.total(infinite) - k.whole > k.frac
    # Where more than k entries are +inf, these tie and are the only candidates.
    tied = xp.where(infinite, xp.zeros_like(a), -xp.inf)
    a = xp.where(overfull, tied, a)
    candidates = xp.total(a > -xp.inf)
    frac = xp.where(k.whole < candidates, k.frac, 0.0)
    k = Count(xp.minimum(k.whole, candidates), frac)
    lam = xp.where(soft, xp.clip(lam, float(xp.finfo(lam.dtype).tiny), None), 1.0)
    w = xp.astype(k.whole - xp.index(x), lam.dtype) + xp.stop_gradient(k.frac)
    a = _without_infinities(xp, a, lam)
    return Prepared(x, sign, a, xp.clip(w, 0.0, 1.0), k, lam, valid, soft, overfull, given)


def _without_infinities(xp: Any, a: Array, lam: Array) -> Array:
    """Finite stand-ins for infinite entries, too far from the others to be pooled with them."""
    finite, limit = xp.isfinite(a), float(xp.finfo(a.dtype).max)
    now, lam = xp.stop_gradient(a), xp.stop_gradient(lam)
    some = xp.total(finite) > 0
    top = xp.where(some, xp.largest(xp.where(finite, now, -limit)), 0.0)
    bottom = xp.where(some, -xp.largest(xp.where(finite, -now, -limit)), 0.0)
    above = xp.clip(top + 2.0 * (lam + xp.abs(top)), None, limit)
    below = xp.clip(bottom - 2.0 * (lam + xp.abs(bottom)), -limit, None)
    return xp.where(finite, a, xp.where(a > 0, above, below))


class Paired(NamedTuple):
    """Every entry beside its weight, and what is known of its block."""

    w: Array
    size: Array
    weight: Array
    shared: Array  # entries whose weight moves with k

    @classmethod
    def of(cls, xp: Any, rows: Prepared, solved: SolvedBlocks) -> Paired:
        w = xp.take_along_axis(rows.w, solved.paired, axis=-1)
        size = xp.block_sum(xp.ones_like(w), solved.block)
        weight = xp.block_sum(w, solved.block)
        # k is the weight of the one block that is neither selected whole nor left out whole.
        boundary = solved.paired == xp.clip(rows.k.whole, None, w.shape[-1] - 1)
        return cls(w, size, weight, boundary & (weight > 0) & (weight < size))

    def live_w(self, xp: Any, k: Count) -> Array:
        """w, which moves with k."""
        return self.w + xp.where(self.shared, k.frac - xp.stop_gradient(k.frac), 0.0)

    @property
    def selected(self) -> Array:
        """Entries that are selected whole and stand alone."""
        return (self.size == 1) & (self.weight == 1)


def output(
    xp: Any, rows: Prepared, paired: Paired, operator: Operator, y: Array, d: Array
) -> Array:
    """The output of the operator, from y and d of its blocks; in invalid rows, anything."""
    if operator.op == MAGNITUDE:
        if operator.debias:
            y = xp.where(paired.weight > 0, y + rows.lam * d, 0.0)
            y = xp.where(paired.selected, rows.a, y)
        y = xp.where(is_undecided(rows), 0.0, y)
    return y if rows.sign is None else rows.sign * y


def or_nan(xp: Any, rows: Prepared, valid: Array, y: Array) -> Array:
    """The output; invalid rows are NaN, and so are their derivatives in x, k and lam."""
    nan = rows.given * xp.astype(xp.where(valid, 0.0, xp.nan), rows.x.dtype)
    return xp.where(valid, y, nan)


def is_undecided(rows: Prepared) -> Array:
    """Entries at 0, unless all of the row is selected: which of several zeros are taken is not decided,
    so they have no slope."""
    return (rows.x == 0) & (rows.k.whole < rows.x.shape[-1])
