"""The evaluation of a task of JAX: its losses, its own values and its samples, each called with the keywords that it names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax

from diloco.settings.run import RunSettings
from diloco_learner.api.evaluation import BatchEvaluation, Evaluation, evaluated, own_values, validation_sets
from diloco_learner.task import Task, named

Measure: TypeAlias = Callable[[Any], BatchEvaluation]


class Evaluating:
    """The evaluation of a task's model, as the run's settings have it."""

    def __init__(self, task: Task, settings: RunSettings) -> None:
        self.task, self._settings, self._seed = task, settings.task, settings.seed

    def evaluation(self, measure: Measure, params: Any, company: Mapping[str, Any]) -> Evaluation:
        """Return how good parameters are, by all that the task has to say it.

        ``measure`` evaluates a batch, ``company`` has the state and the constants beside ``params``.
        """
        sets = validation_sets(self.task, self._settings)
        found = {name: [measure(batch) for batch in batches] for name, batches in sets.items()}
        return evaluated(found, lambda: self._own_values(params, company), self._settings)

    def check(self, trace: Callable[[Any], object], params: Any, company: Mapping[str, Any]) -> None:
        """Check that validation sets and values of the task's own are what they can be; no loss is computed.

        Raises:
            SettingsError: they are not.
        """
        for batches in validation_sets(self.task, self._settings).values():
            trace(batches[0])
        self._own_values(params, company)

    def sample(self, params: Any, company: Mapping[str, Any], seed: int, count: int, prompt: str | None = None) -> str | None:
        """Return text of ``count`` characters from the model, behind a ``prompt`` if given; None if the task draws none."""
        draw = getattr(self.task, "sample", None)
        if draw is None:
            return None
        given = self._given("sample", company) | ({} if prompt is None else {"prompt": prompt})
        return str(draw(params, jax.random.key(seed), count, **given))

    def _own_values(self, params: Any, company: Mapping[str, Any]) -> dict[str, float]:
        if not hasattr(self.task, "evaluate"):
            return {}
        return own_values(self.task, self._given("evaluate", {"key": jax.random.key(self._seed), **company}), params)

    def _given(self, member: str, known: Mapping[str, Any]) -> dict[str, Any]:
        wanted = named(self.task, member)
        return {name: value for name, value in known.items() if name in wanted}
