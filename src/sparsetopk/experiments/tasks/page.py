"""What the methods reached on a task, as rows of a table and in words."""

from __future__ import annotations

from typing import Any

from ..runs import mean_and_error
from .methods import DISTILLED, METHODS, RAMP

HEADER = [
    "method",
    "%",
    "lr",
    "strength",
    "nonzeros forward",
    "backward",
    "time",
    "kept",
    "remarks",
]
OFF = 0.01  # of k: a sum that is further off is said


def rows(result: dict[str, Any]) -> list[list[str]]:
    """Best first; time of a step and bytes kept for the backward are relative to hard."""
    found, cost = result["results"]["methods"], result["results"]["cost"]
    made = [HEADER]
    for name in sorted(found, key=lambda name: -_mean(found[name])):
        run = found[name]
        strength = "" if run["strength"] is None else f"{run['strength']:.2g}"
        counts = [
            f"{mean_and_error(run[f'nonzeros {way}'])[0]:.1f}" for way in ("forward", "backward")
        ]
        costs = [f"{cost[of][name] / cost[of]['hard']:.1f}" for of in ("seconds", "bytes kept")]
        if name == DISTILLED:  # it selects in use alone
            counts = ["all", "all"]
        label = f"**{name}**" if METHODS[name].ours else name
        made.append(
            [label, _quality(run), f"{run['rate']:.2g}", strength, *counts, *costs, _remarks(run)]
        )
    return made


def verdict(result: dict[str, Any]) -> str:
    """Which method is best, and how far the best of ours, or of others, is from it."""
    found = result["results"]["methods"]
    best, *others = sorted(found, key=lambda name: -_mean(found[name]))
    ours = METHODS[best].ours
    other = next(name for name in others if METHODS[name].ours != ours)
    behind = _mean(found[best]) - _mean(found[other])
    error = sum(mean_and_error(found[n]["quality"])[1] ** 2 for n in (best, other)) ** 0.5
    near = "within one standard error of it" if behind <= error else "worse"
    left_out = [name for name in METHODS if name not in found and name not in (RAMP, DISTILLED)]
    return (
        f"Best: {best}{', one of ours' if ours else ''} ({_quality(found[best])} %). The best of "
        f"{'the others' if ours else 'ours'}, {other} ({_quality(found[other])} %), is {near}."
        + (f" Not run: {', '.join(left_out)}." if left_out else "")
    )


def text(result: dict[str, Any]) -> str:
    """For a terminal."""
    cells = [[cell.replace("**", "") for cell in row] for row in rows(result)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells
    ]
    return "\n".join([*lines, "", verdict(result), ""])


def _mean(run: dict[str, Any]) -> float:
    return mean_and_error(run["quality"])[0]


def _quality(run: dict[str, Any]) -> str:
    mean, error = mean_and_error(run["quality"])
    return f"{mean:.2f}" if error != error else f"{mean:.2f} ± {error:.2f}"


def _remarks(run: dict[str, Any]) -> str:
    remarks = []
    if any(run["failed"]):
        remarks.append(f"not finite in {sum(run['failed'])} of {len(run['failed'])} runs")
    if max(run["sum off by"]) > OFF:
        remarks.append(f"sum off k by up to {100 * max(run['sum off by']):.0f} %")
    if run["at the edge"]:
        remarks.append("best at the edge of what was tried")
    return "; ".join(remarks)
