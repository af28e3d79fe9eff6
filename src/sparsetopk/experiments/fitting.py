"""Training of image classifiers that can be interrupted, and what is measured of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from .cifar import Images, Split
from .runs import Checkpoint, mean_and_error

Loss = Callable[[Tensor, Tensor], Tensor]
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, for colours
POINTS = 20  # of a curve


@dataclass(frozen=True)
class Recipe:
    """SGD with momentum 0.9 or AdamW; a linear warm-up, then a decay to 0; gradients of norm 1 at
    most. ``chunk`` images at a time go through the model."""

    optimizer: Literal["sgd", "adamw"]
    decay: Literal["cosine", "linear"]
    lr: float
    steps: int
    warmup: int
    batch: int
    pixels: int
    weight_decay: float = 0.0
    chunk: int = 64
    save_every: int = 25

    def rate(self, step: int) -> float:
        """The learning rate of a step, from 0 on."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (
            0.5 + 0.5 * math.cos(math.pi * done) if self.decay == "cosine" else 1 - done
        )


def prepared(x: Tensor, pixels: int, device: torch.device) -> Tensor:
    """Bytes as numbers of about unit scale, resized."""
    x = x.to(device).float() / 255
    if x.shape[1] == 3:
        x = (x - x.new_tensor(MEAN).view(3, 1, 1)) / x.new_tensor(STD).view(3, 1, 1)
    else:
        x = 2 * x - 1
    if x.shape[-1] != pixels:
        x = F.interpolate(x, (pixels, pixels), mode="bilinear")
    return x


def batch_of(images: Images, size: int, seed: int, step: int) -> Split:
    """The training images of a step, a function of seed and step alone: each once in an epoch, some
    of them mirrored."""
    epoch, i = divmod(step, len(images.train) // size)
    order = torch.randperm(len(images.train), generator=_random(seed, 2 * epoch))
    batch = images.train.take(order[i * size : (i + 1) * size])
    if not images.flips:
        return batch
    flipped = torch.rand(size, generator=_random(seed, 2 * step + 1)) < 0.5
    return Split(torch.where(flipped.view(-1, 1, 1, 1), batch.x.flip(-1), batch.x), batch.y)


def _random(seed: int, part: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_003 * seed + part)


def ranks(logits: Tensor, y: Tensor) -> Tensor:
    """How many other classes are not below the right one; NaN is above everything."""
    right = logits.gather(-1, y.unsqueeze(-1))
    return (~(logits < right)).sum(dim=-1) - 1


def fit(
    model: nn.Module,
    loss: Loss,
    images: Images,
    recipe: Recipe,
    seed: int,
    checkpoint: Checkpoint | None = None,
    bar: tqdm[Any] | None = None,
) -> dict[str, Any]:
    """Train in place. Returns the share in percent of training images that are right at first sight,
    over the steps, and under "seconds" the time."""
    optimizer = _optimizer(model, recipe)
    state: dict[str, Any] = {"step": 0, "right": [], "seconds": 0.0}
    saved = checkpoint.load() if checkpoint else None
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state = saved["state"]
    if bar is not None:
        skip(bar, state["step"])
    model.train()
    for step in range(state["step"], recipe.steps):
        began = time.perf_counter()
        batch = batch_of(images, recipe.batch, seed, step)
        state["right"].append(train_step(model, loss, optimizer, batch, recipe, step))
        state["seconds"] += time.perf_counter() - began
        state["step"] = step + 1
        if checkpoint and state["step"] % recipe.save_every == 0:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            checkpoint.save({**saved, "state": state})
        if bar is not None:
            bar.update()
    return {
        "curve": _curve(state["right"], recipe),
        "seconds": {"training": state["seconds"], "step": state["seconds"] / recipe.steps},
    }


def skip(bar: tqdm[Any], steps: int) -> None:
    """Leave out steps that were made before: they say nothing about the time that is left."""
    if steps:
        bar.total -= steps
        bar.refresh()


def _optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(
            model.parameters(), lr=0.0, momentum=0.9, weight_decay=recipe.weight_decay
        )
    return torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=recipe.weight_decay)


def train_step(
    model: nn.Module,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    batch: Split,
    recipe: Recipe,
    step: int,
) -> int:
    """One step; returns how many images of the batch were right before it."""
    device, right = next(model.parameters()).device, 0
    for group in optimizer.param_groups:
        group["lr"] = recipe.rate(step)
    optimizer.zero_grad()
    for x, y in zip(batch.x.split(recipe.chunk), batch.y.split(recipe.chunk), strict=True):
        y = y.to(device)
        logits = model(prepared(x, recipe.pixels, device))
        (loss(logits, y) * (len(y) / recipe.batch)).backward()
        right += int((ranks(logits.detach(), y) == 0).sum())
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return right


def _curve(right: list[int], recipe: Recipe) -> dict[str, list[float]]:
    """Means over stretches of steps, in percent."""
    length = max(1, math.ceil(len(right) / POINTS))
    parts = [right[i : i + length] for i in range(0, len(right), length)]
    ends = [min(i + length, len(right)) for i in range(0, len(right), length)]
    return {
        "step": [float(end) for end in ends],
        "accuracy": [100 * sum(part) / (len(part) * recipe.batch) for part in parts],
    }


def accuracies(
    model: nn.Module,
    split: Split,
    ks: tuple[int, ...],
    pixels: int,
    after: Callable[[], None] = lambda: None,
    chunk: int = 80,
) -> dict[str, float]:
    """The top-k accuracies in percent; ``after`` is called after every chunk."""
    device, found = next(model.parameters()).device, []
    model.eval()
    with torch.no_grad():
        for x, y in zip(split.x.split(chunk), split.y.split(chunk), strict=True):
            found.append(ranks(model(prepared(x, pixels, device)), y.to(device)).cpu())
            after()
    rank = torch.cat(found)
    return {str(k): 100 * float((rank < k).double().mean()) for k in ks}


def interleaved(actions: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each action in every round, after one that is not counted. They take turns, so that
    what else the machine does is no one's disadvantage."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(rounds + 1):
        for name, action in actions.items():
            began = time.perf_counter()
            action()
            if turn:
                times[name].append(time.perf_counter() - began)
    return times


def difference(ours: list[float], baseline: list[float]) -> tuple[float, float]:
    """The mean of the differences, seed by seed, and its standard error."""
    return mean_and_error([a - b for a, b in zip(ours, baseline, strict=True)])


def compared(ours: list[float], baseline: list[float]) -> Literal[-1, 0, 1]:
    """Whether the difference is clear, more than two standard errors: 1 better, -1 worse."""
    mean, error = difference(ours, baseline)
    return 1 if mean > 2 * error else -1 if mean < -2 * error else 0
