"""The formulas of the page on the maths, as they stand there, against the library."""

import importlib
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import sparsetopk as st
from scalars import PHIS, PNorm, TwoSidedPNorm, operator_of, relaxed
from sparsetopk._maths.scalars import lone_response
from sparsetopk.reference import numerical_jacobian

PAGE = Path(__file__).parent.parent / "docs" / "maths.md"
PS = (2.0, 1.5, 4 / 3, 1.2)
PHI_NAMES = ("identity", "half_square", "abs", "exp")
SEEDS = range(8)


class Parts(NamedTuple):
    """One row, split as in Theorem 1: v, u, d, and which entries are in B and in A."""

    x: np.ndarray
    k: float
    lam: float
    v: float
    u: np.ndarray
    d: np.ndarray
    B: np.ndarray
    A: np.ndarray


def split(x, k, lam, reg, phi_name) -> Parts:
    column = lambda value: np.array([[float(value)]])  # noqa: E731
    s = relaxed(x[None], column(k), column(lam), operator_of(reg, phi_name))
    B, A = s.split.inside[0], s.split.above[0]
    d, u = s.blocks.d[0], s.blocks.u[0]
    if PHIS[phi_name].straight:  # an entry that stands alone has y = 1
        d = np.where(A, reg.inverse(np.ones_like(d)), d)
        u = np.where(A, x - lam * d, u)
    v = u[B][0] if B.any() else np.nan
    return Parts(x, k, lam, v, u, d, B, A)


def draw(seed, phi_name="identity", n=9):
    """x (nonnegative for even phi), a real k, and a lam that leaves several entries fractional."""
    rng = np.random.default_rng(seed)
    x, k, lam = rng.normal(size=n), rng.uniform(1.2, 3.8), rng.uniform(0.3, 0.9)
    if phi_name == "abs":
        lam /= 2  # with more of it v = 0, a case of its own
    return (np.abs(x) if PHIS[phi_name].even else x), k, lam


def operator(x, k, lam, phi_name, p):
    """y of Theorem 1: the gradient of f_{phi,R}(., 1_k)."""
    w = np.clip(k - np.arange(x.size), 0, 1)
    return st.permutahedron(x, w, lam, p=p, phi=phi_name)


@pytest.mark.parametrize("phi_name", PHI_NAMES)
@pytest.mark.parametrize("p", PS)
@pytest.mark.parametrize("seed", SEEDS)
def test_threshold_reduction(phi_name, p, seed):
    """Theorem 1 against PAV, which knows nothing of it."""
    x, k, lam = draw(seed, phi_name)
    reg, phi = PNorm(p), PHIS[phi_name]
    parts = split(x, k, lam, reg, phi_name)
    assert parts.B.any()
    v = np.array(parts.v)
    prime = phi.prime(v)
    above = reg.response(np.maximum((x - v) / lam, 0.0))
    np.testing.assert_allclose(np.minimum(above, prime).sum(), k * prime, rtol=1e-12)
    T = x - lam * lone_response(x, np.ones_like(x), np.full_like(x, lam), reg, phi)
    np.testing.assert_allclose(
        np.minimum(above, phi.prime(T)), operator(x, k, lam, phi_name, p), atol=1e-10
    )
    z = lambda v: np.minimum(  # noqa: E731
        reg.response(np.maximum((x - v) / lam, 0.0)) / phi.prime(np.array(v)), 1
    ).sum()
    sums = [z(v) for v in np.linspace(0.01, x.max(), 200)]
    assert np.all(np.diff(sums) <= 1e-12)


@pytest.mark.parametrize("two_sided", [False, True])
@pytest.mark.parametrize("p", PS)
@pytest.mark.parametrize("seed", SEEDS)
def test_bracket(p, two_sided, seed):
    x, k, lam = draw(seed)
    reg = TwoSidedPNorm(p) if two_sided else PNorm(p)
    tau = split(x, k, lam, reg, "identity").v
    s = np.sort(x)[::-1]
    assert s[int(np.ceil(k)) - 1] - lam <= tau <= s[int(np.floor(k))] + lam * two_sided


