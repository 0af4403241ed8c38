"""A run's directory: what was asked for reads back, and anything else is refused with the file's name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco.errors import RunError
from diloco.service.rundir import RunDirectory, load, write_json
from diloco.settings.presets import run_settings


def directory(path: Path, data: str | None = "/texts") -> RunDirectory:
    settings = run_settings("published", {"round.steps": 7, "round.quorum": "all"})
    return RunDirectory(path, "r1", "nats://host:4222", data, settings)


@pytest.mark.parametrize("data", ["/texts", None])
def test_what_was_saved_reads_back(tmp_path: Path, data: str | None) -> None:
    saved = directory(tmp_path / "runs" / "r1", data)
    saved.save()
    again = load(tmp_path / "runs" / "r1")
    assert again == saved
    assert again.settings.digest() == saved.settings.digest()


def test_a_run_from_another_one_has_learners_as_that_one_has(tmp_path: Path) -> None:
    torch = {"learner-1": "mine:make", "learner-9": "mine:make"}
    old = replace(directory(tmp_path / "old"), devices_per_learner=4, processes_per_learner=2, least_processes=1, torch=torch)
    new = replace(directory(tmp_path / "new"), learners=2).with_learners_of(old)
    assert (new.devices_per_learner, new.processes_per_learner, new.least_processes) == (4, 2, 1)
    assert new.torch == {"learner-1": "mine:make"}  # of two learners there is no tenth
    assert new.path == tmp_path / "new"
    assert new.with_learners_of(directory(tmp_path)).torch is None


def test_a_run_is_finished_when_it_has_a_report(tmp_path: Path) -> None:
    run = directory(tmp_path)
    assert not run.finished
    write_json(run.report, {})
    assert run.finished


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    file = tmp_path / "new" / "value.json"
    write_json(file, {"a": [1]})
    write_json(file, {"b": None})
    assert json.loads(file.read_text()) == {"b": None}
    assert list(file.parent.iterdir()) == [file]
    with pytest.raises(TypeError):
        write_json(file, {"c": object()})
    assert json.loads(file.read_text()) == {"b": None}


def test_there_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"nowhere: not a run's directory \(it has no run.json\)"):
        load(tmp_path / "nowhere")


def test_a_run_of_another_format(tmp_path: Path) -> None:
    directory(tmp_path).save()
    file = tmp_path / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 9, "version": "7.7"}))
    with pytest.raises(RunError, match=r"made by version 7.7 of diloco \(format 9\); this is .* \(format 3\)"):
        load(tmp_path)


def test_a_run_json_that_is_a_directory(tmp_path: Path) -> None:
    (tmp_path / "run.json").mkdir()
    with pytest.raises(RunError, match=r"run.json: damaged"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"settings": {"round": {"steps": 0}}}, "round.steps = 0"),
        ({"settings": None}, ""),
        ({"settings": [1]}, ""),
        ({"name": ...}, "name"),
        ({"format": ...}, "format"),
    ],
)
def test_a_damaged_run_json_is_refused(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    directory(tmp_path).save()
    file = tmp_path / "run.json"
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))
    with pytest.raises(RunError, match=f"run.json: damaged: .*{expected}"):
        load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"[]", b"3", b"null", b'"text"', b"\xff\xfe"])
def test_content_that_is_no_run_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(RunError, match=r"run.json: damaged"):
        load(tmp_path)


def test_a_run_json_cut_anywhere_is_refused(tmp_path: Path) -> None:
    directory(tmp_path).save()
    file = tmp_path / "run.json"
    whole = file.read_bytes()
    for length in range(0, len(whole), 7):
        file.write_bytes(whole[:length])
        with pytest.raises(RunError, match="damaged"):
            load(tmp_path)
