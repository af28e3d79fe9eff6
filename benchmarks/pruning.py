"""Times of pruning, as ratios of minima in one run. One thread, float32.

Pruning: a training step of the paper's MLP against the same step with hard pruning by ``torch.topk``;
and one top-k over many tensors against copying them, and against ``torch.topk`` of their concatenation.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sparsetopk
from sparsetopk._core import native
from sparsetopk.torch import topk_mag_multi
from sparsetopk.torch.prune import prune


def best(contestants: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Minimum time of each in milliseconds, over rounds in which all of them take their turn."""
    times = dict.fromkeys(contestants, float("inf"))
    for _ in range(rounds):
        for name, f in contestants.items():
            start = time.perf_counter()
            result = f()
            times[name] = min(times[name], 1e3 * (time.perf_counter() - start))
            del result  # outside of the time, and before the next one
    return times


class HardTopK(torch.nn.Module):
    """What one would write without this package: the mask of ``torch.topk``, as a parametrisation."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def forward(self, w: Tensor) -> Tensor:
        mask = torch.zeros_like(w).view(-1)
        indices = w.detach().abs().view(-1).topk(self.k, sorted=False).indices
        return w * mask.scatter_(0, indices, 1.0).view_as(w)


def mlp() -> torch.nn.Sequential:
    """Of the paper's experiment on MNIST."""
    sizes = (784, 32, 32, 10)
    layers = [torch.nn.Linear(n, m) for n, m in itertools.pairwise(sizes)]
    relu = torch.nn.ReLU
    return torch.nn.Sequential(layers[0], relu(), layers[1], relu(), layers[2])


def training_step(model: torch.nn.Module, batch: int = 128) -> Callable[[], object]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    x, y = torch.randn(batch, 784), torch.randint(10, (batch,))

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def hard(model: torch.nn.Sequential, keep: float) -> torch.nn.Sequential:
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            pruned = HardTopK(round(keep * layer.weight.numel()))
            torch.nn.utils.parametrize.register_parametrization(layer, "weight", pruned)
    return model


def pruning_step(rounds: int) -> dict[str, float]:
    contestants = {"dense": training_step(mlp()), "torch.topk": training_step(hard(mlp(), 0.1))}
    for name, options in {
        "ours": {},
        "ours, p = 4/3": {"p": 4 / 3},
        "ours, straight through": {"straight_through": True},
        "ours, global": {"scope": "global"},
    }.items():
        model = mlp()
        prune(model, 0.1, 1e-4, **options)  # type: ignore[arg-type]
        contestants[name] = training_step(model)
    times = best(contestants, rounds)
    print("\ntraining step of the MLP 784-32-32-10, batch 128, 10 % of each matrix")
    for name, ms in times.items():
        print(f"  {name:24s} {1e3 * ms:8.0f} us {ms / times['torch.topk']:6.2f} of torch.topk")
    return times


def many_tensors(n: int, count: int, rounds: int) -> dict[str, Any]:
    weights = [torch.randn(n // count) * (0.5 + i / count) for i in range(count)]
    k = n // 10

    def concatenated() -> Tensor:
        flat = torch.cat(weights)
        kept = flat.abs().topk(k, sorted=False).indices
        return torch.zeros_like(flat).scatter_(0, kept, flat[kept])

    def gradient(lam: float) -> Callable[[], object]:
        leaves = [w.clone().requires_grad_() for w in weights]
        ys = topk_mag_multi(leaves, k, lam)
        return lambda: torch.autograd.grad(ys, leaves, weights, retain_graph=True)

    results: dict[str, Any] = {"n": n, "tensors": count}
    results["ms"] = best(
        {
            "clones": lambda: [w.clone() for w in weights],
            "lam = 1e-4": lambda: topk_mag_multi(weights, k, 1e-4),
            "lam = 0.1": lambda: topk_mag_multi(weights, k, 0.1),
            "hard": lambda: topk_mag_multi(weights, k, 0.0),
            "backward, lam = 1e-4": gradient(1e-4),
        },
        rounds,
    )
    results["ms"] |= best({"concatenate and torch.topk": concatenated}, 1)
    results["extra memory"] = _extra_memory(n, count)
    print(f"\none top-k over {count} tensors with {n:.0e} weights together, 10 % kept")
    for name, ms in results["ms"].items():
        print(f"  {name:28s} {ms:8.0f} ms {ms / results['ms']['clones']:6.2f} of clones")
    for name, share in results["extra memory"].items():
        print(f"  memory of {name} beyond the output: {100 * share:.1f} % of the weights")
    return results


_MEMORY = """
import sys, torch
from sparsetopk.torch import topk_mag_multi
n, count = map(int, sys.argv[1:])
torch.set_num_threads(1)
def peak():
    open("/proc/self/clear_refs", "w").write("5") if before is None else None
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
before = None
weights = [torch.randn(n // count, requires_grad=True) for _ in range(count)]
topk_mag_multi([w[:1000] for w in weights], 100, 0.1)
for w in weights: w.grad = None
before = peak()
ys = topk_mag_multi(weights, n // 10, 1e-4)
print(1024 * (peak() - before) / (4 * n) - 1)
gs = [w.detach() for w in weights]
before = None
before = peak()
found = torch.autograd.grad(ys, weights, gs)
print(1024 * (peak() - before) / (4 * n) - 1)
"""


def _extra_memory(n: int, count: int) -> dict[str, float]:
    """Of forward and backward, as shares of the weights; in a fresh process."""
    if sys.platform != "linux":
        return {}
    command = [sys.executable, "-c", _MEMORY, str(n), str(count)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return {"forward": float(out[0]), "backward": float(out[1])}


def pruning(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "step, ms": pruning_step(arguments.rounds),
        "many tensors": many_tensors(arguments.weights, 100, 4),
    }


# ----------------------------------------------------------------------------------------------- main

PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {"pruning": pruning}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=300, help="of each step (default: 300)")
    parser.add_argument("--weights", type=int, default=200_000_000, help="for many tensors")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    level = native.simd_level() if native else "none"
    print(f"torch {torch.__version__}, kernels {level}, {arguments.threads} thread(s)")
    content: dict[str, Any] = {
        "machine": platform.machine(),
        "kernels": level,
        "threads": arguments.threads,
        "versions": {"torch": torch.__version__, "sparsetopk": sparsetopk.__version__},
    }
    for name in arguments.parts:
        content[name] = PARTS[name](arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
