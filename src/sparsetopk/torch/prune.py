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
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from .._checks import check_choice, check_exponent, check_positive_int
from ._prune.pretrained import rename_tied, restore_tied
from ._prune.pruned import Frozen, Group, Operator, Pruned, PrunedShard, Settings, beside
from ._prune.schedules import ChooseLam, KeepSchedule, LamSchedule, Schedule, check_schedules
from ._prune.targets import (
    Keep,
    Names,
    Target,
    by_weight,
    count_kept,
    distinct,
    find_targets,
    parametrizations,
)
from ._prune.units import Pattern, Unit, Weights, unit_of
from ._rows.arguments import check_lam, check_number
from ._spread.groups import Shared

__all__ = [
    "ChooseLam",
    "Coverage",
    "KeepSchedule",
    "LamSchedule",
    "Pruner",
    "Row",
    "erdos_renyi",
    "finalize",
    "prune",
    "report",
]


class Row(NamedTuple):
    """A pruned parameter in a report."""

    name: str
    shape: tuple[int, ...]
    kept: int  # weights that are not 0
    fraction: float  # the share of these
    fractional: int  # of these, the ones that are neither left out nor as they were


class Coverage(NamedTuple):
    """How much of a model is pruned."""

    pruned: int  # weights of pruned parameters
    total: int  # of all parameters
    left_out: tuple[str, ...]  # parameters with rows and columns that are not pruned

    def __str__(self) -> str:
        share = f"{self.pruned:,d} of {self.total:,d} weights ({self.pruned / self.total:.1%})"
        return share + (f"; left out: {', '.join(self.left_out)}" if self.left_out else "")


class Pruner:
    """What ``prune`` returns: it steps the schedules, as one steps those of a learning rate, and its
    ``coverage`` says how much of the model is pruned, and what is not."""

    def __init__(
        self, groups: list[Group], schedules: tuple[Schedule, ...], coverage: Coverage
    ) -> None:
        self._groups, self._schedules, self.coverage = groups, schedules, coverage
        self._move(0)

    def __repr__(self) -> str:
        return f"Pruner({self.coverage})"

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
    keep: Keep | Mapping[str | type[torch.nn.Module], Keep] | None = None,
    lam: float | ChooseLam | None = None,
    *,
    p: float | None = None,
    scope: Literal["tensor", "global"] = "tensor",
    modules: Names | None = None,
    exclude: Names | None = None,
    schedule: Schedule | Sequence[Schedule] | None = None,
    unit: Unit = "weight",
    operator: Operator | None = None,
    lam_scale: Literal["rms"] | None = None,
    straight_through: bool = False,
    steps: int | None = None,
) -> Pruner:
    """Parametrise weights of a model, in place, by ``topk_mag``.

    - ``keep``: a float is the share that is kept (0.1 by default), an int the number; for all, or a
      mapping from names or module types to it (what no key matches stays as it is). Of each tensor by
      itself (``scope="tensor"``), or of all of them together ("global"); ``erdos_renyi`` makes a
      mapping.
    - ``steps``: for how many steps the model will be trained. What is kept then goes down from all in
      the first half of them, by a ``KeepSchedule``: call ``step()`` of the result after every one.
    - ``lam``: how far the selection is relaxed, 0 is hard; or a ``ChooseLam``. ``lam_scale="rms"`` takes
      it in units of the weights' root mean square to the power 2 - p (for p = 2 it is a pure number).
      By default lam is 0 with ``steps``; without, it is 1 in these units, with p = 4/3 (on sharded
      parameters p = 2): what did well in each case. With a lam, p is 2 by default.
    - ``modules``, ``exclude``: module types, and names of modules or parameters; or a function of the
      name of a parameter and the parameter. By default every ``weight`` that is at least a matrix
      (linear, convolution and embedding layers, the ``Conv1D`` of GPT-2), and the projections of
      ``MultiheadAttention``; a name of a container means those below it, and the full name of a
      parameter that one, whatever the module. ``Pruner.coverage`` says what was left out.
      Parameters that are tied stay so, and count once; all their owners must be chosen alike.
    - ``schedule``: a ``KeepSchedule``, a ``LamSchedule``, or both.
    - ``unit="row"`` keeps whole rows, by their norm, and counts rows; a pair such as (16, 16) blocks of
      a matrix. "2:4" keeps 2 of every 4 weights that follow each other in a row, which sparse tensor
      cores can use; there is no ``keep`` then.
    - ``operator(w, k)`` replaces ``topk_mag``: it is given the weights (or norms) as a vector.
    - ``straight_through=True``: exactly k weights in the forward, the relaxed gradient in the backward.

    The model may be one that FSDP2 has sharded, with ``scope="global"``: call ``prune`` on all ranks, on
    the module whose forward is called, after ``fully_shard`` and before the optimiser is made.

    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    >>> pruner = prune(model, keep=0.25, lam=0)
    >>> [int((layer.weight != 0).sum()) for layer in (model[0], model[2])]
    [512, 80]
    """
    check_choice("scope", scope, ("tensor", "global"))
    kind = unit_of(unit)
    keep = _keep_by_default(keep, kind, scope, lam, operator)
    lam, schedule, relaxed = _recipe(lam, schedule, steps)
    _check_numbers(lam, p, lam_scale)
    _check_together(keep, scope, operator, straight_through)
    targets = find_targets(model, keep, modules, exclude)
    if relaxed and not _are_sharded(targets):
        p, lam_scale = 4 / 3 if p is None else p, "rms"
    settings = Settings(2.0 if p is None else p, kind, operator, lam_scale, straight_through)
    return _registered(model, targets, scope, settings, lam, check_schedules(schedule))


