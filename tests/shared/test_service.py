"""Names of processes that are as many as were started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from diloco.errors import DilocoError, RunError, SettingsError
from diloco.service import skeleton
from diloco.service.skeleton import parse_settings
from diloco.settings.service import ServiceSettings, SyncerSettings

SCRIPT = """
import sys
from diloco.service.skeleton import parse_settings
from diloco.settings.service import SyncerSettings
print(parse_settings(SyncerSettings, "test").name, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DILOCO_NAME", "syncer-us-*")
    monkeypatch.setenv("DILOCO_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("DILOCO_LOG_FORMAT", "console")
    monkeypatch.setattr(sys, "argv", ["test"])


def process() -> tuple[subprocess.Popen[str], str]:
    """A process of that name, which lives until its stdin is closed; and the name that it took."""
    started = subprocess.Popen([sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    return started, started.stdout.readline().strip()


def end(ended: subprocess.Popen[str]) -> None:
    ended.kill()
    ended.communicate()


@pytest.mark.services
def test_each_process_takes_the_first_number_that_is_free_and_leaves_it_to_the_next_one() -> None:
    one, first = process()
    two, second = process()
    try:
        assert [first, second] == ["syncer-us-0", "syncer-us-1"]
        end(one)
        three, third = process()
        end(three)
        assert third == "syncer-us-0"
    finally:
        end(one)
        end(two)


def test_a_name_without_a_star_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_NAME", "syncer-us")
    assert parse_settings(SyncerSettings, "test").name == "syncer-us"


@pytest.mark.services
def test_two_processes_of_one_name_do_not_use_one_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DILOCO_NAME", "syncer-us-0")
    monkeypatch.setattr(skeleton, "ENDING_S", 0.0)
    one, first = process()
    try:
        assert first == "syncer-us-0"
        with pytest.raises(RunError) as refused:
            parse_settings(SyncerSettings, "test")
        assert str(refused.value) == (
            f"name = 'syncer-us-0': another process with this name uses {tmp_path} (state_dir): stop that one, or give "
            "this one another name or another folder"
        )
        monkeypatch.setenv("DILOCO_NAME", "syncer-us-*")
        assert parse_settings(SyncerSettings, "test").name == "syncer-us-1"
    finally:
        end(one)
    monkeypatch.setenv("DILOCO_NAME", "syncer-us-0")
    assert parse_settings(SyncerSettings, "test").name == "syncer-us-0"  # a killed process leaves nothing behind


@pytest.mark.parametrize("name", ["*", "a*b", "Learner-*", "a" * 44 + "*", "a" * 49])
def test_a_star_stands_at_the_end_of_a_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_NAME", name)
    with pytest.raises(SettingsError, match="name"):
        parse_settings(ServiceSettings, "test")


def test_a_state_directory_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DILOCO_STATE_DIR", str(tmp_path / "file"))
    with pytest.raises(DilocoError, match=r"^state_dir: .*file cannot be written: File exists; set state_dir"):
        parse_settings(SyncerSettings, "test")


def test_a_number_counts_only_if_there_is_an_identity_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DILOCO_IDENTITY", str(tmp_path / "{name}.identity"))
    with pytest.raises(
        SettingsError, match=r"\{name\}.identity: there is none for name = 'syncer-us-\*': make it with 'diloco"
    ):
        parse_settings(SyncerSettings, "test")
    (tmp_path / "syncer-us-3.identity").touch()
    assert parse_settings(SyncerSettings, "test").name == "syncer-us-3"
    with pytest.raises(DilocoError, match=r"all names with an identity \(.*\{name\}.identity\) are taken"):
        parse_settings(SyncerSettings, "test")  # this process holds it
