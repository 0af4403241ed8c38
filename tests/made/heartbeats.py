"""The one maker of learners' heartbeats: a new field is added here."""

from __future__ import annotations

from typing import Any

from diloco.wire.control import Heartbeat


def learner_heartbeat(learner: str, fragments: int, **changes: Any) -> Heartbeat:
    """A heartbeat of a learner of so many fragments that steps and has done nothing yet, but for the changes."""
    values: dict[str, Any] = {
        "learner": learner,
        "region": "",
        "incarnation": 1,
        "role": "learner",
        "state": "stepping",
        "sending": False,
        "step": 0,
        "tokens": 0,
        "step_s": 1.0,
        "loss": None,
        "versions": [0] * fragments,
        "steps": [0] * fragments,
        "fragment_tokens": [0] * fragments,
        "lost_tokens": [0] * fragments,
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
