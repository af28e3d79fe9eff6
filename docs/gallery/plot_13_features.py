"""
Exactly k columns of a table
============================

Which 12 of 64 pixels say most about a handwritten digit? Judged one by one, the best pixels are
neighbours that say the same. ``TopKFeatureSelector`` chooses them together, by gradient.
"""

import warnings

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits
from sklearn.ensemble import ExtraTreesClassifier
from sklearn.feature_selection import SelectKBest, f_classif
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline

from sparsetopk.experiments.drawing import COLOURS
from sparsetopk.sklearn import TopKFeatureSelector

# %%
# An estimator of scikit-learn
# ----------------------------
#
# It stands in a pipeline, and gives exactly k columns. What judges them here is another model than
# the small network that has chosen them.

warnings.filterwarnings(
    "ignore", module="sklearn.feature_selection"
)  # some pixels are constant
x, y = load_digits(return_X_y=True)
x, x_test, y, y_test = train_test_split(x, y, random_state=0, stratify=y)


def selectors(k):
    return {
        "one by one (F test)": SelectKBest(f_classif, k=k),
        "together (relaxed top-k)": TopKFeatureSelector(k=k, random_state=0),
    }


def accuracy(selector):
    model = make_pipeline(selector, ExtraTreesClassifier(200, random_state=0))
    return 100 * model.fit(x, y).score(x_test, y_test)


KS = [4, 8, 12, 20]
found = {name: [accuracy(selectors(k)[name]) for k in KS] for name in selectors(1)}
for name, of_k in found.items():
    print(
        f"{name:25}",
        "  ".join(f"k = {k}: {v:.1f} %" for k, v in zip(KS, of_k, strict=True)),
    )

# %%
# What they have chosen
# ---------------------

colours = [COLOURS["dense"], COLOURS["p = 2"]]
figure, axes = plt.subplots(
    1, 3, figsize=(9, 3), layout="constrained", width_ratios=[2, 1, 1]
)
for (name, of_k), colour in zip(found.items(), colours, strict=True):
    axes[0].plot(KS, of_k, "o-", label=name, color=colour)
axes[0].set_xlabel("pixels")
axes[0].set_ylabel("% right")
axes[0].legend(frameon=False)
for ax, (name, selector) in zip(axes[1:], selectors(12).items(), strict=True):
    chosen = selector.fit(x, y).get_support().reshape(8, 8)
    ax.imshow(np.where(chosen, 1.0, 0.25) * x.mean(axis=0).reshape(8, 8), cmap="gray_r")
    ax.scatter(*np.nonzero(chosen)[::-1], s=14, color=COLOURS["p = 2"])
    ax.set_title(name, fontsize=8)
    ax.set_axis_off()
plt.show()
