"""A NATS server's metrics, as ``diloco-server-watch`` tells them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from diloco.service.metrics import Labelled, Metric, Values
from diloco_coordinator.server_watch.figures import ServerFigures


@dataclass(frozen=True)
class StreamDisk:
    """The file system of a server's streams."""

    free_bytes: int  # for a user without privileges
    size_bytes: int


@dataclass(frozen=True)
class ServerLook:
    """A server at one moment."""

    figures: ServerFigures | None  # None: it does not answer
    healthy: bool
    disk: StreamDisk | None  # None: its folder cannot be looked at
    memory_limit_bytes: int
    violations: Labelled = field(default_factory=dict)  # by identity, action and subject, as its log has them


def _said(value: Callable[[ServerFigures], Values]) -> Callable[[ServerLook], Values]:
    """Read a value of a server that answers."""
    return lambda look: None if look.figures is None else value(look.figures)


def _on_disk(value: Callable[[StreamDisk], Values]) -> Callable[[ServerLook], Values]:
    return lambda look: None if look.disk is None else value(look.disk)


def _certificate_s(figures: ServerFigures) -> float | None:
    return None if figures.certificate_ends_s is None else figures.certificate_ends_s - time.time()


VIOLATIONS = Metric[ServerLook](
    "diloco_server_violations_total",
    "counter",
    "Messages and subscriptions that the server denied to an identity, by its log; action payload: a message that was "
    "too large. At most 1024 identities and subjects",
    lambda look: look.violations,
    ("identity", "action", "subject"),
)
METRICS: tuple[Metric[ServerLook], ...] = (
    Metric("diloco_server_up", "gauge", "1 if the server answers", lambda look: float(look.figures is not None)),
    Metric("diloco_server_healthy", "gauge", "1 if the server reports that it is healthy", lambda look: float(look.healthy)),
    Metric(
        "diloco_server_info",
        "gauge",
        "Always 1: the version of nats-server",
        _said(lambda figures: {(figures.version,): 1.0}),
        ("server_version",),
    ),
    Metric(
        "diloco_server_start_timestamp_seconds",
        "gauge",
        "Unix time at which the server started",
        _said(lambda figures: figures.began_s),
    ),
    Metric(
        "diloco_server_disk_free_bytes",
        "gauge",
        "Free space of the file system that holds the server's streams",
        _on_disk(lambda disk: disk.free_bytes),
    ),
    Metric(
        "diloco_server_disk_size_bytes",
        "gauge",
        "Size of the file system that holds the server's streams",
        _on_disk(lambda disk: disk.size_bytes),
    ),
    Metric("diloco_server_stored_bytes", "gauge", "Size of all streams on disk", _said(lambda figures: figures.stored_bytes)),
    Metric(
        "diloco_server_stored_limit_bytes",
        "gauge",
        "Largest size that JetStream allows for all streams",
        _said(lambda figures: figures.max_stored_bytes),
    ),
    Metric("diloco_server_streams", "gauge", "Streams", _said(lambda figures: figures.streams)),
    Metric("diloco_server_messages", "gauge", "Messages in all streams", _said(lambda figures: figures.messages)),
    Metric(
        "diloco_server_memory_bytes",
        "gauge",
        "Memory used by the server's process",
        _said(lambda figures: figures.memory_bytes),
    ),
    Metric(
        "diloco_server_memory_limit_bytes",
        "gauge",
        "Memory available to the server: `memory_bytes`, or all of the machine",
        lambda look: look.memory_limit_bytes,
    ),
    Metric("diloco_server_connections", "gauge", "Connections of clients", _said(lambda figures: figures.connections)),
    Metric(
        "diloco_server_connections_limit",
        "gauge",
        "Largest number of connections that the server accepts",
        _said(lambda figures: figures.max_connections),
    ),
    Metric(
        "diloco_server_slow_consumers_total",
        "counter",
        "Connections that the server closed because the client read too slowly",
        _said(lambda figures: figures.slow_consumers),
    ),
    Metric("diloco_server_received_bytes_total", "counter", "Payload received", _said(lambda figures: figures.received_bytes)),
    Metric("diloco_server_sent_bytes_total", "counter", "Payload sent", _said(lambda figures: figures.sent_bytes)),
    Metric(
        "diloco_server_api_errors_total",
        "counter",
        "Requests to JetStream that the server refused",
        _said(lambda figures: figures.api_errors),
    ),
    VIOLATIONS,
    Metric(
        "diloco_server_certificate_remaining_seconds",
        "gauge",
        "Time until the server's certificate expires; no value without TLS",
        _said(_certificate_s),
    ),
)
