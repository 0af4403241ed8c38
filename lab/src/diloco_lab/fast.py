"""The fast mode: from round to round, without the messages in between.

A learner that does not wait lives its life whatever the rounds do. So its stretches are known ahead, and with them when its
steps end, and what it holds at any time. A round is three events: it opens, it closes, its version is committed. When, and with
whom, follows from times alone, by the rules of :mod:`diloco.core.round`. They are played by :mod:`diloco_lab.kernel`, which is
compiled; the quorum, the grace window and when first rounds are due are the product's own functions. This module lives the
lives, and keeps what the kernel knows of them. ``tests/lab/test_modes.py`` holds both modes equal.

Not exact are grace windows while learners' step times differ and their median falls (the full mode looks again at every step,
the fast one at every answer), and what passes of the signs of life over a link that is cut, between two regular pulses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numba.experimental.function_type  # noqa: F401  makes numba take what has an address for a function
import numpy as np
from numba import types

from diloco.core.books import NOTHING
from diloco.core.pace import Average, first_due_steps, grace_s
from diloco.core.round import DEFAULT_STEP_S
from diloco.errors import SettingsError
from diloco_lab import kernel
from diloco_lab.cluster import MICROS, NEVER_US, Learner, micros
from diloco_lab.kernel import Ask, Records, World
from diloco_lab.life import Stretch
from diloco_lab.network import MEMBER_BYTES, Sizes, Way
from diloco_lab.outcome import LearnerOutcome, Outcome, Scenario, Uptime, Version

AHEAD_US = 3600 * MICROS  # how much more of a life is found out at once than is asked for
COUNTABLE = 1 << 62


def simulate(scenario: Scenario) -> Outcome:
    """Play a scenario; without rounds it is the learners' lives alone.

    Raises:
        SettingsError: a learner would process more tokens than can be counted.
    """
    uptime = Uptime(len(scenario.learners), scenario.duration_us)
    if scenario.rounds is None:
        return _lives(scenario, uptime)
    return _Rounds(scenario, uptime).play()


def _lives(scenario: Scenario, uptime: Uptime) -> Outcome:
    lines = [_Line(scenario, index, learner, uptime) for index, learner in enumerate(scenario.learners)]
    # together, so that what is known of all can be forgotten
    for until_us in range(0, scenario.duration_us + AHEAD_US, AHEAD_US):
        for line in lines:
            line.extend(until_us)
    uptime.settle()
    return Outcome(scenario.duration_us, uptime.stepping_us, [line.outcome() for line in lines])


class _Line:
    """A learner's life as far as it is known."""

    def __init__(self, scenario: Scenario, index: int, learner: Learner, uptime: Uptime) -> None:
        self.scenario, self.index, self.learner, self._uptime = scenario, index, learner, uptime
        self.life = scenario.life(learner)
        self.steps = self.tokens = 0
        self.limit = NEVER_US  # steps after which it waits for a version
        self._last: tuple[Stretch, int, int] | None = None  # with steps and tokens done before

    def outcome(self) -> LearnerOutcome:
        steps, tokens = self.steps, self.tokens
        if self._last is not None and self.life.now_us > self.scenario.duration_us:
            stretch, steps, tokens = self._last
            if stretch.steps:
                done = min((self.scenario.duration_us - stretch.start_us) // stretch.step_us, stretch.steps - 1)
                steps, tokens = steps + done, tokens + done * stretch.slices * self.learner.tokens
        return LearnerOutcome(self.learner.name, self.life.chip_time, steps, tokens, self.life.failures)

    def extend(self, until_us: int) -> None:
        """Know what happens up to a time; less if it waits, or if the simulation ends."""
        until_us = min(until_us, self.scenario.duration_us)
        while self.life.now_us <= until_us and self.steps < self.limit:
            self._add(self.life.advance(self.limit - self.steps, self.scenario.duration_us + 1))

    def wait(self, until_us: int) -> int:
        """It waits since the end of what is known, for what comes at a time; when it goes on."""
        self._add(self.life.wait(until_us))
        return self.life.now_us

    def _add(self, stretch: Stretch) -> None:
        self._last = stretch, self.steps, self.tokens
        if stretch.steps:
            self.steps += stretch.steps
            self.tokens += ((stretch.steps - 1) * stretch.slices + stretch.last_slices) * self.learner.tokens
        self._uptime.add(self.index, stretch)
        if self.scenario.on_stretch:
            self.scenario.on_stretch(self.learner, stretch)


class _ToldLine(_Line):
    """One that notes what the kernel is to know, as rows of its arrays."""

    def __init__(self, scenario: Scenario, index: int, learner: Learner, uptime: Uptime) -> None:
        super().__init__(scenario, index, learner, uptime)
        assert scenario.rounds is not None
        liveness = scenario.rounds.settings.liveness
        self._pulse_us, self._dead_us = micros(liveness.pulse_s), micros(liveness.dead_s)
        self.up = Way(learner.link, scenario.cuts.get(learner.name, ()))
        self.stretches: list[tuple[float, ...]] = []
        self.gone: list[tuple[int, int]] = []
        for begin_us, end_us in self.up.cuts:
            told_us = (begin_us - self.up.delay_us - 1) // self._pulse_us * self._pulse_us
            self._note_gone(max(0, told_us), -(-end_us // self._pulse_us) * self._pulse_us)
        self.loads: list[tuple[int, bool]] = []
        self._average = Average()

    def _add(self, stretch: Stretch) -> None:
        each, silent_us = self.learner.tokens, stretch.silent_us or (0, 0)
        done, absent = (self.steps, self.tokens), stretch.kind == "absent"
        times = stretch.start_us, stretch.end_us, stretch.steps, stretch.step_us
        worth = stretch.slices * each, stretch.last_slices * each
        self.stretches.append((*times, *worth, *done, *silent_us, absent, self._average.get()))
        if stretch.steps:
            self._note_pace(stretch)
        if stretch.silent_us is not None:
            self._note_silence(stretch, *stretch.silent_us)
        if stretch.lost or (absent and stretch.end_us < self.scenario.duration_us):
            self.loads.append((stretch.end_us, stretch.lost))
        super()._add(stretch)

    def _note_pace(self, stretch: Stretch) -> None:
        step_s, average = stretch.step_us / MICROS, self._average
        last_s = (stretch.end_us - stretch.start_us - (stretch.steps - 1) * stretch.step_us) / MICROS
        if average.value != step_s:
            if average.value is not None and stretch.steps > 1:
                average.value = step_s + (average.value - step_s) * (1 - average.weight) ** (stretch.steps - 1)
            elif stretch.steps > 1:
                average.value = step_s
        average.add(last_s)

    def _note_silence(self, stretch: Stretch, begin_us: int, end_us: int) -> None:
        """When it is taken for dead because of that: some time after its last sign of life."""
        last_us = max(stretch.start_us, (begin_us - 1) // self._pulse_us * self._pulse_us)
        if stretch.kind == "stepping":
            done = min(stretch.steps - 1, (begin_us - stretch.start_us) // stretch.step_us)
            last_us = max(last_us, stretch.start_us + done * stretch.step_us)
        back_us = min(stretch.end_us, -(-end_us // self._pulse_us) * self._pulse_us)
        if stretch.kind == "absent" and not stretch.start_us:  # it has not been heard yet
            last_us = -self._dead_us - self.up.delay_us - 1
        self._note_gone(last_us, back_us)

    def _note_gone(self, last_us: int, back_us: int) -> None:
        """What it tells last and what it tells next are so far apart."""
        dead_us = last_us + self.up.delay_us + self._dead_us + 1
        if dead_us < back_us + self.up.delay_us:
            self.gone.append((dead_us, back_us + self.up.delay_us))


class _Window(types.WrapperAddressProtocol):  # type: ignore[misc]
    """A function of three numbers that compiled code can call."""

    def __init__(self, function: Callable[[float, float, float], float]) -> None:
        self._function = ctypes.CFUNCTYPE(*[ctypes.c_double] * 4)(function)

    def __wrapper_address__(self) -> int | None:
        return ctypes.cast(self._function, ctypes.c_void_p).value

    def signature(self) -> types.Type:
        return types.float64(types.float64, types.float64, types.float64)


class _Rounds:
    def __init__(self, scenario: Scenario, uptime: Uptime) -> None:
        assert scenario.rounds is not None
        self.scenario, self.rounds, self.uptime = scenario, scenario.rounds, uptime
        self.round = self.rounds.settings.round
        self.lines = [_ToldLine(scenario, index, learner, uptime) for index, learner in enumerate(scenario.learners)]
        for learner in scenario.learners:
            worth = learner.slices * learner.tokens * (scenario.duration_s / learner.step_s + 1)
            if worth > COUNTABLE:
                raise SettingsError(
                    f"learner {learner.name}: tokens = {learner.tokens} for a slice's part of a step are {worth:.3g} in "
                    f"{scenario.duration_s:g} s, expected at most {COUNTABLE:.3g}"
                )
        self.world = self._world()

    def _world(self) -> World:
        count, fragments = len(self.lines), len(self.rounds.sizes)
        settings = self.rounds.settings
        run, lines = np.zeros(1, kernel.RUN), np.zeros(count, kernel.LINE)
        for name, value in (
            ("until_us", self.scenario.duration_us),
            ("answer_us", micros(self.rounds.answer_s)),
            ("commit_us", micros(self.rounds.commit_s)),
            ("steps", self.round.steps),
            ("max_versions", settings.carry.max_versions),
            ("max_staleness", self.round.max_staleness_versions),
            ("learners_wait", self.round.learners_wait),
            ("pulse_us", micros(settings.liveness.pulse_s)),
            ("member_bytes", MEMBER_BYTES),
            ("nothing", NOTHING),
            ("weight", Average().weight),
            ("default_step_s", DEFAULT_STEP_S),
            ("tells", self.scenario.on_version is not None),
            ("late", settings.carry.late),
            ("overlap", settings.carry.overlap),
            ("pace_s", self._pace_s()),
        ):
            run[name] = value
        cuts = [line.up.cuts for line in self.lines]
        world = World(
            run,
            np.array([settings.quorum(live) for live in range(count + 1)], np.int64),
            lines,
            np.zeros((count, 0), kernel.STRETCH),
            np.zeros((count, max([1, *map(len, cuts)])), kernel.SPAN),
            np.zeros((count, 1), kernel.SPAN),
            np.zeros((count, 1), kernel.LOAD),
            np.zeros(fragments, kernel.FRAGMENT),
            np.zeros((fragments, count), kernel.WORK),
            np.zeros((fragments, count, kernel.KEPT_OFFERS), kernel.OFFER),
            np.zeros((fragments, count, 4), kernel.COMING),
            np.zeros(count, np.int64),
            np.zeros(count),
        )
        lines["limit"] = NEVER_US
        lines["delay_us"] = [line.up.delay_us for line in self.lines]
        lines["bits_per_s"] = [line.learner.link.bits_per_s for line in self.lines]
        lines["cuts"] = list(map(len, cuts))
        for m, spans in enumerate(cuts):
            world.cuts[m, : len(spans)] = list(spans)
        sizes = Sizes(self.rounds)
        world.fragments["next_us"] = world.fragments["later_us"] = NEVER_US
        world.fragments["quorum_s"] = world.fragments["sync_s"] = np.nan
        world.fragments["first_due"] = [first_due_steps(self.round, p, fragments) for p in range(fragments)]
        world.fragments["offer_bytes"] = sizes.offers
        world.fragments["record_bytes"] = [sizes.record(p, 0) for p in range(fragments)]
        world.works["again_us"] = world.works["after_us"] = world.works["ready_us"] = NEVER_US
        world.works["carried_since"] = world.works["offered_us"] = -1
        world.works["encoded_us"] = world.works["sent_us"] = -1
        world.fragments["todo"] = True
        if self.round.learners_wait:
            for m in range(count):
                kernel.limit(world, m)
        return world

    def _pace_s(self) -> float:
        """The time of a step, if it is the same for all learners at all times; 0 otherwise."""
        learners = self.scenario.learners
        paces = {learner.step_s for learner in learners}
        irregular = any(learner.slowdowns for learner in learners) or self.scenario.faults
        return 0.0 if irregular or len(paces) > 1 else micros(paces.pop()) / MICROS

    def play(self) -> Outcome:
        """All of it."""
        window_s = _Window(lambda step_s, quorum_s, sync_s: grace_s(self.round, step_s, quorum_s, sync_s))
        while (asked := kernel.play(self.world, window_s))[0] != Ask.NOTHING:
            ask, p, m, at_us = asked
            if ask == Ask.LIFE:
                self._extend(self.lines if m < 0 else [self.lines[m]], at_us)
            elif ask == Ask.WAIT:
                self._wait(p, m, at_us)
            elif ask == Ask.ROOM:
                self._make_room()
            else:
                self._tell(p)
        self._extend(self.lines, self.scenario.duration_us)
        self.uptime.settle()
        run = self.world.run[0]
        outcomes = [self._outcome(line) for line in self.lines]
        return Outcome(self.scenario.duration_us, self.uptime.stepping_us, outcomes, int(run["versions"]), int(run["members"]))

    def _outcome(self, line: _Line) -> LearnerOutcome:
        outcome, m, sizes = line.outcome(), line.index, self.rounds.sizes
        merged, lost = 0, 0
        for p, size in enumerate(sizes):
            kernel.settle(self.world, p, m, self.scenario.duration_us)
            work = self.world.works[p, m]
            held = int(work["kept_tokens"]) + outcome.tokens - int(work["from_tokens"])
            merged += size * int(work["merged_tokens"])
            lost += size * (outcome.tokens - held - int(work["merged_tokens"]))
        outcome.merged_tokens, outcome.lost_tokens = merged / sum(sizes), lost / sum(sizes)
        known = self.world.lines[m]
        outcome.bytes_up, outcome.bytes_down = int(known["bytes_up"]), int(known["bytes_down"])
        return outcome

    # ---- what the kernel asks for

    def _extend(self, lines: Sequence[_ToldLine], until_us: int) -> None:
        ahead_us = 0 if self.round.learners_wait else AHEAD_US
        for line in lines:
            line.limit = int(self.world.lines["limit"][line.index])
            line.extend(until_us + ahead_us)
            self._publish(line)
        self.world.fragments["todo"] = True  # somebody may turn out to be gone

    def _wait(self, p: int, m: int, until_us: int) -> None:
        line, work, coming = self.lines[m], self.world.works[p, m], self.world.coming[p, m]
        at_us = line.wait(until_us)
        came = coming[(work["first"] + work["coming"] - 1) % coming.size]
        came["at_us"], came["steps"], came["tokens"] = at_us, line.steps, line.tokens
        self._publish(line)

    def _make_room(self) -> None:
        """The rings begin anew, twice as long."""
        old, works = self.world.coming, self.world.works
        order = (works["first"][:, :, None] + np.arange(old.shape[2])) % old.shape[2]
        new = np.zeros((*old.shape[:2], 2 * old.shape[2]), old.dtype)
        new[:, :, : old.shape[2]] = np.take_along_axis(old, order, axis=2)
        works["first"] = 0
        self.world = self.world._replace(coming=new)

    def _tell(self, p: int) -> None:
        fragment, members = self.world.fragments[p], []
        for line, work, offers in zip(self.lines, self.world.works[p], self.world.offers[p], strict=True):
            if work["chosen"]:
                offer = offers[work["chosen"] % kernel.KEPT_OFFERS]
                members.append((line.learner.name, int(offer["steps"]), int(offer["tokens"])))
        times = int(fragment["opened_us"]), int(self.world.run["clock_us"][0])
        assert self.scenario.on_version is not None
        self.scenario.on_version(Version(p, int(fragment["version"]), *times, tuple(members)))

    # ---- what the kernel knows of a life

    def _publish(self, line: _ToldLine) -> None:
        """Have the kernel know what is new; what is over for good is forgotten."""
        world, m = self.world, line.index
        known = world.lines[m : m + 1]
        fragments = world.fragments
        opened_us = fragments["opened_us"][fragments["phase"] == kernel.OPEN]
        over_us = min([int(world.run["clock_us"][0]), *opened_us.tolist()]) - line.up.delay_us
        count, gone = int(known["known"][0]), int(known["gone"][0])
        over = int(np.searchsorted(world.stretches["end_us"][m, :count], over_us))
        stretches, known["known"] = _appended(world.stretches, m, over, count, line.stretches)
        spans = [span for span in (*world.gone[m, :gone].tolist(), *line.gone) if span[1] > over_us]
        gone_spans, known["gone"] = _appended(world.gone, m, gone, gone, _joined(spans))
        loads, known["loads"] = _appended(world.loads, m, int(known["load"][0]), int(known["loads"][0]), line.loads)
        known["load"], known["now_us"], known["steps"] = 0, line.life.now_us, line.steps
        self.world = world._replace(stretches=stretches, gone=gone_spans, loads=loads)
        line.stretches, line.gone, line.loads = [], [], []


def _joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans of time in order, those that meet as one."""
    joined: list[tuple[int, int]] = []
    for begin_us, end_us in sorted(spans):
        if joined and begin_us <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end_us, joined[-1][1])
        else:
            joined.append((begin_us, end_us))
    return joined


def _appended(rows: Records, m: int, first: int, count: int, new: Sequence[object]) -> tuple[Records, int]:
    """A learner's rows from the first to the last one and then new ones; and how many they are."""
    kept = count - first
    total = kept + len(new)
    if total > rows.shape[1]:
        wider = np.zeros((rows.shape[0], max(total, 2 * rows.shape[1])), rows.dtype)
        wider[:, : rows.shape[1]] = rows
        rows = wider
    rows[m, :kept] = rows[m, first:count].copy()
    rows[m, kept:total] = new
    return rows, total
