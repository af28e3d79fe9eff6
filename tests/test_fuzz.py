"""Random draws against an oracle, for some seconds; and what was found so before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fuzz import FOUND, PATHS, Rows, Task, check, draw_rows, read, write
from fuzz_oracle import Oracle

HERE = Path(__file__).parent


@pytest.mark.parametrize("path", sorted(FOUND.glob("*.json")), ids=lambda path: path.stem)
def test_what_was_found(path):
    task = read(path)
    if task.path not in PATHS[task.frontend]:
        pytest.skip(f"there is no {task.frontend} {task.path} here")
    failure, _, _ = check(task)
    assert failure is None, str(failure)


def test_some_seconds(tmp_path):
    """`make fuzz SEED=...` draws the same again, and on."""
    seed = os.environ.get("SPARSETOPK_FUZZ_SEED", "1")
    command = [sys.executable, HERE / "fuzz.py", "--seconds", "20", "--calls", "45", "--seed", seed]
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [*command, "--found", tmp_path],
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=400,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


@np.errstate(all="ignore")
def test_the_oracle_satisfies_the_conditions():
    """Its masks sum to k, and what it says of derivatives are differences of what it says of y."""
    rng = np.random.default_rng(0)
    for kind in ("mask", "two-sided", "sign", "magnitude", "debiased"):
        for p in (1.2, 1.5, 2.0, 3.0):
            rows = draw_rows(rng, kind, p, "float64", 40, 7)
            lam = np.clip(rows.lam, 0.1, 2.0)
            rows = rows._replace(x=rng.normal(size=(40, 7)), lam=lam, dlam=rng.normal(size=(40, 1)))
            oracle = Oracle(kind, p, rows)
            bounds = oracle.bounds(1e-6, 0.0)
            _, *block, _ = oracle.answer(oracle.solve())
            clear = ~bounds.jumps
            if kind in ("mask", "two-sided"):
                np.testing.assert_allclose(
                    bounds.answer.y.sum(-1, keepdims=True), rows.k, atol=1e-12
                )
            h = 1e-6
            ends = []
            for sign in (1, -1):
                there = rows._replace(
                    x=rows.x + sign * h * rows.dx,
                    lam=rows.lam + sign * h * rows.dlam,
                )
                end = Oracle(kind, p, there)
                answer, *other, _ = end.answer(end.solve())
                for one, two in zip(
                    block, other, strict=True
                ):  # a step over a kink is no derivative
                    clear = clear & (one == two).all(-1, keepdims=True)
                ends.append(answer.y)
            slope = (rows.g * (ends[0] - ends[1])).sum(-1, keepdims=True) / (2 * h)
            want = (bounds.answer.x * rows.dx).sum(-1, keepdims=True)
            want = want + bounds.answer.lam * rows.dlam
            assert clear.mean() > 0.5
            np.testing.assert_allclose(slope[clear], want[clear], rtol=2e-3, atol=2e-4)


def test_a_defect_is_found_and_written(monkeypatch, tmp_path):
    """A path that is wrong in one entry: it is seen, and what is written fails again."""
    import fuzz

    path = PATHS["numpy"]["core"]

    def wrong(*arguments):
        found = path.run(*arguments)
        y = found.answer.y.copy()
        y[0, -1] += 1e-6
        return found._replace(answer=found.answer._replace(y=y))

    rng = np.random.default_rng(1)
    task = Task(
        "numpy", "core", "mask", 2.0, "float64", draw_rows(rng, "mask", 2.0, "float64", 9, 8)
    )
    assert check(task)[0] is None
    monkeypatch.setitem(PATHS["numpy"], "core", path._replace(run=wrong))
    monkeypatch.setattr(fuzz, "FOUND", tmp_path)
    failure = check(task)[0]
    assert failure is not None
    small, why = fuzz.shrink(task, failure)
    assert small.rows.x.shape[1] < 8
    again = read(write(small, why, 0))
    assert isinstance(again.rows, Rows)
    assert check(again)[0] is not None
