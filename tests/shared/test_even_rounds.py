"""Rounds stay spread evenly over a cycle, in virtual time: owners, takeovers, cuts, newcomers, other settings.

Owners decide by the product's own :class:`~diloco.core.syncer.round.Round` and :class:`~diloco.core.syncer.roster.Roster`.
Learners are a step counter each; a round takes the time of its messages. Steps are counted in those of the fastest learner.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.made.heartbeats import learner_heartbeat
from tests.made.log_entries import hash_of
from tests.made.run_settings import ROUNDS, settings_of

from diloco.core.log.chain import Chain
from diloco.core.syncer.roster import Roster
from diloco.core.syncer.round import Round

MERGE_S = 0.05
HEARTBEAT_S = 0.5


@dataclass
class Learner:
    name: str
    step_s: float
    fragments: int
    step: int = 0
    here: bool = True
    versions: list[int] = field(default_factory=list)
    unmerged: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.versions, self.unmerged = [0] * self.fragments, [0] * self.fragments


@dataclass
class Owner:
    roster: Roster
    rounds: dict[int, Round]
    here: bool = True
    pace: float = 1.0


class World:
    """Learners and the owners of a run's fragments, which are dealt to the owners in turn."""

    def __init__(self, fragments: int, *, speeds: tuple[float, ...], latency: float, owners: int = 2, **changes: Any) -> None:
        """``speeds``: of learners; 1 is a step a second. ``latency``: of a message, in steps of the fastest one."""
        settings = {"fragments.count": fragments, "round.steps": fragments, "learners": len(speeds)} | changes
        self.settings = settings_of(ROUNDS, **settings)
        self.fragments, self.step_s = fragments, 1 / max(speeds)
        self.latency_s, self.now_s = latency * self.step_s, 0.0
        self.learners = [Learner(f"learner-{n}", 1 / speed, fragments) for n, speed in enumerate(speeds)]
        chains = [Chain(fragment, 0, 0, bytes(32), 0, hash_of(0)) for fragment in range(fragments)]
        self.owners = [self.owner(chains[n::owners]) for n in range(owners)]
        self.openings: list[tuple[float, int]] = []  # (time, fragment)
        self.versions: list[tuple[float, int]] = []  # likewise
        self.cut = False
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        for n, learner in enumerate(self.learners):
            self.at((0.3 * n + 1) * learner.step_s, lambda learner=learner: self._step(learner))  # type: ignore[misc]
        self.at(0.0, self._beat)

    def owner(self, chains: list[Chain]) -> Owner:
        """An owner that has heard nothing yet."""
        roster = Roster(self.settings)
        return Owner(roster, {chain.fragment: Round(roster, chain, self.fragments) for chain in chains})

    def at(self, at_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), act))

    def play(self, steps: float) -> None:
        until_s = self.now_s + steps * self.step_s
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, act = heapq.heappop(self._events)
            act()
        self.now_s = until_s

    def evenness(self, events: list[tuple[float, int]], since_s: float) -> tuple[int, int]:
        """The most of these openings or versions in a step, and the most steps in a row without one."""
        each = Counter(int(at_s / self.step_s) for at_s, _ in events if at_s >= since_s)
        without = longest = 0
        for step in range(int(since_s / self.step_s), int(self.now_s / self.step_s)):
            without = 0 if each[step] else without + 1
            longest = max(longest, without)
        return max(each.values()), longest

    def periods(self, since_s: float) -> list[float]:
        """By fragment: the mean steps from version to version."""
        times: dict[int, list[float]] = {}
        for at_s, fragment in self.versions:
            if at_s >= since_s:
                times.setdefault(fragment, []).append(at_s / self.step_s)
        return [(each[-1] - each[0]) / (len(each) - 1) for each in times.values()]

    def reference_step_s(self) -> float:
        reference = self.owners[0].roster.clock(self.now_s).reference
        assert reference is not None
        return reference.heartbeat.step_s

    # ---- learners

    def _step(self, learner: Learner) -> None:
        if learner.here:
            learner.step += 1
            learner.unmerged = [steps + 1 for steps in learner.unmerged]
            self._tell(learner)
        self.at(self.now_s + learner.step_s, lambda: self._step(learner))

    def _beat(self) -> None:
        for learner in self.learners:
            if learner.here:
                self._tell(learner)
        self.at(self.now_s + HEARTBEAT_S, self._beat)

    def _tell(self, learner: Learner) -> None:
        if self.cut:
            return
        steps = list(learner.unmerged)
        heartbeat = learner_heartbeat(learner.name, learner.step, *learner.versions, steps=steps, step_s=learner.step_s)

        def heard() -> None:
            for owner in self.owners:
                if owner.here:
                    owner.roster.hear(heartbeat, self.now_s)
                    self._look(owner)

        self.at(self.now_s + self.latency_s, heard)

    # ---- owners

    def _look(self, owner: Owner) -> None:
        for fragment, round_ in owner.rounds.items():
            if round_.due(self.now_s, int(owner.roster.settings.round.steps * owner.pace)):
                round_.open(self.now_s)
                self.openings.append((self.now_s, fragment))
                answered_s = self.now_s + 2 * self.latency_s
                self.at(answered_s + MERGE_S * self.step_s, lambda f=fragment, r=round_, o=owner: self._commit(o, f, r))  # type: ignore[misc]

    def _commit(self, owner: Owner, fragment: int, round_: Round) -> None:
        if not owner.here or owner.rounds.get(fragment) is not round_:
            return  # killed meanwhile
        if self.cut:
            self.at(self.now_s + 1.0, lambda: self._commit(owner, fragment, round_))
            return
        round_.chain.version += 1
        round_.committed(self.now_s)
        self.versions.append((self.now_s, fragment))
        version = round_.chain.version

        def applied() -> None:
            for learner in self.learners:
                learner.versions[fragment], learner.unmerged[fragment] = version, 1

        self.at(self.now_s + self.latency_s, applied)
        self._look(owner)


