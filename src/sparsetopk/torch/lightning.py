"""Pruning with the ``Trainer`` of Lightning; it must be installed."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from .prune import Pruner

__all__ = ["PruneCallback"]


class PruneCallback(Callback):  # type: ignore[misc, unused-ignore]
    """Steps the schedules of a pruner after every step of the optimiser.

    Give it as ``Trainer(..., callbacks=[PruneCallback(pruner)])``. Checkpoints have the step.
    """

    def __init__(self, pruner: Pruner) -> None:
        self.pruner, self._seen = pruner, 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._seen = trainer.global_step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Where gradients are accumulated, not every batch has a step."""
        if trainer.global_step > self._seen:
            self._seen = trainer.global_step
            self.pruner.step()

    def state_dict(self) -> dict[str, Any]:
        return self.pruner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.pruner.load_state_dict(state_dict)
