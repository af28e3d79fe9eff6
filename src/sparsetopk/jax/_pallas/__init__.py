"""The top-k family as Pallas kernels, for GPUs (by Triton) and TPUs; imported with the first of them.

``_maths`` runs inside the kernels as it stands: ``tiles.py`` has the namespace that it is written over.
"""

from __future__ import annotations

from typing import Any

from . import experimental

# The longest rows, by dtype: what registers hold, and on a TPU eight times that is a small part of the
# memory beside its core.
_ON_GPU = {"float16": 1 << 14, "bfloat16": 1 << 14, "float32": 1 << 14, "float64": 1 << 13}
_ON_TPU = {"bfloat16": 1 << 14, "float32": 1 << 14}
_LONGEST: dict[str, dict[str, int]] = {"cuda": _ON_GPU, "rocm": _ON_GPU, "tpu": _ON_TPU}


def takes(platform: str, x: Any) -> bool:
    """Whether the kernels are there for rows x (..., n), given by their type; a number of rows that is
    known later, for an exported program, they cannot have."""
    longest = _LONGEST.get(platform, {}).get(str(x.dtype), 0)
    if not all(isinstance(size, int) and size > 0 for size in x.shape):
        return False
    return bool(x.shape[-1] <= longest) and experimental.available()
