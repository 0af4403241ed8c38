"""When rounds are due: each fragment in a slot of its own of a cycle of H steps, by the steps of one learner."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tests.made.heartbeats import learner_heartbeat
from tests.made.log_entries import hash_of
from tests.made.run_settings import ROUNDS, settings_of

from diloco.core.learner.slots import choose, first_slot
from diloco.core.log.chain import Chain
from diloco.core.syncer.roster import Roster
from diloco.core.syncer.round import Round

FOUR: dict[str, Any] = {"fragments.count": 4, "round.steps": 8}


def rounds_of(*, version: int, **changes: Any) -> list[Round]:
    """The rounds of one owner, of all fragments, whose logs are at ``version``."""
    settings = settings_of(ROUNDS, **FOUR | changes)
    roster, count = Roster(settings), settings.fragments.count
    chains = [Chain(fragment, version, 0, bytes(32), 9, hash_of(version)) for fragment in range(count)]
    return [Round(roster, chain, count) for chain in chains]


def hear(rounds: list[Round], learner: str, step: int, now_s: float, *, unmerged: int | None = None, **changes: Any) -> None:
    versions = [round_.chain.version for round_ in rounds]
    steps = [step if unmerged is None else unmerged] * len(rounds)
    rounds[0].roster.hear(learner_heartbeat(learner, step, *versions, steps=steps, **changes), now_s)


def due(rounds: list[Round], now_s: float, steps: int | None = None) -> list[int]:
    """Open the rounds that are due and close them at once: those fragments."""
    found = [n for n, round_ in enumerate(rounds) if round_.due(now_s, steps or round_.settings.round.steps)]
    for n in found:
        rounds[n].open(now_s)
        rounds[n].opened_at_s = None
    return found


def play(rounds: list[Round], learner: str, steps: range, *, step_s: float = 1.0, h: int | None = None) -> dict[int, list[int]]:
    """Let a learner step; the fragments that are due, by step."""
    found: dict[int, list[int]] = {}
    for step in steps:
        hear(rounds, learner, step, step * step_s, step_s=step_s)
        if fragments := due(rounds, step * step_s, h):
            found[step] = fragments
    return found


def test_each_fragment_has_a_slot_of_its_own_from_the_first_cycle_on() -> None:
    assert [first_slot(8, fragment, 4) for fragment in range(4)] == [8, 2, 4, 6]
    assert play(rounds_of(version=0), "ann", range(18)) == {2: [1], 4: [2], 6: [3], 8: [0], 10: [1], 12: [2], 14: [3], 16: [0]}


def test_a_restarted_owner_goes_on_in_the_same_slots() -> None:
    """An owner that has heard nothing before: all fragments are overdue, and none is made up for."""
    rounds = rounds_of(version=5)
    found = play(rounds, "ann", range(103, 113))  # fragment 3 is a step late
    assert found == {103: [3], 104: [0], 106: [1], 108: [2], 110: [3], 112: [0]}


def test_a_fragment_is_not_due_twice_within_half_a_cycle() -> None:
    rounds = rounds_of(version=5)
    hear(rounds, "ann", 104, 0.0, unmerged=3)  # the owner before opened a round three steps ago
    assert due(rounds, 0.0) == []
    rounds = rounds_of(version=5)
    assert play(rounds, "ann", range(104, 107)) == {104: [0], 106: [1]}
    assert play(rounds, "ann", range(107, 109)) == {108: [2]}
    rounds[3].open(108.5)  # since a learner leaves
    rounds[3].opened_at_s = None
    assert play(rounds, "ann", range(109, 120)) == {112: [0], 114: [1], 116: [2], 118: [3]}  # and not at 110


def test_a_slot_that_was_missed_is_missed() -> None:
    """Fragment 0 is busy at 104 and 105, and its next round comes with the next cycle; a step late is in time."""
    rounds = rounds_of(version=5)
    play(rounds, "ann", range(90, 104))
    rounds[0].open(103.5)
    assert play(rounds, "ann", range(104, 106)) == {}
    rounds[0].opened_at_s = None
    assert play(rounds, "ann", range(106, 114)) == {106: [1], 108: [2], 110: [3], 112: [0]}
    rounds[1].open(113.5)
    hear(rounds, "ann", 114, 114.0)
    assert due(rounds, 114.0) == []
    rounds[1].opened_at_s, rounds[1]._opened_at_step = None, 0.0  # it was opened long before, and is over now
    assert due(rounds, 115.0) == [1]


@pytest.mark.parametrize(("h", "count"), [(1, 1), (1, 3), (2, 5), (5, 3), (24, 12), (24, 24), (7, 24), (100, 4)])
def test_a_cycle_has_one_round_of_each_fragment_and_they_are_spread_evenly(h: int, count: int) -> None:
    rounds = rounds_of(version=1, **{"fragments.count": count, "round.steps": h})
    play(rounds, "ann", range(9 * h, 10 * h), step_s=0.5)
    found = play(rounds, "ann", range(10 * h, 20 * h), step_s=0.5)
    assert Counter(fragment for fragments in found.values() for fragment in fragments) == dict.fromkeys(range(count), 10)
    assert max(map(len, found.values())) <= -(-count // h)


def test_another_h_moves_the_slots_of_all_fragments_together() -> None:
    rounds = rounds_of(version=1)
    play(rounds, "ann", range(80, 96))
    found = play(rounds, "ann", range(96, 132), h=12)  # slots 0, 3, 6, 9 of twelve
    assert found == {96: [0], 99: [1], 102: [2], 105: [3], 108: [0], 111: [1], 114: [2], 117: [3], 120: [0]} | {
        123: [1],
        126: [2],
        129: [3],
    }


@pytest.mark.parametrize(
    ("step_times", "quorum", "expected"),
    [
        ({"ann": 1.0, "bob": 1.0}, 1, "ann"),
        ({"ann": 1.4, "bob": 1.0}, 1, "ann"),  # about as fast
        ({"ann": 1.6, "bob": 1.0}, 1, "bob"),
        ({"ann": 20.0, "bob": 1.0, "cat": 1.0}, 1, "bob"),
        ({"ann": 1.0, "bob": 20.0, "cat": 20.0}, 1, "ann"),
        ({"ann": 1.0, "bob": 20.0, "cat": 20.0}, 2, "bob"),  # ann is far faster than the second: rounds need two learners
        ({"ann": 14.0, "bob": 20.0, "cat": 20.0}, 2, "ann"),
        ({"ann": 50.0, "bob": 20.0, "cat": 1.0}, 2, "bob"),
        ({"ann": 50.0, "bob": 20.0, "cat": 1.0}, "all", "ann"),
    ],
)
def test_the_reference_is_the_first_by_name_of_those_as_fast_as_the_quorum(
    step_times: dict[str, float], quorum: object, expected: str
) -> None:
    rounds = rounds_of(version=1, **{"round.quorum": quorum})
    for learner, step_s in step_times.items():
        hear(rounds, learner, 0, 0.0, step_s=step_s)
    reference = rounds[0].roster.clock(0.0).reference
    assert reference is not None
    assert reference.heartbeat.learner == expected


def test_the_reference_steps_on_between_two_heartbeats_but_not_for_ever() -> None:
    rounds = rounds_of(version=1, **{"liveness.heartbeat_s": 0.5})
    roster = rounds[0].roster
    for step in range(40, 44):
        hear(rounds, "ann", step, step * 1.0)
    assert roster.clock(43.25).position == 43.25
    assert roster.clock(46.0).position == 44.5  # a step and a heartbeat after it was heard
    hear(rounds, "ann", 44, 46.5)
    assert roster.clock(46.5).position == 44.5  # it never goes back
    hear(rounds, "ann", 44, 47.0, state="waiting")
    assert roster.clock(49.0).position == 44.5


def test_a_reference_that_stands_still_is_replaced_after_a_few_steps() -> None:
    rounds = rounds_of(version=1, **{"liveness.dead_s": 60})
    for step in range(40, 55):
        hear(rounds, "ann", min(step, 42), step * 1.0)
        hear(rounds, "bob", step, step * 1.0)
        reference = rounds[0].roster.clock(step * 1.0).reference
        assert reference is not None
        # 42 was its last step; after 9 steps it counts as 1.8 times slower than bob
        assert reference.heartbeat.learner == ("ann" if step <= 51 else "bob")


@pytest.mark.parametrize(
    ("times_s", "quorum", "known", "expected"),
    [
        ([1.0, 1.0], 1, 1, 1),  # a newcomer whose name comes first is as fast
        ([1.0, 1.7], 1, 1, 1),  # it became slower than any that would be chosen
        ([1.0, 1.9], 1, 1, 0),
        ([1.0, 1.0, 0.57], 2, 2, 2),  # or faster
        ([1.0, 1.0, 0.54], 2, 2, 0),
        ([1.0, 1.7], 1, None, 0),
    ],
)
def test_the_reference_is_kept_within_wider_bounds(times_s: list[float], quorum: int, known: int | None, expected: int) -> None:
    assert choose(times_s, quorum, known) == expected


@pytest.mark.parametrize(
    "lie",
    [
        {"state": "closing"},  # it takes no step any more
        {"state": "leaving"},
        {"step_s": 1e12},  # the slowest of all by its own word, of which no step is heard
    ],
)
def test_a_learner_that_takes_no_steps_is_no_reference(lie: dict[str, Any]) -> None:
    """With quorum ``all`` the slowest learner is the reference: one whose step stands still would stop all slots."""
    rounds = rounds_of(version=1, **{"round.quorum": "all"})
    for step in range(40, 70):
        hear(rounds, "a-liar", 5, step * 1.0, **lie)
        hear(rounds, "bob", step, step * 1.0)
        if step >= 42:
            reference = rounds[0].roster.clock(step * 1.0).reference
            assert reference is not None
            assert reference.heartbeat.learner == "bob"


def test_learners_that_have_not_ended_a_step_do_not_make_another_one_the_reference() -> None:
    """With quorum ``all`` the slowest learner counts, and the time of its steps is not known yet."""
    rounds = rounds_of(version=1, **{"round.quorum": "all"})
    hear(rounds, "ann", 1, 1.0, step_s=1.0)
    hear(rounds, "bob", 0, 1.0, step_s=0.0)
    reference = rounds[0].roster.clock(1.0).reference
    assert reference is not None
    assert reference.heartbeat.learner == "ann"


def test_heartbeats_that_were_held_up_do_not_make_a_learner_fast() -> None:
    """A link to bob is cut for 60 s; then his heartbeats come at once. He goes on with steps of one second, as ann does."""
    rounds = rounds_of(version=1)
    for step in range(41):
        hear(rounds, "ann", step, float(step), busy_s=float(step))
        hear(rounds, "bob", step, float(step), busy_s=float(step))
    for step in range(41, 101):
        hear(rounds, "bob", step, 100.0 + step / 1e6, busy_s=float(step))
    hear(rounds, "ann", 100, 100.5, busy_s=100.0)
    clock = rounds[0].roster.clock(101.0)
    assert clock.reference is not None
    assert clock.cycle_s(8) == pytest.approx(8.0, rel=0.5)
    assert clock.position <= 103


def test_a_few_long_steps_make_no_other_learner_the_reference() -> None:
    """Each third step of ann takes four seconds, the others one: her mean goes up and down to more than 1.5 times bob's."""
    rounds = rounds_of(version=1)
    ends_s = {6 * three + more for three in range(20) for more in (1, 2, 6)}  # of ann's steps
    references, step = set(), 0
    for now in range(121):
        step += now in ends_s
        hear(rounds, "ann", step, float(now))
        hear(rounds, "bob", now, float(now))
        reference = rounds[0].roster.clock(float(now)).reference
        assert reference is not None
        references.add(reference.heartbeat.learner)
    assert references == {"ann"}


def test_no_learner_no_slot() -> None:
    rounds = rounds_of(version=1)
    assert due(rounds, 0.0) == []
    assert rounds[0].next_look_s(0.0, 8) == float("inf")
    hear(rounds, "ann", 43, 1.0, step_s=0.5)
    assert rounds[2].next_look_s(1.0, 8) == pytest.approx(0.5)  # from step 43 to 44
