"""Permission violations, as a NATS server logs them: counted by identity and subject, and no client's for another's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from diloco.process.sender_counts import MAX_PAIRS
from diloco_coordinator.server_watch.violations import MAX_READ_BYTES, ViolationLog, names_of

ANN, EVE = "U" + "A" * 55, "U" + "E" * 55
LISTS = f"""
accounts {{
  P1 {{
    # ann: learner
    users: [ {{ nkey: {ANN}, permissions: {{
"""


def line(key: str, what: str, client: str = "v2.16.0:python3:toy-1-bulk") -> str:
    """A line as nats-server 2.15 writes it."""
    return f'[12673] 2026/11/29 11:48:12.006652 [ERR] 127.0.0.1:50638 - cid:149 - "{client}" - "P1/nkey:{key}" - {what}\n'


@pytest.fixture
def log(tmp_path: Path) -> ViolationLog:
    (tmp_path / "auth.conf").write_text(LISTS)
    (tmp_path / "nats.log").write_text(line(ANN, 'Publish Violation - Subject "before"'))
    return ViolationLog(tmp_path / "nats.log", tmp_path / "auth.conf")


def written(log: ViolationLog, text: str) -> dict[tuple[str, ...], float]:
    with log._log_file.open("a") as file:
        file.write(text)
    log.read()
    return dict(log.counts())


def test_violations_are_counted_by_identity_action_and_subject_from_now_on(log: ViolationLog) -> None:
    text = 2 * line(ANN, 'Publish Violation - Subject "$JS.API.STREAM.DELETE.DILOCO_x_LOG"')
    text += line(EVE, 'Subscription Violation - Subject "diloco.run.>", SID 12')
    text += line(EVE, "maximum payload exceeded: 1048576 vs 65536")
    text += "[1] 2026/11/29 11:48:12.0 [INF] Server is ready\n"
    found = written(log, text)
    assert found == {
        ("ann", "publish", "$JS.API.STREAM.DELETE.DILOCO_x_LOG"): 2.0,
        (f"key {blake3(EVE.encode()).hexdigest()[:8]}", "subscription", "diloco.run.>"): 1.0,
        (f"key {blake3(EVE.encode()).hexdigest()[:8]}", "payload", ""): 1.0,
    }
    assert not any(EVE in label for labels in found for label in labels), "a public key is a secret of its identity"
    assert log.total == 4


def test_a_client_s_own_name_counts_for_no_other_identity(log: ViolationLog) -> None:
    forged = f'x" - "P2/nkey:{ANN}" - Publish Violation - Subject "diloco.run.round.0'
    too_large = f'x" - "P2/nkey:{ANN}" - maximum payload exceeded: 2 vs 1'
    text = line(EVE, 'Publish Violation - Subject "y"', forged)
    found = written(log, text + "".join(line(EVE, "Slow Consumer Detected", name) for name in (forged, too_large)))
    assert found == {(f"key {blake3(EVE.encode()).hexdigest()[:8]}", "publish", "y"): 1.0}


def test_half_a_line_is_read_when_the_rest_has_come_and_a_log_that_was_rotated_from_its_beginning(log: ViolationLog) -> None:
    whole = line(ANN, 'Publish Violation - Reply "a"')
    assert written(log, whole[:90]) == {}
    assert written(log, whole[90:]) == {("ann", "publish", "a"): 1.0}
    log._log_file.write_text(line(ANN, 'Publish Violation - Subject "b"'))
    assert written(log, "") == {("ann", "publish", "a"): 1.0, ("ann", "publish", "b"): 1.0}
    log._log_file.unlink()
    log.read()
    assert log.total == 2


def test_a_log_that_was_rotated_several_times_since_the_last_look_is_read_to_its_end(log: ViolationLog) -> None:
    """As nats-server does: the name's file is renamed, with the time in the name, and begun anew."""
    old = log._log_file.with_name(f"{log._log_file.name}.2026.11.28")
    old.write_text(line(ANN, 'Publish Violation - Subject "older"'))
    os.utime(old, (1, 1))
    assert written(log, line(ANN, 'Publish Violation - Subject "a"')) == {("ann", "publish", "a"): 1.0}
    for second in range(3):
        with log._log_file.open("a") as file:
            file.write(line(ANN, 'Publish Violation - Subject "a"'))
        rotated = log._log_file.with_name(f"{log._log_file.name}.2026.11.29.{second}")
        log._log_file.rename(rotated)
        os.utime(rotated, (2 + second, 2 + second))
        log._log_file.touch()
    assert written(log, line(ANN, 'Publish Violation - Subject "b"')) == {
        ("ann", "publish", "a"): 4.0,
        ("ann", "publish", "b"): 1.0,
    }


def test_what_is_kept_and_read_at_once_is_bounded(log: ViolationLog) -> None:
    text = "".join(line(ANN, f'Publish Violation - Subject "{number}"') for number in range(2 * MAX_PAIRS))
    assert len(written(log, text)) == MAX_PAIRS + 1
    assert sum(log.counts().values()) == 2 * MAX_PAIRS
    written(log, "x" * (2 * MAX_READ_BYTES))
    assert len(log._rest) < MAX_READ_BYTES


@given(st.binary(max_size=400))
def test_no_bytes_end_the_reading(noise: bytes) -> None:
    log = ViolationLog(Path("/nonexistent"))
    log._take(b'[1] x [ERR] - "' + noise + b'" - Publish Violation - Subject "' + noise + b'"')
    for labels in log.counts():
        assert all(label.isascii() for label in labels)


def test_names_are_those_of_the_servers_list() -> None:
    assert names_of(LISTS) == {ANN: "ann"}
