"""The baselines: what they solve, what they keep, and their derivatives."""

import pytest

torch = pytest.importorskip("torch")

import sparsetopk.torch as st
from sparsetopk.torch.baselines import binary_entropy_topk_mag, hard_topk_mag, sinkhorn_topk_mag

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
