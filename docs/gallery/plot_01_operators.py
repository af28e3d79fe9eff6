"""
The operators, by eye
=====================

A top-k keeps the k largest entries of a vector and jumps when two of them change places. Here
is what the relaxed operators return instead, and what ``lam`` and ``p`` do to it.
"""

import matplotlib.pyplot as plt
import numpy as np

import sparsetopk as st
from sparsetopk.experiments.drawing import COLOURS

# sphinx_gallery_thumbnail_number = 3

# %%
# Four operators
# --------------
#
# One vector; k is 2. The largest entry is far above the rest. The second place is disputed: by
# 1 and 0.9 if the largest values are wanted, by 1, 0.9 and -0.95 if it is the largest
# magnitudes.
#
# - :func:`~sparsetopk.topk_mask` marks the k largest entries, with numbers in [0, 1] that sum
#   to k.
# - With ``two_sided=True`` the mask is smooth both where it leaves 0 and where it reaches 1.
# - :func:`~sparsetopk.topk_mag` keeps the k entries of largest magnitude, with their values.
# - :func:`~sparsetopk.topk_sign` marks those, with their signs.
#
# ``lam = 0`` is the hard operator in each case.

x = np.array([0.3, 1.6, -0.2, 1.0, -0.95, 0.9, -0.6, 0.1])
LAM = 0.2
operators = {
    "topk_mask": lambda lam: st.topk_mask(x, k=2, lam=lam),
    "topk_mask, two-sided, p = 3/2": lambda lam: st.topk_mask(
        x, 2, lam, p=1.5, two_sided=True
    ),
    "topk_mag": lambda lam: st.topk_mag(x, k=2, lam=lam),
    "topk_sign": lambda lam: st.topk_sign(x, k=2, lam=lam),
}

print(f"{'x':30s}", x)
for name, operator in operators.items():
    print(f"{name:30s}", operator(LAM).round(2) + 0.0)

# %%
# The entry that clearly wins is what the hard operator makes of it, and the ones that clearly
# lose are exactly 0. Only the entries near the boundary share.

figure, axes = plt.subplots(2, 2, figsize=(8, 5), sharex=True)
places = np.arange(len(x))
for ax, (name, operator) in zip(axes.flat, operators.items(), strict=True):
    colour = COLOURS["two-sided" if "two-sided" in name else "p = 2"]
    ax.bar(places, x, 0.85, color="none", edgecolor="#c8ccd0", linewidth=1, label="x")
    ax.bar(places - 0.2, operator(0.0), 0.35, color=COLOURS["hard"], label="lam = 0")
    ax.bar(places + 0.2, operator(LAM), 0.35, color=colour, label=f"lam = {LAM}")
    ax.axhline(0, color="black", linewidth=0.6)
    ax.set_title(name)
axes[0, 0].legend()
axes[0, 1].legend()
plt.show()

# %%
# What lam does
# -------------
#
# Each line is one entry of the mask as lam grows. Up to lam = 0.1, the gap between 1 and 0.9,
# this is the hard mask. Then these two share, more and more entries join, and in the end all of
# them have nearly k/n.

lams = np.geomspace(0.02, 100, 300)
masks = np.array([st.topk_mask(x, k=2, lam=lam) for lam in lams])
fractional = ((masks > 0) & (masks < 1)).sum(axis=1)

figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.4), sharex=True)
left.plot(lams, masks, color=COLOURS["p = 2"], alpha=0.8)
left.axhline(2 / len(x), color="black", linewidth=0.8, linestyle=":")
for text, place in {
    "1.6": (1.7, 0.93),
    "1": (0.19, 0.76),
    "0.9": (0.25, 0.3),
    "k/n": (0.022, 0.27),
}.items():
    left.text(*place, text, fontsize=9)
left.set(xscale="log", xlabel="lam", ylabel="topk_mask(x, k=2)")
right.step(lams, fractional, color=COLOURS["p = 2"])
right.set(xlabel="lam", ylabel="fractional entries")
plt.show()

# %%
# The right panel is often the better way to think of it. :func:`~sparsetopk.choose_lam` goes
# from the number of fractional entries to lam:

scores = np.random.default_rng(0).normal(size=1000)
for wanted in (2, 8, 32):
    lam = st.choose_lam(scores, k=10, fractional=wanted)
    mask = st.topk_mask(scores, k=10, lam=lam)
    found = ((mask > 0) & (mask < 1)).sum()
    print(
        f"fractional={wanted:2d}: lam = {lam.item():.3f}, {found} of 1000 entries are fractional"
    )
    assert found == wanted

# %%
# What p does
# -----------
#
# Move one entry, s, through the others and look at its place in the mask, and at the slope of
# that. The smoother operators spread out over a wider range of s for the same lam, so each has
# a lam of its own here.

others = np.array([0.3, 0.2, -0.5])
s = np.linspace(-0.8, 1.0, 721)
paths = np.column_stack([s, np.tile(others, (len(s), 1))])
curves = {
    "hard": {"lam": 0.0},
    "p = 2": {"lam": 0.4},
    "p = 4/3": {"lam": 0.8, "p": 4 / 3},
    "two-sided": {"lam": 0.4, "p": 1.5, "two_sided": True},
}
direction = np.zeros_like(paths)
direction[:, 0] = 1

figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.4), sharex=True)
for name, options in curves.items():
    left.plot(
        s, st.topk_mask(paths, k=2, **options)[:, 0], color=COLOURS[name], label=name
    )
    if name != "hard":
        slope = st.topk_mask_jvp(paths, k=2, dx=direction, **options)[:, 0]
        right.plot(s, slope, color=COLOURS[name])
left.set(xlabel="s", ylabel="mask of s", title="a top-2 mask of (s, 0.3, 0.2, -0.5)")
right.set(xlabel="s", title="its slope in s")
left.legend(loc="lower right")
plt.show()

# %%
# The hard mask jumps. With p = 2 the mask is continuous, and its slope jumps at both ends. With
# p = 4/3 it leaves 0 smoothly, but the slope still jumps where an entry reaches 1: another one
# near s = 0.05, and s itself near 0.4. The slope of the two-sided mask is continuous
# everywhere.
