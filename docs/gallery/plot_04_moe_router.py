"""
A router that learns what to select
===================================

A mixture of experts sends each token to few of its experts. With *expert choice* every expert
takes its k best tokens, so that the load is even by design. Here is what a relaxed top-k
changes about it, on a task that fits into a picture.
"""

import math

import matplotlib.pyplot as plt
import torch

import sparsetopk.torch as st
from sparsetopk.experiments.drawing import COLOURS
from sparsetopk.torch.nn import ExpertChoice, ExpertMLP, MixtureOfExperts

# %%
# The task
# --------
#
# Tokens are points of the plane. In each of four sectors the target is another rotation of the
# point, in two of them also twice as long. Four experts, one per sector, could do it; nobody
# tells them which.

EXPERTS, TOKENS = 4, 256
ANGLES = torch.arange(EXPERTS) * math.pi / 2
rotations = torch.stack(
    [
        torch.stack([ANGLES.cos(), -ANGLES.sin()], 1),
        torch.stack([ANGLES.sin(), ANGLES.cos()], 1),
    ],
    1,
)
maps = rotations * torch.tensor([1.0, 2.0, 1.0, 2.0])[:, None, None]


def draw(tokens, generator):
    """Tokens and targets."""
    x = torch.randn(tokens, 2, generator=generator)
    sector = ((torch.atan2(x[:, 1], x[:, 0]) / (math.pi / 2)).floor().long()) % EXPERTS
    return x, torch.einsum("tij,tj->ti", maps[sector], x)


# %%
# Two routers
# -----------
#
# :class:`~sparsetopk.torch.nn.ExpertChoice` with ``capacity_factor=1.5``: every expert takes
# 1.5 * 256 / 4 = 96 of the 256 tokens. ``lam = 0`` is the usual hard router; ``hard_eval=True``
# makes the relaxed one hard in ``eval()``.

LAMS = {"hard": 0.0, "relaxed": 0.3}
colours = {"hard": COLOURS["hard"], "relaxed": COLOURS["p = 2"]}
STEPS = 250


def train(lam, seed):
    torch.manual_seed(seed)
    router = ExpertChoice(capacity_factor=1.5, lam=lam, hard_eval=True)
    moe = MixtureOfExperts(router, ExpertMLP(experts=EXPERTS, dim=2, hidden=8))
    optimizer = torch.optim.Adam(moe.parameters(), lr=2e-2, fused=True)
    generator = torch.Generator().manual_seed(100 + seed)
    losses, fractional = [], []
    for _ in range(STEPS):
        x, y = draw(TOKENS, generator)
        loss = (moe(x) - y).square().mean() / y.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        fractional.append(moe.routing.statistics()["fractional"].item())
    return moe, losses, fractional


trained = {name: [train(lam, seed) for seed in range(3)] for name, lam in LAMS.items()}

# %%
# What the experts took
# ---------------------
#
# ``statistics()`` of the last routing, for new tokens. The load of the relaxed router is a
# little more than 96: tokens that share a place are all computed.

x, y = draw(TOKENS, torch.Generator().manual_seed(1))
for name, runs in trained.items():
    moe = runs[0][0].train()
    moe(x)
    statistics = moe.routing.statistics()
    load = statistics["load"].tolist()
    print(
        f"{name:8s} load {load}, fractional {100 * statistics['fractional']:.0f} %,"
        f" dropped {100 * statistics['dropped']:.1f} %"
    )

# %%
# A token may be taken by several experts, or by none. Colour says which expert gives it the
# largest weight; the tokens with a black rim are taken in part by at least one.

figure, axes = plt.subplots(1, 2, figsize=(8, 4), sharex=True, sharey=True)
palette = plt.get_cmap("tab10")
for ax, (name, runs) in zip(axes, trained.items(), strict=True):
    moe = runs[0][0].train()
    moe(x)
    routing = moe.routing
    selected = torch.zeros(EXPERTS, TOKENS).scatter(
        1, routing.tokens, routing.selected.detach()
    )
    weight = torch.zeros(EXPERTS, TOKENS).scatter(
        1, routing.tokens, routing.weights.detach()
    )
    none = (selected == 0).all(0)
    shared = ((selected > 0) & (selected < 1)).any(0)
    ax.axhline(0, color="black", linewidth=0.6)
    ax.axvline(0, color="black", linewidth=0.6)
    ax.scatter(
        *x[none].T, marker="x", color="black", s=18, label="no expert", linewidth=0.8
    )
    for expert in range(EXPERTS):
        mine = (weight.argmax(0) == expert) & ~none
        for rim, where in (("none", mine & ~shared), ("black", mine & shared)):
            ax.scatter(
                *x[where].T, s=26, color=palette(expert), edgecolor=rim, linewidth=0.9
            )
    ax.set(title=f"{name} router", aspect="equal")
axes[0].legend(loc="lower left", fontsize=9)
plt.show()

# %%
# Both have found the four sectors: the expert of a token is the one that is made for its
# target. The hard router leaves some tokens near the origin, where the target is small, without
# an expert. The relaxed one also shares there.
#
# What the selection itself can learn from: the entries of the logits that a gradient through
# ``selected`` reaches.

for name, lam in LAMS.items():
    logits = trained["hard"][0][0].gate(x).detach().requires_grad_()
    st.expert_choice(logits, k=96, lam=lam).selected.square().sum().backward()
    print(f"{name:8s} {int((logits.grad != 0).sum()):4d} of {logits.numel()} logits")

# %%
# Did it help?
# ------------

figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.4))
for name, runs in trained.items():
    for _, losses, fractional in runs:
        smooth = torch.tensor(losses).unfold(0, 10, 1).mean(1)
        left.plot(range(10, STEPS + 1), smooth, color=colours[name], linewidth=1.2)
        right.plot(fractional, color=colours[name], linewidth=1.2)
    left.plot([], [], color=colours[name], label=name)
left.set(yscale="log", xlabel="step", title="relative error, means of 10 steps")
left.legend()
right.set(xlabel="step", ylim=(0, 1), title="share of fractional assignments")
plt.show()

final = {}
for name, runs in trained.items():
    x, y = draw(2000, torch.Generator().manual_seed(2))
    with torch.no_grad():
        missed = [moe.eval()(x) - y for moe, *_ in runs]
    final[name] = [(each.square().mean() / y.square().mean()).item() for each in missed]
    print(
        f"{name:8s} error in eval(), three seeds:",
        *(f"{each:.3f}" for each in final[name]),
    )

# %%
# Not here. The seeds differ more than the routers do. A hard router has a gradient too: through
# the softmax gates of the tokens that it took, and with a gate that is linear in the token this
# is enough to find four sectors. The relaxed router has a gradient through the selection as
# well, and pays for it with the tokens that share a place. Whether that pays off has to be
# measured on the task at hand; :doc:`/reproduce` says how the paper did.

assert min(final["relaxed"]) < max(final["hard"])
assert min(final["hard"]) < max(final["relaxed"])
