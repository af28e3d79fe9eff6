"""One top-k over weights that are spread over tensors and processes, and a model of what it costs.

    python benchmarks/scale.py                       # 2e8 weights (10 GB of memory)
    python benchmarks/scale.py --weights 20000000    # small
    python benchmarks/scale.py --table               # of docs/scale.md, from results/scale.json

One process: against copying the weights, and against ``torch.topk`` of their concatenation. Then 1, 2
and 4 processes over gloo, each with its part of the weights: what is predicted from the time of one
process and from that of a collective, beside what is measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pruning import many_tensors

import sparsetopk
from sparsetopk._core import native
from sparsetopk.torch import topk_mag_multi

RESULTS = Path(__file__).parent / "results" / "scale.json"
TENSORS = 16  # of each process
KEEP, LAM = 0.1, 1e-4

# ------------------------------------------------------------------------------------- the cost model

BYTES = 8.0  # of a copied weight: four are read and four are written
# What was not measured here, for the table: an accelerator's memory in bytes per second, one hop of a
# network in seconds, and a link of it in bytes per second.
MEMORY, HOP, LINK = 2e12, 10e-6, 25e9
WEIGHTS = (1e9, 1e10, 1e11, 1e12)
DEVICES = (8, 64, 512, 4096)


def predicted(copies: float, copy: float, collectives: float) -> float:
    """Seconds: ``copies`` times what it takes to copy the weights of a device, and the collectives."""
    return copies * copy + collectives


def collectives(devices: int, sent: list[tuple[str, int]]) -> float:
    """Seconds, of messages up a tree of the devices and down again, or around (``all_gather``)."""
    hops = 2 * math.ceil(math.log2(devices)) * HOP
    numbers = sum(n * (devices if name == "all_gather" else 2) for name, n in sent)
    return len(sent) * hops + 8 * numbers / LINK


def table(content: dict[str, Any]) -> str:
    """Forward and backward of one global top-k in milliseconds, and of these the collectives."""
    copies, sent = content["copies"], content["processes"]["4"]["sent"]
    lines = ["| weights | " + " | ".join(f"{d} devices" for d in DEVICES) + " |"]
    lines.append("|---" * (len(DEVICES) + 1) + "|")
    for n in WEIGHTS:
        cells = []
        for devices in DEVICES:
            waits = {way: collectives(devices, sent[way]) for way in sent}
            copy = BYTES * n / devices / MEMORY
            total = sum(predicted(copies[way], copy, waits[way]) for way in sent)
            cells.append(f"{1e3 * total:.3g} ({1e3 * sum(waits.values()):.2g})")
        lines.append(f"| {n:.0e} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------- measured runs


def counted(run: Callable[[], object]) -> list[tuple[str, int]]:
    """The collectives of a call, with how many numbers a rank sends in each."""
    sent: list[tuple[str, int]] = []
    kept = {"all_reduce": dist.all_reduce, "all_gather": dist.all_gather}

    def counting(name: str) -> Callable[..., Any]:
        def call(out: Any, *arguments: Any, **options: Any) -> Any:
            sent.append((name, (out[0] if isinstance(out, list) else out).numel()))
            return kept[name](out, *arguments, **options)

        return call

    for name in kept:
        setattr(dist, name, counting(name))
    run()
    for name, f in kept.items():
        setattr(dist, name, f)
    return sent


def measure(rank: int, size: int, n: int, rounds: int, folder: str) -> None:
    """In a process of the group: seconds, as the slowest rank has them."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = f"file://{folder}/store{size}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    group = dist.group.WORLD
    torch.manual_seed(rank)
    weights = [torch.randn(n // size // TENSORS, requires_grad=True) for _ in range(TENSORS)]
    k = round(KEEP * size * sum(w.numel() for w in weights))
    gs = [w.detach() for w in weights]

    def forward() -> list[torch.Tensor]:
        return topk_mag_multi(weights, k, LAM, group=group)

    ys = forward()
    contestants = {
        "copy": lambda: [w.detach().clone() for w in weights],
        "forward": forward,
        "backward": lambda: torch.autograd.grad(ys, weights, gs, retain_graph=True),
    }
    times = {name: together(f, rounds) for name, f in contestants.items()}
    sent = {name: counted(contestants[name]) for name in ("forward", "backward")}
    for name, messages in sent.items():
        buffers = [torch.zeros(numbers, dtype=torch.float64) for _, numbers in messages]
        only = lambda buffers=buffers: [dist.all_reduce(b) for b in buffers]  # noqa: E731
        times[f"collectives of {name}"] = together(only, 4 * rounds)
    if rank == 0:
        content = {"seconds": times, "sent": sent}
        Path(folder, f"{size}.json").write_text(json.dumps(content))
    dist.destroy_process_group()


def together(f: Callable[[], object], rounds: int) -> float:
    """The shortest of some rounds, in each of which all ranks start together and the last one counts."""
    least = math.inf
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        result = f()
        seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        del result
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        least = min(least, float(seconds))
    return least


def processes(n: int, rounds: int) -> dict[str, Any]:
    """Runs on 1, 2 and 4 processes, and what the model says of them."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in (1, 2, 4):
            torch.multiprocessing.spawn(measure, (size, n, rounds, folder), size)  # type: ignore[attr-defined]
            found[str(size)] = json.loads(Path(folder, f"{size}.json").read_text())
    one = found["1"]["seconds"]
    copies = {way: one[way] / one["copy"] for way in ("forward", "backward")}
    print(f"\n{n:.0e} weights over processes, lam = {LAM}, {os.cpu_count()} cores, in ms")
    print("processes          copy  collectives  measured  predicted")
    for size, run in found.items():
        for way, times in copies.items():
            seconds, count = run["seconds"], len(run["sent"][way])
            waits = seconds[f"collectives of {way}"]
            # A copy is timed with all processes at work, as they share cores and memory.
            run[f"predicted {way}"] = predicted(times, seconds["copy"], waits)
            print(
                f"{size:>4s} {way:9s} {1e3 * seconds['copy']:8.2f} {count:3d}: {1e3 * waits:6.2f}"
                f"  {1e3 * seconds[way]:9.2f} {1e3 * run[f'predicted {way}']:9.2f}"
            )
    return {"weights": n, "copies": copies, "processes": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--weights", type=int, default=200_000_000, help="in all (default: 2e8)")
    parser.add_argument("--rounds", type=int, default=5, help="of each measurement (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    parser.add_argument("--table", action="store_true", help="only print the table of the model")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(json.loads((arguments.json or RESULTS).read_text())["scale"]))
        return
    torch.set_num_threads(1)
    torch.manual_seed(0)
    level = native.simd_level() if native else "none"
    print(f"torch {torch.__version__}, kernels {level}, one thread for each process")
    content: dict[str, Any] = {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "kernels": level,
        "versions": {"torch": torch.__version__, "sparsetopk": sparsetopk.__version__},
        "many tensors": many_tensors(arguments.weights, 100, arguments.rounds),
        # Of larger tensors, new processes would mostly show the page faults of their allocation.
        "scale": processes(arguments.weights // 10, arguments.rounds),
    }
    print(f"\n{table(content['scale'])}")
    if arguments.json:
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
