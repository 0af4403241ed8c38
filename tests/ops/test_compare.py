"""``diloco compare`` on runs' directories: over, stopped, going on, not begun, damaged; and what it refuses."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from diloco.errors import RunError, SettingsError
from diloco.service import rundir
from diloco.service.rundir import RunDirectory
from diloco.settings.presets import run_settings
from diloco_ops.compare.compare_command import compare, read_all
from diloco_ops.compare.reading import read
from diloco_report.side_by_side import MAX_RUNS, LossSample

TEXT = "7d2a5b8e" * 8
LEARNER: dict[str, Any] = {
    "tokens": 500,
    "tokens_merged": 400,
    "bytes_up": 60,
    "bytes_down": 90,
    "blocked_fraction": 0.01,
    "points": [[2.0, 100, 1, 5.5], [4.0, 300, 3, 4.5]],
}
SERIES: dict[str, Any] = {
    "wall_s": 8.0,
    "learners": {"ann": LEARNER, "bob": LEARNER | {"blocked_fraction": 0.02, "points": [[3.0, 200, 1, 5.0]]}},
    "validation": [[4.0, 200, 4.75], [6.0, 300, 4.25]],
    "traffic": [[2.0, 10, 30], [8.0, 120, 180]],
    "merges": [{}, {}, {}],
}
REPORT: dict[str, Any] = {
    "wall_s": 10.0,
    "parameters": 1000,
    "units": "nats per byte",
    "val_loss": 4.0,
    "val_loss_initial": 5.5,
    "values": {"val_loss/other": 3.5},
    "tokens_processed": 1000,
    "tokens_merged": 750,
    "versions": 12,
    "learners": {"ann": {"blocked_fraction": 0.01}, "bob": {"blocked_fraction": 0.03}},
    "traffic": {"bytes_up": 100, "bytes_down": 300},
    "changes": [{"text": "tokens = 1000"}],
    "series": {
        "learners": {"ann": [[5.0, 500, 5, 4.5]]},
        "global": [[5.0, 300, 4.5]],
        "traffic": [[5.0, 50, 150], [10.0, 100, 300]],
    },
}


def make(path: Path, name: str = "", **changed: Any) -> Path:
    """A run's directory without losses."""
    own = {name: changed.pop(name) for name in ("units", "data") if name in changed}
    usual: dict[str, Any] = {"units": "nats per byte", "data": None}
    RunDirectory(path, name or path.name, "nats://x", settings=run_settings("decoupled", changed), **usual | own).save()
    return path


def over(path: Path, report: dict[str, Any] | None = None, text: str | None = TEXT, **changed: Any) -> Path:
    make(path, **changed)
    (path / "report.json").write_text(json.dumps(REPORT | (report or {})))
    (path / "evaluation.json").write_text(json.dumps({"text": text}))
    return path


def going_on(path: Path, series: dict[str, Any] | None = None, **changed: Any) -> Path:
    make(path, **changed)
    (path / "series.json").write_text(json.dumps(SERIES | (series or {})))
    return path


def test_a_run_that_is_over_is_read_from_its_report(tmp_path: Path) -> None:
    [entry] = read_all([over(tmp_path / "a", seed=5)])
    assert (entry.name, entry.state, entry.units, entry.parameters) == ("a", "finished", "nats per byte", 1000)
    # the end is a point of its own; bytes are those of both ways
    assert entry.validation == [LossSample(4.5, 300.0, 5.0, 200.0), LossSample(4.0, 750.0, 10.0, 400.0)]
    assert entry.training == [LossSample(4.5, 500.0, 5.0, 200.0)]
    assert entry.ends["rate"] == 100.0
    assert entry.ends["merged"] == 0.75
    assert entry.ends["blocked"] == 0.03
    assert entry.values == {"val_loss/other": 3.5}
    assert entry.settings["seed"] == 5
    assert entry.settings["round.steps"] == run_settings("decoupled", {}).round.steps
    assert (entry.changes, entry.notes) == (["tokens = 1000"], [])


