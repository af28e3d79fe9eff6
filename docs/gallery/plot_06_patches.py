"""
Picking the patches that matter
===============================

A large image, of which only a small part says anything. A small network scores the patches, a
top-k picks some, and the large network sees only those. Nobody labels the patches: with a
relaxed top-k the scores are learned from the labels of the images.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

import sparsetopk.torch as st
from sparsetopk.experiments.digits import digits
from sparsetopk.experiments.drawing import COLOURS

# sphinx_gallery_thumbnail_number = 2

# %%
# The images
# ----------
#
# A canvas of 5 x 5 patches. One holds a handwritten digit. Eight others hold digits whose
# pixels were shuffled: as dark as a digit, but without a form. The other 16 are almost blank.

x, y, x_test, y_test = (torch.from_numpy(part) for part in digits())
PATCHES, CLUTTER, K = 25, 8, 2


def canvases(x, generator):
    """Patches of canvases, [images, 25, 64], and where the digits are."""
    patches = 0.1 * torch.rand(len(x), PATCHES, 64, generator=generator)
    places = torch.rand(len(x), PATCHES, generator=generator).argsort(1)
    rows = torch.arange(len(x))
    for place in places[:, 1 : CLUTTER + 1].T:
        other = x[torch.randint(len(x), (len(x),), generator=generator)]
        pixels = torch.rand(len(x), 64, generator=generator).argsort(1)
        patches[rows, place] = other.gather(1, pixels)
    patches[rows, places[:, 0]] = x
    return patches, places[:, 0]


generator = torch.Generator().manual_seed(0)
train_set, _ = canvases(x, generator)
test_set, digit_at = canvases(x_test, generator)

# %%
# The model
# ---------
#
# Scores of the patches, a top-2 mask over them, and a classifier of what was picked. In
# ``eval()`` the selection is hard (``hard_eval=True``): 2 patches, and nothing else has to be
# computed.


class Picker(nn.Module):
    def __init__(self, lam):
        super().__init__()
        self.score = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))
        self.mask = st.nn.TopKMask(K, lam, hard_eval=True)
        self.embed = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        self.classify = nn.Linear(64, 10)

    def forward(self, patches):
        self.picked = self.mask(self.score(patches).squeeze(-1))
        return self.classify((self.picked.unsqueeze(-1) * self.embed(patches)).sum(1))


# %%
# Three values of lam
# -------------------
#
# **hard** is lam = 0. The scores then have no gradient, so what is picked is as it was at the
# beginning. **narrow** is lam = 1. **wide** is lam = 5, where nearly all patches share the mask
# at first.

STEPS, BATCH, EVERY = 200, 32, 40
LAMS = {"hard": 0.0, "narrow": 1.0, "wide": 5.0}
colours = {"hard": COLOURS["hard"], "narrow": "#e9a8b0", "wide": COLOURS["p = 2"]}


def evaluate(model):
    """Accuracy, and how often the digit is among the picked patches, in percent."""
    model.eval()
    with torch.no_grad():
        right = model(test_set).argmax(1) == y_test
    found = model.picked.gather(1, digit_at[:, None]) > 0
    model.train()
    return 100 * right.float().mean().item(), 100 * found.float().mean().item()


def train(lam, seed):
    torch.manual_seed(seed)
    model = Picker(lam)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, fused=True)
    path = [evaluate(model)]
    for step in range(STEPS):
        batch = torch.randint(len(y), (BATCH,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(train_set[batch]), y[batch]).backward()
        optimizer.step()
        if (step + 1) % EVERY == 0:
            path.append(evaluate(model))
    return model, torch.tensor(path)


trained = {name: [train(lam, seed) for seed in range(3)] for name, lam in LAMS.items()}
for name, runs in trained.items():
    accuracy, found = torch.stack([path[-1] for _, path in runs]).T.tolist()
    print(f"{name:8s} accuracy, %:", *(f"{a:5.1f}" for a in accuracy), end="   ")
    print("digit among the two, %:", *(f"{f:5.1f}" for f in found))

# %%
figure, axes = plt.subplots(1, 2, figsize=(8.4, 3.4), sharex=True, sharey=True)
steps = torch.arange(0, STEPS + 1, EVERY)
for name, runs in trained.items():
    for ax, column in zip(axes, (1, 0), strict=True):
        for _, path in runs:
            ax.plot(steps, path[:, column], color=colours[name], linewidth=1.3)
        ax.plot([], [], color=colours[name], label=name)
axes[0].set(xlabel="step", ylabel="%", title="the digit is among the two picked")
axes[1].set(xlabel="step", title="accuracy on test images")
axes[0].legend(loc="center right")
plt.show()

# %%
# With a wide lam the model finds the digit in nearly all test images, with every seed, and
# nobody told it where to look. In use it picks two patches: the mask is hard in ``eval()``.
#
# With lam = 1 it is stuck. Digits and clutter look alike to scores that have not learned yet,
# and clutter does harm, so both are pushed down together. The mask then rests on the 16 blank
# patches, and the digit is out of reach of the gradient. With a wide lam every patch stays in
# reach until the scores can tell digits from clutter.

for name in ("narrow", "wide"):
    model = trained[name][0][0]
    with torch.no_grad():
        model(test_set)
    reached = model.picked.gather(1, digit_at[:, None]) > 0
    shared = (model.picked > 0).sum(1).float().mean()
    share = 100 * reached.float().mean()
    print(
        f"{name:6s} {shared:4.1f} patches share the mask, the digit is one in {share:.0f} %"
    )

assert all(path[-1, 1] > 80 for _, path in trained["wide"])
assert all(path[-1, 1] < 20 for _, path in trained["narrow"])

# %%
# What was picked, in three test images: red frames are the patches that the wide model picked.
# One holds the digit. The other must be picked too, as k is 2; a blank patch does no harm.

model = trained["wide"][0][0].eval()
with torch.no_grad():
    guesses = model(test_set).argmax(1)
figure, axes = plt.subplots(1, 3, figsize=(8.4, 3.2))
for image, ax in enumerate(axes):
    canvas = test_set[image].reshape(5, 5, 8, 8).permute(0, 2, 1, 3).reshape(40, 40)
    ax.imshow(canvas, vmin=0, vmax=1)
    for place in model.picked[image].nonzero().flatten().tolist():
        corner = (place % 5 * 8 - 0.5, place // 5 * 8 - 0.5)
        ax.add_patch(
            plt.Rectangle(corner, 8, 8, fill=False, color=COLOURS["p = 2"], linewidth=2)
        )
    ax.set_title(f"label {y_test[image]}, answer {guesses[image]}")
    ax.set(xticks=[], yticks=[])
    ax.grid(False)
    ax.spines[:].set(visible=True, color="#c8ccd0")
plt.show()
