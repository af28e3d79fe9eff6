"""Pruning as a transformation of optax: around an optimiser; a training loop stays as it is.

.. code-block:: python

    ramp = optax.polynomial_schedule(1.0, 0.1, power=3, transition_steps=1000)
    optimizer = pruned(optax.adam(1e-3), keep=ramp, lam=1e-2)
    state = optimizer.init(params)
    ...
    updates, state = optimizer.update(gradients, state, params)
    params = optax.apply_updates(params, updates)    # pruned
    ...
    params = prune_params(state.weights, keep=0.1, lam=0.0)    # at the end: exactly sparse
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from ._rows.arguments import AxisName, Number
from .prune import Keep, Where, is_weight, prune_params


class PrunedState(NamedTuple):
    """What ``pruned`` keeps."""

    step: Array  # the number of updates so far
    weights: Any  # the parameters that are learned, of which the model sees the pruned ones
    inner: Any  # the state of the optimiser


def pruned(
    optimizer: optax.GradientTransformation,
    keep: Keep | Callable[[Array], Keep] = 0.1,
    lam: Number | Callable[[Array], Number] = 1e-4,
    *,
    p: float = 2.0,
    scope: Literal["tensor", "global"] = "tensor",
    where: Where = is_weight,
    straight_through: bool = False,
    axis_name: AxisName = None,
) -> optax.GradientTransformation:
    """An optimiser of weights of which the parameters are ``prune_params(weights, keep, lam, ...)``.

    The gradients that it is given are those at the parameters. They go back through the selection to
    the weights, which the optimiser moves; the update is what leads to the parameters that these give.
    So the model, the loss and the loop stay as they are. It needs memory for the weights too.

    ``keep`` and ``lam`` are schedules if they can be called, as everywhere in optax: functions of the
    number of updates. A schedule of ``keep`` gives whatever ``prune_params`` takes, so also a pytree or
    a function of path and leaf. The first gradient is taken as one at the pruned parameters: begin with
    ``keep`` = 1, or give the model ``prune_params(params, ...)`` after ``init(params)``.
    """

    def prune(weights: Any, step: Array) -> Any:
        return prune_params(
            weights,
            keep(step) if callable(keep) else keep,
            lam(step) if callable(lam) else lam,
            p=p,
            scope=scope,
            where=where,
            straight_through=straight_through,
            axis_name=axis_name,
        )

    def init(params: Any) -> PrunedState:
        return PrunedState(jnp.zeros((), jnp.int32), params, optimizer.init(params))

    def update(gradients: Any, state: PrunedState, params: Any = None) -> tuple[Any, PrunedState]:
        if params is None:
            raise ValueError("params must be given to the update of pruned, got None")
        step, weights, inner = state
        _, pull = jax.vjp(lambda weights: prune(weights, step), weights)
        moved, inner = optimizer.update(pull(gradients)[0], inner, weights)
        weights = optax.apply_updates(weights, moved)
        updates = jax.tree.map(jnp.subtract, prune(weights, step + 1), params)
        return updates, PrunedState(step + 1, weights, inner)

    return optax.GradientTransformation(init, update)
