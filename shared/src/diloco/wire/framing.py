"""The frame of every message: how fields become bytes, are checked, and are refused.

A frame is the msgpack array ``[magic, version, kind, run, fields, hash, body]``: ``run`` is the run's identity (8 bytes),
``fields`` the message's fields as a msgpack array, ``hash`` the BLAKE3 hash over all that stands before it, ``body`` a
zstd frame or nothing (:mod:`diloco.wire.body`). Messages are in :mod:`diloco.wire.offers` (deltas),
:mod:`diloco.wire.entries` (the log) and :mod:`diloco.wire.control` (all that is not stored).

``docs/protocol.md`` is the same in prose, for someone who writes a member in another language.
"""

from __future__ import annotations

import functools
import math
import threading
from typing import Annotated, ClassVar, TypeVar

import msgspec
from blake3 import blake3
from msgspec import Meta, Struct

from diloco.errors import FormatError, HashError

MAGIC = "DLC"
VERSION = 2  # of the protocol of all frames
OLDEST = 2  # members of this version take part in runs of the protocols OLDEST to VERSION
MAX_FRAME_BYTES = 1 << 20


class Message(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Base of all messages; a field's place in the class is its place on the wire."""

    kind: ClassVar[str]
    subject_field: ClassVar[str | None] = None  # the field that the last token of its subject states, where one does

    def __post_init__(self) -> None:
        for place, value in enumerate(msgspec.structs.astuple(self)):
            if type(value) is float and not math.isfinite(value):
                raise ValueError(f"{self.__struct_fields__[place]} is not finite")


M = TypeVar("M", bound=Message)

_PREPARING = threading.Lock()  # msgspec examines a class at its first decoder, and crashes where two threads do so at once
_FRAME = msgspec.msgpack.Decoder(
    tuple[
        Annotated[str, Meta(max_length=8)],
        int,
        Annotated[str, Meta(max_length=16)],
        Annotated[bytes, Meta(max_length=8)],
        Annotated[bytes, Meta(max_length=MAX_FRAME_BYTES)],
        Annotated[bytes, Meta(max_length=32)],
        Annotated[bytes, Meta(max_length=MAX_FRAME_BYTES)],
    ]
)
_ENCODER = msgspec.msgpack.Encoder()


def run_id(run: str, settings_digest: bytes) -> bytes:
    """Return the run's identity in every frame: 8 bytes of BLAKE3 over its name and its settings' digest."""
    return blake3(run.encode() + b"\0" + settings_digest).digest()[:8]


def hash_of(message: Message, run: bytes) -> bytes:
    """Return the hash (32 bytes) in a frame of ``message``; for a record, the hash of that log entry."""
    return _hash(message.kind, run, _encode(message))


def pack(message: Message, run: bytes, inline: bytes = b"") -> bytes:
    """Return the frame of ``message``."""
    fields = _encode(message)
    return _ENCODER.encode((MAGIC, VERSION, message.kind, run, fields, _hash(message.kind, run, fields), inline))


def unpack(data: bytes, cls: type[M], run: bytes) -> tuple[M, bytes, bytes]:
    """Return the message, its hash, and the body bytes in the head.

    Raises:
        FormatError: no frame, another protocol version, kind or run, or a field out of bounds.
        HashError: the fields do not have the stated hash.
    """
    if len(data) > MAX_FRAME_BYTES:
        raise FormatError(f"{cls.kind}: {len(data)} bytes, more than a frame's {MAX_FRAME_BYTES}")
    try:
        magic, version, kind, its_run, fields, its_hash, inline = _FRAME.decode(data)
        if magic != MAGIC:
            raise FormatError(f"{cls.kind}: not a message of this protocol (magic {magic!r}, expected {MAGIC!r})")
        if version != VERSION:
            raise FormatError(f"{cls.kind}: protocol version {version}, expected {VERSION}; update the older member")
        if kind != cls.kind:
            raise FormatError(f"{cls.kind}: came as {kind!r}")
        if its_run != run:
            raise FormatError(f"{cls.kind}: belongs to run {its_run.hex()}, expected {run.hex()}")
        if its_hash != _hash(kind, run, fields):
            raise HashError(f"{cls.kind}: its fields do not have the hash that it states")
        message: M = _decoder(cls).decode(fields)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise FormatError(f"{cls.kind}: {error}") from None
    return message, its_hash, inline


def kind_of(data: bytes) -> str | None:
    """Return the kind that a frame states, without any check, or None if it is no frame."""
    try:
        return _FRAME.decode(data)[2] if len(data) <= MAX_FRAME_BYTES else None
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None


@functools.cache
def _decoder(cls: type[M]) -> msgspec.msgpack.Decoder[M]:
    with _PREPARING:
        return msgspec.msgpack.Decoder(cls)


def _encode(message: Message) -> bytes:
    values = msgspec.structs.astuple(message)
    required = len(values) - len(message.__struct_defaults__)
    while len(values) > required and values[-1] is None:  # last fields that may be absent
        values = values[:-1]
    return _ENCODER.encode(values)


def _hash(kind: str, run: bytes, fields: bytes) -> bytes:
    return blake3(f"{MAGIC}{VERSION}{kind}\0".encode() + run + fields).digest()
