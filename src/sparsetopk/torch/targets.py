"""Which parameters of a model are pruned, and how many of their weights are kept."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from .arguments import check_number
from .pruned import Pruned, beside

Keep = int | float
Names = Collection[str | type[torch.nn.Module]]

#: The modules whose ``weight`` is pruned unless others are named.
MODULES = (
    torch.nn.Linear,
    torch.nn.Conv1d,
    torch.nn.Conv2d,
    torch.nn.Conv3d,
    torch.nn.Embedding,
)


class Target(NamedTuple):
    name: str
    module: torch.nn.Module
    parameter: str
    keep: Keep

    @property
    def weight(self) -> Any:
        return getattr(self.module, self.parameter)


def distinct(targets: list[Target]) -> list[Tensor]:
    """Tied weights are one."""
    return list({id(target.weight): target.weight for target in targets}.values())


def find_targets(
    model: torch.nn.Module,
    keep: Keep | Mapping[str | type[torch.nn.Module], Keep],
    modules: Names | None,
    exclude: Names | None,
) -> list[Target]:
    chosen = tuple(modules) if modules is not None else MODULES
    if isinstance(keep, Mapping) and modules is None:
        chosen = tuple(keep)
    excluded, found = tuple(exclude or ()), []
    unmatched = {key for key in (*chosen, *excluded) if isinstance(key, str)}
    for path, module in model.named_modules():
        if isinstance(module, (parametrize.ParametrizationList, Pruned)):
            continue
        for parameter in (*module._parameters, *parametrizations(module)):
            name = f"{path}.{parameter}" if path else parameter
            matches = [key for key in chosen if _matches(key, name, path, module, parameter)]
            left_out = [key for key in excluded if _is_below(key, name, module)]
            unmatched -= {*matches, *left_out}
            share = _keep_of(keep, name, path, module, parameter) if matches else None
            if share is None or left_out or getattr(module, parameter) is None:
                continue
            pruned = parametrize.is_parametrized(module, parameter)
            if pruned or beside(parameter) in module._modules:
                raise ValueError(f"{name} must be a plain parameter, got one that is parametrised")
            found.append(Target(name, module, parameter, share))
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


def count_kept(target: Target, units: int) -> int:
    keep = target.keep
    check_number("keep", keep)
    if isinstance(keep, int):
        if not 1 <= keep <= units:
            raise ValueError(f"keep must be in [1, {units}] for {target.name}, got {keep}")
        return keep
    if not 0 < keep <= 1:
        raise ValueError(f"keep must be an int, or a share in (0, 1], got {keep}")
    return max(1, round(keep * units))


def parametrizations(module: torch.nn.Module) -> dict[str, Any]:
    if not parametrize.is_parametrized(module):
        return {}
    return dict(module.parametrizations.items())  # type: ignore[operator, union-attr]
