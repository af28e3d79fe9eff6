"""The house stays as CONTRIBUTING lays it out: how long functions and files are, how many arguments
functions have, and what the maths imports. All of it is read from the source."""

import ast
from pathlib import Path

import pytest

import mutations

ROOT = Path(__file__).parent.parent / "src/sparsetopk"
FILES = {
    path.relative_to(ROOT).as_posix(): ast.parse(path.read_text())
    for path in sorted(ROOT.rglob("*.py"))
    if path.relative_to(ROOT).parts[0] != "experiments"
}
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
# Rooms of kernels: these have pointers, strides and sizes one by one, as a launch has no records.
KERNELS = ("torch/_triton/", "jax/_pallas/")
LINES_OF_A_FUNCTION = 60
LINES_OF_A_FILE = 450
ARGUMENTS = 8
# Longer ones, and how long they may be: each is one subject, which two files would tear apart.
LONG_FILES = {
    "_maths/threshold.py": 500,  # one search, from the boundary of k to the last Newton step
    "torch/_spread/multi.py": 560,  # one row in many tensors, forward and backward
    "torch/_spread/passes.py": 470,  # every pass over its pieces, by the core and without
    "torch/_triton/long.py": 490,
    "torch/_triton/solve.py": 480,
    "torch/moe.py": 600,  # routers and mixtures, most of it docstrings
    "torch/prune.py": 480,
}
# Internal functions with more: records are made from their parts, and a search is told all there is.
MANY_ARGUMENTS = {
    ("_maths/blocks.py", "Blocks.of"),
    ("_maths/response.py", "Relaxed.of"),
    ("_maths/root.py", "increasing_root"),
    ("_numpy/losses.py", "_evaluated"),
    ("jax/_functions/operators.py", "_Call.of"),
}


def functions(tree, within=""):
    """All of them, with their names in full."""
    for node in ast.iter_child_nodes(tree):
        named = isinstance(node, (*FUNCTION, ast.ClassDef))
        name = f"{within}{node.name}" if named else within
        if isinstance(node, FUNCTION):
            yield name, node
        yield from functions(node, f"{name}." if named else within)


def public_names():
    """What modules without an underscore define, or list in ``__all__``."""
    names = set()
    for path, tree in FILES.items():
        parts = path.removesuffix("__init__.py").split("/")
        if any(part.startswith("_") for part in parts):
            continue
        for node in tree.body:
            if isinstance(node, (*FUNCTION, ast.ClassDef)) and not node.name.startswith("_"):
                names.add(node.name)
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                names |= set(ast.literal_eval(node.value))
    return names


def is_public(name, public):
    """A public function, or what makes a public class."""
    return name in public or (name.endswith(".__init__") and name.split(".")[0] in public)


def test_functions_are_short():
    for path, tree in FILES.items():
        for name, node in functions(tree):
            lines = node.end_lineno - node.lineno + 1
            limit = LINES_OF_A_FUNCTION
            assert lines <= limit, f"{path}: {name} has {lines} lines, {limit} are allowed"


def test_functions_have_few_arguments():
    """Public ones have the options that users ask for, each with its name and default."""
    public, found = public_names(), set()
    for path, tree in FILES.items():
        for name, node in functions(tree):
            args = node.args
            all_of_them = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
            count = sum(a is not None and a.arg not in ("self", "cls") for a in all_of_them)
            if count > ARGUMENTS and not path.startswith(KERNELS) and not is_public(name, public):
                found.add((path, name))
    assert found == MANY_ARGUMENTS
    assert len(MANY_ARGUMENTS) <= 5


def test_files_are_short():
    for path in FILES:
        lines = (ROOT / path).read_text().count("\n")
        limit = LONG_FILES.get(path, LINES_OF_A_FILE)
        assert lines <= limit, f"{path} has {lines} lines, {limit} are allowed"


def test_frameworks_are_imported_in_their_rooms_alone():
    """The maths imports none, NumPy among them; nothing but the front-end of a framework imports it."""
    own = {"torch": ("torch/", "sklearn.py", "cli.py"), "jax": ("jax/",)}
    for path, tree in FILES.items():
        imported = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported.add(node.module.split(".")[0])
        if path.startswith("_maths/"):
            assert not imported & {"numpy", "torch", "jax", "scipy"}, path
        for framework, rooms in own.items():
            assert framework not in imported or path.startswith(rooms), (path, framework)


def test_a_name_has_one_meaning():
    """What a solver gives is in its name: CONTRIBUTING has the table."""
    without = ("solve", "Solved", "Setting", "value")
    for path, tree in FILES.items():
        if not path.startswith(KERNELS):
            names = {n.name for n in tree.body if isinstance(n, (*FUNCTION, ast.ClassDef))}
            assert not names & set(without), path


def test_constants_are_given_once():
    """Whoever gives a module's name a second value takes it from the functions that had the first."""
    tests = {p: ast.parse(p.read_text()) for p in sorted(Path(__file__).parent.glob("*.py"))}
    for path, tree in (FILES | tests).items():
        assigned = [node.targets for node in tree.body if isinstance(node, ast.Assign)]
        nodes = [node for targets in assigned for target in targets for node in ast.walk(target)]
        names = [n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        twice = {name for name in names if names.count(name) > 1}
        assert not twice, f"{path}: {twice}"


def test_every_mutation_fits_the_code():
    """`make mutate` puts other text where it finds its own, which must stand there once."""
    core = ROOT.parents[1] / "csrc"
    if not core.exists():
        pytest.skip("the source is not here")
    for room, broken in ((ROOT / "_maths", mutations.MATHS), (core, mutations.KERNELS)):
        for mutation in broken:
            assert (room / mutation.file).read_text().count(mutation.old) == 1, mutation.what
