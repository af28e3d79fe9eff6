"""Which operator of the top-k family: a static argument of everything that is traced."""

from __future__ import annotations

from typing import NamedTuple

from .scalars import PHIS, Phi, PNorm, Regularizer, TwoSidedPNorm

# The operators by the numbers that the compiled core gives them; it does not have the last.
MASK, MAGNITUDE, SIGN, TWO_SIDED, EXP = range(5)
_PHI_NAMES = ("identity", "half_square", "abs", "identity", "exp")


class Kind(NamedTuple):
    """An operator: which, 1/(p - 1), and whether its magnitudes are debiased."""

    op: int
    exponent: float
    debias: bool = False

    @property
    def reg(self) -> Regularizer:
        return TwoSidedPNorm(self.exponent) if self.op == TWO_SIDED else PNorm(self.exponent)

    @property
    def phi(self) -> Phi:
        return PHIS[_PHI_NAMES[self.op]]  # type: ignore[index]
