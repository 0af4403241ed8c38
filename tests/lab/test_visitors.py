"""Learners that join in mid-run and leave, and data-parallel training on the same batches."""

from __future__ import annotations

from typing import Any

import pytest
from tests.made.tiny_trials import STEP_TOKENS, TINY_TRIAL, play_tiny

from diloco.errors import SettingsError
from diloco.settings.presets import run_settings
from diloco_lab.experiment.methods import play
from diloco_lab.experiment.spec import Arm
from diloco_lab.paces.spec import MOST_S, PaceSpec, Visitors


def visited(count: int = 1, **values: Any) -> PaceSpec:
    return PaceSpec(visitors=Visitors(count=count, **values))


def test_visitors_are_the_last_learners_and_come_day_after_day() -> None:
    first, second, third = visited(count=2, joins_s=4, stays_s=3, away_s=1, times=2).paces(3).learners
    assert (first.begins_s, first.away) == (0, ())
    assert second == third
    assert (second.begins_s, second.away) == (4, ((7, 8), (11, 11 + MOST_S)))


def test_visitors_are_some_of_the_learners() -> None:
    with pytest.raises(SettingsError, match=r"visitors.count = 2: the arm has 2 learners, and one at least stays"):
        visited(count=2, joins_s=1, stays_s=1).paces(2)
    both = PaceSpec(visitors=Visitors(count=1, joins_s=1, stays_s=1), away={"learner-1": [(1, 2)]})
    with pytest.raises(SettingsError, match="learner-1 is one of the 1 visitors"):
        both.paces(2)
    with pytest.raises(ValueError, match=r"times = 2 stays need a time between them; set away_s"):
        visited(joins_s=1, stays_s=1, times=2)


@pytest.mark.slow
def test_data_parallel_training_has_the_batches_of_visitors_while_they_are_there(text: str) -> None:
    settings = run_settings("decoupled", TINY_TRIAL | {"tokens": 24 * STEP_TOKENS})
    found = play(Arm(method="data-parallel", pace=visited(joins_s=0.95, stays_s=0.5)), settings, text)
    # steps of 0.1 s: ten alone, five of both, and four alone
    assert found.tokens == 24 * STEP_TOKENS
    assert found.virtual_s == pytest.approx(1.9)
    assert found.goodput == pytest.approx(2.4 / (1.9 + 0.5))


@pytest.mark.slow
def test_a_visitor_is_in_versions_while_it_is_there(text: str) -> None:
    found = play_tiny(text, 60 * STEP_TOKENS, visited(joins_s=1.0, stays_s=1.5).paces(2))
    # 60 steps of 0.1 s, some 15 of which the visitor took; the other learner did not wait for it
    assert found.goodput > 0.85
    assert found.shares[0] == 1
    assert 0.15 < found.shares[1] < 0.5
    assert found.lost < 0.1
