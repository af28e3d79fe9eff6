"""Permutahedron, sorting, ranking and norms on JAX arrays: NumPy's values, and every transform."""

import subprocess
import sys
import textwrap
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as hs

import sparsetopk
from scalars import PHIS
from sparsetopk._numpy.isotonic import solve_isotonic

jax = pytest.importorskip("jax")

import jax.numpy as jnp

import sparsetopk.jax as st
from jax_ways import check_derivatives, in_xla_operations, with_four_devices
from sparsetopk.jax._solvers import pav

PHI_NAMES = ("identity", "half_square", "abs", "exp")
LAMS = (0.0, 1e-3, 0.3, 3.0, 1e3)
# The function of a front-end, of x, w and lam.
OPERATORS = {
    "soft_sort": lambda module, x, w, lam, **options: module.soft_sort(x, lam, **options),
    "soft_rank": lambda module, x, w, lam, **options: module.soft_rank(x, lam, **options),
    "permutahedron": lambda module, x, w, lam, **options: module.permutahedron(
        x, w, lam, **options
    ),
}


def arrays(dtype=np.float64, shape=(3, 7)):
    """x and w away from ties and zeros, so that no derivative is taken at a kink."""
    rng = np.random.default_rng(7)
    x, w = rng.normal(size=shape), rng.uniform(0.1, 2.0, size=shape[-1])
    return jnp.asarray(x, dtype), jnp.asarray(w, dtype)


def close(found, expected, rtol=1e-11, atol=1e-11):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=rtol, atol=atol),
        found,
        expected,
    )


def with_cotangents(f, g, *at):
    """f, and the cotangents of what it is given for the cotangent g of its output, in one call."""

    @jax.jit
    def both(*at):
        y, pull = jax.vjp(f, *at)
        return y, pull(jnp.asarray(g, y.dtype))

    return both(*at)


# the solver in XLA operations


def solved_by_numpy(x, w, lam, phi, exponent):
    return tuple(solve_isotonic(x, w, lam, phi, exponent, "pav", {}))


# Compiling takes longer than the rows here do.
solve_in_xla = jax.jit(
    pav.solve_in_xla,
    static_argnames=("phi", "exponent"),
    compiler_options={"xla_backend_optimization_level": 0},
)


def rows_for(phi, n, dtype):
    """Many kinds of rows, with lam from 1e-8 to 1e8."""
    rng = np.random.default_rng(n)
    x, w = rng.normal(size=(40, n)), rng.uniform(0.0, 2.0, size=(40, n))
    x[10:20], x[20], x[21:24] = np.round(x[10:20]), 0.7, rng.standard_cauchy((3, n))
    x[24:27] += 1e5
    w[5:15] = np.round(2 * w[5:15]) / 2
    if phi == "identity":
        w[30:] -= 1.0
    if phi == "exp":
        x = np.clip(x, -5.0, 5.0)
    lam = 10.0 ** rng.permutation(np.linspace(-8, 8, 40)).reshape(-1, 1)
    return (np.abs(x) if PHIS[phi].even else x).astype(dtype), w.astype(dtype), lam.astype(dtype)


@pytest.mark.parametrize(
    ("phi", "exponent"),
    [*((phi, e) for phi in PHI_NAMES[:2] for e in (1.0, 3.0, 0.5)), ("abs", 1.0), ("exp", 2.0)],
)
def test_merging_in_pairs_is_pav(phi, exponent):
    x, w, lam = rows_for(phi, 29, np.float64)
    d, block, paired = solve_in_xla(x, w, lam, phi=phi, exponent=exponent)
    exact, blocks, pairs = solved_by_numpy(x, w, lam, phi, exponent)
    scale = np.abs(exact).max(-1, keepdims=True) + 1e-300
    close(d / scale, exact / scale, atol=1e-13)
    np.testing.assert_array_equal(paired, pairs)
    if phi != "half_square":  # there thresholds near 0, the same to float resolution, may be pooled
        np.testing.assert_array_equal(block, blocks)


