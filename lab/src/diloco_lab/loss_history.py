"""Losses of a global model while it is trained, by virtual time: what a user waits for."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

DIGITS = 5  # of losses, after the point


class LossPoint(msgspec.Struct, frozen=True, array_like=True):
    """The loss of the global model at a time, in virtual seconds; ``tokens``: processed by then. None: it is not finite."""

    at_s: float
    tokens: int
    loss: float | None


def point(at_s: float, tokens: int, loss: float) -> LossPoint:
    """Return a point, rounded to what is worth keeping."""
    return LossPoint(round(at_s, 3), tokens, round(loss, DIGITS) if math.isfinite(loss) else None)


def reached_s(history: Sequence[LossPoint], loss: float) -> float | None:
    """Return when a loss was reached for the first time, between two points on the line through them; None: never.

    The loss is rounded as those of the points are, so that the last one is reached at the end.
    """
    loss = round(loss, DIGITS)
    before: LossPoint | None = None
    for now in history:
        if now.loss is None:
            before = None
            continue
        if now.loss <= loss:
            if before is None or before.loss is None:
                return now.at_s
            return before.at_s + (now.at_s - before.at_s) * (before.loss - loss) / (before.loss - now.loss)
        before = now
    return None
