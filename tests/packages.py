"""Checks the sdist and the wheels in a folder, and runs the quick tests on sdist and compiled wheel,
each installed in a clean environment and away from the source tree. `make wheel` runs it.

    python packages.py dist work
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IN_SDIST = {
    *("CHANGELOG.md", "CITATION.cff", "CMakeLists.txt", "CONTRIBUTING.md", "LICENSE", "Makefile"),
    *("PKG-INFO", "README.md", "SECURITY.md", "constraints.txt", "constraints-oldest.txt"),
    *("pyproject.toml", ".gitignore"),
    *("benchmarks", "conda", "csrc", "docs", "examples", "src", "tests"),
}
FOR_TESTS = ("tests", "docs", "benchmarks", "examples", "README.md", "pyproject.toml")
# A minute of both front-ends; the other quick tests take minutes more.
QUICK = ("package", "native", "errors", "smoothness", "published_failures", "jax_ffi")
REQUIREMENTS = ("pytest", "pytest-xdist", "hypothesis", "scipy")
OLDEST_JAX = "jax==0.9.0"  # that pyproject.toml allows


def check_sdist(path: Path) -> None:
    with tarfile.open(path) as archive:
        names = {Path(*Path(name).parts[1:]) for name in archive.getnames()}
    found = {name.parts[0] for name in names}
    assert found == IN_SDIST, f"{path.name}: {sorted(found ^ IN_SDIST)}"
    of_code = (name for name in names if name.parts[0] in ("csrc", "src", "tests"))
    kinds = {name.suffix for name in of_code if name.parent.name != "found"}  # which has JSON
    assert kinds <= {".cpp", ".hpp", ".py", ".pyi", ".typed"}, f"{path.name}: {kinds}"


def check_wheel(path: Path) -> None:
    assert re.fullmatch(r"sparsetopk-[\d.]+-cp311-abi3-\w+\.whl", path.name), path.name
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
    for name in (
        "_core/_native.abi3.so",
        "_core/_native.pyi",
        "py.typed",
        "torch/__init__.py",
        "jax/__init__.py",
    ):
        assert f"sparsetopk/{name}" in names, f"{path.name} lacks {name}"
    size = path.stat().st_size / 1e6
    assert size < 3, f"{path.name} has {size:.1f} MB"
    odd = [n for n in names if not re.match(r"sparsetopk(-[\d.]+\.dist-info)?/", n) or ".cpp" in n]
    assert not odd, f"{path.name}: {odd}"


def check_pure(path: Path, compiled: Path) -> None:
    """The same files but for the core: for machines that no other wheel fits, as with Windows."""
    names = [
        {re.sub(r"-[\d.]+\.dist-info", "", name) for name in zipfile.ZipFile(wheel).namelist()}
        for wheel in (path, compiled)
    ]
    assert names[1] - names[0] == {"sparsetopk/_core/_native.abi3.so"}, names[1] ^ names[0]
    assert names[0] <= names[1], names[0] - names[1]


def run_tests(path: Path, work: Path, requirements: list[str], names: tuple[str, ...]) -> None:
    shutil.rmtree(work, ignore_errors=True)
    venv.create(work / "env", with_pip=True)
    python = work.resolve() / "env" / "bin" / "python"
    for name in FOR_TESTS:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, work / name)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *REQUIREMENTS, *requirements], check=True)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    code = (
        "import jax, sparsetopk, sparsetopk._core._native as c; "
        "print(sparsetopk.__file__, c.simd_level(), 'jax', jax.__version__, *c.xla_handlers())"
    )
    shown = subprocess.check_output([python, "-c", code], cwd=work, env=env, text=True)
    print(f"{path.name}: {shown}", end="", flush=True)
    assert shown.startswith(str(python.parent.parent)), shown
    # An sdist is built without the headers of XLA.
    assert ("sparsetopk_threshold" in shown) == (path.suffix == ".whl"), shown
    pytest = [python, "-m", "pytest", "-q", "-m", "not slow", "-n", "2"]
    files = [f"tests/test_{name}.py" for name in names]
    subprocess.run([*pytest, *files], cwd=work, env=env, check=True)


def main(dist: Path, work: Path) -> None:
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*-abi3-*.whl")
    (pure,) = dist.glob("*-py3-none-any.whl")
    check_sdist(sdist)
    check_wheel(wheel)
    check_pure(pure, wheel)
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    for path in (wheel, sdist):
        run_tests(path, work, [*constraints, f"{path.resolve()}[experiments,jax,torch]"], QUICK)
    run_tests(wheel, work, [OLDEST_JAX, f"{wheel.resolve()}[jax]"], ("jax_ffi",))
    for path in (sdist, wheel, pure):
        print(f"{path}  {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
