"""A scenario, and the outcome of simulating it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from diloco_lab.simulator.cluster import MICROS, ClusterLearner, RoundTerms, micros
from diloco_lab.simulator.lifetime import ChipTime, Fault, Lifetime, Stretch


@dataclass(frozen=True)
class MergedVersion:
    """A committed version, and whose offers are in it: (learner, steps, tokens)."""

    fragment: int
    version: int
    opened_us: int
    committed_us: int
    members: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class Scenario:
    """Learners, rounds and faults to be simulated. ``faults`` and ``cuts`` (from, until) are a tape's, by learner.

    ``on_stretch``, ``on_version`` and ``on_failure`` are called with what happens; only the events of one learner are in order.
    """

    learners: Sequence[ClusterLearner]
    duration_s: float
    seed: int
    rounds: RoundTerms | None = None
    faults: Mapping[str, Sequence[Fault]] = field(default_factory=dict)
    cuts: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    on_stretch: Callable[[ClusterLearner, Stretch], Any] | None = None
    on_version: Callable[[MergedVersion], Any] | None = None
    on_failure: Callable[[ClusterLearner, Fault], Any] | None = None  # of those that are drawn, not a tape's

    @property
    def duration_us(self) -> int:
        return micros(self.duration_s)

    def lifetime(self, learner: ClusterLearner) -> Lifetime:
        """Return the lifetime of one of the learners, at its beginning."""
        notice = self.on_failure
        note = None if notice is None else lambda fault: notice(learner, fault)
        return Lifetime(learner, self.seed, self.faults.get(learner.name, ()), note)


@dataclass
class LearnerOutcome:
    """One learner's part. Tokens ``merged`` and ``lost`` are means over the parameters, since fragments are merged apart."""

    name: str
    chip_time: ChipTime
    steps: int
    tokens: int
    failures: int
    merged_tokens: float = 0.0
    lost_tokens: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0


@dataclass
class Outcome:
    """All of it. A learner's last stretch is finished, so its time may be a little longer than the scenario's."""

    duration_us: int
    stepping_us: int  # in which some learner took a step
    learners: list[LearnerOutcome]
    versions: int = 0
    members: int = 0  # of all versions

    @property
    def chip_time(self) -> ChipTime:
        """All learners' together."""
        return sum((learner.chip_time for learner in self.learners), start=ChipTime())

    @property
    def goodput(self) -> float:
        """Share of the allocated chip-time that went into steps that count."""
        total = self.chip_time
        return total.useful / total.allocated if total.allocated else 0.0

    @property
    def uptime(self) -> float:
        """Share of the time in which some learner took a step."""
        return self.stepping_us / self.duration_us

    @property
    def tokens(self) -> int:
        """Processed by all learners."""
        return sum(learner.tokens for learner in self.learners)

    @property
    def merged_tokens(self) -> float:
        """Of all learners."""
        return sum(learner.merged_tokens for learner in self.learners)

    @property
    def tokens_per_s(self) -> float:
        """Processed by all learners a second."""
        return self.tokens / self.duration_us * MICROS


class Uptime:
    """Adds up the time in which some learner steps, from stretches that each learner reports in order."""

    def __init__(self, learners: int, until_us: int) -> None:
        self.stepping_us = 0
        self._until_us = until_us
        self._busy: list[list[tuple[int, int]]] = [[] for _ in range(learners)]
        self._known_us = [0] * learners  # reported up to here
        self._settled_us = 0
        self._reported = 0

    def add(self, learner: int, stretch: Stretch) -> None:
        """Add a learner's next stretch."""
        self._known_us[learner] = stretch.end_us
        if stretch.kind == "stepping":
            busy = self._busy[learner]
            if busy and busy[-1][1] == stretch.start_us:
                busy[-1] = (busy[-1][0], stretch.end_us)
            else:
                busy.append((stretch.start_us, stretch.end_us))
        self._reported += 1
        if self._reported >= 64 * len(self._busy):  # so that memory does not grow with time
            self.settle()

    def settle(self) -> None:
        """Count what is known of all learners, and forget it."""
        self._reported = 0
        limit_us, at_us = min(self._until_us, *self._known_us), self._settled_us
        for begin_us, end_us in sorted(part for busy in self._busy for part in busy):
            begin_us, end_us = max(begin_us, at_us), min(end_us, limit_us)
            if end_us > begin_us:
                self.stepping_us += end_us - begin_us
                at_us = end_us
        self._settled_us = limit_us
        self._busy = [[(max(b, limit_us), e) for b, e in busy if e > limit_us] for busy in self._busy]
