"""What is JAX's own: transforms, tracing, dtypes, sharding. Values and derivatives are tested with the
case table, over all front-ends."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import sparsetopk
from cases import CASES, MAGNITUDES, MASKS, ROWS, TWO_SIDED, Case
from jax_ways import AS_USERS_HAVE_IT, check_derivatives, with_four_devices
from test_derivatives import AT, SMOOTH

jax = pytest.importorskip("jax")

import jax.numpy as jnp

import sparsetopk.jax as st
from sparsetopk._maths.operator import Operator as Kind
from sparsetopk._maths.operator import exponent
from sparsetopk.jax._rows import threshold
from sparsetopk.jax._rows.arguments import is_hard
from sparsetopk.jax._solvers import ffi

# One case of every kind that has code of its own, for what takes long.
FEW = [
    Case("topk_mask", {"p": 1.5}),
    Case("topk_mask", {"p": 4 / 3, "two_sided": True}),
    Case("topk", {}),
    Case("topk_mag", {"p": 2.0}),
    Case("topk_mag", {"p": 1.5, "debias": False}),
    Case("topk_sign", {"p": 2.0}),
]


solve_in_xla = jax.jit(threshold.solve_in_xla, static_argnames="setting")


def gaussian(*shape, seed=0, dtype=np.float64):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(dtype))


def close(got, expected, **tolerances):
    options = {"rtol": 1e-6, "atol": 1e-9} | tolerances
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **options), got, expected)


# values


# topk is a mask times x
@pytest.mark.parametrize(
    "case", [c for c in CASES if c.p in (2.0, 1.2, 3.0) and c.operator != "topk"], ids=str
)
def test_both_implementations_agree(case: Case):
    """The plain one, that of GPU and TPU, on all inputs at once. Float32 with p <= 2 is that of
    ``test_batches``, on thousands of rows."""
    x, k, lam = ROWS
    exact = case.function(sparsetopk)(x, k, lam)
    kind = _kind(case)
    for dtype, tolerance in ((np.float64, 1e-12), (np.float32, 3e-5))[: 2 if case.p > 2 else 1]:
        at = (jnp.asarray(x, dtype), jnp.floor(k).astype(int), jnp.asarray(k % 1, dtype))
        setting = threshold.TopKSetting(kind, False)
        y = solve_in_xla(*at, jnp.asarray(lam, dtype), setting).y
        if case.p > 2 and not case.two_sided:
            tolerance = max(tolerance**0.5, 1e-6)
        np.testing.assert_allclose(y, exact, rtol=tolerance, atol=tolerance)


def _kind(case: Case) -> Kind:
    op = {"topk_mag": 1, "topk_sign": 2}.get(case.operator, 3 if case.two_sided else 0)
    return Kind(op, exponent(case.p), case.options.get("debias", case.operator == "topk_mag"))


def rows_of_every_kind(n=400):
    """Rows that a solver may stumble over, with their k and lam."""
    rng = np.random.default_rng(0)
    x = np.stack(
        [
            rng.normal(size=n),
            rng.standard_cauchy(size=n),
            np.exp(5 * rng.normal(size=n)),
            rng.integers(0, 2, size=n),
            np.full(n, 3.25),
            np.sort(rng.normal(size=n)),
            np.append(rng.normal(size=n - 1), 1e8),
            np.maximum(rng.normal(size=n), 0),
            1e5 + rng.normal(size=n),
            1e-30 * rng.normal(size=n),
            np.where(rng.random(n) < 0.3, -np.inf, rng.normal(size=n)),
            np.append(rng.normal(size=n - 2), [np.inf, np.inf]),
        ]
    ).astype(np.float32)
    ks, lams = (0.3, 1, 7.5, n // 3, n - 1), (1e-30, 1e-6, 0.1, 1.0, 1e3, 1e30)
    k, lam = (v.reshape(-1, 1, 1) for v in np.meshgrid(ks, lams))
    return x, k, lam


@pytest.mark.parametrize("case", [MASKS[0], MASKS[2], *FEW[1:]], ids=str)
def test_the_plain_solver_cannot_fail(case: Case):
    x, k, lam = rows_of_every_kind()
    if case.operator in ("topk_mag", "topk_sign"):
        x = x[np.isfinite(x).all(-1)]
    shape = (len(k), *x.shape)
    exact = case.function(sparsetopk)(np.broadcast_to(x, shape).astype(np.float64), k, lam)
    at = (jnp.broadcast_to(x, shape), *(jnp.broadcast_to(v, (*shape[:2], 1)) for v in (k, lam)))
    whole, frac = jnp.floor(at[1]).astype(int), (at[1] % 1).astype(np.float32)
    solved = solve_in_xla(
        at[0], whole, frac, at[2].astype(np.float32), threshold.TopKSetting(_kind(case), False)
    )
    y = np.asarray(solved.y, dtype=np.float64)
    if case.operator == "topk":
        y = np.where(np.isfinite(x), x, 0.0) * y
        exact = np.where(np.isfinite(x), exact, 0.0)
    # t = (x - tau)/lam is rounded to float32, and x is up to 1e8 times lam apart from it
    scale = np.maximum(1.0, np.abs(np.where(np.isfinite(x), x, 0.0))) if case.operator in (
        "topk", "topk_mag") else 1.0  # fmt: skip
    error = np.abs(y - exact) / scale
    assert np.nanmax(error) < 2e-4
    if case.operator == "topk_mask":
        candidates = np.isfinite(x) | (x > 0)
        expected = np.minimum(k, candidates.sum(-1, keepdims=True))
        total = y.sum(-1, keepdims=True)
        np.testing.assert_allclose(total, np.broadcast_to(expected, total.shape), rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64], ids=str)
def test_dtypes(dtype, way):
    x = gaussian(3, 300).astype(dtype)
    for case in (FEW[1], FEW[3]):
        y = case.function(st)(x, 20, 0.3)
        assert y.dtype == dtype
        exact = case.function(sparsetopk)(np.asarray(x, np.float64), 20, 0.3)
        eps = 32 * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=eps, atol=eps)


@pytest.mark.parametrize("operator", ["topk_mask", "topk_mag", "topk_sign"])
@pytest.mark.parametrize("p", [1.5, 1.2])
def test_float32_beside_the_hard_answer(operator, p, way):
    """Where S is flat at 0, a sum that is right leaves the threshold free to be wrong."""
    x = np.random.default_rng(0).normal(size=(4000, 33)).astype(np.float32)
    exact = getattr(sparsetopk, operator)(x.astype(np.float64), 5, 0.1, p=p)
    f = jax.jit(lambda x: getattr(st, operator)(x, 5, 0.1, p=p), compiler_options=AS_USERS_HAVE_IT)
    np.testing.assert_allclose(f(jnp.asarray(x)), exact, rtol=1e-6, atol=5e-6)


@pytest.mark.parametrize(
    ("lam", "hard"),
    [
        (np.float64(0.1), False),
        (np.float32(0.1), False),
        (np.array(0.1), False),
        (np.array([0.1, 0.0]), None),
        (np.zeros(2), True),
        (0, True),
        (jnp.float32(0.1), None),  # on a device
    ],
)
def test_what_is_read_of_lam_decides_what_is_compiled(lam, hard):
    assert is_hard(lam) is hard


@pytest.mark.parametrize("completion", [None, "spread", "best"])
@pytest.mark.parametrize("kind", ["indices", "sets"])
def test_targets_that_a_trace_closes_over(completion, kind):
    x, y = gaussian(3, 6), jnp.array([1, 2, 5])
    y = y if kind == "indices" else jax.nn.one_hot(y, 6)
    f = lambda x: st.topk_loss(x, y, 3, completion=completion)  # noqa: E731
    close(jax.jit(f)(x), f(x))
    close(jax.jit(jax.grad(f))(x), jax.grad(f)(x))


@pytest.mark.parametrize("completion", [None, "spread", "best"])
@pytest.mark.parametrize("kind", ["indices", "sets"])
def test_bad_targets_that_are_traced_make_their_row_nan(completion, kind):
    x, y = gaussian(4, 6), jnp.array([1, -7, 6, 5])
    if kind == "sets":
        y = jax.nn.one_hot(y, 6).at[1, 0].set(-1.0).at[2, 0].set(2.0)
    f = lambda x, y: st.topk_loss(x, y, 3, completion=completion, reduction="none")  # noqa: E731
    gradient = jax.jit(jax.grad(lambda x, y: f(x, y).sum()))(x, y)
    for found in (jax.jit(f)(x, y), gradient.sum(axis=-1)):
        np.testing.assert_array_equal(jnp.isnan(found), [False, True, True, False])
    with pytest.raises(ValueError, match="targets must be"):
        f(x, y)


def test_without_float64():
    with jax.enable_x64(False):
        x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 50)))
        assert x.dtype == jnp.float32
        y = st.topk_mask(x, 5, 0.3)
        exact = sparsetopk.topk_mask(np.asarray(x, np.float64), 5, 0.3)
        np.testing.assert_allclose(y, exact, atol=1e-5)
        gradient = jax.grad(lambda x: (st.topk_mask(x, 5, 0.3) ** 2).sum())(x)
        assert gradient.dtype == jnp.float32


@pytest.mark.slow
def test_counts_are_exact_above_2_24_without_float64(way):
    n = 2**24 + 8
    with jax.enable_x64(False):
        x = jnp.zeros(n, jnp.bfloat16).at[:3].set(1.0)
        for k in (2**24 + 3, jnp.int32(2**24 + 3)):
            y = st.topk_mask(x, k, 0.0)
            assert int((y == 1).sum()) == 2**24 + 3
        y = st.topk_mask(jnp.arange(n - 2**24, dtype=jnp.float32), 3, 0.1)
        assert int(y.sum()) == 3


def test_numbers_do_not_promote_the_dtype_of_x():
    for dtype in (jnp.bfloat16, jnp.float32):
        x = jnp.ones(4, dtype)
        for k, lam in (
            (2, 0.5),
            (jnp.float64(2.0), jnp.float64(0.5)),
            (np.int64(2), np.float64(0.5)),
        ):
            assert st.topk_mask(x, k, lam).dtype == dtype
    weak = jnp.full(4, 1.0)
    assert weak.weak_type
    assert st.topk_mask(weak, 2, 0.5).dtype == weak.dtype


# derivatives


# First derivatives of all cases are tested over the front-ends.
@pytest.mark.parametrize("case", [*FEW, MASKS[4], TWO_SIDED[3], MAGNITUDES[8]], ids=str)
def test_derivatives_to_order_two_in_both_modes(case: Case):
    check_derivatives(case.function(st), AT)


@pytest.mark.parametrize(
    ("phi", "p"),
    [("identity", 2.0), ("identity", 3.0), ("half_square", 4 / 3), ("abs", 1.5), ("exp", 4 / 3)],
)
def test_derivatives_of_values(phi, p):
    check_derivatives(lambda x, k, lam: st.topk_value(x, k, lam, p=p, phi=phi), AT)


@pytest.mark.parametrize(
    ("completion", "options"),
    [(None, {}), ("spread", {"p": 1.5, "two_sided": True}), ("best", {"p": 4 / 3})],
)
def test_derivatives_of_losses(completion, options):
    targets = jnp.array([0, 5, 2])
    f = lambda *at: st.topk_loss(at[0], targets, *at[1:], completion=completion, **options)  # noqa: E731
    check_derivatives(f, (gaussian(3, 6), np.float64(2.6), np.float64(0.8)))


def test_third_derivatives_follow_from_the_rule():
    f = lambda s: st.topk_mask(SMOOTH["real k"][0] * (1 + s), 2.4, 0.5, p=4 / 3)[3]  # noqa: E731
    third = jax.jacfwd(jax.jacrev(jax.jacfwd(f)))(0.0)
    second = jax.jit(jax.jacfwd(jax.jacrev(f)))
    step = 1e-5
    np.testing.assert_allclose(third, (second(step) - second(-step)) / (2 * step), rtol=1e-6)
    assert abs(third) > 1e-2


@pytest.mark.parametrize("case", [FEW[1], FEW[2], FEW[4]], ids=str)
def test_transforms(case: Case):
    f = lambda x: case.function(st)(x, 2.5, 0.6)  # noqa: E731
    loss = lambda x: (f(x) ** 2).sum()  # noqa: E731
    x, dx = gaussian(3, 6), gaussian(3, 6, seed=1)
    y, gradient = f(x), jax.grad(loss)(x)
    close(jax.jit(f)(x), y)
    close(jax.vmap(f)(x), y)
    close(jax.vmap(jax.vmap(f))(x[None])[0], y)
    close(jax.vmap(jax.grad(loss))(x), gradient)
    close(jax.grad(jax.checkpoint(loss))(x), gradient)
    jacobian = jax.vmap(jax.jacrev(f))(x)
    close(jax.vmap(jax.jacfwd(f))(x), jacobian)
    close(jax.jvp(f, (x,), (dx,))[1], jnp.einsum("mij,mj->mi", jacobian, dx))
    close(jax.vjp(f, x)[1](dx)[0], jnp.einsum("mij,mi->mj", jacobian, dx))
    close(jax.hessian(loss)(x[0]), jax.jacrev(jax.jacrev(loss))(x[0]))
    _, scanned = jax.lax.scan(lambda total, row: (total + loss(row), f(row)), 0.0, x)
    close(scanned, y)
    shape = jax.eval_shape(f, jax.ShapeDtypeStruct((2, 9), jnp.float32))
    assert (shape.shape, shape.dtype) == ((2, 9), jnp.float32)
    donated = jax.jit(f, donate_argnums=0)
    close(donated(x + 0.0), y)


@pytest.mark.parametrize("case", [FEW[1], FEW[4]], ids=str)
def test_vmap_over_k_and_lam(case: Case, way):
    f, x = case.function(st), gaussian(4, 6)
    k, lam = jnp.array([1.0, 2.5, 0.0, 6.0]), jnp.array([0.5, 0.0, 1.0, 2.0])
    expected = f(x, k[:, None], lam[:, None])
    close(jax.vmap(f)(x, k, lam), expected)
    close(jax.vmap(f, in_axes=(1, 0, 0))(x.T, k, lam), expected)
    each = jax.vmap(f, in_axes=(None, 0, None))(x[0], k, 0.5)
    close(each, f(jnp.broadcast_to(x[0], (4, 6)), k[:, None], 0.5))
    nested = jax.vmap(jax.vmap(f, in_axes=(None, 0, None)), in_axes=(None, None, 0))
    close(nested(x[0], k, lam)[2, 1], f(x[0], k[1], lam[2]))


def test_k_and_lam_may_depend_on_x():
    f = lambda x: st.topk_mask(  # noqa: E731
        x, 1 + jax.nn.sigmoid(x.sum(-1, keepdims=True)), jnp.exp(x).mean()
    )
    check_derivatives(f, (gaussian(2, 6),))


def test_gradients_of_k_and_lam_have_their_shape_and_dtype():
    x = gaussian(2, 5, 3, dtype=np.float32)
    k, lam = jnp.array([[[1.0]], [[2.0]]], jnp.float16), jnp.float32(0.5)
    dk, dlam = jax.grad(lambda k, lam: (st.topk_mask(x, k, lam, axis=1) ** 2).sum(), (0, 1))(k, lam)
    assert (dk.shape, dk.dtype) == ((2, 1, 1), jnp.float16)
    assert (dlam.shape, dlam.dtype) == ((), jnp.float32)
    integer = jax.grad(lambda x: st.topk_mask(x, jnp.int32(2), 0.5)[0, 0, 0])(x)
    assert integer.shape == x.shape


def test_traced_bad_arguments_make_nan(way):
    x = gaussian(2, 5)
    f = jax.jit(st.topk_mask)
    assert jnp.isnan(f(x, 7.0, 0.1)).all()
    assert jnp.isnan(f(x, 2.0, -1.0)).all()
    y = f(x, jnp.array([[2.0], [jnp.nan]]), 0.1)
    assert jnp.isnan(y).all(-1).tolist() == [False, True]
    gradient = jax.jit(jax.grad(lambda x, k: st.topk_mask(x, k, 0.1)[0].sum()))
    assert jnp.isnan(gradient(x, 7.0)[0]).all()


def test_straight_through():
    x = gaussian(3, 20)
    for name in ("topk_mask", "topk", "topk_mag", "topk_sign"):
        f = getattr(st, name)
        hard = f(x, 4, 0.0)
        y, pull = jax.vjp(lambda x, f=f: f(x, 4, 0.5, straight_through=True), x)
        np.testing.assert_array_equal(y, hard)
        close(pull(x), jax.vjp(lambda x, f=f: f(x, 4, 0.5), x)[1](x))


@pytest.mark.parametrize("magnitude", [False, True])
def test_derivative_of_a_selection(magnitude):
    x = gaussian(3, 20)
    select = jax.jit(lambda x: st.topk_select(x, 4, 0.5, magnitude=magnitude))
    values, pull, (indices, _) = jax.vjp(lambda x: (select(x)[0], select(x)[1:]), x, has_aux=True)
    g = gaussian(*values.shape, seed=1)
    f = st.topk_mag if magnitude else st.topk_mask
    expected = jax.vjp(lambda x: jnp.take_along_axis(f(x, 4, 0.5), indices, -1), x)[1](g)
    close(pull(g), expected)
    assert indices.dtype == jnp.int32


@pytest.mark.parametrize("case", [FEW[0], FEW[3]], ids=str)
def test_memory_of_a_gradient_is_linear(case: Case):
    n = 1_000_000
    x = jax.ShapeDtypeStruct((n,), jnp.float32)
    loss = lambda x, k, lam: (case.function(st)(x, k, lam) ** 2).sum()  # noqa: E731
    for f in (jax.grad(loss, argnums=(0, 1, 2)), lambda *at: jax.jvp(loss, at, at)):
        used = jax.jit(f).lower(x, 1e4, 0.1).compile().memory_analysis().temp_size_in_bytes
        assert used < 16 * 4 * n


def test_export_has_no_call_of_the_core_for_other_platforms():
    from jax import export

    f = jax.jit(jax.grad(lambda x: st.topk_mask(x, 5, 0.1).sum()))
    x = jax.ShapeDtypeStruct((4, 64), jnp.float32)
    for platform in ("cuda", "tpu"):
        assert "@sparsetopk" not in export.export(f, platforms=[platform])(x).mlir_module()
    if ffi.available():
        assert "sparsetopk_threshold" in f.lower(x).as_text()


def test_errors_name_the_argument():
    x = gaussian(2, 5)
    with pytest.raises(TypeError, match=r"x must be a jax.Array or a NumPy array, got \[1.0\]"):
        st.topk_mask([1.0], 1)
    with pytest.raises(TypeError, match=r"x must be an array of dtype .*, got int"):
        st.topk_mask(jnp.arange(3), 1)
    with pytest.raises(ValueError, match=r"k must be in \[0, n\] with n=5, got 6"):
        st.topk_mask(x, 6)
    with pytest.raises(ValueError, match="lam must be finite and at least 0, got -1"):
        st.topk_mask(x, 2, -1)
    with pytest.raises(ValueError, match=r"k must be a number or broadcast to shape \(2, 1\)"):
        st.topk_mask(x, jnp.ones(5))
    with pytest.raises(ValueError, match=r"axis must be in \[-2, 2\)"):
        st.topk_mask(x, 1, axis=2)
    with pytest.raises(ValueError, match="solver must be one of"):
        st.topk_mask(x, 1, solver="bca")


# sharding


def in_four_devices(code: str) -> None:
    """Run in a process of its own, in which the CPU is four devices."""
    prelude = """
