"""The look of the gallery's figures: set before every script, so that the scripts need not say it."""

from typing import Any

import matplotlib.pyplot as plt
import torch

LOOK = {
    "figure.constrained_layout.use": True,
    "figure.figsize": (8, 3.6),
    "figure.dpi": 100,
    "savefig.dpi": 100,
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "image.cmap": "Greys",
}


def reset(settings: dict[str, Any], name: str) -> None:
    """One thread, and matplotlib as it should be at the beginning of a script."""
    torch.set_num_threads(1)
    plt.rcdefaults()
    plt.rcParams.update(LOOK)
