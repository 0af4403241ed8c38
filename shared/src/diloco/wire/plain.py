"""Data from others without a frame: JSON of servers, coordinators and relays, and values of buckets."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def json_object(data: bytes) -> dict[str, Any] | None:
    """Return the JSON object in ``data``, or None if there is none. The caller checks its values."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def decoded(stored: bytes, decoder: msgspec.msgpack.Decoder[T] | msgspec.json.Decoder[T]) -> T | None:
    """Decode a value of the bucket; None if it is none of ours."""
    try:
        return decoder.decode(stored)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