@pytest.mark.parametrize(
    ("phi", "exponent"), [("identity", 1.0), ("identity", 2.0), ("half_square", 3.0)]
)
def test_merging_in_pairs_in_float32(phi, exponent):
    """Rows of more than one piece. The unit is the largest entry of a row; sums cost a few roundings."""
    x, w, lam = rows_for(phi, 101, np.float32)
    w = np.abs(w)  # or sums of w would cancel
    d, _, paired = solve_in_xla(x, w, lam, phi=phi, exponent=exponent)
    wide = (v.astype(np.float64) for v in (x, w, lam))
    exact, _, pairs = solved_by_numpy(*wide, phi, exponent)
    scale = np.abs(exact).max(-1, keepdims=True)
    close(d / scale, exact / scale, rtol=0, atol=4e-6)
    np.testing.assert_array_equal(paired, pairs)


@pytest.mark.parametrize("n", [1, 3, 33, 65])
def test_any_number_of_pieces(n):
    x, w, lam = rows_for("identity", n, np.float64)
    found = solve_in_xla(x, w, lam, phi="identity", exponent=1.0)
    close(found, solved_by_numpy(x, w, lam, "identity", 1.0), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("exponent", [1.0, 2.0])
def test_merging_where_everything_ties_or_nothing_pools(exponent):
    """What takes pool adjacent violators longest: each new entry is pooled with all before it."""
    n = 200
    i = np.arange(n, dtype=np.float64)
    x = np.stack([-(2.0**-i), 2.0**-i, -(2.0 ** (i / 4)), -i, np.where(i < 3, 1e6, -i), 0.0 * i])
    w, lam = np.tile(n - i, (6, 1)), np.array([[1e-3], [1e-3], [1.0], [1.0], [2.0], [0.1]])
    found = solve_in_xla(x, w, lam, phi="identity", exponent=exponent)
    exact = solved_by_numpy(x, w, lam, "identity", exponent)
    close(found[0], exact[0], rtol=1e-10)
    np.testing.assert_array_equal(found[1], exact[1])


ENTRIES = hs.one_of(
    hs.sampled_from([0.0, 1.0, -1.0, 1e-9, 3.0, 1e6]), hs.floats(-10, 10, allow_subnormal=False)
)


@given(
    x=hs.lists(ENTRIES, min_size=8, max_size=8),
    w=hs.lists(ENTRIES, min_size=8, max_size=8),
    lam=hs.sampled_from([1e-8, 1e-3, 0.5, 1.0, 1e3, 1e8]),
    exponent=hs.sampled_from([1.0, 2.0]),
)
@settings(max_examples=60)
def test_merging_in_pairs_on_any_row(x, w, lam, exponent):
    x, w, lam = np.array([x]), np.array([w]), np.full((1, 1), lam)
    d, _, paired = solve_in_xla(x, w, lam, phi="identity", exponent=exponent)
    exact, _, pairs = solved_by_numpy(x, w, lam, "identity", exponent)
    scale = np.abs(exact).max() + 1e-300
    close(d / scale, exact / scale, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(paired, pairs)


# values and first derivatives


@pytest.mark.parametrize(
    ("phi", "p"),
    [
        *(("identity", p) for p in (2.0, 1.5, 3.0)),
        *(("half_square", p) for p in (2.0, 1.5, 4 / 3, 3.0)),
        *(("abs", p) for p in (2.0, 1.2)),
        *(("exp", p) for p in (2.0, 4 / 3, 3.0)),
    ],
)
def test_values_and_cotangents_are_those_of_numpy(phi, p):
    x, w = arrays(shape=(5, 3, 7))
    lam = jnp.asarray(LAMS).reshape(5, 1, 1)
    g = np.random.default_rng(1).normal(size=x.shape)

    @jax.jit
    def everything(x, w, lam):
        y, pull = jax.vjp(lambda *at: st.permutahedron(*at, p=p, phi=phi), x, w, lam)
        value, slope = jax.value_and_grad(
            lambda x: st.permutahedron_value(x, w, lam, p=p, phi=phi).sum()
        )(x)
        return y, tuple(pull(g)), value, slope

    y, cotangents, value, slope = everything(x, w, lam)
    at = tuple(map(np.asarray, (x, w, lam)))
    exact = sparsetopk.permutahedron(*at, p=p, phi=phi)
    close(y, exact)
    expected = sparsetopk.permutahedron_vjp(*at, dy=g, p=p, phi=phi)
    close(cotangents, tuple(expected), rtol=1e-7, atol=1e-9)
    close(value, sparsetopk.permutahedron_value(*at, p=p, phi=phi).sum())
    close(slope[1:], exact[1:], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "p", "descending"),
    [
        ("soft_sort", 2.0, False),
        ("soft_sort", 4 / 3, True),
        ("soft_rank", 2.0, True),
        ("soft_rank", 4 / 3, False),
    ],
)
def test_sorting(name, p, descending):
    x, _ = arrays(shape=(5, 3, 7))
    lam = jnp.asarray(LAMS).reshape(5, 1, 1)
    g = np.random.default_rng(1).normal(size=x.shape)
    options = {"p": p, "descending": descending}
    y, cotangents = with_cotangents(partial(getattr(st, name), **options), g, x, lam)
    at = np.asarray(x), np.asarray(lam)
    close(y, getattr(sparsetopk, name)(*at, **options))
    expected = getattr(sparsetopk, f"{name}_vjp")(*at, dy=g, **options)
    close(cotangents, tuple(expected), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("permutahedron", dtype) for dtype in (jnp.float16, jnp.bfloat16, jnp.float32)),
        ("soft_sort", jnp.float16),
        ("soft_rank", jnp.bfloat16),
    ],
)
def test_low_precision(name, dtype):
    """One rounding to the dtype, of what is computed in float32."""
    x, w = arrays(dtype, shape=(5, 3, 7))
    lam = np.reshape(LAMS, (5, 1, 1))
    eps = max(float(jnp.finfo(dtype).eps), 8 * float(jnp.finfo(jnp.float32).eps))
    g = jnp.ones_like(x) * jnp.arange(7, dtype=dtype)
    y, (dx, dw) = with_cotangents(lambda *at: OPERATORS[name](st, *at, lam, p=1.5), g, x, w)
    assert y.dtype == dtype
    wide = np.asarray(x, np.float64), np.asarray(w, np.float64)
    close(y, OPERATORS[name](sparsetopk, *wide, lam, p=1.5), rtol=eps, atol=eps)
    assert dx.dtype == dw.dtype == dtype
    if name == "permutahedron":
        g = np.asarray(g, np.float64)
        expected = sparsetopk.permutahedron_vjp(*wide, lam, dy=g, p=1.5)
        scale = np.abs(expected.x).max(-1, keepdims=True) + 1e-30
        close(dx / scale, expected.x / scale, rtol=0, atol=10 * eps)
        close(dw, expected.w, rtol=10 * eps, atol=10 * eps * np.abs(g).sum())


