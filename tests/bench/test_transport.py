"""The transport benchmark runs, and says what it says it does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.pace import DEADLINE_S

pytestmark = pytest.mark.services

SCRIPT = Path(__file__).parents[2] / "bench" / "transport.py"
SMALLEST = ["--record-mb", "0.25", "0.6", "--sample-mb", "0.6", "--samples", "2", "--small", "10"]


def test_json_has_a_row_for_everything_measured() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, *SMALLEST, "--json"], capture_output=True, text=True, timeout=2 * DEADLINE_S, check=True
    )
    result = json.loads(done.stdout)
    assert set(result["machine"]) == {"cpu", "cores", "system", "python", "nats-server", "nats-py"}
    assert all(result["machine"].values())
    assert [(row["what"], row["record_mb"], row["records"]) for row in result["records"]] == [
        ("append", 0.25, 2),
        ("read", 0.25, 2),
        ("append", 0.6, 1),
        ("read", 0.6, 1),
    ]
    assert [(row["writers"], row["appends"]) for row in result["small"]] == [(1, 10), (8, 10), (64, 10)]
    rates = [row["mb_s"] for row in result["records"]] + [row["per_s"] for row in result["small"]] + [result["disk_mb_s"]]
    for rate in rates:
        assert 0 < rate["least"] <= rate["median"] <= rate["most"]
    for row in result["small"]:
        assert 0 < row["p50_s"] <= row["p99_s"]


@pytest.mark.slow
def test_the_table_names_the_machine_and_the_target() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, *SMALLEST], capture_output=True, text=True, timeout=2 * DEADLINE_S, check=True
    )
    lines = done.stdout.splitlines()
    assert "nats-server 2." in lines[0]
    assert [line.split()[0] for line in lines[2:]] == ["disk", *["append", "read"] * 2, "1/s", *["append"] * 3]
    assert [line.split()[9] for line in lines if line.startswith("read")] == ["200", "200"]
