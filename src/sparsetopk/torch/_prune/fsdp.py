"""Pruned weights of a model that FSDP2 has sharded (``fully_shard``).

What the layers see and what is trained are two parameters, both sharded: the layer's own one, which
FSDP gathers, frees and reduces as always, holds the pruned weights y; W stands beside it. Before a
forward of the model, if W, k or lam has changed, the top-k is solved on the shards of all ranks, and
every rank writes its shard of y. After a backward FSDP leaves the cotangents of y in shards, and these
are carried through the solution to W. So no rank ever has more full weights than FSDP gathers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..._checks import check_choice
from .pruned import Group, PrunedShard, Settings, beside
from .schedules import ChooseLam
from .targets import Target, distinct
from .units import Weights

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def check_sharded(settings: Settings, scope: str, lam: float | ChooseLam) -> None:
    """What needs more than the shards of a rank and a few numbers of the others is left out."""
    check_choice("scope, on sharded parameters,", scope, ("global",))
    if settings.unit != Weights():
        raise ValueError(f"unit, on sharded parameters, must be 'weight', got {settings.unit}")
    for name in ("operator", "lam_scale"):
        if (value := getattr(settings, name)) is not None:
            raise ValueError(f"{name} must be None on sharded parameters, got {value!r}")
    if isinstance(lam, ChooseLam):
        raise ValueError(f"lam must be a number on sharded parameters, got {lam}")


def shard_group(targets: list[Target]) -> ProcessGroup:
    """The processes over which all the parameters are sharded, each along one dimension of one mesh."""
    axes = set()
    for target in targets:
        name, w = target.name, target.weight
        if not isinstance(w, DTensor):
            raise ValueError(f"{name} must be sharded as the other parameters are, got a plain one")
        sharded = [i for i, where in enumerate(w.placements) if where != Replicate()]
        if len(sharded) != 1 or not isinstance(w.placements[sharded[0]], Shard):
            raise ValueError(
                f"{name} must be sharded along one dimension of its mesh and replicated along the "
                f"others, got {w.placements}"
            )
        axes.add((w.device_mesh, sharded[0]))
    if len(axes) != 1:
        raise ValueError(f"all pruned parameters must be sharded alike, got {len(axes)} ways")
    mesh, axis = axes.pop()
    return mesh.get_group(axis)


def register(group: Group, targets: list[Target], model: torch.nn.Module) -> None:
    """W goes beside each parameter, for the module that has it first."""
    ys = distinct(targets)
    index = {id(y): i for i, y in enumerate(ys)}
    for target in targets:
        i = index[id(target.weight)]
        if i == len(group.members):
            part = PrunedShard(group, i, target.parameter, target.weight)
            target.module.add_module(beside(target.parameter), part)
            group.members.append(part)
    group.link = Link(model, group, ys)


def local(w: DTensor) -> Tensor:
    """The shard of this rank."""
    return w.to_local().detach()


class Link:
    """Between the trained weights W of a group and the parameters y that FSDP manages."""

    def __init__(self, model: torch.nn.Module, group: Group, ys: Sequence[Any]) -> None:
        self._model, self._group, self._ws, self._ys = model, group, group.originals, ys
        self._key: Any = None
        self._solution: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._queued = False
        # FSDP's own hook, which gathers, must come after.
        self._handles = [model.register_forward_pre_hook(self._before_forward, prepend=True)]
        self._handles += [y.register_post_accumulate_grad_hook(self._after_gradient) for y in ys]

    def _before_forward(self, *_: object) -> None:
        self._queued = False  # also after a backward that failed
        self.refresh()

    def refresh(self) -> None:
        """Solve, if anything has changed: a collective call."""
        versions = [(w._version, local(w)._version, w.requires_grad) for w in self._ws]
        key = (torch.is_inference_mode_enabled(), self._group.version, versions)
        if key == self._key:
            return
        self._key, self._solution = None, ([], [])  # before there is a new one: it may be large
        with torch.enable_grad():
            xs = [local(w).requires_grad_(w.requires_grad) for w in self._ws]
            self._solution = xs, self._group.evaluate(xs)
        self.write(self._solution[1])
        self._key = key

    def write(self, shards: Sequence[Tensor]) -> None:
        """Into the shards of y; what FSDP still has gathered is out of date."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        with torch.no_grad():
            for y, shard in zip(self._ys, shards, strict=True):
                local(y).copy_(shard)

    def _after_gradient(self, _: Tensor) -> None:
        """FSDP has one of the cotangents; when the backward ends it has all of them."""
        if not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._carry)

    def _carry(self) -> None:
        """The cotangents of y become those of W."""
        self._queued = False
        xs, outs = self._solution
        used = [(out, y.grad) for out, y in zip(outs, self._ys, strict=True) if y.grad is not None]
        found = torch.autograd.grad(
            [out for out, _ in used],
            [x for x in xs if x.requires_grad],
            [g.to_local() for _, g in used],
            retain_graph=True,
        )
        each = iter(found)
        for w, y in zip(self._ws, self._ys, strict=True):
            y.grad = None
            if w.requires_grad:
                g = DTensor.from_local(
                    next(each), w.device_mesh, w.placements, shape=w.shape, stride=w.stride()
                )
                w.grad = g if w.grad is None else w.grad + g

    def finish(self, shards: Sequence[Tensor]) -> None:
        """These are the shards of y from now on, and plain parameters."""
        self.write(shards)
        for handle in self._handles:
            handle.remove()
