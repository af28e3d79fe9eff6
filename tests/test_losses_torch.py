"""The top-k loss as torch users call it: against a direct formula in every way that a batch, its targets
and their reduction may come, by the kernel and by ordinary operations."""

import functools
import itertools
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import sparsetopk.torch as st
from levels import printed_at_all_levels
from sparsetopk.torch import nn
from sparsetopk.torch._fused import loss as fused_loss

F64 = torch.float64
KINDS = [
    {},
    {"p": 1.5},
    {"p": 4 / 3},
    {"p": 3.0},
    {"two_sided": True},
    {"two_sided": True, "p": 1.5},
    {"two_sided": True, "p": 4 / 3},
]
N, K, LAM = 7, 3, 0.8


def gaussian(*shape, seed=0, dtype=F64):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).to(dtype)


def classes(*shape, n=N, seed=1):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, n, size=shape))


@pytest.fixture(params=["kernel", "operations"])
def path(request, monkeypatch):
    """Both ways through the code."""
    if request.param == "operations":
        monkeypatch.setattr(fused_loss, "takes", lambda *_: False)
    return request.param


def direct(x, t, k=K, lam=LAM, **options):
    """f(x, 1_k) - <x, t> for weights t, one per row."""
    return st.topk_value(x, k, lam, **options) - (x * t).sum(dim=-1)


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_value_and_gradient(path, options):
    x, t = gaussian(20, N).requires_grad_(), classes(20)
    one_hot = torch.nn.functional.one_hot(t, N).to(F64)
    loss = st.topk_loss(x, t, K, LAM, completion=None, reduction="none", **options)
    torch.testing.assert_close(loss, direct(x, one_hot, **options))
    g = gaussian(20, seed=2)
    gradient = torch.autograd.grad(loss, x, g)[0]
    y = st.topk_mask(x, K, LAM, **options)
    torch.testing.assert_close(gradient, g[:, None] * (y - one_hot), rtol=0, atol=1e-14)


