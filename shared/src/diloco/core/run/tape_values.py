"""Numbers and texts as the bytes of a tape: varints (LEB128), and lengths before what is long."""

from __future__ import annotations

from diloco.errors import FormatError

MAX_TEXT_BYTES, MAX_ITEMS = 1024, 4096
_MAX_INT_BYTES = 9  # 63 bits


def pack_varint(value: int) -> bytes:
    """Return a number as a varint."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def pack_text(value: str) -> bytes:
    """Return a text as its length and its bytes."""
    raw = value.encode()
    return pack_varint(len(raw)) + raw


def read_varint(data: bytes, at: int, what: str) -> tuple[int, int]:
    """Return the varint at a place, and the place behind it; ``what`` it is begins an error.

    Raises:
        FormatError: it ends in the middle, or is too long.
    """
    value = 0
    for shift in range(0, 7 * _MAX_INT_BYTES, 7):
        if at >= len(data):
            raise FormatError(f"{what}: ends in the middle")
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
    raise FormatError(f"{what}: more than {_MAX_INT_BYTES} bytes")


def read_text(data: bytes, at: int, what: str) -> tuple[str, int]:
    """Return the text at a place as :func:`read_varint` does a number; it raises FormatError, too, where there is none."""
    length, at = read_varint(data, at, what)
    if length > MAX_TEXT_BYTES or at + length > len(data):
        raise FormatError(f"{what}: a text of {length} bytes, at most {min(MAX_TEXT_BYTES, len(data) - at)} are possible")
    try:
        return data[at : at + length].decode(), at + length
    except UnicodeDecodeError:
        raise FormatError(f"{what}: not UTF-8") from None


def read_varints(data: bytes, at: int, what: str) -> tuple[tuple[int, ...], int]:
    """Return the numbers at a place as :func:`read_varint` does one; it raises FormatError, too, where they are too many."""
    count, at = read_varint(data, at, what)
    if count > MAX_ITEMS:
        raise FormatError(f"{what}: {count} values, at most {MAX_ITEMS} are possible")
    values = []
    for _ in range(count):
        value, at = read_varint(data, at, what)
        values.append(value)
    return tuple(values), at
