"""An estimator for scikit-learn that selects features; needs scikit-learn 1.6 or later, and torch."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator
from sklearn.feature_selection import SelectorMixin
from sklearn.utils import Tags, check_random_state
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor
from torch.nn import functional as F

from ._checks import check_choice, check_positive_int
from .torch import topk_mask

__all__ = ["TopKFeatureSelector"]

_LAST = 0.01  # of lam, at the end


class TopKFeatureSelector(SelectorMixin, BaseEstimator):  # type: ignore[misc]
    """Exactly k features of a table, chosen by the gradient of what is to be predicted from them.

    A small network sees all features, scaled to variance 1 and multiplied by a relaxed top-k of scores;
    network and scores are trained together, and lam goes to a hundredth, so that k features are left.
    No feature is chosen twice, and features that say the same do not all come in, as they do where each
    is judged alone.

    Parameters
    ----------
    k : int
        How many features to select.
    target : {"auto", "classes", "numbers", "features"}
        What is predicted: classes or numbers in y, or without y the features themselves. "auto" looks
        at y.
    hidden : int
        The width of the network; 0 for a linear model.
    lam, p : float
        The relaxation at the start, in units in which scores begin at 0; see ``topk_mask``.
    steps, batch_size, learning_rate
        Of Adam.
    random_state : int, RandomState or None

    Attributes
    ----------
    support_ : bool array of shape (n_features,)
    scores_ : array of shape (n_features,)
        Larger for what is selected; of no meaning beyond their order.

    Examples
    --------
    >>> X = np.random.default_rng(0).normal(size=(300, 8))
    >>> y = X[:, 2] - 2 * X[:, 5]
    >>> selector = TopKFeatureSelector(k=2, random_state=0).fit(X, y)
    >>> [int(i) for i in selector.get_support(indices=True)]
    [2, 5]
    """

    def __init__(
        self,
        k: int = 10,
        *,
        target: Literal["auto", "classes", "numbers", "features"] = "auto",
        hidden: int = 32,
        lam: float = 1.0,
        p: float = 4 / 3,
        steps: int = 300,
        batch_size: int = 256,
        learning_rate: float = 0.02,
        random_state: Any = None,
    ) -> None:
        self.k = k
        self.target = target
        self.hidden = hidden
        self.lam = lam
        self.p = p
        self.steps = steps
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: ArrayLike | None = None) -> TopKFeatureSelector:
        table: np.ndarray
        given: np.ndarray | None = None
        if y is None:
            table = validate_data(self, X, dtype=np.float64)
        else:
            table, given = validate_data(self, X, y, dtype=np.float64, multi_output=True)
        n = table.shape[1]
        if check_positive_int("k", self.k) > n:
            raise ValueError(f"k must be in [1, n] with n={n} features, got {self.k}")
        x = _scaled(table)
        wanted, outputs = self._wanted(x, given)
        seed = check_random_state(self.random_state).randint(2**31)
        with torch.random.fork_rng(devices=[]), torch.enable_grad():  # nobody else's numbers change
            torch.manual_seed(seed)
            scores = self._train(x, wanted, outputs)
        self.scores_ = scores.numpy().astype(np.float64)
        self.support_ = np.zeros(n, dtype=bool)
        self.support_[np.argsort(-self.scores_, kind="stable")[: self.k]] = True
        return self

    def _wanted(self, x: Tensor, y: np.ndarray | None) -> tuple[Tensor, int]:
        """What is to be predicted, and the number of outputs."""
        target = check_choice("target", self.target, ("auto", "classes", "numbers", "features"))
        if target == "auto":
            kinds = ("binary", "multiclass")
            discrete = y is not None and type_of_target(y) in kinds
            target = "features" if y is None else "classes" if discrete else "numbers"
        if target == "features":
            return x, x.shape[1]
        if y is None:
            raise ValueError(f"target={target!r} requires y to be passed, but the target y is None")
        if target == "classes":
            check_classification_targets(y)
            classes, labels = np.unique(y, return_inverse=True)
            return torch.from_numpy(labels.reshape(-1)), len(classes)
        numbers = _scaled(np.asarray(y, dtype=np.float64).reshape(len(x), -1))
        return numbers, numbers.shape[1]

    def _train(self, x: Tensor, wanted: Tensor, outputs: int) -> Tensor:
        n = x.shape[1]
        scores = torch.nn.Parameter(torch.zeros(n))
        network: torch.nn.Module = torch.nn.Linear(n, outputs)
        if self.hidden:
            layers = [torch.nn.Linear(n, self.hidden), torch.nn.ReLU()]
            network = torch.nn.Sequential(*layers, torch.nn.Linear(self.hidden, outputs))
        optimizer = torch.optim.Adam([scores, *network.parameters()], lr=self.learning_rate)
        loss = F.mse_loss if wanted.is_floating_point() else F.cross_entropy
        for step in range(self.steps):
            at = torch.randint(len(x), (min(self.batch_size, len(x)),))
            lam = self.lam * _LAST ** (step / self.steps)
            mask = topk_mask(scores, self.k, lam, p=self.p)
            optimizer.zero_grad()
            loss(network(x[at] * mask), wanted[at]).backward()
            optimizer.step()
        return scores.detach()

    def _get_support_mask(self) -> np.ndarray:
        check_is_fitted(self)
        return self.support_

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        tags.target_tags.required = self.target in ("classes", "numbers")
        return tags


def _scaled(columns: np.ndarray) -> Tensor:
    """With mean 0 and variance 1, but for those that are constant."""
    scale = columns.std(axis=0)
    scaled = (columns - columns.mean(axis=0)) / np.where(scale > 0, scale, 1.0)
    return torch.from_numpy(scaled).float()
