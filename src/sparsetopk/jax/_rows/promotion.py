"""How numbers of different types and shapes go together in the maths, whatever a user has set."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import jax

P = ParamSpec("P")
R = TypeVar("R")


def promoting(f: Callable[P, R]) -> Callable[P, R]:
    """f, traced with the promotion of types and shapes that is JAX's default.

    ``jax_numpy_dtype_promotion="strict"`` and ``jax_numpy_rank_promotion="raise"`` are there to find
    mistakes in the code of those who set them.
    """

    @wraps(f)
    def traced(*args: P.args, **options: P.kwargs) -> R:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return f(*args, **options)

    return traced
