"""Rounds that last longer than the steps between two of them, as syncers' heartbeats tell."""

from __future__ import annotations

from collections.abc import Sequence

from diloco.core.learner.slots import LongRounds, choose
from diloco.core.syncer.bandwidth import steps_between
from diloco.settings.run import RunSettings
from diloco.wire.control import Heartbeat, ShardHeartbeat


class SlowFragments:
    """By fragment, how long its rounds last: the last word of an open round is about its length."""

    def __init__(self) -> None:
        self._open_s: dict[int, float] = {}
        self._rounds: dict[int, LongRounds] = {}
        self.found: str | None = None  # the condition, with the numbers of when it began

    def hear(self, heartbeat: ShardHeartbeat, settings: RunSettings, live: Sequence[Heartbeat]) -> None:
        """Take in a syncer's heartbeat; ``live`` are those of the live learners."""
        times_s = [learner.step_s for learner in sorted(live, key=lambda learner: learner.learner) if learner.step_s > 0]
        if not times_s or settings.round.learners_wait:
            return
        steps = steps_between(settings, heartbeat.pace)
        cycle_s = steps * times_s[choose(times_s, settings.quorum(len(times_s)))]
        open_s = {fragment: waited_s for fragment, _, _, waited_s in heartbeat.open}
        for fragment in heartbeat.fragments:
            before_s, now_s = self._open_s.get(fragment), open_s.get(fragment)
            if before_s is not None and (now_s is None or now_s < before_s):
                self._rounds.setdefault(fragment, LongRounds()).add(before_s, cycle_s)
        self._open_s = {f: s for f, s in self._open_s.items() if f not in heartbeat.fragments} | open_s
        self._look(steps)

    def _look(self, steps: int) -> None:
        found = next((rounds.found for _, rounds in sorted(self._rounds.items()) if rounds.found is not None), None)
        if found is None:
            self.found = None
        elif self.found is None:
            round_s, cycle_s = found
            self.found = (
                f"rounds last {round_s:.3g} s, but {steps} steps last {cycle_s:.3g} s, so each fragment's next round "
                f"comes a multiple of {steps} steps later; set more round.steps"
            )