def _check_numbers(lam: float | ChooseLam, p: float | None, lam_scale: object) -> None:
    if lam_scale not in (None, "rms"):
        raise ValueError(f"lam_scale must be None or 'rms', got {lam_scale!r}")
    if p is not None:
        check_exponent(p)
    if not isinstance(lam, ChooseLam):
        check_number("lam", lam)
        check_lam(lam, readable=True)


def _check_together(keep: Any, scope: str, operator: Operator | None, straight: bool) -> None:
    """Arguments that exclude each other."""
    if operator is not None and straight:
        raise ValueError("straight_through must be False when an operator is given, got True")
    if scope == "global" and isinstance(keep, Mapping):
        raise TypeError("keep must be a number when scope='global', got a mapping")


def _are_sharded(targets: Sequence[Target]) -> bool:
    return any(hasattr(target.weight, "placements") for target in targets)  # DTensors


def _registered(
    model: torch.nn.Module,
    targets: list[Target],
    scope: str,
    settings: Settings,
    lam: float | ChooseLam,
    schedules: tuple[Schedule, ...],
) -> Pruner:
    """Makes the groups, then registers them: by then every argument has been checked."""
    parts = [targets] if scope == "global" else by_weight(targets)
    coverage = _coverage(model, targets)
    first_lam = lam if isinstance(lam, ChooseLam) else float(lam)
    groups = [_group(part, settings, first_lam) for part in parts]
    if _are_sharded(targets):
        from ._prune import fsdp  # which needs torch.distributed

        fsdp.check_sharded(settings, scope, lam)
        groups[0].processes = fsdp.shard_group(targets)
        fsdp.register(groups[0], targets, model)
    else:
        for group, part in zip(groups, parts, strict=True):
            _register(group, part)
        rename_tied(model, [target.name for target in targets])
    return Pruner(groups, schedules, coverage)


def _keep_by_default(
    keep: Any, unit: Weights, scope: str, lam: float | ChooseLam | None, operator: Operator | None
) -> Any:
    """What is kept of every tensor, or of every m weights."""
    if not isinstance(unit, Pattern):
        return 0.1 if keep is None else keep
    name = f"when unit='{unit.n}:{unit.m}'"
    if keep is not None:
        raise ValueError(f"keep must be None {name}, which says it, got {keep!r}")
    check_choice(f"scope, {name},", scope, ("tensor",))
    if isinstance(lam, ChooseLam) or operator is not None:
        given = lam if isinstance(lam, ChooseLam) else operator
        raise ValueError(f"lam must be a number and operator None {name}, got {given!r}")
    return unit.n


