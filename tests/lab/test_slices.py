"""Slices that fail: steps and batches of elastic learners and of data-parallel training, by a tape, by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.made.tiny_trials import STEP_TOKENS, TINY_TRIAL, play_tiny

from diloco.errors import SettingsError
from diloco.settings.presets import run_settings
from diloco_lab.batches import RowShare, take_rows
from diloco_lab.experiment.methods import play
from diloco_lab.experiment.spec import Arm
from diloco_lab.paces.spec import PaceSpec
from diloco_lab.paces.step_clocks import JointClock, StepClock, clock_of
from diloco_lab.published.published import FITTED

# the sixth of eight slices is away from 10 s to 110 s
TAPE = """{"format": "diloco-failures", "version": 1, "duration_s": 1000.0}
{"at_s": 10.0, "kind": "chip_loss", "target": "learner-0/slice-5", "duration_s": 100.0}
"""
STEP_S = 4.0


@pytest.fixture
def tape(tmp_path: Path) -> str:
    path = tmp_path / "mine.jsonl"
    path.write_text(TAPE)
    return str(path)


def pace(name: str, **changes: Any) -> PaceSpec:
    return PaceSpec(**{"tape": name, "tape_step_s": STEP_S, "step_s": STEP_S, "slices": 8} | changes)


def steps(clock: StepClock, count: int) -> tuple[list[float], list[float]]:
    """Return when the next steps end, and the shares of slices that they are taken with."""
    now_s, ends, shares = 0.0, [], []
    for _ in range(count):
        step = clock.step(now_s)
        now_s += step.step_s
        ends.append(now_s)
        shares.append(step.share)
    return ends, shares


def test_a_learner_goes_on_without_a_lost_slice_and_takes_it_in_again(tape: str) -> None:
    first, second = pace(tape).paces(2).learners
    assert steps(clock_of(first), 3) == ([4.0, 8.0, 12.0], [1.0, 1.0, 1.0])
    ends, shares = steps(clock_of(second), 42)
    # it fails within the third step; the fourth one begins after the reconfiguration, with three of four slices
    assert ends[:4] == pytest.approx([4, 8, 12, 12 + FITTED.downscale_s + 4])
    assert shares[:4] == [1, 1, 0.75, 0.75]
    # the slice is back at 110 s, and is taken in at the end of the step in which it has waited for long enough
    alone = int(np.ceil((110 + FITTED.gather_s - 12 - FITTED.downscale_s) / 4))
    assert shares[3 : 3 + alone + 1] == [0.75] * alone + [1]
    assert ends[3 + alone] - ends[2 + alone] == pytest.approx(FITTED.upscale_s + 4)


def test_a_learner_that_is_not_elastic_begins_again_on_spare_slices(tape: str) -> None:
    ends, shares = steps(clock_of(pace(tape, elastic=False).paces(2).learners[1]), 5)
    assert ends == pytest.approx([4, 8, 12, 12 + FITTED.restart_s + 4, 12 + FITTED.restart_s + 8])
    assert shares == [1, 1, 0.75, 1, 1]


def test_data_parallel_training_stands_still_as_one_machine(tape: str) -> None:
    clock = JointClock(pace(tape).paces(2))
    found = [clock.step(now_s) for now_s in (0.0, 4.0, 8.0, 12.0)]
    assert [joint.timed.share for joint in found] == [1, 1, 7 / 8, 7 / 8]
    assert found[3].timed.step_s == pytest.approx(FITTED.downscale_s + 4)
    assert found[3].timed.useful_s == pytest.approx(4 * 7 / 8)
    assert list(found[3].present) == [0, 1]


def test_a_tape_begins_again_after_its_end(tape: str) -> None:
    clock = clock_of(pace(tape).paces(2).learners[1])
    assert clock.step(500.0).share == 1
    assert clock.step(1012.0).share == 0.75


def test_whole_rows_add_up_to_the_shares() -> None:
    rows = RowShare()
    assert [rows.rows(8, 15 / 16) for _ in range(4)] == [7, 8, 7, 8]
    assert [rows.rows(4, 0.1) for _ in range(3)] == [1, 1, 1]  # a step has a row at least, which is no debt
    assert rows.rows(4, 1.0) == 4
    batch = {"x": np.arange(12).reshape(4, 3), "scale": np.float32(2), "table": np.zeros((5, 2))}
    taken = take_rows(batch, 4, [0, 2])
    assert taken["x"].tolist() == [[0, 1, 2], [6, 7, 8]]
    assert (taken["scale"], taken["table"].shape) == (2, (5, 2))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"slices": 4}, r"mine.jsonl, line 2: target 'learner-0/slice-5' is none of learner-0/slice-0 to learner-0/slice-3"),
        ({"tape": "chips-1200k"}, "kind 'freeze' is not known here; known are chip_loss"),
    ],
)
def test_a_tape_takes_slices_that_there_are(tape: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        pace(tape, **changes).paces(2)
    with pytest.raises(SettingsError, match=r"pace.slices = 8: fewer than the 9 learners"):
        pace(tape).paces(9)
    with pytest.raises(ValueError, match="slices = 8 are those of a tape"):
        PaceSpec(slices=8)
    with pytest.raises(ValueError, match="elastic = false is of learners with slices"):
        PaceSpec(elastic=False)


@pytest.mark.parametrize(("name", "slices"), [("slices-150k", 586), ("slices-1200k", 4687), ("slices-2400k", 9375)])
def test_tapes_of_slices_that_come_with_the_lab_can_be_played_by_any_number_of_learners(name: str, slices: int) -> None:
    paces = PaceSpec(tape=name, tape_step_s=FITTED.step_s, slices=slices)
    [whole] = paces.paces(1).learners
    assert whole.machine is not None
    assert whole.machine.faults
    for learners in (2, 16):
        found = [each.machine for each in paces.paces(learners).learners if each.machine is not None]
        assert len(found) == learners
        # equal parts leave out the last slices, 10 of 586 for 16 learners, and only their failures are not met
        assert 0.95 * len(whole.machine.faults) <= sum(len(machine.faults) for machine in found) <= len(whole.machine.faults)
        if slices > 1000:
            assert all(machine.faults for machine in found)


@pytest.mark.slow
def test_a_trial_of_learners_that_lose_slices_has_smaller_batches(text: str, tape: str) -> None:
    # of 4 rows the second learner trains on 3 from the third step on, as long as the trial lasts
    paces = pace(tape, step_s=0.1).paces(2)
    found, again = (play_tiny(text, 40 * STEP_TOKENS, paces) for _ in range(2))
    assert found.state_hashes == again.state_hashes
    assert found.tokens % STEP_TOKENS != 0
    assert found.tokens % (STEP_TOKENS // 4) == 0
    assert found.merged + found.lost + found.held == pytest.approx(1)
    # the learner that lost nothing always trained; the other one stood still for 21.7 s of the tape, and lost a quarter after
    assert 0.5 < found.goodput < 0.8


@pytest.mark.slow
def test_a_data_parallel_arm_has_the_batch_of_what_is_left(text: str, tape: str) -> None:
    settings = run_settings("decoupled", TINY_TRIAL | {"tokens": 6 * 2 * STEP_TOKENS})
    whole, part = (
        play(Arm(method="data-parallel", pace=each, sample_s=0.25), settings, text)
        for each in (PaceSpec(step_s=0.1), pace(tape, step_s=0.1))
    )
    # 768 tokens in steps of 8 rows, 128 tokens; with a slice of eight lost they have 7 rows from the third on: a step more
    assert (whole.tokens, part.tokens) == (768, 2 * 128 + 5 * 112)
    assert whole.virtual_s == pytest.approx(0.6)
    assert part.virtual_s == pytest.approx(0.7 + 0.1 * FITTED.downscale_s / 4)
    assert whole.goodput == pytest.approx(1)
    assert part.goodput == pytest.approx((0.2 + 0.5 * 7 / 8) / (0.7 + 0.1 * FITTED.downscale_s / 4))
    assert whole.history is not None
    assert [point.at_s for point in whole.history] == [0.3, 0.5, 0.6]
    assert [point.tokens for point in whole.history] == [3 * 128, 5 * 128, 768]
    assert whole.history[-1].loss == pytest.approx(whole.loss, abs=1e-5)
