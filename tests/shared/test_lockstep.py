"""Learners in lockstep, in a model of rounds that know nothing of one another: who joins in between is in step soon."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from diloco.core.learner.lockstep import missing_since_s

FRAGMENTS = 3
PATIENCE_S = 5.0
Version = dict[int, int]  # a batch of each member's share of the data


@dataclass
class Lockstep:
    """A learner's place among the steps of a run, as of its last boundary."""

    newest: list[Version]
    patience_s: float
    since_s: float | None = None

    def behind(self, now_s: float, *, holds: bool, moved: bool) -> bool:
        self.since_s = missing_since_s(self.newest, self.since_s, now_s, holds=holds, moved=moved)
        return self.since_s is not None and now_s - self.since_s < self.patience_s


@dataclass
class Learner:
    """What it has applied, whether it holds its newest step, and the versions that this was taken at."""

    share: int
    applied: list[int]
    lockstep: Lockstep = field(default_factory=lambda: Lockstep([{} for _ in range(FRAGMENTS)], PATIENCE_S))
    careless: bool = False  # steps whenever nothing is unmerged
    steps: list[int] = field(default_factory=lambda: [0] * FRAGMENTS)
    batch: int = 0
    at: tuple[int, ...] = ()
    behind: bool = False

    def boundary(self, now_s: float, *, moved: bool) -> None:
        self.behind = not self.careless and self.lockstep.behind(now_s, holds=any(self.steps), moved=moved)
        if not self.behind and not any(self.steps):
            self.at, self.steps, self.batch = tuple(self.applied), [1] * FRAGMENTS, self.batch + 1


class Rounds:
    """Owners that make a version once all learners that are not behind have answered, and a network that takes any time."""

    def __init__(self, seed: int, learners: list[Learner]) -> None:
        self.random, self.learners = random.Random(seed), learners
        self.logs: list[list[Version]] = [[{}] for _ in range(FRAGMENTS)]
        self.made: list[list[tuple[int, ...]]] = []  # what the gradients of each version were taken at

    def join(self, share: int, *, careless: bool = False) -> None:
        """A learner loads the logs as they are."""
        learner = Learner(share, [len(log) - 1 for log in self.logs], careless=careless)
        for fragment, log in enumerate(self.logs):
            learner.lockstep.newest[fragment] = {share: batch for version in log for share, batch in version.items()}
        self.learners.append(learner)

    def play(self, events: int, now_s: float = 0.0) -> None:
        for _ in range(events):
            fragment, learner = self.random.randrange(FRAGMENTS), self.random.choice(self.learners)
            if self.random.random() < 0.5:
                self._merge(fragment)
            else:
                moved = learner.applied[fragment] < len(self.logs[fragment]) - 1
                if moved:
                    learner.applied[fragment] += 1
                    learner.steps[fragment] = 0
                    learner.lockstep.newest[fragment] = self.logs[fragment][learner.applied[fragment]]
                learner.boundary(now_s, moved=moved)

    def _merge(self, fragment: int) -> None:
        waited_for, log = [learner for learner in self.learners if not learner.behind], self.logs[fragment]
        if waited_for and all(own.steps[fragment] and own.applied[fragment] == len(log) - 1 for own in waited_for):
            self.made.append([own.at for own in waited_for])
            log.append({own.share: own.batch for own in waited_for})

    def mixed(self) -> int:
        """Versions among the last 50 whose gradients were taken at parameters of different steps."""
        return sum(len(set(gradients)) > 1 for gradients in self.made[-50:])

    def whole(self) -> bool:
        """Whether all learners were in each of the last 50."""
        return {len(gradients) for gradients in self.made[-50:]} == {len(self.learners)}


def joined(seed: int, *, careless: bool = False) -> Rounds:
    """Two learners that train, and one that joins at any moment."""
    rounds = Rounds(seed, [Learner(share, [0] * FRAGMENTS, careless=careless) for share in range(2)])
    rounds.play(200 + seed)
    rounds.join(2, careless=careless)
    rounds.play(4000)
    return rounds


@pytest.mark.parametrize("seed", range(40))
def test_who_joins_at_any_moment_is_soon_in_step(seed: int) -> None:
    rounds = joined(seed)
    assert rounds.whole()
    assert rounds.mixed() == 0


def test_without_it_gradients_of_two_steps_would_mix_for_ever() -> None:
    assert sum(joined(seed, careless=True).mixed() > 25 for seed in range(40)) > 5


@pytest.mark.parametrize("seed", range(10))
def test_who_is_out_of_step_once_does_not_stay_so(seed: int) -> None:
    rounds = joined(seed, careless=True)
    for learner in rounds.learners:
        learner.careless = False
    rounds.play(1000)
    rounds.play(3000, now_s=PATIENCE_S)
    assert rounds.whole()
    assert rounds.mixed() == 0


@pytest.mark.parametrize("seed", range(10))
def test_who_begins_with_uneven_logs_goes_on_when_nothing_comes(seed: int) -> None:
    # all were killed between two versions of one step: no learner holds the gradients that the third fragment lacks
    rounds = Rounds(seed, [])
    for log in rounds.logs:
        log += [{0: batch, 1: batch, 2: batch} for batch in range(1, 8)]
    del rounds.logs[2][-1]
    for share in range(3):
        rounds.join(share)
        rounds.learners[share].batch = 7
    rounds.play(100, now_s=10.0)
    assert rounds.made == []
    assert all(learner.behind for learner in rounds.learners)
    rounds.play(4000, now_s=10.0 + PATIENCE_S)
    assert rounds.whole()
    assert rounds.mixed() == 0


def test_patience_begins_again_with_every_version() -> None:
    lockstep = Lockstep([{0: 4, 1: 7}, {0: 4, 2: 1}], PATIENCE_S)
    assert not lockstep.behind(0.0, holds=False, moved=False)
    lockstep.newest[0] = {0: 5, 1: 8}
    assert not lockstep.behind(1.0, holds=True, moved=True)  # its own step is still to be answered there
    assert lockstep.behind(2.0, holds=False, moved=True)
    assert lockstep.behind(6.5, holds=False, moved=False)
    lockstep.newest[0] = {0: 6, 1: 9}
    assert lockstep.behind(6.5, holds=False, moved=True)
    assert lockstep.behind(11.0, holds=False, moved=False)
    assert not lockstep.behind(11.5, holds=False, moved=False)
    lockstep.newest[1] = {0: 6, 2: 1}  # share 2's learner is gone, and has nothing in the other
    assert not lockstep.behind(12.0, holds=False, moved=True)