def test_without_x64():
    with jax.enable_x64(False):
        x, w = np.float32([3.0, 1.0, 0.9]), np.float32([2.0, 1.0, 0.0])
        y = st.permutahedron(jnp.asarray(x), jnp.asarray(w), 0.5)
        assert y.dtype == jnp.float32
        close(y, [2.0, 0.6, 0.4], rtol=1e-6)
        assert st.soft_rank(jnp.asarray(x), 0.5, p=1.5).dtype == jnp.float32


@pytest.mark.parametrize("axis", [0, -2])
def test_every_axis(axis):
    x, _ = arrays(shape=(3, 4, 5))
    w = jnp.linspace(2.0, -1.0, x.shape[axis])
    for operator in OPERATORS.values():
        expected = operator(sparsetopk, np.asarray(x), np.asarray(w), 0.5, axis=axis)
        close(operator(st, x, w, 0.5, axis=axis), expected, rtol=1e-9, atol=1e-9)


def test_weights_that_broadcast():
    x, _ = arrays(shape=(2, 3, 4))
    g = np.random.default_rng(4).normal(size=(2, 3, 4))
    for shape in ((4,), (3, 4), (2, 1, 4), (2, 3, 4)):
        w = jnp.asarray(np.random.default_rng(5).normal(size=shape))
        y, cotangents = with_cotangents(lambda x, w: st.permutahedron(x, w, 0.8), g, x, w)
        at = np.asarray(x), np.asarray(w)
        close(y, sparsetopk.permutahedron(*at, 0.8))
        expected = sparsetopk.permutahedron_vjp(*at, 0.8, dy=g)
        close(cotangents, (expected.x, expected.w))


