"""The scalar functions of the maths over NumPy, and solved rows, as tests ask for them."""

from __future__ import annotations

import numpy as np

from sparsetopk._maths import operator, scalars, threshold
from sparsetopk._maths.operator import OF_PHI, TWO_SIDED, Operator
from sparsetopk._numpy import namespace as xp
from sparsetopk._numpy.arguments import Rows
from sparsetopk._numpy.relaxed import TopKProblem

PHIS = {name: scalars.Phi(xp, name) for name in OF_PHI}


def PNorm(p):
    return scalars.PNorm(xp, operator.exponent(p))


def TwoSidedPNorm(p):
    return scalars.TwoSidedPNorm(xp, operator.exponent(p))


def operator_of(reg, phi_name):
    two_sided = isinstance(reg, scalars.TwoSidedPNorm)
    return Operator(TWO_SIDED if two_sided else OF_PHI[phi_name], reg.exponent)


def relaxed(x, k, lam, op):
    """Rows x (m, n) with k and lam (m, 1), by the core if it has the operator."""
    return TopKProblem(Rows.of("x", x, -1), k, lam, op).relaxed


def state_in_numpy(x, k, lam, op):
    with xp.quiet():
        return threshold.state_of(xp, xp.Whole(np.asarray(x)), xp.split(k), lam, op)
