"""How numbers of different types and shapes go together in the maths, whatever a user has set."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

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


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def saturated(values: Array, dtype: Any) -> Array:
    """A derivative in this dtype: one that it cannot hold is its largest number, as in the kernels."""
    limit = jnp.finfo(dtype).max.astype(values.dtype)
    return jnp.clip(values, -limit, limit).astype(dtype)


@saturated.defjvp
def _saturated_jvp(dtype: Any, at: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return saturated(at[0], dtype), tangents[0].astype(dtype)
