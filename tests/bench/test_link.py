"""The benchmark of links runs, and says what it says it does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.pace import DEADLINE_S

pytestmark = pytest.mark.services

SCRIPT = Path(__file__).parents[2] / "bench" / "link.py"


@pytest.mark.slow
def test_json_has_a_row_for_everything_measured_and_it_is_about_what_it_should_be() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--seconds", "0.2", "--rates", "20", "--json"],
        capture_output=True, text=True, timeout=2 * DEADLINE_S, check=True,
    )  # fmt: skip
    result = json.loads(done.stdout)
    [rate] = result["rates"]
    assert rate["rate_mbit_s"] == 20
    assert rate["achieved_mbit_s"] > 0
    assert [(row["delay_s"], row["jitter_s"]) for row in result["delays"]] == [
        (0, 0), (0.03, 0), (0.07, 0), (0.03, 0.005), (0.07, 0.005),
    ]  # fmt: skip
    for row in result["delays"]:
        assert row["off_s"]["least"] >= -row["jitter_s"] - 0.0005
    assert [(row["rate_mbit_s"], row["sent_as"]) for row in result["control"]] == [
        (5, "control"), (5, "bulk"), (10, "control"), (10, "bulk"),
    ]  # fmt: skip
    assert result["unlimited"]["mb_s"] > 0
