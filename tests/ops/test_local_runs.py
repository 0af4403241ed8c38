"""The runs of a folder: where each stands by its files, and which one commands without a directory take."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from tests.made.reports import fake_report
from tests.pace import DEADLINE_S
from typer.testing import CliRunner

from diloco.errors import RunError, SettingsError
from diloco.service import rundir
from diloco.service.rundir import RunDirectory
from diloco.settings.presets import run_settings
from diloco_ops.page import page_command as page
from diloco_ops.reading import inspect, local_runs, runs
from diloco_ops.reading.local_runs import local_run, newest_run, stands
from diloco_ops.top import top_command as top
from diloco_ops.weights import evaluating, export


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make(
    name: str, at_s: float, *, url: str = "nats://127.0.0.1:1", processed: int | None = 610, services: bool = True
) -> Path:
    """Make a run's directory, as ``diloco up`` leaves it when it is stopped."""
    path = Path("runs") / name
    RunDirectory(path, name, url, None, run_settings(overrides={"tokens": 1000})).save()
    if services:
        (path / "services").mkdir()
    if processed is not None:
        status = {"run": name, "tokens_processed": processed, "tokens_budget": 1000, "learners": {"learner-0": {}}}
        (path / "status.json").write_text(json.dumps(status))
    for file in path.glob("*.json"):
        os.utime(file, (at_s, at_s))
    return path


def finish(path: Path) -> None:
    (path / "report.json").write_text("{}")


def test_where_a_run_stands() -> None:
    stopped, begun, elsewhere = make("a", 10), make("b", 10, url="", services=False), make("c", 10, services=False)
    finished = make("d", 10)
    finish(finished)
    damaged = make("e", 10)
    (damaged / "run.json").write_text("{")
    assert [local_run(path).standing for path in (stopped, begun, elsewhere, finished, damaged)] == [
        "stopped", "not begun", "elsewhere", "finished", "damaged"
    ]  # fmt: skip
    with rundir.locked(stopped):
        assert stands(local_run(stopped)) == "running at 61 %"
    assert stands(local_run(stopped)) == "stopped at 61 %"
    assert stands(local_run(finished)) == "finished"


def test_a_run_that_a_url_names_is_elsewhere_whatever_this_folder_holds() -> None:
    Path("services").mkdir()
    assert local_runs.standing_of(RunDirectory(Path(), "mine", "nats://there:4222", None, run_settings())) == "elsewhere"


@pytest.mark.parametrize(
    ("status", "fraction"),
    [
        ('{"tokens_processed": 610, "tokens_budget": 1000}', 0.61),
        ('{"tokens_processed": 1100, "tokens_budget": 1000}', 1.0),  # learners take a step more than the budget
        ('{"tokens_processed": 1, "tokens_budget": 0}', None),
        ('{"tokens_processed": "many", "tokens_budget": 1000}', None),
        ("[]", None),
        ("{", None),
    ],
)
def test_progress_is_that_of_the_last_status(status: str, fraction: float | None) -> None:
    path = make("a", 10)
    (path / "status.json").write_text(status)
    assert local_run(path).fraction == fraction


def test_the_newest_run_is_the_one_with_the_newest_sign(capsys: pytest.CaptureFixture[str]) -> None:
    make("z", 10)
    make("b", 30)
    make("m", 20)
    (make("damaged", 40) / "run.json").write_text("{")
    Path("runs/lab").mkdir()
    Path("runs/notes.txt").write_text("")
    assert [run.name for run in local_runs.local_runs()] == ["damaged", "b", "m", "z"]
    assert newest_run("diloco status") == Path("runs/b")
    assert capsys.readouterr().err == "diloco status: runs/b, the newest run, which is stopped at 61 %\n"


