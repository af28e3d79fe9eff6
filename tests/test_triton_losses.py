"""The value and the losses by Triton kernels, under Triton's interpreter, against the core."""

from __future__ import annotations

import numpy as np
import pytest

from test_batches import rows

torch = pytest.importorskip("torch")
pytest.importorskip("triton", minversion="3.5")
st = pytest.importorskip("sparsetopk.torch")

from interpreted import assert_near, both, compile_all, interpreted  # noqa: F401
from launches import launches
from sparsetopk._maths.operator import MAGNITUDE, MASK, TWO_SIDED
from sparsetopk.torch._triton import launch

inf, nan = float("inf"), float("nan")

VALUES = [
    {},
    {"p": 4 / 3},
    {"two_sided": True, "p": 1.5},
    {"phi": "half_square", "p": 1.5},
    {"phi": "half_square"},
    {"phi": "abs"},
]
LOSSES = [
    {"completion": None, "reduction": "none"},
    {"p": 1.5},
    {"completion": "best"},
    {"completion": "best", "two_sided": True, "p": 1.5, "reduction": "sum"},
    {"label_smoothing": 0.1, "reduction": "none", "two_sided": True},
    {"completion": None, "label_smoothing": 0.2},
    {"completion": None, "weighted": True},
]


@pytest.mark.parametrize("options", VALUES, ids=str)
def test_a_thousand_values_and_their_derivatives(options):
    at = [torch.from_numpy(v[:1000]) for v in rows(33, 20_000)]
    x, k, lam, g = at[0].float(), at[1], at[2], at[3][:, 0].float()
    found, want = both(lambda *v: st.topk_value(*v, **options), x, k, lam, g=g)
    size = x.double().abs().clamp_min(1.0)
    size = size**2 if options.get("phi") == "half_square" else size
    size = size.sum(-1)
    assert_near(found[0], want[0], 4e-7, size)
    assert_near(found[1], want[1], 2e-6, (size * g.abs())[:, None])
    assert_near(found[3], want[3], 2e-6, (size * g.abs())[:, None] / lam.clamp_max(1.0))
    # In k it jumps at a whole k, where any threshold in a gap is as good.
    at = k[:, 0] == 5.5
    assert_near(found[2][at], want[2][at], 2e-6, (size * g.abs())[at, None])


def targets_of(kind, m, n):
    rng = np.random.default_rng(m)
    if kind == "labels":
        labels = torch.from_numpy(rng.integers(0, n, size=m))
        labels[5:9] = -100
        return labels
    several = torch.from_numpy(rng.random((m, n)) < 0.1)
    return several if kind == "sets" else several * torch.from_numpy(rng.random((m, n))).float()


def loss_of(targets, options, k=15.5, lam=0.3):
    options = dict(options)
    if options.pop("weighted", False):
        options["weight"] = torch.linspace(0.0, 2.0, 33)
    return lambda x: st.topk_loss(x, targets, k, lam, **options)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *(("labels", options) for options in LOSSES),
        *(("sets", options) for options in LOSSES[1:3]),
        *(("weights", options) for options in (*LOSSES[:2], *LOSSES[4:])),
    ],
    ids=str,
)
def test_losses_and_their_gradients(options, kind):
    x = torch.from_numpy(np.random.default_rng(1).normal(size=(700, 33))).float()
    f = loss_of(targets_of(kind, 700, 33), options)
    is_none = options.get("reduction") == "none"
    g = torch.linspace(-1.0, 1.0, 700) if is_none else torch.tensor(1.0)
    found, want = both(f, x, g=g)
    summed = 700 if options.get("reduction") == "sum" else 1
    assert_near(found[0], want[0], 4e-7, 33.0 * summed)
    assert_near(found[1], want[1], 2e-6, want[1].abs().max().double())


SPECIAL = torch.tensor(
    [
        [1.0, nan, 0.0, 2.0, 3.0, 0.5],
        [-inf, 1.0, 2.0, -inf, 0.5, 0.25],
        [1.0, inf, 0.5, 0.0, 2.0, -1.0],
        [inf, inf, inf, inf, 0.0, 1.0],
        [0.25] * 6,
        [3.0, 3.0, 1.0, 1.0, 1.0, -inf],
        [0.0, -0.0, 0.0, 0.0, 0.0, 0.0],
        [1.0, 1.5, 0.5, 0.75, 1.25, 0.0],
    ]
)


