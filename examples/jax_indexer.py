"""An indexer that learns to fetch k of n tokens, in Flax NNX or in Equinox, with optax.

pip install 'sparsetopk[jax]' flax equinox optax
python examples/jax_indexer.py --framework equinox
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import sparsetopk.jax as st

TOKENS, K, CODE, VALUE, BATCH = 64, 4, 16, 4, 64


def answer(
    index: Callable[..., Any], gate: Callable[..., Any], batch: tuple[jax.Array, ...], lam: float
) -> tuple[jax.Array, jax.Array]:
    """What is read from the fetched tokens, and which these are. The model alone differs."""
    queries, codes, values, _ = batch
    scores = jnp.einsum("bi,bni->bn", index(queries), codes) / CODE**0.5
    both = jnp.concatenate([codes, values], axis=-1)
    found = st.select_tokens(both, scores, K, lam, backward_k=1)
    fetched = jnp.take_along_axis(both, found.indices[..., None], axis=1)
    logits = jnp.einsum("bi,bsi->bs", gate(queries), fetched[..., :CODE]) / CODE**0.5
    weights = found.weights * jnp.exp(logits - logits.max(axis=-1, keepdims=True))
    weights = weights / weights.sum(axis=-1, keepdims=True)
    return jnp.einsum("bs,bsv->bv", weights, fetched[..., CODE:]), found.indices[:, :K]


def error(
    index: Callable[..., Any], gate: Callable[..., Any], batch: tuple[jax.Array, ...]
) -> jax.Array:
    read, _ = answer(index, gate, batch, lam=1.0)
    values, needle = batch[2:]
    return jnp.square(read - values[jnp.arange(BATCH), needle]).mean()


def draw(key: jax.Array) -> tuple[jax.Array, ...]:
    keys = jax.random.split(key, 3)
    hidden = jnp.linalg.qr(jax.random.normal(jax.random.key(7), (CODE, CODE)))[0]
    codes = jax.random.normal(keys[0], (BATCH, TOKENS, CODE))
    values = jax.random.normal(keys[1], (BATCH, TOKENS, VALUE))
    needle = jax.random.randint(keys[2], (BATCH,), 0, TOKENS)
    return codes[jnp.arange(BATCH), needle] @ hidden, codes, values, needle


def batches(steps: int) -> Iterator[tuple[jax.Array, ...]]:
    drawn = jax.jit(draw)
    return (drawn(jax.random.key(step)) for step in range(100, 100 + steps))


class Flax(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.index = nnx.Linear(CODE, CODE, use_bias=False, rngs=rngs)
        self.gate = nnx.Linear(CODE, CODE, use_bias=False, rngs=rngs)


def train_flax(steps: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    model = Flax(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model: Flax, optimizer: nnx.Optimizer, batch: tuple[jax.Array, ...]) -> None:
        gradient = nnx.grad(lambda model: error(model.index, model.gate, batch))(model)
        optimizer.update(model, gradient)

    for batch in batches(steps):
        step(model, optimizer, batch)
    return model.index, model.gate


class Equinox(eqx.Module):
    index: eqx.nn.Linear
    gate: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key)
        self.index, self.gate = (
            eqx.nn.Linear(CODE, CODE, use_bias=False, key=each) for each in keys
        )


def train_equinox(steps: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    model = Equinox(jax.random.key(0))
    optimizer = optax.adam(1e-2)
    state = optimizer.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def step(model: Equinox, state: Any, batch: tuple[jax.Array, ...]) -> tuple[Equinox, Any]:
        def loss(model: Equinox) -> jax.Array:
            return error(jax.vmap(model.index), jax.vmap(model.gate), batch)

        updates, state = optimizer.update(eqx.filter_grad(loss)(model), state)
        return eqx.apply_updates(model, updates), state

    for batch in batches(steps):
        model, state = step(model, state, batch)
    return jax.vmap(model.index), jax.vmap(model.gate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--framework", choices=("flax", "equinox"), default="flax")
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    train = {"flax": train_flax, "equinox": train_equinox}[arguments.framework]
    index, gate = train(arguments.steps)
    found = [
        (answer(index, gate, batch, lam=0.0)[1] == batch[3][:, None]).any(axis=-1).mean()
        for batch in map(draw, jax.random.split(jax.random.key(1), 10))
    ]
    print(f"{arguments.framework}: {100 * sum(found) / len(found):.1f} % of the needles fetched")


if __name__ == "__main__":
    main()
