"""The package around the operators: imports, the command line, the examples in the docs."""

import contextlib
import doctest
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

import mutations
import sparsetopk
from sparsetopk import cli
from sparsetopk._core import _native as _core

ROOT = Path(__file__).parent.parent
OF_FRAMEWORKS = {
    *("nn", "moe", "prune", "baselines", "Selection", "Routing"),
    *(
        "expert_choice",
        "token_choice",
        "topk_mag_multi",
        "topk_threshold",
        "prune_params",
        "sparsity",
        "export_checks",
    ),
    *("select_tokens", "topk_attention", "SelectedTokens"),
}


def test_import_needs_no_framework():
    code = (
        "import sys, sparsetopk; "
        "loaded = {'torch', 'jax', 'scipy', 'matplotlib'} & set(sys.modules); "
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names_exist_and_have_docstrings():
    assert len(set(sparsetopk.__all__)) == len(sparsetopk.__all__)
    for name in sparsetopk.__all__:
        assert getattr(sparsetopk, name).__doc__, name


@pytest.mark.parametrize(("framework", "axis"), [("torch", "dim"), ("jax", "axis")])
def test_public_names_have_the_signature_of_numpy(framework, axis):
    pytest.importorskip(framework)
    front = importlib.import_module(f"sparsetopk.{framework}")
    for name in set(front.__all__) - OF_FRAMEWORKS:
        function = getattr(front, name)
        assert function.__doc__, name
        ours = {k: p.default for k, p in inspect.signature(function).parameters.items()}
        numpys = inspect.signature(getattr(sparsetopk, name)).parameters
        expected = {axis if k == "axis" else k: p.default for k, p in numpys.items()}
        assert ours.get("straight_through", False) is False
        assert ours.get("axis_name") is None is ours.get("group")
        own = {"straight_through", "axis_name", "group", "where", "values", "sorted"}
        ours, expected = ({k: v for k, v in of.items() if k not in own} for of in (ours, expected))
        assert ours == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "modules"),
    [
        ("sparsetopk", set()),
        ("sparsetopk.torch", set()),
        ("sparsetopk.jax", {"moe", "prune"}),
    ],
)
def test_internals_have_an_underscore(module, modules):
    """In a new process: what is imported later becomes an attribute too."""
    pytest.importorskip(module.removeprefix("sparsetopk").lstrip(".") or "numpy")
    code = f"import {module} as m; print(*(name for name in dir(m) if name[0] != '_'))"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert set(out.stdout.split()) == set(importlib.import_module(module).__all__) | modules


def test_every_operator_has_its_derivatives():
    for name in (
        "topk_mask",
        "topk",
        "topk_mag",
        "topk_sign",
        "soft_sort",
        "soft_rank",
        "permutahedron",
    ):
        for suffix in ("_jvp", "_vjp", "_jacobian"):
            assert name + suffix in sparsetopk.__all__


def modules():
    names = (m.name for m in pkgutil.walk_packages(sparsetopk.__path__, "sparsetopk."))
    return [name for name in names if not name.endswith("_native")]


# What a part of the package needs beside its framework.
NEEDS = {
    "sparsetopk.experiments.": ("tqdm", None),
    "sparsetopk.jax.optax": ("optax", None),
    "sparsetopk.sklearn": ("sklearn", "1.6"),
    "sparsetopk.torch._triton.": ("triton", "3.5"),
    "sparsetopk.torch.huggingface": ("transformers", None),
    "sparsetopk.torch.lightning": ("lightning", None),
}


@pytest.mark.parametrize("name", modules())
def test_docstring_examples(name):
    if name.startswith("sparsetopk.torch"):
        # Examples draw numbers, and a lam with which few of them compete is a warning: always the same.
        pytest.importorskip("torch").manual_seed(0)
    for start, (needed, version) in NEEDS.items():
        if name.startswith(start):
            pytest.importorskip(needed, minversion=version)
    default = contextlib.nullcontext()
    if name.startswith("sparsetopk.jax"):  # other tests turn float64 on
        default = pytest.importorskip("jax").enable_x64(False)
    with default:
        result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


PAGES = ["README.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
# Code of other projects stands in blocks that are not marked "python".
WITH_EXAMPLES = {
    "README.md",
    "docs/index.md",
    "docs/start.md",
    "docs/migrate.md",
    "docs/migrate_pruning.md",
    "docs/maths.md",
}


@pytest.mark.slow
@pytest.mark.parametrize("path", PAGES)
def test_examples_of_the_docs_run(path, monkeypatch):
    if sys.platform == "linux":  # the name of the machine need not be known
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / path).read_text(), re.M | re.S)
    assert blocks or path not in WITH_EXAMPLES
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, path, "exec"), namespace)
    # a comment that starts with a list is the result, to the digits shown
    shown = re.findall(r"^(st\..*?) +# (\[.*?\])", "".join(blocks), re.M)
    for expression, result in shown:
        np.testing.assert_allclose(eval(expression, namespace), eval(result), atol=0.0051)
    assert len(shown) >= 7 or path != "README.md"