@pytest.mark.parametrize(("name", "p"), [("soft_sort", 2.0), ("soft_rank", 4 / 3)])
def test_extreme_lam_and_shift(name, p, way):
    x, _ = arrays(shape=(4, 100))
    x, lam = x + 1e5, np.array([[1e-8], [1e-4], [1e3], [1e8]])
    g = np.ones((4, 100)) * np.arange(100.0)
    f = partial(getattr(st, name), lam=lam, p=p)
    y, (dx,) = with_cotangents(f, g, x)
    close(y, getattr(sparsetopk, name)(np.asarray(x), lam, p=p), rtol=1e-10)
    assert np.isfinite(dx).all()


def test_tiny_lam_in_low_precision_has_finite_slopes():
    for dtype in (jnp.float16, jnp.float32):
        x = jnp.asarray([0.3, 0.3, 0.3, -1.0], dtype)
        assert np.isfinite(jax.jit(jax.grad(lambda x: st.soft_rank(x, 1e-37)[0]))(x)).all()


def test_ties_share_and_their_blocks_carry_the_slope(way):
    # and equal entries with equal weights are not pooled: neither moves
    w = jnp.asarray([[3.0, 2.0, 1.0], [1.0, 1.0, 0.0]])
    x, g = jnp.asarray([[1.0, 1.0, 0.0]] * 2), jnp.asarray([[1.0, 0.0, 0.0]] * 2)
    y, (dx,) = with_cotangents(lambda x: st.permutahedron(x, w, 0.1), g, x)
    close(y, [[2.5, 2.5, 1.0], [1.0, 1.0, 0.0]])
    close(dx, [[5.0, -5.0, 0.0], [0.0, 0.0, 0.0]])


def test_flat_blocks_give_no_nan():
    """p < 2, tied entries whose weights cancel: nothing moves with x, and w is shared."""
    x, w = jnp.zeros(2), jnp.asarray([1.0, -1.0])
    f = lambda x, w: st.permutahedron(x, w, 1.0, p=1.5)  # noqa: E731
    _, cotangents = with_cotangents(f, [1.0, 0.0], x, w)
    close(cotangents, ([0.0, 0.0], [0.5, 0.5]))


def test_an_output_of_zero_moves_and_has_no_sign():
    x, w = jnp.asarray([-1.0, -1.0]), jnp.asarray([1.0, -1.0])
    f = lambda x, w: st.permutahedron(x, w, 1.0)  # noqa: E731
    y, cotangents = with_cotangents(f, [1.0, 0.0], x, w)
    close(cotangents, ([0.5, -0.5], [0.5, 0.5]))
    assert not np.signbit(y).any()
    hard = jax.jit(lambda x: st.permutahedron(x, jnp.zeros(2), 0.0, phi="half_square"))(x)
    assert not np.signbit(hard).any()


# transforms


@pytest.mark.parametrize(
    ("f", "phi", "p"),
    [
        ("permutahedron", "identity", 1.5),
        ("permutahedron_value", "half_square", 4 / 3),
        *(
            (f, phi, p)
            for f in ("permutahedron", "permutahedron_value")
            for phi, p in (("half_square", 2.0), ("abs", 1.5), ("exp", 1.2))
        ),
    ],
)
def test_derivatives_to_order_two_in_both_modes(f, phi, p):
    x, w = arrays(shape=(2, 4))
    lam = jnp.asarray([[0.3], [3.0]])
    check_derivatives(lambda *at: getattr(st, f)(*at, p=p, phi=phi), (x, w, lam))


def test_second_derivatives_of_the_value_where_a_weight_is_zero():
    """An entry alone with w = 0 has u = x: the value is w phi(x) to first order in w."""
    x, w = jnp.asarray([3.0, 1.0]), jnp.asarray([1.0, 0.0])
    for p in (2.0, 1.5):
        value = lambda x, w, p=p: st.permutahedron_value(x, w, 0.1, p=p, phi="half_square")  # noqa: E731
        mixed = jax.jacfwd(jax.grad(value, argnums=1))(x, w)
        close(mixed[1, 1], 1.0)


