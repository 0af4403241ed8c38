"""Lines and headers from a server, whose subjects, reply subjects and headers other members chose: any bytes at all.

A server checks none of them. The library's own decoding ends its reading, without a word, at a subject or a status that is
not UTF-8, takes a header that a member wrote for the server's word, and knows no subject with a form feed in it.
"""

from __future__ import annotations

from dataclasses import dataclass

# The server appends its headers to those of a stored message. All of a large block would keep a reader busy for long.
READ_BYTES = 4096
_VERSION = b"NATS/1.0"
_NUMBER_DIGITS = 10


@dataclass(frozen=True)
class Delivered:
    """The line before a message: sizes in bytes, ``size`` with headers."""

    subject: bytes
    sid: int
    reply: bytes
    header_size: int
    size: int


def delivered(line: bytes) -> Delivered | None:
    """Return what the line before a message says; None if it is another line. Subjects become valid UTF-8.

    Raises:
        ValueError: it is one, and damaged.
    """
    operation, *words = line.split(b" ")
    sizes = {b"MSG": 1, b"HMSG": 2}.get(operation)
    if sizes is None:
        return None
    numbers = words[1:2] + words[-sizes:]
    if len(words) not in (2 + sizes, 3 + sizes) or not all(0 < len(n) <= _NUMBER_DIGITS and n.isdigit() for n in numbers):
        raise ValueError(line[:80])
    sid, *counts = map(int, numbers)
    header_size = counts[0] if sizes == 2 else 0
    if header_size > counts[-1]:
        raise ValueError(line[:80])
    reply = words[2] if len(words) == 3 + sizes else b""
    return Delivered(_readable(words[0]), sid, _readable(reply), header_size, counts[-1])


def headers(block: bytes) -> dict[str, str]:
    """Return the headers at the end of a message's block of headers, of two of a name the last one.

    ``Status`` and ``Description`` are the server's, which sends no stored message so: they are in the first line.
    """
    first, _, rest = block[:READ_BYTES].partition(b"\r\n")
    lines = rest if len(block) <= READ_BYTES else block[-READ_BYTES:]
    found: dict[str, str] = {}
    for line in lines.split(b"\r\n"):
        name, colon, value = line.partition(b":")
        if colon:
            found[_text(name)] = _text(value)
    found.pop("Status", None)
    found.pop("Description", None)
    status, _, description = first.removeprefix(_VERSION).strip().partition(b" ")
    if status.isdigit() and "Nats-Sequence" not in found:
        found |= {"Status": _text(status), "Description": _text(description)}
    return found


def _text(value: bytes) -> str:
    return value.decode(errors="replace").strip()


def _readable(subject: bytes) -> bytes:
    return subject if subject.isascii() else subject.decode(errors="replace").encode()
