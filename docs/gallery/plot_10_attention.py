"""
Top-k attention, in JAX
=======================

Softmax attention gives every key some weight. A top-k mask gives weight to few of them, and
exactly none to the others; relaxed, it still learns which.
"""

from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import sparsetopk.jax as st
from sparsetopk.experiments.drawing import COLOURS

# %%
# The task
# --------
#
# 64 tokens, of 16 kinds, four of each. A token shows its kind only in a few of its 24 numbers,
# by a code that is the same everywhere; the others are noise. Each token is to return the mean
# of the values of its kind: it must find the four, itself among them.

KINDS, EACH, CODE, NOISE, VALUE = 16, 4, 8, 16, 8
TOKENS = KINDS * EACH
random = np.random.default_rng(0)
codes = random.normal(size=(KINDS, CODE))
kinds = np.repeat(np.arange(KINDS), EACH)


def draw(batch):
    """Tokens, values and targets."""
    shown = codes[kinds] + 0.3 * random.normal(size=(batch, TOKENS, CODE))
    noise = random.normal(size=(batch, TOKENS, NOISE))
    values = random.normal(size=(batch, TOKENS, VALUE))
    means = values.reshape(batch, KINDS, EACH, VALUE).mean(axis=2)
    tokens = np.concatenate([shown, noise], axis=-1)
    return tuple(
        np.float32(part) for part in (tokens, values, np.repeat(means, EACH, axis=1))
    )


# %%
# Three kinds of attention
# ------------------------
#
# They differ in how scores become weights. The relaxed top-k mask sums to k, so that dividing
# by k makes weights.


def softmax(scores):
    return jax.nn.softmax(scores)


def hard(scores):
    """Softmax over the 4 largest scores; which they are has no derivative."""
    chosen = st.topk_mask(scores, EACH, 0.0)
    return jax.nn.softmax(jnp.where(chosen > 0, scores, -jnp.inf))


def equal(scores):
    """Equal weights for the 4 largest scores: without a derivative, and not for training."""
    return st.topk_mask(scores, EACH, 0.0) / EACH


def relaxed(scores):
    return st.topk_mask(scores, EACH, 1.0) / EACH


METHODS = {"softmax": softmax, "hard": hard, "relaxed": relaxed}
colours = {
    "softmax": COLOURS["dense"],
    "hard": COLOURS["hard"],
    "relaxed": COLOURS["p = 2"],
}


def attention(weigh, params, tokens):
    queries, keys = tokens @ params["query"], tokens @ params["key"]
    return weigh(queries @ keys.mT / jnp.sqrt(queries.shape[-1]))


def loss(weigh, params, tokens, values, targets):
    """The error relative to that of answering 0."""
    answers = attention(weigh, params, tokens) @ values
    return jnp.square(answers - targets).mean() / jnp.square(targets).mean()


@partial(jax.jit, static_argnums=0)
def step(weigh, params, momentum, data):
    """Of gradient descent with momentum, and steps of a fixed length."""
    value, slope = jax.value_and_grad(partial(loss, weigh))(params, *data)
    norm = jnp.sqrt(sum(jnp.square(each).sum() for each in jax.tree.leaves(slope)))
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g / norm, momentum, slope)
    params = jax.tree.map(lambda p, m: p - 0.02 * m, params, momentum)
    return params, momentum, value


STEPS = 200


def train(weigh, seed):
    """Parameters, and the error in every step."""
    start = np.random.default_rng(seed)
    params = {
        name: jnp.float32(0.3 * start.normal(size=(CODE + NOISE, 16)))
        for name in ("query", "key")
    }
    momentum, path = jax.tree.map(jnp.zeros_like, params), []
    for _ in range(STEPS):
        params, momentum, value = step(weigh, params, momentum, draw(8))
        path.append(float(value))
    return params, np.array(path)


trained = {
    name: [train(weigh, seed) for seed in (1, 2)] for name, weigh in METHODS.items()
}
final = {
    name: [path[-20:].mean() for _, path in runs] for name, runs in trained.items()
}
for name, found in final.items():
    print(
        f"{name:8s} error in the last 20 steps, two seeds:",
        *(f"{each:.3f}" for each in found),
    )

# %%
# Rows of attention
# -----------------
#
# The weights of one input that was not seen before, tokens ordered by kind: perfect attention
# has 4 x 4 blocks on the diagonal.

tokens, _, _ = draw(1)
figure, axes = plt.subplots(1, 4, figsize=(10, 3), width_ratios=[3, 3, 3, 3.4])
for ax, (name, weigh) in zip(axes, METHODS.items(), strict=False):
    weights = np.array(attention(weigh, trained[name][0][0], tokens)[0])
    ax.imshow(weights, vmin=0, vmax=1 / EACH)
    inside = (
        weights.reshape(TOKENS, KINDS, EACH).sum(2)[np.arange(TOKENS), kinds].mean()
    )
    ax.set(title=name, xlabel="keys", xticks=[], yticks=[])
    ax.grid(False)
    count = (weights > 0).sum(1).mean()
    print(
        f"{name:8s} {count:4.1f} keys have a weight, {100 * inside:.0f} % of it is right"
    )
axes[0].set_ylabel("queries")
for name, runs in trained.items():
    for _, path in runs:
        smooth = np.convolve(path, np.ones(10) / 10, mode="valid")
        axes[3].plot(smooth, color=colours[name], linewidth=1.3)
    axes[3].plot([], [], color=colours[name], label=name)
axes[3].set(title="error, means of 10 steps", xlabel="step", ylim=(0, 1.6))
axes[3].legend()
plt.show()

# %%
# Softmax attention can sharpen only by growing its scores, and in 200 steps it still has
# weights on all 64 keys. The two others have weights on few keys, and most of it on the right
# ones. The relaxed top-k has the smallest error here, with both seeds; the learning rate is the
# same for all and was not tuned.
#
# How much of that is because a mask gives *equal* weights, which is what this task wants, and
# how much because it shares where it is not sure? Take both, and give four keys equal weights:

data = draw(50)
for name, weigh in (
    ("hard", hard),
    ("hard", equal),
    ("relaxed", relaxed),
    ("relaxed", equal),
):
    found = [loss(weigh, params, *data) for params, _ in trained[name]]
    shown = "  ".join(f"{each:.3f}" for each in found)
    print(f"trained {name:8s} used {weigh.__name__:8s} error on new inputs: {shown}")

# %%
# Equal weights change nothing for what was trained hard. What was trained relaxed is better
# even if it is used hard: its scores are better. The rest of its advantage is that it shares.

assert max(final["relaxed"]) < min(final["hard"] + final["softmax"])
assert max(found) < min(loss(equal, params, *data) for params, _ in trained["hard"])

# %%
# The relaxed weights are sparse, and so are their derivatives: for the first query, these
# scores matter.

params = trained["relaxed"][0][0]
scores = (tokens @ params["query"])[0, 0] @ (tokens @ params["key"])[0].T / np.sqrt(16)
jacobian = np.array(jax.jacobian(relaxed)(scores))
reached = (jacobian != 0).any(0).sum()
print(f"{reached} of {TOKENS} scores have a derivative that is not 0")
