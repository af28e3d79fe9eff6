"""What this package uses of torch that torch does not promise to keep, and nothing else does.

Where there is a public way, that is taken. What is missing here is an error when the package is
imported, and not a wrong answer later.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

# By what they are called in torch. None of these has a public counterpart in torch 2.6 to 2.13.
NAMES = (
    "_C._are_functorch_transforms_active",
    "_C._autograd._get_current_graph_task_keep_graph",
    "_C._current_graph_task_id",
    "_C._has_storage",
    "_C._is_tracing",
    "_C._len_torch_dispatch_stack",
    "_disable_dynamo",
    "Tensor._is_zerotensor",
    "autograd.forward_ad._current_level",
)


def find(name: str) -> Any:
    """An attribute of torch; one of an attribute, if there are dots."""
    found: Any = torch
    for part in name.split("."):
        if not hasattr(found, part):
            raise ImportError(
                f"torch must have torch.{name}, which torch {torch.__version__} has not; "
                "install another version of torch, or of sparsetopk"
            )
        found = getattr(found, part)
    return found


(
    #: Whether a transform of torch.func is at work.
    is_transforming,
    #: Whether the backward that is running keeps its graph.
    keeps_graph,
    #: The number of the backward that is running; negative if there is none.
    current_backward,
    #: Whether a tensor has memory at all.
    has_storage,
    #: Whether torch.jit.trace is at work (torch.jit.is_tracing is deprecated with it).
    is_tracing,
    #: How many modes see every operation, such as that of fake tensors.
    dispatch_modes,
    #: As torch.compiler.disable, which would import the compiler here and now.
    without_compiler,
    #: Whether a tensor is zeros that were never written.
    is_zerotensor,
    _,
) = map(find, NAMES)


#: Whether torch tells an export from other compilations, as it does from 2.7 on.
KNOWS_EXPORTS = hasattr(torch.compiler, "is_exporting")


def is_exporting() -> bool:
    """Whether torch.export is known to be at work."""
    return KNOWS_EXPORTS and torch.compiler.is_exporting()


def in_forward_mode() -> bool:
    """Whether a level of forward-mode differentiation is open."""
    return forward_ad._current_level >= 0
