"""Times of the PyTorch front-end, as ratios of minima in one run.

One thread, float32, N(0, 1) input, lam = 0.1. Against ``torch.topk`` (forward, unsorted), which a user
would call instead, against ``x.clone()``, which allocates and copies as every operator must, and, where
they are installed, against entmax and torchsort. The contestants of one line take turns of a few calls
each, so that a busy machine slows all of them. A large tensor is allocated and freed first: without it,
the C library hands memory back to the system between calls, and all that is new is timed as pages that
the system fills with 0. Writes tables, and with ``--json FILE`` the numbers.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import sparsetopk
import sparsetopk.torch as st
from sparsetopk._core import native

SHAPES = [
    (65536, 8, 2),
    (4096, 100, 3),
    (1024, 400, 28),
    (128, 4096, 410),
    (16, 65536, 64),
    (1, 1 << 20, 131_072),
    (1, 1 << 20, 64),
    (1, 10_000_000, 1_000_000),
    (1, 1000, 10),
]
LAM = 0.1


def best(contestants: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Minimum time of each in milliseconds, over rounds in which all of them take their turn.

    Each is called once before: the first backward of a process imports a part of torch for seconds,
    which would leave the time for a single round, on fresh memory.
    """
    times = dict.fromkeys(contestants, float("inf"))
    for f in contestants.values():
        f()
    end = time.perf_counter() + seconds * len(contestants)
    while time.perf_counter() < end:
        for name, f in contestants.items():
            for _ in range(5):
                start = time.perf_counter()
                f()
                times[name] = min(times[name], 1e3 * (time.perf_counter() - start))
    return times


