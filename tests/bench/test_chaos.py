"""The chaos benchmark runs from end to end, and says what a run with failures is worth beside one without."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.pace import LONG_TEST_S

pytestmark = pytest.mark.services

SCRIPT = Path(__file__).parents[2] / "bench" / "chaos.py"


@pytest.mark.slow
def test_a_disturbed_run_is_compared_with_an_undisturbed_one(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--long", "--for", "20", "--rate", "0.2", "--keep", str(tmp_path), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LONG_TEST_S, check=False)
    result = json.loads(done.stdout)
    assert result == json.loads((tmp_path / "result.json").read_text())
    assert (result["verdict"]["violations"], result["lasted"]) == ([], True)
    # four are drawn; one may meet a process that is only beginning again, and is left out with a warning
    assert 3 <= sum(result["verdict"]["failures"].values()) <= 4
    disturbed, undisturbed = result["loss"]["disturbed"], result["loss"]["undisturbed"]
    assert undisturbed["tokens_merged"] == pytest.approx(disturbed["tokens_merged"], rel=0.1)
    assert result["loss"]["difference"] == pytest.approx(disturbed["val_loss"] / undisturbed["val_loss"] - 1)
    assert result["passed"] == (done.returncode == 0)
