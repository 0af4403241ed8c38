"""The evaluation of a torch task's module: validation losses, the task's own values, samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from diloco.settings.run import RunSettings
from diloco_learner.api import members
from diloco_learner.api.evaluation import BatchEvaluation, Evaluation, evaluated, own_values, validation_sets
from diloco_learner.pytorch.task import TorchTask, loss_of


class TorchEvaluating:
    """Evaluates modules of a task, each in its mode of evaluation and without gradients."""

    def __init__(self, task: TorchTask, settings: RunSettings) -> None:
        self._task, self._run = task, settings

    def evaluation(self, module: nn.Module) -> Evaluation:
        """Return how good a module is.

        Raises:
            SettingsError: validation sets, or values of the task's own, are not what they can be.
        """
        with torch.no_grad(), members.users_errors(self._run.task):
            self._begin(module, self._run.seed)
            sets = validation_sets(self._task, self._run.task)
            found = {name: [self._batch_evaluation(module, batch) for batch in batches] for name, batches in sets.items()}
            return evaluated(found, lambda: self.own_values(module), self._run.task)

    def first_batches(self) -> list[Any]:
        """Return the first batch of each validation set.

        Raises:
            SettingsError: a set is not what it can be.
        """
        with members.users_errors(self._run.task):
            return [batches[0] for batches in validation_sets(self._task, self._run.task).values()]

    def try_out(self, module: nn.Module, batches: Sequence[Any]) -> None:
        """Check that batches have losses.

        Raises:
            SettingsError: one has none.
        """
        with torch.no_grad(), members.users_errors(self._run.task, self._task.loss):
            self._begin(module, self._run.seed)
            for batch in batches:
                self._batch_evaluation(module, batch)

    def own_values(self, module: nn.Module) -> dict[str, float]:
        """Return the values that the task's ``evaluate`` says.

        Raises:
            SettingsError: they are not what they can be.
        """
        with torch.no_grad(), members.users_errors(self._run.task):
            self._begin(module, self._run.seed)
            return own_values(self._task, {}, module) if hasattr(self._task, "evaluate") else {}

    def sample(self, module: nn.Module, seed: int, count: int, prompt: str | None) -> str | None:
        """Return text of ``count`` characters, behind a ``prompt`` if given; None if the task draws none."""
        with torch.no_grad():
            draw, given = getattr(self._task, "sample", None), {} if prompt is None else {"prompt": prompt}
            self._begin(module, seed)
            return None if draw is None else str(draw(module, count, **given))

    def _batch_evaluation(self, module: nn.Module, batch: Any) -> BatchEvaluation:
        return BatchEvaluation.of(*loss_of(self._task, module, batch))

    def _begin(self, module: nn.Module, seed: int) -> None:
        torch.manual_seed(seed)
        module.eval()
