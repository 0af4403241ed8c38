"""Kills of random processes inside an island, in real processes: a few of those that ``bench/kills.py`` does fifty of."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

KILLS = Path(__file__).parents[2] / "bench" / "kills.py"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_tokens_add_up_and_all_take_one_course_whichever_processes_are_killed_at_random_moments(tmp_path: Path) -> None:
    command = [sys.executable, str(KILLS), "--kills", "5", "--pause-s", "6", "--folder", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["codes"] == {"up": 0, "plain": 0}
    checks = result["checks"]
    assert checks["verified"]
    assert checks["wrong"] == []
    assert checks["lives"] > len([kill for kill in result["kills"] if kill["missed"]]), "each was made again, bit for bit"
    for processed, merged, lost in checks["tokens"].values():
        assert abs(processed - merged - lost) <= 2
        assert merged > 0
    missed = [kill for kill in result["kills"] if kill["missed"]]
    assert missed, "some kill was of a process of the generation"
    for kill in missed:
        if not kill["led"] and kill["processes"] == 3:
            assert kill["lost_steps"] <= 2, "the leader kept the last boundary's state"
