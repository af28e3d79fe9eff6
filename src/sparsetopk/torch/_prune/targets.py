"""Which parameters of a model are pruned, and how many of their weights are kept."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from .._rows.arguments import check_number
from .pruned import Pruned, beside

Keep = int | float
Names = Collection[str | type[torch.nn.Module]] | Callable[[str, torch.nn.Parameter], bool]

_NORMS = (torch.nn.LayerNorm, torch.nn.RMSNorm)
_OF_ATTENTION = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


def is_matrix(module: torch.nn.Module, parameter: str) -> bool:
    """Whether a parameter is pruned unless others are named: ``weight``, of whatever module, if it has
    rows and columns and is no scale, and the projections of attention."""
    if isinstance(module, torch.nn.MultiheadAttention):
        return parameter in _OF_ATTENTION
    if parameter != "weight" or isinstance(module, _NORMS):
        return False
    return getattr(module._parameters.get("weight"), "ndim", 2) >= 2


class Target(NamedTuple):
    name: str
    module: torch.nn.Module
    parameter: str
    keep: Keep

    @property
    def weight(self) -> Any:
        return getattr(self.module, self.parameter)


def by_weight(targets: list[Target]) -> list[list[Target]]:
    """Those of tied weights together."""
    found: dict[int, list[Target]] = {}
    for target in targets:
        found.setdefault(id(target.weight), []).append(target)
    return list(found.values())


def distinct(targets: list[Target]) -> list[Tensor]:
    """Tied weights are one."""
    return list({id(target.weight): target.weight for target in targets}.values())


def find_targets(
    model: torch.nn.Module,
    keep: Keep | Mapping[str | type[torch.nn.Module], Keep],
    modules: Names | None,
    exclude: Names | None,
) -> list[Target]:
    chosen = _keys(keep if isinstance(keep, Mapping) and modules is None else modules)
    excluded, found = _keys(exclude) or (), []
    owners: dict[
        int, list[tuple[str, Keep | None]]
    ] = {}  # of every parameter, and what they ask for
    unmatched = {key for key in (*(chosen or ()), *excluded) if isinstance(key, str)}
    for path, module in model.named_modules():
        if isinstance(module, (parametrize.ParametrizationList, Pruned)):
            for parameter, value in module._parameters.items():
                owners.setdefault(id(value), []).append((f"{path}.{parameter}", None))
            continue
        for parameter in (*module._parameters, *parametrizations(module)):
            if getattr(module, parameter) is None:
                continue
            name = f"{path}.{parameter}" if path else parameter
            if chosen is None:
                matches: list[Any] = [is_matrix] if is_matrix(module, parameter) else []
            else:
                matches = [key for key in chosen if _matches(key, name, path, module, parameter)]
            left_out = [key for key in excluded if _is_below(key, name, module, parameter)]
            unmatched -= {*matches, *left_out}
            share = _keep_of(keep, name, path, module, parameter) if matches else None
            share = None if left_out else share
            if parameter in module._parameters:
                owners.setdefault(id(module._parameters[parameter]), []).append((name, share))
            if share is None:
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
    for target in found:
        _check_tied(owners.get(id(target.weight), []))
    return found


def _check_tied(owners: list[tuple[str, Keep | None]]) -> None:
    """That all who share a parameter ask for the same: there is one value for all of them."""
    if len({share for _, share in owners}) > 1:
        asked = (f"{name} {'as it is' if share is None else share}" for name, share in owners)
        raise ValueError(f"keep must be the same for tied parameters, got {', '.join(asked)}")


def _keys(names: Any) -> tuple[Any, ...] | None:
    return (names,) if callable(names) else None if names is None else tuple(names)


def _matches(key: Any, name: str, path: str, module: torch.nn.Module, parameter: str) -> bool:
    if isinstance(key, type):
        own = is_matrix(module, parameter) or parameter == "weight"
        return isinstance(module, key) and own
    if callable(key):
        return bool(key(name, getattr(module, parameter)))
    if key == name or (key == path and parameter == "weight"):
        return True
    return f"{path}.".startswith(key + ".") and is_matrix(module, parameter)


def _is_below(key: Any, name: str, module: torch.nn.Module, parameter: str) -> bool:
    if isinstance(key, type):
        return isinstance(module, key)
    if callable(key):
        return bool(key(name, getattr(module, parameter)))
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
