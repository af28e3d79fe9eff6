"""
Pruning an MLP while it trains
==============================

A network for handwritten digits is trained from the start with the aim that 5 % of its weights
are left. Three ways to get there, which differ in ``lam`` alone.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

from sparsetopk.experiments.digits import digits
from sparsetopk.experiments.drawing import COLOURS
from sparsetopk.torch.prune import KeepSchedule, LamSchedule, finalize, prune, report

x, y, x_test, y_test = (torch.from_numpy(part) for part in digits())

# sphinx_gallery_thumbnail_number = 2

# %%
# :func:`~sparsetopk.torch.prune.prune` puts ``topk_mag`` on every weight matrix. In the first
# half of the training, ``KeepSchedule`` goes from all weights to 5 % of them.
#
# - **hard**: ``lam = 0``. A weight that is left out has no gradient.
# - **relaxed**: ``lam = 1`` all the way. Weights near the boundary are shrunk and share it; a
#   hard selection is made once, after the training.
# - **annealed**: the same, but ``LamSchedule`` takes lam to 0 in the last quarter, so that the
#   network that is trained at the end is the one that is used.
#
# The optimiser and its learning rate are the same for all three, and were not tuned for any of
# them.

KEEP, EPOCHS, BATCH = 0.05, 14, 64
STEPS = EPOCHS * (len(x) // BATCH)
ramp = KeepSchedule(STEPS // 2)
METHODS = {
    "hard": {"lam": 0.0, "schedule": ramp},
    "relaxed": {"lam": 1.0, "schedule": ramp},
    "annealed": {
        "lam": 1.0,
        "schedule": [ramp, LamSchedule(STEPS // 4, begin=3 * STEPS // 4)],
    },
}
colours = {"hard": COLOURS["hard"], "relaxed": "#e9a8b0", "annealed": COLOURS["p = 2"]}


def error(model):
    """In percent of the test digits."""
    with torch.no_grad():
        return 100 * (model(x_test).argmax(1) != y_test).float().mean().item()


def train(options, seed):
    """A pruned model, and its error after every epoch."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    pruner = prune(model, keep=KEEP, **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)
    errors = []
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(x)).split(BATCH)[: len(x) // BATCH]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
            pruner.step()
        errors.append(error(model))
    return model, errors


trained = {
    name: [train(options, seed) for seed in range(3)]
    for name, options in METHODS.items()
}

# %%
# :func:`~sparsetopk.torch.prune.report` on a network of the second kind, as it was trained:
# many weights are *fractional*, that is, neither left out nor as they were, and more than 5 %
# are not 0.

report(trained["relaxed"][0][0])

# %%
# :func:`~sparsetopk.torch.prune.finalize` leaves plain parameters with exactly 5 % of the
# weights. For the relaxed networks this is a change.

final = {
    name: [error(finalize(model, hard=True)) for model, _ in runs]
    for name, runs in trained.items()
}
for name, errors in final.items():
    print(
        f"{name:9s} error in %, of three seeds:", *(f"{value:5.1f}" for value in errors)
    )

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.6), width_ratios=[3, 2])
for place, (name, runs) in enumerate(trained.items()):
    for _, errors in runs:
        left.plot(range(1, EPOCHS + 1), errors, color=colours[name], linewidth=1.2)
    left.plot([], [], color=colours[name], label=name)
    right.scatter([place] * 3, final[name], color=colours[name], s=45, zorder=3)
left.axvspan(0, EPOCHS / 2, color="black", alpha=0.04, linewidth=0)
left.text(0.2, 1, "weights are taken away", fontsize=9)
left.set(
    xlabel="epoch",
    ylabel="error on test digits, %",
    title="while training",
    xlim=(0, EPOCHS),
)
left.set_ylim(0, 40)
left.legend(loc="upper right")
right.set(xticks=range(3), xticklabels=METHODS, xlim=(-0.5, 2.5), ylim=(0, None))
right.set_title("after finalize: 5 % of the weights")
plt.show()

# %%
# While they are relaxed, both relaxed networks have lower errors than the hard ones; they also
# have more weights then. To cut them to 5 % in one go costs more than was gained: **relaxed**
# ends up worse than **hard**. With lam annealed to 0 nothing is left to cut at the end, and
# here the annealed networks are better than the hard ones for every seed.

assert max(final["annealed"]) < min(final["hard"])
assert min(final["relaxed"]) > max(final["annealed"])

# %%
# Which weights are left? Each of the 64 squares is one hidden unit, with the weights of its 8 x
# 8 pixels.

weights = trained["annealed"][0][0][0].weight.detach().reshape(8, 8, 8, 8)
figure, ax = plt.subplots(figsize=(4.6, 4.6))
limit = weights.abs().max()
ax.imshow(
    weights.permute(0, 2, 1, 3).reshape(64, 64), cmap="RdBu_r", vmin=-limit, vmax=limit
)
ax.set(xticks=range(0, 64, 8), yticks=range(0, 64, 8), xticklabels=[], yticklabels=[])
for edge in range(8, 64, 8):
    ax.axhline(edge - 0.5, color="#c8ccd0", linewidth=0.6)
    ax.axvline(edge - 0.5, color="#c8ccd0", linewidth=0.6)
ax.grid(False)
ax.set_title("weights of the first layer")
plt.show()
used = int((weights.reshape(64, 64) != 0).any(1).sum())
print(f"{used} of 64 hidden units have an input left")
