"""The Pallas kernels, interpreted on the CPU, against the core and float64; and lowered for GPUs and
TPUs that are not here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cases import ROWS
from test_batches import EPS32, KINDS, PS, Batch, assert_close, batch, expected, function, options
from test_jax_meshes import run

jax = pytest.importorskip("jax")

import jax.numpy as jnp

import sparsetopk.jax as st
from jax_ways import in_pallas
from sparsetopk._maths.operator import MAGNITUDE, MASK, SIGN, TWO_SIDED
from sparsetopk.jax import _pallas
from sparsetopk.jax._pallas import experimental, kernels
from sparsetopk.jax._solvers import ffi

N = 17  # of all rows here: one compilation for each operator, and blocks that are not full
inf, nan = np.inf, np.nan


def special_rows() -> Batch:
    """Infinities, NaN, ties, zeros, each with several k, and with a k or lam that is none."""
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
    # Where a derivative jumps rounding decides on which side: not in these rows.
    clear = expected(kind, p, N).clear[:, 0]
    rows = np.concatenate([clear, np.ones(len(at.x) - random, bool)])
    near(found[1][rows], want[1][rows], 2e-6 * e * e, steep[rows])
    # In k and lam it does where a whole k meets a gap.
    rows = at.k[:, 0] % 1 == 0.5
    for a, b in zip(found[2:], want[2:], strict=True):
        near(a[rows], b[rows], 2e-6 * e * e, steep[rows])
    assert_close([np.float64(v[:random]) for v in found[:2]], kind, p, N, EPS32)


PLATFORMS = {
    "cuda": "__gpu$xla.gpu.triton",
    "rocm": "__gpu$xla.gpu.triton",
    "tpu": "tpu_custom_call",
}


def lowered(f, *at, platform):
    """The custom calls, and whether there are loops of XLA."""
    text = jax.jit(f).trace(*at).lower(lowering_platforms=(platform,)).as_text()
    return re.findall(r"custom_call @(\S+?)\(", text), "stablehlo.while" in text


def like(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def by_kernel(count, platform):
    return [PLATFORMS[platform]] * count, False


@pytest.mark.parametrize("platform", PLATFORMS)
def test_one_kernel_each_way(platform):
    x, per_row = like(8, 100), like(8, 1)
    for f in (
        lambda x, k, lam: st.topk_mask(x, 5, 0.1),
        lambda x, k, lam: st.topk_mask(x, k, lam, p=1.2, two_sided=True),
        lambda x, k, lam: st.topk_mag(x, k, lam, p=4 / 3, debias=False),
        lambda x, k, lam: st.topk_mag(x, 5, lam),
        lambda x, k, lam: st.topk_sign(x, 5.5, 0.1, p=3.0),
        lambda x, k, lam: st.topk_mag(x, 5, 0.0),
    ):
        assert lowered(f, x, per_row, per_row, platform=platform) == by_kernel(1, platform)
        pull = lambda *at, f=f: jax.vjp(f, *at)[1](at[0])  # noqa: E731
        assert lowered(pull, x, per_row, per_row, platform=platform) == by_kernel(2, platform)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_any_shape_that_fits(platform):
    f = lambda x: st.topk_mask(x, 1, 0.1)  # noqa: E731
    for shape in ((1, 1), (3, 2), (5, 1000), (2, 16384), (7,), (2, 3, 4, 5)):
        assert lowered(f, like(*shape), platform=platform) == by_kernel(1, platform), shape
    along = lambda x: st.topk_mask(x, 1, 0.1, axis=0)  # noqa: E731
    assert lowered(along, like(20, 30), platform=platform) == by_kernel(1, platform)
    assert lowered(jax.vmap(f), like(4, 5, 30), platform=platform) == by_kernel(1, platform)
    for dtype in _pallas._LONGEST[platform]:
        found = lowered(f, like(9, 30, dtype=jnp.dtype(dtype)), platform=platform)
        assert found == by_kernel(1, platform), dtype


@pytest.mark.parametrize("platform", PLATFORMS)
def test_xla_operations_for_the_rest(platform, monkeypatch):
    f = lambda x: st.topk_mask(x, 1, 0.1)  # noqa: E731
    plain = [], True
    assert lowered(f, like(2, 16385), platform=platform) == plain
    doubles = like(2, 16384, dtype=jnp.float64)
    assert lowered(f, doubles, platform=platform) == plain
    if platform == "tpu":
        assert lowered(f, like(2, 9, dtype=jnp.float16), platform=platform) == plain
    size = jax.export.symbolic_shape("b, 30")
    assert lowered(f, like(*size), platform=platform) == plain
    forward = lambda x: jax.jvp(f, (x,), (x,))[1]  # noqa: E731
    calls, _ = lowered(forward, like(2, 30), platform=platform)
    assert calls == [PLATFORMS[platform]]  # the state by a kernel, the tangent in XLA operations
    monkeypatch.setattr(experimental, "available", lambda: False)
    assert lowered(f, like(2, 31), platform=platform) == plain


@pytest.mark.slow
def test_kernels_on_devices_of_a_mesh():
    """Inside shard_map every device has rows of its own; what XLA is to share out it would gather."""
    run(
        """
        def calls(f, x, platform):
            text = jax.jit(f).trace(x).lower(lowering_platforms=(platform,)).as_text()
            return len(re.findall(r"custom_call @(?:__gpu|tpu_custom_call)", text))

        f = lambda x: st.topk_mask(x, 5, 0.3)
        pull = lambda x: jax.vjp(f, x)[1](x)[0]
        for kind in (AxisType.Auto, AxisType.Explicit):
            m = mesh(kind)
            here = jax.device_put(x, NamedSharding(m, P("a")))
            every = lambda f, **o: jax.shard_map(f, mesh=m, in_specs=P("a"), out_specs=P("a"), **o)
            for platform in ("cuda", "rocm", "tpu"):
                assert calls(every(f), here, platform) == 1
                assert calls(every(pull), here, platform) == 2
                assert calls(f, here, platform) == 0
                if kind == AxisType.Auto:
                    assert calls(every(f, axis_names={"a"}), here, platform) == 0
        """
    )


def test_export_for_many_platforms():
    """On GPUs without kernels, of which JAX does not promise that other versions run them."""
    f = jax.jit(lambda x: st.topk_mask(x, 5, 0.1))
    for platform, count in (("cuda", 0), ("rocm", 0), ("tpu", 1)):
        text = jax.export.export(f, platforms=[platform])(like(4, 20)).mlir_module()
        assert text.count("stablehlo.custom_call") == count
    made = jax.export.export(f, platforms=("cpu", *PLATFORMS), disabled_checks=st.export_checks())(
        like(4, 20)
    )
    again = jax.export.deserialize(made.serialize())
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 20)), jnp.float32)
    np.testing.assert_array_equal(again.call(x), st.topk_mask(x, 5, 0.1))


def test_kernels_can_be_turned_off(monkeypatch):
    monkeypatch.setenv("SPARSETOPK_PALLAS", "0")
    experimental.available.cache_clear()
    try:
        found = lowered(lambda x: st.topk_mask(x, 1, 0.1), like(2, 37), platform="cuda")
    finally:
        experimental.available.cache_clear()
    assert found == ([], True)


@pytest.mark.slow
def test_compiled_for_a_gpu():
    """For sm_90, by Triton: no register is spilled, but for a few in the gradient of magnitudes, and
    every entry is read once, 16 bytes at a time."""
    pytest.importorskip("triton")
    operators = [(MASK, 1.0), (MASK, 2.0), (TWO_SIDED, 2.0), (MAGNITUDE, 1.0), (SIGN, 1.0)]
    requests = [
        {"op": op, "exponent": e, "debias": op == MAGNITUDE, "n": 4096, "backward": backward}
        for op, e in operators
        for backward in (False, True)
    ]
    script = Path(__file__).with_name("pallas_compiled.py")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, script],
        input=json.dumps(requests),
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    per_thread = kernels._PER_THREAD * 4 // 16
    for asked, found in zip(requests, json.loads(done.stdout), strict=True):
        gradient_of_magnitudes = asked["backward"] and asked["op"] == MAGNITUDE
        assert found["stack"] <= (24 if gradient_of_magnitudes else 0), (asked, found)
        arrays = 2 if asked["backward"] else 1
        assert found["loads of 16 bytes"] == arrays * per_thread, (asked, found)


@pytest.mark.parametrize(
    ("module", "name"), [(m, name) for m, names in experimental.NAMES.items() for name in names]
)
def test_what_is_used_of_pallas_is_there(module, name):
    """Where it is not, XLA operations would serve, without a word."""
    experimental.find(module, name)


def test_pallas_is_imported_for_kernels_alone():
    program = """
import sys, jax, jax.numpy as jnp, sparsetopk.jax as st
x = jnp.ones((3, 4), jnp.float32)  # also where 64 bits are the default
jax.grad(lambda x: st.topk_mag(x, 2, 0.1).sum())(x)
assert "jax.experimental.pallas" not in sys.modules
jax.jit(lambda x: st.topk_mag(x, 2, 0.1)).trace(x).lower(lowering_platforms=("tpu",))
assert "jax.experimental.pallas" in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
