"""What the modules of this package have in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._rows.arguments import Number


class Module(torch.nn.Module):
    """k, lam and the keyword arguments of a function."""

    k: Number
    lam: Number

    def __init__(self, k: Number, lam: Number, **options: Any) -> None:
        super().__init__()
        self._keep("k", k)
        self._keep("lam", lam)
        self.options = options

    def _keep(self, name: str, value: Number) -> None:
        if isinstance(value, Tensor) and not isinstance(value, torch.nn.Parameter):
            self.register_buffer(name, value)
        else:
            setattr(self, name, value)

    def extra_repr(self) -> str:
        shown = {"k": _short(self.k), "lam": _short(self.lam), **self.options}
        return ", ".join(f"{key}={value}" for key, value in shown.items())


def _short(value: Number) -> str:
    if not isinstance(value, Tensor):
        return f"{value:g}"
    return f"{type(value).__name__}{tuple(value.shape)}"


class HardenedModule(Module):
    """A module that may be hard in evaluation mode."""

    def __init__(self, k: Number, lam: Number, *, hard_eval: bool, **options: Any) -> None:
        super().__init__(k, lam, **options)
        self.hard_eval = hard_eval

    @property
    def current_lam(self) -> Number:
        """lam, or 0 where the module is hard."""
        return 0.0 if self.hard_eval and not self.training else self.lam

    def extra_repr(self) -> str:
        return super().extra_repr() + (", hard_eval=True" if self.hard_eval else "")
