"""The estimator for scikit-learn."""

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn", minversion="1.6")

import torch
from sklearn.utils.estimator_checks import check_estimator

from sparsetopk.sklearn import TopKFeatureSelector


def table(seed=0, rows=400):
    """12 features: 0 to 2 say something, 3 to 5 are copies of these with noise, the rest is noise."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 12))
    x[:, 3:6] = x[:, :3] + 0.3 * rng.normal(size=(rows, 3))
    return x


@pytest.mark.parametrize("target", ["classes", "numbers", "several numbers"])
def test_finds_what_matters_and_no_copies(target):
    x = table()
    y = x[:, :3] @ np.array([2.0, -1.5, 1.0])
    if target == "classes":
        y = np.where(y > 0, "yes", "no")
    elif target == "several numbers":
        y = x[:, :3] @ np.array([[2.0, 0.0], [0.0, 1.0], [1.0, -1.0]])
    before = torch.random.get_rng_state()
    selector = TopKFeatureSelector(k=3, random_state=0).fit(100 * x + 7, y)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert selector.get_support(indices=True).tolist() == [0, 1, 2]
    assert selector.transform(x).shape == (400, 3)
    again = TopKFeatureSelector(k=3, random_state=0).fit(100 * x + 7, y)
    assert np.array_equal(again.scores_, selector.scores_)


def test_without_y_it_keeps_what_the_others_follow_from():
    rng = np.random.default_rng(0)
    causes = rng.normal(size=(500, 2))
    x = np.concatenate([causes @ rng.normal(size=(2, 6)), 0.0 * causes], axis=1)
    selector = TopKFeatureSelector(k=2, hidden=0, steps=600, random_state=0).fit(x)
    support = selector.get_support(indices=True)
    assert len(set(support)) == 2
    assert set(support) < set(range(6))  # a constant feature says nothing


@pytest.mark.parametrize("k", [1, 5, 12])
def test_exactly_k_whatever_the_features(k):
    x = np.ones((20, 12))  # nothing to choose by
    assert TopKFeatureSelector(k=k, steps=3).fit(x, np.arange(20) % 2).get_support().sum() == k


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 13}, r"k must be in \[1, n\] with n=12 features, got 13"),
        ({"k": 0}, "k must be at least 1"),
        ({"k": 2, "target": "labels"}, "target must be one of"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        TopKFeatureSelector(**options).fit(table(), table()[:, 0])
    with pytest.raises(ValueError, match="requires y to be passed"):
        TopKFeatureSelector(k=2, target="classes").fit(table())


@pytest.mark.slow
@pytest.mark.parametrize("target", ["auto", "numbers"])
def test_scikit_learn_is_content(target):
    # What is skipped needs an environment variable: the array API.
    check_estimator(TopKFeatureSelector(k=1, steps=5, target=target), on_skip=None)