def _coverage(model: torch.nn.Module, targets: list[Target]) -> Coverage:
    parameters = {id(w): (name, w) for name, w in model.named_parameters()}
    pruned = {id(w): w.numel() for w in distinct(targets)}
    left_out = tuple(
        name for key, (name, w) in parameters.items() if key not in pruned and w.ndim > 1
    )
    total = sum(w.numel() for _, w in parameters.values())
    return Coverage(sum(pruned.values()), total, left_out)


def erdos_renyi(
    model: torch.nn.Module,
    keep: float,
    *,
    modules: Names | None = None,
    exclude: Names | None = None,
) -> dict[str | type[torch.nn.Module], Keep]:
    """A ``keep`` for every parameter that ``prune`` would choose, with which the share ``keep`` of all
    their weights remains: in proportion to the sum of a weight's dimensions over their product (ERK), so
    that large layers are sparser. A layer that would keep more than it has is left dense.

    >>> model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Linear(100, 10))
    >>> {name: round(share, 3) for name, share in erdos_renyi(model, 0.1).items()}
    {'0.weight': 0.071, '1.weight': 0.39}
    """
    if not 0 < keep <= 1:
        raise ValueError(f"keep must be a share in (0, 1], got {keep}")
    targets = find_targets(model, keep, modules, exclude)
    first = {id(target.weight): target for target in reversed(targets)}
    open_, left = list(first.values()), keep * sum(t.weight.numel() for t in first.values())
    share: dict[int, float] = {}
    while open_:
        scale = left / sum(sum(target.weight.shape) for target in open_)
        density = [scale * sum(t.weight.shape) / t.weight.numel() for t in open_]
        full = [t for t, d in zip(open_, density, strict=True) if d >= 1.0]
        if not full:
            share |= {id(t.weight): d for t, d in zip(open_, density, strict=True)}
            break
        share |= {id(t.weight): 1.0 for t in full}
        left -= sum(t.weight.numel() for t in full)
        open_ = [t for t in open_ if id(t.weight) not in share]
    return {target.name: share[id(target.weight)] for target in targets}


