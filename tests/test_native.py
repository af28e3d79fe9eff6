"""What the compiled kernels must get right beyond the case table; `make sanitize` looks much harder."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import sparsetopk.torch as stt
from levels import printed_at_all_levels
from sparsetopk._core import native

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
KERNELS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("two_sided", [False, True])
def test_nothing_is_selected_for_k_0_though_an_entry_is_infinite(two_sided):
    x = torch.tensor([np.inf, 1.0, -np.inf, 2.0])
    assert stt.topk_mask(x, 0, 0.1, two_sided=two_sided).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("dtype", KERNELS)
def test_minus_zero_counts_as_zero(dtype):
    x = torch.tensor([-0.0, 0.0, 2.0, -3.0], dtype=dtype)
    assert stt.topk_sign(x, 4, 0.0).tolist() == [1, 1, 1, -1]


@pytest.mark.parametrize("dtype", KERNELS)
@pytest.mark.parametrize("p", [2.0, 1.5, 4 / 3])
def test_almost_everything_is_selected(dtype, p):
    """Where the two-sided responses are flat one more step of Newton's method may lead far away."""
    x = torch.tensor([1.0, -0.5] * 8, dtype=dtype)
    y = stt.topk_mask(x, 16 - 1e-9, 1.0, p=p, two_sided=True)
    assert abs(float(y.double().sum()) - 16) <= 16 * torch.finfo(dtype).eps + 1e-6


def test_lam_as_small_as_numbers_get():
    lam = 5e-324
    x = torch.tensor([3.0, 2.0, 2.0, 0.0], dtype=torch.float64) * lam
    for two_sided in (False, True):
        y = stt.topk_mask(x, 1.5, lam, two_sided=two_sided)
        np.testing.assert_allclose(float(y.sum()), 1.5, rtol=1e-12)


@pytest.mark.parametrize("p", [4 / 3, 3.0])
def test_magnitudes_near_the_largest_number(p):
    x = torch.tensor([1.7e308, -1.79e308, 1.0], dtype=torch.float64)
    for debias in (False, True):
        y = stt.topk_mag(x, 2, 1e-3, p=p, debias=debias)
        assert torch.isfinite(y).all()
        assert (y.abs() <= x.abs()).all()


def run_python(code: str, timeout: float = 60) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        timeout=timeout,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout


@pytest.mark.slow
def test_calls_end_where_subnormal_numbers_are_flushed():
    """The boundary lies just above many zeros: the number after 0 must not be one that counts as 0."""
    run_python(
        """
        import torch, sparsetopk.torch as st
        torch.set_flush_denormal(True)
        torch.manual_seed(0)
        for n in (300, 1024, 5000):
            for k in range(1, n // 2, 7):
                x = torch.where(torch.rand(n) < 0.7, 0.0, torch.randn(n))
                y = st.topk_mask(x, k, 1e-3)
                assert abs(float(y.sum()) - k) <= 1e-6 * k + 1e-6
        """
    )


@pytest.mark.slow
def test_subnormal_halves_count_where_subnormal_numbers_are_flushed():
    """They are normal numbers in the float32 that the kernels compute in."""
    run_python(
        """
        import torch, sparsetopk.torch as st

        bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
        halves = bits.view(torch.float16)
        halves = halves[halves.isfinite()]
        x = torch.tensor([4e-5, 1e-5, -3e-5, 2e-5, 5e-5], dtype=torch.float16)

        def results():
            yield st.topk_mag(halves, len(halves), 0.0)
            yield st.topk_mag(halves, len(halves), 1.0, p=1.5)
            yield st.topk_mask(halves, 1000, 1.0)
            yield st.topk_sign(x, 3, 0.0)
            for operator in (st.topk_mask, st.topk_mag):
                for lam in (0.0, 1e-5, 1.0):
                    at = x.clone().requires_grad_()
                    y = operator(at, 2, lam)
                    yield y.detach()
                    yield torch.autograd.grad(y, at, torch.full_like(y, 4e-5))[0]
            y = st.topk_mag(x, 4, 0.0)
            yield torch.stack(st.topk_select(y, 2)[:1])

        expected = list(results())
        for all_of_them in expected[:2]:
            assert all_of_them.view(torch.int16).equal((halves + 0).view(torch.int16))
        assert expected[4].tolist() == [1, 0, 0, 0, 1]
        torch.set_flush_denormal(True)
        for found, wanted in zip(results(), expected, strict=True):
            assert torch.equal(found.view(-1), wanted.view(-1)), (found, wanted)
        """
    )


