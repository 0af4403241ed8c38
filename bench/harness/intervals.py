"""Results of repeated measurements: ratios of pairs with their interval, and spreads."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

T95 = {  # Student's t of an interval of 95 %, by the number of pairs
    2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365, 12: 2.201, 16: 2.131, 24: 2.069, 32: 2.040, 48: 2.012,
    64: 1.998,
}  # fmt: skip


def ratio(ones: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """Return the mean ``ratio`` of pairs of times, and its interval of 95 % from ``low`` to ``high``, by their logarithms.

    There are as many pairs as :data:`T95` knows, or one, whose interval is unknown: it is not returned.
    """
    logs = [math.log(one / other) for one, other in zip(ones, others, strict=True)]
    mean = statistics.mean(logs)
    if len(logs) == 1:
        return {"ratio": math.exp(mean)}
    error = T95[len(logs)] * statistics.stdev(logs) / math.sqrt(len(logs))
    return {name: math.exp(value) for name, value in (("ratio", mean), ("low", mean - error), ("high", mean + error))}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the least and the most of some values."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}
