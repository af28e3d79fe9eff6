"""Relaxed linear programs over the permutahedron P(w) on tensors, for any w.

Common to all of them:

- ``lam >= 0`` is a number or a tensor that broadcasts against x with length 1 along ``dim``; ``lam = 0``
  is the hard operator. x, w and lam may require gradients.
- ``p > 1``; ``solver`` is "pav" (on the CPU, and for p = 2 on GPUs with Triton; else it goes through the
  host) or "dykstra" (p = 2, on the device of x), with ``solver_options`` as in NumPy.
- The output has the shape, dtype and device of x. An infinite or NaN entry makes its row NaN; so does
  a bad lam or w whose value cannot be read at once (traced, or on another device than the CPU).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..._checks import check_along, check_exponent, check_phi, check_solver
from ..._maths.dykstra import RULE, StoppingRule
from ..._maths.isotonic import PHI_NAMES, SolvedBlocks
from ..._maths.operator import Operator
from ..._maths.scalars import Phi
from ..._types import IsotonicSolver, PhiName, SolverOptions
from .._fused import isotonic as fused_isotonic
from .._rows.arguments import (
    Number,
    Rows,
    check_dense,
    check_lam,
    check_number,
    is_plain,
    without_entries,
)
from .._rows.isotonic import LiveBlocks, relax
from .._rows.namespace import LOOKS_ALWAYS as xp
from .._solvers import dykstra, pav
from .._triton import isotonic as on_gpu


@dataclass(frozen=True)
class IsotonicSetting:
    """What is asked of the rows, checked."""

    exponent: float
    phi: Phi
    rule: StoppingRule | None  # of dykstra; None for pav
    readable: bool  # whether the numbers in the tensors can be looked at

    @classmethod
    def of(
        cls,
        p: float,
        phi: PhiName,
        solver: IsotonicSolver,
        options: SolverOptions | None,
        *numbers: object,
    ) -> IsotonicSetting:
        operator = Operator(check_phi(phi), check_exponent(p))
        options = check_solver(solver, ("pav", "dykstra"), options, operator)
        rule = None if solver == "pav" else RULE.given(**options)
        return cls(check_exponent(p), Phi(xp, phi), rule, is_plain(*numbers))

    @property
    def phi_number(self) -> int:
        return PHI_NAMES.index(self.phi.name)

    def solve(self, x: Tensor, w: Tensor, lam: Tensor) -> tuple[SolvedBlocks, Tensor | None]:
        """The blocks of detached rows, and which rows (m, 1) the solver has failed at."""
        if self.rule is None:
            return SolvedBlocks(*pav.solve_blocks(x, w, lam, self.phi_number, self.exponent)), None
        tol = max(self.rule.tol, 8 * torch.finfo(lam.dtype).eps)
        d, block, paired, residual = dykstra.solve_blocks(
            x, w, lam, self.phi_number, tol, self.rule.max_iter, self.rule.fixed_count
        )
        failed = None if self.rule.fixed_count else residual > tol
        if failed is not None and self.readable:
            self.rule.check("dykstra", (~failed).numpy(), residual.numpy())
        return SolvedBlocks(d, block, paired), failed


@dataclass(frozen=True)
class RelaxedRows:
    """Rows (m, n) with their blocks; live tensors."""

    phi: Phi
    blocks: LiveBlocks
    sign: Tensor | None  # of x, for even phi
    soft: Tensor  # rows (m, 1) with lam > 0
    invalid: Tensor  # rows (m, 1) whose result is NaN
    nan: Tensor  # NaN in invalid rows, and so in their derivatives

    def y(self) -> Tensor:
        """y_{phi,R}(x, w); for lam = 0 phi'(x) times the LMO."""
        blocks = self.blocks
        y = torch.where(self.soft, blocks.y(), self.phi.prime(blocks.x) * blocks.w)
        y = y if self.sign is None else self.sign * y
        return torch.where(self.invalid, self.nan, y + 0.0)

    def value(self) -> Tensor:
        """f_{phi,R}(x, w), (m, 1)."""
        blocks = self.blocks
        hard = (self.phi.value(blocks.x) * blocks.w).sum(dim=-1, keepdim=True)
        value = torch.where(self.soft, blocks.value(), hard)
        return torch.where(self.invalid, self.nan.sum(dim=-1, keepdim=True), value)


def relax_rows(
    x: Tensor, w: Tensor, lam: Tensor, setting: IsotonicSetting, floor: float
) -> RelaxedRows:
    """Rows x (m, n), w (m, n) or (1, n), lam (m, 1) in the dtype of the computation; not empty."""
    phi = setting.phi
    x, w = x.to(lam.dtype), w.to(lam.dtype)
    invalid = (
        any_of_row(~x.isfinite()) | any_of_row(~w.isfinite()) | ~((lam >= 0) & (lam < torch.inf))
    )
    if phi.name != "identity":
        invalid = invalid | any_of_row(w < 0)
    sign = torch.where(x < 0, -1.0, 1.0).to(x.dtype) if phi.even else None
    soft = (lam > 0) & ~invalid
    a = x if sign is None else x * sign
    a, safe_lam = torch.where(invalid, 0.0, a), torch.where(soft, lam, 1.0)
    finite_w = torch.nan_to_num(w.detach(), posinf=0.0, neginf=0.0)
    solved, failed = setting.solve(a.detach(), finite_w, safe_lam.detach())
    paired = torch.where(invalid, 0.0, w).gather(-1, solved.paired)
    invalid = invalid if failed is None else invalid | (failed & soft)
    nan = (x + w + lam) * torch.where(invalid, torch.nan, 0.0).to(x.dtype)
    blocks = relax(a, paired, safe_lam, solved, phi.name, setting.exponent, floor)
    return RelaxedRows(phi, blocks, sign, soft, invalid, nan)


