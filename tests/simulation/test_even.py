"""Settings that leave rounds little room, and syncers that never stay: in virtual time, with the real services."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from tests.simulation.even import EvenWorld
from tests.simulation.world import Chaos

KILLS_END_S = 9.0


class Planned(EvenWorld):
    """A cluster of equally fast learners where nothing goes wrong by chance.

    ``kill_every_s``: so often are all syncers killed, and with ``learners_too`` one of the learners. ``delay_s``: of messages.
    """

    def __init__(
        self, *, kill_every_s: float = 0.0, learners_too: bool = False, delay_s: float = 0.001, **changes: Any
    ) -> None:
        self._delay_s, self._ends_s = delay_s, KILLS_END_S if kill_every_s else 0.5
        super().__init__(1, **changes)
        learners = [process for process in self.processes if process.name.startswith("learner")]
        syncers = [process for process in self.processes if process.name.startswith("syncer")]
        kills = int(self._ends_s / kill_every_s) if kill_every_s else 0
        for number in range(1, kills):
            killed = [*syncers, *([learners[number % len(learners)]] if learners_too else [])]
            for process in killed:
                self.later(number * kill_every_s, self._fault, "kill", process, 0.0)

    def _draw_chaos(self, possible: Sequence[str]) -> Chaos:
        super()._draw_chaos(possible)
        return Chaos(self._ends_s, 0.0, 0.0, 0.0, 0.0, {}, [])

    def draw_step_s(self, rng: random.Random) -> float:
        super().draw_step_s(rng)
        return 0.1

    def delay_s(self) -> float:
        return self._delay_s

    def deliveries_s(self) -> list[float]:
        return [2 * self._delay_s]

    def rates(self) -> dict[int, float]:
        """Return by fragment the versions in a step of the reference, long after the last fault."""
        steps = self.settled()
        versions = self.versions_in(steps)
        count = len(self.map.fragments)
        return {index: sum(fragment == index for _, fragment in versions) / len(steps) for index in range(count)}


@pytest.mark.parametrize(
    ("changes", "period"),
    [
        ({"round__steps": 4, "fragments__count": 1}, 4),
        ({"round__steps": 4, "fragments__count": 8}, 4),  # more fragments than steps: two in a slot
        ({"round__steps": 6, "round__overlap_steps": 20.0}, 6),  # a grace window would last beyond the next round
    ],
)
def test_a_short_interval_is_kept(changes: dict[str, Any], period: int) -> None:
    world = Planned(**changes)
    outcome = world.run()
    assert outcome.error is None
    assert world.rates() == pytest.approx(dict.fromkeys(world.rates(), 1 / period), rel=0.25)


@pytest.mark.parametrize("fragments", [1, 3])
def test_a_round_in_each_step_comes_in_most_steps(fragments: int) -> None:
    """Steps vary between 0.05 and 0.15 s: a round that ends in the second half of one misses the slot that began with it."""
    world = Planned(round__steps=1, fragments__count=fragments)
    outcome = world.run()
    assert outcome.error is None
    rates = world.rates().values()
    assert min(rates) > 0.5
    assert max(rates) <= 1


def test_an_interval_below_the_round_trip_becomes_a_multiple_of_it_and_is_said_once() -> None:
    """A message takes two steps, and an append as many, so a round takes about nine steps, and its interval has four."""
    told: list[str] = []
    world = Planned(delay_s=0.1, round__steps=4, fragments__count=4)
    world.logger.note = lambda who, what: told.append(what) if "interval_below_round_trip" in what else None  # type: ignore[attr-defined]
    outcome = world.run()
    assert outcome.error is None
    assert world.rates() == pytest.approx(dict.fromkeys(range(4), 1 / 12), rel=0.25)
    [once] = told
    print(once)
    assert "set round.steps to" in once


def test_a_run_whose_only_syncer_is_killed_again_and_again_makes_versions_all_along() -> None:
    world = Planned(kill_every_s=3.0)
    outcome = world.run()
    assert outcome.error is None
    assert len({fragment for at_s, fragment in world.versions_s if at_s < KILLS_END_S}) == len(world.map.fragments)


def test_learners_that_wait_do_not_hang_though_the_syncer_and_a_learner_are_killed_in_each_cycle() -> None:
    diloco: dict[str, Any] = {
        "fragments__count": 1,
        "round__learners_wait": True,
        "round__quorum": "all",
        "carry__overlap": False,
    }
    world = Planned(preset="diloco", kill_every_s=1.0, learners_too=True, **diloco)
    outcome = world.run()
    assert outcome.error is None