_SIXTEEN_BITS = """
import torch, sparsetopk.torch as st
generator = torch.Generator().manual_seed(0)
for dtype in (torch.float16, torch.bfloat16):
    for n in (7, 33, 1025):
        x = torch.randn(40, n, generator=generator).to(dtype).requires_grad_()
        for p in (2.0, 1.5, 1.2):
            y = st.topk_mag(x, n / 3, 0.1, p=p), st.topk_mask(x, 2.5, 0.1, p=p, two_sided=True)
            g = (3e4 * x.detach()).clamp(-6e4, 6e4)
            dx = [torch.autograd.grad(one, x, g)[0] for one in y]
            for found in (*y, *dx):
                assert found.isfinite().all()
                print(found.detach().view(torch.int16).numpy().tobytes().hex())
"""


def test_16_bits_are_the_same_at_all_levels():
    """Halves are converted by the processor where it can."""
    (found,) = printed_at_all_levels(_SIXTEEN_BITS)
    assert found.count("\n") == 72


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "n"), [(3000, 7), (70, 300), (2, 20_000)])
@pytest.mark.parametrize("p", [1.5, 1.2, 3.0])
@pytest.mark.parametrize("name", ["topk_mask", "two-sided", "topk_mag", "topk_sign", "topk_loss"])
def test_16_bits_that_are_widened(name, p, rows, n, dtype):
    """Beside float32, with k and lam for each row, rows that are apart, and large cotangents."""
    generator = torch.Generator().manual_seed(rows)
    wide = torch.randn(rows, n + 3, generator=generator).to(dtype)
    k, lam = 1 + 4 * torch.rand(2, rows, 1, generator=generator)
    labels = torch.randint(n, (rows,), generator=generator)

    def found(to):
        x = wide.to(to)[:, :n].requires_grad_()
        numbers = k.clone().requires_grad_(), lam.clone().requires_grad_()
        if name == "topk_loss":
            y = stt.topk_loss(x, labels, 3, 0.3, p=p, reduction="none")
            return y, *torch.autograd.grad(y.sum(), x)
        operator = getattr(stt, "topk_mask" if name == "two-sided" else name)
        options = {"two_sided": True} if name == "two-sided" else {}
        y = operator(x, *numbers, p=p, **options)
        return y, *torch.autograd.grad(y, (x, *numbers), 8 * x.detach())

    epsilon = torch.finfo(dtype).eps
    for narrow, expected in zip(found(dtype), found(torch.float32), strict=True):
        assert narrow.isfinite().all()
        limit = torch.finfo(dtype).max if narrow.dtype == dtype else torch.inf
        expected = expected.clamp(-limit, limit)
        room = 1e-6 * expected.abs().max() if narrow.dtype == torch.float32 else 1e-7
        torch.testing.assert_close(narrow.float(), expected, rtol=epsilon, atol=float(room))


@pytest.mark.slow
def test_entries_at_0_are_not_selected_whole_where_subnormal_numbers_are_flushed():
    run_python(
        """
        import torch, sparsetopk.torch as st

        torch.set_flush_denormal(True)
        for p in (2.0, 4 / 3):
            for debias in (False, True):
                x = torch.tensor([0.0, 2.0, 0.0, 0.0], dtype=torch.float64, requires_grad=True)
                st.topk_mag(x, 2, 1.0, p=p, debias=debias).sum().backward()
                assert x.grad[[0, 2, 3]].tolist() == [0, 0, 0], x.grad
        """
    )


@pytest.mark.slow
def test_threads_flush_subnormal_numbers_where_the_caller_does():
    """All rows are the same, and so must their outputs be, whichever thread they fall to."""
    run_python(
        """
        import torch, sparsetopk.torch as st
        torch.set_num_threads(2)
        row = torch.tensor([1e-40, -1e-40, 1.0, 1.0, 2.0, -2.0, 1e-45])
        st.topk_mask(row.repeat(60_000, 2), 9, 0.0)  # threads begin with what their maker has
        torch.set_flush_denormal(True)
        for operator in (st.topk_mask, st.topk_mag):
            for _ in range(20):
                x = row.repeat(60_000, 2).requires_grad_()
                y = operator(x, 9, 0.0)
                y.sum().backward()
                for found in (y.detach(), x.grad):
                    bits = found.view(torch.int32)
                    assert (bits == bits[0]).all(), found.unique(dim=0)
        """
    )


