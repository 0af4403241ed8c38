"""Metrics over HTTP: the text is Prometheus's, the server answers what it should and bounds what anybody can make it do."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from tests.pace import DEADLINE_S

from diloco.errors import SettingsError
from diloco.nats.identity import Identity
from diloco.nats.server_list import ListWatch
from diloco.nats.transport import NatsTransport
from diloco.process.observe import Counted, get_logger
from diloco.service import metrics
from diloco.service.metrics import Exporter, Histogram, Metric, families, one_of
from diloco.settings.loading import load_service
from diloco.settings.service import ServiceSettings, host_and_port

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

LABELS = {"run": "mine", "name": "one", "region": ""}


@dataclass
class Answer:
    data: bytes


@dataclass
class Connection:
    is_connected: bool = True
    denied: int = 2
    says: str = "1970-01-12T12:46:40Z"  # an hour behind the broker's now_s

    async def request(self, subject: str, data: bytes, timeout: float) -> Answer:
        assert subject in ("$JS.API.STREAM.INFO.KV_DILOCO_mine", "$JS.API.STREAM.INFO.DILOCO_mine_LOG")
        return Answer(json.dumps({"ts": self.says}).encode())

    stats: Mapping[str, int] = field(default_factory=lambda: {"reconnects": 3})


@dataclass
class Certified:
    expires: datetime


class Broker:
    """As much of a transport as the exporter looks at."""

    identity: Identity | None = None
    now_s = 1_000_000.0
    lists: Mapping[str, ListWatch] = {}  # none without an identity

    def __init__(self) -> None:
        self.control, self.bulk = Connection(), Connection()

    def wall_s(self) -> float:
        return self.now_s

    @property
    def connected(self) -> bool:
        return self.control.is_connected and self.bulk.is_connected


@dataclass
class Worker:
    """A service that has joined its run, and whose metrics are ``values``."""

    values: Mapping[str, float] = field(default_factory=lambda: {"diloco_test_things_total": 5.0})
    reason: str | None = None
    beat: float | None = None
    quiet_s: float = metrics.SILENT_S
    refused: Counted | None = None

    def waits_for(self) -> str | None:
        return self.reason

    def beat_s(self) -> float | None:
        return self.beat

    def families(self) -> Iterator[Family]:
        def things(worker: Worker) -> float:
            return worker.values["diloco_test_things_total"]

        return families([Metric("diloco_test_things_total", "counter", "Things", things)], self, LABELS)


@pytest.fixture
async def exporter() -> AsyncIterator[Exporter]:
    settings = ServiceSettings(name="one", run="mine", metrics_address="127.0.0.1:0")
    async with Exporter(settings, "test", get_logger()) as made:
        yield made


def joined(exporter: Exporter, worker: Worker | None = None) -> tuple[Broker, Worker]:
    broker, worker = Broker(), worker or Worker()
    exporter.transport, exporter.observed = cast(NatsTransport, broker), worker
    return broker, worker


async def send(exporter: Exporter, data: bytes, *, end: bool = False) -> bytes:
    """What comes back, until the other side closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", exporter.port)
    writer.write(data)
    if end:
        writer.write_eof()
    try:
        return await asyncio.wait_for(reader.read(), DEADLINE_S)
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def ask(exporter: Exporter, path: str, method: str = "GET") -> tuple[int, dict[str, str], str]:
    answer = await send(exporter, f"{method} {path} HTTP/1.1\r\nHost: here\r\n\r\n".encode())
    head, _, body = answer.decode().partition("\r\n\r\n")
    status, *lines = head.split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    assert int(headers["Content-Length"]) == len(body)
    assert headers["Connection"] == "close"
    return int(status.split(" ")[1]), headers, body


def parsed(text: str) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    """Samples by name and labels; fails where the text breaks the format's rules."""
    found: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        assert family.type != "unknown"
        for sample in family.samples:
            labels = frozenset(sample.labels.items())
            assert labels not in found.setdefault(sample.name, {}), f"twice: {sample}"
            found[sample.name][labels] = sample.value
    return found


