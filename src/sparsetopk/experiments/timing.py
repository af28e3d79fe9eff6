"""Fig. 4 of the paper: the time of a relaxed top-k against n, with k = ceil(n/10).

One row of N(0, 1) in float32, lam = 0.1, p = 2, forward only. The paper times PAV, 100 iterations of
Dykstra's algorithm and the hard top-k, on a TPU. Here are also the threshold solver, Dykstra's
algorithm to convergence, and other libraries where they are installed.

A run is one method at one n. It takes turns with the hard top-k of the same framework, so that a busy
machine slows both; the ratio is that of the minima. Also measured is how far each output is from
the exact one, and for several lam how far Dykstra's algorithm is from PAV after 100 iterations.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

import sparsetopk
from sparsetopk._types import Array, Solver, SolverOptions

from .drawing import COLOURS, pyplot, save, tidy
from .runs import Book, Claim, Options

TITLE = "Runtime"

CAPTIONS = {
    "timing": "Fig. 4 of the paper: time of one call against n, k = ceil(n/10), minima. "
    "The paper's figure was measured on a TPU.",
    "agreement": "How far 100 iterations of Dykstra's algorithm are from PAV, in float64.",
}

Row = NDArray[np.float32]
Call = Callable[[], Any]

LAM = 0.1
LAMS = (0.01, 0.1, 1.0)  # the paper does not say its own
ITERATIONS = 100
CONVERGED: SolverOptions = {"tol": 1e-6, "max_iter": 10_000_000}
EQUAL = 1e-5  # two outputs in float32 that are the same but for rounding


@dataclass(frozen=True)
class Method:
    """A contestant: ``prepare(x, k, device)`` gives a call that waits for its output."""

    framework: str
    name: str
    needs: str  # the package that it is imported from
    prepare: Callable[[Row, int, str], Call]
    largest: int = 1_000_000  # n
    relaxed: bool = True  # its output is the relaxed mask; else it is timed only

    @property
    def key(self) -> str:
        return f"{self.framework} {self.name}"

    def installed(self) -> bool:
        return all(find_spec(m) for m in {self.framework.lower(), self.needs})


def _on_torch(f: Callable[[Any, int], Any]) -> Callable[[Row, int, str], Call]:
    def prepare(x: Row, k: int, device: str) -> Call:
        import torch

        on_device = torch.from_numpy(x).to(device)

        def call() -> Any:
            with torch.no_grad():
                y = f(on_device, k)
            if on_device.is_cuda:
                torch.cuda.synchronize()
            return y

        return call

    return prepare


def _on_jax(f: Callable[[Any, int], Any]) -> Callable[[Row, int, str], Call]:
    def prepare(x: Row, k: int, device: str) -> Call:
        import jax

        # that of torch may have another name: any accelerator that JAX has
        place = jax.devices("cpu")[0] if device == "cpu" else jax.devices()[0]
        on_device, compiled = jax.device_put(x, place), jax.jit(lambda x: f(x, k))
        return lambda: jax.block_until_ready(compiled(on_device))

    return prepare


def _torch_mask(solver: Solver, options: SolverOptions | None = None) -> Any:
    def mask(x: Any, k: int) -> Any:
        import sparsetopk.torch as st

        return st.topk_mask(x, k, LAM, solver=solver, solver_options=options)

    return _on_torch(mask)


def _jax_mask(solver: Solver, options: SolverOptions | None = None) -> Any:
    def mask(x: Any, k: int) -> Any:
        import sparsetopk.jax as st

        return st.topk_mask(x, k, LAM, solver=solver, solver_options=options)

    return _on_jax(mask)


def _top_k(x: Any, k: int) -> Any:
    import jax

    return jax.lax.top_k(x, k)


def _budget_bisect(x: Any, k: int) -> Any:
    return import_module("entmax").budget_bisect(x / LAM, k)


def _soft_rank(x: Any, k: int) -> Any:
    return import_module("torchsort").soft_rank(x, regularization_strength=LAM)


def _box_section(x: Any, k: int) -> Any:
    import jax.numpy as jnp

    ones, project = jnp.ones_like(x[0]), import_module("jaxopt.projection").projection_box_section
    return project(x[0] / LAM, (0.0 * ones, ones, ones, float(k)))[None]


def _sorting_network(x: Row, k: int, device: str) -> Call:
    network = import_module("difftopk").DiffTopkNet("bitonic", x.shape[-1], k, device=device)
    return _on_torch(lambda x, _: network(x)[1])(x, k, device)


DYKSTRA_100: SolverOptions = {"max_iter": ITERATIONS}
# Dykstra's algorithm needs about n^2 iterations of cost n; the sorting network n^2 memory a layer.
METHODS = (
    Method(
        "torch", "hard", "torch", _on_torch(lambda x, k: x.topk(k, sorted=False)), relaxed=False
    ),
    Method("torch", "threshold", "torch", _torch_mask("threshold")),
    Method("torch", "PAV", "torch", _torch_mask("pav")),
    Method("torch", "Dykstra, 100", "torch", _torch_mask("dykstra", DYKSTRA_100)),
    Method("torch", "Dykstra, converged", "torch", _torch_mask("dykstra", CONVERGED), 3162),
    Method("torch", "entmax budget_bisect", "entmax", _on_torch(_budget_bisect)),
    Method("torch", "torchsort soft_rank", "torchsort", _on_torch(_soft_rank), relaxed=False),
    Method("torch", "difftopk bitonic", "difftopk", _sorting_network, 316, relaxed=False),
    Method("JAX", "hard", "jax", _on_jax(_top_k), relaxed=False),
    Method("JAX", "threshold", "jax", _jax_mask("threshold")),
    Method("JAX", "PAV", "jax", _jax_mask("pav")),
    Method("JAX", "Dykstra, 100", "jax", _jax_mask("dykstra", DYKSTRA_100)),
    Method("JAX", "Dykstra, converged", "jax", _jax_mask("dykstra", CONVERGED), 3162),
    Method("JAX", "jaxopt box_section", "jaxopt", _on_jax(_box_section)),
)

QUICK = {"sizes": [100, 464, 2154, 10_000], "seconds": 0.1}
FULL = {
    "sizes": [100, 316, 1000, 3162, 10_000, 31_623, 100_000, 316_228, 1_000_000],
    "seconds": 1.0,
}


def gaussian(n: int) -> tuple[Array, int]:
    """The input (1, n) and k; float64, with values that float32 holds."""
    x = np.random.default_rng(0).normal(size=(1, n)).astype(np.float32)
    return x.astype(np.float64), math.ceil(n / 10)


def minima(calls: dict[str, Call], seconds: float) -> dict[str, float]:
    """The shortest time of each, over rounds in which all take a turn of one call or several."""
    for call in calls.values():
        call()
    best = dict.fromkeys(calls, math.inf)
    begin, rounds = time.perf_counter(), 0
    while rounds < 3 or time.perf_counter() - begin < seconds * len(calls):
        rounds += 1
        for name, call in calls.items():
            end = time.perf_counter() + seconds / 10
            start = -math.inf
            while start < end:  # once at least
                start = time.perf_counter()
                call()
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def measure(method: Method, n: int, device: str, seconds: float) -> dict[str, Any]:
    """Its time beside that of the hard top-k, and its distance from the exact relaxed mask."""
    exact_x, k = gaussian(n)
    x = exact_x.astype(np.float32)
    hard = next(m for m in METHODS if (m.framework, m.name) == (method.framework, "hard"))
    calls = {m.name: m.prepare(x, k, device) for m in (method, hard)}
    error = None
    if method.relaxed:
        y = calls[method.name]()
        y = np.asarray(y.cpu() if method.framework == "torch" else y)
        error = float(np.abs(y - sparsetopk.topk_mask(exact_x, k, LAM)).max())
    best = minima(calls, seconds)
    return {"error": error, "seconds": {"call": best[method.name], "hard": best["hard"]}}


def disagreement(n: int) -> dict[str, float]:
    """The largest difference of 100 iterations of Dykstra's algorithm and PAV, for each lam."""
    x, k = gaussian(n)
    found = {}
    for lam in LAMS:
        dykstra = sparsetopk.topk_mask(x, k, lam, solver="dykstra", solver_options=DYKSTRA_100)
        pav = sparsetopk.topk_mask(x, k, lam, solver="pav")
        found[str(lam)] = float(np.abs(dykstra - pav).max())
    return found


