"""The compiled core as calls of XLA: what they compute, and where they can be called."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp

import sparsetopk
import sparsetopk.jax as st
from jax_ways import with_four_devices
from sparsetopk import _core as core
from sparsetopk._maths.operator import Operator
from sparsetopk._numpy.isotonic import solve_isotonic
from sparsetopk.jax._rows.pieces import cut
from sparsetopk.jax._rows.threshold import TopKSetting, solve_topk
from sparsetopk.jax._solvers import ffi, pav

pytestmark = pytest.mark.skipif(
    not ffi.available(), reason="the core was built without the headers of XLA"
)

MASK, MAGNITUDE, SIGN, TWO_SIDED = range(4)
OPERATORS = [
    *((MASK, exponent, False) for exponent in (1.0, 2.0, 3.0, 0.5)),
    *((MAGNITUDE, exponent, debias) for exponent in (1.0, 3.0) for debias in (False, True)),
    *((SIGN, exponent, False) for exponent in (1.0, 3.0)),
    *((TWO_SIDED, exponent, False) for exponent in (1.0, 2.0, 3.0)),
]
DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)
PHI_NAMES = ("identity", "half_square", "abs", "exp")


def normal(*shape, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), dtype)


def threshold(x, k=5.5, lam=0.3, operator=(MASK, 1.0, False), dtype=jnp.float32):
    """For k and lam that broadcast against x (..., 1)."""
    return tuple(
        solve_topk(x, *numbers_of(x, k, lam, dtype), TopKSetting(Operator(*operator), None))
    )


def numbers_of(x, k, lam, dtype=jnp.float32):
    """whole, frac and lam of every row."""
    whole = jnp.floor(jnp.asarray(k, dtype))
    numbers = (whole.astype(jnp.int32), k - whole, jnp.asarray(lam, dtype))
    return [jnp.broadcast_to(v, (*x.shape[:-1], 1)) for v in numbers]


def in_core(name, *arrays, results, **attributes):
    """A call of a handler as it is, whatever it is given."""
    types = [jax.ShapeDtypeStruct(*result) for result in results]
    return jax.ffi.ffi_call(f"sparsetopk_{name}", types)(*arrays, **attributes)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_threshold_is_that_of_numpy(operator, dtype):
    x = normal(4, 3, 50, dtype=dtype)
    k, lam = np.linspace(0, 50, 12).reshape(4, 3, 1), np.linspace(0, 1, 3).reshape(3, 1)
    found = jax.jit(threshold, static_argnums=(3, 4))(x, k, lam, operator, jnp.float64)
    rows = np.asarray(x, np.float64).reshape(12, 50)
    expected = core.solve_topk(
        core.Operator(*operator), rows, k.reshape(12, 1), np.tile(lam, (4, 1)).astype(np.float64)
    )
    y, pivot, delta = (np.asarray(v, np.float64).reshape(12, -1) for v in found)
    assert found[0].dtype == dtype
    # 16-bit numbers and float32 are solved in float32
    eps = float(max(jnp.finfo(dtype).eps, jnp.finfo(jnp.float32).eps * (dtype != jnp.float64)))
    scale = np.abs(expected.y).max()
    np.testing.assert_allclose(y, expected.y, rtol=2 * eps, atol=20 * eps * scale)
    lams = np.tile(lam, (4, 1))
    v, expected_v = (
        np.where(np.isfinite(at) & (lams > 0), at - lams * by, at)
        for at, by in ((pivot, delta), (expected.state[:, :1], expected.state[:, 1:]))
    )
    np.testing.assert_allclose(v, expected_v, rtol=1e-4 if dtype != jnp.float64 else 1e-12)
    assert np.isfinite(y).all()


def test_counts_beyond_float32_are_exact():
    n = 2**24 + 5
    x = jnp.zeros((1, n), jnp.float32).at[0, :4].set(-9.0)
    whole = jnp.full((1, 1), n - 4, jnp.int32)
    zero = jnp.zeros((1, 1), jnp.float32)
    y, pivot, _ = solve_topk(x, whole, zero, zero + 0.1, TopKSetting(Operator(MASK, 1.0), None))
    assert np.asarray(y, np.float64).sum() == n - 4
    assert (y[0, :4] == 0).all()
    assert float(pivot[0, 0]) in (0.0, -9.0)


@pytest.mark.parametrize("shape", [(7,), (0, 7), (2, 0, 7), (2, 3, 1, 7), (3, 0), (0, 0), (0,)])
def test_any_number_of_leading_axes(shape):
    x = normal(*shape)
    y, pivot, delta = jax.jit(threshold, static_argnums=1)(x, min(2, shape[-1]))
    assert y.shape == shape
    assert pivot.shape == delta.shape == (*shape[:-1], 1)
    np.testing.assert_allclose(y.sum(-1), np.full(shape[:-1], min(2, shape[-1])), rtol=1e-6)
    lam = jnp.ones((*shape[:-1], 1), jnp.float32)
    d, block, paired = jax.jit(lambda x: pav.solve_blocks(x, x, lam, "identity", 1.0))(x)
    assert d.shape == block.shape == paired.shape == shape


@pytest.mark.parametrize(
    ("k", "lam"),
    [(-1.0, 0.1), (51.0, 0.1), (np.nan, 0.1), (2.0, -1.0), (2.0, np.nan), (2.0, np.inf)],
)
def test_a_row_with_a_bad_number_is_nan(k, lam):
    y, pivot, _ = threshold(normal(2, 50), jnp.array([[2.0], [k]]), jnp.array([[0.1], [lam]]))
    assert np.isfinite(y[0]).all()
    assert np.isnan(y[1]).all()
    assert np.isnan(pivot[1])


def solved_by_numpy(x, w, lam, phi, exponent):
    return tuple(solve_isotonic(x, w, lam, PHI_NAMES[phi], exponent, "pav", {}))


@pytest.mark.parametrize("phi", range(4))
@pytest.mark.parametrize("exponent", [1.0, 3.0, 0.5])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_pav_is_that_of_numpy(phi, exponent, dtype):
    x, w = abs(normal(9, 40, dtype=dtype)), abs(normal(2, 9, 40, dtype=dtype))[1]
    lam = jnp.geomspace(0.1, 10, 9, dtype=dtype)[:, None]
    d, block, paired = jax.jit(lambda *a: pav.solve_blocks(*a, PHI_NAMES[phi], exponent))(x, w, lam)
    arrays = (np.asarray(v, np.float64) for v in (x, w, lam))
    expected = solved_by_numpy(*arrays, phi, exponent)
    assert d.dtype == dtype
    assert block.dtype == paired.dtype == jnp.int32
    np.testing.assert_allclose(d, expected[0], rtol=4 * jnp.finfo(dtype).eps, atol=1e-12)
    np.testing.assert_array_equal(block, expected[1])
    np.testing.assert_array_equal(paired, expected[2])


def test_rows_do_not_depend_on_which_thread_solves_them():
    x = normal(1000, 400)
    lam = jnp.ones((1000, 1), jnp.float32)
    together = (threshold(x), pav.solve_blocks(x, x[::-1], lam, "identity", 1.0))
    for i in (0, 499, 999):
        alone = (threshold(x[i]), pav.solve_blocks(x[i], x[999 - i], lam[i], "identity", 1.0))
        for rows, row in zip(together, alone, strict=True):
            for found, expected in zip(rows, row, strict=True):
                np.testing.assert_array_equal(found[i], expected)


@pytest.mark.parametrize(
    ("name", "value"),
    [("x", np.nan), ("x", -np.inf), ("w", np.inf), ("w", -1.0), ("lam", 0.0), ("lam", np.inf)],
)
def test_pav_of_a_row_without_an_answer_is_nan(name, value):
    arrays = {"x": normal(2, 6), "w": abs(normal(2, 6)), "lam": jnp.ones((2, 1), jnp.float32)}
    arrays[name] = arrays[name].at[1, 0].set(value)
    d, block, paired = pav.solve_blocks(*arrays.values(), "half_square", 1.0)
    assert np.isfinite(d[0]).all()
    assert np.isnan(d[1]).all()
    assert block[1].tolist() == paired[1].tolist() == list(range(6))


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("x", np.zeros((2, 5), np.int32), "x must be F32 or F64 or F16 or BF16, got S32"),
        ("lam", np.ones((1, 1), np.float32), r"lam must have shape \(2, 1\), got \(1, 1\)"),
        ("frac", np.ones((2, 5), np.float32), r"frac must have shape \(2, 1\), got \(2, 5\)"),
        ("whole", np.ones((2, 1), np.float32), "whole must be S32, got F32"),
        ("lam", np.ones((2, 1), jnp.bfloat16), "lam must be F32 or F64, got BF16"),
        ("op", 4, r"op must be in \[0, 3\], got 4"),
    ],
)
def test_threshold_says_what_is_wrong(name, array, message):
    arrays = {"x": normal(2, 5), "whole": jnp.ones((2, 1), jnp.int32)}
    arrays |= {
        "frac": jnp.zeros((2, 1), jnp.float32),
        "lam": jnp.ones((2, 1), jnp.float32),
        "op": 0,
        name: array,
    }
    op, x = np.int32(arrays.pop("op")), arrays["x"]
    rows = ((2, 1), arrays["lam"].dtype)
    attributes = {"op": op, "exponent": np.float64(1), "debias": np.bool_(False)}
    results = [(x.shape, x.dtype), rows, rows]
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        in_core("threshold", *arrays.values(), results=results, **attributes)
    state = jnp.zeros((2, 1), jnp.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        in_core(
            "threshold_backward", *arrays.values(), state, state, x, results=results, **attributes
        )


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("w", np.ones(5, np.float32), r"w must have shape \(2, 5\), got \(5,\)"),
        ("lam", np.ones((2, 5), np.float32), r"lam must have shape \(2, 1\), got \(2, 5\)"),
        ("x", np.ones((2, 5), jnp.bfloat16), "x must be F32 or F64, got BF16"),
        ("phi", -1, r"phi must be in \[0, 3\], got -1"),
    ],
)
def test_pav_says_what_is_wrong(name, array, message):
    arrays = {
        "x": normal(2, 5),
        "w": normal(2, 5),
        "lam": jnp.ones((2, 1), jnp.float32),
        "phi": 0,
        name: array,
    }
    phi, x = np.int32(arrays.pop("phi")), arrays["x"]
    results = [(x.shape, x.dtype), (x.shape, np.int32), (x.shape, np.int32)]
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        in_core("pav", *arrays.values(), results=results, phi=phi, exponent=np.float64(1))


def test_the_other_calls_say_what_is_wrong():
    x, row = normal(2, 5), jnp.ones((2, 1), jnp.float32)
    arrays = (x, row.astype(jnp.int32), row, row, row, row)
    results = [(x.shape, x.dtype), (row.shape, row.dtype), (row.shape, row.dtype)]
    attributes = {"op": np.int32(0), "exponent": np.float64(1), "debias": np.bool_(False)}
    with pytest.raises(jax.errors.JaxRuntimeError, match="g must be F32, got F16"):
        in_core("threshold_backward", *arrays, x.astype(jnp.float16), results=results, **attributes)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="indices must have at most n slots, got 6"
    ):
        in_core("largest", x, results=[((2, 6), np.int32)])
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"indices must have shape \(2, 3\), got"):
        in_core("largest", x, results=[((1, 3), np.int32)])


def test_the_calls_for_slots_say_what_is_wrong():
    x, row = normal(2, 5), jnp.ones((2, 1), jnp.float32)
    at, number = (x, row.astype(jnp.int32), row, row), (row.shape, row.dtype)
    attributes = {"op": np.int32(0), "exponent": np.float64(1), "debias": np.bool_(False)}

    def fails(message, name, *arrays, results, **attributes):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            in_core(name, *arrays, results=results, **attributes)

    slots = [((2, 3), np.float32), ((2, 3), np.int32), number, number, number]
    wrong = [((2, 4), np.float32), *slots[1:]]
    fails(r"values must have shape \(2, 3\), got", "select", *at, results=wrong, **attributes)
    wrong = [((2, 6), np.float32), ((2, 6), np.int32), *slots[2:]]
    fails("at most n slots, got 6", "select", *at, results=wrong, **attributes)
    wrong = [((2, 0), np.float32), ((2, 0), np.int32), *slots[2:]]
    fails("indices must have a slot, got none", "select", *at, results=wrong, **attributes)
    indices, g = jnp.array([[0, 1, 5], [0, 1, 2]], jnp.int32), jnp.ones((2, 3), jnp.float32)
    back = [(x.shape, x.dtype), number, number]
    given = (*at, row, row, indices, g, row)
    fails(
        r"indices must be in \[0, n\), got 5", "select_backward", *given, results=back, **attributes
    )
    given = (*at, row, row, indices, g.astype(jnp.float16), row)
    fails("of_values must be F32", "select_backward", *given, results=back, **attributes)
    del attributes["debias"]
    fails(
        "op must be 0 or 3, got 1",
        "value",
        *at,
        results=[number],
        **attributes | {"op": np.int32(1)},
    )
    attributes |= {"fractional": np.int64(2), "least": np.float64(1e-30)}
    for name, bad, message in (
        ("fractional", np.int64(6), r"fractional must be in \[1, n\], got 6"),
        ("least", np.float64(2), r"least must be in \(0, 1\)"),
        ("op", np.int32(2), "op must have no signs, got 2"),
    ):
        fails(message, "choose_lam", *at[:3], results=[number], **attributes | {name: bad})


def test_the_calls_for_losses_and_ranks_say_what_is_wrong():
    x, row = normal(2, 5), jnp.ones((2, 1), jnp.float32)
    at, number = (x, row.astype(jnp.int32), row, row), (row.shape, row.dtype)
    attributes = {
        "op": np.int32(0),
        "exponent": np.float64(1),
        "ignored": np.int64(-100),
        "completion": np.int32(2),
        "smoothing": np.float64(0),
    }
    found = [number, (x.shape, x.dtype)]
    for targets, wrong, message in (
        (row, {}, r"targets must have shape \(2, 5\), got \(2, 1\)"),
        (x.astype(jnp.int32), {}, r"targets must have shape \(2, 1\), got \(2, 5\)"),
        (x.astype(jnp.float16), {}, "targets must be S32 or S64 or F32 or F64, got F16"),
        (x, {"completion": np.int32(3)}, r"completion must be in \[0, 2\], got 3"),
        (x, {"smoothing": np.float64(2)}, r"smoothing must be in \[0, 1\], got 2"),
        (x, {"op": np.int32(1)}, "op must be 0 or 3, got 1"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            in_core("target_loss", *at, targets, results=found, **attributes | wrong)
    attributes = {
        "exponent": np.float64(1),
        "size": np.float64(2),
        "descending": np.bool_(True),
        "least": np.float64(1e-36),
    }
    for given, wrong, message in (
        (x.astype(jnp.float16), {}, "x must be F32 or F64, got F16"),
        (x, {"size": np.float64(0.5)}, "size must be at least 1, got 0.5"),
        (x, {"least": np.float64(2)}, r"least must be in \(0, 1\)"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            in_core("choose_rank_lam", given, results=[number], **attributes | wrong)


def test_arrays_are_cut_from_the_one_that_they_were_put_together_in():
    x = jnp.arange(40.0).reshape(2, 20)
    some = (1, (5, 15), jnp.float32), (4, (5, 3, 8), jnp.bfloat16), (1, (0, 20), int)
    for width, sizes, dtype in some:
        given, begin = x.astype(dtype), 0
        found = jax.vmap(lambda x: cut(x, sizes, width))(given)  # noqa: B023
        for v, size in zip(found, sizes, strict=True):
            np.testing.assert_array_equal(v, given[:, begin : begin + size])
            begin += -(-size // width) * width
    f = lambda x: sum((i * v).sum() for i, v in enumerate(cut(x, (3, 7, 2), 4)))  # noqa: E731
    slope = jax.grad(f)(x[0, :16])
    np.testing.assert_array_equal(slope, [0] * 4 + [1] * 7 + [0] + [2] * 2 + [0] * 2)
    for results, width, message in (
        ([((2, 21), x.dtype)], 1, "parts must have no more entries than x"),
        ([((1, 20), x.dtype)], 1, "parts must have the rows of x"),
        ([((2, 20), np.int32)], 1, "parts must be F(32|64), got S32"),
        ([((2, 20), x.dtype)], 0, "width must be at least 1, got 0"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            in_core("cut", x, results=results, width=np.int64(width))


def test_vmap_makes_rows():
    x, k, lam = normal(4, 3, 50), jnp.arange(1.0, 4.0), jnp.geomspace(0.1, 1, 4)

    over_k = jax.vmap(threshold, (1, 0, None), (1, 0, 0))
    found = jax.jit(jax.vmap(over_k, (0, None, 0)))(x.transpose(0, 2, 1), k, lam)
    y = found[0].transpose(0, 2, 1)
    for i in range(4):
        for j in range(3):
            expected = threshold(x[i, j], k[j], lam[i])
            for a, b in zip((y, *found[1:]), expected, strict=True):
                np.testing.assert_array_equal(a[i, j], b)


def test_vmap_is_one_call():
    text = jax.jit(jax.vmap(jax.vmap(threshold))).lower(normal(4, 3, 50)).as_text()
    assert text.count("@sparsetopk_threshold") == 1


def test_scan_and_checkpoint():
    x = normal(5, 3, 50)

    @jax.checkpoint
    def weighted(x):
        rows = jax.lax.stop_gradient(x)
        return (x * threshold(rows)[0]).sum()

    def step(total, x):
        return total + weighted(x), jax.grad(weighted)(x)

    total, dx = jax.jit(lambda x: jax.lax.scan(step, 0.0, x))(x)
    y = threshold(x)[0]
    np.testing.assert_allclose(total, (x * y).sum(), rtol=1e-5)
    np.testing.assert_array_equal(dx, y)
    np.testing.assert_array_equal(jax.vmap(jax.grad(weighted))(x), y)


def test_a_donated_argument_may_be_overwritten():
    x = normal(4, 50)
    expected = np.asarray(threshold(x)[0])
    found, *_ = jax.jit(threshold, donate_argnums=0)(x)
    assert x.is_deleted()
    np.testing.assert_array_equal(found, expected)


def run_on_four_devices(code: str) -> None:
    setting = """
    import contextlib, os
    os.environ["SPARSETOPK_THREADS"] = "4"
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    from sparsetopk._maths.operator import Operator
    from sparsetopk.jax._rows.threshold import TopKSetting, solve_topk
    from sparsetopk.jax._solvers import pav as isotonic

    def threshold(x, k=5.5):
        shape = (*x.shape[:-1], 1)
        k = jnp.broadcast_to(jnp.asarray(k, jnp.float32), shape)
        whole = jnp.floor(k)
        at = (x, whole.astype(jnp.int32), k - whole, jnp.full(shape, 0.3))
        return tuple(solve_topk(*at, TopKSetting(Operator(0, 1.0), None)))

    def pav(x, k=None):
        lam = jnp.ones((*x.shape[:-1], 1), jnp.float32)
        return isotonic.solve_blocks(x, x[..., ::-1], lam, "identity", 1.0)

    def mesh(*sizes, kind=AxisType.Auto):
        return jax.make_mesh(sizes, ("a", "b")[: len(sizes)], axis_types=(kind,) * len(sizes))

    def check(f, x, place, moves=False):
        expected = [np.asarray(v) for v in f(x)]
        placed = jax.device_put(x, place)
        compiled = jax.jit(f).lower(placed).compile()
        text = compiled.as_text()
        moved = [c for c in ("all-gather", "all-to-all", "all-reduce", "collective") if c in text]
        assert bool(moved) == moves, (place, moved)
        for found, value in zip(compiled(placed), expected, strict=True):
            np.testing.assert_array_equal(found, value)
            rows = NamedSharding(place.mesh, P(*place.spec[:2]))
            assert moves or found.sharding.is_equivalent_to(rows, found.ndim), found.sharding

    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4, 52)), jnp.float32)
    """
    setting, code = textwrap.dedent(setting), textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", setting + code],
        env=with_four_devices(),
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_no_row_moves_between_devices():
    run_on_four_devices(
        """
        for solve in (threshold, pav):
            batched = jax.vmap(jax.vmap(solve))
            for f in (solve, batched):
                check(f, x, NamedSharding(mesh(4), P("a")))
                check(f, x, NamedSharding(mesh(2, 2), P("a", "b")))
                check(f, x, NamedSharding(mesh(2, 2), P(None, ("a", "b"))))
            # what is solved together is brought together
            check(solve, x, NamedSharding(mesh(4), P(None, None, "a")), moves=True)
            check(solve, x, NamedSharding(mesh(2, 2), P("a", None, "b")), moves=True)
            check(solve, x[0, 0], NamedSharding(mesh(4), P("a")), moves=True)

        def scan(x):
            return jax.lax.scan(lambda c, _: (threshold(c)[0], None), x, None, length=3)[0],

        check(scan, x, NamedSharding(mesh(4), P("a")))
        """
    )


@pytest.mark.slow
def test_no_row_moves_with_the_partitioner_before_shardy():
    run_on_four_devices(
        """
        jax.config.update("jax_use_shardy_partitioner", False)
        for solve in (threshold, pav, jax.vmap(jax.vmap(threshold))):
            check(solve, x, NamedSharding(mesh(4), P("a")))
            check(solve, x, NamedSharding(mesh(2, 2), P("a", "b")))
        """
    )


@pytest.mark.slow
def test_shard_map():
    run_on_four_devices(
        """
        specs = dict(mesh=mesh(4), out_specs=P("a"))
        for check_vma in (True, False):
            specs["check_vma"] = check_vma
            for solve in (threshold, pav):
                y = jax.jit(jax.shard_map(solve, in_specs=P("a"), **specs))(x)[0]
                np.testing.assert_array_equal(y, solve(x)[0])
            # the same x on every device, and another k
            k = jnp.arange(1.0, 5.0)
            of_k = jax.shard_map(lambda x, k: threshold(x, k)[0], in_specs=(P(), P("a")), **specs)
            y = jax.jit(of_k)(x[0, :1], k[:, None])
            np.testing.assert_array_equal(y, jnp.stack([threshold(x[0, 0], one)[0] for one in k]))
        """
    )


@pytest.mark.slow
def test_devices_may_solve_at_once():
    """Each wants all threads of the pool, which serves one of them at a time."""
    run_on_four_devices(
        """
        x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 300, 1000)), jnp.float32)
        expected = threshold(x)
        found = jax.jit(lambda x: jax.lax.scan(lambda c, _: (c, threshold(c)), x, None, length=5)[1])
        for value, stack in zip(expected, found(jax.device_put(x, NamedSharding(mesh(4), P("a"))))):
            assert (stack == value).all()
        for value, stack in zip(expected, jax.pmap(threshold)(x)):
            assert (stack == value).all()
        """
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited as Linux does it")
def test_memory_that_runs_out_is_an_error_of_jax():
    """Four rows, each solved on a thread of its own by arrays that are longer than what is left."""
    code = """
    import os, resource
    os.environ["SPARSETOPK_THREADS"] = "4"
    import jax, jax.numpy as jnp
    from sparsetopk.jax._solvers import pav

    def call(x):
        return pav.solve_blocks(x, x, jnp.ones((len(x), 1), x.dtype), "identity", 1.0)

    x = jax.random.normal(jax.random.key(0), (4, 2_000_000))
    compiled = jax.jit(call).lower(x).compile()
    jax.block_until_ready(call(x[:, :4000]))
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    results = 3 * x.nbytes
    resource.setrlimit(resource.RLIMIT_AS, (used + results + 60_000_000, -1))
    try:
        jax.block_until_ready(compiled(x))
    except jax.errors.JaxRuntimeError as error:
        assert "sparsetopk: out of memory" in str(error), error
    else:
        raise AssertionError("no error")
    jax.block_until_ready(call(x[:, :4000]))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120)


