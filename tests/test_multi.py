"""One top-k over many tensors: equal to that of the concatenation, by either kind of passes."""

import gc
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import sparsetopk.torch as st
from sparsetopk.torch._spread import multi, passes

PASSES = {"compiled": passes.native, "torch": None}


@pytest.fixture(params=PASSES)
def kind(request, monkeypatch):
    """Both kinds of passes, with a sample so small that short rows need them."""
    monkeypatch.setattr(multi, "native", PASSES[request.param])
    monkeypatch.setattr(multi, "_SAMPLE", 64)
    return request.param


def tensors(content="normal", dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    found = [3 * normal(1000), normal(10, 3, 30), normal(500, 2), normal(1), normal(0, 4)]
    if content == "ties":
        found = [x.round() for x in found]
    if content == "cauchy":
        found = [x / normal(*x.shape) for x in found]
    if content == "zeros":
        found = [torch.where(x.abs() < 1, 0.0, x) for x in found]
    if content == "scales":
        found = [x * 100.0**i for i, x in enumerate(found)]
    return [x.to(dtype) for x in found]


def flat(xs):
    return torch.cat([x.flatten() for x in xs])


N = 1000 + 900 + 1000 + 1


def compare(xs, k, lam, tolerance=1e-10, **options):
    """Values and all first derivatives, with those of the concatenation."""
    xs = [x.clone().requires_grad_() for x in xs]
    numbers = [torch.tensor(float(v), dtype=torch.float64, requires_grad=True) for v in (k, lam)]
    row = flat(xs).detach().requires_grad_()
    gs = [
        torch.cos(torch.arange(x.numel(), dtype=x.dtype) + i).view_as(x) for i, x in enumerate(xs)
    ]
    ys = st.topk_mag_multi(xs, *numbers, **options)
    y = st.topk_mag(row, *numbers, **options)
    scale = row.detach().abs().max().item()
    torch.testing.assert_close(flat(ys), y, rtol=tolerance, atol=tolerance * scale)
    assert [x.shape for x in ys] == [x.shape for x in xs]
    found = torch.autograd.grad(ys, [*xs, *numbers], gs)
    expected = torch.autograd.grad(y, [row, *numbers], flat(gs))
    for a, b in ((flat(found[:-2]), expected[0]), *zip(found[-2:], expected[1:], strict=True)):
        size = max(b.abs().max().item(), 1e-3)
        torch.testing.assert_close(a, b, rtol=1e3 * tolerance, atol=1e3 * tolerance * size)


@pytest.mark.parametrize("content", ["normal", "ties", "cauchy", "zeros", "scales"])
@pytest.mark.parametrize("lam", [0.0, 1e-6, 0.1, 30.0])
@pytest.mark.parametrize("k", [0, 1, 290, 290.3, 2000, N - 1, N])
def test_equals_the_concatenation(kind, content, lam, k):
    compare(tensors(content), k, lam)


@pytest.mark.parametrize("p", [4 / 3, 3.0, 1.2])
@pytest.mark.parametrize("debias", [True, False])
@pytest.mark.parametrize("k", [290, 1500.5])
def test_equals_the_concatenation_for_other_p(kind, p, debias, k):
    # in k the two thresholds, solved apart, agree to the residual times the slope of S, steep for p = 3
    compare(tensors(), k, 0.3, 1e-8, p=p, debias=debias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lam", [0.0, 1e-3, 0.5])
def test_other_dtypes(kind, dtype, lam):
    """Solved in float64 and rounded once, as that of one row."""
    xs = tensors(dtype=dtype)
    ys = st.topk_mag_multi(xs, 290, lam)
    expected = st.topk_mag(flat(xs).double(), 290, lam)
    assert all(y.dtype == dtype for y in ys)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(flat(ys).double(), expected, rtol=2 * eps, atol=1e-6)


def test_dtypes_may_differ(kind):
    dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float64)
    xs = [x.to(dtype).requires_grad_() for x, dtype in zip(tensors(), dtypes, strict=True)]
    row = torch.cat([x.detach().double().flatten() for x in xs]).requires_grad_()
    ys, y = st.topk_mag_multi(xs, 290, 0.1), st.topk_mag(row, 290, 0.1)
    assert [y.dtype for y in ys] == list(dtypes)
    torch.testing.assert_close(
        torch.cat([y.double().flatten() for y in ys]), y, rtol=0.01, atol=0.01
    )
    found = torch.autograd.grad(ys, xs, [torch.ones_like(y) for y in ys])
    expected = torch.autograd.grad(y, row, torch.ones_like(y))[0]
    found = torch.cat([g.double().flatten() for g in found])
    torch.testing.assert_close(found, expected, rtol=0.01, atol=0.01)


LENGTHS = (200_001, 65_536, 77, 30)


@pytest.mark.parametrize("lam", [0.0, 1e-5, 1e-3, 0.05, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ties", [False, True])
def test_long_rows(lam, dtype, ties, monkeypatch):
    """Longer than a piece, with the sample that is the default, and as long rows are written."""
    generator = torch.Generator().manual_seed(1)
    xs = [torch.randn(n, generator=generator) * (1 + i / 10) for i, n in enumerate(LENGTHS)]
    xs = [(x.round(decimals=3) if ties else x).to(dtype) for x in xs]
    expected = st.topk_mag(flat(xs).double(), 20_000.5, lam)
    results = []
    for length in (1, 1 << 60):
        monkeypatch.setattr(passes, "_LONG", length)
        results.append(flat(st.topk_mag_multi(xs, 20_000.5, lam)))
        tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-6 if lam else 0.0}
        torch.testing.assert_close(results[-1].double(), expected, **tolerance)
        compare(xs, 20_000.5, lam, 0.1 if dtype == torch.bfloat16 else 1e-6)
    assert torch.equal(*results)


def test_pieces_may_differ():
    """Of some no entry is undecided, of others every one; and the layers have scales of their own."""
    generator = torch.Generator().manual_seed(2)
    scales = (1e-3, 1.0, 1e3, 0.0, 1.0)
    xs = [torch.randn(70_000, generator=generator, dtype=torch.float64) * s for s in scales]
    xs[4] = 1.5 + 1e-4 * xs[4]  # at the boundary, all of them
    for k in (100_000.0, 110_000.0, 140_000.5, 250_000.0):
        for lam in (0.0, 1e-3, 0.1):
            compare(xs, k, lam)


def test_threads_do_not_change_the_result():
    xs = [torch.randn(300_000), torch.randn(100_000)]
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(flat(st.topk_mag_multi(xs, 1000, 0.3)))
        assert torch.equal(*found)
    finally:
        torch.set_num_threads(before)


def test_ties_go_to_the_first_tensors(kind):
    xs = [torch.full((100,), -2.0), torch.full((3, 50), 2.0), torch.ones(100)]
    first, second, third = st.topk_mag_multi(xs, 120.5, 0.0)
    assert (first == -2).all()
    assert (second.flatten()[:20] == 2).all()
    assert second.flatten()[20] == 1
    assert second.count_nonzero() == 21
    assert third.count_nonzero() == 0


def test_straight_through_is_hard_with_the_relaxed_derivative(kind):
    xs = [x.requires_grad_() for x in tensors()]
    ys = st.topk_mag_multi(xs, 290, 0.5, straight_through=True)
    assert torch.equal(flat(ys), flat(st.topk_mag_multi(xs, 290, 0.0)))
    gs = [torch.ones_like(y) for y in ys]
    found = torch.autograd.grad(ys, xs, gs)
    expected = torch.autograd.grad(st.topk_mag_multi(xs, 290, 0.5), xs, gs)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_one_bad_entry_makes_everything_nan(kind, bad):
    xs = tensors()
    xs[2][100, 1] = bad
    xs = [x.requires_grad_() for x in xs]
    for k in (0, 290, N):
        ys = st.topk_mag_multi(xs, k, 0.1)
        assert flat(ys).isnan().all()
        assert flat(torch.autograd.grad(ys, xs, [torch.ones_like(y) for y in ys])).isnan().all()


def test_an_output_without_a_cotangent_has_a_gradient_all_the_same(kind):
    xs = [x.requires_grad_() for x in tensors()[:2]]
    found = torch.autograd.grad(st.topk_mag_multi(xs, 190, 2.0)[0].sum(), xs)
    ys = st.topk_mag_multi(xs, 190, 2.0)
    expected = torch.autograd.grad(ys, xs, [torch.ones_like(ys[0]), torch.zeros_like(ys[1])])
    torch.testing.assert_close(found, expected)
    assert found[1].count_nonzero() > 0


def test_second_derivatives_and_transforms_go_through_the_concatenation():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(4, generator=generator, dtype=torch.float64) for _ in range(2))
    k, lam = torch.tensor(2.6, dtype=torch.float64), torch.tensor(0.7, dtype=torch.float64)
    f = lambda *at: tuple(st.topk_mag_multi(at[:2], *at[2:], p=1.5))  # noqa: E731
    at = [v.clone().requires_grad_() for v in (a, b, k, lam)]
    assert torch.autograd.gradcheck(f, at, atol=1e-5)
    assert torch.autograd.gradgradcheck(f, at, atol=1e-4)
    jvp = torch.func.jvp(lambda x: f(x, b, k, lam), (a,), (torch.ones_like(a),))[1]
    jacobian = torch.func.jacrev(lambda x: f(x, b, k, lam))(a)
    torch.testing.assert_close(jvp, tuple(j.sum(dim=-1) for j in jacobian))
    batched = torch.vmap(lambda x: f(x, b, k, lam)[0])(torch.stack([a, 2 * a]))
    torch.testing.assert_close(batched[1], f(2 * a, b, k, lam)[0])


def test_layouts_and_shapes_are_kept(kind):
    x = torch.randn(4, 5, 6).permute(2, 0, 1)
    y = st.topk_mag_multi([x, torch.tensor(3.0)], 30, 0.1)
    expected = st.topk_mag(torch.cat([x.flatten(), torch.tensor([3.0])]), 30, 0.1)
    torch.testing.assert_close(y[0].flatten(), expected[:-1])
    assert y[1].shape == ()


def test_nothing_at_all():
    assert st.topk_mag_multi([], 0) == []
    assert st.topk_mag_multi([torch.zeros(0, 3)], 0)[0].shape == (0, 3)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.zeros(3), 1), TypeError, "tensors must be a sequence of tensors, got Tensor"),
        (([torch.zeros(3), 1.0], 1), TypeError, r"tensors\[1\] must be a torch.Tensor"),
        (([torch.zeros(3)], 4), ValueError, r"k must be in \[0, n\] with n=3, got 4"),
        (([torch.zeros(3)], torch.ones(2)), ValueError, r"k must have one entry, got shape \(2,\)"),
        (([torch.zeros(3)], 1, -1.0), ValueError, "lam must be finite and at least 0"),
        (([torch.zeros(3, dtype=torch.int64)], 1), TypeError, "dtype float16"),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        st.topk_mag_multi(*arguments)


