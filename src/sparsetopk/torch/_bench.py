"""``sparsetopk bench``: what the operators give on a device, and how long they take there.

First values and derivatives against the compiled core in float64 on the CPU, then times beside a copy,
``torch.topk``, ``torch.compile`` and, where it is installed, entmax.
"""

from __future__ import annotations

import importlib.util
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import __version__
from . import topk, topk_mag, topk_mask, topk_sign

Operation = Callable[..., Tensor]

ROWS = 100_000  # random ones, of WIDTH entries
WIDTH = 64
SHAPES = ((65536, 8), (4096, 1000), (4096, 4096), (64, 65536), (1, 1 << 24))
_LAM = 0.1
_SECONDS = 0.3  # for each number
_CHUNK = 20_000  # rows at a time
_BOUND = 2e-6  # for errors
_NEAR = 4e-6  # of k and lam: what rounding may amount to where derivatives jump


class _Operator(NamedTuple):
    name: str
    call: Operation
    steepness: float  # by which an error in t may grow in S(t), and its square in S'(t)
    takes_infinities: bool


OPERATORS = (
    _Operator("topk_mask", topk_mask, 1.0, True),
    _Operator("topk_mask, p = 3/2", lambda *v: topk_mask(*v, p=1.5), 2.0, True),
    _Operator("two-sided, p = 4/3", lambda *v: topk_mask(*v, p=4 / 3, two_sided=True), 3.0, True),
    _Operator("topk", topk, 1.0, True),
    _Operator("topk_mag", topk_mag, 1.0, False),
    _Operator(
        "topk_mag, biased, p = 3/2", lambda *v: topk_mag(*v, p=1.5, debias=False), 2.0, False
    ),
    _Operator("topk_sign", topk_sign, 1.0, False),
)


def _special_rows() -> tuple[Tensor, Tensor, Tensor]:
    """x, k and lam: ties, padding, infinities, NaN, all and nothing selected, and hard rows."""
    x = torch.randn(12, 40, generator=torch.Generator().manual_seed(1))
    k, lam = torch.full((12, 1), 5.5), torch.full((12, 1), _LAM)
    x[0, 3] = torch.nan
    x[1] = 0.25
    x[2, :20] = 1.0
    k[3], k[4], k[5] = 0.0, 40.0, 7.0
    lam[6:8] = 0.0
    x[7] = x[7].round()
    x[8, ::2] = -torch.inf
    x[9, 3:] = -torch.inf
    x[10, :3] = torch.inf
    x[11, :20] = torch.inf
    return x, k, lam


def _random_rows(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, WIDTH, generator=generator)
    k = torch.rand(rows, 1, generator=generator) * (WIDTH - 2) + 0.5
    lam = 10.0 ** (torch.rand(rows, 1, generator=generator) * 3 - 2)
    return x, k, lam


def _solved(f: Operation, inputs: tuple[Tensor, ...], g: Tensor) -> list[Tensor]:
    live = [v.detach().requires_grad_() for v in inputs]
    y = f(*live)
    found = [y.detach(), *torch.autograd.grad(y, live, g)]
    return [v.cpu().double() for v in found]


def _error(found: Tensor, want: Tensor, scale: Tensor) -> Tensor:
    """The largest of every row, over its scale; infinite where NaN or infinities are not where they must
    be."""
    alike = (found.isnan() == want.isnan()) & (found.isinf() == want.isinf())
    error = torch.where(want.isfinite() & found.isfinite(), (found - want).abs() / scale, 0.0)
    return torch.where(alike, error, torch.inf).amax(-1)


def _worst(found: list[Tensor], want: list[Tensor], scale: Tensor) -> Tensor:
    """Of the derivatives in x, k and lam, for every row."""
    each = [_error(a, b, scale) for a, b in zip(found[1:], want[1:], strict=True)]
    return torch.stack(each).amax(0)


def _errors(
    operator: _Operator, x: Tensor, k: Tensor, lam: Tensor, device: str
) -> tuple[float, float]:
    """Of the values and of the derivatives in x, k and lam, in units of what rounding may do."""
    g = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    inputs = x, k, lam, g
    want = _solved(operator.call, tuple(v.double() for v in inputs[:3]), g.double())
    found = _solved(operator.call, tuple(v.to(device) for v in inputs[:3]), g.to(device))
    size = torch.where(x.isfinite(), x.abs(), 0.0).double().amax(-1, keepdim=True).clamp_min(1.0)
    slope = operator.steepness**2 * size * (1 + 1 / lam.double().clamp_min(1e-2))
    slope = slope * g.double().abs().sum(-1, keepdim=True)
    errors = _worst(found, want, slope)
    # Where a derivative jumps, so near that rounding decides, it may be that of the other side.
    at = (errors > _BOUND).nonzero()[:, 0]
    for in_k, in_lam in ((1 - _NEAR, 1), (1 + _NEAR, 1), (1, 1 - _NEAR), (1, 1 + _NEAR)):
        x_at, k_at, lam_at, g_at = (v[at].double() for v in inputs)
        beside = _solved(operator.call, (x_at, k_at * in_k, lam_at * in_lam), g_at)
        errors[at] = errors[at].minimum(_worst([v[at] for v in found], beside, slope[at]))
    return float(_error(found[0], want[0], size * operator.steepness).max()), float(errors.max())


