"""
A top-k loss for ambiguous labels
=================================

Some labels cannot be told apart by looking: two breeds of dogs, or two names for one thing. A
classifier that may name k classes should not be asked to guess which of them the annotator
wrote down.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

from sparsetopk.experiments.digits import digits
from sparsetopk.experiments.drawing import COLOURS
from sparsetopk.torch.nn import TopKLoss

# %%
# Digits in pairs
# ---------------
#
# To know the truth, we make such labels from handwritten digits. They come in pairs, 0 and 1, 2
# and 3, up to 8 and 9, and for every training digit a coin decides whether it has its own label
# or that of its partner. No classifier can have a top-1 accuracy far above 50 % on such labels.
# But the right *pair* can be seen, so a top-2 accuracy near 100 % is possible.

x, y, x_test, y_test = (torch.from_numpy(part) for part in digits())
x, y = x[:700], y[:700]


def confused(y, seed):
    """Half of the labels are those of the partner."""
    generator = torch.Generator().manual_seed(seed)
    return torch.where(torch.rand(len(y), generator=generator) < 0.5, y ^ 1, y)


# %%
# Three losses
# ------------
#
# Cross-entropy asks for one class. So does :class:`~sparsetopk.torch.nn.TopKLoss` with k = 1.
# With k = 2 and ``completion="best"`` it is zero as soon as the label is fully among the two
# selected classes: there is nothing to gain by ranking one of a pair above the other.

losses = {
    "cross-entropy": nn.CrossEntropyLoss(),
    "top-1 loss": TopKLoss(k=1, lam=0.3),
    "top-2 loss": TopKLoss(k=2, lam=0.3, completion="best"),
}
colours = {
    "cross-entropy": COLOURS["dense"],
    "top-1 loss": "#e9a8b0",
    "top-2 loss": COLOURS["p = 2"],
}
STEPS, EVERY = 200, 10


def accuracies(model):
    """Top-1 and top-2 accuracy by the true labels of the test digits, in percent."""
    with torch.no_grad():
        hits = model(x_test).topk(2).indices == y_test[:, None]
    return [100 * hits[:, :k].any(1).float().mean().item() for k in (1, 2)]


def train(loss, seed):
    labels = confused(y, seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)
    path = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model(x), labels).backward()
        optimizer.step()
        if (step + 1) % EVERY == 0:
            path.append(accuracies(model))
    return model, torch.tensor(path)


trained = {
    name: [train(loss, seed) for seed in range(3)] for name, loss in losses.items()
}

print("accuracy on test digits, mean of three seeds, %")
for name, runs in trained.items():
    top1, top2 = torch.stack([path[-1] for _, path in runs]).mean(0).tolist()
    print(f"{name:14s} top-1 {top1:5.1f}   top-2 {top2:5.1f}")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.6))
steps = torch.arange(1, STEPS // EVERY + 1) * EVERY
for name, runs in trained.items():
    for _, path in runs:
        left.plot(steps, path[:, 1], color=colours[name], linewidth=1.2)
    left.plot([], [], color=colours[name], label=name)
left.set(xlabel="step", ylabel="top-2 accuracy, %", ylim=(75, 100))
left.set_title("by the true labels of test digits")
left.legend(loc="lower right")

share = {
    name: [
        100 * (model(x).argmax(1) == confused(y, seed)).float().mean().item()
        for seed, (model, _) in enumerate(runs)
    ]
    for name, runs in trained.items()
}
for place, name in enumerate(losses):
    right.scatter([place] * 3, share[name], color=colours[name], s=45, zorder=3)
right.axhline(50, color="black", linewidth=0.8, linestyle=":")
right.set(xticks=range(3), xticklabels=losses, xlim=(-0.5, 2.5), ylim=(40, 102))
right.set_title("training labels that are ranked first, %")
plt.show()

# %%
# The right panel shows why. Which of the two labels a training digit got was decided by a coin,
# and 50 % is all that can be learned of it. The losses that ask for one class go on to memorise
# the coins, and their top-2 accuracy on new digits falls while they do. The top-2 loss has less
# reason to, and is the best of the three for every seed.

final = {
    name: [path[-1, 1].item() for _, path in runs] for name, runs in trained.items()
}
assert min(final["top-2 loss"]) > max(final["cross-entropy"]) > max(final["top-1 loss"])
assert max(share["top-2 loss"]) < min(share["cross-entropy"] + share["top-1 loss"]) - 10

# %%
# These labels are made for a top-2 loss. What it does for labels that are wrong in other ways,
# this example does not say.
