"""Fig. 1 of the paper, and a second path that shows what it does not: how smooth each mask is.

The paper draws the hard mask, p = 2 and p = 4/3 for theta(s) = (3, 1, s - 1, s), k = 2. Along that
path p = 4/3 is smooth. Along the second one, (s, 0.3, 0.2, -0.5), an entry reaches 1 while others
are still fractional, and there its derivative jumps; that of the two-sided mask does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import sparsetopk as st
from sparsetopk._numpy.operators import MaskOptions
from sparsetopk._types import Array

from .drawing import pyplot, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Track:
    """x(s) = start + s * direction, and which entries of y are summed."""

    title: str
    s: Array
    start: tuple[float, ...]
    direction: tuple[float, ...]
    summed: slice
    legend: str  # where there is room for it


FIGURE_1 = Track(
    r"$\theta(s) = (3,\ 1,\ s-1,\ s)$: $y_2 + y_3$",
    np.linspace(-0.5, 5.5, 24_001),
    (3.0, 1.0, -1.0, 0.0),
    (0.0, 0.0, 1.0, 1.0),
    slice(1, 3),
    "upper center",
)
SATURATION = Track(
    r"$(s,\ 0.3,\ 0.2,\ -0.5)$: $y_1$",
    np.linspace(-0.75, 1.25, 24_001),
    (0.0, 0.3, 0.2, -0.5),
    (1.0, 0.0, 0.0, 0.0),
    slice(0, 1),
    "upper left",
)
TRACKS = (FIGURE_1, SATURATION)


@dataclass(frozen=True)
class Curve:
    label: str
    colour: str
    lam: float
    options: MaskOptions

    def along(self, track: Track) -> tuple[Array, Array]:
        """The sum of the entries and its derivative in s, from the Jacobian in closed form."""
        direction = np.broadcast_to(track.direction, (track.s.size, 4))
        x = track.start + track.s[:, None] * direction
        y = st.topk_mask(x, 2, self.lam, **self.options)
        dy = st.topk_mask_jvp(x, 2, self.lam, dx=direction, **self.options)
        return y[:, track.summed].sum(axis=-1), dy[:, track.summed].sum(axis=-1)


# The two-sided mask is fractional over a width of 2 lam: half the lam compares like with like.
CURVES = (
    Curve("hard", "#9aa0a6", 0.0, {}),
    Curve("p = 2", "#d1495b", 1.0, {"p": 2.0}),
    Curve("p = 4/3", "#3a7d44", 1.0, {"p": 4 / 3}),
    Curve("two-sided p = 3/2", "#00798c", 0.5, {"p": 1.5, "two_sided": True}),
)


HEADER = (
    "mask",
    "exactly 0 or 1",
    "jump of y",
    "jump of slope, Fig. 1",
    "jump of slope, saturation",
)


def measure(curve: Curve) -> tuple[str, ...]:
    """The label; the share of Fig. 1 that is exactly 0 or 1; the largest change of y, and of its
    slope on either track, from one point of the grid to the next."""
    y, slope = curve.along(FIGURE_1)
    _, at_saturation = curve.along(SATURATION)
    jumps = [float(np.abs(np.diff(values)).max()) for values in (y, slope, at_saturation)]
    sparse = float(np.mean((y == 0) | (y == 1)))
    return (curve.label, f"{sparse:.0%}", *(f"{jump:.3f}" for jump in jumps))


def table() -> str:
    """The measurements as an aligned text table."""
    rows = [HEADER, *(measure(curve) for curve in CURVES)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *(line.rstrip() for line in lines[1:])])


def figure(tracks: Sequence[Track]) -> Figure:
    """Values above, derivatives below, one column a track."""
    picture, axes = pyplot().subplots(
        *(2, len(tracks)),
        figsize=(5 * len(tracks) if len(tracks) > 1 else 6.4, 5),
        sharex="col",
        height_ratios=(3, 2),
        layout="constrained",
        squeeze=False,
    )
    for column, track in enumerate(tracks):
        above, below = axes[:, column]
        for curve in CURVES:
            y, slope = curve.along(track)
            if curve.lam == 0:  # no line across the jumps
                y = np.where(np.abs(np.diff(y, append=y[-1])) > 0.5, np.nan, y)
            style: dict[str, Any] = {"color": curve.colour, "lw": 1.8}
            above.plot(track.s, y, label=curve.label, **style)
            below.plot(track.s, slope, **style)
        above.set_title(track.title, fontsize=11)
        below.set_xlabel("$s$")
    axes[0, 0].set_ylabel("top-2 mask")
    axes[1, 0].set_ylabel("derivative in $s$")
    axes[0, 0].legend(frameon=False, loc=tracks[0].legend)
    tidy(*axes.flat)
    return picture


def draw(path: Path) -> None:
    """Both tracks; PNG or SVG by the file's suffix."""
    picture = figure(TRACKS)
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=110)
    pyplot().close(picture)