def text_of(table: list[Metric[None]]) -> str:
    from prometheus_client import CollectorRegistry, generate_latest

    class Collector:
        def collect(self) -> Iterator[Family]:
            return families(table, None, LABELS)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(cast(Any, Collector()))
    return generate_latest(registry).decode()


# ---- the text


def test_a_counter_a_gauge_and_a_histogram_line_by_line() -> None:
    times = Histogram((0.5, 2.0))
    for time_s in (0.5, 0.6, 2.0, 7.0):
        times.observe(time_s)
    table: list[Metric[None]] = [
        Metric("diloco_test_steps_total", "counter", "Steps", lambda _: 12),
        Metric("diloco_test_state", "gauge", "State", lambda _: one_of("b", ("a", "b")), ("state",)),
        Metric("diloco_test_wait_seconds", "histogram", "Waits", lambda _: times),
        Metric("diloco_test_absent_bytes", "gauge", "Has no value now", lambda _: None),
    ]
    own = 'name="one",region="",run="mine"'
    assert sorted(text_of(table).splitlines()) == sorted(
        f"""\
# HELP diloco_test_steps_total Steps
# TYPE diloco_test_steps_total counter
diloco_test_steps_total{{{own}}} 12.0
# HELP diloco_test_state State
# TYPE diloco_test_state gauge
diloco_test_state{{{own},state="a"}} 0.0
diloco_test_state{{{own},state="b"}} 1.0
# HELP diloco_test_wait_seconds Waits
# TYPE diloco_test_wait_seconds histogram
diloco_test_wait_seconds_bucket{{le="0.5",{own}}} 1.0
diloco_test_wait_seconds_bucket{{le="2.0",{own}}} 3.0
diloco_test_wait_seconds_bucket{{le="+Inf",{own}}} 4.0
diloco_test_wait_seconds_count{{{own}}} 4.0
diloco_test_wait_seconds_sum{{{own}}} 10.1""".splitlines()
    )


@given(st.dictionaries(st.text(), st.floats(allow_nan=False), max_size=5))
def test_labels_and_values_of_any_kind_come_back_as_they_were(values: dict[str, float]) -> None:
    table: list[Metric[None]] = [
        Metric(
            "diloco_test_x_bytes",
            "gauge",
            'a \\ and "b"',
            lambda _: {(key,): value for key, value in values.items()},
            ("kind",),
        )
    ]
    # of the format's rules only these: a line ends with \n alone, and values of labels are escaped
    found = parsed(text_of(table)).get("diloco_test_x_bytes", {})
    assert {dict(labels)["kind"]: value for labels, value in found.items()} == values


@given(st.lists(st.floats(0, 1000)))
def test_a_histogram_counts_what_is_at_most_as_long(times_s: list[float]) -> None:
    histogram = Histogram()
    for time_s in times_s:
        histogram.observe(time_s)
    assert histogram.buckets() == [
        (str(bound) if bound < math.inf else "+Inf", sum(time_s <= bound for time_s in times_s))
        for bound in (*metrics.ROUND_BUCKETS_S, math.inf)
    ]
    assert histogram.sum_s == pytest.approx(sum(times_s))


def test_refused_messages_are_counted_by_kind_from_any_sender() -> None:
    refused = Counted(get_logger())
    for sender, kind in (("a", "HashError"), ("b", "HashError"), ("a", "FormatError")):
        refused.note(sender, kind)
    counted = metrics.by_kind(refused)
    assert {kind: count for kind, count in counted.items() if count} == {("HashError",): 2, ("FormatError",): 1}
    assert counted["ChainError",] == 0  # so that a first one is an increase


