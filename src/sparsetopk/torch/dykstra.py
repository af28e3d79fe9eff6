"""Dykstra's alternating projections as a torch operator, for p = 2; see the NumPy module of that name.

It works with the operations of the device that the tensors are on. No derivative: see ``isotonic``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .pav import PHI_NAMES, fold

_library = torch.library.Library("sparsetopk", "FRAGMENT")
_library.define(
    "dykstra(Tensor x, Tensor w, Tensor lam, int phi, float tol, int max_iter, bool fixed_count)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)

# Looking at the residual makes the host wait for another device.
_SWEEPS_BETWEEN_LOOKS = 64


def solve(
    x: Tensor, w: Tensor, lam: Tensor, phi: int, tol: float, max_iter: int, fixed_count: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """d, block and paired as ``pav.solve`` gives them, and the residual (m, 1), relative.

    Stops when a sweep moves no dual variable by more than tol times the largest |y_i| of an entry
    alone, or by no more than rounding does; ``fixed_count`` takes exactly ``max_iter`` sweeps.
    """
    return torch.ops.sparsetopk.dykstra(x, w, lam, phi, tol, max_iter, fixed_count)


def _solve(
    x: Tensor, w: Tensor, lam: Tensor, phi: int, tol: float, max_iter: int, fixed_count: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, w = x.to(lam.dtype), w.to(lam.dtype).expand(x.shape)
    s, order = x.sort(dim=-1, descending=True, stable=True)
    w, w_order = w.sort(dim=-1, descending=True, stable=True)
    rank = order.argsort(dim=-1)
    name = PHI_NAMES[phi]
    d, joined, residual = _project(s, w, lam, name == "half_square", tol, max_iter, fixed_count)
    start = torch.nn.functional.pad(~joined, (1, 0), value=True)
    if name == "abs":  # v = max(v, 0); what is moved to 0 stands alone there
        below = s - lam * d < 0
        d, start = torch.where(below, s / lam, d), start | below
    block = start.cumsum(dim=-1) - 1
    return d.gather(-1, rank), block.gather(-1, rank), w_order.gather(-1, rank), residual


def _project(
    s: Tensor, w: Tensor, lam: Tensor, curved: bool, tol: float, max_iter: int, fixed_count: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """d, which neighbours share a block, and the residual, for sorted rows."""
    # Stationarity for p = 2: h_i d_i = b_i + alpha_{i-1} - alpha_i.
    b, h = (w * s, 1.0 + lam * w) if curved else (w, torch.ones_like(w))
    step = 1.0 / (1.0 / h[:, :-1] + 1.0 / h[:, 1:])
    gap = (s[:, :-1] - s[:, 1:]) / lam
    eps = torch.finfo(s.dtype).eps
    scale = (b / h).abs().amax(dim=-1, keepdim=True)
    rounding = eps * b.abs().amax(dim=-1, keepdim=True)
    alpha = s.new_zeros(s.shape[0], s.shape[1] + 1)
    moved = torch.zeros_like(scale)
    every = 1 if s.device.type == "cpu" else _SWEEPS_BETWEEN_LOOKS

    def response() -> Tensor:
        return (b + alpha[:, :-1] - alpha[:, 1:]) / h

    for sweep in range(max_iter):
        before = alpha.clone()
        for first in (1, 2):
            d = response()
            slack = gap - d[:, :-1] + d[:, 1:]  # (v_i - v_{i+1})/lam
            free = (alpha[:, 1:-1] - step * slack).clamp_min(0.0)
            alpha[:, first:-1:2] = free[:, first - 1 :: 2]
        moved = (alpha - before).abs().amax(dim=-1, keepdim=True)
        look = not fixed_count and sweep % every == every - 1
        if look and bool((moved <= torch.maximum(tol * scale, rounding)).all()):
            break
    return response(), alpha[:, 1:-1] > 0, moved / torch.where(scale > 0, scale, 1.0)


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
    solved = solve(x, w, lam, *options)
    return tuple(t.unflatten(0, (info.batch_size, -1)) for t in solved), (0, 0, 0, 0)


_library.impl("dykstra", _solve, "CompositeExplicitAutograd")
_library.impl("dykstra", _meta, "Meta")
torch.library.register_vmap("sparsetopk::dykstra", _vmap, lib=_library)
