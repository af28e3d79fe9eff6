"""Fig. 5 of the paper: an MLP of which 10 % of each weight matrix is kept while it is trained.

Its parts: "paper" is the paper's setting: SGD, batches of 128, learning rate 1e-2, lam = 1e-4, 30
epochs. "sweep" tries learning rates and lam on a validation split, as many settings for every method;
"best" trains with the ones it chose, on the whole training set (in the full form for half as many
epochs), and "ramp" does the same while keep goes from everything to 10 % in the first half of the steps.
"variants" changes one thing at a time, to see what makes pruning work. The sweep never sees the test
set; the other parts choose nothing.

Relaxed operators keep some more weights than k while they train, and with a large lam many more. So
every error is measured twice: of the network as it is trained, and of the one with exactly 10 % of each
matrix, the largest. The second one chooses and judges.

The paper leaves open how weights start (here: as torch starts them), how pixels are scaled (here: to
[0, 1]) and lam of the straight-through baseline (here: the same as that of the others). Its baseline is
entropy-regularised optimal transport by Sinkhorn's algorithm; here it is the limit of that algorithm,
the mask of binary entropy, which is solved exactly and in less time.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from . import digits
from .data import at_hand
from .drawing import COLOURS, log_scale, pyplot, save, tidy
from .pruned_mlp import CHANCE, KEEP, METHODS, Setting, Tensors, Trainer, train
from .runs import Book, Claim, ExperimentError, Options, mean_and_error

TITLE = "Pruning while training (Fig. 5)"
CAPTIONS = {
    "pruning": "Fig. 5 of the paper: test error of the network with exactly 10 % of each matrix, mean "
    "and one standard error over the seeds, against epochs and against time.",
    "pruning-variants": "What makes it work: one change at a time to two settings, after a few epochs.",
}
RELAXED = ("p = 2", "p = 4/3")
WITHOUT_LAM = ("dense", "hard")
FASHION_SEEDS = 3
RAMP = 0.5  # of the steps


@dataclass(frozen=True)
class Plan:
    """What is run; ``lrs`` and ``lams`` are swept, ``share`` of the training set validates."""

    data: str
    batch: int
    epochs: int
    best_epochs: int
    sweep_epochs: int
    variant_epochs: int
    seeds: int
    variant_seeds: int
    share: float
    lrs: tuple[float, ...]
    lams: tuple[float, ...]


# "best" has half the epochs of the paper: straight through takes about half of all the time.
FULL = Plan("mnist", 128, 30, 15, 4, 5, 5, 3, 1 / 12, (0.1, 0.3, 1.0, 3.0), (0.1, 0.3, 1.0, 3.0))
QUICK = Plan("digits", 32, 4, 8, 4, 3, 2, 1, 1 / 4, (0.3, 1.0), (0.3, 1.0))

UNCHANGED = "as it is"
# One change at a time: to the paper's setting, and to one in which the relaxed operators do well.
BASES: dict[str, dict[str, Any]] = {
    "the paper's setting": {},
    "lr 0.3, lam 1": {"lr": 0.3, "lam": 1.0, "relative": True},
}
CHANGES: dict[str, dict[str, Any]] = {
    UNCHANGED: {},
    "lr 0.01": {"lr": 0.01},
    "lr 0.3": {"lr": 0.3},
    "lam 0.0001": {"lam": 1e-4},
    "lam 1": {"lam": 1.0},
    "first weights x 3": {"init": 3.0},
    "first weights / 3": {"init": 1 / 3},
    "ramp of keep": {"ramp": RAMP},
    "standardised pixels": {"standardise": True},
}
VARIANT_METHODS = ("hard", "p = 2")
SWEEP_SEED = 1000  # not one of those that are reported
BAR = "{desc}{percentage:3.0f} %|{bar}| {elapsed} past, {remaining} left"


# ------------------------------------------------------------------------------------------- settings


def paper_setting(plan: Plan, method: str) -> Setting:
    return Setting(method, batch=plan.batch, epochs=plan.epochs)


def swept_settings(plan: Plan, method: str) -> list[Setting]:
    """As many for every method: where there is no lam, the learning rates lie closer."""
    base = replace(paper_setting(plan, method), epochs=plan.sweep_epochs, relative=True)
    if method in WITHOUT_LAM:
        lrs = np.geomspace(min(plan.lrs), max(plan.lrs), len(plan.lrs) * len(plan.lams))
        return [replace(base, lr=round(float(lr), 4)) for lr in lrs]
    return [replace(base, lr=lr, lam=lam) for lr in plan.lrs for lam in plan.lams]


def variants(plan: Plan) -> list[tuple[str, str, Setting]]:
    """(base, change, setting); a change that changes nothing is left out, and for the hard operator
    that of lam."""
    found = []
    for base, values in BASES.items():
        for method in VARIANT_METHODS:
            setting = replace(paper_setting(plan, method), epochs=plan.variant_epochs, **values)
            for change, value in CHANGES.items():
                changed = replace(setting, **value)
                without_effect = changed == setting or (method == "hard" and "lam" in value)
                if change == UNCHANGED or not without_effect:
                    found.append((base, change, changed))
    return found


# ------------------------------------------------------------------------------------------- runs


@dataclass
class Runs:
    """Makes runs one by one, and moves the bar by the time that each epoch should take."""

    book: Book
    data: str
    cost: dict[str, int]  # microseconds of an epoch: whole numbers, which add up to the total
    bar: Any

    def make(self, part: str, label: str, setting: Setting, data: Tensors, seed: int) -> Any:
        name = re.sub(r"[^a-z0-9.]+", "-", f"{self.data} {part} {label} {seed}".lower())
        settings = {"data": self.data, "part": part, "seed": seed, **asdict(setting)}
        cost, ticks = self.cost[setting.method], 0

        def tick(epochs: int) -> None:
            nonlocal ticks
            ticks += epochs
            self.bar.update(cost * epochs)

        self.bar.set_description(f"{self.data}, {part}: {label}")
        result = self.book.run(
            name, settings, lambda checkpoint: train(setting, data, seed, checkpoint, tick)
        )
        tick(setting.epochs - ticks)  # what was already there
        return result

    def seeds(
        self, part: str, label: str, setting: Setting, data: Tensors, seeds: Iterable[int]
    ) -> dict[str, Any]:
        """The runs of one setting, side by side."""
        each = [self.make(part, label, setting, data, seed) for seed in seeds]
        return {"setting": asdict(setting), **{key: [run[key] for run in each] for key in each[0]}}


def run(options: Options) -> dict[str, Any]:
    plan = FULL if options.full else QUICK
    return carry_out(replace(plan, seeds=options.seeds or plan.seeds), options)


def carry_out(plan: Plan, options: Options) -> dict[str, Any]:
    book = Book(options, "pruning")
    data = digits.digits() if plan.data == "digits" else digits.mnist(options)
    fashion, left_out = _fashion(options) if options.full else (None, [])
    everything = _tensors(data, options.device)
    held_out = _tensors(digits.hold_out(data, plan.share), options.device)
    cost = _microseconds_per_epoch(plan, everything)
    total = _microseconds(plan, cost, fashion is not None)
    print(f"pruning: about {math.ceil(total / 60e6)} min")
    with tqdm(total=total, bar_format=BAR) as bar:
        runs = Runs(book, plan.data, cost, bar)
        results: dict[str, Any] = {"data": plan.data}
        results["paper"] = {
            m: runs.seeds("paper", m, paper_setting(plan, m), everything, range(plan.seeds))
            for m in METHODS
        }
        results["sweep"] = {m: _sweep(runs, plan, m, held_out) for m in METHODS}
        best = {m: replace(_best(results["sweep"][m]), epochs=plan.best_epochs) for m in METHODS}
        results["best"] = {
            m: runs.seeds("best", m, best[m], everything, range(plan.seeds)) for m in METHODS
        }
        results["ramp"] = {
            m: runs.seeds(
                "ramp", m, replace(best[m], ramp=RAMP), everything, range(plan.variant_seeds)
            )
            for m in METHODS
            if m != "dense"
        }
        results["variants"] = [
            {"base": base, "change": change}
            | runs.seeds(
                "variants",
                f"{setting.method} {base} {change}",
                setting,
                everything,
                range(plan.variant_seeds),
            )
            for base, change, setting in variants(plan)
        ]
        if fashion is not None:
            other = Runs(book, "fashion-mnist", cost, bar)
            tensors = _tensors(fashion, options.device)
            results["fashion-mnist"] = {
                m: other.seeds("best", m, best[m], tensors, range(FASHION_SEEDS)) for m in METHODS
            }
    return book.finish({"plan": asdict(plan), "left out": left_out}, results)


def _sweep(runs: Runs, plan: Plan, method: str, data: Tensors) -> list[dict[str, Any]]:
    """One seed for each setting; the error that chooses is that of exactly 10 % of the weights."""
    found = []
    for setting in swept_settings(plan, method):
        label = f"{method} lr {setting.lr} lam {setting.lam}"
        made = runs.make("sweep", label, setting, data, SWEEP_SEED)
        error, share = made["sparse errors"][-1], made["nonzeros"]
        found.append({"setting": asdict(setting), "error": error, "nonzeros": share})
    return found


def _best(swept: list[dict[str, Any]]) -> Setting:
    return Setting(**min(swept, key=lambda each: each["error"])["setting"])


def _fashion(options: Options) -> tuple[digits.Data | None, list[str]]:
    """Fashion-MNIST, or why it is left out; a corrupt file is an error."""
    if any(at_hand(f"fashion-mnist/{name}", options) for name in digits.FASHION):
        return digits.fashion_mnist(options), []
    try:
        return digits.fashion_mnist(options), []
    except ExperimentError as error:
        return None, [f"Fashion-MNIST: {error}"]


def _tensors(data: digits.Data, device: str) -> Tensors:
    x, y, x_test, y_test = (torch.from_numpy(np.ascontiguousarray(each)) for each in data)
    return x.to(device), y.to(device), x_test.to(device), y_test.to(device)


def _microseconds_per_epoch(plan: Plan, data: Tensors, steps: int = 10) -> dict[str, int]:
    """Measured on a few steps."""
    x, y, _, _ = data
    found = {}
    for method in METHODS:
        setting = replace(paper_setting(plan, method), lr=0.1, lam=0.3, relative=True)
        trainer = Trainer(setting, data, 0)
        trainer.step(x[: plan.batch], y[: plan.batch])
        start = time.perf_counter()
        for _ in range(steps):
            trainer.step(x[: plan.batch], y[: plan.batch])
        seconds = (time.perf_counter() - start) / steps * math.ceil(len(y) / plan.batch)
        found[method] = math.ceil(1e6 * seconds)
    return found


def _microseconds(plan: Plan, cost: dict[str, int], fashion: bool) -> int:
    best = plan.seeds + FASHION_SEEDS * fashion
    sweep = len(plan.lrs) * len(plan.lams) * plan.sweep_epochs
    every = sum(cost.values()) * (plan.seeds * plan.epochs + best * plan.best_epochs + sweep)
    ramp = (sum(cost.values()) - cost["dense"]) * plan.best_epochs
    changed = sum(cost[setting.method] * setting.epochs for _, _, setting in variants(plan))
    return every + plan.variant_seeds * (ramp + changed)


# ------------------------------------------------------------------------------------------- results

Spread = tuple[float, float]  # a mean and its standard error


def final_error(summary: dict[str, Any]) -> Spread:
    """After the last epoch, with exactly 10 % of the weights."""
    return mean_and_error([errors[-1] for errors in summary["sparse errors"]])


def mean_error(summary: dict[str, Any]) -> Spread:
    """Over all epochs: what trains faster has less."""
    return mean_and_error([sum(errors) / len(errors) for errors in summary["sparse errors"]])


def seconds_per_epoch(summary: dict[str, Any]) -> float:
    return min(min(seconds) for seconds in summary["seconds"])


def tables(result: dict[str, Any]) -> dict[str, list[list[str]]]:
    """Title and rows, the first of them the header."""
    results = result["results"]
    found = {f"{title[0].upper()}{title[1:]}": _methods(results[p]) for p, title in PARTS.items()}
    if "fashion-mnist" in results:
        found["Fashion-MNIST, with the settings that were best on MNIST"] = _methods(
            results["fashion-mnist"]
        )
    found["One change at a time: test error"] = _changes(results["variants"])
    return found


def _methods(part: dict[str, Any]) -> list[list[str]]:
    """A row for every method."""
    rows = [["method", "lr", "lam", "test error", "as trained", "nonzeros", "ms per epoch"]]
    for method, summary in part.items():
        setting = summary["setting"]
        rows.append(
            [
                method,
                f"{setting['lr']:g}",
                "" if method in WITHOUT_LAM else f"{setting['lam']:g}",
                _percent(final_error(summary)),
                _percent(mean_and_error([errors[-1] for errors in summary["errors"]])),
                f"{100 * mean_and_error(summary['nonzeros'])[0]:.1f} %",
                f"{1e3 * seconds_per_epoch(summary):.0f}",
            ]
        )
    return rows


def _changes(found: list[dict[str, Any]]) -> list[list[str]]:
    """A row for every change, a column for every base and method."""
    columns = [(base, method) for base in BASES for method in VARIANT_METHODS]
    cells = {
        (v["base"], v["setting"]["method"], v["change"]): _percent(final_error(v)) for v in found
    }
    rows = [
        [change, *(cells.get((*column, change), "") for column in columns)] for change in CHANGES
    ]
    return [["", *(f"{method}, {base}" for base, method in columns)], *rows]


def claims(result: dict[str, Any]) -> list[Claim]:
    results = result["results"]
    place = "the test set of MNIST" if results["data"] == "mnist" else "digits, not MNIST"
    few = len(results["paper"]["hard"]["nonzeros"]) < 2
    found = [
        _straight_through(results),
        _comparison(
            results,
            "The relaxed top-k trains significantly faster than the hard one",
            "Fig. 5, test error against time",
            lambda part, m: _below(mean_error(part[m]), mean_error(part["hard"])),
            mean_error,
            ("hard", *RELAXED),
            f"mean error over all epochs, {place}; {_paces(results)}",
        ),
        _comparison(
            results,
            "Pruning with the relaxed top-k gives better accuracy than with the hard one",
            "stated",
            lambda part, m: _below(final_error(part[m]), final_error(part["hard"])),
            final_error,
            ("hard", *RELAXED),
            f"error after the last epoch, {place}; {_ramped(results)}",
        ),
        _comparison(
            results,
            "The relaxed operators are comparable to the straight-through baseline",
            "5.9 % and comparable",
            lambda part, m: _comparable(
                final_error(part[m]), final_error(part["straight-through"])
            ),
            final_error,
            ("straight-through", *RELAXED),
            f"error after the last epoch, {place}",
        ),
    ]
    if few:
        found = [replace(each, verdict="not measured", note="one seed alone") for each in found]
    return [*found, _nonzeros(results)]


def _straight_through(results: dict[str, Any]) -> Claim:
    """Reproduced if it is reached in the paper's setting, partly if with other settings."""
    reached = [
        not _below((0.059, 0.0), final_error(results[part]["straight-through"]))
        for part in ("paper", "best")
    ]
    text, paper = "The straight-through baseline has a test error of 5.9 %", "5.9 %"
    ours = _both(results, final_error, ("straight-through",))
    if results["data"] != "mnist":
        return Claim(text, paper, ours, "not measured", "the quick form is on digits, not MNIST")
    verdict: Any = "reproduced" if reached[0] else "partly" if reached[1] else "not reproduced"
    return Claim(text, paper, ours, verdict, "partly: only with a learning rate and lam of our own")


