"""Decisions of a learner of several processes, in any order and with any delay of the facts that they are made of."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.made.learner_island import GENERATION, ISLAND_ACTS, PROCESSES, RUN, DecidedIsland, go_on
from tests.made.learner_world import FRAGMENTS, TOKENS, act
from tests.made.run_settings import WORLD, settings_of

from diloco.core.learner.decisions import BOUNDARIES_APART_MAX, Course
from diloco.errors import IslandError
from diloco.wire.control import MarkerAnswer, SnapshotMarker
from diloco.wire.process_messages import Decided, PartSaved


@given(st.lists(ISLAND_ACTS, max_size=80), st.sampled_from(["arrival", "overlap"]))
def test_all_processes_apply_the_same_in_the_same_order(schedule: list[Any], at: str) -> None:
    island = DecidedIsland(settings_of(WORLD, apply__at=at), PROCESSES)
    for name, *values in schedule:
        act(island, name, *values)
    go_on(island, 8 if at == "arrival" else 16)  # it may wait for a version for five boundaries, and hold another one back
    rewound = any(name == "rewind" for name, *_ in schedule)
    for process in island.processes:
        assert process.applied == island.applied
        assert process.course.chain == island.decisions.course.chain
        assert process.course.step == island.decisions.course.step
    for index, log in enumerate(island.logs):
        versions = [version for fragment, version in island.applied if fragment == index]
        assert versions[-1] == log.chain.version, "the newest version is applied in the end"
        if not rewound:
            assert versions == sorted(set(versions)), "none twice, and none after a newer one"
    island.check_accounts()


def overlapping_island() -> DecidedIsland:
    """An island that has answered a round with the value as of step 4, and has the version that the round made; tau is 3."""
    changes: dict[str, Any] = {"round.steps": 20, "round.overlap_steps": 3, "apply.at": "overlap"}
    island = DecidedIsland(settings_of(WORLD, **changes), PROCESSES)
    go_on(island, 4)
    island.announce(0)
    go_on(island, 1)
    assert island.learner.fragments[0].answer_step == 4
    island.merge(0, own=True)
    return island


def test_all_processes_apply_a_version_at_the_end_of_the_overlap() -> None:
    island = overlapping_island()
    steps = []
    for _ in range(6):
        before = len(island.applied)
        go_on(island, 1)
        steps += [island.learner.accounts.step] * (len(island.applied) - before)
    assert steps == [7]
    assert all(process.applied[-1] == (0, 1) for process in island.processes)


def test_an_island_waits_at_the_end_of_the_overlap_for_a_version_that_is_not_at_all_processes() -> None:
    island = overlapping_island()
    all_processes, island.decisions.needed = island.decisions.needed, [frozenset([*range(PROCESSES), 99])] * FRAGMENTS
    flying = []
    for _ in range(4):
        go_on(island, 1)
        flying.append(island.flying)
    assert flying == [True, True, False, False]
    assert (0, 1) not in island.applied
    island.decisions.needed = all_processes
    go_on(island, 1)
    assert (island.applied[-1], island.flying, island.learner.accounts.step) == ((0, 1), True, 7)


@given(st.lists(ISLAND_ACTS, max_size=80))
def test_all_save_the_arrays_of_the_offers_in_the_saved_accounts(schedule: list[Any]) -> None:
    island = DecidedIsland(settings_of(WORLD), PROCESSES)
    for name, *values in schedule:
        act(island, name, *values)
    island.want()
    go_on(island, 8)
    assert island.saved
    for process in island.processes:
        assert process.saved == island.saved


def test_no_state_is_saved_while_another_is_or_an_offer_is_half_made() -> None:
    island = DecidedIsland(settings_of(WORLD), PROCESSES)
    go_on(island, 2)
    decisions = island.decisions
    island.announce(0)
    island.look_ahead()
    island.end_step()
    island.announce(0)
    assert island.answers, "an offer is being quantised"
    island.want()
    island.look_ahead()
    assert not island.saves()
    island.end_step()
    island.encode()
    island.look_ahead()
    assert island.saves()
    island.announce(1)
    assert not island.answers, "none begins before the state is saved"
    decisions.carry_out()
    assert decisions.saves.under_way is not None
    island.wanted = "own"
    island.look_ahead()
    assert not island.saves()
    assert decisions.saves.saved(0, PartSaved(decisions.course.number - 1, bytes(32), 1)) is None


def test_a_part_may_be_saved_before_the_leader_is_at_that_boundary() -> None:
    island = DecidedIsland(settings_of(WORLD), PROCESSES)
    go_on(island, 2)
    decisions, saves = island.decisions, island.decisions.saves
    island.want()
    island.look_ahead()
    assert decisions.made is not None
    assert decisions.made.save is not None
    part = PartSaved(decisions.made.number, bytes(32), 1)
    assert saves.saved(1, part) is None
    name = decisions.made.save.name
    decisions.carry_out()
    assert saves.saved(2, part) is None
    assert saves.saved(0, part) is not None
    assert saves.whole == name


def test_a_leader_that_waits_knows_whether_all_are_where_it_is() -> None:
    island = DecidedIsland(settings_of(WORLD), PROCESSES)
    go_on(island, 2)
    followed = [island.decisions.is_followed]
    island.look_ahead()
    island.end_step()
    followed.append(island.decisions.is_followed)
    island.settle()
    assert [*followed, island.decisions.is_followed] == [True, False, True]


def test_a_marker_is_answered_at_a_boundary_with_its_versions_before_any_other_state() -> None:
    island = DecidedIsland(settings_of(WORLD), PROCESSES)
    go_on(island, 2)
    markers, decisions = island.learner.markers, island.decisions
    versions = [1] + [0] * (FRAGMENTS - 1)
    markers.hear(SnapshotMarker(4, versions), FRAGMENTS)
    island.look_ahead()
    assert not island.saves(), "a version that it names has not come"
    island.end_step()
    for _ in range(2):
        island.merge(0, own=False)  # the second one is held back
    island.settle()
    island.want()
    island.look_ahead()
    made = decisions.made
    assert made is not None
    assert [(write.fragment, write.version) for write in made.writes] == [(0, 1)]
    assert made.save is not None
    assert (made.save.purpose, made.save.marker) == ("whole", 4)
    decisions.carry_out()
    for process in range(PROCESSES):
        decisions.saves.saved(process, PartSaved(made.number, bytes(32), 1))
    markers.answer(MarkerAnswer("ann", 4, 2, versions, 1, bytes(32), [(1, bytes(32))] * 2))
    island.stage()
    go_on(island, 3)  # a single step is kept, so the version is staged upon the one before
    assert island.applied[-1] == (0, 2)


def test_an_island_that_is_behind_catches_up_before_it_steps() -> None:
    island = DecidedIsland(settings_of(WORLD), PROCESSES)
    go_on(island, 2)
    before = island.learner.accounts.step
    for _ in range(5):
        island.merge(0, own=False)
    flying = []
    for _ in range(8):
        go_on(island, 1)
        flying.append(island.flying)
    assert [version for index, version in island.applied if index == 0][-5:] == [1, 2, 3, 4, 5]
    # the single step that was in flight is kept, so each version is staged upon the one before, a boundary later
    assert flying == [False] * 4 + [True] * 4, "a step is taken once a single version waits"
    assert island.learner.accounts.step == before + 4  # the one that was in flight, and three


@given(st.lists(ISLAND_ACTS, max_size=40), st.lists(ISLAND_ACTS, max_size=20))
def test_a_step_that_was_taken_for_granted_and_is_not_taken_is_counted_nowhere(before: list[Any], after: list[Any]) -> None:
    island = DecidedIsland(settings_of(WORLD), PROCESSES)
    for name, *values in before:
        act(island, name, *values)
    go_on(island, 1)
    island.look_ahead()
    taken, island.flying = island.taken, False  # the loop was left before it
    island.end_step()
    island.flying = False
    island.learner.leaving = True
    for name, *values in after:
        act(island, name, *values)
    go_on(island, 2)
    assert island.learner.accounts.step == island.taken == taken
    assert island.learner.accounts.tokens == TOKENS * taken
    island.check_accounts()


@given(st.lists(ISLAND_ACTS, max_size=60))
def test_steps_of_all_processes_are_the_steps_that_are_booked(schedule: list[Any]) -> None:
    island = DecidedIsland(settings_of(WORLD), PROCESSES)
    for name, *values in schedule:
        act(island, name, *values)
    go_on(island, 3)
    flying = int(island.flying)
    assert island.learner.accounts.step == island.taken == island.decisions.course.step - flying
    assert island.learner.accounts.tokens == TOKENS * island.taken


def decided(island: DecidedIsland) -> Decided:
    island.look_ahead()
    made = island.decisions.made
    assert made is not None
    return made


def test_a_version_is_not_decided_before_its_rows_are_everywhere() -> None:
    island = DecidedIsland(settings_of(WORLD), 2)
    island.deliver(0)
    island.hear(0)
    first = decided(island)
    assert first.writes == []  # of process 1 nothing is known
    assert first.wait, "no step is taken on values that are not the log's"
    island.end_step()
    island.settle()
    assert {write.fragment for write in decided(island).writes} == {0, 1}


def test_a_process_that_took_another_course_is_named_with_step_and_hashes() -> None:
    island = DecidedIsland(settings_of(WORLD), 2)
    made = decided(island)
    island.end_step()
    other = Course(RUN, GENERATION).take(msgspec.structs.replace(made, batch=(3, 5)))
    own = island.decisions.course.chain.hex()[:16]
    with pytest.raises(IslandError, match=rf"process 1, step 0: .* hash {other.chain.hex()[:16]}, the leader's have {own}"):
        island.decisions.passed(1, other)


def test_a_process_refuses_a_decision_that_is_not_the_next_one() -> None:
    island = DecidedIsland(settings_of(WORLD), 2)
    first = decided(island)
    course = Course(RUN, GENERATION)
    course.take(first)
    with pytest.raises(IslandError, match=r"decision 0 of generation 7, step 0.* expected decision 1"):
        course.take(first)
    with pytest.raises(IslandError, match="generation 8"):
        Course(RUN, GENERATION).take(msgspec.structs.replace(first, generation=8))


def test_a_process_that_does_not_pass_boundaries_is_named() -> None:
    island = DecidedIsland(settings_of(WORLD), 2)
    island.settle()
    for _ in range(BOUNDARIES_APART_MAX):
        decided(island)
        island.decisions.carry_out()
    decided(island)
    with pytest.raises(IslandError, match=r"process 1, step .* boundaries behind"):
        island.decisions.carry_out()
