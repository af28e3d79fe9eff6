"""Pruning while training: the weights that a model sees are a top-k in magnitude of those it learns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .._checks import check_choice
from ._functions.multi import topk_mag_each, topk_mag_multi
from ._rows.arguments import AxisName, Number
from ._rows.calls import varying
from ._rows.pieces import Spread, own_axes

Tree = TypeVar("Tree")
Where = Callable[[str, Any], bool]
Keep = Any
"""A number, a pytree of numbers, or a function of path and leaf."""


def is_weight(path: str, leaf: Any) -> bool:
    """Kernels and embeddings: arrays of floats with at least two axes."""
    return hasattr(leaf, "ndim") and leaf.ndim >= 2 and jnp.issubdtype(leaf.dtype, jnp.floating)


def prune_params(
    params: Tree,
    keep: Keep = 0.1,
    lam: Number = 1e-4,
    *,
    p: float = 2.0,
    scope: Literal["tensor", "global"] = "tensor",
    where: Where = is_weight,
    straight_through: bool = False,
    axis_name: AxisName = None,
) -> Tree:
    """The parameters with ``topk_mag`` of their weights, for any pytree.

    Give the model ``prune_params(params)`` and the optimiser ``params``: gradients go through the
    selection, also to weights near its boundary that are not selected. For p = 2, lam is a pure number,
    whatever the scale of the weights. With ``lam=0`` at the end of training the result is exactly
    sparse. ``sparsetopk.jax.optax.pruned`` does this around an optimiser.

    ``keep`` is the share of the weights that is kept (a float in [0, 1]) or their number (an int): of
    each tensor, or with ``scope="global"`` of all together. It may be traced, as ``lam`` may, so that a
    schedule runs in one compiled step; and for each tensor it may be another: a pytree with the
    structure of ``params`` or a prefix of it, or a function of path and leaf.
    ``where(path, leaf)`` says which leaves are pruned, by a path like "dense/kernel"; by default arrays
    of floats with two axes or more. ``straight_through=True`` gives the hard selection with the
    derivative of the relaxed one.

    Parameters that are sharded stay so, and no weight moves between devices (``topk_mag_multi``). Inside
    ``shard_map``, ``axis_name`` names the mesh axes over which they are sharded; it is () where every
    device prunes parameters of its own.

    >>> params = {"kernel": jnp.arange(12.0).reshape(3, 4), "bias": jnp.ones(4)}
    >>> prune_params(params, keep=0.25, lam=0.0)["kernel"]
    Array([[ 0.,  0.,  0.,  0.],
           [ 0.,  0.,  0.,  0.],
           [ 0.,  9., 10., 11.]], dtype=float32)
    """
    check_choice("scope", scope, ("tensor", "global"))
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    names = [_name(path) for path, _ in leaves]
    new = [leaf for _, leaf in leaves]
    chosen = [i for i, leaf in enumerate(new) if where(names[i], leaf)]
    if not chosen:
        raise ValueError("where must hold for at least one leaf of params, got none")
    weights = [jnp.asarray(new[i]) for i in chosen]
    options = {"p": p, "straight_through": straight_through, "axis_name": axis_name}
    if scope == "global":
        k = _count(_one(keep), _size(weights, axis_name))
        found = topk_mag_multi(weights, k, lam, **options)  # type: ignore[arg-type]
    else:
        each = zip(_of_each(keep, params, names, new, chosen), weights, strict=True)
        ks = [_count(share, _size([w], axis_name)) for share, w in each]
        found = topk_mag_each(weights, ks, lam, **options)  # type: ignore[arg-type]
    for i, w in zip(chosen, found, strict=True):
        new[i] = w
    return jax.tree_util.tree_unflatten(structure, new)


def _size(weights: list[Array], axis_name: AxisName) -> int:
    """How many weights there are, over all shards."""
    over = {name for w in weights for name in varying(w)}
    if over and axis_name is None:
        raise ValueError(
            f"axis_name must be given inside shard_map, where params differ over {sorted(over)}: the "
            "axes over which they are sharded, or () to prune every shard by itself"
        )
    names = (axis_name,) if isinstance(axis_name, str) else axis_name or ()
    return Spread.of(weights, own_axes(weights, names)).n


def _is_number(keep: object) -> TypeGuard[Number]:
    return isinstance(keep, (int, float, np.generic)) or hasattr(keep, "dtype")


def _one(keep: Keep) -> Number:
    if not _is_number(keep):
        raise TypeError(f"keep must be one number with scope='global', got {keep!r}")
    return keep


def _of_each(
    keep: Keep, params: Any, names: list[str], leaves: list[Any], chosen: list[int]
) -> list[Number]:
    """What is kept of each of the leaves that are chosen."""
    if _is_number(keep):
        return [keep] * len(chosen)
    if callable(keep):
        return [keep(names[i], leaves[i]) for i in chosen]
    if isinstance(keep, str):
        raise TypeError(f"keep must be a share (float) or a number of weights (int), got {keep!r}")
    every = jax.tree.leaves(jax.tree.broadcast(keep, params))
    return [every[i] for i in chosen]


def sparsity(params: Any, where: Where = is_weight) -> dict[str, tuple[int, int]]:
    """For logging: how many weights of each leaf are not 0, of how many; "" is all together.

    >>> sparsity({"kernel": jnp.eye(3), "bias": jnp.ones(3)})
    {'kernel': (3, 9), '': (3, 9)}
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    found = {
        _name(path): (int(jnp.count_nonzero(leaf)), leaf.size)
        for path, leaf in leaves
        if where(_name(path), leaf)
    }
    totals = list(zip(*found.values(), strict=True)) or [(0,), (0,)]
    return found | {"": (sum(totals[0]), sum(totals[1]))}


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _count(keep: Number, n: int) -> Number:
    """How many of n weights are kept."""
    if isinstance(keep, np.generic) or (isinstance(keep, np.ndarray) and keep.ndim == 0):
        keep = keep.item()
    if isinstance(keep, (Array, np.ndarray)):  # it may be traced: a bad one makes the weights NaN
        whole = jnp.issubdtype(keep.dtype, jnp.integer)
        return jnp.asarray(keep) if whole else jnp.round(lax.stop_gradient(keep) * n)
    if isinstance(keep, bool) or not isinstance(keep, (int, float)):
        raise TypeError(f"keep must be a share (float) or a number of weights (int), got {keep!r}")
    most = n if isinstance(keep, int) else 1
    if not 0 <= keep <= most:
        raise ValueError(f"keep must be in [0, {most}], got {keep}")
    return keep if isinstance(keep, int) else round(keep * n)
