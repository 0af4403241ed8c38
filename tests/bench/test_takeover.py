"""The takeover benchmark runs, and a standby is as quick as it should be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.pace import DEADLINE_S

pytestmark = pytest.mark.services

SCRIPT = Path(__file__).parents[2] / "bench" / "takeover.py"


@pytest.mark.slow
def test_json_has_a_row_for_every_failure() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--kills", "1", "--freezes", "1", "--json"],
        capture_output=True,
        text=True,
        timeout=4 * DEADLINE_S,
        check=True,
    )
    result = json.loads(done.stdout)
    assert [row["how"] for row in result["failures"]] == ["SIGKILL", "SIGSTOP"]
    for row in result["failures"]:
        assert 0 < row["first_record_s"] <= row["last_record_s"]
        assert row["first_record_s"] < row["first_version_s"]
        assert row["first_record_s"] <= result["target_s"]