@pytest.mark.parametrize("options", VALUES[:1] + VALUES[2:4] + VALUES[5:], ids=str)
def test_special_values(options):
    k = torch.tensor([0.0, 2.0, 2.5, 6.0]).double().repeat_interleave(8)[:, None]
    lam = torch.full((32, 1), 0.1).double()
    lam[7::8] = 0.0  # a hard row among the others
    f = lambda x: st.topk_value(x, k, lam, **options)  # noqa: E731
    found, want = both(f, SPECIAL.repeat(4, 1), g=torch.ones(32))
    assert torch.equal(found[0] == inf, want[0] == inf)
    assert_near(found[0].clamp_max(100.0), want[0].clamp_max(100.0), 2e-6)
    assert_near(found[1], want[1], 1e-5)


@pytest.mark.parametrize("options", [*LOSSES[:4], {"lam": 0.0}], ids=str)
def test_special_losses(options):
    """Labels of rows with padding, infinities and ties; a label that is ignored."""
    options = options | {"reduction": "none"}
    f = loss_of(torch.tensor([0, 1, 0, 0, 2, 1, 3, -100]), options, 3.0, options.pop("lam", 0.1))
    found, want = both(f, SPECIAL, g=torch.ones(8))
    assert torch.equal(found[0] == inf, want[0] == inf)
    assert_near(found[0].clamp_max(100.0), want[0].clamp_max(100.0), 2e-6)
    assert_near(found[1], want[1], 1e-5)


def test_best_is_exactly_zero_where_labels_are_selected_whole():
    x = torch.from_numpy(np.random.default_rng(2).normal(size=(500, 40))).float()
    labels = x.argmax(-1)
    x.scatter_(-1, labels[:, None], 5.0)
    loss = st.topk_loss(x, labels, 7, 0.1, completion="best", reduction="none")
    assert torch.equal(loss, torch.zeros(500))


