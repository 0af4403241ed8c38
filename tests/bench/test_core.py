"""The benchmark of the core runs, and says what it should; how fast it is, is no test's matter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.pace import DEADLINE_S

pytestmark = pytest.mark.services

CORE = Path(__file__).parents[2] / "bench" / "core.py"
STAGES = {"encode", "decode", "merge of 4", "merge of 8", "fold in place", "fold"}
TARGETS = {"encode": 0.8, "decode": 1.5, "merge of 4": 1.2, "merge of 8": 1.2, "fold in place": 0.4, "fold": 0.4}


def run(*arguments: str) -> str:
    command = [sys.executable, str(CORE), "--values", "4096", "--repeat", "2", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * DEADLINE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_json_output() -> None:
    result = json.loads(run("--json"))
    assert result["values"] > 1000
    assert result["repeat"] == 2
    assert result["machine"].keys() == {"cpu", "cores", "vectors", "python", "numpy"}
    assert result["machine"]["cores"] > 0
    rows = {(row["name"], row["bits"]): row for row in result["rows"]}
    assert len(rows) == len(result["rows"])
    assert {(name, bits) for name in STAGES for bits in (2, 4, 8, 16, 32)} < rows.keys()
    assert {name: row["target"] for (name, bits), row in rows.items() if bits == 4 and row["target"]} == TARGETS
    for (name, bits), row in rows.items():
        assert 0 < row["best_s"] <= row["median_s"]
        assert row["best"] == row["values"] / row["best_s"] / 1e9
        assert row["ratio"] == (row["best"] / row["target"] if row["target"] else None)
        assert row["values"] == result["values"] * {"merge of 4": 4, "merge of 8": 8}.get(name, 1) or name not in STAGES
        assert bits == 4 or row["target"] is None
    ours, naive = rows["merge of 4", 4], rows["merge of 4, plain NumPy", 4]
    assert result["times_plain_numpy"] == ours["best"] / naive["best"]
    assert result["times_float64_mean"] == ours["best"] / rows["float64 mean of 4", 32]["best"]


@pytest.mark.slow
def test_table() -> None:
    heading, columns, *rows, comparison = run().splitlines()
    assert "2 repeats" in heading
    assert columns.split() == ["1e9", "values/s", "bits", "best", "median", "target", "ratio"]
    assert len(rows) == 5 * len(STAGES) + 3
    encode = next(row for row in rows if row.split()[:2] == ["encode", "4"]).split()
    assert (encode[0], encode[1], float(encode[4])) == ("encode", "4", 0.8)
    assert "times as fast as plain NumPy" in comparison
