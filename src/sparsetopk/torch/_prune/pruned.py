"""Pruned parameters: one top-k over a group of them, solved when something has changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from .._functions.operators import topk_mag
from .._functions.selection import choose_lam
from .._fused.kernels import place
from .._private import is_exporting, without_compiler
from .._rows.arguments import Number, is_plain
from .._spread.multi import topk_mag_multi
from .schedules import ChooseLam, KeepSchedule, Schedule
from .units import Weights

Operator = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class Settings:
    p: float
    unit: Weights
    operator: Operator | None
    lam_scale: str | None
    straight_through: bool


class _Hand(torch.autograd.Function):
    """Hands solved weights to a forward, and their cotangents back through the solution.

    It keeps nothing that autograd frees, so that a second backward finds it as the first one did.
    """

    @staticmethod
    def forward(
        ctx: Any, evaluate: Any, xs: list[Tensor], ys: list[Tensor], *originals: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.evaluate, ctx.xs, ctx.ys, ctx.originals = evaluate, xs, ys, originals
        ctx.set_materialize_grads(False)
        return tuple(y.detach() for y in ys)

    @staticmethod
    def backward(ctx: Any, *gs: Tensor | None) -> tuple[Tensor | None, ...]:
        again = torch.is_grad_enabled()  # for a second derivative: at the weights themselves
        xs = [x.view_as(x) for x in ctx.originals] if again else ctx.xs
        ys = ctx.evaluate(xs) if again else ctx.ys
        used = [(y, g) for y, g in zip(ys, gs, strict=True) if g is not None]
        found = torch.autograd.grad(
            [y for y, _ in used],
            [x for x in xs if x.requires_grad],
            [g.to_dense() for _, g in used],
            retain_graph=True,
            create_graph=again,
            allow_unused=True,
        )
        each = iter(found)
        return (None, None, None, *(next(each) if x.requires_grad else None for x in xs))


@dataclass
class Group:
    """Parameters that share one k: a single one, or with ``scope="global"`` all of them."""

    settings: Settings
    final_k: int  # what is kept at the end of a schedule
    first_lam: float | ChooseLam  # and lam at the beginning
    members: list[Any] = field(default_factory=list)
    k: int = 0
    lam: float = 0.0
    step: int = 0
    chosen: float = 0.0  # by a ChooseLam, for this k
    processes: Any = None  # the group over which the members are sharded
    link: Any = None  # to the parameters that FSDP manages
    warned: bool = False  # that too few or too many compete

    def __post_init__(self) -> None:
        _watch_optimizers()
        # What was solved for, and the solution: one object, as other threads may replace it.
        self._found: tuple[Any, Sequence[Tensor]] | None = None
        # The same numbers as tensors, which a compiled graph takes as inputs.
        self._k, self._lam = (torch.zeros((), dtype=torch.float64, device="cpu") for _ in range(2))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_found": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        _watch_optimizers()
        self.__dict__.update(state)

    @property
    def originals(self) -> list[Any]:
        return [member.original for member in self.members]

    @property
    def shards(self) -> list[Tensor]:
        """Of this rank; all there is without FSDP."""
        return self.originals if self.processes is None else [w.to_local() for w in self.originals]

    @property
    def is_relaxed(self) -> bool:
        """Whether weights may be seen to compete in the forward, which is not so straight through."""
        hard = self.lam == 0 or self.settings.straight_through or self.settings.operator is not None
        units = sum(self.settings.unit.count(w) for w in self.originals)
        return not hard and self.k < units and self.settings.unit == Weights()

    @property
    def version(self) -> tuple[float, ...]:
        """What the solution depends on beside the weights. Fused optimisers change a parameter and leave
        its own version as it was."""
        return self.k, self.lam, _steps

    def set(self, k: int, lam: float, step: int) -> None:
        self.k, self.lam, self.step = k, lam, step
        self._k.fill_(k)
        self._lam.fill_(lam)

    def advance(self, step: int, schedules: Sequence[Schedule]) -> None:
        """k and lam at a step."""
        units = sum(self.settings.unit.count(w) for w in self.originals)
        keep, rest = self.final_k / units, 1.0
        for schedule in schedules:
            if isinstance(schedule, KeepSchedule):
                keep += (schedule.start - keep) * schedule.rest(step)
            else:
                rest = schedule.rest(step)
        k = min(max(1, round(keep * units)), units)
        lam = self.first_lam
        if isinstance(lam, ChooseLam):
            anew = k != self.k or (lam.every is not None and step % lam.every == 0)
            lam = self.chosen = self._choose(lam, k) if anew else self.chosen
        self.set(k, lam * rest, step)

    def _choose(self, lam: ChooseLam, k: int) -> float:
        values = [self.settings.unit.values(w.detach()) for w in self.originals]
        everything = torch.cat([v.flatten() for v in values])
        found = choose_lam(everything, k, lam.fractional, p=self.settings.p, magnitude=True)
        return float(found)

    def output(self, index: int, w: Tensor) -> Tensor:
        """The pruned weights of a member, whose own are w."""
        originals = [w] if len(self.members) == 1 else self.originals
        if _in_graph() and len(originals) > 1:
            return self.solved_outside(index)
        if not is_plain() or not all(isinstance(x, torch.nn.Parameter) for x in originals):
            return self.evaluate(originals)[index]
        return self.solved(index, originals)

    @without_compiler  # type: ignore[untyped-decorator]
    def solved_outside(self, index: int) -> Tensor:
        """A compiled graph breaks here: the solution is shared with other layers."""
        return self.solved(index, self.originals)

    def solved(self, index: int, originals: list[Tensor]) -> Tensor:
        """From the last solution, as long as nothing has changed."""
        inference = torch.is_inference_mode_enabled()
        versions = [(id(x), x._version, place(x), x.requires_grad) for x in originals]
        key = (inference, self.version, versions)
        found = self._found
        if found is None or found[0] != key:
            self._found = found = None  # before there is a new one: it may be large
            self._found = found = key, self._solve(originals, inference)
        y = found[1][index]
        return y if torch.is_grad_enabled() else y.detach()

    def _solve(self, originals: list[Tensor], inference: bool) -> Sequence[Tensor]:
        if inference:
            return self.evaluate(originals)
        with torch.enable_grad():
            xs = [x.detach().requires_grad_(x.requires_grad) for x in originals]
            ys = self.evaluate(xs)
            return _Hand.apply(self.evaluate, xs, ys, *originals)  # type: ignore[no-untyped-call]

    def evaluate(self, weights: Sequence[Tensor], hard: bool = False) -> list[Tensor]:
        """The pruned weights, live."""
        unit = self.settings.unit
        values = [unit.values(w) for w in weights]
        each = zip(weights, values, self._topk(values, hard), strict=True)
        return [_laid_out(unit.put_back(w, v, kept), w) for w, v, kept in each]

    def _topk(self, values: list[Tensor], hard: bool) -> list[Tensor]:
        settings = self.settings
        if settings.operator is not None and not hard:
            flat = (
                torch.cat([v.flatten() for v in values]) if len(values) > 1 else values[0].flatten()
            )
            parts = settings.operator(flat, self.k).split([v.numel() for v in values])
            return [part.view_as(v) for part, v in zip(parts, values, strict=True)]
        k: Number = self._k if _in_graph() else self.k
        lam = 0.0 if hard else self._current_lam(values)
        options: Any = {"p": settings.p, "straight_through": settings.straight_through and not hard}
        if len(values) > 1 or self.processes is not None:
            return topk_mag_multi(values, k, lam, group=self.processes, **options)
        vectors = settings.unit.vectors(values[0])
        return [topk_mag(vectors, k, lam, **options).reshape(values[0].shape)]

    def _current_lam(self, values: list[Tensor]) -> Number:
        """By the scaling law, weights c times as large have the same top-k with c^(2-p) lam."""
        lam: Number = self._lam if _in_graph() else self.lam
        p = self.settings.p
        if self.settings.lam_scale is None or p == 2.0:
            return lam
        squares = [v.detach().to(torch.float64).square().sum() for v in values]
        squares = [s.to(squares[0].device) for s in squares]
        mean = torch.stack(squares).sum() / sum(v.numel() for v in values)
        return lam * torch.where(mean > 0, mean, 1.0) ** (1.0 - p / 2)


def _in_graph() -> bool:
    """Whether numbers are inputs of a graph, so that it holds for others too: an exported one does not
    see them change."""
    return torch.compiler.is_compiling() and not is_exporting()


def _laid_out(y: Tensor, w: Tensor) -> Tensor:
    """y in the order of the memory of w, which convolutions go by."""
    if not is_plain() or w.is_contiguous():
        return y
    for ndim, order in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if w.ndim == ndim and w.is_contiguous(memory_format=order):
            return y.contiguous(memory_format=order)
    return y


_steps = 0  # of all optimisers


def _count_step(*_: object) -> None:
    global _steps
    _steps += 1


@cache
def _watch_optimizers() -> None:
    """Count the steps from now on: whoever prunes nothing has no hook on their optimisers."""
    register_optimizer_step_post_hook(_count_step)


class Pruned(torch.nn.Module):
    """The parametrisation of a pruned parameter; made by ``prune``."""

    def __init__(self, group: Group, index: int) -> None:
        super().__init__()
        self.group, self.index = group, index

    def forward(self, w: Tensor) -> Tensor:
        return self.group.output(self.index, w)

    def get_extra_state(self) -> Tensor:
        """k, lam and the step of the schedules, which go with the model's state dict."""
        group = self.group
        numbers = [group.k, group.lam, group.step, group.chosen]
        return torch.tensor(numbers, dtype=torch.float64, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        k, lam, step, self.group.chosen = state.tolist()
        self.group.set(int(k), lam, int(step))

    def extra_repr(self) -> str:
        shared = f" of {len(self.group.members)} tensors" if len(self.group.members) > 1 else ""
        return f"k={self.group.k}{shared}, lam={self.group.lam:g}"


class Frozen(torch.nn.Module):
    """The parametrisation of a parameter that is 0 where it was once; made by ``finalize``."""

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, w: Tensor) -> Tensor:
        return torch.where(self.mask, w, 0.0)


def beside(parameter: str) -> str:
    """The name of the module beside a parameter that FSDP manages."""
    return f"pruned_{parameter}"


class PrunedShard(Pruned):
    """Beside a parameter that FSDP manages: the weights W that are trained, and whose top-k it holds."""

    def __init__(self, group: Group, index: int, parameter: str, y: Tensor) -> None:
        super().__init__(group, index)
        self.parameter = parameter
        self.original = torch.nn.Parameter(y.detach().clone(), requires_grad=y.requires_grad)
