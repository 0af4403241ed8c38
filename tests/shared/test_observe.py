"""Events, and how processes end. What needs a process of its own runs in one."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco.errors import AdmissionError, DilocoError, SettingsError
from diloco.process import logs, observe


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "logs" / "learner-0.jsonl"
    observe.configure("learner-0", "run", file=path)
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_event_is_one_json_line_with_the_fixed_keys_first(file: Path) -> None:
    observe.get_logger(shard=1).info("round_closed", fragment=3, weight=0.5, members=["learner-0"])
    (event,) = read(file)
    assert list(event) == [
        "time",
        "level",
        "service",
        "role",
        "run",
        "region",
        "event",
        "shard",
        "fragment",
        "weight",
        "members",
    ]
    assert (event["level"], event["service"], event["run"], event["event"]) == ("info", "learner-0", "run", "round_closed")
    assert [entry.event for entry in logs.merge(file.parent.parent)] == ["round_closed"]


def test_every_event_says_who_and_where(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    observe.configure("toy-1", "demo", role="learner", region="eu", file=path)
    observe.log.info("region_away", other_region="us", region="ap", role="other")
    (event,) = read(path)
    assert list(event)[:7] == list(logs.FIXED_KEYS)
    assert (event["service"], event["role"], event["run"], event["region"]) == ("toy-1", "learner", "demo", "eu")
    assert (event["other_region"], event["region_"], event["role_"]) == ("us", "ap", "other")
    observe.configure("up", "demo", file=path)
    observe.log.info("starting")
    assert (read(path)[-1]["role"], read(path)[-1]["region"]) == ("up", "")


def test_progress_is_told_every_half_minute_with_rates(file: Path) -> None:
    counts = {"steps": 100, "tokens": 1600}
    progress = observe.Progress(observe.get_logger(), 1000.0, lambda: (dict(counts), {"state": "stepping"}))
    for now_s, steps in ((1000.0, 100), (1029.9, 158), (1032.0, 164), (1061.9, 200), (1062.0, 224)):
        counts.update(steps=steps, tokens=16 * steps)
        progress.look(now_s)
    first, second = read(file)
    assert (first["event"], first["level"], first["state"]) == ("progress", "info", "stepping")
    # 64 steps in 32 s, of a process that had 100 behind it; then 60 in 30 s
    assert (first["steps"], first["steps_per_s"], first["tokens_per_s"]) == (164, 2.0, 32.0)
    assert (second["steps"], second["steps_per_s"]) == (224, 2.0)


def test_values_of_any_kind_are_written(file: Path) -> None:
    observe.log.info(
        "odd", path=Path("/x"), digest=b"\x01\xff", nan=float("nan"), array=np.arange(2), scalar=np.float32(0.5),
        huge=10**30, surrogate="\ud800", service="other", text="line\nline",
    )  # fmt: skip
    observe.log.info("plain", path=Path("/x"), digest=b"\x01\xff", nan=float("nan"), scalar=np.float32(0.5), service="other")
    odd, plain = read(file)
    assert odd["event"] == "odd"
    assert "1" + "0" * 30 in odd["huge"]
    assert (plain["path"], plain["digest"], plain["nan"], plain["scalar"]) == ("/x", "01ff", None, 0.5)
    assert (plain["service"], plain["service_"]) == ("learner-0", "other")


def test_levels(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    observe.configure("x", "run", level="warning", file=path)
    observe.log.info("quiet")
    observe.log.warning("loud")
    assert [event["event"] for event in read(path)] == ["loud"]


def test_exceptions_stay_inside_the_line(file: Path) -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        observe.log.exception("step_failed", step=3)
    (event,) = read(file)
    assert event["error"] == "ValueError: two\nlines"
    assert event["traceback"].startswith("Traceback")
    assert "exc_info" not in event


def test_a_torn_line_is_ended_by_the_next_process(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"time": "2026-')
    observe.configure("x", "run", file=path)
    observe.log.info("started")
    assert path.read_text().splitlines()[0] == '{"time": "2026-'
    assert json.loads(path.read_text().splitlines()[1])["event"] == "started"


def test_a_log_that_cannot_be_opened_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DilocoError, match="the log cannot be written"):
        observe.configure("x", "run", file=tmp_path / "file" / "x.jsonl")


def test_a_full_disk_drops_events_and_says_how_many() -> None:
    class Full(io.BytesIO):
        room = True

        def write(self, line: Any) -> int:
            if not self.room:
                raise OSError(28, "No space left on device")
            return super().write(line)

    stream = Full()
    lines = observe._JsonLines(stream)
    lines.write({"event": "a"})
    stream.room = False
    lines.write({"event": "b"})
    lines.write({"event": "c"})
    stream.room = True
    lines.write({"event": "d"})
    assert [json.loads(line) for line in stream.getvalue().splitlines()] == [
        {"event": "a"},
        {"event": "d", "events_dropped": 2},
    ]


def test_console_lines_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    observe.configure("syncer-0", "run", fmt="console")
    observe.log.warning("round_late", fragment=3, name="\x1b[2J[bold]")
    text = stderr.getvalue()
    assert " syncer-0      warn  round_late " in text
    assert text.endswith(" fragment=3 name=\\x1b[2J[bold]\n")


def test_libraries_and_tasks_and_threads_become_events(file: Path) -> None:
    logging.getLogger("nats").error("slow consumer %d", 3)

    async def leave_one() -> None:
        asyncio.get_running_loop().create_future().set_exception(ValueError("not looked at"))

    asyncio.run(leave_one())
    thread = threading.Thread(target=lambda: 1 // 0, name="encoder")
    thread.start()
    thread.join()
    first, second, third = read(file)
    assert (first["event"], first["library"], first["message"]) == ("library_message", "nats", "slow consumer 3")
    assert (second["library"], second["error"]) == ("asyncio", "ValueError: not looked at")
    assert (third["event"], third["thread"]) == ("internal_error", "encoder")
    assert "ZeroDivisionError" in third["traceback"]


def test_the_end_of_a_connection_that_a_library_reports_is_a_warning_without_a_traceback(file: Path) -> None:
    async def leave_one() -> None:
        asyncio.get_running_loop().create_future().set_exception(ConnectionResetError("by peer"))

    asyncio.run(leave_one())
    (event,) = read(file)
    assert (event["event"], event["level"], event["error"]) == ("library_message", "warning", "ConnectionResetError: by peer")
    assert "traceback" not in event


def test_refusals_are_logged_once_and_all_counted(file: Path) -> None:
    refused = observe.Counted(observe.log, limit=3)
    counts = [refused.note("learner-0", "HashError", fragment=1) for _ in range(3)]
    refused.note("learner-0", "FormatError")
    refused.note("learner-1", "HashError")
    for sender in range(100):
        refused.note(f"forged-{sender}", "HashError")
    assert counts == [1, 2, 3]
    assert refused.total == 105
    assert refused.counts()["learner-0", "HashError"] == 3
    assert len(refused.counts()) == 4
    assert [(event["sender"], event["kind"]) for event in read(file)] == [
        ("learner-0", "HashError"), ("learner-0", "FormatError"), ("learner-1", "HashError"), ("*", "*"),
    ]  # fmt: skip


def _raise(error: BaseException) -> int:
    raise error


@pytest.mark.parametrize(
    ("error", "code", "line", "logged"),
    [
        (
            AdmissionError("tensor 'head'\nis (2, 3)"), 6, "diloco: tensor 'head' is (2, 3)\n",
            [("critical", 6, "tensor 'head'\nis (2, 3)")],
        ),
        (
            ExceptionGroup("tasks", [ExceptionGroup("in", [SettingsError("no setting 'x'")])]), 2,
            "diloco: no setting 'x'\n", [("critical", 2, "no setting 'x'")],
        ),
        (KeyboardInterrupt(), 130, "", [("info", 130, "interrupted")]),
        (BaseExceptionGroup("tasks", [KeyboardInterrupt()]), 130, "", [("info", 130, "interrupted")]),
        (SystemExit(3), 3, "", [("critical", 3, "sys.exit(3) was called")]),
        (SystemExit(None), 0, "", []),
        (SystemExit("told"), 1, "diloco: told\n", [("critical", 1, "told")]),
    ],
)  # fmt: skip
def test_endings(
    error: BaseException,
    code: int,
    line: str,
    logged: list[tuple[str, int, str]],
    file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert observe.run_main(lambda: _raise(error)) == code
    assert capsys.readouterr().err == line
    events = read(file)
    assert {(event["event"], event["service"]) for event in events} <= {("process_ended", "learner-0")}
    assert [(event["level"], event["code"], event["reason"]) for event in events] == logged


def test_results_are_exit_codes() -> None:
    assert observe.run_main(lambda: None) == 0
    assert observe.run_main(lambda: 4) == 4


def test_a_defect_is_logged_and_told_in_one_line(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    group = ExceptionGroup("tasks", [SettingsError("x"), KeyError("y")])
    assert observe.run_main(lambda: _raise(group), "diloco-syncer") == 70
    assert capsys.readouterr().err == f"diloco-syncer: internal error: KeyError: 'y'; see {file}\n"
    defect, end = read(file)
    assert (defect["event"], defect["level"]) == ("internal_error", "critical")
    assert "KeyError" in defect["traceback"]
    assert (end["event"], end["level"], end["code"]) == ("process_ended", "critical", 70)


def test_a_defect_before_any_configuration_leaves_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(observe, "_log_place", None)
    assert observe.run_main(lambda: _raise(RuntimeError("oh"))) == 70
    (path,) = tmp_path.iterdir()
    assert capsys.readouterr().err == f"diloco: internal error: RuntimeError: oh; see {path}\n"
    (event,) = read(path)
    assert event["error"] == "RuntimeError: oh"


def test_a_defect_without_any_temporary_folder_shows_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/proc/missing")
    monkeypatch.setattr(observe, "_log_place", None)
    assert observe.run_main(lambda: _raise(RuntimeError("oh"))) == 70
    *traceback, last = capsys.readouterr().err.splitlines()
    assert traceback[0] == "Traceback (most recent call last):"
    assert last == "diloco: internal error: RuntimeError: oh; see the traceback above"


@pytest.mark.services
def test_a_process_without_run_main_shows_no_traceback(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    code = f"""
        from pathlib import Path
        from diloco.process import observe
        observe.configure("x", "run", file=Path({str(path)!r}))
        1 // 0
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "internal error: ZeroDivisionError" in done.stderr
    assert read(path)[0]["event"] == "internal_error"


@pytest.mark.services
def test_a_reader_that_went_away_is_no_error() -> None:
    code = """
        import sys
        from diloco.process import observe

        def main():
            for number in range(200_000):
                print("line", number)

        sys.exit(observe.run_main(main))
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 0
