"""For the tests of the Triton kernels: under Triton's interpreter on CPU tensors, and compiled for GPUs
that are not here. The interpreter has neither the hardware's division and powers, nor its threads."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from launches import kernels_run
from sparsetopk.torch._solvers import ops
from sparsetopk.torch._triton import launch, state

DEVICE = os.environ["SPARSETOPK_DEVICE"]
on_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="looks at the kernels on CPU tensors")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Tensors on the device take the kernels; on the CPU, where they are interpreted, many rows in a
    program. NumPy does not warn of what they may do."""
    monkeypatch.setattr(state, "is_served", lambda x: x.device.type == DEVICE)
    if DEVICE == "cpu":
        monkeypatch.setattr(launch, "_ENTRIES", 1 << 16)
        monkeypatch.setattr(launch, "_LANES", 1 << 10)
        monkeypatch.setattr(ops, "threshold", _as_on_a_gpu(ops.threshold))
    with np.errstate(all="ignore"), kernels_run() as names:
        monkeypatch.setattr(__name__ + "._ran", names)
        yield


def _as_on_a_gpu(threshold):
    """The solver alone is an operator of which a CPU has its own: here the kernels take its place."""

    def solved(x, k, lam, op, exponent, hard=None):
        if state.is_served(x):
            return ops._threshold(x, k, lam, op, exponent)
        return threshold(x, k, lam, op, exponent, hard)

    return solved


_ran: list[str] = []  # the kernels that ran in this test


@contextlib.contextmanager
def by_the_core():
    """Nothing takes the kernels, which must have run before: else the core is compared with itself."""
    assert _ran, "no kernel has run"
    before = len(_ran)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "is_served", lambda x: False)
        yield
    assert len(_ran) == before, _ran[before:]


def both(f, *inputs, g):
    """Value and derivatives in all inputs, by the kernels on the device and by the core."""

    def run(device="cpu"):
        live = [v.detach().to(device, copy=True).requires_grad_() for v in inputs]
        y = f(*live)
        return [v.cpu() for v in (y.detach(), *torch.autograd.grad(y, live, g.to(device)))]

    found = run(DEVICE)
    with by_the_core():
        return found, run()


def assert_near(found, want, tol, scale=1.0):
    """Also that NaN is where it must be."""
    found, want = found.double(), want.double()
    assert torch.equal(found.isnan(), want.isnan())
    error = (found - want).nan_to_num(0.0).abs() / scale
    assert float(error.max()) <= tol, float(error.max())


def compile_all(requests):
    """By a process of its own, as this one interprets kernels."""
    script = Path(__file__).with_name("triton_compiled.py")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, script],
        input=json.dumps(requests),
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
