"""The syncer of a simulation: it cannot fail, and owns all fragments.

The product's :class:`~diloco.core.syncer.round.Round` and :class:`~diloco.core.syncer.round.Roster` decide when a round opens
and closes, and with whose offers; :class:`~diloco.core.log.chain.Chain` and :func:`~diloco.core.syncer.merging.version_record`
make its version.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from msgspec import structs

from diloco.core.learner.fragment_state import FragmentVersion as Folded
from diloco.core.learner.slots import offset
from diloco.core.log.chain import Chain
from diloco.core.syncer import merging
from diloco.core.syncer.roster import Roster
from diloco.core.syncer.round import Merge, Round, RoundOffer
from diloco.wire.body import Body
from diloco.wire.control import Announcement, Heartbeat
from diloco_lab.simulator.cluster import MICROS, NEVER_US, ClusterLearner, RoundTerms, micros
from diloco_lab.simulator.events import LOOK, MESSAGE, Events
from diloco_lab.simulator.lifetime_history import Steps
from diloco_lab.simulator.network import Direction, Sizes
from diloco_lab.simulator.outcome import MergedVersion

NO_HASH = bytes(32)
NO_BODY = Body(0, NO_HASH, 0, bytes(8))


class SyncedLearner(Protocol):
    """A learner as the syncer knows it."""

    learner: ClusterLearner
    process: int  # number of its process
    steps: Steps
    up: Direction
    down: Direction

    def hear_round(self, now_us: int, announced: Announcement) -> None:
        """Take in an announcement."""

    def receive(self, now_us: int, folded: Folded) -> None:
        """Take in a version."""

    def is_silent(self, now_us: int, *, absent: bool = False) -> bool:
        """Return whether nothing is heard of the learner now; ``absent``: since it takes no part."""

    def heard_us(self, at_us: int) -> int:
        """Return when the syncer hears of a boundary of the learner's."""


