"""The picture of rounds after a cut: it is drawn from the simulator's counts, and its page states these."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.pace import DEADLINE_S

pytestmark = pytest.mark.services

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "bench" / "even_rounds.py"
BEGIN_S = 180 + 2 * 24  # two cycles after the cut


def test_the_page_and_its_picture_have_the_counts(tmp_path: Path) -> None:
    file = tmp_path / "counts.json"
    subprocess.run([sys.executable, SCRIPT, "--counts", file], timeout=DEADLINE_S, check=True)
    before = json.loads(SCRIPT.with_name("even_rounds_before.json").read_text())["versions"]
    now = json.loads(file.read_text())["versions"]
    assert len(before) == len(now) == 420
    late, late_now = before[BEGIN_S:], now[BEGIN_S:]
    page = (ROOT / "docs" / "regions.md").read_text()
    assert f"| most versions in a second | {max(late)} | {max(late_now)} |" in page
    assert f"| seconds without a version, of 192 | {late.count(0)} | {late_now.count(0)} |" in page
    cards = 3  # the picture's, and in each panel the time of the cut
    assert (ROOT / "docs" / "even-rounds.svg").read_text().count("<rect ") == cards + sum(map(bool, [*before, *now]))
