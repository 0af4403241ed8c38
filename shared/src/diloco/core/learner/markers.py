"""Snapshot markers of a whole run's checkpoint, as a learner answers them.

A marker names a version of each fragment. Later versions are held back until the state with exactly these has been copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from diloco.core.learner.fragment_state import FragmentState, FragmentVersion
from diloco.errors import MessageError
from diloco.wire.control import MarkerAnswer, MarkerDeclined, SnapshotMarker

MarkerReply: TypeAlias = MarkerAnswer | MarkerDeclined


@dataclass
class Markers:
    """The newest marker, and the answer to the last one that was answered."""

    marker: SnapshotMarker | None = None  # not answered yet
    answered: MarkerReply | None = None
    held_back: list[int] | None = None  # by fragment: no later version is applied

    def hear(self, marker: SnapshotMarker, fragments: int) -> MarkerReply | None:
        """Take in a marker; return the newest answer if the marker is not newer than it: its sender learns to count on.

        Raises:
            MessageError: the marker names another number of fragments.
        """
        if len(marker.versions) != fragments:
            raise MessageError(f"marker {marker.number} of {len(marker.versions)} fragments, the run has {fragments}")
        newest = self.marker or self.answered
        if newest is None or marker.number > newest.number:
            self.marker, self.held_back = marker, marker.versions
        return self.answered if self.answered is not None and marker.number <= self.answered.number else None

    def reached(self, fragments: Sequence[FragmentState]) -> SnapshotMarker | None:
        """Return the marker that a state with these fragments answers, if there is one."""
        marker = self.marker
        if marker is None:
            return None
        reached = all(state.delta.base_version >= version for state, version in zip(fragments, marker.versions, strict=True))
        return marker if reached else None

    def copied(self, marker: SnapshotMarker) -> None:
        """Let versions beyond a marker be applied: the state that it asks for has been copied."""
        if self.marker is marker:
            self.held_back = None

    def answer(self, answer: MarkerReply) -> None:
        """Note that the state that a marker asks for is saved, or that it never will be."""
        self.answered = answer
        if self.marker is not None and self.marker.number == answer.number:
            self.forget()

    def forget(self) -> None:
        """Drop the marker: the log has lost versions that it may name."""
        self.marker = self.held_back = None

    def may_apply(self, version: FragmentVersion, fragments: Sequence[FragmentState]) -> bool:
        """Return whether a version that waits is to be applied now.

        Entries are read in the log's order: when one beyond the marker comes, the whole of the marker has come. If it has not,
        the marker names versions that a server has lost, which may never come again: nothing waits for them.
        """
        held_back = self.held_back
        if held_back is None or version.record is None or version.chain.version <= held_back[version.chain.fragment]:
            return True
        return any(state.newest.chain.version < held for state, held in zip(fragments, held_back, strict=True))
