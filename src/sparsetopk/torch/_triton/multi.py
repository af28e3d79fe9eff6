"""Top-k in magnitude over many tensors together, by the kernels for long rows: a row that lies in
pieces. Addresses go to the device, and nothing comes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..._maths.operator import Operator
from .._fused.kernels import place
from .._rows.arguments import Number
from . import LONGEST, state

_ALIGNED = 16  # bytes, for loads of as many


def takes(tensors: Sequence[Tensor]) -> bool:
    """Whether there are kernels: for tensors of one dtype on one device, which are not empty."""
    first, n = tensors[0], sum(x.numel() for x in tensors)
    alike = all((x.dtype, x.device) == (first.dtype, first.device) for x in tensors)
    return alike and 0 < n <= LONGEST and state.is_served(first)


class _Chunks(NamedTuple):
    """How the row of all tensors is cut: the tensor of every chunk, and where in it it starts."""

    tensor: np.ndarray[Any, Any]
    start: np.ndarray[Any, Any]
    sizes: np.ndarray[Any, Any]

    @classmethod
    def of(cls, tensors: Sequence[Tensor], chunk: int) -> _Chunks:
        sizes = np.array([x.numel() for x in tensors], dtype=np.int64)
        pieces = -(-sizes // chunk)
        tensor = np.repeat(np.arange(len(sizes)), pieces)
        first = np.repeat(np.cumsum(pieces) - pieces, pieces)
        return cls(tensor, chunk * (np.arange(len(tensor)) - first), sizes)

    def addresses(self, flat: Sequence[Tensor]) -> Tensor:
        at = np.array([place(x) for x in flat], dtype=np.int64)
        table = at[self.tensor] + self.start * flat[0].element_size()
        return torch.from_numpy(table).to(flat[0].device, non_blocking=True)

    def starts(self, device: torch.device) -> Tensor:
        before = np.cumsum(self.sizes) - self.sizes
        table = np.append(before[self.tensor] + self.start, self.sizes.sum())
        return torch.from_numpy(table).to(device, non_blocking=True)


def _flat(x: Tensor) -> Tensor:
    """Contiguous, and where a load of many bytes can start."""
    flat = x.detach().contiguous().view(-1)
    return flat if place(flat) % _ALIGNED == 0 else flat.clone()


def _row(flat: Sequence[Tensor]) -> tuple[_Chunks, Any]:
    from . import launch_long

    chunks, device = _Chunks.of(flat, launch_long.CHUNK), flat[0].device
    n, count = int(chunks.sizes.sum()), len(chunks.tensor)
    table, starts = chunks.addresses(flat), chunks.starts(device)
    return chunks, launch_long.Place(table, starts, 1, n, count, flat[0].dtype, True)


def _number(value: Number, like: Tensor) -> Number:
    return value.detach().to(like.device).reshape(1) if isinstance(value, Tensor) else value


def forward(
    tensors: Sequence[Tensor], k: Number, lam: Number, operator: Operator, straight_through: bool
) -> tuple[list[Tensor], Tensor]:
    """The outputs, and the state; ``straight_through`` writes those for lam = 0."""
    from . import launch_long

    flat = [_flat(x) for x in tensors]
    outs = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]
    chunks, row = _row(flat)
    numbers = _number(k, flat[0]), _number(lam, flat[0])
    to = chunks.addresses([out.view(-1) for out in outs])
    solved = launch_long.forward(row, *numbers, operator, None if straight_through else to)
    if straight_through:
        launch_long.forward(row, numbers[0], 0.0, operator, to)
    return outs, solved


def backward(
    tensors: Sequence[Tensor],
    gs: Sequence[Tensor | None],
    state: Tensor,
    k: Number,
    lam: Number,
    operator: Operator,
) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
    """The cotangents of the tensors, and of k and lam where these are tensors."""
    from . import launch_long

    flat = [_flat(x) for x in tensors]
    outs = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]
    given = [
        torch.zeros_like(x) if g is None else _flat(g.to(x.dtype))
        for g, x in zip(gs, flat, strict=True)
    ]
    chunks, row = _row(flat)
    dk, dlam = launch_long.backward(
        row,
        chunks.addresses(given),
        state,
        _number(k, state),
        _number(lam, state),
        operator,
        chunks.addresses([out.view(-1) for out in outs]),
        in_k=isinstance(k, Tensor),
        in_lam=isinstance(lam, Tensor),
    )
    return outs, _like(dk, k), _like(dlam, lam)


def _like(d: Tensor, value: Number) -> Tensor | None:
    if not isinstance(value, Tensor):
        return None
    return d.to(value.device, value.dtype).reshape(value.shape)