@pytest.mark.parametrize(("name", "p"), [("soft_rank", 1.5), ("soft_sort", 2.0)])
def test_transforms(name, p):
    x, w = arrays()
    weights = jnp.arange(1.0, 8.0)

    def f(x):
        return OPERATORS[name](st, x, w, 0.7, p=p)

    def scalar(x):
        return (f(x) * weights).sum()

    @jax.jit
    def everything(x):
        batched = jax.vmap(jax.vmap(f))(x[None])[0], jax.vmap(f, in_axes=1, out_axes=1)(x.T).T
        jacobians = jax.jacfwd(f)(x[0]), jax.jacrev(f)(x[0])
        gradients = jax.vmap(jax.grad(scalar))(x)[0], jax.grad(jax.checkpoint(scalar))(x[0])
        carried, _ = jax.lax.scan(lambda state, row: (state + f(row), f(state)), x[0], x)
        return batched, jacobians, gradients, jax.hessian(scalar)(x[0]), carried

    batched, jacobians, gradients, hessian, carried = everything(x)
    y = f(x)
    close(batched, (y, y))
    numpys = getattr(sparsetopk, f"{name}_jacobian")(np.asarray(x[0]), 0.7, p=p)
    close(jacobians, (numpys, numpys), rtol=1e-9, atol=1e-9)
    close(gradients, (weights @ numpys,) * 2, rtol=1e-9, atol=1e-9)
    close(hessian, hessian.T)
    assert (np.abs(hessian).max() > 1e-3) == (p != 2.0)
    close(carried, x[0] + y.sum(0))
    close(jax.jit(f, donate_argnums=0)(x + 0.0), y)


def test_xla_operations_in_transforms():
    """Nested vmap and both modes, with lam and w that are batched or not."""
    x, w = arrays()
    lams = jnp.asarray([0.1, 1.0, 10.0])

    def f(x, w, lam):
        return st.permutahedron(x, w, lam, p=1.5)

    def everything(x, w, lams):
        y = jax.vmap(jax.vmap(f, (None, None, 0)), (0, None, None))(x, w, lams)
        return y, jax.vmap(jax.grad(lambda *at: f(*at)[0], argnums=(0, 1, 2)))(
            x, w[None] * lams[:, None], lams
        )

    expected = jax.jit(everything)(x, w, lams)
    with in_xla_operations():
        close(jax.jit(everything)(x, w, lams), expected, rtol=1e-9, atol=1e-9)


def test_vmap_over_w_and_lam():
    x, w = arrays()
    many_w, lams = jnp.stack([w, 2 * w, w - 1]), jnp.asarray([0.1, 1.0])
    one = lambda w, lam: st.permutahedron(x, w, lam)  # noqa: E731
    found = jax.jit(jax.vmap(jax.vmap(one, (None, 0)), (0, None)))(many_w, lams)
    for i in range(3):
        for j in range(2):
            close(found[i, j], sparsetopk.permutahedron(x, many_w[i], float(lams[j])))


def test_shapes_without_values():
    x, w = jax.ShapeDtypeStruct((3, 7), jnp.bfloat16), jax.ShapeDtypeStruct((7,), jnp.float32)
    y = jax.eval_shape(st.permutahedron, x, w)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert jax.eval_shape(st.permutahedron_value, x, w).shape == (3,)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0,)])
def test_empty(shape):
    x, w = jnp.zeros(shape), jnp.zeros(shape[-1])
    for f in (st.soft_sort, st.soft_rank, lambda x: st.permutahedron(x, w)):
        assert f(x).shape == shape
        assert jax.grad(lambda x, f=f: f(x).sum())(x).shape == shape
    assert st.permutahedron_value(x, w).shape == shape[:-1]
    assert st.half_sq_support_norm(x, 0).shape == shape[:-1]


