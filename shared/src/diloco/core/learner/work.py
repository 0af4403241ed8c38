"""A learner's inner steps in order, so that a step is booked once and counted for a fragment when something happens to it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from diloco.core.learner.accounts import StepDone
from diloco.core.learner.fragment_state import FragmentState

RUNS = 64  # that are remembered


@dataclass(slots=True)
class _Run:
    """Steps of ``tokens`` each on consecutive batches of a share, or on data that no share has."""

    first_step: int
    steps: int
    tokens: int
    share: int | None
    first_batch: int


@dataclass
class Work:
    """Steps booked so far, and the newest of them as runs; a fragment has counted those before its ``settled_step``."""

    steps: int = 0
    runs: list[_Run] = field(default_factory=list)

    def add(self, tokens: int, share: int | None, batch: int, steps: int) -> bool:
        """Book steps of ``tokens`` each; return whether every fragment is to be settled now, and then :meth:`forget`."""
        last = self.runs[-1] if self.runs else None
        if last is not None and last.tokens == tokens and last.share == share and last.first_batch + last.steps == batch:
            last.steps += steps
        else:
            self.runs.append(_Run(self.steps, steps, tokens, share, batch))
        self.steps += steps
        return len(self.runs) > RUNS

    def after(self, done: StepDone) -> Work:
        """Return the steps as they are once these are booked too; these stay as they are."""
        after = Work(self.steps, [*self.runs[:-1], *map(replace, self.runs[-1:])])  # only the last one may grow
        after.add(done.tokens, done.share, done.batch, done.steps)
        return after

    def settle(self, state: FragmentState) -> None:
        """Count for a fragment the steps that it has not counted."""
        for run in reversed(self.runs):
            skipped = max(0, state.settled_step - run.first_step)
            if skipped >= run.steps:
                break
            steps = run.steps - skipped
            state.delta.step(steps * run.tokens, run.share, run.first_batch + skipped, steps)
        state.settled_step = self.steps

    def unmerged(self, state: FragmentState) -> bool:
        """Return whether a fragment holds steps that are not merged."""
        return state.settled_step < self.steps or state.delta.steps > 0

    def forget(self) -> None:
        """Forget the runs: every fragment is settled."""
        self.runs.clear()
