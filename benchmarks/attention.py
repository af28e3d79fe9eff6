"""The backward of ``TopKAttention`` beside that of dense ways, as times in one run. One thread, float32.

"softmax straight through" selects the same k keys in the forward, with the derivative of the softmax of
all index scores; "dense" is ``scaled_dot_product_attention`` of all keys, without an indexer.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from sparsetopk.torch.nn import TopKAttention


def heads(layer: TopKAttention, x: Tensor) -> tuple[Tensor, ...]:
    parts = layer.inputs(x).chunk(3, dim=-1)
    return tuple(v.unflatten(-1, (layer.heads, -1)).transpose(1, 2) for v in parts)


def softmax_straight_through(layer: TopKAttention, x: Tensor) -> Tensor:
    a, b = layer.index(x).chunk(2, dim=-1)
    soft = (a @ b.mT / math.sqrt(a.shape[-1])).softmax(dim=-1)
    at = soft.detach().topk(layer.k, dim=-1).indices
    y = torch.zeros_like(soft).scatter(-1, at, 1.0) + (soft - soft.detach())
    q, k, v = heads(layer, x)
    logits = q @ k.mT / math.sqrt(q.shape[-1])
    weights = y.unsqueeze(1) * (logits - logits.detach().amax(dim=-1, keepdim=True)).exp()
    out = (weights / weights.sum(dim=-1, keepdim=True)) @ v
    return layer.output(out.transpose(1, 2).flatten(2))


def dense(layer: TopKAttention, x: Tensor) -> Tensor:
    out = nn.functional.scaled_dot_product_attention(*heads(layer, x))
    return layer.output(out.transpose(1, 2).flatten(2))


def measure(length: int, rounds: int) -> dict[str, dict[str, float]]:
    """Minimum times in milliseconds, over rounds in which all of them take their turn."""
    layer = TopKAttention(64, 2, 16, index_dim=32)
    x = torch.randn(1, length, 64, requires_grad=True)
    ways = {"ours": layer, "softmax straight through": softmax_straight_through, "dense": dense}
    times = {name: {"forward": math.inf, "backward": math.inf} for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            y = way(x) if name == "ours" else way(layer, x)
            middle = time.perf_counter()
            y.square().sum().backward()
            end = time.perf_counter()
            for part, seconds in (("forward", middle - start), ("backward", end - middle)):
                times[name][part] = min(times[name][part], round(1e3 * seconds, 2))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = {str(length): measure(length, arguments.rounds) for length in (1024, 4096)}
    text = json.dumps(results, indent=1)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
