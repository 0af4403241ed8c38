"""The rounds of a simulation: learners and a syncer in virtual time, decided by the product's own core.

One syncer, which cannot fail, owns all fragments. The product decides by :class:`~diloco.core.syncer.round.Round` and its
:class:`~diloco.core.syncer.round.Roster` (when a round opens and closes, with whose offers),
:class:`~diloco.core.log.chain.Chain` and :func:`~diloco.core.syncer.merging.version_record` (the log's rules and totals), and
:class:`~diloco.core.learner.learner.Learner` (what a learner offers, holds and loses). There are no arrays.

Quiet time is skipped. A learner's boundaries are played where a version or a round waits for one, or where the learner says
that it next has to decide. Heartbeats that change nothing are left out: the syncer is told when a learner has taken enough
steps for a round, and when its silence makes it count as gone.

At one moment learners first end their steps, then messages arrive, and then the syncer looks at its rounds.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace

import numpy as np

from diloco.core.learner import boundary
from diloco.core.learner.accounts import MemberTraffic, StepDone
from diloco.core.learner.fragment_state import DueOffer, Phase
from diloco.core.learner.fragment_state import FragmentVersion as Folded
from diloco.core.learner.learner import Learner as Protocol
from diloco.core.run.pace import first_due_steps
from diloco.core.syncer import claims
from diloco.core.syncer.round import RoundOffer
from diloco.errors import SettingsError
from diloco.settings.presets import changed_settings
from diloco.wire.control import Announcement, Heartbeat
from diloco_lab.simulator.cluster import MICROS, NEVER_US, RoundTerms, micros
from diloco_lab.simulator.events import BOUNDARY, MESSAGE, Events
from diloco_lab.simulator.lifetime_history import AHEAD_US, Steps
from diloco_lab.simulator.network import Direction, Sizes
from diloco_lab.simulator.outcome import LearnerOutcome, Outcome, Scenario, Uptime
from diloco_lab.simulator.reports import ReportSyncer
from diloco_lab.simulator.syncer import NO_BODY, SimulatedSyncer

NO_VALUES = np.zeros(0, np.uint8)
FOR_EVER = 10**18  # tokens: the run does not end by itself
TASK = "diloco_lab:steps"  # no model is trained: the settings say nothing about a step's tokens


def simulate(scenario: Scenario, rounds: RoundTerms) -> Outcome:
    """Play a scenario with rounds.

    Raises:
        SettingsError: a learner would process more tokens than a run, or a step, can have.
    """
    run = {"tokens": FOR_EVER, "task.name": TASK}
    rounds = replace(rounds, settings=changed_settings(rounds.settings, run, "simulation"))
    most = claims.OWN_TASK.most_tokens
    for learner in scenario.learners:
        worth = learner.slices * learner.tokens * (scenario.duration_s / learner.step_s + 1)
        if worth > FOR_EVER:
            raise SettingsError(
                f"learner {learner.name}: tokens = {learner.tokens} for a slice's part of a step are {worth:.3g} in "
                f"{scenario.duration_s:g} s, expected at most {FOR_EVER:.3g}"
            )
        if learner.slices * learner.tokens > most:
            raise SettingsError(
                f"learner {learner.name}: tokens = {learner.tokens} for a slice's part of a step are "
                f"{learner.slices * learner.tokens} a step, expected at most {most}"
            )
    events, uptime = Events(scenario.duration_us), Uptime(len(scenario.learners), scenario.duration_us)
    syncer = (ReportSyncer if rounds.by_reports else SimulatedSyncer)(events, rounds, scenario.on_version)
    members = [_Member(events, syncer, scenario, rounds, index=index, uptime=uptime) for index in range(len(scenario.learners))]
    syncer.listeners.extend(members)
    for member in members:
        member.begin()
    events.play()
    outcomes = [member.outcome() for member in members]
    uptime.settle()
    return Outcome(scenario.duration_us, uptime.stepping_us, outcomes, syncer.versions, syncer.members)


class _Member:
    """A learner: its lifetime, its link, and its protocol side."""

    def __init__(
        self, events: Events, syncer: SimulatedSyncer, scenario: Scenario, rounds: RoundTerms, index: int, uptime: Uptime
    ) -> None:
        self.events, self.syncer, self.rounds, self.settings = events, syncer, rounds, rounds.settings
        self.index, self.learner = index, scenario.learners[index]
        cuts = scenario.cuts.get(self.learner.name, ())
        self.up, self.down = Direction(self.learner.link, cuts), Direction(self.learner.link, cuts)
        self.steps = Steps(scenario, index, self.learner, uptime)
        self._offer_bytes = Sizes(rounds).offers
        self.process = 0  # number of the process; what an earlier one has begun comes to nothing
        self._batch = 0
        self._next_us = NEVER_US  # of the boundary that is looked at next
        overlaps = self.settings.apply.at == "overlap"
        self._decides = rounds.learners_may_wait  # whether a boundary decides more than what has come
        # a round that is announced after a boundary makes the learner wait so many steps after it at the earliest
        self._free_steps = math.ceil(self.settings.round.overlap_steps) if overlaps else NEVER_US
        if self._decides:
            self.steps.limit = 1  # no learner waits before the first step
        self._silences: deque[tuple[int, int, bool]] = deque()  # from, until, whether absent: those that are known and not over
        self._waits = False
        self._pending: set[int] = set()  # fragments of which versions wait for the next boundary
        self._asked: set[int] = set()  # fragments whose open round is to be answered at a boundary
        self._sending: dict[int, int] = {}  # by fragment: when the learner knows that its offer is stored
        self._offered_us: dict[int, int] = {}  # by fragment: when the newest offer was made
        self._due_steps: dict[int, int] = {}  # by fragment: the step of which the syncer is to be told
        self.protocol = self._joined()

    def _joined(self) -> Protocol:
        """Return the protocol side of a new process, which begins with the log."""
        self.process += 1
        protocol = Protocol(self.learner.name, "learner", "", self.process, self.settings)
        for round_ in self.syncer.rounds:
            protocol.seat(Folded(None, replace(round_.chain, cursors=dict(round_.chain.cursors))))
        self._pending = set(range(len(protocol.fragments)))
        return protocol

    def begin(self) -> None:
        heartbeat_us = micros(self.settings.liveness.heartbeat_s)
        for begin_us, end_us in self.up.cuts:
            told_us = max(0, (begin_us - self.up.delay_us - 1) // heartbeat_us * heartbeat_us)
            self._note_absence(0, told_us, -(-end_us // heartbeat_us) * heartbeat_us)
        present_us = micros(self.learner.present[0][0]) if self.learner.present else 0
        self._play_regularly(0)
        self._look_at(present_us)
        if isinstance(self.syncer, ReportSyncer):
            self._tell_step(1)

    def outcome(self) -> LearnerOutcome:
        self._book(self.events.until_us)
        self.steps.extend(self.events.until_us)
        self.protocol.settle()
        outcome, sizes, merged, lost = self.steps.outcome(), self.rounds.sizes, 0, 0
        for size, state, round_ in zip(sizes, self.protocol.fragments, self.syncer.rounds, strict=True):
            cursor = round_.chain.cursors.get(self.learner.name)
            tokens = cursor.tokens if cursor else 0
            merged += size * tokens
            lost += size * (outcome.tokens - state.delta.tokens - tokens)
        outcome.merged_tokens, outcome.lost_tokens = merged / sum(sizes), lost / sum(sizes)
        outcome.bytes_up, outcome.bytes_down = self.up.bytes, self.down.bytes
        return outcome

    # ---- time

    def _play_on(self, now_us: int) -> None:
        """Know the near future, and when the learner counts as gone in it; forget the past."""
        self.steps.forget(now_us - self.up.delay_us)
        self.steps.extend(now_us + AHEAD_US)
        heartbeat_us = micros(self.settings.liveness.heartbeat_s)
        for stretch, (begin_us, end_us) in self.steps.silences:
            last_us = max(stretch.start_us, (begin_us - 1) // heartbeat_us * heartbeat_us)
            if stretch.kind == "stepping":
                done = min(stretch.steps - 1, (begin_us - stretch.start_us) // stretch.step_us)
                last_us = max(last_us, stretch.start_us + done * stretch.step_us)
            if stretch.kind == "absent" and not stretch.start_us:  # it has not been heard yet
                last_us = -NEVER_US
            self._note_absence(now_us, last_us, min(stretch.end_us, -(-end_us // heartbeat_us) * heartbeat_us))
            self._silences.append((begin_us, end_us, stretch.kind == "absent"))
        self.steps.silences.clear()
        self.syncer.watch_pace(self, now_us)

    def _play_regularly(self, now_us: int) -> None:
        self._play_on(now_us)
        self.events.at(now_us + AHEAD_US // 2, BOUNDARY, self._play_regularly)

    def is_silent(self, now_us: int, *, absent: bool = False) -> bool:
        """Return whether nothing is heard of the learner now, and it hears nothing; ``absent``: since it takes no part."""
        while self._silences and self._silences[0][1] <= now_us:
            self._silences.popleft()
        return bool(self._silences) and self._silences[0][0] <= now_us and (self._silences[0][2] or not absent)

    def _note_absence(self, now_us: int, last_us: int, back_us: int) -> None:
        """Between its last heartbeat and the next one it counts as gone, if that takes so long."""
        gone_us = last_us + self.up.delay_us + micros(self.settings.liveness.dead_s) + 1
        back_us += self.up.delay_us
        if gone_us < back_us:
            self.events.at(max(now_us, gone_us), MESSAGE, self.syncer.lose, self)
            self.events.at(max(now_us, back_us), MESSAGE, self.syncer.find, self)

    def heard_us(self, at_us: int) -> int:
        """Return when the syncer hears of a boundary: by the first heartbeat from then on that passes the link."""
        heartbeat_us = micros(self.settings.liveness.heartbeat_s)
        while (arrives_us := self.up.tell(at_us)) is None:
            passes_us = self.up.open_us(self.up.open_us(at_us) + self.up.delay_us) - self.up.delay_us
            at_us = -(-max(self.up.open_us(at_us), passes_us) // heartbeat_us) * heartbeat_us
        return arrives_us

    def _look_at(self, boundary_us: int) -> None:
        if boundary_us < self._next_us:
            self._next_us = boundary_us
            self.events.at(boundary_us, BOUNDARY, self._boundary)

    def _look_after(self, at_us: int) -> None:
        """Look at the first boundary after a time."""
        self._look_at(self.steps.boundary_us(at_us))

    def _book(self, now_us: int) -> None:
        for steps, tokens in self.steps.book(now_us):
            self.protocol.book(
                StepDone(tokens=tokens, share=self.index, batch=self._batch, loss=None, busy_s=0.0, blocked_s=0.0, steps=steps)
            )
            self._batch += steps

    # ---- boundaries

    def _boundary(self, now_us: int) -> None:
        if now_us != self._next_us:
            return  # an earlier one was looked at
        self._next_us = NEVER_US
        self._book(now_us)
        if self.steps.loads and self.steps.loads[0][0] <= now_us:
            self._restart()
        protocol = self.protocol
        for fragment in [fragment for fragment, stored_us in self._sending.items() if stored_us < now_us]:
            self._stored(fragment)
        joins = protocol.fragments[0].phase is Phase.JOINING
        applied = self._apply(now_us, joins=joins)
        if self._decides:
            self._play_on(now_us)
        if joins:
            self.events.at(self.heard_us(now_us), MESSAGE, self.syncer.hear, self, self._heartbeat())
        for fragment in applied:
            self._expect_round(fragment)
        for fragment in list(self._due_steps):
            self._tell_due(fragment, now_us)
        for fragment in sorted(self._asked):
            self._try_answer(fragment, now_us)
        if self._decides and not self._waits:
            self._look_at(self.steps.step_us(self.steps.limit))
        if self.steps.loads:
            self._look_at(self.steps.loads[0][0])

    def _apply(self, now_us: int, *, joins: bool) -> list[int]:
        """Apply the versions that are due; return their fragments."""
        protocol, pending = self.protocol, sorted(self._pending)
        self._pending.clear()
        if not self._decides and not joins:
            for fragment in pending:
                for application in boundary.due(protocol, protocol.fragments[fragment]):
                    boundary.apply_version(protocol, application)
            return pending
        decision, _ = boundary.pass_boundary(protocol, now_us / MICROS)
        self._waits = decision.wait
        if self._decides:
            wake = boundary.next_decision(protocol, self.learner.tokens)
            assert wake.steps is not None
            steps = 0 if decision.wait else min(wake.steps, self._free_steps)
            self.steps.limit = protocol.accounts.step + steps
            if decision.wait and wake.at_s is not None:
                self.events.at(max(now_us, micros(wake.at_s)) + 1, BOUNDARY, self._give_up, protocol.accounts.step)
        return sorted({application.fragment for application in decision.applies})

    def _give_up(self, now_us: int, step: int) -> None:
        """Look again at a boundary that waits, once it has waited as long as it may."""
        if self._waits and self.protocol.accounts.step == step:
            self._end_wait(now_us)

    def _restart(self) -> None:
        """Begin again with the log, after the process was killed, or the learner was away."""
        self.steps.loads.pop(0)
        step = self.protocol.accounts.step
        self.protocol = self._joined()
        self.protocol.accounts.step = step
        for of_process in (self._sending, self._offered_us, self._asked, self._due_steps):
            of_process.clear()

    def _expect_round(self, fragment: int) -> None:
        """Note the step from which on the learner counts for the next round (:meth:`diloco.core.syncer.round.Round.due`)."""
        state, round_ = self.protocol.fragments[fragment], self.settings.round
        if not round_.learners_wait:
            self._due_steps[fragment] = state.version_step + 1
        elif state.delta.base_version:
            self._due_steps[fragment] = state.version_step + round_.steps
        else:
            self._due_steps[fragment] = first_due_steps(round_, fragment, len(self.protocol.fragments))

    def _tell_due(self, fragment: int, now_us: int) -> None:
        """Have the syncer told of that step, once it is known when it ends."""
        step = self._due_steps[fragment]
        done_us = max(now_us, self.steps.step_us(step))
        if done_us < NEVER_US:
            del self._due_steps[fragment]
            state = self.protocol.fragments[fragment]
            due = (self, self.process, fragment, state.delta.base_version, state.version_step, step)
            self.events.at(self.heard_us(done_us), MESSAGE, self.syncer.hear_due, *due)

    def _tell_step(self, step: int) -> None:
        """Have the syncer told when a step is done."""
        done_us = self.steps.step_us(step)
        if done_us < NEVER_US:
            self.events.at(self.heard_us(done_us), MESSAGE, self._told, step)

    def _told(self, now_us: int, step: int) -> None:
        assert isinstance(self.syncer, ReportSyncer)
        self.syncer.hear_report(now_us, self)
        self._tell_step(step + 1)

    def _heartbeat(self) -> Heartbeat:
        return self.protocol.heartbeat([], 1, MemberTraffic(self.up.bytes, self.down.bytes, 0))

    # ---- rounds

    def hear_round(self, now_us: int, announced: Announcement) -> None:
        """Take in an announcement; a learner that is silent answers once it is back."""
        self.protocol.hear(announced, now_us / MICROS)
        if self._free_steps < NEVER_US:
            self._look_after(now_us)  # it sets when the learner waits for the version
        if self.is_silent(now_us):
            self._ask_again(announced.fragment, now_us)
        else:
            self._try_answer(announced.fragment, now_us)

    def _ask_again(self, fragment: int, after_us: int) -> None:
        """Try to answer a fragment's open round at the first boundary after a time."""
        self._asked.add(fragment)
        self._look_after(after_us)

    def _try_answer(self, fragment: int, now_us: int) -> None:
        """Answer a fragment's open round, if it is one, with its value as of the last boundary."""
        self._asked.discard(fragment)
        state = self.protocol.fragments[fragment]
        stored_us, offered_us = self._sending.get(fragment, -1), self._offered_us.get(fragment, -1)
        if stored_us >= now_us:
            self._ask_again(fragment, stored_us)
        elif self.steps.boundary_us(offered_us) > now_us >= 0 <= offered_us:
            self._ask_again(fragment, offered_us)
        else:
            if stored_us >= 0:
                self._stored(fragment)
            if state.wants_answer:
                self._answer(fragment, now_us)
            elif state.pending or state.open_version > state.delta.base_version + 1:
                self._asked.add(fragment)

    def _answer(self, fragment: int, now_us: int) -> None:
        self._book(now_us)
        self.protocol.submit(fragment, None)
        answer = self.protocol.try_answer(fragment)
        if answer is None:
            return
        rounds = self.rounds
        ready_us = now_us + micros(rounds.answer_s)
        arrives_us = self.up.send(ready_us, self._offer_bytes[fragment])
        self._offered_us[fragment], self._sending[fragment] = now_us, arrives_us + self.down.delay_us
        if ready_us > now_us:
            self.events.at(ready_us, MESSAGE, self._encoded, self.process, answer, arrives_us)
        else:
            self._encoded(now_us, self.process, answer, arrives_us)

    def _encoded(self, now_us: int, process: int, answer: DueOffer, arrives_us: int) -> None:
        if process != self.process:
            return
        offer = self.protocol.encoded(answer).message(answer.fragment, NO_BODY)
        self.events.at(arrives_us, MESSAGE, self.syncer.hear_offer, RoundOffer(offer, NO_VALUES))
        if self.protocol.fragments[answer.fragment].pending:
            self._wake(now_us, answer.fragment)

    def _stored(self, fragment: int) -> None:
        del self._sending[fragment]
        self.protocol.sent(fragment, 0)

    def receive(self, now_us: int, folded: Folded) -> None:
        """Take in a version."""
        fragment = folded.chain.fragment
        state = self.protocol.fragments[fragment]
        if folded.chain.version > state.newest.chain.version:  # otherwise the log was loaded with it
            self.protocol.queue(fragment, folded)
            if state.phase is not Phase.ENCODING:
                self._wake(now_us, fragment)

    def _wake(self, now_us: int, fragment: int) -> None:
        """Apply what has come at the next boundary, which ends the wait of a learner that waits."""
        self._pending.add(fragment)
        if self._waits:
            self._end_wait(now_us)
        else:
            self._look_after(now_us)

    def _end_wait(self, now_us: int) -> None:
        self._waits = False
        self.steps.wait(now_us)
        self._play_on(now_us)
        self._look_after(now_us - 1)
