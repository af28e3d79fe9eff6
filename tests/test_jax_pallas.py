"""The Pallas kernels, interpreted on the CPU, against the core and float64; and lowered for GPUs and TPUs
that are not here."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import pytest

from cases import ROWS
from test_batches import EPS32, KINDS, PS, Batch, assert_close, batch, function, options

jax = pytest.importorskip("jax")

import jax.numpy as jnp

import sparsetopk.jax as st
from jax_ways import in_pallas
from sparsetopk.jax import _pallas
from sparsetopk.jax._pallas import experimental
from sparsetopk.jax._solvers import ffi

N = 17  # of all rows here: one compilation for each operator, and blocks that are not full
inf, nan = np.inf, np.nan


def special_rows() -> Batch:
    """Infinities, NaN, ties, zeros, and a k or lam that is none; each with several k, relaxed and hard."""
    x = np.random.default_rng(3).normal(size=(11, N))
    x[0, 3] = nan
    x[1, ::2] = -inf
    x[2, :3] = inf
    x[3, :10] = inf
    x[4, 3:] = -inf
    x[5] = -inf
    x[6] = 0.25
    x[7, :10] = 0.0
    x[8, ::3] = -0.0
    x[9] = np.resize([3.0, 3.0, 2.0, 2.0, 2.0, -5.0, 1e30], N)
    x[10] = np.resize([1e-40, -1e-40, 1.0, 1.0, 2.0, -2.0, 1e-45], N)
    k, lam = (0.0, 1.0, 3.5, 5.0, 12.0, N - 0.5, N, -1.0, nan), (0.1, 0.0, nan)
    each = np.meshgrid(np.arange(len(x)), k, lam, indexing="ij")
    i, k, lam = (v.reshape(-1, 1) for v in each)
    return Batch(x[i[:, 0]], k, lam, np.ones((len(i), N)))


def table(kind: str) -> Batch:
    """The inputs of the case table, with what plays no part after them."""
    x, k, lam = ROWS
    absent = -inf if kind in ("mask", "two-sided") else 0.0
    rest = np.full((len(x), N - x.shape[1]), absent)
    return Batch(np.append(x, rest, axis=-1), k, lam, np.ones((len(x), N)))


def all_rows(kind: str, p: float) -> Batch:
    """Random rows first, which are compared with float64 too."""
    parts = [batch(kind, p, N), table(kind), special_rows()]
    return Batch(*(np.concatenate(v).astype(np.float32) for v in zip(*parts, strict=True)))


def both(kind, p, at):
    """Value and derivatives in x, k and lam, in one compiled call."""
    f = lambda x, k, lam: function(st, kind)(x, k, lam, **options(kind, p))  # noqa: E731

    def of(x, k, lam, g):
        y, pull = jax.vjp(f, x, k, lam)
        return y, *pull(g)

    with np.errstate(all="ignore"):
        return [np.asarray(v) for v in jax.jit(of)(*map(jnp.asarray, at))]


def near(found, want, tolerance, scale=1.0):
    np.testing.assert_array_equal(np.isnan(found), np.isnan(want))
    same = (found == want) | np.isnan(want)
    error = np.where(same, 0.0, np.abs(np.float64(found) - want) / scale)
    assert error.max() <= tolerance, (error.max(), np.argwhere(error > tolerance)[:5].tolist())


def in_the_rest(kind, p, platform):
    """What differs between platforms is how rows are read, and not what becomes of them."""
    few = ("mask", 2.0), ("magnitude", 1.5)
    quick = p in (2.0, 1.5) if platform == "cuda" else (kind, p) in few
    return pytest.param(kind, p, platform, marks=[] if quick else pytest.mark.slow)


WAYS = [in_the_rest(kind, p, way) for way in ("cuda", "tpu") for kind in KINDS for p in PS]


@pytest.mark.skipif(not ffi.available(), reason="the core was built without the headers of XLA")
@pytest.mark.parametrize(("kind", "p", "platform"), WAYS)
def test_interpreted(kind, p, platform):
    at = all_rows(kind, p)
    want = both(kind, p, at)
    with in_pallas(platform):
        found = both(kind, p, at)
    # Exactly, where the core has 0, 1, infinities, NaN; and the hard rows.
    random = len(batch(kind, p, N).x)
    special = slice(random, None)
    for value in (0.0, 1.0, inf, -inf):
        np.testing.assert_array_equal(found[0][special] == value, want[0][special] == value)
    hard = at.lam[:, 0] == 0
    for a, b in zip(found, want, strict=True):
        np.testing.assert_array_equal(a[hard], b[hard])
    finite = np.where(np.isfinite(at.x), np.abs(at.x), 0.0)
    scale, e = np.maximum(1.0, finite.max(-1, keepdims=True)), max(1.0, 1 / (p - 1))
    near(found[0], want[0], 2e-6, scale * max(1.0, e / 3))
    with np.errstate(all="ignore"):
        steep = scale * (1 + 1 / at.lam) * np.abs(at.g).sum(-1, keepdims=True)
    near(found[1], want[1], 2e-6 * e * e, steep)
    # In k and lam the derivative jumps where a whole k meets a gap: rounding decides on which side.
    rows = at.k[:, 0] % 1 == 0.5
    for a, b in zip(found[2:], want[2:], strict=True):
        near(a[rows], b[rows], 2e-6 * e * e, steep[rows])
    assert_close([np.float64(v[:random]) for v in found[:2]], kind, p, N, EPS32)
