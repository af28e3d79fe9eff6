"""Pool adjacent violators: by the compiled core, csrc/pav.hpp, or where that could not be built by
``_maths.pav``."""

from __future__ import annotations

import numpy as np

from .._core import native
from .._maths.isotonic import PHI_NAMES
from .._maths.pav import Sorted, pool
from .._types import Array, Bools, Ints
from . import namespace as xp
from .isotonic import Isotonic


def solve_sorted(problem: Isotonic) -> tuple[Array, Bools]:
    """d, and which entries are the first of their block."""
    if native is None:
        return _in_arrays(problem)
    d, first = _compiled(problem)
    return d, first == np.arange(first.shape[-1])


def _compiled(problem: Isotonic) -> tuple[Array, Ints]:
    """d, and the first entry of the block of every entry."""
    s, w, lam = (np.ascontiguousarray(a) for a in (problem.s, problem.w, problem.lam))
    d, first = np.empty_like(s), np.empty(s.shape, dtype=np.int64)
    native.solve_isotonic(
        PHI_NAMES.index(problem.phi.name),
        problem.exponent,
        s.shape[0],
        s.shape[1],
        s.ctypes.data,
        w.ctypes.data,
        lam.ctypes.data,
        d.ctypes.data,
        first.ctypes.data,
    )
    return d, first


def _in_arrays(problem: Isotonic) -> tuple[Array, Bools]:
    rows = Sorted(problem.s, problem.w, problem.lam, problem.reg, problem.phi, _sums)
    with xp.quiet():
        blocks = pool(rows)
        return blocks.d(rows), blocks.start


def _sums(*values: Array) -> list[Array]:
    return xp.sums(values)
