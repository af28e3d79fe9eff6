"""Without the compiled core: the same results, a warning once, and an installation that succeeds."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")

import everything

ROOT = Path(__file__).parent.parent
SCRIPT = Path(everything.__file__)
PIP = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps")


def run(*command: str | Path, code: int = 0) -> list[str]:
    """What the command says, without a compiler."""
    done = subprocess.run(
        [str(part) for part in command],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parent), "CXX": shutil.which("false") or ""},
    )
    assert done.returncode == code, done.stderr
    return (done.stderr if code else done.stdout).splitlines()


def assert_same_as_compiled(archive: Path) -> None:
    expected = everything.everything()
    with np.load(archive) as found:
        assert set(found) == set(expected)
        for name, value in expected.items():
            # derivatives of p = 3 near 0 are steep, and both solve to the rounding of t
            np.testing.assert_allclose(
                found[name], value, rtol=1e-6, atol=1e-6, err_msg=name, equal_nan=True
            )


def test_everything_works_without_the_core(tmp_path):
    archive = tmp_path / "without.npz"
    *warnings, _ = run(sys.executable, SCRIPT, archive, "without-core")
    assert len(warnings) == 1
    assert warnings[0].startswith("RuntimeWarning sparsetopk was installed without its compiled")
    assert_same_as_compiled(archive)


def test_info_says_that_there_is_no_core():
    code = (
        "import sys, warnings; warnings.simplefilter('ignore'); "
        "sys.modules['sparsetopk._core._native'] = None; "
        "from sparsetopk import cli; cli.main(['info'])"
    )
    assert "kernels    none: computed in NumPy" in run(sys.executable, "-c", code)


def test_free_threaded_python_is_told_why_there_is_no_core():
    code = (
        "import sys, sysconfig; sys.modules['sparsetopk._core._native'] = None; "
        "sysconfig.get_config_vars()['Py_GIL_DISABLED'] = 1; "
        "import warnings; warnings.showwarning = lambda text, *_: print(text); "
        "import sparsetopk"
    )
    (line,) = run(sys.executable, "-c", code)
    assert line.endswith("It is for Python with the GIL, and this is a free-threaded build.")


@pytest.fixture
def source(tmp_path):
    """A copy of what the package is built of."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("csrc", "src"):
        shutil.copytree(ROOT / name, source / name)
    (source / "PKG-INFO").touch()  # an sdist, which needs no jaxlib to build
    return source


def test_installs_without_a_compiler(source, tmp_path):
    """In an environment of its own, which takes NumPy and torch from this one."""
    env, archive = tmp_path / "env", tmp_path / "pure.npz"
    run(sys.executable, "-m", "venv", "--without-pip", env)
    packages = next(env.glob("lib/python3*/site-packages"))
    (packages / "outer.pth").write_text(f"{Path(np.__file__).parents[1]}\n")
    run(*PIP, "--target", packages, source)
    assert "Tag: py3-none-any" in next(packages.glob("sparsetopk-*/WHEEL")).read_text()
    warning, origin = run(env / "bin" / "python", SCRIPT, archive)
    assert warning.startswith("RuntimeWarning")
    assert Path(origin).is_relative_to(packages)
    assert_same_as_compiled(archive)


def test_to_work_on_the_code_needs_a_compiler(source, tmp_path):
    said = run(*PIP, "--target", tmp_path / "packages", "--editable", source, code=1)
    assert any("The core did not compile: the reason stands above." in line for line in said)
