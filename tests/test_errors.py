"""Bad input gets an error that names the argument, what was expected and what came."""

import numpy as np
import pytest

import sparsetopk as st

X = np.array([[0.3, 0.1, -0.2], [1.0, 2.0, 3.0]])
FAMILY = [st.topk_mask, st.topk, st.topk_mag, st.topk_sign, st.topk_select, st.topk_value]

BAD = [
    # arguments, keywords, error, what the message names
    ((X, -1), {}, ValueError, r"k must be in \[0, n\] with n=3, got -1"),
    ((X, 4), {}, ValueError, r"k must be in \[0, n\] with n=3, got 4"),
    ((X, np.nan), {}, ValueError, r"k must be in \[0, n\] with n=3, got nan"),
    ((X, "2"), {}, TypeError, r"k must be a real number or an array of them, got '2'"),
    ((X, 1j), {}, TypeError, r"k must be a real number"),
    ((X, True), {}, TypeError, r"k must be a real number .* got True"),
    ((X, None), {}, TypeError, r"k must be a real number .* got None"),
    ((X, [1, 1, 2]), {}, ValueError, r"k must be a number or broadcast to shape \(2, 1\).*\(3,\)"),
    ((X, 1, -0.1), {}, ValueError, r"lam must be finite and at least 0, got -0.1"),
    ((X, 1, np.nan), {}, ValueError, r"lam must be finite and at least 0, got nan"),
    ((X, 1, np.inf), {}, ValueError, r"lam must be finite and at least 0, got inf"),
    ((X, 1, [[1.0, 1.0]]), {}, ValueError, r"lam must be .* shape \(2, 1\).* got shape \(1, 2\)"),
    ((X, 1), {"p": 1.0}, ValueError, r"p must be finite and greater than 1, got 1.0"),
    ((X, 1), {"p": np.nan}, ValueError, r"p must be finite and greater than 1, got nan"),
    ((X, 1), {"p": np.inf}, ValueError, r"p must be finite and greater than 1, got inf"),
    ((X, 1), {"p": "2"}, TypeError, r"p must be a number, got '2'"),
    ((X.astype(int), 1), {}, TypeError, r"x must be an array of dtype float16.*, got int64"),
    ((X.astype(complex), 1), {}, TypeError, r"x must be an array of dtype .*, got complex128"),
    ((X > 0, 1), {}, TypeError, r"x must be an array of dtype .*, got bool"),
    (([["a"]], 1), {}, TypeError, r"x must be an array of dtype .*, got <U1"),
    ((X, 1), {"axis": 2}, ValueError, r"axis must be in \[-2, 2\) for x of shape \(2, 3\), got 2"),
    ((X, 1), {"axis": -3}, ValueError, r"axis must be in \[-2, 2\)"),
    ((X, 1), {"axis": 0.0}, TypeError, r"axis must be an int.*, got 0.0"),
    ((np.float64(1.0), 1), {}, ValueError, r"x must have at least one axis, got a scalar"),
]


@pytest.mark.parametrize("operator", FAMILY, ids=lambda f: f.__name__)
@pytest.mark.parametrize(("args", "options", "error", "message"), BAD)
def test_every_top_k_operator_checks_its_arguments(operator, args, options, error, message):
    with pytest.raises(error, match=message):
        operator(*args, **options)


@pytest.mark.parametrize("operator", FAMILY[:4], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"solver": "newton"}, r"solver must be one of 'threshold', .*, got 'newton'"),
        ({"solver": "dykstra", "p": 1.5}, r"p must be 2 for solver 'dykstra', got 1.5"),
        (
            {"solver": "pav", "solver_options": {"tol": 1e-3}},
            r"solver_options must be empty .*'pav'",
        ),
        ({"solver_options": {"iterations": 3}}, r"a key of solver_options must be one of"),
        ({"solver_options": {"max_iter": 0}}, r"solver_options\['max_iter'\] must be at least 1"),
        (
            {"solver_options": {"tol": -1.0}},
            r"solver_options\['tol'\] must be a finite number >= 0",
        ),
    ],
)
def test_solvers_are_checked(operator, options, message):
    with pytest.raises(ValueError, match=message):
        operator(X, 1, **options)
    with pytest.raises(ValueError, match=message):
        operator(X, 1, 0.0, **options)  # also where nothing is left for the solver to do


