"""A service's folder is one run's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.pace import DEADLINE_S

from diloco import __version__
from diloco.errors import RunError
from diloco.service import volume


def test_a_folder_is_claimed_once_and_found_again(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: volume.claim(tmp_path / "state", "demo"), range(32)))
    said = json.loads((tmp_path / "state" / "volume.json").read_text())
    assert said == {"format": 1, "run": "demo", "software": __version__}


def test_a_folder_of_another_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    volume.claim(tmp_path, "demo")
    before = (tmp_path / "volume.json").read_bytes()
    with pytest.raises(RunError) as refused:
        volume.claim(tmp_path, "other")
    assert str(refused.value) == (
        f"{tmp_path}: holds the files of run 'demo', not of 'other': give this service another folder (state_dir), or empty "
        "this folder"
    )
    assert (tmp_path / "volume.json").read_bytes() == before


def test_a_downgrade_is_refused(tmp_path: Path) -> None:
    (tmp_path / "volume.json").write_text('{"format": 2, "run": "demo", "software": "0.9.1", "more": []}')
    with pytest.raises(RunError) as refused:
        volume.claim(tmp_path, "demo")
    assert str(refused.value) == (
        f"{tmp_path}: was written by the newer diloco '0.9.1' (format 2), and this is {__version__} (format 1): start "
        "that version, or give this service another folder (state_dir)"
    )


@pytest.mark.parametrize(
    "content", [b"\xff", b"{", b"[]", b'{"format": 1}', b'{"format": 1e999, "run": "demo"}', b"[" * 4000, b" " * 9999]
)
def test_a_damaged_one_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "volume.json").write_bytes(content)
    with pytest.raises(RunError, match=r"volume.json: damaged \(.*remove the file if the folder belongs to this run"):
        volume.claim(tmp_path, "demo")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    with pytest.raises(RunError, match=r"^state_dir: .*/state cannot be written: .*; set state_dir \(DILOCO_STATE_DIR\) to"):
        volume.claim(tmp_path / "state", "demo")


@pytest.mark.services
@pytest.mark.parametrize("service", ["diloco_syncer", "diloco_learner", "diloco_coordinator"])
def test_a_service_on_another_runs_volume_ends_with_one_line(tmp_path: Path, service: str) -> None:
    volume.claim(tmp_path, "demo")
    environment = os.environ | {"DILOCO_NAME": "one", "DILOCO_RUN": "other", "DILOCO_STATE_DIR": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-m", service],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert ended.returncode == RunError.exit_code
    assert ended.stderr.count("\n") == 1
    assert f"{tmp_path}: holds the files of run 'demo', not of 'other'" in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["volume.json"]
