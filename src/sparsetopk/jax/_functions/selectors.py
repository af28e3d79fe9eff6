"""Tokens and keys that are selected for each input, as pure functions: exactly k, straight through.

As the layers of ``sparsetopk.torch.nn``: what is selected is found without gradients, and the relaxed
top-k is solved among the slots, which hold what is selected and what competes. ``lam = 0`` is the hard
selection, with k slots.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..._checks import check_positive_int
from ..._maths.select import check_slots, default_capacity
from .._rows.arguments import Number, check_float_array, is_hard
from .._rows.promotion import promoting
from .operators import topk_mask


class SelectedTokens(NamedTuple):
    """What ``select_tokens`` has selected: ``[..., slots]``, and tokens ``[..., slots, dim]``."""

    tokens: Array  # times their weights
    weights: Array  # 1 for what is selected, 0 for what competes; both have a derivative
    indices: Array
    selected: Array  # whether a slot is of the k


@promoting
def select_tokens(
    x: Array,
    scores: Array,
    k: int,
    lam: Number = 1.0,
    *,
    p: float = 2.0,
    capacity: int | None = None,
    backward_k: int | None = None,
    where: Array | None = None,
) -> SelectedTokens:
    """k of n tokens for each input, ``x`` ``[..., n, dim]``, by their ``scores`` ``[..., n]``.

    The first k slots are the selection, in the order of the tokens; those after them hold tokens that
    compete, which are 0 in the forward and have the relaxed derivative. ``where`` is True where there is
    a token. ``backward_k``, at most k, is the k of the derivative: 1 is better where few of the k are
    what is looked for.

    >>> select_tokens(jnp.eye(4), jnp.array([0.3, 2.0, -1.0, 1.0]), k=2, lam=0.0).indices
    Array([1, 3], dtype=int32)
    """
    n = check_float_array("scores", scores).shape[-1]
    if x.shape[:-1] != scores.shape:
        raise ValueError(
            f"scores must have the shape of x without its last axis, {x.shape[:-1]}, got {scores.shape}"
        )
    slots = _slots(k, n, lam, capacity)
    if where is not None:
        scores = jnp.where(where, scores, -jnp.inf)
    top, best = lax.top_k(lax.stop_gradient(scores), slots)
    selected = _first(top, k)
    # What is selected comes first, in the order of the tokens.
    place = jnp.arange(slots, dtype=best.dtype)
    _, indices = lax.sort((jnp.where(selected, best, n + place), best), num_keys=1)
    selected = place < selected.sum(axis=-1, keepdims=True, dtype=best.dtype)
    few = jnp.take_along_axis(scores, indices, -1)
    weights = _weights(few, selected, k, lam, p, backward_k)
    tokens = jnp.take_along_axis(x, indices[..., None], -2)
    return SelectedTokens(
        tokens * weights[..., None].astype(tokens.dtype), weights, indices, selected
    )


@promoting
def topk_attention(
    query: Array,
    key: Array,
    value: Array,
    index_query: Array,
    index_key: Array,
    k: int,
    lam: Number = 1.0,
    *,
    p: float = 2.0,
    capacity: int | None = None,
    backward_k: int | None = None,
    is_causal: bool = False,
    where: Array | None = None,
    chunk: int = 512,
) -> Array:
    """Attention of each query to k keys, those with the largest products of index vectors.

    ``query``, ``key`` and ``value`` are ``[batch, L, heads, dim]`` as for
    ``jax.nn.dot_product_attention``, the index vectors ``[batch, L, index_dim]``; one selection is for
    all heads. Gradients go to all five, straight through: index scores of all keys are computed for
    ``chunk`` queries at a time and not kept, and the backward gathers ``capacity`` keys for every query.
    ``where``, ``[batch, L]``, is True where there are keys; a query that sees none gives 0.

    >>> q = jnp.ones((1, 3, 2, 4))
    >>> topk_attention(q, q, q, q[:, :, 0], q[:, :, 0], k=2).shape
    (1, 3, 2, 4)
    """
    a, b = _of_index("query", query, index_query), _of_index("key", key, index_key)
    slots = _slots(k, b.shape[1], lam, capacity)
    a = a / math.sqrt(a.shape[-1])
    at, allowed = _candidates(*lax.stop_gradient((a, b)), slots, is_causal, where, chunk)
    scores = jnp.einsum("bqd,bqsd->bqs", a, _rows_at(b, at))
    scores = jnp.where(allowed, scores, -jnp.inf)
    selected = _first(scores, k)
    y = _weights(scores, selected, k, lam, p, backward_k)
    logits = jnp.einsum("bqhd,bqshd->bqhs", query, _rows_at(key, at)) / math.sqrt(query.shape[-1])
    logits = jnp.where(allowed[:, :, None], logits, -jnp.inf)
    weights = _exp(logits, selected[:, :, None]) * y[:, :, None].astype(logits.dtype)
    # At least 1, but for queries that see no key.
    total = jnp.maximum(weights.sum(axis=-1, keepdims=True), 0.5)
    return jnp.einsum("bqhs,bqshd->bqhd", weights / total, _rows_at(value, at))


def _of_index(name: str, x: object, index: object) -> Array:
    """The checked index vectors beside the queries or the keys."""
    shape = check_float_array(name, x).shape[:2]
    found = check_float_array(f"index_{name}", index)
    if found.ndim != 3 or found.shape[:2] != shape:
        raise ValueError(
            f"index_{name} must have shape [batch, L, index_dim] with batch and L of {name}, "
            f"{shape}, got {found.shape}"
        )
    return found


def _exp(logits: Array, selected: Array) -> Array:
    """Exponentials over the largest of those that are selected, whatever logits compete with them.

    What competes may be far above; it is 0 in the forward, and its derivative is kept finite.
    """
    top = lax.stop_gradient(jnp.where(selected, logits, -jnp.inf).max(axis=-1, keepdims=True))
    most = math.log(float(jnp.finfo(logits.dtype).max)) / 2
    return jnp.exp(jnp.minimum(logits - jnp.where(top > -jnp.inf, top, 0.0), most))


def _rows_at(x: Array, at: Array) -> Array:
    """x ``[batch, L, ...]`` at indices ``[batch, ...]``, each batch by itself: it may be sharded."""
    return jax.vmap(lambda x, at: x[at])(x, at)


def _slots(k: int, n: int, lam: Number, capacity: int | None) -> int:
    if check_positive_int("k", k) > n:
        raise ValueError(f"k must be in [1, n] with n={n}, got {k}")
    if is_hard(lam):
        return k
    if capacity is None:
        return default_capacity(k, n)
    check_slots(check_positive_int("capacity", capacity), k, n)
    return min(n, capacity)


def _first(scores: Array, k: int) -> Array:
    """Which of the slots, whose scores decrease, are of the k."""
    return (jnp.arange(scores.shape[-1]) < k) & (lax.stop_gradient(scores) > -jnp.inf)


def _weights(
    scores: Array, selected: Array, k: int, lam: Number, p: float, backward_k: int | None
) -> Array:
    """1 for the slots that are selected, with the relaxed derivative."""
    of = k if backward_k is None else check_positive_int("backward_k", backward_k, k)
    if is_hard(lam):
        return selected.astype(scores.dtype)
    relaxed = topk_mask(scores, of, lam, p=p)
    return selected.astype(relaxed.dtype) + (relaxed - lax.stop_gradient(relaxed))


def _candidates(
    a: Array, b: Array, slots: int, is_causal: bool, where: Array | None, chunk: int
) -> tuple[Array, Array]:
    """The keys with the largest index scores, ``[batch, L, slots]``, and which may be seen."""
    keys = jnp.arange(b.shape[1])

    def of_query(each: tuple[Array, Array]) -> tuple[Array, Array]:
        index, position = each  # [batch, index_dim]
        scores = jnp.einsum("bd,bkd->bk", index, b)
        scores = scores if where is None else jnp.where(where, scores, -jnp.inf)
        scores = jnp.where(keys > position, -jnp.inf, scores) if is_causal else scores
        best, at = lax.top_k(scores, slots)
        return at, best > -jnp.inf

    queries = a.swapaxes(0, 1), jnp.arange(a.shape[1])
    at, allowed = lax.map(of_query, queries, batch_size=check_positive_int("chunk", chunk))
    return at.swapaxes(0, 1), allowed.swapaxes(0, 1)