@pytest.mark.parametrize("n", [1, 2, 16, 100, 1025, 3000])
@pytest.mark.parametrize("options", KINDS, ids=str)
@pytest.mark.parametrize("completion", [None, "spread", "best"])
def test_kernel_and_operations_agree(n, options, completion, monkeypatch):
    """Rows of any length, with padding, infinities, NaN, lam = 0 and k = 0 or n among them."""
    x = gaussian(12, n)
    x[1, : n // 2] = -torch.inf
    x[2] = -torch.inf
    x[3, n // 2] = torch.inf
    x[4, 0] = torch.nan
    x[5] = 0.25
    x[6] += 1e5
    k = torch.full((12, 1), min(2.5, n), dtype=F64)
    k[7], k[8] = 0 if completion is None else 1, n
    lam = torch.full((12, 1), 0.7, dtype=F64)
    lam[9], lam[10], lam[11] = 0.0, 1e-3, 1e3
    t = classes(12, n=n)
    found = []
    for takes in (fused_loss.takes, lambda *_: False):
        monkeypatch.setattr(fused_loss, "takes", takes)
        leaf = x.clone().requires_grad_()
        loss = st.topk_loss(leaf, t, k, lam, completion=completion, reduction="none", **options)
        found.append((loss.detach(), torch.autograd.grad(loss[loss.isfinite()].sum(), leaf)[0]))
    assert found[0][0][4].isnan()
    # row 6 subtracts values of size 1e5 k in another order, and so loses 1e-16 of them
    torch.testing.assert_close(found[0], found[1], equal_nan=True, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision(path, dtype):
    x, t = gaussian(30, 50, dtype=dtype), classes(30, n=50)
    leaf, wide = x.clone().requires_grad_(), x.to(F64).requires_grad_()
    loss, exact = (st.topk_loss(v, t, K, LAM, reduction="none") for v in (leaf, wide))
    assert loss.dtype == dtype
    torch.testing.assert_close(loss.to(F64), exact, rtol=torch.finfo(dtype).eps, atol=1e-7)
    gradients = [torch.autograd.grad(v.mean(), w)[0] for v, w in ((loss, leaf), (exact, wide))]
    torch.testing.assert_close(
        gradients[0].to(F64), gradients[1], rtol=0, atol=2 * torch.finfo(dtype).eps / 30
    )


def test_classes_on_any_dim(path):
    x, t = gaussian(4, N, 5, 3), classes(4, 5, 3)
    last = x.movedim(1, -1).contiguous().requires_grad_()
    leaf = x.clone().requires_grad_()
    expected = st.topk_loss(last, t, K, reduction="none")
    loss = st.topk_loss(leaf, t, K, dim=1, reduction="none")
    assert loss.shape == (4, 5, 3)
    torch.testing.assert_close(loss, expected)
    g = gaussian(4, 5, 3, seed=3)
    gradient = torch.autograd.grad(loss, leaf, g)[0]
    torch.testing.assert_close(gradient.movedim(1, -1), torch.autograd.grad(expected, last, g)[0])
    weights = torch.rand(4, N, 5, 3, dtype=F64) * K / N
    torch.testing.assert_close(
        st.topk_loss(x, weights, K, dim=1),
        st.topk_loss(x.movedim(1, -1), weights.movedim(1, -1), K),
    )
    row = st.topk_loss(x[0, :, 0, 0], t[0, 0, 0], K)
    torch.testing.assert_close(row, st.topk_loss(x[:1, :, 0, 0], t[:1, 0, 0], K))


def test_targets_of_every_form(path):
    """Class indices, one-hot, booleans, sets and soft targets."""
    x, t = gaussian(10, N), classes(10)
    one_hot = torch.nn.functional.one_hot(t, N)
    expected = direct(x, one_hot)
    for targets in (t, t.to(torch.int32), one_hot.bool(), one_hot.float(), one_hot.to(F64)):
        loss = st.topk_loss(x, targets, K, LAM, completion=None, reduction="none")
        torch.testing.assert_close(loss, expected)
    sets = one_hot.bool() | torch.nn.functional.one_hot((t + 2) % N, N).bool()
    soft = torch.rand(10, N, dtype=F64).softmax(dim=-1)
    for targets in (sets, soft, sets.T.contiguous().T):
        leaf = x.clone().requires_grad_()
        loss = st.topk_loss(leaf, targets, K, LAM, completion=None, reduction="none")
        torch.testing.assert_close(loss, direct(leaf, targets.to(F64)))
        gradient = torch.autograd.grad(loss.sum(), leaf)[0]
        torch.testing.assert_close(gradient, st.topk_mask(x, K, LAM) - targets.to(F64))


@pytest.mark.parametrize("completion", [None, "spread", "best"])
def test_reduction_of_ignored_and_weighted_rows(path, completion):
    """As cross_entropy has it: what is ignored counts for nothing, and the mean is weighted."""
    x, t = gaussian(12, N).requires_grad_(), classes(12)
    w = torch.rand(N, dtype=F64)
    every = st.topk_loss(x, t, K, LAM, completion=completion, reduction="none")
    ignored = torch.arange(12) % 3 == 0
    some = torch.where(ignored, -100, t)
    each = torch.where(ignored, 0.0, w[t])
    for weight, row in ((None, (~ignored).to(F64)), (w, each)):
        options = {"completion": completion, "weight": weight}
        expected = {"none": every * row, "sum": every @ row, "mean": every @ row / row.sum()}
        for reduction, value in expected.items():
            loss = st.topk_loss(x, some, K, LAM, reduction=reduction, **options)
            torch.testing.assert_close(loss, value)
            g = gaussian(*value.shape, seed=4)
            gradients = [torch.autograd.grad(v, x, g, retain_graph=True)[0] for v in (loss, value)]
            torch.testing.assert_close(*gradients)
            assert (gradients[0][ignored] == 0).all()
    other = torch.where(ignored, 5, t)
    torch.testing.assert_close(
        st.topk_loss(x, other, K, LAM, ignore_index=5, completion=completion, weight=w),
        every @ torch.where(other == 5, 0.0, w[t]) / torch.where(other == 5, 0.0, w[t]).sum(),
    )


def test_the_mean_is_that_of_cross_entropy():
    """With k = 1, shift-invariant both: the same rows count, with the same weights."""
    x, t, w = 30 * gaussian(12, N), classes(12), torch.rand(N, dtype=F64) + 0.1
    t[::4] = -100
    for weight in (None, w):
        # far from any tie both are max(x) - x_t, but for R(1) = lam/2
        ours = st.topk_loss(x, t, 1, 1e-6, weight=weight, completion=None) + 0.5e-6
        theirs = torch.nn.functional.cross_entropy(1e3 * x, t, weight=weight) / 1e3
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    nothing = torch.full((12,), -100)
    assert st.topk_loss(x, nothing, 1).isnan()
    assert st.topk_loss(x, nothing, 1, reduction="sum") == 0


def test_weights_of_soft_targets_are_averages(path):
    x, w = gaussian(5, N), torch.rand(N, dtype=F64)
    t = torch.rand(5, N, dtype=F64)
    t[4] = 0
    row = torch.where(t.sum(-1) > 0, (t @ w) / t.sum(-1).clamp_min(1e-9), 1.0)
    loss = direct(x, t)
    found = st.topk_loss(x, t, K, LAM, weight=w, completion=None)
    torch.testing.assert_close(found, (loss * row).sum() / row.sum())
    t = classes(5)
    torch.testing.assert_close(
        st.topk_loss(x, torch.nn.functional.one_hot(t, N).bool(), K, weight=w),
        st.topk_loss(x, t, K, weight=w),
    )


@pytest.mark.parametrize("completion", [None, "spread"])
def test_label_smoothing(path, completion):
    x, t = gaussian(6, N), classes(6)
    one_hot = torch.nn.functional.one_hot(t, N).to(F64)
    options = {"completion": completion, "reduction": "none"}
    loss = st.topk_loss(x, t, K, LAM, label_smoothing=0.2, **options)
    smooth = 0.8 * one_hot + 0.2 / N
    torch.testing.assert_close(loss, st.topk_loss(x, smooth, K, LAM, **options))
    if completion is None:
        torch.testing.assert_close(loss, direct(x, smooth))
    x[:, 0] = -torch.inf  # not a candidate, and not the label: gets nothing
    t = t.clamp_min(1)
    loss = st.topk_loss(x, t, K, LAM, label_smoothing=0.2, **options)
    others = st.topk_loss(x[:, 1:], t - 1, K, LAM, label_smoothing=0.2, **options)
    torch.testing.assert_close(loss, others)


@pytest.mark.parametrize("completion", ["spread", "best"])
@pytest.mark.parametrize("options", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_completed_losses_have_a_least_value_of_0_and_do_not_feel_a_shift(
    path, completion, options, dtype
):
    x, t = gaussian(40, N, dtype=dtype), classes(40)
    loss = st.topk_loss(x, t, K, LAM, completion=completion, reduction="none", **options)
    small = 20 * torch.finfo(dtype).eps
    assert (loss >= -small).all()
    assert (loss > small).any()
    shifted = x + 16.0  # rounds, which the other undoes
    moved, back = (
        st.topk_loss(v, t, K, LAM, completion=completion, reduction="none", **options)
        for v in (shifted, shifted - 16.0)
    )
    # differences of values of the size of 16 k
    torch.testing.assert_close(moved, back, rtol=0, atol=16 * K * small)
    gradient = torch.func.grad(
        lambda v: st.topk_loss(v, t, K, LAM, completion=completion, **options)
    )(x)
    torch.testing.assert_close(
        gradient.sum(dim=-1), torch.zeros(40, dtype=dtype), rtol=0, atol=small
    )


def test_zero_where_the_target_is_the_answer(path):
    """spread: where y(x) = t'. best: where the label is taken whole."""
    t = torch.tensor([2])
    filled = torch.full((1, N), (K - 1) / (N - 1), dtype=F64)
    filled[0, 2] = 1.0
    spread = {"completion": "spread", "reduction": "none"}
    x = LAM * filled  # p = 2: y = x/lam - tau/lam
    torch.testing.assert_close(st.topk_mask(x, K, LAM), filled)
    torch.testing.assert_close(st.topk_loss(x, t, K, LAM, **spread), torch.zeros(1, dtype=F64))
    x = gaussian(1, N)
    x[0, 2] = x.max() + LAM
    best = {"completion": "best", "reduction": "none"}
    torch.testing.assert_close(st.topk_loss(x, t, K, LAM, **best), torch.zeros(1, dtype=F64))
    x[0, 2] = x.min() - LAM
    assert st.topk_loss(x, t, K, LAM, **best) > 0.1


def test_the_loss_of_the_paper_is_unbounded_below_for_k_above_1(path):
    x, t = gaussian(1, N), torch.tensor([2])
    losses = [st.topk_loss(x - shift, t, K, completion=None).item() for shift in (0, 10, 100)]
    assert losses[0] - losses[1] == pytest.approx(10 * (K - 1))
    assert losses[0] - losses[2] == pytest.approx(100 * (K - 1))
    assert st.topk_loss(x - 100, t, 1).item() == pytest.approx(st.topk_loss(x, t, 1).item())


def test_double_backward_batched_gradients_and_several_backwards():
    x, t = gaussian(4, N).requires_grad_(), classes(4)
    t[1] = -100
    sets = torch.zeros(4, N, dtype=torch.bool)
    sets[0, 2] = sets[1, :2] = sets[3, 3:6] = True
    options = {"weight": torch.rand(N, dtype=F64), "reduction": "none"}
    for completion, targets in itertools.product((None, "spread", "best"), (t, sets)):
        f = functools.partial(
            st.topk_loss, targets=targets, k=K, lam=LAM, completion=completion, **options
        )
        assert torch.autograd.gradcheck(f, x, check_batched_grad=True)
        assert torch.autograd.gradgradcheck(f, x)
    loss = st.topk_loss(x, t, K)  # the last backward works in place: not the others
    first, second = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    last = torch.autograd.grad(loss, x)[0]
    assert torch.equal(first, second)
    assert torch.equal(first, last)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, x)


def test_gradients_of_targets_weights_k_and_lam():
    x, t = gaussian(4, N), torch.rand(4, N, dtype=F64, requires_grad=True)
    w, k, lam = (torch.tensor(v, dtype=F64, requires_grad=True) for v in ([0.5] * N, 2.5, 0.8))
    f = lambda t, w, k, lam: st.topk_loss(x, t, k, lam, weight=w, completion=None)  # noqa: E731
    assert torch.autograd.gradcheck(f, (t, w, k, lam))


def test_threads_give_the_same_loss():
    x, t = gaussian(3000, 100, dtype=torch.float32), classes(3000, n=100)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            leaf = x.clone().requires_grad_()
            loss = st.topk_loss(leaf, t, K)
            found.append((loss.detach(), torch.autograd.grad(loss, leaf)[0]))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize(
    "n", [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 100, 255, 256, 257, 1023, 1025]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("completion", [None, "spread"])
def test_rows_of_every_length_are_right_and_the_same_in_every_batch(n, dtype, completion):
    """Short rows are solved in lanes, with their values, and as many as there are lanes at a time."""
    x, k = gaussian(37, n).to(dtype), min(3, n)
    x[5, : n // 2], x[6] = -torch.inf, 0.5
    t = classes(37, n=n)
    t[5], t[7] = n - 1, -100
    for lam in (0.05, 1.0, 30.0, 1e4):
        leaf, wide = x.clone().requires_grad_(), x.double().requires_grad_()
        f = functools.partial(st.topk_loss, k=k, lam=lam, completion=completion)
        loss, gradient = f(leaf, t), torch.autograd.grad(f(leaf, t), leaf)[0]
        one_hot = torch.nn.functional.one_hot(t.clamp_min(0), n).to(F64)
        each = torch.where(t == -100, 0.0, f(wide, one_hot, reduction="none"))
        expected = each.sum() / 36
        eps = torch.finfo(dtype).eps
        # rounded once, however small it is beside what it is a difference of
        atol = eps * abs(expected.item()) + 1e-12 * (1 + lam)
        torch.testing.assert_close(loss.to(F64), expected, rtol=0, atol=atol)
        exact = torch.autograd.grad(expected, wide)[0]
        atol = 8 * eps * max(1.0, 4 / lam) / (1 if dtype == torch.float16 else 36)
        torch.testing.assert_close(gradient.to(F64), exact, rtol=0, atol=atol)
        alone = torch.stack(
            [f(row[None], label[None], reduction="sum") for row, label in zip(x, t, strict=True)]
        )
        assert torch.equal(alone, f(x, t, reduction="none"))
        last = torch.autograd.grad(f(leaf, t, reduction="sum"), leaf)[0][30:]
        few = x[30:].clone().requires_grad_()
        assert torch.equal(last, torch.autograd.grad(f(few, t[30:], reduction="sum"), few)[0])


LEVELS = """
import hashlib, torch, sparsetopk.torch as st
generator, found = torch.Generator().manual_seed(0), hashlib.sha256()
for n in (2, 9, 16, 33, 100, 256, 400, 1500):
    x, t = torch.randn(35, n, generator=generator), torch.randint(n, (35,), generator=generator)
    for dtype in (torch.float32, torch.float64, torch.float16):
        for p, two_sided in ((2, False), (1.5, False), (4 / 3, False), (2, True), (1.5, True)):
            for lam in (0.1, 30.0):
                leaf = x.to(dtype).requires_grad_()
                options = {"reduction": "sum", "p": p, "two_sided": two_sided}
                loss = st.topk_loss(leaf, t, 2, lam, **options)
                for y in (loss.detach(), *torch.autograd.grad(loss, leaf)):
                    found.update(y.numpy().tobytes())
print(found.hexdigest())
"""


def test_instruction_sets_agree_to_the_last_bit():
    assert len(printed_at_all_levels(LEVELS)) == 1


def test_labels_wherever_they_are(path):
    """Of a longer tensor, with steps between them, in more than one dimension, and of other integers."""
    x, t = gaussian(12, N, dtype=torch.float32), classes(12)
    expected = st.topk_loss(x, t, K, LAM)
    padded = torch.cat([t.new_full((3,), -1), t, t.new_full((2,), N)])
    for labels in (padded[3:-2], t.repeat_interleave(2)[::2], t.to(torch.int32)):
        assert torch.equal(st.topk_loss(x, labels, K, LAM), expected)
    found = st.topk_loss(x.view(3, 4, N), t.view(3, 4), K, LAM)
    assert torch.equal(found, expected)
    assert torch.equal(st.topk_loss(x[0], t[0], K, LAM), st.topk_loss(x[:1], t[:1], K, LAM))


def test_a_mean_is_scaled_as_any_other(path):
    """The gradient of a mean comes with its factor, and is differentiated again with it."""
    for dtype in (F64, torch.float32):
        x, t = gaussian(9, N).to(dtype).requires_grad_(), classes(9)
        t[2] = -100
        total, mean = (st.topk_loss(x, t, K, LAM, reduction=r) for r in ("sum", "mean"))
        torch.testing.assert_close(8 * mean, total)
        first, second = (torch.autograd.grad(v, x, create_graph=True)[0] for v in (total, mean))
        torch.testing.assert_close(8 * second, first)
        g = gaussian(9, N, seed=3).to(dtype)
        twice = [torch.autograd.grad(d, x, g, retain_graph=True)[0] for d in (first, second)]
        torch.testing.assert_close(8 * twice[1], twice[0])
        again = torch.autograd.grad(3 * mean, x, retain_graph=True)[0]
        torch.testing.assert_close(again, 3 * second.detach())
        torch.testing.assert_close(torch.autograd.grad(mean, x)[0], second.detach())
    none = torch.full((9,), -100)
    lost = st.topk_loss(x, none, K, LAM)
    assert lost.isnan()


def test_module():
    w = torch.rand(N)
    module = nn.TopKLoss(weight=w, ignore_index=0, label_smoothing=0.1, dim=1, completion="spread")
    assert module.k == 3
    assert sorted(module.state_dict()) == ["weight"]
    x, t = gaussian(5, N, 2, dtype=torch.float32), classes(5, 2)
    expected = st.topk_loss(
        x, t, 3, weight=w, ignore_index=0, label_smoothing=0.1, dim=1, completion="spread"
    )
    torch.testing.assert_close(module(x, t), expected)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, t), expected)


def test_a_classifier_learns():
    """Three of ten classes may be named: the label is among them soon."""
    torch.manual_seed(0)
    centres = 3 * torch.randn(10, 8)
    t = torch.arange(200) % 10
    x = centres[t] + torch.randn(200, 8)
    for completion in ("spread", "best"):
        model, loss = torch.nn.Linear(8, 10), nn.TopKLoss(3, completion=completion)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        for _ in range(100):
            optimizer.zero_grad()
            loss(model(x), t).backward()
            optimizer.step()
        found = model(x).topk(3).indices
        assert (found == t[:, None]).any(dim=-1).float().mean() > 0.95


X, T = torch.zeros(2, 3), torch.tensor([0, 1])
BAD = [
    ({"label_smoothing": 1.5}, ValueError, r"label_smoothing must be in \[0, 1\], got 1.5"),
    ({"label_smoothing": math.nan}, ValueError, r"label_smoothing must be in \[0, 1\], got nan"),
    (
        {"label_smoothing": 0.1, "completion": "best"},
        ValueError,
        r"label_smoothing must be 0 with completion='best', got 0.1",
    ),
    ({"ignore_index": 1.0}, TypeError, r"ignore_index must be an int, got 1.0"),
    ({"weight": torch.ones(2)}, ValueError, r"weight must have shape \(3,\), .* got \(2,\)"),
    ({"weight": [1.0, 1, 1]}, TypeError, r"weight must be a torch.Tensor, got"),
    ({"dim": 2}, ValueError, r"dim must be in \[-2, 2\) for logits of shape \(2, 3\), got 2"),
    (
        {"dim": 0},
        ValueError,
        r"targets must have shape \(3,\) when they are class indices \(that of logits without dim 0\)",
    ),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD)
def test_arguments_are_checked(options, error, message):
    with pytest.raises(error, match=message):
        st.topk_loss(X, T, 2, **options)


@pytest.mark.parametrize("label", [-1, 3, -101])
def test_labels_are_checked(path, label):
    with pytest.raises(ValueError, match=rf"class indices in \[0, 3\), got {label}"):
        st.topk_loss(X, torch.tensor([0, label]), 2)


@pytest.mark.parametrize(
    "options", [{}, {"weight": torch.linspace(0.1, 0.9, 5)}, {"reduction": "none"}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_autocast_is_that_of_cross_entropy(dtype, options):
    x = torch.randn(4, 5, dtype=dtype, requires_grad=True)
    t = torch.rand(4, 5) * 2 / 5
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = st.topk_loss(x, t, 2, **options)
        expected = torch.nn.functional.cross_entropy(x.detach(), t.to(dtype))
    assert loss.dtype == expected.dtype
    wide = st.topk_loss(x.detach().to(loss.dtype), t, 2, **options)
    torch.testing.assert_close(loss.detach(), wide)
    loss.sum().backward()
    assert x.grad.dtype == dtype
