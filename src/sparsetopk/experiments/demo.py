"""A first look, in about half a minute: Fig. 1 of the paper, an indexer, and networks pruned on digits.

Every network has 10 % of its weights at the end; keep goes there from everything in the first half of
the steps. All methods have the same learning rate and lam, which were not tuned; with one seed and a
constant learning rate the error of a single epoch can be far off, as the curves show: the table has the
median of the last five.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

from . import digits, figure1
from .drawing import pyplot, tidy
from .pruned_mlp import Setting, train
from .pruning import RAMP, draw_errors
from .runs import Checkpoint
from .tasks import training

METHODS = ("dense", "hard", "p = 2", "p = 4/3", "smooth")
EPOCHS = 30
INDEXER = {"hard": "hard", "relaxed": "p = 4/3 straight-through, backward k = 1"}


def setting(method: str, epochs: int = EPOCHS) -> Setting:
    ramp = 0.0 if method == "dense" else RAMP
    return Setting(method, 0.3, 0.3, relative=True, ramp=ramp, batch=32, epochs=epochs)


def train_all(epochs: int = EPOCHS) -> dict[str, Any]:
    """One seed of every method on scikit-learn's digits."""
    x, y, x_test, y_test = map(torch.from_numpy, digits.digits())
    found: dict[str, Any] = {}
    for method in METHODS:
        made = train(setting(method, epochs), (x, y, x_test, y_test), 0, Unsaved())
        found[method] = {"setting": asdict(setting(method, epochs))}
        found[method] |= {key: [value] for key, value in made.items()}
    return found


def needles(steps: int | None = None) -> str:
    """How often an indexer fetches the token that is asked for, with lam = 1 and one seed."""
    make, at = training.MAKE["indexer-64"], training.Setting(rate=0.01, strength=1.0)
    lines = [f"{'selection':10s}  needles found"]
    lines.append("-" * len(lines[0]))
    for label, method in INDEXER.items():
        made = training.train(make, method, at, 0, {}, steps or make({}, 0).steps)
        lines.append(f"{label:10s}  {made['quality']:11.1f} %")
    return "\n".join(lines)


class Unsaved(Checkpoint):
    """For runs that are too short to be resumed."""

    def __init__(self) -> None:
        super().__init__(Path(), {})

    def load(self) -> None:
        return None

    def save(self, state: Any) -> None:
        pass


def table(found: dict[str, Any]) -> str:
    """The error and the share of nonzeros of the networks as they would be used."""
    lines = [f"{'weights':10s}  error on test digits  nonzeros"]
    lines.append("-" * len(lines[0]))
    for method, summary in found.items():
        error, share = median(summary["sparse errors"][0][-5:]), summary["sparse nonzeros"][0]
        lines.append(f"{method:10s}  {100 * error:18.1f} %  {100 * share:6.1f} %")
    return "\n".join(lines)


def draw(found: dict[str, Any], path: Path) -> None:
    """Fig. 1 and the second path beside it, then errors against epochs."""
    figure, axes = pyplot().subplots(1, 3, figsize=(14, 4), layout="constrained")
    for ax, track in zip(axes, figure1.TRACKS, strict=False):
        for curve in figure1.CURVES:
            ax.plot(track.s, curve.along(track)[0], color=curve.colour, label=curve.label, lw=1.8)
        ax.set_title(track.title, fontsize=11)
        ax.set_xlabel("$s$")
    for method, summary in found.items():
        draw_errors(axes[2], method, summary, None)
    axes[0].set_ylabel("top-2 mask")
    axes[2].set_title("10 % of the weights: error on test digits, %", fontsize=11)
    axes[2].set_xlabel("epoch")
    axes[0].legend(frameon=False)
    axes[2].legend(frameon=False)
    tidy(*axes)
    figure.savefig(path, dpi=110)
    pyplot().close(figure)


def main(out: Path) -> str:
    """Draws ``demo.png``; the text to print."""
    out.mkdir(parents=True, exist_ok=True)  # before a minute is spent, if it cannot be
    found = train_all()
    picture = out / "demo.png"
    draw(found, picture)
    return "\n".join(
        [
            "A top-2 mask along two paths: how sparse, and the largest jump of it and of its slope",
            "",
            figure1.table(),
            "",
            "An indexer that learns to fetch 4 of 64 tokens; by chance it finds 6 %",
            "",
            needles(),
            "",
            "A network 64-32-32-10 for handwritten digits, pruned while it is trained",
            "",
            table(found),
            "",
            f"Picture: {picture}",
        ]
    )
