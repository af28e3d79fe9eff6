"""The figures of the paper that show the operators themselves, and one of ours.

What the captions say of them is measured on grids. A function is called continuous if its largest
change from one point of the grid to the next shrinks with the grid: to a quarter where it is smooth,
not at all where it jumps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

import sparsetopk as st
from sparsetopk._numpy.operators import MagOptions
from sparsetopk._types import Array, Bools

from . import figure1
from .drawing import COLOURS, pyplot, save, tidy
from .figure1 import CURVES, FIGURE_1, SATURATION, Curve, Track
from .runs import Book, Claim, Options

TITLE = "The operators in pictures"

CAPTIONS = {
    "figure1": "Fig. 1 of the paper: the sum of two entries of the top-2 mask of (3, 1, s - 1, s), "
    "and its derivative. Hard, p = 2, p = 4/3, and the two-sided mask.",
    "permutahedra": "Fig. 2 of the paper: the permutahedra of three w in the plane where the "
    "entries sum to 1. Top-1 is the simplex, top-2 the capped simplex, a partial ranking the hexagon.",
    "surfaces": "Fig. 3 of the paper: top-2 in magnitude of (x1, x2, 1/2, 1), lam = 0.3, the sum of "
    "the first two entries. The hard one jumps: it has no surface there.",
    "several_p": "The figure of the paper's discussion: Fig. 1 for more values of p.",
    "negentropy": "The k-support negentropy on the simplex, n = 3. For k = 2 (the figure of the "
    "paper's appendix) and, for comparison, the ordinary negentropy. Lighter is lower.",
    "saturation": "Ours: the first entry of the top-2 mask of (s, 0.3, 0.2, -0.5). It reaches 1 "
    "while others are fractional. There the derivative of p = 4/3 jumps; that of the two-sided mask "
    "does not.",
}

QUICK = {"points": 4001, "lines": 17, "surface": 61, "simplex": 61}
FULL = {"points": 96_001, "lines": 33, "surface": 121, "simplex": 181}

LAM_3 = 0.3
# p = 3 is left out: with two fractional entries, as here, it is the same as p = 2.
POWERS = {"p = 8/7": 8 / 7, "p = 4/3": 4 / 3, "p = 3/2": 1.5, "p = 2": 2.0, "p = 4": 4.0}
WEIGHTS = {
    "w = (1, 0, 0)": (1.0, 0.0, 0.0),
    "w = (1/2, 1/2, 0)": (1 / 2, 1 / 2, 0.0),
    "w = (2/3, 1/3, 0)": (2 / 3, 1 / 3, 0.0),
}
SEVERAL = tuple(Curve(name, "", 1.0, {"p": p}) for name, p in POWERS.items())


def jumps(values: Array) -> list[float]:
    """The largest change along the first axis between neighbours, on every fourth point and on all."""
    return [float(np.abs(np.diff(v, axis=0)).max()) for v in (values[::4], values)]


def continuous(found: list[float]) -> bool:
    """Whether the jumps shrink with the grid; a change that is rounding counts as none."""
    return found[1] <= max(0.5 * found[0], 1e-9)


# Fig. 1, several p, saturation


def measure_curve(curve: Curve, track: Track, points: int) -> dict[str, Any]:
    """Where the curve is exactly 0, and how it and its slope jump."""
    y, slope = curve.along(replace(track, s=np.linspace(track.s[0], track.s[-1], points)))
    return {"zeros": float(np.mean(y == 0)), "value": jumps(y), "slope": jumps(slope)}


def draw_several_p(directory: Path) -> None:
    plt = pyplot()
    figure, ax = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
    for curve, colour in zip(
        SEVERAL, plt.cm.viridis(np.linspace(0, 0.9, len(SEVERAL))), strict=True
    ):
        ax.plot(FIGURE_1.s, curve.along(FIGURE_1)[0], label=curve.label, color=colour, lw=1.8)
    y = CURVES[0].along(FIGURE_1)[0]
    y = np.where(np.abs(np.diff(y, append=y[-1])) > 0.5, np.nan, y)
    ax.plot(FIGURE_1.s, y, label="hard", color=COLOURS["hard"], lw=1.8, zorder=1)
    ax.set_title(FIGURE_1.title, fontsize=11)
    ax.set_xlabel("$s$")
    ax.set_ylabel("top-2 mask")
    ax.legend(frameon=False, loc="lower left")
    tidy(ax)
    save(figure, directory, "several_p")


# Fig. 2


def vertices(w: tuple[float, ...]) -> Array:
    """Those of P(w), around its centre: what the linear oracle answers, each once."""
    directions = np.array(list(permutations((2.0, 1.0, 0.0))))
    found = np.unique(st.lmo(directions, w).astype(np.float64), axis=0)
    across, up = found @ [1.0, -1.0, 0.0], found @ [-1.0, -1.0, 2.0] / np.sqrt(3)
    return found[np.argsort(np.arctan2(up, across))]


def draw_permutahedra(directory: Path) -> None:
    figure = pyplot().figure(figsize=(6.4, 5.6))
    ax = figure.add_axes((0.0, 0.1, 1.0, 0.9), projection="3d", computed_zorder=False)
    from mpl_toolkits.mplot3d.art3d import Poly3DCollection  # type: ignore[import-untyped]

    order = ("w = (1, 0, 0)", "w = (2/3, 1/3, 0)", "w = (1/2, 1/2, 0)")  # each holds the next
    colours = {order[0]: "#f1e4c8", order[1]: "#b5babf", order[2]: "#5b8db8"}
    for layer, name in enumerate(order, start=1):
        corners = vertices(WEIGHTS[name])
        face = Poly3DCollection([corners], facecolor=colours[name], edgecolor="#3c4043", label=name)
        face.set_zorder(layer)
        ax.add_collection3d(face)
        ax.scatter(*corners.T, color="#3c4043", s=16, zorder=10, depthshade=False)
    ax.set(xlim=(0, 1), ylim=(0, 1), zlim=(0, 1), xticks=(0, 1), yticks=(0, 1), zticks=(0, 1))
    ax.set(xlabel="$y_1$", ylabel="$y_2$", zlabel="$y_3$")
    ax.set_box_aspect((1, 1, 1))
    ax.view_init(elev=28, azim=38)
    figure.legend(*ax.get_legend_handles_labels(), loc="lower center", ncols=3, frameon=False)
    save(figure, directory, "permutahedra")


# Fig. 3


@dataclass(frozen=True)
class Surface:
    """y_1 + y_2 of top-2 in magnitude of (x_1, x_2, 1/2, 1), in the paper's form y*."""

    label: str
    lam: float
    options: MagOptions

    def at(self, x1: Array, x2: Array) -> tuple[Array, Array]:
        """Its value, and its derivative in x_1."""
        x = np.stack([x1, x2, np.full_like(x1, 0.5), np.ones_like(x1)], axis=-1)
        dx = np.broadcast_to([1.0, 0.0, 0.0, 0.0], x.shape)
        y = st.topk_mag(x, 2, self.lam, **self.options)
        dy = st.topk_mag_jvp(x, 2, self.lam, dx=dx, **self.options)
        return y[..., :2].sum(axis=-1), dy[..., :2].sum(axis=-1)


