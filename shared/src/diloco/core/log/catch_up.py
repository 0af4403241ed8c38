"""Which versions a region's log must have before a learner that joins there takes a step.

A region whose server was away has an old log until owners have brought it up to date. A learner that joined meanwhile would
step on old versions. So it waits until its log has the versions that the run had when it joined.

It knows these by claims. A learner's heartbeat states the versions that it has applied. More than half of the learners that it
hears in other regions must have applied a version, or a later one, for it to be waited for. No version is waited for beyond
those that the rounds announce as committed. So a lie costs time only if more than half of these learners tell it and no owner
announces a round of its fragment. And the wait has limits, in time and without progress. Learners of its own region do not
count: they are as far behind as its log.

Pure: it is given the time, heartbeats, announcements, and the versions of the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from diloco.core.syncer.roster import ACTIVE
from diloco.wire.control import Announcement, Heartbeat

LISTEN_HEARTBEATS, LISTEN_S = 3.0, 5.0  # a learner listens for so many times `liveness.heartbeat_s`, at most for so long
QUIET_S = 60.0  # without a new version of a fragment that is behind: the region is cut off from the others, or they lie
MOST_S = 600.0  # in all: a learner's restart is worth no longer wait, whatever others say


class LogStanding(Enum):
    """How a region's log stands to what others have."""

    UNKNOWN = "unknown"  # the learners have not been listened to for long enough
    BEHIND = "behind"
    CURRENT = "current"
    GIVEN_UP = "given up"  # it is behind, and is waited for no longer


class CatchUp:
    """The versions of others, as a learner hears of them that joins in ``region``; ``fragments``: how many the run has."""

    def __init__(self, region: str, fragments: int, heartbeat_s: float, now_s: float) -> None:
        self.region, self.fragments = region, fragments
        self._listened_s = now_s + min(LISTEN_HEARTBEATS * heartbeat_s, LISTEN_S)
        self._applied: dict[str, list[int]] = {}  # by learner of another region, by fragment
        self._announced: dict[int, int] = {}  # by fragment: the newest version that a round follows
        self._stated: list[int] | None = None  # by fragment, as of the end of listening
        self._seen: list[int] = []  # by fragment: the log's newest version, as handed in last
        self._began_s = self._moved_s = now_s

    def hear(self, heartbeat: Heartbeat) -> None:
        """Take in the heartbeat of an admitted learner, which has as many versions as the run has fragments."""
        if heartbeat.region != self.region and heartbeat.state in ACTIVE:
            self._applied[heartbeat.learner] = heartbeat.versions
        else:
            self._applied.pop(heartbeat.learner, None)

    def hear_round(self, announced: Announcement) -> None:
        """Take in the announcement of a round: its fragment's newest version is the one before."""
        index = announced.fragment
        if index < self.fragments:
            self._announced[index] = max(self._announced.get(index, 0), announced.version - 1)

    def wanted(self, now_s: float) -> list[int] | None:
        """Return by fragment the version that the log must have; None while learners are still listened to."""
        if now_s < self._listened_s:
            return None
        if self._stated is None:
            self._stated = [self._common(index) for index in range(self.fragments)]
        return [min(stated, self._announced.get(index, stated)) for index, stated in enumerate(self._stated)]

    def _common(self, index: int) -> int:
        """Return the newest version of a fragment that more than half of the learners have applied."""
        versions = sorted((applied[index] for applied in self._applied.values()), reverse=True)
        return versions[len(versions) // 2] if versions else 0

    def judge(self, versions: Sequence[int], now_s: float) -> LogStanding:
        """Judge the log by its newest version of each fragment, as it is now."""
        wanted = self.wanted(now_s)
        if wanted is None:
            return LogStanding.UNKNOWN
        behind = [index for index, version in enumerate(versions) if version < wanted[index]]
        if not behind:
            return LogStanding.CURRENT
        if not self._seen:
            self._began_s = self._moved_s = now_s
        elif any(versions[index] > self._seen[index] for index in behind):
            self._moved_s = now_s
        self._seen = list(versions)
        over = now_s - self._moved_s >= QUIET_S or now_s - self._began_s >= MOST_S
        return LogStanding.GIVEN_UP if over else LogStanding.BEHIND

    def furthest(self, versions: Sequence[int], now_s: float) -> tuple[int, int]:
        """Return the fragment of which the log lacks most versions, and the version that it must have."""
        wanted = self.wanted(now_s)
        assert wanted is not None
        index = max(range(self.fragments), key=lambda index: wanted[index] - versions[index])
        return index, wanted[index]
