"""Compiles the Pallas kernels ahead of time by Triton, for GPUs that need not be here, and says what
came out.

Run as a program, as ``triton_compiled.py`` is: a list of requests as JSON on standard input, a list of
results on standard output.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import triton
from jax._src.pallas.triton import pallas_call_registration as registration
from triton.backends.compiler import GPUTarget

from sparsetopk._maths.operator import Operator
from sparsetopk.jax._pallas import kernels
from sparsetopk.jax._rows.threshold import TopKSetting

_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


def in_triton(f, *at):
    """What Pallas hands to Triton."""
    found, lower = [], registration.lowering.lower_jaxpr_to_triton_module

    def caught(*args, **options):
        result = lower(*args, **options)
        found.append(result.module.operation.get_asm(enable_debug_info=False))
        return result

    registration.lowering.lower_jaxpr_to_triton_module = caught
    try:
        jax.jit(f).trace(*at).lower(lowering_platforms=("cuda",))
    finally:
        registration.lowering.lower_jaxpr_to_triton_module = lower
    return found[-1]


def compiled(op, exponent, debias, n, backward, capability=90):
    """Registers, bytes on the stack, and instructions of a thread that load from and store to memory."""
    setting = TopKSetting(Operator(op, exponent, debias), False)
    x, number = (jax.ShapeDtypeStruct((64, size), jnp.float32) for size in (n, 1))
    whole = jax.ShapeDtypeStruct((64, 1), jnp.int32)
    at = (x, whole, number, number, number, number, x) if backward else (x, whole, number, number)
    compute = kernels.backward if backward else kernels.forward
    warps = kernels.Shape.of(n, "cuda").options.num_warps
    with tempfile.TemporaryDirectory() as place:
        source, binary = Path(place, "kernel.ttir"), Path(place, "kernel.cubin")
        source.write_text(in_triton(partial(compute, setting=setting, platform="cuda"), *at))
        target = GPUTarget("cuda", capability, 32)
        made = triton.compile(str(source), target=target, options={"num_warps": warps})
        binary.write_bytes(made.asm["cubin"])
        shown = [
            subprocess.run(
                [_TOOLS / "cuobjdump", option, binary], capture_output=True, text=True, check=True
            ).stdout
            for option in ("-res-usage", "-sass")
        ]
    usage = {name.lower(): int(v) for name, v in re.findall(r"(REG|STACK):(\d+)", shown[0])}
    count = lambda what: len(re.findall(rf"\b{what}\b", shown[1]))  # noqa: E731
    wide = len(re.findall(r"\bLDG\.E\S*\.128", shown[1]))
    return usage | {"loads of 16 bytes": wide, "loads": count("LDG"), "stores": count("STG")}


if __name__ == "__main__":
    json.dump([compiled(**request) for request in json.load(sys.stdin)], sys.stdout)