def _comparison(
    results: dict[str, Any],
    text: str,
    paper: str,
    holds: Callable[[dict[str, Any], str], bool],
    measure: Callable[[dict[str, Any]], Spread],
    shown: tuple[str, ...],
    note: str,
) -> Claim:
    """Reproduced if it holds for p = 2 and p = 4/3 in the paper's setting; partly if for one of
    them, or with the settings where each method is at its best."""
    found = {part: [holds(results[part], m) for m in RELAXED] for part in ("paper", "best")}
    verdict: Any = "not reproduced"
    if all(found["paper"]):
        verdict = "reproduced"
    elif any(found["paper"] + found["best"]):
        verdict = "partly"
    return Claim(text, paper, _both(results, measure, shown), verdict, note)


def _nonzeros(results: dict[str, Any]) -> Claim:
    shares = {m: results["paper"][m]["nonzeros"] for m in RELAXED}
    kept = all(abs(share - KEEP) < 0.005 for m in RELAXED for share in shares[m])
    at_best = {m: mean_and_error(results["best"][m]["nonzeros"])[0] for m in RELAXED}
    return Claim(
        "The relaxed top-k keeps the rate of 10 % nonzero weights",
        "10 %",
        "; ".join(f"{m}: {100 * mean_and_error(shares[m])[0]:.2f} %" for m in RELAXED),
        "reproduced" if kept else "not reproduced",
        "while training with a larger lam there are more: "
        + "; ".join(
            f"{m}, lam {results['best'][m]['setting']['lam']:g}: {100 * share:.0f} %"
            for m, share in at_best.items()
        ),
    )


