"""Pruning while training: the weights that a model sees are a top-k in magnitude of those it learns."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from .._checks import check_choice
from ._functions.operators import topk_mag
from ._rows.arguments import Number

Tree = TypeVar("Tree")
Where = Callable[[str, Any], bool]


def is_weight(path: str, leaf: Any) -> bool:
    """Kernels and embeddings: arrays of floats with at least two axes."""
    return hasattr(leaf, "ndim") and leaf.ndim >= 2 and jnp.issubdtype(leaf.dtype, jnp.floating)


def prune_params(
    params: Tree,
    keep: float = 0.1,
    lam: Number = 1e-4,
    *,
    p: float = 2.0,
    scope: Literal["tensor", "global"] = "tensor",
    where: Where = is_weight,
    straight_through: bool = False,
) -> Tree:
    """The parameters with ``topk_mag`` of their weights, for any pytree.

    Give the model ``prune_params(params)`` and the optimiser ``params``: gradients go through the
    selection, also to weights near its boundary that are not selected. For p = 2, lam is a pure number,
    whatever the scale of the weights. With ``lam=0`` at the end of training the result is exactly
    sparse.

    ``keep`` is the share of the weights that is kept (a float in [0, 1]) or their number (an int): of
    each tensor, or with ``scope="global"`` of all together, which are put into one vector for that.
    ``where(path, leaf)`` says which leaves are pruned, by a path like "dense/kernel"; by default arrays
    of floats with two axes or more. ``straight_through=True`` gives the hard selection with the
    derivative of the relaxed one.

    >>> params = {"kernel": jnp.arange(12.0).reshape(3, 4), "bias": jnp.ones(4)}
    >>> prune_params(params, keep=0.25, lam=0.0)["kernel"]
    Array([[ 0.,  0.,  0.,  0.],
           [ 0.,  0.,  0.,  0.],
           [ 0.,  9., 10., 11.]], dtype=float32)
    """
    check_choice("scope", scope, ("tensor", "global"))
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    chosen = [i for i, (path, leaf) in enumerate(leaves) if where(_name(path), leaf)]
    if not chosen:
        raise ValueError("where must hold for at least one leaf of params, got none")

    def pruned(w: Array) -> Array:
        k = _count(keep, w.size)
        return topk_mag(w, k, lam, p=p, straight_through=straight_through)

    weights = [jnp.asarray(leaves[i][1]) for i in chosen]
    if scope == "global":
        together = pruned(jnp.concatenate([w.reshape(-1) for w in weights]))
        parts = jnp.split(together, list(accumulate(w.size for w in weights))[:-1])
    else:
        parts = [pruned(w.reshape(-1)) for w in weights]
    new = [leaf for _, leaf in leaves]
    for i, w, part in zip(chosen, weights, parts, strict=True):
        new[i] = part.reshape(w.shape).astype(w.dtype)
    return jax.tree_util.tree_unflatten(structure, new)


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _count(keep: float, n: int) -> int:
    """How many of n weights are kept."""
    if isinstance(keep, bool) or not isinstance(keep, (int, float)):
        raise TypeError(f"keep must be a share (float) or a number of weights (int), got {keep!r}")
    most = n if isinstance(keep, int) else 1
    if not 0 <= keep <= most:
        raise ValueError(f"keep must be in [0, {most}], got {keep}")
    return keep if isinstance(keep, int) else round(keep * n)
