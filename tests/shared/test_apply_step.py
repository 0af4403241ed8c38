"""``apply.at = overlap``: a version is applied tau own steps after the answer, waited for if it is late, and never for ever."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.made.learner_world import FRAGMENTS, SCHEDULES, LearnerWorld, act
from tests.made.run_settings import WORLD, settings_of

from diloco.core.learner.boundary import Decision, apply, decide, next_decision
from diloco.core.learner.fragment_state import Application
from diloco.core.learner.learner import Learner
from diloco.errors import SettingsError
from diloco.settings.presets import run_settings
from diloco.wire.control import Announcement, SnapshotMarker

DEAD_S = 5  # liveness.dead_s; each boundary of the world is a second after the one before
VERSION = (Application(0, 1, "version"),)


def overlapping(tau: float, **changes: Any) -> LearnerWorld:
    """A learner that has taken four steps; H is 20."""
    overlap: dict[str, Any] = {"apply.at": "overlap", "round.overlap_steps": tau, "round.steps": 20}
    world = LearnerWorld(settings_of(WORLD, **(overlap | changes)))
    world.boundary()
    step(world, 4)
    return world


def step(world: LearnerWorld, steps: int = 1) -> Decision:
    """Take steps, each with its boundary; return the last one's decision."""
    for _ in range(steps):
        world.step()
        decision = world.boundary()
    return decision


def answered(world: LearnerWorld, index: int = 0) -> None:
    """Have a round announced and answered with the value as of the boundary that the learner is at."""
    world.announce(index)
    world.boundary()
    send(world)


def send(world: LearnerWorld) -> None:
    world.encode()
    world.store()


def take_over(world: LearnerWorld) -> None:
    """Have a new owner announce the open round."""
    world.learner.hear(Announcement(0, 1, 1, "syncer-1", 1.0, False, 0, world.run.round.steps, []), world.now_s)


def steps_of_applies(world: LearnerWorld, steps: int) -> list[int]:
    """Take steps; return the own steps after which versions were applied."""
    return [decision.step for decision in (step(world) for _ in range(steps)) if decision.applies]


@pytest.mark.parametrize(("tau", "expected"), [(1, 5), (5, 9), (10, 14), (2.5, 7)])
def test_a_version_is_applied_tau_steps_after_the_answer_however_early_it_came(tau: float, expected: int) -> None:
    world = overlapping(tau)
    answered(world)  # at step 4
    world.merge(0, own=True)
    assert steps_of_applies(world, 12) == [expected]
    world.check_accounts()
    assert world.learner.fragments[0].delta.steps == 12, "all since the answer stay for the next one (carry.overlap)"


@pytest.mark.parametrize("tau", [1, 5, 10])
def test_a_round_answered_in_mid_step_counts_from_the_value_that_was_offered(tau: int) -> None:
    world = overlapping(tau)
    step(world, 5)  # at 9 the first round of fragment 1 is expected, whose slot is 10 of 20, so the fragment is kept readable
    world.step()
    world.announce(1)  # answered with the value as of step 9
    world.encode()
    world.store()
    world.merge(1, own=True)
    first = world.boundary()
    assert first.step == 10
    assert [first.step] * bool(first.applies) + steps_of_applies(world, 12) == [9 + tau]


def test_a_round_that_a_learner_could_not_answer_counts_from_its_next_boundary() -> None:
    world = overlapping(3)
    world.step()
    world.announce(0)
    world.merge(0, own=False)  # the others were quick
    first = world.boundary()
    assert (first.step, first.applies) == (5, ())
    assert steps_of_applies(world, 6) == [8]


def test_versions_of_rounds_that_were_not_heard_are_applied_on_arrival() -> None:
    world = overlapping(3)
    world.merge(0, own=False)
    assert world.boundary().applies == VERSION


def test_on_arrival_a_version_waits_for_no_step() -> None:
    world = overlapping(3, **{"apply.at": "arrival"})
    answered(world)
    world.merge(0, own=True)
    assert steps_of_applies(world, 6) == [5]
    answered(world)
    assert not any(step(world).wait for _ in range(12)), "nor does a step for a version"


def test_a_late_version_is_waited_for_and_applied_when_it_comes() -> None:
    world = overlapping(2)
    answered(world)
    assert not step(world).wait
    late = step(world)
    assert (late.step, late.wait, late.activity) == (6, True, "waiting")
    assert world.boundary().wait
    world.merge(0, own=True)
    found = world.boundary()
    assert (found.step, found.applies, found.wait) == (6, VERSION, False)
    assert world.learner.missing_since_s is None


def test_no_version_is_waited_for_longer_than_a_dead_member() -> None:
    world = overlapping(2)
    answered(world)
    step(world)
    waits = [step(world).wait, *(world.boundary().wait for _ in range(DEAD_S))]
    assert waits == [True] * DEAD_S + [False]
    assert not any(step(world).wait for _ in range(3)), "it has had its time"
    world.merge(0, own=True)
    assert step(world).applies == VERSION


def test_a_new_owner_s_announcement_ends_the_wait() -> None:
    world = overlapping(3)
    answered(world)
    assert step(world, 3).wait
    take_over(world)
    assert not world.boundary().wait
    send(world)
    assert not any(step(world).wait for _ in range(3)), "it is made later than the first owner would have made it"
    world.merge(0, own=False)
    assert world.boundary().applies == VERSION


def test_a_new_owner_s_announcement_moves_no_apply_step() -> None:
    world = overlapping(3)
    answered(world)
    step(world)
    take_over(world)
    world.boundary()
    send(world)
    world.merge(0, own=True)
    assert steps_of_applies(world, 5) == [7], "three steps after the first answer"


