"""Fig. 7 of the paper: vision mixtures of experts, with a hard and with a relaxed router.

Experts choose their tokens by the gates. (a) A small ViT with experts in every other block is trained
from scratch; (b) a pretrained ViT gets experts that start as copies of its MLPs, and is fine-tuned.
The paper trains V-MoE S/32 on JFT-300M, which is not public: this is CIFAR-100, or in the quick form
digits.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from ..torch.moe import Routing
from . import cifar, drawing, finetune, vit
from .cifar import Images
from .fitting import (
    Recipe,
    accuracies,
    batch_of,
    compared,
    difference,
    fit,
    interleaved,
    skip,
    train_step,
)
from .runs import Book, Checkpoint, Claim, Options, mean_and_error
from .vit import RouterName

TITLE = "Routers of vision mixtures of experts (Fig. 7)"
CAPTIONS = {
    "moe": "Fig. 7 of the paper, on other data. Above: test accuracy, each seed, mean and two standard "
    "errors. Below: accuracy on the batches while training."
}
ROUTERS: tuple[RouterName, ...] = get_args(RouterName)
COLOURS = {"hard": "#9aa0a6", "relaxed": "#d1495b", "Dykstra-10": "#00798c"}
SHARES = ("fractional", "dropped", "without expert")
TUNING_SEED = 1000
PAPER_RATIO = 1.5  # 15 hours against 10


@dataclass(frozen=True)
class Part:
    """``capacity_factor``: the paper's is 28 tokens x 32 experts of 400. ``group``: so many images
    are routed together."""

    backbone: str
    recipe: Recipe
    seeds: int
    experts: int
    capacity_factor: float = 2.24
    group: int = 8


@dataclass(frozen=True)
class Setting:
    scratch: Part
    upcycled: Part
    lams: tuple[float, ...]  # times experts: gates are of size 1/experts
    rounds: int  # of the timing


SMALL = vit.Shape(32, 4, 96, 6, 3, 192)
# AdamW, lr, its decay and that of the weights are the paper's for (a). (b) is trained as the models of
# finetune are, with an lr that is good for cross-entropy there, the same for all routers.
_ADAM = Recipe("adamw", "linear", 1e-3, 250, 25, 128, 32, weight_decay=0.1, chunk=128)
FULL = Setting(
    Part("small ViT", _ADAM, 3, experts=16),
    Part(
        "ViT-S/14",
        Recipe("sgd", "cosine", lr=0.03, steps=60, warmup=6, batch=64, pixels=56, save_every=20),
        3,
        experts=4,
        capacity_factor=1.5,
    ),
    (0.03, 0.1, 0.3),
    5,
)
_TINY = replace(_ADAM, lr=3e-3, steps=80, warmup=8, batch=64, pixels=0, chunk=64)
QUICK = Setting(
    Part("tiny ViT", _TINY, 3, experts=4),
    Part("tiny ViT", replace(_TINY, steps=30, warmup=3), 3, experts=4),
    (0.1, 0.3),
    5,
)
PARTS = ("scratch", "upcycled")


def setting_of(options: Options, images: Images) -> Setting:
    setting = FULL if options.full else QUICK
    parts = {name: getattr(setting, name) for name in PARTS}
    if not options.full:
        pixels = images.train.x.shape[-1]
        parts = {n: replace(p, recipe=replace(p.recipe, pixels=pixels)) for n, p in parts.items()}
    if options.seeds is not None:
        parts = {n: replace(p, seeds=options.seeds) for n, p in parts.items()}
    return replace(setting, **parts)


Maker = Callable[[RouterName, float, int], vit.ViT]


def makers(setting: Setting, images: Images, options: Options) -> dict[str, Maker]:
    """What makes the model of each part, for a router, its lam and a seed."""
    a, b = setting.scratch, setting.upcycled
    shape = SMALL if a.backbone == "small ViT" else finetune.tiny_shape(images)
    pretrained = finetune.backbone_of(b.backbone, b.recipe.pixels, images, options)

    def scratch(name: RouterName, lam: float, seed: int) -> vit.ViT:
        router = vit.make_router(name, lam / a.experts, a.capacity_factor)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return vit.with_experts(vit.ViT(shape, images.classes), a.experts, router, a.group)

    def upcycled(name: RouterName, lam: float, seed: int) -> vit.ViT:
        router = vit.make_router(name, lam / b.experts, b.capacity_factor, normalize=True)
        model = pretrained()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return vit.upcycled(model, b.experts, router, b.group)

    return {"scratch": scratch, "upcycled": upcycled}


def run(options: Options) -> dict[str, Any]:
    images = cifar.load(options)
    setting = setting_of(options, images)
    make_model = makers(setting, images, options)
    book, device = Book(options, "moe"), torch.device(options.device)
    total = len(setting.lams) * setting.scratch.recipe.steps
    for part in PARTS:
        arranged = getattr(setting, part)
        total += len(ROUTERS) * arranged.seeds * arranged.recipe.steps
    with tqdm(total=total, unit="step") as bar:

        def one(part: str, name: RouterName, lam: float, seed: int, on: str) -> dict[str, Any]:
            arranged: Part = getattr(setting, part)
            known = {"part": asdict(arranged), "data": images.name, "router": name, "seed": seed}
            known |= {"lam": lam if name != "hard" else 0.0, "on": on}
            made = False

            def make(checkpoint: Checkpoint) -> dict[str, Any]:
                nonlocal made
                made = True
                bar.set_description(f"{part}, {on}: {name}, lam {known['lam']:g}, seed {seed}")
                model = make_model[part](name, lam, seed).to(device)
                recipe = arranged.recipe
                fitted = fit(model, F.cross_entropy, images, recipe, seed, checkpoint, bar)
                split = images.validation if on == "validation" else images.test
                return {**fitted, **evaluate(model, split, recipe.pixels, arranged.group)}

            result = book.run(f"{part}-{on}-{name}-{known['lam']:g}-{seed}", known, make)
            skip(bar, 0 if made else arranged.recipe.steps)
            return result

        tuned = {
            f"{lam:g}": one("scratch", "relaxed", lam, TUNING_SEED, "validation")
            for lam in setting.lams
        }
        lam = float(max(tuned, key=lambda lam: tuned[lam]["accuracy"]))
        tested = {
            part: {
                name: [
                    one(part, name, lam, seed, "test")
                    for seed in range(getattr(setting, part).seeds)
                ]
                for name in ROUTERS
            }
            for part in PARTS
        }
    known = {"data": images.name, "lam": lam, "setting": asdict(setting)}
    timing = book.run(
        "timing",
        known,
        lambda _: {"seconds": measure(make_model, images, setting, lam, device)},
    )
    results = {
        "validation": {value: run["accuracy"] for value, run in tuned.items()},
        "lam": lam,
        **tested,
        "timing": timing,
    }
    pretraining = finetune.pretraining_of(setting.upcycled.backbone)
    known = {"data": images.name, "pretraining": pretraining}
    return book.finish({**asdict(setting), **known}, results)


def evaluate(model: vit.ViT, split: cifar.Split, pixels: int, group: int) -> dict[str, Any]:
    """Top-1 accuracy in percent, and means over the mixtures of the model and the images: the tokens
    that each expert takes against an even share, and the shares in percent of the assignments that
    are fractional, of the selection that was dropped, of tokens that no expert takes."""
    load: list[Tensor] = []
    tokens = group * (1 + (pixels // model.shape.patch) ** 2)
    rest: dict[str, list[float]] = {name: [] for name in SHARES}

    def look() -> None:
        for moe in vit.mixtures(model):
            assert moe.routing is not None
            found = moe.routing.statistics()
            load.append(found["load"] / found["load"].mean())
            rest["fractional"].append(100 * float(found["fractional"]))
            rest["dropped"].append(100 * float(found["dropped"]))
            rest["without expert"].append(100 * _untaken(moe.routing, tokens))

    accuracy = accuracies(model, split, (1,), pixels, look)["1"]
    shares = {name: statistics.fmean(values) for name, values in rest.items()}
    return {"accuracy": accuracy, "load": torch.stack(load).mean(dim=0).tolist(), **shares}


def _untaken(routing: Routing, n: int) -> float:
    """The share of the n tokens of a group that no expert takes."""
    taken = (routing.selected.detach() > 0).flatten(-2).float()
    count = taken.new_zeros((*taken.shape[:-1], n)).scatter_add(
        -1, routing.tokens.flatten(-2), taken
    )
    return float((count == 0).float().mean())


def measure(
    make_model: dict[str, Maker],
    images: Images,
    setting: Setting,
    lam: float,
    device: torch.device,
) -> dict[str, Any]:
    """Seconds of a whole step with each router in (a), and of the routers alone, with their gradient,
    in the size of the paper: 28 of 400 tokens for each of 32 experts."""
    part = setting.scratch
    batch = batch_of(images, part.recipe.batch, TUNING_SEED, 0)

    def step(name: RouterName) -> Callable[[], object]:
        model = make_model["scratch"](name, lam, TUNING_SEED).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
        return lambda: train_step(model, F.cross_entropy, optimizer, batch, part.recipe, 0)

    logits = torch.randn(8, 400, 32, generator=torch.Generator().manual_seed(0))
    logits = logits.to(device).requires_grad_()

    def alone(name: RouterName) -> Callable[[], object]:
        router = vit.make_router(name, lam / 32, 2.24)
        return lambda: torch.autograd.grad(router(logits).weights.sum(), logits)

    return {
        "step": interleaved({name: step(name) for name in ROUTERS}, setting.rounds),
        "router": interleaved({name: alone(name) for name in ROUTERS}, 4 * setting.rounds),
    }


def accuracy_of(result: dict[str, Any], part: str, name: str) -> list[float]:
    return [run["accuracy"] for run in result["results"][part][name]]


def draw(result: dict[str, Any], directory: Path) -> None:
    """Test accuracy above of both parts, training accuracy against steps below."""
    plt = drawing.pyplot()
    figure, axes = plt.subplots(2, 2, figsize=(10, 6), layout="constrained")
    for column, part in enumerate(PARTS):
        above, below = axes[:, column]
        for i, name in enumerate(ROUTERS):
            runs = result["results"][part][name]
            values = accuracy_of(result, part, name)
            mean, error = mean_and_error(values)
            above.errorbar([mean], [i], xerr=[2 * error], fmt="o", color=COLOURS[name], capsize=4)
            above.plot(values, [i] * len(values), "|", color=COLOURS[name], ms=12)
            curves = [run["curve"]["accuracy"] for run in runs]
            mean_curve = [statistics.fmean(at) for at in zip(*curves, strict=True)]
            below.plot(runs[0]["curve"]["step"], mean_curve, color=COLOURS[name], label=name)
        above.set_yticks(range(len(ROUTERS)), ROUTERS)
        above.set_title(f"{part}: {result['settings'][part]['backbone']}", fontsize=11)
        above.set_xlabel("test accuracy, %")
        below.set_xlabel("step")
        below.set_ylabel("top-1 of training batches, %")
    axes[1, 0].legend(frameon=False)
    drawing.tidy(*axes.flat)
    drawing.save(figure, directory, "moe")


def tables(result: dict[str, Any]) -> dict[str, list[list[str]]]:
    """Title and rows, the first of them the header."""
    found = {}
    for part in PARTS:
        rows = [["router", "top-1, %", *(f"{name}, %" for name in SHARES), "lightest", "heaviest"]]
        for name in ROUTERS:
            runs = result["results"][part][name]
            mean, error = mean_and_error(accuracy_of(result, part, name))
            loads = [load for run in runs for load in run["load"]]
            shares = [statistics.fmean(run[share] for run in runs) for share in SHARES]
            rows.append(
                [
                    name,
                    f"{mean:.2f} ± {error:.2f}",
                    *(f"{share:.1f}" for share in shares),
                    f"{min(loads):.2f}",
                    f"{max(loads):.2f}",
                ]
            )
        found[f"{part}: accuracy, shares, and the load of experts (1: as many as all others)"] = (
            rows
        )
    seconds = result["results"]["timing"]["seconds"]
    times = [
        [n, *(f"{1e3 * statistics.median(seconds[of][n]):.2f}" for of in seconds)] for n in ROUTERS
    ]
    found["Milliseconds, medians"] = [["router", *(f"a {of}" for of in seconds)], *times]
    return found


def claims(result: dict[str, Any]) -> list[Claim]:
    return [_accuracy_claim(result), _time_claim(result)]


def _told(result: dict[str, Any], part: str) -> str:
    hard = accuracy_of(result, part, "hard")
    mean, error = mean_and_error(hard)
    parts = [f"hard {mean:.2f} ± {error:.2f} %"]
    for name in ROUTERS[1:]:
        mean, error = difference(accuracy_of(result, part, name), hard)
        parts.append(f"{name} {mean:+.2f} ± {error:.2f}")
    return f"{part}: {', '.join(parts)}"


def _accuracy_claim(result: dict[str, Any]) -> Claim:
    """Reproduced if the paper's router, Dykstra-10, is clearly better than the hard one in every part
    that has a spread; partly if it or the exact one is in some part, and neither clearly worse."""
    parts = [part for part in PARTS if result["settings"][part]["seeds"] > 1]
    signs = {
        (part, name): compared(accuracy_of(result, part, name), accuracy_of(result, part, "hard"))
        for part in parts
        for name in ROUTERS[1:]
    }
    verdict: Any = "not reproduced"
    if not parts:
        verdict = "not measured"
    elif all(signs[part, "Dykstra-10"] == 1 for part in parts):
        verdict = "reproduced"
    elif 1 in signs.values() and -1 not in signs.values():
        verdict = "partly"
    fractional = statistics.fmean(
        run["fractional"] for part in PARTS for run in result["results"][part]["relaxed"]
    )
    lam, lams = result["results"]["lam"], result["settings"]["lams"]
    edge = "at the edge of the sweep, " if lam in (min(lams), max(lams)) else ""
    return Claim(
        "A relaxed router trains a better mixture of experts than a hard one",
        "better precision-at-1 on JFT-300M at the end of training (one run)",
        "; ".join(_told(result, part) for part in PARTS) + " (points against hard, same seeds)",
        verdict,
        f"{result['settings']['data']}, not JFT-300M; lam = {lam:g}/experts, {edge}chosen on a "
        f"validation split; lr not tuned; {fractional:.1f} % of the exact router's assignments are "
        "fractional.",
    )


def _time_claim(result: dict[str, Any]) -> Claim:
    """Reproduced if the ratio of whole steps is the paper's within a tenth; not measured if two
    standard errors are more than that."""
    seconds = result["results"]["timing"]["seconds"]
    step, alone = seconds["step"], seconds["router"]
    ratios = {
        name: mean_and_error([a / b for a, b in zip(step[name], step["hard"], strict=True)])
        for name in ROUTERS[1:]
    }
    mean, error = ratios["Dykstra-10"]
    verdict: Any = "not measured"
    if 2 * error <= 0.1 * PAPER_RATIO:
        near = abs(mean - PAPER_RATIO) <= 0.1 * PAPER_RATIO
        verdict = "reproduced" if near else "not reproduced"
    said = ", ".join(f"{n} {m:.2f} ± {e:.2f}" for n, (m, e) in ratios.items())
    millis = ", ".join(f"{n} {1000 * statistics.median(t):.2f} ms" for n, t in alone.items())
    return Claim(
        "The relaxed router makes training take half as long again",
        "15 hours against 10, with Dykstra-10",
        f"time of a step against the hard router's: {said}",
        verdict,
        "On other hardware. The router alone with its gradient, for 8 groups of the paper's size: "
        f"{millis}.",
    )