def test_rows_that_are_sharded_stay_where_they_are():
    """In XLA operations, of which one could gather; what is asked of all devices is only who is done."""
    script = """
        import numpy as np, jax, jax.numpy as jnp
        from jax.sharding import Mesh, NamedSharding, PartitionSpec
        from sparsetopk.jax import permutahedron
        from sparsetopk.jax._solvers import ffi
        ffi.available = lambda: False
        place = NamedSharding(Mesh(np.array(jax.devices()), ("rows",)), PartitionSpec("rows"))
        x = jax.ShapeDtypeStruct((4, 2, 40), jnp.float32, sharding=place)
        for solver in ("pav", "dykstra"):
            f = lambda x, w: (permutahedron(x, w, solver=solver) ** 2).sum()
            program = jax.jit(jax.grad(f)).lower(x, x).compile().as_text()
            assert "all-reduce(" in program
            for gathers in ("all-gather(", "all-to-all(", "collective-permute("):
                assert gathers not in program, (solver, gathers)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    subprocess.run(command, check=True, env=with_four_devices())


def test_memory_of_a_gradient(way):
    """A few dozen arrays as long as the row, whatever its length."""
    n = 1_000_000
    f = jax.grad(lambda x: (st.soft_rank(x, 1.0, p=1.5) * jnp.arange(n)).sum())
    compiled = jax.jit(f).lower(jax.ShapeDtypeStruct((n,), jnp.float32)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 200 * n


# rows that are not finite, and arguments that cannot be read


@pytest.mark.parametrize("name", OPERATORS)
def test_rows_that_are_not_finite(name):
    x, w = arrays(shape=(5, 7))
    spoilt = x.at[1, 2].set(jnp.nan).at[2, 3].set(jnp.inf).at[3, 0].set(-jnp.inf)
    f = lambda x: OPERATORS[name](st, x, w, 0.5)  # noqa: E731
    y, (dx,) = with_cotangents(f, jnp.ones_like(x), spoilt)
    _, dy = jax.jit(lambda x: jax.jvp(f, (x,), (jnp.ones_like(x),)))(spoilt)
    spoilt_rows = [1, 2] if name.startswith("soft_") else [1, 2, 3]  # where -inf is padding
    for found in (y, dx, dy):
        assert np.isnan(found[jnp.asarray(spoilt_rows)]).all()
        assert np.isfinite(found[jnp.asarray([0, 4])]).all()
    close(y[0], f(x)[0])


def test_numbers_that_cannot_be_read_make_their_rows_nan():
    x, w = arrays()
    lam = jnp.asarray([[0.5], [-1.0], [jnp.inf]])
    y = jax.jit(st.soft_rank)(x, lam)
    np.testing.assert_array_equal(np.isnan(y).all(-1), [False, True, True])
    w = jnp.stack([w, -w, w.at[0].set(jnp.nan)])
    y = jax.jit(lambda x, w: st.permutahedron(x, w, phi="abs"))(x, w)
    np.testing.assert_array_equal(np.isnan(y).all(-1), [False, True, True])


def test_errors_name_the_argument():
    x, w = arrays()
    with pytest.raises(TypeError, match="w must be an array of real numbers, got list"):
        st.permutahedron(x, [1.0, 2.0])
    with pytest.raises(
        TypeError, match=r"w must be an array of real numbers, got an array of .*bool"
    ):
        st.permutahedron(x, w > 1)
    with pytest.raises(
        ValueError, match=r"w must have length n=7 along axis 1 .* got shape \(6,\)"
    ):
        st.permutahedron(x, w[:6])
    with pytest.raises(ValueError, match=r"w must have length n=7 along axis 1 .* \(2, 7\)"):
        st.permutahedron(x, jnp.stack([w, w]))
    with pytest.raises(ValueError, match="w must be nonnegative unless phi='identity', got -1"):
        st.permutahedron(x, jnp.full(7, -1.0), phi="abs")
    with pytest.raises(ValueError, match=r"lam must be finite and at least 0, got -1"):
        st.soft_rank(x, -1.0)
    with pytest.raises(ValueError, match=r"lam must be a number or broadcast to shape \(3, 1\)"):
        st.soft_rank(x, jnp.ones(7))
    with pytest.raises(ValueError, match="solver must be one of 'pav', 'dykstra', got 'bca'"):
        st.soft_sort(x, solver="bca")
    with pytest.raises(ValueError, match="p must be 2 for solver 'dykstra'"):
        st.soft_sort(x, p=1.5, solver="dykstra")
    with pytest.raises(ValueError, match=r"axis must be in \[-2, 2\)"):
        st.soft_rank(x, axis=2)
    with pytest.raises(TypeError, match=r"x must be an array of dtype .* got int"):
        st.soft_rank(jnp.arange(3))


# dykstra


@pytest.mark.parametrize("phi", PHI_NAMES[:3])
def test_dykstra_equals_pav(phi):
    x, w = arrays(shape=(4, 7))
    lam, g = jnp.asarray([[0.0], [0.1], [2.0], [9.0]]), jnp.ones((4, 7)) * jnp.arange(7.0)

    def both(solver):
        f = lambda x, w: st.permutahedron(x, w, lam, phi=phi, solver=solver)  # noqa: E731
        return with_cotangents(f, g, x, w)

    close(both("dykstra"), both("pav"), rtol=1e-6, atol=1e-6)


def test_dykstra_keeps_its_rule():
    x, _ = arrays(shape=(2, 40))
    few = {"solver": "dykstra", "solver_options": {"max_iter": 5}}
    close(st.soft_rank(x, 10.0, **few), sparsetopk.soft_rank(np.asarray(x), 10.0, **few))
    strict = {"solver": "dykstra", "solver_options": {"max_iter": 5, "tol": 1e-12}}
    with pytest.raises(sparsetopk.ConvergenceError, match="solver 'dykstra' still has a residual"):
        st.soft_rank(x, 10.0, **strict)
    rows = jax.jit(lambda x: st.soft_rank(x, jnp.asarray([[0.0], [10.0]]), **strict))(x)
    np.testing.assert_array_equal(np.isnan(rows).all(-1), [False, True])


# the top-k family by these solvers


@pytest.mark.parametrize("name", ["topk_mask", "topk", "topk_mag", "topk_sign"])
def test_top_k_by_these_solvers(name):
    x = jnp.asarray([[3.0, 1.0, 0.95, -1.0, 0.2], [-3.0, 1.0, 0.9, 0.5, 0.4]])
    k, lam = jnp.asarray([[2.0], [1.5]]), jnp.asarray([[0.1], [0.7]])
    g = jnp.ones_like(x) * jnp.arange(5.0)
    at = tuple(map(np.asarray, (x, k, lam)))
    expected = getattr(sparsetopk, name)(*at), tuple(getattr(sparsetopk, f"{name}_vjp")(*at, dy=g))
    for solver in ("pav", "dykstra") if name == "topk_mag" else ("pav",):
        found = with_cotangents(partial(getattr(st, name), solver=solver), g, x, k, lam)
        close(found, expected, rtol=1e-6, atol=1e-6)


def test_top_k_with_hard_rows_and_infinities():
    inf = jnp.inf
    x = jnp.asarray(
        [
            [3.0, 1.0, -inf, 0.9],
            [inf, inf, inf, 0.0],
            [3.0, 1.0, 0.95, 0.0],
            [1.0, jnp.nan, 0.0, 0.0],
        ]
    )
    lam = jnp.asarray([[0.5], [0.5], [0.0], [0.5]])
    for k in (2, jnp.asarray([[2], [2], [2], [2]])):
        for f in (st.topk_mask, st.topk):
            close(f(x, k, lam, solver="pav"), f(x, k, lam))


# norms


@pytest.mark.parametrize("k", [0, 0.4, 2.5, 7])
def test_norms_are_those_of_numpy(k):
    rng = np.random.default_rng(0)
    y = np.stack([rng.normal(size=(5, 7)), np.round(rng.normal(size=(5, 7))), np.zeros((5, 7))])
    close(st.half_sq_support_norm(jnp.asarray(y), k), sparsetopk.half_sq_support_norm(y, k))
    both = np.stack([y, np.abs(y)])
    close(st.support_negentropy(jnp.asarray(both), k), sparsetopk.support_negentropy(both, k))
    w = np.linspace(2.0, 0.0, 7)
    close(st.owl_norm(jnp.asarray(y), jnp.asarray(w)), sparsetopk.owl_norm(y, w))


def test_derivatives_of_norms():
    y, _ = arrays()
    k, w = jnp.asarray(2.3), jnp.linspace(2.0, 0.1, 7)
    check_derivatives(st.half_sq_support_norm, (y, k))
    check_derivatives(lambda y, k: st.support_negentropy(jnp.abs(y), k), (y, k))
    check_derivatives(st.owl_norm, (y, w))


def test_norms_where_nothing_is_finite():
    y = jnp.asarray([[1.0, jnp.nan, 0.0], [1.0, jnp.inf, 0.0], [1.0, 0.5, 0.0]])
    for f in (st.half_sq_support_norm, st.support_negentropy):
        value = f(y, 2)
        assert np.isnan(value[0])
        assert value[1] == jnp.inf
        assert np.isfinite(value[2])
        assert np.isnan(jax.jit(f)(y, 4.0)[2])
    assert np.isfinite(jax.grad(st.support_negentropy)(jnp.zeros(3), 2)).all()
