"""The bytes of a run beside those of data-parallel training: a ring all-reduce of bfloat16 gradients at every step.

Such a ring sends, and receives, 2 (M - 1) / M of the model a learner of M.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

BFLOAT16_BYTES = 2


def compared(learners: Mapping[str, Mapping[str, Any]], parameters: int, borders: Sequence[Any]) -> dict[str, Any]:
    """Return the report's ``traffic``, from its ``learners``: their steps, and bytes sent and received."""
    steps, bytes_up, bytes_down = (
        sum(learner[key] for learner in learners.values()) for key in ("steps", "bytes_up", "bytes_down")
    )
    ring = 2 * max(0, len(learners) - 1) / max(1, len(learners))
    data_parallel = round(2 * steps * ring * parameters * BFLOAT16_BYTES)
    return {
        "bytes_up": bytes_up,
        "bytes_down": bytes_down,
        "bytes_data_parallel": data_parallel,
        "ratio": data_parallel / (bytes_up + bytes_down) if bytes_up + bytes_down else None,
        "borders": list(borders),
    }
