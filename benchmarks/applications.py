"""Times of losses and mixtures, as ratios of minima in one run: what they cost beside what they replace.

One thread and float32 unless said otherwise; forward and backward. ``--json FILE`` writes the numbers.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch_operators import best

import sparsetopk
import sparsetopk.torch as st
from sparsetopk._core import native
from sparsetopk.torch.nn import ExpertChoice, ExpertMLP, MixtureOfExperts, TopKLoss


def losses(seconds: float) -> list[dict[str, Any]]:
    """TopKLoss over cross-entropy, forward + backward."""
    results = []
    print("\nlosses, forward + backward over cross_entropy")
    for rows, n in ((512, 100), (512, 1000)):
        x, t = torch.randn(rows, n, requires_grad=True), torch.randint(n, (rows,))
        contestants: dict[str, Any] = {
            "cross_entropy": torch.nn.CrossEntropyLoss(),
            "k=3": TopKLoss(3, completion=None),
            "k=3, lam=0.1": TopKLoss(3, 0.1, completion=None),
            "k=3, p=4/3": TopKLoss(3, p=4 / 3, completion=None),
            "k=3, two-sided 3/2": TopKLoss(3, p=1.5, two_sided=True, completion=None),
            "k=3, spread": TopKLoss(3),
            "k=3, best": TopKLoss(3, completion="best"),
        }
        times = best({name: _step(f, x, t) for name, f in contestants.items()}, seconds)
        print(f"  {rows} x {n}: cross_entropy {1e3 * times['cross_entropy']:.0f} microseconds")
        for name, ms in list(times.items())[1:]:
            print(f"    {name:24s} {ms / times['cross_entropy']:6.2f}", flush=True)
        results.append({"rows": rows, "n": n, "ms": times})
    return results


def _step(f: Callable[..., torch.Tensor], x: torch.Tensor, t: torch.Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(f(x, t), x)


class PlainRouter(torch.nn.Module):
    """Expert choice as one would write it with ``torch.topk``, with empty slots beyond k."""

    def __init__(self, k: int, capacity: int) -> None:
        super().__init__()
        self.k, self.capacity = k, capacity

    def forward(self, logits: torch.Tensor, mask: None = None) -> st.Routing:
        tokens = logits.mT.topk(self.capacity, dim=-1).indices
        taken = (torch.arange(self.capacity) < self.k).to(logits.dtype).expand(tokens.shape)
        weights = taken * logits.softmax(dim=-1).mT.gather(-1, tokens)
        return st.Routing(weights, tokens, taken, taken.new_zeros(taken.shape[:-1]), taken.sum())


def mixtures(seconds: float) -> list[dict[str, Any]]:
    """What the relaxed router adds to the step of a MoE layer with the hard one, forward + backward.

    The paper's: 32 experts that take 28 of 400 tokens each, of the width of a ViT-S, and a narrow one.
    Layers with either router do the same products, which vary more from run to run than routers cost. So
    routers are timed alone, and their difference is put over the step of the layer. Whole steps are
    shown with the same hard layer twice: the ratio of the two says what a ratio of steps is worth.
    """
    results = []
    print("\nMoE layer, 28 of 400 tokens to each of 32 experts, forward + backward")
    for dim, hidden in ((384, 1536), (96, 384)):
        x, experts = torch.randn(2, 400, dim), ExpertMLP(32, dim, hidden)
        routers: dict[str, torch.nn.Module] = {
            "hard, 36 slots": ExpertChoice(28, 0.0, capacity=36),
            "hard, 36 slots, again": ExpertChoice(28, 0.0, capacity=36),
            "relaxed, 36 slots": ExpertChoice(28, 0.1, capacity=36),
            "torch.topk, 36 slots": PlainRouter(28, 36),
            "hard, 28 slots": ExpertChoice(28, 0.0),
            "relaxed, 28 slots": ExpertChoice(28, 0.1, capacity=28),
        }
        layers = {name: MixtureOfExperts(router, experts) for name, router in routers.items()}
        gate = next(iter(layers.values())).gate
        for layer in layers.values():
            layer.gate = gate
        torch.nn.init.normal_(gate.weight, std=dim**-0.5)  # logits of size 1
        logits = gate(x).detach().requires_grad_()
        alone = best({name: _route(router, logits) for name, router in routers.items()}, seconds)
        times = best({name: _train(layer, x) for name, layer in layers.items()}, seconds)
        lost = {
            name: layer.routing.statistics()["dropped"].item() for name, layer in layers.items()
        }
        step, hard = min(list(times.values())[:2]), alone["hard, 36 slots"]
        print(f"  dim {dim}, hidden {hidden}: hard, 36 slots {step:.1f} ms")
        print(f"    {'':24s} router    adds to   step over   selection")
        print(f"    {'':24s} alone ms  the step  hard        dropped")
        for name, ms in times.items():
            print(
                f"    {name:24s} {alone[name]:7.2f} {100 * (alone[name] - hard) / step:8.2f} %"
                f" {ms / times['hard, 36 slots']:9.3f} {100 * lost[name]:10.2f} %",
                flush=True,
            )
        results.append(
            {"dim": dim, "hidden": hidden, "ms": times, "router ms": alone, "dropped": lost}
        )
    return results


def _route(router: torch.nn.Module, logits: torch.Tensor) -> Callable[[], object]:
    g = torch.randn_like(router(logits).weights)
    return lambda: torch.autograd.grad(router(logits).weights, logits, g)


def _train(layer: torch.nn.Module, x: torch.Tensor) -> Callable[[], object]:
    g, parameters = torch.randn_like(x), list(layer.parameters())
    return lambda: torch.autograd.grad(layer(x), parameters, g)


PARTS = {"losses": losses, "mixtures": mixtures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each measurement")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    level = native.simd_level() if native else "none"
    print(f"torch {torch.__version__}, kernels {level}, 1 thread")
    content: dict[str, Any] = {
        "machine": platform.machine(),
        "kernels": level,
        "versions": {"torch": torch.__version__, "sparsetopk": sparsetopk.__version__},
    }
    for name in arguments.parts or PARTS:
        content[name] = PARTS[name](arguments.seconds)
    if arguments.json:
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