class Counting:
    """Passes that count themselves: each will be one message to the other processes."""

    def __init__(self, inner):
        self.inner, self.calls = inner, []

    def __getattr__(self, name):
        self.calls.append(name)
        return getattr(self.inner, name)


@pytest.mark.parametrize("lam", [0.0, 1e-4, 0.1])
@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
def test_few_passes_are_enough_for_normal_weights(lam, share):
    generator = torch.Generator().manual_seed(0)
    xs = [torch.randn(400_000, generator=generator) * (1 + i) for i in range(3)]
    counting = Counting(passes.CompiledPasses(xs, [torch.empty_like(x) for x in xs]))
    multi.solve_spread(multi.Survey.of(xs), counting, round(share * 1_200_000), lam, 1.0, True)
    assert len(counting.calls) + 1 <= 12  # one for the sample


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("lam", [1e-4, 0.1])
def test_next_to_no_memory_beyond_the_outputs(lam):
    def peak():
        with open("/proc/self/status") as file:
            status = file.read()
        return 1024 * int(status.split("VmHWM:")[1].split()[0])

    xs = [torch.randn(2_000_000, requires_grad=True) for _ in range(8)]
    weights = 4 * 16_000_000
    gs = [x.detach() for x in xs]
    st.topk_mag_multi([x[:1000] for x in xs], 100, 0.1)

    def share(run):
        gc.collect()
        with open("/proc/self/clear_refs", "w") as file:  # the peak so far is forgotten
            file.write("5")
        before = peak()
        result = run()
        return result, (peak() - before) / weights - 1

    ys, forward = share(lambda: st.topk_mag_multi(xs, 1_600_000, lam))
    _, backward = share(lambda: torch.autograd.grad(ys, xs, gs))
    assert forward < 0.05
    assert backward < 0.05


def test_counts_are_exact_beyond_what_float32_holds():
    """2^24 + 1 of 2^24 + 3 equal entries, and one that is larger."""
    n = (1 << 24) + 3
    xs = [torch.ones(n, dtype=torch.float16), torch.full((1,), 2.0)]
    y, top = st.topk_mag_multi(xs, (1 << 24) + 1, 0.0)
    assert int(y.count_nonzero()) == 1 << 24
    assert top.item() == 2
    assert np.array_equal(y[-3:].numpy(), [0, 0, 0])


def test_an_integer_k_has_no_cotangent_also_beside_a_nan():
    x = torch.tensor([1.0, torch.nan, 2.0], requires_grad=True)
    (y,) = st.topk_mag_multi([x], torch.tensor(2))
    y.sum().backward()
    assert x.grad.isnan().all()
