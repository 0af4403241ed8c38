"""Retention of a log: keyframes by count and bytes, and with each all entries after it."""

from __future__ import annotations

from collections.abc import Iterable

from diloco.core.log.fold import keyframe_bytes
from diloco.settings.run import LogSettings


def keyframes_kept(settings: LogSettings, parameters: int, moments: int) -> int:
    """Return the number of each fragment's newest keyframes that stay in the log of a model of ``parameters`` parameters.

    From one keyframe to the next the log grows by that keyframe and about ``keyframe_factor`` times its size of records (before
    zstd), of all fragments alike, so ``keep_bytes`` of the whole log are the same number of keyframes for each of them.
    """
    cycle_bytes = keyframe_bytes(parameters, moments) * (1 + settings.keyframe_factor)
    return max(settings.keep_keyframes, int(settings.keep_bytes // cycle_bytes))


def keyframe_due(
    settings: LogSettings, log_bytes: int, keyframe_bytes: int, newest_sequence: int, damaged: Iterable[int]
) -> bool:
    """Whether a fragment's log has grown enough since its newest keyframe for another one, or a later one is damaged.

    Args:
        settings: of the log, those in force.
        log_bytes: size of the entries since the newest whole keyframe.
        keyframe_bytes: size of a keyframe's content.
        newest_sequence: of the newest whole keyframe, in the stream.
        damaged: sequences of keyframes that cannot be loaded.
    """
    return any(sequence > newest_sequence for sequence in damaged) or log_bytes >= settings.keyframe_factor * keyframe_bytes
