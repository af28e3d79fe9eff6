"""Ways to select k of n that a gradient goes through, from scores to a mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from ...torch import baselines, topk_mask

Mask: TypeAlias = Callable[[Tensor, int, float], Tensor]  # of scores (..., n), k and a strength


@dataclass(frozen=True)
class Method:
    mask: Mask
    strengths: bool = True  # whether there is something to choose
    annealed: bool = False  # the strength goes to a hundredth in equal ratios
    in_use: Callable[[Tensor, int], Tensor] | None = None  # None: the hard mask
    ours: bool = False
    special: bool = False  # for the tasks that name it


def hard(scores: Tensor, k: int, _: float = 0.0) -> Tensor:
    return topk_mask(scores.detach(), k, 0.0)


def straight_through(soft: Mask, backward_k: int | None = None) -> Mask:
    """The hard mask, with the derivative of another one, or of that with another k."""

    def mask(scores: Tensor, k: int, strength: float) -> Tensor:
        relaxed = soft(scores, k if backward_k is None else backward_k, strength)
        return hard(scores, k) + (relaxed - relaxed.detach())

    return mask


def gated(scores: Tensor, k: int, _: float = 0.0) -> Tensor:
    """What is selected is weighed by a sigmoid of its score, as routers do it."""
    return hard(scores, k) * torch.sigmoid(scores)


def ramp(scores: Tensor, k: int, left: float) -> Tensor:
    """Hard, with everything selected at the start; ``left`` goes from 1 to 0."""
    n = scores.shape[-1]
    return hard(scores, max(k, round(n * (k / n) ** (1 - left))))


P_2, P_4_3, TWO_SIDED = (
    partial(topk_mask, p=2.0),
    partial(topk_mask, p=4 / 3),
    partial(topk_mask, p=1.5, two_sided=True),
)

# What some tasks have alone. All but the ramp are losses of the task, which take no mask.
RAMP, DISTILLED = "hard ramp", "KL from dense attention"
CROSS_ENTROPY, SMOOTHED = "cross-entropy", "cross-entropy, smoothed labels"
LOSS_2, LOSS_4_3, LOSS_TWO_SIDED = (
    "top-k loss, p = 2",
    "top-k loss, p = 4/3",
    "top-k loss, two-sided",
)
METHODS = {
    "hard": Method(hard, strengths=False),
    RAMP: Method(ramp, strengths=False, special=True),
    DISTILLED: Method(hard, strengths=False, special=True),
    CROSS_ENTROPY: Method(hard, strengths=False, special=True),
    SMOOTHED: Method(hard, special=True),
    "straight-through identity": Method(
        straight_through(lambda scores, *_: scores), strengths=False
    ),
    "gated": Method(gated, strengths=False, in_use=gated),
    "softmax straight-through": Method(baselines.softmax_mask),
    "Gumbel straight-through": Method(partial(baselines.softmax_mask, gumbel=True)),
    "perturbed": Method(partial(baselines.perturbed_mask, samples=20), annealed=True),
    "Sinkhorn": Method(partial(baselines.sinkhorn_mask, iterations=20), annealed=True),
    "LapSum": Method(baselines.lapsum_mask, annealed=True),
    "DFTopK": Method(baselines.dftopk_mask, annealed=True),
    "budget of entmax": Method(partial(topk_mask, p=1.5), annealed=True),
    "p = 2 annealed": Method(P_2, annealed=True, ours=True),
    "p = 4/3 annealed": Method(P_4_3, annealed=True, ours=True),
    "two-sided annealed": Method(TWO_SIDED, annealed=True, ours=True),
    "p = 2 straight-through": Method(straight_through(P_2), ours=True),
    "p = 4/3 straight-through": Method(straight_through(P_4_3), ours=True),
    "two-sided straight-through": Method(straight_through(TWO_SIDED), ours=True),
    "p = 2 straight-through, backward k = 1": Method(straight_through(P_2, 1), ours=True),
    "p = 4/3 straight-through, backward k = 1": Method(straight_through(P_4_3, 1), ours=True),
    LOSS_2: Method(hard, ours=True, special=True),
    LOSS_4_3: Method(hard, ours=True, special=True),
    LOSS_TWO_SIDED: Method(hard, ours=True, special=True),
}
# Ours with as many settings as one method of others has: three forms at strength 1, two learning rates.
# They were named before any task but indexer-256 was run.
THREE = (
    "p = 4/3 annealed",
    "p = 2 straight-through",
    "p = 4/3 straight-through, backward k = 1",
)
