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
    "settings",
    "nonzeros forward",
    "backward",
    "time",
    "kept",
    "remarks",
]
OFF = 0.01  # of k: a sum that is further off is said


def rows(result: dict[str, Any]) -> list[list[str]]:
    """Best first; time of a step and bytes kept for the backward are relative to hard."""
    found = {name: (name, run) for name, run in result["results"]["methods"].items()}
    ours = result["results"].get("ours")
    if ours is not None:
        found["ours"] = (ours["form"], ours)
    best_first = sorted(found.values(), key=lambda row: -_mean(row[1]))
    return [
        HEADER,
        *(_row(name, run, result["results"]["cost"], run is ours) for name, run in best_first),
    ]


def _row(name: str, run: dict[str, Any], cost: dict[str, Any], six: bool) -> list[str]:
    strength = "" if run["strength"] is None else f"{run['strength']:.2g}"
    counts = [f"{mean_and_error(run[f'nonzeros {way}'])[0]:.1f}" for way in ("forward", "backward")]
    if name == DISTILLED:  # it selects in use alone
        counts = ["all", "all"]
    elif METHODS[name].special and name != RAMP:
        counts[0] = ""  # a loss, which has no mask
    costs = [f"{cost[of][name] / cost[of]['hard']:.1f}" for of in ("seconds", "bytes kept")]
    label = f"**{name}**" if METHODS[name].ours else name
    if six:
        label = f"**ours with six settings: {name}**"
    chosen = [f"{run['rate']:.2g}", strength, str(run["settings"])]
    return [label, quality(run), *chosen, *counts, *costs, _remarks(run)]


def verdict(result: dict[str, Any]) -> str:
    """Which method is best, how far the best of ours, or of others, is from it, and ours with six
    settings."""
    found, ours = result["results"]["methods"], result["results"].get("ours")
    best, *others = sorted(found, key=lambda name: -_mean(found[name]))
    is_ours = METHODS[best].ours
    other = next(name for name in others if METHODS[name].ours != is_ours)
    near = "within one standard error of it" if _near(found[other], found[best]) else "worse"
    said = (
        f"Best: {best}{', one of ours' if is_ours else ''} ({quality(found[best])} %). The best of "
        f"{'the others' if is_ours else 'ours'}, {other} ({quality(found[other])} %), is {near}."
    )
    if ours is not None:
        rival = best_of_others(result)
        said += (
            f" Ours with six settings in all: {ours['form']} ({quality(ours)} %), which is "
            f"{standing(result, ours)} {rival} ({quality(found[rival])} %)."
        )
    left_out = [name for name in METHODS if name not in found and not METHODS[name].special]
    return said + (f" Not run: {', '.join(left_out)}." if left_out else "")


def best_of_others(result: dict[str, Any]) -> str:
    found = result["results"]["methods"]
    return max((m for m in found if not METHODS[m].ours), key=lambda name: _mean(found[name]))


def chosen_form(result: dict[str, Any]) -> str | None:
    """The form of ours that is best on validation data, with its own best setting."""
    found = result["results"]["methods"]
    known = [m for m in found if METHODS[m].ours and "validation" in found[m]]
    return max(known, key=lambda name: found[name]["validation"], default=None)


def standing(result: dict[str, Any], ours: dict[str, Any]) -> str:
    """A run of ours beside the best of others, which is taken by its test."""
    rival = result["results"]["methods"][best_of_others(result)]
    if _mean(ours) >= _mean(rival):
        return "as good as" if _near(rival, ours) else "better than"
    return "within one standard error of" if _near(ours, rival) else "worse than"


def difference(result: dict[str, Any], ours: dict[str, Any]) -> str:
    """Of a run of ours and the best of others."""
    rival = result["results"]["methods"][best_of_others(result)]
    return f"{_mean(ours) - _mean(rival):+.2f} ± {_error(ours, rival):.2f}"


def _near(worse: dict[str, Any], better: dict[str, Any]) -> bool:
    """Whether they differ by no more than the standard error of their difference."""
    return _mean(better) - _mean(worse) <= _error(worse, better)


def _error(*runs: dict[str, Any]) -> float:
    return float(sum(mean_and_error(run["quality"])[1] ** 2 for run in runs) ** 0.5)


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


def quality(run: dict[str, Any]) -> str:
    mean, error = mean_and_error(run["quality"])
    return f"{mean:.2f}" if error != error else f"{mean:.2f} ± {error:.2f}"


def _remarks(run: dict[str, Any]) -> str:
    remarks = []
    if any(run["failed"]):
        remarks.append(f"not finite in {sum(run['failed'])} of {len(run['failed'])} runs")
    if max(run["sum off by"]) > OFF:
        remarks.append(f"sum off k by up to {100 * max(run['sum off by']):.0f} %")
    if run.get("at the edge"):
        remarks.append("best at the edge of what was tried")
    return "; ".join(remarks)
