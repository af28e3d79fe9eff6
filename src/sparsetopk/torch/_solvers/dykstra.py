"""Dykstra's alternating projections as a torch operator, for p = 2.

It works with the operations of the device that the tensors are on. No derivative: see ``isotonic``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._maths import dykstra
from ..._maths.isotonic import PHI_NAMES
from .._rows.namespace import LOOKS_ALWAYS, LOOKS_SELDOM
from .pav import fold

_library = torch.library.Library("sparsetopk", "FRAGMENT")
_library.define(
    "dykstra(Tensor x, Tensor w, Tensor lam, int phi, float tol, int max_iter, bool fixed_count)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)


def solve_blocks(
    x: Tensor, w: Tensor, lam: Tensor, phi: int, tol: float, max_iter: int, fixed_count: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """d, block and paired as ``pav.solve_blocks`` gives them, and the residual (m, 1), relative.

    Stops when a sweep moves no dual variable by more than tol times the largest |y_i| of an entry
    alone, or by no more than rounding does; ``fixed_count`` takes exactly ``max_iter`` sweeps.
    """
    return torch.ops.sparsetopk.dykstra(x, w, lam, phi, tol, max_iter, fixed_count)


def _solve(
    x: Tensor, w: Tensor, lam: Tensor, phi: int, tol: float, max_iter: int, fixed_count: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, w = x.to(lam.dtype), w.to(lam.dtype).expand(x.shape)
    xp = LOOKS_ALWAYS if x.device.type == "cpu" else LOOKS_SELDOM
    rule = dykstra.StoppingRule(tol, max_iter, fixed_count)
    solved, residual = dykstra.solve_blocks(xp, x, w, lam, PHI_NAMES[phi], rule)
    return *solved, residual


def _meta(
    x: Tensor, w: Tensor, lam: Tensor, phi: int, tol: float, max_iter: int, fixed_count: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    block = x.new_empty(x.shape, dtype=torch.int64)
    residual = lam.new_empty((x.shape[0], 1))
    return lam.new_empty(x.shape), block, torch.empty_like(block), residual


def _vmap(
    info: Any, in_dims: tuple[Any, ...], x: Tensor, w: Tensor, lam: Tensor, *options: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    x, w, lam = fold(info, in_dims, x, w, lam)
    solved = solve_blocks(x, w, lam, *options)
    return tuple(t.unflatten(0, (info.batch_size, -1)) for t in solved), (0, 0, 0, 0)


_library.impl("dykstra", _solve, "CompositeExplicitAutograd")
_library.impl("dykstra", _meta, "Meta")
torch.library.register_vmap("sparsetopk::dykstra", _vmap, lib=_library)