CALLS = {
    "two-sided pav": (
        lambda: st.topk_mask(X, 1, two_sided=True, solver="pav"),
        ValueError,
        r"solver must be 'threshold' when two_sided=True, got 'pav'",
    ),
    "two-sided phi": (
        lambda: st.topk_value(X, 1, two_sided=True, phi="abs"),
        ValueError,
        r"phi must be 'identity' when two_sided=True, got 'abs'",
    ),
    "unknown phi": (
        lambda: st.topk_value(X, 1, phi="square"),
        ValueError,
        r"phi must be one of 'identity', .*, got 'square'",
    ),
    "two-sided magnitude": (
        lambda: st.topk_select(X, 1, two_sided=True, magnitude=True),
        ValueError,
        r"two_sided must be False when magnitude=True",
    ),
    "capacity of an array k": (
        lambda: st.topk_select(X, [[1], [2]]),
        ValueError,
        r"capacity must be given when k is an array, got k of shape \(2, 1\)",
    ),
    "capacity above n": (
        lambda: st.topk_select(X, 1, capacity=4),
        ValueError,
        r"capacity must be in \[1, 3\], got 4",
    ),
    "capacity of 1.5": (
        lambda: st.topk_select(X, 1, capacity=1.5),
        TypeError,
        r"capacity must be an int, got 1.5",
    ),
    "fractional of 0": (
        lambda: st.choose_lam(X, 1, 0),
        ValueError,
        r"fractional must be at least 1, got 0",
    ),
    "integer logits": (
        lambda: st.topk_loss([[1, 2, 3]], [0], 2),
        TypeError,
        r"logits must be an array of dtype float16",
    ),
    "k of a loss": (
        lambda: st.topk_loss(X, [0, 1], [1, 2]),
        ValueError,
        r"k must be .* shape \(2, 1\) \(that of logits with length 1",
    ),
    "cotangent of a loss": (
        lambda: st.topk_loss_vjp(X, [0, 1], 2, dy=[1.0, 2.0, 3.0], reduction="none"),
        ValueError,
        r"dy must be a number or have shape \(2,\), got \(3,\)",
    ),
    "direction of a sort": (
        lambda: st.soft_sort_jvp(X, dx=X[0]),
        ValueError,
        r"dx must have shape \(2, 3\), got \(3,\)",
    ),
    "direction of a rank": (
        lambda: st.soft_rank_jvp(X, dx=X[0]),
        ValueError,
        r"dx must have shape \(2, 3\), got \(3,\)",
    ),
    "rank of booleans": (
        lambda: st.soft_rank([True, False]),
        TypeError,
        r"x must be an array of dtype float16.*, got bool",
    ),
    "shape of dx": (
        lambda: st.topk_mask_jvp(X, 1, dx=X[0]),
        ValueError,
        r"dx must have shape \(2, 3\), got \(3,\)",
    ),
    "shape of dy": (
        lambda: st.topk_mask_vjp(X, 1, dy=X.T),
        ValueError,
        r"dy must have shape \(2, 3\), got \(3, 2\)",
    ),
    "length of w": (
        lambda: st.permutahedron(X, [1.0, 2.0]),
        ValueError,
        r"w must have length n=3 along axis 1 .* \(2, 3\), got shape \(2,\)",
    ),
    "a number for w": (
        lambda: st.permutahedron(X, 1.0),
        ValueError,
        r"w must have length n=3 along axis 1 .* got shape \(\)",
    ),
    "w that does not reach the axis": (
        lambda: st.permutahedron(np.ones((4, 3, 2)), np.ones((3, 2)), axis=0),
        ValueError,
        r"w must have length n=4 along axis 0 .* got shape \(3, 2\)",
    ),
    "length 1 of w": (
        lambda: st.permutahedron(X, [[1.0]]),
        ValueError,
        r"w must have length n=3 along axis 1",
    ),
    "negative w": (
        lambda: st.permutahedron(X, [1.0, 0.5, -1.0], phi="half_square"),
        ValueError,
        r"w must be nonnegative unless phi='identity', got -1 with phi='half_square'",
    ),
    "complex w": (
        lambda: st.permutahedron(X, [1j, 2.0, 3.0]),
        TypeError,
        r"w must be a real number or an array of them",
    ),
    "threshold for any w": (
        lambda: st.permutahedron(X, X, solver="threshold"),
        ValueError,
        r"solver must be one of 'pav', 'dykstra', 'bca', got 'threshold'",
    ),
    "dykstra for exp": (
        lambda: st.permutahedron(X, [1.0, 0.5, 0.0], phi="exp", solver="dykstra"),
        ValueError,
        r"phi must not be 'exp' for solver 'dykstra'",
    ),
    "shape of dw": (
        lambda: st.permutahedron_jvp(X, X, dw=X[0]),
        ValueError,
        r"dw must have the shape of w, \(2, 3\), got \(3,\)",
    ),
    "negative w of a norm": (
        lambda: st.owl_norm(X, [1.0, 0.5, -1.0]),
        ValueError,
        r"w must be nonnegative",
    ),
    "k of a norm": (
        lambda: st.half_sq_support_norm(X, 4),
        ValueError,
        r"k must be in \[0, n\] with n=3, got 4",
    ),
    "targets out of range": (
        lambda: st.topk_loss(X, [0, 3], 2),
        ValueError,
        r"targets must be class indices in \[0, 3\), got 3",
    ),
    "shape of indices": (
        lambda: st.topk_loss(X, [0, 1, 2], 2),
        ValueError,
        r"targets must have shape \(2,\) when they are class indices .*, got \(3,\)",
    ),
    "shape of weights": (
        lambda: st.topk_loss(X, [0.5, 0.5], 2),
        ValueError,
        r"targets must have the shape of logits, \(2, 3\), got \(2,\)",
    ),
    "weights above 1": (
        lambda: st.topk_loss(X, 2 * np.eye(3)[:2], 2),
        ValueError,
        r"targets must be in \[0, 1\], got values from 0.0 to 2.0",
    ),
    "targets of strings": (
        lambda: st.topk_loss(X, ["a", "b"], 2),
        TypeError,
        r"targets must be integer class indices, or booleans or floats",
    ),
    "soft targets for best": (
        lambda: st.topk_loss(X, np.full((2, 3), 0.3), 2, completion="best"),
        ValueError,
        r"targets must be class indices or sets of labels .*'best', got soft targets",
    ),
    "the row with too many labels": (
        lambda: st.topk_loss(X, [[1.0, 1, 1], [1, 1, 0]], [[3], [1]], completion="best"),
        ValueError,
        r"targets must have at most k labels .* got 2 for k=1",
    ),
    "k above n by little": (
        lambda: st.topk_mask(X, 3.0000001),
        ValueError,
        r"k must be in \[0, n\] with n=3, got 3.0000001",
    ),
    "phi of a list": (
        lambda: st.topk_value(X, 1, phi=["abs"]),
        ValueError,
        r"phi must be one of .*, got \['abs'\]",
    ),
    "solver_options of a number": (
        lambda: st.topk_mask(X, 1, solver_options=5),
        TypeError,
        r"solver_options must be a dict, got 5",
    ),
    "p beyond floats": (
        lambda: st.topk_mask(X, 1, p=10**400),
        ValueError,
        r"p must be finite and greater than 1, got 1000",
    ),
    "ragged x": (
        lambda: st.topk_mask([[1.0], [1.0, 2.0]], 1),
        ValueError,
        r"x must be a rectangular array",
    ),
    "too many labels": (
        lambda: st.topk_loss(X, np.ones((2, 3)), 2, completion="spread"),
        ValueError,
        r"targets must have at most k labels .* got 3 for k=2",
    ),
    "unknown completion": (
        lambda: st.topk_loss(X, [0, 1], 2, completion="fill"),
        ValueError,
        r"completion must be 'spread', 'best' or None, got 'fill'",
    ),
    "unknown reduction": (
        lambda: st.topk_loss(X, [0, 1], 2, reduction="average"),
        ValueError,
        r"reduction must be one of 'mean', 'sum', 'none', got 'average'",
    ),
    "rank of a complex array": (
        lambda: st.soft_rank(X.astype(complex)),
        TypeError,
        r"x must be an array of dtype",
    ),
    "sort of integers": (lambda: st.sort([3, 1, 2]), TypeError, r"x must be .*, got int64"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(name):
    call, error, message = CALLS[name]
    with pytest.raises(error, match=message):
        call()
