"""A learner's life: worked by hand, as alternating renewals, and what holds whatever happens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_lab.simulator import simulation
from diloco_lab.simulator.cluster import MICROS, ClusterLearner, Costs, Slowdowns
from diloco_lab.simulator.lifetime import ChipTime, Fault, FaultKind, Lifetime, Stretch
from diloco_lab.simulator.outcome import LearnerOutcome, Scenario
from diloco_lab.simulator.repair import RepairTime

AT_ONCE = 10**9


def fault(at_s: float, kind: FaultKind, duration_s: float = 0.0, index: int = 0, factor: float = 1.0) -> Fault:
    return Fault(round(at_s * MICROS), kind, round(duration_s * MICROS), index, factor)


def play(learner: ClusterLearner, duration_s: float, *faults: Fault) -> tuple[LearnerOutcome, list[tuple[Any, ...]], ChipTime]:
    """What came of it, its stretches as (kind, from, until, steps, slices of the last step), and chip-seconds."""
    stretches: list[Stretch] = []
    scenario = Scenario(
        [learner], duration_s, 1, faults={learner.name: faults}, on_stretch=lambda _, stretch: stretches.append(stretch)
    )
    outcome = simulation.simulate(scenario).learners[0]
    plain = [(s.kind, s.start_us / MICROS, s.end_us / MICROS, s.steps, s.last_slices) for s in stretches]
    return outcome, plain, seconds(outcome.chip_time)


def seconds(time: ChipTime) -> ChipTime:
    parts = (time.useful, time.redone, time.idle, time.reconfiguring, time.repairing)
    assert not any(part % MICROS for part in parts)
    return ChipTime(*(part // MICROS for part in parts))


COSTS = Costs(elastic=True, downscale_s=30.0, upscale_s=20.0)
TEN = ClusterLearner("learner-0", slices=10, chips=4, step_s=10.0, tokens=7, costs=COSTS)


# ---- by hand


def test_nothing_happens_to_one_chip() -> None:
    outcome, stretches, time = play(ClusterLearner("learner-0", 1, 1, 2.0), 100.0)
    assert time == ChipTime(useful=102)  # the step that begins at the end is finished
    assert (outcome.steps, outcome.tokens, outcome.failures) == (50, 50, 0)
    assert stretches == [("stepping", 0.0, 102.0, 51, 1)]


def test_one_chip_is_repaired() -> None:
    """It fails in the third step, which is worth nothing, and is away until 35."""
    learner = ClusterLearner("learner-0", 1, 1, 2.0, costs=Costs(True, 3.0, 4.0))
    outcome, stretches, time = play(learner, 48.0, fault(5.0, "chip_loss", 30.0))
    assert stretches == [
        ("stepping", 0.0, 6.0, 3, 0),
        ("reconfiguring", 6.0, 9.0, 0, 0),
        ("reconfiguring", 9.0, 39.0, 0, 0),
        ("stepping", 39.0, 49.0, 5, 1),
    ]
    assert time == ChipTime(useful=4 + 10, repairing=35 - 4, idle=4)
    assert (outcome.steps, outcome.tokens, outcome.failures) == (7, 6, 1)


def test_failures_within_one_step_and_a_reconfiguration_share_it() -> None:
    faults = [fault(11.0, "chip_loss", 500.0, 0), fault(13.0, "chip_loss", 500.0, 1), fault(25.0, "chip_loss", 500.0, 2)]
    outcome, stretches, time = play(TEN, 99.0, *faults)
    assert stretches == [("stepping", 0.0, 20.0, 2, 8), ("reconfiguring", 20.0, 50.0, 0, 0), ("stepping", 50.0, 100.0, 5, 7)]
    away = (100 - 10) + (100 - 10) + (100 - 25)
    assert time == 4 * ChipTime(useful=100 + 80 + 50 * 7, reconfiguring=30 * 7 + 5, repairing=away)
    assert (outcome.tokens, outcome.failures) == (7 * (10 + 8 + 4 * 7), 3)  # the last step ends after the end


def test_slices_that_are_back_are_gathered() -> None:
    """The first is back at 62: both join in the first reconfiguration after 62 + 25."""
    learner = replace(TEN, costs=replace(COSTS, gather_s=25.0))
    faults = [fault(11.0, "chip_loss", 51.0, 0), fault(12.0, "chip_loss", 68.0, 1)]
    _, stretches, time = play(learner, 119.0, *faults)
    assert stretches == [
        ("stepping", 0.0, 20.0, 2, 8),
        ("reconfiguring", 20.0, 50.0, 0, 0),
        ("stepping", 50.0, 90.0, 4, 8),
        ("reconfiguring", 90.0, 110.0, 0, 0),
        ("stepping", 110.0, 120.0, 1, 10),
    ]
    idle, repairing = (90 - 62) + (90 - 80), (62 - 10) + (80 - 10)
    useful, reconfiguring = 100 + 80 + 40 * 8 + 100, 30 * 8 + 20 * 10
    assert time == 4 * ChipTime(useful, 0, idle, reconfiguring, repairing)


def test_who_is_not_elastic_begins_again_at_the_last_checkpoint() -> None:
    """A checkpoint every four steps; the seventh notices the failure, and steps five to seven are taken once more."""
    learner = replace(TEN, costs=Costs(elastic=False, restart_s=30.0, checkpoint_s=40.0))
    _, stretches, time = play(learner, 139.0, fault(65.0, "chip_loss", 1000.0))
    assert stretches == [("stepping", 0.0, 70.0, 7, 9), ("reconfiguring", 70.0, 100.0, 0, 0), ("stepping", 100.0, 140.0, 4, 10)]
    assert time == 4 * ChipTime(useful=400 + 400, redone=100 + 100 + 90, reconfiguring=300, repairing=10)


def test_a_killed_learner_loses_the_step_under_way() -> None:
    _, stretches, time = play(TEN, 159.0, fault(25.0, "kill"))
    assert stretches == [
        ("stepping", 0.0, 20.0, 2, 10),
        ("reconfiguring", 20.0, 105.0, 0, 0),  # killed at 25, back restart_s later
        ("stepping", 105.0, 165.0, 6, 10),
    ]
    assert time == 4 * ChipTime(useful=200 + 600, redone=50, reconfiguring=800)


def test_a_frozen_learner_finishes_its_step_later() -> None:
    _, stretches, time = play(TEN, 56.0, fault(25.0, "freeze", 7.0))
    assert stretches == [("stepping", 0.0, 37.0, 3, 10), ("stepping", 37.0, 57.0, 2, 10)]
    assert time == 4 * ChipTime(useful=500, idle=70)


def test_steps_that_begin_within_a_slowdown_take_longer() -> None:
    _, stretches, time = play(TEN, 69.0, fault(15.0, "slow", 20.0, factor=3.0))
    assert stretches == [("stepping", 0.0, 20.0, 2, 10), ("stepping", 20.0, 50.0, 1, 10), ("stepping", 50.0, 70.0, 2, 10)]
    assert time == 4 * ChipTime(useful=700)


def test_only_what_is_present_is_allocated() -> None:
    _, stretches, time = play(replace(TEN, present=((15.0, 42.0), (60.0, 65.0))), 100.0, fault(50.0, "chip_loss", 100.0))
    assert stretches == [
        ("absent", 0.0, 15.0, 0, 0),
        ("stepping", 15.0, 45.0, 3, 10),
        ("absent", 45.0, 60.0, 0, 0),
        ("stepping", 60.0, 70.0, 1, 10),
        ("absent", 70.0, 100.000001, 0, 0),
    ]
    assert time == 4 * ChipTime(useful=400)


def test_a_learner_that_waits_is_idle() -> None:
    life = Lifetime(TEN, 1)
    life.advance(3, 10**9)
    life.wait(47 * MICROS)
    assert (life.now_us, seconds(life.chip_time)) == (47 * MICROS, 4 * ChipTime(useful=300, idle=170))


# ---- renewals: what is known without playing it


def share(learner: ClusterLearner, duration_s: float, seed: int = 1) -> tuple[ChipTime, float]:
    time = simulation.simulate(Scenario([learner], duration_s, seed)).learners[0].chip_time
    return time, time.useful / time.allocated


def test_a_slice_that_fails_and_is_repaired_is_an_alternating_renewal() -> None:
    """Up 10000 s, then 500 s of repair and 20 s of joining."""
    learner = ClusterLearner(
        "learner-0", 1, 4, 1.0, between_s=40_000.0, repair=RepairTime(1, 1, 500.0), costs=Costs(True, 0.0, 20.0)
    )
    _, useful = share(learner, 5e7)
    assert useful == pytest.approx(10_000 / 10_520, abs=0.002)


@pytest.mark.parametrize("repair", [RepairTime(1, 1, 100.0), RepairTime(2.0, 0.7, 40.0)])
def test_the_share_of_slices_away_depends_on_means_alone(repair: RepairTime) -> None:
    """Each slice by itself is up 1000 s and away for the mean of its repairs, whatever their distribution."""
    learner = ClusterLearner("learner-0", 200, 4, 1.0, between_s=4000.0, repair=repair, costs=Costs(True, 0.0, 0.0))
    time, _ = share(learner, 2e5)
    assert time.repairing / time.allocated == pytest.approx(repair.mean_s / (1000 + repair.mean_s), rel=0.02)


def test_restarts_alone_are_an_alternating_renewal() -> None:
    """An interrupted step counts but for one slice; half a step later on the mean that is noticed, and the restart begins."""
    costs = Costs(elastic=False, restart_s=80.0)
    learner = ClusterLearner("learner-0", 50, 8, 2.0, between_s=400_000.0, costs=costs)  # one every 1000 s
    _, useful = share(learner, 5e6)
    assert useful == pytest.approx(1000 / 1080, rel=0.005)


# ---- whatever happens

seconds_up_to = st.floats(0.0, 60.0)
faults_strategy = st.lists(
    st.builds(
        fault,
        st.integers(0, 300).map(float) | st.floats(0.0, 300.0),
        st.sampled_from(["chip_loss", "slow", "freeze", "kill"]),
        st.integers(0, 60).map(float),
        st.integers(0, 1),
        st.sampled_from([1.0, 1.5, 3.0]),
    ),
    max_size=6,
).map(lambda faults: sorted(faults, key=lambda fault: fault.at_us))
learners = st.builds(
    ClusterLearner,
    st.just("learner-0"),
    st.integers(2, 5),
    st.integers(1, 3),
    st.sampled_from([1.0, 2.5, 10.0]),
    between_s=st.sampled_from([50.0, 300.0, 3000.0]),
    repair=st.sampled_from([RepairTime(1, 1, 5.0), RepairTime(0.7, 2, 100.0)]),
    costs=st.builds(Costs, st.booleans(), *[seconds_up_to] * 4, st.sampled_from([0.0, 25.0])),
    slowdowns=st.sampled_from([None, Slowdowns(40.0, 20.0, 1.7)]),
    present=st.sampled_from([(), ((0.0, 100.0), (130.0, 260.0)), ((33.3, 200.0),)]),
)
UNTIL_US = 300 * MICROS


def lived(life: Lifetime, steps: Sequence[int], waits: Sequence[int] = ()) -> list[Stretch]:
    """Its stretches, so many steps asked for at a time; now and then it waits a while after a stretch."""
    stretches: list[Stretch] = []
    while life.now_us < UNTIL_US:
        stretches.append(life.advance(steps[len(stretches) % len(steps)], UNTIL_US))
        if waits and waits[len(stretches) % len(waits)] and stretches[-1].kind == "stepping":
            stretches.append(life.wait(life.now_us + waits[len(stretches) % len(waits)]))
    return stretches


@settings(max_examples=300)
@given(learners, faults_strategy, st.integers(0, 99), st.lists(st.sampled_from([0, 1, 3_000_000]), max_size=3))
def test_chip_time_is_conserved(learner: ClusterLearner, faults: list[Fault], seed: int, waits: list[int]) -> None:
    life = Lifetime(learner, seed, faults)
    stretches = lived(life, [AT_ONCE, 1, 2], waits)
    assert stretches[0].start_us == 0
    assert all(a.end_us == b.start_us for a, b in pairwise(stretches))
    absent_us = sum(s.end_us - s.start_us for s in stretches if s.kind == "absent")
    time = life.chip_time
    assert time.allocated == learner.slices * learner.chips * (life.now_us - absent_us)
    assert min(time.useful, time.redone, time.idle, time.reconfiguring, time.repairing) >= 0


def stepwise(stretches: list[Stretch]) -> list[tuple[Any, ...]]:
    """Stretches as single steps: when each ends, and how many slices' work counts."""
    plain: list[tuple[Any, ...]] = []
    for s in stretches:
        if s.kind != "stepping":
            plain.append((s.kind, s.start_us, s.end_us, s.lost))
        ends = ((s.start_us + i * s.step_us, s.slices) for i in range(1, s.steps))
        plain += [*ends, (s.end_us, s.last_slices)] if s.steps else []
    return plain


@settings(max_examples=300)
@given(learners, faults_strategy, st.integers(0, 99), st.lists(st.integers(1, 7), min_size=1, max_size=3))
def test_how_many_steps_are_asked_for_makes_no_difference(
    learner: ClusterLearner, faults: list[Fault], seed: int, steps: list[int]
) -> None:
    one, other = Lifetime(learner, seed, faults), Lifetime(learner, seed, faults)
    assert stepwise(lived(one, [AT_ONCE])) == stepwise(lived(other, steps))
    assert (one.chip_time, one.failures) == (other.chip_time, other.failures)


def test_a_seed_decides_all() -> None:
    learner = replace(TEN, slices=1000, between_s=1e6, slowdowns=Slowdowns(300.0, 30.0, 2.0))
    one, again, other = (lived(Lifetime(learner, seed), [AT_ONCE]) for seed in (1, 1, 2))
    assert one == again
    assert one != other
