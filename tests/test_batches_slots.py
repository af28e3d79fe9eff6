"""The rows of ``test_batches`` in slots, their values, and the lam chosen for them: calls of the core.

Against the same float64, with and without the core.
"""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

import sparsetopk
from sparsetopk import _core as core
from test_batches import EPS32, PS, batch, expected

jax = pytest.importorskip("jax")
st = pytest.importorskip("sparsetopk.jax")

from jax_ways import in_xla_operations
from sparsetopk.jax._solvers import ffi

every_p = pytest.mark.parametrize("p", PS)
every_way = pytest.mark.parametrize("way", ["core", "XLA operations"])
OPTIONS = {"mask": {}, "two-sided": {"two_sided": True}, "debiased": {"magnitude": True}}
every_kind = pytest.mark.parametrize("kind", OPTIONS)


def some_rows(at, want, way):
    """A quarter of the rows where XLA's operations compute: 20,000 for every p, all kinds together."""
    m = len(at.x) if way == "core" else len(at.x) // 4
    return (type(v)(*(part[:m] for part in v)) for v in (at, want))


def computed(f, way, *arrays):
    """f of float32 arrays, in float64."""
    if way == "core" and not ffi.available():
        pytest.skip("the core was built without its handlers for XLA")
    with contextlib.nullcontext() if way == "core" else in_xla_operations():
        found = jax.jit(f)(*(jax.numpy.asarray(v, np.float32) for v in arrays))
    return [np.asarray(v, np.float64 if v.dtype == np.float32 else None) for v in found]


def vjp(kind, p, at, dy):
    """In float64, by NumPy."""
    if kind == "debiased":
        return sparsetopk.topk_mag_vjp(at.x, at.k, at.lam, dy=dy, p=p)
    return sparsetopk.topk_mask_vjp(at.x, at.k, at.lam, dy=dy, p=p, **OPTIONS[kind])


@every_way
@every_p
@every_kind
def test_slots_of_jax(kind, p, way):
    """Values, indices, and what is left out, with the cotangents of x of both."""
    at, want = some_rows(batch(kind, p, 33), expected(kind, p, 33), way)
    capacity = 12
    of_values, of_dropped = at.g[:, :capacity], at.g[:, -1]

    def both(x, k, lam, of_values, of_dropped):
        def slots(x):
            found = st.topk_select(x, k, lam, p=p, capacity=capacity, **OPTIONS[kind])
            return (found.values, found.dropped), found.indices

        (values, dropped), pull, indices = jax.vjp(slots, x, has_aux=True)
        return values, indices, dropped, *pull((of_values, of_dropped))

    values, indices, dropped, dx = computed(both, way, at.x, at.k, at.lam, of_values, of_dropped)
    assert (np.diff(indices, axis=-1) > 0).all()
    has_slot = np.zeros(at.x.shape, bool)
    np.put_along_axis(has_slot, indices, True, axis=-1)
    e = max(1.0, 1 / (p - 1))
    scale = e * (1 + np.abs(at.x).max(-1, keepdims=True))
    close = 256 * EPS32 * scale
    assert (np.abs(values - np.take_along_axis(want.y, indices, -1)) <= close).all()
    size = np.abs(want.y)
    least = np.where(has_slot, size, np.inf).min(-1, keepdims=True)
    assert (has_slot | (size <= least + 2 * close)).all()  # those without a slot are smaller
    left_out = np.where(has_slot, 0.0, size).sum(-1)
    assert (left_out > 0).mean() > 0.2
    assert (np.abs(dropped - left_out) <= 33 * close[:, 0]).all()
    g = np.where(has_slot, 0.0, np.sign(want.y) * of_dropped[:, None])
    np.put_along_axis(g, indices, of_values, axis=-1)
    rows = want.clear[:, 0]
    steep = scale * e * (1 + 1 / at.lam) * np.abs(at.g).sum(-1, keepdims=True)
    error = np.abs(dx - vjp(kind, p, at, g).x)[rows] / (EPS32 * steep)[rows]
    assert error.max() <= 4096, (error.max(), np.argwhere(error > 4096)[:5].tolist())


@every_way
@every_p
@pytest.mark.parametrize("kind", ["mask", "two-sided"])
def test_values_of_jax(kind, p, way):
    """<x, y> - R(y), and its gradient, which is y."""
    at, (y, *_) = some_rows(batch(kind, p, 33), expected(kind, p, 33), way)
    both = jax.vmap(
        jax.value_and_grad(lambda x, k, lam: st.topk_value(x, k, lam, p=p, **OPTIONS[kind]))
    )
    value, slope = computed(both, way, at.x, at.k[:, 0], at.lam[:, 0])
    r = y**p + (1 - y) ** p if kind == "two-sided" else y**p
    want = (at.x * y - at.lam / p * r).sum(-1)
    size = (np.abs(at.x) + at.lam).sum(-1)
    error = np.abs(value - want) / (EPS32 * size)
    assert error.max() <= 16, error.max()
    close = 256 * EPS32 * max(1.0, 1 / (p - 1)) * (1 + np.abs(at.x).max(-1, keepdims=True))
    assert (np.abs(slope - y) <= close).all()


