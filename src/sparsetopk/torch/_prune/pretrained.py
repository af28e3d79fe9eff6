"""Models of the transformers library while they are pruned: it finds tied weights by their names, which
a parametrisation changes. Nothing of that library is imported; other models stay as they are."""

from __future__ import annotations

import re
from typing import Any

import torch

_HELD = ("all_tied_weights_keys", "_tied_weights_keys")  # of names to those they are tied to


def rename_tied(model: torch.nn.Module, names: list[str]) -> None:
    """After ``prune``: tied parameters have the names of what is trained in their place."""
    if not hasattr(model, _HELD[0]):
        return
    new = {name: re.sub(r"([^.]+)$", r"parametrizations.\1.original", name) for name in names}
    _rename(model, new)
    model.resize_token_embeddings = _refuse  # type: ignore[assignment]


def restore_tied(model: torch.nn.Module) -> None:
    """After ``finalize``."""
    if model.__dict__.pop("resize_token_embeddings", None) is None:
        return
    names = {
        name for held in _HELD for pair in (getattr(model, held) or {}).items() for name in pair
    }
    _rename(
        model, {name: re.sub(r"parametrizations\.(.+)\.original$", r"\1", name) for name in names}
    )


def _rename(model: torch.nn.Module, new: dict[str, str]) -> None:
    for held in _HELD:
        tied = getattr(model, held, None)
        if isinstance(tied, dict):
            renamed = {new.get(name, name): new.get(to, to) for name, to in tied.items()}
            setattr(model, held, renamed)


def _refuse(*_: Any, **__: Any) -> None:
    raise RuntimeError(
        "resize_token_embeddings puts other parameters, with another number of weights, in the place of "
        "pruned ones: call it before prune; or finalize(model), resize, prune(model) again and give the "
        "optimiser the new parameters"
    )
