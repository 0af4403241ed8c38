"""Some thousand schedules of a simulated cluster; every one replays exactly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.simulation.blocks import in_blocks
from tests.simulation.play import happens, play, play_all, survived
from tests.simulation.world import FAULTS, LOCKSTEP, OVERLAP, World

ROOT = Path(__file__).parents[2]

# What schedules have found; each was drawn with these seeds when it was. A seed means the same only while services and
# simulation draw alike, so what can be tested by itself is, too.
FOUND = {
    17: "round.learners_wait: a syncer that begins again has not seen the steps that learners wait after, and no round is due",
    39: "an announcement that was overtaken made a closing round one like any other, answered before the last step was booked",
    78: "an offer of more tokens than the budget was refused for ever: one learner had done nearly all alone",
    92: "version 0 of a founder that came late hid the keyframes of the run",
    105: "all had stopped, and a killed learner's tokens, counted no more, had brought the count below the budget",
    336: "an owner lost its fragment, was given it again, and did not notice: its announcements had too old an epoch",
    790: "a mark that was said again when a server had lost what it names held versions back for ever",
    985: "an owner gave a log away that it had seen closed, and that was closed no more; and it missed the offers stored again",
    10043: "the log went back before a newcomer had applied anything: what it was initialised with was in its first offer",
    10127: "two syncers each had found one fragment closed, and neither believed the other",
    10138: "a takeover that was lost, and its successor, had one epoch: what was answered to the first was not all there was",
    10999: "a server went back while a learner joined: one fragment was loaded before that, and nothing more came to be read",
}


@in_blocks(1500, 60)
def test_no_schedule_breaks_an_invariant_or_hangs(seeds: range) -> None:
    total = survived(play_all(seeds).outcomes)
    kinds = ("state restored", "state borrowed", "state marked", "keyframe", "takeover", "purge")
    happens(total, (*(f"fault {kind}" for kind in FAULTS), *kinds), seeds)


@in_blocks(50, 5)  # each as dear as several others: a version of every fragment for every step
def test_gradients_of_learners_in_lockstep_are_averaged_whatever_goes_wrong(seeds: range) -> None:
    outcomes = [World(seed, number=LOCKSTEP).run() for seed in seeds]
    failed = {outcome.seed: repr(outcome.error) for outcome in outcomes if outcome.error is not None}
    assert not failed
    assert sum(outcome.stats["version"] for outcome in outcomes) > 20 * len(seeds)
    assert not any(outcome.stats["state borrowed"] for outcome in outcomes)  # there is none


@in_blocks(50, 10)
def test_an_overlap_of_a_fixed_length_holds_no_run_up_whatever_goes_wrong(seeds: range) -> None:
    outcomes = [World(seed, number=OVERLAP).run() for seed in seeds]
    failed = {outcome.seed: repr(outcome.error) for outcome in outcomes if outcome.error is not None}
    assert not failed
    assert sum(outcome.stats["version"] for outcome in outcomes) > 3 * len(seeds)


@in_blocks(100, 10)
def test_versions_are_made_evenly_again_two_cycles_after_whatever_went_wrong(seeds: range) -> None:
    total = survived(play_all(seeds, even=True).outcomes, "--even ")
    assert total["evenness looked at"] > len(seeds) / 2
    assert total["takeover"] > 6 * len(seeds)


@in_blocks(300, 20)
def test_state_is_averaged_and_no_learner_keeps_its_own_whatever_goes_wrong(seeds: range) -> None:
    total = survived(play_all(seeds, state=True).outcomes, "--state ")
    kinds = ("fault kill", "state restored", "state marked", "keyframe", "takeover", "purge", "step in a state")
    happens(total, kinds, seeds)


@in_blocks(60, 10)
def test_a_run_goes_on_when_a_syncer_s_memory_goes_bad_whatever_else_goes_wrong(seeds: range) -> None:
    total = survived(play_all(seeds, faulty=True).outcomes, "--faulty ")
    assert total["wrong entry"] > len(seeds) / 4
    assert total["keyframe after a wrong entry"]


@in_blocks(60, 10)
@pytest.mark.parametrize("regions", [False, True])
def test_nonsense_on_the_heads_of_fragments_takes_nothing_from_a_run_whatever_goes_wrong(seeds: range, regions: bool) -> None:
    total = survived(play_all(seeds, hostile=True, regions=regions).outcomes, f"--hostile {'--regions ' * regions}")
    assert total["nonsense stored"] > 8 * len(seeds)
    assert total["version"] > 5 * len(seeds)


@in_blocks(60, 10)
def test_a_run_that_is_ordered_back_goes_back_once_whatever_goes_wrong(seeds: range) -> None:
    play_rollbacks(seeds, {})


@in_blocks(30, 30)
@pytest.mark.parametrize("merged", [False, True])
def test_a_run_in_regions_that_is_ordered_back_goes_back_once_whatever_goes_wrong(seeds: range, merged: bool) -> None:
    play_rollbacks(seeds, {"regions": True, "merged": merged})


def play_rollbacks(seeds: range, kind: dict[str, bool]) -> None:
    total = survived(play_all(seeds, rollbacks=True, **kind).outcomes, "--rollbacks ")
    assert total["rollback ordered"] >= total["rolled back"]  # most end before the order
    happens(total, ["rolled back"], seeds)
    assert total["takeover"] > len(seeds)


@pytest.mark.parametrize("seed", FOUND)
def test_what_was_found_stays_found(seed: int) -> None:
    error = play(seed).error
    assert error is None, f"{FOUND[seed]}: {error}"


@pytest.mark.tool
@pytest.mark.parametrize("how", [{}, {"regions": True, "merged": True}])
def test_a_seed_replays_exactly_in_any_process(how: dict[str, bool]) -> None:
    here = World(9, **how).run()
    again = World(9, verbose=False, **how).run()
    assert here.trace == again.trace
    program = f"from tests.simulation.world import World; print(World(9, **{how}).run().trace_hash)"
    environment = os.environ | {"PYTHONHASHSEED": "12345", "PYTHONPATH": str(ROOT)}
    there = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert there.stdout.strip() == here.trace_hash
