"""Pruning around an optimiser of optax is pruning in the loss; layers for Flax NNX and Equinox learn."""

import runpy
from pathlib import Path

import numpy as np
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

import jax.numpy as jnp

import sparsetopk.jax as st
from sparsetopk.jax.optax import pruned

RNG = np.random.default_rng(0)
X, Y = jnp.asarray(RNG.normal(size=(64, 12))), jnp.asarray(RNG.normal(size=(64, 3)))
PARAMS = {
    "first": {"kernel": jnp.asarray(RNG.normal(size=(12, 8))), "bias": jnp.zeros(8)},
    "last": {"kernel": jnp.asarray(RNG.normal(size=(8, 3)))},
}


def loss(params):
    hidden = jnp.tanh(X @ params["first"]["kernel"] + params["first"]["bias"])
    return ((hidden @ params["last"]["kernel"] - Y) ** 2).mean()


def by_layer(path, leaf):
    return 0.5 if path.startswith("first") else 0.25


@pytest.mark.parametrize(
    ("keep", "options"),
    [
        (optax.linear_schedule(1.0, 0.2, 6), {"scope": "global"}),
        (lambda step: by_layer, {"straight_through": True}),
        (0.3, {"p": 1.5}),
    ],
    ids=["ramp", "by layer", "fixed"],
)
def test_around_an_optimizer_is_as_in_the_loss(keep, options):
    lam = optax.linear_schedule(1.0, 0.1, 6)
    at = lambda step: keep(step) if callable(keep) else keep  # noqa: E731
    optimizer = pruned(optax.adam(0.05), keep, lam, **options)
    inside = optax.adam(0.05)
    traces = []

    @jax.jit
    def step(params, state):
        traces.append(None)
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def expected_step(weights, state, i):
        seen = lambda weights: loss(st.prune_params(weights, at(i), lam(i), **options))  # noqa: E731
        updates, state = inside.update(jax.grad(seen)(weights), state, weights)
        return optax.apply_updates(weights, updates), state

    state, weights, expected = optimizer.init(PARAMS), PARAMS, inside.init(PARAMS)
    # Schedules compute in float32, and round in another way outside of jit.
    prune = jax.jit(lambda weights, i: st.prune_params(weights, at(i), lam(i), **options))
    first, last = jnp.int32(0), jnp.int32(8)
    params = prune(PARAMS, first)
    for i in range(8):
        params, state = step(params, state)
        weights, expected = expected_step(weights, expected, jnp.int32(i))
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-9)  # noqa: E731
    jax.tree.map(close, state.weights, weights)
    jax.tree.map(close, params, prune(weights, last))
    assert len(traces) == 1
    assert state.step == 8
    final = st.prune_params(state.weights, at(last), 0.0, **options | {"straight_through": False})
    kept, of = st.sparsity(final)[""]
    assert of == 120
    assert kept == {"ramp": 24, "by layer": 54, "fixed": 29 + 7}[_name(keep, options)]


def _name(keep, options):
    return "ramp" if "scope" in options else "by layer" if callable(keep) else "fixed"


def test_params_must_be_given():
    optimizer = pruned(optax.sgd(0.1))
    with pytest.raises(ValueError, match="params must be given to the update of pruned"):
        optimizer.update(PARAMS, optimizer.init(PARAMS))


@pytest.mark.parametrize("name", ["flax", "equinox"])
def test_layers(name):
    """The examples end with a loss, before and after."""
    pytest.importorskip(name)
    path = Path(__file__).parent.parent / "examples" / f"{name}_layers.py"
    with jax.enable_x64(False):
        before, after = runpy.run_path(str(path))["train"](steps=60)
    assert after < 0.5 * before
