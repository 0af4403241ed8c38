"""A service's HTTP server: ``/metrics`` for Prometheus, ``/healthz``, ``/readyz``.

A service lists its metrics in a table (:class:`Metric`): a name with its unit, a meaning, and a function that reads the value
from the service. Nothing is computed between two scrapes. ``prometheus_client`` makes the text, without its threads, its
server and its global registry. It is imported only where ``metrics_address`` is set, since it delays the start of a service.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

from diloco import __version__
from diloco.errors import MessageError, SettingsError
from diloco.nats import clock
from diloco.nats.transport import NatsTransport
from diloco.process import telemetry
from diloco.process.observe import Counted, Logger
from diloco.process.sender_counts import SenderCounts
from diloco.process.tasks import end
from diloco.process.telemetry import Telemetry
from diloco.settings.service import ServiceSettings, host_and_port
from diloco.wire import framing
from diloco.wire.subjects import Subjects

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

PATHS = ("/metrics", "/healthz", "/readyz")
MAX_REQUEST_BYTES = 8192
MAX_REST_BYTES = 1 << 16  # read and dropped, so that a refused client can read why before the connection is reset
MAX_CONNECTIONS = 16
TIMEOUT_S = 5.0  # for a request to come and its answer to go
CLOCK_EVERY_S = 30.0  # clocks are compared so often
CLOCK_RETRY_S = 1.0  # and so often until there is a first result
SENDERS = 32  # with refused messages that are named, those of the last ones
SENDERS_S = 600.0  # and for so long after the last of them
SENDER_LENGTH = 128
SILENT_S = 15.0  # a service that is connected and gives no heartbeat for so long hangs
ROUND_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)  # from a LAN's rounds to those of a thin link

T = TypeVar("T")
Labelled = Mapping[tuple[str, ...], float]
Kind = Literal["counter", "gauge", "histogram"]


class Histogram:
    """Counts of times by their length; not for several threads at once."""

    def __init__(self, bounds_s: Sequence[float] = ROUND_BUCKETS_S) -> None:
        self.bounds_s, self.sum_s = bounds_s, 0.0
        self._counts = [0] * (len(bounds_s) + 1)

    def observe(self, time_s: float) -> None:
        """Count a time."""
        self._counts[bisect.bisect_left(self.bounds_s, time_s)] += 1
        self.sum_s += time_s

    def buckets(self) -> list[tuple[str, float]]:
        """Return upper bounds, as text, with the number of times that were at most as long."""
        return list(zip([*map(str, self.bounds_s), "+Inf"], accumulate(self._counts), strict=True))


Values = float | Labelled | Histogram | None


@dataclass(frozen=True)
class Metric(Generic[T]):
    """One row of a table. ``value`` returns one value, or one by the values of ``labels``, or None: there is none now."""

    name: str
    kind: Kind
    meaning: str
    value: Callable[[T], Values]
    labels: tuple[str, ...] = ()


class Observed(Protocol):
    """A service in its run."""

    quiet_s: float  # longest time without a heartbeat

    @property
    def refused(self) -> Counted | None:
        """The messages that it refused; None: it hears none."""

    def waits_for(self) -> str | None:
        """Name the thing that it waits for before its work; None if it works, or stands by."""

    def beat_s(self) -> float | None:
        """Return the time of its last heartbeat, by its loop's clock; None if none is due yet."""

    def families(self) -> Iterator[Family]:
        """Yield its metrics, as of now."""


def one_of(state: str, states: Iterable[str]) -> Labelled:
    """Return a state as a metric: 1 for the one that holds, 0 for all others."""
    return {(name,): float(name == state) for name in states}


def usual_kinds(error: type[MessageError] = MessageError) -> list[str]:
    """Return the names of an error of messages and of all that are derived from it."""
    return [error.__name__, *(name for derived in error.__subclasses__() for name in usual_kinds(derived))]


def by_kind(refused: Counted) -> Labelled:
    """Return refused messages by kind of error, of all senders together: senders' names would have no bound.

    The usual kinds count from 0: of a series that begins at 1 Prometheus sees no increase.
    """
    kinds: dict[tuple[str, ...], float] = {(kind,): 0.0 for kind in usual_kinds()}
    for (_, kind), count in refused.counts().items():
        kinds[kind,] = kinds.get((kind,), 0) + count
    return kinds


def by_sender(counted: SenderCounts) -> Labelled:
    """Return counts by sender and reason. Senders' names may come from the wire: they are cut, and their number is bounded."""
    found: dict[tuple[str, ...], float] = {}
    for (sender, reason), count in counted.counts().items():
        pair = _label(sender), _label(reason)
        found[pair] = found.get(pair, 0.0) + count
    return found


