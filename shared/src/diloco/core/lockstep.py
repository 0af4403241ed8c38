"""When a learner in lockstep may take its next step: one that comes in between must not stay in between.

In lockstep every step of every learner is answered by one version of every fragment. The fragments' rounds know nothing of one
another, though. Others may have ended a step, and some fragments got their versions of it without a learner that has just
joined or come back, while the rest waits. Were it to step now, it would end its every step when the others have ended theirs,
and they would wait for it as it does for them: everybody at half the pace, with gradients of two steps in one version.

All of a step's versions hold the same batches. So where the newest versions of two fragments hold different batches of one
share of the data, those of a step have not all come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass
class Lockstep:
    """One learner's place among the steps of a run.

    ``newest`` are, by fragment, the ends by share of the batches in the version applied last; after a log was loaded, of all
    that it has merged. If no version comes for ``patience_s``, there is nobody who would make those that are missing: all began
    again, from logs that end unevenly.
    """

    newest: list[Mapping[int, int]]
    patience_s: float
    moved_at_s: float | None = None  # when a version came last, as long as others are missing

    def behind(self, now_s: float, *, holds: bool, moved: bool) -> bool:
        """Whether versions are missing that are made without this learner.

        It takes part in those that it ``holds`` an unmerged step for. ``moved``: a version was applied just now.
        """
        if holds or self._even():
            self.moved_at_s = None
            return False
        if moved or self.moved_at_s is None:
            self.moved_at_s = now_s
        return now_s - self.moved_at_s < self.patience_s

    def _even(self) -> bool:
        seen: dict[int, int] = {}
        return all(seen.setdefault(share, end) == end for ends in self.newest for share, end in ends.items())
