"""Slots and routers by Triton kernels, under Triton's interpreter, against the core."""

from __future__ import annotations

import numpy as np
import pytest

from test_batches import rows

torch = pytest.importorskip("torch")
pytest.importorskip("triton", minversion="3.5")
st = pytest.importorskip("sparsetopk.torch")

from torch._subclasses.fake_tensor import FakeTensorMode

from interpreted import assert_near, both, by_the_core, compile_all, interpreted  # noqa: F401
from launches import Counting, launches
from sparsetopk._maths.operator import MAGNITUDE, MASK, TWO_SIDED
from sparsetopk.torch import moe
from sparsetopk.torch._triton import state

inf, nan = float("inf"), float("nan")

KINDS = [{}, {"magnitude": True}, {"two_sided": True, "p": 1.5}]
straight_and_not = pytest.mark.parametrize("straight", [False, True], ids=["relaxed", "straight"])
every_kind = pytest.mark.parametrize("options", KINDS, ids=str)


def compare(x, k, lam, capacity, tol, options):
    """Values and what is dropped, put back in their places, and their derivatives."""
    m, n = x.shape
    g = torch.from_numpy(np.random.default_rng(3).normal(size=(m, n + 1))).to(x.dtype)
    selections = []

    def f(x, k, lam):
        found = st.topk_select(x, k, lam, capacity=capacity, **options)
        selections.append(found)
        dense = torch.zeros_like(x).scatter(-1, found.indices, found.values)
        return torch.cat([dense, found.dropped[:, None]], dim=-1)

    found, want = both(f, x, k, lam, g=g)
    first, second = selections
    scale = x.double().nan_to_num(0.0, 0.0, 0.0).abs().amax(-1, keepdim=True).clamp_min(1.0)
    valid = ~second.dropped.isnan()
    assert torch.equal(first.dropped.isnan(), ~valid)
    assert_near(found[0][valid], want[0][valid], tol, scale[valid] * capacity)
    # An entry that is 0 up to rounding may have a slot here and none there.
    same = (first.indices == second.indices).all(-1) | ~valid
    if len(first) > 3:
        same &= (first.selected == second.selected).all(-1) | ~valid
    assert same.double().mean() > 0.97
    steep = scale * (1 + 1 / lam.clamp_min(1e-3)) * g.double().abs().sum(-1, keepdim=True)
    assert_near(found[1][same], want[1][same], tol, steep[same])
    clear = same & (k != k.floor())[:, 0]  # else rounding decides on which side of a jump
    if clear.any():
        for a, b in zip(found[2:], want[2:], strict=True):
            assert_near(a[clear], b[clear], tol, steep[clear])


@every_kind
@straight_and_not
def test_a_thousand_rows(options, straight):
    x, k, lam, _ = (torch.from_numpy(v[:1000]) for v in rows(33, 20_000))
    k = k.clamp_max(17.0)  # 17 slots: some rows have more than they hold
    x = x.float()
    compare(x, k, lam, 17, 4e-6, options | {"straight_through": straight})


@every_kind
@straight_and_not
def test_long_rows_are_given_slots_in_parts(options, straight):
    """Of 2048 entries: ties and what is selected are in all of them, and some of it finds no slot."""
    x = torch.from_numpy(np.random.default_rng(6).normal(size=(6, 5000))).float()
    x[1] = (2.0 * x[1]).round()
    x[2, ::7] = 2.5
    x[3, 4000:] = -inf if not options.get("magnitude") else 0.0
    x[4] = 1.0
    k = torch.tensor([300.5, 300.0, 300.5, 20.0, 300.5, 300.5]).double()[:, None]
    for lam in (0.1, 0.0):
        lam = torch.full((6, 1), lam).double()
        lam[1] = lam[5] = 0.0
        compare(x, k, lam, 320, 4e-6, options | {"straight_through": straight})


def special_rows():
    x = torch.from_numpy(np.random.default_rng(3).normal(size=(10, 24))).float()
    x[0, 3] = nan
    x[1, ::2] = -inf
    x[2, :2] = inf
    x[3, :20] = inf
    x[4, 3:] = -inf
    x[5] = -inf
    x[6] = 0.25
    x[7, :10] = 0.0
    x[8, 5:15] = 2.5  # ties, some of them without a slot
    return x


