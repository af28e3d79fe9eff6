"""Every entry of the C API, with lengths and addresses that make no sense: an error, and no crash."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys

import numpy as np
import pytest

from sparsetopk._core import native

pytestmark = pytest.mark.skipif(native is None, reason="the compiled core is not there")

FLOATS = {"exponent", "floor", "least"}
OF_PIECES = {"k", "lam", "pivot", "delta", "size", "cut", "from", "to", "lo", "hi"}
FLAGS = {"debias", "is_long", "spread", "single_w"}
LENGTHS = {"rows", "n", "count"}
GIVEN = {"op": 0, "dtype": 1, "phi": 0, "itemsize": 8, "x_itemsize": 8, "w_itemsize": 8} | {
    "capacity": 1,
    "fractional": 1,
    "shift": 0,
    "first": 0,
    "last": 0,
    "threads": 1,
    "ignored": -100,
    "w_rows": 1,
    "x_rows": 1,
}


def entries():
    """The functions that take arguments, with the names of these, from their own docstrings."""
    for name in dir(native):
        signature = re.match(rf"{name}\(([^)]*)\)", getattr(native, name).__doc__ or "")
        if signature and not name.startswith("_"):
            yield name, signature[1].split(", ")


def arguments(name, parameters, lengths, addresses):
    """Of the entry, with all lengths and all addresses as given."""
    pieces = name.startswith("pieces")
    for parameter in parameters:
        if parameter in FLOATS or (pieces and parameter in OF_PIECES):
            yield 1.0
        elif parameter in FLAGS:
            yield False
        elif parameter in LENGTHS:
            yield lengths
        elif parameter.endswith("_stride"):
            yield 1
        elif parameter in GIVEN and not (parameter == "first" and "permutahedron" in name):
            yield GIVEN[parameter]
        else:
            yield addresses


def test_all_are_seen():
    found = dict(entries())
    assert {"threshold_forward", "threshold_backward", "threshold_loss"} <= found.keys()
    assert {"select_slots", "choose_lam", "solve_isotonic", "argsort_descending"} <= found.keys()
    assert len(found) >= 16


@pytest.mark.parametrize("lengths", [-1, -(2**62), 2**40, 2**62, 1, 7])
@pytest.mark.parametrize(("name", "parameters"), list(entries()), ids=lambda value: str(value)[:24])
def test_no_memory_is_touched(name, parameters, lengths):
    """Without an address there is nothing to compute, whatever the lengths are."""
    with pytest.raises((ValueError, OverflowError), match=r"length|address|must"):
        getattr(native, name)(*arguments(name, parameters, lengths, 0))


@pytest.mark.parametrize(("name", "parameters"), list(entries()), ids=lambda value: str(value)[:24])
def test_arguments_of_other_types(name, parameters):
    for wrong in ((), ("x",) * len(parameters), (None,) * (len(parameters) + 3)):
        with pytest.raises(TypeError):
            getattr(native, name)(*wrong)


def test_negative_strides_and_threads():
    x, y = np.ones((2, 3)), np.empty((2, 3))
    k, state = np.ones(2), np.empty((2, 2))
    address = [v.ctypes.data for v in (x, k, state, y)]
    for stride, k_stride, threads in itertools.product((3, -3), (1, -1), (1, -1)):
        call = lambda s=stride, ks=k_stride, t=threads: native.threshold_forward(  # noqa: E731
            *(0, 1.0, False, 1, 2, 3, s, address[0], address[1], ks, address[1], 1, address[2]),
            *(address[3], t),
        )
        if min(stride, k_stride, threads) > 0:
            call()
        else:
            with pytest.raises(ValueError, match="strides and threads must be at least 0"):
                call()
    np.testing.assert_allclose(y.sum(axis=-1), 1.0)


def test_memory_that_runs_out():
    """A MemoryError, and Python goes on."""
    program = """
import resource, numpy as np, sparsetopk
x = np.random.default_rng(0).normal(size=4_000_000)
sparsetopk.soft_rank(x[:1000]); sparsetopk.topk_mask(x[:1000], 10)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20), resource.RLIM_INFINITY))
failed = 0
for call in (lambda: sparsetopk.soft_rank(x), lambda: sparsetopk.argsort(x),
             lambda: sparsetopk.topk_mask(x, 10), lambda: sparsetopk.topk_select(x, 10)):
    try:
        call()
    except MemoryError:
        failed += 1
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert failed == 4, failed
assert abs(sparsetopk.topk_mask(x, 10).sum() - 10) < 1e-9
"""
    pytest.importorskip("resource")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
