"""The full mode: every pulse, announcement, offer and version, decided by the product's own core.

One syncer, which cannot fail, owns all fragments. What is the product's: :class:`~diloco.core.round.Round` and its
:class:`~diloco.core.round.Roster` (when a round opens and closes, who is in it), :class:`~diloco.core.chain.Chain` and
:func:`~diloco.core.merging.version_record` (what may follow, and the accounts), :class:`~diloco.core.books.Books` (what a
learner offers, holds and loses). In the place of parameters every fragment has a single zero.

At one moment learners first end their steps, then messages arrive, and then the syncer looks what they mean.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from diloco.core import merging, quantise
from diloco.core.books import Books
from diloco.core.chain import Chain
from diloco.core.pace import Average, first_due_steps
from diloco.core.round import Held, Merge, Roster, Round
from diloco.settings import changed_settings
from diloco.wire.messages import Body, Offer, Pulse, Record
from diloco_lab.cluster import MICROS, Learner, Rounds, micros
from diloco_lab.life import Stretch
from diloco_lab.network import Sizes, Way
from diloco_lab.outcome import LearnerOutcome, Outcome, Scenario, Uptime, Version

NO_HASH = bytes(32)
NO_BODY = Body(0, NO_HASH, 0, bytes(8))
ZERO = np.zeros(1, np.float32)
FOR_EVER = 10**18  # tokens: the run does not end by itself
BOUNDARY, MESSAGE, LOOK = 0, 1, 2  # the order of what happens at one moment

Act = Callable[[int], None]


def simulate(scenario: Scenario) -> Outcome:
    """Play a scenario with rounds, message by message."""
    return _World(scenario).play()


class _World:
    def __init__(self, scenario: Scenario) -> None:
        assert scenario.rounds is not None
        self.scenario, rounds = scenario, scenario.rounds
        self.rounds: Rounds = replace(rounds, settings=changed_settings(rounds.settings, {"tokens": FOR_EVER}, "simulation"))
        self.settings = self.rounds.settings
        self.until_us = scenario.duration_us
        self.sizes = Sizes(self.rounds)
        self.uptime = Uptime(len(scenario.learners), self.until_us)
        self._queue: list[tuple[int, int, int, Act]] = []
        self._pushed = 0
        self.members = [_Member(self, index, learner) for index, learner in enumerate(scenario.learners)]
        self.syncer = _Syncer(self)

    def at(self, at_us: int, act: Act, *, order: int = MESSAGE) -> None:
        """Have something done at a time."""
        self._pushed += 1
        heapq.heappush(self._queue, (at_us, order, self._pushed, act))

    def play(self) -> Outcome:
        for member in self.members:
            member.begin()
        while self._queue and self._queue[0][0] <= self.until_us:
            at_us, _, _, act = heapq.heappop(self._queue)
            act(at_us)
        self.uptime.settle()
        return Outcome(
            self.until_us,
            self.uptime.stepping_us,
            [member.outcome() for member in self.members],
            self.syncer.versions,
            self.syncer.members,
        )


class _Member:
    """A learner: its life, its books, and what it knows of rounds."""

    def __init__(self, world: _World, index: int, learner: Learner) -> None:
        self.world, self.learner = world, learner
        cuts = world.scenario.cuts.get(learner.name, ())
        self.life = world.scenario.life(learner)
        self.up, self.down = Way(learner.link, cuts), Way(learner.link, cuts)
        self.index, self.step, self.tokens = index, 0, 0
        self.step_average = Average()
        settings, count = world.settings, len(world.rounds.sizes)
        self.books = [
            Books(learner.name, 1, settings.carry, settings.codec.error_feedback, ZERO, 0, NO_HASH) for _ in range(count)
        ]
        self.pending: list[deque[Record]] = [deque() for _ in range(count)]
        self.version_step = [0] * count
        self.open_version, self.answered = [0] * count, [0] * count
        self.encoding, self.sending = [False] * count, [False] * count
        self.snapshot = [False] * count  # there is one as of the last boundary
        self.silent_us = (0, 0)
        self._pulse_us = micros(settings.liveness.pulse_s)
        self.waiting = self.absent = False
        self.reload = False  # the log is to be loaded at the next boundary

    def begin(self) -> None:
        if self.learner.present and self.learner.present[0][0] > 0:
            self._go_on()
        else:
            self._boundary(0, 0)
        self.world.at(self._pulse_us, self._keep_alive)
        for begin_us, _ in self.up.cuts:
            self._miss(begin_us - self.up.delay_us)

    def outcome(self) -> LearnerOutcome:
        sizes, chains = self.world.rounds.sizes, [round_.chain for round_ in self.world.syncer.rounds]
        merged = [chain.cursors[self.learner.name].tokens if self.learner.name in chain.cursors else 0 for chain in chains]
        lost = [self.tokens - books.tokens - tokens for books, tokens in zip(self.books, merged, strict=True)]
        return LearnerOutcome(
            self.learner.name,
            self.life.chip_time,
            self.step,
            self.tokens,
            self.life.failures,
            float(np.average(merged, weights=sizes)),
            float(np.average(lost, weights=sizes)),
            self.up.bytes,
            self.down.bytes,
        )

    def heard(self, at_us: int) -> bool:
        """Whether the learner hears and says something at a time."""
        begin_us, end_us = self.silent_us
        return not begin_us <= at_us < end_us

    # ---- stepping

    def _boundary(self, now_us: int, slices: int) -> None:
        """The end of a step that so many slices took part in, or (0) of anything else."""
        if slices:
            tokens = slices * self.learner.tokens
            self.step += 1
            self.tokens += tokens
            for books in self.books:
                books.step(tokens, self.index, self.step)
        if self.reload:
            self._load()
        for fragment in range(len(self.books)):
            if not self.encoding[fragment]:
                self._apply(fragment)
            self.snapshot[fragment] = True
            self._try_answer(fragment, now_us)
        self._pulse(now_us)
        round_ = self.world.settings.round
        taken = [self.step - step for step in self.version_step]
        self.waiting = round_.learners_wait and any(steps >= self._steps_due(p) for p, steps in enumerate(taken))
        if not self.waiting:
            self._go_on()

    def _steps_due(self, fragment: int) -> int:
        round_ = self.world.settings.round
        return round_.steps if self.books[fragment].base_version else first_due_steps(round_, fragment, len(self.books))

    def _go_on(self) -> None:
        stretch = self.life.advance(1, self.world.until_us + 1)
        self._note(stretch)
        self.world.at(stretch.end_us, lambda at_us: self._ended(at_us, stretch), order=BOUNDARY)

    def _ended(self, now_us: int, stretch: Stretch) -> None:
        if stretch.kind == "stepping":
            self.step_average.add((stretch.end_us - stretch.start_us) / MICROS)
        if stretch.kind == "absent" and now_us < self.world.until_us:
            self.reload = True
        if stretch.lost:
            self._forget()
        self.absent = False
        self._boundary(now_us, stretch.last_slices if stretch.steps else 0)

    def _note(self, stretch: Stretch) -> None:
        self.world.uptime.add(self.index, stretch)
        if stretch.silent_us is not None:
            self.silent_us = stretch.silent_us
            self._miss(stretch.silent_us[0], stretch.start_us)
        self.absent = stretch.kind == "absent"
        if self.world.scenario.on_stretch:
            self.world.scenario.on_stretch(self.learner, stretch)

    def _miss(self, before_us: int, told_us: int = 0) -> None:
        """Somebody may be waiting for what it tells no more: it counts as gone this long after its last sign of life."""
        last_us = max(told_us, (before_us - 1) // self._pulse_us * self._pulse_us)
        self.world.syncer.look_at(last_us + self.up.delay_us + micros(self.world.settings.liveness.dead_s) + 1)

    def _forget(self) -> None:
        """The process was killed: it begins again with the log."""
        for books in self.books:
            books.incarnation, books.next_number = books.incarnation + 1, 1
        self.reload = True

    def _load(self) -> None:
        self.reload = False
        for fragment, round_ in enumerate(self.world.syncer.rounds):
            self.pending[fragment].clear()
            chain = replace(round_.chain, cursors=dict(round_.chain.cursors))
            self.books[fragment].reload(chain, ZERO, spoilt=True)
            self.version_step[fragment] = self.step
            self.answered[fragment] = 0

    # ---- rounds

    def hear_round(self, fragment: int, version: int, now_us: int) -> None:
        """An announcement; who is silent knows of it once it is back."""
        self.open_version[fragment] = version
        if self.heard(now_us):
            self._try_answer(fragment, now_us)

    def _try_answer(self, fragment: int, now_us: int) -> None:
        books, version = self.books[fragment], self.open_version[fragment]
        if (
            version != books.base_version + 1
            or self.answered[fragment] >= version
            or self.pending[fragment]
            or self.sending[fragment]
            or not self.snapshot[fragment]
        ):
            return
        self.answered[fragment] = version
        if not books.steps:
            return
        settings = self.world.settings
        self.snapshot[fragment], self.encoding[fragment], self.sending[fragment] = False, True, True
        made = books.offer(ZERO.copy(), books.steps, books.tokens, books.data, version, settings.codec.offer_bits)
        offer = Offer(
            fragment=fragment,
            learner=self.learner.name,
            incarnation=made.incarnation,
            number=made.number,
            after=made.after,
            round=version,
            base_version=made.base_version,
            base_hash=made.base_hash,
            bits=made.bits,
            steps=made.steps,
            tokens=made.tokens,
            lost_tokens=max(0, made.lost_tokens),
            data=made.data,
            body=NO_BODY,
        )
        held = Held(offer, quantise.quantise(ZERO, 32))
        ready_us = now_us + micros(self.world.rounds.answer_s)
        arrives_us = self.up.send(ready_us, self.world.sizes.offers[fragment])
        self.world.at(ready_us, lambda at_us: self._encoded(fragment, at_us))
        self.world.at(arrives_us, lambda at_us: self.world.syncer.hear_offer(fragment, held, at_us))
        self.world.at(arrives_us + self.down.delay_us, lambda _: self._sent(fragment))

    def _encoded(self, fragment: int, now_us: int) -> None:
        self.encoding[fragment] = False
        if self.pending[fragment]:
            self._wake(now_us)

    def _sent(self, fragment: int) -> None:
        self.sending[fragment] = False

    def receive(self, record: Record, now_us: int) -> None:
        """A version has come."""
        self.pending[record.fragment].append(record)
        if not self.encoding[record.fragment]:
            self._wake(now_us)

    def _wake(self, now_us: int) -> None:
        """Look, if it waits for a version, whether that has come."""
        if self.waiting:
            stretch = self.life.wait(now_us)
            self._note(stretch)
            self.waiting = False
            self.world.at(stretch.end_us, lambda at_us: self._boundary(at_us, 0), order=BOUNDARY)

    def _apply(self, fragment: int) -> None:
        books = self.books[fragment]
        while self.pending[fragment]:
            record = self.pending[fragment].popleft()
            if record.version == books.base_version + 1:
                books.apply(record, ZERO)
                self.version_step[fragment] = self.step

    # ---- pulses

    def _keep_alive(self, now_us: int) -> None:
        if self.heard(now_us):
            self._pulse(now_us, news=False)
        self.world.at(now_us + self._pulse_us, self._keep_alive)

    def _pulse(self, now_us: int, *, news: bool = True) -> None:
        arrives_us = self.up.tell(now_us)
        if arrives_us is None or self.absent:
            return
        pulse = Pulse(
            learner=self.learner.name,
            region="",
            incarnation=self.books[0].incarnation,
            role="learner",
            state="waiting" if self.waiting else "stepping",
            sending=any(self.sending),
            step=self.step,
            tokens=self.tokens,
            step_s=self.step_average.get(),
            loss=None,
            versions=[books.base_version for books in self.books],
            steps=[books.steps for books in self.books],
            fragment_tokens=[books.tokens for books in self.books],
            lost_tokens=[max(0, books.lost_tokens) for books in self.books],
            trained=[],
            batch_tokens=1,
            busy_s=0.0,
            blocked_s=0.0,
            bytes_up=self.up.bytes,
            bytes_down=self.down.bytes,
            refused=0,
            software="",
        )
        self.world.at(arrives_us, lambda at_us: self.world.syncer.hear_pulse(pulse, at_us, news=news))


class _Syncer:
    """All fragments' rounds."""

    def __init__(self, world: _World) -> None:
        self.world, settings = world, world.settings
        self.roster = Roster(settings)
        count = len(world.rounds.sizes)
        chains = [Chain(p, 0, 0, NO_HASH, 0, NO_HASH) for p in range(count)]
        self.rounds = [Round(self.roster, chain, count) for chain in chains]
        self._opened_us = [0] * count
        self._wakes_us = [0] * count  # when each round is looked at again
        self._looks_us: set[int] = set()
        self.versions = self.members = 0

    def hear_pulse(self, pulse: Pulse, now_us: int, *, news: bool) -> None:
        """One that has no ``news`` only says that its learner is alive."""
        known, now_s = self.roster.learners.get(pulse.learner), now_us / MICROS
        back = known is None or now_s - known.at_s >= self.world.settings.liveness.dead_s
        self.roster.hear(pulse, now_s)
        if news or back:
            self.look_at(now_us)

    def hear_offer(self, fragment: int, held: Held, now_us: int) -> None:
        self.rounds[fragment].hold(held)
        self.world.at(now_us, lambda at_us: self._poll(fragment, at_us), order=LOOK)

    def look_at(self, at_us: int) -> None:
        """Have a look at a time, after all that arrives then."""
        if at_us not in self._looks_us:
            self._looks_us.add(at_us)
            self.world.at(at_us, self._look, order=LOOK)

    def _look(self, now_us: int) -> None:
        """Open what is due, and close what may be."""
        self._looks_us.discard(now_us)
        now_s, steps = now_us / MICROS, self.world.settings.round.steps
        for fragment, round_ in enumerate(self.rounds):
            if round_.opened_at_s is None and round_.due(now_s, steps):
                round_.open(now_s)
                self._opened_us[fragment] = now_us
                for member in self.world.members:
                    self._announce(member, fragment, round_.version, now_us)
            self._poll(fragment, now_us)

    def _announce(self, member: _Member, fragment: int, version: int, now_us: int) -> None:
        arrives_us = member.down.open_us(member.down.open_us(now_us) + member.down.delay_us)  # it is repeated
        self.world.at(arrives_us, lambda at_us: member.hear_round(fragment, version, at_us))

    def _poll(self, fragment: int, now_us: int) -> None:
        round_, now_s = self.rounds[fragment], now_us / MICROS
        merge = round_.poll(now_s)
        if merge is not None:
            self.world.at(now_us + micros(self.world.rounds.commit_s), lambda at_us: self._commit(fragment, merge, at_us))
        elif round_.opened_at_s is not None and round_.merge_at_s is None and round_.quorum_at_s is not None:
            wake_us = now_us + micros(round_.remaining_s(now_s)) + 1
            if wake_us != self._wakes_us[fragment]:
                self._wakes_us[fragment] = wake_us
                self.world.at(wake_us, lambda at_us: self._poll(fragment, at_us), order=LOOK)

    def _commit(self, fragment: int, merge: Merge, now_us: int) -> None:
        round_, chain, settings = self.rounds[fragment], self.rounds[fragment].chain, self.world.settings
        record = merging.version_record(
            chain,
            merge,
            settings,
            bits=settings.codec.record_bits,
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
        self.versions += 1
        self.members += len(record.members)
        for member in self.world.members:
            if not member.absent:
                arrives_us = member.down.send(now_us, self.world.sizes.record(fragment, len(record.members)))
                self._deliver(member, record, arrives_us)
        if self.world.scenario.on_version:
            names = tuple((m.learner, m.steps, m.tokens) for m in record.members)
            self.world.scenario.on_version(Version(fragment, record.version, self._opened_us[fragment], now_us, names))

    def _deliver(self, member: _Member, record: Record, at_us: int) -> None:
        self.world.at(at_us, lambda now_us: member.receive(record, now_us))