def test_a_version_is_not_held_once_a_later_round_or_version_is_known() -> None:
    world = overlapping(10)
    answered(world)
    world.merge(0, own=True)
    assert not step(world).applies
    world.announce(0)
    assert step(world).applies == VERSION
    assert world.learner.fragments[0].answer_step == 6, "the later round is answered there"
    send(world)
    world.merge(0, own=False)
    world.merge(0, own=False)
    assert step(world).applies == (Application(0, 2, "version"), Application(0, 3, "version"))


def test_a_rollback_is_applied_at_once_with_what_was_held_before_it() -> None:
    world = overlapping(10)
    answered(world)
    world.merge(0, own=True)
    world.merge(0, own=False, rolled_back=True)
    assert world.boundary().applies == (Application(0, 1, "version"), Application(0, 2, "version"))


@pytest.mark.parametrize("how", ["leaving", "draining"])
def test_a_learner_that_takes_no_step_any_more_applies_on_arrival_and_waits_for_nothing(how: str) -> None:
    world = overlapping(10)
    answered(world, 0)
    answered(world, 1)
    world.merge(0, own=True)
    setattr(world.learner, how, True)
    decision = world.boundary()
    assert (decision.applies, decision.stop, decision.wait) == (VERSION, True, False)
    world.merge(1, own=True)
    assert world.boundary().applies == (Application(1, 1, "version"),)


def test_a_learner_whose_budget_is_used_up_applies_what_it_held_at_the_next_boundary() -> None:
    world = overlapping(10, tokens=60)
    answered(world)
    world.merge(0, own=True)  # 40 tokens of this learner, and 5 of another one
    decision = step(world, 2)
    assert (decision.applies, decision.stop) == ((), True)
    assert world.boundary().applies == VERSION


def test_a_version_that_a_marker_holds_back_is_not_waited_for() -> None:
    world = overlapping(2)
    world.learner.markers.hear(SnapshotMarker(1, [0, 1]), FRAGMENTS)  # fragment 0 stays until fragment 1 has version 1
    world.learner.markers.held_back = [0, 0]
    answered(world)
    world.merge(0, own=True)
    decision = step(world, 2)
    assert (decision.applies, decision.wait) == ((), False)


def test_a_learner_that_begins_again_applies_what_had_come_from_the_log() -> None:
    world = overlapping(10)
    answered(world)
    world.merge(0, own=True)
    assert not step(world).applies
    dumped = world.learner.dump([(3, world.taken)])
    world.kill()
    world.learner.restore(*dumped)
    assert world.boundary().applies == (Application(0, 1, "reload"),)


def test_an_invalid_value_is_replaced_at_once() -> None:
    world = overlapping(10)
    world.announce(0)
    world.boundary()
    world.learner.not_finite(0)
    world.merge(0, own=False)
    assert world.boundary().applies == (Application(0, 1, "reset"),)


def test_an_evaluator_applies_on_arrival() -> None:
    world = overlapping(10)
    world.learner = Learner("eve", "evaluator", "", 1, world.run)
    for log in world.logs:
        world.learner.seat(log.head(None, arrays=True))
    world.boundary()
    world.announce(0)
    world.merge(0, own=False)
    assert world.boundary().applies == VERSION


def test_the_own_value_is_mixed_in_as_it_is_at_the_boundary_that_applies() -> None:
    world = overlapping(5, apply__alpha=0.5, carry__overlap=False)
    answered(world)
    world.merge(0, own=True)
    step(world, 4)
    assert world.values[0].tolist() == [2.0] * 4, "eight steps of a quarter, and nothing of version 1, which is 1"
    world.step()
    [applied] = apply(world.learner, decide(world.learner, world.now_s))
    assert applied.write is not None
    assert (applied.write.theta.tolist(), applied.write.reset) == ([1.0] * 4, False), "alpha counts where nothing is reset"


@given(SCHEDULES, st.sampled_from([1.0, 2.0, 3.0]))
def test_until_it_has_to_decide_a_boundary_decides_nothing(schedule: list[Any], tau: float) -> None:
    world = LearnerWorld(settings_of(WORLD, **{"apply.at": "overlap", "round.overlap_steps": tau}))
    for name, *values in schedule:
        act(world, name, *values)
    first, wake = world.boundary(), next_decision(world.learner, world.tokens)
    if first.wait:
        assert wake.at_s is not None
        world.now_s = int(wake.at_s)
        first, wake = world.boundary(), next_decision(world.learner, world.tokens)
        assert not first.wait, "nothing came, and the time is over"
    for _ in range(min(wake.steps or 0, 20) - 1):
        decision = step(world)
        assert (decision.applies, decision.stop, decision.wait, decision.activity) == ((), False, False, "stepping")


@given(SCHEDULES)
def test_every_token_is_merged_or_lost_or_held(schedule: list[Any]) -> None:
    world = LearnerWorld(settings_of(WORLD, apply__at="overlap"))
    for name, *values in schedule:
        act(world, name, *values)
        if name == "boundary":
            world.check_accounts()


def test_settings_that_leave_no_step_to_the_overlap_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"apply\.at = overlap with round\.learners_wait"):
        run_settings("diloco", {"apply.at": "overlap"})
    with pytest.raises(SettingsError, match=r"overlap_steps = 24 and round\.steps = 24"):
        run_settings("decoupled", {"apply.at": "overlap", "round.overlap_steps": 24})


def test_a_run_without_the_setting_keeps_its_identity() -> None:
    assert "at" not in run_settings().model_dump()["apply"]
    assert run_settings("decoupled", {"apply.at": "arrival"}).digest() == run_settings().digest()
    assert run_settings("decoupled", {"apply.at": "overlap"}).digest() != run_settings().digest()
