"""Draws rows, operators, settings and paths at random, and holds what is computed against an oracle.

    python tests/fuzz.py --seconds 60 --seed 1 --frontend torch

Every draw follows from the seed. What fails is made as small as it can be and written to tests/found,
whose files tests/test_fuzz.py runs again: it exits with 1 then.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

# Before anything imports them.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("JAX_ENABLE_X64", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from fuzz_oracle import Answer, Oracle, Rows
from fuzz_paths import EPS, FEW_PS, LARGEST, MAGNITUDES, PATHS, Found

FOUND = Path(__file__).with_name("found")
# Where rows fill vectors, lanes, tiles or blocks of the core, and one entry to either side.
EDGES = sorted({2**i + j for i in range(1, 13) for j in (-1, 0, 1)} | {1, 2, 3, 383, 384, 385})
LONG = (65535, 65536, 65537, 100_000)
FEW_LENGTHS = (6, 32, 34, 130)
PS = (1.05, 1.1, 1.2, 4 / 3, 1.5, 1.7, 2.0, 2.0, 2.0, 2.5, 3.0, 6.0)
LEAST = {"float64": 1e-300, "float32": 1e-37, "bfloat16": 1e-37, "float16": 1e-7}
# Derivatives are products of S(t), which underflows for p near 1 and a large lam: see docs/maths.md.
LEAST_SLOPE = LEAST | {"float64": 1e-250}
ROUNDINGS = 64.0  # how many a path may take
PROGRAMS = 1000  # calls after which what was compiled is forgotten
CHEAP = (2.0, 1.5, 4 / 3)
UNSOLVED = (
    2e-10  # of k, in a mask whose y is narrower than what it is computed in: see docs/maths.md
)
STRUCTURES = (
    "normal",
    "cauchy",
    "ties",
    "constant",
    "sorted",
    "geometric",
    "near ties",
    "zeros",
    "shifted",
    "two-valued",
)


class Task(NamedTuple):
    """One call."""

    frontend: str
    path: str
    kind: str
    p: float
    dtype: str
    rows: Rows

    def __str__(self) -> str:
        m, n = self.rows.x.shape
        return f"{self.frontend}/{self.path} {self.kind} p={self.p:.4g} {self.dtype} {m} x {n}"


def rounded(values: Any, dtype: str) -> np.ndarray:
    """To what the dtype can hold, as float64."""
    values = np.clip(np.asarray(values, np.float64), -LARGEST[dtype], LARGEST[dtype])
    if dtype == "bfloat16":
        bits = np.float32(values).view(np.uint32)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
        return np.float64(bits.view(np.float32))
    return np.float64(values.astype(dtype))


def entries(rng: np.random.Generator, structure: str, m: int, n: int, dtype: str) -> np.ndarray:
    x = rng.normal(size=(m, n))
    if structure == "cauchy":
        return np.clip(rng.standard_cauchy(size=(m, n)), -1e4, 1e4)
    if structure == "ties":
        return np.round(2 * x) / 2
    if structure == "constant":
        return np.full((m, n), rng.normal())
    if structure == "sorted":
        return np.sort(x, axis=-1)[:, :: rng.choice([-1, 1])]
    if structure == "geometric":
        return np.sign(x) * 10.0 ** rng.uniform(-4, 4, size=(m, n))
    if structure == "near ties":
        return 1 + EPS[dtype] * rng.integers(0, 6, size=(m, n)) * np.where(
            rng.random((m, n)) < 0.9, 1, 50
        )
    if structure == "zeros":
        return np.where(rng.random((m, n)) < 0.6, 0.0, x)
    if structure == "shifted":
        return x + rng.choice([-1, 1]) * 10.0 ** rng.uniform(0, 4)
    if structure == "two-valued":
        return np.where(x > 0, 1.0, -0.5)
    return x


def draw(
    rng: np.random.Generator, frontend: str, only: str | None = None, seen: Any = None
) -> Task:
    """``seen`` are the settings that were compiled before: most draws take one of these again."""
    path_name = only or str(rng.choice(list(PATHS[frontend])))
    path = PATHS[frontend][path_name]
    dtype, kind = str(rng.choice(path.dtypes)), str(rng.choice(path.kinds))
    p = float(rng.choice(FEW_PS if path.few else PS))
    if path.few:
        n, m = int(rng.choice(FEW_LENGTHS)), 64
        known = seen.setdefault((frontend, path_name), []) if seen is not None else []
        if known and rng.random() < 0.9:
            dtype, kind, p, n = known[rng.integers(len(known))]
        elif seen is not None:
            known.append((dtype, kind, p, n))
    else:
        n = int(rng.choice(LONG if path.most > 1 << 14 and rng.random() < 0.05 else EDGES))
        cost = 16 if kind == "two-sided" and p not in (2.0, 1.5, 4 / 3) else 1
        m = int(np.clip(path.most // cost // n, 1, rng.integers(1, 300)))
    m = min(m, 8) if path_name == "many tensors" else m
    wide = 6 if path.narrow and dtype != "float64" else 30
    return Task(frontend, path_name, kind, p, dtype, draw_rows(rng, kind, p, dtype, m, n, wide))


def draw_rows(
    rng: np.random.Generator, kind: str, p: float, dtype: str, m: int, n: int, wide: int = 6
) -> Rows:
    """With k, lam and a scale for every row, by up to ``wide`` powers of ten; and one structure."""
    x = entries(rng, str(rng.choice(STRUCTURES)), m, n, dtype)
    power = 1 if dtype == "float16" else wide
    scale = 10.0 ** np.where(rng.random((m, 1)) < 0.7, 0.0, rng.uniform(-power, power, size=(m, 1)))
    # By the scaling laws lam is so large beside the entries: mostly as it is used, else anything.
    usual = rng.choice([1e-3, 0.03, 0.3, 1.0, 10.0], size=(m, 1))
    law = scale ** (2 - p) if kind in ("magnitude", "debiased") else scale
    any_lam = (law if wide < 30 else 1.0) * 10.0 ** rng.uniform(-wide, wide, size=(m, 1))
    lam = np.where(rng.random((m, 1)) < 0.8, usual * law, any_lam)
    whole = rng.choice([0, 1, 2, n // 2, n - 1, n, n // 10, 5], size=(m, 1)).clip(0, n)
    part = rng.choice([0, 0, 0, 0.5, rng.random(), 1e-3, 1 - 1e-3, 2.0**-20], size=(m, 1))
    k = np.minimum(whole + part, n)
    g, dx = rng.normal(size=(2, m, n))
    dk, dlam = rng.normal(size=(2, m, 1))
    narrow = "float64" if dtype == "float64" else "float32"
    # Slopes are S'/lam: below, those of most blocks are beyond the largest number.
    least = 5.0 * max(1.0, 1 / (p - 1)) / LARGEST[dtype] if dtype == "float16" else 1e-30
    return Rows(
        rounded(x * scale, dtype),
        rounded(k, narrow),
        rounded(np.clip(lam, least, 1e30), narrow),
        rounded(g, dtype),
        rounded(dx, dtype),
        rounded(dk, narrow),
        rounded(dlam * lam, narrow),
    )


# ------------------------------------------------------------------------------------------- checks


class Failure(NamedTuple):
    what: str
    row: int
    got: float
    expected: float
    slack: float

    def __str__(self) -> str:
        return f"{self.what}: got {self.got!r}, expected {self.expected!r} within {self.slack:.2g}"


def outputs(task: Task, rows: Rows) -> Found | Failure:
    """What the path of the task makes of the rows."""
    try:
        return PATHS[task.frontend][task.path].run(task.kind, task.p, task.dtype, rows)
    except Exception as error:  # whatever it is, it is a finding
        return Failure(f"{type(error).__name__}: {str(error)[:200]}", 0, np.nan, np.nan, 0.0)


def check(task: Task) -> tuple[Failure | None, int, int]:
    """What is wrong, in how many rows derivatives were compared, and in how many they were not."""
    with np.errstate(all="ignore"):
        found = outputs(task, task.rows)
        return (found, 0, 0) if isinstance(found, Failure) else compare(task, found)


def _compute(task: Task) -> str:
    """What the path computes in, as docs/maths.md says."""
    in_core = task.p == 2.0 and task.path != "operations"
    narrow = PATHS[task.frontend][task.path].narrow or in_core
    return "float32" if narrow and task.dtype != "float64" else "float64"


def _of_cheap(task: Task) -> float:
    """Of y, where S(t) is cheap: the core has t in float32 then, and its rounding grows with S."""
    cheap = task.dtype != "float64" and task.p in CHEAP
    return 2 * EPS["float32"] / (task.p - 1) if cheap else 0.0


def _rounding(task: Task) -> float:
    """Of y, to its dtype: twice, and that of t."""
    return 2 * EPS[task.dtype] + _of_cheap(task)


def compare(task: Task, found: Found) -> tuple[Failure | None, int, int]:
    rows, dtype = task.rows, task.dtype
    compute = _compute(task)
    unsolved = UNSOLVED if compute != dtype else 0.0
    oracle = Oracle(task.kind, task.p, rows)
    bounds = oracle.bounds(ROUNDINGS * EPS[compute], _rounding(task), unsolved)
    clear = ~bounds.jumps
    largest = LARGEST[dtype] / 16
    least = LEAST[dtype]
    # In float32 slopes of S below 1e-18 are not told from each other.
    narrow = PATHS[task.frontend][task.path].narrow and dtype != "float64"
    tiny = (1e-15 if narrow else 0.0) * np.abs(rows.g).max(-1, keepdims=True) / rows.lam
    for name, got, want, slack in zip(
        Answer._fields, found.answer, bounds.answer, bounds.slack, strict=True
    ):
        derivative = name != "y"
        size = largest if name in "xy" else LARGEST[compute] / 16
        steep = derivative & ~(np.abs(want) < size)  # cut off: finite is enough
        scale = np.abs(rows.x).max(-1, keepdims=True) * least if name == "y" else 0.0
        slack = slack + (tiny + LEAST_SLOPE[dtype] if derivative else scale + least)
        wrong = ~(np.abs(got - want) <= slack) & ~steep
        if derivative:
            wrong = (wrong & clear) | ~np.isfinite(got)
        if wrong.any():
            i, j = np.argwhere(wrong)[0]
            return (
                Failure(
                    name,
                    int(i),
                    got[i, j],
                    want[i, j],
                    float(np.broadcast_to(slack, got.shape)[i, j]),
                ),
                0,
                0,
            )
    failure = (
        of_properties(task, found, bounds)
        or of_tangent(task, found, bounds)
        or of_relations(task, found, bounds)
    )
    return failure, int(clear.sum()), int((~clear).sum())


def of_properties(task: Task, found: Found, bounds: Any) -> Failure | None:
    """The sum is k; entries that are equal have equal outputs, and larger ones no smaller."""
    rows, y = task.rows, found.answer.y
    eps = EPS[task.dtype]
    if task.kind in ("mask", "two-sided"):
        got = y.sum(-1, keepdims=True)
        # What docs/maths.md promises: roundings of k, and one of the range of t for every entry, as its
        # t is rounded to that; in a path's own precision. And a rounding of every y to its dtype, and
        # of its t where that is made in float32.
        n = rows.x.shape[1]
        slack = EPS[_compute(task)] * (ROUNDINGS * np.maximum(rows.k, 1.0) + n)
        slack = slack + (eps + _of_cheap(task)) * rows.k + LEAST[task.dtype] * n
        wrong = ~(np.abs(got - rows.k) <= slack)
        if wrong.any():
            i = int(np.argwhere(wrong)[0, 0])
            return Failure("sum of y", i, got[i, 0], rows.k[i, 0], float(slack[i, 0]))
    order = np.argsort(rows.x, axis=-1, kind="stable")
    x, y = (np.take_along_axis(v, order, axis=-1) for v in (rows.x, y))
    step, move = np.diff(x, axis=-1), np.diff(y, axis=-1)
    # Of neighbours each is rounded, and for p = 4/3 a two-sided S(t) is a cube of what is rounded.
    roundings = 12 if task.kind == "two-sided" and task.p == 4 / 3 else 4
    slack = roundings * eps * np.abs(y[:, 1:]) + ROUNDINGS * EPS["float64"]
    # Powers of arrays may be rounded in one way at the end of an array and in another before it.
    exact = task.path in ("core", "threads", "levels")
    wrong = ((step == 0) & (np.abs(move) > (0.0 if exact else slack))) | ~(move >= -slack)
    if wrong.any():
        i, j = np.argwhere(wrong)[0]
        return Failure("order of y", int(i), y[i, j + 1], y[i, j], 0.0)
    return None


def of_relations(task: Task, found: Found, bounds: Any) -> Failure | None:
    """Rows in another order, in other units, and with a larger k: with one of these, by the lengths.

    Outputs of one path are held against each other, within what the oracle allows to both.
    """
    rows = task.rows
    n = rows.x.shape[1]
    y, dtype = found.answer.y, task.dtype
    slack = 2 * bounds.slack.y + LEAST[dtype] * (1 + np.abs(rows.x).max(-1, keepdims=True))
    which = ("permuted", "scaled", "larger k")[(n + len(rows.x)) % 3]
    if which == "permuted":
        order = np.random.default_rng(n).permutation(n)
        columns = {name: getattr(rows, name)[:, order] for name in ("x", "g", "dx")}
        want, other = y[:, order], rows._replace(**columns)
        slack = np.broadcast_to(slack, y.shape)[:, order]
    elif which == "scaled":
        c, power = 4.0, 2 - task.p
        of_lam = c**power if task.kind in MAGNITUDES else c
        other = rows._replace(x=c * rows.x, lam=of_lam * rows.lam)
        if not (np.abs(other.x) < LARGEST[dtype] / 4).all() or task.p not in (2.0, 1.5):
            return None  # other powers of c are rounded
        grows = c if task.kind in MAGNITUDES else 1.0
        want, slack = grows * y, grows * slack
    else:
        want, other = y, rows._replace(k=np.minimum(rows.k + 0.25, n))
    found_there = outputs(task, other)
    if isinstance(found_there, Failure):
        return found_there
    got = found_there.answer.y
    off = np.abs(want) - np.abs(got) if which == "larger k" else np.abs(got - want)
    wrong = ~(off <= slack)
    if wrong.any():
        i, j = np.argwhere(wrong)[0]
        return Failure(which, int(i), got[i, j], want[i, j], float(slack[i, j]))
    return None


def of_tangent(task: Task, found: Found, bounds: Any) -> Failure | None:
    """Forward mode is the transpose of reverse mode, which was compared."""
    if found.dy is None:
        return None
    rows, (_, x, k, lam), slack = task.rows, bounds.answer, bounds.slack
    n, least = rows.x.shape[1], 16 * LEAST_SLOPE[task.dtype]
    got = (rows.g * found.dy).sum(-1, keepdims=True)
    terms = [(x * rows.dx).sum(-1, keepdims=True), k * rows.dk, lam * rows.dlam]
    room = (slack.x * np.abs(rows.dx)).sum(-1, keepdims=True)
    room = room + slack.k * np.abs(rows.dk) + slack.lam * np.abs(rows.dlam)
    sizes = (np.abs(x * rows.dx)).sum(-1, keepdims=True) + np.abs(terms[1]) + np.abs(terms[2])
    room = 2 * room + 8 * EPS[task.dtype] * (
        sizes + (np.abs(rows.g * found.dy)).sum(-1, keepdims=True)
    )
    # Forward mode is not cut off: what may be beyond the largest number is left out.
    compared = (sizes < LARGEST[task.dtype] / 1e3) & ~bounds.jumps
    wrong = ~(np.abs(got - sum(terms)) <= room + least * n) & compared
    if wrong.any():
        i = int(np.argwhere(wrong)[0, 0])
        return Failure("jvp", i, got[i, 0], float(sum(terms)[i, 0]), float(room[i, 0]))
    return None


# ---------------------------------------------------------------------------------------- shrinking


def shrink(task: Task, failure: Failure, seconds: float = 10.0) -> tuple[Task, Failure]:
    """The row that fails, then without entries that it fails without, with simpler numbers."""
    end = time.monotonic() + seconds

    def fails(rows: Rows) -> Failure | None:
        if time.monotonic() > end or (PATHS[task.frontend][task.path].few and len(rows.x) != 64):
            return None
        return check(task._replace(rows=rows))[0]

    rows = task.rows
    alone = Rows(*(v[failure.row : failure.row + 1] for v in rows))
    if found := fails(alone):
        rows, failure = alone, found
        part = rows.x.shape[1] // 2
        while part >= 1 and time.monotonic() < end:
            for begin in range(0, rows.x.shape[1], part):
                left = np.delete(np.arange(rows.x.shape[1]), np.s_[begin : begin + part])
                smaller = Rows(*(v[:, left] if v.shape[1] > 1 else v for v in rows))
                if left.size > 1 and smaller.k.max() <= left.size and (found := fails(smaller)):
                    rows, failure = smaller, found
                    break
            else:
                part //= 2
    return task._replace(rows=rows), failure


def write(task: Task, failure: Failure, seed: int) -> Path:
    FOUND.mkdir(exist_ok=True)
    fields = task._replace(rows=None)._asdict() | {"why": str(failure)}  # type: ignore[arg-type]
    fields["rows"] = {name: v.tolist() for name, v in task.rows._asdict().items()}
    where = f"{task.frontend}-{task.path}-{task.kind}-{failure.what.split(':')[0]}-{seed}".replace(
        " ", "-"
    )
    path = FOUND / f"{where}.json"
    path.write_text(json.dumps(fields) + "\n")
    return path


def read(path: Path) -> Task:
    fields = json.loads(path.read_text())
    del fields["why"]
    n = len(fields["rows"]["x"][0])
    rows = Rows(*(np.array(v, np.float64).reshape(len(v), -1) for v in fields.pop("rows").values()))
    assert rows.x.shape[1] == n
    return Task(rows=rows, **fields)


def forget_programs() -> None:
    """What JAX has compiled: a process may map the code of a few thousand programs and no more."""
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()


def _cpu_seconds() -> float:
    """Of this process and of those that it has started."""
    return sum(os.times()[:4])


def run(
    frontends: list[str],
    seconds: float,
    seed: int,
    only: str | None,
    most: int,
    calls: int,
    clock: Any = time.monotonic,
) -> int:
    start, counts, failures = clock(), collections.Counter(), 0
    compared = skipped = number = 0
    seen: dict[Any, Any] = {}
    while clock() - start < seconds and failures < most and number < calls:
        rng = np.random.default_rng([seed, number])
        frontend = frontends[number % len(frontends)]
        task = draw(rng, frontend, only, seen)
        failure, clear, not_clear = check(task)
        number += 1
        if number % PROGRAMS == 0:
            seen.clear()
            forget_programs()
        counts[f"{task.frontend}/{task.path}"] += task.rows.x.shape[0]
        compared, skipped = compared + clear, skipped + not_clear
        if failure:
            failures += 1
            small, why = shrink(task, failure)
            path = write(small, why, seed * 1_000_000 + number - 1)
            row = why.row if len(small.rows.x) > 1 else 0
            print(
                f"{small} (draw {number - 1}), k = {small.rows.k[row, 0]!r}, "
                f"lam = {small.rows.lam[row, 0]!r}\n  {why}\n  {path.name}",
                flush=True,
            )
    share = compared / max(compared + skipped, 1)
    print(
        f"seed {seed}: {number} calls, {sum(counts.values())} rows in {clock() - start:.0f} s "
        f"({', '.join(f'{name} {n}' for name, n in sorted(counts.items()))}); derivatives compared in "
        f"{share:.0%} of the rows, those that are clear of kinks; {failures} failures",
        flush=True,
    )
    return failures


def main() -> int:
    global FOUND
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=None, help="drawn if it is not given")
    parser.add_argument("--frontend", choices=PATHS, action="append", help="all of them otherwise")
    parser.add_argument("--path", help="one path of the front-end, such as core")
    parser.add_argument("--most", type=int, default=20, help="failures to end at")
    parser.add_argument("--calls", type=int, default=1 << 60, help="and calls")
    parser.add_argument("--cpu", action="store_true", help="count seconds of CPU time")
    parser.add_argument("--found", type=Path, default=FOUND, help="where failures are written")
    parser.add_argument("--replay", type=Path, nargs="*", help="files that were written")
    options = parser.parse_args()
    FOUND = options.found
    if options.replay:
        found = [check(read(path))[0] for path in options.replay]
        print(
            *(f"{path}: {why}" for path, why in zip(options.replay, found, strict=True)), sep="\n"
        )
        return int(any(found))
    seed = options.seed if options.seed is not None else int(time.time())
    frontends = options.frontend or list(PATHS)
    clock = _cpu_seconds if options.cpu else time.monotonic
    drawn = (options.path, options.most, options.calls)
    return int(run(frontends, options.seconds, seed, *drawn, clock) > 0)


if __name__ == "__main__":
    sys.exit(main())