def test_a_local_run_goes_on_as_long_as_diloco_up_is_at_work_on_it(tmp_path: Path) -> None:
    going_on(tmp_path / "a")
    (tmp_path / "a" / "services").mkdir()
    assert read(tmp_path / "a").state == "stopped"  # its series is new
    hour_ago_s = time.time() - 3600
    os.utime(tmp_path / "a" / "series.json", (hour_ago_s, hour_ago_s))
    with rundir.locked(tmp_path / "a"):
        assert read(tmp_path / "a").state == "going on"
    assert read(tmp_path / "a").state == "stopped"


def test_a_run_that_goes_on_or_was_stopped_is_read_from_its_series(tmp_path: Path) -> None:
    going_on(tmp_path / "a")
    going_on(tmp_path / "b")
    hour_ago_s = time.time() - 3600
    os.utime(tmp_path / "b" / "series.json", (hour_ago_s, hour_ago_s))
    new, old = read_all([tmp_path / "a", tmp_path / "b"])
    assert (new.state, old.state) == ("going on", "stopped")
    # bytes: 40 at 2 s, 300 at 8 s, in between in proportion
    assert new.validation == [LossSample(4.75, 200.0, 4.0, 40 + 260 / 3), LossSample(4.25, 300.0, 6.0, 40 + 520 / 3)]
    assert [(sample.time, sample.loss) for sample in new.training] == [(2.0, 5.5), (3.0, 5.0), (4.0, 4.5)]
    assert new.ends == {
        "loss": 4.25,
        "tokens": 1000,
        "merged": 0.8,
        "time_s": 8.0,
        "rate": 125.0,
        "bytes_up": 120,
        "bytes_down": 180,
        "versions": 3,
        "blocked": 0.02,
    }


def test_a_run_that_goes_on_has_more_versions_than_its_page_shows(tmp_path: Path) -> None:
    thinned = going_on(tmp_path / "a", {"merges_every": 2, "newest": [3, 4]})
    [entry] = read_all([thinned])
    assert entry.ends["versions"] == 7


def test_what_an_older_version_wrote_has_its_bytes_at_the_end_alone(tmp_path: Path) -> None:
    series = {name: value for name, value in REPORT["series"].items() if name != "traffic"}
    [entry] = read_all([over(tmp_path / "a", {"series": series})])
    assert [sample.bytes for sample in entry.validation] == [None, 400.0]
    assert [sample.bytes for sample in entry.training] == [None]
    assert "bytes are known only at the end" in entry.notes[0]


def test_a_run_without_losses_yet_has_an_entry_that_says_so(tmp_path: Path) -> None:
    begun = going_on(tmp_path / "begun", {"learners": {}, "validation": [], "traffic": [], "merges": []})
    for entry in read_all([make(tmp_path / "new"), begun]):
        assert (entry.validation, entry.training) in (((), ()), ([], []))
        assert "no losses yet" in entry.notes[0]
    assert read_all([tmp_path / "new"])[0].state == "not begun"


def test_losses_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    [entry] = read_all([over(tmp_path / "a", {"val_loss": None, "series": REPORT["series"] | {"global": [[1.0, 2, None]]}})])
    assert entry.validation == []
    assert entry.ends["loss"] is None


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ((TEXT, TEXT), ("Python's standard library",) * 2),
        ((TEXT, "ff" * 32), ("Python's standard library (7d2a5b8e)", "Python's standard library (ffffffff)")),
        ((TEXT, None), ("Python's standard library",) * 2),
    ],
)
def test_texts_are_told_apart_by_their_hashes(tmp_path: Path, texts: tuple[str | None, ...], words: tuple[str, ...]) -> None:
    paths = [over(tmp_path / f"r{number}", text=text) for number, text in enumerate(texts)]
    entries = read_all(paths)
    assert tuple(entry.text for entry in entries) == words
    assert any("assumed to be" in note for note in entries[1].notes) == (texts[1] is None)


