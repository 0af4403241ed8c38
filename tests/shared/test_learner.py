"""A learner's state machine: its table of phases, its accounts under random schedules, and decisions apart from their doing."""

from __future__ import annotations

import copy
import pickle
from collections import deque
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import product
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.made.learner_world import FRAGMENTS, SCHEDULES, SIZE, TOKENS, LearnerWorld, act
from tests.made.run_settings import WORLD, settings_of

from diloco.core.learner.accounts import StepDone
from diloco.core.learner.boundary import Decision, apply, decide, next_decision
from diloco.core.learner.fragment_state import TRANSITIONS, Application, OfferEvent, Phase
from diloco.core.learner.learner import Learner
from diloco.core.run.changes import Effective
from diloco.core.tensors import ranges
from diloco.errors import MessageError, NonFiniteError
from diloco.settings.run import RunSettings
from diloco.wire.control import Announcement, MarkerAnswer, SnapshotMarker


def plain(value: Any) -> Any:
    """A value that can be compared: all that a learner's state is made of."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Enum) or callable(value):
        return repr(value) if isinstance(value, Enum) else "callable"
    if isinstance(value, msgspec.Struct):
        return msgspec.to_builtins(value)
    if isinstance(value, dict):
        return {str(key): plain(its) for key, its in value.items()}
    if isinstance(value, list | tuple | deque):
        return [plain(its) for its in value]
    if isinstance(value, RunSettings):
        return value.digest()
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    return {name: plain(its) for name, its in vars(value).items()} if hasattr(value, "__dict__") else value


def test_every_pair_of_a_phase_and_an_event_is_in_the_table() -> None:
    assert TRANSITIONS.keys() == set(product(Phase, OfferEvent))


@pytest.mark.parametrize(("phase", "event"), list(product(Phase, OfferEvent)), ids=lambda value: value.name)
def test_what_cannot_happen_is_refused_and_changes_nothing(phase: Phase, event: OfferEvent) -> None:
    state, after = LearnerWorld(settings_of(WORLD)).learner.fragments[0], TRANSITIONS[phase, event]
    state.phase = phase
    if after is None:
        with pytest.raises(ValueError, match=f"fragment 0: {event.value} while {phase.value}"):
            state.happen(event)
        assert state.phase is phase
    else:
        state.happen(event)
        assert state.phase is after


def test_every_phase_is_reached_from_joining() -> None:
    reached, waiting = set[Phase](), [Phase.JOINING]
    while waiting:
        phase = waiting.pop()
        if phase not in reached:
            reached.add(phase)
            waiting += [after for (before, _), after in TRANSITIONS.items() if before is phase and after is not None]
    assert reached == set(Phase)


def test_state_is_offered_as_it_is_and_a_version_replaces_it_and_its_counts_are_those_of_a_parameter() -> None:
    world = LearnerWorld(settings_of(WORLD))
    world.learner = learner = Learner("ann", "learner", "", 2, world.run)
    for log, state in zip(world.logs, (False, True), strict=True):
        learner.seat(log.head(None, arrays=True), state=state)
    learner.take_up_accounts()
    world.boundary()
    world.step(4)
    for index in range(FRAGMENTS):
        world.announce(index)
    world.boundary()
    assert [answer.bits for answer in world.answers] == [8, 32]
    world.encode()
    world.encode()
    of_state = learner.fragments[1].values
    assert of_state is not None
    [offered] = of_state.held.values()
    assert offered.body.view(np.float32).tolist() == [1.0] * SIZE  # four steps of a quarter, from a base of 0
    world.store()
    world.step()
    for index in range(FRAGMENTS):
        world.merge(index, own=True)
    world.boundary()
    assert world.values[0].tolist() == pytest.approx([1.25] * SIZE, abs=0.01)  # version 1 is 1.0, and the fifth step is kept
    assert world.values[1].tolist() == [1.0] * SIZE
    world.check_accounts()
    assert [(state.delta.steps, state.delta.tokens, state.delta.lost_tokens) for state in learner.fragments] == [(1, 10, 0)] * 2


@given(SCHEDULES, st.booleans())
def test_every_token_is_merged_or_lost_or_held(schedule: list[Any], overlap: bool) -> None:
    world = LearnerWorld(settings_of(WORLD, carry__overlap=overlap))
    for name, *values in schedule:
        act(world, name, *values)
        if name == "boundary":
            world.check_accounts()
            for state in world.learner.fragments:
                pending = [offer.stated.data for offer in state.delta.pending]
                assert all(data == ranges.normal(data) for data in pending)


@given(SCHEDULES, st.booleans())
def test_a_learner_of_logs_that_are_closed_holds_nothing_beside_their_values(schedule: list[Any], overlap: bool) -> None:
    world = LearnerWorld(settings_of(WORLD, carry__overlap=overlap))
    for name, *values in schedule:
        act(world, name, *values)
    for index in range(FRAGMENTS):
        world.close(index)
    while not world.boundary().finished:
        world.encode()
        world.store()
    world.check_accounts()
    for state, values, log in zip(world.learner.fragments, world.values, world.logs, strict=True):
        assert (state.delta.steps, state.delta.tokens) == (0, 0)
        assert values.tolist() == [log.chain.version] * SIZE


@given(SCHEDULES, st.booleans())
def test_deciding_changes_nothing_and_a_decision_can_be_carried_out_elsewhere(schedule: list[Any], overlap: bool) -> None:
    world = LearnerWorld(settings_of(WORLD, carry__overlap=overlap))
    for name, *values in schedule:
        act(world, name, *values)
        elsewhere = copy.deepcopy(world.learner)
        decision = decide(world.learner, world.now_s)
        assert decide(world.learner, world.now_s) == decision
        assert plain(world.learner) == plain(elsewhere)
        carried: Decision = pickle.loads(pickle.dumps(decision))
        assert carried == decision
        here = copy.deepcopy(world.learner)
        assert plain(apply(elsewhere, carried)) == plain(apply(here, decision))
        assert plain(elsewhere) == plain(here)
        moment = here.accounts.moment(here.budget)
        assert decision.moment == moment
        assert decision.finished == all(s.newest.chain.closed and not s.pending for s in here.fragments)


@given(SCHEDULES, st.booleans())
def test_without_arrays_it_counts_the_same(schedule: list[Any], overlap: bool) -> None:
    worlds = [
        LearnerWorld(settings_of(WORLD, carry__overlap=overlap)),
        LearnerWorld(settings_of(WORLD, carry__overlap=overlap), arrays=False),
    ]
    for name, *values in schedule:
        for world in worlds:
            act(world, name, *values)
    counts = []
    for world in worlds:
        world.learner.settle()
        counts.append([plain(state.delta) for state in world.learner.fragments] + [plain(world.learner.accounts)])
    assert counts[0] == counts[1]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.booleans()), max_size=100))
def test_steps_booked_together_count_as_steps_one_by_one(booked: list[tuple[int, int, bool]]) -> None:
    together, single = LearnerWorld(settings_of(WORLD)).learner, LearnerWorld(settings_of(WORLD)).learner
    batches = [0] * 4
    for share, steps, settles in booked:
        together.book(StepDone(TOKENS, share, batches[share], None, 0.0, 0.0, steps))
        for batch in range(batches[share], batches[share] + steps):
            single.book(StepDone(TOKENS, share, batch, None, 0.0, 0.0))
            single.settle()
        batches[share] += steps
        if settles:
            together.work.settle(together.fragments[share % FRAGMENTS])
    together.settle()
    assert [plain(state.delta) for state in together.fragments] == [plain(state.delta) for state in single.fragments]
    assert plain(together.accounts) == plain(single.accounts)


@given(SCHEDULES, st.booleans(), st.data())
def test_all_tokens_that_steps_have_counted_are_merged_held_or_lost(
    schedule: list[Any], overlap: bool, data: st.DataObject
) -> None:
    world = LearnerWorld(settings_of(WORLD, carry__overlap=overlap))
    counted = 0
    for name, *values in schedule:
        if name == "kill":  # what was not saved is counted by no process that goes on
            continue
        world.tokens, before = data.draw(st.integers(1, 2 * TOKENS), label="tokens of a step"), world.learner.work.steps
        act(world, name, *values)
        counted += world.tokens * (world.learner.work.steps - before)
    world.learner.settle()
    accounts = world.learner.accounts
    assert accounts.tokens - accounts.earlier_tokens == counted
    for log, state in zip(world.logs, world.learner.fragments, strict=True):
        cursor = log.chain.cursors.get("ann")
        pending = [offer for offer in state.delta.pending if not offer.dropped]
        assert all(0 < offer.stated.steps <= offer.stated.tokens <= 2 * TOKENS * offer.stated.steps for offer in pending)
        if not state.pending:  # else the log has merged what the learner does not know yet
            merged = cursor.tokens if cursor else 0
            assert merged + state.delta.tokens + state.delta.lost_tokens == accounts.tokens


@given(st.sampled_from(["decoupled", "diloco", "data-parallel"]), SCHEDULES)
def test_until_it_has_to_decide_a_boundary_decides_nothing(preset: str, schedule: list[Any]) -> None:
    overrides = {"round__steps": 4} if preset != "data-parallel" else {"round__steps": 1}
    world = LearnerWorld(settings_of(WORLD, preset, tokens=3000, **overrides))
    for name, *values in schedule:
        act(world, name, *values)
    first, steps = world.boundary(), next_decision(world.learner, TOKENS).steps
    if first.stop or first.wait:
        return
    for _ in range((steps or 50) - 1):
        world.step()
        decision = decide(world.learner, world.now_s)
        assert (decision.applies, decision.stop, decision.wait, decision.activity) == ((), False, False, "stepping")
        apply(world.learner, decision)


def joined(**overrides: Any) -> LearnerWorld:
    world = LearnerWorld(settings_of(WORLD, **overrides))
    world.boundary()
    return world


def test_a_decision_is_not_carried_out_twice() -> None:
    world = joined()
    world.merge(0, own=False)
    decision = decide(world.learner, 1.0)
    assert decision.applies == (Application(0, 1, "version"),)
    apply(world.learner, decision)
    with pytest.raises(ValueError, match="the next one is None"):
        apply(world.learner, decision)


def test_versions_wait_while_an_offer_is_quantised() -> None:
    world = joined()
    world.step(4)
    world.announce(0)
    world.boundary()
    assert world.learner.encoding
    world.merge(0, own=False)
    world.merge(1, own=False)
    assert world.boundary().applies == (Application(1, 1, "version"),)
    world.encode()
    assert world.boundary().applies == (Application(0, 1, "version"),)
    assert world.learner.fragments[0].phase is Phase.SENDING


def test_a_value_that_is_not_finite_is_replaced_by_the_newest_version() -> None:
    world = joined()
    world.step(4)
    world.values[0][1] = np.nan
    world.announce(0)
    world.boundary()
    with pytest.raises(NonFiniteError):
        world.encode()
    world.learner.not_finite(0)
    world.merge(0, own=False)
    world.merge(0, own=False)
    assert not world.learner.may_dump
    assert world.boundary().applies == (Application(0, 2, "reset"),)
    assert world.values[0].tolist() == [2.0] * SIZE
    assert world.learner.fragments[0].phase is Phase.READY
    world.check_accounts()


def test_versions_beyond_a_mark_wait_for_the_copy() -> None:
    world = joined()
    learner = world.learner
    assert learner.markers.hear(SnapshotMarker(1, [1, 0]), FRAGMENTS) is None
    for _ in range(2):
        world.merge(0, own=False)
    world.merge(1, own=False)
    decision = world.boundary()
    assert (decision.applies, decision.save) == ((Application(0, 1, "version"),), 1)
    marker = learner.markers.reached(learner.fragments)
    assert marker is not None
    learner.markers.copied(marker)
    assert world.boundary().applies == (Application(0, 2, "version"), Application(1, 1, "version"))
    answer = MarkerAnswer("ann", 1, 0, [1, 0], 1, bytes(32))
    learner.markers.answer(answer)
    assert world.boundary().save is None
    assert learner.markers.hear(SnapshotMarker(1, [1, 0]), FRAGMENTS) == answer
    with pytest.raises(MessageError, match="marker 2 of 1 fragments"):
        learner.markers.hear(SnapshotMarker(2, [1]), FRAGMENTS)


def test_a_round_is_answered_again_where_the_answer_is_gone() -> None:
    world = joined()
    world.step(4)
    world.announce(0)
    world.boundary()
    world.encode()
    world.store()
    assert not world.learner.fragments[0].wants_answer
    world.learner.reopen(0)
    world.boundary()
    assert [answer.version for answer in world.answers] == [1]


def near_the_end(budget: int) -> LearnerWorld:
    """A learner of whose steps each has one token, and of whose fragment 0 the log has one offer, zoe's, of 5 tokens."""
    world = LearnerWorld(settings_of(WORLD, tokens=budget), tokens=1)
    world.boundary()
    world.merge(0, own=False)
    world.boundary()
    world.step(4)
    world.boundary()
    return world