def _below(a: Spread, b: Spread) -> bool:
    """By more than two standard errors of the difference."""
    return a[0] + 2 * math.hypot(a[1], b[1]) < b[0]


def _comparable(a: Spread, b: Spread) -> bool:
    """Not worse by a point, whatever the spread; two that have learned nothing do not count."""
    return a[0] + 2 * math.hypot(a[1], b[1]) < b[0] + 0.01 and max(a[0], b[0]) < CHANCE / 2


def _percent(value: Spread) -> str:
    mean, error = value
    return f"{100 * mean:.1f} %" if math.isnan(error) else f"{100 * mean:.1f} ± {100 * error:.1f} %"


def _both(
    results: dict[str, Any], measure: Callable[[dict[str, Any]], Spread], methods: tuple[str, ...]
) -> str:
    def line(part: str) -> str:
        return ", ".join(f"{m} {_percent(measure(results[part][m]))}" for m in methods)

    return f"the paper's setting: {line('paper')}; each at its best: {line('best')}"


def _paces(results: dict[str, Any]) -> str:
    hard = seconds_per_epoch(results["paper"]["hard"])
    ratios = {m: seconds_per_epoch(results["paper"][m]) / hard for m in RELAXED}
    return "an epoch takes " + ", ".join(
        f"{ratio:.1f} times that of hard with {m}" for m, ratio in ratios.items()
    )