def kill_and_restart(world: World) -> None:
    """A syncer is killed and back after a second."""
    before = world.owners[0]
    before.here = False
    world.play(1 / world.step_s)
    world.owners[0] = world.owner([round_.chain for round_ in before.rounds.values()])


def kill_all_and_resume(world: World) -> None:
    for owner in world.owners:
        owner.here = False
    world.play(3 / world.step_s)
    world.owners = [world.owner([round_.chain for round_ in owner.rounds.values()]) for owner in world.owners]


def take_over(world: World) -> None:
    """The other owner, which has heard all heartbeats, takes over all fragments of the first."""
    lost, heir = world.owners
    lost.here = False
    world.play(3 / world.step_s)
    heir.rounds |= {f: Round(heir.roster, round_.chain, world.fragments) for f, round_ in lost.rounds.items()}
    world.owners = [heir]


def cut_all_links(world: World) -> None:
    world.cut = True
    world.play(60 / world.step_s)
    world.cut = False


def lose_the_reference(world: World) -> None:
    world.learners[0].here = False


def admit_a_newcomer(world: World) -> None:
    """A learner whose name comes first, and whose steps count from elsewhere."""
    newcomer = Learner("a-newcomer", world.learners[0].step_s, world.fragments, step=7)
    newcomer.versions = list(world.learners[0].versions)
    world.learners.append(newcomer)
    world.at(world.now_s + 0.4, lambda: world._step(newcomer))


def lengthen_and_shorten_the_interval(world: World) -> None:
    for steps in (36, 24):
        settings = world.settings.model_copy(update={"round": world.settings.round.model_copy(update={"steps": steps})})
        for owner in world.owners:
            owner.roster.change(settings, frozenset())
        world.play(200)


FAULTS = [
    kill_and_restart,
    kill_all_and_resume,
    take_over,
    cut_all_links,
    lose_the_reference,
    admit_a_newcomer,
]


@pytest.mark.parametrize(("fragments", "latency"), [(12, 0.01), (12, 1.5), (24, 0.6)])
@pytest.mark.parametrize("fault", FAULTS)
def test_two_cycles_after_a_fault_rounds_are_even(fault: Callable[[World], None], fragments: int, latency: float) -> None:
    world = World(fragments, speeds=(1.0, 1.0, 1.0), latency=latency)
    world.play(5 * fragments)
    began_s = world.now_s
    fault(world)
    world.play(2 * fragments)
    assert world.evenness(world.openings, began_s)[0] <= 4, "right after the fault"
    since_s = world.now_s
    world.play(10 * fragments)
    most, without = world.evenness(world.versions, since_s)
    assert most <= 2
    assert without < 4
    assert world.periods(since_s) == pytest.approx([fragments] * fragments, rel=0.02)


@pytest.mark.parametrize("latency", [0.01, 1.5])
@pytest.mark.parametrize("speeds", [(1, 20), (1, 20, 20), (20, 1, 1), (1, 1.18, 1, 1.3)])
def test_learners_of_other_speeds_leave_rounds_even(speeds: tuple[float, ...], latency: float) -> None:
    world = World(24, speeds=speeds, latency=latency)
    world.play(5 * 24)
    since_s = world.now_s
    world.play(10 * 24)
    most, without = world.evenness(world.versions, since_s)
    assert most <= 2
    assert without < 4
    steps = 24 * world.reference_step_s() / world.step_s
    assert world.periods(since_s) == pytest.approx([steps] * 24, rel=0.02)


def test_another_interval_leaves_rounds_even() -> None:
    world = World(24, speeds=(1.0, 1.0), latency=0.1)
    world.play(5 * 24)
    began_s = world.now_s
    lengthen_and_shorten_the_interval(world)
    assert world.evenness(world.openings, began_s)[0] <= 4
    since_s = world.now_s
    world.play(10 * 24)
    most, without = world.evenness(world.versions, since_s)
    assert most <= 2
    assert without < 4
    assert world.periods(since_s) == pytest.approx([24] * 24, rel=0.02)


def test_an_owner_whose_pace_is_slower_has_even_rounds_of_its_own() -> None:
    world = World(24, speeds=(1.0, 1.0), latency=0.1)
    world.owners[0].pace = 1.5
    world.play(5 * 36)
    since_s = world.now_s
    world.play(10 * 36)
    own = set(world.owners[0].rounds)
    times = [at_s for at_s, fragment in world.versions if fragment in own and at_s >= since_s]
    assert max(Counter(map(int, times)).values()) == 1
    assert max(later - earlier for earlier, later in itertools.pairwise(times)) <= 4  # 12 of them in 36 steps
    by_fragment = dict(zip(sorted({f for _, f in world.versions}), world.periods(since_s), strict=False))
    assert len(by_fragment) == 24