def test_the_last_round_is_answered_by_a_learner_that_has_stopped() -> None:
    world = near_the_end(25)  # 5 tokens are merged, and four times as many may be on their way
    world.announce(0, closing=True)
    assert world.answers == []  # a step may be under way
    assert world.learner.draining
    assert world.boundary().stop
    assert [answer.version for answer in world.answers] == [2]


def test_the_last_round_is_answered_again_by_a_learner_that_has_gone_on_since() -> None:
    world = near_the_end(26)  # more than the log makes possible: no announcement ends the run
    world.step(22)
    assert world.boundary().stop  # by its own 26 tokens
    world.announce(0, closing=True)
    world.boundary()
    world.encode()
    world.store()
    assert not world.learner.draining
    assert world.stored[0][-1].stated.steps == 26
    # a version that states fewer tokens than were announced, or a change of the budget, has it take a step more
    world.learner.change(Effective(settings_of(WORLD, tokens=60), 1))
    assert not world.boundary().stop
    world.step()
    world.learner.change(Effective(settings_of(WORLD, tokens=26), 2))
    assert world.boundary().stop
    world.boundary()  # the first one finds out that there is more, and this one reads it
    world.encode()
    world.store()
    assert world.stored[0][-1].stated.steps == 27


def test_no_announcement_ends_a_run_that_its_log_does_not_show_near_its_end() -> None:
    world = near_the_end(26)
    world.learner.hear(Announcement(0, 2, 0, "syncer-1", 1.0, True, 2**62, world.run.round.steps, []), 1.0)
    decision = world.boundary()
    assert not world.learner.draining
    assert not decision.stop
    assert [answer.version for answer in world.answers] == [2]  # as a round like any other: it keeps no learner from an answer
    assert world.learner.accounts.processed() == 5 + 2 * 5  # zoe may hold two offers more


