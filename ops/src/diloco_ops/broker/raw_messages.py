"""Messages as no client of ours sends them: subjects, reply subjects and headers of any bytes."""

from __future__ import annotations

from typing import Any

import nats.errors

from diloco.nats.transport import NatsTransport

FLUSH_S = 10.0  # a busy server across the world has answered by then


def command(subject: bytes, data: bytes, headers: bytes = b"", reply: bytes = b"") -> bytes:
    """Return the bytes with which a client publishes a message."""
    names = b" ".join(name for name in (subject, reply) if name)
    if not headers:
        return b"PUB %s %d\r\n%s\r\n" % (names, len(data), data)
    return b"HPUB %s %d %d\r\n%s%s\r\n" % (names, len(headers), len(headers) + len(data), headers, data)


async def publish(client: Any, subject: bytes, data: bytes, headers: bytes = b"", reply: bytes = b"") -> None:
    """Publish with a client of nats-py, without its checks."""
    await client._send_command(command(subject, data, headers, reply))  # noqa: SLF001 - what is public refuses these bytes
    await client._flush_pending()  # noqa: SLF001


async def is_published(link: NatsTransport, subject: bytes, data: bytes, headers: bytes = b"", reply: bytes = b"") -> bool:
    """Publish over a link's bulk connection; False: the connection was lost."""
    try:
        await publish(link.bulk, subject, data, headers, reply)
    except (nats.errors.Error, OSError):
        return False
    return True


async def is_flushed(link: NatsTransport) -> bool:
    """Wait until the server has taken all, and its refusals are here; False: the connection was lost."""
    try:
        await link.bulk.flush(FLUSH_S)
    except (nats.errors.Error, OSError):
        return False
    return True
