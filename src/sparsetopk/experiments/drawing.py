"""The look that all figures share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# One colour for one method, in every figure.
COLOURS = {
    "dense": "#3c4043",
    "hard": "#9aa0a6",
    "p = 2": "#d1495b",
    "p = 4/3": "#3a7d44",
    "two-sided": "#00798c",
    "smooth": "#00798c",
    "straight-through": "#edae49",
}


def pyplot() -> Any:
    """matplotlib.pyplot, without a display."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "sparsetopk"  # else the names in an SVG are random
    import matplotlib.pyplot as plt

    return plt


def tidy(*axes: Any) -> None:
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25)


def log_scale(ax: Any) -> None:
    """Of y, with plain numbers on it."""
    from matplotlib.ticker import LogLocator, NullLocator

    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter("{x:g}")


def save(figure: Figure, directory: Path, name: str) -> None:
    """As PNG and SVG; the same numbers give the same file."""
    directory.mkdir(parents=True, exist_ok=True)
    figure.savefig(directory / f"{name}.png", dpi=110)
    figure.savefig(directory / f"{name}.svg", metadata={"Date": None})
    pyplot().close(figure)
