"""What every solver returns, and the closed-form derivatives that follow from it (Proposition 7)."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from ._types import Array, Bools, Ints
from .phis import Phi
from .regularizers import Regularizer
from .roots import ConvergenceError
from .rowwise import block_sum

# Keeps sums and products of slopes finite, for any lam > 0.
_STEEPEST = 1e280


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

    def check(self, solver: str, converged: Bools, residual: Array) -> None:
        if not self.fixed_count and not converged.all():
            raise ConvergenceError(
                f"solver '{solver}' still has a residual of {np.max(residual):.2e} after "
                f"{self.max_iter} iterations, expected at most tol={self.tol:.0e}; raise max_iter "
                "or tol in solver_options, or take another solver"
            )


@dataclass(frozen=True)
class Solution:
    """The minimiser u of R*(x - u) + f_phi(u, w), row by row; all arrays are (rows, n).

    Entries of one block share one value of u. Blocks are named by ids in [0, n] that the solver
    hands out; they are never recovered from u.
    """

    d: Array  # (x - u) / lam: the argument of the response, y = S(d)
    u: Array
    weight: Array  # the entry of w that x is paired with; only its sum over a block matters
    block: Ints
    residual: Array  # (rows, 1): how far from optimal, in the units of the solver's stopping rule

    @property
    def alone(self) -> Bools:
        """Which entries are a block of their own."""
        return block_sum(np.ones_like(self.d), self.block) == 1

    @classmethod
    def trivial(cls, x: Array) -> Solution:
        """Nothing is selected."""
        zero, block = np.zeros_like(x), np.broadcast_to(np.arange(x.shape[-1]), x.shape)
        return cls(zero, x, zero, block, np.zeros((x.shape[0], 1)))

    def with_rows(self, where: Bools, other: Solution) -> Solution:
        """This solution, with the rows ``where`` (rows,) taken from the smaller ``other``."""
        merged = {}
        for field in fields(self):
            merged[field.name] = np.array(getattr(self, field.name))
            merged[field.name][where] = getattr(other, field.name)
        return Solution(**merged)

    def scatter(self, order: Ints) -> Solution:
        """Undo the sort: the solution for x, given the one for x[order]."""

        def put(values: Array) -> Array:
            out = np.empty_like(values)
            np.put_along_axis(out, order, values, axis=-1)
            return out

        block = np.empty_like(self.block)
        np.put_along_axis(block, order, self.block, axis=-1)
        return Solution(put(self.d), put(self.u), put(self.weight), block, self.residual)


@dataclass(frozen=True)
class Linearization:
    """The derivatives of an operator at one input, row by row; all arrays are (rows, n).

    In x: J = diag(diag) - sum_B left_B right_B^T, blocks B as in the solution.
    In w: dy_i = in_weight_i * (sum of dw over the block of i). In k and lam: one column each.
    """

    diag: Array
    left: Array
    right: Array
    block: Ints
    in_weight: Array
    in_k: Array
    in_lam: Array

    def jvp(self, dx: Array) -> Array:
        """J dx."""
        return self.diag * dx - self.left * block_sum(self.right * dx, self.block)

    def vjp(self, dy: Array) -> Array:
        """J^T dy."""
        return self.diag * dy - self.right * block_sum(self.left * dy, self.block)

    def dense(self) -> Array:
        """J, as (rows, n, n)."""
        same = self.block[:, :, None] == self.block[:, None, :]
        outer = self.left[:, :, None] * self.right[:, None, :]
        return np.eye(self.diag.shape[-1]) * self.diag[:, :, None] - np.where(same, outer, 0.0)

    def signed(self, sign: Array) -> Linearization:
        """The same for sign(x) * y(|x|)."""
        return replace(
            self,
            diag=self.diag * sign * sign,
            left=self.left * sign,
            right=self.right * sign,
            in_weight=self.in_weight * sign,
            in_k=self.in_k * sign,
            in_lam=self.in_lam * sign,
        )

    def times_x(self, x: Array, y: Array) -> Linearization:
        """The same for x * y(x); an infinite x, padding or not, has no slope."""
        finite = np.where(np.isfinite(x), x, 0.0)

        def scaled(values: Array) -> Array:
            with np.errstate(over="ignore"):
                return np.clip(finite * values, -_STEEPEST, _STEEPEST)

        return replace(
            self,
            diag=y + scaled(self.diag),
            left=scaled(self.left),
            in_weight=scaled(self.in_weight),
            in_k=scaled(self.in_k),
            in_lam=scaled(self.in_lam),
        )

    def frozen_in_x(self, rows: Bools, diag: Array | float = 0.0) -> Linearization:
        """In the given rows (rows, 1), J = diag(diag)."""
        return replace(
            self,
            diag=np.where(rows, diag, self.diag),
            left=np.where(rows, 0.0, self.left),
            right=np.where(rows, 0.0, self.right),
        )

    def hard(self, rows: Bools, diag: Array | float) -> Linearization:
        """In the given rows (rows, 1), J = diag(diag) and no other derivative: lam = 0."""
        return replace(
            self.frozen_in_x(rows, diag),
            in_weight=np.where(rows, 0.0, self.in_weight),
            in_k=np.where(rows, 0.0, self.in_k),
            in_lam=np.where(rows, 0.0, self.in_lam),
        )


def linearize(
    solution: Solution, lam: Array, reg: Regularizer, phi: Phi, *, debias: bool = False
) -> Linearization:
    """Derivatives of y = S(d), or of the debiased S(d) + lam d, from the blocks of the solution.

    On a block with threshold g, sum_B S((x_i - g)/lam) = phi'(g) sum_B w_i. Differentiating, with
    D_i = S'(d_i)/lam and c = phi''(g) sum_B w_i::

        dg = (sum_B D_i dx_i - phi'(g) sum_B dw_i) / (sum_B D_i + c),   dy_i = D_i (dx_i - dg).
    """
    d, u, block = solution.d, solution.u, solution.block
    rise = reg.slope(d)  # lam D, of which shares are formed: D itself may overflow
    with np.errstate(over="ignore"):
        gain = np.minimum(rise / lam, _STEEPEST) + (1.0 if debias else 0.0)
    size = block_sum(np.ones_like(d), block)
    weight = block_sum(solution.weight, block)
    curvature = phi.curvature(u, weight)
    total = block_sum(rise, block) + lam * curvature
    alone = size == 1
    with np.errstate(divide="ignore", invalid="ignore"):
        # Flat everywhere on the block (p < 2, nothing selected): the limit shares equally.
        share = np.where(total > 0, rise / total, 1.0 / size)
        unit = np.where(total > 0, (rise + lam * debias) / total, 1.0 / size)
        # gain * (1 - share), free of cancellation; it is gain where the curvature is infinite.
        lone = np.where(np.isinf(curvature), gain, curvature * unit)
    result = Linearization(
        diag=np.where(alone, lone, gain),
        left=np.where(alone, 0.0, gain),
        right=np.where(alone, 0.0, share),
        block=block,
        in_weight=unit * phi.prime(u),
        in_k=np.zeros_like(d),
        in_lam=np.zeros_like(d),
    )
    # x enters through x/lam alone, and the debiased output has lam d besides.
    in_lam = d * debias - result.jvp(d)
    # k is the weight of the one block that is neither selected whole nor left out whole.
    in_k = np.where((weight > 0) & (weight < size), result.in_weight, 0.0)
    return replace(result, in_lam=in_lam, in_k=in_k)
