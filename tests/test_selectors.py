"""Layers that select tokens: what they compute, against dense formulas."""

import copy

import pytest

torch = pytest.importorskip("torch")

import sparsetopk.torch as st
from sparsetopk.torch.nn import PatchSelector, RunningLam, TokenSelector, TopKAttention

F64 = torch.float64


def dense_attention(layer, x, mask, straight_through=True):
    """The formula of the docstring, with L x L matrices."""
    batch, length, dim = x.shape
    a, b = layer.index(x).chunk(2, dim=-1)
    scores = a @ b.mT / a.shape[-1] ** 0.5
    allowed = torch.ones(batch, length, length, dtype=torch.bool)
    if mask is not None:
        allowed &= mask.unsqueeze(1)
    if layer.causal:
        allowed &= torch.ones(length, length, dtype=torch.bool).tril()
    y = st.topk_mask(
        scores.masked_fill(~allowed, -torch.inf),
        layer.k,
        layer.lam,
        straight_through=straight_through,
    ).unsqueeze(1)
    heads = lambda v: v.reshape(batch, length, layer.heads, -1).transpose(1, 2)  # noqa: E731
    q, k, v = map(heads, layer.inputs(x).chunk(3, dim=-1))
    logits = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~allowed.unsqueeze(1), -torch.inf)
    weights = y * (logits - logits.detach().amax(-1, keepdim=True).nan_to_num(neginf=0.0)).exp()
    total = weights.sum(-1, keepdim=True)
    out = torch.where(total > 0, weights / torch.where(total > 0, total, 1.0), 0.0) @ v
    return layer.output(out.transpose(1, 2).reshape(batch, length, dim))


def attention_case(causal):
    torch.manual_seed(0)
    layer = TopKAttention(16, 2, 3, 0.5, index_dim=8, causal=causal, capacity=20, chunk=7).to(F64)
    x = torch.randn(3, 20, 16, dtype=F64, requires_grad=True)
    mask = torch.rand(3, 20) < 0.8
    mask[2] = False  # a row that is all padding
    return layer, x, mask


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_the_dense_formula(causal):
    layer, x, mask = attention_case(causal)
    g = torch.randn(3, 20, 16, dtype=F64)
    at = [x, *layer.parameters()]
    for seen in (None, mask):
        y, expected = layer(x, seen), dense_attention(layer, x, seen)
        torch.testing.assert_close(y, expected)
        found, wanted = (torch.autograd.grad((v * g).sum(), at) for v in (y, expected))
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other)
    assert found[1].abs().sum() > 0  # the indexer learns
    hard = copy.deepcopy(layer).eval()
    torch.testing.assert_close(hard(x, mask), layer(x, mask))
    assert torch.equal(hard(x, mask)[2], hard.output.bias.expand(20, 16))
    assert hard.slots(20) == 3


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_attention_takes_no_harm_from_large_logits_of_what_competes(dtype):
    """The keys that compete are not seen in the forward, however well they would fit the query."""
    layer, x, mask = attention_case(False)
    with torch.no_grad():
        layer.inputs.weight *= 40
    layer, x = layer.to(dtype), x.detach().to(dtype).requires_grad_()
    hard = copy.deepcopy(layer).eval()
    for seen in (None, mask):
        y = layer(x, seen)
        torch.testing.assert_close(y, hard(x, seen))
        found = torch.autograd.grad(1e3 * y.sum(), [x, *layer.parameters()])
        assert all(g.isfinite().all() for g in found)


def test_attention_of_an_empty_batch():
    layer, x, mask = attention_case(True)
    y = layer(x[:0], mask[:0])
    y.sum().backward()
    assert y.shape == (0, 20, 16)
    assert not layer.index.weight.grad.any()


def test_attention_keeps_nothing_of_the_size_of_a_matrix():
    layer, length = TopKAttention(16, 2, 3, capacity=6, index_dim=4), 400
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: sizes.append(t.numel()) or t, lambda t: t
    ):
        layer(torch.randn(1, length, 16)).sum()
    assert max(sizes) <= length * 6 * 16


def test_attention_compiled_and_under_autocast():
    layer, x, mask = attention_case(True)
    layer, x = layer.float(), x.detach().float()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, mask), layer(x, mask))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x, mask)
    assert y.dtype == torch.bfloat16
    assert y.isfinite().all()
    other = TopKAttention(16, 2, 3, 0.5, index_dim=8, causal=True, capacity=20)
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(other(x, mask), layer(x, mask))


