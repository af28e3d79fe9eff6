"""Thousands of rows at once, by NumPy, torch and JAX, with and without the core, against float64.

The reference here is the equation of the threshold, solved by SciPy, and the closed form of the
derivative as docs/maths.md has it, written out in NumPy: it shares nothing with the package.
"""

from __future__ import annotations

import contextlib
import re
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
from scipy.optimize import elementwise

import sparsetopk
from sparsetopk import _core as core

PS = (2.0, 1.5, 4 / 3, 1.2)
KINDS = ("mask", "two-sided", "magnitude", "debiased", "sign")
FUNCTIONS = {"mask": "topk_mask", "two-sided": "topk_mask", "sign": "topk_sign"}
LENGTHS = (1, 2, 7, 8, 9, 16, 17, 64, 257)
# Where rows fill vectors, lanes or tiles of the core, and one entry to either side.
EDGES = sorted({2**i + j for i in range(3, 14) for j in (-1, 0, 1)} | {1, 2, 383, 384, 385})


# Machine code as users have it. The Makefile has other tests do without: it takes longer to make than
# to run.
OPTIMISED = {"xla_backend_optimization_level": 3}


class Batch(NamedTuple):
    """Rows, each with its k and lam, and a cotangent; all of them float32 numbers."""

    x: np.ndarray
    k: np.ndarray
    lam: np.ndarray
    g: np.ndarray


