"""What every experiment shares: its options, results that survive an interruption, claims to judge.

An experiment is a module with

- ``TITLE``, a line for people;
- ``run(options)``, which writes ``<out>/<name>/result.json`` through a ``Book``;
- ``draw(result, directory)``, which writes its figures as PNG and SVG, and ``CAPTIONS`` of them by name;
- ``tables(result)``, rows of cells by title, of which the first row is the header;
- ``claims(result)``, what the paper says and what was measured here.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

PACKAGES = ("sparsetopk", "numpy", "torch", "jax", "matplotlib", "scikit-learn")


class ExperimentError(Exception):
    """What the user can put right: data that is missing or corrupt, a directory without access."""


@dataclass(frozen=True)
class Options:
    """The options of ``sparsetopk reproduce``."""

    out: Path
    full: bool = False
    data: Path | None = None
    seeds: int | None = None
    device: str = "cpu"


@dataclass(frozen=True)
class Claim:
    """One sentence of the paper, what was measured here with its spread, and what follows."""

    text: str
    paper: str
    ours: str
    verdict: Literal["reproduced", "partly", "not reproduced", "not measured"]
    note: str = ""


class Checkpoint:
    """The state of a run in the middle, in a file that is there whole or not at all."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.settings = path, settings

    def load(self) -> Any:
        """What was saved last with these settings, or None."""
        import torch

        if not self.path.exists():
            return None
        try:
            saved = torch.load(self.path, weights_only=True)
            settings, state = saved["settings"], saved["state"]
        except Exception as error:  # whatever a file that is no checkpoint makes torch raise
            set_aside(self.path, error)
            return None
        return state if settings == self.settings else None

    def save(self, state: Any) -> None:
        import torch

        with whole_file(self.path) as unfinished:
            torch.save({"settings": self.settings, "state": state}, unfinished)


class Book:
    """The runs of one experiment, one file for each that is finished; a killed one goes on from there.

    A run is known by its name and its settings: if they changed, it is made again.
    """

    def __init__(self, options: Options, experiment: str) -> None:
        self.options, self.experiment = options, experiment
        self.directory = options.out / experiment
        try:
            (self.directory / "runs").mkdir(parents=True, exist_ok=True)
            write_json(self.directory / "runs" / "writable", {})
            (self.directory / "runs" / "writable").unlink()
        except OSError as error:
            raise ExperimentError(f"--out: cannot write to {options.out}: {error}") from error

    def run(
        self, name: str, settings: dict[str, Any], make: Callable[[Checkpoint], dict[str, Any]]
    ) -> dict[str, Any]:
        """The results of a run, from its file or made now. What depends on the machine's mood is
        under the key "seconds"; the rest must be the same every time."""
        path = self.directory / "runs" / f"{name}.json"
        settings = json.loads(json.dumps(settings))
        known, checkpoint = _known(path), Checkpoint(path.with_suffix(".checkpoint"), settings)
        if known is None or known["settings"] != settings:
            known = {"settings": settings, "results": make(checkpoint)}
            write_json(path, known)
        checkpoint.path.unlink(missing_ok=True)  # also where it was interrupted right before this
        return known["results"]

    def finish(self, settings: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
        """Write result.json, which says all that is needed to make it again; returns its content."""
        content = {
            "experiment": self.experiment,
            "form": "full" if self.options.full else "quick",
            "settings": settings,
            "versions": versions(),
            "results": results,
        }
        write_json(self.directory / "result.json", content)
        return content


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _known(path: Path) -> dict[str, Any] | None:
    """What a finished run has left, or None."""
    if not path.exists():
        return None
    try:
        known = json.loads(path.read_text())
        if not (isinstance(known, dict) and isinstance(known.get("results"), dict)):
            raise ValueError("it has no results of a run")
        return {"settings": known.get("settings"), "results": known["results"]}
    except ValueError as error:
        set_aside(path, error)
        return None


def set_aside(path: Path, error: Exception) -> None:
    """Renames a file that cannot be used, so that what it stood for is made again."""
    aside = path.with_name(path.name + ".corrupt")
    os.replace(path, aside)
    print(f"sparsetopk: {path} is corrupt ({error}); it is now {aside.name}", file=sys.stderr)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A new file that takes the place of ``path`` when all of it is written, or else is no more."""
    handle, name = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".part", dir=path.parent)
    unfinished = Path(name)
    try:
        os.close(handle)
        umask = os.umask(0)
        os.umask(umask)
        unfinished.chmod(0o666 & ~umask)  # as any other file, and not for its owner alone
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """The file is there whole or not at all."""
    with whole_file(path) as unfinished:
        unfinished.write_text(json.dumps(content, indent=1, default=_plain) + "\n")


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Path):
        return str(value)
    return value.tolist()  # NumPy's numbers and arrays


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """The mean of independent runs and its standard error."""
    n = len(values)
    mean = sum(values) / n
    if n < 2:
        return mean, float("nan")
    variance = sum((v - mean) ** 2 for v in values) / (n - 1)
    return mean, (variance / n) ** 0.5
