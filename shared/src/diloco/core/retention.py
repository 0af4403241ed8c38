"""How much of a log stays: keyframes by count and bytes, and with each all entries after it."""

from __future__ import annotations

from diloco.core.fold import keyframe_bytes
from diloco.settings import LogSettings


def keyframes_kept(settings: LogSettings, parameters: int, moments: int) -> int:
    """How many of each fragment's newest keyframes stay in the log of a model of so many parameters, and moments of each.

    From one keyframe to the next the log grows by that keyframe and about ``keyframe_factor`` times its size of records (before
    zstd), of all fragments alike, so ``keep_bytes`` of the whole log are the same number of keyframes for each of them.
    """
    cycle_bytes = keyframe_bytes(parameters, moments) * (1 + settings.keyframe_factor)
    return max(settings.keep_keyframes, int(settings.keep_bytes // cycle_bytes))
