"""Ids of traces and spans, derived from the names of versions and offers: every service makes the same ones by itself.

A version's trace has the spans of its round, at its syncer, and of each reader. An offer's trace has those of its making, at
its learner; a regional offer's those at its syncer. The round links to the offers that it merged, and an offer to the round
that it answers. Nothing of it travels in messages. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from blake3 import blake3

PURPOSE = "diloco 2026 ids of traces"  # of the hash, as BLAKE3 wants it
TRACE_BYTES, SPAN_BYTES = 16, 8


@dataclass(frozen=True)
class Ids:
    """A trace, and a span in it."""

    trace: bytes
    span: bytes

    def child(self, *names: str | int) -> Ids:
        """Return a span of the same trace that is called so within this one."""
        return Ids(self.trace, _digest(self.trace + self.span, *names)[:SPAN_BYTES])


@dataclass(frozen=True)
class Span:
    """A stretch of work, between two moments of Unix time. ``parent`` is a span of the same trace."""

    name: str
    ids: Ids
    parent: bytes | None
    began_s: float
    ended_s: float
    attributes: Mapping[str, str | int | float] = field(default_factory=dict)
    links: tuple[Ids, ...] = ()


def version_ids(run: bytes, fragment: int, version: int) -> Ids:
    """Return the trace of a version, and the span of the round that makes it. ``run``: identity of the run."""
    return _ids(run, "version", fragment, version)


def offer_ids(run: bytes, learner: str, incarnation: int, fragment: int, number: int) -> Ids:
    """Return the trace of an offer, and the span of its making."""
    return _ids(run, "offer", learner, incarnation, fragment, number)


def regional_offer_ids(run: bytes, syncer: str, incarnation: int, fragment: int, number: int) -> Ids:
    """Return the trace of a regional offer, and the span of its making."""
    return _ids(run, "regional offer", syncer, incarnation, fragment, number)


def is_sampled(version: Ids, share: float) -> bool:
    """Whether a version's way is told, of which ``share`` are; the same for all services that have the same share."""
    return int.from_bytes(version.trace[:8], "big") < share * 2**64


def _ids(run: bytes, *names: str | int) -> Ids:
    digest = _digest(run, *names)
    return Ids(digest[:TRACE_BYTES], digest[TRACE_BYTES : TRACE_BYTES + SPAN_BYTES])


def _digest(key: bytes, *names: str | int) -> bytes:
    text = "\0".join(map(str, names)).encode()
    return blake3(key + b"\0" + text, derive_key_context=PURPOSE).digest()
