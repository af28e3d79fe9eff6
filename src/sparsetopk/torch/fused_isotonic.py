"""The permutahedron with phi = identity by the compiled kernels, for plain CPU tensors.

Solved blocks are saved for the backward pass, one kernel too; where that is itself differentiated, it
is written again in ordinary operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import pav
from .isotonic import Solved, relax
from .scalars import PHIS, PNorm

_IDENTITY = pav.PHI_NAMES.index("identity")


def evaluate(
    x: Tensor, w: Tensor, lam: Tensor, reg: PNorm, floor: float, dtype: torch.dtype
) -> Tensor | None:
    """y in the given dtype for rows x (m, n), w (m, n) or (1, n), lam (m, 1) in float64; None where
    these are not all finite and lam > 0. ``floor`` is the least lam that slopes are taken with."""
    if pav._core is None or not bool((lam.detach() > 0).all()):
        return None
    found = pav.kernel(x.detach(), w.detach(), lam.detach(), _IDENTITY, reg.exponent)
    if found is None:
        return None
    solved = Solved(*found)
    if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad or lam.requires_grad):
        return _Fused.apply(x, w, lam, solved, reg, floor, dtype)  # type: ignore[no-any-return]
    return _response(solved.d, reg, dtype)


def _response(d: Tensor, reg: PNorm, dtype: torch.dtype) -> Tensor:
    """S(d), with 0 for -0."""
    return torch.add(reg.response(d), 0.0, out=torch.empty(d.shape, dtype=dtype))


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        lam: Tensor,
        solved: Solved,
        reg: PNorm,
        floor: float,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(x, w, lam, *solved)
        ctx.reg, ctx.floor, ctx.dtype = reg, floor, dtype
        return _response(solved.d, reg, dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, w, lam, *solved = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        rule = _differentiable_backward if torch.is_grad_enabled() else _backward
        found = rule(x, w, lam, Solved(*solved), g, ctx.reg, ctx.floor, wanted)
        return (*found, None, None, None, None)


def _backward(
    x: Tensor,
    w: Tensor,
    lam: Tensor,
    solved: Solved,
    g: Tensor,
    reg: PNorm,
    floor: float,
    wanted: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """The cotangents of x, w and lam."""
    g, lam_ = pav.sortable(g), lam.contiguous()
    dx = torch.empty_like(g)
    dw = torch.zeros(w.shape, dtype=torch.float64) if wanted[1] else None
    dlam = torch.empty_like(lam_) if wanted[2] else None
    pav._core.permutahedron_backward(
        reg.exponent,
        g.element_size(),
        g.shape[0],
        g.shape[1],
        lam_.data_ptr(),
        solved.d.data_ptr(),
        solved.block.data_ptr(),
        solved.paired.data_ptr(),
        g.data_ptr(),
        dx.data_ptr(),
        0 if dw is None else dw.data_ptr(),
        w.shape[0] == 1,
        0 if dlam is None else dlam.data_ptr(),
        floor,
    )
    return (
        dx.to(x.dtype) if wanted[0] else None,
        None if dw is None else dw.to(w.dtype),
        dlam,
    )


def _differentiable_backward(
    x: Tensor,
    w: Tensor,
    lam: Tensor,
    solved: Solved,
    g: Tensor,
    reg: PNorm,
    floor: float,
    wanted: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """The same with a graph: w or lam may depend on x, so derivatives are taken at aliases."""
    x, w, lam = (v.view_as(v) for v in (x, w, lam))
    paired = w.to(lam.dtype).expand(solved.d.shape).gather(-1, solved.paired)
    y = relax(x.to(lam.dtype), paired, lam, solved, reg, PHIS["identity"], floor).y().to(g.dtype)
    inputs = [v for v, want in zip((x, w, lam), wanted, strict=True) if want]
    found = iter(torch.autograd.grad(y, inputs, g, create_graph=True))
    return tuple(next(found) if want else None for want in wanted)