def check(device: str, rows: int = ROWS) -> list[dict[str, Any]]:
    """A line for every operator: the largest errors over special and random rows, and a verdict."""
    found = []
    for operator in OPERATORS:
        x, k, lam = _special_rows()
        if not operator.takes_infinities:  # they make a row NaN, as the core has it too
            x = x[:8]
        worst = list(_errors(operator, x, k[: len(x)], lam[: len(x)], device))
        random = (v.split(_CHUNK) for v in _random_rows(rows))
        for x, k, lam in zip(*random, strict=True):
            errors = _errors(operator, x, k, lam, device)
            worst = [max(pair) for pair in zip(worst, errors, strict=True)]
        found.append(
            {
                "operator": operator.name,
                "rows": rows,
                "values": worst[0],
                "derivatives": worst[1],
                "right": max(worst) <= _BOUND,
            }
        )
    return found


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


def _milliseconds(f: Callable[[], object], device: str) -> float:
    """The least of several runs, each of as many calls as take a while."""
    f()
    _synchronize(device)
    start, calls = time.perf_counter(), 0
    while calls < 3 or (time.perf_counter() - start < _SECONDS / 4 and calls < 1000):
        f()
        calls += 1
    _synchronize(device)
    best = (time.perf_counter() - start) / calls
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(calls):
            f()
        _synchronize(device)
        best = min(best, (time.perf_counter() - start) / calls)
    return 1e3 * best


def _others() -> dict[str, Callable[[Tensor, int], Tensor]]:
    """What is measured besides, from rows and k to something of the rows."""
    rows: dict[str, Callable[[Tensor, int], Tensor]] = {
        "copy": lambda x, _: x.clone(),
        "torch.topk": lambda x, k: x.topk(k).values,
        "topk_mask": lambda x, k: topk_mask(x, k, _LAM),
        "topk_mask, lam = 0": lambda x, k: topk_mask(x, k, 0.0),
        "topk_mag": lambda x, k: topk_mag(x, k, _LAM),
        "topk_mask, compiled": torch.compile(lambda x, k: topk_mask(x, k, _LAM), dynamic=False),
    }
    if importlib.util.find_spec("entmax") is None:
        return rows
    sparsemax = importlib.import_module("entmax").sparsemax
    return rows | {"entmax.sparsemax": lambda x, _: sparsemax(x)}


def measure(device: str, shapes: tuple[tuple[int, int], ...] = SHAPES) -> list[dict[str, Any]]:
    """A line for every shape and operation: milliseconds forward, and forward and backward."""
    found = []
    for shape in shapes:
        x = torch.randn(shape, device=device)
        k, live, g = max(1, shape[1] // 10), x.clone().requires_grad_(), torch.randn_like(x)
        for name, f in _others().items():
            line: dict[str, Any] = {"shape": list(shape), "k": k, "operation": name}

            def both(f: Any = f, live: Tensor = live, k: int = k, g: Tensor = g) -> None:
                y = f(live, k)
                torch.autograd.grad(y, live, g[..., : y.shape[-1]])

            try:
                line["forward"] = _milliseconds(lambda f=f, x=x, k=k: f(x, k), device)  # type: ignore[misc]
                line["both"] = _milliseconds(both, device)
            except Exception as error:  # what one operation cannot do, the others may
                line["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
            found.append(line)
    return found


def _name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def _table(header: list[str], lines: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    rows = [header, ["-" * w for w in widths], *lines]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def run(device: str, file: Path | None) -> bool:
    """Prints both tables, writes them to a file, and says whether everything is right."""
    about = {
        "sparsetopk": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": _name(device),
    }
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    checked = check(device)
    lines = [
        [
            c["operator"],
            f"{c['values']:.1e}",
            f"{c['derivatives']:.1e}",
            "ok" if c["right"] else "NO",
        ]
        for c in checked
    ]
    print(_table([f"errors over {checked[0]['rows']} rows", "values", "derivatives", ""], lines))
    timed = measure(device)
    lines = [
        [
            " x ".join(map(str, t["shape"])),
            t["operation"],
            *(
                [f"{t[key]:.3f}" for key in ("forward", "both")]
                if "both" in t
                else [t["error"], ""]
            ),
        ]
        for t in timed
    ]
    print(_table(["float32, k = n/10", "milliseconds", "forward", "and backward"], lines))
    if file is not None:
        file.write_text(json.dumps({"about": about, "checked": checked, "timed": timed}, indent=1))
        print(
            f"{file} has all of this. Please send it, in an issue of the project: hardly any device has "
            "been measured."
        )
    return all(c["right"] for c in checked)
