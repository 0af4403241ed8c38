"""JSON from others: what servers, coordinators, relays and buckets say."""

from __future__ import annotations

import json
from typing import Any


def json_object(data: bytes) -> dict[str, Any] | None:
    """The JSON object that bytes are, or None if they are none; what is in it is for the caller to check."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
