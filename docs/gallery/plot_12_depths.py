"""
Mixture of depths: a block for the tokens that need it
======================================================

A block of a network is dear, and most tokens would do without. A router picks k tokens for the block;
the others pass by. Which tokens it picks has no gradient, unless the selection is relaxed.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

from sparsetopk.experiments.drawing import COLOURS
from sparsetopk.torch.nn import TokenSelector

# %%
# The task
# --------
#
# Of 32 tokens, the 4 that lie furthest along a direction that nobody names have to be changed, by a
# map that takes a block to learn. The others stay as they are.

TOKENS, K, DIM, BATCH, STEPS = 32, 4, 16, 64, 300
torch.manual_seed(0)
torch.set_num_threads(1)
direction, mixing = torch.randn(DIM), torch.linalg.qr(torch.randn(DIM, DIM)).Q


def draw(batch=BATCH):
    """Tokens, what they should become, and which of them change."""
    x = torch.randn(batch, TOKENS, DIM)
    changed = (x @ direction).topk(K, dim=-1).indices
    target = x.clone()
    at = changed.unsqueeze(-1).expand(-1, -1, DIM)
    target.scatter_add_(1, at, torch.tanh(2 * x.gather(1, at) @ mixing))
    return x, target, changed


# %%
# The block
# ---------
#
# ``TokenSelector`` scores the tokens. In training it has some slots more than k, for the tokens that
# compete; their weight is 0 in the forward, so they change nothing, and their derivative says whether
# they had better be selected. In ``eval()`` there are k, and the block computes nothing else.


class Depths(nn.Module):
    def __init__(self, lam, gated=False):
        super().__init__()
        self.selector = TokenSelector(K, DIM, lam=lam)
        self.block = nn.Sequential(nn.Linear(DIM, 64), nn.GELU(), nn.Linear(64, DIM))
        self.gated = gated

    def forward(self, x):
        _, weights, indices, _ = self.selector(x)
        if (
            self.gated
        ):  # as in the paper on mixtures of depths: a weight for what is selected
            weights = (
                weights
                * self.selector.scorer(x).squeeze(-1).gather(1, indices).sigmoid()
            )
        at = indices.unsqueeze(-1).expand(-1, -1, DIM)
        return x.scatter_add(1, at, weights.unsqueeze(-1) * self.block(x.gather(1, at)))


# %%
# Three routers
# -------------
#
# A hard top-k, one that weighs what it has selected by a gate, as in Raposo et al. (2024), and the
# relaxed top-k straight through.

ROUTERS = {"hard": (0.0, False), "hard and gated": (0.0, True), "relaxed": (1.0, False)}


def train(lam, gated):
    """The share of the right tokens that are selected, as training goes on, and the last error."""
    torch.manual_seed(1)
    model = Depths(lam, gated)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    shares = []
    for _ in range(STEPS):
        x, target, changed = draw()
        loss = (model(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            picked = model.selector.scorer(x).squeeze(-1).topk(K, dim=-1).indices
        right = (picked.unsqueeze(-1) == changed.unsqueeze(-2)).any(dim=-1)
        shares.append(right.float().mean().item())
    x, target, _ = draw(2000)
    with torch.no_grad():
        error = (model.eval()(x) - target).square().mean().item()
    return shares, error


found = {name: train(*options) for name, options in ROUTERS.items()}
for name, (shares, error) in found.items():
    late = sum(shares[-20:]) / 20
    print(
        f"{name:15} {100 * late:5.1f} % of the right tokens, error in use {error:.4f}"
    )

# %%
# The hard router stays where chance has put it: its block learns to help a little with the wrong
# tokens. A gate tells what is selected whether it should be, but nothing to those that are not.

colours = [COLOURS["hard"], COLOURS["p = 4/3"], COLOURS["p = 2"]]
figure, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
for (name, (shares, _)), colour in zip(found.items(), colours, strict=True):
    ax.plot(torch.tensor(shares).unfold(0, 10, 1).mean(-1), label=name, color=colour)
ax.axhline(K / TOKENS, color="0.6", lw=1, ls=":")
ax.set_xlabel("step")
ax.set_ylabel("right tokens selected")
ax.set_ylim(0, 1.02)
ax.legend(frameon=False)
plt.show()
