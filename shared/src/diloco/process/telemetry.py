"""Spans to an OpenTelemetry collector, over OTLP and HTTP, by a thread of its own; without an endpoint nothing of it.

The process's own work never waits: a span goes into a bounded queue, and is dropped and counted where that is full, or where
the collector does not take it. OpenTelemetry's libraries make and send the messages; they are imported here alone, and only
where an endpoint is set.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from diloco import __version__
from diloco.core.run.tracing import Ids, Span, is_sampled
from diloco.errors import SettingsError
from diloco.process.observe import Logger
from diloco.process.retry import Complaint
from diloco.settings.service import ServiceSettings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

MAX_WAITING = 4096  # spans: at some 2 KB each, 8 MB
MAX_BATCH = 512
GATHER_S = 0.5  # from a span's coming to its sending, so that several go at once
TIMEOUT_S = 5.0  # for the collector to take a batch
CLOSE_S = 3.0  # at the end of a process, for what waits


class Telemetry:
    """The spans of one process on their way to a collector."""

    def __init__(self, settings: ServiceSettings, kind: str, log: Logger) -> None:
        """``kind``: of the service.

        Raises:
            SettingsError: OpenTelemetry is not installed.
        """
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
        except ImportError as error:
            raise SettingsError(
                f"telemetry.endpoint (DILOCO_TELEMETRY) = {settings.telemetry.endpoint!r}: OpenTelemetry is not installed "
                f"({error}); pip install 'diloco[otel]', or leave the setting out"
            ) from None
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # a collector that is away is told below, once
        self._share, self._log, self._complaint = settings.telemetry.sample, log, Complaint(log)
        about = {"service.name": f"diloco-{kind}", "service.instance.id": settings.name, "service.version": __version__}
        about |= {"diloco.run": settings.run, "diloco.region": settings.region or ""}
        self._resource = Resource(about)
        self._exporter = OTLPSpanExporter(settings.telemetry.traces_url, timeout=TIMEOUT_S)
        self._waiting: queue.Queue[Span] = queue.Queue(MAX_WAITING)
        self._ending = threading.Event()
        self.exported = self.dropped = 0
        self._thread = threading.Thread(target=self._send, name="telemetry", daemon=True)
        self._thread.start()

    def wants(self, version: Ids) -> bool:
        """Whether a version's way is told."""
        return is_sampled(version, self._share)

    def add(self, span: Span) -> None:
        """Take a span, or drop it; from any thread, at once."""
        try:
            self._waiting.put_nowait(span)
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Send what waits, for as long as a process's end may take."""
        self._ending.set()
        self._thread.join(CLOSE_S)
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _send(self) -> None:
        while not (self._ending.is_set() and self._waiting.empty()):
            self._ending.wait(GATHER_S)
            batch: list[Span] = []
            while len(batch) < MAX_BATCH and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            if batch:
                self._export(batch)

    def _export(self, batch: Sequence[Span]) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        try:
            taken = self._exporter.export([self._readable(span) for span in batch]) is SpanExportResult.SUCCESS
            reason = "the collector does not take them"
        except Exception as error:  # a library's defect is no reason to end a run
            taken, reason = False, repr(error)
        if taken:
            self.exported += len(batch)
            self._complaint.over()
        else:
            self.dropped += len(batch)
            self._complaint.warn("telemetry_not_exported", spans=len(batch), reason=reason)

    def _readable(self, span: Span) -> ReadableSpan:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import Link, SpanContext, TraceFlags

        def context(ids: Ids) -> SpanContext:
            trace, own = int.from_bytes(ids.trace, "big"), int.from_bytes(ids.span, "big")
            return SpanContext(trace, own, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

        parent = None if span.parent is None else context(Ids(span.ids.trace, span.parent))
        times: dict[str, Any] = {"start_time": int(span.began_s * 1e9), "end_time": int(max(span.began_s, span.ended_s) * 1e9)}
        return ReadableSpan(
            span.name,
            context(span.ids),
            parent,
            self._resource,
            dict(span.attributes),
            links=[Link(context(ids)) for ids in span.links],
            instrumentation_scope=InstrumentationScope("diloco", __version__),
            **times,
        )


def begin(settings: ServiceSettings, kind: str, log: Logger) -> Telemetry | None:
    """Return a process's telemetry, or None where no endpoint is set.

    Raises:
        SettingsError: OpenTelemetry is not installed.
    """
    return Telemetry(settings, kind, log) if settings.telemetry.endpoint else None