SURFACES = (
    Surface("hard", 0.0, {"debias": False}),
    Surface("p = 2", LAM_3, {"p": 2.0, "debias": False}),
    Surface("p = 4/3", LAM_3, {"p": 4 / 3, "debias": False}),
)


def measure_surface(surface: Surface, points: int, lines: int) -> dict[str, Any]:
    """Jumps along lines in x_1, and the share of the square where it is exactly 0."""
    x1, x2 = np.meshgrid(np.linspace(-2, 2, points), np.linspace(-2, 2, lines), indexing="ij")
    y, slope = surface.at(x1, x2)
    return {"zeros": float(np.mean(y == 0)), "value": jumps(y), "slope": jumps(slope)}


def draw_surfaces(directory: Path, points: int) -> None:
    plt = pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(11, 4), subplot_kw={"projection": "3d"})
    figure.subplots_adjust(left=0.0, right=0.97, bottom=0.05, top=0.95, wspace=0.1)
    x1, x2 = np.meshgrid(np.linspace(-2, 2, points), np.linspace(-2, 2, points), indexing="ij")
    for ax, surface in zip(axes, SURFACES, strict=True):
        y, _ = surface.at(x1, x2)
        if surface.lam == 0:  # no wall across the jumps
            y = np.where(_steep(y), np.nan, y)
        ax.plot_surface(
            *(x1, x2, y), cmap="viridis", vmin=-4, vmax=4, rcount=points, ccount=points, lw=0
        ).set(rasterized=True, antialiased=False)
        ax.set_title(f"{surface.label}: $y_1 + y_2$", fontsize=12)
        ax.set(xlabel="$x_1$", ylabel="$x_2$", zlim=(-4, 4))
        ax.set(xticks=(-2, 0, 2), yticks=(-2, 0, 2), zticks=(-4, 0, 4))
        ax.view_init(elev=26, azim=-58)
    save(figure, directory, "surfaces")