@pytest.mark.parametrize(("two_sided", "gap"), [(False, 1.0), (True, 2.0)])
@pytest.mark.parametrize("p", PS)
def test_hard_exactly_from_a_gap_on(p, two_sided, gap):
    lam = 0.25  # and gaps that floats hold exactly
    for factor, hard in ((1.0, True), (1 + 2**-20, True), (1 - 2**-6, False)):
        x = np.array([2.0, 1.0, 1.0 - gap * lam * factor, -1.0])
        y = st.topk_mask(x, 2, lam, p=p, two_sided=two_sided)
        assert np.array_equal(y, [1, 1, 0, 0]) == hard


@pytest.mark.parametrize("phi_name", PHI_NAMES)
@pytest.mark.parametrize("p", PS)
@pytest.mark.parametrize("seed", SEEDS)
def test_derivatives_in_x_k_and_lam(phi_name, p, seed):
    """Theorem 2 against central differences of the operator."""
    x, k, lam = draw(seed, phi_name)
    parts = split(x, k, lam, PNorm(p), phi_name)
    D = PNorm(p).slope(parts.d) / lam
    v, A, B = np.array(parts.v), parts.A, parts.B
    phi = PHIS[phi_name]
    prime, c = phi.prime(v), phi.curvature(v, np.array(k - A.sum()))
    curvature = phi.curvature(parts.u, np.ones_like(x))

    def differential(dx, dk, dlam):
        moved = dx - parts.d * dlam
        dv = ((D * moved)[B].sum() - prime * dk) / (D[B].sum() + c)
        on_A = curvature * D / np.where(A, curvature + D, 1.0) * moved
        return np.where(B, D * (moved - dv), np.where(A, on_A, 0.0))

    f = lambda x, k, lam: operator(x, k, lam, phi_name, p)  # noqa: E731
    zero, step = np.zeros_like(x), 1e-6
    J = numerical_jacobian(lambda x: f(x, k, lam), x, step)
    scale = 1e-5 * max(1.0, np.abs(J).max())
    ours = np.stack([differential(e, 0.0, 0.0) for e in np.eye(x.size)], axis=-1)
    np.testing.assert_allclose(ours, J, atol=scale)
    in_k = (f(x, k + step, lam) - f(x, k - step, lam)) / (2 * step)
    np.testing.assert_allclose(differential(zero, 1.0, 0.0), in_k, atol=scale)
    in_lam = (f(x, k, lam + step) - f(x, k, lam - step)) / (2 * step)
    np.testing.assert_allclose(differential(zero, 0.0, 1.0), in_lam, atol=scale)
    np.testing.assert_allclose(-ours @ parts.d, in_lam, atol=scale)


@pytest.mark.parametrize("debias", [False, True])
@pytest.mark.parametrize("p", PS)
@pytest.mark.parametrize("seed", SEEDS)
def test_table_of_magnitude_jacobians(p, debias, seed):
    a, k, lam = draw(seed, "half_square")
    parts = split(a, k, lam, PNorm(p), "half_square")
    D = PNorm(p).slope(parts.d) / lam
    A, B = parts.A, parts.B
    share = D / (D[B].sum() + k - A.sum())
    on_B = (debias + D)[:, None] * (np.eye(a.size) - share)
    on_A = np.diag(np.ones_like(D) if debias else D / (1 + D))
    expected = np.where(np.outer(B, B), on_B, np.where(np.outer(A, A), on_A, 0.0))
    jacobian = st.topk_mag_jacobian(a, k, lam, p=p, debias=debias)
    np.testing.assert_allclose(jacobian, expected, atol=1e-10)
    if debias:
        in_lam = st.topk_mag_jvp(a, k, lam, p=p, dlam=1.0)
        np.testing.assert_allclose(in_lam, parts.d - jacobian @ parts.d, atol=1e-10)


def test_signed_mask_at_zero_has_a_diagonal_jacobian():
    x, lam = np.array([0.3, -0.2, 0.1, 0.05]), 1.0
    y = st.topk_sign(x, 2, lam, p=1.5)
    np.testing.assert_allclose(y, np.sign(x) * x**2)  # sum |y| < k: g = 0
    np.testing.assert_allclose(
        st.topk_sign_jacobian(x, 2, lam, p=1.5), np.diag(2 * np.abs(x)), atol=1e-14
    )


