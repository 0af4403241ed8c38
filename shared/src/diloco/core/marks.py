"""Snapshot markers of a whole run's checkpoint, as a learner answers them.

A mark names a version of each fragment. Later versions are held back until the state with exactly these has been copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diloco.core.fragment_state import FragmentState, Version
from diloco.errors import MessageError
from diloco.wire.control import MarkerAnswer, SnapshotMarker


@dataclass
class Marks:
    """The newest mark, and the answer to the last one that was answered."""

    mark: SnapshotMarker | None = None  # not answered yet
    answered: MarkerAnswer | None = None
    held_back: list[int] | None = None  # by fragment: no later version is applied

    def hear(self, mark: SnapshotMarker, fragments: int) -> MarkerAnswer | None:
        """Take in a mark; return the newest answer if the mark is not newer than it: its sender learns to count on.

        Raises:
            MessageError: the mark names another number of fragments.
        """
        if len(mark.versions) != fragments:
            raise MessageError(f"mark {mark.number} of {len(mark.versions)} fragments, the run has {fragments}")
        newest = self.mark or self.answered
        if newest is None or mark.number > newest.number:
            self.mark, self.held_back = mark, mark.versions
        return self.answered if self.answered is not None and mark.number <= self.answered.number else None

    def reached(self, fragments: Sequence[FragmentState]) -> SnapshotMarker | None:
        """Return the mark that a state with these fragments answers, if there is one."""
        mark = self.mark
        if mark is None:
            return None
        reached = all(state.delta.base_version >= version for state, version in zip(fragments, mark.versions, strict=True))
        return mark if reached else None

    def copied(self, mark: SnapshotMarker) -> None:
        """Let versions beyond a mark be applied: the state that it asks for has been copied."""
        if self.mark is mark:
            self.held_back = None

    def answer(self, answer: MarkerAnswer) -> None:
        """Note that the state that a mark asks for is saved."""
        self.answered = answer
        if self.mark is not None and self.mark.number == answer.number:
            self.forget()

    def forget(self) -> None:
        """Drop the mark: the log has lost versions that it may name."""
        self.mark = self.held_back = None

    def may_apply(self, version: Version, fragments: Sequence[FragmentState]) -> bool:
        """Return whether a version that waits is to be applied now.

        Entries are read in the log's order: when one beyond the mark comes, the whole of the mark has come. If it has not, the
        mark names versions that a server has lost, which may never come again: nothing waits for them.
        """
        held_back = self.held_back
        if held_back is None or version.record is None or version.chain.version <= held_back[version.chain.fragment]:
            return True
        return any(state.newest.chain.version < held for state, held in zip(fragments, held_back, strict=True))
