"""Compares this machine's clock with a NATS server's, by the time that JetStream states in the description of a stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import nats.errors

from diloco.nats.client import Client
from diloco.wire.plain import json_object

TIMEOUT_S = 2.0  # a longer way says too little about a clock


@dataclass(frozen=True)
class ClockOffset:
    """A measured difference between two clocks."""

    ahead_s: float  # this machine's clock minus the server's
    uncertainty_s: float  # half of the round trip


def time_of(answer: Mapping[str, Any]) -> float | None:
    """Return when a server answered, in seconds since the epoch by its clock; None: it does not say."""
    try:
        return datetime.fromisoformat(answer["ts"]).timestamp()
    except (LookupError, TypeError, ValueError, OverflowError):
        return None


def offset(answer: Mapping[str, Any], sent_s: float, took_s: float) -> ClockOffset | None:
    """Return the offset by an answer to a request that was sent at ``sent_s``, Unix time, and took ``took_s``.

    The server is assumed to have answered halfway. None: the answer states no time.
    """
    server_s = time_of(answer)
    return None if server_s is None else ClockOffset(sent_s + took_s / 2 - server_s, took_s / 2)


async def measure(client: Client, stream: str, wall_s: Callable[[], float]) -> ClockOffset | None:
    """Ask a server for the description of a stream. None: no answer in time, or no such stream.

    ``wall_s`` returns Unix time by the clock that is measured.
    """
    sent_s, began_s = wall_s(), time.perf_counter()
    try:
        answer = await client.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout=TIMEOUT_S)
    except (nats.errors.Error, TimeoutError):
        return None
    return offset(json_object(answer.data) or {}, sent_s, time.perf_counter() - began_s)
