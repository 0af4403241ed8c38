"""Failure tapes in the simulator."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from diloco.errors import FormatError
from diloco_lab.simulator import simulation
from diloco_lab.simulator.cluster import YEAR_S, Cluster, ClusterLearner
from diloco_lab.simulator.lifetime import Fault
from diloco_lab.simulator.outcome import Scenario
from diloco_lab.simulator.repair import RepairTime
from diloco_lab.traces import tapes
from diloco_ops import failures

HEADER = {"format": "diloco-failures", "version": 1, "duration_s": 100}
LEARNERS = [ClusterLearner(f"learner-{index}", slices=4, chips=8, step_s=1.0) for index in range(3)]


def read(*lines: dict[str, object]) -> tapes.PlayedTape:
    return tapes.read([json.dumps(line) for line in (HEADER, *lines)], "storm.jsonl", LEARNERS)


def test_every_kind_reaches_its_learners() -> None:
    played = read(
        {"at_s": 1, "kind": "chip_loss", "target": "learner-0/slice-3/chip-5", "duration_s": 60},
        {"at_s": 2, "kind": "freeze", "target": "learner-[12]", "duration_s": 4.5},
        {"at_s": 3, "kind": "slow", "target": "learner-2", "duration_s": 10, "factor": 3},
        {"at_s": 4, "kind": "kill", "target": "learner-1"},
        {"at_s": 5, "kind": "cut", "target": "learner-1", "duration_s": 2},
        {"at_s": 6, "kind": "chip_loss", "target": "learner-2/slice-*", "duration_s": 1},
    )
    assert played.duration_s == 100
    assert played.faults["learner-0"] == [Fault(1_000_000, "chip_loss", 60_000_000, 3)]
    assert played.faults["learner-1"] == [Fault(2_000_000, "freeze", 4_500_000), Fault(4_000_000, "kill", 0)]
    assert played.faults["learner-2"][:2] == [
        Fault(2_000_000, "freeze", 4_500_000),
        Fault(3_000_000, "slow", 10_000_000, 0, 3.0),
    ]
    assert [fault.slice for fault in played.faults["learner-2"][2:]] == [0, 1, 2, 3]
    assert played.cuts == {"learner-1": [(5_000_000, 7_000_000)]}
    assert played.left_out == {}


def test_what_happens_to_others_is_counted() -> None:
    played = read(
        {"at_s": 1, "kind": "kill", "target": "syncer-0"},
        {"at_s": 2, "kind": "nats_kill", "target": "nats"},
        {"at_s": 2, "kind": "nats_kill", "target": "nats"},
        {"at_s": 3, "kind": "link_cut", "target": "link/us-eu", "duration_s": 3},
    )
    assert played.faults == {}
    assert played.left_out == {"kill": 1, "nats_kill": 2, "link_cut": 1}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            {"at_s": 1, "kind": "freeze", "target": "learner-7", "duration_s": 1},
            "learner-7' is no learner.*learner-0, learner-1, l",
        ),
        ({"at_s": 1, "kind": "freeze", "target": "leaner-1", "duration_s": 1}, "did you mean 'learner-1'"),
        ({"at_s": 1, "kind": "chip_loss", "target": "learner-1", "duration_s": 1}, "names no slice"),
        ({"at_s": 1, "kind": "chip_loss", "target": "learner-1/slice-4", "duration_s": 1}, "has slice-0 to slice-3"),
        ({"at_s": 1, "kind": "slow", "target": "learner-1", "duration_s": 1}, "factor = None, expected a number"),
        ({"at_s": 1, "kind": "slow", "target": "learner-1", "duration_s": 1, "factor": 0.5}, "factor = 0.5, expected"),
        ({"at_s": -1, "kind": "kill", "target": "learner-1"}, "at_s = -1"),
    ],
)
def test_a_tape_that_cannot_be_played_is_refused_with_its_line(line: dict[str, object], words: str) -> None:
    with pytest.raises(FormatError, match=f"storm.jsonl, line 3: .*{words}"):
        read({"at_s": 0, "kind": "kill", "target": "learner-0"}, line)


def test_time_may_not_go_back() -> None:
    with pytest.raises(FormatError, match=r"storm\.jsonl, line 3: at_s = 1 comes after 2"):
        read({"at_s": 2, "kind": "kill", "target": "learner-0"}, {"at_s": 1, "kind": "kill", "target": "learner-0"})


def test_a_recorded_simulation_is_the_same_when_its_tape_is_played(tmp_path: Path) -> None:
    cluster = Cluster(40_000, 4, 100, 2.0, YEAR_S / 50, RepairTime(2.0, 1.0, 200.0))
    drawn: list[tuple[str, Fault]] = []
    scenario = Scenario(cluster.split(5), 7200.0, 5, on_failure=lambda learner, fault: drawn.append((learner.name, fault)))
    first = simulation.simulate(scenario)
    assert sum(learner.failures for learner in first.learners) > 400
    text = failures.encode(tapes.record(scenario, drawn))
    learners = [replace(learner, between_s=math.inf) for learner in scenario.learners]
    played = tapes.read(text.splitlines(), "made", learners)
    again = simulation.simulate(Scenario(learners, played.duration_s, 99, faults=played.faults))
    assert again.stepping_us == first.stepping_us
    assert [learner.steps for learner in again.learners] == [learner.steps for learner in first.learners]
    assert again.goodput == pytest.approx(first.goodput, abs=1e-5)  # what failed in a stretch beyond the end is not on the tape


def test_for_live_learners_a_lost_slice_is_a_frozen_learner() -> None:
    tape = failures.FailureTape(
        9.0, [failures.Failure(1.0, "chip_loss", "learner-2/slice-3", 600.0), failures.Failure(2.0, "kill", "nats")]
    )
    assert tapes.whole_learners(tape, 20.0).failures == [
        failures.Failure(1.0, "freeze", "learner-2", 20.0),
        failures.Failure(2.0, "kill", "nats"),
    ]