import functools, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import sparsetopk.jax as st
x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32))
mesh = Mesh(np.array(jax.devices()), ("data",))
assert len(jax.devices()) == 4
"""
    result = subprocess.run(
        [sys.executable, "-c", prelude + code],
        env=with_four_devices(),
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_sharded_rows_do_not_move():
    in_four_devices("""
sharding = NamedSharding(mesh, P("data", None))
there = jax.device_put(x, sharding)
for f in (
    lambda x: st.topk_mask(x, 5, 0.3),
    jax.grad(lambda x: (st.topk_mag(x, 5, 0.3) ** 2).sum()),
    lambda x: jax.vmap(lambda x: st.topk(x, 5, 0.3))(x),
):
    compiled = jax.jit(f).lower(there).compile()
    text = compiled.as_text()
    assert "all-gather" not in text and "all-to-all" not in text and "permute" not in text, text
    y = compiled(there)
    assert y.sharding.is_equivalent_to(sharding, 2), y.sharding
    np.testing.assert_allclose(y, f(x), atol=1e-6)
""")


@pytest.mark.slow
def test_a_row_over_many_devices():
    in_four_devices("""
# One entry of the mask is 3e-8 below 1, where the slope for p = 3/2 has a root: in float64.
jax.config.update("jax_enable_x64", True)
names = {"topk_mask": {"p": 2.0}, "topk": {"p": 1.5, "two_sided": True}, "topk_mag": {}, "topk_sign": {}}
rows = P(None, "data")
for name, options in names.items():
    f = functools.partial(getattr(st, name), **options)
    loss = lambda x, k, lam, **more: (f(x, k, lam, **more) ** 2 * jnp.cos(x)).sum()
    for lam in (0.3, 0.0):
        shard = functools.partial(jax.shard_map, mesh=mesh)
        inside = shard(
            lambda x, k: f(x, k, lam, axis_name="data"), in_specs=(rows, P()), out_specs=rows
        )
        np.testing.assert_allclose(jax.jit(inside)(x, 7.5), f(x, 7.5, lam), atol=2e-6)
    at = (x.astype(np.float64), 7.5, 0.3)
    whole = jax.grad(loss, argnums=(0, 1, 2))(*at)
    total = shard(
        lambda *at: jax.lax.psum(loss(*at, axis_name="data"), "data"),
        in_specs=(rows, P(), P()), out_specs=P(),
    )
    parts = jax.jit(jax.grad(total, argnums=(0, 1, 2)))(*at)
    for part, expected in zip(parts, whole):
        np.testing.assert_allclose(part, expected, rtol=1e-6, atol=1e-6)
""")