def families(metrics: Iterable[Metric[T]], source: T, labels: Mapping[str, str]) -> Iterator[Family]:
    """Yield the metrics of a table as ``source`` has them now, each with ``labels``."""
    from prometheus_client.core import HistogramMetricFamily
    from prometheus_client.core import Metric as Family

    for metric in metrics:
        value = metric.value(source)
        if value is None:
            continue
        if isinstance(value, Histogram):
            histogram = HistogramMetricFamily(metric.name, metric.meaning, labels=list(labels))
            histogram.add_metric(list(labels.values()), value.buckets(), value.sum_s)
            yield histogram
            continue
        plain = Family(metric.name.removesuffix("_total"), metric.meaning, metric.kind)
        for own, number in ({(): value} if isinstance(value, int | float) else value).items():
            plain.add_sample(metric.name, {**labels, **dict(zip(metric.labels, own, strict=True))}, number)
        yield plain


@dataclass(eq=False)
class Exporter:
    """A process's HTTP server, if ``metrics_address`` is set; it answers while the process still starts."""

    settings: ServiceSettings
    kind: str  # of the service
    log: Logger
    connects: bool = True  # False: a process that has no connection to NATS, by its nature
    transport: NatsTransport | None = None
    observed: Observed | None = None
    starting: str = "its run to be created"  # the thing waited for until ``observed`` is set
    port: int | None = None  # of the listener
    telemetry: Telemetry | None = None  # None: no endpoint is set for it
    far: dict[str, NatsTransport] = field(default_factory=dict)  # connections to the servers of other regions, by region
    began_s: float = field(default_factory=time.time)
    offsets_s: dict[str, float] = field(default_factory=dict)  # by connection: this clock minus its server's, at last
    _comparing: asyncio.Task[None] | None = None
    _server: asyncio.Server | None = None
    _connections: dict[asyncio.Task[None], asyncio.StreamWriter] = field(default_factory=dict)  # the oldest first

    async def start(self) -> None:
        """Begin to answer, in the running loop.

        Raises:
            SettingsError: the address cannot be used; or telemetry is set, and its libraries are not installed.
        """
        self.telemetry = telemetry.begin(self.settings, self.kind, self.log)
        if not self.settings.metrics_address:
            return
        import prometheus_client.exposition  # noqa: F401  # here rather than at the first scrape, which would hold up the loop

        host, port = host_and_port(self.settings.metrics_address)
        try:
            self._server = await asyncio.start_server(self._connected, host, port, limit=MAX_REQUEST_BYTES)
        except OSError as error:
            raise SettingsError(
                f"metrics_address (DILOCO_METRICS_ADDRESS) = {self.settings.metrics_address!r}: cannot listen there: "
                f"{(error.strerror or str(error)).lower()}; set another address, or leave it empty"
            ) from None
        self._comparing = asyncio.ensure_future(self._compare_clocks())
        self.port = self._server.sockets[0].getsockname()[1]
        self.log.info("metrics_served", host=host, port=self.port)

    async def close(self) -> None:
        """Stop answering, and send the spans that wait."""
        if self.telemetry is not None:
            await asyncio.to_thread(self.telemetry.close)
        if self._server is not None:
            await end(self._comparing)
            self._server.close()
            for connection in self._connections:
                connection.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    async def __aenter__(self) -> Exporter:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def compare_clocks(self) -> None:
        """Compare this machine's clock with those of the servers; keep what was found before where one does not answer."""
        if self.transport is None:
            return
        names = Subjects(self.settings.run)
        control, bulk = self.transport.control, self.transport.bulk
        for name, client, stream in (("control", control, f"KV_{names.bucket}"), ("bulk", bulk, names.log_stream)):
            if client.is_connected:
                found = await clock.measure(client, stream, self.transport.wall_s)
                if found is not None:
                    self.offsets_s[name] = found.ahead_s

    async def _compare_clocks(self) -> None:
        while True:
            await self.compare_clocks()
            await asyncio.sleep(CLOCK_EVERY_S if len(self.offsets_s) == 2 else CLOCK_RETRY_S)

    # ---- content

    def waits_for(self) -> str | None:
        """Name the thing that keeps the service from its work, or None."""
        if self.connects and self.transport is None:
            return "NATS"  # without its address, which may contain a password: the log has it
        if self.transport is not None and not self.transport.connected:
            return "its connection to NATS"
        return self.starting if self.observed is None else self.observed.waits_for()

    def silent_s(self) -> float | None:
        """Return the time since the last heartbeat if that is too long, else None."""
        connected = not self.connects if self.transport is None else self.transport.connected
        if self.observed is None or not connected:
            return None  # it waits for others: a restart would not help, and would lose work
        beat_s = self.observed.beat_s()
        silent_s = 0.0 if beat_s is None else asyncio.get_running_loop().time() - beat_s
        return silent_s if silent_s > self.observed.quiet_s else None

    def labels(self) -> dict[str, str]:
        """Return the labels of every metric of this process."""
        return {"run": self.settings.run, "name": self.settings.name, "region": self.settings.region or ""}

    def exposition(self) -> bytes:
        """Return all metrics, in Prometheus's text format."""
        from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        ProcessCollector(registry=registry)
        return generate_latest(registry)

    def collect(self) -> Iterator[Family]:
        """Yield all metrics; ``prometheus_client`` calls it."""
        yield from families(COMMON, self, self.labels())
        if self.connects:
            yield from families(CONNECTED, self, self.labels())
        if self.observed is not None:
            yield from self.observed.families()

    # ---- HTTP

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            # the oldest one gives way: else one who holds connections keeps the probes from an answer
            self._connections.pop(next(iter(self._connections))).transport.abort()
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._connections[task] = writer
        task.add_done_callback(lambda ended: self._connections.pop(ended, None))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            # a client that has gone, or is too slow, gets no answer
            with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
                async with asyncio.timeout(TIMEOUT_S):
                    writer.write(await self._response(reader))
                    await writer.drain()
                    writer.write_eof()
                    dropped = 0
                    while dropped < MAX_REST_BYTES and (rest := await reader.read(MAX_REQUEST_BYTES)):
                        dropped += len(rest)
        finally:
            writer.transport.abort()

    async def _response(self, reader: asyncio.StreamReader) -> bytes:
        try:
            request = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"at most {MAX_REQUEST_BYTES} bytes\n")
        method, _, rest = request.partition(b"\r\n")[0].partition(b" ")
        target, _, version = rest.rpartition(b" ")
        if not method.isalpha() or not target.startswith(b"/") or version not in (b"HTTP/1.0", b"HTTP/1.1"):
            return _response(HTTPStatus.BAD_REQUEST, "not a request of HTTP/1.1\n")
        if method != b"GET":
            text = "" if method == b"HEAD" else "only GET is supported\n"
            return _response(HTTPStatus.METHOD_NOT_ALLOWED, text, "Allow: GET\r\n")
        return self._page(target.partition(b"?")[0].decode("latin-1"))

    def _page(self, path: str) -> bytes:
        if path not in PATHS:
            return _response(HTTPStatus.NOT_FOUND, f"the paths are {', '.join(PATHS)}\n")
        try:
            if path == "/metrics":
                return _response(HTTPStatus.OK, self.exposition())
            if path == "/healthz":
                trouble = self.silent_s()
                said = None if trouble is None else f"no sign of life for {trouble:.0f} s"
            else:
                waits_for = self.waits_for()
                said = None if waits_for is None else f"waits for {waits_for}"
        except Exception as error:  # a defect, which must not end the process's own work
            self.log.error("metrics_failed", path=path, exc_info=error)
            return _response(HTTPStatus.INTERNAL_SERVER_ERROR, "an internal error; see the log\n")
        return _response(HTTPStatus.OK, "ok\n") if said is None else _response(HTTPStatus.SERVICE_UNAVAILABLE, f"{said}\n")


