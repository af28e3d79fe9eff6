"""Pool adjacent violators as a torch operator. It has no derivative: see ``isotonic`` for that.

On the CPU it is the compiled kernel, with its own sort; where there is Triton it is one of its kernels.
Other devices go through the host.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._core import native
from ..._maths.isotonic import PHI_NAMES
from ..._numpy.isotonic import solve_isotonic
from .._fused.kernels import address, bare, check_not_onnx
from .._private import is_tracing
from .._triton import isotonic as on_gpu

_library = torch.library.Library("sparsetopk", "FRAGMENT")
_library.define(
    "pav(Tensor x, Tensor w, Tensor lam, int phi, float exponent) -> (Tensor, Tensor, Tensor)"
)


def solve_blocks(
    x: Tensor, w: Tensor, lam: Tensor, phi: int, exponent: float
) -> tuple[Tensor, Tensor, Tensor]:
    """d, block and paired for detached, finite rows x (m, n), |x| for even phi, with w (m, n) or (1, n)
    and lam > 0 (m, 1), each in the order of x: (x - u)/lam in the dtype of lam, the ids of the blocks,
    and the index of the entry of w that every entry is paired with.
    """
    if not torch.compiler.is_compiling() and is_tracing():
        check_not_onnx()
    if on_gpu.takes(x):
        return on_gpu.solve(x, w, lam, phi, exponent)
    return torch.ops.sparsetopk.pav(x, w, lam, phi, exponent)


def _cpu(
    x: Tensor, w: Tensor, lam: Tensor, phi: int, exponent: float
) -> tuple[Tensor, Tensor, Tensor]:
    if native is None:
        return _in_numpy(x, w, lam, phi, exponent)
    x, w, lam_ = (bare(v) for v in (sortable(x), sortable(w), lam.double().contiguous()))
    d = x.new_empty(x.shape, dtype=torch.float64)
    block, paired = (x.new_empty(x.shape, dtype=torch.int64) for _ in range(2))
    n = x.numel()
    native.solve_permutahedron(
        phi,
        exponent,
        x.shape[1],
        x.shape[0],
        x.element_size(),
        address(x, x.dtype, n),
        w.shape[0],
        w.element_size(),
        address(w, w.dtype, w.shape[0] * x.shape[1]),
        address(lam_, torch.float64, x.shape[0]),
        address(d, torch.float64, n),
        address(block, torch.int64, n),
        address(paired, torch.int64, n),
        torch.get_num_threads(),
    )
    return d.to(lam.dtype), block, paired


def sortable(x: Tensor) -> Tensor:
    """In one of the two types that the kernel sorts."""
    return (x if x.dtype in (torch.float32, torch.float64) else x.float()).contiguous()


def _in_numpy(
    x: Tensor, w: Tensor, lam: Tensor, phi: int, exponent: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Without the kernel."""
    x_, w_, lam_ = (v.double().numpy() for v in (x, w.expand(x.shape), lam))
    solved = solve_isotonic(x_, w_, lam_, PHI_NAMES[phi], exponent, "pav", {})
    d, block, paired = (torch.from_numpy(a) for a in solved)
    return d.to(lam.dtype), block, paired


def _through_the_host(
    x: Tensor, w: Tensor, lam: Tensor, phi: int, exponent: float
) -> tuple[Tensor, Tensor, Tensor]:
    d, block, paired = _cpu(x.cpu(), w.cpu(), lam.cpu(), phi, exponent)
    return d.to(x.device), block.to(x.device), paired.to(x.device)


def _meta(
    x: Tensor, w: Tensor, lam: Tensor, phi: int, exponent: float
) -> tuple[Tensor, Tensor, Tensor]:
    check_not_onnx()
    block = x.new_empty(x.shape, dtype=torch.int64)
    return lam.new_empty(x.shape), block, torch.empty_like(block)


def fold(
    info: Any, in_dims: tuple[Any, ...], x: Tensor, w: Tensor, lam: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Batched rows as more rows, for a rule of vmap."""

    def batched(t: Tensor, dim: int | None) -> Tensor:
        return t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)

    x, w, lam = batched(x, in_dims[0]), batched(w, in_dims[1]), batched(lam, in_dims[2])
    w = w.expand(-1, x.shape[1], -1)
    return x.flatten(0, 1), w.flatten(0, 1), lam.flatten(0, 1)


def _vmap(
    info: Any,
    in_dims: tuple[Any, ...],
    x: Tensor,
    w: Tensor,
    lam: Tensor,
    phi: int,
    exponent: float,
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    x, w, lam = fold(info, in_dims, x, w, lam)
    solved = solve_blocks(x, w, lam, phi, exponent)
    return tuple(t.unflatten(0, (info.batch_size, -1)) for t in solved), (0, 0, 0)


_library.impl("pav", _through_the_host, "CompositeExplicitAutograd")
_library.impl("pav", _cpu, "CPU")
_library.impl("pav", _meta, "Meta")
torch.library.register_vmap("sparsetopk::pav", _vmap, lib=_library)
