"""Times of the JAX front-end under jit on the CPU, as ratios of minima in one run.

float32, N(0, 1) input, p = 2, lam = 0.1. Against ``lax.top_k`` (forward) and, where it is installed,
``jaxopt.projection.projection_box_section``, which solves the same problem by bisection. The plain XLA
operations, which are written for GPU and TPU, stand beside the compiled core. The contestants of one
line take turns, so that a busy machine slows all of them. Writes tables, and with ``--json FILE`` the
numbers.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sparsetopk
import sparsetopk.jax as st
from sparsetopk._maths.operator import MASK
from sparsetopk._maths.operator import Operator as Kind
from sparsetopk.jax._rows.threshold import TopKSetting, solve_in_xla
from sparsetopk.jax._solvers import ffi

try:
    from jaxopt.projection import projection_box_section
except ImportError:
    projection_box_section = None

LAM = 0.1
Function = Callable[[jax.Array], jax.Array]


def best(contestants: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Minimum time of each in milliseconds, over rounds in which all of them take their turn."""
    for f in contestants.values():
        jax.block_until_ready(f())
    times = dict.fromkeys(contestants, float("inf"))
    end = time.perf_counter() + seconds * len(contestants)
    while time.perf_counter() < end:
        for name, f in contestants.items():
            for _ in range(5):
                start = time.perf_counter()
                jax.block_until_ready(f())
                times[name] = min(times[name], 1e3 * (time.perf_counter() - start))
    return times


def gaussian(rows: int, n: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(rows, n)).astype(np.float32))


def gradient(f: Function) -> Callable[[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    """The value of f, and the cotangent of its argument."""

    @jax.jit
    def both(x: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        y, pull = jax.vjp(f, x)
        return y, *pull(g)

    return both


def box_section(n: int, k: int) -> Function:
    """The same mask by jaxopt."""
    box = (jnp.zeros(n), jnp.ones(n), jnp.ones(n), float(k))
    return jax.vmap(lambda x: projection_box_section(x / LAM, box))


def peers(seconds: float) -> list[dict[str, Any]]:
    results = []
    print("\ntopk_mask: forward over lax.top_k and jaxopt, forward + gradient over that of jaxopt")
    print(f"{'':28s} lax.top_k    jaxopt    gradient")
    for rows, n, k in ((1, 1_000_000, 10_000), (64, 1000, 5), (4096, 64, 2)):
        x, g = gaussian(rows, n), gaussian(rows, n, seed=1)
        ours = lambda x, k=k: st.topk_mask(x, k, LAM)  # noqa: E731
        forward, top_k = jax.jit(ours), jax.jit(lambda x, k=k: jax.lax.top_k(x, k))
        both = gradient(ours)
        contestants: dict[str, Callable[[], object]] = {
            "forward": lambda f=forward, x=x: f(x),
            "forward + gradient": lambda f=both, x=x, g=g: f(x, g),
            "lax.top_k": lambda f=top_k, x=x: f(x),
        }
        if projection_box_section is not None:
            theirs = box_section(n, k)
            np.testing.assert_allclose(theirs(x), ours(x), atol=1e-4)
            f, df = jax.jit(theirs), gradient(theirs)
            contestants["jaxopt"] = lambda f=f, x=x: f(x)
            contestants["jaxopt + gradient"] = lambda f=df, x=x, g=g: f(x, g)
        times = best(contestants, seconds)
        ratios = [
            times["forward"] / times["lax.top_k"],
            times["forward"] / times.get("jaxopt", np.nan),
            times["forward + gradient"] / times.get("jaxopt + gradient", np.nan),
        ]
        shown = "".join(f"{ratio:10.3f}" for ratio in ratios)
        print(f"{f'{rows} x {n}, k = {k}':28s}{shown}", flush=True)
        results.append({"rows": rows, "n": n, "k": k, "ms": times})
    return results


def implementations(seconds: float) -> list[dict[str, Any]]:
    results = []
    print("\nforward of the plain XLA operations, over the compiled core")
    for rows, n, k in ((1024, 1000, 100), (256, 8192, 819)):
        x = gaussian(rows, n)
        per_row = (
            jnp.full((rows, 1), k, jnp.int32),
            jnp.zeros((rows, 1)),
            jnp.full((rows, 1), LAM),
        )
        setting = TopKSetting(Kind(MASK, 1.0), False)
        plain = jax.jit(lambda x, at=per_row, setting=setting: solve_in_xla(x, *at, setting).y)
        core = jax.jit(lambda x, k=k: st.topk_mask(x, k, LAM))
        np.testing.assert_allclose(plain(x), core(x), atol=1e-5)
        times = best(
            {"core": lambda f=core, x=x: f(x), "plain": lambda f=plain, x=x: f(x)}, seconds
        )
        ratio = times["plain"] / times["core"]
        print(f"{f'{rows} x {n}, k = {k}':28s}{ratio:10.2f}", flush=True)
        results.append({"rows": rows, "n": n, "k": k, "ms": times})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each contestant")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    options = parser.parse_args()
    with_core = "with" if ffi.available() else "without"
    print(f"jax {jax.__version__}, {with_core} the compiled core")
    results = {
        "versions": {
            "sparsetopk": sparsetopk.__version__,
            "jax": jax.__version__,
            "python": platform.python_version(),
        },
        "core": ffi.available(),
        "peers": peers(options.seconds),
        "implementations": implementations(options.seconds),
    }
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
