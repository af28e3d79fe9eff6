"""The implementation for other devices, on the CPU; and derivatives on JAX against differences."""

import contextlib
import os

import jax
import numpy as np
import pytest

from sparsetopk.jax import _pallas
from sparsetopk.jax._pallas import kernels
from sparsetopk.jax._solvers import ffi

# As users have it; the Makefile has flags with which most tests compile in a quarter of the time. Of the
# two ways to emit fused loops, XLA has lost one, and its flag, between jax 0.10 and 0.12.
_TWO_EMITTERS = jax.__version_info__ < (0, 11)
AS_USERS_HAVE_IT = {"xla_backend_optimization_level": 3} | (
    {"xla_cpu_use_fusion_emitters": True} if _TWO_EMITTERS else {}
)


def with_four_devices():
    """The environment of a process in which the CPU is four devices. Where things go is decided before
    machine code is made: that is made quickly, and not optimised."""
    flags = (
        "--xla_force_host_platform_device_count=4",
        "--xla_backend_optimization_level=0",
        *(["--xla_cpu_use_fusion_emitters=false"] if _TWO_EMITTERS else []),
    )
    return os.environ | {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}


@contextlib.contextmanager
def in_xla_operations():
    with pytest.MonkeyPatch.context() as patch, jax.default_matmul_precision("highest"):
        # The precision is part of what a trace is remembered by; there is no product that it changes.
        patch.setattr(ffi, "available", lambda: False)
        yield


@contextlib.contextmanager
def in_pallas(platform):
    """The kernels for this platform, interpreted on the CPU; on a GPU with many rows in a program."""
    precision = {"cuda": "float32", "tpu": "tensorfloat32"}[platform]
    shape_of = kernels.Shape.of
    with pytest.MonkeyPatch.context() as patch, jax.default_matmul_precision(precision):
        patch.setattr(ffi, "available", lambda: False)
        patch.setitem(_pallas._LONGEST, "cpu", _pallas._LONGEST[platform])
        patch.setattr(kernels, "_ENTRIES", 1 << 16)
        patch.setattr(kernels.Shape, "of", lambda n, _: shape_of(n, platform))
        yield


def check_derivatives(f, at, step=1e-5, tolerance=1e-5):
    """First and second derivatives of f in everything in ``at``, in all modes and pairs of modes, along
    random directions; three compilations, where ``jax.test_util.check_grads`` has dozens."""
    at = tuple(jax.numpy.asarray(v) for v in at)
    rng = np.random.default_rng(0)
    like = lambda tree: jax.tree.map(lambda v: rng.normal(size=v.shape).astype(v.dtype), tree)  # noqa: E731
    v, g = like(at), like(jax.eval_shape(f, *at))

    def first(at):
        """Forward, and reverse."""
        return jax.jvp(f, at, v)[1], jax.vjp(f, *at)[1](g)

    u, h = like(at), like(jax.eval_shape(first, at))

    @jax.jit
    def second(at):
        """Either of either."""
        return jax.jvp(first, (at,), (u,))[1], jax.vjp(first, at)[1](h)[0]

    compiled = jax.jit(first)
    forward, backward = compiled(at)
    _close(forward, _central(jax.jit(f), at, v, step), tolerance)
    _close(_inner(backward, v), _inner(g, forward), tolerance)
    forward, backward = second(at)
    _close(forward, _central(lambda *at: compiled(at), at, u, step), tolerance)
    _close(_inner(backward, u), _inner(h, forward), tolerance)


def _central(f, at, direction, step):
    ends = (f(*(x + s * step * d for x, d in zip(at, direction, strict=True))) for s in (1, -1))
    return jax.tree.map(lambda a, b: (a - b) / (2 * step), *ends)


def _inner(one, other):
    return sum(
        (np.asarray(a) * b).sum() for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True)
    )


def _close(found, expected, tolerance):
    """Relative to the largest entry: differences lose the same digits in all."""

    def compare(a, b):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1.0, np.abs(b).max()))

    jax.tree.map(compare, found, expected)
