"""Routers of a mixture of experts: which tokens go to which experts, as pure functions.

A router turns logits ``[..., tokens, experts]`` into a ``Routing``: for every expert a fixed number of
slots with the tokens that it takes and the weights of its outputs. ``lam = 0`` is the usual hard router;
with ``lam > 0`` tokens near the boundary are shared, and the selection itself has a gradient.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from .._checks import check_choice, check_positive_int
from ._functions.operators import topk_mask
from ._functions.selection import topk_select
from ._rows.arguments import AxisName, Number, check_float_array, is_hard
from ._rows.compiled import compiled, entries
from ._rows.slots import largest

SelectOn = Literal["logits", "gates"]


class Routing(NamedTuple):
    """The tokens that every expert takes: ``[..., experts, slots]`` unless said otherwise."""

    weights: Array  # of the expert's outputs: the selection times the gate, 0 in unused slots
    tokens: Array  # indices, distinct for each expert
    selected: Array  # the selection alone, in [0, 1]
    dropped: Array  # [..., experts]: the part of the selection that found no slot
    balance: Array  # a scalar: the load-balance loss of ``token_choice``, 1 if all is even

    def dispatch(self, x: Array) -> Array:
        """The tokens ``[..., tokens, dim]`` in their slots, ``[..., experts, slots, dim]``; 0 in slots
        that are not used."""
        return _dispatched(x, self.tokens, self.selected, x.ndim - 2)

    def combine(self, y: Array, tokens: int) -> Array:
        """What the experts made of their slots, ``[..., experts, slots, dim]``, times the weights and
        added up for each of so many tokens, ``[..., tokens, dim]``; 0 for those that nobody took."""
        return _combined(y, self.tokens, self.weights, y.ndim - 3, tokens)

    def statistics(self) -> dict[str, Array]:
        """For logging: ``load``, how many tokens every expert takes (a mean over all but experts);
        ``dropped``, the share of the selection that found no slot; ``fractional``, the share of the
        taken tokens that are taken in part."""
        selected, lost = lax.stop_gradient((self.selected, self.dropped.sum()))
        taken, kept = selected > 0, selected.sum()
        tiny = jnp.finfo(kept.dtype).tiny
        return {
            "load": taken.sum(axis=-1).reshape(-1, taken.shape[-2]).astype(kept.dtype).mean(axis=0),
            "dropped": lost / jnp.maximum(kept + lost, tiny),
            "fractional": (taken & (selected < 1)).sum() / jnp.maximum(taken.sum(), 1),
        }


def expert_choice(
    logits: Array,
    k: Number | None = None,
    lam: Number = 0.1,
    *,
    capacity_factor: float | None = None,
    p: float = 2.0,
    two_sided: bool = False,
    select_on: SelectOn = "logits",
    mask: Array | None = None,
    capacity: int | None = None,
    normalize: bool = False,
    noise: float = 0.0,
    key: Array | None = None,
    axis_name: AxisName = None,
) -> Routing:
    r"""Every expert takes k tokens (Zhou et al., 2022; the router of the paper's experiments).

    .. math:: w_{e} = y(s_e) \cdot g_e, \qquad
              y(s_e) = \mathrm{topk\_mask}(s_e, k, \lambda) \text{ over the tokens}, \qquad
              g = \mathrm{softmax}(\text{logits}) \text{ over the experts}

    The scores s are the logits or, with ``select_on="gates"``, the gates g, as V-MoE and the paper have
    it. Gates are of size 1/experts, and so must be lam then: at the same lam far more tokens are
    shared.

    ``mask`` is True where there is a token; the others are never taken. ``capacity`` is the number of
    slots of each expert, as in ``topk_select``; by default ceil(k) if lam is 0. ``normalize=True``
    divides by the sum over the experts of a token, which are 0 to all of them. Give k, or
    ``capacity_factor`` c for k = c tokens/experts, rounded up. ``noise`` is the standard deviation of
    what is added to the logits while training, drawn with ``key``.

    Inside ``shard_map``, ``axis_name`` names the mesh axes over which tokens are sharded: k of all of
    them are taken. Slots are those of this device, and their tokens are counted from 0 on each.

    >>> expert_choice(jnp.eye(4, 2), k=1, lam=0.0).tokens
    Array([[0],
           [1]], dtype=int32)
    """
    logits = _noisy(_check(logits, select_on, mask), noise, key)
    k = _tokens_of_each(logits, k, capacity_factor, axis_name)
    logits, gates = _gates(logits, mask)
    scores = gates if select_on == "gates" else logits
    if mask is not None:
        scores = jnp.where(mask[..., None], scores, -jnp.inf)
    n = logits.shape[-2]
    if capacity is None and is_hard(lam) and not isinstance(k, (Array, np.ndarray)):
        capacity = min(n, max(1, math.ceil(k)))
    selected, tokens, dropped = topk_select(
        scores.mT, k, lam, p=p, two_sided=two_sided, capacity=capacity, axis_name=axis_name
    )
    weights = selected * _taken(gates.mT, tokens, gates.ndim - 1)
    if normalize:
        weights = _normalized(weights, tokens, weights.ndim - 1, n)
    return Routing(weights, tokens, selected, dropped, jnp.zeros((), logits.dtype))


def _tokens_of_each(
    logits: Array, k: Number | None, capacity_factor: float | None, axis_name: AxisName
) -> Number:
    """How many tokens an expert takes: k, or what the capacity factor makes of all there are."""
    if (k is None) == (capacity_factor is None):
        raise ValueError(
            f"exactly one of k and capacity_factor must be given, got k={k} and "
            f"capacity_factor={capacity_factor}"
        )
    if k is not None:
        return k
    assert capacity_factor is not None
    total = logits.shape[-2] * (1 if axis_name is None else lax.psum(1, axis_name))
    return min(total, math.ceil(capacity_factor * total / logits.shape[-1]))


def token_choice(
    logits: Array,
    k: Number = 1,
    lam: Number = 0.1,
    *,
    capacity_factor: float | None = None,
    p: float = 2.0,
    two_sided: bool = False,
    select_on: SelectOn = "logits",
    mask: Array | None = None,
    capacity: int | None = None,
    normalize: bool = False,
    noise: float = 0.0,
    key: Array | None = None,
    axis_name: AxisName = None,
) -> Routing:
    r"""Every token takes k experts, and every expert as many of these tokens as it has slots.

    .. math:: w_{t} = y(s_t) \cdot g_t, \qquad
              y(s_t) = \mathrm{topk\_mask}(s_t, k, \lambda) \text{ over the experts}

    An expert that more tokens take than it has slots (``capacity``, or ``capacity_factor`` times its
    even share, k tokens/experts; by default as many as there are tokens) drops those with the smallest
    weights. ``normalize=True`` makes the weights of a token sum to
    1 over the experts that did not drop it. The other arguments are those of ``expert_choice``.

    ``balance`` is the load-balance loss of Fedus et al. (2022), :math:`E \sum_e f_e P_e` with the share
    :math:`f_e` of the selection that an expert has and its mean gate :math:`P_e`: at least 1 where gates
    and selection agree, and 1 if all experts have the same. With ``axis_name`` it is over the tokens of
    all devices; what a token takes is its own matter.

    >>> token_choice(jnp.eye(4, 2), k=1, lam=0.0, capacity=3).tokens
    Array([[0, 2, 3],
           [0, 1, 2]], dtype=int32)
    """
    logits = _noisy(_check(logits, select_on, mask), noise, key)
    logits, gates = _gates(logits, mask)
    y = topk_mask(gates if select_on == "gates" else logits, k, lam, p=p, two_sided=two_sided)
    if mask is not None:
        y = jnp.where(mask[..., None], y, 0.0)
    n, experts = logits.shape[-2:]
    if capacity is None and capacity_factor is not None:
        capacity = min(n, max(1, math.ceil(capacity_factor * float(k) * n / experts)))
    capacity = n if capacity is None else check_positive_int("capacity", capacity, at_most=n)
    balance = _balance(y, gates, mask, axis_name)
    y = y.mT
    dense = y * gates.mT
    tokens, lost = _slots(lax.stop_gradient(dense), dense.ndim - 1, capacity)
    weights, selected = (_taken(v, tokens, v.ndim - 1) for v in (dense, y))
    dropped = jnp.where(lost, lax.stop_gradient(y), 0.0).sum(axis=-1)
    if normalize:
        weights = _normalized(weights, tokens, weights.ndim - 1, n)
    return Routing(weights, tokens, selected, dropped, balance)


def _check(logits: object, select_on: SelectOn, mask: object) -> Array:
    logits = check_float_array("logits", logits)
    check_choice("select_on", select_on, ("logits", "gates"))
    if logits.ndim < 2:
        raise ValueError(f"logits must have shape [..., tokens, experts], got {logits.shape}")
    if mask is None:
        return logits
    if not isinstance(mask, (Array, np.ndarray)) or mask.dtype != jnp.bool_:
        raise TypeError(
            "mask must be an array of booleans, True where there is a token, got "
            f"{getattr(mask, 'dtype', repr(mask))}"
        )
    if mask.shape != logits.shape[:-1]:
        raise ValueError(f"mask must have shape {logits.shape[:-1]}, got {mask.shape}")
    return logits


def _noisy(logits: Array, noise: float, key: Array | None) -> Array:
    if not noise:
        return logits
    if key is None:
        raise ValueError(f"key must be given with noise={noise}, got None")
    return logits + noise * jax.random.normal(key, logits.shape, logits.dtype)


def _gates(logits: Array, mask: Array | None) -> tuple[Array, Array]:
    """Logits without what padding may hold, and their softmax, in float32 or float64."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    if mask is not None:
        logits = jnp.where(mask[..., None], logits, 0.0)
    return logits, jax.nn.softmax(logits, axis=-1)


@compiled("axis", results=entries)
def _taken(values: Array, tokens: Array, axis: int) -> Array:
    return jnp.take_along_axis(values, tokens, axis=axis)


@compiled("axis", "capacity", results=lambda *at: (entries(*at), entries(*at)))
def _slots(y: Array, axis: int, capacity: int) -> tuple[Array, Array]:
    return largest(y, capacity)


@compiled("axis", "n", results=entries)
def _normalized(weights: Array, tokens: Array, axis: int, n: int) -> Array:
    """Weights that sum to 1 over the experts of every token that has any."""

    def divide(weights: Array, tokens: Array) -> Array:
        total = jnp.zeros(n, weights.dtype).at[tokens].add(weights)
        return weights / jnp.where(total > 0, total, 1.0)[tokens]

    return jnp.vectorize(divide, signature="(e,s),(e,s)->(e,s)")(weights, tokens)


# Groups of tokens may be sharded, and the features of a token.
def _in_slots(spec: Any, axis: Any) -> PartitionSpec:
    return PartitionSpec(*spec[:axis], None, None, spec[-1])


def _by_token(spec: Any, axis: Any) -> PartitionSpec:
    return PartitionSpec(*spec[:axis], None, spec[-1])


@compiled("axis", results=_in_slots)
def _dispatched(x: Array, tokens: Array, selected: Array, axis: int) -> Array:
    def take(x: Array, tokens: Array, selected: Array) -> Array:
        return jnp.where(selected[..., None] > 0, x[tokens], 0.0)

    return jnp.vectorize(take, signature="(t,d),(e,s),(e,s)->(e,s,d)")(x, tokens, selected)


@compiled("axis", "count", results=_by_token)
def _combined(y: Array, tokens: Array, weights: Array, axis: int, count: int) -> Array:
    def add(y: Array, tokens: Array, weights: Array) -> Array:
        weighted = jnp.where(weights[..., None] != 0, y * weights[..., None].astype(y.dtype), 0.0)
        return jnp.zeros((count, y.shape[-1]), y.dtype).at[tokens].add(weighted)

    return jnp.vectorize(add, signature="(e,s,d),(e,s),(e,s)->(t,d)")(y, tokens, weights)


def _balance(y: Array, gates: Array, mask: Array | None, axis_name: AxisName) -> Array:
    """E sum_e f_e P_e over all tokens there are."""
    if mask is not None:
        gates = jnp.where(mask[..., None], gates, 0.0)
    f, mean = (v.sum(axis=tuple(range(v.ndim - 1))) for v in (y, gates))
    if axis_name is not None:
        f, mean = lax.psum((f, mean), axis_name)
    tiny = jnp.finfo(f.dtype).tiny
    f, mean = (v / jnp.maximum(v.sum(), tiny) for v in (f, mean))
    return y.shape[-1] * (f * mean).sum()
