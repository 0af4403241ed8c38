"""Which syncer owns which fragments: how they are dealt out, and when one may be taken over.

Any number of syncers may come and go. At most ``shards`` of them, the *holders*, share the fragments; the others stand by.
There are no more holders than fragments, and a small model may have fewer fragments than the run's settings say. The owners
are a small table, written only on change and by compare-and-set; nothing in it expires. Every syncer runs this state
machine on the heartbeats that it hears. If two of them propose at once, the compare-and-set lets one table through; if one of
them is wrong about another, the log's fence still lets only one owner write.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated

from msgspec import Meta, Struct

from diloco.core.syncer.syncers import SyncerNews, SyncerPresence, Syncers
from diloco.wire.control import ShardHeartbeat
from diloco.wire.fields import MAX_FRAGMENTS, MAX_SYNCERS, MemberName

FIRST_TABLE_S = 2.0  # that the first table waits for syncers: processes that are started together hear each other by then
READ_EVERY_S = 2.0  # the table, even if no message says that it has changed: heartbeats may be lost
HEARTBEATS = 6  # heartbeats in the time after which a silent syncer is gone
RIVAL_HEARTBEATS = 4  # heartbeats of a younger process with this syncer's name: more than may come late after a restart
# of an even share: a fragment moves only between syncers whose loads differ by more than this
UNEVEN = 0.1


class OwnersTable(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """The value of the key ``owners``: the syncers that share the fragments, and by fragment its owner."""

    holders: Annotated[list[MemberName], Meta(min_length=1, max_length=MAX_SYNCERS)]
    owners: Annotated[list[MemberName], Meta(min_length=1, max_length=MAX_FRAGMENTS)]


def plan(
    table: OwnersTable | None,
    live: Collection[str],
    sizes: Sequence[int],
    shards: int,
    regions: Mapping[str, str] | None = None,
) -> OwnersTable | None:
    """Return the table that should be, if it is another one than ``table``; None too if no syncer is ``live``.

    Living holders stay, others fill up free places by name. With ``regions`` (of the living, by name) those of the region with
    the fewest holders come first, and a region without any gets the place of one of a region with several: fewest bytes cross
    between regions where each owns its share. A fragment without a living owner goes to the holder with the
    fewest parameters, largest first. Then fragments move from the fullest holder to the emptiest while their loads differ by
    more than ``UNEVEN`` of an even share and a move makes them clearly more even. It is a function of its arguments alone,
    and a table that it returned needs no change.
    """
    holders = [name for name in table.holders if name in live][:shards] if table else []
    holders = _seat(holders, set(live), shards, regions or {})
    if not holders:
        return None
    owners = _with_orphans(list(table.owners) if table else [""] * len(sizes), holders, sizes)
    _even_out(owners, holders, sizes)
    planned = OwnersTable(holders, owners)
    return None if planned == table else planned


def _with_orphans(owners: list[str], holders: Sequence[str], sizes: Sequence[int]) -> list[str]:
    """Return the owners, with each fragment that none of ``holders`` has given to the emptiest of them, largest first."""
    loads = _loads(owners, holders, sizes)
    orphans = [fragment for fragment, owner in enumerate(owners) if owner not in loads]
    for fragment in sorted(orphans, key=lambda f: -sizes[f]):
        owners[fragment] = min(holders, key=loads.__getitem__)
        loads[owners[fragment]] += sizes[fragment]
    return owners


def _even_out(owners: list[str], holders: Sequence[str], sizes: Sequence[int]) -> None:
    """Move fragments, in place, from the fullest of ``holders`` to the emptiest while that makes loads clearly more even."""
    loads = _loads(owners, holders, sizes)
    margin = UNEVEN * sum(sizes) / len(holders)
    while True:
        fullest, emptiest = max(holders, key=loads.__getitem__), min(holders, key=loads.__getitem__)
        excess = loads[fullest] - loads[emptiest]
        movable = [f for f, owner in enumerate(owners) if owner == fullest and sizes[f] <= excess - margin / 2]
        if excess <= margin or not movable:
            return
        fragment = min(movable, key=lambda f: abs(excess - 2 * sizes[f]))
        owners[fragment] = emptiest
        loads[fullest] -= sizes[fragment]
        loads[emptiest] += sizes[fragment]


def _loads(owners: Sequence[str], holders: Sequence[str], sizes: Sequence[int]) -> dict[str, int]:
    """Return the parameters that each of ``holders`` owns."""
    loads = dict.fromkeys(holders, 0)
    for fragment, owner in enumerate(owners):
        if owner in loads:
            loads[owner] += sizes[fragment]
    return loads


def _seat(holders: list[str], live: set[str], shards: int, regions: Mapping[str, str]) -> list[str]:
    """Return the holders, with free places filled, and as many regions among them as can be."""
    seated = list(holders)
    waiting = sorted(live - set(seated))
    while waiting:
        counts = Counter(regions.get(name, "") for name in seated)
        name = min(waiting, key=lambda candidate: (counts[regions.get(candidate, "")], candidate))
        if len(seated) >= shards:
            region, most = counts.most_common(1)[0]
            if counts[regions.get(name, "")] or most < 2:
                break
            seated.remove(max(holder for holder in seated if regions.get(holder, "") == region))
        waiting.remove(name)
        seated.append(name)
    return seated


class Ownership:
    """One syncer's view: the owners table as last read, and the other syncers as heard (:class:`Syncers`)."""

    def __init__(
        self,
        name: str,
        incarnation: int,
        sizes: Sequence[int],
        shards: int,
        takeover_s: float,
        region: str = "",
        away_s: float = math.inf,
    ) -> None:
        """``region``: empty in a run without; one without a heartbeat counts as gone after ``away_s``."""
        self.name, self.incarnation, self.region = name, incarnation, region
        self.sizes, self.shards = sizes, min(shards, len(sizes))
        self.table: OwnersTable | None = None
        self.revision = 0  # of the table; 0: there is none
        self.leaving = False
        self._others = Syncers(region, takeover_s, away_s)
        self._rival = (0, 0, 0)  # incarnation, newest number, heartbeats of a younger process with this name
        self._read_at_s = -math.inf  # when the table was last read
        self._read_for = 0  # the newest revision that others knew then
        self._still_since_s = -math.inf  # when its revision last changed
        self._unable_since_s = math.inf  # nothing can be committed from here
        self.wrong: Mapping[int, str] = {}  # by fragment whose log ends with a wrong entry: the syncer that wrote it

    def change(self, shards: int, takeover_s: float, away_s: float) -> None:
        """Go by these settings from now on."""
        self.shards = min(shards, len(self.sizes))
        self._others.takeover_s, self._others.away_s = takeover_s, away_s

    @property
    def heartbeat_s(self) -> float:
        """Seconds from one heartbeat to the next."""
        return self._others.takeover_s / HEARTBEATS

    @property
    def holds(self) -> bool:
        """Whether this syncer shares the fragments; if not it stands by."""
        return self.table is not None and self.name in self.table.holders

    @property
    def replaced(self) -> bool:
        """Whether a younger process goes by this one's name."""
        return self._rival[2] >= RIVAL_HEARTBEATS

    @property
    def closed_elsewhere(self) -> set[int]:
        """The fragments of others whose log is closed: by the newest heartbeat of the syncer that the table gives each to.

        That one watches the log's end, which a server's crash may undo; an owner before it does so no more.
        """
        said = {(index, name) for name, syncer in self._others for index in syncer.heartbeat.closed}
        return {index for index, owner in said.intersection(enumerate(self.table.owners if self.table else []))}

    def hear(self, heartbeat: ShardHeartbeat, now_s: float) -> bool:
        """Take in a heartbeat, this syncer's own included. Return whether it says anything to act on."""
        if heartbeat.syncer == self.name:
            self._hear_own(heartbeat, now_s)
            return False
        heard = self._others.hear(heartbeat, now_s)
        return heard is SyncerNews.NEWS or (heard is SyncerNews.ALIVE and heartbeat.revision > self.revision)

    def _hear_own(self, heartbeat: ShardHeartbeat, now_s: float) -> None:
        if heartbeat.incarnation == self.incarnation:
            self._others.hear_own(now_s)
        elif heartbeat.incarnation > self.incarnation:
            rival, number, heartbeats = self._rival
            if (heartbeat.incarnation, heartbeat.number) > (rival, number):
                self._rival = (heartbeat.incarnation, heartbeat.number, heartbeats + 1)

    def read(self, table: OwnersTable | None, revision: int, now_s: float) -> None:
        """Take in the table as stored, with the revision of its key."""
        if revision != self.revision:
            self._still_since_s = now_s
        self.table, self.revision = table, revision
        self._read_at_s, self._read_for = now_s, self._others.newest_revision()

    def must_read(self, now_s: float) -> bool:
        """Whether the table should be read: another syncer knows a newer one, or the last time is long ago."""
        newest = self._others.newest_revision()
        return newest > max(self.revision, self._read_for) or now_s - self._read_at_s >= READ_EVERY_S

    def distrust(self) -> None:
        """Take over nothing before the table is read again: another process has written as an owner."""
        self._read_at_s = -math.inf

    def reach(self, commits: bool, now_s: float) -> None:
        """Take in whether a version could be committed from here: whether a majority of regions is reached, and has room."""
        self._unable_since_s = math.inf if commits else min(self._unable_since_s, now_s)

    def unable(self, now_s: float) -> bool:
        """Whether nothing could be committed from here for so long that others are to do it.

        Such a syncer is heard, since the control store may be reached by another way than the regions' servers.
        """
        return now_s - self._unable_since_s >= self._others.away_s

    def live(self, now_s: float) -> set[str]:
        """Return the syncers that fragments may go to."""
        names = {name for name, syncer in self._others if syncer.heartbeat.state not in ("leaving", "unable")}
        names |= {name for name in self._named() if name not in self._others}  # not heard yet: perhaps only not yet
        names = {name for name in names - {self.name} if not self._is_gone(name, now_s)}
        return names if self.leaving or self.unable(now_s) else names | {self.name}

    def propose(self, now_s: float) -> OwnersTable | None:
        """Return the table to put in the place of the known one, or None.

        The first table waits for ``shards`` syncers, but no longer than ``FIRST_TABLE_S``, so that a start does not deal
        twice. A change that only makes loads more even, or fills a place that is not waited for, waits until the table has
        been still for a while: two syncers that do not hear the same ones would otherwise change it in turn, and fast. A
        syncer that has just come to a run with regions gets nothing yet (:meth:`Syncers.is_back`). An owner that has written a
        wrong entry owns nothing until others have taken over from it: its memory may be bad.
        """
        live = self.live(now_s)
        if self.table is not None:
            live -= {name for index, name in self.wrong.items() if self.table.owners[index] == name} - {self.name}
        if self.table is None:
            if len(live) < self.shards and self._others.hearing_s(now_s) < FIRST_TABLE_S:
                return None
        elif not self._others.hears(now_s):
            return None  # cut off, or its region's server is away: others hear who is there
        elif self._named() <= live:
            if now_s - self._still_since_s < 2 * self._others.takeover_s:
                return None
            new = live - self._named()
            live -= {name for name in new if not self._others.is_back(None if name == self.name else name, now_s)}
        return plan(self.table, live, self.sizes, self.shards, self._regions())

    def hearing_s(self, now_s: float) -> float:
        """Return for how long this syncer has heard others without a break; 0 while it is deaf."""
        return self._others.hearing_s(now_s)

    def speaks(self, now_s: float) -> bool:
        """Whether this syncer tells learners who is alive: of its region's syncers that are there, the one that began first."""
        if self.leaving or self.unable(now_s):
            return False
        return all(
            (self.incarnation, self.name) < (syncer.heartbeat.incarnation, name)
            for name, syncer in self._others
            if syncer.heartbeat.region == self.region
            and syncer.heartbeat.state not in ("leaving", "unable")
            and not self._is_gone(name, now_s)
        )

    def keeps(self, fragment: int, now_s: float) -> bool:
        """Whether this syncer looks after a fragment in its region: the first of those who live there does.

        It stores the fragment's keyframes there, and combines offers of it. Where the owner lives, it is the owner.
        """
        if self.table is None:
            return False
        regions = self._regions()
        if regions.get(self.table.owners[fragment]) == self.region:
            return False
        return self.name == min(name for name in self.live(now_s) | {self.name} if regions.get(name) == self.region)

    def inhabited(self, now_s: float) -> set[str]:
        """Return the regions in which a syncer lives."""
        regions = self._regions()
        return {regions[name] for name in self.live(now_s) if name in regions}

    def mine(self, now_s: float) -> set[int]:
        """Return the fragments to own: those of the table, unless this syncer leaves and no other one could take them."""
        if self.table is None or (self.leaving and not self.live(now_s)):
            return set()
        return {fragment for fragment, owner in enumerate(self.table.owners) if owner == self.name}

    def may_take(self, fragment: int, now_s: float) -> bool:
        """Whether a fragment of the table's is free: no live syncer that could commit anything still owns it.

        None is, until this syncer has heard the others for two heartbeats, nor before it has read a table that it found wrong.
        """
        if self.leaving or self._read_at_s == -math.inf or self._others.hearing_s(now_s) < 2 * self.heartbeat_s:
            return False
        return not any(
            fragment in syncer.heartbeat.fragments
            and syncer.heartbeat.state != "unable"
            and self.wrong.get(fragment) != name
            and not self._is_gone(name, now_s)
            for name, syncer in self._others
        )

    def _named(self) -> set[str]:
        return {*self.table.holders, *self.table.owners} if self.table else set()

    def _is_gone(self, name: str, now_s: float) -> bool:
        return self._others.presence(name, now_s) is SyncerPresence.GONE

    def _regions(self) -> dict[str, str]:
        return {self.name: self.region} | self._others.regions()