@pytest.mark.slow
def test_results_do_not_depend_on_the_number_of_threads():
    """Many rows, which threads share, and one long row, which they share in blocks."""
    run_python(
        """
        import torch, sparsetopk.torch as st
        torch.manual_seed(0)
        for shape in ((300, 400), (2, 70000), (1, 300000)):
            for operator in (st.topk_mask, st.topk_mag, st.topk_sign, st.soft_rank):
                if operator is st.soft_rank and shape[1] > 1000:
                    continue
                args = (0.1,) if operator is st.soft_rank else (shape[1] / 7, 0.1)
                x, g = torch.randn(2, *shape)
                found = []
                for threads in (1, 2, 3, 4):
                    torch.set_num_threads(threads)
                    at = x.clone().requires_grad_()
                    y = operator(at, *args)
                    found.append((y.detach(), *torch.autograd.grad(y, at, g)))
                for y, dx in found[1:]:
                    assert torch.equal(y, found[0][0]) and torch.equal(dx, found[0][1])
        """
    )


@pytest.mark.parametrize("p", [1.05, 1.1, 1.2, 1.7])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_what_little_the_block_has_is_not_within_a_tolerance_of_k(p, dtype):
    """Of ties and one entry below them, which has 1e-6: a step from there, where S is flat, is long."""
    for n in (5, 33, 400, 3000):
        x = np.round(2 * np.random.default_rng(n).normal(size=(20, n))) / 2
        k = np.full((20, 1), n - 1.0)
        k[::2] = 1 + 2.0**-20
        for two_sided in (False, True):
            at = [torch.from_numpy(v) for v in (x.astype(dtype), k)]
            y = stt.topk_mask(*at, 1.0, p=p, two_sided=two_sided).double().numpy()
            rounding = np.finfo(dtype).eps * np.abs(y).sum(-1, keepdims=True)
            assert np.all(np.abs(y.sum(-1, keepdims=True) - k) <= rounding + 1e-9)


