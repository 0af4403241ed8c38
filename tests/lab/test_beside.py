"""Experiments beside runs: an arm is a point, with the means of its seeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco.errors import FormatError
from diloco_lab.experiment import beside
from diloco_lab.experiment.generation import GENERATION
from diloco_ops.compare.compare_command import read_all

PUBLISHED = Path(__file__).parents[2] / "docs" / "quality" / "bars.results.json"


def trials(arm: str) -> list[dict[str, Any]]:
    found = json.loads(PUBLISHED.read_text())["trials"]
    return [trial["measured"] for trial in found if trial["arm"] == arm and trial.get("measured")]


def test_each_arm_that_has_ended_is_an_entry_with_the_means_of_its_seeds() -> None:
    entries = {entry.name: entry for entry in read_all([PUBLISHED])}
    assert set(entries) == {f"bars: {method}-{rule}" for method in ("data-parallel", "decoupled") for rule in ("adamw", "muon")}
    entry, measured = entries["bars: decoupled-muon"], trials("decoupled-muon")
    losses = [trial["loss"] for trial in measured]
    assert entry.ends["loss"] == pytest.approx(sum(losses) / len(losses))
    assert entry.ends["spread"] == pytest.approx(float(np.std(losses, ddof=1)))
    assert entry.ends["seeds"] == len(losses) == 8
    [point] = entry.validation
    assert point.loss == entry.ends["loss"]
    # what the global model has seen by then, and not what learners have processed
    tokens = sum(trial["tokens"] for trial in measured) / len(measured)
    assert point.tokens == pytest.approx(tokens * sum(trial["merged"] for trial in measured) / len(measured))
    assert point.bytes is None
    assert entry.kind == ("nats per byte", "Python's standard library")
    assert entry.settings["inner.optimizer"] == "muon"
    assert entry.settings["lab.method"] == "decoupled"
    [alone] = entries["bars: data-parallel-muon"].validation
    assert alone.tokens == pytest.approx(sum(trial["tokens"] for trial in trials("data-parallel-muon")) / 8)
    assert alone.time is None
    assert all(entry.arm for entry in entries.values())


@pytest.mark.parametrize(("generation", "said"), [(1, True), (GENERATION, False)])
def test_losses_of_other_rules_are_named(tmp_path: Path, generation: int, said: bool) -> None:
    path = tmp_path / "bars.results.json"
    path.write_text(json.dumps(json.loads(PUBLISHED.read_text()) | {"generation": generation}))
    for entry, _ in beside.read(path):
        assert any(f"of generation {generation}" in note for note in entry.notes) == said


def test_a_file_that_holds_no_results_is_named(tmp_path: Path) -> None:
    path = tmp_path / "wrong.results.json"
    path.write_text("{}")
    with pytest.raises(FormatError, match=r"wrong\.results\.json"):
        beside.read(path)
