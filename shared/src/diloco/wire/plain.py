"""JSON from others: answers of servers, coordinators and relays, and values of buckets."""

from __future__ import annotations

import json
from typing import Any


def json_object(data: bytes) -> dict[str, Any] | None:
    """Return the JSON object in ``data``, or None if there is none. The caller checks its values."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
