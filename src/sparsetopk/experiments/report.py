"""One page of HTML on all experiments: what the paper says, what was measured, the figures.

The page needs no other file.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from dataclasses import dataclass, field
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

from . import EXPERIMENTS
from .runs import Claim, ExperimentError, whole_file

# What is to be judged, for experiments that have not been run: the claim, and the paper's figure.
PAPER = {
    "figures": (
        ("The relaxed masks are sparse, p = 2 is continuous (Fig. 1 and 3)", "by figures"),
        ("With p = 4/3 the operators are differentiable everywhere (Fig. 1 and 3)", "by figures"),
    ),
    "timing": (
        ("100 iterations of Dykstra's algorithm give the same output as PAV", "the same output"),
        ("Dykstra's algorithm is faster than PAV on accelerators (Fig. 4)", "faster on a TPU"),
    ),
    "pruning": (
        ("The relaxed top-k trains significantly faster than the hard one (Fig. 5)", "by figure"),
        ("The relaxed top-k keeps the share of nonzero weights", "10 %"),
        (
            "The entropy-regularised straight-through baseline is comparable with the relaxed top-k",
            "5.9 % test error",
        ),
    ),
    "finetune": (
        (
            "The top-3 loss beats cross-entropy in top-k accuracy, for several k (Fig. 6)",
            "by figure",
        ),
        (
            "The top-3 loss costs little beside the step (Fig. 6)",
            "9.5 s a step for cross-entropy, 9.7 s for p = 2, 10 s for p = 4/3",
        ),
    ),
    "moe": (
        (
            "A mixture of experts with the relaxed router is better than with the hard one (Fig. 7)",
            "better precision at 1 in the last steps",
        ),
        ("Training with the relaxed router takes longer", "15 hours against 10"),
    ),
}


@dataclass(frozen=True)
class Part:
    """An experiment on the page."""

    name: str
    title: str
    claims: list[Claim]
    result: dict[str, Any] | None = None
    pictures: dict[Path, str] = field(default_factory=dict)  # file and caption
    tables: dict[str, list[list[str]]] = field(default_factory=dict)

    @property
    def form(self) -> str:
        return f"{self.result['form']} form" if self.result else "not run"


def write(directory: Path) -> Path:
    """Write ``report.html`` on the results in the directory; returns its path."""
    parts = [read(directory, name) for name in EXPERIMENTS]
    if not any(part.result for part in parts):
        raise ExperimentError(f"{directory} has no results: no */result.json of an experiment")
    path = directory / "report.html"
    try:
        with whole_file(path) as unfinished:
            unfinished.write_text(page(parts), encoding="utf-8")
    except OSError as error:
        raise ExperimentError(f"cannot write {path}: {error}") from error
    return path


def read(directory: Path, name: str) -> Part:
    """What the directory has of an experiment; its figures are drawn there."""
    path = directory / name / "result.json"
    if not path.is_file():
        claims = [Claim(text, paper, "not run", "not measured") for text, paper in PAPER[name]]
        return Part(name, name.capitalize(), claims)
    try:
        result = json.loads(path.read_text())
    except ValueError as error:
        raise ExperimentError(f"{path} is corrupt: {error}") from error
    module = import_module(f".{name}", __package__)
    try:
        pictures = _pictures(module, result, path)
        claims, tables = module.claims(result), module.tables(result)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ExperimentError(f"{path} is not what {name} has written: {error!r}") from error
    return Part(name, module.TITLE, claims, result, pictures, tables)


def _pictures(module: Any, result: dict[str, Any], path: Path) -> dict[Path, str]:
    """The figures beside the result, in the order of their captions; drawn if they are not there, or
    are older."""
    there = [figure.stat().st_mtime for figure in path.parent.glob("*.svg")]
    if min(there, default=0.0) < path.stat().st_mtime:
        module.draw(result, path.parent)
    return {path.with_name(f"{name}.svg"): caption for name, caption in module.CAPTIONS.items()}


# HTML

STYLE = """
:root { color-scheme: light dark; --text: #202124; --back: #ffffff; --soft: #5f6368; --line: #dadce0;
  --panel: #f6f7f8; }
@media (prefers-color-scheme: dark) { :root { --text: #e8eaed; --back: #17181a; --soft: #9aa0a6;
  --line: #3c4043; --panel: #202225; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1rem; font: 16px/1.5 system-ui, sans-serif;
  color: var(--text); background: var(--back); overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.2; } h2 { font-size: 1.3rem; margin-top: 2.5rem; }
a { color: inherit; } small, figcaption, caption, .soft { color: var(--soft); font-size: 0.875rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: 0.4rem 0.6rem;
  border-bottom: 1px solid var(--line); }
.numbers { overflow-x: auto; margin: 1rem 0; } .numbers table { width: auto; }
.numbers th, .numbers td { white-space: nowrap; font-variant-numeric: tabular-nums; }
.numbers td + td, .numbers th + th { text-align: right; }
caption { text-align: left; padding: 0.3rem 0; }
figure { margin: 1.5rem 0; }
figure img { width: 100%; max-width: 48rem; height: auto; background: #fff; border-radius: 6px; }
.verdict { display: inline-block; padding: 0.05rem 0.55rem; border-radius: 1rem; color: #fff;
  white-space: nowrap; font-size: 0.875rem; }
.reproduced { background: #2e7d32; } .partly { background: #9a6700; }
.not-reproduced { background: #b3261e; } .not-measured { background: #5f6368; }
details { background: var(--panel); border-radius: 6px; padding: 0.4rem 0.8rem; margin: 1rem 0; }
@media (max-width: 40rem) {
  .claims thead { display: none; } .claims tr { display: block; padding: 0.6rem 0;
    border-bottom: 1px solid var(--line); }
  .claims td { display: block; border: 0; padding: 0.15rem 0; }
  .claims td[data-of]::before { content: attr(data-of) ": "; color: var(--soft); } }
"""


def page(parts: list[Part]) -> str:
    number = Counter(claim.verdict for part in parts for claim in part.claims)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in number.items())
    rows = [_claim(claim, part) for part in parts for claim in part.claims]
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>The paper, reproduced</title>\n<style>{STYLE}</style>\n</head>\n<body>",
            "<h1>Fast, differentiable and sparse top-k: the paper, reproduced</h1>",
            f"<p>Claims of the paper: {escape(counts)}. Quick forms are small and show that everything "
            "runs; full forms are the ones to judge by.</p>",
            _claims(rows),
            *(_section(part) for part in parts),
            "</body>\n</html>\n",
        ]
    )


def _claims(rows: list[str]) -> str:
    head = "<tr><th>Claim</th><th>Paper</th><th>Here</th><th>Verdict</th></tr>"
    body = "\n".join(rows)
    return f'<table class="claims"><thead>{head}</thead>\n<tbody>\n{body}\n</tbody></table>'


def _claim(claim: Claim, part: Part | None = None) -> str:
    """A row; with the part it belongs to, if that is not clear."""
    origin = ""
    if part is not None:
        origin = f'<br><small><a href="#{part.name}">{part.name}</a>, {escape(part.form)}</small>'
    note = f"<br><small>{escape(claim.note)}</small>" if claim.note else ""
    label = f'<span class="verdict {claim.verdict.replace(" ", "-")}">{claim.verdict}</span>'
    return (
        f"<tr><td>{escape(claim.text)}{origin}</td><td data-of=Paper>{escape(claim.paper)}</td>"
        f"<td data-of=Here>{escape(claim.ours)}{note}</td><td>{label}</td></tr>"
    )


def _section(part: Part) -> str:
    heading = f'<h2 id="{part.name}">{escape(part.title)}</h2>'
    if part.result is None:
        left = "".join(
            f"<li>{escape(claim.text)} ({escape(claim.paper)})</li>" for claim in part.claims
        )
        return f"<section>{heading}\n<p>Not run. Not measured:</p><ul>{left}</ul></section>"
    settings = {"form": part.result["form"], **part.result["settings"]}
    return "\n".join(
        [
            f'<section>{heading}\n<p class="soft">{escape(part.form)}</p>',
            _claims([_claim(claim) for claim in part.claims]),
            *(_figure(path, caption) for path, caption in part.pictures.items()),
            *(_table(title, rows) for title, rows in part.tables.items()),
            f"<details><summary>Settings and versions</summary>{_pairs(settings)}",
            f"{_pairs(part.result['versions'])}</details></section>",
        ]
    )


def _figure(path: Path, caption: str) -> str:
    data, text = base64.b64encode(path.read_bytes()).decode(), escape(caption)
    image = f'<img src="data:image/svg+xml;base64,{data}" alt="{text}">'
    return f"<figure>{image}<figcaption>{text}</figcaption></figure>"


def _table(title: str, rows: list[list[str]]) -> str:
    head, *body = (
        "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in row)
        for tag, row in zip(["th"] + ["td"] * len(rows), rows, strict=False)
    )
    lines = "\n".join(f"<tr>{row}</tr>" for row in [head, *body])
    return f'<div class="numbers"><table><caption>{escape(title)}</caption>\n{lines}</table></div>'


def _pairs(values: dict[str, Any]) -> str:
    """What is not a plain string as JSON."""
    shown = {k: v if isinstance(v, str) else json.dumps(v) for k, v in values.items()}
    return (
        "<ul>" + "".join(f"<li>{escape(k)}: {escape(v)}</li>" for k, v in shown.items()) + "</ul>"
    )
