"""``choose_rank_lam``: the smallest lam with which blocks of ``soft_rank`` are so large on average."""

import numpy as np
import pytest

import sparsetopk

N = 40
_rng = np.random.default_rng(0)
X = _rng.normal(size=(6, N)) * 10.0 ** np.arange(-3, 3).reshape(-1, 1)
X[1] = np.round(X[1], 3)  # with ties
X[2, 25:] = -np.inf
THERE = ~np.isneginf(X)
SETTINGS = [(2.0, True), (1.5, False), (3.0, True)]


def average_size(lam, **options):
    """Of the blocks of every row, from what its Jacobian does not keep apart."""
    slopes = sparsetopk.soft_rank_jacobian(X, lam, **options) != 0
    found = []
    for there, of_row in zip(THERE, slopes, strict=True):
        together = of_row[there][:, there] | np.eye(there.sum(), dtype=bool)
        found.append(there.sum() / len(np.unique(together, axis=0)))
    return np.array(found)


@pytest.mark.parametrize("size", [2, 5.5, 16])
@pytest.mark.parametrize(("p", "descending"), SETTINGS)
def test_it_is_the_smallest(size, p, descending):
    options = {"p": p, "descending": descending}
    lam = sparsetopk.choose_rank_lam(X, size, **options)
    assert (average_size(lam, **options) >= size).all()
    assert (average_size(lam * (1 - 1e-6), **options) < size).all()


@pytest.mark.parametrize(("p", "descending"), SETTINGS)
def test_blocks_only_grow_with_lam(p, descending):
    options = {"p": p, "descending": descending}
    one = sparsetopk.choose_rank_lam(X, N, **options)  # with which all is one block
    sizes = [average_size(one * 2.0**-e, **options) for e in np.arange(12.0, -1.0, -0.25)]
    assert (np.diff(sizes, axis=0) >= 0).all()
    np.testing.assert_array_equal(sizes[-1], THERE.sum(axis=1))


@pytest.mark.parametrize(("p", "descending"), SETTINGS)
def test_front_ends_agree(st, p, descending):
    options = {"p": p, "descending": descending}
    for axis, x in ((-1, X), (0, X.T)):
        found = st.choose_rank_lam(x, 4, axis=axis, **options)
        expected = sparsetopk.choose_rank_lam(x, 4, axis=axis, **options)
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_rows_in_which_every_lam_does(st):
    x = np.array([[1.0, 1.0, 1.0], [5.0, -np.inf, -np.inf], [-np.inf] * 3, [0.0, 3.0, 9.0]])
    np.testing.assert_array_equal(st.choose_rank_lam(x, 2)[:3], np.ones((3, 1)))
    np.testing.assert_allclose(st.choose_rank_lam(x, 1)[3], 9.0 / 2 / 3, rtol=1e-6)  # the scale
    assert np.isnan(st.choose_rank_lam(np.array([[np.nan, 1.0], [np.inf, 1.0]]))).all()
    assert st.choose_rank_lam(np.zeros((2, 0))).shape == (2, 1)


@pytest.mark.parametrize(
    ("size", "error", "message"),
    [
        (0.5, ValueError, "size must be finite and at least 1, got 0.5"),
        (np.inf, ValueError, "size must be finite and at least 1, got inf"),
        (np.nan, ValueError, "size must be finite and at least 1, got nan"),
        (True, TypeError, "size must be a number, got True"),
    ],
)
def test_errors(st, size, error, message):
    with pytest.raises(error, match=message):
        st.choose_rank_lam(X, size)
