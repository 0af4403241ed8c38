"""Ids that all services make alike, which versions are told of, and a collector that is slow, away, or not wanted at all."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
from blake3 import blake3
from tests.pace import DEADLINE_S

from diloco.core.run.tracing import Span, is_sampled, offer_ids, version_ids
from diloco.errors import SettingsError
from diloco.process import telemetry
from diloco.process.observe import Logger
from diloco.process.telemetry import MAX_WAITING, Telemetry
from diloco.settings.service import ServiceSettings, TelemetrySettings

RUN = bytes(range(8))
WITHOUT = "needs diloco[otel]"


class Noted:
    """A logger that keeps the names of events."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def warning(self, event: str, **_: Any) -> None:
        self.events.append(event)


def settings(endpoint: str, sample: float = 1.0) -> ServiceSettings:
    return ServiceSettings(name="one", telemetry=TelemetrySettings(endpoint=endpoint, sample=sample))


def test_ids_follow_from_names_alone() -> None:
    digest = blake3(RUN + b"\0version\x003\x0017", derive_key_context="diloco 2026 ids of traces").digest()
    ids = version_ids(RUN, 3, 17)
    assert (ids.trace, ids.span) == (digest[:16], digest[16:24])
    child = blake3(ids.trace + ids.span + b"\0read\0ann", derive_key_context="diloco 2026 ids of traces").digest()[:8]
    assert (ids.child("read", "ann").trace, ids.child("read", "ann").span) == (ids.trace, child)
    offer = blake3(RUN + b"\0offer\0ann\x007\x003\x002", derive_key_context="diloco 2026 ids of traces").digest()
    assert offer_ids(RUN, "ann", 7, 3, 2).trace == offer[:16]
    others = {version_ids(RUN, 3, 18), version_ids(RUN, 31, 7), version_ids(bytes(8), 3, 17), offer_ids(RUN, "ann", 7, 3, 3)}
    assert len({each.trace for each in others} | {ids.trace}) == 5


def test_a_share_of_the_versions_is_told_of_the_same_for_all() -> None:
    versions = [version_ids(RUN, fragment, version) for fragment in range(4) for version in range(1000)]
    assert not any(is_sampled(each, 0.0) for each in versions)
    assert all(is_sampled(each, 1.0) for each in versions)
    quarter = {each.trace for each in versions if is_sampled(each, 0.25)}
    assert 880 < len(quarter) < 1120  # 1000, with a standard deviation of 27
    assert {each.trace for each in versions if is_sampled(each, 0.1)} < quarter


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
        ("http://127.0.0.1:4318/", "http://127.0.0.1:4318/v1/traces"),
        ("https://otel.example/run/traces", "https://otel.example/run/traces"),
    ],
)
def test_an_endpoint_without_a_path_has_the_usual_one(given: str, sent: str) -> None:
    assert TelemetrySettings(endpoint=given).traces_url == sent


@pytest.mark.parametrize(
    "wrong", ["127.0.0.1:4318", "ftp://host:1", "http://", "http://user:word@host:1", "http://host:99999", "http://a b"]
)
def test_what_is_no_endpoint_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="expected http:// or https://"):
        TelemetrySettings(endpoint=wrong)


@pytest.mark.tool
def test_without_an_endpoint_nothing_of_it_is_loaded() -> None:
    assert telemetry.begin(ServiceSettings(name="one"), "syncer", cast(Logger, Noted())) is None
    loads = "import sys, diloco.member.member, diloco_syncer.service, diloco_coordinator.service, diloco_learner.run.process"
    found = subprocess.run(
        [sys.executable, "-c", f"{loads}\nprint([name for name in sys.modules if name.startswith('opentelemetry')])"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == "[]"


def test_an_endpoint_without_the_libraries_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(SettingsError, match=r"telemetry.endpoint .* is not installed .*; pip install 'diloco\[otel\]'"):
        telemetry.begin(settings("http://127.0.0.1:4318"), "syncer", cast(Logger, Noted()))


def until(reached: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not reached():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


SPAN = Span("round", version_ids(RUN, 3, 17), None, 1.0, 2.0, {"diloco.fragment": 3})


def test_a_collector_that_takes_nothing_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.sdk", reason=WITHOUT)
    monkeypatch.setattr(telemetry, "TIMEOUT_S", 1.0)
    monkeypatch.setattr(telemetry, "CLOSE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        made = Telemetry(settings(f"http://127.0.0.1:{silent.getsockname()[1]}"), "syncer", cast(Logger, Noted()))
        for _ in range(3 * MAX_WAITING):  # more than waits and is on its way
            made.add(SPAN)
        assert made.dropped >= MAX_WAITING
        assert made.exported == 0
        made.close()


def test_a_collector_that_is_away_is_told_once_and_spans_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.sdk", reason=WITHOUT)
    monkeypatch.setattr(telemetry, "TIMEOUT_S", 0.5)
    log = Noted()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    made = Telemetry(settings(f"http://127.0.0.1:{port}"), "syncer", cast(Logger, log))
    for number in (1, 2):
        made.add(SPAN)
        until(lambda number=number: made.dropped == number)  # type: ignore[misc]
    assert log.events == ["telemetry_not_exported"]
    made.close()
