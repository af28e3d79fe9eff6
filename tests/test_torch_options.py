"""Options that change which entries compete, and what is returned: against their definitions in float64,
eager and compiled, with gradients."""

from __future__ import annotations

import pytest
import torch

import sparsetopk.torch as st

F64 = torch.float64


def gaussian(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def merged(x):
    """Dimensions 0 and 2 of three as one, the last."""
    return x.permute(1, 0, 2).flatten(1)


def back(y, x):
    return y.unflatten(-1, (x.shape[0], x.shape[2])).permute(1, 0, 2)


# Each with its definition by functions of one dimension, and of the largest.
OPTIONS = {
    "mask, two dims": (
        lambda x, k, lam: st.topk_mask(x, k, lam, dim=(0, 2)),
        lambda x, k, lam: back(st.topk_mask(merged(x), k[0], lam[0]), x),
    ),
    "topk, two dims": (
        lambda x, k, lam: st.topk(x, k, lam, dim=(-1, 0), p=1.5, two_sided=True),
        lambda x, k, lam: back(st.topk(merged(x), k[0], lam[0], p=1.5, two_sided=True), x),
    ),
    "mag, all dims": (
        lambda x, k, lam: st.topk_mag(x, k.sum(), lam.mean(), dim=None),
        lambda x, k, lam: st.topk_mag(x.flatten(), k.sum(), lam.mean()).view_as(x),
    ),
    "value, two dims": (
        lambda x, k, lam: st.topk_value(x, k, lam, dim=(0, 2)),
        lambda x, k, lam: st.topk_value(merged(x), k[0], lam[0]),
    ),
    "rank, two dims": (
        lambda x, k, lam: st.soft_rank(x, lam, dim=(0, 2)) + 0 * k,
        lambda x, k, lam: back(st.soft_rank(merged(x), lam[0]), x) + 0 * k,
    ),
    "mask, smallest": (
        lambda x, k, lam: st.topk_mask(x, k, lam, dim=(0, 2), largest=False),
        lambda x, k, lam: back(st.topk_mask(-merged(x), k[0], lam[0]), x),
    ),
    "topk, smallest": (
        lambda x, k, lam: st.topk(x, 3, lam[0, 0, 0], dim=1, largest=False) + 0 * k,
        lambda x, k, lam: x * st.topk_mask(-x, 3, lam[0, 0, 0], dim=1) + 0 * k,
    ),
    "straight through, smallest": (
        lambda x, k, lam: st.topk(x, k, lam, dim=(0, 2), largest=False, straight_through=True),
        lambda x, k, lam: -back(st.topk(-merged(x), k[0], lam[0], straight_through=True), x),
    ),
    "select, values of x": (
        lambda x, k, lam: scattered(x, k, lam, values="x"),
        lambda x, k, lam: st.topk(merged(x), k[0], lam[0]),
    ),
    "select, sorted": (
        lambda x, k, lam: scattered(x, k, lam, sorted=True),
        lambda x, k, lam: st.topk_mask(merged(x), k[0], lam[0]),
    ),
    "select, smallest": (
        lambda x, k, lam: scattered(x, k, lam, values="x", sorted=True, largest=False),
        lambda x, k, lam: st.topk(merged(x), k[0], lam[0], largest=False),
    ),
    "select straight through, values of x": (
        lambda x, k, lam: scattered(x, k, lam, values="x", straight_through=True),
        lambda x, k, lam: merged(x) * st.topk_mask(merged(x), k[0], lam[0], straight_through=True),
    ),
}


def scattered(x, k, lam, **options):
    """What was selected over two dimensions, put back into their entries."""
    n = x.shape[0] * x.shape[2]
    found = st.topk_select(x, k, lam, dim=(0, 2), capacity=n, **options)
    return torch.zeros_like(merged(x)).scatter(-1, found.indices, found.values)


def gradients(f, x, k, lam):
    inputs = [v.clone().requires_grad_() for v in (x, k, lam)]
    y = f(*inputs)
    g = torch.cos(torch.arange(y.numel())).to(y.dtype).view_as(y)
    return y.detach(), *torch.autograd.grad(y, inputs, g, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"]
)
@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_what_they_say(name, compiled):
    f, definition = OPTIONS[name]
    torch._dynamo.reset()
    g = torch.compile(f, backend="aot_eager", fullgraph=True) if compiled else f
    x = gaussian(6, 300, 4)
    k = 1.0 + 8.0 * torch.rand(1, 300, 1, generator=torch.Generator().manual_seed(1))
    k[:, :50] = 3.0
    lam = torch.full((1, 300, 1), 0.4)
    expected = gradients(definition, *(v.to(F64) for v in (x, k, lam)))
    for dtype, rtol in ((F64, 1e-9), (torch.float32, 2e-4)):
        if compiled and dtype != F64:
            break  # the same operators as in eager mode, which tracing would take as long for again
        found = gradients(g, *(v.to(dtype) for v in (x, k, lam)))
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == dtype
            torch.testing.assert_close(a.to(F64), b, rtol=rtol, atol=rtol * float(b.abs().max()))


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
def test_hard_selection_is_that_of_torch(largest, dtype):
    x = gaussian(5000, 40, dtype=dtype).to(dtype)
    found = st.topk_select(x, 7, 0.0, values="x", sorted=True, largest=largest)
    expected = torch.topk(x, 7, largest=largest)
    assert found.values.shape == (5000, 7)
    torch.testing.assert_close(found.values, expected.values, rtol=0, atol=0)
    torch.testing.assert_close(x.gather(-1, found.indices), expected.values, rtol=0, atol=0)
    layer = st.nn.TopKSelect(7, 0.1, values="x", sorted=True, largest=largest, hard_eval=True)
    torch.testing.assert_close(layer.eval()(x).values[:, :7], expected.values, rtol=0, atol=0)


def test_padding_of_a_sorted_selection_is_last():
    x = torch.tensor([[2.0, -torch.inf, -1.0, -torch.inf]])
    found = st.topk_select(x, 3, 0.0, values="x", sorted=True)
    assert found.values.tolist() == [[2.0, -1.0, 0.0]]
    assert found.indices[0, :2].tolist() == [0, 2]


@pytest.mark.parametrize("magnitude", [False, True])
@pytest.mark.parametrize("p", [2.0, 1.5])
def test_threshold_is_what_entries_must_exceed(magnitude, p):
    operator = st.topk_mag if magnitude else st.topk_mask
    x = gaussian(5000, 40, dtype=F64)
    size = x.abs() if magnitude else x
    for lam in (0.0, 1e-3, 0.3):
        v = st.topk_threshold(x, 5.5, lam, p=p, magnitude=magnitude)
        y = operator(x, 5.5, lam, p=p)
        assert v.shape == (5000, 1)
        clear = (size - v).abs() > 1e-12
        torch.testing.assert_close(clear & (y != 0), clear & (size > v))
        assert lam or ((y != 0) == (size >= v)).all()
    whole = st.topk_threshold(x, 50, 0.0, dim=None, magnitude=magnitude)
    assert whole.shape == (1, 1)
    assert whole == size.flatten().topk(50).values.min()


@pytest.mark.parametrize("k", [-1.0, 3.0, 50.0])
def test_learned_numbers_are_taken_within_their_range(k):
    k, lam = (torch.nn.Parameter(torch.tensor(v)) for v in (k, -0.1))
    x = gaussian(4, 10)
    for layer in (st.nn.TopKMask(k, 0.1), st.nn.TopKSelect(k, 0.1, capacity=10)):
        y = layer(x) if isinstance(layer, st.nn.TopKMask) else layer(x).values
        torch.testing.assert_close(y.sum(dim=-1), k.detach().clamp(0, 10).expand(4))
        y.square().sum().backward()
        assert k.grad.isfinite()
    y = st.nn.TopKMask(3, lam)(x)
    torch.testing.assert_close(y, st.topk_mask(x, 3, 0.0))
    with pytest.raises(ValueError, match="lam must be finite and at least 0"):
        st.topk_mask(x, 3, lam)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: st.topk_mask(x, 3, dim=(0, 0)), ValueError, "each of them once"),
        (lambda x: st.topk_mask(x, 3, dim=()), ValueError, "each of them once"),
        (lambda x: st.topk_mask(x, 3, dim=(0, 2)), ValueError, r"dim must be in \[-2, 2\)"),
        (
            lambda x: st.topk_mask(x, 3, dim="x"),
            TypeError,
            "dim must be an int, a tuple of ints or None",
        ),
        (
            lambda x: st.topk_mask(x, torch.ones(4, 1), dim=None),
            ValueError,
            r"length 1 along dims \(0, 1\), got shape \(4, 1\)",
        ),
        (lambda x: st.topk_select(x, 3, magnitude=True, largest=False), ValueError, "largest"),
        (lambda x: st.topk_select(x, 3, sorted=True, straight_through=True), ValueError, "sorted"),
        (lambda x: st.topk_select(x, 3, values="y"), ValueError, "values must be"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call(gaussian(4, 6))
