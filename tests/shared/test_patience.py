"""How long rounds wait for a learner that fails, over all fragments of a syncer, in virtual time.

Owners decide by the product's own :class:`~diloco.core.syncer.round.Round`; learners are step counters that answer when a test
says. All runs have the quorum ``all``, 5 s of liveness and steps of 0.1 s: a learner has 20 s of patience. Two fragments make
five versions a second.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.made.heartbeats import learner_heartbeat
from tests.made.log_entries import hash_of
from tests.made.rounds import RAW, STEPS, offer
from tests.made.run_settings import ROUNDS, settings_of

from diloco.core.log.chain import Chain
from diloco.core.syncer.patience import RETURN, Patience
from diloco.core.syncer.roster import Roster
from diloco.core.syncer.round import Round, RoundOffer
from diloco.wire.entries import Cursor

FRAGMENTS = 2
TICK_S = 0.05
PROMPT_S = 0.05
WHOLE_S = 20.0  # four times `liveness.dead_s`
STEP_S = 0.1
NEVER = 1e9

Answers = Callable[["World", int, float], float]  # seconds from the opening of a fragment's round to the answer


def promptly(world: World, fragment: int, now_s: float) -> float:
    return PROMPT_S


@dataclass
class Learner:
    name: str
    step_s: float = STEP_S
    answers: Answers = promptly
    silent: tuple[float, float] = (NEVER, NEVER)  # from when to when it does nothing, and is not heard
    step: float = 0.0
    numbers: Counter[int] = field(default_factory=Counter)
    unmerged: list[int] = field(default_factory=lambda: [0] * FRAGMENTS)


class World:
    """Learners, and one syncer that owns all fragments."""

    def __init__(self, *learners: Learner, **changes: Any) -> None:
        values = {"round.quorum": "all", "learners": len(learners), "fragments.count": FRAGMENTS, "tokens": 10**9} | changes
        self.learners = {learner.name: learner for learner in learners}
        self.roster = Roster(settings_of(ROUNDS, **values))
        chains = [Chain(fragment, 0, 0, bytes(32), 0, hash_of(0)) for fragment in range(FRAGMENTS)]
        self.rounds = [Round(self.roster, chain, FRAGMENTS) for chain in chains]
        self.now_s = 0.0
        self.due: list[tuple[float, int, str, int]] = []  # answers on their way: when, fragment, learner, round
        self.versions: list[tuple[float, int, frozenset[str]]] = []  # when, fragment, who is in it
        self.in_vain: list[tuple[float, str]] = []

    def play(self, for_s: float) -> World:
        until_s = self.now_s + for_s
        while self.now_s < until_s:
            self.now_s += TICK_S
            for learner in self.learners.values():
                self._step(learner)
            for fragment, round_ in enumerate(self.rounds):
                self._look(fragment, round_)
        return self

    def made(self, since_s: float = 0.0, *, without: str | None = None) -> int:
        """Return how many versions were made since then: all, or those without a learner."""
        return sum(at_s > since_s and without not in names for at_s, _, names in self.versions)

    def _step(self, learner: Learner) -> None:
        if learner.silent[0] <= self.now_s < learner.silent[1]:
            return
        before, learner.step = int(learner.step), learner.step + TICK_S / learner.step_s
        taken = int(learner.step + 1e-9) - before
        learner.unmerged = [steps + taken for steps in learner.unmerged]
        versions = [round_.chain.version for round_ in self.rounds]
        steps = list(learner.unmerged)
        beat = learner_heartbeat(learner.name, int(learner.step + 1e-9), *versions, steps=steps, step_s=learner.step_s)
        self.roster.hear(beat, self.now_s)

    def _look(self, fragment: int, round_: Round) -> None:
        if round_.due(self.now_s, STEPS):
            round_.open(self.now_s)
            for learner in self.learners.values():
                after_s = learner.answers(self, fragment, self.now_s)
                self.due.append((self.now_s + after_s, fragment, learner.name, round_.version))
        for at_s, of, name, version in [each for each in self.due if each[1] == fragment and each[0] <= self.now_s]:
            learner = self.learners[name]
            if not learner.silent[0] <= self.now_s < learner.silent[1]:
                self.due.remove((at_s, of, name, version))
                self.deliver(fragment, name, version)
        merge = round_.poll(self.now_s)
        self.in_vain += [(self.now_s, gone.learner) for gone in round_.waits.take_news()]
        if merge is not None:
            self._commit(fragment, round_, {held.offer.members[0].learner for held in merge.held})

    def deliver(self, fragment: int, name: str, version: int) -> None:
        """Let an answer of a learner arrive, to the round that makes ``version``."""
        chain, learner = self.rounds[fragment].chain, self.learners[name]
        learner.numbers[fragment] += 1
        base = min(version - 1, chain.version)
        values = {"after": chain.cursor(name), "base_version": base, "base_hash": hash_of(base)}
        sent = offer(name, learner.numbers[fragment], version, **values)
        self.rounds[fragment].hold(RoundOffer(sent, RAW))

    def _commit(self, fragment: int, round_: Round, names: set[str]) -> None:
        chain = round_.chain
        chain.version += 1
        chain.state_hash = hash_of(chain.version)
        for name in names:
            learner = self.learners[name]
            chain.cursors[name] = Cursor(name, 1, learner.numbers[fragment], chain.version, 0, 0, 0)
            learner.unmerged[fragment] = 0
        round_.committed(self.now_s)
        self.versions.append((self.now_s, fragment, frozenset(names)))


class AnswersInTurn:
    """The attack: one answer a fragment, and none until it is waited for in vain; then one offer more."""

    def __init__(self) -> None:
        self.answered = [False] * FRAGMENTS

    def __call__(self, world: World, fragment: int, now_s: float) -> float:
        in_vain = "eve" in world.rounds[fragment].waits.in_vain
        answers = in_vain or not self.answered[fragment]
        self.answered[fragment] = answers
        return PROMPT_S if answers else NEVER


class LateOnceAndThenInTurn(AnswersInTurn):
    """Its first answers come late, so that long waits for it seem usual."""

    def __call__(self, world: World, fragment: int, now_s: float) -> float:
        return super().__call__(world, fragment, now_s) if world.rounds[fragment].chain.version else 0.95 * WHOLE_S


class OneFragmentAfterTheOther:
    """It withholds its answers to one fragment until others do not wait any more, and goes on to the next one."""

    def __init__(self) -> None:
        self.target = 0

    def __call__(self, world: World, fragment: int, now_s: float) -> float:
        if "eve" in world.rounds[self.target].waits.in_vain:
            self.target = (self.target + 1) % FRAGMENTS
        return NEVER if fragment == self.target else PROMPT_S


@pytest.fixture(scope="module")
def pace() -> float:
    """Versions a second without an attacker."""
    return World(Learner("ann"), Learner("bob"), Learner("eve")).play(60).made() / 60


def test_prompt_learners_make_five_versions_a_second_and_are_never_given_up(pace: float) -> None:
    assert pace == pytest.approx(5.0, rel=0.05)


@pytest.mark.parametrize(
    ("attack", "over_s"), [(AnswersInTurn, 30), (OneFragmentAfterTheOther, 30), (LateOnceAndThenInTurn, 120)]
)
def test_a_learner_that_answers_in_turn_holds_a_run_up_once_and_no_more(
    pace: float, attack: Callable[[], Answers], over_s: float
) -> None:
    """It has its 20 s once. In the ten minutes after that the run has at least nine tenths of its pace."""
    world = World(Learner("ann"), Learner("bob"), Learner("eve", answers=attack())).play(600 + over_s)
    assert world.made(since_s=over_s) / 600 >= 0.9 * pace
    assert {name for _, name in world.in_vain} == {"eve"}


def test_a_late_learner_that_fails_in_turn_holds_a_run_up_no_more_than_if_it_never_failed() -> None:
    """Its answers take 0.6 s, which is longer than a cycle: always so late it leaves half of the pace, as a slow link does."""

    class InTurn(AnswersInTurn):
        def __call__(self, world: World, fragment: int, now_s: float) -> float:
            return 0.6 if super().__call__(world, fragment, now_s) < NEVER else NEVER

    in_turn = World(Learner("ann"), Learner("bob"), Learner("eve", answers=InTurn())).play(330)
    always = World(Learner("ann"), Learner("bob"), Learner("eve", answers=lambda *_: 0.6)).play(330)
    assert in_turn.made(since_s=30) >= always.made(since_s=30)


def test_a_learner_that_always_answers_when_others_are_about_to_give_it_up_is_given_up(pace: float) -> None:
    """One round in two it answers after 19 of its 20 seconds."""
    turns = itertools.cycle((PROMPT_S, 0.95 * WHOLE_S))
    world = World(Learner("ann"), Learner("bob"), Learner("eve", answers=lambda *_: next(turns))).play(660)
    assert world.made(since_s=60) / 600 >= 0.9 * pace


@given(st.lists(st.sampled_from([0.0, 0.1, 0.5, 2.0, 10.0, 19.0, NEVER]), min_size=1, max_size=80))
@settings(max_examples=50, deadline=None)
def test_whatever_a_learner_does_others_wait_for_its_patience_and_a_twentieth_of_the_time(delays: list[float]) -> None:
    """Beyond its usual wait, or twice that where its patience is used up."""
    patience, now_s, held_s = Patience(), 0.0, 0.0
    for delay_s in delays:
        now_s += 0.2
        usual_s, least_s, waited_s = patience.usual_s, patience.least_s(STEP_S), 0.0
        while waited_s < min(delay_s, WHOLE_S) and (patience.left_s(WHOLE_S) > 0 or waited_s < least_s):
            waited_s, now_s = waited_s + STEP_S, now_s + STEP_S
            patience.debit(waited_s, waited_s - STEP_S, now_s, WHOLE_S)
        held_s += max(0.0, waited_s - max(usual_s, least_s))
        if waited_s >= delay_s:
            patience.answer(waited_s, now_s, WHOLE_S)
        else:
            patience.fail()
    assert 0.0 <= patience.spent_s <= WHOLE_S
    assert held_s <= WHOLE_S + now_s / RETURN + STEP_S * len(delays)


def test_patience_comes_back_over_twenty_times_as_many_answered_rounds_as_were_missed() -> None:
    """20 s without an answer are 20 rounds of a second; after 400 answered ones it is whole, after 200 half of it is."""
    patience = Patience()
    patience.answer(0.0, 0.0, WHOLE_S)
    for second in range(1, 21):
        patience.debit(second, second - 1, second, WHOLE_S)
    assert patience.left_s(WHOLE_S) == 0
    for second in range(21, 221):
        patience.answer(0.0, second, WHOLE_S)
    assert patience.left_s(WHOLE_S) == pytest.approx(WHOLE_S / 2 + 20 / RETURN - 0.05, abs=0.1)
    for second in range(221, 421):
        patience.answer(0.0, second, WHOLE_S)
    assert patience.left_s(WHOLE_S) == WHOLE_S


def test_the_usual_wait_is_a_mean_and_shrinks_with_waits_in_vain_and_without_patience_never_grows() -> None:
    patience = Patience()
    for second in range(16):
        patience.answer(4.0, 10.0 * second, WHOLE_S)
    assert patience.usual_s == 4.0
    patience.answer(12.0, 160.0, WHOLE_S)
    assert patience.usual_s == 4.5
    patience.fail()
    patience.fail()  # in another fragment
    assert patience.usual_s == 4.5 * 15 / 16
    patience.spent_s = WHOLE_S
    patience.answer(19.0, 170.0, WHOLE_S)
    assert patience.usual_s == 4.5 * 15 / 16


def test_fragments_that_wait_at_the_same_time_count_once() -> None:
    patience = Patience()
    for second in range(1, 11):
        for _ in range(8):
            patience.debit(second, second - 1, second, WHOLE_S)
    assert patience.spent_s == 10


# ---- honest learners


def test_an_honest_learner_twenty_times_slower_is_waited_for_in_every_round() -> None:
    """A step every 2 s: the rounds have its pace, a version of each fragment every 8 s."""
    world = World(Learner("ann"), Learner("bob"), Learner("slow", step_s=20 * STEP_S, answers=lambda *_: 2.0)).play(400)
    assert not world.in_vain
    assert world.made(without="slow") == 0
    assert world.made() == pytest.approx(400 / 8 * FRAGMENTS, abs=5)


def test_a_learner_whose_offers_take_long_to_cross_is_waited_for_in_every_round() -> None:
    world = World(Learner("ann"), Learner("bob"), Learner("far", answers=lambda *_: 6.0)).play(400)
    assert not world.in_vain
    assert world.made(without="far") == 0


def test_a_learner_that_was_paused_once_is_in_every_version_afterwards() -> None:
    """It is frozen for a minute (SIGSTOP): the others wait 5 s for it, and it has three quarters of its patience left."""
    world = World(Learner("ann"), Learner("bob"), Learner("carl", silent=(30.0, 90.0))).play(300)
    assert world.made(since_s=29, without="carl") == pytest.approx(55 * 5, rel=0.1)
    assert world.made(since_s=91, without="carl") == 0
    assert world.roster.patience_of("carl").spent_s <= 5.0


def test_a_learner_whose_link_was_cut_once_is_in_every_version_afterwards() -> None:
    """It is heard all the time, and its offers do not come for a minute: it is given up after its 20 s, and is back at once."""

    def cut(world: World, fragment: int, now_s: float) -> float:
        return max(PROMPT_S, 90.0 - now_s) if now_s >= 30 else PROMPT_S

    world = World(Learner("ann"), Learner("bob"), Learner("carl", answers=cut)).play(300)
    assert world.made(since_s=29, without="carl") == pytest.approx(40 * 5, rel=0.1)
    assert world.made(since_s=92, without="carl") == 0
    assert world.roster.patience_of("carl").left_s(WHOLE_S) >= 10  # 210 s of answers later
