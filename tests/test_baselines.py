"""The baselines: what they solve, what they keep, and their derivatives."""

import pytest

torch = pytest.importorskip("torch")

import sparsetopk.torch as st
from sparsetopk.torch.baselines import (
    binary_entropy_topk_mag,
    dftopk_mask,
    hard_topk_mag,
    lapsum_mask,
    perturbed_mask,
    sinkhorn_mask,
    sinkhorn_topk_mag,
    softmax_mask,
)

RELAXED = [binary_entropy_topk_mag, sinkhorn_topk_mag]


def rows(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def mask(y, x):
    return y / x


def test_hard_keeps_the_largest():
    x = rows(3, 20).requires_grad_()
    y = hard_topk_mag(x, 4)
    assert (y.count_nonzero(dim=-1) == 4).all()
    smallest = y.abs().masked_fill(y == 0, torch.inf).amin(dim=-1)
    assert (smallest >= x.abs().masked_fill(y != 0, 0).amax(dim=-1)).all()
    g = rows(3, 20, seed=1)
    kept = (y != 0).double()
    torch.testing.assert_close(torch.autograd.grad(y, x, g)[0], g * kept)
    straight = hard_topk_mag(x, 4, straight_through=True)
    assert torch.equal(straight, y)
    assert torch.equal(torch.autograd.grad(straight, x, g)[0], g)


@pytest.mark.parametrize("lam", [0.01, 0.3, 10.0])
@pytest.mark.parametrize("k", [1, 4, 7.5, 19])
def test_binary_entropy_solves_its_problem(lam, k):
    """lam (log y - log(1 - y)) = |x| - tau, with one tau per row, and the sum is k."""
    x = rows(3, 20)
    y = mask(binary_entropy_topk_mag(x, k, lam), x)
    torch.testing.assert_close(y.sum(dim=-1), torch.full((3,), float(k), dtype=torch.float64))
    inner = (y > 1e-6) & (y < 1 - 1e-6)
    tau = x.abs() - lam * torch.logit(y)
    for row, at in zip(tau, inner, strict=True):
        if at.any():
            torch.testing.assert_close(row[at], row[at].mean().expand(int(at.sum())))


def test_both_are_the_hard_one_in_the_limit_and_sinkhorn_is_binary_entropy():
    x = rows(3, 20)
    torch.testing.assert_close(binary_entropy_topk_mag(x, 4, 1e-4), hard_topk_mag(x, 4))
    found = sinkhorn_topk_mag(x, 4, 0.5, iterations=2000)
    torch.testing.assert_close(found, binary_entropy_topk_mag(x, 4, 0.5))


@pytest.mark.parametrize("f", RELAXED)
def test_derivatives(f):
    x = rows(2, 7).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: f(x, 3, 0.4), x)
    assert torch.autograd.gradgradcheck(lambda x: f(x, 3, 0.4), x, atol=1e-4)


@pytest.mark.parametrize("f", RELAXED)
def test_straight_through(f):
    x = rows(2, 30).requires_grad_()
    y = f(x, 5, 0.4, straight_through=True)
    assert torch.equal(y, st.topk_mag(x, 5, 0.0))
    found = torch.autograd.grad(y.sin().sum(), x)[0]
    g = st.topk_mag(x.detach(), 5, 0.0).cos()
    torch.testing.assert_close(found, torch.autograd.grad(f(x, 5, 0.4), x, g)[0])


