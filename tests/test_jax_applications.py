"""Pruning of parameters and routing of tokens in JAX."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp

import sparsetopk.jax as st


def normal(*shape, seed=0, dtype=jnp.float64):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def parameters():
    return {
        "first": {"kernel": normal(20, 10), "bias": normal(10, seed=1)},
        "second": [normal(10, 3, seed=2, dtype=jnp.float32)],
        "steps": jnp.int32(3),
    }


def test_each_tensor_keeps_its_share():
    params = parameters()
    hard = st.prune_params(params, keep=0.1, lam=0.0)
    assert int((hard["first"]["kernel"] != 0).sum()) == 20
    assert int((hard["second"][0] != 0).sum()) == 3
    assert hard["second"][0].dtype == jnp.float32
    np.testing.assert_array_equal(hard["first"]["bias"], params["first"]["bias"])
    assert hard["steps"] == 3
    kept = hard["first"]["kernel"] != 0
    np.testing.assert_array_equal(hard["first"]["kernel"][kept], params["first"]["kernel"][kept])
    count = st.prune_params(params, keep=7, lam=0.0)
    assert int((count["first"]["kernel"] != 0).sum()) == 7
    through = st.prune_params(params, keep=0.1, lam=0.5, straight_through=True)
    np.testing.assert_array_equal(through["first"]["kernel"], hard["first"]["kernel"])


def test_all_together_is_the_top_k_of_one_vector():
    params = parameters()
    pruned = st.prune_params(params, keep=0.2, lam=0.3, p=1.5, scope="global")
    weights = [params["first"]["kernel"], params["second"][0]]
    together = jnp.concatenate([w.ravel() for w in weights])
    expected = st.topk_mag(together, 46, 0.3, p=1.5)
    np.testing.assert_allclose(pruned["first"]["kernel"].ravel(), expected[:200], rtol=1e-12)
    np.testing.assert_allclose(pruned["second"][0].ravel(), expected[200:], rtol=1e-6)


def test_where_chooses_by_path_and_leaf():
    params = parameters()
    pruned = st.prune_params(params, keep=0.1, lam=0.0, where=lambda path, _: path == "first/bias")
    assert int((pruned["first"]["bias"] != 0).sum()) == 1
    np.testing.assert_array_equal(pruned["first"]["kernel"], params["first"]["kernel"])
    with pytest.raises(ValueError, match="where must hold for at least one leaf"):
        st.prune_params(params, where=lambda path, leaf: False)
    with pytest.raises(ValueError, match=r"keep must be in \[0, 1\], got 1.5"):
        st.prune_params(params, keep=1.5)
    with pytest.raises(TypeError, match="keep must be a share"):
        st.prune_params(params, keep="all")


def test_gradients_reach_the_block_and_nothing_below():
    w = normal(10, 10)
    loss = lambda w: (st.prune_params({"w": w}, keep=0.1, lam=0.5)["w"] ** 2).sum()  # noqa: E731
    pruned, gradient = st.prune_params({"w": w}, keep=0.1, lam=0.5)["w"], jax.grad(loss)(w)
    np.testing.assert_array_equal(gradient != 0, pruned != 0)
    assert int((pruned != 0).sum()) > 10  # the fractional ones are there too


def test_keep_may_be_traced_and_differ_from_leaf_to_leaf():
    params = parameters()
    expected = st.prune_params(params, keep=0.2, lam=0.3)
    traced = jax.jit(lambda q, keep, lam: st.prune_params(q, keep, lam))(params, 0.2, 0.3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), traced, expected)
    by_path = lambda path, leaf: 5 if path == "first/kernel" else 0.5  # noqa: E731
    by_tree = {"first": 5, "second": [0.5], "steps": 0}
    for keep in (by_path, by_tree):
        found = st.prune_params(params, keep, lam=0.0)
        assert st.sparsity(found) == {"first/kernel": (5, 200), "second/0": (15, 30), "": (20, 230)}
    with pytest.raises(TypeError, match="keep must be one number with scope='global'"):
        st.prune_params(params, by_path, scope="global")


def test_a_pruned_model_learns():
    x, truth = normal(256, 20), jnp.where(jnp.arange(20) < 2, 2.0, 0.0)[:, None]
    y = x @ truth
    params = {"w": 0.2 * truth + 0.02 * normal(20, 1, seed=3)}
    loss = lambda q, lam: ((x @ st.prune_params(q, keep=0.1, lam=lam)["w"] - y) ** 2).mean()  # noqa: E731
    step = jax.jit(lambda q: jax.tree.map(lambda a, g: a - 0.05 * g, q, jax.grad(loss)(q, 0.5)))
    before = loss(params, 0.0)
    for _ in range(200):
        params = step(params)
    assert loss(params, 0.0) < 1e-2 * before
    assert int((st.prune_params(params, keep=0.1, lam=0.0)["w"] != 0).sum()) == 2


@pytest.mark.parametrize("router", ["expert_choice", "token_choice"])
@pytest.mark.parametrize(
    "options",
    [
        {"lam": 0.3},
        {"lam": 0.0},
        {"lam": 0.05, "select_on": "gates", "capacity": 6, "normalize": True},
        {"lam": 0.3, "p": 1.5, "two_sided": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("masked", [False, True])
def test_routing_is_that_of_torch(router, options, masked):
    torch = pytest.importorskip("torch")
    import sparsetopk.torch as other

    logits = np.random.default_rng(0).normal(size=(2, 12, 4))
    if (
        router == "token_choice"
    ):  # torch has as many slots as it takes here, JAX as many as it may take
        options = {"capacity": 12} | options
    mask = np.arange(12) < np.array([[12], [9]]) if masked else None
    given = {"mask": mask} if masked else {}
    routing = getattr(st, router)(jnp.asarray(logits), 2.0, **options, **given)
    given = {"mask": torch.from_numpy(mask)} if masked else {}
    expected = getattr(other, router)(torch.from_numpy(logits), 2.0, **options, **given)
    for ours, theirs in zip(routing, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-12)
    for ours, theirs in zip(
        routing.statistics().values(), expected.statistics().values(), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_routing_has_gradients_and_fixed_shapes():
    logits = normal(2, 30, 4)
    f = jax.jit(lambda x: st.expert_choice(x, 6, 0.3, capacity=10))
    assert f(logits).tokens.shape == (2, 4, 10)
    gradient = jax.grad(lambda x: (f(x).selected ** 2).sum())(logits)
    assert jnp.isfinite(gradient).all()
    assert (gradient != 0).any()
    batched = jax.vmap(lambda x: st.token_choice(x, 2, 0.3))(logits)
    np.testing.assert_allclose(batched.weights, st.token_choice(logits, 2, 0.3).weights, atol=1e-12)


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match=r"logits must have shape \[..., tokens, experts\]"):
        st.expert_choice(normal(5), 1)
    with pytest.raises(TypeError, match="mask must be an array of booleans"):
        st.token_choice(normal(5, 3), 1, mask=jnp.ones(5))
    with pytest.raises(ValueError, match=r"mask must have shape \(5,\), got \(3,\)"):
        st.token_choice(normal(5, 3), 1, mask=jnp.ones(3, bool))
    with pytest.raises(ValueError, match="select_on must be one of"):
        st.expert_choice(normal(5, 3), 1, select_on="scores")


def test_a_mixture_by_dispatch_and_combine():
    x, logits, w = normal(2, 12, 5), normal(2, 12, 3, seed=1), normal(3, 5, 5, seed=2)
    routing = st.token_choice(logits, 2, 0.3, capacity_factor=1.0)
    assert routing.tokens.shape == (2, 3, 8)

    def layer(x, w):
        y = jnp.einsum("besd,edf->besf", routing.dispatch(x), w)
        return routing.combine(jnp.tanh(y), 12)

    taken = (
        jnp.zeros((2, 3, 12))
        .at[jnp.arange(2)[:, None, None], jnp.arange(3)[:, None], routing.tokens]
        .add(routing.weights)
    )

    def dense(x, w):
        y = jnp.tanh(jnp.einsum("btd,edf->betf", x, w))
        return jnp.einsum("bet,betd->btd", taken, y)

    np.testing.assert_allclose(layer(x, w), dense(x, w), atol=1e-12)
    slope = lambda f: jax.grad(lambda *at: jnp.cos(f(*at)).sum(), argnums=(0, 1))(x, w)  # noqa: E731
    for a, b in zip(slope(layer), slope(dense), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)


def test_noise_and_capacity_factor():
    logits = normal(2, 12, 3)
    by_factor = st.expert_choice(logits, capacity_factor=1.0, lam=0.3)
    for a, b in zip(by_factor, st.expert_choice(logits, 4, 0.3), strict=True):
        np.testing.assert_array_equal(a, b)
    key = jax.random.key(0)
    noisy = st.expert_choice(logits, 4, noise=0.5, key=key)
    moved = st.expert_choice(logits + 0.5 * jax.random.normal(key, logits.shape, logits.dtype), 4)
    np.testing.assert_array_equal(noisy.weights, moved.weights)
    with pytest.raises(ValueError, match=r"key must be given with noise=0\.5"):
        st.token_choice(logits, 2, noise=0.5)
    with pytest.raises(ValueError, match="exactly one of k and capacity_factor"):
        st.expert_choice(logits)
