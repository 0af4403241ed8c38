"""Losses by time: when one was reached, and claims about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.errors import SettingsError
from diloco_lab.experiment import answer, spec
from diloco_lab.experiment.methods import Measured
from diloco_lab.experiment.runner import Results
from diloco_lab.loss_history import LossPoint, point, reached_s

FILE = """
question = "Which one is there first?"
seeds = 2

[settings]
tokens = 1024

[arms.slow]
sample_s = 1.0

[arms.fast]
sample_s = 1.0

[[claims]]
arm = "fast"
against = "slow"
of = "time"
below = -0.2
"""


def test_a_loss_is_reached_on_the_line_between_two_points() -> None:
    history = [LossPoint(1.0, 10, 4.0), LossPoint(2.0, 20, 3.0), LossPoint(4.0, 40, 2.0), LossPoint(6.0, 60, 2.5)]
    assert reached_s(history, 4.5) == 1.0
    assert reached_s(history, 2.5) == 3.0
    assert reached_s(history, 1.9) is None
    diverged = point(1.0, 10, float("nan"))
    assert diverged == LossPoint(1.0, 10, None)
    assert reached_s([diverged, history[2]], 2.0) == 4.0


@pytest.mark.parametrize("end", [1.663876, 1.663884])  # both are stored as 1.66388
def test_a_run_reaches_its_own_end(end: float) -> None:
    history = [point(1.0, 10, 2.0), point(2.0, 20, end)]
    assert reached_s(history, end) == pytest.approx(2.0)


def test_a_claim_of_time_is_about_the_loss_that_both_reach(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(FILE)
    experiment = spec.load(str(path))

    def ended(ends_s: float, loss: float) -> Measured:
        history = [LossPoint(0.0, 0, 5.0), LossPoint(ends_s, 100, loss)]
        return Measured(loss=loss, tokens=100, wall_s=1.0, virtual_s=ends_s, history=history)

    # slow is at 2 after 30 s. fast goes from 5 to 1 in 20 s, and so is at 2 after 15 s; with the other seed it ends at 3 after
    # 20 s, where slow is after 20 s, too: half as long, and as long
    measured = {
        ("slow", 0): ended(30, 2.0),
        ("fast", 0): ended(20, 1.0),
        ("slow", 1): ended(30, 2.0),
        ("fast", 1): ended(20, 3.0),
    }
    [verdict] = answer.verdicts(experiment, Results(measured, {}))
    assert verdict.paired.pairs == 2
    assert verdict.paired.mean == pytest.approx(-0.25)
    assert verdict.holds is False
    assert verdict.sentence().startswith("fast reaches the loss of both 25.0 % sooner than slow over 2 pairs")
    path.write_text(FILE.replace("[arms.fast]\nsample_s = 1.0", "[arms.fast]"))
    with pytest.raises(SettingsError, match="needs losses along the way: set their sample_s"):
        spec.load(str(path))
