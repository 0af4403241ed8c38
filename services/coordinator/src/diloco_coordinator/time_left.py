"""The time that is left of a run, from the pace of its last minute: a shorter one jumps with every merge and every failure.

Pure: no clock, no network, no file.
"""

from __future__ import annotations

from collections import deque

WINDOW_S = 60.0  # a learner that is killed and starts again is away for less
EVERY_S = 1.0  # between two marks


class RecentPace:
    """Tokens a second of all learners together over the last :data:`WINDOW_S`, or since they began."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()  # time and tokens processed by then

    def is_due(self, now_s: float) -> bool:
        """Return whether another mark is due: to count the tokens of all learners takes time."""
        return not self._marks or now_s - self._marks[-1][0] >= EVERY_S

    def note(self, tokens: int, now_s: float) -> None:
        """Take in the tokens that all learners have processed by now."""
        self._marks.append((now_s, tokens))
        while len(self._marks) > 2 and now_s - self._marks[1][0] >= WINDOW_S:
            self._marks.popleft()

    def left_s(self, tokens_left: int) -> float | None:
        """Return how long so many tokens take at this pace; None while it is not known, or nothing goes on."""
        if len(self._marks) < 2:
            return None
        (began_s, before), (ended_s, after) = self._marks[0], self._marks[-1]
        return tokens_left * (ended_s - began_s) / (after - before) if after > before else None