async def test_what_all_services_tell(exporter: Exporter) -> None:
    broker, _ = joined(exporter, Worker(reason="rain"))
    broker.bulk.is_connected = False
    _, headers, body = await ask(exporter, "/metrics")
    assert headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = parsed(body)
    own = frozenset(LABELS.items())
    assert found["diloco_test_things_total"] == {own: 5}
    assert found["diloco_ready"] == {own: 0}
    assert found["diloco_healthy"] == {own: 1}
    assert found["diloco_broker_connected"] == {own | {("connection", "control")}: 1, own | {("connection", "bulk")}: 0}
    assert set(found["diloco_broker_reconnects_total"].values()) == {3}
    [build] = found["diloco_build_info"]
    assert {"service": "test", "protocol": "2"}.items() <= dict(build).items()
    assert found["process_start_time_seconds"][frozenset()] > 1e9
    assert found["process_resident_memory_bytes"][frozenset()] > 1e6
    assert set(found["diloco_broker_denied_total"].values()) == {2}
    assert found["diloco_start_timestamp_seconds"][own] == pytest.approx(time.time(), abs=DEADLINE_S)
    assert "diloco_certificate_remaining_seconds" not in found  # no identity


async def test_tasks_are_counted_until_they_have_ended(exporter: Exporter) -> None:
    async def tasks() -> float:
        _, _, body = await ask(exporter, "/metrics")
        return parsed(body)["diloco_tasks"][frozenset(LABELS.items())]

    before, released = await tasks(), asyncio.Event()
    waiting = [asyncio.ensure_future(released.wait()) for _ in range(3)]
    assert await tasks() == before + 3
    released.set()
    await asyncio.gather(*waiting)
    assert await tasks() == before


async def test_the_clock_is_compared_with_each_server_that_answers(exporter: Exporter) -> None:
    broker, _ = joined(exporter)
    broker.bulk.says = "yesterday"
    await exporter.compare_clocks()
    found = parsed((await ask(exporter, "/metrics"))[2])["diloco_clock_offset_seconds"]
    [(labels, offset_s)] = found.items()
    assert ("connection", "control") in labels
    assert offset_s == pytest.approx(3600, abs=DEADLINE_S)
    broker.control.says = broker.bulk.says = "1970-01-12T13:47:40.5Z"
    await exporter.compare_clocks()
    assert sorted(exporter.offsets_s) == ["bulk", "control"]
    assert exporter.offsets_s["bulk"] == pytest.approx(-60.5, abs=DEADLINE_S)
    broker.control.is_connected = False  # what was found last stays
    broker.bulk.says = "1970-01-12T13:46:40Z"
    await exporter.compare_clocks()
    assert exporter.offsets_s["control"] == pytest.approx(-60.5, abs=DEADLINE_S)
    assert exporter.offsets_s["bulk"] == pytest.approx(0, abs=DEADLINE_S)


async def test_the_certificate_ends_so_long_after_now(exporter: Exporter) -> None:
    broker, _ = joined(exporter)
    broker.identity = cast(Identity, Certified(datetime.fromtimestamp(Broker.now_s + 14 * 86400, UTC)))
    own = frozenset(LABELS.items())
    assert parsed((await ask(exporter, "/metrics"))[2])["diloco_certificate_remaining_seconds"] == {own: 14 * 86400}


async def test_senders_of_refused_messages_are_few_and_their_names_short(exporter: Exporter) -> None:
    now_s = 5000.0
    refused = Counted(get_logger(), clock=lambda: now_s)
    joined(exporter, Worker(refused=refused))
    for number in range(40):
        now_s += 1
        refused.note(f"learner-{number}", "HashError")
        refused.note(f"learner-{number}", "FormatError")
    refused.note(500 * "\udce4", "HashError")
    ages = _ages((await ask(exporter, "/metrics"))[2])
    assert len(ages) == 32
    assert (ages["learner-39"], ages["learner-9"], ages[("\\udce4" * 22)[:128]]) == (0, 30, 0)
    now_s += 599
    refused.note("diloco.mine.heartbeat.learner-3", "HashError")
    assert _ages((await ask(exporter, "/metrics"))[2]) == {"learner-3": 0, "learner-39": 599, ("\\udce4" * 22)[:128]: 599}
    now_s += 1000
    assert _ages((await ask(exporter, "/metrics"))[2]) == {}


