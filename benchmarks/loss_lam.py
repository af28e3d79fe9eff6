"""The default lam of ``topk_loss``: seven settings, five seeds, chosen on validation data.

Cross-entropy and the loss with p = 2 at five lam, each at several learning rates. Where labels are noisy
those for validation are too, and those of the test are not. Every run is a file in ``--runs``, so that
it goes on where it was stopped.

    python benchmarks/loss_lam.py --runs out --output benchmarks/results/loss_lam.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparsetopk.experiments import cifar
from sparsetopk.experiments.digits import hold_out, mnist
from sparsetopk.experiments.runs import Book, Options, mean_and_error
from sparsetopk.experiments.tasks import top_loss
from sparsetopk.experiments.tasks.models import Data
from sparsetopk.experiments.tasks.training import load
from sparsetopk.torch import topk_loss

LAMS = (1.0, 3.0, 10.0, 30.0, 100.0)
CROSS_ENTROPY = "cross-entropy"
SEEDS = 5


class Setting(NamedTuple):
    data: Callable[[Options], Data]
    model: Callable[[], nn.Module]
    k: int
    rates: tuple[float, ...]
    steps: int = 200
    batch: int = 128
    momentum: float | None = None  # of SGD; None: Adam


@cache
def features(noisy: bool, options: Options) -> Data:
    return load("top-5-noisy" if noisy else "top-5", options)[1]


@cache
def pictures(options: Options) -> Data:
    images = cifar.cifar100(options)
    parts = {"train": images.train, "validation": images.validation, "test": images.test}
    return {
        name: (part.x[: top_loss.TAKEN[name]].float() / 128 - 1, part.y[: top_loss.TAKEN[name]])
        for name, part in parts.items()
    }


@cache
def digits(noisy: bool, options: Options) -> Data:
    """4,000 digits to train with, 6,000 for validation and the 10,000 of the test."""
    whole = mnist(options)
    x, y, x_chosen, y_chosen = hold_out(whole, 0.1)
    parts = {"train": (x[:4000], y[:4000]), "validation": (x_chosen, y_chosen), "test": whole[2:]}
    data = {name: (torch.from_numpy(a), torch.from_numpy(b)) for name, (a, b) in parts.items()}
    generator = torch.Generator().manual_seed(0)
    return {
        name: (x, drawn_anew(y, generator) if noisy and name != "test" else y)
        for name, (x, y) in data.items()
    }


def drawn_anew(y: Tensor, generator: torch.Generator) -> Tensor:
    others = torch.randint(10, y.shape, generator=generator)
    return torch.where(torch.rand(len(y), generator=generator) < top_loss.NOISE, others, y)


def linear() -> nn.Module:
    return nn.Linear(768, 100)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def convolutional() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(1024, 100)),
    )


ADAM, SGD = (0.0003, 0.001, 0.003, 0.01, 0.03), (0.003, 0.01, 0.03, 0.1, 0.3)
SETTINGS = {
    "features, Adam": Setting(partial(features, False), linear, 5, ADAM),
    "features, noisy, Adam": Setting(partial(features, True), linear, 5, ADAM),
    "features, noisy, SGD": Setting(partial(features, True), linear, 5, SGD, momentum=0.9),
    "MNIST, Adam": Setting(partial(digits, False), mlp, 2, ADAM, 300),
    "MNIST, noisy, Adam": Setting(partial(digits, True), mlp, 3, ADAM[1:4], 300),
    "MNIST, SGD": Setting(partial(digits, False), mlp, 2, SGD[1:4], 300, momentum=0.9),
    "CIFAR-100, convolutional, Adam": Setting(
        pictures, convolutional, 5, (0.001, 0.003, 0.01), 300, 64
    ),
}


def train(
    setting: Setting, data: Data, lam: float | None, rate: float, seed: int
) -> dict[str, Any]:
    """Shares of the pictures whose label is among the first k."""
    torch.manual_seed(seed)
    model, generator = setting.model(), torch.Generator().manual_seed(seed)
    weights = model.parameters()
    optimizer: torch.optim.Optimizer = torch.optim.Adam(weights, rate)
    if setting.momentum is not None:
        optimizer = torch.optim.SGD(model.parameters(), rate, setting.momentum)
    x, y = data["train"]
    for _ in range(setting.steps):
        at = torch.randint(len(y), (setting.batch,), generator=generator)
        logits = model(x[at])
        loss = (
            F.cross_entropy(logits, y[at])
            if lam is None
            else topk_loss(logits, y[at], setting.k, lam)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {part: found(model, *data[part], setting.k) for part in ("validation", "test")}


@torch.no_grad()
def found(model: nn.Module, x: Tensor, y: Tensor, k: int) -> float:
    logits = torch.cat([model(part) for part in x.split(1000)])
    return 100 * (logits.topk(k).indices == y.unsqueeze(-1)).any(dim=-1).float().mean().item()


def run(name: str, book: Book) -> dict[str, Any]:
    """Means and standard errors over seeds by way and rate."""
    setting = SETTINGS[name]
    result: dict[str, Any] = {}
    for lam in (None, *LAMS):
        way = CROSS_ENTROPY if lam is None else f"lam = {lam:g}"
        for rate in setting.rates:
            runs = []
            for seed in range(SEEDS):
                known = {"lam": lam, "rate": rate, "seed": seed, "steps": setting.steps}
                make = partial(of_book, name, lam, rate, seed, book.options)
                runs.append(book.run(f"{name} {way} {rate:g} {seed}", known, make))
            result.setdefault(way, {})[f"{rate:g}"] = {
                part: [round(v, 3) for v in mean_and_error([r[part] for r in runs])]
                for part in ("validation", "test")
            }
    return result


def of_book(
    name: str, lam: float | None, rate: float, seed: int, options: Options, _: Any
) -> dict[str, Any]:
    setting = SETTINGS[name]
    return train(setting, setting.data(options), lam, rate, seed)


def chosen(result: dict[str, Any]) -> dict[str, Any]:
    """By validation: the rate of cross-entropy, each way at it, and each at its own best rate."""

    def best(way: str) -> str:
        return max(result[way], key=lambda rate: result[way][rate]["validation"][0])

    common = best(CROSS_ENTROPY)
    return {
        way: {
            "at the rate of cross-entropy": {"rate": common, **result[way][common]},
            "at its own rate": {"rate": best(way), **result[way][best(way)]},
        }
        for way in result
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    book = Book(Options(arguments.runs, full=True), "loss-lam")
    results = {}
    for name in arguments.only:
        result = run(name, book)
        results[name] = {"chosen": chosen(result), "all": result}
        print(name, json.dumps(results[name]["chosen"], indent=1), flush=True)
    arguments.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