@every_way
@every_p
@pytest.mark.parametrize("kind", ["mask", "two-sided"])
def test_losses_of_jax(kind, p, way):
    """f(x, 1_k) - <x, t> + R(t) for a label that is filled up evenly, and its gradient y - t.

    Rows that are left out have none.
    """
    at, (y, *_) = some_rows(batch(kind, p, 33), expected(kind, p, 33), way)
    labels = np.random.default_rng(0).integers(33, size=len(y))
    labels[::10] = -100
    some = (at.k[:, 0] >= 1) & (labels >= 0)

    def both(x, k, lam):
        def loss(x):
            options = {"p": p, "reduction": "none"} | OPTIONS[kind]
            return st.topk_loss(x, jax.numpy.asarray(labels), k, lam, **options)

        value, pull = jax.vjp(loss, x)
        return value, *pull(jax.numpy.ones_like(value))

    k = np.maximum(at.k, np.float32(1))
    value, slope = computed(both, way, at.x, k, at.lam)
    t = np.broadcast_to((k - 1) / 32, y.shape).copy()
    np.put_along_axis(t, np.maximum(labels, 0)[:, None], 1.0, axis=-1)

    def r(y):
        return (y**p + (1 - y) ** p if kind == "two-sided" else y**p) * at.lam / p

    want = (at.x * (y - t) - r(y) + r(t)).sum(-1)
    size = (np.abs(at.x) + at.lam).sum(-1)
    error = (np.abs(value - want) / (EPS32 * size))[some]
    assert error.max() <= 32, error.max()
    close = 256 * EPS32 * max(1.0, 1 / (p - 1)) * (1 + np.abs(at.x).max(-1, keepdims=True))
    assert (np.abs(slope - (y - t)) <= close)[some].all()
    assert not value[::10].any()
    assert not slope[::10].any()


def float64_best(kind, p, at, k, t):
    """The value and the output of the best that selects all the labels t, by NumPy."""
    others = np.where(t > 0, -np.inf, at.x)
    left = np.maximum(np.floor(k) - t.sum(-1, keepdims=True), 0) + k % 1
    options = {"p": p} | OPTIONS[kind]
    value = sparsetopk.topk_value(others, left, at.lam, **options)
    whole = (at.x * t - at.lam / p * t).sum(-1)
    return value + whole, t + sparsetopk.topk_mask(others, left, at.lam, **options)


@pytest.mark.parametrize(("way", "p"), [*(("core", p) for p in PS), ("XLA operations", 1.5)])
@pytest.mark.parametrize("targets", ["soft", "smoothed", "best"])
@pytest.mark.parametrize("kind", ["mask", "two-sided"])
def test_losses_of_jax_with_any_targets(kind, targets, p, way):
    """Weights that are filled up, labels that are smoothed, and the best that selects sets of labels."""
    at, (y, *_) = some_rows(batch(kind, p, 33), expected(kind, p, 33), way)
    rng, k = np.random.default_rng(0), np.maximum(at.k, np.float32(1))
    labels = rng.integers(33, size=len(y))
    one_hot = labels[:, None] == np.arange(33)
    options = {"p": p, "reduction": "none"} | OPTIONS[kind]
    if targets == "soft":
        given = (rng.random(y.shape) * k / 33).astype(np.float32)
        t = given.astype(np.float64)
        sums = t.sum(-1, keepdims=True)
        t = t + (1 - t) * (k - sums) / (33 - sums)
    elif targets == "smoothed":
        given, t = labels, 0.9 * one_hot + 0.1 / 33
        options |= {"label_smoothing": 0.1, "completion": None}
    else:
        more = np.roll(one_hot, 7, axis=-1) & (k >= 2)
        given = t = (one_hot | more).astype(np.float64)
        options |= {"completion": "best"}

    def both(x, k, lam):
        loss = lambda x: st.topk_loss(x, jax.numpy.asarray(given), k, lam, **options)  # noqa: E731
        value, pull = jax.vjp(loss, x)
        return value, *pull(jax.numpy.ones_like(value))

    value, slope = computed(both, way, at.x, k, at.lam)

    def r(y):
        return (y**p + (1 - y) ** p if kind == "two-sided" else y**p) * at.lam / p

    want, taken = (at.x * y - r(y)).sum(-1), t
    if targets == "best":
        best, taken = float64_best(kind, p, at, k, t)
        want = want - best
    else:
        want = want - (at.x * t).sum(-1) + (r(t).sum(-1) if targets == "soft" else 0.0)
    some = at.k[:, 0] >= 1  # others have another k here
    size = (np.abs(at.x) + at.lam).sum(-1)
    error = (np.abs(value - want) / (EPS32 * size))[some]
    assert error.max() <= 32, error.max()
    close = 512 * EPS32 * max(1.0, 1 / (p - 1)) * (1 + np.abs(at.x).max(-1, keepdims=True))
    assert (np.abs(slope - (y - taken)) <= close)[some].all()


