"""Which recipe of ``prune`` ends with the best sparse network: all of them with about the same budget.

Three small networks, 10 % of each weight matrix, SGD. Every recipe of a network has about as many
settings on a validation split: learning rates by three of its own, twelve on digits, nine on MNIST; an
optimum at an end of the learning rates adds one beyond it. The best is trained with other seeds and
tested. Errors are those of the network with exactly the weights that are kept, ``finalize(hard=True)``.

    python benchmarks/pruning_recipes.py --output benchmarks/results/pruning_recipes.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sparsetopk.experiments.digits import digits, hold_out, mnist
from sparsetopk.experiments.runs import Options
from sparsetopk.torch.prune import KeepSchedule, LamSchedule, finalize, prune

KEEP, BATCH = 0.1, 64
LAMS = (0.1, 0.3, 1.0)
RAMPS = (0.25, 0.5, 0.75)


def without_ramp(**options: Any) -> Callable[[int, float], dict[str, Any]]:
    return lambda steps, lam: {"lam": lam, "lam_scale": "rms", **options}


def with_ramp(anneal: bool, ramp: float = 0.5, **options: Any) -> Callable[..., dict[str, Any]]:
    """keep goes down in the first half; lam, if it is annealed, in the first three quarters."""

    def settings(steps: int, lam: float) -> dict[str, Any]:
        schedule: list[Any] = [KeepSchedule(round(ramp * steps))] if ramp else []
        schedule += [LamSchedule(round(0.75 * steps))] if anneal else []
        return {"lam": lam, "lam_scale": "rms", "schedule": schedule, **options}

    return settings


def hard_ramp(steps: int, ramp: float) -> dict[str, Any]:
    return {"lam": 0.0, "schedule": KeepSchedule(round(ramp * steps))}


def hard(steps: int, _: float) -> dict[str, Any]:
    return {"lam": 0.0}


class Recipe(NamedTuple):
    options: Callable[[int, float], dict[str, Any]]
    values: tuple[float, ...]


RECIPES = {
    "hard": Recipe(hard, (0.0,)),
    "p = 2": Recipe(without_ramp(), LAMS),
    "p = 4/3": Recipe(without_ramp(p=4 / 3), LAMS),
    "straight-through": Recipe(without_ramp(straight_through=True), LAMS),
    "p = 4/3, annealed": Recipe(with_ramp(True, 0, p=4 / 3), LAMS),
    "hard, ramp": Recipe(hard_ramp, RAMPS),
    "p = 2, ramp": Recipe(with_ramp(False), LAMS),
    "p = 4/3, ramp": Recipe(with_ramp(False, p=4 / 3), LAMS),
    "p = 2, ramp, annealed": Recipe(with_ramp(True), LAMS),
    "p = 4/3, ramp, annealed": Recipe(with_ramp(True, p=4 / 3), LAMS),
    "straight-through, ramp": Recipe(with_ramp(False, straight_through=True), LAMS),
}


class Task(NamedTuple):
    model: Callable[[], nn.Module]
    data: Callable[[], Any]
    steps: int
    rates: tuple[float, ...] = (0.1, 0.3, 1.0)
    seeds: int = 3
    recipes: tuple[str, ...] = (
        *("hard", "p = 2", "p = 4/3", "hard, ramp", "p = 2, ramp", "p = 4/3, ramp"),
        *("p = 4/3, ramp, annealed", "straight-through, ramp"),
    )


def mlp(*sizes: int) -> nn.Module:
    layers: list[nn.Module] = []
    for n, m in itertools.pairwise(sizes):
        layers += [nn.Linear(n, m), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        *(nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(400, 32), nn.ReLU(), nn.Linear(32, 10)),
    )


def small_mnist() -> Any:
    return mnist(Options(Path()))


TASKS = {
    "digits, 64-32-10": Task(
        lambda: mlp(64, 32, 10), digits, 600, (0.03, 0.1, 0.3, 1.0), 5, tuple(RECIPES)
    ),
    "MNIST, 784-32-32-10": Task(lambda: mlp(784, 32, 32, 10), small_mnist, 300),
    "MNIST, convolutional": Task(convolutional, small_mnist, 200),
}


def error(task: Task, data: Any, options: dict[str, Any], lr: float, seed: int) -> float:
    """Test error in percent of the network with exactly the share of weights."""
    x, y, x_test, y_test = (torch.from_numpy(v) for v in data)
    torch.manual_seed(seed)
    model = task.model()
    pruner = prune(model, keep=KEEP, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for batch in torch.randint(len(y), (task.steps, BATCH)):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        if not loss.isfinite():
            return 100.0
        loss.backward()
        optimizer.step()
        pruner.step()
    finalize(model, hard=True)
    with torch.no_grad():
        wrong: Tensor = model(x_test).argmax(dim=1) != y_test
    return 100.0 * wrong.double().mean().item()


def sweep(task: Task, recipe: Recipe, validation: Any) -> tuple[dict[str, float], float, float]:
    """Errors on the validation split by setting, and the best learning rate and value."""
    found: dict[tuple[float, float], float] = {}
    rates = list(task.rates)
    if recipe.values == (0.0,):  # as many settings, all of them learning rates
        ends, count = (task.rates[0], task.rates[-1]), 3 * len(task.rates)
        rates = np.geomspace(*ends, count).tolist()

    def measure(lr: float) -> None:
        for value in recipe.values:
            options = recipe.options(task.steps, value)
            found[lr, value] = error(task, validation, options, lr, seed=0)

    for lr in rates:
        measure(lr)
    lr, _ = min(found, key=found.__getitem__)
    if lr in (max(rates), min(rates)):
        measure(3.3 * lr if lr == max(rates) else lr / 3.3)
    best = min(found, key=found.__getitem__)
    return {f"lr {lr:.3g}, {value:g}": e for (lr, value), e in found.items()}, *best


def run(name: str, there: dict[str, Any], save: Callable[[], None]) -> None:
    task = TASKS[name]
    data = task.data()
    validation = hold_out(data, 0.2)
    for recipe_name in task.recipes:
        recipe = RECIPES[recipe_name]
        if recipe_name in there:
            continue
        settings, lr, value = sweep(task, recipe, validation)
        options = recipe.options(task.steps, value)
        errors = [error(task, data, options, lr, seed) for seed in range(1, task.seeds + 1)]
        there[recipe_name] = {
            "error": float(np.mean(errors)),
            "standard error": float(np.std(errors, ddof=1) / math.sqrt(task.seeds)),
            "lr": lr,
            "value": value,
            "errors": errors,
            "validation": settings,
        }
        save()
        print(name, recipe_name, f"{np.mean(errors):.2f}", lr, value, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="goes on where it stopped")
    path = parser.parse_args().output
    torch.set_num_threads(1)
    results = json.loads(path.read_text()) if path.exists() else {}
    for name in TASKS:
        results.setdefault(name, {})
        run(name, results[name], lambda: path.write_text(json.dumps(results, indent=1) + "\n"))


if __name__ == "__main__":
    main()
