"""The values of a run that are tracked: read from the statuses of a live run, or from the report of one that is over.

Pure. A learner's values stand at its own step, those of the run at the tokens that all learners have processed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

RUN, VALIDATION = "run", "validation_loss"
_OF_RUN = ("tokens_merged", "tokens_per_s", "versions", "rounds")
_OF_LEARNER = (
    "loss", "step_s", "tokens", "tokens_merged", "tokens_per_s", "busy_fraction", "blocked_fraction", "bytes_up", "bytes_down",
    "rounds_merged", "rounds_missed",
)  # fmt: skip


@dataclass(frozen=True)
class Value:
    """A value ``name`` of ``owner``, which is a learner or the run, at a step, ``wall_s`` after the run began."""

    owner: str
    name: str
    step: int
    value: float
    wall_s: float


@dataclass
class Statuses:
    """One status after the other; of each value, its points: none twice, and none at a step that it has passed."""

    _last: dict[tuple[str, str], int] = field(default_factory=dict)

    def read(self, status: Mapping[str, Any]) -> list[Value]:
        """Return the values that are new in a status, which is as in ``docs/report.md``."""
        return self.new(_of_status(status))

    def new(self, values: Iterable[Value]) -> list[Value]:
        """Return the values that are new, and numbers."""
        return [value for value in values if math.isfinite(value.value) and self._is_new(value)]

    def _is_new(self, value: Value) -> bool:
        key = value.owner, value.name
        if value.step <= self._last.get(key, -1):
            return False
        self._last[key] = value.step
        return True


def of_report(report: Mapping[str, Any]) -> list[Value]:
    """Return the losses of a finished run, by time, the model's at its end included; ``report`` as in ``docs/report.md``.

    Raises:
        KeyError, TypeError, ValueError: it is damaged.
    """
    series = report["series"]
    found = [Value(RUN, VALIDATION, int(tokens), float(loss), float(at)) for at, tokens, loss in series["global"]]
    found += at_end(report)
    for name, points in series["learners"].items():
        found += [Value(str(name), "loss", int(step), float(loss), float(at)) for at, _, step, loss in points]
    return sorted((value for value in found if math.isfinite(value.value)), key=lambda value: value.wall_s)


def at_end(report: Mapping[str, Any]) -> list[Value]:
    """Return the validation loss of a run's last version, if there is one: it is known after the last status.

    Raises:
        KeyError, TypeError, ValueError: the report is damaged.
    """
    loss = report["val_loss"]
    return [] if loss is None else [Value(RUN, VALIDATION, int(report["tokens_merged"]), float(loss), float(report["wall_s"]))]


def _of_status(status: Mapping[str, Any]) -> Iterator[Value]:
    wall_s, tokens, learners = float(status["wall_s"]), int(status["tokens_processed"]), status["learners"]
    for at, merged, loss in status["validation"]:
        yield Value(RUN, VALIDATION, int(merged), float(loss), float(at))
    totals = {name: status[name] for name in _OF_RUN if name in status}
    totals["tokens_per_s"] = sum(float(learner["tokens_per_s"] or 0.0) for learner in learners.values())
    totals["learners"] = sum(learner["state"] not in ("gone", "left", "finished") for learner in learners.values())
    for name, value in totals.items():
        yield Value(RUN, name, tokens, float(value), wall_s)
    for learner_name, learner in learners.items():
        for name in _OF_LEARNER:
            if learner[name] is not None:
                yield Value(learner_name, name, int(learner["step"]), float(learner[name]), wall_s)
