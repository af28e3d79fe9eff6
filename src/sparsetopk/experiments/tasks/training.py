"""Every method on a task: settings chosen on validation data, then seeds that are tested.

Every method has six settings on one seed: three strengths and two learning rates, or six learning rates
where there is no strength to choose. Where the best is at an edge of the strengths (of the rates, where
there are six), two more settings beyond it are tried, at most twice. Ours has many forms, so it is also
given six settings in all: three forms at one strength and two learning rates.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..digits import digits, hold_out, mnist
from ..runs import Book, Checkpoint, Options
from . import patches, top_loss
from .methods import METHODS, RAMP, hard
from .models import (
    Data,
    Indexer,
    Instances,
    Neighbours,
    Pixels,
    Pruning,
    Select,
    Task,
    Watch,
)

Make = Callable[[Data, int], Task]  # of data and seed
MAKE: dict[str, Make] = {
    "indexer-64": partial(Indexer, 64),
    "indexer-256": partial(Indexer, 256),
    "indexer-512": partial(Indexer, 512),
    "patches": patches.Patches,
    "pixels-20": partial(Pixels, 20),
    "pixels-50": partial(Pixels, 50),
    "instances": partial(Instances, 20),
    "top-5": top_loss.TopLoss,
    "top-5-noisy": top_loss.TopLoss,
    "neighbours": Neighbours,
    "pruning": Pruning,
}
STRENGTHS = (0.3, 1.0, 3.0)
FACTOR = 10**0.5
SEEDS = 5
CHOOSING = -1  # the seed of runs that settings are chosen by, on validation data
QUICK_STEPS = 40


@dataclass(frozen=True)
class Setting:
    rate: float
    strength: float


class Watched:
    """A ``select`` that counts what is not 0 in masks and in gradients, and how far sums are off k."""

    def __init__(self, name: str, task: Task, strength: float) -> None:
        self.name, self.method, self.task, self.strength = name, METHODS[name], task, strength
        self.is_ramp = name == RAMP
        self.progress = 0.0
        self.forward = self.backward = self.off = 0.0
        self.rows = 0

    def current(self) -> float:
        """Ramps and annealing end in the middle of the steps, so that what is selected at the end is
        trained for the other half."""
        over = self.task.annealed_over
        done = min(1.0, self.progress / over) if over else 0.0
        if self.is_ramp:
            return 1 - done
        return self.strength * (0.01**done if self.method.annealed else 1.0)

    def scores(self, scores: Tensor) -> Tensor:
        importance = self.task.importance() if self.is_ramp else None
        return scores.view_as(scores) if importance is None else importance

    def in_training(self, scores: Tensor, k: int) -> Tensor:
        scores = self.watch(self.scores(scores))
        mask = self.method.mask(scores, k, self.current())
        now = mask.detach()
        self.forward += (now != 0).sum().item()
        if not self.is_ramp:
            self.off = max(self.off, (now.sum(dim=-1) - k).abs().max().item() / k)
        return mask

    def watch(self, scores: Tensor) -> Tensor:
        """Scores whose gradient is counted."""
        self.rows += scores.numel() // scores.shape[-1]
        if scores.requires_grad:
            scores.register_hook(self._count)
        return scores

    def _count(self, gradient: Tensor) -> None:
        self.backward += (gradient != 0).sum().item()

    def in_use(self, scores: Tensor, k: int) -> Tensor:
        return (self.method.in_use or hard)(self.scores(scores), k)


def train(
    make: Make, name: str, setting: Setting, seed: int, data: Data, steps: int
) -> dict[str, Any]:
    """One run: its quality with k selected, counts per row, and whether it failed."""
    torch.manual_seed(seed)
    task = make(data, seed)
    watched = Watched(name, task, setting.strength)
    optimizer = torch.optim.Adam(task.parameters(), lr=setting.rate)
    generator = torch.Generator().manual_seed(seed)
    failed = False
    for step in range(steps):
        watched.progress = step / steps
        loss = step_loss(watched, watched.in_training, watched.watch, generator)
        optimizer.zero_grad()
        if loss.requires_grad:
            loss.backward()
        if not all(p.grad is None or bool(p.grad.isfinite().all()) for p in task.parameters()):
            failed = True
            break
        optimizer.step()
    with torch.no_grad():
        quality = task.quality(watched.in_use, "validation" if seed == CHOOSING else "test")
    rows = max(watched.rows, 1)
    return {
        "quality": quality,
        "nonzeros forward": watched.forward / rows,
        "nonzeros backward": watched.backward / rows,
        "sum off by": watched.off,
        "failed": failed,
    }


def step_loss(watched: Watched, select: Select, watch: Watch, generator: torch.Generator) -> Tensor:
    if watched.method.special and not watched.is_ramp:
        return watched.task.special_loss(watched.name, watch, watched.strength, generator)
    return watched.task.loss(select, generator)


def first_settings(task: Task, strengths: bool) -> list[Setting]:
    if strengths:
        return [Setting(rate, strength) for strength in STRENGTHS for rate in task.rates]
    return [Setting(task.rates[0] * FACTOR**i, 1.0) for i in range(-2, 4)]


def beyond(tried: list[Setting], best: Setting, strengths: bool) -> list[Setting]:
    """Two more settings where the best is at an edge."""
    if strengths:
        values = sorted({s.strength for s in tried})
        rates = sorted({s.rate for s in tried})
        if best.strength in (values[0], values[-1]):
            factor = 1 / FACTOR if best.strength == values[0] else FACTOR
            return [Setting(rate, best.strength * factor) for rate in rates]
        return []
    values = sorted({s.rate for s in tried})
    if best.rate in (values[0], values[-1]):
        factor = 1 / FACTOR if best.rate == values[0] else FACTOR
        return [Setting(best.rate * factor**i, 1.0) for i in (1, 2)]
    return []


class Trials:
    """The runs of a task, each in a file of its own."""

    def __init__(self, name: str, options: Options) -> None:
        self.options, self.book = options, Book(options, f"task-{name}")
        self.make, self.data = load(name, options)
        self.example = self.make(self.data, 0)
        self.seeds = options.seeds or (SEEDS if options.full else 1)
        self.steps = self.example.steps if options.full else QUICK_STEPS

    def one(self, method: str, setting: Setting, seed: int) -> dict[str, Any]:
        known = {"method": method, "rate": setting.rate, "strength": setting.strength}
        known |= {"seed": seed, "steps": self.steps, "full": self.options.full}
        if METHODS[method].annealed:
            known["annealed over"] = self.example.annealed_over
        file = f"{_file(method)} {setting.rate:.3g} {setting.strength:.3g} {seed}"
        return self.book.run(
            file,
            known,
            lambda _: train(self.make, method, setting, seed, self.data, self.steps),
        )

    def validated(self, method: str, settings: list[Setting]) -> dict[Setting, float]:
        return {s: self.one(method, s, CHOOSING)["quality"] for s in settings}

    def tested(self, method: str, setting: Setting) -> dict[str, Any]:
        runs = [self.one(method, setting, seed) for seed in range(self.seeds)]
        return {
            "rate": setting.rate,
            "strength": setting.strength if METHODS[method].strengths else None,
            "validation": self.one(method, setting, CHOOSING)["quality"],
            **{key: [r[key] for r in runs] for key in runs[0]},
        }

    def of(self, method: str) -> dict[str, Any]:
        """A method with the setting that is best for it."""
        strengths = METHODS[method].strengths
        settings = first_settings(self.example, strengths)
        tried = self.validated(method, settings if self.options.full else settings[2:3])
        for _ in range(2 if self.options.full else 0):
            tried |= self.validated(method, beyond(list(tried), _best(tried), strengths))
        best = _best(tried)
        return {
            "settings": len(tried),
            "at the edge": bool(self.options.full and beyond(list(tried), best, strengths)),
            **self.tested(method, best),
        }

    def ours(self) -> dict[str, Any]:
        """The best of six settings of three forms of ours."""
        settings = [Setting(rate, 1.0) for rate in self.example.rates]
        tried = {
            (form, setting): quality
            for form in self.example.ours
            for setting, quality in self.validated(form, settings).items()
        }
        form, setting = _best(tried)
        return {"form": form, "settings": len(tried), **self.tested(form, setting)}


def _best(tried: dict[Any, float]) -> Any:
    return max(tried, key=lambda setting: tried[setting])


def run(name: str, options: Options) -> dict[str, Any]:
    """All methods on a task, in ``<out>/task-<name>/result.json``."""
    trials = Trials(name, options)
    names = [m for m in METHODS if not METHODS[m].special or m in trials.example.special]
    methods = {method: trials.of(method) for method in names}
    ours = trials.ours()
    rounds = 20 if options.full else 3
    costs = trials.book.run(
        "cost", {"methods": names}, lambda _: cost(trials.make, trials.data, names, rounds)
    )
    return trials.book.finish(
        {
            "seeds": trials.seeds,
            "steps": trials.steps,
            "annealed over": trials.example.annealed_over,
        },
        {"methods": methods, "ours": ours, "cost": costs},
    )


def cost(make: Make, data: Data, methods: list[str], rounds: int) -> dict[str, Any]:
    """The least seconds of a step, in turns, and the bytes that it keeps for its backward."""
    seconds = dict.fromkeys(methods, math.inf)
    kept = dict.fromkeys(methods, 0)
    task = make(data, 0)
    for i in range(rounds):
        for name in methods:
            watched = Watched(name, task, 1.0)

            def select(scores: Tensor, k: int, watched: Watched = watched) -> Tensor:
                return watched.method.mask(watched.scores(scores), k, watched.current())

            saved: dict[int, int] = {}

            def keep(t: Tensor, saved: dict[int, int] = saved) -> Tensor:
                saved[t.data_ptr()] = t.nbytes
                return t

            start = time.perf_counter()
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
                drawn = torch.Generator().manual_seed(i)
                loss = step_loss(watched, select, lambda scores: scores, drawn)
            if loss.requires_grad:
                loss.backward()
            seconds[name] = min(seconds[name], time.perf_counter() - start)
            kept[name] = sum(saved.values())
    return {"bytes kept": kept, "seconds": seconds}


def load(name: str, options: Options) -> tuple[Make, Data]:
    """Digits in three parts, MNIST in full, else those of scikit-learn; or what the task is about."""
    make = MAKE[name]
    if name.startswith("indexer"):
        return make, {}
    if name.startswith("top-5"):
        found = _kept(options, "features", lambda: top_loss.features(options))
        return make, top_loss.noisy(found) if name == "top-5-noisy" else found
    whole = mnist(options) if options.full else digits()
    x, y, x_chosen, y_chosen = hold_out(whole, 0.1)
    parts = {"train": (x, y), "validation": (x_chosen, y_chosen), "test": whole[2:]}
    data = {k: (torch.from_numpy(a), torch.from_numpy(b)) for k, (a, b) in parts.items()}
    if name == "patches":
        steps = patches.STEPS if options.full else QUICK_STEPS
        known = _kept(options, "classifier", lambda: patches.without_clutter(data, steps))
        return partial(patches.Patches, known=known), patches.cluttered(
            data, 1.0 if options.full else 0.1
        )
    return make, data


def _kept(options: Options, name: str, make: Callable[[], Any]) -> Any:
    """What is made once, and then read from a file of tensors."""
    form = "full" if options.full else "quick"
    checkpoint = Checkpoint(options.out / f"{name}-{form}.pt", {"version": 1})
    found = checkpoint.load()
    if found is None:
        found = make()
        checkpoint.save(found)
    return found


def _file(method: str) -> str:
    return "".join(c if c.isalnum() or c in "=- " else "_" for c in method)
