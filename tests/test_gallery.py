"""The gallery: its scripts can be copied and run alone. Building the docs runs them."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

GALLERY = Path(__file__).parents[1] / "docs" / "gallery"
SCRIPTS = sorted(GALLERY.glob("plot_*.py"))
INSTALLED = {
    "jax",
    "matplotlib",
    "numpy",
    "sklearn",
    "sparsetopk",
    "torch",
} | sys.stdlib_module_names


def imported(script: Path) -> set[str]:
    """The top-level packages that a script imports."""
    found = set()
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module if node.level == 0 and node.module else ".")
    return {name.split(".")[0] for name in found}


def test_there_are_thirteen_scripts():
    assert len(SCRIPTS) == 13


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_needs_only_what_is_installed_with_the_package(script):
    assert imported(script) <= INSTALLED


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_has_a_title_and_draws_a_figure(script):
    text = script.read_text()
    title, line = ast.get_docstring(ast.parse(text)).splitlines()[:2]
    assert line == "=" * len(title)
    assert "plt.show()" in text


def test_a_copied_script_runs_alone(tmp_path):
    shutil.copy(GALLERY / "plot_01_operators.py", tmp_path / "copied.py")
    run = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:__main__", "copied.py"],
        cwd=tmp_path,
        env=os.environ | {"MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert "fractional=32" in run.stdout