def run(options: Options) -> dict[str, Any]:
    return measure_all(options, FULL if options.full else QUICK)


def measure_all(options: Options, form: dict[str, Any]) -> dict[str, Any]:
    import torch

    book = Book(options, "timing")
    settings = {**form, "lam": LAM, "device": options.device, "threads": torch.get_num_threads()}
    there = [method for method in METHODS if method.installed()]
    todo = [(method, n) for n in form["sizes"] for method in there if n <= method.largest]
    times: dict[str, dict[str, Any]] = {method.key: {} for method in there}
    for method, n in tqdm(todo, desc="timing", unit="run"):
        times[method.key][str(n)] = _timed(book, settings, method, n)
    results = {
        "times": times,
        "agreement": {str(n): _compared(book, n) for n in form["sizes"]},
        "not installed": [method.key for method in METHODS if method not in there],
    }
    return book.finish(settings, results)


def _timed(book: Book, settings: dict[str, Any], method: Method, n: int) -> dict[str, Any]:
    name = f"{method.key.replace(',', '').replace(' ', '-')}-{n}"
    only_n = {key: value for key, value in settings.items() if key != "sizes"}
    device, seconds = settings["device"], settings["seconds"]
    return book.run(name, {**only_n, "n": n}, lambda _: measure(method, n, device, seconds))