def any_of_row(flags: Tensor) -> Tensor:
    return flags.any(dim=-1, keepdim=True)


def floor_of(dtype: torch.dtype) -> float:
    """The least lam whose inverse, a slope, is finite in the dtype of x."""
    return 2.0 / torch.finfo(dtype).max


def by_kernels(
    x: Tensor, w: Tensor, lam: Tensor, setting: IsotonicSetting, dtype: torch.dtype
) -> Tensor | None:
    """y of rows by the fused kernels if they can, which is not so for infinite numbers."""
    fast = setting.readable and setting.rule is None and setting.phi.name == "identity"
    if fast and not on_gpu.takes(x):
        return fused_isotonic.y_of(x, w, lam, setting.exponent, floor_of(dtype), dtype)
    return None


def lam_of_rows(rows: Rows, lam: Number) -> Tensor:
    check_number("lam", lam)
    rows.check_shape("lam", lam)
    check_lam(lam, isinstance(lam, Tensor) and is_plain(lam))
    return rows.per_row(lam)


def _weights(rows: Rows, w: object, phi: PhiName) -> Tensor:
    """w as rows (m, n), or (1, n) if it is a vector, which lies along the dimension."""
    if not isinstance(w, Tensor) or w.dtype == torch.bool or w.is_complex():
        got = f"a tensor of dtype {w.dtype}" if isinstance(w, Tensor) else type(w).__name__
        raise TypeError(f"w must be a tensor of real numbers, got {got}")
    check_dense("w", w)
    check_along("w", w.shape, rows.x.shape, rows.dim, "dim")
    if phi != "identity" and is_plain(w) and bool((w < 0).any()):
        raise ValueError(
            f"w must be nonnegative unless phi='identity', got {w[w == w].min():g} with phi={phi!r}"
        )
    return w.reshape(1, -1) if w.ndim == 1 else rows.tangent(w.broadcast_to(rows.x.shape))


def permutahedron(
    x: Tensor,
    w: Tensor,
    lam: Number = 1.0,
    *,
    p: float = 2.0,
    phi: PhiName = "identity",
    dim: int = -1,
    solver: IsotonicSolver = "pav",
    solver_options: SolverOptions | None = None,
) -> Tensor:
    r"""The relaxed linear program over the permutahedron P(w), Proposition 2 of the paper.

    .. math:: y_{\phi,R}(x, w) = \arg\max_y \langle x, y \rangle - f_\phi^*(y, w) - R(y), \qquad
              R(y) = \frac{\lambda}{p} \sum_i |y_i|^p

    For phi = "identity" that is :math:`\max_{y \in P(w)} \langle x, y \rangle - R(y)`. ``lam = 0``
    gives the linear maximisation oracle, times phi'(x). w comes in any order, as a vector of length n
    or as anything that broadcasts to the shape of x; it must be nonnegative unless phi is the identity.

    >>> x, w = torch.tensor([3.0, 1.0, 0.9]), torch.tensor([2.0, 1.0, 0.0])
    >>> permutahedron(x, w, lam=0.5)
    tensor([2.0000, 0.6000, 0.4000])
    """
    rows = Rows.of("x", x, dim)
    setting = IsotonicSetting.of(p, phi, solver, solver_options, x, w, lam)
    w_rows, lam_rows = _weights(rows, w, phi), lam_of_rows(rows, lam)
    if x.numel() == 0:
        return without_entries(x, rows.unflatten(w_rows.expand(rows.data.shape)), lam)
    y = by_kernels(rows.data, w_rows, lam_rows, setting, x.dtype)
    if y is None:
        y = relax_rows(rows.data, w_rows, lam_rows, setting, floor_of(x.dtype)).y()
    return rows.restore(y)


def permutahedron_value(
    x: Tensor,
    w: Tensor,
    lam: Number = 1.0,
    *,
    p: float = 2.0,
    phi: PhiName = "identity",
    dim: int = -1,
    solver: IsotonicSolver = "pav",
    solver_options: SolverOptions | None = None,
) -> Tensor:
    """f_{phi,R}(x, w), the optimal value of ``permutahedron``, one per row.

    Convex in x; its gradient in x is ``permutahedron(x, w, ...)``. ``lam = 0`` gives f_phi(x, w), for
    instance the sum of the k largest entries for w = 1_k, or the OWL norm for phi = "abs".
    """
    rows = Rows.of("x", x, dim)
    setting = IsotonicSetting.of(p, phi, solver, solver_options, x, w, lam)
    w_rows, lam_rows = _weights(rows, w, phi), lam_of_rows(rows, lam)
    if x.numel() == 0:
        empty = without_entries(x, rows.unflatten(w_rows.expand(rows.data.shape)), lam)
        return empty.sum(dim=dim)
    solved = relax_rows(rows.data, w_rows, lam_rows, setting, floor_of(x.dtype))
    return rows.restore_scalars(solved.value())
