"""Draws threshold.svg, the picture of the start page: which entries compete, and what they get.

python docs/images/threshold.py
"""

from pathlib import Path

import numpy as np

import sparsetopk as st
from sparsetopk.experiments.drawing import COLOURS, pyplot, tidy

X, K, LAM = np.array([1.5, 0.3, 0.92, 1.9, -0.4, 0.8, 1.0, 0.1]), 3, 0.4
WINS, SHARES, LOSES = "#3c4043", COLOURS["two-sided"], "#c4c9ce"


def colours(y):
    return [WINS if value == 1 else SHARES if value > 0 else LOSES for value in y]


def threshold(y):
    """tau, from an entry that shares: y = (x - tau)/lam for p = 2."""
    one = int(np.argmax((y > 0) & (y < 1)))
    return X[one] - LAM * y[one]


def scores(ax, y):
    tau = threshold(y)
    ax.axhspan(tau, tau + LAM, color=SHARES, alpha=0.15, lw=0)
    ax.bar(range(X.size), X, color=colours(y), width=0.7)
    ax.axhline(0, color="#9aa0a6", lw=0.8)
    for height, text in ((tau + LAM, r"$\tau + \lambda$"), (tau, r"$\tau$")):
        ax.axhline(height, color=SHARES, lw=1.2, ls="--")
        ax.text(X.size - 0.15, height, text, color=SHARES, va="center", fontsize=13)
    ax.set_title("scores $x$")


def masks(ax, hard, relaxed):
    bars = ax.bar(range(X.size), relaxed, color=colours(relaxed), width=0.7)
    chosen = np.flatnonzero(hard)
    ax.bar(chosen, hard[chosen], fill=False, ec=COLOURS["p = 2"], ls=":", lw=1.6, width=0.84)
    labels = [f"{value:.2g}" if value in (0, 1) else f"{value:.2f}" for value in relaxed]
    box = {"facecolor": "white", "linewidth": 0, "pad": 0.5}  # over the dotted line
    ax.bar_label(bars, labels, padding=3, fontsize=10, color=WINS, bbox=box)
    ax.set(ylim=(0, 1.18), yticks=(0, 0.5, 1))
    ax.set_title("top-3 mask (dotted: hard)")


def draw(path):
    plt = pyplot()
    plt.rcParams.update({"font.size": 11, "svg.hashsalt": path.name})
    figure, axes = plt.subplots(1, 2, figsize=(6.8, 2.6), layout="constrained")
    hard, relaxed = st.topk_mask(X, K, 0.0), st.topk_mask(X, K, LAM)
    scores(axes[0], relaxed)
    masks(axes[1], hard, relaxed)
    tidy(*axes)
    for ax in axes:
        ax.set(xticks=[], axisbelow=True)
        ax.grid(axis="x", visible=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    draw(Path(__file__).with_suffix(".svg"))
