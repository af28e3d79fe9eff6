"""What is steep or large: p > 2, whose S has no bounded slope, tiny lam, k close to a whole number."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest

import sparsetopk
from sparsetopk import _core as core
from sparsetopk._core import native, solve_topk
from sparsetopk._maths.operator import MASK, Operator

needs_core = pytest.mark.skipif(native is None, reason="the compiled core is not there")


def steep_rows():
    rng = np.random.default_rng(0)
    k = rng.choice([1.0, 5.0, 5.5, 20.0, 40.0], size=(300, 1))
    return rng.normal(size=(300, 64)), k


def assert_sums(y, k, tolerance=1e-9):
    assert (np.abs(y.sum(-1, keepdims=True) - k) / k).max() <= tolerance


@pytest.mark.parametrize("p", [3.0, 6.0, 12.0, 20.0])
@pytest.mark.parametrize("lam", [1e-3, 0.1, 10.0])
@pytest.mark.parametrize("in_core", [True, False])
def test_the_sum_is_k_for_large_p(p, lam, in_core, monkeypatch):
    x, k = steep_rows()
    if not in_core:
        monkeypatch.setattr(core, "native", None)
    assert_sums(sparsetopk.topk_mask(x, k, lam, p=p), k)


@pytest.mark.parametrize("p", [3.0, 12.0])
def test_the_sum_is_k_in_array_operations(p, monkeypatch):
    """Of torch, as on other devices, and of XLA."""
    x, k = steep_rows()
    jax = pytest.importorskip("jax")
    import sparsetopk.jax
    from jax_ways import in_xla_operations

    with in_xla_operations():
        run = jax.jit(lambda x, k: sparsetopk.jax.topk_mask(x, k, 0.1, p=p))
        assert_sums(np.asarray(run(x, k)), k)
    torch = pytest.importorskip("torch")
    from sparsetopk.torch import topk_mask
    from sparsetopk.torch._fused import rows

    monkeypatch.setattr(rows, "takes", lambda *_: False)
    assert_sums(topk_mask(torch.from_numpy(x), torch.from_numpy(k), 0.1, p=p).numpy(), k)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("topk_mask", {}),
        ("topk_mask", {"two_sided": True}),
        ("topk_sign", {}),
        ("topk_mag", {}),
        ("topk_mag", {"debias": False}),
    ],
)
@pytest.mark.parametrize("p", [1.2, 2.0, 3.0, 6.0])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_cotangents_are_finite(name, options, p, dtype):
    limit = float(np.finfo(dtype).max)
    for scale in (0.0, 1e-5, 1.0, 1e20, 1e38):
        x = np.array([3.0, 3.0, 1.0, -2.0, 0.0]) * scale
        x = np.clip(x, -limit, limit).astype(dtype)
        for lam in (1e-10, 1e-5, 1.0, 1e10):
            for k in (1.0, 2.5, 5.0):
                g = np.array([1, -2, 3, 4, 5], dtype)
                found = getattr(sparsetopk, name + "_vjp")(x, k, lam, dy=g, p=p, **options)
                assert np.isfinite(found.x).all(), (x, lam, k)
                assert np.isfinite(found.k), (x, lam, k)
                assert np.isfinite(found.lam), (x, lam, k)


@pytest.mark.parametrize("p", [1.1, 1.2, 1.5])
def test_debiased_magnitude_close_to_a_whole_k(p):
    torch = pytest.importorskip("torch")
    st = pytest.importorskip("sparsetopk.torch")
    x = np.random.default_rng(1).normal(size=(200, 12)).astype(np.float32)
    for above in (1e-6, 1e-7, 1e-8):
        k = 5 + above
        want = sparsetopk.topk_mag(x.astype(np.float64), k, 1.0, p=p)
        y = st.topk_mag(torch.from_numpy(x), k, 1.0, p=p)
        assert np.abs(y.numpy() - want).max() <= 1e-4


@needs_core
def test_a_long_call_can_be_stopped():
    x = np.random.default_rng(0).normal(size=(20_000, 1000))
    one = np.ones((len(x), 1))
    native.entries_read()
    threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    # What a shell starts in the background ignores the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):  # all of it takes a second or two
            solve_topk(Operator(MASK, 5.0), x, 100 * one, 10 * one)
    finally:
        signal.signal(signal.SIGINT, before)
    assert native.entries_read() < x.size


def test_tangents_are_finite_for_tiny_lam(st):
    """Where t = (x - v)/lam is so large that its powers overflow."""
    x, k = np.array([[3.0, 2.0, 1.0, 0.5]]), np.array([[2.0]])
    lam, one = np.array([[1e-17]]), np.ones((1, 1))
    for name in ("topk_mask", "topk_sign", "topk_mag"):
        dy = getattr(st, name + "_jvp")(x, k, lam, dx=np.ones_like(x), dk=one, dlam=one, p=1.05)
        want = [[1.0, 1.0, 0.0, 0.0]] if name == "topk_mag" else np.zeros_like(x)
        np.testing.assert_array_equal(dy, want)


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_magnitudes_keep_their_digits_for_tiny_lam(st, scale):
    """The block is as wide as lam v: what is found in units of lam is not near enough."""
    x = scale * np.array([2500.0, -0.8])
    found = st.topk_mag(x, 1.5, 1e-23)
    np.testing.assert_allclose(found, x * [1.0, 0.5], rtol=1e-12)


def test_a_threshold_that_starts_at_zero_is_not_held_there():
    """Where lam is the size of the entries, the first guess of a threshold is 0, and it moves on."""
    x = 1 + 1e-7 * np.random.default_rng(0).integers(0, 6, size=(1, 33))
    g, dx = np.random.default_rng(1).normal(size=(2, 1, 33))
    dy = sparsetopk.topk_sign_jvp(x, 32.0, 1.0, dx=dx)
    found = sparsetopk.topk_sign_vjp(x, 32.0, 1.0, dy=g).x
    np.testing.assert_allclose((g * dy).sum(), (found * dx).sum(), rtol=1e-9)


@pytest.mark.parametrize("p", [2.5, 6.0])
def test_choose_lam_leaves_as_many_fractional_for_large_p(p):
    x = np.random.default_rng(0).normal(size=(60, 64))
    lam = sparsetopk.choose_lam(x, 10, fractional=8, p=p)
    y = sparsetopk.topk_mask(x, 10, lam, p=p)
    assert (((y > 0) & (y < 1)).sum(axis=-1) >= 8).all()