def test_readme_names_the_two_commands():
    readme = (ROOT / "README.md").read_text()
    assert "make demo" in readme
    assert "make test" in readme


@pytest.mark.slow
def test_demo_draws_the_picture_and_prints_the_tables(tmp_path, capsys, monkeypatch):
    torch = pytest.importorskip("torch")
    from sparsetopk.experiments import demo

    monkeypatch.setattr(
        torch, "set_num_threads", lambda threads: None
    )  # it would stay for all tests

    train_all = demo.train_all
    monkeypatch.setattr(demo, "train_all", lambda: train_all(epochs=2))
    assert cli.main(["demo", "--out", str(tmp_path / "new")]) == 0
    assert (tmp_path / "new" / "demo.png").stat().st_size > 10_000
    text = capsys.readouterr().out
    masks, networks = (
        {line.split("  ")[0]: [c.strip() for c in line.split("  ") if c] for line in lines}
        for lines in (
            t.splitlines() for t in (text.split("An indexer")[0], text.split("A network")[1])
        )
    )
    assert "needles found" in text
    # mask, exactly 0 or 1, jump of y, jump of slope on Fig. 1 and at saturation
    assert float(masks["hard"][2]) == 1
    assert float(masks["p = 2"][3]) == 0.5
    assert float(masks["p = 4/3"][3]) < 0.01
    np.testing.assert_allclose(float(masks["p = 4/3"][4]), 1.6705, atol=1e-3)
    assert float(masks["two-sided p = 3/2"][4]) < 0.01
    for method in ("hard", "smooth"):
        assert networks[method][-1] == "10.0 %"


def test_the_version_is_the_same_everywhere():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for path, line in (
        ("CITATION.cff", f"version: {version}"),
        ("CHANGELOG.md", f"## [{version}]"),
        ("conda/recipe.yaml", f'version: "{version}"'),
    ):
        if (ROOT / path).exists():  # beside an installed wheel there are tests and docs alone
            assert line in (ROOT / path).read_text(), path


def test_info(capsys):
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    assert f"sparsetopk {sparsetopk.__version__}" in out
    assert _core.simd_level() in out
    assert f"numpy      {np.__version__}" in out
    for name in ("torch", "triton", "jax", "jaxlib", "handlers"):
        assert re.search(rf"^{name} +\S", out, re.M), name


def test_private_functions_of_torch_are_there():
    """By name: what a new version of torch has moved is to be found here first."""
    pytest.importorskip("torch")
    private = importlib.import_module("sparsetopk.torch._private")
    for name in private.NAMES:
        private.find(name)
    with pytest.raises(
        ImportError, match=r"torch must have torch\._C\._gone, which torch .* has not"
    ):
        private.find("_C._gone")


def test_private_functions_of_torch_stand_in_one_module():
    pattern = re.compile(r"torch\._(?!_)|torch\.\w+\._(?!_)|forward_ad\._")
    package = Path(sparsetopk.__file__).parent
    for path in package.rglob("*.py"):
        if path.name != "_private.py":
            used = [line for line in path.read_text().splitlines() if pattern.search(line)]
            used = [line for line in used if "import" not in line]
            assert not used, (path, used)


def test_nothing_private_of_jax_is_used():
    package = Path(sparsetopk.__file__).parent
    private = re.compile(r"jax\._(?!_version__)|jaxlib\._|from jax\.\w+ import _")
    for path in package.rglob("*.py"):
        assert not private.search(path.read_text()), path


def test_notes_of_a_release():
    path = ROOT / ".github" / "notes.py"
    if not path.exists():
        pytest.skip("a package has no .github")
    spec = importlib.util.spec_from_file_location("notes", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    changelog = (
        "# C\n\n## [Unreleased]\n\n- c\n\n## [0.2.0] - 2026-11-17\n\n- b\n\n## [0.1.0]\n\n- a\n"
    )
    assert module.notes(changelog, "0.2.0") == "- b\n"
    assert module.notes(changelog, "0.1.0") == "- a\n"
    with pytest.raises(SystemExit, match=r"one section \[0\.3\.0\], found 0"):
        module.notes(changelog, "0.3.0")


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["demo", "--nonsense"]])
def test_wrong_command_lines_end_with_usage(argv, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == 2
    assert "usage: sparsetopk" in capsys.readouterr().err


def test_every_mutation_stands_in_the_docs():
    text = (ROOT / "docs" / "testing.md").read_text()
    for mutation in (*mutations.MATHS, *mutations.KERNELS):
        line = next(x for x in text.splitlines() if x.startswith(f"- `{mutation.file}`"))
        assert mutation.what in line
