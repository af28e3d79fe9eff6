"""On a device that is neither a CPU nor one that has kernels, and where a read by the host is an error:
the same numbers, and how many launches they take."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "other_device.py"
# As many as are counted, and a few more.
LAUNCHES = {
    "topk_mask p=2.00 False": 150,
    "topk_mask p=1.50 False": 750,
    "topk_mask p=1.50 True": 870,
    "topk_mag p=2.0": 1310,
    "topk_sign": 170,
    "topk_select": 190,
    "topk_select straight through": 400,
    "TokenChoice": 200,
    "topk_mask p=1.20 True": 2300,
    "topk_mask p=3": 640,
    "topk_mag p=3": 1550,
    "topk_mask p=3 True": 2400,
    "choose_lam": 1000,
}
# Where S, or an entry alone, takes a loop.
BACKWARD = {"topk_mask p=1.20 True": 320, "topk_mag p=3": 580, "topk_mask p=3 True": 320}


@pytest.fixture(scope="module")
def found():
    run = [sys.executable, "-W", "ignore", str(SCRIPT), "-v"]
    done = subprocess.run(run, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def test_everything_runs_on_another_device(found):
    """In float32, where the CPU has float64 inside; a host read would have failed."""
    failed = {name: case["failed"] for name, case in found.items() if "failed" in case}
    assert not failed
    errors = {name: case["error"] for name, case in found.items()}
    assert max(errors.values()) <= 1e-5, errors
    assert errors["topk_mask special"] <= 1e-6
    assert errors["topk_mask float64"] <= 1e-14


@pytest.mark.parametrize("name", LAUNCHES)
def test_launches(found, name):
    assert found[name]["forward"] <= LAUNCHES[name]
    assert found[name]["backward"] <= BACKWARD.get(name, 270)
