"""The two-sided mask for any p, by what makes it optimal: r'(y_i) = (x_i - v)/lam wherever 0 < y_i < 1.

So there is no solver to compare with. With a = p - 1, r'(y) = y^a - (1-y)^a, and S' = 1/r''.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

import sparsetopk
from sparsetopk._core import native
from sparsetopk._maths.operator import TWO_SIDED, Operator, exponent

PS = (1.05, 1.1, 1.2, 4 / 3, 1.7, 1.95, 2.05, 2.5, 3.0, 4.0, 6.0, 12.0, 20.0)
every_p = pytest.mark.parametrize("p", PS)


def rows(m=400, n=33, seed=0):
    rng = np.random.default_rng(seed)
    x, g = rng.normal(size=(2, m, n))
    k = rng.choice([1.0, 3.0, 7.5, 16.0, 32.9], size=(m, 1))
    lam = rng.choice([1e-3, 0.1, 1.0, 30.0], size=(m, 1))
    return tuple(v.astype(np.float32).astype(np.float64) for v in (x, k, lam, g))


def steepest(p):
    """The largest slope of S: at 1/2 or at the ends."""
    a = p - 1
    return max(2.0 ** (a - 2) / a, 1 / a if a >= 1 else 1.0)


def threshold(x, y, lam, p):
    """v of every entry with 0 < y < 1; NaN where y is 0 or 1, or says nothing of v."""
    a = p - 1
    tells = (y > 1e-12) & (y < 1 - 1e-3)
    y = np.where(tells, y, 0.5)
    return np.where(tells, x - lam * (y**a - (1 - y) ** a), np.nan)


def gradient(y, lam, g, p):
    a = p - 1
    inside = (y > 0) & (y < 1)
    y = np.where(inside, y, 0.5)
    slope = np.where(inside, 1 / (a * (y ** (a - 1) + (1 - y) ** (a - 1))), 0.0)
    total = slope.sum(-1, keepdims=True)
    mean = (slope * g).sum(-1, keepdims=True) / np.where(total > 0, total, 1.0)
    return slope * (g - mean) / lam


def by_numpy(x, k, lam, g, p):
    y = sparsetopk.topk_mask(x, k, lam, p=p, two_sided=True)
    return y, sparsetopk.topk_mask_vjp(x, k, lam, dy=g, p=p, two_sided=True).x


def by_torch(x, k, lam, g, p, dtype="float64"):
    torch = pytest.importorskip("torch")
    st = pytest.importorskip("sparsetopk.torch")
    dtype = getattr(torch, dtype)
    at = torch.tensor(x, dtype=dtype, requires_grad=True)
    y = st.topk_mask(at, torch.tensor(k), torch.tensor(lam), p=p, two_sided=True)
    y.backward(torch.tensor(g, dtype=dtype))
    return y.detach().double().numpy(), at.grad.double().numpy()


def by_jax(x, k, lam, g, p):
    jax = pytest.importorskip("jax")
    st = pytest.importorskip("sparsetopk.jax")
    x, k, lam, g = (jax.numpy.asarray(v, np.float32) for v in (x, k, lam, g))
    y, pull = jax.vjp(lambda x: st.topk_mask(x, k, lam, p=p, two_sided=True), x)
    return np.asarray(y, np.float64), np.asarray(pull(g)[0], np.float64)


@every_p
@pytest.mark.parametrize("solve", [by_numpy, by_torch])
def test_float64_is_optimal(solve, p):
    x, k, lam, g = rows()
    y, dx = solve(x, k, lam, g, p)
    assert np.abs(y.sum(-1, keepdims=True) - k).max() <= 1e-10 * steepest(p)
    v = threshold(x, y, lam, p)
    clear = ~np.isnan(v).all(-1, keepdims=True)
    v = np.where(clear, v, 0.0)
    low, high = np.nanmin(v, -1, keepdims=True), np.nanmax(v, -1, keepdims=True)
    # y is rounded to 1e-16 of itself, v so to a of that; and 1 - y to as much absolutely.
    assert ((high - low) / (lam + np.abs(x).max())).max() <= 1e-12
    slack = 1e-9 * (lam + np.abs(x).max())
    assert np.all((y > 0) | (x <= low - lam + slack) | ~clear)
    # What is 1 up to rounding is r'(1 - 1e-16) above v at least.
    rounded = lam * 2e-16 ** min(p - 1, 1.0)
    assert np.all((y < 1) | (x >= high + lam - rounded - slack) | ~clear)
    want = gradient(y, lam, g, p)
    # Near 1 the distance of y to it has lost its digits, and S' with it.
    sure = (y < 1 - 1e-6).all(-1, keepdims=True) & clear
    error = np.abs(dx - want) * lam / (steepest(p) * np.abs(g).max())
    assert sure.mean() > 0.1
    assert np.where(sure, error, 0.0).max() <= 1e-9


@every_p
@pytest.mark.parametrize("solve", ["torch", "jax"])
def test_float32_is_as_float64(solve, p):
    x, k, lam, g = rows()
    want = by_numpy(x, k, lam, g, p)
    found = by_jax(x, k, lam, g, p) if solve == "jax" else by_torch(x, k, lam, g, p, "float32")
    scale = steepest(p) * (1 + np.abs(x).max(-1, keepdims=True) / lam)
    if solve == "torch":  # which computes in float64, and rounds x and y alone
        scale = 1.0
    assert (np.abs(found[0] - want[0]) / scale).max() <= 1e-6
    if solve == "torch":
        # The sum of y is met to 1e-7: where it hardly depends on v, that is all that is known of S'.
        size = np.abs(want[1]).max(-1, keepdims=True) + 1e-3 * np.abs(g).max() / lam
        assert (np.abs(found[1] - want[1]) / size).max() <= 1e-5


@pytest.mark.parametrize("p", [1.05, 1.2, 1.5, 1.7])
@np.errstate(all="ignore")
def test_torch_operations_where_s_is_flat(p):
    """With next to nothing to share, or all but that, y is at an end of S: the sum has its digits."""
    pytest.importorskip("torch")
    from fuzz_oracle import Rows
    from fuzz_paths import by_torch_operations

    rng, m = np.random.default_rng(0), 60
    for n in (17, 129):
        x = np.where(np.arange(m)[:, None] % 2 > 0, 0.7, rng.normal(size=(m, n)))
        k = rng.choice([2.0**-20, 1e-3, 1.001, n - 1e-3, n - 2.0**-20], size=(m, 1))
        lam, one = rng.choice([1e-3, 0.3, 10.0], size=(m, 1)), np.ones((m, 1))
        found = by_torch_operations("two-sided", p, "float64", Rows(x, k, lam, x, x, one, one))
        off = np.abs(found.answer.y.sum(-1, keepdims=True) - k)
        assert np.all(off <= 2.0**-52 * (64 * np.maximum(k, 1) + n))  # as docs/maths.md promises


@every_p
def test_it_is_in_the_core(p):
    assert Operator(TWO_SIDED, exponent(p)).is_compiled


@pytest.mark.parametrize("p", [1.2, 6.0])
def test_it_costs_little_more_than_a_closed_form(p):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(100, 1000))

    def seconds(p):
        times = []
        for _ in range(7):
            start = time.process_time()
            sparsetopk.topk_mask(x, 100, 1.0, p=p, two_sided=True)
            times.append(time.process_time() - start)
        return min(times)

    if native is None:
        pytest.skip("the compiled core is not there")
    assert seconds(p) <= 10 * seconds(1.5)
