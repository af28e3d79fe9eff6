"""Selection for each input in JAX, against dense formulas and the layers of torch."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp

import sparsetopk.jax as st

RNG = np.random.default_rng(0)


def draw(*shape):
    return jnp.asarray(RNG.normal(size=shape))


def through(scores, k, backward_k, lam):
    relaxed = st.topk_mask(scores, backward_k, lam)
    return jax.lax.stop_gradient(st.topk_mask(scores, k, 0.0) - relaxed) + relaxed


@pytest.mark.parametrize("backward_k", [None, 1])
def test_tokens_are_selected_in_order_with_the_relaxed_gradient(backward_k):
    x, scores, where = draw(200, 12, 5), draw(200, 12), RNG.random((200, 12)) < 0.7
    where[0] = False
    options = {"backward_k": backward_k, "where": where, "capacity": 12}

    def found(x, scores):
        return jnp.sin(st.select_tokens(x, scores, 3, 0.7, **options).tokens.sum(-2)).sum()

    def dense(x, scores):
        y = through(jnp.where(where, scores, -jnp.inf), 3, backward_k or 3, 0.7)
        return jnp.sin((x * y[..., None]).sum(-2)).sum()

    pairs = [jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(x, scores) for f in (found, dense)]
    for a, b in zip(*map(jax.tree.leaves, pairs), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)
    few = st.select_tokens(x, scores, 3, 0.0, where=where)
    assert few.tokens.shape == (200, 3, 5)
    assert not few.tokens[0].any()
    np.testing.assert_array_equal(few.selected.sum(-1), np.minimum(where.sum(-1), 3))
    assert (np.diff(few.indices, axis=-1) > 0)[np.asarray(few.selected[:, 1:])].all()


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_is_the_dense_formula(is_causal):
    q, k, v = (draw(2, 20, 2, 4) for _ in range(3))
    a, b, where = draw(2, 20, 6), draw(2, 20, 6), RNG.random((2, 20)) < 0.8
    where[1] = False

    def found(*at):
        options = {"capacity": 20, "is_causal": is_causal, "where": where, "chunk": 7}
        return jnp.sin(st.topk_attention(*at, 3, 0.5, **options)).sum()

    def dense(q, k, v, a, b):
        allowed = np.broadcast_to(where[:, None], (2, 20, 20))
        allowed = np.tril(allowed) if is_causal else allowed
        scores = jnp.einsum("bqd,bkd->bqk", a, b) / 6**0.5
        y = through(jnp.where(allowed, scores, -jnp.inf), 3, 3, 0.5)
        weights = jnp.exp(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2) * y[:, None]
        total = weights.sum(-1, keepdims=True)
        weights = jnp.where(total > 0, weights / jnp.where(total > 0, total, 1.0), 0.0)
        return jnp.sin(jnp.einsum("bhqk,bkhd->bqhd", weights, v)).sum()

    pairs = [
        jax.jit(jax.value_and_grad(f, argnums=tuple(range(5))))(q, k, v, a, b)
        for f in (found, dense)
    ]
    for one, other in zip(*map(jax.tree.leaves, pairs), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12)
    assert np.abs(pairs[0][1][3]).max() > 0  # the indexer learns


def test_attention_takes_no_harm_from_large_logits_of_what_competes():
    """The keys that compete are not seen in the forward, however well they would fit the query."""
    q, k, v, a, b = (draw(2, 20, *s).astype("float32") for s in [(2, 4)] * 3 + [(6,)] * 2)
    where = jnp.ones((2, 20), dtype=bool).at[1].set(False)

    def found(lam, *at):
        return st.topk_attention(100 * at[0], *at[1:], 3, lam, capacity=20, where=where)

    y, derivative = jax.vjp(lambda *at: found(0.5, *at), q, k, v, a, b)
    np.testing.assert_allclose(y, found(0.0, q, k, v, a, b), rtol=1e-6)
    assert all(jnp.isfinite(g).all() for g in derivative(1e3 * jnp.ones_like(y)))


def test_what_is_selected_has_the_weight_1_to_the_last_bit():
    weights = st.select_tokens(draw(500, 12, 1), draw(500, 12), 3, 0.7).weights
    np.testing.assert_array_equal(jnp.sort(weights, -1)[:, -3:], 1.0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: st.select_tokens(draw(4, 2), draw(4), 5), ValueError, r"k must be in \[1, n\]"),
        (
            lambda: st.select_tokens(draw(4, 2), draw(3), 2),
            ValueError,
            "scores must have the shape",
        ),
        (lambda: st.select_tokens(draw(4, 2), jnp.arange(4), 2), TypeError, "scores must"),
        (
            lambda: st.select_tokens(draw(4, 2), draw(4), 3, capacity=2),
            ValueError,
            r"capacity must be at least ceil\(k\)=3",
        ),
        (
            lambda: st.select_tokens(draw(4, 2), draw(4), 3, backward_k=4),
            ValueError,
            r"backward_k must be in \[1, 3\]",
        ),
        (
            lambda: st.topk_attention(*[draw(2, 5, 3, 4)] * 4, draw(2, 5, 4), 2),
            ValueError,
            r"index_query must have shape \[batch, L, index_dim\]",
        ),
        (
            lambda: st.topk_attention(*[draw(2, 5, 3, 4)] * 3, draw(2, 5, 4), draw(2, 4, 4), 2),
            ValueError,
            r"index_key must have .* of key, \(2, 5\), got \(2, 4, 4\)",
        ),
    ],
)
def test_wrong_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["flax", "equinox"])
def test_an_indexer_in_other_frameworks_learns(framework, monkeypatch, capsys):
    for name in ("flax", "equinox", "optax"):
        pytest.importorskip(name)
    example = Path(__file__).parent.parent / "examples" / "jax_indexer.py"
    monkeypatch.setattr(sys, "argv", ["jax_indexer.py", "--framework", framework])
    runpy.run_path(str(example), run_name="__main__")
    assert float(capsys.readouterr().out.split()[1]) > 99