def _response(status: HTTPStatus, body: str | bytes, header: str = "") -> bytes:
    content = body.encode() if isinstance(body, str) else body
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\n"
        "Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
        f"Content-Length: {len(content)}\r\n"
        f"{header}Connection: close\r\n\r\n"
    )
    return head.encode() + content


def _connections(exporter: Exporter, value: Callable[[Any], float]) -> Labelled:
    if exporter.transport is None:
        return {("control",): 0.0, ("bulk",): 0.0}
    return {("control",): value(exporter.transport.control), ("bulk",): value(exporter.transport.bulk)}


def _lists(exporter: Exporter) -> Labelled:
    links = ({} if exporter.transport is None else {"": exporter.transport}) | exporter.far
    return {
        (connection, region, watch.server): float(watch.number)
        for region, link in links.items()
        for connection, watch in link.lists.items()
        if watch.number is not None
    }


def _offsets(exporter: Exporter) -> Labelled:
    return {(connection,): offset_s for connection, offset_s in exporter.offsets_s.items()}


def _certificate_s(exporter: Exporter) -> float | None:
    """Return the time until the process's own certificate ends, negative when it has; None: it has none."""
    if exporter.transport is None or exporter.transport.identity is None:
        return None
    return exporter.transport.identity.expires.timestamp() - exporter.transport.wall_s()


