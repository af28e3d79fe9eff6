"""Dykstra's alternating projections (Algorithm 1 of the paper), for p = 2.

The monotone cone is the intersection of C1 = {v_1 >= v_2, v_3 >= v_4, ...} and
C2 = {v_2 >= v_3, v_4 >= v_5, ...}; projecting onto either averages pairs. Run on its increments, the
algorithm is coordinate ascent in the dual (Tibshirani, 2017), with an affine update: alpha_i >= 0 is
the multiplier of v_i >= v_{i+1}, and one that is not active ends with alpha_i = 0 exactly, so that
blocks are read off from that.

The paper prints the linear term <v, w> in both of its steps, which solves the problem with 2w; here it
enters once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from .isotonic import SolvedBlocks, block_ids, truncate
from .scalars import PhiName

Array = Any


class ConvergenceError(RuntimeError):
    """A solver could not meet its stopping rule; the message says which rule and how far it got."""


@dataclass(frozen=True)
class StoppingRule:
    """Work until the residual is at most ``tol``; give up after ``max_iter`` iterations."""

    tol: float
    max_iter: int
    fixed_count: bool = False  # take exactly max_iter iterations, whatever the residual

    def given(self, *, tol: float | None = None, max_iter: int | None = None) -> StoppingRule:
        """The rule with a user's options: ``max_iter`` alone asks for exactly so many."""
        if max_iter is not None and tol is None:
            return StoppingRule(0.0, max_iter, fixed_count=True)
        return StoppingRule(
            self.tol if tol is None else tol, self.max_iter if max_iter is None else max_iter
        )

    def at_least(self, tol: float) -> StoppingRule:
        """The rule for a dtype in which residuals are no smaller than this."""
        if self.fixed_count:
            return self
        return StoppingRule(max(self.tol, tol), self.max_iter)

    def check(self, solver: str, converged: Any, residual: Any) -> None:
        if not self.fixed_count and not converged.all():
            raise ConvergenceError(
                f"solver '{solver}' still has a residual of {float(residual.max()):.2e} after "
                f"{self.max_iter} iterations, expected at most tol={self.tol:.0e}; raise max_iter "
                "or tol in solver_options, or take another solver"
            )


# The iterations needed grow as n^2 at large lam; 100,000 are enough for n = 256.
RULE = StoppingRule(tol=1e-12, max_iter=100_000)


class _Ascent(NamedTuple):
    alpha: Array  # (..., n + 1); the first and the last stay 0
    moved: Array  # by the last sweep, (..., 1)


def solve_blocks(
    xp: Any, x: Array, w: Array, lam: Array, phi: PhiName, rule: StoppingRule
) -> tuple[SolvedBlocks, Array]:
    """Rows x and w (..., n) in any order, and the residual (..., 1), relative.

    Stops when no sweep moves a dual variable of a row by more than tol times the largest abs(y_i) of an
    entry alone, or by no more than rounding does; ``fixed_count`` takes exactly ``max_iter`` sweeps.
    """
    s, order = xp.sort(x)
    w, w_order = xp.sort(w)
    d, joined, missed = _project(xp, s, w, lam, phi == "half_square", rule)
    start = (
        xp.concat([xp.ones_like(joined[..., :1]), ~joined], axis=-1)
        if s.shape[-1] > 1
        else (xp.ones_like(s, dtype=bool))
    )
    if phi == "abs":
        d, start = truncate(xp, s, lam, d, start, s - lam * d)
    return SolvedBlocks(*xp.unsort(order, d, block_ids(xp, start), w_order)), missed


def _project(
    xp: Any, s: Array, w: Array, lam: Array, curved: bool, rule: StoppingRule
) -> tuple[Array, Array, Array]:
    """d, which neighbours share a block, and the residual, for sorted rows."""
    # Stationarity for p = 2: h_i d_i = b_i + alpha_{i-1} - alpha_i.
    b, h = (w * s, 1.0 + lam * w) if curved else (w, xp.ones_like(w))
    step = 1.0 / (1.0 / h[..., :-1] + 1.0 / h[..., 1:])
    gap = (s[..., :-1] - s[..., 1:]) / lam
    scale = xp.largest(xp.abs(b / h))
    rounding = float(xp.finfo(s.dtype).eps) * xp.largest(xp.abs(b))
    enough = xp.maximum(rule.tol * scale, rounding)
    odd = xp.index(s)[:-1] % 2 == 0
    edge = xp.zeros_like(s[..., :1])

    def response(alpha: Array) -> Array:
        return (b + alpha[..., :-1] - alpha[..., 1:]) / h

    def update(alpha: Array, pairs: Array) -> Array:
        d = response(alpha)
        slack = gap - d[..., :-1] + d[..., 1:]  # (v_i - v_{i+1})/lam
        inner = alpha[..., 1:-1]
        free = xp.clip(inner - step * slack, 0.0, None)
        return xp.concat([edge, xp.where(pairs, free, inner), edge], axis=-1)

    def sweep(_: Any, at: _Ascent) -> _Ascent:
        alpha = update(update(at.alpha, odd), ~odd)
        return _Ascent(alpha, xp.largest(xp.abs(alpha - at.alpha)))

    def busy(at: _Ascent) -> Array:
        return at.moved >= 0 if rule.fixed_count else at.moved > enough

    first = _Ascent(xp.concat([xp.zeros_like(s), edge], axis=-1), xp.full_like(edge, xp.inf))
    alpha, moved = xp.while_loop(busy, sweep, first, rule.max_iter)
    return response(alpha), alpha[..., 1:-1] > 0, residual(xp, moved, scale, rounding)


def residual(xp: Any, moved: Array, scale: Array, rounding: Array) -> Array:
    """By how much of ``scale`` the last sweep moved a row; 0 where rounding alone would: a row that can
    not be solved any better has converged, however small its outputs are beside its terms."""
    return xp.where(moved <= rounding, 0.0, moved / xp.where(scale > 0, scale, 1.0))