def _steep(y: Array) -> Bools:
    """Where the next point along either axis is far: the hard operator jumps by 1/2 or more."""
    along_x1 = np.diff(y, axis=0, append=y[-1:])
    along_x2 = np.diff(y, axis=1, append=y[:, -1:])
    return np.maximum(np.abs(along_x1), np.abs(along_x2)) > 0.45


# The k-support negentropy


def simplex(points: int) -> Array:
    """A triangular grid on it, (m, 3), corners and edges included."""
    return np.array(
        [(i, j, points - 1 - i - j) for i in range(points) for j in range(points - i)]
    ) / (points - 1)


def negentropy(y: Array) -> Array:
    return np.where(y > 0, y * np.log(np.where(y > 0, y, 1.0)), 0.0).sum(axis=-1)


def measure_negentropy(points: int) -> dict[str, Any]:
    """For k = 2: how far from the negentropy it is where at most two entries are nonzero, and how
    far above the mean of two points it is between them (0 or less, if it is convex)."""
    y = simplex(points)
    edge = y[(y == 0).any(axis=-1)]
    z = np.random.default_rng(0).permutation(y)
    middle, ends = (st.support_negentropy(v, 2) for v in ((y + z) / 2, np.stack([y, z])))
    return {
        "edges": float(np.abs(st.support_negentropy(edge, 2) - negentropy(edge)).max()),
        "above": float((middle - ends.mean(axis=0)).max()),
    }


def draw_negentropy(directory: Path, points: int) -> None:
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(8.6, 3.7), layout="constrained")
    y = simplex(points)
    across, up = y[:, 1] + y[:, 2] / 2, y[:, 2] * np.sqrt(3) / 2
    levels = np.linspace(-np.log(3), 0.0, 15)
    for ax, k, label in zip(axes, (2, 3), ("$k = 2$", "$k = 3$: negentropy"), strict=True):
        value = st.support_negentropy(y, k)
        filled = ax.tricontourf(across, up, value, levels, cmap="viridis_r", extend="max")
        ax.tricontour(across, up, value, levels, colors="white", linewidths=0.6, linestyles="solid")
        ax.plot([0, 1, 0.5, 0], [0, 0, np.sqrt(3) / 2, 0], color="#3c4043", lw=1.2)
        for at, name in (
            ((-0.06, -0.05), "$e_1$"),
            ((1.06, -0.05), "$e_2$"),
            ((0.5, 0.91), "$e_3$"),
        ):
            ax.text(*at, name, ha="center", va="center")
        ax.set_title(label, fontsize=11, pad=16)
        ax.set_aspect("equal")
        ax.axis("off")
    figure.get_layout_engine().set(wspace=0.08)
    figure.colorbar(filled, ax=axes, shrink=0.85, ticks=[-1, -0.75, -0.5, -0.25, 0])
    save(figure, directory, "negentropy")


# The experiment


def run(options: Options) -> dict[str, Any]:
    """Measure what the captions say; the grids are finer in the full form."""
    book = Book(options, "figures")
    settings = FULL if options.full else QUICK
    points, lines = settings["points"], settings["lines"]
    measures: dict[str, Callable[[object], dict[str, Any]]] = {
        "figure1": lambda _: {c.label: measure_curve(c, FIGURE_1, points) for c in CURVES},
        "saturation": lambda _: {c.label: measure_curve(c, SATURATION, points) for c in CURVES},
        "several_p": lambda _: {c.label: measure_curve(c, FIGURE_1, points) for c in SEVERAL},
        "permutahedra": lambda _: {name: len(vertices(w)) for name, w in WEIGHTS.items()},
        "surfaces": lambda _: {s.label: measure_surface(s, points, lines) for s in SURFACES},
        "negentropy": lambda _: measure_negentropy(settings["simplex"]),
    }
    results = {
        name: book.run(name, settings, make)
        for name, make in tqdm(measures.items(), "figures", unit="figure")
    }
    return book.finish(settings, results)


def draw(result: dict[str, Any], directory: Path) -> None:
    settings = result["settings"]
    save(figure1.figure([FIGURE_1]), directory, "figure1")
    draw_permutahedra(directory)
    draw_surfaces(directory, settings["surface"])
    draw_several_p(directory)
    draw_negentropy(directory, settings["simplex"])
    save(figure1.figure([SATURATION]), directory, "saturation")


