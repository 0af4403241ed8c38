"""The evaluation of a model by its task: losses and metrics of validation sets, and the task's own values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from diloco.errors import SettingsError
from diloco.settings.run import TaskSettings
from diloco_learner.api import members
from diloco_learner.task_api import METRIC_NAME

UNNAMED = ""  # the set of a task whose validation() returns a list


class BatchEvaluation(NamedTuple):
    """Loss of a validation batch, and metrics by name; the ``tokens`` that both are means of (None: the task counts none)."""

    loss: float
    metrics: Mapping[str, float]
    tokens: float | None = None

    @classmethod
    def of(cls, loss: Any, metrics: Mapping[str, Any], tokens: Any) -> BatchEvaluation:
        """Return the evaluation of a batch whose scalars are on the host, or are waited for."""
        named = {name: float(value) for name, value in metrics.items()}
        return cls(float(loss), named, None if tokens is None else float(tokens))


@dataclass(frozen=True)
class Evaluation:
    """The results of an evaluation.

    ``loss`` is the mean of the validation sets' losses, or None if the task has no set. Within a set, batches are weighted by
    their tokens if the task counts them. ``values`` are named ``val_loss/SET`` for named sets, ``val/METRIC`` or
    ``val/SET/METRIC`` for the loss's metrics, and as ``evaluate`` names its own. If ``evaluate`` raised the ``failure``, its
    values are missing.
    """

    loss: float | None
    values: Mapping[str, float]
    failure: SettingsError | None = None

    def finite_values(self) -> dict[str, float | None]:
        """Return the values for JSON: None for one that is not finite."""
        return {name: value if math.isfinite(value) else None for name, value in self.values.items()}


def validation_sets(task: object, settings: TaskSettings) -> dict[str, Sequence[Any]]:
    """Return the validation batches by the name of their set; empty if the task has none.

    Raises:
        SettingsError: a set is empty or has no fit name, or there are none though the task says it has.
    """
    validation = getattr(task, "validation", None)
    if validation is None:
        return {}
    returned = validation()
    sets = dict(returned) if isinstance(returned, Mapping) else {UNNAMED: returned}
    source = f"task.name = {settings.name!r}: validation() returned"
    where = members.place(validation)
    if not sets:
        raise SettingsError(f"{source} no set; give at least one batch, or leave validation() out: no validation loss{where}")
    for name, batches in sets.items():
        if isinstance(returned, Mapping) and (not isinstance(name, str) or METRIC_NAME.fullmatch(name) is None):
            raise SettingsError(
                f"{source} a set named {name!r}, expected 1 to 48 lower-case letters, digits and _, such as 'code'{where}"
            )
        if not isinstance(batches, Sequence | np.ndarray):
            raise SettingsError(
                f"{source} a {type(batches).__name__}, expected a list of batches, or such lists by name{where}"
            )
        if not len(batches):
            raise SettingsError(
                f"{source} no batch{f' in set {name!r}' if name else ''}; give at least one, on which the model is "
                f"evaluated, or leave validation() out: no validation loss{where}"
            )
    return sets


def evaluated(
    sets: Mapping[str, Sequence[BatchEvaluation]], own: Callable[[], Mapping[str, float]], settings: TaskSettings
) -> Evaluation:
    """Return the evaluation with these results of batches. ``own`` returns the values of ``evaluate``.

    Raises:
        SettingsError: the loss counts no token in a whole set.
    """
    losses, values = [], {}
    for name, batches in sets.items():
        counted = [batch for batch in batches if batch.tokens != 0]  # of the others the loss is the mean of nothing
        if not counted:
            of = f" {name!r}" if name else ""
            raise SettingsError(
                f"task.name = {settings.name!r}: the loss counts no token in validation set{of}: leave some of its labels "
                "unmasked, or leave the set out"
            )
        weights = [1.0 if batch.tokens is None else batch.tokens for batch in counted]
        losses.append(_mean([batch.loss for batch in counted], weights))
        if name != UNNAMED:
            values[f"val_loss/{name}"] = losses[-1]
        for metric in counted[0].metrics:
            mean = _mean([batch.metrics[metric] for batch in counted], weights)
            values["/".join(filter(None, ("val", name, metric)))] = mean
    loss = _mean(losses) if losses else None
    try:
        with members.users_errors(settings):
            return Evaluation(loss, values | dict(own()))
    except SettingsError as error:
        return Evaluation(loss, values, error)


def own_values(task: object, given: Mapping[str, Any], params: Any) -> dict[str, float]:
    """Return the values of a task's ``evaluate``, called with the keywords ``given``.

    Raises:
        SettingsError: it returned something else.
    """
    evaluate = task.evaluate  # type: ignore[attr-defined]
    returned, where = evaluate(params, **given), members.place(evaluate)
    if not isinstance(returned, Mapping):
        raise SettingsError(f"task: evaluate() returned a {type(returned).__name__}, expected numbers by name{where}")
    for name, value in returned.items():
        if not isinstance(name, str) or METRIC_NAME.fullmatch(name) is None:
            raise SettingsError(
                f"task: evaluate() named a value {name!r}, expected 1 to 48 lower-case letters, digits and _{where}"
            )
        if np.shape(value) != () or not np.issubdtype(np.asarray(value).dtype, np.number):
            raise SettingsError(f"task: evaluate() returned {name} = {value!r}, expected a number{where}")
    return {name: float(value) for name, value in returned.items()}


def _mean(values: Sequence[float], weights: Sequence[float] | None = None) -> float:
    alike = weights is None or all(weight == weights[0] for weight in weights)
    return float(np.mean(values) if alike else np.average(values, weights=weights))  # two sums may round differently
