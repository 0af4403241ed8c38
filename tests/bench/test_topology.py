"""The benchmark of topologies runs, and says what it says it does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.pace import DEADLINE_S

pytestmark = pytest.mark.services

SCRIPT = Path(__file__).parents[2] / "bench" / "topology.py"


@pytest.mark.slow
def test_json_has_both_shapes_and_unlinked_servers_need_nobody() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--cut", "8", "--json"], capture_output=True, text=True, timeout=4 * DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert list(result["shapes"]) == ["unlinked", "gateways"]
    for shape in result["shapes"].values():
        for rate in ("thin", "fast"):
            assert shape[rate]["seconds"] >= 8 * result["payload_bytes"] / (1e6 * result["rates_mbit_s"][rate]) * 0.98
            assert all(1 < share < 1.1 for share in shape[rate]["of_payload"].values())
    unlinked = result["shapes"]["unlinked"]
    assert set(unlinked["cut"]["can_make_consumers"].values()) == {"yes"}
    assert set(unlinked["cut"]["can_make_streams"].values()) == {"yes"}
