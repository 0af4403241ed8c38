"""Bodies: how a large payload travels beside the fields of its message.

A body larger than a part travels in messages of its own, stored before the head; each part starts with the attempt (8 bytes)
that the head names, so that parts of two attempts never mix. Hashes of bodies are over uncompressed bytes, since zstd's output
may differ between versions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

from diloco.errors import FormatError
from diloco.wire.fields import Hash

PART_BYTES = 512 * 1024
ATTEMPT_BYTES = 8

Attempt = Annotated[bytes, Meta(min_length=ATTEMPT_BYTES, max_length=ATTEMPT_BYTES)]


class Body(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Description of a body: compressed size, hash of the uncompressed bytes, and number of parts (0: it is in the head)."""

    size_bytes: Annotated[int, Meta(ge=0, le=2**40)]
    content_hash: Hash
    parts: Annotated[int, Meta(ge=0, le=2**22)]
    attempt: Attempt


def describe_body(packed: bytes, content_hash: bytes, attempt: bytes) -> tuple[Body, bytes, list[bytes]]:
    """Divide a zstd frame; return its description, the bytes that go into the head, and the parts that go before it."""
    if len(packed) <= PART_BYTES:
        return Body(len(packed), content_hash, 0, attempt), packed, []
    step = PART_BYTES - ATTEMPT_BYTES
    parts = [attempt + packed[at : at + step] for at in range(0, len(packed), step)]
    return Body(len(packed), content_hash, len(parts), attempt), b"", parts


def is_part(data: bytes, attempt: bytes) -> bool:
    """Whether a message can be a part of an attempt's body."""
    return ATTEMPT_BYTES < len(data) <= PART_BYTES and data[:ATTEMPT_BYTES] == attempt


def check_body_size(body: Body, limit_bytes: int, what: str) -> None:
    """Refuse a body of impossible size or number of parts, before anything is allocated for it.

    Raises:
        FormatError: with ``what``, the limit, and the stated number.
    """
    if body.size_bytes > limit_bytes:
        raise FormatError(f"{what}: body of {body.size_bytes} bytes, at most {limit_bytes} fit its fragment")
    expected = 0 if body.size_bytes <= PART_BYTES else -(-body.size_bytes // (PART_BYTES - ATTEMPT_BYTES))
    if body.parts != expected:
        raise FormatError(f"{what}: body of {body.size_bytes} bytes in {body.parts} parts, expected {expected}")


def body_pieces(body: Body, inline: bytes, parts: Sequence[bytes], what: str) -> Sequence[bytes]:
    """Return the pieces of the zstd frame: the head's bytes, or the parts (without their attempts).

    Raises:
        FormatError: it has another size than the head says.
    """
    pieces = parts if body.parts else [inline]
    size_bytes = sum(map(len, pieces))
    if size_bytes != body.size_bytes:
        raise FormatError(f"{what}: body of {size_bytes} bytes, its head says {body.size_bytes}")
    return pieces
