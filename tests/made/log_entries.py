"""The one maker of a log's records, and the one of offers: a new field is added here."""

from __future__ import annotations

from typing import Any

from diloco.wire.body import Body
from diloco.wire.entries import Record
from diloco.wire.offers import MergeMember, Offer

BODY = Body(size_bytes=0, content_hash=b"c" * 32, parts=0, attempt=b"attempt.")


def record_of(version: int, /, *members: MergeMember, **changes: Any) -> Record:
    """Return a record that makes a version of fragment 0 of these members, with these changes; it fits no log as it is."""
    values: dict[str, Any] = {
        "fragment": 0,
        "entry": "version",
        "version": version,
        "epoch": 0,
        "syncer": "syncer-0",
        "previous": bytes(32),
        "members": list(members),
        "regional_offers": [],
        "bits": 4,
        "learning_rate": 0.5,
        "momentum": 0.0,
        "tokens_merged": 0,
        "tokens_lost": 0,
        "state_hash": bytes(32),
        "closing": False,
        "committed_at_s": 0.0,
        "quorum_s": 0.0,
        "round_s": 0.0,
        "body": BODY,
    }
    return Record(**(values | changes))


def offer_of(learner: str, /, **changes: Any) -> Offer:
    """Return a learner's first offer of fragment 0, of four steps of ten tokens since version 0, with these changes."""
    values: dict[str, Any] = {
        "fragment": 0,
        "learner": learner,
        "incarnation": 1,
        "number": 1,
        "after": (0, 0),
        "round": 1,
        "base_version": 0,
        "base_hash": bytes(32),
        "bits": 4,
        "steps": 4,
        "tokens": 40,
        "lost_tokens": 0,
        "data": [(0, 0, 4)],
        "body": BODY,
    }
    return Offer(**(values | changes))


def hash_of(version: int) -> bytes:
    return version.to_bytes(32, "big")
