"""Is anything slower than it was? Times of this checkout over those of another, in one run.

    git worktree add ../before COMMIT       # and install it in an environment of its own
    python benchmarks/before_after.py ../before/.venv/bin/python [--json FILE]

Each checkout runs in a process of its own; the two take turns of a few calls, so that a busy machine
slows both. What both have is timed, on one thread, float32, N(0, 1), lam = 0.1; and the first call of
JAX, which traces and compiles, in new processes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CALLS = 5
SHAPES = [(65536, 8, 2), (4096, 100, 3), (1024, 400, 28), (16, 65536, 64), (1, 1 << 20, 131_072)]
SHAPES += [(1, 1000, 10)]
FIRST_CALLS = ("topk_mask", "gradient of topk_mask", "soft_rank")


def contestants() -> dict[str, Callable[[], object]]:
    """What is timed, by the package of this process."""
    import torch

    import sparsetopk.torch as st

    torch.set_num_threads(1)
    torch.manual_seed(0)
    found: dict[str, Callable[[], object]] = {}

    def add(name: str, f: Callable[[Any], Any], x: Any) -> None:
        leaf = x.clone().requires_grad_()
        g = torch.randn_like(f(x))
        found[name] = lambda: f(x)
        found[f"{name}, with its gradient"] = lambda: torch.autograd.grad(f(leaf), leaf, g)

    for rows, n, k in SHAPES:
        x, shape = torch.randn(rows, n), f"{rows} x {n}"
        add(f"topk_mask {shape}", lambda x, k=k: st.topk_mask(x, k, 0.1), x)
        add(f"topk_mag {shape}", lambda x, k=k: st.topk_mag(x, k, 0.1), x)
        add(f"topk_mask p=4/3 {shape}", lambda x, k=k: st.topk_mask(x, k, 0.1, p=4 / 3), x)
    x = torch.randn(64, 1000)
    add("soft_rank 64 x 1000", st.soft_rank, x)
    labels = torch.randint(100, (512,))
    loss = lambda x: st.topk_loss(x, labels, 5, 1.0, completion="spread")  # noqa: E731
    add("topk_loss 512 x 100", loss, torch.randn(512, 100))
    found["topk_select 64 x 1000"] = lambda: st.topk_select(x, 10)
    return found


def serve() -> None:
    """Time what is asked for on the standard input; used by ``main``."""
    found = contestants()
    print(json.dumps(list(found)), flush=True)
    for line in sys.stdin:
        f, least = found[line.strip()], float("inf")
        for _ in range(CALLS):
            start = time.perf_counter()
            f()
            least = min(least, time.perf_counter() - start)
        print(least, flush=True)


def first_call(name: str) -> None:
    """The time of the first call in a new process, beyond what importing takes."""
    import jax
    import jax.numpy as jnp

    import sparsetopk.jax as st

    functions = {
        "topk_mask": jax.jit(lambda x: st.topk_mask(x, 10, 0.1)),
        "gradient of topk_mask": jax.jit(jax.grad(lambda x: (st.topk_mask(x, 10, 0.1) ** 2).sum())),
        "soft_rank": jax.jit(st.soft_rank),
    }
    x = jax.block_until_ready(jnp.ones((64, 1000)) * jnp.arange(1000.0))
    start = time.perf_counter()
    jax.block_until_ready(functions[name](x))
    print(time.perf_counter() - start)


class Checkout:
    def __init__(self, python: str) -> None:
        self.python = python
        pipe = subprocess.PIPE
        command = [python, __file__, "--serve"]
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.names: list[str] = json.loads(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def time(self, name: str) -> float:
        assert self.process.stdin is not None
        print(name, file=self.process.stdin, flush=True)
        return float(self._line())

    def first_call(self, name: str) -> float:
        return float(subprocess.check_output([self.python, __file__, "--first-call", name]))


def compare(seconds: float, now: Checkout, before: Checkout) -> dict[str, dict[str, float]]:
    table = {}
    for name in (name for name in now.names if name in before.names):
        times = {"now": float("inf"), "before": float("inf")}
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for which, checkout in (("now", now), ("before", before)):
                times[which] = min(times[which], checkout.time(name))
        table[name] = times
    for name in FIRST_CALLS:
        pairs = [(now.first_call(name), before.first_call(name)) for _ in range(3)]
        table[f"first call of JAX, {name}"] = dict(
            zip(("now", "before"), map(min, *pairs), strict=True)
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("python", nargs="?", help="the interpreter of the other checkout")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each line (default: 1)")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--first-call", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        return serve()
    if asked.first_call:
        return first_call(asked.first_call)
    if asked.python is None:
        parser.error("the interpreter of the other checkout is missing")
    table = compare(asked.seconds, Checkout(sys.executable), Checkout(asked.python))
    for name, times in table.items():
        print(f"{name:48s} {times['now'] / times['before']:6.2f}")
    if asked.json:
        asked.json.write_text(json.dumps({"seconds": table}, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
