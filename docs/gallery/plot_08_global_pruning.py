"""
Global pruning: which layers keep what
======================================

4 % of each layer, or 4 % of the whole model? With one k for all layers they compete, and the
model decides where its weights are worth most.
"""

from itertools import pairwise

import matplotlib.pyplot as plt
import torch
from torch import nn

import sparsetopk.torch as st
from sparsetopk.experiments.digits import digits
from sparsetopk.experiments.drawing import COLOURS
from sparsetopk.torch.prune import KeepSchedule, LamSchedule, finalize, prune, report

# %%
# One threshold for many tensors
# ------------------------------
#
# :func:`~sparsetopk.torch.topk_mag_multi` is ``topk_mag`` of all entries of several tensors
# together, without putting them together. Three tensors of the same shape and of different
# scales:

torch.manual_seed(0)
tensors = [scale * torch.randn(200, 50) for scale in (0.5, 1.0, 2.0)]
kept = st.topk_mag_multi(tensors, k=3000, lam=0.1)
for tensor, part in zip(tensors, kept, strict=True):
    print(
        f"standard deviation {tensor.std():.1f}: {100 * (part != 0).float().mean():4.1f} % kept"
    )

together = st.topk_mag(
    torch.cat([tensor.flatten() for tensor in tensors]), k=3000, lam=0.1
)
torch.testing.assert_close(torch.cat([part.flatten() for part in kept]), together)

# %%
# A network with layers of different sizes
# ----------------------------------------
#
# ``prune(scope="global")`` does this to all weights of a model. Both networks have 4 % of their
# weights in the end; lam goes from 1 to the hard selection in the last quarter of the training.

x, y, x_test, y_test = (torch.from_numpy(part) for part in digits())
WIDTHS = (64, 96, 48, 24, 10)
KEEP, EPOCHS, BATCH = 0.04, 14, 64
STEPS = EPOCHS * (len(x) // BATCH)


def error(model):
    with torch.no_grad():
        return 100 * (model(x_test).argmax(1) != y_test).float().mean().item()


def train(scope, seed):
    torch.manual_seed(seed)
    layers = [nn.Linear(a, b) for a, b in pairwise(WIDTHS)]
    model = nn.Sequential(
        *[part for layer in layers for part in (layer, nn.ReLU())][:-1]
    )
    schedule = [KeepSchedule(STEPS // 2), LamSchedule(STEPS // 4, begin=3 * STEPS // 4)]
    pruner = prune(model, keep=KEEP, lam=1.0, scope=scope, schedule=schedule)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)
    shares = []
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(x)).split(BATCH)[: len(x) // BATCH]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
            pruner.step()
        with torch.no_grad():
            shares.append(
                [(layer.weight != 0).float().mean().item() for layer in layers]
            )
    return model, 100 * torch.tensor(shares)


trained = {
    scope: [train(scope, seed) for seed in range(2)] for scope in ("tensor", "global")
}
report(trained["global"][0][0])
errors = {
    s: [error(finalize(model)) for model, _ in runs] for s, runs in trained.items()
}
for scope, found in errors.items():
    print(f"{scope:6s} error in %, two seeds:", *(f"{each:5.1f}" for each in found))

# %%
colours = {"tensor": "#e9a8b0", "global": COLOURS["p = 2"]}
names = [f"{a} to {b}" for a, b in pairwise(WIDTHS)]
figure, (left, middle, right) = plt.subplots(
    1, 3, figsize=(9, 3.6), width_ratios=[4, 4, 2]
)
for offset, (scope, runs) in zip((-0.2, 0.2), trained.items(), strict=True):
    places = torch.arange(len(names)) + offset
    left.bar(
        places, runs[0][1][-1], 0.4, color=colours[scope], label=f'scope="{scope}"'
    )
    right.scatter([offset] * 2, errors[scope], color=colours[scope], s=45, zorder=3)
for layer, name in enumerate(names):
    path = trained["global"][0][1][:, layer]
    middle.plot(
        range(1, EPOCHS + 1), path, color=COLOURS["p = 2"], alpha=0.4 + 0.2 * layer
    )
    lift = {0: 2.5, 1: -2.5}.get(layer, 0)  # these two end at the same place
    middle.text(EPOCHS + 0.3, path[-1] + lift, name, fontsize=8, va="center")
left.set(title="kept of each layer, %", xticks=range(len(names)))
left.set_xticklabels(names, rotation=20)
left.legend()
middle.set(xlabel="epoch", title="global: kept while training, %", xlim=(0, EPOCHS + 5))
right.set(title="error, %", xticks=(-0.2, 0.2), xlim=(-0.5, 0.5), ylim=(0, None))
right.set_xticklabels(list(trained))
plt.show()

# %%
# Both networks have the same number of weights. With 4 % of each layer, the last one has 10
# weights, one for each class on average. Globally the small last layers keep a much larger
# share and the large first ones a little less, and the errors are far smaller.

assert max(errors["global"]) < min(errors["tensor"])