def unread(f):
    """As where values cannot be read."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("_rows.arguments", "_functions.losses"):
            patch.setattr(f"sparsetopk.torch.{module}.is_plain", lambda *_: False)
        return f()


def test_a_bad_k_lam_or_label_makes_its_row_nan():
    x = torch.from_numpy(np.random.default_rng(5).normal(size=(9, 12))).float().requires_grad_()
    k = torch.tensor([[3.0], [-1.0], [12.5], [nan], [inf], [3.0], [3.0], [3.0], [3.0]])
    lam = torch.tensor([[0.1]] * 5 + [[-0.1], [inf], [nan], [0.1]])
    values = unread(lambda: st.topk_value(x, k, lam))
    assert values[1:8].isnan().all()
    assert torch.equal(values[::8], st.topk_value(x[::8], 3.0, 0.1))
    labels = torch.tensor([0, -1, 12, 3, 1 << 40, -100, 11, 0, 5])
    losses = unread(lambda: st.topk_loss(x, labels, 3.0, 0.1, reduction="none"))
    (dx,) = torch.autograd.grad(losses, x, torch.ones(9))
    bad = torch.tensor([1, 2, 4])
    assert torch.equal(losses.isnan().nonzero()[:, 0], bad)
    assert torch.equal(dx.isnan().all(-1).nonzero()[:, 0], bad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes(dtype):
    x = torch.from_numpy(np.random.default_rng(6).normal(size=(20, 100))).to(dtype)
    labels, weight = torch.arange(20), torch.linspace(0.5, 1.5, 100).to(dtype)
    f = lambda x: st.topk_loss(x, labels, 10.5, 0.1, completion="spread", weight=weight)  # noqa: E731
    found, want = both(f, x, g=torch.ones((), dtype=dtype))
    assert found[0].dtype == found[1].dtype == dtype
    rounding = 1e-12 if dtype == torch.float64 else 2e-6 + 2 * torch.finfo(dtype).eps
    for a, b in zip(found, want, strict=True):
        assert_near(a, b, rounding, b.double().abs().max())


@pytest.mark.parametrize("completion", ["value", None, "best"])
def test_second_derivatives(completion):
    x = torch.from_numpy(np.random.default_rng(10).normal(size=(5, 12))).double()

    def gradient(x):
        if completion == "value":
            y = st.topk_value(x, 3.5, 0.4, p=1.5)
        else:
            y = st.topk_loss(x, torch.arange(5), 3.5, 0.4, p=1.5, completion=completion)
        return torch.autograd.grad((y**2).sum(), x, create_graph=True)[0]

    found, want = both(gradient, x, g=x.flip(0))
    for a, b in zip(found, want, strict=True):
        assert_near(a, b, 1e-9, b.abs().max().clamp_min(1.0))


def test_derivatives_in_k_lam_and_weights_of_a_loss():
    """The value is the kernel, the rest ordinary operations."""
    x = torch.from_numpy(np.random.default_rng(11).normal(size=(30, 12))).float()
    t = torch.from_numpy(np.random.default_rng(12).random((30, 12)) / 2).float()
    k, lam = torch.tensor(8.5).double(), torch.tensor(0.2).double()
    f = lambda x, k, lam, t: st.topk_loss(x, t, k, lam, completion="spread")  # noqa: E731
    found, want = both(f, x, k, lam, t, g=torch.tensor(1.0))
    for a, b in zip(found, want, strict=True):
        assert_near(a, b, 2e-6, b.double().abs().max().clamp_min(1.0))


def test_operator_is_registered_as_torch_wants_it():
    x, t = torch.randn(4, 10, requires_grad=True), torch.tensor([0, 1, 2, 3])
    numbers = (None, 2.5, torch.full((1, 1), 0.2), 0.0)
    for chosen in ((None, None, 0, 0.0, 0, 2), (t, None, 2, 0.0, -100, 0)):
        torch.library.opcheck(
            torch.ops.sparsetopk.rows_value.default, (x, *numbers, MASK, 1.0, *chosen)
        )


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_launches(reduction, monkeypatch):
    """One for every row and, where rows are put together, one program more; one backward."""
    labels = torch.zeros(64, dtype=torch.int64, device="meta")
    f = lambda x: st.topk_loss(x, labels, 5, completion="best", reduction=reduction)  # noqa: E731
    forward, backward = launches(f, (64, 4096))
    expected = {"rows_value": 1} if reduction == "none" else {"rows_value": 1, "total": 1}
    assert forward == expected
    assert backward == {"rows_value_backward": 1}
    ran = []
    for name in ("value_kernel", "total_kernel"):
        real = getattr(launch, name)
        counted = type(
            "", (), {"__getitem__": lambda _, at, r=real, n=name: ran.append(n) or r[at]}
        )
        monkeypatch.setattr(launch, name, counted())
    st.topk_loss(torch.randn(3, 8), torch.arange(3), 2, completion="best", reduction=reduction)
    assert len(ran) == len(expected)
    assert launches(lambda x: st.topk_value(x, 64), (64, 4096)) == (
        {"rows_value": 1},
        {"rows_value_backward": 1},
    )


TENSORS = {"K_TENSOR": True, "LAM_TENSOR": True, "HARD": True}


def test_compiled_for_nvidia():
    """Nothing spills up to 8192 entries; each entry is read once, and twice where two problems are
    solved for a row; none is written forward."""
    loss = {"OP": MASK, "KIND": 1, "REDUCTION": 0}
    requests = [
        {"name": "value", "arch": 80, "n": 8192, "OP": TWO_SIDED, "E": 2.0},
        {"name": "value", "arch": 90, "n": 8192, "COMPLETION": 1, **loss},
        {
            "name": "value",
            "arch": 90,
            "n": 8192,
            "COMPLETION": 1,
            **loss,
            "OP": TWO_SIDED,
            "E": 2.0,
        },
        {"name": "value", "arch": 80, "n": 8192, "COMPLETION": 1, **loss, "E": 5.0},
        {"name": "value", "arch": 80, "n": 8192, "COMPLETION": 2, **loss},
        {"name": "value", "arch": 90, "n": 8192, "COMPLETION": 2, **loss, **TENSORS},
        {
            "name": "value",
            "arch": 90,
            "n": 8192,
            "COMPLETION": 2,
            **loss,
            **TENSORS,
            "OP": TWO_SIDED,
            "E": 2.0,
        },
        {"name": "value_backward", "arch": 80, "n": 8192, "COMPLETION": 2, **loss, **TENSORS},
        {"name": "value_backward", "arch": 90, "n": 8192, "COMPLETION": 1, **loss},
        {"name": "value_backward", "arch": 80, "n": 1024, "OP": MAGNITUDE},
    ]
    for request, found in zip(requests, compile_all(requests), strict=True):
        assert found["spills"] == 0, (request, found)
        per_thread = found["block"] * found["rows"] // (32 * found["warps"])
        tiles = 2 if request.get("COMPLETION") == 2 else 1
        assert found["loads"].count(".128") == tiles * per_thread // 4, (request, found)
        stored = per_thread // 4 if request["name"] == "value_backward" else 0
        assert found["stores"].count(".128") == stored, (request, found)
