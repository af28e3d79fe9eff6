"""Every path through the package that computes an operator of the top-k family, behind one face.

A path takes rows of float64 numbers that its dtype can hold, and returns y, the cotangents and, where it
has a forward mode, the tangent of y.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from typing import Any, NamedTuple

import numpy as np

import sparsetopk
from fuzz_oracle import KINDS, Answer, Rows
from levels import LEVELS
from sparsetopk import _core as core

NAMES = {"mask": "topk_mask", "two-sided": "topk_mask", "sign": "topk_sign"}
# XLA and torch.compile compile for each: few p and few lengths.
FEW_PS = (2.0, 1.5, 4 / 3, 1.2, 3.0)
EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
LARGEST = {"float64": 1.7e308, "float32": 3.4e38, "float16": 65504.0, "bfloat16": 3.3e38}


class Found(NamedTuple):
    answer: Answer
    dy: np.ndarray | None


class Path(NamedTuple):
    run: Callable[[str, float, str, Rows], Found]
    dtypes: tuple[str, ...]
    kinds: tuple[str, ...] = KINDS
    few: bool = False  # compiled for each p and shape
    most: int = 1 << 14  # entries in a call
    narrow: bool = False  # computes in float32, unless x is float64


def options(kind: str, p: float) -> dict[str, Any]:
    extra = {"two-sided": {"two_sided": True}, "magnitude": {"debias": False}}
    return {"p": p} | extra.get(kind, {})


def name_of(kind: str) -> str:
    return NAMES.get(kind, "topk_mag")


# --------------------------------------------------------------------------------------------- NumPy


def by_numpy(kind: str, p: float, dtype: str, rows: Rows) -> Found:
    f, at = name_of(kind), (rows.x.astype(dtype), rows.k, rows.lam)
    y = getattr(sparsetopk, f)(*at, **options(kind, p))
    found = getattr(sparsetopk, f + "_vjp")(*at, dy=rows.g.astype(dtype), **options(kind, p))
    tangents = {"dx": rows.dx.astype(dtype), "dk": rows.dk, "dlam": rows.dlam}
    dy = getattr(sparsetopk, f + "_jvp")(*at, **tangents, **options(kind, p))
    return Found(Answer(*(np.float64(v) for v in (y, *found))), np.float64(dy))


def without_core(kind: str, p: float, dtype: str, rows: Rows) -> Found:
    native, core.native = core.native, None
    try:
        return by_numpy(kind, p, dtype, rows)
    finally:
        core.native = native


def of_levels(kind: str, p: float, dtype: str, rows: Rows) -> Found:
    """The kernels of each instruction set, in processes of their own: all bits are the same."""
    with tempfile.TemporaryDirectory() as directory:
        source = f"{directory}/rows.npz"
        np.savez(source, *rows)
        runs = []
        for level in LEVELS:
            command = [
                sys.executable,
                __file__,
                kind,
                repr(p),
                dtype,
                source,
                f"{directory}/{level}.npz",
            ]
            runs.append(subprocess.Popen(command, env=os.environ | {"SPARSETOPK_SIMD": level}))
        if any(run.wait() for run in runs):
            raise RuntimeError("a process has failed")
        found = []
        for level in LEVELS:
            with np.load(f"{directory}/{level}.npz") as file:
                found.append([file[name] for name in file.files])
    for level, other in zip(LEVELS[1:], found[1:], strict=True):
        for one, two in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(one, two, err_msg=f"{LEVELS[0]} and {level} differ")
    *answer, dy = found[0]
    return Found(Answer(*answer), dy)


# --------------------------------------------------------------------------------------------- torch


def _torch(kind: str, p: float, dtype: str, rows: Rows, call: Any, forward: bool) -> Found:
    import torch

    x, g, dx = (torch.from_numpy(v).to(getattr(torch, dtype)) for v in (rows.x, rows.g, rows.dx))
    k, lam, dk, dlam = (torch.from_numpy(v) for v in (rows.k, rows.lam, rows.dk, rows.dlam))
    at = [v.clone().requires_grad_() for v in (x, k, lam)]
    y = call(*at)
    found = torch.autograd.grad(y, at, g, materialize_grads=True)
    dy = torch.func.jvp(call, (x, k, lam), (dx, dk, dlam))[1].double().numpy() if forward else None
    return Found(Answer(*(v.detach().double().numpy() for v in (y, *found))), dy)


def _torch_call(kind: str, p: float, **more: Any) -> Any:
    import sparsetopk.torch as st

    return functools.partial(getattr(st, name_of(kind)), **options(kind, p), **more)


def by_torch(kind: str, p: float, dtype: str, rows: Rows) -> Found:
    return _torch(kind, p, dtype, rows, _torch_call(kind, p), forward=True)


def by_threads(kind: str, p: float, dtype: str, rows: Rows) -> Found:
    """With one thread and with three: all bits are the same."""
    import torch

    before, found = torch.get_num_threads(), []
    for threads in (3, 1):
        torch.set_num_threads(threads)
        found.append(_torch(kind, p, dtype, rows, _torch_call(kind, p), forward=False))
    torch.set_num_threads(before)
    for one, other in zip(found[0].answer, found[1].answer, strict=True):
        np.testing.assert_array_equal(one, other, err_msg="numbers of threads differ")
    return found[0]


@contextlib.contextmanager
def _replaced(*places: tuple[Any, str, Any]) -> Any:
    before = [getattr(owner, name) for owner, name, _ in places]
    for owner, name, value in places:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name, _), value in zip(places, before, strict=True):
            setattr(owner, name, value)


def by_torch_operations(kind: str, p: float, dtype: str, rows: Rows) -> Found:
    """As another device computes it, in ordinary operations and float32 unless x is float64."""
    import torch

    from sparsetopk.torch._fused import rows as fused
    from sparsetopk.torch._rows import arguments
    from sparsetopk.torch._solvers import ops, vectorized

    compute = torch.float64 if dtype == "float64" else torch.float32
    with _replaced(
        (arguments, "compute_dtype", lambda x: compute),
        (fused, "takes", lambda *_: False),
        # Passes that change nothing are left out here, as there is time to look.
        (ops, "threshold", lambda *a, **o: vectorized.state_of(*a, **o, stop_early=True)),
    ):
        return _torch(kind, p, dtype, rows, _torch_call(kind, p), forward=False)


def by_many_tensors(kind: str, p: float, dtype: str, rows: Rows) -> Found:
    """Each row cut into pieces."""
    import torch

    import sparsetopk.torch as st

    parts = []
    for i, row in enumerate(rows.x):
        cuts = sorted({0, len(row) // 3, len(row) - i % 2, len(row)})
        pieces = [
            torch.tensor(row[a:b]).to(getattr(torch, dtype)) for a, b in itertools.pairwise(cuts)
        ]
        gs = [
            torch.tensor(rows.g[i, a:b]).to(getattr(torch, dtype))
            for a, b in itertools.pairwise(cuts)
        ]
        at = [
            v.requires_grad_()
            for v in (*pieces, torch.tensor(rows.k[i, 0]), torch.tensor(rows.lam[i, 0]))
        ]
        ys = st.topk_mag_multi(at[:-2], *at[-2:], **options(kind, p))
        *dx, dk, dlam = torch.autograd.grad(ys, at, gs, materialize_grads=True)
        flat = lambda vs: torch.cat(list(vs)).detach().double().numpy()  # noqa: E731
        parts.append((flat(ys), flat(dx), dk.numpy()[None], dlam.numpy()[None]))
    return Found(Answer(*(np.stack(v) for v in zip(*parts, strict=True))), None)


def by_processes(kind: str, p: float, dtype: str, rows: Rows) -> Found:
    """Rows that are sharded over a group, here of this process alone."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    call = _torch_call(kind, p, group=dist.group.WORLD)
    return _torch(kind, p, dtype, rows, call, forward=False)


