"""An MLP that is pruned while it is trained, by one of several methods; a run that can be resumed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..torch import topk_mag, topk_mask
from ..torch.baselines import binary_entropy_topk_mag
from ..torch.prune import KeepSchedule, Pruner, prune
from .runs import Checkpoint

METHODS = ("dense", "hard", "p = 2", "p = 4/3", "smooth", "straight-through")
KEEP = 0.1
CHANCE = 0.9  # the error of a run that diverged
SAVE_EVERY = 5  # epochs

Tensors = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Setting:
    """How a network is trained; as it stands, as in the paper.

    ``lam`` is that of the operator, or with ``relative`` in units that follow the weights: r^(2-p) for
    weights with root mean square r, r^2 for the smooth recipe, r for straight through. For p = 2 it is a
    pure number either way. ``init`` multiplies the first weights, ``ramp`` is the share of the steps in
    which what is kept goes from everything to 10 %, ``standardise`` shifts and scales the pixels.
    """

    method: str
    lr: float = 1e-2
    lam: float = 1e-4
    relative: bool = False
    init: float = 1.0
    ramp: float = 0.0
    standardise: bool = False
    batch: int = 128
    epochs: int = 30


def smooth_topk_mag(w: Tensor, k: int, lam: float, relative: bool) -> Tensor:
    """w times the two-sided mask of w^2: differentiable everywhere."""
    size = w * w
    unit = size.detach().mean() if relative else 1.0
    return w * topk_mask(size, k, lam * unit, p=1.5, two_sided=True)


def straight_through_topk_mag(w: Tensor, k: int, lam: float, relative: bool) -> Tensor:
    """Exactly k weights; the derivative is that of the mask of binary entropy."""
    unit = float(w.detach().square().mean().sqrt()) if relative else 1.0
    return binary_entropy_topk_mag(w, k, lam * unit, straight_through=True)


def prune_by(setting: Setting, model: nn.Module, steps: int) -> Pruner | None:
    ramp = round(setting.ramp * steps)
    options: dict[str, Any] = {"keep": KEEP, "schedule": KeepSchedule(ramp) if ramp else None}
    ours: dict[str, Any] = {"lam": setting.lam, "relative": setting.relative}
    match setting.method:
        case "dense":
            return None
        case "hard":
            return prune(model, lam=0.0, **options)
        case "smooth":
            return prune(model, operator=partial(smooth_topk_mag, **ours), **options)
        case "straight-through":
            return prune(model, operator=partial(straight_through_topk_mag, **ours), **options)
    p = {"p = 2": 2.0, "p = 4/3": 4 / 3}[setting.method]
    scale: Any = "rms" if setting.relative else None
    return prune(model, lam=setting.lam, p=p, lam_scale=scale, **options)


def network(inputs: int, seed: int, scale: float = 1.0) -> nn.Sequential:
    """The paper's MLP, inputs-32-32-10; the same seed gives every method the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)]
    for layer in layers[::2]:
        assert isinstance(layer.weight, Tensor)
        layer.weight.data *= scale
    return nn.Sequential(*layers)


def linear(model: nn.Sequential) -> list[Any]:
    return [layer for layer in model if isinstance(layer, nn.Linear)]


class Trainer:
    """A network and all that its next step depends on."""

    def __init__(self, setting: Setting, data: Tensors, seed: int) -> None:
        self.data = _standardised(data) if setting.standardise else data
        x, y, _, _ = self.data
        self.model = network(x.shape[1], seed, setting.init).to(x.device)
        steps = setting.epochs * math.ceil(len(y) / setting.batch)
        self.pruner = prune_by(setting, self.model, steps)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=setting.lr)
        self.generator = torch.Generator().manual_seed(seed)
        self.batch, self.ramp = setting.batch, setting.ramp > 0

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        if self.pruner is not None and self.ramp:
            self.pruner.step()
        return loss.detach()

    def epoch(self) -> bool:
        """Whether the loss is still finite after it."""
        x, y, _, _ = self.data
        order = torch.randperm(len(y), generator=self.generator).to(y.device)
        batches = zip(x[order].split(self.batch), y[order].split(self.batch), strict=True)
        for each in batches:
            loss = self.step(*each)
        return bool(loss.isfinite())

    def sparse(self) -> nn.Sequential:
        """The network with exactly the share of weights that is to be kept."""
        if self.pruner is None:
            return self.model
        model = network(self.data[0].shape[1], 0).to(self.data[0].device)
        for ours, layer in zip(linear(self.model), linear(model), strict=True):
            w = ours.parametrizations.weight.original.detach()
            layer.weight.data = topk_mag(w.flatten(), round(KEEP * w.numel()), 0.0).view_as(w)
            layer.bias.data = ours.bias.data
        return model

    @torch.no_grad()
    def error(self, model: nn.Module) -> float:
        _, _, x, y = self.data
        return int((model(x).argmax(dim=1) != y).sum()) / len(y)

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])


@torch.no_grad()
def nonzeros(model: nn.Sequential) -> float:
    """The share of weights that are not 0."""
    weights = [layer.weight for layer in linear(model)]
    return sum(int(w.count_nonzero()) for w in weights) / sum(w.numel() for w in weights)


def _standardised(data: Tensors) -> Tensors:
    x, y, x_test, y_test = data
    mean, deviation = x.mean(), x.std()
    return (x - mean) / deviation, y, (x_test - mean) / deviation, y_test


def train(
    setting: Setting,
    data: Tensors,
    seed: int,
    checkpoint: Checkpoint,
    tick: Callable[[int], object] = lambda epochs: None,
) -> dict[str, Any]:
    """The errors after each epoch: of the network as it is trained, and with exactly 10 %."""
    trainer = Trainer(setting, data, seed)
    curves: dict[str, list[float]] = {"errors": [], "sparse errors": [], "seconds": []}
    saved = checkpoint.load()
    if saved is not None:
        trainer.restore(saved["trainer"])
        curves = saved["curves"]
        tick(len(curves["errors"]))
    finite = True
    while finite and len(curves["errors"]) < setting.epochs:
        start = time.perf_counter()
        finite = trainer.epoch()
        curves["seconds"].append(time.perf_counter() - start)
        curves["errors"].append(trainer.error(trainer.model) if finite else CHANCE)
        curves["sparse errors"].append(trainer.error(trainer.sparse()) if finite else CHANCE)
        tick(1)
        if finite and len(curves["errors"]) % SAVE_EVERY == 0:
            checkpoint.save({"trainer": trainer.state(), "curves": curves})
    missing = setting.epochs - len(curves["errors"])
    tick(missing)
    for name in ("errors", "sparse errors"):
        curves[name] += [CHANCE] * missing
    return {
        **curves,
        "diverged": not finite,
        "nonzeros": nonzeros(trainer.model),
        "sparse nonzeros": nonzeros(trainer.sparse()),
    }
