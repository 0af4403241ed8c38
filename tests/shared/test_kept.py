"""The state kept where a process of a learner is lost: without what that process carried."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.made.learner_world import FRAGMENTS, SCHEDULES, TOKENS, LearnerWorld, act
from tests.made.run_settings import WORLD, settings_of

from diloco.core.learner.accounts import StepDone
from diloco.core.learner.boundary import decide
from diloco.core.learner.decisions import presuming
from diloco.core.learner.learner import ACCOUNTS, Dump

STEP = 0.25  # that a step adds to each value
BARE = st.sets(st.integers(0, FRAGMENTS - 1))
MERGES = st.lists(st.tuples(st.just("merge"), st.integers(0, FRAGMENTS - 1), st.booleans()), max_size=4)


def kept(world: LearnerWorld) -> Dump:
    """A dump as of the last boundary, while a step is in flight that a decision takes for granted, and that does not end."""
    before = world.learner.accounts.step
    with presuming(world.learner, StepDone(world.tokens, 3, world.taken, None, 0.0, 0.0)):
        assert world.learner.accounts.step == before + 1
        decide(world.learner, world.now_s)
    return world.learner.dump([(3, world.taken)])


def restored(world: LearnerWorld, dump: Dump, bare: set[int]) -> None:
    plain, arrays = dump
    left = {name: array for name, array in arrays.items() if not name.startswith(tuple(f"{ACCOUNTS}{i}/" for i in bare))}
    values = world.values
    world.kill()
    world.values = values  # which another process of the learner has
    world.learner.restore(msgspec.json.decode(msgspec.json.encode(plain)), left, bare)


def values_hold(world: LearnerWorld) -> None:
    """Each value is its version and all steps that are counted for it, and no others."""
    world.learner.settle()
    for state, values in zip(world.learner.fragments, world.values, strict=True):
        assert state.values is not None
        np.testing.assert_allclose(values - state.values.base, STEP * state.delta.steps, atol=1e-4)


@example([("step", 1), ("kill",), ("step", 1)], [], [], set())
@given(SCHEDULES, MERGES, SCHEDULES, BARE)
def test_accounts_and_values_hold_whatever_was_carried_by_the_lost_process(
    before: list[Any], meanwhile: list[Any], after: list[Any], bare: set[int]
) -> None:
    world = LearnerWorld(settings_of(WORLD))
    for name, *acted in before:
        act(world, name, *acted)
    while world.answers:
        world.encode()
    world.boundary()
    tokens = world.learner.accounts.tokens
    dump = kept(world)
    for name, *acted in meanwhile:
        act(world, name, *acted)
    restored(world, dump, bare)
    assert world.learner.accounts.tokens == tokens, "the step in flight is not counted, and all before are"
    world.boundary()
    world.check_accounts()
    values_hold(world)
    for name, *acted in after:
        act(world, name, *acted)
        if name == "boundary" and not any(each[0] == "kill" for each in after):
            world.check_accounts()
            values_hold(world)


def trained(steps: int) -> LearnerWorld:
    world = LearnerWorld(settings_of(WORLD))
    world.boundary()
    world.step(steps)
    world.boundary()
    return world


def test_the_step_in_flight_is_in_none_of_the_accounts() -> None:
    world = trained(5)
    plain, _ = kept(world)
    assert (plain["step"], plain["tokens"], plain["positions"]) == (5, 5 * TOKENS, [(3, 5)])
    assert [(f["steps"], f["tokens"], f["data"]) for f in plain["fragments"]] == [(5, 5 * TOKENS, [(3, 0, 5)])] * FRAGMENTS


@pytest.mark.parametrize(
    ("offered", "merged", "held"),
    [
        (False, False, 5),  # the log has the base yet, so the displacement is known
        (True, False, 0),  # that of the offer is not
        (False, True, 0),  # nor is the base
    ],
)
def test_a_fragment_without_arrays_keeps_what_follows_from_the_log(offered: bool, merged: bool, held: int) -> None:
    world = trained(5)
    if offered:
        world.announce(0)
        world.boundary()
        world.encode()
        world.store()
    dump = kept(world)
    if merged:
        world.merge(0, own=False)
    restored(world, dump, {0})
    world.boundary()
    first, second = world.learner.fragments
    assert (first.delta.tokens, first.delta.lost_tokens) == (held * TOKENS, (5 - held) * TOKENS)
    assert (second.delta.tokens, second.delta.lost_tokens) == (5 * TOKENS, 0)
    values_hold(world)


def test_an_offer_whose_arrays_are_gone_counts_once_it_is_merged() -> None:
    world = trained(5)
    world.announce(0)
    world.boundary()
    world.encode()
    world.store()
    dump = kept(world)
    restored(world, dump, {0})
    world.boundary()
    world.merge(0, own=True)
    world.boundary()
    world.check_accounts()
    counts = world.learner.fragments[0].delta
    assert (counts.tokens, counts.lost_tokens) == (0, 0), "it was merged: nothing is lost"
