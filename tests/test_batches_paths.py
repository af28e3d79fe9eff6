"""The thousands of rows of ``test_batches``, by the ways in which a row is not one array of one call:
over shards, over many tensors, and in compiled graphs; against the same float64."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sparsetopk._maths.operator import MAGNITUDE, MASK, SIGN, TWO_SIDED, Operator, exponent
from test_batches import (
    EPS32,
    EPS64,
    KINDS,
    OPTIMISED,
    PS,
    Batch,
    assert_close,
    batch,
    expected,
    function,
    options,
)

every_p = pytest.mark.parametrize("p", PS)
every_kind = pytest.mark.parametrize("kind", KINDS)

OPS = {"mask": MASK, "two-sided": TWO_SIDED, "sign": SIGN}


class Ranks:
    """Threads as ranks: what a ``torch.distributed`` group does for them, without processes."""

    def __init__(self, size):
        self.size, self.barrier, self.values = size, threading.Barrier(size), [None] * size

    def all(self, rank, value):
        self.values[rank] = value
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()
        return found


class Shared:
    """Of one of them; the methods of ``_spread.groups.Shared``."""

    def __init__(self, ranks, rank):
        self.ranks, self.rank, self.size = ranks, rank, ranks.size

    def gather(self, values):
        return torch.stack(self.ranks.all(self.rank, values.detach().clone()))

    def sum(self, values):
        return self.gather(values).sum(dim=0)


def by_shards_of_torch(kind, p, at, dtype, sizes):
    from sparsetopk.torch._rows.arguments import Rows
    from sparsetopk.torch._spread import sharded

    operator = Operator(OPS.get(kind, MAGNITUDE), exponent(p), kind == "debiased")
    x, g = (torch.from_numpy(v).to(dtype).split(sizes, dim=-1) for v in (at.x, at.g))
    k, lam = torch.from_numpy(at.k), torch.from_numpy(at.lam)
    ranks = Ranks(len(sizes))

    def of_rank(rank):
        try:
            here = x[rank].clone().requires_grad_()
            y = sharded.evaluate(Rows.of("x", here, -1), k, lam, operator, Shared(ranks, rank))
            return y.detach(), torch.autograd.grad(y, here, g[rank])[0]
        except BaseException:
            ranks.barrier.abort()  # so that the others do not wait for this one
            raise

    with ThreadPoolExecutor(len(sizes)) as pool:
        parts = list(pool.map(of_rank, range(len(sizes))))
    return tuple(torch.cat(v, dim=-1).double().numpy() for v in zip(*parts, strict=True))


@every_p
@every_kind
@pytest.mark.parametrize("bits", [32, 64])
def test_shards_of_torch(kind, p, bits):
    """Histograms take 2048 buckets for every row, however short: 4,000 rows of each kind, and so 20,000
    of every p."""
    dtype, eps = (torch.float32, EPS32) if bits == 32 else (torch.float64, EPS64)
    for n, sizes in ((64, [40, 0, 24]), (9, [4, 5]))[bits == 64 :]:
        found = by_shards_of_torch(kind, p, batch(kind, p, n), dtype, sizes)
        assert_close(found, kind, p, n, eps)


@every_p
@every_kind
def test_shards_of_jax(kind, p):
    """Shards are an axis of ``vmap``, which has the collectives of a mesh."""
    jax = pytest.importorskip("jax")
    st = pytest.importorskip("sparsetopk.jax")
    from jax_ways import AS_USERS_HAVE_IT

    at, shards = batch(kind, p, 33), 3

    def cut(v):
        return jax.numpy.asarray(v.reshape(len(v), shards, -1).swapaxes(0, 1), np.float32)

    def both(x, g):
        k, lam = (jax.numpy.asarray(v, np.float32) for v in (at.k, at.lam))
        f = lambda x: function(st, kind)(x, k, lam, axis_name="shard", **options(kind, p))  # noqa: E731
        y, pull = jax.vjp(f, x)
        return y, pull(g)[0]

    sharded = jax.vmap(both, axis_name="shard")
    found = jax.jit(sharded, compiler_options=AS_USERS_HAVE_IT)(cut(at.x), cut(at.g))
    found = (np.asarray(v, np.float64).swapaxes(0, 1).reshape(at.x.shape) for v in found)
    assert_close(tuple(found), kind, p, 33, EPS32)


@every_p
@pytest.mark.parametrize("kind", ["magnitude", "debiased"])
@pytest.mark.parametrize("way", ["as they are", "over shards"])
def test_many_arrays_of_jax(kind, p, way):
    """Rows are an axis of ``vmap``: of calls in which nothing is put together, and of calls over shards,
    with the collectives of a mesh."""
    jax = pytest.importorskip("jax")
    st = pytest.importorskip("sparsetopk.jax")
    from sparsetopk.jax._functions import multi

    at, ends = batch(kind, p, 33), (2, 2, 7)
    jnp, debias = jax.numpy, kind == "debiased"

    def of_row(x, k, lam):
        parts = jnp.split(x, ends)
        if way == "over shards":
            found = st.topk_mag_multi(parts, k, lam, p=p, debias=debias, axis_name="shard")
        else:
            setting = multi._Setting(Operator(MAGNITUDE, exponent(p), debias), None, ())
            found = multi._evaluate(tuple(parts), k, lam, setting)
        return jnp.concatenate(found)

    def both(x, k, lam, g):
        y, pull = jax.vjp(lambda x: of_row(x, k, lam), x)
        return y, pull(g)[0]

    f, given = both, [jnp.asarray(v, np.float32) for v in at]
    if way == "over shards":
        f = jax.vmap(both, in_axes=(0, None, None, 0), axis_name="shard")
        given = [v.reshape(len(v), 3, -1) if v.shape[-1] > 1 else v for v in given]
    k, lam = (v[:, 0] for v in given[1:3])
    optimised = jax.jit(jax.vmap(f), compiler_options=OPTIMISED)
    found = optimised(given[0], k, lam, given[3])
    found = (np.asarray(v, np.float64).reshape(at.x.shape) for v in found)
    assert_close(tuple(found), kind, p, 33, EPS32)


@every_p
@every_kind
@pytest.mark.parametrize("way", ["core", "XLA operations"])
def test_where_largest_and_axes_of_jax(kind, p, way):
    """The rows as (3, 11), with a column of what must not matter that is no candidate; masks of the
    smallest of -x."""
    jax = pytest.importorskip("jax")
    st = pytest.importorskip("sparsetopk.jax")
    from jax_ways import in_xla_operations

    at, jnp = batch(kind, p, 33), jax.numpy
    smallest = kind in ("mask", "two-sided")
    others = {"largest": False} if smallest else {}

    def wide(v, fill):
        v = v.reshape(-1, 3, 11)
        return jnp.asarray(np.insert(v, 4, fill, axis=2), np.float32)

    x, g = wide(-at.x if smallest else at.x, np.nan), wide(at.g, 1.0)
    where = jnp.arange(12) != 4

    def both(x, k, lam, g):
        f = lambda x: function(st, kind)(  # noqa: E731
            x, k, lam, axis=(1, 2), where=where, **others, **options(kind, p)
        )
        y, pull = jax.vjp(f, x)
        return y, pull(g)[0]

    k, lam = (jnp.asarray(v, np.float32)[..., None] for v in (at.k, at.lam))
    with contextlib.nullcontext() if way == "core" else in_xla_operations():
        optimised = jax.jit(both, compiler_options=OPTIMISED)
        y, dx = (np.asarray(v, np.float64) for v in optimised(x, k, lam, g))
    assert not y[..., 4].any()
    assert not dx[..., 4].any()
    y, dx = (np.delete(v, 4, axis=2).reshape(at.x.shape) for v in (y, dx))
    assert_close((y, -dx if smallest else dx), kind, p, 33, EPS32)


@every_p
@pytest.mark.parametrize("kind", ["magnitude", "debiased"])
def test_many_tensors(kind, p):
    """One row to a call: a tenth of the rows, with their gradients."""
    import sparsetopk.torch as st

    n, sizes = 64, [1, 40, 0, 23]
    at = batch(kind, p, n)
    xs, gs = (torch.from_numpy(v).float() for v in (at.x, at.g))
    found = []
    for x, k, lam, g in zip(xs, at.k[:, 0], at.lam[:, 0], gs, strict=True):
        pieces = [piece.clone().requires_grad_() for piece in x.split(sizes)]
        ys = st.topk_mag_multi(pieces, float(k), float(lam), **options(kind, p))
        dx = torch.autograd.grad(ys, pieces, g.split(sizes))
        found.append((torch.cat(ys).detach(), torch.cat(dx)))
    y, dx = (torch.stack(v).double().numpy() for v in zip(*found, strict=True))
    assert_close((y, dx), kind, p, n, EPS32)


@every_p
@pytest.mark.parametrize("kind", ["magnitude", "debiased"])
def test_values_over_many_tensors(kind, p):
    """Half of the rows of each kind, so that there are 20,000 of every p."""
    import sparsetopk.torch as st

    n, sizes, m = 33, [1, 20, 0, 12], 10_000
    at = Batch(*(v[:m] for v in batch(kind, p, n)))
    y, dx, _ = expected(kind, p, n)
    y = y.copy()
    with torch.no_grad():
        for i, (x, k, lam) in enumerate(
            zip(torch.from_numpy(at.x).float(), at.k, at.lam, strict=True)
        ):
            ys = st.topk_mag_multi(x.split(sizes), float(k[0]), float(lam[0]), **options(kind, p))
            y[i] = torch.cat(ys).numpy()
    assert_close((y, dx), kind, p, n, EPS32)


@every_p
@every_kind
def test_compiled_graphs(kind, p):
    import sparsetopk.torch as st

    torch.compiler.reset()  # it gives up after so many operators of one line
    f = torch.compile(
        lambda x, k, lam: function(st, kind)(x, k, lam, **options(kind, p)),
        fullgraph=True,
        backend="aot_eager",  # Inductor calls the same operators
    )
    at = batch(kind, p, 33)
    x, k, lam, g = (torch.from_numpy(v) for v in at)
    x = x.float().requires_grad_()
    y = f(x, k, lam)
    dx = torch.autograd.grad(y, x, g.float())[0]
    assert_close((y.detach().double().numpy(), dx.double().numpy()), kind, p, 33, EPS32)


@pytest.mark.parametrize("kind", ["mask", "sign", "debiased"])
def test_a_block_that_all_is_left_for_is_whole(kind):
    """k = 2 entries at the threshold, as far as lam can tell, and nothing that competes with them."""
    x, g = np.array([[1.0, 1.0, 0.5]]), np.array([[-2.69, 0.97, -0.31]])
    at = Batch(x, np.array([[2.0]]), np.array([[2e-30]]), g)
    y, dx = by_shards_of_torch(kind, 1.5, at, torch.float32, [2, 1])
    np.testing.assert_array_equal(y, [[1.0, 1.0, 0.0]])
    slope = 1.0 if kind == "debiased" else 0.0
    np.testing.assert_allclose(dx, slope * g * [1.0, 1.0, 0.0], rtol=1e-6)