@pytest.mark.parametrize("two_sided", [False, True])
def test_derivative_in_k_is_one_sided_where_nothing_is_fractional(two_sided):
    x, lam, step = np.array([0.0, 3.0, 1.0, 2.0]), 0.3, 1e-3
    f = lambda k: st.topk_mask(x, k, lam, p=1.5, two_sided=two_sided)  # noqa: E731
    np.testing.assert_allclose((f(2 + step) - f(2)) / step, [0, 0, 1, 0], atol=1e-9)
    np.testing.assert_allclose((f(2) - f(2 - step)) / step, [0, 0, 0, 1], atol=1e-9)
    assert not st.topk_mask_jvp(x, 2, lam, p=1.5, two_sided=two_sided, dk=1.0).any()


@pytest.mark.parametrize("two_sided", [False, True])
@pytest.mark.parametrize("p", PS)
@pytest.mark.parametrize("seed", SEEDS)
def test_bounds_of_the_mask_jacobian(p, two_sided, seed):
    x, k, lam = draw(seed)
    reg = TwoSidedPNorm(p) if two_sided else PNorm(p)
    parts = split(x, k, lam, reg, "identity")
    D = np.where(parts.B, reg.slope(parts.d) / lam, 0.0)
    J = st.topk_mask_jacobian(x, k, lam, p=p, two_sided=two_sided)
    np.testing.assert_allclose(J, np.diag(D) - np.outer(D, D) / D.sum(), atol=1e-10)
    assert np.linalg.eigvalsh(J).min() > -1e-12
    assert np.linalg.eigvalsh(np.diag(D) - J).min() > -1e-12
    bound = 2 ** (p - 3) / (p - 1) if two_sided else 1 / (p - 1)
    assert np.linalg.norm(J, 2) <= bound / lam * (1 + 1e-12)


def test_the_bounds_are_reached():
    """Two entries, half each: J = D [[1, -1], [-1, 1]] / 2, whose norm is D."""
    for p in (1.5, 4 / 3, 2.0):
        J = st.topk_mask_jacobian([0.0, 0.0], 1, 0.3, p=p, two_sided=True)
        np.testing.assert_allclose(np.linalg.norm(J, 2), 2 ** (p - 3) / ((p - 1) * 0.3))


@pytest.mark.parametrize(("p", "at"), [(4 / 3, 0.45947), (1.5, None), (2.0, None)])
def test_jump_at_the_ceiling(p, at):
    """Below the ceiling the slope is as in the formula, above it is 0."""
    others, lam = np.array([0.3, 0.2, -0.5]), 1.0
    mask = lambda a: st.topk_mask(np.array([a, *others]), 2, lam, p=p)  # noqa: E731
    lo, hi = 0.3, 2.0
    while hi - lo > 1e-14:
        middle = (lo + hi) / 2
        lo, hi = (lo, middle) if mask(middle)[0] == 1 else (middle, hi)
    if at is not None:
        assert abs(hi - at) < 1e-5
    parts = split(np.array([hi, *others]), 2.0, lam, PNorm(p), "identity")
    D = np.where(parts.B, PNorm(p).slope(parts.d) / lam, 0.0)[1:]
    e = 1 / (p - 1)
    below = e / lam * (1 - e / (e + lam * D.sum()))
    slope = lambda a: st.topk_mask_jacobian(np.array([a, *others]), 2, lam, p=p)[0, 0]  # noqa: E731
    np.testing.assert_allclose([slope(hi - 1e-9), slope(hi + 1e-9)], [below, 0], atol=1e-6)
    assert below > 0.1


