"""What chaos sees of a run from outside: its log, its signs of life, and how long each recovery takes.

Pure: it is told of records, pulses and answers with the time of its own clock.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from diloco.core.chain import Chain
from diloco.errors import ChainError
from diloco.wire.messages import Pulse, Record, ShardPulse

KEPT = 256  # versions of a fragment that a pulse may lag behind


@dataclass
class Recovery:
    """Something that broke at ``since_s``, and what has to be seen before it counts as recovered."""

    kind: str
    target: str
    since_s: float
    fragments: set[int] = field(default_factory=set)  # each must have a next record
    learner: str | None = None  # must step
    step: tuple[int, int] | None = None  # incarnation and step at its first pulse since
    status: bool = False  # a status must be answered
    version: bool = False  # any fragment must have a next version
    server: bool = False  # the server must have been away first
    done_s: float | None = None

    @property
    def took_s(self) -> float | None:
        return None if self.done_s is None else self.done_s - self.since_s


class Witness:
    """Follows a run. ``chains`` are the fragments' heads where it begins to look."""

    def __init__(self, chains: Sequence[Chain], sizes: Sequence[int]) -> None:
        self.chains, self.sizes = list(chains), sizes
        self.versions: dict[tuple[int, int], bytes] = {}  # by fragment and version: check of the entry
        self.takeovers = self.passed_over = self.doubled = 0
        self.pulses: dict[str, Pulse] = {}
        self.shards: dict[str, ShardPulse] = {}
        self.recoveries: list[Recovery] = []
        self._followers: dict[tuple[int, bytes], bytes] = {}  # by fragment and check of an entry: the one that followed it
        self._merged: dict[tuple[int, str], list[tuple[int, int]]] = {}  # by fragment, learner: version, tokens so far
        for chain in chains:
            for name, cursor in chain.cursors.items():
                self._merged[chain.fragment, name] = [(chain.version, cursor.tokens)]

    # ---- what comes in

    def entry(self, record: Record, check: bytes, sequence: int, now_s: float) -> None:
        """Take in a log entry."""
        chain = self.chains[record.fragment]
        follower = self._followers.get((record.fragment, record.previous))
        if follower is not None:
            self.doubled += follower != check  # a copy of an entry is no second one
            self.passed_over += 1
            return
        try:
            chain.check(record)
        except ChainError:
            self.passed_over += 1
            return
        chain.advance(record, check, sequence)
        self._followers[record.fragment, record.previous] = check
        self.takeovers += record.entry == "takeover"
        if record.makes_version:
            self.versions[record.fragment, record.version] = check
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
            elif waiting.version and record.entry == "version" and not waiting.server:
                waiting.done_s = now_s

    def pulse(self, pulse: Pulse, now_s: float) -> None:
        """Take in a learner's or an evaluator's sign of life."""
        self.pulses[pulse.learner] = pulse
        for waiting in self._open(now_s):
            if waiting.learner == pulse.learner:
                if pulse.role == "evaluator" or pulse.state in ("closing", "finished"):
                    waiting.done_s = now_s
                elif pulse.state == "stepping":
                    step = (pulse.incarnation, pulse.step)
                    if waiting.step is not None and step > waiting.step:
                        waiting.done_s = now_s
                    waiting.step = waiting.step or step

    def shard(self, pulse: ShardPulse) -> None:
        """Take in a syncer's sign of life."""
        self.shards[pulse.syncer] = pulse

    def answered(self, asked_s: float, now_s: float) -> None:
        """The coordinator answered a request for its status."""
        for waiting in self._open(asked_s):
            if waiting.status:
                waiting.done_s = now_s

    def away(self, now_s: float) -> None:
        """The server is not there."""
        for waiting in self._open(now_s):
            waiting.server = False

    def expect(self, recovery: Recovery) -> None:
        """Something broke."""
        self.recoveries.append(recovery)

    def owned(self, syncer: str) -> set[int]:
        """The fragments that a syncer says it owns, but for those whose log is closed."""
        pulse = self.shards.get(syncer)
        return {f for f in pulse.fragments if not self.chains[f].closed} if pulse else set()

    # ---- what follows from it

    @property
    def finished(self) -> bool:
        """Whether every fragment's log is closed: nothing more has to be seen."""
        return all(chain.closed for chain in self.chains)

    @property
    def open(self) -> list[Recovery]:
        """What has not recovered."""
        return [recovery for recovery in self.recoveries if recovery.done_s is None]

    def learners(self) -> list[Pulse]:
        """The last word of each learner."""
        return [pulse for pulse in self.pulses.values() if pulse.role == "learner"]

    def processed(self) -> int:
        return sum(pulse.tokens for pulse in self.learners())

    def lost(self) -> float:
        """Tokens that will never be merged, as the mean over fragments by their parameters."""
        lost = sum(n * size for pulse in self.learners() for n, size in zip(pulse.lost_tokens, self.sizes, strict=True))
        return lost / sum(self.sizes)

    def unaccounted(self, pulse: Pulse) -> dict[int, int] | None:
        """By fragment, what a learner processed and neither merged nor lost nor holds; None: its versions are not known yet."""
        found = {}
        for fragment, version in enumerate(pulse.versions):
            if version > self.chains[fragment].version:
                return None
            merged = self._merged_at(fragment, pulse.learner, version)
            if merged is None:
                return None
            rest = pulse.tokens - merged - pulse.lost_tokens[fragment] - pulse.fragment_tokens[fragment]
            if rest:
                found[fragment] = rest
        return found

    def compare(self, stored: Mapping[tuple[int, int], Collection[bytes]]) -> tuple[int, int]:
        """How many of the versions that were seen are gone, and how many are others, now that the log was read again.

        Args:
            stored: by fragment and version, the checks of all entries in the log that say they make it. A fragment's
                versions below the oldest there were dropped on purpose.
        """
        oldest: dict[int, int] = {}
        for fragment, version in stored:
            oldest[fragment] = min(version, oldest.get(fragment, version))
        kept = {key: check for key, check in self.versions.items() if key[1] >= oldest.get(key[0], math.inf)}
        lost = sum(key not in stored for key in kept)
        changed = sum(key in stored and check not in stored[key] for key, check in kept.items())
        return lost, changed

    def recovery_times(self) -> dict[str, dict[str, float]]:
        """By what broke: how many recovered, and the median and the longest time in seconds."""
        times: dict[str, list[float]] = {}
        for recovery in self.recoveries:
            if recovery.took_s is not None:
                group = recovery.target.rpartition("-")[0] or recovery.target
                times.setdefault(f"{recovery.kind} {group}", []).append(recovery.took_s)
        return {
            what: {"count": len(taken), "median_s": round(median(taken), 3), "max_s": round(max(taken), 3)}
            for what, taken in sorted(times.items())
        }

    def _open(self, now_s: float) -> Collection[Recovery]:
        return [recovery for recovery in self.open if recovery.since_s <= now_s]

    def _merged_at(self, fragment: int, learner: str, version: int) -> int | None:
        series = self._merged.get((fragment, learner), [(0, 0)])
        at = bisect.bisect_right(series, version, key=lambda point: point[0])
        return series[at - 1][1] if at else None
