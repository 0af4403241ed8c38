"""The rule by which the processes of a learner meet: where each goes, and when those that have come begin together.

For a learner of a fixed size it is simple, and here: all of them come to process 0. The rule of learners that may begin with
fewer is :class:`diloco.elastic.assembly.ElasticAssembly`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from diloco.wire.process_messages import Standing


class Assembly(Protocol):
    """A rule, and the processes that have come to this one. It has no clock: times are handed in."""

    goes_on: bool  # whether a leader listens on once a generation has begun: those that come later wait for the next one

    @property
    def present(self) -> Collection[int]:
        """The own process, and all that have come and not gone."""

    @property
    def members(self) -> list[int]:
        """The processes of the generation that could begin; empty: too few have come."""

    @property
    def least_note(self) -> str:
        """How few could begin, for the end of a sentence; empty if all have to be there."""

    def where(self, at: int | None, heard: Mapping[int, Standing]) -> int | None:
        """Return the process that this one goes to; itself: it has the others come; None: there is none.

        ``at``: where it is now. ``heard``: what others that listen say, by index.
        """

    def begin(self, now_s: float) -> None:
        """Have the others come from now on."""

    def wait_for_next(self) -> None:
        """Note that a generation goes on without this process."""

    def come(self, index: int, now_s: float) -> None:
        """Note that a process has come."""

    def go(self, index: int) -> None:
        """Note that a process has gone again."""

    def begins_s(self, now_s: float) -> float | None:
        """Return in how many seconds a generation begins if no process comes or goes; None: it cannot."""

    def grows(self, members: Collection[int], waiting: Collection[int]) -> bool:
        """Whether a generation of ``members`` would be larger with those that are ``waiting``."""


class WholeAssembly:
    """All ``count`` processes of a learner come to process 0; process ``own`` is this one."""

    goes_on = False
    least_note = ""

    def __init__(self, own: int, count: int) -> None:
        self.own, self.count, self.present = own, count, {own}

    @property
    def members(self) -> list[int]:
        """All, once all are there."""
        return sorted(self.present) if len(self.present) == self.count else []

    def where(self, at: int | None, heard: Mapping[int, Standing]) -> int | None:
        """Return process 0, where it is this one or listens."""
        return 0 if self.own == 0 or 0 in heard else None

    def begin(self, now_s: float) -> None:
        """Have the others come."""
        self.present = {self.own}

    def wait_for_next(self) -> None:
        """Wait: process 0 begins again, since it has lost this one."""

    def come(self, index: int, now_s: float) -> None:
        """Note that a process has come."""
        self.present.add(index)

    def go(self, index: int) -> None:
        """Note that a process has gone again."""
        self.present.discard(index)

    def begins_s(self, now_s: float) -> float | None:
        """Return 0 once all are there."""
        return 0.0 if self.members else None

    def grows(self, members: Collection[int], waiting: Collection[int]) -> bool:
        """Return that it does not: all are there."""
        return False
