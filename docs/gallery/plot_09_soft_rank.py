"""
Soft sort and rank: learning to rank
====================================

Ranks are piecewise constant: their gradient is 0 wherever it exists. Relaxed ranks have
gradients, and a rank correlation can be trained for directly.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch

import sparsetopk as stn
import sparsetopk.torch as st
from sparsetopk.experiments.drawing import COLOURS

# %%
# What lam does
# -------------
#
# Ranks count from the largest, which has rank 1. With lam = 0 they are the hard ranks. As lam
# grows, entries that are close share ranks, and in the end all have the mean rank. A relaxed
# sort goes to the mean of the entries in the same way.

x = np.array([2.9, 2.2, 2.0, 0.8, 0.1])
lams = np.geomspace(0.03, 30, 200)
ranks = np.array([stn.soft_rank(x, lam) for lam in lams])
sorts = np.array([stn.soft_sort(x, lam) for lam in lams])

figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.4), sharex=True)
left.plot(lams, ranks, color=COLOURS["p = 2"])
right.plot(lams, sorts, color=COLOURS["p = 2"])
for place, value in enumerate(x):
    left.text(0.03, ranks[0, place] - 0.07, f"x = {value}", fontsize=9)
left.set(xscale="log", xlabel="lam", ylabel="soft_rank(x)")
right.set(xlabel="lam", ylabel="soft_sort(x)")
left.invert_yaxis()
plt.show()

# %%
# A rank correlation as a loss
# ----------------------------
#
# Spearman's correlation is that of the ranks. Scores are standardised in each list first, as
# lam is in the units of the scores.


def spearman_loss(scores, ranks, lam):
    """1 minus Spearman's correlation, with soft ranks of the scores; lists are rows."""
    n = scores.shape[-1]
    scores = (scores - scores.mean(-1, keepdim=True)) / scores.std(-1, keepdim=True)
    difference = st.soft_rank(scores, lam) - ranks
    return (6 * difference.square().sum(-1) / (n * (n**2 - 1))).mean()


# %%
# Lists of items
# --------------
#
# Each list has 30 items with 8 features. What counts is a linear utility, but what is observed
# is a grade that grows exponentially with the utility plus noise, as sales or clicks do: few
# items have nearly all of it. A linear model is to rank the items.

LISTS, ITEMS, FEATURES = 20, 30, 8
generator = torch.Generator().manual_seed(0)
direction = torch.randn(FEATURES, generator=generator)


def draw(lists):
    features = torch.randn(lists, ITEMS, FEATURES, generator=generator)
    utility = features @ direction / direction.norm()
    noisy = utility + 0.7 * torch.randn(lists, ITEMS, generator=generator)
    return features, (2 * noisy).exp(), utility


features, grades, _ = draw(LISTS)
test_features, _, test_utility = draw(100)


def spearman(scores, utility):
    """Spearman's correlation with the true utility, mean of all lists."""
    return 1 - spearman_loss(scores, st.soft_rank(utility, lam=0.0), lam=0.0).item()


# %%
# Four losses
# -----------
#
# The squared error of the grades, that of their logarithms (the right thing to do, for those
# who know how the grades came about), and the rank correlation with lam = 0.1 and with lam = 0,
# the hard ranks.

ranks = st.soft_rank(grades, lam=0.0)
losses = {
    "squared error": lambda scores: (scores - grades / grades.std()).square().mean(),
    "squared error of logs": lambda scores: (scores - grades.log()).square().mean(),
    "soft ranks": lambda scores: spearman_loss(scores, ranks, lam=0.1),
    "hard ranks": lambda scores: spearman_loss(scores, ranks, lam=0.0),
}
styles = {
    "squared error": {"color": COLOURS["dense"]},
    "squared error of logs": {"color": COLOURS["dense"], "linestyle": ":"},
    "soft ranks": {"color": COLOURS["p = 2"]},
    "hard ranks": {"color": COLOURS["hard"]},
}
STEPS, EVERY = 120, 5


def train(loss):
    """The correlation on test lists, every few steps."""
    torch.manual_seed(0)
    model = torch.nn.Linear(FEATURES, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, fused=True)
    path = []
    for step in range(STEPS + 1):
        if step % EVERY == 0:
            with torch.no_grad():
                path.append(spearman(model(test_features).squeeze(-1), test_utility))
        optimizer.zero_grad()
        loss(model(features).squeeze(-1)).backward()
        optimizer.step()
    return path


paths = {name: train(loss) for name, loss in losses.items()}
for name, path in paths.items():
    print(f"{name:22s} Spearman's correlation with the utility {path[-1]:.3f}")

# %%
figure, ax = plt.subplots(figsize=(6.4, 3.6))
for name, path in paths.items():
    ax.plot(range(0, STEPS + 1, EVERY), path, label=name, **styles[name])
ax.set(xlabel="step", ylabel="correlation on test lists", ylim=(0.3, 1.01))
ax.legend(loc="center right")
plt.show()

# %%
# Hard ranks teach nothing: their gradient is 0. Soft ranks do, and do not care how grades are
# distributed: only the order counts. The squared error of the grades is led by the few largest.
# That of the logarithms is nearly as good as soft ranks here; it needs to know the logarithm.

last = {name: path[-1] for name, path in paths.items()}
assert paths["hard ranks"][0] == last["hard ranks"]
assert last["soft ranks"] > last["squared error"] + 0.01
