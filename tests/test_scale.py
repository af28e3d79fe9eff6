"""Rows over many processes: equal to those of one process, by few messages of a fixed size."""

import datetime
import os
import traceback

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

import sparsetopk.torch as st  # noqa: E402
from sparsetopk.torch import multi  # noqa: E402

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo"
)
F64 = torch.float64


def equal(found, expected, tolerance=1e-10):
    """To rounding, in units of the largest number."""
    finite = expected[expected.isfinite()].abs()
    scale = max(1e-300, float(finite.max())) if finite.numel() else 1.0
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
        for name in ("normal", "ties", "cauchy", "sorted"):
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


# --------------------------------------------------------------------------- starting the processes

CHECKS = {
    2: [
        multi_equals_one_process,
        multi_in_few_messages,
        multi_special,
        multi_errors,
    ],
    4: [
        multi_equals_one_process,
        multi_in_few_messages,
        multi_special,
    ],
}


def _run(rank, size, store, queue):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the name of the machine need not be known
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=store,
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=120),
    )
    for check in CHECKS[size]:
        try:
            check(dist.group.WORLD)
            queue.put((rank, check.__name__, None))
        except BaseException:
            queue.put((rank, check.__name__, traceback.format_exc()))
            break
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What every check said on every rank; each number of processes is started once."""
    found = {}

    def run(size):
        if size not in found:
            store = f"file://{tmp_path_factory.mktemp('store')}/store"
            found[size] = start(_run, size, store, len(CHECKS[size]))
        return found[size]

    return run


def start(target, size, store, messages, timeout=300):
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    workers = [
        context.Process(target=target, args=(rank, size, store, queue)) for rank in range(size)
    ]
    for worker in workers:
        worker.start()
    found = {}
    for _ in range(size * messages):
        rank, name, error = queue.get(timeout=timeout)
        found[rank, name] = error
        if error is not None:
            break
    for worker in workers:
        worker.join(timeout=5 if any(found.values()) else timeout)
        worker.kill()
    return found


@pytest.mark.parametrize(
    ("size", "name"), [(size, f.__name__) for size, checks in CHECKS.items() for f in checks]
)
def test_in_processes(results, size, name):
    found = results(size)
    errors = [
        f"on rank {rank}:\n{error}" for (rank, n), error in found.items() if n == name and error
    ]
    assert not errors, "\n".join(errors)
    assert all((rank, name) in found for rank in range(size)), "a check before it failed"
