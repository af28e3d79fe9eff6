"""The implementation for other devices, on the CPU."""

import contextlib

import jax
import pytest

from sparsetopk.jax._solvers import ffi


@contextlib.contextmanager
def in_xla_operations():
    with pytest.MonkeyPatch.context() as patch, jax.default_matmul_precision("highest"):
        # The precision is part of what a trace is remembered by; there is no product that it changes.
        patch.setattr(ffi, "available", lambda: False)
        yield