def tables(result: dict[str, Any]) -> dict[str, list[list[str]]]:
    """Title and rows, the first of them the header."""
    results = result["results"]
    header = ["", "exactly 0", "jump of the value", "jump of the slope", "differentiable"]
    parts = {
        "Fig. 1": results["figure1"],
        "Fig. 1, several p": results["several_p"],
        "Through saturation": results["saturation"],
        "Fig. 3, along lines in x1": results["surfaces"],
    }
    return {
        f"{title}: share of the grid, and the largest change between its neighbours": [
            header,
            *([label, *_row(m)] for label, m in measured.items()),
        ]
        for title, measured in parts.items()
    }


def _row(m: dict[str, Any]) -> list[str]:
    return [
        f"{m['zeros']:.0%}",
        f"{m['value'][1]:.4f}",
        f"{m['slope'][1]:.4f}",
        "yes" if differentiable(m) else "no",
    ]


def differentiable(measured: dict[str, Any]) -> bool:
    """Continuously, along what was measured."""
    return continuous(measured["value"]) and continuous(measured["slope"])


def claims(result: dict[str, Any]) -> list[Claim]:
    r = result["results"]
    return [
        _sparse(r["figure1"]),
        _hard_and_p_2(r["figure1"], r["surfaces"]),
        _p_4_3(r["figure1"], r["saturation"], r["surfaces"]),
        _polytopes(r["permutahedra"]),
        _biconjugate(r["negentropy"]),
    ]


def _sparse(curves: dict[str, Any]) -> Claim:
    shares = {label: curves[label]["zeros"] for label in ("p = 2", "p = 4/3")}
    return Claim(
        "The relaxed masks are sparse: exactly 0 for some s (Fig. 1)",
        "exactly 0 for some values of s",
        ", ".join(f"{label}: 0 at {share:.0%} of the s" for label, share in shares.items()),
        "reproduced" if min(shares.values()) > 0 else "not reproduced",
    )


def _hard_and_p_2(curves: dict[str, Any], surfaces: dict[str, Any]) -> Claim:
    hard = [continuous(m["hard"]["value"]) for m in (curves, surfaces)]
    p_2 = [continuous(m["p = 2"]["value"]) for m in (curves, surfaces)]
    as_said = not any(hard) and all(p_2)
    jump = max(m["hard"]["value"][1] for m in (curves, surfaces))
    slope = max(m["p = 2"]["slope"][1] for m in (curves, surfaces))
    return Claim(
        "Without regularisation the operators jump; with p = 2 they are continuous (Fig. 1 and 3)",
        "discontinuous; continuous and differentiable almost everywhere",
        f"the hard ones jump by {jump:.2f}; p = 2 {'does not jump' if all(p_2) else 'jumps'}, "
        f"its slope changes by {slope:.2f} at kinks",
        "reproduced" if as_said else "not reproduced",
    )


def _p_4_3(figure_1: dict[str, Any], saturation: dict[str, Any], surfaces: dict[str, Any]) -> Claim:
    places = {
        "the path of Fig. 1": figure_1["p = 4/3"],
        "the path through saturation": saturation["p = 4/3"],
        "the surface of Fig. 3": surfaces["p = 4/3"],
    }
    smooth = [place for place, m in places.items() if differentiable(m)]
    broken = [
        f"{place} ({m['slope'][1]:.2f})" for place, m in places.items() if place not in smooth
    ]
    said = [f"the slope is continuous on {', '.join(smooth)}"] if smooth else []
    said += [f"it jumps on {' and '.join(broken)}"] if broken else []
    two_sided = differentiable(saturation["two-sided p = 3/2"])
    return Claim(
        "With p = 4/3 the operators are differentiable everywhere (Fig. 1 and 3)",
        "continuously differentiable",
        "; ".join(said),
        "reproduced" if not broken else "partly" if smooth else "not reproduced",
        "The slope jumps where an entry reaches its ceiling while others are fractional. "
        f"The two-sided mask {'does not jump' if two_sided else 'jumps'} on the same path.",
    )


def _polytopes(corners: dict[str, int]) -> Claim:
    return Claim(
        "P(w) is the simplex, the capped simplex and a hexagon for the three w of Fig. 2",
        "3, 3 and 6 vertices",
        ", ".join(f"{name}: {number}" for name, number in corners.items()),
        "reproduced" if list(corners.values()) == [3, 3, 6] else "not reproduced",
    )


def _biconjugate(measured: dict[str, Any]) -> Claim:
    edges, above = measured["edges"], measured["above"]
    return Claim(
        "The k-support negentropy is a convex relaxation of the negentropy of k-sparse vectors",
        "convex, and equal to it on vectors with at most k nonzeros (Proposition 4)",
        f"n = 3, k = 2: differs by at most {edges:.1e} there; at most {above:.1e} above the mean of "
        "two points half-way between them",
        "reproduced" if edges < 1e-9 and above < 1e-9 else "not reproduced",
    )
