"""Train a small transformer on bytes, with one threshold for all its weights, sharded by FSDP2.

pip install 'sparsetopk[torch]'
torchrun --nproc-per-node 2 examples/global_prune_fsdp.py
python examples/global_prune_fsdp.py            # one process, the same numbers

The text is the source of Python's own argparse. Only 10 % of the weights of the linear and embedding
layers are kept, wherever in the model they are.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from sparsetopk.torch.prune import KeepSchedule, finalize, prune, report

LENGTH, DIM = 64, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, DIM // 4)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, 256)
        for table in (self.token, self.position):  # of the size of the other weights
            nn.init.normal_(table.weight, std=0.5 * DIM**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(LENGTH, device=tokens.device))
        return self.head(self.norm(self.blocks(x)).flatten(0, 1))


def batches(steps: int, size: int) -> Tensor:
    """(steps, size, LENGTH + 1) pieces of the text, the same on every rank."""
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(text) - LENGTH, (steps, size, 1), generator=generator)
    return text[starts + torch.arange(LENGTH + 1)]


def mean_over_ranks(value: Tensor, world: int) -> float:
    if world > 1:
        dist.all_reduce(value)
    return float(value) / world


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=16, help="over all processes (default: 16)")
    parser.add_argument("--keep", type=float, default=0.1, help="share of the weights")
    arguments = parser.parse_args()
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    torch.manual_seed(0)  # the same weights on every rank
    model = Transformer(blocks=2)
    if world > 1:
        dist.init_process_group("gloo")
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    pruner = prune(
        model, arguments.keep, 0.1, scope="global", schedule=KeepSchedule(arguments.steps // 2)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    for step, batch in enumerate(batches(arguments.steps, arguments.batch)):
        tokens = batch.chunk(world)[rank]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        pruner.step()
        value = mean_over_ranks(loss.detach(), world)
        if rank == 0 and (step % 10 == 9 or step == arguments.steps - 1):
            print(f"step {step + 1:4d}  loss {value:.6f}")

    rows = report(model)
    finalize(model, hard=True)
    with torch.no_grad():
        zeros = torch.stack([_zeros(model.get_parameter(row.name)) for row in rows]).sum()
    count = sum(model.get_parameter(row.name).numel() for row in rows)
    share = mean_over_ranks(zeros.double(), world) * world / count
    if rank == 0:
        print(f"final loss {value:.6f}, {100 * share:.3f} % zeros of {count:,d} weights")
    if world > 1:
        dist.destroy_process_group()
        # A thread of gloo lets go of the last tensor, for which Python must still be there.
        time.sleep(0.2)


def _zeros(w: Tensor) -> Tensor:
    """In the shard of this rank."""
    return ((w.to_local() if hasattr(w, "to_local") else w) == 0).sum()


if __name__ == "__main__":
    main()
