"""When a learner in lockstep may take its next step: one that comes in between must not stay in between.

In lockstep every step of every learner is answered by one version of every fragment. The fragments' rounds know nothing of one
another, though. Others may have ended a step, and some fragments got their versions of it without a learner that has just
joined or come back, while the rest waits. Were it to step now, it would end its every step when the others have ended theirs,
and they would wait for it as it does for them: everybody at half the pace, with gradients of two steps in one version.

All of a step's versions hold the same batches. So where the newest versions of two fragments hold different batches of one
share of the data, those of a step have not all come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def missing_since_s(
    newest: Sequence[Mapping[int, int]], since_s: float | None, now_s: float, *, holds: bool, moved: bool
) -> float | None:
    """Return since when no version has come although some are missing that are made without this learner; None: none is.

    ``newest`` are, by fragment, the ends by share of the batches in the version applied last; after a log was loaded, of all
    that it has merged. ``since_s`` is the last result. The learner takes part in the versions that it ``holds`` an unmerged
    step for. ``moved``: a version was applied just now. If none comes for long, no learner is there that would make the missing
    ones: all learners began again, from logs that end unevenly.
    """
    if holds or _even(newest):
        return None
    return now_s if moved or since_s is None else since_s


def _even(newest: Sequence[Mapping[int, int]]) -> bool:
    seen: dict[int, int] = {}
    return all(seen.setdefault(share, end) == end for ends in newest for share, end in ends.items())
