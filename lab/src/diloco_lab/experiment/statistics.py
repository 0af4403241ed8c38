"""Paired seeds: differences, their spread, and the bound that decides a claim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Paired:
    """Relative differences of losses, ``arm / against - 1``, over seeds that both arms have.

    ``spread`` is the standard deviation of one difference; ``interval`` holds the mean with 95 %, two-sided, and ``bound`` is
    above it with 95 %, one-sided (Student's t). Both are None with fewer than two pairs.
    """

    pairs: int
    mean: float
    spread: float | None
    interval: tuple[float, float] | None
    bound: float | None


def paired(arm: Sequence[float], against: Sequence[float]) -> Paired:
    """Compare losses [seeds] of two arms, seed by seed.

    Raises:
        ValueError: no pair, or not the same number of both.
    """
    differences = np.array([one / other - 1 for one, other in zip(arm, against, strict=True)])
    if not differences.size:
        raise ValueError("no pairs")
    mean, pairs = float(differences.mean()), int(differences.size)
    if pairs < 2:
        return Paired(pairs, mean, None, None, None)
    spread = float(differences.std(ddof=1))
    error, freedom = spread / np.sqrt(pairs), pairs - 1
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * float(error)
    bound = mean + float(stats.t.ppf(CONFIDENCE, freedom)) * float(error)
    return Paired(pairs, mean, spread, (mean - half, mean + half), bound)


def seeds_for(spread: float, margin: float, limit: int = 1000) -> int | None:
    """Return the fewest pairs whose one-sided bound is ``margin`` above their mean at most; None: more than ``limit``."""
    for pairs in range(2, limit + 1):
        if float(stats.t.ppf(CONFIDENCE, pairs - 1)) * spread / np.sqrt(pairs) <= margin:
            return pairs
    return None
