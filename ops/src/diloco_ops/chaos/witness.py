"""The run as chaos sees it from outside: its log, its heartbeats, and how long each recovery takes.

Pure: it takes records, heartbeats and answers with the time of its own clock.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from diloco.core.log.chain import Chain
from diloco.core.log.quorum import majority
from diloco.errors import ChainError
from diloco.wire.control import Heartbeat, ShardHeartbeat
from diloco.wire.entries import Record

KEPT = 256  # versions of a fragment that a heartbeat may lag behind


@dataclass
class WatchedRecovery:
    """A failure at ``since_s``, and the signs that must be seen before it counts as recovered."""

    kind: str
    target: str
    since_s: float
    fragments: set[int] = field(default_factory=set)  # each must have a next record
    learner: str | None = None  # must step
    step: tuple[int, int] | None = None  # incarnation and step at its first heartbeat since
    status: bool = False  # a status must be answered
    version: bool = False  # any fragment must have a next version
    server: bool = False  # the server must have been away first
    region: str | None = None  # a version must merge work of a learner there, if it has any
    done_s: float | None = None

    @property
    def took_s(self) -> float | None:
        return None if self.done_s is None else self.done_s - self.since_s


class Witness:
    """Follows a run. ``chains`` are the fragments' heads where it begins to look."""

    def __init__(self, chains: Sequence[Chain], sizes: Sequence[int]) -> None:
        self.chains, self.sizes = list(chains), sizes
        self.versions: dict[tuple[int, int], bytes] = {}  # by fragment and version: hash of the entry
        self.takeovers = self.passed_over = self.doubled = 0
        self.heartbeats: dict[str, Heartbeat] = {}
        self.shards: dict[str, ShardHeartbeat] = {}
        self.recoveries: list[WatchedRecovery] = []
        self._followers: dict[tuple[int, bytes], bytes] = {}  # by fragment and hash of an entry: the one that followed it
        self._merged: dict[tuple[int, str], list[tuple[int, int]]] = {}  # by fragment, learner: version, tokens so far
        for chain in chains:
            for name, cursor in chain.cursors.items():
                self._merged[chain.fragment, name] = [(chain.version, cursor.tokens)]

    # ---- observations

    def entry(self, record: Record, entry_hash: bytes, sequence: int, now_s: float) -> None:
        """Take in a log entry."""
        chain = self.chains[record.fragment]
        follower = self._followers.get((record.fragment, record.previous))
        if follower is not None:
            self.doubled += follower != entry_hash  # a copy of an entry is no second one
            self.passed_over += 1
            return
        try:
            chain.check(record)
        except ChainError:
            self.passed_over += 1
            return
        chain.advance(record, entry_hash, sequence)
        self._followers[record.fragment, record.previous] = entry_hash
        self.takeovers += record.entry == "takeover"
        if record.makes_version:
            self.versions[record.fragment, record.version] = entry_hash
            for member in record.members:
                series = self._merged.setdefault((record.fragment, member.learner), [(0, 0)])
                series.append((record.version, chain.cursors[member.learner].tokens))
                if len(series) > 2 * KEPT:
                    del series[:KEPT]
        for waiting in self._open(now_s):
            if waiting.fragments:
                waiting.fragments.discard(record.fragment)
                if not waiting.fragments:
                    waiting.done_s = now_s
            elif waiting.version and record.entry == "version" and not waiting.server and self._is_of(waiting.region, record):
                waiting.done_s = now_s

    def _is_of(self, region: str | None, record: Record) -> bool:
        """Whether a version merges work of a region; of one without learners any version counts."""
        there = {heartbeat.learner for heartbeat in self.learners() if heartbeat.region == region}
        return not there or any(member.learner in there for member in record.members)

    def heartbeat(self, heartbeat: Heartbeat, now_s: float) -> None:
        """Take in a learner's or an evaluator's heartbeat."""
        self.heartbeats[heartbeat.learner] = heartbeat
        for waiting in self._open(now_s):
            if waiting.learner == heartbeat.learner:
                if heartbeat.role == "evaluator" or heartbeat.state in ("closing", "finished"):
                    waiting.done_s = now_s
                elif heartbeat.state == "stepping":
                    step = (heartbeat.incarnation, heartbeat.step)
                    if waiting.step is not None and step > waiting.step:
                        waiting.done_s = now_s
                    waiting.step = waiting.step or step

    def shard(self, heartbeat: ShardHeartbeat) -> None:
        """Take in a syncer's heartbeat."""
        self.shards[heartbeat.syncer] = heartbeat

    def answered(self, asked_s: float, now_s: float) -> None:
        """Note that the coordinator answered a request for its status."""
        for waiting in self._open(asked_s):
            if waiting.status:
                waiting.done_s = now_s

    def away(self, now_s: float) -> None:
        """Note that the server is not there."""
        for waiting in self._open(now_s):
            waiting.server = False

    def expect(self, recovery: WatchedRecovery) -> None:
        """Expect a recovery: something broke."""
        self.recoveries.append(recovery)

    def owned(self, syncer: str) -> set[int]:
        """Return the fragments that a syncer says it owns, but for those whose log is closed."""
        heartbeat = self.shards.get(syncer)
        return {f for f in heartbeat.fragments if not self.chains[f].closed} if heartbeat else set()

    # ---- conclusions

    @property
    def finished(self) -> bool:
        """Whether every fragment's log is closed: nothing more has to be seen."""
        return all(chain.closed for chain in self.chains)

    @property
    def open(self) -> list[WatchedRecovery]:
        """Failures that have not recovered."""
        return [recovery for recovery in self.recoveries if recovery.done_s is None]

    def learners(self) -> list[Heartbeat]:
        """Return the last heartbeat of each learner."""
        return [heartbeat for heartbeat in self.heartbeats.values() if heartbeat.role == "learner"]

    def processed(self) -> int:
        return sum(heartbeat.tokens for heartbeat in self.learners())

    def lost(self) -> float:
        """Return the tokens that will never be merged, as the mean over fragments by their parameters."""
        lost = sum(n * size for heartbeat in self.learners() for n, size in zip(heartbeat.lost_tokens, self.sizes, strict=True))
        return lost / sum(self.sizes)

    def unaccounted(self, heartbeat: Heartbeat) -> dict[int, int] | None:
        """Return by fragment the tokens that a learner processed, and neither merged, lost nor holds; None: not known yet."""
        found = {}
        for fragment, version in enumerate(heartbeat.versions):
            if version > self.chains[fragment].version:
                return None
            merged = self._merged_at(fragment, heartbeat.learner, version)
            if merged is None:
                return None
            rest = heartbeat.tokens - merged - heartbeat.lost_tokens[fragment] - heartbeat.fragment_tokens[fragment]
            if rest:
                found[fragment] = rest
        return found

    def compare(self, logs: Sequence[Mapping[tuple[int, int], Collection[bytes]]]) -> tuple[int, int, int]:
        """Count the versions that were seen and are gone, are others, or too few regions hold, now that logs were read again.

        Args:
            logs: of each region, or the only one: by fragment and version, the checks of all entries that say they make it. A
                fragment's versions below the oldest there were dropped on purpose; a region that was far behind may have been
                given a keyframe in place of some.
        """
        oldest: list[dict[int, int]] = [{} for _ in logs]
        newest: list[dict[int, int]] = [{} for _ in logs]
        for stored, first, last in zip(logs, oldest, newest, strict=True):
            for fragment, version in stored:
                first[fragment] = min(version, first.get(fragment, version))
                last[fragment] = max(version, last.get(fragment, version))
        lost = changed = too_few = 0
        for (fragment, version), entry_hash in self.versions.items():
            held = [stored[fragment, version] for stored in logs if (fragment, version) in stored]
            dropped = sum(version < first.get(fragment, math.inf) for first in oldest)
            lost += not held and dropped < len(logs)
            changed += any(entry_hash not in entries for entries in held)
            too_few += sum(last.get(fragment, -1) >= version for last in newest) < majority(len(logs))
        return lost, changed, too_few

    def recovery_times(self) -> dict[str, dict[str, float]]:
        """Return by kind of failure how many recovered, and the median and the longest time in seconds."""
        times: dict[str, list[float]] = {}
        for recovery in self.recoveries:
            if recovery.took_s is not None:
                group = recovery.target.rpartition("-")[0] or recovery.target
                times.setdefault(f"{recovery.kind} {group}", []).append(recovery.took_s)
        return {
            what: {"count": len(taken), "median_s": round(median(taken), 3), "max_s": round(max(taken), 3)}
            for what, taken in sorted(times.items())
        }

    def _open(self, now_s: float) -> Collection[WatchedRecovery]:
        return [recovery for recovery in self.open if recovery.since_s <= now_s]

    def _merged_at(self, fragment: int, learner: str, version: int) -> int | None:
        series = self._merged.get((fragment, learner), [(0, 0)])
        at = bisect.bisect_right(series, version, key=lambda point: point[0])
        return series[at - 1][1] if at else None
