"""The run's history in its bucket, as the leading coordinator stores it: its picture of the run, and curves.

Written by coordinators (:mod:`diloco_coordinator.history`); read by those that stand by, and by ``diloco top``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import zstandard

from diloco.errors import FormatError

KEY = "history"
FORMAT = 1
MAX_BYTES = 1 << 18  # compressed: a run of any length and size
MAX_PLAIN_BYTES = 1 << 22


@dataclass(frozen=True)
class Past:
    """A run's history as a coordinator stored it; ``curves`` continue a monitor."""

    term: int
    at_s: float  # Unix time by the writer's clock
    picture: Mapping[str, Any]
    curves: Mapping[str, Any]


def unpack(stored: bytes) -> Past:
    """Return the history in a stored value.

    Raises:
        FormatError: it is damaged, too large, or of another version.
    """
    try:
        if len(stored) > MAX_BYTES:
            raise ValueError(f"{len(stored)} bytes, at most {MAX_BYTES}")
        stated = zstandard.get_frame_parameters(stored).content_size
        if stated > MAX_PLAIN_BYTES:
            raise ValueError(f"{stated} bytes when unpacked, at most {MAX_PLAIN_BYTES}")
        value = json.loads(zstandard.ZstdDecompressor().decompress(stored, max_output_size=MAX_PLAIN_BYTES))
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise ValueError("unknown format")
        picture, curves = value["picture"], value["curves"]
        if not isinstance(picture, dict) or not isinstance(curves, dict):
            raise ValueError("picture and curves must be objects")
        return Past(int(value["term"]), float(value["at_s"]), picture, curves)
    except (zstandard.ZstdError, ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        raise FormatError(f"the bucket's key {KEY!r} is damaged ({error}); the leading coordinator writes it again") from None
