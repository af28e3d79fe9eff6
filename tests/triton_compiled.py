"""Compiles the Triton kernels ahead of time, for GPUs that need not be here, and says what came out.

Run as a program: a list of requests as JSON on standard input, a list of results on standard output.
Triton decides when it is imported whether kernels are interpreted or compiled, so that tests, which
interpret them, ask for this in a process of its own.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sparsetopk._maths.operator import Operator
from sparsetopk.torch._triton import (
    backward,
    forward,
    lam,
    launch_long,
    long,
    long_backward,
    pav,
    select,
    value,
)
from sparsetopk.torch._triton.launch import Shape, is_light

_KERNELS = {
    "forward": forward.forward_kernel,
    "backward": backward.backward_kernel,
    "value": value.value_kernel,
    "value_backward": value.value_backward_kernel,
    "select": select.select_kernel,
    "select_backward": select.select_backward_kernel,
    "slots": select.slots_kernel,
    "pav": pav.pav_kernel,
    "merge": pav.merge_kernel,
    "lam": lam.lam_kernel,
}
_SOLVED = ("backward", "select_backward")  # kernels that are handed a state
_LIGHT = ("forward", "value", "value_backward", "select", "lam")  # and with room if S is light
_LONG = {
    "sample": long.sample_kernel,
    "gather": long.gather_kernel,
    "solve": long.solve_kernel,
    "apply": long.apply_kernel,
    "sums": long_backward.sums_kernel,
    "spread": long_backward.spread_kernel,
}
_TYPES = {"float32": "fp32", "float64": "fp64", "float16": "fp16", "bfloat16": "bf16"}
_OF_X = ("x_ptr", "y_ptr", "g_ptr", "dx_ptr", "value_ptr", "starts_ptr")
_POINTERS = {"copied_ptr": "i32", "index_ptr": "i32", "table_ptr": "fp64", "again_ptr": "fp64"}
_POINTERS |= {"first_ptr": "i32", "stack_ptr": "fp64"}
_POINTERS |= {"other_ptr": "i32", "delta_ptr": "fp64", "total_ptr": "fp64"}
_POINTERS |= {f"{name}_ptr": "i64" for name in ("order", "w_order", "block", "paired")}
_INDICES = ("index_ptr", "t_ptr")  # of slots, and of classes where targets are labels
# Arguments of a launch with numbers for k and lam > 0, and what a request may replace.
_CONSTANTS = {
    "K_TENSOR": False,
    "LAM_TENSOR": False,
    "OP": 0,
    "E": 1.0,
    "DEBIAS": False,
    "TIMES": False,
    "RELAXED": True,
    "HARD": False,
    "WRITE": True,
    "COUNT": False,
    "IN_K": False,
    "IN_LAM": False,
    "KIND": 0,
    "COMPLETION": 0,
    "SMOOTHED": False,
    "WEIGHTED": False,
    "REDUCTION": 2,
    "STRAIGHT": False,
    "IN_SLOTS": True,
    "IN_DROPPED": False,
    "PHI": 0,
    "LANES": 32,
    "TABLE": False,
    "AGAIN": False,
    "G": 1024,
    "CHUNK": launch_long.CHUNK,
    "S": 8192,
}


def _source(name: str, n: int, dtype: str, constants: dict[str, Any]) -> tuple[ASTSource, Shape]:
    kernel = (_KERNELS | _LONG)[name]
    computed = "float64" if dtype == "float64" else "float32"
    fixed = asked = _CONSTANTS | constants | {"D": getattr(tl, computed), "T": getattr(tl, dtype)}
    operator = Operator(fixed["OP"], fixed["E"], fixed["DEBIAS"])
    light = name in _SOLVED or (name in _LIGHT and is_light(operator))
    shape = Shape.of(n, operator, getattr(torch, computed), light)
    if name in ("pav", "merge"):
        shape = Shape(1, fixed["LANES"], 1)
    if name in _LONG:
        shape = Shape(launch_long.CHUNK, 1, launch_long.WARPS[kernel])
    fixed = fixed | {"ROWS": shape.rows, "BLOCK": shape.block}
    fixed = {key: value for key, value in fixed.items() if key in kernel.arg_names}
    signature: dict[str, str] = {}
    for argument in kernel.arg_names:
        if argument in fixed:
            signature[argument] = "constexpr"
        elif argument.endswith("_ptr"):
            of = _TYPES[dtype if argument in _OF_X else computed]
            if fixed.get("TABLE") and argument in _OF_X:
                of = "i64"
            of = _POINTERS.get(argument, of)
            if name not in _LONG and argument in _INDICES[: 1 + (asked["KIND"] == 1)]:
                of = "i64"
            signature[argument] = "*" + of
        else:
            signature[argument] = "i64" if argument.endswith(("bits", "ignored")) else "i32"
    # A launch sees that pointers and n are divisible by 16.
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, argument in enumerate(kernel.arg_names)
        if argument.endswith("_ptr") or (argument == "n" and n % 16 == 0)
    }
    constexprs = {(kernel.arg_names.index(key),): value for key, value in fixed.items()}
    return ASTSource(kernel, signature=signature, constexprs=constexprs, attrs=attrs), shape


def _of_cuda(cubin: bytes) -> dict[str, Any]:
    """Registers, spills, and the loads and stores of global memory in the machine code."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run(
                [tool, flag, file.name], capture_output=True, text=True, check=True
            ).stdout
            for flag in ("-res-usage", "-sass")
        )
    used = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return {
        "registers": used["REG"],
        "spills": used["STACK"] + used["LOCAL"] + len(re.findall(r"\b(?:LDL|STL)\b", code)),
        "loads": re.findall(r"\bLDG\.E([\w.]*)", code),
        "stores": re.findall(r"\bSTG\.E([\w.]*)", code),
    }


def _of_hip(assembly: str) -> dict[str, Any]:
    def last(key: str) -> int:
        return int(re.findall(rf"\.{key}:\s+(\d+)", assembly)[-1])

    return {
        "registers": last("vgpr_count"),
        "spills": last("vgpr_spill_count") + last("private_segment_fixed_size"),
        "loads": re.findall(r"\b(?:global|buffer)_load_(\w+)", assembly),
        "stores": re.findall(r"\b(?:global|buffer)_store_(\w+)", assembly),
    }


def compiled(name: str, arch: int | str, n: int, dtype: str = "float32", **constants: Any) -> dict:
    """A kernel for rows of n entries on an architecture: 90 is sm_90, "gfx942" is AMD's."""
    source, shape = _source(name, n, dtype, constants)
    is_cuda = isinstance(arch, int)
    target = GPUTarget("cuda", arch, 32) if is_cuda else GPUTarget("hip", arch, 64)
    found = triton.compile(source, target=target, options={"num_warps": shape.warps})
    counts = _of_cuda(found.asm["cubin"]) if is_cuda else _of_hip(found.asm["amdgcn"])
    return counts | {"shared": found.metadata.shared, **shape._asdict()}


if __name__ == "__main__":
    json.dump([compiled(**request) for request in json.load(sys.stdin)], sys.stdout)
