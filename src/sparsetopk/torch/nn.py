"""Modules over the functions of this package; they hold no state but what they are given.

``k`` and ``lam`` are numbers, tensors (kept as buffers) or parameters (trained, if they require
gradients, and taken at the nearest end where they have left [0, n] or are below 0); ``lam`` may be a
``RunningLam``. With ``hard_eval=True`` a module in evaluation mode is the
hard operator, lam = 0.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from .._types import Completion, Reduction
from ._functions.losses import topk_loss
from ._functions.operators import topk, topk_mag, topk_mask, topk_sign
from ._functions.selection import Selection, check_capacity, is_hard, topk_select
from ._modules import HardenedModule, Lam, Module, Operator, RunningLam, selects
from ._rows.arguments import Dim, Number, entries
from ._sae import TopKSAE
from ._selectors import PatchSelector, SelectedTokens, TokenSelector, TopKAttention
from .moe import ExpertChoice, ExpertMLP, MixtureOfExperts, TokenChoice

__all__ = [
    "ExpertChoice",
    "ExpertMLP",
    "MixtureOfExperts",
    "PatchSelector",
    "RunningLam",
    "SelectedTokens",
    "TokenChoice",
    "TokenSelector",
    "TopK",
    "TopKAttention",
    "TopKLoss",
    "TopKMag",
    "TopKMask",
    "TopKSAE",
    "TopKSelect",
    "TopKSign",
]


class TopKMask(Operator):
    """``topk_mask`` as a module.

    >>> TopKMask(2, p=1.5)
    TopKMask(k=2, lam=0.1, p=1.5, two_sided=False, largest=True, dim=-1, straight_through=False)
    """

    def __init__(
        self,
        k: Number,
        lam: Lam = 0.1,
        *,
        p: float = 2.0,
        two_sided: bool = False,
        largest: bool = True,
        dim: Dim = -1,
        straight_through: bool = False,
        hard_eval: bool = False,
    ) -> None:
        options = {"p": p, "two_sided": two_sided, "largest": largest, "dim": dim}
        super().__init__(k, lam, hard_eval=hard_eval, **options, straight_through=straight_through)

    def forward(self, x: Tensor) -> Tensor:
        return self.evaluate(topk_mask, x)


class TopK(TopKMask):
    """``topk`` as a module."""

    def forward(self, x: Tensor) -> Tensor:
        return self.evaluate(topk, x)


class TopKMag(Operator):
    """``topk_mag`` as a module."""

    def __init__(
        self,
        k: Number,
        lam: Lam = 0.1,
        *,
        p: float = 2.0,
        debias: bool = True,
        dim: Dim = -1,
        straight_through: bool = False,
        hard_eval: bool = False,
    ) -> None:
        options = {"p": p, "debias": debias, "dim": dim}
        super().__init__(k, lam, hard_eval=hard_eval, **options, straight_through=straight_through)

    def forward(self, x: Tensor) -> Tensor:
        return self.evaluate(topk_mag, x)


class TopKSign(Operator):
    """``topk_sign`` as a module."""

    def __init__(
        self,
        k: Number,
        lam: Lam = 0.1,
        *,
        p: float = 2.0,
        dim: Dim = -1,
        straight_through: bool = False,
        hard_eval: bool = False,
    ) -> None:
        options = {"p": p, "dim": dim}
        super().__init__(k, lam, hard_eval=hard_eval, **options, straight_through=straight_through)

    def forward(self, x: Tensor) -> Tensor:
        return self.evaluate(topk_sign, x)


class TopKSelect(HardenedModule):
    """``topk_select`` as a module: values, indices and what was dropped, with as many slots in
    ``eval()`` as in ``train()``.

    >>> TopKSelect(2, 0.0, values="x", sorted=True)(Tensor([3.0, 1.0, 5.0])).values
    tensor([5., 3.])
    """

    def __init__(
        self,
        k: Number,
        lam: Lam = 0.1,
        *,
        p: float = 2.0,
        two_sided: bool = False,
        magnitude: bool = False,
        largest: bool = True,
        values: Literal["mask", "x"] = "mask",
        sorted: bool = False,
        dim: Dim = -1,
        capacity: int | None = None,
        hard_eval: bool = False,
    ) -> None:
        options: Any = {"p": p, "two_sided": two_sided, "magnitude": magnitude, "largest": largest}
        options |= {"values": values, "sorted": sorted, "dim": dim}
        super().__init__(k, lam, hard_eval=hard_eval, **options)
        self.capacity = capacity

    def forward(self, x: Tensor) -> Selection:
        n = entries(x, self.options["dim"])
        hard = not isinstance(self.lam, RunningLam) and is_hard(self.lam)
        capacity = check_capacity(self.capacity, self.k, n, hard)
        k, lam = self.within(n), self.current_lam
        selection = topk_select(x, k, lam, capacity=capacity, **self.options)

        def competing() -> Tensor:
            """Of all entries: a running lam that saw the slots alone would grow once they are full."""
            options = {name: self.options[name] for name in ("p", "dim")}
            if self.options["magnitude"]:
                y = topk_mag(x.detach(), k, lam, **options)
                return (y != 0) & (y != x.detach())
            options |= {name: self.options[name] for name in ("two_sided", "largest")}
            y = topk_mask(x.detach(), k, lam, **options)
            return (y > 0) & (y < 1)

        self.watch(competing, x.numel() // max(n, 1), n, selects(k, n))
        return selection


class TopKLoss(Module):
    """``topk_loss`` as a module; ``weight``, one number per class, is kept as a buffer.

    >>> TopKLoss(5, completion="best").k
    5
    """

    weight: Tensor | None

    def __init__(
        self,
        k: Number = 3,
        lam: Number = 30.0,
        *,
        p: float = 2.0,
        two_sided: bool = False,
        completion: Completion | None = "spread",
        reduction: Reduction = "mean",
        dim: int = -1,
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
        weight: Tensor | None = None,
    ) -> None:
        options = {"p": p, "two_sided": two_sided, "completion": completion, "dim": dim}
        super().__init__(
            k,
            lam,
            **options,
            reduction=reduction,
            label_smoothing=label_smoothing,
            ignore_index=ignore_index,
        )
        self.register_buffer("weight", weight)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        lam = self.lam.value if isinstance(self.lam, RunningLam) else self.lam
        k = self.within(entries(logits, self.options["dim"]))
        return topk_loss(logits, targets, k, lam, weight=self.weight, **self.options)
