"""The fast mode: from round to round, without the messages in between.

A learner that does not wait lives its life whatever the rounds do. So its stretches are known ahead, and with them when its
steps end, and what it holds at any time. A round is three events: it opens, it closes, its version is committed. When, and with
whom, follows from times alone, by the rules of :mod:`diloco.core.round`: the functions that those rules consist of (the quorum,
the grace window, first rounds) are the product's; ``tests/lab/test_modes.py`` holds the rest equal to the full mode.

Not exact are moving averages of step times (of a learner that is slowed or frozen; they decide the length of a grace window)
and signs of life over links that are cut.
"""

from __future__ import annotations

import heapq
import statistics
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from diloco.core.books import NOTHING
from diloco.core.pace import Average, first_due_steps, grace_s
from diloco_lab.cluster import MICROS, NEVER_US, Learner, micros
from diloco_lab.life import Stretch
from diloco_lab.network import Sizes, Way
from diloco_lab.outcome import LearnerOutcome, Outcome, Scenario, Uptime, Version

KEPT_STRETCHES = 256
LOAD, ANSWER, LAST = -(1 << 31), -(1 << 30), 1 << 30  # orders of what happens at one moment; an opening's is its fragment


def simulate(scenario: Scenario) -> Outcome:
    """Play a scenario; without rounds it is the learners' lives alone."""
    uptime = Uptime(len(scenario.learners), scenario.duration_us)
    if scenario.rounds is None:
        return _lives(scenario, uptime)
    return _Rounds(scenario, uptime).play()


def _lives(scenario: Scenario, uptime: Uptime) -> Outcome:
    lines = [_Line(scenario, index, learner, uptime) for index, learner in enumerate(scenario.learners)]
    for line in lines:
        line.extend(scenario.duration_us)
    uptime.settle()
    return Outcome(scenario.duration_us, uptime.stepping_us, [line.outcome() for line in lines])