def _ages(text: str) -> dict[str, float]:
    found = parsed(text).get("diloco_refused_sender_age_seconds", {})
    return {dict(labels)["sender"]: age_s for labels, age_s in found.items()}


# ---- health


async def test_ready_says_what_is_waited_for(exporter: Exporter) -> None:
    assert await says(exporter, "/readyz") == (503, "waits for NATS\n")
    exporter.transport = cast(NatsTransport, Broker())
    assert await says(exporter, "/readyz") == (503, "waits for its run to be created\n")
    broker, worker = joined(exporter, Worker(reason="the log"))
    assert await says(exporter, "/readyz") == (503, "waits for the log\n")
    worker.reason = None
    assert await says(exporter, "/readyz") == (200, "ok\n")
    broker.control.is_connected = False
    assert await says(exporter, "/readyz") == (503, "waits for its connection to NATS\n")


async def test_healthy_is_who_waits_for_others_and_not_who_hangs(exporter: Exporter) -> None:
    assert await says(exporter, "/healthz") == (200, "ok\n")
    now_s = asyncio.get_running_loop().time()
    broker, worker = joined(exporter)
    assert await says(exporter, "/healthz") == (200, "ok\n")  # it may have had no reason to give a heartbeat yet
    worker.beat = now_s - 1
    assert await says(exporter, "/healthz") == (200, "ok\n")
    worker.beat = now_s - 1000
    status, said = await says(exporter, "/healthz")
    assert (status, said.startswith("no sign of life for 100")) == (503, True)
    worker.quiet_s = 5000  # of a run whose heartbeats are rare
    assert (await says(exporter, "/healthz"))[0] == 200
    worker.quiet_s, broker.control.is_connected = 15, False  # to start it again would not bring NATS back
    assert (await says(exporter, "/healthz"))[0] == 200


async def says(exporter: Exporter, path: str) -> tuple[int, str]:
    status, _, body = await ask(exporter, path)
    return status, body


# ---- the server


@pytest.mark.parametrize("path", ["/", "/metric", "/metrics/", "/../etc/passwd", "/%6detrics", "/readyz/x"])
async def test_other_paths_are_not_found(exporter: Exporter, path: str) -> None:
    assert (await ask(exporter, path))[0] == 404


