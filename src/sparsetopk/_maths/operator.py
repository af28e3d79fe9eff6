"""Which operator of the top-k family is asked for, and k in two parts."""

from __future__ import annotations

from typing import Any, NamedTuple

from .scalars import Phi, PhiName, PNorm, Regularizer, TwoSidedPNorm

# The operators by the numbers that the compiled core gives them; it does not have the last.
MASK, MAGNITUDE, SIGN, TWO_SIDED, EXP = range(5)
PHI_NAMES: tuple[PhiName, ...] = ("identity", "half_square", "abs", "identity", "exp")
OF_PHI: dict[PhiName, int] = {"identity": MASK, "half_square": MAGNITUDE, "abs": SIGN, "exp": EXP}


def exponent(p: float) -> float:
    """q - 1 = 1 / (p - 1), with the rounding of p = 3/2 and p = 4/3 taken out."""
    exponent = 1.0 / (p - 1.0)
    nearest = round(exponent)
    return float(nearest) if abs(exponent - nearest) < 1e-12 * exponent else exponent


class Operator(NamedTuple):
    """An operator: which one, 1/(p - 1), and whether its magnitudes are debiased."""

    op: int
    exponent: float
    debias: bool = False

    @property
    def is_compiled(self) -> bool:
        """Whether the compiled core, where it is there, has this operator."""
        # The two-sided one for p from 1.05 to 20, up to rounding. Written here, as torch.compile may
        # take numbers at the top of a module for variables.
        if self.op == TWO_SIDED:
            return 0.999 / 19 <= self.exponent <= 20.001
        return self.op != EXP

    @property
    def p(self) -> float:
        return 1.0 + 1.0 / self.exponent

    @property
    def phi_name(self) -> PhiName:
        return PHI_NAMES[self.op]

    def reg(self, xp: Any) -> Regularizer:
        kind = TwoSidedPNorm if self.op == TWO_SIDED else PNorm
        return kind(xp, self.exponent)

    def phi(self, xp: Any) -> Phi:
        return Phi(xp, self.phi_name)


class Count(NamedTuple):
    """k in two parts, (..., 1): exact also above 2^24, where float32 is not."""

    whole: Any  # the integer part
    frac: Any  # the rest, in [0, 1): what carries the derivative

    def is_valid(self, n: int) -> Any:
        """Whether k is in [0, n]."""
        whole, frac = self
        return (whole >= 0) & (frac >= 0) & ((whole < n) | ((whole == n) & (frac == 0)))
