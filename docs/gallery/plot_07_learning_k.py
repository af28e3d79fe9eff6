"""
Learning k by gradient
======================

How many entries should be kept? k is a real number here and has a derivative, so that a penalty
on it can be weighed against the loss, and both descend together.
"""

import matplotlib.pyplot as plt
import torch

import sparsetopk.torch as st
from sparsetopk.experiments.drawing import COLOURS

# %%
# What k.grad is
# --------------
#
# Where entries share the boundary, a little more of k goes to them: dy/dk is positive on the
# fractional entries, sums to 1, and is 0 elsewhere.

x = torch.tensor([2.0, 1.1, 1.0, 0.9, -0.5], dtype=torch.float64)
k = torch.tensor(2.4, dtype=torch.float64, requires_grad=True)
mask = st.topk_mask(x, k, lam=0.5)
in_k = torch.autograd.functional.jacobian(
    lambda k: st.topk_mask(x, k, lam=0.5), k.detach()
)
print("mask  ", [round(v, 2) for v in mask.tolist()])
print("dy/dk ", [round(v, 2) for v in in_k.tolist()])

# %%
# How many features?
# ------------------
#
# A linear regression in which 12 of 100 features count, with weights between 0.5 and 1.5. The
# model uses ``topk_mag(w, k)``. Weights and k are trained together, from the least-squares fit
# with all features, and every unit of k has a price that is added to the loss.

FEATURES, USED, SAMPLES = 100, 12, 400
generator = torch.Generator().manual_seed(0)
truth = torch.zeros(FEATURES)
truth[:USED] = torch.linspace(0.5, 1.5, USED) * (-1) ** torch.arange(USED)
inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
targets = inputs @ truth + 0.5 * torch.randn(SAMPLES, generator=generator)
dense = torch.linalg.lstsq(inputs, targets[:, None]).solution[:, 0]
LAM, STEPS = 0.1, 320


def train(start, price):
    """The weights that the model uses, and the path of k."""
    w = dense.clone().requires_grad_()
    k = torch.tensor(float(start), requires_grad=True)
    groups = [{"params": [w], "lr": 0.01}, {"params": [k], "lr": 0.3}]
    optimizer = torch.optim.Adam(groups, fused=True)
    path = [k.item()]
    for _ in range(STEPS):
        loss = (inputs @ st.topk_mag(w, k, LAM) - targets).square().mean() + price * k
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            k.clamp_(1, FEATURES)
        path.append(k.item())
    with torch.no_grad():
        return st.topk_mag(w, k, LAM), path


starts = {start: train(start, price=0.02) for start in (3, 30, 60, 100)}
for start, (used, path) in starts.items():
    right, wrong = (int((part != 0).sum()) for part in (used[:USED], used[USED:]))
    print(
        f"from {start:3d}: k = {path[-1]:5.2f}, {right} of 12 features that count, {wrong} others"
    )

# %%
# From above and from below, k comes close to 12, and the features that count are in use. That
# it can grow is thanks to the relaxation: a feature that is only partly in shows whether more
# of it would pay.
#
# A higher price buys fewer features. Each of them lowers the loss by about the square of its
# weight, so one would expect those with a smaller square to go.

prices = [0.005, 0.02, 0.05, 0.2, 0.4, 0.8]
bought = [train(60, price) for price in prices]
nonzero = [int((used != 0).sum()) for used, _ in bought]
expected = [int((truth.square() > price).sum()) for price in prices]

figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.6))
for _, path in starts.values():
    left.plot(path, color=COLOURS["p = 2"])
left.axhline(USED, color="black", linewidth=0.8, linestyle=":")
left.text(STEPS, USED - 7, "12 features count", fontsize=9, ha="right")
left.set(
    xlabel="step", ylabel="k", title="k while it is learned, price 0.02", ylim=(0, None)
)
right.plot(
    prices,
    [path[-1] for _, path in bought],
    "o-",
    color=COLOURS["p = 2"],
    label="learned k",
)
right.plot(prices, nonzero, "s--", color="#e9a8b0", label="features in use", zorder=1)
right.plot(
    prices,
    expected,
    "^:",
    color=COLOURS["hard"],
    label="squared weight > price",
    zorder=1,
)
right.set(
    xscale="log",
    xlabel="price of one unit of k",
    ylim=(0, 20),
    title="what a price buys",
)
right.legend()
plt.show()

for price, count, (_, path) in zip(prices, nonzero, bought, strict=True):
    print(f"price {price:5.3f}: k = {path[-1]:5.2f}, {count} features in use")

# %%
# Up to a price of 0.4 the number of features in use is what one would expect. The learned k is
# smaller than that number where the price is high: relaxed entries may *share* places, and a
# weight that has shrunk by sharing can grow to make up for it. So read k as what is paid for,
# count the entries that are not 0, and use a small lam where k itself matters.

assert all(abs(path[-1] - USED) < 2 for _, path in starts.values())
assert all(abs(nonzero[i] - expected[i]) <= 2 for i in range(5))
assert bought[-1][1][-1] < nonzero[-1] - 2
