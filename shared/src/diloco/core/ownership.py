"""Which syncer owns which fragments: who is alive, how fragments are dealt out, and who may take one over.

Any number of syncers may come and go. At most ``shards`` of them, the *holders*, share the fragments; the others stand by. Who
owns what is a small table, written only on change and by compare-and-set; nothing in it expires (design.md section 5). Every
syncer runs this state machine on what it hears. If two of them propose at once, the compare-and-set lets one table through;
if one of them is wrong about another, the log's fence still lets only one owner write.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta, Struct

from diloco.wire.messages import MAX_FRAGMENTS, MAX_SYNCERS, MemberName, ShardPulse

FIRST_TABLE_S = 2.0
READ_EVERY_S = 2.0
PULSES = 6  # in the time after which a silent syncer is gone
RIVAL_PULSES = 4
# of an even share: a fragment moves only between syncers whose loads differ by more than this
UNEVEN = 0.1
RETURN = 2.0  # so many times away_s a region has to be there again before it is given anything


class OwnersTable(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """The value of the key ``owners``: the syncers that share the fragments, and by fragment the one that owns it."""

    holders: Annotated[list[MemberName], Meta(min_length=1, max_length=MAX_SYNCERS)]
    owners: Annotated[list[MemberName], Meta(min_length=1, max_length=MAX_FRAGMENTS)]


def plan(
    table: OwnersTable | None,
    live: Collection[str],
    sizes: Sequence[int],
    shards: int,
    regions: Mapping[str, str] | None = None,
) -> OwnersTable | None:
    """The table that should be, if it is another one than ``table``; None too if nobody is ``live``.

    Living holders stay, others fill up free places by name. With ``regions`` (of the living, by name) those of the region with
    the fewest holders come first, and a region without any gets the place of one of a region with several, since what crosses
    between regions is least where each owns its share. A fragment without a living owner goes to the holder with the
    fewest parameters, largest first. Then fragments move from the fullest holder to the emptiest while their loads differ by
    more than ``UNEVEN`` of an even share and a move makes them clearly more even. It is a function of its arguments alone,
    and a table that it returned needs no change.
    """
    holders = [name for name in table.holders if name in live][:shards] if table else []
    holders = _seat(holders, set(live), shards, regions or {})
    if not holders:
        return None
    loads = dict.fromkeys(holders, 0)
    owners = list(table.owners) if table else [""] * len(sizes)
    for fragment, owner in enumerate(owners):
        if owner in loads:
            loads[owner] += sizes[fragment]
    orphans = [fragment for fragment, owner in enumerate(owners) if owner not in loads]
    for fragment in sorted(orphans, key=lambda f: -sizes[f]):
        owners[fragment] = min(holders, key=loads.__getitem__)
        loads[owners[fragment]] += sizes[fragment]
    margin = UNEVEN * sum(sizes) / len(holders)
    while True:
        fullest, emptiest = max(holders, key=loads.__getitem__), min(holders, key=loads.__getitem__)
        excess = loads[fullest] - loads[emptiest]
        movable = [f for f, owner in enumerate(owners) if owner == fullest and sizes[f] <= excess - margin / 2]
        if excess <= margin or not movable:
            break
        fragment = min(movable, key=lambda f: abs(excess - 2 * sizes[f]))
        owners[fragment] = emptiest
        loads[fullest] -= sizes[fragment]
        loads[emptiest] += sizes[fragment]
    planned = OwnersTable(holders, owners)
    return None if planned == table else planned


def _seat(holders: list[str], live: set[str], shards: int, regions: Mapping[str, str]) -> list[str]:
    """Holders, with free places filled, and as many regions among them as can be."""
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


@dataclass
class _Peer:
    pulse: ShardPulse
    at_s: float
    since_s: float  # when it was first heard, or again after it had been gone


class Ownership:
    """One syncer's view: the table as last read, and the syncers as heard by its own clock.

    It hears its own pulses too. While they do not come back, it is this process or its connection that is silent, and
    nobody counts as gone; when they come again, the others get as long as ever to be heard.
    """

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
        """``region``: empty in a run without; one of which nobody is heard counts as gone after ``away_s``."""
        self.name, self.incarnation, self.region, self.away_s = name, incarnation, region, away_s
        self.sizes, self.shards, self.takeover_s = sizes, shards, takeover_s
        self.table: OwnersTable | None = None
        self.revision = 0  # of the table; 0: there is none
        self.leaving = False
        self._peers: dict[str, _Peer] = {}
        self._rival = (0, 0, 0)  # incarnation, newest number, pulses of a younger process with this name
        self._echo_at_s = self._hearing_since_s = -math.inf
        self._read_at_s = -math.inf  # when the table was last read, and the newest revision that others knew then
        self._read_for = 0
        self._still_since_s = -math.inf  # when its revision last changed
        self._unable_since_s = math.inf  # nothing can be committed from here

    @property
    def pulse_s(self) -> float:
        """How often to pulse."""
        return self.takeover_s / PULSES

    @property
    def holds(self) -> bool:
        """Whether this syncer shares the fragments; if not it stands by."""
        return self.table is not None and self.name in self.table.holders

    @property
    def replaced(self) -> bool:
        """Whether a younger process goes by this one's name."""
        return self._rival[2] >= RIVAL_PULSES

    @property
    def closed_elsewhere(self) -> set[int]:
        """Others' fragments whose log is closed: by the newest word of the one that the table gives each to.

        It looks after the log's end, which a server's crash may undo; whoever had the fragment before does so no more.
        """
        said = {(index, name) for name, peer in self._peers.items() for index in peer.pulse.closed}
        return {index for index, owner in said.intersection(enumerate(self.table.owners if self.table else []))}

    def hear(self, pulse: ShardPulse, now_s: float) -> bool:
        """Take in a pulse, the syncer's own included; whether there is something new to act on."""
        if pulse.syncer == self.name:
            return self._hear_own(pulse, now_s)
        known = self._peers.get(pulse.syncer)
        if known is None and len(self._peers) >= MAX_SYNCERS:
            self._peers = {name: peer for name, peer in self._peers.items() if not self._gone(name, now_s)}
            if len(self._peers) >= MAX_SYNCERS:
                return False
        gone = known is not None and self._gone(pulse.syncer, now_s)
        if known is not None and _age(pulse) <= _age(known.pulse):
            started_again = gone and pulse.incarnation != known.pulse.incarnation  # with its clock set back
            if not started_again:
                return False  # repeated or late
        returns = known is None or gone or (known.pulse.state == "unable" and pulse.state != "unable")
        self._peers[pulse.syncer] = _Peer(pulse, now_s, now_s if known is None or returns else known.since_s)
        if known is None or gone or pulse.revision > self.revision:
            return True
        before = known.pulse
        return (pulse.state, pulse.fragments, pulse.closed) != (before.state, before.fragments, before.closed)

    def _hear_own(self, pulse: ShardPulse, now_s: float) -> bool:
        if pulse.incarnation > self.incarnation:
            rival, number, pulses = self._rival
            if (pulse.incarnation, pulse.number) > (rival, number):
                self._rival = (pulse.incarnation, pulse.number, pulses + 1)
        elif pulse.incarnation == self.incarnation:
            if not self._hears(now_s):
                self._hearing_since_s = now_s
            self._echo_at_s = now_s
        return False

    def read(self, table: OwnersTable | None, revision: int, now_s: float) -> None:
        """Take in the table as stored, with the revision of its key."""
        if revision != self.revision:
            self._still_since_s = now_s
        self.table, self.revision = table, revision
        self._read_at_s, self._read_for = now_s, self._newest()

    def must_read(self, now_s: float) -> bool:
        """Whether the table should be read: somebody knows a newer one, or the last time is long ago."""
        return self._newest() > max(self.revision, self._read_for) or now_s - self._read_at_s >= READ_EVERY_S

    def distrust(self) -> None:
        """Somebody else has written as an owner: read the table before anything is taken over again."""
        self._read_at_s = -math.inf

    def reach(self, commits: bool, now_s: float) -> None:
        """Take in whether a version could be committed from here: whether there is room, in a majority that can be reached."""
        self._unable_since_s = math.inf if commits else min(self._unable_since_s, now_s)

    def unable(self, now_s: float) -> bool:
        """Whether nothing could be committed from here for so long that others are to do it.

        Such a syncer is heard, since the control store may be reached by another way than the regions' servers.
        """
        return now_s - self._unable_since_s >= self.away_s

    def live(self, now_s: float) -> set[str]:
        """The syncers that fragments may go to."""
        names = {name for name, peer in self._peers.items() if peer.pulse.state not in ("leaving", "unable")}
        names |= {name for name in self._named() if name not in self._peers}  # not heard yet: perhaps only not yet
        names = {name for name in names - {self.name} if not self._gone(name, now_s)}
        return names if self.leaving or self.unable(now_s) else names | {self.name}

    def propose(self, now_s: float) -> OwnersTable | None:
        """The table to put in the place of the known one, or None.

        The first table waits for ``shards`` syncers, but no longer than ``FIRST_TABLE_S``, so that a start does not deal
        twice. What only makes loads more even, or fills a place that nobody waits for, waits until the table has been still
        for a while: two syncers that do not hear the same ones would otherwise change it in turn, and fast. Who has just come
        to a run with regions gets nothing yet: its region may have been cut off, and has to catch up over the same links.
        """
        live = self.live(now_s)
        if self.table is None:
            waited_s = now_s - self._hearing_since_s if self._hears(now_s) else 0.0
            if len(live) < self.shards and waited_s < FIRST_TABLE_S:
                return None
        elif not self._hears(now_s):
            return None  # cut off, or its region's server is away: who is there is for others to say
        elif self._named() <= live:
            if now_s - self._still_since_s < 2 * self.takeover_s:
                return None
            live -= {name for name in live - self._named() if self._is_fresh(name, now_s)}
        return plan(self.table, live, self.sizes, self.shards, self._regions())

    def keeps(self, fragment: int, now_s: float) -> bool:
        """Whether it is this syncer that looks after a fragment in its region: the first of those who live there.

        It stores the fragment's keyframes there, and combines offers of it. Where the owner lives, it is the owner.
        """
        if self.table is None:
            return False
        regions = self._regions()
        if regions.get(self.table.owners[fragment]) == self.region:
            return False
        return self.name == min(name for name in self.live(now_s) | {self.name} if regions.get(name) == self.region)

    def inhabited(self, now_s: float) -> set[str]:
        """The regions in which a syncer lives."""
        regions = self._regions()
        return {regions[name] for name in self.live(now_s) if name in regions}

    def mine(self, now_s: float) -> set[int]:
        """The fragments to own: those of the table, unless this syncer leaves and nobody else lives to be given them."""
        if self.table is None or (self.leaving and not self.live(now_s)):
            return set()
        return {fragment for fragment, owner in enumerate(self.table.owners) if owner == self.name}

    def may_take(self, fragment: int, now_s: float) -> bool:
        """Whether a fragment of the table's is free: nobody alive still owns it, who could commit anything.

        Nothing is, until this syncer has heard the others for two pulses, nor before it has read a table that it found wrong.
        """
        heard_s = now_s - self._hearing_since_s if self._hears(now_s) else 0.0
        if self.leaving or self._read_at_s == -math.inf or heard_s < 2 * self.pulse_s:
            return False
        return not any(
            fragment in peer.pulse.fragments and peer.pulse.state != "unable" and not self._gone(name, now_s)
            for name, peer in self._peers.items()
        )

    def _named(self) -> set[str]:
        return {*self.table.holders, *self.table.owners} if self.table else set()

    def _newest(self) -> int:
        return max((peer.pulse.revision for peer in self._peers.values()), default=0)

    def _hears(self, now_s: float) -> bool:
        return now_s - self._echo_at_s < self.takeover_s / 2

    def _gone(self, name: str, now_s: float) -> bool:
        peer = self._peers.get(name)
        heard_at_s = peer.at_s if peer else -math.inf
        silence_s = self.takeover_s if self._near(peer, now_s) else self.away_s
        return self._hears(now_s) and now_s - max(heard_at_s, self._hearing_since_s) >= silence_s

    def _is_fresh(self, name: str, now_s: float) -> bool:
        since_s = self._hearing_since_s if name == self.name else self._peers[name].since_s
        return bool(self.region) and now_s - since_s < RETURN * self.away_s

    def _near(self, peer: _Peer | None, now_s: float) -> bool:
        """Whether a silence is the peer's own: others of its region are heard, or it is this one's region."""
        if not self.region:
            return True
        if peer is None:
            return False
        region = peer.pulse.region
        fresh_s = self.takeover_s / 2
        others = [p for p in self._peers.values() if p is not peer and p.pulse.region == region]
        return region == self.region or any(now_s - other.at_s < fresh_s for other in others)

    def _regions(self) -> dict[str, str]:
        return {self.name: self.region} | {name: peer.pulse.region for name, peer in self._peers.items()}


def _age(pulse: ShardPulse) -> tuple[int, int]:
    return pulse.incarnation, pulse.number