def _recipe(
    lam: float | ChooseLam | None, schedule: Schedule | Sequence[Schedule] | None, steps: int | None
) -> tuple[float | ChooseLam, Schedule | Sequence[Schedule] | None, bool]:
    """lam and the schedules, with what did well where nothing was said; whether lam was chosen here,
    and relaxes."""
    if steps is None:
        return 1.0 if lam is None else lam, schedule, lam is None
    check_positive_int("steps", steps)
    if schedule is not None:
        raise ValueError(f"schedule must be None when steps is given, got {schedule!r}")
    return 0.0 if lam is None else lam, KeepSchedule(max(1, steps // 2)), False


def _group(targets: list[Target], settings: Settings, lam: float | ChooseLam) -> Group:
    for target in targets:
        settings.unit.check(target.name, tuple(target.weight.shape))
    units = sum(settings.unit.count(w) for w in distinct(targets))
    return Group(settings, count_kept(targets[0], units), lam)


def _register(group: Group, targets: list[Target]) -> None:
    index = {id(w): i for i, w in enumerate(distinct(targets))}
    for target in targets:
        pruned = Pruned(group, index[id(target.weight)])
        parametrize.register_parametrization(target.module, target.parameter, pruned, unsafe=True)
        if pruned.index == len(group.members):
            group.members.append(parametrizations(target.module)[target.parameter])


def _pruned(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str, Pruned]]:
    for path, module in model.named_modules():
        for parameter, parts in parametrizations(module).items():
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
    return getattr(module, parameter), parametrizations(module)[parameter].original


def report(model: torch.nn.Module) -> list[Row]:
    """Print how sparse the pruned parameters are, one line for each, and return the lines; tied ones
    have one line, under the first of their names.

    Over a sharded model every rank calls it, and the first one prints.
    """
    first: dict[tuple[int, int], tuple[str, torch.nn.Module, str, Pruned]] = {}
    for each in _pruned(model):
        first.setdefault((id(each[-1].group), each[-1].index), each)
    found = list(first.values())
    with torch.no_grad():
        pairs = [_pruned_now(module, parameter, part) for _, module, parameter, part in found]
        counts = torch.tensor(
            [[int((y != 0).sum()), int(((y != 0) & (y != w)).sum())] for y, w in pairs],
            device="cpu",
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
        _warn([each[-1].group for each in found], rows)
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


def _warn(groups: list[Group], rows: list[Row]) -> None:
    """Once, if lam is so small or so large that no selection is learned."""
    counted = [row for group, row in zip(groups, rows, strict=True) if group.is_relaxed]
    if not counted or any(group.warned for group in groups):
        return
    n, kept, fractional = math.prod(_total(counted).shape), *_total(counted)[2::2]
    if fractional == 0:
        advice = "the selection is hard in effect, with slopes of 1/lam; take a larger lam"
    elif kept == n:
        advice = "nothing is left out; take a smaller lam"
    else:
        return
    for group in groups:
        group.warned = True
    lam = next(group.lam for group in groups if group.is_relaxed)
    warnings.warn(
        f"{fractional} of {n} pruned weights compete at lam={lam:g}: {advice}, or a ChooseLam",
        stacklevel=3,
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


def finalize(
    model: torch.nn.Module, hard: bool = False, *, freeze: bool = False
) -> torch.nn.Module:
    """Replace pruned parameters by plain ones, as the layers see them now; returns the model.

    With ``hard=True`` by their hard limit, exactly k of them. The parameters are the ones that the
    optimiser has. With ``freeze=True`` what is 0 stays 0 while the model is trained further, whatever
    the optimiser does; a second ``finalize`` makes them plain.
    """
    _thaw(model)
    found = list(_pruned(model))
    with torch.no_grad():
        groups = {id(part.group): part.group for *_, part in found}
        if freeze and any(group.link is not None for group in groups.values()):
            raise ValueError("freeze must be False on sharded parameters, got True")
        exact = {
            key: group.evaluate(group.shards, hard=True) for key, group in groups.items() if hard
        }
        values: dict[int, list[Tensor]] = {key: [] for key in groups}
        for _, module, parameter, part in found:
            key = id(part.group)
            y = exact[key][part.index] if hard else _pruned_now(module, parameter, part)[0].clone()
            values[key].append(y)
        for key, group in groups.items():
            if group.link is not None:
                group.link.finish(values[key])
        for _, module, parameter, part in found:
            _make_plain(module, parameter, part, values[id(part.group)].pop(0))
    restore_tied(model)
    if freeze:
        for _, module, parameter, _ in found:
            mask = Frozen(getattr(module, parameter).detach() != 0)
            parametrize.register_parametrization(module, parameter, mask, unsafe=True)
        rename_tied(model, [name for name, *_ in found])
    return model


def _thaw(model: torch.nn.Module) -> None:
    """Frozen parameters as plain ones, 0 where they are seen as 0."""
    for module in list(model.modules()):
        for parameter, parts in parametrizations(module).items():
            if any(isinstance(part, Frozen) for part in parts):
                value = getattr(module, parameter).detach().clone()
                _plain(module, parameter, value)


def _plain(module: torch.nn.Module, parameter: str, value: Tensor) -> None:
    _own_class(module)
    parametrize.remove_parametrizations(module, parameter, leave_parametrized=False)
    with torch.no_grad():
        getattr(module, parameter).copy_(value)


def _make_plain(module: torch.nn.Module, parameter: str, part: Pruned, value: Tensor) -> None:
    if isinstance(part, PrunedShard):  # the parameter has its value already
        delattr(module, beside(parameter))
        return
    _plain(module, parameter, value)
