"""Rows over many processes: equal to those of one process, by few messages of a fixed size."""

import contextlib
import datetime
import functools
import importlib
import io
import itertools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist

import sparsetopk.torch as st
from processes import start
from sparsetopk._maths import threshold
from sparsetopk._maths.operator import MASK, Operator
from sparsetopk.torch import moe, nn, prune
from sparsetopk.torch._rows.namespace import LOOKS_ALWAYS
from sparsetopk.torch._solvers import vectorized
from sparsetopk.torch._spread import multi, sharded

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo"
)
F64 = torch.float64


def equal(found, expected, tolerance=1e-10, least=1e-300):
    """To rounding, in units of the largest number, or of ``least`` where all are small."""
    finite = expected[expected.isfinite()].abs()
    scale = max(least, float(finite.max())) if finite.numel() else 1.0
    torch.testing.assert_close(
        found, expected, rtol=tolerance, atol=tolerance * scale, equal_nan=True
    )


class Counting:
    """The collectives inside, with the number of entries that each of them sends."""

    names = ("all_reduce", "all_gather")

    def __enter__(self):
        self.sizes, self.kept = [], {name: getattr(dist, name) for name in self.names}
        for name, f in self.kept.items():
            setattr(dist, name, self.counted(f))
        return self

    def counted(self, f):
        def run(out, *arguments, **options):
            self.sizes.append(sum(x.numel() for x in (out if isinstance(out, list) else [out])))
            return f(out, *arguments, **options)

        return run

    def __exit__(self, *error):
        for name, f in self.kept.items():
            setattr(dist, name, f)