def batch(kind: str, p: float, n: int) -> Batch:
    return rows(n, 20_000 if n == 33 else 2_000 if n in LENGTHS else 17 + 20_000 // n)


@cache
def rows(n: int, m: int) -> Batch:
    rng = np.random.default_rng(n)
    k = rng.choice([0.0, 1.0, min(5.0, n), min(5.5, n), n / 2, n], size=(m, 1))
    lam = rng.choice([1e-3, 0.1, 0.1, 1.0], size=(m, 1))
    x, g = rng.normal(size=(2, m, n))
    return Batch(*(v.astype(np.float32).astype(np.float64) for v in (x, k, lam, g)))


def options(kind: str, p: float) -> dict[str, object]:
    extra = {"two-sided": {"two_sided": True}, "magnitude": {"debias": False}}
    return {"p": p} | extra.get(kind, {})


def bisect(lo, hi, is_below, steps=64):
    for _ in range(steps):
        middle = (lo + hi) / 2
        below = is_below(middle)
        lo, hi = np.where(below, middle, lo), np.where(below, hi, middle)
    return (lo + hi) / 2


def response(t, kind, e):
    """S and S', by the definition: S^-1(y) = y^(1/e) - (1-y)^(1/e) for the two-sided ones."""
    if kind != "two-sided":
        t = np.maximum(t, 0.0)
        return t**e, np.where(t > 0, e * np.where(t > 0, t, 1.0) ** (e - 1), 0.0)
    nodes = _table(e)
    size = nodes.shape[1] - 1
    at = (1 - np.minimum(np.abs(t), 1.0)) * size
    i = np.minimum(at.astype(int), size - 1)
    r = at - i
    (c0, d0), (c1, d1) = nodes[:, i], nodes[:, i + 1]
    c = c0 + r * d0 + r * r * (3 * (c1 - c0) - 2 * d0 - d1 + r * (2 * (c0 - c1) + d0 + d1))
    y = np.where(np.abs(t) < 1, np.maximum(c, 0.0), 0.0) ** e
    rest = 1 - 1 / e
    slope = e * y**rest / (1 + (y / (1 - y)) ** rest)
    return np.where(t > 0, 1 - y, y), np.where(np.abs(t) < 1, slope, 0.0)


@cache
def _table(e: float, size: int = 1 << 14) -> np.ndarray:
    """c = y^(1/e) with c - (1 - y)^(1/e) = t for t from -1 to 0 in steps, by bisection; and dc/dt.

    c is so smooth that a cubic between the steps is exact to rounding.
    """
    t = np.linspace(-1, 0, size + 1)
    c = bisect(0 * t, 0 * t + 0.5 ** (1 / e), lambda c: c - (1 - c**e) ** (1 / e) < t)
    y = c**e
    return np.stack([c, 1 / (1 + (y / (1 - y)) ** (1 - 1 / e)) / size])


class Expected(NamedTuple):
    y: np.ndarray
    dx: np.ndarray
    clear: np.ndarray  # rows in which no entry is so close to a kink that rounding decides


def amid_gap(a, k, lam, top, zero, v):
    """Where k entries are whole and the others 0, any threshold in between will do: the middle one, at
    which no entry is close to a kink."""
    order = np.argsort(-a, axis=-1)
    s, top = (np.take_along_axis(values, order, axis=-1) for values in (a, top))
    i = np.clip(k, 1, max(a.shape[-1] - 1, 1)).astype(int) - 1
    high = np.take_along_axis(s - lam * top, i, axis=-1)
    low = np.take_along_axis(s, np.minimum(i + 1, a.shape[-1] - 1), axis=-1) - lam * zero
    free = (k == i + 1) & (k < a.shape[-1]) & (high - low > 0)
    return np.where(free, (low + high) / 2, v)


@cache
def expected(kind: str, p: float, n: int) -> Expected:
    x, k, lam, g = batch(kind, p, n)
    e, curved = 1 / (p - 1), kind in ("magnitude", "debiased")
    even = curved or kind == "sign"
    a, sign = (np.abs(x), np.sign(x)) if even else (x, np.ones_like(x))
    zero = -1.0 if kind == "two-sided" else 0.0
    # Where an entry stands alone: S(t) = phi'(a - lam t).
    top = np.ones_like(a)
    if curved:
        top = np.minimum(a / lam, a ** (1 / e))
        for _ in range(12):  # of a convex function, from above: Newton's method does not overshoot
            top = top - (top**e + lam * top - a) / (e * top ** (e - 1) + lam)

    def surplus(v, i):
        """sum_j z_j - k in rows i, with z = 1 from the top on and S(t)/phi'(v) below."""
        v = v[:, None]
        t = (a[i] - v) / lam[i]
        whole = t >= top[i]
        share = response(np.where(whole, 0.0, t), kind, e)[0]
        share = np.where(whole, 0.0, share / np.maximum(v, 1e-300) if curved else share)
        # Apart: beside those selected whole, what little the others have would be rounded away.
        return share.sum(-1) - (k[i, 0] - whole.sum(-1))

    reach = np.abs(a).max(-1) + lam[:, 0]
    ends = 0 * reach if even else -reach - lam[:, 0], reach + lam[:, 0]
    v = elementwise.find_root(surplus, ends, args=(np.arange(len(a)),)).x[:, None]
    v = amid_gap(a, k, lam, top, zero, v)
    t = np.where(k >= n, np.inf if kind != "sign" else a / lam, (a - v) / lam)
    if kind == "sign":
        pinned = np.minimum(response(a / lam, kind, e)[0], 1).sum(-1, keepdims=True) <= k
        t = np.where(pinned, a / lam, t)
    t = np.where(k == 0, -np.inf, t)
    inside, above = (t > zero) & (t < top), t >= top
    finite = np.where(inside, t, 0.0)
    s, slope = response(finite, kind, e)
    slope = np.where(inside, slope, 0.0)
    b = lam if kind == "debiased" else 0.0
    whole = a if kind == "debiased" else top**e if curved else np.ones_like(a)
    y = sign * np.where(inside, s + b * finite, np.where(above, whole, 0.0))

    left = k - above.sum(-1, keepdims=True)
    total = slope.sum(-1, keepdims=True) + (lam * left if curved else 0.0)
    gs = sign * g
    mean = (np.where(inside, slope + b, 0.0) * gs).sum(-1, keepdims=True) / np.where(
        total > 0, total, 1.0
    )
    if kind == "sign":
        mean = np.where(pinned, 0.0, mean)
    dx = np.where(inside, (slope * (gs - mean) + b * gs) / lam, 0.0)
    of_whole = np.zeros_like(a)
    if curved:
        rise = e * top ** (e - 1)
        of_whole = np.ones_like(a) if kind == "debiased" else rise / (rise + lam)
    dx = sign * np.where(above, of_whole * gs, dx)
    # The ends of S, and blocks that are one by rounding alone.
    near = np.minimum(np.abs(t - zero), np.abs(t - top)) < 2e-3 * np.maximum(top, 1e-3)
    size = inside.sum(-1, keepdims=True)
    hidden = (size > 0) & (np.minimum(left, size - left) < 1e-3)
    return Expected(y, dx, ~(near.any(-1, keepdims=True) | hidden | (k >= n) | (k == 0)))


def function(module, kind):
    return getattr(module, FUNCTIONS.get(kind, "topk_mag"))


def by_numpy(kind, p, at):
    f = FUNCTIONS.get(kind, "topk_mag")
    y = getattr(sparsetopk, f)(at.x, at.k, at.lam, **options(kind, p))
    dx = getattr(sparsetopk, f + "_vjp")(at.x, at.k, at.lam, dy=at.g, **options(kind, p)).x
    return y, dx


def by_torch(kind, p, at, dtype):
    torch = pytest.importorskip("torch")
    st = pytest.importorskip("sparsetopk.torch")
    x, k, lam, g = (torch.from_numpy(v).to(dtype) for v in at)
    x.requires_grad_()
    y = function(st, kind)(x, k.double(), lam.double(), **options(kind, p))
    dx = torch.autograd.grad(y, x, g)[0]
    return y.detach().double().numpy(), dx.double().numpy()


def by_torch_operations(kind, p, at, dtype, monkeypatch):
    """As another device computes it, in ordinary operations and the dtype of x."""
    from sparsetopk.torch._fused import rows as fused
    from sparsetopk.torch._rows import arguments
    from sparsetopk.torch._solvers import ops, vectorized

    monkeypatch.setattr(arguments, "compute_dtype", lambda x: dtype)
    monkeypatch.setattr(fused, "takes", lambda *_: False)
    monkeypatch.setattr(ops, "threshold", vectorized.state_of)
    return by_torch(kind, p, at, dtype)


def by_jax(kind, p, at, dtype, in_core):
    jax = pytest.importorskip("jax")
    st = pytest.importorskip("sparsetopk.jax")
    from jax_ways import in_xla_operations

    def both(x, k, lam, g):
        y, pull = jax.vjp(lambda x: function(st, kind)(x, k, lam, **options(kind, p)), x)
        return y, pull(g)[0]

    optimised = jax.jit(both, compiler_options=OPTIMISED)
    with contextlib.nullcontext() if in_core else in_xla_operations():
        found = optimised(*(jax.numpy.asarray(v, dtype) for v in at))
    return tuple(np.asarray(v, np.float64) for v in found)


def assert_close(found, kind, p, n, eps):
    """S and its argument t are known to a few roundings, and S is no steeper than e = 1/(p - 1) for a
    mask; for magnitudes it is up to e v/t. Derivatives are S'/lam, whose own slope is e/lam."""
    y, dx = found
    want, at = (
        type(v)(*(part[: len(y)] for part in v)) for v in (expected(kind, p, n), batch(kind, p, n))
    )
    e = max(1.0, 1 / (p - 1))
    scale = e * (1 + np.abs(at.x).max(-1, keepdims=True))
    error = np.abs(y - want.y) / (eps * scale)
    assert error.max() <= 256, (error.max(), np.argwhere(error > 256)[:5].tolist())
    rows = want.clear[:, 0]
    steep = scale * e * (1 + 1 / at.lam) * np.abs(at.g).sum(-1, keepdims=True)
    error = (np.abs(dx - want.dx) / (eps * steep))[rows]
    assert rows.mean() > 0.02 or n < 8
    assert error.max(initial=0) <= 4096, (error.max(), np.argwhere(error > 4096)[:5].tolist())


EPS32, EPS64 = 2.0**-23, 1e-13


def lengths(kind):
    """The two-sided response is costly to define: fewer rows of it."""
    return (33, 9, 64) if kind == "two-sided" else (33, *LENGTHS)


every_case = pytest.mark.parametrize("p", PS)
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_case
@every_kind
def test_numpy(kind, p):
    for n in lengths(kind):
        assert_close(by_numpy(kind, p, batch(kind, p, n)), kind, p, n, EPS64)


@every_case
@every_kind
def test_numpy_without_the_core(kind, p, monkeypatch):
    """In array operations, one after the other: 6,000 rows of each kind, and so 30,000 of every p."""
    monkeypatch.setattr(core, "native", None)
    for n in (33, 9):
        at = Batch(*(v[:4_000] for v in batch(kind, p, n)))
        assert_close(by_numpy(kind, p, at), kind, p, n, EPS64)


@every_case
@every_kind
@pytest.mark.parametrize("bits", [32, 64])
def test_torch(kind, p, bits):
    torch = pytest.importorskip("torch")
    dtype, eps = (torch.float32, EPS32) if bits == 32 else (torch.float64, EPS64)
    for n in lengths(kind):
        assert_close(by_torch(kind, p, batch(kind, p, n), dtype), kind, p, n, eps)


@every_kind
@pytest.mark.parametrize("bits", [32, 64])
def test_edges_of_blocks(kind, bits):
    torch = pytest.importorskip("torch")
    dtype, eps = (torch.float32, EPS32) if bits == 32 else (torch.float64, EPS64)
    p = 1.5 if kind == "sign" else 2.0
    for n in EDGES:
        assert_close(by_torch(kind, p, batch(kind, p, n), dtype), kind, p, n, eps)


@pytest.mark.parametrize("kind", ["mask", "sign", "two-sided"])
@pytest.mark.parametrize("p", [1.5, 4 / 3, 1.2])
@pytest.mark.parametrize("bits", [32, 64])
def test_edges_of_lanes(kind, p, bits):
    """Short rows of another p are solved many at a time too."""
    torch = pytest.importorskip("torch")
    dtype, eps = (torch.float32, EPS32) if bits == 32 else (torch.float64, EPS64)
    for n in (n for n in EDGES if n <= 385):
        assert_close(by_torch(kind, p, batch(kind, p, n), dtype), kind, p, n, eps)


@every_kind
@pytest.mark.parametrize("p", [2.0, 1.5, 1.2])
@pytest.mark.parametrize("bits", [16, 32, 64])
@pytest.mark.parametrize("n", [1, 8, 13, 100, 400])
def test_any_number_of_rows(kind, p, bits, n):
    """Rows that share vectors do not see each other, however many there are."""
    torch = pytest.importorskip("torch")
    dtype = {16: torch.bfloat16, 32: torch.float32, 64: torch.float64}[bits]
    at = batch(kind, p, n)
    y, dx = by_torch(kind, p, Batch(*(v[:70] for v in at)), dtype)
    for m in range(16, 53):  # fewer rows of 100 entries are solved one by one
        part = by_torch(kind, p, Batch(*(v[70 - m : 70] for v in at)), dtype)
        np.testing.assert_array_equal(part[0], y[70 - m :])
        np.testing.assert_array_equal(part[1], dx[70 - m :])


@every_case
@every_kind
@pytest.mark.parametrize("bits", [32, 64])
def test_torch_operations(kind, p, bits, monkeypatch):
    torch = pytest.importorskip("torch")
    dtype, eps = (torch.float32, EPS32) if bits == 32 else (torch.float64, EPS64)
    for n in (33, 9):
        found = by_torch_operations(kind, p, batch(kind, p, n), dtype, monkeypatch)
        assert_close(found, kind, p, n, eps)


@every_case
@every_kind
@pytest.mark.parametrize("way", ["core", "XLA operations"])
def test_jax(kind, p, way):
    from sparsetopk.jax._solvers import ffi

    if way == "core" and not ffi.available():
        pytest.skip("the core was built without its handlers for XLA")
    found = by_jax(kind, p, batch(kind, p, 33), np.float32, way == "core")
    assert_close(found, kind, p, 33, EPS32)


def test_xla_optimises_also_where_machine_code_is_not_optimised():
    """As the Makefile has it for most tests: what XLA rewrites, it rewrites there too."""
    jax = pytest.importorskip("jax")
    st = pytest.importorskip("sparsetopk.jax")
    from jax_ways import in_xla_operations

    def program(level):
        f = jax.grad(lambda x: (st.topk_mask(x, 5.5, 0.3, p=1.5) ** 2).sum())
        options = {"xla_backend_optimization_level": level}
        text = (
            jax.jit(f, compiler_options=options).lower(jax.numpy.ones((4, 33))).compile().as_text()
        )
        return re.sub(r"metadata={[^}]*}", "", text).split("\n", 1)[1]

    with in_xla_operations():
        found, users_have = (program(level) for level in (0, 3))
    assert "fusion(" in found
    assert found == users_have


@pytest.mark.parametrize("p", [2.0, 4 / 3, 1.2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [33, 100])
def test_short_rows_are_as_long_ones(kind, n, p):
    """Also where k is whole and nothing is left for a block, so that the gradient jumps close by: with
    entries that compete with none, a row is long, and solved in another way."""
    torch = pytest.importorskip("torch")
    at = batch(kind, p, n)
    at = Batch(*(v[at.k[:, 0] < n] for v in at))
    absent = -100.0 if kind in ("mask", "two-sided") else 0.0
    more = np.full((at.x.shape[0], 500 - n), absent)
    long = at._replace(x=np.append(at.x, more, axis=-1), g=np.append(at.g, 0 * more, axis=-1))
    short = by_torch(kind, p, at, torch.float64)
    for one, other in zip(short, by_torch(kind, p, long, torch.float64), strict=True):
        scale = np.abs(other).max(axis=-1, keepdims=True) + 1e-3
        np.testing.assert_allclose(one / scale, other[:, :n] / scale, rtol=0, atol=1e-9)
