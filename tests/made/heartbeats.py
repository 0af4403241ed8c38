"""The one maker of learners' heartbeats, and the one of syncers': a new field is added here."""

from __future__ import annotations

from typing import Any

from diloco.wire.control import Heartbeat, ShardHeartbeat


def learner_heartbeat(learner: str, step: int = 0, /, *versions: int, **changes: Any) -> Heartbeat:
    """Return a heartbeat of a learner that steps, and of whose steps none is merged yet, with these changes.

    ``versions``: by fragment, the version last applied; one fragment at version 0 if none is given.
    """
    step, versions = changes.get("step", step), versions or (0,)
    values: dict[str, Any] = {
        "learner": learner,
        "region": "",
        "incarnation": 1,
        "role": "learner",
        "state": "stepping",
        "sending": False,
        "step": step,
        "tokens": 0,
        "step_s": 1.0,
        "loss": None,
        "versions": list(versions),
        "steps": [step] * len(versions),
        "fragment_tokens": [0] * len(versions),
        "lost_tokens": [0] * len(versions),
        "trained": [],
        "batch_tokens": 0,
        "busy_s": 0.0,
        "blocked_s": 0.0,
        "bytes_up": 0,
        "bytes_down": 0,
        "refused": 0,
        "software": "",
    }
    return Heartbeat(**(values | changes))


def shard_heartbeat(syncer: str, number: int = 1, /, **changes: Any) -> ShardHeartbeat:
    """Return a heartbeat of a syncer that owns no fragment, with these changes."""
    values: dict[str, Any] = {
        "syncer": syncer,
        "region": "",
        "incarnation": 1,
        "number": number,
        "state": "owner",
        "revision": 0,
        "fragments": [],
        "closed": [],
        "rounds": 0,
        "versions": 0,
        "open": [],
        "refused": 0,
        "bytes_up": 0,
        "bytes_down": 0,
        "crossing": [],
        "record_bits": 4,
        "pace": 1.0,
        "offer_bits": [],
        "software": "",
    }
    return ShardHeartbeat(**(values | changes))