def test_a_learner_that_has_stopped_at_the_budget_is_not_sent_on_by_an_announcement_that_lags_behind_its_steps() -> None:
    world = near_the_end(40)  # 4 own tokens
    world.learner.hear(Announcement(0, 2, 0, "syncer-1", 1.0, False, 14, world.run.round.steps, []), 1.0)  # 10 of others
    world.step(26)
    assert world.boundary().stop  # 30 own ones and 10
    # the heartbeats that this one sums up have but 28 of the own tokens; 11 of others would be too few
    world.learner.hear(Announcement(0, 2, 0, "syncer-1", 1.0, False, 15, world.run.round.steps, []), 2.0)
    assert world.boundary().stop
    assert world.learner.accounts.processed() == 40


def test_a_learner_stops_at_the_version_that_states_the_budget_before_any_announcement_does() -> None:
    world = joined(tokens=15)
    world.merge(0, own=False)  # zoe's 5 tokens
    world.merge(0, own=False)
    assert not world.boundary().stop
    world.merge(0, own=False)
    assert world.boundary().stop


def test_an_announcement_that_does_not_fit_changes_nothing() -> None:
    world = joined()
    before = plain(world.learner)
    for heard in (
        Announcement(FRAGMENTS, 1, 0, "syncer-0", 1.0, False, 0, 4, []),
        Announcement(0, 1, 0, "syncer-0", 1.0, False, 0, 4, [("", 32)]),
    ):
        with pytest.raises(MessageError):
            world.learner.hear(heard, 1.0)
    assert plain(world.learner) == before


