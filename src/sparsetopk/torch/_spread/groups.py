"""Numbers that the processes of a group put together: each method is one collective.

What comes back is the same on every rank to the last bit (what was reduced is sent to all), so that
every rank takes the same decisions and the next collective finds all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from .._rows.arguments import show

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Shared:
    """The processes over which a row is spread, in the order of their ranks."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        on_cpu = "cpu:" in dist.get_backend_config(group)
        self._device = torch.device("cpu") if on_cpu else torch.accelerator.current_accelerator()

    def sum(self, values: Tensor) -> Tensor:
        """Over all ranks."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def largest(self, values: Tensor) -> Tensor:
        """Over all ranks."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def _reduced(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        there = values.detach().to(self._device, copy=True).contiguous()
        dist.all_reduce(there, op, group=self.group)
        return there.to(values.device)

    def gather(self, values: Tensor) -> Tensor:
        """(size, ...), by rank."""
        here = values.detach().to(self._device).contiguous()
        there = [torch.empty_like(here) for _ in range(self.size)]
        dist.all_gather(there, here, group=self.group)
        return torch.stack(there).to(values.device)


def check_group(group: object) -> Shared | None:
    if group is None:
        return None
    if not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        raise TypeError(
            "group must be a torch.distributed.ProcessGroup that this process is part of, "
            f"got {show(group)}"
        )
    return Shared(group)