@every_kind
@straight_and_not
def test_special_rows(options, straight):
    """Padding, infinities, ties and constants, for several k; hard rows among the others."""
    x = special_rows().repeat(6, 1)
    k = torch.tensor([0.0, 4.5, 5.0]).double().repeat_interleave(20)[:, None]
    lam = torch.full((60, 1), 0.1).double()
    lam[::20] = lam[9::10] = 0.0
    lam[10:][torch.isin(torch.arange(50) % 20, torch.tensor([1, 3, 6, 8]))] = 0.0
    compare(x, k, lam, 5, 4e-6, options | {"straight_through": straight})


@straight_and_not
def test_as_many_slots_as_entries_and_one(straight):
    x = special_rows()
    for capacity in (1, 24):
        k, lam = (torch.full((10, 1), v, dtype=torch.float64) for v in (min(capacity, 20), 0.1))
        compare(x, k, lam, capacity, 4e-6, {"straight_through": straight})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes(dtype):
    x = torch.from_numpy(np.random.default_rng(6).normal(size=(50, 64))).to(dtype)
    k, lam = (torch.full((50, 1), v, dtype=torch.float64) for v in (10.5, 0.1))
    found = st.topk_select(x, k, lam, capacity=14)
    with by_the_core():
        want = st.topk_select(x, k, lam, capacity=14)
    assert found.values.dtype == dtype
    assert torch.equal(found.indices, want.indices)
    eps = max(1e-11, 2 * torch.finfo(dtype).eps if dtype != torch.float64 else 0.0)
    assert_near(found.values, want.values, eps)


def test_a_bad_k_or_lam_makes_its_row_nan():
    x = torch.from_numpy(np.random.default_rng(5).normal(size=(9, 12))).float()
    k = torch.tensor([[3.0], [-1.0], [12.5], [nan], [inf], [3.0], [3.0], [3.0], [5.0]])
    lam = torch.tensor([[0.1]] * 5 + [[-0.1], [inf], [nan], [0.1]])
    with pytest.MonkeyPatch.context() as patch:  # as where values cannot be read
        for module in ("_rows.arguments", "_functions.selection"):
            patch.setattr(f"sparsetopk.torch.{module}.is_plain", lambda *_: False)
        found = st.topk_select(x, k, lam, capacity=4)
        straight = st.topk_select(x, k, lam, capacity=4, straight_through=True)
    assert found.values[1:8].isnan().all()
    assert found.dropped[1:8].isnan().all()
    assert straight.values[1:].isnan().all()  # of the last, k is more than there are slots
    good = st.topk_select(x[:1], 3.0, 0.1, capacity=4)
    for a, b in zip(found, good, strict=True):
        assert torch.equal(a[:1], b)


def test_second_derivatives():
    x = torch.from_numpy(np.random.default_rng(10).normal(size=(5, 12))).double()

    def gradient(x):
        found = st.topk_select(x, 3.5, 0.4, p=1.5, capacity=4)
        total = (found.values**2).sum() + (found.dropped**2).sum()
        return torch.autograd.grad(total, x, create_graph=True)[0]

    found, want = both(gradient, x, g=x.flip(0))
    for a, b in zip(found, want, strict=True):
        assert_near(a, b, 1e-9, b.abs().max().clamp_min(1.0))


@pytest.mark.parametrize("route", [moe.expert_choice, moe.token_choice])
def test_routers(route):
    logits = torch.from_numpy(np.random.default_rng(7).normal(size=(3, 40, 8))).float()
    mask = torch.rand(3, 40, generator=torch.Generator().manual_seed(1)) > 0.2
    tokens = []

    def f(logits):
        routing = route(logits, 2, 0.3, mask=mask, capacity=10)
        tokens.append(routing.tokens)
        return torch.cat([routing.weights, routing.dropped[..., None].detach()], dim=-1)

    found, want = both(
        f, logits, g=torch.randn(3, 8, 11, generator=torch.Generator().manual_seed(2))
    )
    assert torch.equal(*tokens)
    for a, b in zip(found, want, strict=True):
        assert_near(a, b, 4e-6, 10.0)


def test_operators_are_registered_as_torch_wants_them():
    x = torch.randn(4, 10, requires_grad=True)
    k, lam = torch.full((4, 1), 2.5, requires_grad=True), torch.full((1, 1), 0.2)
    asked = (k, 0.0, lam, 0.0, MAGNITUDE, 1.0, True, 5, True)
    torch.library.opcheck(torch.ops.sparsetopk.rows_select.default, (x, *asked))
    torch.library.opcheck(torch.ops.sparsetopk.rows_slots.default, (x.detach(), 3))


