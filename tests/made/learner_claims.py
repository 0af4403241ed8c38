"""Claims of a learner, and what cannot be of them."""

from __future__ import annotations

import math
from typing import Any

from tests.made.log_entries import hash_of
from tests.made.rounds import offer

from diloco.core.log.chain import Chain
from diloco.core.syncer import claims
from diloco.core.syncer.claims import StepBounds
from diloco.errors import ClaimError
from diloco.settings.run import RunSettings
from diloco.wire.entries import Cursor
from diloco.wire.grants import Grant

BATCH = 16 * 128  # tokens of the built-in task
BUILT_IN_BOUNDS = StepBounds(BATCH // 8, 8 * BATCH)


def chain_with(*cursors: Cursor) -> Chain:
    merged, lost = (sum(getattr(cursor, name) for cursor in cursors) for name in ("tokens", "lost_tokens"))
    return Chain(0, 5, 1, hash_of(9), 9, hash_of(5), merged, lost, False, {cursor.learner: cursor for cursor in cursors})


def ann(tokens: int, lost_tokens: int, steps: int = 0) -> Cursor:
    return Cursor("ann", 1, 1, 3, tokens, lost_tokens, steps)


def impossible(
    settings: RunSettings,
    chain: Chain | None = None,
    *,
    bounds: StepBounds = BUILT_IN_BOUNDS,
    grant: Grant | None = None,
    elapsed_s: float = math.inf,
    **claim: Any,
) -> str:
    """What cannot be of a claim of ann's; empty: it can be."""
    values: dict[str, Any] = {"steps": 24, "tokens": 24 * BATCH, "data": [(0, 100, 24)]}
    try:
        claims.judge(offer("ann", 2, **values | claim), chain, settings, bounds, grant, elapsed_s)
    except ClaimError as error:
        return str(error)
    return ""