@pytest.mark.parametrize(("announced", "expected"), [(3, 3), (4, 4), (40, 4), (2**62, 4)])
def test_a_round_is_heard_from_an_owner_that_knows_of_another_interval(announced: int, expected: int) -> None:
    world = joined()
    assert world.run.round.steps == 4
    world.learner.hear(Announcement(0, 1, 0, "syncer-0", 1.0, False, 0, announced, []), 1.0)
    assert world.learner.fragments[0].open_version == 1
    assert world.learner.fragments[0].steps_between == expected  # boundaries expect no round sooner than round.steps


def test_a_change_of_the_budget_counts_from_the_next_boundary() -> None:
    world = joined()
    world.step(4)
    world.learner.change(Effective(settings_of(WORLD, tokens=4 * TOKENS), 1))
    assert world.learner.budget == 10**9
    decision = world.boundary()
    assert (decision.changes, decision.budget, decision.stop) == (1, 4 * TOKENS, True)
    assert world.learner.budget == 4 * TOKENS


@given(SCHEDULES, SCHEDULES)
def test_a_learner_goes_on_from_what_it_dumped(before: list[Any], after: list[Any]) -> None:
    world = LearnerWorld(settings_of(WORLD))
    for name, *values in before:
        act(world, name, *values)
    while world.answers:
        world.encode()
    world.boundary()
    plain_state, arrays = world.learner.dump([(3, world.taken)])
    values, learner = [its.copy() for its in world.values], world.learner
    world.kill()
    world.learner.restore(msgspec.json.decode(msgspec.json.encode(plain_state)), arrays)
    world.values = values
    restored = world.learner
    assert restored.activity == "recovering", "what it has restored counts from now on"
    assert restored.accounts.tokens == learner.accounts.tokens
    for name, *acted in after:
        act(world, name, *acted)
        if name == "boundary" and not any(act_[0] == "kill" for act_ in after):
            world.check_accounts()