@functools.cache
def _graph(kind: str, p: float) -> Any:
    import torch

    return torch.compile(_torch_call(kind, p), backend="aot_eager", fullgraph=True)


def by_graph(kind: str, p: float, dtype: str, rows: Rows) -> Found:
    """Dynamo limits how often it compiles a function: here one has all settings of an operator."""
    import torch

    config = torch._dynamo.config
    limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    with config.patch({limit: 1 << 12, f"accumulated_{limit}": 1 << 12}):
        return _torch(kind, p, dtype, rows, _graph(kind, p), forward=False)


@contextlib.contextmanager
def _interpreted(*more: tuple[Any, str, Any]) -> Any:
    """CPU tensors take the kernels for GPUs, under Triton's interpreter, and it is seen to be called."""
    from launches import kernels_run
    from sparsetopk.torch._triton import launch, state

    replaced = (state, "is_served", lambda x: x.is_cpu), (launch, "_ENTRIES", 1 << 16), *more
    # NumPy does not warn of what kernels may do.
    with np.errstate(all="ignore"), _replaced(*replaced), kernels_run() as called:
        yield
    assert called, "no kernel was interpreted"


def by_triton(kind: str, p: float, dtype: str, rows: Rows) -> Found:
    """Rows in registers."""
    with _interpreted():
        return _torch(kind, p, dtype, rows, _torch_call(kind, p), forward=False)


