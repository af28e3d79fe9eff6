"""With a large lam the threshold of a magnitude is tiny beside the entries: what hangs on it keeps its
digits, on every path. And other rows whose digits hang on one number, against closed forms."""

from __future__ import annotations

import numpy as np
import pytest

import sparsetopk
from levels import printed_at_all_levels
from sparsetopk import _core as core

LAM = 1e12


@pytest.fixture(params=["core", "operations"])
def path(request, monkeypatch):
    if request.param == "operations":
        monkeypatch.setattr(core, "native", None)


def rows(n):
    rng = np.random.default_rng(n)
    return rng.uniform(1.0, 2.0, size=(3, n)), rng.normal(size=(3, n))


@pytest.mark.parametrize("n", [5, 68, 500])
@pytest.mark.usefixtures("path")
def test_derivative_in_k(n):
    """All entries share k, so that v = sum(a)/(n + lam k): it was found to 1e-8 of itself."""
    (a, g), k = rows(n), 0.3
    v, mean = a.sum(-1) / (n + LAM * k), g.sum(-1) / (n + LAM * k)
    found = sparsetopk.topk_mag_vjp(a, np.full((3, 1), k), LAM, dy=g, debias=False).k[:, 0]
    np.testing.assert_allclose(found, v * mean, rtol=1e-12)


@pytest.mark.parametrize("n", [68, 4097])
@pytest.mark.usefixtures("path")
def test_one_entry_beside_many_that_are_whole(n):
    """The smallest is the block alone: thousands that are whole cost it no digits."""
    (a, g), k = rows(n), n - 0.001
    a[:, 0] = 0.5
    left = k - (n - 1)
    v, mean = a[:, :1] / (1 + LAM * left), g[:, :1] / (1 + LAM * left)
    found = sparsetopk.topk_mag_vjp(a, np.full((3, 1), k), LAM, dy=g, debias=False).k
    np.testing.assert_allclose(found, v * mean, rtol=1e-12)


@pytest.mark.parametrize("n", [1, 5, 500])
@pytest.mark.usefixtures("path")
def test_debiased_derivative_in_lam(n):
    """y = S(t) + a - v with t = (a - v)/lam and v = sum(a)/(n + lam k): terms as large as a cancel."""
    (a, g), k, dlam = rows(n), 0.3, 0.7 * LAM
    v = a.sum(-1, keepdims=True) / (n + LAM * k)
    dv = -k * v / (n + LAM * k)
    want = -(a - v) / LAM**2 - dv / LAM - dv
    dy = sparsetopk.topk_mag_jvp(a, k, LAM, dlam=dlam)
    np.testing.assert_allclose(dy, want * dlam, rtol=1e-12)
    found = sparsetopk.topk_mag_vjp(a, k, np.full((3, 1), LAM), dy=g).lam
    scale = (np.abs(g * want)).sum(-1, keepdims=True)
    np.testing.assert_allclose(found / scale, (g * want).sum(-1, keepdims=True) / scale, atol=1e-12)


@pytest.mark.parametrize("p", [3.0, 6.0])
@pytest.mark.usefixtures("path")
def test_little_is_left_where_s_is_steep(p):
    """t = (k - 1)^(p-1) is below what the pivot is rounded by, at first: all of k - 1 was missing."""
    x = np.array([28.5, 3.7, 1.8, 1.3, 0.4, 0.4, 0.1, 0.1, -0.6, -0.9, -1.6])
    for k in (1.0 + 2.0**-20, 1.00001, 1.001):
        y = sparsetopk.topk_mask(x, k, 10.0, p=p)
        np.testing.assert_allclose(y[:2], [1.0, k - 1.0], rtol=1e-9)


def test_magnitudes_are_never_above_their_entry():
    """Not at the end of what there is either, where sums overflow: -inf came out."""
    x = np.random.default_rng(0).uniform(-1, 1, size=(200, 2))
    x = np.copysign(1.797e308 * (1 - 0.05 * np.abs(x)), x)
    for k in (1.999, 2 - 1e-9):
        for debias in (True, False):
            y = sparsetopk.topk_mag(x, k, 1.0, debias=debias)
            assert (np.abs(y) <= np.abs(x)).all()


PROGRAM = """
import hashlib, numpy as np, sparsetopk as st
rng, found = np.random.default_rng(0), hashlib.sha256()
for n in (1, 7, 16, 33, 100, 400, 5000):
    x, dy = rng.normal(size=(2, 20, n))
    for dtype in (np.float32, np.float64):
        for f in ("topk_mask", "topk_mag", "topk_sign"):
            for p in (1.2, 4 / 3, 1.5, 2.0, 3.0):
                at, g = (x.astype(dtype), 0.3 * n, 0.2), dy.astype(dtype)
                for y in (getattr(st, f)(*at, p=p), *getattr(st, f + "_vjp")(*at, dy=g, p=p)):
                    found.update(np.ascontiguousarray(y).tobytes())
print(found.hexdigest())
"""


def test_instruction_sets_agree_to_the_last_bit():
    """Fused multiply-adds, which only some have, made them differ."""
    assert len(printed_at_all_levels(PROGRAM)) == 1
