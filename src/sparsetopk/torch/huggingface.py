"""Pruning with the ``Trainer`` of the transformers library; it must be installed.

While a model is pruned, ``save_pretrained`` has the weights that are trained, with k, lam and the step,
to go on from: ``Trainer.train(resume_from_checkpoint=...)`` does. After ``finalize`` it has those that
the layers see, for ``from_pretrained``.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from .prune import Pruner

__all__ = ["PruneCallback"]


class PruneCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Steps the schedules of a pruner after every step of the optimiser.

    Give it as ``Trainer(..., callbacks=[PruneCallback(pruner)])``. The step comes back with the model
    when training is resumed.
    """

    def __init__(self, pruner: Pruner) -> None:
        self.pruner = pruner

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.pruner.step()
