"""Breaks the maths and the kernels, one way at a time, and sees whether the quick tests notice.

    python tests/mutations.py [words]

With words, only what has one of them in its description. Every mutation is a piece of text that stands
once in a file, and another in its place; the file is put back. The tests are those of NumPy over the
case table, up to the first that fails: on the maths with the core hidden, on the kernels with the core
compiled anew, unoptimised and for one level. It fails if a mutation is not noticed, or no longer fits
the code, or if the tests fail on the code as it is.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
CORE = "SPARSETOPK_MUTANT"  # the path of a core; empty: none
# The quickest first.
FILES = ("conventions", "derivatives", "values", "selection", "smoothness", "operators")
TESTS = [*(f"tests/test_{name}.py" for name in FILES), "-k", "not torch and not jax"]


class Mutation(NamedTuple):
    what: str
    file: str
    old: str
    new: str


MATHS = [
    Mutation(
        "sign: the equation of the two-sided response",
        "scalars.py",
        "+ (-t if e < 1.0 else t)",
        "+ (t if e < 1.0 else -t)",
    ),
    Mutation(
        "factor: the slope of the two-sided response",
        "scalars.py",
        "((self.p - 1.0) * (low + high))",
        "(self.p * (low + high))",
    ),
    Mutation(
        "factor: a lone magnitude for p = 3/2", "scalars.py", "half = slope / 2", "half = slope"
    ),
    Mutation(
        "sign: a lone magnitude for p = 2",
        "scalars.py",
        "return w * s / (1.0 + lam * w)",
        "return w * s / (1.0 - lam * w)",
    ),
    Mutation(
        "bound: the boundary of a hard row with real k",
        "threshold.py",
        "boundary = row.nth(last, dtype, even, rows)",
        "boundary = row.nth(xp.clip(whole, 1, None), dtype, even, rows)",
    ),
    Mutation(
        "bound: k = n selects everything",
        "threshold.py",
        "everything = (whole >= count) & ~nothing",
        "everything = (whole > count) & ~nothing",
    ),
    Mutation(
        "guard: infinities that crowd",
        "threshold.py",
        "crowded = infinite - whole > frac",
        "crowded = infinite < 0",
    ),
    Mutation(
        "sign: the bracket of the root finder",
        "root.py",
        "xp.where(value <= 0, at.x, at.lo)",
        "xp.where(value >= 0, at.x, at.lo)",
    ),
    Mutation(
        "tie rule: the lowest index wins",
        "response.py",
        "before = xp.cumsum(tied, axis=-1) - xp.astype(tied, xp.int32)",
        "before = xp.cumsum(tied, axis=-1)",
    ),
    Mutation(
        "guard: k moves nothing where nothing is fractional",
        "response.py",
        "return (left > 0) & (left < self.split.size)",
        "return left > -1",
    ),
    Mutation(
        "bound: the fraction of k that is left for the block",
        "response.py",
        "left = xp.astype(k.whole - split.taken, lam.dtype) + k.frac",
        "left = xp.astype(k.whole - split.taken, lam.dtype)",
    ),
    Mutation(
        "factor: the cotangent of k is one for a block",
        "response.py",
        "dk = xp.where(self._is_fractional(), dk / size, 0.0)",
        "dk = xp.where(self._is_fractional(), dk, 0.0)",
    ),
    Mutation(
        "factor: what a crowd of infinities shares",
        "response.py",
        "share = k / xp.where(crowd > 0, crowd, 1.0)",
        "share = k",
    ),
    Mutation(
        "guard: slopes that float16 cannot show",
        "response.py",
        "return 4.0 * max(1.0, operator.exponent) / float(xp.finfo(dtype).max)",
        "return 0.0",
    ),
    Mutation(
        "sign: the tangent of lam",
        "blocks.py",
        "distance = distance - self.d * dlam",
        "distance = distance + self.d * dlam",
    ),
    Mutation(
        "sign: a block moves with its mean",
        "blocks.py",
        "shift = -self.totals([self._share() * held], linear=True)[0]",
        "shift = self.totals([self._share() * held], linear=True)[0]",
    ),
    Mutation(
        "sign: the cotangent of lam", "blocks.py", "= self.d * xp.clip(", "= -self.d * xp.clip("
    ),
    Mutation(
        "bound: how many are fractional",
        "select.py",
        "return xp.total(counted) >= fractional",
        "return xp.total(counted) > fractional",
    ),
    Mutation(
        "sign: the penalty of an entry that is selected whole",
        "value.py",
        "top = top - lam * reg.penalty(xp.ones_like(lam))",
        "top = top + lam * reg.penalty(xp.ones_like(lam))",
    ),
    Mutation(
        "bound: the room that a target leaves",
        "value.py",
        "room = xp.where(candidate, 1.0 - t, 0.0)",
        "room = xp.where(candidate, 1.0, 0.0)",
    ),
]

KERNELS = [
    Mutation(
        "sign: a lone magnitude for p = 2",
        "power.hpp",
        "if constexpr (E == 1) return target / (1 + linear);",
        "if constexpr (E == 1) return target / (1 - linear);",
    ),
    Mutation(
        "guard: the threshold of signs is not below 0",
        "kinds.hpp",
        "kAbsolute = true, kFloor = true;",
        "kAbsolute = true, kFloor = false;",
    ),
    Mutation(
        "bound: what is left for the block",
        "threshold.hpp",
        "const double left = k - sums.above;",
        "const double left = k;",
    ),
    Mutation(
        "sign: cotangents of negative entries",
        "cotangents.hpp",
        "Kind::kAbsolute && double(widen(x)) < 0 ? 0.0 - value : value",
        "value",
    ),
    Mutation(
        "tie rule: the lowest index wins",
        "output.hpp",
        "j < count && left > 0; ++j, left -= 1)",
        "j < count && left > 0; ++j)",
    ),
    Mutation(
        "factor: what a crowd of infinities shares",
        "output.hpp",
        "row.k > 0 ? row.k / state.delta : 0",
        "row.k > 0 ? row.k : 0",
    ),
    Mutation(
        "sign: a block in PAV",
        "pav.hpp",
        "return (weight - offset) / size;",
        "return (weight + offset) / size;",
    ),
]


def pytest_configure() -> None:
    """As a plugin of pytest, ``-p mutations``: the core is what the variable says."""
    import sparsetopk._core as core

    if not os.environ[CORE]:
        core.native = None
        return
    spec = importlib.util.spec_from_file_location("sparsetopk._core._native", os.environ[CORE])
    core.native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(core.native)


def passes(core: str, shared: str) -> bool:
    """Whether the tests pass; what they share, such as slow references, is kept for the next."""
    environment = os.environ | {CORE: core, "SPARSETOPK_TESTS": shared}
    options = ["-p", "mutations", "-p", "no:cacheprovider", "-x", "-q", "--no-header"]
    command = [sys.executable, "-m", "pytest", *options, *TESTS]
    environment["PYTHONPATH"] = os.pathsep.join(str(ROOT / name) for name in ("src", "tests"))
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, 1):  # neither passed nor failed
        raise RuntimeError(done.stdout + done.stderr)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    print("   ", *(line.split(" - ")[0] for line in failed) if failed else ["all pass"], flush=True)
    return done.returncode == 0


def compiled(directory: str) -> str:
    """The core from the sources as they are."""
    flags = ["-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O0", "-DSPARSETOPK_X86_64=OFF"]
    python = f"-DPython_EXECUTABLE={sys.executable}"
    cmake = Path(sys.executable).parent / "cmake"
    for command in (
        ["-S", ROOT, "-B", directory, python, *flags],
        ["--build", directory, "-j", "2"],
    ):
        done = subprocess.run([cmake, *command], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
    (found,) = Path(directory).glob("_native*.so")
    return str(found)


def is_noticed(mutation: Mutation, path: Path, build: str, shared: str) -> bool:
    text = path.read_text()
    if text.count(mutation.old) != 1:
        print(f"    {path.name} has this {text.count(mutation.old)} times: {mutation.old}")
        return False
    try:
        path.write_text(text.replace(mutation.old, mutation.new))
        return not passes(compiled(build) if build else "", shared)
    finally:
        path.write_text(text)


def main(words: list[str]) -> int:
    missed = []
    with tempfile.TemporaryDirectory() as shared, tempfile.TemporaryDirectory() as build:
        for room, mutations, made in (
            (ROOT / "src/sparsetopk/_maths", MATHS, ""),
            (ROOT / "csrc", KERNELS, build),
        ):
            chosen = [m for m in mutations if not words or any(w in str(m) for w in words)]
            if not chosen:
                continue
            for mutation in chosen:
                print(f"{mutation.file}, {mutation.what}", flush=True)
                if not is_noticed(mutation, room / mutation.file, made, shared):
                    missed.append(f"{mutation.file}, {mutation.what}")
            print(f"{room.relative_to(ROOT)} as it is", flush=True)
            if not passes(compiled(made) if made else "", shared):
                missed.append("there was nothing to notice")
    print(f"not noticed: {missed}" if missed else "all noticed")
    return len(missed) > 0


if CORE in os.environ:  # before conftest.py imports JAX, for which nothing is tested here
    sys.modules["jax"] = None  # type: ignore[assignment]

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
