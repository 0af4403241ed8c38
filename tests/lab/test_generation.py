"""Losses change only with the generation of trials, so that results of different rules are never compared."""

from __future__ import annotations

from typing import Any

import pytest

from diloco.settings.presets import run_settings
from diloco_lab.experiment.generation import GENERATION
from diloco_lab.experiment.methods import play
from diloco_lab.experiment.spec import Arm
from diloco_lab.paces.spec import PaceSpec

SETTINGS: dict[str, Any] = {
    "tokens": 8192,
    "learners": 2,
    "task.layers": 1,
    "task.width": 16,
    "task.heads": 2,
    "task.context": 16,
    "task.batch": 4,
    "fragments.count": 3,
    "round.steps": 6,
}
UNEVEN = PaceSpec(factors=[1.0, 1.7])  # late offers and unequal weights
GOLDEN_GENERATION = 2
GOLDEN = {"decoupled": 0.9234209957523881, "published": 1.0566543095579772}  # the losses of that generation, by preset


@pytest.mark.parametrize("preset", GOLDEN)
def test_a_loss_changes_only_with_the_generation(preset: str, text: str) -> None:
    assert GENERATION == GOLDEN_GENERATION, (
        f"trials are of generation {GENERATION} now: play the two trials of this test, and set GOLDEN_GENERATION and GOLDEN"
    )
    loss = play(Arm(preset=preset, pace=UNEVEN), run_settings(preset, SETTINGS), text).loss
    assert loss == pytest.approx(GOLDEN[preset], rel=1e-4), (
        f"a trial of preset {preset} ends at {loss}, not at {GOLDEN[preset]}: schedule or arithmetic has changed. If that is "
        "intended, raise GENERATION in diloco_lab/experiment/generation.py and add a line there that says what changed; then "
        "set GOLDEN_GENERATION and GOLDEN here, and make the pages again with `diloco lab page docs/quality/*.md`, which no "
        "longer judges claims by the results of before"
    )
