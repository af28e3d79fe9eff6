"""What a call costs: what is kept for a backward, what is traced, what is lowered."""

import re

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp

import sparsetopk.jax as st
from jax_ways import in_xla_operations
from sparsetopk.jax._solvers import ffi

X = np.random.default_rng(0).normal(size=(8, 4, 12)).astype(np.float32)
LABELS = np.random.default_rng(1).integers(12, size=(8, 4))
W = np.linspace(2.0, 0.0, 12, dtype=np.float32)
OPERATORS = {
    "topk_mask": lambda x: st.topk_mask(x, np.arange(1, 9).reshape(8, 1, 1), 0.3, p=1.5),
    "topk": lambda x: st.topk(x, 5, 0.3, two_sided=True),
    "topk in 16 bits": lambda x: st.topk(x.astype(jnp.bfloat16), 2.5, 0.3).astype(x.dtype),
    "topk_mag": lambda x: st.topk_mag(x, 5, np.full((4, 1), 0.1), straight_through=True),
    "hard": lambda x: st.topk_mag(x, 5, 0.0),
    "topk_sign": lambda x: st.topk_sign(x, 5, 0.3),
    "pav": lambda x: st.topk_mask(x, 5, 0.3, solver="pav"),
    "soft_rank": lambda x: st.soft_rank(x, 0.3, p=1.5),
    "permutahedron_value": lambda x: st.permutahedron_value(x, W, 0.3, phi="exp"),
    "topk_loss": lambda x: st.topk_loss(x, LABELS, 3, completion="best"),
    "support_negentropy": lambda x: st.support_negentropy(jnp.abs(x), 3),
    "topk_select": lambda x: st.topk_select(x, 5, 0.3, capacity=6).values,
    "choose_lam": lambda x: st.choose_lam(x, 5),
    "expert_choice": lambda x: st.expert_choice(x, 2, 0.3, capacity=3, normalize=True).weights,
    "token_choice": lambda x: st.token_choice(x, 5, 0.3, capacity=3, normalize=True).weights,
    "expert_choice, masked": lambda x: (
        st.expert_choice(
            x, 2, np.float32(0.3), capacity=3, mask=X[..., 0] > -1, select_on="gates"
        ).weights
    ),
    "token_choice, noisy": lambda x: (
        st.token_choice(x, 5, 0.3, mask=X[..., 0] > -1, noise=0.1, key=jax.random.key(0))
        .combine(x[:, None] * jnp.ones((1, 12, 1, 1), x.dtype), 4)
        .astype(x.dtype)
    ),
    "dispatch": lambda x: st.expert_choice(x, 2, 0.3, capacity=3).dispatch(x),
    "select_tokens": lambda x: st.select_tokens(x, x[..., 0], 2, where=X[0, :, 0] > -9).tokens,
    "topk_attention": lambda x: st.topk_attention(
        *[x[:, :, None]] * 3, x, x, 2, is_causal=True, where=X[..., 0] > -9
    ),
    "largest=False": lambda x: st.topk_mask(x, 2, 0.3, largest=False, where=X[0] > -1, axis=None),
    "losses": lambda x: st.topk_loss(
        x, LABELS, 3, label_smoothing=0.1, weight=np.ones(12, np.float32)
    ),
    "prune_params": lambda x: st.prune_params({"a": x, "b": x}, 0.1, 0.1, scope="global")["a"],
}


@pytest.mark.parametrize("name", OPERATORS)
def test_strict_promotion(name):
    """Of types and of shapes: that is about the code of those who ask for it."""

    def both(x):
        y, pull = jax.vjp(OPERATORS[name], x)
        return y, pull(jnp.cos(y))[0]

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        y, dx = both(jnp.asarray(X))
    assert np.isfinite(y).all()
    assert dx.shape == X.shape


