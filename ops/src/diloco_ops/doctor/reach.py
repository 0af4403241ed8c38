"""Reach a server without logging in: its name, its address, its first line, its certificate."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import urlsplit

from diloco.errors import BrokerError
from diloco.wire.plain import json_object
from diloco_ops.doctor.verdicts import ServerInfo

CONNECT_S = 5.0  # a lost SYN is sent again after 1 and 3 s
INFO_BYTES = 1 << 16
DEFAULT_PORT = 4222
REFUSED = os.strerror(errno.ECONNREFUSED)


@dataclass(frozen=True)
class Reached:
    """One server: its address and how long a TCP connection took; or why there was none."""

    url: str
    address: str = ""
    connect_s: float = 0.0
    error: str = ""


def endpoint(url: str) -> tuple[str, int]:
    """Return host and port of a server's URL."""
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or DEFAULT_PORT


async def reach(url: str) -> Reached:
    """Resolve a server's name and connect to it, without a word."""
    host, port = endpoint(url)
    shown = f"{host}:{port}"
    try:
        async with asyncio.timeout(CONNECT_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except TimeoutError:
        return Reached(shown, error=f"the name {host!r} is not resolved within {CONNECT_S:g} s")
    except OSError as error:
        return Reached(shown, error=f"the name {host!r} is not resolved: {error.strerror or error}")
    address = str(found[0][4][0])
    began_s = time.perf_counter()
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(address, port)
    except TimeoutError:
        return Reached(shown, address, error=f"no answer within {CONNECT_S:g} s: a firewall, or no route")
    except OSError as error:
        return Reached(shown, address, error=os.strerror(error.errno) if error.errno else str(error))
    connect_s = time.perf_counter() - began_s
    writer.close()
    return Reached(shown, address, connect_s)


def first_word(url: str) -> ServerInfo:
    """Return a server's description of itself, before a login. Blocks.

    Raises:
        BrokerError: it is no NATS server, or is gone.
    """
    with _spoken_to(url) as (_, said):
        return said


def certificate_ends(url: str, tls: ssl.SSLContext) -> datetime:
    """Return when a server's certificate ends. Blocks.

    It must be good for the URL's host, and of the authority of ``tls``.

    Raises:
        BrokerError: it is not accepted, or the server offers no TLS.
    """
    with _spoken_to(url) as (plain, said):
        if not said.tls:
            raise BrokerError("the server offers no TLS, which an identity requires")
        with tls.wrap_socket(plain, server_hostname=endpoint(url)[0]) as secured:
            ends = (secured.getpeercert() or {}).get("notAfter")
            return datetime.fromtimestamp(ssl.cert_time_to_seconds(str(ends)), UTC)


@contextmanager
def _spoken_to(url: str) -> Iterator[tuple[socket.socket, ServerInfo]]:
    host, port = endpoint(url)
    try:
        with socket.create_connection((host, port), CONNECT_S) as plain:
            yield plain, server_info(_first_line(plain))
    except ssl.SSLCertVerificationError as error:
        raise BrokerError(f"{host}: its certificate is not accepted: {error.verify_message.rstrip('.')}") from None
    except (OSError, ValueError) as error:
        raise BrokerError(f"{host}:{port}: {getattr(error, 'strerror', None) or error}") from None


def _first_line(connected: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\r\n") and len(line) < INFO_BYTES:
        more = connected.recv(1)  # what comes after the line is TLS's
        if not more:
            break
        line += more
    return line


def server_info(line: bytes) -> ServerInfo:
    """Decode a server's INFO line.

    Raises:
        BrokerError: it is none.
    """
    kind, _, text = line.partition(b" ")
    info = json_object(text) if kind == b"INFO" else None
    if info is None:
        raise BrokerError(f"not a NATS server: it answers {line[:40]!r}")
    version, max_payload = info.get("version"), info.get("max_payload")
    if not isinstance(version, str) or not isinstance(max_payload, int):
        raise BrokerError("a NATS server that states no version")
    return ServerInfo(version[:40], max_payload, info.get("jetstream") is True, info.get("tls_required") is True)
