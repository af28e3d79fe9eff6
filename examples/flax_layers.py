"""Layers for Flax NNX: a sparse activation, and a mixture of experts with a relaxed router."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import sparsetopk.jax as st


class TopK(nnx.Module):
    """Keeps the k largest of the features in magnitude; hard in ``eval()``."""

    def __init__(self, k: int, lam: float = 0.1):
        self.k, self.lam, self.deterministic = k, lam, False

    def __call__(self, x: jax.Array) -> jax.Array:
        return st.topk_mag(x, self.k, 0.0 if self.deterministic else self.lam)


class Mixture(nnx.Module):
    """Every token takes k experts, linear ones; tokens are [..., tokens, dim]."""

    def __init__(self, experts: int, dim: int, k: int, *, rngs: nnx.Rngs):
        self.gate = nnx.Linear(dim, experts, use_bias=False, rngs=rngs)
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (experts, dim, dim)) / dim**0.5)
        self.k = k

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        routing = st.token_choice(self.gate(x), self.k, lam=0.3, capacity_factor=1.5)
        y = jnp.einsum("...esd,edf->...esf", routing.dispatch(x), self.kernel[...])
        return x + routing.combine(y, x.shape[-2]), routing.balance


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.mixture = Mixture(4, 8, 2, rngs=rngs)
        self.sparse = TopK(4)
        self.out = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, balance = self.mixture(x)
        return self.out(self.sparse(y))[..., 0], balance


def train(steps: int = 300) -> tuple[float, float]:
    """The loss before and after."""
    x = jax.random.normal(jax.random.key(0), (8, 16, 8))
    target = jnp.where(x[..., 0] > 0, x[..., 1], -x[..., 2])
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    def loss(model: Model) -> jax.Array:
        y, balance = model(x)
        return ((y - target) ** 2).mean() + 0.01 * balance

    @nnx.jit
    def step(model: Model, optimizer: nnx.Optimizer) -> jax.Array:
        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    losses = [float(step(model, optimizer)) for _ in range(steps)]
    return losses[0], losses[-1]


if __name__ == "__main__":
    print("loss: {:.3f} -> {:.3f}".format(*train()))
