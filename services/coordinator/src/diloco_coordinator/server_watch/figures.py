"""The figures of a NATS server that are passed on, out of the answers of its monitoring port.

Pure: no clock, no network, no file. Only what is named here is passed on. The answers also have addresses and names of
accounts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from diloco.errors import FormatError
from diloco.wire.plain import json_object

MAX_ANSWER_BYTES = 1 << 18  # a hundred times what a server answers
MAX_NUMBER = 1 << 63
UNLIMITED_CONNECTIONS = 1 << 16  # the server's default: more than it bears
VERSION = re.compile(r"[0-9]{1,4}(\.[0-9]{1,4}){2}([-+][0-9A-Za-z.+-]{1,24})?")


@dataclass(frozen=True, kw_only=True)
class ServerFigures:
    """A server's own figures. Counts are since it began."""

    version: str
    began_s: float  # Unix time
    memory_bytes: int
    connections: int
    max_connections: int
    slow_consumers: int
    received_bytes: int
    sent_bytes: int
    streams: int
    messages: int
    stored_bytes: int  # of all streams
    max_stored_bytes: int  # that JetStream may store
    api_errors: int
    certificate_ends_s: float | None  # Unix time; None: the server has no TLS
    missing_limits: tuple[str, ...] = ()  # settings of `deploy/` that bound what one client takes, and that it does not have


def read_answer(answer: bytes) -> tuple[int, bytes]:
    """Return status and body of an answer of HTTP/1.0.

    Raises:
        FormatError: it is none, or is cut off.
    """
    if len(answer) > MAX_ANSWER_BYTES:
        raise FormatError(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
    head, end, body = answer.partition(b"\r\n\r\n")
    first = re.match(rb"HTTP/1\.[01] ([0-9]{3})(?: |\r|$)", head)
    if first is None or not end:
        raise FormatError(f"not an HTTP answer: {answer[:40]!r}")
    length = re.search(rb"\r\ncontent-length: *([0-9]{1,9})(?:\r|$)", head, re.IGNORECASE)
    if length is not None and int(length[1]) != len(body):
        raise FormatError(f"an answer of {len(body)} bytes that states {int(length[1])}")
    return int(first[1]), body


def figures(varz: bytes, jsz: bytes) -> ServerFigures:
    """Return the figures in the answers to ``/varz`` and ``/jsz``.

    Raises:
        FormatError: an answer is no JSON object, or a figure is missing or out of range.
    """
    about, streams = _object(varz, "/varz"), _object(jsz, "/jsz")
    version = about.get("version")
    if not isinstance(version, str) or not VERSION.fullmatch(version):
        raise FormatError("/varz: version is none")
    ends = about.get("tls_cert_not_after")
    return ServerFigures(
        version=version,
        began_s=_time_s(about, "start"),
        memory_bytes=_number(about, "mem"),
        connections=_number(about, "connections"),
        max_connections=_number(about, "max_connections"),
        slow_consumers=_number(about, "slow_consumers"),
        received_bytes=_number(about, "in_bytes"),
        sent_bytes=_number(about, "out_bytes"),
        streams=_number(streams, "streams"),
        messages=_number(streams, "messages"),
        stored_bytes=_number(streams, "storage"),
        max_stored_bytes=_number(streams, "config", "max_storage"),
        api_errors=_number(streams, "api", "errors"),
        certificate_ends_s=None if ends is None else _time_s(about, "tls_cert_not_after"),
        missing_limits=_missing_limits(about),
    )


def _missing_limits(about: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the limits that a server's configuration does not set, as far as the server tells them."""
    missing = {
        "max_connections": _number(about, "max_connections") >= UNLIMITED_CONNECTIONS,
        "max_subscriptions": not about.get("max_subscriptions"),  # it tells none that is not set
    }
    return tuple(name for name, is_missing in missing.items() if is_missing)


def _object(data: bytes, path: str) -> dict[str, Any]:
    found = json_object(data)
    if found is None:
        raise FormatError(f"{path}: not a JSON object")
    return found


def _number(values: Any, *names: str) -> int:
    for name in names:
        values = values.get(name) if isinstance(values, Mapping) else None
    if type(values) is not int or not 0 <= values < MAX_NUMBER:
        raise FormatError(f"{'.'.join(names)} is not a number within the allowed range")
    return values


def _time_s(values: Mapping[str, Any], name: str) -> float:
    try:
        return datetime.fromisoformat(values[name]).timestamp()
    except (LookupError, TypeError, ValueError, OverflowError):
        raise FormatError(f"{name} is not a time") from None