def shares(n, size, kind):
    """How many of n entries each rank has."""
    if kind == "even":
        return [n // size + (rank < n % size) for rank in range(size)]
    if kind == "empty":
        return [0] * (size - 1) + [n]
    return (
        [n // 2]
        + [n // 2 // (size - 1)] * (size - 2)
        + [n - n // 2 - n // 2 // (size - 1) * (size - 2)]
    )


# ---------------------------------------------------------------- many tensors (checks in processes)


def content(name, n=3000, dtype=F64):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(n, generator=generator, dtype=F64)
    if name == "ties":
        x = x.round()
    if name == "cauchy":
        x = x / torch.randn(n, generator=generator, dtype=F64)
    if name == "sorted":  # everything on the first ranks is selected, and nothing on the last
        x = x.abs().sort(descending=True).values
    return x.to(dtype)


def contents(group, *names):
    """Fewer where there are more ranks than cores, and every collective waits for all of them."""
    return names if dist.get_world_size(group) == 2 else names[:2]


def compare_multi(group, x, kind, k, lam, tolerance=1e-10, **options):
    """Values, and derivatives in x, k and lam, with those of one process."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    numbers = [torch.tensor(float(v), dtype=F64, requires_grad=True) for v in (k, lam)]
    x = x.clone().requires_grad_()
    g = torch.cos(torch.arange(len(x), dtype=x.dtype))
    counts = shares(len(x), size, kind)
    y = st.topk_mag(x, *numbers, **options)
    expected = torch.autograd.grad(y, [x, *numbers], g)
    here = x.detach().split(counts)[rank].clone().requires_grad_()
    pieces = [here[: len(here) // 3], here[len(here) // 3 :].reshape(1, -1)]
    with Counting() as forward:
        ys = st.topk_mag_multi(pieces, *numbers, group=group, **options)
    with Counting() as backward:
        loss = torch.cat([y.flatten() for y in ys]) @ g.split(counts)[rank]
        found = torch.autograd.grad(loss, [here, *numbers])
    equal(torch.cat([y.flatten() for y in ys]).detach(), y.detach().split(counts)[rank], tolerance)
    equal(found[0], expected[0].split(counts)[rank], tolerance)
    for one, other in zip(found[1:], expected[1:], strict=True):
        equal(one, other, 10 * tolerance)
    assert len(backward.sizes) <= 2
    return forward.sizes


def multi_equals_one_process(group):
    multi._SAMPLE = 64  # so that short rows need passes
    try:
        for name in contents(group, "normal", "ties", "cauchy", "sorted"):
            for kind in ("even", "uneven", "empty"):
                for k, lam in ((300, 0.1), (30.5, 2.0), (700, 1e-4), (300, 0.0), (40.5, 0.0)):
                    compare_multi(group, content(name), kind, k, lam)
        x = content("normal")
        for options in ({"p": 1.5}, {"p": 3.0}, {"debias": False}, {"straight_through": True}):
            compare_multi(group, x, "uneven", 300, 0.1, **options)
        for k in (0, len(x)):
            for lam in (0.1, 0.0):
                compare_multi(group, x, "uneven", k, lam, debias=False)
        compare_multi(group, content("normal", dtype=torch.float32), "uneven", 300, 0.1, 1e-5)
        native, multi.native = multi.native, None
        compare_multi(group, x, "empty", 300, 0.1)
        compare_multi(group, content("ties"), "empty", 300, 0.0)
        multi.native = native
    finally:
        multi._SAMPLE = 1 << 15


def multi_in_few_messages(group):
    """Of a size that does not depend on n."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    sent = {}
    for n in (1 << 18, 1 << 19):
        x = content("normal", n, torch.float32).split(shares(n, size, "even"))[rank]
        for share in (0.01, 0.1, 0.5):
            for lam in (0.0, 1e-4, 0.1):
                with Counting() as counting:
                    st.topk_mag_multi([x], round(share * n), lam, group=group)
                assert len(counting.sizes) <= 12, counting.sizes
                sent.setdefault(n, []).append(max(counting.sizes))
    assert sent[1 << 18] == sent[1 << 19]


def multi_special(group):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    x = torch.ones(5, dtype=F64, requires_grad=True)
    # A NaN on one rank is one on all.
    for k in (0, 3, 5 * size):
        bad = torch.where(torch.arange(5) == 2, torch.nan, x) if rank == size - 1 else x
        (y,) = st.topk_mag_multi([bad], k, 0.1, group=group)
        assert y.isnan().all()
        assert torch.autograd.grad(y.sum(), x)[0].isnan().any()
    # The lowest rank wins a tie, and there the lowest index.
    (y,) = st.topk_mag_multi([x.detach()], 7.5, 0.0, group=group)
    expected = [[1.0] * 5, [1.0, 1.0, 0.5, 0.0, 0.0], [0.0] * 5, [0.0] * 5][rank]
    assert y.tolist() == expected
    # Counts are exact beyond what float32 holds.
    n = (1 << 24) // size + 3
    ones = torch.ones(n, dtype=torch.float16)
    k = size * n - 2
    (y,) = st.topk_mag_multi([ones], k, 0.0, group=group)
    assert int(y.count_nonzero()) == n - 2 * (rank == size - 1)
    # Nothing anywhere.
    (y,) = st.topk_mag_multi([torch.zeros(0, 3)], 0, group=group)
    assert y.shape == (0, 3)


def multi_errors(group):
    """All ranks see them, and none is left waiting."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    x = torch.ones(4, requires_grad=True)
    with pytest.raises(ValueError, match="k must be the same on every rank, got"):
        st.topk_mag_multi([x], 1 + rank, group=group)
    with pytest.raises(ValueError, match="lam must be the same on every rank, got"):
        st.topk_mag_multi([x], 1, 0.1 * (1 + rank), group=group)
    with pytest.raises(ValueError, match=rf"k must be in \[0, n\] with n={4 * size}, got"):
        st.topk_mag_multi([x], 4 * size + 1, group=group)
    with pytest.raises(ValueError, match="at least one tensor on every rank"):
        st.topk_mag_multi([x] if rank else [], 1, group=group)
    with pytest.raises(TypeError, match=r"group must be a torch.distributed.ProcessGroup"):
        st.topk_mag_multi([x], 1, group="gloo")
    (y,) = st.topk_mag_multi([x], 2, group=group)
    with pytest.raises(RuntimeError, match="no second derivatives over a group"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(ValueError, match=r"group must be None in torch.func"):
        torch.func.grad(lambda x: st.topk_mag_multi([x], 2, group=group)[0].sum())(x)


# ------------------------------------------------------------------- batched rows (in processes)

OPERATORS = {
    "topk_mask": {},
    "topk": {"p": 1.5, "two_sided": True},
    "topk_mag": {"debias": False},
    "topk_sign": {"p": 4 / 3},
}


def batch(name, dtype=F64):
    """Six rows, along the middle dimension."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 401, 3, generator=generator, dtype=F64)
    if name == "ties":
        x = (2 * x).round() / 2
    if name == "cauchy":
        x = x / torch.randn(x.shape, generator=generator, dtype=F64)
    if name == "sorted":
        x = x.sort(dim=1, descending=True).values
    if name == "shifted":
        x = x + 1e5
    if name == "padded":
        x[0, 100:] = -torch.inf
        x[1, :3] = torch.inf
    return x.to(dtype)


def compare_rows(group, f, x, kind, k, lam, tolerance=1e-10):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    numbers = [torch.as_tensor(v, dtype=F64).clone().requires_grad_() for v in (k, lam)]
    x = x.clone().requires_grad_()
    g = torch.cos(torch.arange(x.numel(), dtype=x.dtype)).view_as(x)
    counts = shares(x.shape[1], size, kind)
    y = f(x, *numbers)
    expected = torch.autograd.grad(y, [x, *numbers], g)
    here = x.detach().split(counts, dim=1)[rank].clone().requires_grad_()
    found_y = f(here, *numbers, group=group)
    with Counting() as backward:
        found = torch.autograd.grad(found_y, [here, *numbers], g.split(counts, dim=1)[rank])
    finite = y.detach().split(counts, dim=1)[rank]
    equal(found_y.detach(), finite, tolerance)
    equal(found[0], expected[0].split(counts, dim=1)[rank], tolerance)
    terms = float(expected[0].abs().sum().nan_to_num())  # dk and dlam are sums that may cancel
    for one, other in zip(found[1:], expected[1:], strict=True):
        equal(one, other, tolerance, max(terms, 1e-300))
    assert len(backward.sizes) <= 2


def rows_equal_one_process(group):
    per_row = torch.tensor([[[3.0, 20.0, 100.5]], [[1.0, 200.0, 2.0]]])
    for name, options in OPERATORS.items():
        f = functools.partial(getattr(st, name), dim=1, **options)
        even = name in ("topk_mag", "topk_sign")
        more = () if even else ("padded", "shifted")
        for content in contents(group, "normal", "ties", *more, "cauchy", "sorted"):
            for kind in ("even", "uneven", "empty"):
                for k, lam in ((40, 0.1), (per_row, 0.7), (100.5, 1e-4), (40, 0.0), (0, 0.1)):
                    tolerance = 1e-7 if content == "shifted" else 1e-10  # x has lost five digits
                    compare_rows(group, f, batch(content), kind, k, lam, tolerance)
        mixed = torch.tensor([0.0, 0.5, 2.0])
        compare_rows(group, f, batch("ties"), "uneven", per_row, mixed)
        compare_rows(group, f, batch("normal"), "uneven", 401, 0.1)
        compare_rows(group, f, batch("normal", torch.float32), "uneven", 40, 0.1, 1e-5)
        straight = functools.partial(f, straight_through=True)
        compare_rows(group, straight, batch("normal"), "uneven", 40, 0.1)
    for p in (1.5, 3.0):
        f = functools.partial(st.topk_mag, dim=1, p=p)
        compare_rows(group, f, batch("normal"), "uneven", 40, 0.1)


def slots_over_ranks(group):
    """Every rank has the slots of its own entries: together they are those of one process."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    x = torch.randn(50, 40, generator=torch.Generator().manual_seed(2), dtype=F64)
    for magnitude, operator in ((False, st.topk_mask), (True, st.topk_mag)):
        options = {"magnitude": magnitude, "straight_through": True}
        counts = shares(40, size, "uneven")
        here = x.split(counts, dim=1)[rank].clone().requires_grad_()
        found = st.topk_select(here, 6, 0.5, capacity=here.shape[1], group=group, **options)
        hard, live = (x.clone().requires_grad_() for _ in range(2))
        expected = operator(hard, 6, 0.0).detach().split(counts, dim=1)[rank]
        equal(torch.zeros_like(here).scatter(-1, found.indices, found.values).detach(), expected)
        assert torch.equal(found.selected.sum(-1), (expected != 0).sum(-1))
        (got,) = torch.autograd.grad((found.values * found.indices.double().cos()).sum(), here)
        g = torch.cat([torch.arange(n, dtype=F64).cos() for n in counts])
        (want,) = torch.autograd.grad((operator(live, 6, 0.5) * g).sum(), live)
        equal(got, want.split(counts, dim=1)[rank])


def rows_in_few_messages(group):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    generator = torch.Generator().manual_seed(0)
    sent = {}
    for dtype in (torch.float32, F64):
        for n in (1 << 13, 1 << 14):
            x = torch.randn(4, n, generator=generator, dtype=dtype).chunk(size, dim=-1)[rank]
            for f in (st.topk_mask, st.topk, st.topk_mag, st.topk_sign):
                for share in (0.01, 0.1, 0.5):
                    for lam in (0.0, 1e-4, 0.1):
                        with Counting() as counting:
                            f(x, round(share * n), lam, group=group)
                        assert len(counting.sizes) <= 17, (f, share, lam, counting.sizes)
                        sent.setdefault((dtype, n), []).append(max(counting.sizes))
        assert sent[dtype, 1 << 13] == sent[dtype, 1 << 14]


def rows_special(group):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    x = torch.ones(2, 5, dtype=F64, requires_grad=True)
    bad = x.detach().clone().requires_grad_()
    if rank == size - 1:
        bad.data[1, 2] = torch.nan
    y = st.topk_mask(bad, 3, 0.1, group=group)
    assert y[0].isfinite().all()
    assert y[1].isnan().all()
    (gradient,) = torch.autograd.grad(y.sum(), bad)
    assert gradient[0].isfinite().all()
    assert gradient[1].isnan().all()
    y = st.topk_mask(x.detach(), 7.5, 0.0, group=group)
    assert y[0].tolist() == [[1.0] * 5, [1.0, 1.0, 0.5, 0.0, 0.0], [0.0] * 5, [0.0] * 5][rank]
    with pytest.raises(ValueError, match="k must be the same on every rank"):
        st.topk_mask(x, 1 + rank, group=group)
    with pytest.raises(ValueError, match="lam must be the same on every rank"):
        st.topk_mask(x, 1, 0.1 + rank, group=group)
    with pytest.raises(ValueError, match=rf"k must be in \[0, n\] with n={5 * size}, got"):
        st.topk_mask(x, 5 * size + 1, group=group)
    with pytest.raises(ValueError, match="solver, over a group, must be"):
        st.topk_mask(x, 1, solver="pav", group=group)
    y = st.topk_mask(x, 3, group=group)
    with pytest.raises(RuntimeError, match="no second derivatives over a group"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def rows_of_dtensors(group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    size = dist.get_world_size(group)
    mesh = init_device_mesh("cpu", (size,))
    x = batch("normal").requires_grad_()
    g = torch.cos(x.detach())
    for name, options in OPERATORS.items():
        for more in ({}, {"straight_through": True}):
            f = functools.partial(getattr(st, name), k=40, lam=0.1, dim=1, **options, **more)
            y = f(x)
            (expected,) = torch.autograd.grad(y, x, g)
            for placement in (Shard(1), Shard(2), Replicate()):
                there = distribute_tensor(x.detach(), mesh, [placement]).requires_grad_()
                found = f(there)
                assert found.placements == (placement,)
                assert found.shape == x.shape
                equal(found.full_tensor().detach(), y.detach())
                (found * distribute_tensor(g, mesh, [placement])).sum().backward()
                equal(there.grad.full_tensor(), expected)
    there = distribute_tensor(x.detach(), mesh, [Shard(1)])
    with pytest.raises(ValueError, match="group must be None for a DTensor"):
        st.topk_mask(there, 3, dim=1, group=group)
    with pytest.raises(ValueError, match="k and lam must be numbers where x is sharded along"):
        st.topk_mask(there, torch.tensor(3.0), dim=2)


# ------------------------------------------------------------------------------ FSDP2 (in processes)


class Tied(torch.nn.Module):
    """With a shape that no number of ranks divides, one row only, and a weight that two layers share."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(11, 7)
        self.body = torch.nn.Sequential(
            torch.nn.Linear(7, 13), torch.nn.Tanh(), torch.nn.Linear(13, 1), torch.nn.Linear(1, 7)
        )
        self.head = torch.nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.double()

    def forward(self, tokens):
        return self.head(self.embed(tokens) + self.body(self.embed(tokens)))


N_WEIGHTS = 11 * 7 + 7 * 13 + 13 + 7


def train(model, pruner, rank, size, fused, steps=4, micro=2):
    """Losses over all ranks; gradients of two backwards add up."""
    parameters = [w for w in model.parameters() if w.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=0.05, fused=fused)
    tokens = torch.randint(0, 11, (micro, 8), generator=torch.Generator().manual_seed(5))
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=F64)
        for batch in tokens:
            here = batch.chunk(size)[rank]
            loss = torch.nn.functional.cross_entropy(model(here), here)
            loss.backward()
            total += loss.detach()
        if size > 1:
            dist.all_reduce(total)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        pruner.step()
        losses.append(float(total) / size)
    return losses


def fsdp_prunes_as_one_process(group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    rank, size = dist.get_rank(group), dist.get_world_size(group)
    options = {"scope": "global", "schedule": prune.KeepSchedule(3, start=0.8)}
    meshes = [init_device_mesh("cpu", (size,))]
    if size == 4:  # two replicas of two shards
        meshes.append(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    for mesh, straight_through in itertools.product(meshes, (False, True)):
        fused = straight_through  # an optimiser that does not say what it changed
        alone, model, lam = Tied(), Tied(), 0.3
        here = {**options, "straight_through": straight_through}
        expected = train(alone, prune.prune(alone, 0.3, lam, **here), 0, 1, fused)
        fully_shard(model.body, mesh=mesh)
        fully_shard(model, mesh=mesh)
        pruner = prune.prune(model, 0.3, lam, **here)
        with Counting() as counting:
            model.eval()(torch.arange(3))
            solved = len(counting.sizes)
            model(torch.arange(3))
        assert len(counting.sizes) == solved <= 24  # the second forward finds the solution there
        found = train(model.train(), pruner, rank, size, fused)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=0.0)

        with contextlib.redirect_stdout(io.StringIO()) as printed:
            rows, wanted = prune.report(model), prune.report(alone)
        assert [row[1:] for row in rows] == [row[1:] for row in wanted if row.name != "head.weight"]
        assert ("total" in printed.getvalue().split("layer", 1)[1]) or rank > 0
        own = [w for name, w in model.named_parameters() if "original" not in name]
        assert all(isinstance(w, DTensor) and w.grad is None for w in own if w.ndim == 2)

        prune.finalize(model, hard=True)
        prune.finalize(alone, hard=True)
        state = {name: w.full_tensor() for name, w in model.state_dict().items()}
        assert state.keys() == alone.state_dict().keys()
        for name, w in alone.state_dict().items():
            equal(state[name], w, 1e-8)
        kept = sum(int(state[name].count_nonzero()) for name in PRUNED)
        assert kept == round(0.3 * N_WEIGHTS)
        equal(model(torch.arange(3)).detach(), alone(torch.arange(3)).detach(), 1e-8)


def fsdp_prunes_in_parts(group):
    """Two groups with a share each, on one model: as in one process, also at the end."""
    from torch.distributed.fsdp import fully_shard

    rank, size = dist.get_rank(group), dist.get_world_size(group)
    losses, models = [], []
    for ranks in (1, size):
        model = Tied()
        if ranks > 1:
            fully_shard(model)
        for part, keep in ((["body"], 0.5), (["embed", "head"], 0.2)):
            pruner = prune.prune(model, keep, 0.3, scope="global", modules=part)
        losses.append(train(model, pruner, rank if ranks > 1 else 0, ranks, fused=True))
        prune.finalize(model, hard=True)
        models.append(model)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-9, atol=0.0)
    for name, w in models[1].named_parameters():
        equal(w.detach().full_tensor(), models[0].get_parameter(name).detach(), 1e-8)


PRUNED = ("embed.weight", "body.0.weight", "body.2.weight", "body.3.weight")


def fsdp_errors(group):
    from torch.distributed.fsdp import fully_shard

    model = Tied()
    fully_shard(model)
    for options, message in (
        ({}, "scope, on sharded parameters, must be one of 'global', got 'tensor'"),
        (
            {"scope": "global", "unit": "row"},
            "unit, on sharded parameters, must be 'weight'",
        ),
        (
            {"scope": "global", "lam": prune.ChooseLam()},
            "lam must be a number on sharded parameters",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            prune.prune(model, **options)
    prune.prune(model, 0.5, scope="global")
    with pytest.raises(ValueError, match=r"embed.weight must be a plain parameter"):
        prune.prune(model, 0.5, scope="global")


# -------------------------------------------------------------------- mixture of experts (in processes)


def dense(routing, tokens):
    """The weights of all tokens, [..., experts, tokens]."""
    shape = (*routing.weights.shape[:-1], tokens)
    return routing.weights.new_zeros(shape).scatter(-1, routing.tokens, routing.weights)


def experts_choose_over_ranks(group):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 60, 4, generator=generator, dtype=F64).requires_grad_()
    mask = torch.rand(2, 60, generator=generator) < 0.8
    g = torch.cos(logits.detach().mT)
    routers = (
        {"capacity_factor": 1.0},
        {"k": 7.5, "lam": 0.5, "normalize": True, "p": 1.5},
        {"k": 9, "lam": 0.0, "select_on": "gates"},
    )
    for options in routers:
        for kind in ("even", "uneven", "empty"):
            counts = shares(60, size, kind)
            alone = nn.ExpertChoice(**options, capacity=60)(logits, mask)
            (expected,) = torch.autograd.grad(dense(alone, 60), logits, g)
            here = logits.detach().split(counts, dim=1)[rank].clone().requires_grad_()
            router = nn.ExpertChoice(**options, group=group)
            routing = router(here, mask.split(counts, dim=1)[rank])
            y = dense(routing, counts[rank])
            (found,) = torch.autograd.grad(y, here, g.split(counts, dim=2)[rank])
            equal(y.detach(), dense(alone, 60).detach().split(counts, dim=-1)[rank])
            equal(found, expected.split(counts, dim=1)[rank])
            assert (routing.dropped == 0).all()
    layer = nn.MixtureOfExperts(router, nn.ExpertMLP(4, 8, 16))
    assert layer(torch.randn(2, 5, 8)).shape == (2, 5, 8)
    mlp = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
    upcycled = moe.upcycle(torch.nn.Sequential(mlp), 4, router)
    assert upcycled[0].router is not router
    assert upcycled[0].router.group is group


class ManyRanks:
    """Stands for so many processes that all have the same shard."""

    def __init__(self, size):
        self.size, self.rank = size, 0

    def sum(self, values):
        return self.size * values

    def largest(self, values):
        return values


@pytest.mark.parametrize("lam", [0.0, 0.01])
def test_counts_of_rows_are_exact_beyond_what_float32_holds(lam):
    """2^24 + 1 of 3 * 2^23 entries: those at 1 and at 0.5, and one of those at 0.25."""
    shared, x = ManyRanks(1 << 23), torch.tensor([[1.0, 0.5, 0.25]])
    k, lam = (torch.tensor([[v]], dtype=F64) for v in (2.0**24 + 1, lam))
    rows = sharded.Shards(x, 3 << 23, shared)
    state = threshold.state_of(LOOKS_ALWAYS, rows, vectorized.split(k), lam, Operator(MASK, 1.0))
    pivot, delta = (float(v) for v in state)
    if lam == 0:
        assert (pivot, delta) == (0.25, 1.0)
    else:  # those at 0.25 share what is left
        assert (0.25 - pivot) / float(lam) + delta == pytest.approx(2.0**-23, rel=1e-6)


# --------------------------------------------------------------------------- starting the processes

CHECKS = {
    2: [
        multi_equals_one_process,
        multi_in_few_messages,
        multi_special,
        multi_errors,
        rows_equal_one_process,
        rows_in_few_messages,
        slots_over_ranks,
        rows_special,
        rows_of_dtensors,
        fsdp_prunes_as_one_process,
        fsdp_prunes_in_parts,
        fsdp_errors,
        experts_choose_over_ranks,
    ],
    4: [
        multi_equals_one_process,
        multi_in_few_messages,
        multi_special,
        rows_equal_one_process,
        rows_special,
        rows_of_dtensors,
        fsdp_prunes_as_one_process,
        experts_choose_over_ranks,
    ],
}


def run_checks(group):
    for check in CHECKS[dist.get_world_size(group)]:
        check(group)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_in_processes(tmp_path, size):
    """All of them in one start, which takes longer than most."""
    assert len(start(run_checks, size, tmp_path)) == size


# ------------------------------------------------------------------------------ when a process is lost


def lose_a_rank(world, how):
    """The message of the error on those that are left."""
    rank, size = dist.get_rank(world), dist.get_world_size(world)
    group = dist.new_group(list(range(size)), timeout=datetime.timedelta(seconds=5))
    x = [content("normal", 1 << 17).chunk(size)[rank]]
    st.topk_mag_multi(x, 1000, 0.1, group=group)  # all is well
    if rank == size - 1:
        calls, reduce = [], dist.all_reduce

        def lost(*arguments, **options):
            calls.append(1)
            if len(calls) == 3:  # in the middle of the search
                if how == "dies":
                    os._exit(1)
                time.sleep(3600)
            return reduce(*arguments, **options)

        dist.all_reduce = lost
    with pytest.raises(RuntimeError) as error:
        st.topk_mag_multi(x, 1000, 0.1, group=group)
    return str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_lost_process_is_an_error_for_the_others(tmp_path, how):
    """Within the time-out of the group: without one they would wait longer than this test does."""
    found = start(lose_a_rank, 3, tmp_path, how, answers=2)
    assert sorted(found) == [0, 1]
    assert all(found.values())


# ------------------------------------------------------------------------------------ whole programs

ROOT = Path(__file__).parents[1]


def together(group):
    return dist.get_world_size(group)


def run_example(*launcher):
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, ROOT / "examples/global_prune_fsdp.py", "--steps", "12"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    last = result.stdout.splitlines()[-1]
    loss, zeros = re.fullmatch(r"final loss (\S+), (\S+) % zeros of 135,168 weights", last).groups()
    return float(loss), float(zeros)


@pytest.mark.slow
def test_the_example_ends_in_two_processes_as_in_one(tmp_path):
    start(together, 2, tmp_path)  # or the test is skipped
    alone = run_example()
    both = run_example("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert both[0] == pytest.approx(alone[0], abs=1e-4)
    assert both[1] == alone[1] == pytest.approx(90, abs=1e-3)


def test_the_table_of_the_docs_is_that_of_the_model(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    scale = importlib.import_module("scale")
    results = json.loads((ROOT / "benchmarks" / "results" / "scale.json").read_text())
    assert scale.table(results["scale"]) in (ROOT / "docs" / "scale.md").read_text()


# -------------------------------------------------------------------------------------- accelerators

WAITING = ("item", "_local_scalar_dense", "nonzero", "tolist", "cpu", "numpy")


@pytest.mark.slow
def test_the_solver_of_other_devices_is_one_graph_that_waits_for_nothing():
    """What runs on a GPU: all passes in one graph, none of which hands a number to the host."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def f(x, k, lam):
        return vectorized.state_of(x, k, lam, MASK, 1.0)

    x = torch.randn(3, 50)
    k, lam = torch.full((3, 1), 5.0), torch.full((3, 1), 0.1)
    state = torch.compile(f, fullgraph=True, backend=backend)(x, k, lam)
    torch.testing.assert_close(state, f(x, k, lam))
    (graph,) = graphs
    names = {str(node.target).rsplit(".", 1)[-1].split(" ")[0] for node in graph.graph.nodes}
    assert "sort" in names
    assert (
        100 < len(graph.graph.nodes) < 250
    )  # all of the few passes that follow the sort, and no more
    assert not names & set(WAITING), names


OPERATORS_OF_XLA = ("topk_mask", "topk", "topk_mag", "topk_sign")


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_jax_lowers_for_accelerators_without_a_custom_call(platform):
    """Rows for which there are no kernels."""
    jax = pytest.importorskip("jax")
    import sparsetopk.jax as sj

    x = jax.ShapeDtypeStruct((4, 20_000), "float32")
    for name in OPERATORS_OF_XLA:
        f = jax.jit(
            jax.value_and_grad(lambda x, name=name: (getattr(sj, name)(x, 5, 0.1) ** 2).sum())
        )
        text = jax.export.export(f, platforms=[platform])(x).mlir_module()
        assert "stablehlo.while" in text
        assert "stablehlo.custom_call" not in text
