"""Train a classifier with the top-k loss, in Flax NNX and optax, on scikit-learn's digits.

pip install 'sparsetopk[jax]' flax optax scikit-learn
python examples/flax_topk_loss.py
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from sklearn.datasets import load_digits

import sparsetopk.jax as st


class Classifier(nnx.Module):
    """An MLP whose hidden layer keeps its eight largest activations."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(64, 128, rngs=rngs)
        self.out = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(st.topk_mag(self.hidden(x), k=8, lam=0.1))


@nnx.jit
def train_step(
    model: Classifier, optimizer: nnx.Optimizer, x: jax.Array, t: jax.Array
) -> jax.Array:
    def loss(model: Classifier) -> jax.Array:
        return st.topk_loss(model(x), t, k=3, lam=1.0, completion="best")

    value, gradient = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradient)
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    epochs = parser.parse_args().epochs
    x, t = load_digits(return_X_y=True)
    x, t = jnp.asarray(x / 16.0, dtype=jnp.float32), jnp.asarray(t)
    model = Classifier(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    for epoch in range(epochs):
        for start in range(0, 1280, 128):
            value = train_step(model, optimizer, x[start : start + 128], t[start : start + 128])
        top = jax.lax.top_k(model(x[1280:]), 3)[1]
        accuracy = [(top[:, :k] == t[1280:, None]).any(axis=-1).mean() for k in (1, 3)]
        print(
            f"epoch {epoch:2d}  loss {value:.4f}  top-1 {accuracy[0]:.3f}  top-3 {accuracy[1]:.3f}"
        )


if __name__ == "__main__":
    main()