@straight_and_not
def test_one_launch_each_way_and_no_read_by_the_host(straight):
    f = lambda x: st.topk_select(x, 64, 0.1, straight_through=straight).values  # noqa: E731
    assert launches(f, (64, 4096)) == ({"rows_select": 1}, {"rows_select_backward": 1})


def test_launches_of_routers():
    """The selection of experts is one; tokens choose in one, and experts fill their slots in another."""
    forward, backward = launches(
        lambda x: moe.expert_choice(x, 512, capacity=600).selected, (4096, 8)
    )
    assert forward["rows_select"] == backward["rows_select_backward"] == 1
    forward, backward = launches(lambda x: moe.token_choice(x, 2, capacity=600).selected, (4096, 8))
    assert forward["rows_forward"] == forward["rows_slots"] == backward["rows_backward"] == 1


def test_compiled_for_nvidia():
    """Nothing spills up to 8192 entries. Each entry is read once, and forward, in long rows, once more
    in parts of 2048, which are what is held while slots are written."""
    every = [{"OP": MASK}, {"OP": MAGNITUDE, "DEBIAS": True}, {"STRAIGHT": True}]
    requests = [
        {"name": name, "arch": arch, "n": 8192, **chosen}
        for name in ("select", "select_backward")
        for arch in (80, 90)
        for chosen in every
    ]
    tensors = {"K_TENSOR": True, "LAM_TENSOR": True, "HARD": True}
    more = [(80, {"OP": MASK, "E": 5.0, "STRAIGHT": True}), (90, {"OP": MAGNITUDE, "E": 5.0})]
    more.append((90, {"OP": TWO_SIDED, "E": 2.0, "STRAIGHT": True}))
    requests += [
        {"name": "select", "arch": arch, "n": 8192, **tensors, **chosen} for arch, chosen in more
    ]
    requests += [
        {"name": "select", "arch": 90, "n": 4096, "OP": MASK, "STRAIGHT": True},
        {"name": "slots", "arch": 80, "n": 8192},
    ]
    for request, found in zip(requests, compile_all(requests), strict=True):
        assert found["spills"] == 0, (request, found)
        threads = 32 * found["warps"]
        per_thread = found["block"] * found["rows"] // threads
        again = 2048 // threads if request["name"] == "select" else 0
        assert found["loads"].count(".128") == (per_thread + again) // 4, (request, found)
        dense = per_thread // 4 if request["name"] == "select_backward" else 0
        assert found["stores"].count(".128") == dense, (request, found)


def test_exports_with_fake_tensors_of_cuda():
    class Model(torch.nn.Module):
        def forward(self, x):
            selected = st.topk_select(x, 3, 0.1, capacity=4)
            return st.topk_mask(x, 3, 0.1), selected.values, st.topk_value(x, 3, 0.1)

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = torch.empty(4, 10, device="cuda")
    with pytest.MonkeyPatch.context() as patch, mode:
        patch.setattr(state, "is_served", lambda x: x.is_cuda)
        program = torch.export.export(Model(), (x,))
    names = [str(node.target) for node in program.graph.nodes]
    names = [name.split(".")[1] for name in names if name.startswith("sparsetopk")]
    assert names == ["rows_select", "rows_forward", "rows_value"]


@pytest.mark.parametrize(("options", "fractional"), [(KINDS[0], 3), (KINDS[1], 8)], ids=str)
def test_choose_lam(options, fractional):
    """That of the core, for ties, padding, infinities, constants, k = 0 and k = n too."""
    x = special_rows().repeat(4, 1)
    x[10:] += torch.from_numpy(np.random.default_rng(8).normal(size=(30, 24))).float()
    k = torch.tensor([0.0, 5.0, 6.5, 24.0]).double().repeat(10)[:, None]
    found = st.choose_lam(x, k, fractional, **options)
    with by_the_core():
        want = st.choose_lam(x, k, fractional, **options)
    want = want.clamp_min(1e-36)  # the least that is tried in float32
    assert_near(found / want, want / want, 1e-4)


def test_choose_lam_is_one_launch():
    x = torch.empty(64, 4096, device="meta")
    with pytest.MonkeyPatch.context() as patch, Counting() as counting:
        patch.setattr(state, "is_served", lambda x: x.is_meta)
        st.choose_lam(x, 64)
    assert counting.counts["rows_lam"] == 1
    assert sum(counting.counts.values()) <= 3
