"""
An indexer that learns which tokens to fetch
============================================

A small network gives every token a score, and the k best are fetched. Which these are has no
gradient; straight through the relaxed top-k it has one, for the few tokens that compete.
"""

import matplotlib.pyplot as plt
import torch

import sparsetopk.torch as st
from sparsetopk.experiments.drawing import COLOURS

# %%
# The task
# --------
#
# One of 64 tokens, the needle, has a code that fits the query, by a map that is not known. The
# answer is its value. A model may fetch 4 tokens.

TOKENS, K, CODE, VALUE, BATCH, STEPS = 64, 4, 16, 4, 64, 300
torch.manual_seed(0)
torch.set_num_threads(1)
hidden_map = torch.linalg.qr(torch.randn(CODE, CODE)).Q


def draw():
    """Queries, tokens' codes and values, and where the needle is."""
    codes = torch.randn(BATCH, TOKENS, CODE)
    values = torch.randn(BATCH, TOKENS, VALUE)
    needle = torch.randint(TOKENS, (BATCH,))
    queries = codes[torch.arange(BATCH), needle] @ hidden_map
    return queries, codes, values, needle


# %%
# Four ways to select
# -------------------
#
# All of them select exactly 4 tokens in the forward. They differ in the derivative: none, that of
# the softmax of all 64 scores, or that of the relaxed top-k, which is 0 far from the boundary. The
# last is that of the relaxed top-1: it does not stop when the needle is among the 4 selected.


def hard(scores):
    return st.topk_mask(scores, K, 0.0)


def softmax(scores):
    soft = scores.softmax(dim=-1)
    return hard(scores.detach()) + soft - soft.detach()


def relaxed(scores):
    return st.topk_mask(scores, K, 1.0, straight_through=True)


def relaxed_first(scores):
    first = st.topk_mask(scores, 1, 1.0)
    return hard(scores.detach()) + first - first.detach()


def train(select):
    """The share of needles that are fetched, as training goes on."""
    torch.manual_seed(1)
    index = torch.nn.Linear(CODE, CODE, bias=False)
    gate = torch.nn.Linear(CODE, CODE, bias=False)
    optimizer = torch.optim.Adam([*index.parameters(), *gate.parameters()], lr=1e-2)
    found = []
    for _ in range(STEPS):
        queries, codes, values, needle = draw()
        scores = torch.einsum("bi,bni->bn", index(queries), codes) / CODE**0.5
        mask = select(scores)
        logits = torch.einsum("bi,bni->bn", gate(queries), codes) / CODE**0.5
        weights = mask * (logits - logits.amax(dim=-1, keepdim=True)).exp()
        weights = weights / weights.sum(dim=-1, keepdim=True)
        answer = torch.einsum("bn,bnv->bv", weights, values)
        target = values[torch.arange(BATCH), needle]
        loss = (answer - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        fetched = mask.detach()[torch.arange(BATCH), needle] > 0.5
        found.append(fetched.float().mean().item())
    return found


METHODS = {
    "hard": hard,
    "softmax": softmax,
    "relaxed": relaxed,
    "relaxed, k = 1": relaxed_first,
}
curves = {name: train(select) for name, select in METHODS.items()}
recall = {name: sum(curve[-50:]) / 50 for name, curve in curves.items()}
for name, value in recall.items():
    print(f"{name:14}  {100 * value:5.1f} % of the needles fetched at the end")

# %%
# The hard selection never learns; chance, the dotted line, is 4 in 64. The others find the needle,
# and the backward of the relaxed ones touches a few tokens of each row, that of the softmax all.
# ``sparsetopk.torch.nn.TopKAttention`` is such an indexer before attention, and gathers only these;
# ``backward_k=1`` gives it the derivative of the last.

colours = {
    "hard": COLOURS["hard"],
    "softmax": COLOURS["dense"],
    "relaxed": "#e9a8b0",
    "relaxed, k = 1": COLOURS["p = 2"],
}
figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
for name, curve in curves.items():
    smooth = torch.tensor(curve).unfold(0, 20, 1).mean(dim=-1)
    axes.plot(smooth, label=name, color=colours[name])
axes.axhline(K / TOKENS, color="grey", linestyle=":", linewidth=1)
axes.set(xlabel="step", ylabel="share of needles fetched", ylim=(0, 1.02))
axes.legend(frameon=False)
plt.show()