def gradient(f: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Callable[[], object]:
    """Forward and backward of f at x, with a cotangent that is there already."""
    x = x.clone().requires_grad_()
    g = torch.randn_like(f(x))
    return lambda: torch.autograd.grad(f(x), x, g)


def backward(f: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Callable[[], object]:
    x = x.clone().requires_grad_()
    y = f(x)
    g = torch.randn_like(y)
    return lambda: torch.autograd.grad(y, x, g, retain_graph=True)


def mask(k: int, **options: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: st.topk_mask(x, k, LAM, **options)


def inputs(rows: int, n: int) -> dict[str, torch.Tensor]:
    """What is not like a normal distribution."""
    normal, at = torch.randn(rows, n), torch.arange(n).expand(rows, n)
    return {
        "Cauchy": torch.empty(rows, n).cauchy_(),
        "equal": torch.full((rows, n), 0.7),
        "two-valued": (torch.rand(rows, n) > 0.5).float(),
        "sorted": normal.sort(dim=-1).values,
        "saw-tooth": (at % 64) / 64 + normal / 1000,
        "geometric": torch.exp2(-(at % 120).float()),
        "near ties": 1 + normal * 1e-6,
    }


def accuracy(x: torch.Tensor, k: int) -> dict[str, float]:
    """|sum(y) - k| beyond what is allowed, and the difference to float64 in roundings of t."""
    y, exact = st.topk_mask(x, k, LAM), st.topk_mask(x.double(), k, LAM)
    sums = (y.double().sum(dim=-1) - k).abs() / (1e-6 * k + 1e-6)
    largest_t = (x.abs().amax() / LAM).item()
    roundings = (y - exact).abs().max().item() / (largest_t * torch.finfo(torch.float32).eps)
    return {"sum / allowed": sums.max().item(), "roundings of t": roundings}


def shape_table(seconds: float) -> list[dict[str, Any]]:
    rows_of_table = []
    print("\ntopk_mask, p = 2, against torch.topk and x.clone()")
    print(f"{'':24s} forward  f + b   forward  backward   sum error  roundings")
    print(f"{'':24s} of torch.topk    of x.clone()        / allowed  of t")
    for rows, n, k in SHAPES:
        x, f = torch.randn(rows, n), mask(k)
        times = best(
            {
                "topk": lambda x=x, k=k: torch.topk(x, k, sorted=False),
                "clone": x.clone,
                "forward": lambda f=f, x=x: f(x),
                "forward + backward": gradient(f, x),
                "backward": backward(f, x),
            },
            seconds,
        )
        quality = accuracy(x, k)
        forward, both = (
            times["forward"] / times["topk"],
            times["forward + backward"] / times["topk"],
        )
        against_clone = [times[name] / times["clone"] for name in ("forward", "backward")]
        print(
            f"{f'{rows} x {n}, k = {k}':24s} {forward:6.2f} {both:7.2f}  {against_clone[0]:7.2f}"
            f" {against_clone[1]:8.2f} {quality['sum / allowed']:10.3f}"
            f" {quality['roundings of t']:11.3f}",
            flush=True,
        )
        rows_of_table.append({"rows": rows, "n": n, "k": k, "ms": times, **quality})
    return rows_of_table


def operator_table(seconds: float) -> list[dict[str, Any]]:
    results = []
    print("\nforward of others and on other inputs, over topk_mask with p = 2 on N(0, 1)")
    names = ["lam=0", "p=4/3", "two-sided 3/2", "topk_mag", *inputs(1, 1)]
    print(f"{'':24s}" + "".join(f"{name:>14s}" for name in names))
    for rows, n, k in SHAPES:
        x, f = torch.randn(rows, n), mask(k)
        contestants: dict[str, Callable[[], object]] = {
            "p=2": lambda f=f, x=x: f(x),
            "lam=0": lambda x=x, k=k: st.topk_mask(x, k, 0.0),
            "p=4/3": lambda x=x, k=k: st.topk_mask(x, k, LAM, p=4 / 3),
            "two-sided 3/2": lambda x=x, k=k: st.topk_mask(x, k, LAM, p=1.5, two_sided=True),
            "topk_mag": lambda x=x, k=k: st.topk_mag(x, k, LAM),
        }
        for name, z in inputs(rows, n).items():
            contestants[name] = lambda f=f, z=z: f(z)
        times = best(contestants, seconds)
        ratios = "".join(f"{times[name] / times['p=2']:14.2f}" for name in names)
        print(f"{f'{rows} x {n}, k = {k}':24s}{ratios}", flush=True)
        results.append({"rows": rows, "n": n, "k": k, "ms": times})
    return results


SMALL = [(1, 100, 10), (8, 128, 8), (1, 1000, 10), (64, 1000, 10), (65536, 8, 2), (1024, 400, 28)]


def hard_table(seconds: float) -> list[dict[str, Any]]:
    """From which size on the relaxed top-k costs less than the hard one, without and with a backward."""
    results = []
    print("\ntopk_mask over torch.topk, each forward, and each forward + backward")
    for rows, n, k in SMALL:
        x, f = torch.randn(rows, n), mask(k)
        hard = lambda x, k=k: torch.topk(x, k, sorted=False).values  # noqa: E731
        contestants = {"hard": hard, "relaxed": f}
        both = {f"{name} f + b": gradient(f, x) for name, f in contestants.items()}
        alone = {name: lambda f=f, x=x: f(x) for name, f in contestants.items()}
        times = best({**alone, **both}, seconds)
        forward, with_backward = (
            times[f"relaxed{what}"] / times[f"hard{what}"] for what in ("", " f + b")
        )
        print(f"{f'{rows} x {n}, k = {k}':24s} {forward:6.2f} {with_backward:7.2f}", flush=True)
        results.append({"rows": rows, "n": n, "k": k, "ms": times})
    return results


_library = torch.library.Library("sparsetopk_benchmark", "DEF")
_library.define("copy(Tensor x) -> (Tensor, Tensor)")
_library.define("copy_backward(Tensor x, Tensor state, Tensor g) -> Tensor")
for device in ("CPU", "Meta"):
    _library.impl("copy", lambda x: (x.clone(), x.new_empty(len(x), 2)), device)
    _library.impl("copy_backward", lambda x, state, g: g.clone(), device)


class _Copy(torch.autograd.Function):
    """What every operator of torch.library costs that is called from Python, reads x, writes y, keeps
    x and some numbers, and has an operator as its derivative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y, state = torch.ops.sparsetopk_benchmark.copy(x)
        ctx.save_for_backward(x, state)
        return y

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return torch.ops.sparsetopk_benchmark.copy_backward(*ctx.saved_tensors, g)


def _chain(x: torch.Tensor, k: int) -> torch.Tensor:
    """Twelve operators in one graph: what a call of the graph costs is shared, as it is in a model."""
    for _ in range(12):
        x = st.topk_mask(x, k, LAM)
    return x


def compiled_table(seconds: float) -> list[dict[str, Any]]:
    """Eager and compiled side by side, with an operator that only copies."""
    results = []
    print("\neager and compiled, in milliseconds; seconds to compile forward and backward")
    print(f"{'':34s} forward          forward + backward    compile")
    for rows, n, k in ((64, 1000, 10), (4096, 64, 8), (16, 65536, 64)):
        x, labels = torch.randn(rows, n), torch.randint(n, (rows,))
        contestants: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "copy": _Copy.apply,
            "topk_mask": mask(k),
            "topk_mag": lambda x, k=k: st.topk_mag(x, k, LAM),
            "topk_select": lambda x, k=k: st.topk_select(x, k, LAM).values,
            "topk_loss": lambda x, k=k, t=labels: st.topk_loss(x, t, k),
            "soft_rank": st.soft_rank,
            "12 x mask": lambda x, k=k: _chain(x, k),
        }
        for name, f in contestants.items():
            torch._dynamo.reset()
            compiled = torch.compile(f, fullgraph=True)
            start = time.perf_counter()
            both = gradient(compiled, x)
            both()
            took = time.perf_counter() - start
            times = best(
                {
                    "forward": lambda f=f, x=x: f(x),
                    "compiled forward": lambda f=compiled, x=x: f(x),
                    "f + b": gradient(f, x),
                    "compiled f + b": both,
                },
                seconds,
            )
            ms = [f"{value:8.3f}" for value in times.values()]
            print(
                f"{f'{rows} x {n}':14s}{name:12s}{ms[0]} {ms[1]}   {ms[2]} {ms[3]}  {took:8.1f}",
                flush=True,
            )
            results.append({"rows": rows, "n": n, "k": k, "name": name, "ms": times, "s": took})
    return results


def overhead(seconds: float) -> dict[str, float]:
    """One call on 1 x 1000, over an operator that does nothing, through the same library."""
    _library.define("nothing(Tensor x) -> Tensor")
    _library.impl("nothing", torch.empty_like, "CPU")
    x = torch.randn(1, 1000)
    times = best(
        {
            "nothing": lambda: torch.ops.sparsetopk_benchmark.nothing(x),
            "topk_mask": lambda: st.topk_mask(x, 10, LAM),
            "torch.topk": lambda: torch.topk(x, 10, sorted=False),
        },
        seconds,
    )
    shown = ", ".join(f"{name} {1e3 * ms:.1f}" for name, ms in times.items())
    print(f"\none call on 1 x 1000, in microseconds: {shown}")
    return times


def lengths(seconds: float) -> list[dict[str, Any]]:
    """Forward over n, a tenth of the entries selected, with as many rows as make a million entries."""
    bisect, rank = _from_peer("entmax", "budget_bisect"), _from_peer("torchsort", "soft_rank")
    results = []
    print("\nforward, nanoseconds for each entry")
    for n in (8, 30, 100, 300, 1000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000):
        rows, k = max(1, 1_000_000 // n), max(1, n // 10)
        x = torch.randn(rows, n)
        contestants: dict[str, Callable[[], object]] = {
            "topk_mask": lambda x=x, k=k: st.topk_mask(x, k, LAM),
            "torch.topk": lambda x=x, k=k: torch.topk(x, k, sorted=False),
            "x.clone()": x.clone,
        }
        if n <= 1_000_000:
            contestants["soft_rank"] = lambda x=x: st.soft_rank(x)
            if bisect:
                contestants["entmax"] = lambda x=x, k=k: bisect(x / LAM, budget=k, n_iter=50)
            if rank:
                contestants["torchsort"] = lambda x=x: rank(x)
        times = best(contestants, seconds)
        each = {name: 1e6 * ms / x.numel() for name, ms in times.items()}
        print(
            f"{n:>11,d} " + ", ".join(f"{name} {ns:.3g}" for name, ns in each.items()), flush=True
        )
        results.append({"rows": rows, "n": n, "k": k, "ns": each})
    return results


def more_threads(seconds: float) -> list[dict[str, Any]]:
    """One thread over two: forward, and forward + backward."""
    results = []
    print("\none thread over two")
    for rows, n, k in ((64, 100, 3), (128, 4096, 410), (16, 65536, 64), (1, 1 << 20, 131_072)):
        x, f = torch.randn(rows, n), mask(k)
        calls = {"forward": lambda f=f, x=x: f(x), "forward + backward": gradient(f, x)}
        if rows == 1:
            calls["soft_rank"] = lambda x=x: st.soft_rank(x)
        contestants = {
            f"{name}, {threads}": _on_threads(call, threads)
            for name, call in calls.items()
            for threads in (1, 2)
        }
        times = best(contestants, seconds)
        ratios = {name: times[f"{name}, 1"] / times[f"{name}, 2"] for name in calls}
        shown = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
        print(f"{f'{rows} x {n}, k = {k}':24s} {shown}", flush=True)
        results.append({"rows": rows, "n": n, "k": k, "ms": times})
    torch.set_num_threads(1)
    return results


def _on_threads(call: Callable[[], object], threads: int) -> Callable[[], object]:
    def run() -> object:
        torch.set_num_threads(threads)
        return call()

    return run


def selections(seconds: float) -> list[dict[str, Any]]:
    """``topk_select`` over ``torch.topk`` and a gather, forward."""
    results = []
    print("\ntopk_select over torch.topk and a gather")
    for rows, n, k in ((8, 65536, 655), (4096, 100, 3)):
        x = torch.randn(rows, n)
        times = best(
            {
                "topk_select": lambda x=x, k=k: st.topk_select(x, k, LAM),
                "topk + gather": lambda x=x, k=k: x.gather(-1, torch.topk(x, k).indices),
            },
            seconds,
        )
        ratio = times["topk_select"] / times["topk + gather"]
        print(f"{f'{rows} x {n}, k = {k}':24s} {ratio:6.2f}", flush=True)
        results.append({"rows": rows, "n": n, "k": k, "ms": times})
    return results


def peers(seconds: float) -> dict[str, dict[str, float]]:
    """Forward + backward of what others have, over ours; those that are not installed are left out."""
    bisect = _from_peer("entmax", "budget_bisect")
    results: dict[str, dict[str, float]] = {}
    for rows, n, k in ((1, 1_000_000, 10_000), (64, 1000, 5)):
        x = torch.randn(rows, n)
        contestants = {"topk_mask": gradient(mask(k), x)}
        if bisect:
            contestants["entmax budget_bisect"] = gradient(
                lambda x, k=k, f=bisect: f(x / LAM, budget=k, n_iter=50), x
            )
        for name in ("soft_rank", "soft_sort"):
            both = {"": getattr(st, name), "torchsort ": _from_peer("torchsort", name)}
            for whose, f in both.items():
                if f:
                    contestants[f"{whose}{name}"] = gradient(f, x)
                    contestants[f"{whose}{name} forward"] = lambda x=x, f=f: f(x)
        times = results[f"{rows}x{n}"] = best(contestants, seconds)
        print(f"\n{rows} x {n}, k = {k}, forward + backward unless said otherwise")
        for name, ms in times.items():
            print(f"  {name:24s} {ms:10.2f} ms {ms / times['topk_mask']:8.1f} times topk_mask")
    return results


def _from_peer(module: str, name: str) -> Any:
    """A function of another library, None where it is not installed."""
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError:
        print(f"\n{module} is not installed, and left out")
        return None


_MEMORY = """
import torch, sparsetopk.torch as st
torch.set_num_threads(1)
def peak():
    status = open("/proc/self/status").read()
    return int(status.split("VmHWM:")[1].split()[0])
x = torch.randn(1, 10_000_000)
st.topk_mask(x[:, :1000], 10)
open("/proc/self/clear_refs", "w").write("5")  # the peak so far is forgotten
before = peak()
y = st.topk_mask(x, 1_000_000)
print(peak() - before)
"""


def memory() -> float | None:
    """Peak memory of a call on 1 x 10M beyond input and output, as a share of x; in a fresh process."""
    if sys.platform != "linux":
        return None
    out = subprocess.run(
        [sys.executable, "-c", _MEMORY], capture_output=True, text=True, check=True
    )
    share = (1024 * int(out.stdout) - 40e6) / 40e6
    print(f"\npeak memory beyond input and output at 1 x 10M: {100 * share:.1f} % of x")
    return share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each measurement")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    torch.empty(7_500_000)  # 30 MB; what is freed is kept from then on, up to twice as much
    level = native.simd_level() if native else "none"
    print(f"torch {torch.__version__}, kernels {level}, {arguments.threads} thread(s)")
    content = {
        "machine": platform.machine(),
        "kernels": level,
        "threads": arguments.threads,
        "versions": {"torch": torch.__version__, "sparsetopk": sparsetopk.__version__},
        "shapes": shape_table(arguments.seconds),
        "operators": operator_table(arguments.seconds),
        "hard": hard_table(arguments.seconds),
        "compiled": compiled_table(arguments.seconds),
        "overhead": overhead(arguments.seconds),
        "peers": peers(arguments.seconds),
        "lengths": lengths(arguments.seconds),
        "two threads": more_threads(arguments.seconds),
        "selection": selections(arguments.seconds),
        "memory beyond the output, share of x": memory(),
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