def _ramped(results: dict[str, Any]) -> str:
    return "with a ramp of keep: " + ", ".join(
        f"{m} {_percent(final_error(results['ramp'][m]))}" for m in ("hard", *RELAXED)
    )


# ------------------------------------------------------------------------------------------- figures

PARTS = {
    "paper": "the paper's setting",
    "best": "each method at its best",
    "ramp": "at its best, with a ramp of keep",
}


def draw(result: dict[str, Any], directory: Path) -> None:
    results = result["results"]
    plt = pyplot()
    figure, axes = plt.subplots(3, 2, figsize=(10, 10.5), layout="constrained", sharey="row")
    for row, (part, title) in zip(axes, PARTS.items(), strict=True):
        for method, summary in results[part].items():
            draw_errors(row[0], method, summary, None)
            draw_errors(row[1], method, summary, seconds_per_epoch(summary))
        row[0].set_title(title, fontsize=11, loc="left")
        row[0].set_ylabel("test error, %")
    axes[-1, 0].set_xlabel("epoch")
    axes[-1, 1].set_xlabel("seconds")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    tidy(*axes.flat)
    save(figure, directory, "pruning")
    _draw_variants(results["variants"], directory)


def draw_errors(ax: Any, method: str, summary: dict[str, Any], seconds: float | None) -> None:
    """The mean over the seeds after each epoch, and a band of one standard error, in percent."""
    spreads = [mean_and_error(list(each)) for each in zip(*summary["sparse errors"], strict=True)]
    mean, error = 100 * np.array(spreads).T
    x = (1 + np.arange(len(mean))) * (1.0 if seconds is None else seconds)
    ax.plot(x, mean, color=COLOURS[method], label=method, lw=1.8)
    ax.fill_between(x, mean - error, mean + error, color=COLOURS[method], alpha=0.2, lw=0)
    log_scale(ax)


def _draw_variants(found: list[dict[str, Any]], directory: Path) -> None:
    plt = pyplot()
    figure, axes = plt.subplots(1, len(BASES), figsize=(10, 4), layout="constrained", sharey=True)
    labels = list(CHANGES)
    for ax, base in zip(axes, BASES, strict=True):
        for shift, method in zip((-0.12, 0.12), VARIANT_METHODS, strict=True):
            mine = [v for v in found if v["base"] == base and v["setting"]["method"] == method]
            mean, error = 100 * np.array([final_error(v) for v in mine]).T
            y = np.array([labels.index(v["change"]) for v in mine]) + shift
            ax.errorbar(
                mean, y, xerr=np.nan_to_num(error), fmt="o", color=COLOURS[method], label=method
            )
        ax.set_title(base, fontsize=11, loc="left")
        ax.set_xlabel("test error, %")
    axes[0].set_yticks(range(len(labels)), labels)
    axes[0].invert_yaxis()
    axes[0].legend(frameon=False)
    tidy(*axes)
    save(figure, directory, "pruning-variants")