def _small() -> tuple[tuple[Any, str, Any], ...]:
    """Every row is a long one, of chunks and samples in proportion."""
    from sparsetopk.torch._triton import launch, launch_long

    is_long = (launch, "is_long", lambda *_: True)
    return is_long, (launch_long, "_SAMPLE", 32), (launch_long, "CHUNK", 64)


def by_triton_in_chunks(kind: str, p: float, dtype: str, rows: Rows) -> Found:
    """Rows that no program holds alone."""
    with _interpreted(*_small()):
        return _torch(kind, p, dtype, rows, _torch_call(kind, p), forward=False)


def by_triton_of_many_tensors(kind: str, p: float, dtype: str, rows: Rows) -> Found:
    with _interpreted(*_small()):
        return by_many_tensors(kind, p, dtype, rows)


# ----------------------------------------------------------------------------------------------- JAX


def _both_modes(f: Any) -> Any:
    import jax

    def run(at: Any, g: Any, tangents: Any) -> Any:
        y, pull = jax.vjp(f, *at)
        return y, *pull(g), jax.jvp(f, at, tangents)[1]

    return run


def _jax_rows(dtype: str, rows: Rows) -> tuple[Any, ...]:
    import jax.numpy as jnp

    x, k, lam, g, *tangents = (
        jnp.asarray(v, dtype if v.shape == rows.x.shape and v.shape[1] > 1 else None) for v in rows
    )
    narrow = jnp.float64 if dtype == "float64" else jnp.float32
    k, lam, tangents[1], tangents[2] = (
        v.astype(narrow) for v in (k, lam, tangents[1], tangents[2])
    )
    x, g, tangents[0] = (v.astype(dtype) for v in (x, g, tangents[0]))
    return (x, k, lam), g, tuple(tangents)


@functools.cache
def _jax_compiled(kind: str, p: float, way: str) -> Any:
    """Of each way one of its own, as it remembers what was traced."""
    import jax

    import sparsetopk.jax as st

    f = functools.partial(getattr(st, name_of(kind)), **options(kind, p))
    return jax.jit(_both_modes(f))


def _by_jax(kind: str, p: float, dtype: str, rows: Rows, way: str) -> Found:
    from jax_ways import in_pallas, in_xla_operations

    ways = {"core": contextlib.nullcontext, "operations": in_xla_operations}
    with ways[way]() if way in ways else in_pallas(way):
        run = _jax_compiled(kind, p, way)
        *found, dy = (np.asarray(v, np.float64) for v in run(*_jax_rows(dtype, rows)))
    return Found(Answer(*found), dy)


