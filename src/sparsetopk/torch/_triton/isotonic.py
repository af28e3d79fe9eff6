"""Pool adjacent violators as an operator of torch, on rows that are sorted: see ``pav.py``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import state

_library = torch.library.Library("sparsetopk", "FRAGMENT")
_library.define(
    "rows_pav(Tensor s, Tensor order, Tensor w, Tensor w_order, Tensor lam, int phi,"
    " float exponent) -> (Tensor, Tensor, Tensor)"
)


def takes(x: Tensor) -> bool:
    """Whether there is a kernel."""
    return state.is_served(x) and x.numel() > 0


def solve(
    x: Tensor, w: Tensor, lam: Tensor, phi: int, exponent: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``_solvers.pav.solve`` for what it ``takes``: two sorts and a launch."""
    s, order = x.sort(dim=-1, descending=True, stable=True)
    w, w_order = w.sort(dim=-1, descending=True, stable=True)
    return torch.ops.sparsetopk.rows_pav(s, order, w, w_order, lam, phi, exponent)


def _pav(
    s: Tensor, order: Tensor, w: Tensor, w_order: Tensor, lam: Tensor, phi: int, exponent: float
) -> tuple[Tensor, Tensor, Tensor]:
    from . import launch

    s, order, w, w_order, lam = (v.contiguous() for v in (s, order, w, w_order, lam))
    return launch.pav(s, order, w, w_order, lam, phi, exponent)


def _pav_meta(
    s: Tensor, order: Tensor, w: Tensor, w_order: Tensor, lam: Tensor, phi: int, exponent: float
) -> tuple[Tensor, Tensor, Tensor]:
    block = order.new_empty(s.shape)
    return lam.new_empty(s.shape), block, torch.empty_like(block)


def _pav_vmap(
    info: Any, in_dims: tuple[Any, ...], *arguments: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The batch becomes more rows."""
    *tensors, phi, exponent = arguments
    count = info.batch_size
    folded = [
        t.expand(count, *t.shape) if dim is None else t.movedim(dim, 0)
        for t, dim in zip(tensors, in_dims, strict=False)
    ]
    m = folded[0].shape[1]
    folded = [t.expand(-1, m, -1).flatten(0, 1) for t in folded]
    solved = torch.ops.sparsetopk.rows_pav(*folded, phi, exponent)
    return tuple(t.unflatten(0, (count, m)) for t in solved), (0, 0, 0)


_library.impl("rows_pav", _pav, "CompositeExplicitAutograd")
_library.impl("rows_pav", _pav_meta, "Meta")
torch.library.register_vmap("sparsetopk::rows_pav", _pav_vmap, lib=_library)
