"""References of reports: compared with runs of the same model, batch, tokens and text, and with no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diloco.errors import FormatError
from diloco.settings.presets import run_settings
from diloco_ops.report import reference
from diloco_ops.report.reference import Losses, ReferenceLosses

TEXT, OTHER_TEXT = "aa" * 32, "bb" * 32
DEFAULT = run_settings()
KNOWN = ReferenceLosses(
    reference.conditions(DEFAULT, DEFAULT.tokens, TEXT),
    {"data-parallel-adamw": Losses([1.5, 1.25], "rate 0.016 is the best of 4 trials"), "alone": Losses([2.0], "rate 0.01")},
    {"measured": "2026-11-23"},
)


def compared(changes: dict[str, Any] | None = None, text: str | None = TEXT, data: str | None = None) -> dict[str, Any]:
    settings = run_settings("decoupled", changes)
    return reference.compare([KNOWN], settings, settings.tokens, text, data)


def test_a_run_of_the_same_conditions_is_compared_whatever_its_own_method() -> None:
    # the mean of 1.5 and 1.25, and the deviation 0.25 / sqrt(2)
    arms = {
        "data-parallel-adamw": {
            "loss": 1.375, "spread": pytest.approx(0.25 / 2**0.5), "seeds": 2, "tuned": "rate 0.016 is the best of 4 trials",
        },
        "alone": {"loss": 2.0, "spread": None, "seeds": 1, "tuned": "rate 0.01"},
    }  # fmt: skip
    for changes in ({}, {"seed": 5}, {"outer.learning_rate": 0.7, "codec.offer_bits": 16, "round.steps": 12}):
        assert compared(changes) == {"arms": arms, "where": {"measured": "2026-11-23"}, "missing": None, "command": None}


@pytest.mark.parametrize(
    ("changes", "data", "command"),
    [
        ({"tokens": 800_000}, None, "diloco lab run search --set tokens=800000"),
        ({"learners": 8}, None, "diloco lab run search --set learners=8"),
        ({"task.batch": 8, "task.width": 48}, None, "diloco lab run search --set task.width=48 --set task.batch=8"),
        ({"task.dtype": "bfloat16"}, None, "diloco lab run search --set task.dtype=bfloat16"),
        ({"tokens": 10}, "my text", "diloco lab run search --set tokens=10 --data 'my text'"),
    ],
)
def test_a_run_of_other_conditions_is_told_how_to_measure_them(changes: dict[str, Any], data: str | None, command: str) -> None:
    found = compared(changes, data=data)
    assert (found["arms"], found["command"]) == ({}, command)
    assert found["missing"] == "data-parallel training was not measured yet with these settings"


def test_another_release_of_the_text_is_not_compared() -> None:
    found = compared(text=OTHER_TEXT)
    assert (found["arms"], found["command"]) == ({}, "diloco lab run default")
    assert "with this text (the standard library differs from one Python release to the next)" in found["missing"]
    of_own_task = compared(text=None)
    assert (of_own_task["arms"], of_own_task["command"]) == ({}, None)
    assert "only for the built-in task on text" in of_own_task["missing"]


def test_references_are_read_from_all_folders_and_damaged_ones_named(tmp_path: Path) -> None:
    (tmp_path / f"one{reference.SUFFIX}").write_text(KNOWN.encode())
    assert [reference.read(path) for path in reference.files([tmp_path / "missing", tmp_path])] == [KNOWN]
    damaged = tmp_path / f"two{reference.SUFFIX}"
    for text in ("{", KNOWN.encode().replace("[\n    2.0\n   ]", "[]"), KNOWN.encode().replace("where", "were")):
        assert text != KNOWN.encode()
        damaged.write_text(text)
        with pytest.raises(FormatError, match=r"two.reference.json: not a reference for reports: .*; delete it"):
            reference.read(damaged)