class _Line:
    """A learner's life as far as it is known: its newest stretches, and what was done before each of them."""

    def __init__(self, scenario: Scenario, index: int, learner: Learner, uptime: Uptime) -> None:
        self.scenario, self.index, self.learner, self._uptime = scenario, index, learner, uptime
        self.life = scenario.life(learner)
        cuts = scenario.cuts.get(learner.name, ())
        self.up, self.down = Way(learner.link, cuts), Way(learner.link, cuts)
        self.steps = self.tokens = 0
        self.limit: float = float("inf")  # steps after which it waits for a version
        self.starts: list[int] = []
        self.stretches: list[Stretch] = []
        self.steps_after: list[int] = []
        self.before: list[tuple[int, int]] = []  # steps and tokens
        self.average = Average()
        self.averages: list[float] = []  # of step times, before each stretch
        self.gone: deque[tuple[int, int]] = deque()  # (from, until) in which syncers take it for dead
        self.loads: list[int] = []  # when it begins again with the log; not looked at yet
        self._pulse_us = self._dead_us = 0
        if scenario.rounds is not None:
            liveness = scenario.rounds.settings.liveness
            self._pulse_us, self._dead_us = micros(liveness.pulse_s), micros(liveness.dead_s)

    def outcome(self) -> LearnerOutcome:
        steps, tokens = self.at(self.scenario.duration_us)
        return LearnerOutcome(
            self.learner.name, self.life.chip_time, steps, tokens, self.life.failures, 0.0, 0.0, self.up.bytes, self.down.bytes
        )

    # ---- what is known

    def extend(self, until_us: int) -> None:
        """Know what happens up to a time; less if it waits, or if the simulation ends."""
        until_us = min(until_us, self.scenario.duration_us)
        while self.life.now_us <= until_us and self.steps < self.limit:
            self._add(self.life.advance(min(self.limit - self.steps, NEVER_US), self.scenario.duration_us + 1))  # type: ignore[arg-type]

    def wait(self, until_us: int) -> int:
        """It waits since the end of what is known, for what comes at a time; when it goes on."""
        self._add(self.life.wait(until_us))
        return self.life.now_us

    def _add(self, stretch: Stretch) -> None:
        self.starts.append(stretch.start_us)
        self.stretches.append(stretch)
        self.before.append((self.steps, self.tokens))
        self.averages.append(self.average.get())
        if stretch.steps:
            self.steps += stretch.steps
            self.tokens += ((stretch.steps - 1) * stretch.slices + stretch.last_slices) * self.learner.tokens
            self._average(stretch)
        self.steps_after.append(self.steps)
        self._uptime.add(self.index, stretch)
        if stretch.silent_us is not None and self._dead_us:
            self._note_silence(stretch, *stretch.silent_us)
        if stretch.lost or (stretch.kind == "absent" and stretch.end_us < self.scenario.duration_us):
            self.loads.append(stretch.end_us)
        if self.scenario.on_stretch:
            self.scenario.on_stretch(self.learner, stretch)
        if len(self.starts) > 2 * KEPT_STRETCHES:
            for known in (self.starts, self.stretches, self.steps_after, self.before, self.averages):
                del known[:KEPT_STRETCHES]

    def _average(self, stretch: Stretch) -> None:
        step_s = stretch.step_us / MICROS
        last_s = (stretch.end_us - stretch.start_us - (stretch.steps - 1) * stretch.step_us) / MICROS
        if self.average.value != step_s:
            if self.average.value is not None and stretch.steps > 1:
                self.average.value = step_s + (self.average.value - step_s) * (1 - self.average.weight) ** (stretch.steps - 1)
            elif stretch.steps > 1:
                self.average.value = step_s
        self.average.add(last_s)

    def _note_silence(self, stretch: Stretch, begin_us: int, end_us: int) -> None:
        """When it is taken for dead because of that: some time after its last sign of life."""
        last_us = max(stretch.start_us, (begin_us - 1) // self._pulse_us * self._pulse_us)
        if stretch.kind == "stepping":
            last_us = max(
                last_us,
                stretch.start_us + min(stretch.steps - 1, (begin_us - stretch.start_us) // stretch.step_us) * stretch.step_us,
            )
        back_us = min(stretch.end_us, -(-end_us // self._pulse_us) * self._pulse_us)
        if self.up.cuts:
            while self.up.tell(last_us) is None and last_us > 0:
                last_us -= self._pulse_us
        dead_us = last_us + self.up.delay_us + self._dead_us + 1
        if dead_us < back_us + self.up.delay_us:
            self.gone.append((dead_us, back_us + self.up.delay_us))

    # ---- questions

    def _index(self, at_us: int) -> int:
        if self.life.now_us <= at_us:
            self.extend(at_us)
        return bisect_right(self.starts, at_us) - 1

    def at(self, at_us: int) -> tuple[int, int]:
        """Steps and tokens done by a time."""
        i = self._index(at_us)
        if i < 0:
            return 0, 0
        stretch, (steps, tokens) = self.stretches[i], self.before[i]
        if not stretch.steps:
            return steps, tokens
        if at_us >= stretch.end_us:
            return self.steps, self.tokens
        done = min((at_us - stretch.start_us) // stretch.step_us, stretch.steps - 1)
        return steps + done, tokens + done * stretch.slices * self.learner.tokens

    def boundary(self, after_us: int) -> tuple[int, int, int] | None:
        """The first boundary after a time, and the steps and tokens done by then; None if it waits, or the simulation ends."""
        i = self._index(after_us)
        if self.life.now_us <= after_us:
            return None
        stretch, (steps, tokens) = self.stretches[i], self.before[i]
        if not stretch.steps:
            return stretch.end_us, steps, tokens
        done = (after_us - stretch.start_us) // stretch.step_us + 1
        each = self.learner.tokens
        if done >= stretch.steps:
            return (
                stretch.end_us,
                steps + stretch.steps,
                tokens + ((stretch.steps - 1) * stretch.slices + stretch.last_slices) * each,
            )
        return stretch.start_us + done * stretch.step_us, steps + done, tokens + done * stretch.slices * each

    def step_us(self, step: int) -> int:
        """When so many steps are done."""
        while self.steps < step:
            if self.life.now_us > self.scenario.duration_us or self.steps >= self.limit:
                return NEVER_US
            self.extend(self.life.now_us)
        i = bisect_left(self.steps_after, step)
        stretch, done = self.stretches[i], step - self.before[i][0]
        return stretch.end_us if done == stretch.steps else stretch.start_us + done * stretch.step_us

    def silent(self, at_us: int) -> bool:
        i = self._index(at_us)
        span = self.stretches[i].silent_us if i >= 0 else None
        return span is not None and span[0] <= at_us < span[1]

    def absent(self, at_us: int) -> bool:
        i = self._index(at_us)
        return i >= 0 and at_us < self.stretches[i].end_us and self.stretches[i].kind == "absent"

    def live(self, at_us: int) -> bool:
        """Whether a syncer takes it for alive."""
        if self.life.now_us <= at_us:
            self.extend(at_us)
        return not any(begin_us <= at_us < end_us for begin_us, end_us in self.gone)

    def average_s(self, at_us: int) -> float:
        """Its moving average of step times, as a syncer has heard it."""
        i = self._index(at_us - self.up.delay_us)
        if i < 0:
            return 0.0
        stretch, value = self.stretches[i], self.averages[i]
        done = self.at(at_us - self.up.delay_us)[0] - self.before[i][0]
        if not done:
            return value
        step_s = stretch.step_us / MICROS
        return step_s if not value else step_s + (value - step_s) * 0.8**done


@dataclass
class _Offer:
    """As :class:`diloco.core.books.Outstanding` counts it."""

    number: int
    round: int
    after: int
    base_version: int
    steps: int
    tokens: int
    arrives_us: int
    held_steps: int
    held_tokens: int
    kept: float = 1.0


@dataclass
class _Pending:
    """A version on its way to a learner: when it comes and is applied, and what was done by then."""

    version: int
    merged: tuple[int, int] | None  # number and round of the learner's offer in it
    arrives_us: int
    at_us: int
    steps: int
    tokens: int


@dataclass(slots=True)
class _Work:
    """What a learner holds of a fragment, as :class:`diloco.core.books.Books` counts it."""

    base_version: int = 0
    kept_steps: int = 0  # of what it held when it applied its base
    kept_tokens: int = 0
    from_steps: int = 0  # done by then
    from_tokens: int = 0
    after: int = 0
    number: int = 0
    answered: int = 0
    carried_since: int | None = None
    outstanding: list[_Offer] = field(default_factory=list)
    pending: deque[_Pending] = field(default_factory=deque)
    offered_us: int = -1
    encoded_us: int = -1
    sent_us: int = -1
    heard: int = 0  # version that syncers heard of last, at from which step on
    heard_step: int = 0
    flying: list[_Offer] = field(default_factory=list)  # on their way to the syncer, or there and not merged
    cursor: int = 0
    merged_tokens: int = 0


class _Fragment:
    def __init__(self, learners: int) -> None:
        self.version = 0  # committed
        self.open = False
        self.opened_us = 0
        self.stamp = 0  # of the newest plan: others are void
        self.quorum_us: int | None = None
        self.quorum_average, self.sync_average = Average(), Average()
        self.works = [_Work() for _ in range(learners)]


class _Rounds:
    def __init__(self, scenario: Scenario, uptime: Uptime) -> None:
        assert scenario.rounds is not None
        self.scenario, self.rounds, self.uptime = scenario, scenario.rounds, uptime
        self.settings = scenario.rounds.settings
        self.round, self.carry = self.settings.round, self.settings.carry
        self.sizes = Sizes(scenario.rounds)
        self.until_us = scenario.duration_us
        self.lines = [_Line(scenario, index, learner, uptime) for index, learner in enumerate(scenario.learners)]
        self.fragments = [_Fragment(len(self.lines)) for _ in self.rounds.sizes]
        self.answer_us, self.commit_us = micros(self.rounds.answer_s), micros(self.rounds.commit_s)
        self.versions = self.members = 0
        self._first_due = [first_due_steps(self.round, p, len(self.fragments)) for p in range(len(self.fragments))]
        self._queue: list[tuple[int, int, int, Callable[[int], None]]] = []
        self._pushed = 0
        paces = {learner.step_s for learner in scenario.learners}
        regular = not any(learner.slowdowns for learner in scenario.learners) and not scenario.faults
        self._pace_s = micros(paces.pop()) / MICROS if regular and len(paces) == 1 else None

    def _at(self, at_us: int, act: Callable[[int], None], *, order: int = LAST) -> None:
        """Have something done at a time: what has a lower ``order`` comes first."""
        if at_us <= self.until_us:
            self._pushed += 1
            heapq.heappush(self._queue, (at_us, order, self._pushed, act))

    def play(self) -> Outcome:
        if self.round.learners_wait:
            for line in self.lines:
                self._limit(line)
        for p in range(len(self.fragments)):
            self._plan_open(p, 0)
        while self._queue:
            at_us, _, _, act = heapq.heappop(self._queue)
            act(at_us)
            self._note_loads()
        for line in self.lines:
            line.extend(self.until_us)
        self.uptime.settle()
        return Outcome(
            self.until_us, self.uptime.stepping_us, [self._outcome(line) for line in self.lines], self.versions, self.members
        )

    def _outcome(self, line: _Line) -> LearnerOutcome:
        outcome = line.outcome()
        merged, lost = 0.0, 0.0
        for size, fragment in zip(self.rounds.sizes, self.fragments, strict=True):
            work = fragment.works[line.index]
            self._settle(work, self.until_us)
            held = work.kept_tokens + outcome.tokens - work.from_tokens
            merged += size * work.merged_tokens
            lost += size * (outcome.tokens - held - work.merged_tokens)
        outcome.merged_tokens, outcome.lost_tokens = merged / sum(self.rounds.sizes), lost / sum(self.rounds.sizes)
        return outcome

    # ---- a learner's books

    def _settle(self, work: _Work, now_us: int) -> None:
        """Apply what has come by a boundary that is past."""
        while work.pending and work.pending[0].at_us <= now_us:
            came = work.pending.popleft()
            if came.version == work.base_version + 1:
                self._apply(work, came)

    def _apply(self, work: _Work, came: _Pending) -> None:
        steps = work.kept_steps + came.steps - work.from_steps
        tokens = work.kept_tokens + came.tokens - work.from_tokens
        if came.merged is None:
            if work.carried_since is None:
                work.carried_since = work.base_version
            late = came.version - work.carried_since > self.carry.max_versions
            factor = 0.0 if late or not tokens else self.carry.late
            for offer in work.outstanding:
                offer.held_steps, offer.held_tokens = int(factor * offer.held_steps), int(factor * offer.held_tokens)
                offer.kept *= factor
        else:
            number, answered = came.merged
            merged = next((offer for offer in work.outstanding if offer.number == number), None)
            work.after, work.carried_since = number, None
            work.outstanding.clear()
            factor = 0.0
            if merged is not None:
                steps, tokens = steps - merged.held_steps, tokens - merged.held_tokens
                in_time = answered == came.version and merged.kept > NOTHING
                factor = self.carry.overlap if in_time else self.carry.late
        work.kept_steps, work.kept_tokens = int(factor * steps), int(factor * tokens)
        if not work.kept_tokens:
            work.carried_since = None
        work.base_version, work.from_steps, work.from_tokens = came.version, came.steps, came.tokens

    def _note_loads(self) -> None:
        for line in self.lines:
            while line.loads:
                self._at(line.loads.pop(), lambda now_us, line=line: self._load(line, now_us), order=LOAD)  # type: ignore[misc]

    def _load(self, line: _Line, now_us: int) -> None:
        """A learner begins again with the log; what it held is lost."""
        steps, tokens = line.at(now_us)
        for p, fragment in enumerate(self.fragments):
            work = fragment.works[line.index]
            self._settle(work, now_us - 1)
            work.pending.clear()
            work.outstanding.clear()
            work.after, work.answered, work.carried_since = work.cursor, 0, None
            work.kept_steps = work.kept_tokens = 0
            work.base_version, work.from_steps, work.from_tokens = fragment.version, steps, tokens
            work.heard, work.heard_step = fragment.version, steps
            if not fragment.open:
                self._plan_open(p, now_us)
        if self.round.learners_wait:
            self._limit(line)

    # ---- a round opens

    def _due(self, p: int, version: int) -> int:
        return self.round.steps if version else self._first_due[p]

    def _limit(self, line: _Line) -> None:
        """When a learner has to wait for a version."""
        line.limit = min(
            f.works[line.index].heard_step + self._due(p, f.works[line.index].heard) for p, f in enumerate(self.fragments)
        )

    def _plan_open(self, p: int, now_us: int) -> None:
        """Look when the next round is due, as things are."""
        fragment = self.fragments[p]
        fragment.stamp += 1
        due, ready = self._due(p, fragment.version), []
        for line, work in zip(self.lines, fragment.works, strict=True):
            if work.heard == fragment.version:
                done_us = line.step_us(work.heard_step + due)
                if done_us < NEVER_US:
                    ready.append((done_us + line.up.delay_us, line))
        quorum = self.round.quorum
        ready.sort(key=lambda item: item[0])
        least = quorum if isinstance(quorum, int) else 1
        if len(ready) >= least:
            at_us, stamp = max(now_us, ready[least - 1][0]), fragment.stamp
            self._at(at_us, lambda at_us: self._try_open(p, stamp, ready, at_us), order=p)

    def _try_open(self, p: int, stamp: int, ready: list[tuple[int, _Line]], now_us: int) -> None:
        fragment = self.fragments[p]
        if stamp != fragment.stamp or fragment.open:
            return
        count = sum(at_us <= now_us and line.live(now_us) for at_us, line in ready)
        if count < max(1, self._quorum(now_us)):
            times = [at_us for at_us, _ in ready] + [at_us for line in self.lines for span in line.gone for at_us in span]
            later = [at_us for at_us in times if at_us > now_us]
            if later:
                self._at(min(later), lambda at_us: self._try_open(p, stamp, ready, at_us), order=p)
            return
        fragment.open, fragment.opened_us, fragment.quorum_us = True, now_us, None
        version = fragment.version + 1
        for line in self.lines:
            down = line.down
            at_us = now_us + down.delay_us
            if down.cuts:
                at_us = down.open_us(down.open_us(now_us) + down.delay_us)
            self._answer(p, line, version, at_us, boundary=False)
        self._plan_close(p, now_us)

    def _quorum(self, now_us: int) -> int:
        if isinstance(self.round.quorum, int):
            return self.round.quorum
        return self.settings.quorum(sum(line.live(now_us) for line in self.lines))

    # ---- learners answer

    def _answer(self, p: int, line: _Line, version: int, now_us: int, *, boundary: bool) -> None:
        """As :meth:`diloco.member.Member._try_answer`, at an announcement or at a boundary after it."""
        work = self.fragments[p].works[line.index]
        self._settle(work, now_us)
        if work.base_version < version - 1:
            if work.pending:
                self._answer_later(p, line, version, work.pending[0].at_us)
            return
        if work.base_version > version - 1 or work.answered >= version:
            return
        if work.pending and work.pending[0].arrives_us < now_us + (not boundary):
            return
        if not boundary and line.silent(now_us):
            self._answer_after(p, line, version, now_us)
            return
        if work.sent_us >= now_us:
            self._answer_after(p, line, version, work.sent_us)
            return
        if work.offered_us >= 0:
            next_ = line.boundary(work.offered_us)
            if next_ is None or next_[0] > now_us:
                self._answer_after(p, line, version, work.offered_us)
                return
        work.answered = version
        steps, tokens = line.at(now_us)
        held_steps = work.kept_steps + steps - work.from_steps
        if not held_steps:
            return
        held_tokens = work.kept_tokens + tokens - work.from_tokens
        ready_us = now_us + self.answer_us
        arrives_us = line.up.send(ready_us, self.sizes.offers[p])
        work.number += 1
        work.offered_us, work.encoded_us, work.sent_us = now_us, ready_us, arrives_us + line.down.delay_us
        offer = _Offer(
            work.number, version, work.after, work.base_version, held_steps, held_tokens, arrives_us, held_steps, held_tokens
        )
        work.outstanding.append(offer)
        work.flying.append(offer)
        if boundary:
            self._plan_close(p, now_us)

    def _answer_after(self, p: int, line: _Line, version: int, now_us: int) -> None:
        next_ = line.boundary(now_us)
        if next_ is not None:
            self._answer_later(p, line, version, next_[0])

    def _answer_later(self, p: int, line: _Line, version: int, at_us: int) -> None:
        self._at(at_us, lambda now_us: self._answer(p, line, version, now_us, boundary=True), order=ANSWER + p)

    # ---- a round closes

    def _plan_close(self, p: int, now_us: int) -> None:
        """Look when the open round will close, with what is on its way."""
        fragment = self.fragments[p]
        if not fragment.open:
            return
        version = fragment.version + 1
        fragment.stamp += 1
        answers: dict[int, int] = {}
        for index, work in enumerate(fragment.works):
            if work.flying and work.flying[-1].round == version:
                answers[index] = work.flying[-1].arrives_us
        times = sorted({*answers.values(), *(at_us for line in self.lines for span in line.gone for at_us in span)})
        quorum_us, ends_us = None, NEVER_US
        i = bisect_left(times, fragment.opened_us)
        while True:
            at_us = min(times[i] if i < len(times) else NEVER_US, ends_us)
            if at_us == NEVER_US:
                return  # somebody has yet to answer
            i += i < len(times) and times[i] == at_us
            if quorum_us is None:
                here = sum(arrives_us <= at_us for arrives_us in answers.values())
                if not here or here < self._quorum(at_us):
                    continue
                quorum_us = at_us
                window_s = self._grace_s(fragment, at_us, (at_us - fragment.opened_us) / MICROS)
                ends_us = at_us + micros(window_s) + 1 if window_s else at_us
            if at_us >= ends_us or self._everybody(answers, at_us):
                break
        stamp, close_us, reached_us = fragment.stamp, max(at_us, now_us), quorum_us
        self._at(close_us, lambda at_us: self._close(p, stamp, reached_us, at_us))

    def _everybody(self, answers: dict[int, int], now_us: int) -> bool:
        return all(answers.get(line.index, NEVER_US) <= now_us or not line.live(now_us) for line in self.lines)

    def _grace_s(self, fragment: _Fragment, now_us: int, quorum_s: float) -> float:
        average = Average(value=fragment.quorum_average.value)
        average.add(quorum_s)
        return grace_s(self.round, self._step_s(now_us), average.get(), fragment.sync_average.get())

    def _step_s(self, now_us: int) -> float:
        if self._pace_s is not None:
            return self._pace_s
        paces = [value for line in self.lines if line.live(now_us) and (value := line.average_s(now_us)) > 0]
        return statistics.median(paces) if paces else 1.0

    def _close(self, p: int, stamp: int, quorum_us: int, now_us: int) -> None:
        fragment = self.fragments[p]
        if stamp != fragment.stamp:
            return
        fragment.quorum_average.add((quorum_us - fragment.opened_us) / MICROS)
        version, merged = fragment.version + 1, []
        oldest = fragment.version - self.round.max_staleness_versions
        for line, work in zip(self.lines, fragment.works, strict=True):
            offer = next((o for o in reversed(work.flying) if o.arrives_us <= now_us), None)
            if offer is not None and offer.base_version >= oldest:
                merged.append((line, offer))
        self._at(now_us + self.commit_us, lambda at_us: self._commit(p, version, merged, now_us, at_us))

    def _commit(self, p: int, version: int, merged: list[tuple[_Line, _Offer]], closed_us: int, now_us: int) -> None:
        fragment = self.fragments[p]
        fragment.open, fragment.version = False, version
        fragment.sync_average.add((now_us - closed_us) / MICROS)
        self.versions += 1
        self.members += len(merged)
        offers = {line.index: offer for line, offer in merged}
        size = self.sizes.record(p, len(merged))
        for line, work in zip(self.lines, fragment.works, strict=True):
            offer = offers.get(line.index)
            if offer is not None:
                work.cursor, work.merged_tokens = offer.number, work.merged_tokens + offer.tokens
                work.flying.clear()  # newer ones do not know of this one
            if line.gone or line.learner.present:
                while line.gone and line.gone[0][1] <= now_us:
                    line.gone.popleft()
                if line.absent(now_us):
                    continue
            arrives_us = line.down.send(now_us, size)
            at = self._boundary(line, max(arrives_us, work.encoded_us))
            if at is not None:
                number = None if offer is None else (offer.number, offer.round)
                work.pending.append(_Pending(version, number, arrives_us, *at))
                work.heard, work.heard_step = version, at[1]
                if self.round.learners_wait:
                    self._limit(line)
        self._plan_open(p, now_us)
        if self.scenario.on_version:
            members = tuple((line.learner.name, offer.steps, offer.tokens) for line, offer in merged)
            self.scenario.on_version(Version(p, version, fragment.opened_us, now_us, members))

    def _boundary(self, line: _Line, after_us: int) -> tuple[int, int, int] | None:
        at = line.boundary(after_us)
        if at is None and line.steps >= line.limit and line.life.now_us <= after_us <= self.until_us:
            return line.wait(after_us), line.steps, line.tokens
        return at
