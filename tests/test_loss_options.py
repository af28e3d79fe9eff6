"""``topk_loss`` has one signature, and is the same on all front-ends: thousands of rows in float64."""

import inspect

import numpy as np
import pytest

import sparsetopk

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

import jax.numpy as jnp

import sparsetopk.jax as sj
import sparsetopk.torch as stt

M, N = 2000, 11
_rng = np.random.default_rng(0)
X = 2 * _rng.normal(size=(M, N))
X[::7, 3] = -np.inf
LABELS = np.where(np.arange(M) % 5 == 0, -100, _rng.integers(4, N, size=M))
SETS = _rng.random((M, N)) < 0.1
SETS[:, 3] = False
SETS[SETS.sum(axis=1) > 3] = False
WEIGHT = _rng.random(N) + 0.5
K, LAM = _rng.choice([3.0, 3.5, 6.0], size=(M, 1)), _rng.choice([0.0, 0.3, 2.0], size=(M, 1))

CASES = {
    "ignored": (LABELS, {}),
    "weighted": (LABELS, {"weight": True, "completion": "spread", "reduction": "sum"}),
    "smooth": (LABELS, {"label_smoothing": 0.2, "weight": True, "p": 1.5, "completion": None}),
    "smooth sets": (SETS, {"label_smoothing": 0.1, "completion": "spread", "weight": True}),
    "each": (LABELS, {"completion": "best", "reduction": "none", "two_sided": True}),
}


def test_one_signature():
    ours = inspect.signature(sparsetopk.topk_loss).parameters
    shown = lambda v: (v.name, v.kind, v.default)  # noqa: E731
    in_torch = dict(inspect.signature(stt.topk_loss).parameters)
    in_torch = {("axis" if name == "dim" else name): v for name, v in in_torch.items()}
    in_jax = dict(inspect.signature(sj.topk_loss).parameters)
    assert in_jax.pop("axis_name").default is None
    assert list(ours) == list(in_torch) == list(in_jax)
    for name, v in ours.items():
        assert shown(v) == shown(in_jax[name])
        assert shown(v)[1:] == shown(in_torch[name])[1:]


def of_torch(t, options, dim=-1):
    x = torch.from_numpy(X if dim == -1 else X.T).requires_grad_()
    options = options | {"weight": torch.from_numpy(WEIGHT)} if "weight" in options else options
    k, lam = (torch.from_numpy(v if dim == -1 else v.T) for v in (K, LAM))
    y = stt.topk_loss(x, torch.from_numpy(t), k, lam, dim=dim, **options)
    return y.detach().numpy(), torch.autograd.grad(y, x, y.detach().cos())[0].numpy()


@pytest.mark.parametrize("case", CASES)
def test_numpy_is_as_torch(case):
    t, options = CASES[case]
    value, slope = of_torch(t, options)
    given = options | {"weight": WEIGHT} if "weight" in options else options
    found = sparsetopk.topk_loss(X, t, K, LAM, **given)
    np.testing.assert_allclose(found, value, rtol=1e-11, atol=1e-11)
    pulled = sparsetopk.topk_loss_vjp(X, t, K, LAM, dy=np.cos(found), **given)
    np.testing.assert_allclose(pulled, slope, rtol=1e-9, atol=1e-11)
    turned = sparsetopk.topk_loss(X.T, t.T, K.T, LAM.T, axis=0, **given)
    np.testing.assert_array_equal(turned, found)
    turned = sparsetopk.topk_loss_vjp(X.T, t.T, K.T, LAM.T, dy=np.cos(found), axis=0, **given)
    np.testing.assert_array_equal(turned.T, pulled)


# To compile XLA operations takes long: two cases have all that is not in other tests.
WAYS = [(case, "core") for case in CASES]
WAYS += [(case, "XLA operations") for case in ("weighted", "smooth")]


