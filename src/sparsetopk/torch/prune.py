"""Pruning while training: weights are parametrised by a relaxed top-k in magnitude.

``prune`` puts it on the weights of a model, by ``torch.nn.utils.parametrize``: what the layers see is
``topk_mag(W)``, what is trained is W, and a weight that is left out comes back when it has grown.
``finalize`` leaves the sparse weights as plain parameters; ``report`` says how sparse they are.

The top-k is solved when the weights, k or lam have changed, and not before: in a training loop once
per step of the optimiser, however many forwards and backwards there are in between. That the weights
have changed is seen by their version; a change through ``.data`` hides from it. With one k over all
tensors (``scope="global"``) the layers share the one solution, and each backward carries their gradients
back through it once. So the gradients of W are there after ``backward()`` as always, for clipping,
scaling and any optimiser.

On a model that FSDP2 has sharded there is no parametrisation: ``fsdp`` says what stands in its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import parametrize
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..arguments import check_positive_int
from .arguments import Number, check_exponent, check_lam, check_number, is_plain
from .groups import Shared
from .multi import topk_mag_multi
from .operators import topk_mag
from .selection import choose_lam

Keep = int | float
Operator = Callable[[Tensor, int], Tensor]
Names = Collection[str | type[torch.nn.Module]]

#: The modules whose ``weight`` is pruned unless others are named.
MODULES = (
    torch.nn.Linear,
    torch.nn.Conv1d,
    torch.nn.Conv2d,
    torch.nn.Conv3d,
    torch.nn.Embedding,
)
_POWERS = {"linear": 1, "cubic": 3}


@dataclass(frozen=True)
class ChooseLam:
    """lam such that about so many entries are fractional, by ``choose_lam``.

    It is chosen when ``prune`` is called, and again whenever a schedule changes how many are kept.
    """

    fractional: int = 8


@dataclass(frozen=True)
class _Ramp:
    steps: int
    begin: int = 0
    shape: Literal["linear", "cubic"] = "cubic"

    def __post_init__(self) -> None:
        check_positive_int("steps", self.steps)
        if self.shape not in _POWERS:
            raise ValueError(f"shape must be 'linear' or 'cubic', got {self.shape!r}")

    def rest(self, step: int) -> float:
        """From 1, until ``begin``, down to 0 after ``steps`` more."""
        progress = min(max((step - self.begin) / self.steps, 0.0), 1.0)
        return (1.0 - progress) ** _POWERS[self.shape]


@dataclass(frozen=True)
class KeepSchedule(_Ramp):
    """From the share ``start`` of the weights to what ``prune`` was told to keep, in so many steps."""

    start: float = 1.0


@dataclass(frozen=True)
class LamSchedule(_Ramp):
    """From the lam that ``prune`` was given to 0, the hard operator, in so many steps."""


Schedule = KeepSchedule | LamSchedule


class Row(NamedTuple):
    """A pruned parameter in a report."""

    name: str
    shape: tuple[int, ...]
    kept: int  # weights that are not 0
    fraction: float  # the share of these
    fractional: int  # of these, the ones that are neither left out nor as they were


@dataclass(frozen=True)
class _Settings:
    p: float
    unit: str
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
        again = (
            torch.is_grad_enabled()
        )  # the derivative of the derivative: at the weights themselves
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
class _Group:
    """Parameters that share one k: a single one, or with ``scope="global"`` all of them."""

    settings: _Settings
    final_k: int  # what is kept at the end of a schedule
    first_lam: float | ChooseLam  # and lam at the beginning
    members: list[Any] = field(default_factory=list)
    k: int = 0
    lam: float = 0.0
    step: int = 0
    chosen: float = 0.0  # by a ChooseLam, for this k
    processes: Any = None  # the group over which the members are sharded
    link: Any = None  # to the parameters that FSDP manages

    def __post_init__(self) -> None:
        self._key: Any = None
        self._ys: Sequence[Tensor] = ()
        # The same numbers as tensors, which a compiled graph takes as inputs.
        self._k, self._lam = (
            torch.zeros((), dtype=torch.float64),
            torch.zeros((), dtype=torch.float64),
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_key": None, "_ys": ()}

    @property
    def originals(self) -> list[Any]:
        return [member.original for member in self.members]

    @property
    def shards(self) -> list[Tensor]:
        """Of this rank; all there is without FSDP."""
        return self.originals if self.processes is None else [w.to_local() for w in self.originals]

    def set(self, k: int, lam: float, step: int) -> None:
        self.k, self.lam, self.step = k, lam, step
        self._k.fill_(k)
        self._lam.fill_(lam)

    def advance(self, step: int, schedules: Sequence[Schedule]) -> None:
        """k and lam at a step."""
        units = sum(_count_units(w, self.settings.unit) for w in self.originals)
        keep, rest = self.final_k / units, 1.0
        for schedule in schedules:
            if isinstance(schedule, KeepSchedule):
                keep += (schedule.start - keep) * schedule.rest(step)
            else:
                rest = schedule.rest(step)
        k = min(max(1, round(keep * units)), units)
        lam = self.first_lam
        if isinstance(lam, ChooseLam):
            lam = self.chosen = self._choose(lam, k) if k != self.k else self.chosen
        self.set(k, lam * rest, step)

    def _choose(self, lam: ChooseLam, k: int) -> float:
        values = [_values(w.detach(), self.settings.unit) for w in self.originals]
        everything = torch.cat([v.flatten() for v in values])
        found = choose_lam(everything, k, lam.fractional, p=self.settings.p, magnitude=True)
        return float(found)

    def output(self, index: int, w: Tensor) -> Tensor:
        """The pruned weights of a member, whose own are w."""
        originals = [w] if len(self.members) == 1 else self.originals
        if torch.compiler.is_compiling() and len(originals) > 1:
            return self.solved_outside(index)
        if not is_plain() or not all(isinstance(x, torch.nn.Parameter) for x in originals):
            return self.evaluate(originals)[index]
        return self.solved(index, originals)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def solved_outside(self, index: int) -> Tensor:
        """A compiled graph breaks here: the solution is shared with other layers."""
        return self.solved(index, self.originals)

    def solved(self, index: int, originals: list[Tensor]) -> Tensor:
        """From the last solution, as long as nothing has changed."""
        inference = torch.is_inference_mode_enabled()
        versions = [(id(x), x._version, x.data_ptr(), x.requires_grad) for x in originals]
        key = (inference, self.k, self.lam, _steps, versions)
        if key != self._key:
            self._key, self._ys = None, ()  # before there is a new one: they may be large
            self._ys = self._solve(originals, inference)
            self._key = key
        y = self._ys[index]
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
        values = [_values(w, self.settings.unit) for w in weights]
        kept = self._topk(values, hard)
        if self.settings.unit == "weight":
            return kept
        return [_scale_rows(*each) for each in zip(weights, values, kept, strict=True)]

    def _topk(self, values: list[Tensor], hard: bool) -> list[Tensor]:
        settings = self.settings
        if settings.operator is not None and not hard:
            flat = (
                torch.cat([v.flatten() for v in values]) if len(values) > 1 else values[0].flatten()
            )
            parts = settings.operator(flat, self.k).split([v.numel() for v in values])
            return [part.view_as(v) for part, v in zip(parts, values, strict=True)]
        k: Number = self._k if torch.compiler.is_compiling() else self.k
        lam = 0.0 if hard else self._current_lam(values)
        options: Any = {"p": settings.p, "straight_through": settings.straight_through and not hard}
        if len(values) > 1 or self.processes is not None:
            return topk_mag_multi(values, k, lam, group=self.processes, **options)
        return [topk_mag(values[0].flatten(), k, lam, **options).view_as(values[0])]

    def _current_lam(self, values: list[Tensor]) -> Number:
        """By the scaling law, weights c times as large have the same top-k with c^(2-p) lam."""
        lam: Number = self._lam if torch.compiler.is_compiling() else self.lam
        p = self.settings.p
        if self.settings.lam_scale is None or p == 2.0:
            return lam
        squares = [v.detach().to(torch.float64).square().sum().cpu() for v in values]
        mean = torch.stack(squares).sum() / sum(v.numel() for v in values)
        return lam * torch.where(mean > 0, mean, 1.0) ** (1.0 - p / 2)


def _values(w: Tensor, unit: str) -> Tensor:
    """What is selected: the weights, or the norms of their rows."""
    return w if unit == "weight" else w.flatten(1).norm(dim=1)


def _count_units(w: Tensor, unit: str) -> int:
    return w.numel() if unit == "weight" else w.shape[0]


def _scale_rows(w: Tensor, norm: Tensor, kept: Tensor) -> Tensor:
    scale = torch.where(norm > 0, kept / torch.where(norm > 0, norm, 1.0), 0.0)
    return w * scale.reshape(-1, *[1] * (w.ndim - 1))


_steps = 0  # of all optimisers: fused ones change a parameter and leave its version as it was


def _count_step(*_: object) -> None:
    global _steps
    _steps += 1


register_optimizer_step_post_hook(_count_step)


class Pruned(torch.nn.Module):
    """The parametrisation of a pruned parameter; made by ``prune``."""

    def __init__(self, group: _Group, index: int) -> None:
        super().__init__()
        self.group, self.index = group, index

    def forward(self, w: Tensor) -> Tensor:
        return self.group.output(self.index, w)

    def get_extra_state(self) -> Tensor:
        """k, lam and the step of the schedules, which go with the model's state dict."""
        group = self.group
        return torch.tensor([group.k, group.lam, group.step, group.chosen], dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        k, lam, step, self.group.chosen = state.tolist()
        self.group.set(int(k), lam, int(step))

    def extra_repr(self) -> str:
        shared = f" of {len(self.group.members)} tensors" if len(self.group.members) > 1 else ""
        return f"k={self.group.k}{shared}, lam={self.group.lam:g}"


class PrunedShard(Pruned):
    """Beside a parameter that FSDP manages: the weights W that are trained, and whose top-k it holds."""

    def __init__(self, group: _Group, index: int, parameter: str, y: Tensor) -> None:
        super().__init__(group, index)
        self.parameter = parameter
        self.original = torch.nn.Parameter(y.detach().clone(), requires_grad=y.requires_grad)


class Pruner:
    """What ``prune`` returns: it steps the schedules, as one steps those of a learning rate."""

    def __init__(self, groups: list[_Group], schedules: tuple[Schedule, ...]) -> None:
        self._groups, self._schedules = groups, schedules
        self._move(0)

    def _move(self, step: int) -> None:
        for group in self._groups:
            group.advance(step, self._schedules)

    @property
    def last_step(self) -> int:
        return self._groups[0].step

    def step(self) -> None:
        """Once after every step of the optimiser."""
        self._move(self.last_step + 1)

    def state_dict(self) -> dict[str, int]:
        """The model's state dict has it too, with k and lam."""
        return {"step": self.last_step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._move(state["step"])


def prune(
    model: torch.nn.Module,
    keep: Keep | Mapping[str | type[torch.nn.Module], Keep] = 0.1,
    lam: float | ChooseLam = 1e-4,
    *,
    p: float = 2.0,
    scope: Literal["tensor", "global"] = "tensor",
    modules: Names | None = None,
    exclude: Names | None = None,
    schedule: Schedule | Sequence[Schedule] | None = None,
    unit: Literal["weight", "row"] = "weight",
    operator: Operator | None = None,
    lam_scale: Literal["rms"] | None = None,
    straight_through: bool = False,
) -> Pruner:
    """Parametrise weights of a model, in place, by ``topk_mag``.

    - ``keep``: a float is the share that is kept, an int the number; for all, or a mapping from names
      or module types to it (what no key matches stays as it is). Of each tensor by itself
      (``scope="tensor"``), or of all of them together ("global").
    - ``lam``: how far the selection is relaxed, 0 is hard; or a ``ChooseLam``. ``lam_scale="rms"`` takes
      it in units of the weights' root mean square to the power 2 - p (for p = 2 it is a pure number).
    - ``modules``, ``exclude``: module types, and names of modules or parameters. By default the weights
      of linear, convolution and embedding layers; a name of a container means those below it, and
      the full name of a parameter that one, whatever the module.
    - ``schedule``: a ``KeepSchedule``, a ``LamSchedule``, or both.
    - ``unit="row"`` keeps whole rows, by their norm, and counts rows.
    - ``operator(w, k)`` replaces ``topk_mag``: it is given the weights (or norms) as a vector.
    - ``straight_through=True``: exactly k weights in the forward, the relaxed gradient in the backward.

    The model may be one that FSDP2 has sharded, with ``scope="global"``: call ``prune`` on all ranks, on
    the module whose forward is called, after ``fully_shard`` and before the optimiser is made.

    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    >>> pruner = prune(model, keep=0.25, lam=0)
    >>> [int((layer.weight != 0).sum()) for layer in (model[0], model[2])]
    [512, 80]
    """
    _check_choice("scope", scope, ("tensor", "global"))
    _check_choice("unit", unit, ("weight", "row"))
    _check_choice("lam_scale", lam_scale, (None, "rms"))
    check_exponent(p)
    if not isinstance(lam, ChooseLam):
        check_number("lam", lam)
        check_lam(lam, readable=True)
    if operator is not None and straight_through:
        raise ValueError("straight_through must be False when an operator is given, got True")
    if scope == "global" and isinstance(keep, Mapping):
        raise TypeError("keep must be a number when scope='global', got a mapping")
    targets = _targets(model, keep, modules, exclude)
    settings = _Settings(p, unit, operator, lam_scale, straight_through)
    first_lam = lam if isinstance(lam, ChooseLam) else float(lam)
    parts = [targets] if scope == "global" else [[target] for target in targets]
    schedules = _schedules(schedule)
    groups = [_group(part, settings, first_lam) for part in parts]
    sharded = any(_is_sharded(target) for target in targets)
    if sharded:
        _check_sharded(settings, scope, lam)
        groups[0].processes = _shard_group(targets)
    for group, part in zip(groups, parts, strict=True):  # every argument is checked by now
        _register_sharded(group, part, model) if sharded else _register(group, part)
    return Pruner(groups, schedules)


def _is_sharded(target: _Target) -> bool:
    return hasattr(getattr(target.module, target.parameter), "placements")  # a DTensor


def _check_sharded(settings: _Settings, scope: str, lam: float | ChooseLam) -> None:
    """What needs more than the shards of a rank and a few numbers of the others is left out."""
    _check_choice("scope, on sharded parameters,", scope, ("global",))
    _check_choice("unit, on sharded parameters,", settings.unit, ("weight",))
    _check_choice("operator, on sharded parameters,", settings.operator, (None,))
    _check_choice("lam_scale, on sharded parameters,", settings.lam_scale, (None,))
    if isinstance(lam, ChooseLam):
        raise ValueError(f"lam must be a number on sharded parameters, got {lam}")


def _shard_group(targets: list[_Target]) -> Any:
    from .fsdp import shard_group  # which needs torch.distributed

    return shard_group([(t.name, getattr(t.module, t.parameter)) for t in targets])


def _schedules(schedule: Schedule | Sequence[Schedule] | None) -> tuple[Schedule, ...]:
    if isinstance(schedule, (KeepSchedule, LamSchedule)):
        return (schedule,)
    for each in schedule or ():
        if not isinstance(each, (KeepSchedule, LamSchedule)):
            raise TypeError(f"schedule must be a KeepSchedule or a LamSchedule, got {each!r}")
    return tuple(schedule or ())


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        expected = " or ".join(map(repr, choices))
        raise ValueError(f"{name} must be {expected}, got {value!r}")


class _Target(NamedTuple):
    name: str
    module: torch.nn.Module
    parameter: str
    keep: Keep


def _targets(
    model: torch.nn.Module,
    keep: Keep | Mapping[str | type[torch.nn.Module], Keep],
    modules: Names | None,
    exclude: Names | None,
) -> list[_Target]:
    chosen = tuple(modules) if modules is not None else MODULES
    if isinstance(keep, Mapping) and modules is None:
        chosen = tuple(keep)
    excluded, found = tuple(exclude or ()), []
    unmatched = {key for key in (*chosen, *excluded) if isinstance(key, str)}
    for path, module in model.named_modules():
        if isinstance(module, (parametrize.ParametrizationList, Pruned)):
            continue
        for parameter in (*module._parameters, *_parametrizations(module)):
            name = f"{path}.{parameter}" if path else parameter
            matches = [key for key in chosen if _matches(key, name, path, module, parameter)]
            left_out = [key for key in excluded if _is_below(key, name, module)]
            unmatched -= {*matches, *left_out}
            share = _keep_of(keep, name, path, module, parameter) if matches else None
            if share is None or left_out or getattr(module, parameter) is None:
                continue
            pruned = parametrize.is_parametrized(module, parameter)
            if pruned or _beside(parameter) in module._modules:
                raise ValueError(f"{name} must be a plain parameter, got one that is parametrised")
            found.append(_Target(name, module, parameter, share))
    if unmatched:
        raise ValueError(
            f"modules and exclude must name parts of the model, got {min(unmatched)!r}"
        )
    if not found:
        raise ValueError("the model must have a parameter to prune, got none that is chosen")
    return found


def _matches(
    key: str | type, name: str, path: str, module: torch.nn.Module, parameter: str
) -> bool:
    if isinstance(key, type):
        return isinstance(module, key) and parameter == "weight"
    if key == name or (key == path and parameter == "weight"):
        return True
    return path.startswith(key + ".") and isinstance(module, MODULES) and parameter == "weight"


def _is_below(key: str | type, name: str, module: torch.nn.Module) -> bool:
    if isinstance(key, type):
        return isinstance(module, key)
    return name == key or name.startswith(key + ".")


def _keep_of(
    keep: Keep | Mapping[str | type[torch.nn.Module], Keep],
    name: str,
    path: str,
    module: torch.nn.Module,
    parameter: str,
) -> Keep | None:
    """Names come before types, longer names before shorter ones."""
    if not isinstance(keep, Mapping):
        return keep
    keys = [key for key in keep if _matches(key, name, path, module, parameter)]
    keys.sort(key=lambda key: -len(key) if isinstance(key, str) else 0)
    return keep[keys[0]] if keys else None


def _group(targets: list[_Target], settings: _Settings, lam: float | ChooseLam) -> _Group:
    for target in targets:
        shape = tuple(getattr(target.module, target.parameter).shape)
        if settings.unit == "row" and len(shape) < 2:
            raise ValueError(f"{target.name} must have rows when unit='row', got shape {shape}")
    units = sum(_count_units(w, settings.unit) for w in _distinct(targets))
    return _Group(settings, _count(targets[0], units), lam)


def _distinct(targets: list[_Target]) -> list[Tensor]:
    """Tied weights are one."""
    parameters = (getattr(target.module, target.parameter) for target in targets)
    return list({id(w): w for w in parameters}.values())


def _register(group: _Group, targets: list[_Target]) -> None:
    index = {id(w): i for i, w in enumerate(_distinct(targets))}
    for module, parameter in ((target.module, target.parameter) for target in targets):
        pruned = Pruned(group, index[id(getattr(module, parameter))])
        parametrize.register_parametrization(module, parameter, pruned, unsafe=True)
        if pruned.index == len(group.members):
            group.members.append(_parametrizations(module)[parameter])


def _beside(parameter: str) -> str:
    return f"pruned_{parameter}"


def _register_sharded(group: _Group, targets: list[_Target], model: torch.nn.Module) -> None:
    from .fsdp import Link

    ys: dict[int, Tensor] = {}
    for module, parameter in ((target.module, target.parameter) for target in targets):
        y = getattr(module, parameter)
        if id(y) not in ys:  # tied weights are one
            part = PrunedShard(group, len(ys), parameter, y)
            module.add_module(_beside(parameter), part)
            group.members.append(part)
            ys[id(y)] = y
    settings = lambda: (group.k, group.lam, _steps)  # noqa: E731
    group.link = Link(model, group.originals, [*ys.values()], group.evaluate, settings)


def _parametrizations(module: torch.nn.Module) -> dict[str, Any]:
    if not parametrize.is_parametrized(module):
        return {}
    return dict(module.parametrizations.items())  # type: ignore[operator, union-attr]


def _count(target: _Target, units: int) -> int:
    keep = target.keep
    check_number("keep", keep)
    if isinstance(keep, int):
        if not 1 <= keep <= units:
            raise ValueError(f"keep must be in [1, {units}] for {target.name}, got {keep}")
        return keep
    if not 0 < keep <= 1:
        raise ValueError(f"keep must be an int, or a share in (0, 1], got {keep}")
    return max(1, round(keep * units))


def _pruned(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str, Pruned]]:
    for path, module in model.named_modules():
        for parameter, parts in _parametrizations(module).items():
            for part in parts:
                if isinstance(part, Pruned):
                    yield f"{path}.{parameter}" if path else parameter, module, parameter, part
        for part in module.children():
            if isinstance(part, PrunedShard):
                name = f"{path}.{part.parameter}" if path else part.parameter
                yield name, module, part.parameter, part


def _pruned_now(module: torch.nn.Module, parameter: str, part: Pruned) -> tuple[Tensor, Tensor]:
    """y and W as they are, or the shards of this rank."""
    if part.group.link is not None:
        part.group.link.refresh()
        return getattr(module, parameter).to_local(), part.group.shards[part.index]
    return getattr(module, parameter), _parametrizations(module)[parameter].original


def report(model: torch.nn.Module) -> list[Row]:
    """Print how sparse the pruned parameters are, one line for each, and return the lines.

    Over a sharded model every rank calls it, and the first one prints.
    """
    found = list(_pruned(model))
    with torch.no_grad():
        pairs = [_pruned_now(module, parameter, part) for _, module, parameter, part in found]
        counts = torch.tensor(
            [[int((y != 0).sum()), int(((y != 0) & (y != w)).sum())] for y, w in pairs]
        )
    processes = next((part.group.processes for *_, part in found), None)
    if processes is not None:
        counts = Shared(processes).sum(counts)
    rows = []
    for (name, _, _, part), (kept, fractional) in zip(found, counts.tolist(), strict=True):
        w = part.group.originals[part.index]
        rows.append(Row(name, tuple(w.shape), kept, kept / max(w.numel(), 1), fractional))
    if processes is None or Shared(processes).rank == 0:
        _print(rows)
    return rows


def _print(rows: list[Row]) -> None:
    width = max([5, *(len(row.name) for row in rows)])
    print(f"{'layer':{width}}  {'shape':>18}  {'kept':>11}  fraction  fractional")
    for row in [*rows, _total(rows)]:
        shape = "x".join(map(str, row.shape))
        print(
            f"{row.name:{width}}  {shape:>18}  {row.kept:11,d}  {row.fraction:8.4f}"
            f"  {row.fractional:10,d}"
        )


def _total(rows: list[Row]) -> Row:
    n, kept = sum(math.prod(row.shape) for row in rows), sum(row.kept for row in rows)
    return Row("total", (n,), kept, kept / max(n, 1), sum(row.fractional for row in rows))


def _own_class(module: torch.nn.Module) -> None:
    """Copies of a module share the class that torch made for it, from which a removal takes the
    parameter: for all of them."""
    shared = type(module)
    members = {k: v for k, v in vars(shared).items() if k not in ("__dict__", "__weakref__")}
    module.__class__ = type(shared.__name__, shared.__bases__, members)


def finalize(model: torch.nn.Module, hard: bool = False) -> torch.nn.Module:
    """Replace pruned parameters by plain ones, as the layers see them now; returns the model.

    With ``hard=True`` by their hard limit, exactly k of them. The parameters are the ones that the
    optimiser has.
    """
    found = list(_pruned(model))
    with torch.no_grad():
        groups = {id(part.group): part.group for *_, part in found}
        hard_values = {
            key: group.evaluate(group.shards, hard=True) for key, group in groups.items() if hard
        }
        values = [
            hard_values[id(part.group)][part.index]
            if hard
            else _pruned_now(module, parameter, part)[0].clone()
            for _, module, parameter, part in found
        ]
        for (_, module, parameter, part), value in zip(found, values, strict=True):
            if part.group.link is not None:
                continue
            _own_class(module)
            parametrize.remove_parametrizations(module, parameter, leave_parametrized=False)
            getattr(module, parameter).copy_(value)
        for group in groups.values():
            if group.link is not None:
                mine = [
                    v for (*_, part), v in zip(found, values, strict=True) if part.group is group
                ]
                group.link.write(mine)
                group.link.remove()
        for _, module, parameter, part in found:
            if isinstance(part, PrunedShard):
                delattr(module, _beside(parameter))
    return model
