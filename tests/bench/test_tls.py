"""The benchmark of TLS runs, and says what it says it does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.pace import DEADLINE_S

pytestmark = pytest.mark.services

SCRIPT = Path(__file__).parents[2] / "bench" / "tls.py"


@pytest.mark.slow
def test_json_has_a_row_for_everything_measured() -> None:
    smallest = ["--record-mb", "0.6", "--sample-mb", "1.2", "--samples", "2", "--json"]
    done = subprocess.run(
        [sys.executable, SCRIPT, *smallest], capture_output=True, text=True, timeout=2 * DEADLINE_S, check=True
    )
    rows = json.loads(done.stdout)["rows"]
    assert [(row["what"], row["client"]) for row in rows] == [
        ("append records", "plain"),
        ("append records", "tls"),
        ("append offers", "plain"),
        ("append offers", "member"),
        *(("read", client) for client in ("plain", "tls", "member")),
    ]
    for row in rows:
        assert 0 < row["mb_s"]["least"] <= row["mb_s"]["median"] <= row["mb_s"]["most"]
        assert (row["ratio"]["median"] == 1.0) == (row["client"] == "plain")
