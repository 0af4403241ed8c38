"""Rounds as Algorithm 2 of Decoupled DiLoCo (arXiv 2604.21428) counts them: by the reports of learners, one a step.

There, the syncer takes a step of its own once at least K learners have reported since the step before, and the grace window is
over. A fragment is due at the syncer's steps t with ``t mod H = floor(p H / P)``, and its version is made of the learners that
have reported for that step. So with K = 1 and no window each report is a step of the syncer: in H steps of M learners a
fragment has M versions, each made of one learner.

The product asks all learners, in slots by the steps of one of them (:mod:`diloco.core.learner.slots`). What is here is for
simulations, so that the paper's Table 5 can be played.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from diloco.core.learner.fragment_state import FragmentVersion as Folded
from diloco.core.learner.slots import offset
from diloco.core.log.chain import Chain
from diloco.core.run.pace import MovingAverage, grace_s
from diloco.core.syncer.round import Round
from diloco.settings.presets import changed_settings
from diloco.settings.run import RoundSettings
from diloco_lab.simulator.cluster import MICROS, RoundTerms, micros
from diloco_lab.simulator.events import MESSAGE, Events
from diloco_lab.simulator.outcome import MergedVersion
from diloco_lab.simulator.syncer import SimulatedSyncer, SyncedLearner


@dataclass
class ReportClock:
    """The syncer's own steps. ``sync_average``: seconds from a fragment's step until learners have its version."""

    settings: RoundSettings
    step: int = 0
    reported: set[str] = field(default_factory=set)  # learners, since the step before
    quorum_average: MovingAverage = field(default_factory=MovingAverage)  # from a step until the quorum of the next one
    sync_average: MovingAverage = field(default_factory=MovingAverage)
    _stepped_s: float = 0.0
    _is_near: bool = False  # whether the next step has its quorum

    def report(self, learner: str, quorum: int, step_s: float, now_s: float) -> float | None:
        """Take in a learner's report. Return the seconds until the syncer's next step if this makes its quorum, else None."""
        self.reported.add(learner)
        if self._is_near or len(self.reported) < quorum:
            return None
        self._is_near = True
        self.quorum_average.add(now_s - self._stepped_s)
        return grace_s(self.settings, step_s, self.quorum_average.get(), self.sync_average.get())

    def take_step(self, now_s: float) -> frozenset[str]:
        """Take the syncer's next step; return the learners that have reported for it."""
        reported = frozenset(self.reported)
        self.reported.clear()
        self.step, self._stepped_s, self._is_near = self.step + 1, now_s, False
        return reported

    def is_due(self, fragment: int, fragments: int) -> bool:
        """Return whether a fragment is due at the present step."""
        return self.step % self.settings.steps == offset(self.settings.steps, fragment, fragments)


@dataclass
class ReportRound(Round):
    """A round that asks some learners, and is over once all of them have answered."""

    asked: frozenset[str] = frozenset()

    def ask(self, reported: frozenset[str]) -> None:
        """Ask those of some learners that have taken a step since they applied the newest version."""
        self.asked |= {name for name in reported if self._is_ready(self.roster.learners[name], 1)}

    def due(self, now_s: float, steps: int) -> bool:
        """Whether learners are to be asked."""
        return self.opened_at_s is None and bool(self.asked)

    def quorum(self, now_s: float) -> int:
        """Return how many learners must answer: those that were asked and are alive."""
        return max(1, len(self.asked & {seen.heartbeat.learner for seen in self.roster.live(now_s)}))

    def committed(self, now_s: float) -> None:
        """Wait for the next round."""
        super().committed(now_s)
        self.asked = frozenset()


class ReportSyncer(SimulatedSyncer):
    """The syncer of a simulation that counts rounds by reports."""

    def __init__(self, events: Events, rounds: RoundTerms, on_version: Callable[[MergedVersion], Any] | None) -> None:
        windowless = changed_settings(rounds.settings, {"round.grace_factor": 0.0}, "reports")  # its window is before a round
        super().__init__(events, replace(rounds, settings=windowless), on_version)
        self._clock, self._slots = ReportClock(rounds.settings.round), False

    def _round(self, chain: Chain, fragments: int) -> ReportRound:
        return ReportRound(self.roster, chain, fragments)

    def hear_report(self, now_us: int, member: SyncedLearner) -> None:
        """Hear that a learner has ended a step."""
        now_s = now_us / MICROS
        self._note_paces(now_us)
        quorum, step_s = self.settings.quorum(len(self.roster.live(now_s))), self.roster.long_step_s(now_s)
        wait_s = self._clock.report(member.learner.name, quorum, step_s, now_s)
        if wait_s is not None:
            self.events.at(now_us + micros(wait_s), MESSAGE, self._take_step)

    def _take_step(self, now_us: int) -> None:
        reported = self._clock.take_step(now_us / MICROS)
        for fragment, round_ in enumerate(self.rounds):
            if not self._clock.is_due(fragment, len(self.rounds)) or round_.merge_at_s is not None:
                continue
            assert isinstance(round_, ReportRound)
            round_.ask(reported)
            if round_.opened_at_s is None:
                self._look_at(now_us, fragment)
            else:  # those that it asked do not answer
                self._announce(now_us, fragment)

    def _asked(self, fragment: int) -> Sequence[SyncedLearner]:
        round_ = self.rounds[fragment]
        assert isinstance(round_, ReportRound)
        return [member for member in self.listeners if member.learner.name in round_.asked]

    def _delivered(self, now_us: int, listeners: Sequence[SyncedLearner], folded: Folded) -> None:
        super()._delivered(now_us, listeners, folded)
        self._clock.sync_average.add((now_us - self._opened_us[folded.chain.fragment]) / MICROS)
