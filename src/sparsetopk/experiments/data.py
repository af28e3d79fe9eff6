"""Files of data and weights: where they are looked for, and that they are what they should be.

In this order: the directory of ``--data-dir``, that of the environment variable ``SPARSETOPK_DATA``, the
cache of this user. What is public is downloaded there; for the rest a message says what is missing.
"""

from __future__ import annotations

import hashlib
import os
import urllib.request
from collections.abc import Collection
from pathlib import Path

from tqdm import tqdm

from .runs import ExperimentError, Options, whole_file

CHUNK = 1 << 20


def cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sparsetopk"


def directories(options: Options) -> list[Path]:
    named = [options.data, os.environ.get("SPARSETOPK_DATA")]
    return [Path(d).expanduser() for d in named if d] + [cache()]


def at_hand(name: str, options: Options) -> Path | None:
    """The file, if it is there; its content is not looked at."""
    if options.data is not None and not options.data.is_dir():
        raise ExperimentError(f"--data-dir: {options.data} is not a directory")
    return next((d / name for d in directories(options) if (d / name).is_file()), None)


def find(name: str, sha256: Collection[str], options: Options, url: str | None = None) -> Path:
    """The file ``name``, whose content has one of these hashes."""
    path = at_hand(name, options)
    if path is None and url is None:
        places = ", ".join(map(str, directories(options)))
        raise ExperimentError(
            f"{name} is missing: looked in {places}; say where it is with --data-dir or SPARSETOPK_DATA"
        )
    if path is None:
        assert url is not None
        path = _download(url, cache() / name, sha256)
    elif (found := _hash(path)) not in sha256:
        raise ExperimentError(
            f"{path} is corrupt: its SHA-256 is {found}, not {' or '.join(sha256)}"
        )
    return path


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(url: str, path: Path, sha256: Collection[str]) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as unfinished:
            _fetch(url, unfinished, path.name)
            if (found := _hash(unfinished)) not in sha256:
                raise ExperimentError(
                    f"{url} is corrupt: its SHA-256 is {found}, not {' or '.join(sha256)}"
                )
    except OSError as error:
        raise ExperimentError(
            f"{path.name} is missing and could not be downloaded from {url}: {error}; "
            "say where it is with --data-dir or SPARSETOPK_DATA"
        ) from error
    return path


def _fetch(url: str, path: Path, name: str) -> None:
    with urllib.request.urlopen(url, timeout=60) as source, path.open("wb") as file:
        size = int(source.headers.get("Content-Length", 0)) or None
        with tqdm(total=size, unit="B", unit_scale=True, desc=name) as bar:
            while chunk := source.read(CHUNK):
                file.write(chunk)
                bar.update(len(chunk))