def _refused(exporter: Exporter) -> Labelled:
    """Return the number of refused messages by sender and kind of error."""
    refused = None if exporter.observed is None else exporter.observed.refused
    beats, found = _beats(exporter), dict[tuple[str, ...], float]()
    for (sender, kind), count in ({} if refused is None else refused.counts()).items():
        pair = _sender(sender, beats), _label(kind)
        found[pair] = found.get(pair, 0.0) + count
    return found


def _beats(exporter: Exporter) -> list[str]:
    """Return what stands before a sender's name in the subjects of heartbeats."""
    subjects = Subjects(exporter.settings.run)
    return [subjects.heartbeat(""), subjects.shard("")]


def _senders(exporter: Exporter) -> Labelled:
    """Return the time since a message of a sender was refused, for few senders: their names may come from the wire."""
    refused = None if exporter.observed is None else exporter.observed.refused
    ages_s = {} if refused is None else refused.ages_s()
    newest = sorted(ages_s.items(), key=lambda item: item[1])[:SENDERS]
    # a message that cannot be read is known by its subject, which ends in its sender's name
    beats = _beats(exporter)
    return {(_sender(text, beats),): age_s for text, age_s in newest if age_s < SENDERS_S}


def _sender(text: str, prefixes: Iterable[str]) -> str:
    for prefix in prefixes:
        text = text.removeprefix(prefix)
    return _label(text)


def _label(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode()[:SENDER_LENGTH]


def _spans(exporter: Exporter) -> Labelled:
    kept = exporter.telemetry
    exported, dropped = (0, 0) if kept is None else (kept.exported, kept.dropped)
    return {("exported",): float(exported), ("dropped",): float(dropped)}


COMMON: tuple[Metric[Exporter], ...] = (
    Metric(
        "diloco_build_info",
        "gauge",
        "Always 1; the labels state what runs here, and `protocol` the version of the protocol",
        lambda exporter: {(exporter.kind, __version__, str(framing.VERSION)): 1.0},
        ("service", "version", "protocol"),
    ),
    Metric("diloco_healthy", "gauge", "1 if `/healthz` answers 200", lambda exporter: float(exporter.silent_s() is None)),
    Metric(
        "diloco_telemetry_spans_total",
        "counter",
        "Spans that a collector accepted, or that were dropped",
        _spans,
        ("outcome",),
    ),
    Metric("diloco_ready", "gauge", "1 if `/readyz` answers 200", lambda exporter: float(exporter.waits_for() is None)),
    Metric(
        "diloco_start_timestamp_seconds",
        "gauge",
        "Unix time at which the process started",
        lambda exporter: exporter.began_s,
    ),
    Metric(
        "diloco_tasks",
        "gauge",
        "Asyncio tasks that have not ended, in the event loop that answers `/metrics`",
        lambda _: float(len(asyncio.all_tasks())),
    ),
)
# of processes that are connected to NATS
CONNECTED: tuple[Metric[Exporter], ...] = (
    Metric(
        "diloco_broker_connected",
        "gauge",
        "1 while connected to NATS",
        lambda exporter: _connections(exporter, lambda client: float(client.is_connected)),
        ("connection",),
    ),
    Metric(
        "diloco_broker_reconnects_total",
        "counter",
        "Number of times that a lost connection was restored",
        lambda exporter: _connections(exporter, lambda client: float(client.stats["reconnects"])),
        ("connection",),
    ),
    Metric(
        "diloco_server_list_number",
        "gauge",
        "Number of a server's list of identities; 0: a list from an older version. `other_region` is empty for this "
        "region's servers",
        _lists,
        ("connection", "other_region", "server"),
    ),
    Metric(
        "diloco_broker_denied_total",
        "counter",
        "Requests that the server denied to this process's identity; `permission_denied` in the log names the last",
        lambda exporter: _connections(exporter, lambda client: float(client.denied)),
        ("connection",),
    ),
    Metric(
        "diloco_clock_offset_seconds",
        "gauge",
        "This machine's clock minus the server's clock, compared every 30 s",
        _offsets,
        ("connection",),
    ),
    Metric(
        "diloco_certificate_remaining_seconds",
        "gauge",
        "Time until the certificate of the process's identity expires",
        _certificate_s,
    ),
    Metric(
        "diloco_refused_sender_messages_total",
        "counter",
        "Messages that were refused, by sender and kind of error; at most 1024 pairs",
        _refused,
        ("sender", "kind"),
    ),
    Metric(
        "diloco_refused_sender_age_seconds",
        "gauge",
        "Time since a message from `sender` was refused; covers the last 32 senders of the past ten minutes",
        _senders,
        ("sender",),
    ),
)
