"""Text that evaluators drew from the global model in the course of a run, a few of all that were told.

Pure: no clock, no network, no file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from diloco.wire.fields import MAX_TEXT

MAX_SAMPLES = 8  # every second one goes when there are more, so that the rest are spread over the run

Sampled = tuple[float, int, int, str]  # time, tokens merged, version of the fragment that has the lowest, text


class Samples:
    """The samples of one run, in the order of time."""

    def __init__(self, kept: Iterable[Sequence[Any]] = ()) -> None:
        """Begin with those that :meth:`dump` returned in an earlier process.

        Raises:
            TypeError, ValueError: they are damaged.
        """
        self.kept: list[Sampled] = [
            (float(at_s), int(tokens), int(version), str(text)[:MAX_TEXT]) for at_s, tokens, version, text in kept
        ][-MAX_SAMPLES:]

    def note(self, versions: Sequence[int], text: str, tokens: int, now_s: float) -> None:
        """Take in a sample of a model of these versions, by fragment; one that was noted last is passed over."""
        version = min(versions)
        if self.kept and self.kept[-1][2:] == (version, text):
            return
        self.kept.append((round(now_s, 1), tokens, version, text))
        if len(self.kept) > MAX_SAMPLES:
            self.kept = [*self.kept[:-1:2], self.kept[-1]]

    def dump(self) -> list[list[Any]]:
        """Return a copy for JSON."""
        return [list(sampled) for sampled in self.kept]
