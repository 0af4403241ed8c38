"""Benches print their result to stdout, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.services

BENCHES = Path(__file__).parents[2] / "bench"

LOSES_ITS_CONNECTION = """
import script
from diloco.process.observe import get_logger

arguments = script.parser("A bench.").parse_args(["--json"])
get_logger().warning("nats_disconnected", connection="bench")
script.print_result({"pace": 1.0}, arguments, print)
"""


def test_events_of_a_bench_go_to_stderr_and_its_result_alone_to_stdout() -> None:
    environment = os.environ | {"PYTHONPATH": str(BENCHES)}
    command = [sys.executable, "-c", LOSES_ITS_CONNECTION]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert json.loads(done.stdout) == {"pace": 1.0}
    assert "nats_disconnected" in done.stderr
