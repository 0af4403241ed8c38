"""Offers that are lost at random: their learners are missing in versions, and the work in them is lost."""

from __future__ import annotations

import pytest
from tests.made.tiny_trials import STEP_TOKENS, play_tiny

from diloco_lab.experiment.spec import Arm
from diloco_lab.paces.spec import PaceSpec


def test_only_a_run_has_offers_that_can_be_lost() -> None:
    with pytest.raises(ValueError, match="dropped and offers_s need a method with offers, which 'data-parallel' is not"):
        Arm(method="data-parallel", pace=PaceSpec(dropped=0.5))


@pytest.mark.slow
def test_half_of_the_offers_are_missing_in_versions(text: str) -> None:
    def play(dropped: float, seed: int = 0, steps: int = 200) -> tuple[float, float, float, float]:
        paces = PaceSpec(step_s=1.0, dropped=dropped).paces(4)
        found = play_tiny(text, steps * STEP_TOKENS, paces, learners=4, seed=seed)
        assert found.merged + found.lost + found.held == pytest.approx(1)
        return found.loss, found.members, found.merged, found.lost

    _, members, _, lost = play(0.0)
    assert members == pytest.approx(4, abs=0.3)
    assert lost == pytest.approx(0, abs=0.05)
    _, members, merged, lost = half = play(0.5)
    # of four offers two arrive, on average; versions of none are not made: 2 / (1 - 1 / 16)
    assert members == pytest.approx(2 / (1 - 1 / 16), abs=0.5)
    assert merged < 0.75
    assert lost > 0.25
    assert play(0.5) == half
    assert play(0.5, seed=1) != half