def _compared(book: Book, n: int) -> dict[str, Any]:
    return book.run(f"agreement-{n}", {"n": n, "lams": LAMS}, lambda _: disagreement(n))


def exponent(times: dict[str, Any]) -> float:
    """The slope of log(time) over log(n), by least squares on the upper half of the sizes."""
    points = sorted((int(n), run["seconds"]["call"]) for n, run in times.items())
    n, seconds = np.array(points[len(points) // 2 :]).T
    if len(n) < 2:
        return math.nan
    return float(np.polyfit(np.log(n), np.log(seconds), 1)[0])


STYLES = {
    "hard": (COLOURS["hard"], "-"),
    "threshold": (COLOURS["two-sided"], "-"),
    "PAV": (COLOURS["p = 2"], "-"),
    "Dykstra, 100": (COLOURS["straight-through"], "-"),
    "Dykstra, converged": (COLOURS["straight-through"], ":"),
    "entmax budget_bisect": ("#7b5ea7", "--"),
    "torchsort soft_rank": ("#a0785a", "--"),
    "difftopk bitonic": ("#3c4043", "--"),
    "jaxopt box_section": ("#7b5ea7", "--"),
}


def draw(result: dict[str, Any], directory: Path) -> None:
    _draw_times(result["results"]["times"], directory)
    _draw_agreement(result["results"]["agreement"], directory)


def _draw_times(times: dict[str, Any], directory: Path) -> None:
    frameworks = list(dict.fromkeys(method.framework for method in METHODS if method.key in times))
    figure, axes = pyplot().subplots(
        *(1, len(frameworks)),
        figsize=(5.4 * len(frameworks), 5.6),
        sharey=True,
        layout="constrained",
        squeeze=False,
    )
    for ax, framework in zip(axes.flat, frameworks, strict=True):
        for method in METHODS:
            if method.framework == framework and times.get(method.key):
                points = {
                    int(n): 1e3 * run["seconds"]["call"] for n, run in times[method.key].items()
                }
                colour, line = STYLES[method.name]
                ax.plot(
                    *zip(*sorted(points.items()), strict=True),
                    line,
                    color=colour,
                    marker="o",
                    ms=3.5,
                    lw=1.8,
                    label=method.name,
                )
        ax.set(xscale="log", yscale="log", xlabel="$n$", title=framework)
        ax.legend(
            frameon=False, fontsize=9, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.13)
        )
        tidy(ax)
    axes[0, 0].set_ylabel("milliseconds a call")
    save(figure, directory, "timing")


def _draw_agreement(agreement: dict[str, Any], directory: Path) -> None:
    figure, ax = pyplot().subplots(figsize=(6.4, 3.6), layout="constrained")
    sizes = [int(n) for n in agreement]
    for lam, colour in zip(LAMS, ("#00798c", "#d1495b", "#3c4043"), strict=True):
        found = [max(differences[str(lam)], 1e-17) for differences in agreement.values()]
        ax.plot(sizes, found, marker="o", ms=4, lw=1.8, color=colour, label=f"$\\lambda = {lam}$")
    ax.axhline(EQUAL, color=COLOURS["hard"], ls="--", lw=1)
    ax.text(sizes[0], 2 * EQUAL, "equal in float32 below", color="#5f6368", fontsize=9)
    ax.set(xscale="log", yscale="log", xlabel="$n$", ylabel="largest difference", ylim=(5e-18, 3))
    ax.legend(frameon=False, loc="lower right")
    tidy(ax)
    save(figure, directory, "agreement")


def tables(result: dict[str, Any]) -> dict[str, list[list[str]]]:
    """Title and rows, the first of them the header."""
    sizes, times = [str(n) for n in result["settings"]["sizes"]], result["results"]["times"]

    def table(cell: Callable[[dict[str, Any]], str]) -> list[list[str]]:
        header = ["n", *(f"{int(n):,}" for n in sizes)]
        rows = [
            [key, *(cell(runs[n]) if n in runs else "" for n in sizes)]
            for key, runs in times.items()
        ]
        return [header, *rows]

    ratios = table(lambda run: f"{run['seconds']['call'] / run['seconds']['hard']:.3g}")
    ratios[0].append("exponent")
    for row, runs in zip(ratios[1:], times.values(), strict=True):
        row.append(f"{exponent(runs):.2f}")
    missing = ", ".join(result["results"]["not installed"]) or "none"
    errors = table(lambda run: "" if run["error"] is None else f"{run['error']:.0e}")
    return {
        "Time over that of the hard top-k of the same framework; time grows as n to the exponent "
        f"(upper half of the sizes). Not installed: {missing}": ratios,
        "Milliseconds a call": table(lambda run: f"{1e3 * run['seconds']['call']:.3g}"),
        "Largest difference from the exact mask": [
            errors[0],
            *(r for r in errors[1:] if any(r[1:])),
        ],
    }


def claims(result: dict[str, Any]) -> list[Claim]:
    return [_equals_pav(result), _faster_on_accelerators(result)]


def _equals_pav(result: dict[str, Any]) -> Claim:
    agreement = result["results"]["agreement"]
    equal = [found <= EQUAL for by_lam in agreement.values() for found in by_lam.values()]
    shown = "; ".join(
        _up_to(lam, {int(n): by_lam[str(lam)] for n, by_lam in agreement.items()}) for lam in LAMS
    )
    return Claim(
        "100 iterations of Dykstra's algorithm give the same output as PAV",
        "the same output",
        f"equal (to {EQUAL:.0e}) in {sum(equal)} of {len(equal)} cases: {shown}",
        "reproduced" if all(equal) else "partly" if any(equal) else "not reproduced",
        "The paper does not say for which n and lam it was verified.",
    )


def _up_to(lam: float, differences: dict[int, float]) -> str:
    """Where they are equal, and how far apart beyond."""
    apart = [n for n, difference in differences.items() if difference > EQUAL]
    equal = [n for n in differences if n < min(apart, default=math.inf)]
    said = f"lam = {lam} up to n = {max(equal)}" if equal else f"lam = {lam} at no n"
    return said + (f" (else apart by up to {max(differences.values()):.2g})" if apart else "")


def _faster_on_accelerators(result: dict[str, Any]) -> Claim:
    text = "Dykstra's algorithm is faster than PAV on accelerators (Fig. 4)"
    times, ratios = result["results"]["times"], {}
    for framework in ("torch", "JAX"):
        if f"{framework} PAV" in times:
            dykstra, pav = times[f"{framework} Dykstra, 100"], times[f"{framework} PAV"]
            ratios[framework] = [
                dykstra[n]["seconds"]["call"] / pav[n]["seconds"]["call"] for n in pav
            ]
    device = result["settings"]["device"]
    shown = "; ".join(
        f"{framework} {min(r):.2g} to {max(r):.2g}" for framework, r in ratios.items()
    )
    ours = f"time of 100 iterations over that of PAV, over all n, on {device}: {shown}"
    if device == "cpu":
        return Claim(text, "faster on a TPU", ours, "not measured", "There was no accelerator.")
    faster = [ratio < 1 for ratio in ratios["torch"]]
    return Claim(
        *(text, "faster on a TPU", ours),
        "reproduced" if all(faster) else "partly" if any(faster) else "not reproduced",
        "Judged by torch on this device.",
    )