async def test_a_query_changes_nothing(exporter: Exporter) -> None:
    assert (await ask(exporter, "/healthz?verbose=1"))[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD", "get"])
async def test_only_get_is_allowed(exporter: Exporter, method: str) -> None:
    status, headers, body = await ask(exporter, "/metrics", method)
    assert (status, headers["Allow"]) == (405, "GET")
    assert (body == "") == (method == "HEAD")


@pytest.mark.parametrize(
    "request_",
    [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /metrics\r\n\r\n",
        b"GET /metrics HTTP/2.0\r\n\r\n",
        b"GET metrics HTTP/1.1\r\n\r\n",
        b"G\0T /metrics HTTP/1.1\r\n\r\n",
        b"\xff\xfe\x00 / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",  # as TLS begins
    ],
)
async def test_what_is_no_request_is_refused(exporter: Exporter, request_: bytes) -> None:
    assert (await send(exporter, request_)).startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert (await ask(exporter, "/healthz"))[0] == 200


@given(st.binary(max_size=64))
def test_no_line_is_too_odd_to_be_answered(line: bytes) -> None:
    async def answered() -> bytes:
        exporter = Exporter(ServiceSettings(name="one"), "test", get_logger())
        reader = asyncio.StreamReader()
        reader.feed_data(b"GET /" + line + b" HTTP/1.1\r\n\r\n")
        return await exporter._response(reader)

    assert asyncio.run(answered())[9:12] in (b"200", b"400", b"404", b"405", b"503")


@pytest.mark.parametrize("size", [metrics.MAX_REQUEST_BYTES, 3 * metrics.MAX_REQUEST_BYTES, 40 * metrics.MAX_REQUEST_BYTES])
async def test_large_headers_are_refused(exporter: Exporter, size: int) -> None:
    answer = await send(exporter, b"GET /metrics HTTP/1.1\r\nCookie: " + size * b"x" + b"\r\n\r\n")
    # who goes on sending after what is read of it is cut off, and may not see the answer
    assert answer.startswith(b"HTTP/1.1 431 ") or (not answer and size > metrics.MAX_REST_BYTES)
    assert (await ask(exporter, "/healthz"))[0] == 200


async def test_slow_and_silent_clients_are_cut_off(exporter: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "TIMEOUT_S", 0.2)
    assert await send(exporter, b"") == b""
    assert await send(exporter, b"GET /metr") == b""
    assert await send(exporter, b"GET /metr", end=True) == b""
    assert (await ask(exporter, "/healthz"))[0] == 200


async def test_connections_are_few_and_who_holds_them_keeps_nobody_else_from_an_answer(exporter: Exporter) -> None:
    held = [await asyncio.open_connection("127.0.0.1", exporter.port) for _ in range(metrics.MAX_CONNECTIONS)]
    while len(exporter._connections) < metrics.MAX_CONNECTIONS:
        await asyncio.sleep(0.01)
    assert (await ask(exporter, "/healthz"))[0] == 200
    assert len(exporter._connections) <= metrics.MAX_CONNECTIONS
    assert await asyncio.wait_for(held[0][0].read(), DEADLINE_S) == b""  # the oldest one gave way
    assert not any(reader.at_eof() for reader, _ in held[1:])
    for _, writer in held:
        writer.close()


async def test_a_defect_costs_one_answer_only(exporter: Exporter) -> None:
    joined(exporter, Worker(values={}))
    status, _, body = await ask(exporter, "/metrics")
    assert (status, body) == (500, "an internal error; see the log\n")
    assert (await ask(exporter, "/readyz"))[0] == 200


async def test_a_port_in_use_is_named_with_its_variable(exporter: Exporter) -> None:
    settings = ServiceSettings(name="two", metrics_address=f"127.0.0.1:{exporter.port}")
    with pytest.raises(
        SettingsError, match=r"DILOCO_METRICS_ADDRESS\) = '127.0.0.1:\d+': cannot listen there: .*in use"
    ) as caught:
        await Exporter(settings, "test", get_logger()).start()
    assert "\n" not in str(caught.value)


async def test_without_an_address_nothing_is_served() -> None:
    async with Exporter(ServiceSettings(name="one"), "test", get_logger()) as exporter:
        assert exporter.port is None


# ---- the setting


def test_addresses() -> None:
    assert host_and_port("127.0.0.1:9464") == ("127.0.0.1", 9464)
    assert host_and_port("[::1]:80") == ("::1", 80)
    assert host_and_port("localhost:0") == ("localhost", 0)


@pytest.mark.parametrize(
    "address",
    ["9464", ":9464", "host", "host:", "host:x", "host:65536", "host:-1", "http://h:1", "h:1/x", "a b:1", "u@h:1", "[::1:1"],
)
def test_what_is_no_address_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_NAME", "one")
    monkeypatch.setenv("DILOCO_METRICS_ADDRESS", address)
    with pytest.raises(SettingsError, match=r"metrics_address \(DILOCO_METRICS_ADDRESS\) = .*: expected HOST:PORT"):
        load_service(ServiceSettings, None)


def test_an_empty_variable_switches_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_NAME", "one")
    monkeypatch.setenv("DILOCO_METRICS_ADDRESS", "")
    assert load_service(ServiceSettings, None).metrics_address == ""