@pytest.mark.parametrize(("case", "way"), WAYS, indirect=["way"])
def test_jax_is_as_torch(case, way):
    t, options = CASES[case]
    value, slope = of_torch(t, options)
    weight = jnp.asarray(WEIGHT) if "weight" in options else None

    @jax.jit
    def value_and_slope(x, t, k, lam):
        f = lambda x: sj.topk_loss(x, t, k, lam, axis=0, **options | {"weight": weight})  # noqa: E731
        y, pull = jax.vjp(f, x)
        return y, pull(jnp.cos(y))[0]

    found = value_and_slope(*map(jnp.asarray, (X.T, t.T, K.T, LAM.T)))
    np.testing.assert_allclose(found[0], value, rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(found[1].T, slope, rtol=1e-9, atol=1e-11)


def test_rows_that_are_left_out_may_hold_anything():
    x = X.copy()
    x[::5] = np.nan
    value, slope = of_torch(LABELS, {})
    np.testing.assert_allclose(sparsetopk.topk_loss(x, LABELS, K, LAM), value, rtol=1e-12)
    found = sparsetopk.topk_loss_vjp(x, LABELS, K, LAM, dy=np.cos(value))
    np.testing.assert_allclose(found, slope, atol=1e-12)
    f = lambda x: sj.topk_loss(x, jnp.asarray(LABELS), jnp.asarray(K), jnp.asarray(LAM))  # noqa: E731
    np.testing.assert_allclose(jax.grad(f)(jnp.asarray(x)), slope / np.cos(value), atol=1e-12)


def test_a_mean_of_no_rows_is_nan():
    x, t = X[:2], np.array([-100, -100])
    assert np.isnan(sparsetopk.topk_loss(x, t, 2))
    assert np.isnan(sj.topk_loss(jnp.asarray(x), jnp.asarray(t), 2))
    assert sparsetopk.topk_loss(x, t, 2, reduction="sum") == 0
    assert sj.topk_loss(jnp.asarray(x), jnp.asarray(t), 2, reduction="sum") == 0


@pytest.mark.parametrize("completion", [None, "spread", "best"])
def test_a_bad_label_makes_its_row_nan(completion):
    t = jnp.array([0, -100, -1, N, 2])
    f = jax.jit(
        lambda t: sj.topk_loss(jnp.asarray(X[1:6]), t, 3, completion=completion, reduction="none")
    )
    np.testing.assert_array_equal(jnp.isnan(f(t)), [False, False, True, True, False])
    assert f(t)[1] == 0


@pytest.mark.parametrize("st", ["numpy", "jax"], indirect=True)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_smoothing": "a"}, "label_smoothing must be a number, got 'a'"),
        ({"label_smoothing": 1.5}, r"label_smoothing must be in \[0, 1\], got 1.5"),
        ({"label_smoothing": 0.1, "completion": "best"}, "label_smoothing must be 0 with"),
        ({"ignore_index": 1.5}, "ignore_index must be an int, got 1.5"),
        ({"weight": np.ones(3)}, r"weight must have shape \(11,\), one number per class"),
    ],
)
def test_errors_name_the_argument(st, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        st.topk_loss(X, LABELS, 3, **options)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("completion", [None, "spread", "best"])
def test_where_all_rows_are_ignored_the_mean_is_nan_and_nothing_has_a_gradient(
    completion, weighted
):
    """As in ``cross_entropy``; one such batch must not end a training."""
    x, t = X[:5], np.full(5, -100)
    weight = WEIGHT if weighted else None
    options = {"k": 3, "completion": completion}
    assert np.isnan(sparsetopk.topk_loss(x, t, weight=weight, **options))
    assert not sparsetopk.topk_loss_vjp(x, t, weight=weight, **options).any()
    loss, slope = jax.value_and_grad(
        lambda x: sj.topk_loss(
            x, t, weight=None if weight is None else jnp.asarray(weight), **options
        )
    )(jnp.asarray(x))
    assert jnp.isnan(loss)
    assert not slope.any()
    options |= {"weight": torch.from_numpy(weight) if weighted else None}
    for numbers in ({}, {"lam": torch.tensor(0.3, dtype=torch.float64, requires_grad=True)}):
        at = torch.from_numpy(x).requires_grad_()
        lost = stt.topk_loss(at, torch.from_numpy(t), **options, **numbers)
        assert lost.isnan()
        lost.backward()
        assert not at.grad.any()