def test_other_data_and_other_units_are_of_another_kind(tmp_path: Path) -> None:
    entries = read_all(
        [
            over(tmp_path / "a"),
            over(tmp_path / "b", data="/texts", text="ee" * 32),
            over(tmp_path / "c", {"units": "nats per token"}),
            going_on(tmp_path / "d", units=None),
        ]
    )
    assert [entry.kind for entry in entries] == [
        ("nats per byte", "Python's standard library"),
        ("nats per byte", "/texts"),
        ("nats per token", "Python's standard library"),
        ("units not known", "Python's standard library"),
    ]


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    paths = [make(tmp_path / place, name="run") for place in ("here", "there")]
    assert [entry.name for entry in read_all([*paths, make(tmp_path / "other")])] == [
        f"run ({tmp_path / 'here'})",
        f"run ({tmp_path / 'there'})",
        "other",
    ]


def test_the_command_writes_one_page_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = make(tmp_path / "h", name="[red]\x1b[2J\ud800<img src=x>")
    compare([over(tmp_path / "a"), hostile, over(tmp_path / "c", {"units": "nats per token"})], tmp_path / "new" / "page.html")
    said = capsys.readouterr().out
    assert f"page: {tmp_path / 'new' / 'page.html'}" in said
    assert "losses in different units or of different texts cannot be compared: the page draws them separately" in said
    assert "losses in nats per token, Python's standard library" in said
    assert "– means that the value was not measured; the page says why" in said  # the hostile run goes on, and lacks values
    assert "\x1b" not in said
    assert "[red]" in said
    page = (tmp_path / "new" / "page.html").read_text()
    assert "&lt;img src=x&gt;" in page
    assert "<img" not in page


def test_where_all_was_measured_no_dash_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare([over(tmp_path / "a"), over(tmp_path / "b")], tmp_path / "page.html")
    assert "means that" not in capsys.readouterr().out


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.json").write_text("{}")
    run = over(tmp_path / "a")
    for path, said in (
        (tmp_path / "empty", "not a run's directory"),
        (tmp_path / "nothing", "does not exist"),
        (tmp_path / "file.json", "neither a run's directory nor a file of results"),
    ):
        with pytest.raises(RunError, match=said) as raised:
            read_all([run, path])
        assert str(path) in str(raised.value)


def test_one_run_is_not_compared_with_itself(tmp_path: Path) -> None:
    run = over(tmp_path / "a")
    (tmp_path / "link").symlink_to(run)
    for again in (run, tmp_path / "link", tmp_path / "a" / ".." / "a"):
        with pytest.raises(SettingsError, match="given twice"):
            read_all([run, again])


def test_more_runs_than_a_page_holds_are_refused(tmp_path: Path) -> None:
    paths = [make(tmp_path / f"r{number}") for number in range(MAX_RUNS + 1)]
    assert len(read_all(paths[:-1])) == MAX_RUNS
    with pytest.raises(SettingsError, match=f"at most {MAX_RUNS}"):
        read_all(paths)


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"wall_s": "x"}', "\0"])
@pytest.mark.parametrize("name", ["report.json", "series.json"])
def test_a_damaged_file_is_named_with_a_remedy(tmp_path: Path, name: str, damage: str) -> None:
    path = make(tmp_path / "a")
    (path / name).write_text(damage)
    with pytest.raises(RunError, match="damaged") as raised:
        read_all([path])
    assert name in str(raised.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"series": {"global": [[1]], "learners": {}}},
        {"learners": [3]},
        {"traffic": None},
        {"changes": [{}]},
        {"values": 3},
        {"series": {"global": [[float("nan"), 1, 2.0]], "learners": {}}},
        {"series": REPORT["series"] | {"traffic": [[1.0, None, 3]]}},
    ],
)
def test_a_report_of_another_form_is_named(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(RunError, match=r"report\.json: damaged"):
        read_all([over(tmp_path / "a", wrong)])