def kept(f, x):
    """The size of what a backward needs, in those of x."""
    pull = jax.eval_shape(lambda x: jax.vjp(f, x)[1], x)
    return sum(v.size * v.dtype.itemsize for v in jax.tree.leaves(pull)) / (
        x.size * x.dtype.itemsize
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_backward_needs_x_and_two_numbers_of_a_row(dtype):
    x = jax.ShapeDtypeStruct((4, 10_000), dtype)
    assert kept(lambda x: st.topk_mask(x, 500, 0.1), x) < 1.01
    assert kept(lambda x: st.topk_mag(x, 500, 0.1, p=1.5), x) < 1.01
    assert kept(lambda x: st.topk_sign(x, 500, jnp.ones((4, 1))), x) < 1.01
    assert kept(lambda x: st.topk(x, 500, 0.1), x) < 2.01  # and the mask
    assert kept(lambda x: st.topk_select(x, 500, 0.1)[::2], x) < 1.2  # and 625 indices


_BACKWARD = ["permutahedron_backward"]


def equations(traced):
    """All that are printed: those inside of others too."""
    return str(traced.jaxpr).count(" = ")


@pytest.mark.skipif(not ffi.available(), reason="the core was built without the headers of XLA")
def test_only_what_a_platform_uses_is_traced():
    def slope(x):
        return jax.grad(lambda x: (st.topk_mag(x, 5, 0.1) ** 2).sum())(x)

    long = jax.ShapeDtypeStruct((8, 20_000), jnp.float32)  # for which there are no kernels
    traced = jax.jit(slope).trace(long)
    assert equations(traced) < 20
    texts = {
        platform: traced.lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cpu", "cuda", "tpu")
    }
    for name in ("sparsetopk_threshold", "sparsetopk_threshold_backward"):
        assert texts["cpu"].count(f"@{name}(") == 1
    assert "while" not in texts["cpu"]
    for f, names in (
        (lambda x: st.choose_lam(x, 5), ["choose_lam"]),
        (lambda x: st.topk_select(x, 5, 0.1), ["select"]),
        (
            lambda x: jax.grad(lambda x: sum(v.sum() for v in st.topk_select(x, 5, 0.1)[::2]))(x),
            ["select", "select_backward"],
        ),
        (lambda x: st.topk_value(x, 5, 0.1), ["value"]),
        (lambda x: st.topk_select(x, 5, 0.1, straight_through=True), ["select_straight"]),
        (
            jax.grad(lambda x: st.topk_select(x, 5, 0.1, straight_through=True).values.sum()),
            ["select_backward", "select_straight"],
        ),
        *(
            (jax.grad(lambda x, f=f: (f(x, 0.1) ** 2).sum()), ["permutahedron", *_BACKWARD])
            for f in (st.soft_rank, st.soft_sort)
        ),
        *(
            (jax.grad(lambda x, t=t, o=o: st.topk_loss(x, t, 5, **o)), ["target_loss"])
            for t, o in (
                (np.arange(8), {}),
                (np.arange(8), {"completion": "best"}),
                (np.arange(8), {"label_smoothing": 0.1}),
                (np.eye(8, 20_000), {}),
                (np.eye(8, 20_000), {"completion": "best"}),
            )
        ),
        (st.choose_rank_lam, ["choose_rank_lam"]),
        *(
            (jax.grad(lambda x, f=f: f(x).sum()), names)
            for f, names in (
                (
                    lambda x: st.permutahedron_value(x, np.arange(20_000.0), 0.1),
                    ["permutahedron_value"],
                ),
                (lambda x: st.owl_norm(x, np.ones(20_000, np.float32)), ["permutahedron_value"]),
                (lambda x: st.half_sq_support_norm(x, 5), ["conjugate"]),
                (lambda x: st.support_negentropy(x, 5), ["conjugate"]),
            )
        ),
    ):
        text = jax.jit(f).lower(long).as_text()
        assert sorted(re.findall(r"@sparsetopk_(\w+)\(", text)) == names
    for platform in ("cuda", "tpu"):
        assert "while" in texts[platform]
        assert "sparsetopk" not in texts[platform]


def test_the_search_for_lam_is_traced_once():
    traced = jax.jit(lambda x: st.choose_lam(x, 5)).trace(jnp.asarray(X))
    assert equations(traced) < 10
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.while") < 10, text.count("stablehlo.while")


@pytest.mark.skipif(not ffi.available(), reason="the core was built without the headers of XLA")
def test_the_compiled_backward_is_that_of_xla_operations():
    """In x, k and lam, for every operator, with rows that are hard, empty, full and NaN."""
    x = np.random.default_rng(0).normal(size=(600, 33)).astype(np.float32)
    x[5, 3] = np.nan
    k = np.resize([0.0, 1.0, 2.5, 16.0, 33.0], (600, 1)).astype(np.float32)
    lam = np.resize([0.3, 0.0, 1.0, 0.01], (600, 1)).astype(np.float32)
    operators = [
        lambda *at: st.topk_mask(*at),
        lambda *at: st.topk_mask(*at, p=1.5, two_sided=True),
        lambda *at: st.topk_mag(*at),
        lambda *at: st.topk_mag(*at, p=1.5, debias=False),
        lambda *at: st.topk_sign(*at, p=4 / 3),
    ]

    def slopes(*at):
        for f in operators:
            y, pull = jax.vjp(f, *at)
            yield pull(jnp.cos(y + jnp.arange(33, dtype=y.dtype)))

    compiled = jax.jit(lambda *at: list(slopes(*at)))(x, k, lam)
    with in_xla_operations():
        plain = jax.jit(lambda *at: list(slopes(*at)))(x, k, lam)
    for found, expected in zip(compiled, plain, strict=True):
        for a, b in zip(found, expected, strict=True):
            # float32 on both sides; a slope is 1/lam times differences
            scale = 1.0 + np.nan_to_num(np.abs(b)).max(-1, keepdims=True)
            np.testing.assert_allclose(a / scale, b / scale, atol=2e-4)


@pytest.mark.skipif(not ffi.available(), reason="the core was built without the headers of XLA")
@pytest.mark.parametrize("p", [2.0, 1.5, 1.2, 3.0])
def test_sorts_and_ranks_of_the_core_are_those_of_xla_operations(p):
    """Outputs and derivatives in x, w and lam; rows with ties, padding and NaN, hard rows, and a lam
    that is none."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 17)).astype(np.float32)
    x[::5] = np.round(x[::5])
    x[3, 4], x[7, 2], x[8] = np.nan, -np.inf, 0.5
    lam = np.resize([0.3, 0.0, 1.0, 0.02, 30.0], (60, 1)).astype(np.float32)
    lam[11] = np.nan
    w = rng.normal(size=(60, 17)).astype(np.float32)
    operators = [
        lambda x, w, lam: st.soft_rank(x, lam, p=p),
        lambda x, w, lam: st.soft_sort(x, lam, p=p, descending=False),
        lambda x, w, lam: st.permutahedron(jnp.where(x == -jnp.inf, 0.0, x), w, lam, p=p),
    ]

    def found():
        for f in operators:
            y, pull = jax.vjp(f, x, w, jnp.asarray(lam))
            yield y, *pull(jnp.cos(jnp.arange(17, dtype=y.dtype)) + jnp.zeros_like(y))

    compiled = list(found())
    with in_xla_operations():
        expected = list(found())
    for ours, theirs in zip(compiled, expected, strict=True):
        sizes = [
            np.nan_to_num(np.abs(v), posinf=0, neginf=0).max(-1, keepdims=True) for v in theirs
        ]
        sizes[3] = sizes[3] + sizes[1]  # that in lam is a sum of terms as large as those in x
        for a, b, size in zip(ours, theirs, sizes, strict=True):
            np.testing.assert_allclose(a / (1.0 + size), b / (1.0 + size), atol=1e-4)


@pytest.mark.skipif(not ffi.available(), reason="the core was built without the headers of XLA")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("magnitude", [False, True])
def test_straight_through_slots_of_the_core_are_those_of_xla_operations(magnitude, dtype):
    """With their derivatives; ties, hard rows, k that is not whole, NaN, and a k beyond the slots."""
    x = np.random.default_rng(0).normal(size=(40, 23))
    x[::3] = np.round(x[::3])
    x[4, 5] = np.nan
    x[5, :19] = 0.0 if magnitude else -np.inf
    k = np.resize([3.0, 4.5, 0.0, 6.0, 1.0], (40, 1)).astype(np.float32)
    k[9], k[10] = 8.0, 30.0
    # With 9 the threshold of a rounded row may be an entry to the last bit, and rounding decides.
    lam = np.resize([0.3, 2.0, 0.0, 8.7], (40, 1)).astype(np.float32)
    options = {"magnitude": magnitude, "capacity": 7, "straight_through": True}

    @jax.jit
    def both(x, k, lam):
        y, pull, others = jax.vjp(lambda *at: _live(*at, **options), x, k, lam, has_aux=True)
        return *y, *others, *pull(jax.tree.map(jnp.cos, y))

    at = jnp.asarray(x, dtype), jnp.asarray(k), jnp.asarray(lam)
    compiled = both(*at)
    with in_xla_operations():
        expected = both(*at)
    np.testing.assert_array_equal(compiled[2], expected[2])
    np.testing.assert_array_equal(compiled[3], expected[3])
    for a, b in zip(compiled, expected, strict=True):
        a, b = (np.asarray(v, np.float64) for v in (a, b))
        scale = 1.0 + np.nan_to_num(np.abs(b)).max(-1, keepdims=True)
        tolerance = 1e-4 if dtype == jnp.float32 else 0.02
        np.testing.assert_allclose(a / scale, b / scale, atol=tolerance)


def _live(*at, **options):
    found = st.topk_select(*at, **options)
    return (found.values, found.dropped), (found.indices, found.selected)


def test_labels_that_are_none():
    """Where they cannot be read a bad label makes its row NaN; what is known is read, also under jit."""
    loss = jax.jit(lambda x, y: st.topk_loss(x, y, 3, reduction="none"))
    found = loss(X[:, 0], jnp.asarray([0, -100, 12, 11, 3, -1, 5, 99]))
    np.testing.assert_array_equal(np.isnan(found), [0, 0, 1, 0, 0, 1, 0, 1])
    assert found[1] == 0  # that is ignore_index
    y = jnp.asarray(LABELS)
    for completion in ("best", "spread", None):
        inside = jax.jit(lambda x, c=completion: st.topk_loss(x, y, 3, completion=c))(X)
        np.testing.assert_allclose(inside, st.topk_loss(X, y, 3, completion=completion), rtol=1e-6)


KEPT = {
    "topk_mask": (lambda x: st.topk_mask(x, 10, 0.1), 1),
    "topk": (lambda x: st.topk(x, 10, 0.1), 1),
    "straight through": (lambda x: st.topk_mag(x, 10, 0.1, straight_through=True), 1),
    "topk_loss": (lambda x: st.topk_loss(x, jnp.zeros(64, int), 3), 1),
    # and in float32 what the solver found of the blocks
    "soft_rank": (lambda x: st.soft_rank(x, 0.1), (1, 2)),
    "soft_sort": (lambda x: st.soft_sort(x, 0.1), (1, 3)),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", KEPT)
def test_what_a_backward_keeps(name, dtype):
    """In units of x: softmax keeps 1."""
    f, most = KEPT[name]
    of_x, of_blocks = most if isinstance(most, tuple) else (most, 0)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 500)), dtype)
    kept = jax.tree.leaves(jax.vjp(jax.jit(f), x)[1])
    size = sum(v.nbytes for v in kept if hasattr(v, "nbytes"))
    assert size <= 1.1 * of_x * x.nbytes + 4 * of_blocks * x.size


HARD = np.array(
    [
        [1.0, 1.0, 1.0, 0.0, 0.0, -1.0, 1.0, 0.5],
        [3.0, 3.0, 2.0, 2.0, 2.0, 2.0, -5.0, 1e30],
        [0.0, -0.0, 0.0, -0.0, 0.0, 0.0, 0.0, 0.0],
        [-1.0, -2.0, -np.inf, -4.0, -np.inf, -6.0, -7.0, -8.0],
        [1e-40, -1e-40, 1.0, 1.0, 2.0, -2.0, np.nan, 1e-45],
        [np.inf, np.inf, np.inf, 0.0, 1.0, 2.0, 3.0, 4.0],
    ],
    np.float32,
)


@pytest.mark.parametrize("name", ["topk_mask", "topk_mag"])
def test_hard_rows_by_the_largest_entries(name):
    """Where k is known while tracing, and small; as where it is not."""
    f = getattr(st, name)
    x = np.where(np.isinf(HARD), 9.0, HARD) if name == "topk_mag" else HARD
    with in_xla_operations():
        for k in (0, 1, 3.5, np.array([[1], [2.5], [0], [6], [8], [4]])):
            known = jax.jit(lambda x, k=k: f(x, k, 0.0))
            unknown = jax.jit(lambda x, k: f(x, k, 0.0))(x, jnp.asarray(k, jnp.float32))
            np.testing.assert_array_equal(known(x), unknown)
    long = jax.ShapeDtypeStruct((4, 20_000), jnp.float32)
    for k, loops in ((5, False), (16, False), (17, True)):
        program = jax.jit(lambda x, k=k: f(x, k, 0.0)).trace(long)
        text = program.lower(lowering_platforms=("cuda",)).as_text()
        assert ("stablehlo.while" in text) == loops
        assert ("top_k" in text) != loops