@every_p
@pytest.mark.parametrize("descending", [True, False])
def test_lams_for_ranks_of_jax(p, descending):
    """The core in float32 and NumPy in float64 find the same."""
    x = batch("mask", p, 33).x[:2_000].copy()
    x[::7, 20:] = -np.inf
    choose = lambda x: (st.choose_rank_lam(x, 4.5, p=p, descending=descending),)  # noqa: E731
    (found,) = computed(choose, "core", x)
    wanted = sparsetopk.choose_rank_lam(x, 4.5, p=p, descending=descending)
    np.testing.assert_allclose(found, wanted, rtol=3e-6)


def by_jax(way):
    def choose(x, k, **options):
        return computed(lambda x, k: (st.choose_lam(x, k, **options),), way, x, k)[0]

    return choose


def by_torch(x, k, **options):
    torch = pytest.importorskip("torch")
    st = pytest.importorskip("sparsetopk.torch")
    return st.choose_lam(torch.tensor(x, dtype=torch.float32), torch.tensor(k), **options).numpy()


def by_numpy(x, k, **options):
    return sparsetopk.choose_lam(x.astype(np.float32), k, **options)


@every_p
@every_kind
@pytest.mark.parametrize("by", ["NumPy", "XLA operations"])
def test_a_chosen_lam_is_the_smallest(kind, p, by):
    """By the number of entries of float64 output that are fractional, a little above it and below.

    What is so close to 1 that float32 may round it to 1, times k, does not count in the search: where
    the response is flat at its end (two-sided, p < 2) that is a larger lam. JAX and torch call the core
    for the same numbers.
    """
    x, k = competing(kind, p, 2_500 if by != "NumPy" else 5_000 if kind == "debiased" else 20_000)
    choose = by_numpy if by == "NumPy" else by_jax(by)
    lam = choose(x, k, p=p, **OPTIONS[kind])
    if by == "NumPy":
        np.testing.assert_array_equal(by_torch(x, k, p=p, **OPTIONS[kind]), lam)
        if ffi.available():
            in_jax = by_jax("core")(x, k, p=p, **OPTIONS[kind])
            np.testing.assert_allclose(in_jax, lam, rtol=EPS32)

    def fractional(lam, margin=0.0):
        if kind == "debiased":
            y = sparsetopk.topk_mag(x, k, lam, p=p, debias=False)
            # An entry that stands alone solves y = S((|x| - y)/lam); one of the block has less.
            alone = sparsetopk.topk_mag(x, 33, lam, p=p, debias=False)
            return ((y != 0) & (np.abs(y) < (1 - 1e-9) * np.abs(alone))).sum(-1)
        y = sparsetopk.topk_mask(x, k, lam, p=p, **OPTIONS[kind])
        return ((y > 0) & (y < 1 - margin)).sum(-1)

    enough = fractional(1.0001 * lam) >= 8
    too_few = fractional(0.999 * lam, 64 * EPS32 * np.maximum(1.0, k)) < 8
    assert enough.all(), (1 - enough.mean(), np.argwhere(~enough)[:5].tolist())
    assert too_few.all(), (1 - too_few.mean(), np.argwhere(~too_few)[:5].tolist())


def competing(kind, p, m):
    """Those of the first m rows in which there is something to choose."""
    at = batch(kind, p, 33)
    rows = ((at.k > 0) & (at.k < 33))[:m, 0]
    return at.x[:m][rows], at.k[:m][rows]


@every_p
@every_kind
def test_the_core_chooses_what_array_operations_do(kind, p, monkeypatch):
    at = batch(kind, p, 33)
    x, k = at.x[:500], at.k[:500]
    found = sparsetopk.choose_lam(x, k, p=p, **OPTIONS[kind])
    monkeypatch.setattr(core, "native", None)
    want = sparsetopk.choose_lam(x, k, p=p, **OPTIONS[kind])
    np.testing.assert_allclose(found, want, rtol=1e-7)
