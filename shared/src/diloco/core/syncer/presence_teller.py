"""Summaries by which a syncer tells learners who is alive: of the heartbeats that its gate has let in.

Pure: heartbeats and times of the syncer's own clock in, summaries out.
"""

from __future__ import annotations

import math

from diloco.core.run.summaries_heard import SUMMARIES_A_LEASE
from diloco.settings.run import LivenessSettings
from diloco.wire.control import PresenceSummary
from diloco.wire.fields import MAX_MEMBERS

NEWS_S = 0.5  # a learner that came or came back is named within: a trainer's step is about as long
TURNS_A_LEASE = (
    16  # looks at what is due within `liveness.lease_s`: whole summaries are no later than a quarter of their distance
)


class PresenceTeller:
    """The learners that one syncer hears, and the summaries that are due."""

    def __init__(self, syncer: str, incarnation: int) -> None:
        self.syncer, self.incarnation = syncer, incarnation
        self._heard: dict[str, float] = {}  # by learner: when it was last heard
        self._came: set[str] = set()  # learners that came or came back, and were in no summary since
        self._number = 0
        self._whole_s = -math.inf  # when the last whole summary was made
        self._complete = False  # it has heard every learner that is alive

    def hear(self, learner: str, dead_s: float, now_s: float) -> None:
        """Take in a heartbeat of a learner, which comes back if it was silent for ``dead_s``."""
        heard_s = self._heard.get(learner)
        if heard_s is None and len(self._heard) >= MAX_MEMBERS:
            oldest = min(self._heard, key=self._heard.__getitem__)
            del self._heard[oldest]
            self._came.discard(oldest)
        if heard_s is None or now_s - heard_s >= dead_s:
            self._came.add(learner)
        self._heard[learner] = now_s

    def due(
        self, liveness: LivenessSettings, now_s: float, *, hearing_s: float, waits: bool, speaks: bool
    ) -> PresenceSummary | None:
        """Return the summary that is to be sent now, or None.

        Args:
            liveness: the settings in force.
            now_s: the time.
            hearing_s: for how long this syncer has heard others without a break (:meth:`Syncers.hearing_s`). It says nothing
                before that is ``liveness.lease_s``: it may not have heard all.
            waits: whether heartbeats are held back at its gate, whose learners it has not heard yet. They must have been let in
                once since it hears.
            speaks: whether it is this syncer that speaks for its region (:meth:`Ownership.speaks`).
        """
        self._complete = hearing_s >= liveness.lease_s and (self._complete or not waits)
        if not (self._complete and speaks):
            return None
        whole = now_s - self._whole_s >= liveness.lease_s / SUMMARIES_A_LEASE
        if whole:
            self._heard = {name: heard_s for name, heard_s in self._heard.items() if now_s - heard_s < liveness.lease_s}
            self._whole_s = now_s
        named = sorted(self._heard if whole else self._came)
        self._came.clear()
        if not (whole or named):
            return None
        self._number += 1
        return PresenceSummary(
            syncer=self.syncer,
            incarnation=self.incarnation,
            number=self._number,
            whole=whole,
            learners=[(name, now_s - self._heard[name]) for name in named],
        )


def turn_s(liveness: LivenessSettings) -> float:
    """Return the seconds between two looks at what is due."""
    return min(NEWS_S, liveness.lease_s / TURNS_A_LEASE)
