"""The benchmark of joining runs, and says what it says it does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.pace import DEADLINE_S

pytestmark = pytest.mark.services

SCRIPT = Path(__file__).parents[2] / "bench" / "joining.py"


@pytest.mark.slow
def test_json_has_a_row_for_each_rate_and_no_more_is_read_than_there_is() -> None:
    smallest = ["--parameters", "1000000", "--fragments", "2", "--delay", "0.01", "--samples", "1", "--rates", "100", "50"]
    done = subprocess.run(
        [sys.executable, SCRIPT, *smallest, "--json"], capture_output=True, text=True, timeout=2 * DEADLINE_S, check=True
    )
    result = json.loads(done.stdout)
    assert result["stored_bytes"] > 9e6
    assert [row["rate_mbit_s"] for row in result["rows"]] == [100, 50]
    for row in result["rows"]:
        assert 0 < row["raw_mb_s"] < 1.1 * row["rate_mbit_s"] / 8
        for part in (row["log"], row["loan"]):
            assert 0 < part["share"] <= part["best_share"] < 1.1
        assert 0.7 < row["read"] < 1  # the residuals are left out
