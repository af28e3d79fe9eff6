"""The permutahedron with phi = identity by the compiled kernels, for plain CPU tensors.

What the backward pass needs is saved in sorted order, and that pass is one kernel too; where it is
itself differentiated, the rows are solved again and written in ordinary operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._core import native
from ..._maths.isotonic import PHI_NAMES, SolvedBlocks
from .._rows.arguments import is_plain
from .._rows.isotonic import relax
from .._solvers import pav
from .kernels import address
from .rows import cotangents

_IDENTITY = PHI_NAMES.index("identity")


def y_of(
    x: Tensor, w: Tensor, lam: Tensor, exponent: float, floor: float, dtype: torch.dtype
) -> Tensor | None:
    """y in the given dtype for rows x (m, n), w (m, n) or (1, n), lam (m, 1) in float64; None where
    these are not all finite and lam > 0. ``floor`` is the least lam that slopes are taken with."""
    if native is None or not bool((lam.detach() > 0).all()):
        return None
    if not (torch.is_grad_enabled() and (x.requires_grad or w.requires_grad or lam.requires_grad)):
        return forward(x, w, lam, exponent, dtype, None)
    saved = Saved.of(x, w, w.requires_grad)
    saved.y = forward(x, w, lam, exponent, dtype, saved)
    return None if saved.y is None else _Fused.apply(x, w, lam, exponent, floor, saved)  # type: ignore[no-untyped-call]


class Saved:
    """What the backward pass needs of the forward pass, in sorted order; d has the dtype of the sort.

    And, on its way to autograd, the output y: as an argument it would be an input that comes back,
    which nobody may change in place.
    """

    y: Tensor | None = None

    def __init__(
        self, w_rows: int, order: Tensor, first: Tensor, w_order: Tensor | None, d: Tensor
    ) -> None:
        self.x_rows, self.w_rows = order.shape[0], w_rows
        self.order, self.first, self.w_order, self.d = order, first, w_order, d

    @classmethod
    def of(cls, x: Tensor, w: Tensor, in_w: bool) -> Saved:
        """To be written, for rows x and w; for a derivative in w too if that is wanted."""
        return cls(
            w.shape[0],
            x.new_empty(_once(x).shape, dtype=torch.int32),
            x.new_empty(x.shape, dtype=torch.int32),
            w.new_empty(w.shape, dtype=torch.int32) if in_w else None,
            x.new_empty(x.shape, dtype=pav.sortable(x[:0].detach()).dtype),
        )

    def addresses(self) -> tuple[int, int, int, int]:
        n, of_w = self.d.shape[1], 0 if self.w_order is None else self.w_order.numel()
        return (
            address(self.order, torch.int32, self.x_rows * n),
            address(self.first, torch.int32, self.d.numel()),
            address(self.w_order, torch.int32, of_w),
            address(self.d, self.d.dtype, self.d.numel()),
        )


def _once(x: Tensor) -> Tensor:
    """A single row for rows that are one in memory, as those of an expanded tensor are."""
    return x[:1] if x.stride(0) == 0 else x


def forward(
    x: Tensor, w: Tensor, lam: Tensor, exponent: float, dtype: torch.dtype, saved: Saved | None
) -> Tensor | None:
    m, n = x.shape
    x, w = pav.sortable(_once(x.detach())), pav.sortable(w.detach())
    lam = lam.detach().contiguous()
    y = x.new_empty((m, n))
    finite = native.permutahedron_forward(
        exponent,
        x.element_size(),
        m,
        n,
        x.shape[0],
        address(x, x.dtype, x.numel()),
        w.shape[0],
        w.element_size(),
        address(w, w.dtype, w.shape[0] * n),
        address(lam, torch.float64, m),
        address(y, x.dtype, m * n),
        *((0, 0, 0, 0) if saved is None else saved.addresses()),
        torch.get_num_threads(),
    )
    return y.to(dtype) if finite else None


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        lam: Tensor,
        exponent: float,
        floor: float,
        saved: Saved,
    ) -> Tensor | None:
        ctx.save_for_backward(x, w, lam)
        ctx.exponent, ctx.floor, ctx.saved = exponent, floor, saved
        y, saved.y = saved.y, None
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, w, lam = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled() or not is_plain(g):
            found = _differentiable_backward(x, w, lam, g, ctx.exponent, ctx.floor, wanted)
        else:
            found = backward(x, w, lam, g, ctx.exponent, ctx.floor, wanted, ctx.saved)
        return (*found, None, None, None)


def backward(
    x: Tensor,
    w: Tensor,
    lam: Tensor,
    g: Tensor,
    exponent: float,
    floor: float,
    wanted: tuple[bool, ...],
    saved: Saved,
) -> tuple[Tensor | None, ...]:
    """The cotangents of x, w and lam."""
    m, n = saved.d.shape
    g, lam_ = g.to(saved.d.dtype).contiguous(), lam.contiguous()
    dx = torch.empty_like(g) if wanted[0] else None
    # In float64 where it is the sum over all rows.
    dw_dtype = g.dtype if w.dtype == g.dtype and saved.w_rows == m else torch.float64
    dw = w.new_zeros(w.shape, dtype=dw_dtype) if wanted[1] else None
    dlam = torch.empty_like(lam_) if wanted[2] else None
    native.permutahedron_backward(
        exponent,
        g.element_size(),
        m,
        n,
        saved.x_rows,
        saved.w_rows,
        dw_dtype.itemsize,
        *saved.addresses(),
        address(lam_, torch.float64, m),
        address(g, g.dtype, m * n),
        address(dx, g.dtype, m * n),
        address(dw, dw_dtype, w.numel()),
        address(dlam, torch.float64, m),
        floor,
        torch.get_num_threads(),
    )
    return None if dx is None else dx.to(x.dtype), None if dw is None else dw.to(w.dtype), dlam


def _differentiable_backward(
    x: Tensor,
    w: Tensor,
    lam: Tensor,
    g: Tensor,
    exponent: float,
    floor: float,
    wanted: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """The same with a graph, or for a g that is batched."""

    def live(x: Tensor, w: Tensor, lam: Tensor) -> Tensor:
        solved = SolvedBlocks(
            *pav.solve_blocks(x.detach(), w.detach(), lam.detach(), _IDENTITY, exponent)
        )
        paired = w.to(lam.dtype).expand(x.shape).gather(-1, solved.paired)
        blocks = relax(x.to(lam.dtype), paired, lam, solved, "identity", exponent, floor)
        return blocks.y().to(g.dtype)

    return cotangents(live, (x, w, lam), g, wanted)