def test_subnormal_halves_count_though_xla_flushes_subnormal_numbers():
    x = jnp.array([4e-5, 1e-5, 3e-5, 2e-5, 5e-5], jnp.float16)
    y, _, _ = threshold(x, 2.0, 0.0)
    assert y.tolist() == [1, 0, 0, 0, 1]
    y, _, _ = threshold(x, 2.0, 0.0, (MAGNITUDE, 1.0, False))
    np.testing.assert_array_equal(np.asarray(y), np.asarray(x) * [1, 0, 0, 0, 1])


@pytest.mark.parametrize("p", [1.1, 1.2, 1.5])
@pytest.mark.parametrize("debias", [True, False])
def test_a_state_in_float32_leaves_a_block_its_share(p, debias):
    """Where the second entry has 1e-9 of the threshold, the first lacks that little. Rounding may not
    make it whole, as nothing would be left for the block: its derivatives would be of the other side."""
    rng, e = np.random.default_rng(0), 1 / (p - 1)
    d, share = rng.uniform(0.5, 1.0, size=(400, 1)), 10 ** rng.uniform(-9, -7, size=(400, 1))
    first, second = d**e + 0.1 * d, d**e + 0.1 * d * share ** (1 / e)
    x = np.float32(np.concatenate([first, second, 0.1 * second], axis=1))
    g = np.float32(rng.normal(size=x.shape))
    f = lambda x, k, lam: st.topk_mag(x, k, lam, p=p, debias=debias)  # noqa: E731
    k, lam = np.full((400, 1), 1.0, np.float32), np.full((400, 1), 0.1, np.float32)
    found = jax.vjp(f, *map(jnp.asarray, (x, k, lam)))[1](jnp.asarray(g))
    at = (np.float64(v) for v in (x, k, lam))
    want = sparsetopk.topk_mag_vjp(*at, p=p, debias=debias, dy=np.float64(g))
    for one, other in zip(found, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4 * np.abs(other).max())
