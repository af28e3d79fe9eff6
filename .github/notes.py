"""Prints what the changelog says of the version in pyproject.toml: the notes of its release.

    python .github/notes.py [tag]

A tag that is not that version is an error, and so is a version that the changelog does not have.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def notes(changelog: str, version: str) -> str:
    """The section of a version, without its title."""
    sections = re.split(r"^## ", changelog, flags=re.M)[1:]
    found = [s.partition("\n")[2] for s in sections if s.startswith(f"[{version}]")]
    if len(found) != 1:
        raise SystemExit(f"CHANGELOG.md must have one section [{version}], found {len(found)}")
    return found[0].strip() + "\n"


def main(tag: str) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    if tag and tag != f"v{version}":
        raise SystemExit(f"the tag must be v{version}, the version in pyproject.toml, got {tag}")
    print(notes((ROOT / "CHANGELOG.md").read_text(), version), end="")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
