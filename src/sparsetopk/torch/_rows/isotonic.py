"""The operators over the permutahedron from solved blocks, in ordinary operations on live tensors.

Values come from the solver, as constants; derivatives in x, w and lam, to the second order, from the
rule of ``_maths`` half a step from there, as in ``differentiable``. Which entries share a block is
decided once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..._maths import isotonic
from ..._maths.blocks import Blocks
from ..._maths.isotonic import SolvedBlocks
from ..._maths.scalars import Phi, PhiName, PNorm
from .differentiable import step_from
from .namespace import LOOKS_ALWAYS, needs_derivative

_xp: Any = LOOKS_ALWAYS  # no loop is left in what is done here


class LiveBlocks(NamedTuple):
    """Solved rows of x (|x| for even phi) and of w, each entry beside its partner."""

    x: Tensor
    w: Tensor
    at: Blocks  # at constants
    middle: Blocks  # half a step further
    steps: tuple[Tensor, Tensor, Tensor] | None  # of x, w and lam
    block: Tensor

    def _moved(self, blocks: Blocks) -> Any:
        assert self.steps is not None
        dx, dw, dlam = self.steps
        return blocks.tangent(dx, _xp.block_sum(dw, self.block), dlam)

    def y(self) -> Tensor:
        """S(d)."""
        y = self.at.y()
        return y if self.steps is None else y + self._moved(self.middle).y

    def d(self) -> Tensor:
        """The argument of the response."""
        return self.at.d if self.steps is None else self.at.d + self._moved(self.middle).d

    def value(self) -> Tensor:
        """R*(x - u) + sum_i w_i phi(u_i), (m, 1)."""
        value = isotonic.permutahedron_value(self.at, self.x.detach(), self.w.detach())
        if self.steps is None:
            return value
        y = self.at.y() + self._moved(self.at).y / 2
        return value + isotonic.value_tangent(self.middle, y, *self.steps)


def relax(
    x: Tensor,
    w: Tensor,
    lam: Tensor,
    solved: SolvedBlocks,
    phi: PhiName,
    exponent: float,
    floor: float,
) -> LiveBlocks:
    """The blocks with their derivatives. ``floor`` bounds lam where 1/lam is a slope."""

    reg, phi_ = PNorm(_xp, exponent), Phi(_xp, phi)

    def blocks(x: Tensor, w: Tensor, lam: Tensor, d: Tensor) -> Blocks:
        return isotonic.blocks_of(reg, phi_, x, w, lam, d, solved.block, floor)

    now = x.detach(), w.detach(), lam.detach()
    at = blocks(*now, solved.d)
    if not needs_derivative(x, w, lam):
        return LiveBlocks(x, w, at, at, None, solved.block)
    steps = dx, dw, dlam = step_from(x), step_from(w), step_from(lam)
    moved = at.tangent(dx, _xp.block_sum(dw, solved.block), dlam)
    x_half, w_half, lam_half = (v + d / 2 for v, d in zip(now, steps, strict=True))
    middle = blocks(x_half, w_half, lam_half, solved.d + moved.d / 2)
    return LiveBlocks(x, w, at, middle, (dx, dw, dlam), solved.block)
