"""A learner's view of the summaries in which syncers say whom they hear: whether it can do without others' heartbeats.

Pure: summaries and times of the learner's own clock in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from diloco.settings.run import LivenessSettings
from diloco.wire.control import PresenceSummary
from diloco.wire.fields import MAX_SYNCERS

SUMMARIES_A_LEASE = 4  # whole ones, of each syncer that speaks, within `liveness.lease_s`
# a learner whose heartbeats are rarer hears them itself: by summaries it would be heard of too late, and seem deaf
HEARTBEATS_A_LEASE = 8


class SummariesHeard:
    """The summaries that one learner has heard, by its own clock.

    It can do without the heartbeats of others once whole summaries have come for a quarter of ``liveness.lease_s``, and hears
    them again when none has come for half of it. Only whole summaries that name the learner itself count: a syncer that does
    not hear this learner may miss others, too.
    """

    def __init__(self, learner: str) -> None:
        self.learner = learner
        self._newest: dict[str, tuple[int, int, float]] = {}  # by syncer: incarnation and number, and when it came
        self._since_s, self._whole_s = math.inf, -math.inf  # when whole summaries began to come, and when the last one came

    def hear(self, summary: PresenceSummary, liveness: LivenessSettings, now_s: float) -> Sequence[tuple[str, float]]:
        """Take in a summary; return when each learner that it names was last heard. Return none if it is late or repeated.

        Only a whole one counts for this learner itself. One that comes back is named in a summary of a few, and must not take
        itself for hearing before it knows anything of the others. A syncer may be started again with its clock set back: its
        numbers count afresh once it was silent for ``liveness.lease_s``.
        """
        newest = self._newest.get(summary.syncer)
        if newest is not None and (summary.incarnation, summary.number) <= newest[:2]:
            if now_s - newest[2] < liveness.lease_s:
                return ()
        elif newest is None and not self._make_room(liveness.lease_s, now_s):
            return ()
        self._newest[summary.syncer] = summary.incarnation, summary.number, now_s
        if summary.whole and any(name == self.learner for name, _ in summary.learners):
            if now_s - self._whole_s >= liveness.lease_s / 2:
                self._since_s = now_s
            self._whole_s = now_s
        return [(name, now_s - silent_s) for name, silent_s in summary.learners if summary.whole or name != self.learner]

    def suffice(self, liveness: LivenessSettings, now_s: float) -> bool:
        """Whether the learner can do without the heartbeats of others."""
        if now_s - self._whole_s >= liveness.lease_s / 2 or liveness.heartbeat_s > liveness.lease_s / HEARTBEATS_A_LEASE:
            return False
        return now_s - self._since_s >= liveness.lease_s / SUMMARIES_A_LEASE

    def _make_room(self, lease_s: float, now_s: float) -> bool:
        """Forget the syncers that are silent if there is no room for another one. Return whether there is."""
        if len(self._newest) >= MAX_SYNCERS:
            self._newest = {name: newest for name, newest in self._newest.items() if now_s - newest[2] < lease_s}
        return len(self._newest) < MAX_SYNCERS
