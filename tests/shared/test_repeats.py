"""Repeated lines of a log: written once, counted when they stop. Times are handed in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from diloco.process import observe
from diloco.process.repeats import MAX_BURSTS, Repeats


def line(event: str, level: str = "warning", **values: Any) -> dict[str, Any]:
    return {"event": event, "level": level, **values}


def test_a_burst_is_written_once_and_counted_when_it_is_over() -> None:
    repeats = Repeats()
    hashes = ["3f0a" * 8, "77c1" * 8]
    for number in range(40):  # twice a second
        values: dict[str, Any] = {
            "fragment": number % 3,
            "version": number,
            "reason": f"entry after version {number}: got {hashes[number % 2]}",
        }
        written = repeats.take(line("log_reloaded", **values), number / 2)
        assert written == ([], number == 0)
    assert repeats.next_s() == 29.5  # 10 s after the last one
    assert repeats.due(29.4) == []
    assert repeats.due(29.5) == [
        {
            "event": "lines_repeated",
            "level": "warning",
            "repeated": "log_reloaded",
            "count": 39,
            "within_s": 19.0,
            "fragments": [0, 1, 2],
            "version": 39,
            "reason": f"entry after version 39: got {hashes[1]}",
        }
    ]
    assert repeats.next_s() is None
    assert repeats.take(line("log_reloaded", fragment=0), 30.0) == ([], True)


def test_a_burst_that_goes_on_is_counted_each_minute() -> None:
    repeats = Repeats()
    counts = [count["count"] for second in range(181) for count in repeats.take(line("nats_error", reason="TLS"), second)[0]]
    assert counts == [59, 60, 60]
    assert [count["count"] for count in repeats.end()] == [1]


def test_lines_about_other_things_or_for_other_reasons_are_no_repetition() -> None:
    repeats = Repeats()
    lines = [
        line("nats_error", connection="us-control", reason="TLS fails"),
        line("nats_error", connection="us-bulk", reason="TLS fails"),
        line("nats_error", connection="us-bulk", reason="slow consumer"),
        line("nats_error", "error", connection="us-bulk", reason="slow consumer"),
        line("merge_too_far", learners=["learner-0"]),
        line("merge_too_far", learners=["learner-1"]),
    ]
    assert [repeats.take(each, 0.0)[1] for each in lines] == [True] * 6
    assert [repeats.take(each, 0.1)[1] for each in lines] == [False] * 6


def test_what_is_well_again_ends_a_burst_so_that_the_next_loss_is_written() -> None:
    repeats = Repeats()
    lost, found = line("nats_disconnected", connection="us-bulk"), line("nats_reconnected", "info", connection="us-bulk")
    assert repeats.take(lost, 0.0) == ([], True)
    assert repeats.take(found, 1.0) == ([], True)
    assert repeats.take(lost, 2.0) == ([], True)
    assert repeats.take(lost, 2.5) == ([], False)
    assert repeats.take(line("nats_reconnected", "info", connection="eu-bulk"), 3.0) == ([], True)
    counts, written = repeats.take(found, 3.5)
    assert ([count["count"] for count in counts], written) == ([1], True)


@pytest.mark.parametrize("level", ["debug", "info", "critical"])
def test_other_levels_are_never_held_back(level: str) -> None:
    repeats = Repeats()
    assert [repeats.take(line("taken_over", level), 0.0) for _ in range(3)] == [([], True)] * 3


def test_bursts_are_bounded_and_the_one_that_makes_room_is_counted() -> None:
    repeats = Repeats()
    repeats.take(line("first"), 0.0)
    repeats.take(line("first"), 0.0)
    counts = [count for number in range(5 * MAX_BURSTS) for count in repeats.take(line(f"event_{number}"), 1.0)[0]]
    assert [(count["repeated"], count["count"]) for count in counts] == [("first", 1)]
    assert len(repeats._bursts) == MAX_BURSTS


def test_a_process_writes_its_counts_by_itself_and_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.jsonl"
    observe.configure("syncer-0", "demo", region="eu", file=file)
    for fragment in range(166):
        observe.log.warning("offer_retried", fragment=fragment, reason=f"no answer of {fragment}")

    def main() -> int:
        return 0

    assert observe.run_main(main) == 0
    first, count = (json.loads(each) for each in file.read_text().splitlines())
    assert (first["event"], first["fragment"]) == ("offer_retried", 0)
    assert (count["event"], count["repeated"], count["count"]) == ("lines_repeated", "offer_retried", 165)
    assert (count["level"], count["service"], count["region"], count["run"]) == ("warning", "syncer-0", "eu", "demo")
    assert len(count["fragments"]) == 64
    observe.reset()


def test_a_count_needs_no_further_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.process.repeats.QUIET_S", 0.05)
    file = tmp_path / "x.jsonl"
    observe.configure("syncer-0", "demo", file=file)
    observe.log.warning("nats_error", reason="TLS")
    observe.log.warning("nats_error", reason="TLS")
    assert observe._write_once is not None
    timer = observe._write_once._timer
    assert timer is not None
    timer.join(10)
    assert [json.loads(each)["event"] for each in file.read_text().splitlines()] == ["nats_error", "lines_repeated"]
    observe.reset()