@pytest.mark.parametrize("dtype", KERNELS)
@pytest.mark.parametrize("n", [1025, 5000, 65537, 140_000])
@pytest.mark.parametrize("share", [0.001, 0.02, 0.2, 0.4, 0.9])
@pytest.mark.parametrize("where", ["first", "last", "spread", "middle"])
def test_the_derivative_wherever_the_block_is(dtype, n, share, where):
    """A block is noted in dx between the passes, if there is room: before what it is overwritten by."""
    rng = np.random.default_rng(0)
    size = max(int(share * n), 2)
    inside = rng.permutation(np.arange(1, size + 1)) / (size + 1) / 2 + 1
    x = np.where(rng.random(n) < 0.5, 4.0, -4.0)
    begin = {"first": 0, "last": n - size, "middle": (n - size) // 3, "spread": 0}[where]
    at = np.sort(rng.permutation(n)[:size]) if where == "spread" else begin + np.arange(size)
    x[at] = inside
    k = float(np.count_nonzero(x == 4.0)) + size / 2
    x = torch.tensor(x, dtype=dtype, requires_grad=True)
    g = torch.full((n,), torch.nan, dtype=dtype)  # where there is no derivative, g is not looked at
    g[at] = torch.tensor(rng.normal(size=size), dtype=dtype)
    (dx,) = torch.autograd.grad(stt.topk_mask(x, k, 1.0), x, g)
    entries, cotangents = x.detach().double()[at], g.double()[at]
    # With all of these strictly in the block, the threshold is where they have half of their number.
    assert (entries - entries.mean()).abs().max() < 0.5
    expected = torch.zeros(n, dtype=torch.float64)
    expected[at] = cotangents - cotangents.mean()
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(dx.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", KERNELS)
@pytest.mark.parametrize("n", [1025, 5000, 140_000])
@pytest.mark.parametrize("share", [0.01, 0.2, 0.8])
def test_the_derivative_in_x_is_the_same_with_that_in_k(dtype, n, share):
    """Alone it reads less of x, also where many entries are at the ends of the block."""
    rng = np.random.default_rng(0)
    inside = rng.random(n) < share
    x = np.where(inside, rng.choice([0.25, 0.75], n), rng.choice([-1.0, 0.0, 1.0, 2.0], n))
    k = np.clip(x, 0, 1).sum()
    g = torch.tensor(rng.normal(size=n), dtype=dtype)
    found = []
    for asked in (float(k), torch.tensor(k, dtype=torch.float64, requires_grad=True)):
        at = torch.tensor(x, dtype=dtype, requires_grad=True)
        found.append(torch.autograd.grad(stt.topk_mask(at, asked, 1.0), at, g)[0])
    assert torch.equal(*found)
    assert (found[0][torch.from_numpy(inside)] != 0).any()
    assert (found[0][torch.from_numpy((x < 0) | (x > 1))] == 0).all()


def against_even_probes(n: int) -> np.ndarray:
    """The entries at even distances, of the row and of what is left when they are dropped, are always
    the smallest ones: who cuts at one of them drops no others."""
    x, count = np.full(n, np.inf), 0
    left, step, most = np.arange(n), max(n // min(max(n // 64, 256), 4096), 1), 4096
    start = step // 2
    for _ in range(60):
        if len(left) < 1100:
            break
        probes = left[start::step][:most]
        new = probes[np.isinf(x[probes])]
        x[new] = count + np.arange(len(new))
        count += len(new)
        left = left[x[left] >= count - 1]
        start, step, most = 0, len(left) // 63, 64
    rest = np.isinf(x)
    x[rest] = count + np.random.default_rng(0).permutation(np.count_nonzero(rest))
    return x


def outliers_of_every_size(n: int, dtype: str) -> np.ndarray:
    """Most entries are 1, and whatever digit of the others is looked at, few differ from 1 in it."""
    rng, scale, tiny = np.random.default_rng(0), np.ones(n), np.finfo(dtype).tiny
    for bits in range(np.finfo(dtype).nmant):
        scale[rng.integers(0, n, 40)] += 2.0**-bits
    scale[rng.permutation(n)[:6]] = [4 * tiny, -4 * tiny, 1 / tiny, -1 / tiny, -1.0, 2.0]
    return scale


def rows_of_any_kind(n: int, dtype: str) -> Iterator[tuple[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    i, normal = np.arange(n), rng.normal(size=n)
    step, period = n // min(max(n // 64, 256), 4096), max(n // 4096, 2)
    nested = outliers_of_every_size(n, dtype)
    yield "normal", normal
    yield "against even probes", against_even_probes(n)
    yield "sorted", np.sort(normal)
    yield "reversed", np.sort(normal)[::-1]
    yield "geometric", np.maximum(0.99**i, np.finfo(dtype).tiny)
    yield "Cantor's set", sum((i >> b & 1) * 2 * 3.0 ** -(b + 1) for b in range(20))
    yield "near ties", 1 + rng.integers(0, 4, n) * np.finfo(dtype).eps
    yield "constant", np.full(n, 0.7)
    yield "a low channel", normal - 10 * (i % period == period // 2)
    yield "saw teeth", i % step / step + 1e-3 * normal
    yield "heavy tails", rng.standard_cauchy(n)
    yield "any size", np.clip(normal * np.exp(100 * normal), -1e37, 1e37)
    yield "outliers of every size", nested
    yield "with padding", np.where(rng.random(n) < 0.3, -np.inf, nested)
    yield "zeros where even probes are", np.where(i % step == step // 2, 0.0, normal)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("n", [4096, 65536, 1 << 20])
def test_no_row_is_read_more_often_than_eight_times(n, dtype):
    """To find its k boundary. A short one may be read three times more; see csrc/threshold.hpp."""
    most = 8 * n + 12288 if n > 8192 else 11 * n + 8192
    for name, row in rows_of_any_kind(n, dtype):
        x = torch.from_numpy(row.astype(dtype))
        operators = (stt.topk_mask, stt.topk_mag) if x.isfinite().all() else (stt.topk_mask,)
        for operator, lam, k in product(operators, (0.0, 1e-3, 0.1), (3, n // 8, n // 2 - 1)):
            native.entries_read()
            operator(x, k, lam)
            read = native.entries_read()
            assert 0 < read <= most, (name, operator.__name__, lam, k, read / n)


def entries_read(x: np.ndarray, k: float) -> int:
    native.entries_read()
    stt.topk_mask(torch.from_numpy(x.copy()), k, 1e-3)
    return native.entries_read()


def test_channels_of_any_width_cost_no_pass():
    """Where a row is looked at first depends on what is in it, and not on where it is."""
    n = 1 << 18  # an even sample would have distances of 64
    normal = np.random.default_rng(0).normal(size=n)
    assert entries_read(against_even_probes(n), 3) <= 1.5 * n
    for width in (16, 32, 63, 64, 65, 128, 4096):
        channel = np.arange(n) % width
        teeth = channel / width + 1e-3 * normal
        rows = [teeth, *(normal - 10 * (channel == low) for low in (0, width // 2, width - 1))]
        for row, k in product(rows, (n // 100, n // 9)):
            assert entries_read(row, k) <= 1.5 * n, (width, k)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("n", [1500, 8193, 65536])
def test_the_boundary_is_exact_in_any_row(n, dtype):
    for name, row in rows_of_any_kind(n, dtype):
        x = row.astype(dtype)
        for k in (1, 3, n // 8, n // 4 - 0.5, n // 2 - 1):
            y = stt.topk_mask(torch.from_numpy(x), k, 0.0).numpy()
            boundary = np.sort(x)[n - int(np.ceil(k))]
            assert y.astype(np.float64).sum() == k, (name, k)
            assert (y[x > boundary] == 1).all(), (name, k)
            assert (y[x < boundary] == 0).all(), (name, k)


@pytest.mark.slow
@needs_fork
def test_forked_workers_may_use_several_threads():
    """As the workers of a DataLoader: the threads of the parent are gone, and its locks may be held."""
    run_python(
        """
        import multiprocessing
        import torch, sparsetopk.torch as st

        x = torch.randn(200, 1000)

        def worker(_):
            torch.set_num_threads(4)
            y = st.topk_mask(x, 10, 0.1).numpy()  # torch's own threads do not survive a fork
            return bool(abs(y.sum(-1) - 10).max() < 1e-4)

        torch.set_num_threads(4)
        assert worker(None)
        with multiprocessing.get_context("fork").Pool(2) as workers:
            assert all(workers.map(worker, range(8)))
        """
    )


@pytest.mark.slow
@needs_fork
def test_fork_while_another_thread_is_at_work():
    run_python(
        """
        import os, threading, warnings
        os.environ["SPARSETOPK_THREADS"] = "4"
        import numpy as np, sparsetopk as st

        warnings.simplefilter("ignore", DeprecationWarning)  # that there are threads is the point
        x = np.random.default_rng(0).normal(size=(200, 1000))
        expected = st.topk_mask(x, 10, 0.1)
        done = threading.Event()

        def work():
            while not done.is_set():
                st.topk_mask(x, 10, 0.1)

        thread = threading.Thread(target=work)
        thread.start()
        for _ in range(20):
            child = os.fork()
            if child == 0:
                os._exit(0 if np.array_equal(st.topk_mask(x, 10, 0.1), expected) else 1)
            assert os.waitpid(child, 0)[1] == 0
        done.set()
        thread.join()
        """
    )


_IN_ANOTHER_INTERPRETER = """
import importlib.machinery, importlib.util, array
loader = importlib.machinery.ExtensionFileLoader("sparsetopk._core._native", {path!r})
spec = importlib.util.spec_from_file_location(loader.name, loader.path, loader=loader)
core = importlib.util.module_from_spec(spec)
loader.exec_module(core)
x, y, k, lam = (array.array("d", v) for v in ([3.0, 1.0, 0.95], [0.0] * 3, [2.0], [0.1]))
at = [v.buffer_info()[0] for v in (x, k, lam, y)]
core.threshold_forward(0, 1.0, False, {dtype}, 1, 3, 3, at[0], at[1], 0, at[2], 0, 0, at[3], 2)
print(*(round(v, 9) for v in y))
"""


def test_subinterpreters_have_a_core_of_their_own():
    """Made and ended while the first one goes on. (A NumPy that is in one interpreter of a process only
    makes the import of the package an error elsewhere.)"""
    code = """
    import numpy as np
    import sparsetopk
    from sparsetopk._core import layout, native
    try:
        import _interpreters as interpreters
        make, run = lambda: interpreters.create("legacy"), interpreters.run_string
    except ImportError:
        import _xxsubinterpreters as interpreters
        make, run = interpreters.create, interpreters.run_string

    x = np.random.default_rng(0).normal(size=(500, 64))
    expected = sparsetopk.topk_mask(x, 3, 0.1)
    for _ in range(3):
        other = make()
        run(other, SOURCE.format(path=native.__file__, dtype=layout.DTYPES["float64"]))
        run(other, "try: import sparsetopk\\nexcept ImportError: pass")
        interpreters.destroy(other)
        assert np.array_equal(sparsetopk.topk_mask(x, 3, 0.1), expected)
    """
    code = f"SOURCE = {_IN_ANOTHER_INTERPRETER!r}\n" + textwrap.dedent(code)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split("\n")[:-1] == 3 * ["1.0 0.75 0.25"]


@pytest.mark.parametrize(
    "call",
    [
        "argsort_descending(8, 1, 1 << 58, 64, 64)",
        "solve_isotonic(0, 1.0, 1, 1 << 58, 64, 64, 64, 64, 64)",
        "solve_permutahedron(0, 1.0, 1 << 58, 1, 8, 64, 1, 8, 64, 64, 64, 64, 64, 1)",
        "permutahedron_forward(1.0, 4, 1, 1 << 58, 1, 64, 1, 4, 64, 64, 64, 0, 0, 0, 0, 1)",
        "pieces_block_sums(64, 1 << 56, 1, 1.0, False, 1.0, 1.0, 0.0, 0.0, False, 64)",
        "pieces_masses(64, 1 << 56, 1, 1.0, False, 1.0, 1.0, 0.0, 0.0, False)",
    ],
)
def test_memory_that_cannot_be_had_is_an_error_of_python(call):
    """Asked for before anything is read: no address is looked at, and later calls work."""
    run_python(
        f"""
        import numpy as np, sparsetopk as st
        from sparsetopk._core import native

        try:
            native.{call}
        except MemoryError:
            pass
        else:
            raise AssertionError("no MemoryError")
        assert st.argsort(np.array([1.0, 3.0, 2.0])).tolist() == [1, 2, 0]
        """
    )


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited as Linux does it")
def test_memory_that_runs_out_is_an_error_of_python():
    run_python(
        """
        import resource
        import numpy as np, sparsetopk as st

        x = np.random.default_rng(0).normal(size=4_000_000)
        st.argsort(x[:10]), st.soft_rank(x[:10], 0.1)
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 100_000_000, -1))
        for call in (st.argsort, lambda x: st.soft_rank(x, 0.1)):
            try:
                call(x)
            except MemoryError:
                continue
            raise AssertionError("no MemoryError")
        assert st.argsort(np.array([1.0, 3.0, 2.0])).tolist() == [1, 2, 0]
        """
    )


def test_a_core_from_other_sources_is_refused():
    from sparsetopk._core import layout, native

    found = native.layout()
    layout.check(found)
    offsets = (*found["piece"][:-1], 4)
    for name, other in (("buckets", 512), ("piece", offsets), ("dtypes", (0, 1, 3, 2))):
        with pytest.raises(RuntimeError, match=f"got another {name};"):
            layout.check({**found, name: other})


@pytest.mark.parametrize("n", [8, 100, 129, 1000])
@pytest.mark.parametrize(("op", "exponent"), [(0, 1.0), (0, 2.0), (0, 0.5), (1, 1.0), (3, 2.0)])
def test_a_state_has_no_sign_of_zero(op, exponent, n):
    """Whether the largest of a row is 0 or -0 depends on the instruction set; no bit of a result may."""
    rng = np.random.default_rng(n)
    rows, of_zeros = 37, rng.choice([0.0, -0.0], size=(37, n))
    x = np.where(rng.random((rows, n)) < 0.7, of_zeros, rng.normal(size=(rows, n)))
    k, lam = (rng.choice(v, size=rows).astype(float) for v in ([1, 3.5, n // 2], [0, 0.1, 100]))
    y, state = np.empty_like(x), np.empty((rows, 2))
    at_x, at_k, at_lam, at_state, at_y = (v.ctypes.data for v in (x, k, lam, state, y))
    native.threshold_forward(
        op, exponent, False, 1, rows, n, n, at_x, at_k, 1, at_lam, 1, at_state, at_y, 1
    )
    assert (state == 0).any()
    assert not np.signbit(state[state == 0]).any()