@pytest.mark.parametrize("f", RELAXED)
def test_nothing_everything_and_dtypes(f):
    x = rows(2, 6, dtype=torch.float32)
    assert torch.equal(f(x, 6), x)
    assert (f(x, 0) == 0).all()
    y = f(x.half(), 2)
    assert y.dtype == torch.float16
    torch.testing.assert_close(y.double(), f(x.half().double(), 2), rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("f", RELAXED)
def test_errors(f):
    x = rows(2, 6)
    with pytest.raises(ValueError, match=r"k must be in \[0, n\] with n=6, got 7"):
        f(x, 7)
    with pytest.raises(ValueError, match="lam must be finite and greater than 0, got 0"):
        f(x, 2, 0)
    with pytest.raises(TypeError, match=r"x must be a torch\.Tensor"):
        f([1.0, 2.0], 1)
    with pytest.raises(ValueError, match="iterations must be an int and at least 1, got 0"):
        sinkhorn_topk_mag(x, 2, iterations=0)


# masks


def laplace(u):
    return torch.where(u < 0, u.exp() / 2, 1 - (-u).exp() / 2)


@pytest.mark.parametrize("lam", [0.05, 0.5, 5.0])
@pytest.mark.parametrize("k", [1, 4, 7.5, 19])
def test_lapsum_solves_its_equation(lam, k):
    """y = F((x - tau)/lam) with one tau per row, by bisection, and the sum is k."""
    x = rows(50, 20)
    lo, hi = x.amin(-1, keepdim=True) - 50 * lam, x.amax(-1, keepdim=True) + 50 * lam
    for _ in range(100):
        tau = (lo + hi) / 2
        above = laplace((x - tau) / lam).sum(-1, keepdim=True) > k
        lo, hi = torch.where(above, tau, lo), torch.where(above, hi, tau)
    torch.testing.assert_close(lapsum_mask(x, k, lam), laplace((x - tau) / lam), atol=1e-9, rtol=0)


@pytest.mark.parametrize("f", [lapsum_mask, binary_entropy_topk_mag])
def test_wide_gaps_are_hard_without_a_derivative(f):
    x = torch.arange(6.0, dtype=torch.float64).add(1).requires_grad_()
    y = f(x, 2, 1e-4)
    torch.testing.assert_close(
        y, hard_topk_mag(x, 2) if f is binary_entropy_topk_mag else (x > 4.5).to(x)
    )
    (slope,) = torch.autograd.grad(y.square().sum(), x)
    expected = 2 * y if f is binary_entropy_topk_mag else torch.zeros_like(x)
    torch.testing.assert_close(slope, expected.detach())


@pytest.mark.parametrize("f", [lapsum_mask, sinkhorn_mask, dftopk_mask])
def test_derivatives_of_masks(f):
    x = rows(4, 7).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: f(x, 3, 0.4), x)
    for k in (0, 7):
        assert torch.equal(f(x, k, 0.4), torch.full_like(x, k / 7))
    assert f(x.float(), 3).dtype == torch.float32


def test_sinkhorn_is_binary_entropy_and_dftopk_its_shifted_sigmoid():
    x = rows(30, 20)
    positive = x - x.amin(-1, keepdim=True) + 1  # those in magnitude see the same order
    expected = binary_entropy_topk_mag(positive, 4, 0.5) / positive
    torch.testing.assert_close(sinkhorn_mask(x, 4, 0.5, iterations=2000), expected)
    theta = x.sort(-1, descending=True).values[:, 3:5].mean(-1, keepdim=True)
    torch.testing.assert_close(dftopk_mask(x, 4, 0.3), 1 / (1 + (-(x - theta) / 0.3).exp()))


def test_the_perturbed_mask_is_a_mean_with_its_own_estimate_of_the_derivative():
    x, g = rows(3, 6).requires_grad_(), rows(3, 6, seed=1)
    draws = lambda: torch.Generator().manual_seed(5)  # noqa: E731
    y = perturbed_mask(x, 2, 0.7, samples=50, generator=draws())
    noise = torch.randn((50, 3, 6), generator=draws(), dtype=torch.float64)
    masks = torch.zeros(50, 3, 6, dtype=torch.float64)
    masks.scatter_(-1, (x.detach() + 0.7 * noise).topk(2).indices, 1.0)
    torch.testing.assert_close(y, masks.mean(0))
    jacobian = torch.einsum("sri,srj->rij", masks, noise) / (50 * 0.7)
    found = torch.autograd.grad(y, x, g)[0]
    torch.testing.assert_close(found, torch.einsum("rij,ri->rj", jacobian, g))


def test_softmax_masks_are_hard_with_the_derivative_of_a_softmax():
    x, g = rows(2000, 6).requires_grad_(), rows(2000, 6, seed=1)
    y = softmax_mask(x, 2, 0.7)
    assert torch.equal(y, st.topk_mask(x.detach(), 2, 0.0))
    expected = torch.autograd.grad(2 * (x / 0.7).softmax(-1), x, g)[0]
    torch.testing.assert_close(torch.autograd.grad(y, x, g)[0], expected)
    # With Gumbel noise of the scale lam the largest is drawn as softmax(x/lam) says.
    scores = x.detach()[:1].expand(20_000, -1)
    drawn = softmax_mask(scores, 1, 0.7, gumbel=True, generator=torch.Generator().manual_seed(0))
    assert torch.equal(drawn.sum(-1), torch.ones(20_000, dtype=torch.float64))
    torch.testing.assert_close(drawn.mean(0), (scores[0] / 0.7).softmax(-1), atol=0.015, rtol=0)
