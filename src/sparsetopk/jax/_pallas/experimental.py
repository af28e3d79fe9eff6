"""What this package uses of Pallas, which JAX does not promise to keep, and nothing else does.

Imported with the first kernel that is lowered, and not before.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from typing import Any

import jax
from jax import Array

_PALLAS, _TRITON, _TPU = (
    "jax.experimental.pallas",
    "jax.experimental.pallas.triton",
    "jax.experimental.pallas.tpu",
)
NAMES = {
    _PALLAS: ("BlockSpec", "pallas_call", "program_id"),
    _TRITON: ("CompilerParams", "load", "store"),
    _TPU: ("CompilerParams",),
}


def find(module: str, name: str) -> Any:
    found = import_module(module)
    if not hasattr(found, name):
        raise ImportError(f"jax {jax.__version__} has no {module}.{name}")
    return getattr(found, name)


@cache
def available() -> bool:
    """Whether this version of JAX has all of it, and nobody has turned it off; XLA operations serve
    otherwise."""
    if os.environ.get("SPARSETOPK_PALLAS") == "0":
        return False
    try:
        for module, names in NAMES.items():
            for name in names:
                find(module, name)
    except ImportError:
        return False
    return True


def pallas() -> Any:
    return import_module(_PALLAS)


def gpu_options(warps: int) -> Any:
    return find(_TRITON, "CompilerParams")(num_warps=warps, num_stages=1)


def tpu_options() -> Any:
    return find(_TPU, "CompilerParams")(dimension_semantics=("parallel",))


def masked_load(ref: Any, inside: Array, otherwise: Array) -> Array:
    return find(_TRITON, "load")(ref, mask=inside, other=otherwise)


def masked_store(ref: Any, values: Array, inside: Array) -> None:
    find(_TRITON, "store")(ref, values, mask=inside)
