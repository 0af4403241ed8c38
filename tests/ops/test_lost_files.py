"""``diloco up`` says what to do where a service ends since one of its servers has lost its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.service.rundir import RunDirectory
from diloco.settings.presets import run_settings
from diloco_ops.up.launch import lost_files
from diloco_ops.up.supervise import ServiceFailed

APART = RunDirectory(Path("runs/mine"), "mine", "", None, run_settings("decoupled", {"regions.names": ["eu", "us"]}))
ALONE = RunDirectory(Path("runs/mine"), "mine", "", None, run_settings())
REGION = "; a region's server has lost its files: diloco up --run-dir runs/mine gives it what the others hold"
CONTROL = "; the control store has lost the run: begin again from a checkpoint (diloco up --resume CHECKPOINT)"


@pytest.mark.parametrize(
    ("directory", "said", "code", "remedy"),
    [
        (APART, "coordinator: stream DILOCO_mine_LOG: does not exist on the server", 4, REGION),
        (APART, "syncer-1: region eu: its server has lost the log of run 'mine'; this syncer ends", 4, REGION),
        (APART, "coordinator: bucket DILOCO_mine: stream not found (code 10059)", 4, CONTROL),
        (ALONE, "syncer-0: bucket DILOCO_mine: stream not found (code 10059)", 4, CONTROL),
        (ALONE, "syncer-0: stream DILOCO_mine_LOG: does not exist on the server", 4, ""),
        (APART, "learner-0: no connection to nats://127.0.0.1:1", 4, ""),
        (APART, "learner-0: stream DILOCO_mine_LOG: wrong settings", 2, ""),
    ],
)
def test_a_service_that_ends_for_lost_files_is_named_with_what_to_do(
    directory: RunDirectory, said: str, code: int, remedy: str
) -> None:
    failure = lost_files(ServiceFailed(said, code), directory)
    assert (str(failure), failure.exit_code) == (said + remedy, code)
