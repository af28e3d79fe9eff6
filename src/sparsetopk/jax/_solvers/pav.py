"""Pool adjacent violators for any p, phi and w. It has no derivative: see ``isotonic`` for that.

On the CPU it is the compiled core, with its own sort; elsewhere ``_maths.pav`` in XLA operations.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..._maths.isotonic import PHI_NAMES, block_ids, truncate
from ..._maths.pav import Sorted, pool
from ..._maths.scalars import Phi, PhiName, PNorm
from .._rows import namespace as xp
from .._rows.calls import RowCall
from .plain import row_sums


def solve_blocks(
    x: Array, w: Array, lam: Array, phi: PhiName, exponent: float
) -> tuple[Array, Array, Array]:
    """d, block and paired for finite rows x (..., n), |x| for even phi, with w (..., n) and lam > 0
    (..., 1), all in the dtype of lam, each in the order of x: (x - u)/lam, the ids of the blocks, and
    the index of the entry of w that every entry is paired with.
    """
    d, block, paired = _solve(x, w, lam, phi=phi, exponent=exponent)
    return d, block, paired


def solve_in_xla(
    x: Array, w: Array, lam: Array, phi: PhiName, exponent: float
) -> tuple[Array, Array, Array]:
    """The same on any device."""
    s, order = xp.sort(x)
    w, w_order = xp.sort(w)
    # For |.| without v >= 0 it is the problem of the identity.
    unconstrained = Phi(xp, "identity" if phi == "abs" else phi)
    rows = Sorted(s, w, lam, PNorm(xp, exponent), unconstrained, row_sums)
    blocks = pool(rows)
    d, start = blocks.d(rows), blocks.start
    if phi == "abs":
        d, start = truncate(xp, s, lam, d, start, blocks.origin - lam * blocks.delta)
    d, block, paired = xp.unsort(order, d, block_ids(xp, start), w_order)
    return d, block, paired


def _in_core(*_: Any, phi: PhiName, exponent: float) -> dict[str, Any]:
    return {"phi": np.int32(PHI_NAMES.index(phi)), "exponent": np.float64(exponent)}


def _types(x: Array, *_: Array, phi: PhiName, exponent: float) -> list[tuple[int, Any]]:
    n = x.shape[-1]
    return [(n, x.dtype), (n, jnp.int32), (n, jnp.int32)]


_solve = RowCall(
    "pav", _types, jax.jit(solve_in_xla, static_argnames=("phi", "exponent")), _in_core
)
