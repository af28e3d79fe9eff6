"""Layers for Equinox: a sparse activation, and a linear layer that is pruned while it trains."""

import equinox as eqx
import jax
import optax

import sparsetopk.jax as st


class TopK(eqx.Module):
    """Keeps the k largest of the features in magnitude."""

    k: int
    lam: float = 0.1

    def __call__(self, x: jax.Array) -> jax.Array:
        return st.topk_mag(x, self.k, self.lam)


class Pruned(eqx.Module):
    """A layer whose weights are a relaxed top-k of those that it learns."""

    layer: eqx.Module
    keep: float
    lam: float = 0.1

    def __call__(self, x: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        arrays, rest = eqx.partition(self.layer, eqx.is_array)
        return eqx.combine(st.prune_params(arrays, self.keep, self.lam), rest)(x)


def train(steps: int = 300) -> tuple[float, float]:
    """The loss before and after."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (128, 16))
    target = x[:, :1] - 2 * x[:, 1:2]
    model = eqx.nn.Sequential(
        [
            Pruned(eqx.nn.Linear(16, 32, key=keys[1]), keep=0.2),
            eqx.nn.Lambda(TopK(8)),
            Pruned(eqx.nn.Linear(32, 1, key=keys[2]), keep=0.5),
        ]
    )
    optimizer = optax.adam(1e-2)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_value_and_grad
    def loss(model: eqx.Module) -> jax.Array:
        return ((jax.vmap(model)(x) - target) ** 2).mean()

    @eqx.filter_jit
    def step(model: eqx.Module, state: optax.OptState) -> tuple:
        value, gradients = loss(model)
        updates, state = optimizer.update(gradients, state)
        return eqx.apply_updates(model, updates), state, value

    losses = []
    for _ in range(steps):
        model, state, value = step(model, state)
        losses.append(float(value))
    return losses[0], losses[-1]


if __name__ == "__main__":
    print("loss: {:.3f} -> {:.3f}".format(*train()))
