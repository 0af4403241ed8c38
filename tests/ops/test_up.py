"""Sentences at the end of a run."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_ops.up import on_missed


@pytest.mark.parametrize(
    ("rounds", "said"),
    [
        ({"ann": (251, 1564), "bob": (204, 1611)}, "each learner missed 11 % of the versions or more"),  # 204 / 1815
        ({"ann": (30, 1700), "bob": (300, 1430)}, None),  # bob alone was late
        ({"ann": (900, 100)}, None),  # nobody else's offers closed its rounds
        ({"ann": (0, 0), "bob": (0, 0)}, None),
        ({}, None),
    ],
)
def test_rounds_that_all_learners_miss_are_told(rounds: dict[str, tuple[int, int]], said: str | None) -> None:
    learners = {name: {"rounds_missed": missed, "rounds_merged": merged} for name, (missed, merged) in rounds.items()}
    report: dict[str, Any] = {"learners": learners, "settings": {"round": {"overlap_steps": 2.0}}}
    found = on_missed(report)
    assert found is None if said is None else found is not None and found.startswith(said)
    if found:
        assert "round.overlap_steps (2) steps" in found