def test_tokens_are_selected_in_order_with_the_relaxed_gradient():
    torch.manual_seed(0)
    layer = TokenSelector(3, 5, 0.7, capacity=12).to(F64)
    x = torch.randn(50, 12, 5, dtype=F64, requires_grad=True)
    mask = torch.rand(50, 12) < 0.7
    mask[0], mask[1, 2:] = False, False
    found = layer(x, mask)
    scores = layer.scorer(x).squeeze(-1).masked_fill(~mask, -torch.inf)
    y = st.topk_mask(scores, 3, 0.7, straight_through=True)
    expected = x * y.unsqueeze(-1)
    g = torch.randn(5, dtype=F64)
    torch.testing.assert_close(found.tokens.sum(1), expected.sum(1))
    at = [x, *layer.parameters()]
    pairs = [torch.autograd.grad(((v.sum(1) ** 2) @ g).sum(), at) for v in (found.tokens, expected)]
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other)
    assert torch.equal(found.selected.sum(-1), mask.sum(-1).clamp(max=3))
    few = layer.eval()(x, mask)
    assert few.tokens.shape == (50, 3, 5)
    assert torch.equal(few.indices[2:], found.indices[2:, :3])
    assert (few.indices[2:].diff(dim=-1) > 0)[few.selected[2:, 1:]].all()
    assert not few.tokens[0].any()


@pytest.mark.parametrize("backward_k", [1, 2])
def test_the_derivative_may_be_that_of_a_smaller_k(backward_k):
    torch.manual_seed(0)
    layer = TokenSelector(3, 5, 0.7, capacity=12, backward_k=backward_k).to(F64)
    x = torch.randn(200, 12, 5, dtype=F64, requires_grad=True)
    scores = layer.scorer(x).squeeze(-1)
    hard, relaxed = st.topk_mask(scores.detach(), 3, 0.0), st.topk_mask(scores, backward_k, 0.7)
    expected = (x * (hard + relaxed - relaxed.detach()).unsqueeze(-1)).sum(1)
    found = layer(x).tokens.sum(1)
    torch.testing.assert_close(found, expected)
    at = [x, *layer.parameters()]
    pairs = [torch.autograd.grad(v.sin().sum(), at) for v in (found, expected)]
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other)


def test_patches_and_a_running_lam():
    torch.manual_seed(0)
    lam = RunningLam(4.0)
    layer = PatchSelector(2, 4, 1, lam)
    x = torch.arange(2 * 16 * 12.0).reshape(2, 1, 16, 12).sin()
    for _ in range(30):
        found = layer(x)
    scores = layer.scorer(x.unfold(2, 4, 4).unfold(3, 4, 4).reshape(2, 12, 16)).squeeze(-1)
    best = scores.topk(2).indices.sort().values
    assert torch.equal(found.indices[:, :2], best)
    assert torch.equal(found.tokens[:, 0].reshape(2, 4, 4)[0], _patch(x[0, 0], int(best[0, 0])))
    y = st.topk_mask(scores, 2, lam.value)
    assert abs(((y > 0) & (y < 1)).float().sum(-1).mean().item() - 4) <= 1


def _patch(picture, i):
    row, column = divmod(i, 3)
    return picture[4 * row : 4 * row + 4, 4 * column : 4 * column + 4]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: TokenSelector(0, 4), ValueError, "k must be"),
        (
            lambda: TokenSelector(3, 4, backward_k=4),
            ValueError,
            r"backward_k must be in \[1, 3\], got 4",
        ),
        (
            lambda: TokenSelector(3, 4, capacity=2),
            ValueError,
            r"capacity must be at least ceil\(k\)=3",
        ),
        (
            lambda: TokenSelector(5, 4)(torch.randn(4, 4)),
            ValueError,
            r"k must be in \[1, n\] with n=4",
        ),
        (
            lambda: TokenSelector(2, 4)(torch.ones(4, 4).long()),
            TypeError,
            "x must be a tensor of dtype",
        ),
        (
            lambda: PatchSelector(1, 3, 1)(torch.randn(1, 1, 9, 8)),
            ValueError,
            "multiples of patch=3",
        ),
        (lambda: TopKAttention(10, 3, 2), ValueError, "dim must be a multiple of heads=3, got 10"),
        (
            lambda: TopKAttention(4, 2, 2)(torch.randn(5, 4)),
            ValueError,
            r"x must have the shape \[batch, L, dim\], got \(5, 4\)",
        ),
        *(
            (lambda layer=layer, mask=mask: layer(torch.randn(2, 6, 4), mask), error, message)
            for layer in (TokenSelector(2, 4), TopKAttention(4, 2, 2))
            for mask, error, message in (
                (torch.ones(2, 6), TypeError, "mask must be"),
                (torch.ones(6, 2, dtype=torch.bool), ValueError, "mask must"),
                (torch.ones(2, 6, 6, dtype=torch.bool), ValueError, "mask must"),
            )
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
