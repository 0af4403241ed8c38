"""The other syncers as one syncer hears them, by its own clock: the last heartbeat of each, and what follows from its age.

Each of them is *heard*, *silent* or *gone* (:class:`SyncerPresence`). A silence is its own if others of its region are heard,
or it is of this syncer's region: then it is gone after ``takeover_s``. Else the region may be cut off, and has ``away_s``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from diloco.wire.control import ShardHeartbeat
from diloco.wire.fields import MAX_SYNCERS

RETURN = 2.0  # so many times away_s a syncer has to be there again before it is given anything


class SyncerPresence(Enum):
    """The consequence of the last time that a syncer was heard."""

    HEARD = "heard"  # within half of takeover_s
    SILENT = "silent"  # not within that, but it may live; also one that has not been heard yet
    GONE = "gone"  # silent for so long that its fragments are for others to take over


class SyncerNews(Enum):
    """The news of a heartbeat of another syncer."""

    NOTHING = "nothing"  # repeated or late, or there is no room for one more syncer
    ALIVE = "alive"  # that it lives, as before
    NEWS = "news"  # that it is there, or there again; or another state, or other fragments, than before


@dataclass
class OtherSyncer:
    """Another syncer: its newest heartbeat and when that came."""

    heartbeat: ShardHeartbeat
    at_s: float
    since_s: float  # when it was first heard, or again after it was gone or could commit nothing


class Syncers:
    """The picture that one syncer, of ``region``, has of the others.

    It hears its own heartbeats too. While these do not come back it is *deaf*: this process or its connection is silent, and
    no syncer counts as gone. When they come again, the others get as long as ever to be heard.
    """

    def __init__(self, region: str, takeover_s: float, away_s: float) -> None:
        """``region``: empty in a run without regions."""
        self.region, self.takeover_s, self.away_s = region, takeover_s, away_s
        self._known: dict[str, OtherSyncer] = {}
        self._echo_at_s = self._hearing_since_s = -math.inf

    def __iter__(self) -> Iterator[tuple[str, OtherSyncer]]:
        """Iterate over the others that were ever heard, by name."""
        return iter(self._known.items())

    def __contains__(self, name: str) -> bool:
        return name in self._known

    # ---- this syncer's own hearing

    def hear_own(self, now_s: float) -> None:
        """Take in that an own heartbeat came back."""
        if not self.hears(now_s):
            self._hearing_since_s = now_s
        self._echo_at_s = now_s

    def hears(self, now_s: float) -> bool:
        """Whether this syncer hears: it is not deaf."""
        return now_s - self._echo_at_s < self.takeover_s / 2

    def hearing_s(self, now_s: float) -> float:
        """Return for how long this syncer has heard others without a break; 0 while it is deaf."""
        return now_s - self._hearing_since_s if self.hears(now_s) else 0.0

    # ---- the others

    def hear(self, heartbeat: ShardHeartbeat, now_s: float) -> SyncerNews:
        """Take in another syncer's heartbeat."""
        known = self._known.get(heartbeat.syncer)
        if known is None:
            if not self._make_room(now_s):
                return SyncerNews.NOTHING
            self._known[heartbeat.syncer] = OtherSyncer(heartbeat, now_s, now_s)
            return SyncerNews.NEWS
        gone = self.presence(heartbeat.syncer, now_s) is SyncerPresence.GONE
        before = known.heartbeat
        # one that is gone may have been started again with its clock set back
        if _age(heartbeat) <= _age(before) and not (gone and heartbeat.incarnation != before.incarnation):
            return SyncerNews.NOTHING
        known.heartbeat, known.at_s = heartbeat, now_s
        if gone or (before.state == "unable" and heartbeat.state != "unable"):
            known.since_s = now_s
        same = (heartbeat.state, heartbeat.fragments, heartbeat.closed) == (before.state, before.fragments, before.closed)
        return SyncerNews.ALIVE if same and not gone else SyncerNews.NEWS

    def presence(self, name: str, now_s: float) -> SyncerPresence:
        """Return whether a syncer, heard before or not, is heard, silent or gone."""
        known = self._known.get(name)
        heard_at_s = known.at_s if known else -math.inf
        if self.hears(now_s) and now_s - max(heard_at_s, self._hearing_since_s) >= self._patience_s(known, now_s):
            return SyncerPresence.GONE
        return SyncerPresence.HEARD if self._is_heard(heard_at_s, now_s) else SyncerPresence.SILENT

    def is_back(self, name: str | None, now_s: float) -> bool:
        """Whether a syncer that is not gone (None: this one) is there for long enough to be given fragments.

        In a run with regions its region may have been cut off, and has to catch up over the same links first.
        """
        since_s = self._hearing_since_s if name is None else self._known[name].since_s
        return not self.region or now_s - since_s >= RETURN * self.away_s

    def newest_revision(self) -> int:
        """Return the newest revision of the owners table that any of the others knows; 0 if none is known."""
        return max((syncer.heartbeat.revision for syncer in self._known.values()), default=0)

    def regions(self) -> dict[str, str]:
        """Return the region of each of the others, by name."""
        return {name: syncer.heartbeat.region for name, syncer in self._known.items()}

    def _make_room(self, now_s: float) -> bool:
        """Forget those that are gone if there is no room for another one. Return whether there is."""
        if len(self._known) >= MAX_SYNCERS:
            gone = [name for name in self._known if self.presence(name, now_s) is SyncerPresence.GONE]
            for name in gone:
                del self._known[name]
        return len(self._known) < MAX_SYNCERS

    def _patience_s(self, known: OtherSyncer | None, now_s: float) -> float:
        """Return for how long a syncer may be silent."""
        if not self.region:
            return self.takeover_s
        if known is None:
            return self.away_s
        region = known.heartbeat.region
        others = (other for other in self._known.values() if other is not known and other.heartbeat.region == region)
        own = region == self.region or any(self._is_heard(other.at_s, now_s) for other in others)
        return self.takeover_s if own else self.away_s

    def _is_heard(self, heard_at_s: float, now_s: float) -> bool:
        return now_s - heard_at_s < self.takeover_s / 2


def _age(heartbeat: ShardHeartbeat) -> tuple[int, int]:
    return heartbeat.incarnation, heartbeat.number
