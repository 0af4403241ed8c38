"""The picture of losses by time: means over seeds, within the frame, and only where a claim is about time."""

from __future__ import annotations

import re
from typing import Any

import pytest

from diloco_lab.experiment import answer, time_picture
from diloco_lab.experiment.methods import Measured
from diloco_lab.experiment.runner import Results
from diloco_lab.experiment.spec import Experiment
from diloco_lab.experiment.time_picture import HIGH, LEFT, RIGHT, WIDE
from diloco_lab.loss_history import LossPoint, point

CLAIM = {"arm": "slow", "against": "fast", "below": 0.0}
ARMS = {"slow": {"sample_s": 1.0}, "fast": {"sample_s": 1.0}}
SLOW = [point(2.0, 1, 4.0), point(4.0, 2, 3.0), point(8.0, 3, 2.5)]
FAST = [point(2.0, 1, 3.0), point(4.0, 3, 2.5)]


def experiment(**claim: Any) -> Experiment:
    return Experiment.model_validate({"question": "Which one?", "seeds": 1, "arms": ARMS, "claims": [CLAIM | claim]})


def results(**histories: list[LossPoint]) -> Results:
    return Results({(arm, 0): Measured(2.5, 3, 1.0, history=history) for arm, history in histories.items()}, {})


def test_a_line_is_the_mean_of_histories_and_of_their_ends() -> None:
    longer = [point(2.0, 1, 5.0), point(4.0, 2, 3.5), point(6.0, 3, 3.2), point(9.0, 4, 2.5)]
    assert time_picture.mean_line([SLOW, longer]) == [(2.0, 4.5), (4.0, 3.25), (8.5, 2.5)]
    diverged = [point(2.0, 1, float("nan")), point(4.0, 2, 3.0)]
    assert time_picture.mean_line([FAST, diverged]) == [(4.0, 2.75)]
    assert time_picture.mean_line([]) == []


def test_ends_lie_at_their_times_within_the_frame() -> None:
    svg = time_picture.picture(experiment(of="time"), results(slow=SLOW, fast=FAST))
    ends = [float(at) for at in re.findall(r'<circle cx="([\d.]+)"', svg)]
    # of a quarter of 4 s to 8 s on a logarithmic axis: 4 s are two thirds of it
    assert ends == [WIDE - RIGHT, pytest.approx(LEFT + (WIDE - LEFT - RIGHT) * 2 / 3, abs=0.1)]
    assert all(0 < float(at) < HIGH for at in re.findall(r'cy="([\d.]+)"', svg))
    assert "<title>fast: 2.5000 after 4.0 s</title>" in svg


def test_only_experiments_with_claims_of_time_have_it() -> None:
    known = results(slow=SLOW, fast=FAST)
    assert [each.suffix for each in answer.pictures(experiment(of="time"), experiment(of="time"), known)] == ["", "-by-time"]
    assert [each.suffix for each in answer.pictures(experiment(), experiment(), known)] == [""]
    assert time_picture.picture(experiment(), Results({}, {})) == ""