def by_jax(kind: str, p: float, dtype: str, rows: Rows) -> Found:
    return _by_jax(kind, p, dtype, rows, "core")


def by_xla(kind: str, p: float, dtype: str, rows: Rows) -> Found:
    return _by_jax(kind, p, dtype, rows, "operations")


def by_pallas_on_gpu(kind: str, p: float, dtype: str, rows: Rows) -> Found:
    """The kernels as they are for a GPU, under Pallas' interpreter."""
    return _by_jax(kind, p, dtype, rows, "cuda")


def by_pallas_on_tpu(kind: str, p: float, dtype: str, rows: Rows) -> Found:
    return _by_jax(kind, p, dtype, rows, "tpu")


@functools.cache
def _jax_sharded(kind: str, p: float) -> Any:
    import jax
    from jax.sharding import PartitionSpec as P

    import sparsetopk.jax as st

    devices = len(jax.devices())
    mesh = jax.make_mesh((devices,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    f = functools.partial(getattr(st, name_of(kind)), axis_name="x", **options(kind, p))
    entries = P(None, "x")
    sharded = jax.shard_map(f, mesh=mesh, in_specs=(entries, P(), P()), out_specs=entries)
    return jax.jit(_both_modes(sharded)), devices


def by_shards(kind: str, p: float, dtype: str, rows: Rows) -> Found:
    run, devices = _jax_sharded(kind, p)
    n = rows.x.shape[1] // devices * devices
    assert n == rows.x.shape[1], "lengths are multiples of the number of devices"
    *found, dy = (np.asarray(v, np.float64) for v in run(*_jax_rows(dtype, rows)))
    return Found(Answer(*found), dy)


ALL = ("float32", "float64", "float16", "bfloat16")
WIDE = ("float32", "float64")
MAGNITUDES = ("magnitude", "debiased")
PATHS: dict[str, dict[str, Path]] = {
    "numpy": {
        "core": Path(by_numpy, ("float64", "float32", "float16")),
        "operations": Path(without_core, ("float64", "float32")),
        "levels": Path(of_levels, ("float64", "float32"), most=1 << 16),
    },
    "torch": {
        "core": Path(by_torch, ALL, most=1 << 16),
        "threads": Path(by_threads, ALL, most=1 << 18),
        "operations": Path(by_torch_operations, ALL, narrow=True),
        "many tensors": Path(by_many_tensors, ALL, MAGNITUDES, most=1 << 11),
        "processes": Path(by_processes, WIDE, most=1 << 12),
        "graph": Path(by_graph, WIDE, few=True),
        "triton": Path(by_triton, ("float32",), most=1 << 12, narrow=True),
        "triton in chunks": Path(by_triton_in_chunks, ("float32",), most=1 << 7, narrow=True),
        "triton of many tensors": Path(
            by_triton_of_many_tensors, ("float32",), MAGNITUDES, most=1 << 7, narrow=True
        ),
    },
    "jax": {
        "core": Path(by_jax, ALL, few=True, narrow=True),
        "operations": Path(by_xla, ALL, few=True, narrow=True),
        "shards": Path(by_shards, WIDE, few=True, most=1 << 12, narrow=True),
        "Pallas for GPUs": Path(by_pallas_on_gpu, ALL, few=True, narrow=True),
        "Pallas for TPUs": Path(by_pallas_on_tpu, ("float32", "bfloat16"), few=True, narrow=True),
    },
}


def _has_triton() -> bool:
    """Whether there is one that the kernels are written for."""
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        return False
    return tuple(map(int, version.split(".")[:2])) >= (3, 5)


if not _has_triton():
    PATHS["torch"] = {name: path for name, path in PATHS["torch"].items() if "triton" not in name}


def _one_level() -> None:
    kind, p, dtype, source, target = sys.argv[1:]
    with np.load(source) as file:
        rows = Rows(*(file[name] for name in file.files))
    found = by_numpy(kind, float(p), dtype, rows)
    np.savez(target, *found.answer, found.dy)


if __name__ == "__main__":
    _one_level()
