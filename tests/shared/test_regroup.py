"""The boundary at which a generation of a learner's processes ends, so that a larger one begins from its state."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.made.learner_island import ISLAND_ACTS, PROCESSES, DecidedIsland, go_on
from tests.made.learner_world import act
from tests.made.run_settings import WORLD, settings_of


def regrouped(island: DecidedIsland) -> bool:
    """End the generation if it may end now; return whether it has."""
    if island.decisions.made is not None or not island.decisions.may_save:
        return False
    island.learner.silent = True
    made = island.decisions.make(island.now_s, (3, island.taken), ended=True)
    if made.finished:
        return False
    assert made.ended
    assert made.save is not None, "it ends with a state, or not at all"
    assert made.save.purpose == "own"
    return True


@given(st.lists(ISLAND_ACTS, max_size=60))
def test_a_generation_ends_with_its_state_saved_and_answers_nothing_after_it(schedule: list[Any]) -> None:
    island = DecidedIsland(settings_of(WORLD), PROCESSES)
    for name, *values in schedule:
        act(island, name, *values)
        if regrouped(island):
            break
    else:
        go_on(island, 8)
        assert regrouped(island)
    offers = [state.delta.next_number for state in island.learner.fragments]
    island.decisions.carry_out()
    for index in range(len(offers)):
        island.announce(index)
    assert not island.answers, "an offer of after that boundary would not be in the state"
    assert [state.delta.next_number for state in island.learner.fragments] == offers