class SimulatedSyncer:
    """The rounds of all fragments."""

    def __init__(self, events: Events, rounds: RoundTerms, on_version: Callable[[MergedVersion], Any] | None) -> None:
        self.events, self.settings, self._on_version = events, rounds.settings, on_version
        self.listeners: list[SyncedLearner] = []  # all learners
        self.roster = Roster(rounds.settings)
        self._sizes, self._commit_s = Sizes(rounds), rounds.commit_s
        count = len(rounds.sizes)
        chains = [
            Chain(fragment=fragment, version=0, epoch=0, head=NO_HASH, sequence=0, state_hash=NO_HASH)
            for fragment in range(count)
        ]
        self.rounds = [self._round(chain, count) for chain in chains]
        self.versions = self.members = 0
        self._opened_us = [0] * count
        self._looks: set[tuple[int, int]] = set()  # (time, fragment) of those that are to come
        self._due: set[int] = set()  # fragments of whose next round too few learners have said that it is due
        self._gone: dict[str, int] = defaultdict(int)  # by learner: reasons to take it for dead
        self._unsteady: dict[str, SyncedLearner] = {}  # learners whose step times change
        self._slots = not rounds.settings.round.learners_wait  # whether rounds are due in slots
        self._noted_us = -1  # when learners' steps were last noted
        self._unplanned: set[int] = set()  # fragments of which it is not known when their next slot comes

    def _round(self, chain: Chain, fragments: int) -> Round:
        return Round(self.roster, chain, fragments)

    # ---- learners

    def hear(self, now_us: int, member: SyncedLearner, heartbeat: Heartbeat) -> None:
        """Take in the first heartbeat of a process."""
        self.roster.hear(heartbeat, now_us / MICROS)
        self._note_live(member)
        self._look_around(now_us)

    def hear_due(
        self, now_us: int, member: SyncedLearner, process: int, fragment: int, version: int, since: int, step: int
    ) -> None:
        """Hear that a learner, which applied ``version`` after ``since`` steps, has taken enough since to answer a round."""
        round_, seen = self.rounds[fragment], self.roster.learners.get(member.learner.name)
        if process == member.process and round_.chain.version == version and seen is not None:
            seen.since[fragment] = (version, since)
            seen.heartbeat = structs.replace(seen.heartbeat, step=max(step, seen.heartbeat.step))
            if round_.opened_at_s is None:
                self._due.add(fragment)
                self._look_at(now_us, fragment)

    def lose(self, now_us: int, member: SyncedLearner) -> None:
        """Take a learner for dead: it has been silent for long."""
        self._gone[member.learner.name] += 1
        self._note_live(member)
        self._look_around(now_us)

    def find(self, now_us: int, member: SyncedLearner) -> None:
        """Take a learner for alive again."""
        self._gone[member.learner.name] -= 1
        self._note_live(member)
        self._look_around(now_us)

    def _note_live(self, member: SyncedLearner) -> None:
        """Bring the roster up to date: it is told when a learner's heartbeats cease and begin, and not of each one."""
        seen = self.roster.learners.get(member.learner.name)
        if seen is not None:
            seen.at_s = -math.inf if self._gone[member.learner.name] else math.inf
            seen.first_s = seen.stepped_s = math.inf  # its steps are not told one by one
            self.roster.change(self.settings, self.roster.excluded)

    def watch_pace(self, member: SyncedLearner, now_us: int) -> None:
        """Follow a learner's step time for as long as it changes; its lifetime has been played on."""
        self._unsteady[member.learner.name] = member
        for fragment in self._unplanned:
            self._look_at(now_us, fragment)

    def _note_paces(self, now_us: int) -> None:
        for name, member in list(self._unsteady.items()):
            seen = self.roster.learners.get(name)
            if seen is not None:
                heard_us = now_us - member.up.delay_us
                step_s = member.steps.average_s(heard_us)
                if step_s != seen.heartbeat.step_s:
                    seen.heartbeat = structs.replace(seen.heartbeat, step_s=step_s)
                if heard_us >= member.steps.unsteady_until_us:
                    del self._unsteady[name]

    def _note_steps(self, now_us: int) -> None:
        if self._noted_us == now_us:
            return  # several fragments are looked at, after all that happens at this moment
        self._noted_us = now_us
        for member in self.listeners:
            seen, heard_us = self.roster.learners.get(member.learner.name), now_us - member.up.delay_us
            if seen is not None and member.up.tell(heard_us) is not None:
                step = member.steps.done(heard_us)
                if step > seen.heartbeat.step:
                    seen.heartbeat = structs.replace(seen.heartbeat, step=step)

    # ---- rounds

    def _look_around(self, now_us: int) -> None:
        for fragment, round_ in enumerate(self.rounds):
            if round_.opened_at_s is not None or fragment in self._due or self._slots:
                self._look_at(now_us, fragment)

    def _plan(self, now_us: int, fragment: int) -> None:
        """Look at a fragment again when the syncer hears that its next slot has begun."""
        reference, steps = self.roster.clock(now_us / MICROS).reference, self.settings.round.steps
        self._unplanned.discard(fragment)
        if reference is None:
            return
        [member] = [member for member in self.listeners if member.learner.name == reference.heartbeat.learner]
        begun = reference.heartbeat.step - offset(steps, fragment, len(self.rounds))
        done_us = member.steps.step_us(reference.heartbeat.step + steps - begun % steps)
        if done_us < NEVER_US:
            self._look_at(member.heard_us(done_us), fragment)
        else:
            self._unplanned.add(fragment)

    def _look_at(self, at_us: int, fragment: int) -> None:
        """Look at a round at a time, after all that arrives then."""
        if (at_us, fragment) not in self._looks:
            self._looks.add((at_us, fragment))
            self.events.at(at_us, LOOK + fragment, self._look, fragment)

    def _look(self, now_us: int, fragment: int) -> None:
        self._looks.discard((now_us, fragment))
        round_, now_s = self.rounds[fragment], now_us / MICROS
        self._note_paces(now_us)
        if self._slots:
            self._note_steps(now_us)
        if round_.opened_at_s is None and round_.due(now_s, self.settings.round.steps):
            round_.open(now_s)
            self._due.discard(fragment)
            self._opened_us[fragment] = now_us
            self._announce(now_us, fragment)
        merge = round_.poll(now_s)
        if merge is not None:
            self.events.at(now_us + micros(self._commit_s), MESSAGE, self._commit, fragment, merge)
        elif round_.opened_at_s is not None and round_.merge_at_s is None and round_.quorum_at_s is not None:
            self._look_at(now_us + micros(round_.remaining_s(now_s)) + 1, fragment)
        if round_.opened_at_s is None and self._slots:
            self._plan(now_us, fragment)

    def _announce(self, now_us: int, fragment: int) -> None:
        round_ = self.rounds[fragment]
        announced = Announcement(
            fragment=fragment,
            version=round_.version,
            epoch=0,
            syncer="syncer-0",
            remaining_s=0.0,
            closing=False,
            tokens_processed=0,
            steps=self.settings.round.steps,
            offer_bits=[],
        )
        arrives: dict[int, list[SyncedLearner]] = defaultdict(list)
        for member in self._asked(fragment):
            down = member.down
            arrives[down.open_us(down.open_us(now_us) + down.delay_us)].append(member)  # it is repeated
        for at_us, listeners in arrives.items():
            self.events.at(at_us, MESSAGE, self._announced, listeners, announced)

    def _asked(self, fragment: int) -> Sequence[SyncedLearner]:
        """Return the learners that a fragment's open round asks."""
        return self.listeners

    def _announced(self, now_us: int, listeners: Sequence[SyncedLearner], announced: Announcement) -> None:
        for listener in listeners:
            listener.hear_round(now_us, announced)

    def hear_offer(self, now_us: int, held: RoundOffer) -> None:
        """Hold an offer for the next version."""
        fragment = held.offer.fragment
        self.rounds[fragment].hold(held)
        self._look_at(now_us, fragment)

    def _commit(self, now_us: int, fragment: int, merge: Merge) -> None:
        round_, chain = self.rounds[fragment], self.rounds[fragment].chain
        record = merging.version_record(
            chain,
            merge,
            self.settings,
            bits=self.settings.codec.record_bits,
            learning_rate=0.0,
            momentum=0.0,
            syncer="syncer-0",
            now_s=now_us / MICROS,
            state_hash=NO_HASH,
            body=NO_BODY,
        )
        chain.check(record)
        chain.advance(record, record.version.to_bytes(32, "big"), chain.sequence + 1)
        round_.committed(now_us / MICROS)
        if self._slots:
            self._look_at(now_us, fragment)
        self.versions += 1
        self.members += len(record.members)
        folded = Folded(record, replace(chain, cursors=dict(chain.cursors)))
        size_bytes = self._sizes.record(fragment, len(record.members))
        arrives: dict[int, list[SyncedLearner]] = defaultdict(list)
        for member in self.listeners:
            if not member.is_silent(now_us, absent=True):
                arrives[member.down.send(now_us, size_bytes)].append(member)
        for at_us, listeners in arrives.items():
            self.events.at(at_us, MESSAGE, self._delivered, listeners, folded)
        if self._on_version:
            names = tuple((m.learner, m.steps, m.tokens) for m in record.members)
            self._on_version(MergedVersion(fragment, record.version, self._opened_us[fragment], now_us, names))

    def _delivered(self, now_us: int, listeners: Sequence[SyncedLearner], folded: Folded) -> None:
        for listener in listeners:
            listener.receive(now_us, folded)
