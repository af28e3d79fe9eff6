"""DTensors whose rows are sharded along the dimension of a top-k: which processes share them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from .._rows.arguments import Number

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def group_along(x: DTensor, dim: int, k: Number, lam: Number) -> ProcessGroup | None:
    """The processes over which x is sharded along ``dim``; None if its rows are whole."""
    along = [i for i, where in enumerate(x.placements) if where == Shard(dim)]
    others = [where for i, where in enumerate(x.placements) if i not in along]
    if len(along) > 1 or not all(isinstance(where, (Shard, Replicate)) for where in others):
        raise ValueError(
            "x must be sharded along dim over one dimension of its mesh, and sharded along other "
            f"dimensions or replicated over the others, got {x.placements}"
        )
    if any(isinstance(v, Tensor) for v in (k, lam)) and any(
        where != Replicate() for where in others
    ):
        raise ValueError(
            f"k and lam must be numbers where x is sharded along another dimension than dim={dim}, "
            f"got a tensor and x placed as {x.placements}"
        )
    return x.device_mesh.get_group(along[0]) if along else None


def placed(y: Tensor, like: DTensor) -> DTensor:
    """The shard y of a result that is placed as ``like`` is."""
    return DTensor.from_local(
        y, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )
