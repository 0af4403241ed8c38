"""A collector of OpenTelemetry spans: an HTTP server that takes OTLP, and keeps what came."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse


@dataclass(frozen=True)
class Seen:
    """A span as it came."""

    service: str
    member: str
    name: str
    trace: bytes
    span: bytes
    parent: bytes
    began_ns: int
    ended_ns: int
    links: tuple[tuple[bytes, bytes], ...]
    about: dict[str, Any]


@dataclass
class Collector:
    """``spans`` in the order in which they came."""

    url: str = ""
    spans: list[Seen] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)

    def take(self, path: str, body: bytes) -> None:
        request = ExportTraceServiceRequest()
        request.ParseFromString(body)
        self.paths.add(path)
        for resource_spans in request.resource_spans:
            resource = {pair.key: pair.value.string_value for pair in resource_spans.resource.attributes}
            for scope in resource_spans.scope_spans:
                self.spans.extend(_seen(resource, span) for span in scope.spans)


@contextmanager
def collecting() -> Iterator[Collector]:
    """Serve a collector at a free port."""
    kept = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            kept.take(self.path, self.rfile.read(int(self.headers["Content-Length"])))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    kept.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield kept
    server.shutdown()
    server.server_close()
    thread.join()


def _seen(resource: dict[str, str], span: Any) -> Seen:
    about = {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes}
    return Seen(
        resource["service.name"],
        resource["service.instance.id"],
        span.name,
        span.trace_id,
        span.span_id,
        span.parent_span_id,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        tuple((link.trace_id, link.span_id) for link in span.links),
        about,
    )
