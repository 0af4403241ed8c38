"""Goodput: the share of all learners' time since each was first heard in which a step was in flight.

A learner that is down, starting or recovering has no step in flight, and its time counts. One that trained while it was not
heard states its time when it is heard again. Pure: no clock, no network, no file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from diloco.wire.control import Heartbeat

ENDED = ("left", "finished")  # states after which a learner has no more time


@dataclass
class TrainedTime:
    """The time of one learner, in seconds of the run.

    Attributes:
        first_s: when it was first heard.
        last_s: when it was last heard.
        trained_s: with a step in flight since ``first_s``, as far as it has said.
        ended: it left, or has finished.
        incarnation: of the process that was heard last, with its own ``busy_s``; 0 for none.
    """

    first_s: float
    last_s: float
    trained_s: float = 0.0
    ended: bool = False
    incarnation: int = 0
    busy_s: float = 0.0

    def hear(self, heartbeat: Heartbeat, now_s: float) -> None:
        """Take in a heartbeat. The first one of a process says from where its ``busy_s`` counts."""
        if heartbeat.incarnation == self.incarnation:
            self.trained_s += max(0.0, heartbeat.busy_s - self.busy_s)
        self.incarnation, self.busy_s = heartbeat.incarnation, heartbeat.busy_s
        self.last_s, self.ended = now_s, heartbeat.state in ENDED

    def dump(self) -> dict[str, Any]:
        """Return what :meth:`load` takes."""
        return vars(self).copy()

    @classmethod
    def load(cls, series: Mapping[str, Any]) -> TrainedTime:
        """Return the time of a learner by its series.

        An older version's series have the activity alone.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: they are damaged.
        """
        if (dumped := series.get("trained_time")) is not None:
            numbers = {key: float(dumped[key]) for key in ("first_s", "last_s", "trained_s", "busy_s")}
            return cls(**numbers, ended=bool(dumped["ended"]), incarnation=int(dumped["incarnation"]))
        spans = [(float(from_s), float(to_s), str(state)) for from_s, to_s, state in series["activity"]]
        stepped_s = sum(to_s - from_s for from_s, to_s, state in spans if state in ("stepping", "sending"))
        first_s, last_s, state = (spans[0][0], spans[-1][1], spans[-1][2]) if spans else (0.0, 0.0, "")
        return cls(first_s, last_s, stepped_s * float(series.get("busy_fraction") or 0.0), state in ENDED)


def goodput(times: Iterable[TrainedTime], now_s: float) -> float | None:
    """Return the goodput of learners at ``now_s``, from 0 to 1; None before there is any time."""
    trained_s = present_s = 0.0
    for time in times:
        trained_s += time.trained_s
        present_s += max(0.0, (time.last_s if time.ended else now_s) - time.first_s)
    return min(1.0, trained_s / present_s) if present_s > 0 else None
