"""Combined offers of a region, as anybody may forge them."""

from __future__ import annotations

from typing import Any

from tests.services.toy import SAMPLES

from diloco.wire.body import Body
from diloco.wire.offers import Answer, RegionalOffer


def forged(learner: str, **changes: Any) -> Answer:
    values: dict[str, Any] = {
        "incarnation": 1,
        "number": 1,
        "after": (0, 0),
        "round": 1,
        "base_version": 0,
        "base_hash": bytes(32),
    }
    values |= {"steps": 1, "tokens": SAMPLES, "lost_tokens": 0, "data": [(0, 0, 1)]}
    return Answer(learner, **values | changes)


def combined_of(syncer: str, /, **changes: Any) -> RegionalOffer:
    body = Body(0, bytes(32), 0, bytes(8))
    values: dict[str, Any] = {"fragment": 0, "syncer": syncer, "incarnation": 1, "number": 1, "bits": 4, "body": body}
    return RegionalOffer(**values | {"members": [forged("toy-0")]} | changes)