@pytest.mark.parametrize("p", [1.5, 4 / 3, 1.2, 2.0])
def test_two_sided_response(p):
    reg, t = TwoSidedPNorm(p), np.linspace(-1, 1, 2001)
    closed = {
        2.0: (1 + t) / 2,
        1.5: (1 + t * np.sqrt(2 - t * t)) / 2,
        4 / 3: ((m(t) + t) / 2) ** 3,
    }
    y = reg.response(t)
    low = t <= 0  # the inverse is steep at both ends: near 1 it loses what the float y has lost
    np.testing.assert_allclose((y ** (p - 1) - (1 - y) ** (p - 1))[low], t[low], atol=1e-14)
    np.testing.assert_allclose(y, 1 - y[::-1], atol=1e-15)
    if p in closed:
        np.testing.assert_allclose(y, closed[p], atol=1e-14)
    differences = (reg.response(t + 1e-7) - reg.response(t - 1e-7)) / 2e-7
    np.testing.assert_allclose(reg.slope(t)[1:-1], differences[1:-1], atol=1e-5)


def m(t):
    b = np.cbrt(2 + np.sqrt(4 + t**6))
    return b - t * t / b


@pytest.mark.parametrize("p", [1.5, 4 / 3, 1.2])
def test_two_sided_jacobian_vanishes_towards_a_hard_mask(p):
    """The step of Theorem 3 at a point outside U, along a path that reaches it at a gap of 2 lam."""
    lam = 0.25
    norms = []
    for distance in 2.0 ** -np.arange(1, 9):
        x = np.array([2.0, 1.0, 1.0 - 2 * lam * (1 - distance), -1.0])
        y = st.topk_mask(x, 2, lam, p=p, two_sided=True)
        J = st.topk_mask_jacobian(x, 2, lam, p=p, two_sided=True)
        fractional = np.minimum(y, 1 - y).max()
        h = 1 / ((p - 1) * (fractional ** (p - 2) + (1 - fractional) ** (p - 2)))
        assert np.linalg.norm(J, 2) <= h / lam * (1 + 1e-6)
        norms.append(np.linalg.norm(J, 2))
    assert np.all(np.diff(norms) < 0)
    assert norms[-1] < 0.02 * norms[0]
    assert norms[0] > 0.5


@pytest.mark.parametrize("phi_name", PHI_NAMES)
@pytest.mark.parametrize("p", PS)
def test_derivatives_of_the_value(phi_name, p):
    x, k, lam = draw(3, phi_name)
    f = lambda x=x, k=k, lam=lam: st.topk_value(x, k, lam, p=p, phi=phi_name)  # noqa: E731
    step, parts = 1e-6, split(x, k, lam, PNorm(p), phi_name)
    y = operator(x, k, lam, phi_name, p)
    slope = [(f(x + step * e) - f(x - step * e)) / (2 * step) for e in np.eye(x.size)]
    np.testing.assert_allclose(slope, y, atol=1e-7)
    in_k = (f(k=k + step) - f(k=k - step)) / (2 * step)
    np.testing.assert_allclose(in_k, PHIS[phi_name].value(np.array(parts.v)), atol=1e-7)
    in_lam = (f(lam=lam + step) - f(lam=lam - step)) / (2 * step)
    np.testing.assert_allclose(in_lam, -PNorm(p).penalty(y).sum(), atol=1e-7)


def test_soft_sort_moves_through_w():
    """On a block dy_i = D_i sum dw_j / sum D_j: for p = 2 a mean; a lone entry passes dw on."""
    x, lam = np.array([0.5, 0.2, 0.9, 0.1]), 4.0
    order, y = np.argsort(-x), st.soft_sort(x, lam)
    alone = np.abs(y - x[order]) < 1e-12
    J = st.soft_sort_jacobian(x, lam)[:, order]
    assert alone.any()
    assert not alone.all()
    np.testing.assert_allclose(J[alone][:, alone], np.eye(alone.sum()), atol=1e-12)
    np.testing.assert_allclose(J[~alone][:, ~alone].sum(axis=0), 1, atol=1e-12)
    # for p = 2, D is the same everywhere
    np.testing.assert_allclose(J[~alone][:, ~alone], 1 / (~alone).sum(), atol=1e-12)


def test_functions_that_the_page_names_exist():
    names = re.findall(r"\{py:\w+\}`~?([\w.]+)`", PAGE.read_text())
    assert len(names) > 20
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert callable(getattr(importlib.import_module(module), attribute)), name