COMMANDS: dict[str, Callable[[], object]] = {
    "status": inspect.status,
    "logs": inspect.logs,
    "top": top.top,
    "page": page.page,
    "sample": evaluating.sample,
    "eval": evaluating.evaluate,
    "export": lambda: export.export(["weights.safetensors"]),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_without_a_run_names_what_to_do(command: str) -> None:
    with pytest.raises(RunError, match=rf"^diloco {command}: there is no run in runs/ of this folder; name .*diloco up$"):
        COMMANDS[command]()


@pytest.mark.parametrize("command", ["status", "top", "page"])
def test_a_stopped_run_is_answered_with_the_command_that_goes_on(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    make("d12", 10)
    says = "run 'd12' is stopped at 61 %; go on with: diloco up --run-dir runs/d12"
    if command == "status":
        inspect.status()
        assert capsys.readouterr().out == says + "\n"
        inspect.status(json_=True)
        answer = json.loads(capsys.readouterr().out)
        assert (answer["run"], answer["state"], answer["tokens_processed"]) == ("d12", "stopped", 610)
    else:
        with pytest.raises(RunError, match=rf"^{says}$"):
            COMMANDS[command]()


def test_the_page_of_a_finished_run_is_its_report_to_those_with_the_token(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    finish(make("d12", 10))
    (folder / "runs" / "d12" / "report.json").write_text(json.dumps(fake_report(learners=2, run="d12")))
    answers: dict[str, str] = {}

    def look(place: str) -> None:
        url, _, token = place.partition("#")
        for name, given in (("right", token), ("wrong", "f" * 32)):
            try:
                with urlopen(Request(url, headers={"Authorization": f"Bearer {given}"}), timeout=DEADLINE_S) as answer:
                    answers[name] = answer.read().decode()
            except HTTPError as error:
                answers[name] = str(error.code)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(page, "show", look)
    page.page(open_=True)
    report = (folder / "runs" / "d12" / "report.html").as_uri()
    assert f"run d12 is finished; its report: {report}, and until Ctrl-C: http://127.0.0.1:" in capsys.readouterr().out
    assert answers["wrong"] == "401"
    for part in ("finished after 1:58", "Steps blocked", "data-chart", "learner-1"):
        assert part in answers["right"]


@pytest.mark.parametrize("report", ["", "[]", '{"a":'])
def test_the_page_of_a_finished_run_whose_report_is_damaged_names_the_file(report: str) -> None:
    finish(make("d12", 10))
    Path("runs/d12/report.json").write_text(report)
    with pytest.raises(RunError, match=r"d12/report.json: damaged"):
        page.page()


def test_export_takes_one_or_two_places() -> None:
    with pytest.raises(SettingsError, match=r"diloco export: c: one argument too many; expected \[DIR\] OUT"):
        export.export(["a", "b", "c"])


def test_local_runs_are_listed_newest_first() -> None:
    def said(*arguments: str) -> str:
        return CliRunner().invoke(runs.runs, arguments).output

    assert said() == "no runs in runs/ of this folder; start one: diloco up\n"
    make("old", 10)
    finish(make("new", 20))
    make("fresh", 30, url="", processed=None, services=False)
    lines = [line.split() for line in said().splitlines()]
    assert [line[:2] for line in lines[:2]] == [["run", "state"], ["runs/new", "finished"]]
    assert lines[2][:4] == ["runs/fresh", "not", "begun", "–"]
    assert lines[3][:7] == ["runs/old", "stopped", "61", "%", "610", "1", lines[3][6]]
    listed = json.loads(said("--json"))
    assert [(run["run"], run["state"], run["progress"], run["tokens"], run["learners"]) for run in listed] == [
        ("new", "finished", 0.61, 610, 1), ("fresh", "not begun", None, None, None), ("old", "stopped", 0.61, 610, 1)
    ]  # fmt: skip


def test_a_command_that_looks_whether_a_run_is_locked_does_not_stop_one_that_begins() -> None:
    path = make("a", 10)
    for _ in range(100):
        assert not rundir.is_locked(path)
        with rundir.locked(path):
            assert rundir.is_locked(path)
