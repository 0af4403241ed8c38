"""Reading a run's logs back, merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.errors import RunError
from diloco.process.logs import MAX_LINE_BYTES, LogLine, merge, printable, render, service_colour


def line(second: float, service: str, event: str, level: str = "info", **values: Any) -> str:
    whole, part = divmod(round(second * 1000), 1000)
    time = f"2026-11-21T07:19:{whole:02}.{part:03}000Z"
    return json.dumps({"time": time, "level": level, "service": service, "run": "run", "event": event, **values}) + "\n"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path


def write(run_dir: Path, service: str, *lines: str) -> None:
    with (run_dir / "logs" / f"{service}.jsonl").open("a") as file:
        file.writelines(lines)


def events(run_dir: Path, *args: Any, **kwargs: Any) -> list[str]:
    return [entry.event for entry in merge(run_dir, *args, **kwargs)]


def test_services_are_merged_in_time_order(run_dir: Path) -> None:
    write(run_dir, "learner-0", line(1, "learner-0", "a"), line(4, "learner-0", "d"))
    write(run_dir, "syncer-0", line(2, "syncer-0", "b"), line(3, "syncer-0", "c"), line(5, "syncer-0", "e"))
    assert events(run_dir) == ["a", "b", "c", "d", "e"]


def test_services_and_levels_are_filtered(run_dir: Path) -> None:
    for m in range(3):
        write(run_dir, f"learner-{m}", line(m, "", f"l{m}"), line(m + 0.5, "", f"w{m}", "warning"))
    write(run_dir, "syncer-0", line(9, "", "s", "error"), line(10, "", "odd", "shouting"))
    assert events(run_dir, ["learner-1", "syncer-*"]) == ["l1", "w1", "s", "odd"]
    assert events(run_dir, level="warning") == ["w0", "w1", "w2", "s", "odd"]
    with pytest.raises(RunError, match=r"no log of service 'lerner-1'; there are: learner-0, learner-1"):
        merge(run_dir, ["lerner-1"])


def test_without_logs_the_error_names_the_place(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no logs here"):
        merge(tmp_path)
    (tmp_path / "logs").mkdir()
    with pytest.raises(RunError, match="'loud' is unknown: give one of debug"):
        merge(tmp_path, level="loud")
    assert events(tmp_path) == []


@pytest.mark.parametrize(
    "damage",
    [
        '{"time": "2026-11-21T07:19:01.0',
        "[1, 2]",
        '{"time": 5, "level": "info", "event": "x"}',
        '{"time": "2026-11-21T07:19:01Z", "level": "info"}',
        '{"time": "2026-11-21T07:19:01Z", "level": 3, "event": "x"}',
        '{"time": "noon", "level": "info", "event": "x"}',
        "\x00\x1b[2Jplain text",
        "[" * 100_000,
        '{"time": "0001-01-01T00:00:00+14:00", "level": "info", "event": "x"}',  # in the year 0
    ],
)
def test_damaged_lines_are_shown_in_place(run_dir: Path, damage: str) -> None:
    write(run_dir, "learner-0", line(1, "learner-0", "a"), damage + "\n", line(3, "learner-0", "c"))
    write(run_dir, "syncer-0", line(2, "syncer-0", "b"))
    entries = list(merge(run_dir, level="error"))
    assert [entry.damaged for entry in entries] == [True]
    assert entries[0].raw == damage
    assert json.loads(entries[0].json())["text"] == damage
    assert "\x1b" not in render(entries[0]).plain
    assert events(run_dir) == ["a", "damaged_line", "b", "c"]


def test_bytes_that_are_not_text_and_endless_lines(run_dir: Path) -> None:
    path = run_dir / "logs" / "learner-0.jsonl"
    path.write_bytes(b"\xff\xfe\n" + b"x" * (3 * MAX_LINE_BYTES) + b"\n\n" + line(1, "learner-0", "after").encode())
    entries = list(merge(run_dir))
    assert [entry.event for entry in entries] == ["damaged_line", "damaged_line", "after"]
    assert len(entries[1].raw) == MAX_LINE_BYTES


def test_follow_sees_new_lines_new_files_and_torn_lines(run_dir: Path) -> None:
    write(run_dir, "learner-0", line(1, "learner-0", "a"), line(2, "learner-0", "torn")[:30])
    seen: list[str] = []
    steps = iter(range(4))

    def wait() -> bool:
        step = next(steps)
        if step == 0:
            assert seen == ["a"]
            write(run_dir, "learner-0", line(2, "learner-0", "torn")[30:])
            write(run_dir, "syncer-0", line(1.5, "syncer-0", "new file"))
        elif step == 1:
            assert seen == ["a", "new file", "torn"]
        elif step == 2:
            (run_dir / "logs" / "learner-0.jsonl").write_text(line(3, "learner-0", "replaced"))
        return step < 3

    seen.extend(entry.event for entry in merge(run_dir, follow=True, wait=wait))
    assert seen == ["a", "new file", "torn", "replaced"]


def test_a_last_line_without_its_end_is_read_when_not_following(run_dir: Path) -> None:
    write(run_dir, "learner-0", line(1, "learner-0", "a").rstrip("\n"))
    assert events(run_dir) == ["a"]


def test_json_is_the_line_as_written(run_dir: Path) -> None:
    text = line(1, "learner-0", "a", value=1.50)
    write(run_dir, "learner-0", text)
    assert [entry.json() + "\n" for entry in merge(run_dir)] == [text]


def test_render() -> None:
    values = {"fragment": 3, "loss": 1.23456789, "path": "a b", "nothing": None, "members": ["m"], "traceback": "T:\n  x"}
    plain = render(LogLine(1.0, "syncer-0", "warning", "round_closed", values, "")).plain
    first, *rest = plain.splitlines()
    assert " syncer-0      warn  round_closed " in first
    assert first.endswith(' fragment=3 loss=1.23457 path="a b" nothing=null members=["m"]')
    assert rest == ["    T:", "      x"]


def test_a_line_of_progress_fits_a_terminal_beside_the_name_of_its_container() -> None:
    values: dict[str, object] = {"state": "stepping", "loss": 2.4123, "step_s": 0.5132, "refused": 0, "version_min": 120}
    values |= {"steps": 93_512, "tokens": 1_234_567, "bytes_up": 12_345_678, "bytes_down": 98_765_432_100}
    values |= {f"{name}_per_s": 12_345.678 for name in ("steps", "tokens", "bytes_up", "bytes_down")}
    plain = render(LogLine(1.0, "learner-eu-12", "info", "progress", values, "")).plain
    assert len(plain) <= 100
    assert "progress state=stepping loss=2.412 steps=93.51k tokens=1.235M" in plain
    refused = render(LogLine(1.0, "learner-eu-12", "info", "progress", values | {"refused": 3}, "")).plain
    assert "progress refused=3 state=stepping" in refused


def test_render_cannot_be_used_to_drive_the_terminal() -> None:
    hostile = "\x1b[31m\x07\u202e\n"
    plain = render(
        LogLine(1.0, hostile, hostile, hostile, {hostile: hostile, "list": [hostile], "traceback": hostile}, "")
    ).plain
    assert all(part.isprintable() for part in plain.split("\n"))


def test_colours_are_stable_and_differ_between_neighbours() -> None:
    assert len({service_colour(f"learner-{m}") for m in range(8)}) == 8
    assert service_colour("learner-1") != service_colour("syncer-1")
    assert service_colour("coordinator") == service_colour("coordinator")
    assert service_colour("x-" + "9" * 5000).startswith("#")


@given(st.text())
def test_printable_text_has_no_control_characters(text: str) -> None:
    assert printable(text).isprintable()
