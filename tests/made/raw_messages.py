"""Messages as no client of ours sends them: subjects, reply subjects and headers of any bytes."""

from __future__ import annotations

from typing import Any


def command(subject: bytes, data: bytes, headers: bytes = b"", reply: bytes = b"") -> bytes:
    """What a client writes to publish a message."""
    names = b" ".join(name for name in (subject, reply) if name)
    if not headers:
        return b"PUB %s %d\r\n%s\r\n" % (names, len(data), data)
    return b"HPUB %s %d %d\r\n%s%s\r\n" % (names, len(headers), len(headers) + len(data), headers, data)


async def publish(client: Any, subject: bytes, data: bytes, headers: bytes = b"", reply: bytes = b"") -> None:
    """Publish over a client of nats-py, past all that it checks."""
    await client._send_command(command(subject, data, headers, reply))
    await client._flush_pending()
