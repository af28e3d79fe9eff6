"""Times of the NumPy front-end, as ratios of minima in one run.

Against what a NumPy user would write for a hard top-k (``np.argpartition``, and ``np.sort`` for
scale), on N(0, 1) input in float64. Writes a table, and with ``--json FILE`` the numbers.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import sparsetopk as st

SHAPES = [(4096, 100, 3), (128, 4096, 410), (1, 1_000_000, 131_072)]


def best(f: Callable[[], object], seconds: float) -> float:
    """Minimum over runs that take about ``seconds`` together, in milliseconds."""
    times: list[float] = []
    while sum(times) < seconds or len(times) < 3:
        start = time.perf_counter()
        f()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def hard_top_k(x: np.ndarray, k: int) -> np.ndarray:
    mask = np.zeros_like(x)
    np.put_along_axis(mask, np.argpartition(-x, k, axis=-1)[:, :k], 1.0, axis=-1)
    return mask


def contestants(x: np.ndarray, k: int) -> dict[str, Callable[[], object]]:
    return {
        "np.argpartition mask": lambda: hard_top_k(x, k),
        "np.sort": lambda: np.sort(x, axis=-1),
        "topk_mask p=2": lambda: st.topk_mask(x, k, 0.1),
        "topk_mask p=4/3": lambda: st.topk_mask(x, k, 0.1, p=4 / 3),
        "topk_mask two-sided 3/2": lambda: st.topk_mask(x, k, 0.1, p=1.5, two_sided=True),
        "topk_mag p=2": lambda: st.topk_mag(x, k, 0.1),
        "topk_mask_vjp p=2": lambda: st.topk_mask_vjp(x, k, 0.1, dy=x),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each measurement")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    arguments = parser.parse_args()
    results = []
    for rows, n, k in SHAPES:
        x = np.random.default_rng(0).normal(size=(rows, n))
        print(f"\n{rows} x {n}, k = {k}")
        baseline = None
        for name, f in contestants(x, k).items():
            milliseconds = best(f, arguments.seconds)
            baseline = baseline or milliseconds
            ratio = milliseconds / baseline
            print(
                f"  {name:24s} {milliseconds:10.2f} ms   {ratio:6.2f} of the hard mask", flush=True
            )
            results.append({"rows": rows, "n": n, "k": k, "name": name, "ms": milliseconds})
    if arguments.json:
        versions = {"numpy": np.__version__, "sparsetopk": st.__version__}
        content = {"machine": platform.machine(), "versions": versions, "results": results}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
