"""Rows of fragments on their way between the processes of one learner, in pieces, each with its hash.

A piece is taken out of the fragment's vector at one end, and put into a vector at the other: rows are kept nowhere else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from diloco.core.learner.delta import Baseline
from diloco.core.tensors.rows import VALUE_BYTES, FragmentRows, RowLayout
from diloco.errors import FormatError, HashError
from diloco.processes.links import Links
from diloco.wire import process_messages as island
from diloco.wire.process_messages import PIECE_BYTES, What

Vector = NDArray[np.float32]

READ: tuple[What, ...] = ("snapshot", "whole")  # each process has a part of it


@dataclass
class _Incoming:
    """A vector, float32 [size of the fragment], and by process how many pieces of its rows have come."""

    number: int
    vector: Vector
    came: dict[int, int] = field(default_factory=dict)


class Shipping:
    """Sends rows, and puts those together that come. All calls are the loop's. ``sizes`` are those of the fragments."""

    def __init__(self, links: Links, layouts: Sequence[RowLayout], sizes: Sequence[int]) -> None:
        self.links, self.layouts, self.sizes = links, layouts, sizes
        self._pieces: dict[tuple[int, int, bool], list[FragmentRows]] = {}  # by fragment, process, and whether it is read
        self._incoming: dict[tuple[int, What], _Incoming] = {}  # by fragment and kind: the newest

    def rows(self, fragment: int, process: int, what: What) -> FragmentRows:
        """Return which rows of a fragment a process hands over, or has."""
        layout = self.layouts[fragment]
        return (layout.read if what in READ else layout.held)[process]

    def sharing(self, fragment: int) -> list[list[int]]:
        """Return the other processes that have rows of a fragment, together those that have the same."""
        found: list[list[int]] = []
        for process in self.links.others:
            rows = self.rows(fragment, process, "theta")
            same = next((group for group in found if self.rows(fragment, group[0], "theta") == rows), None)
            if same is not None:
                same.append(process)
            elif rows.size:
                found.append([process])
        return found

    async def send(self, to: Sequence[int], fragment: int, number: int, what: What, vector: Baseline | Vector) -> None:
        """Send rows of a fragment's vector to processes that have the same ones.

        ``vector``, float32 [size of the fragment], must not change any more.
        """
        pieces = self._cut(fragment, self.links.place if what in READ else to[0], what)
        contents = await asyncio.to_thread(_contents, pieces, vector)
        for process in to:
            for piece, (content, digest) in enumerate(contents):
                await self.links.send(
                    process,
                    island.Rows(fragment=fragment, number=number, what=what, piece=piece, pieces=len(pieces), digest=digest),
                    content,
                )

    def take(self, source: int, head: island.Rows, content: memoryview) -> Vector | None:
        """Take in a piece; once all rows of its sender are there, return the vector that has them, float32 [fragment's size].

        A vector that is read is kept until :meth:`release`, and has the rows of all who have sent theirs.

        Raises:
            FormatError, HashError: it does not fit.
        """
        if head.fragment >= len(self.layouts):
            raise FormatError(f"rows of fragment {head.fragment}, the run has {len(self.layouts)}")
        pieces = self._cut(head.fragment, source if head.what in READ else self.links.place, head.what)
        what = f"fragment {head.fragment}, {head.what} {head.number} from process {source}"
        if head.pieces != len(pieces) or head.piece >= head.pieces:
            raise FormatError(f"{what}: piece {head.piece} of {head.pieces}, expected {len(pieces)}")
        incoming = self._expect(head.fragment, head.what, head.number)
        if incoming is None:
            return None  # newer ones have come
        came, rows = incoming.came.get(source, 0), pieces[head.piece]
        if head.piece != came or len(content) != rows.size * VALUE_BYTES:
            expected = f"{came} of {rows.size * VALUE_BYTES}"
            raise FormatError(f"{what}: piece {head.piece} of {len(content)} bytes, expected {expected}")
        if blake3(content).digest() != head.digest:
            raise HashError(f"{what}: piece {head.piece} does not have its hash")
        rows.put(np.frombuffer(content, np.float32), incoming.vector)
        incoming.came[source] = came + 1
        if came + 1 < len(pieces):
            return None
        if head.what not in READ:
            del self._incoming[head.fragment, head.what]
        return incoming.vector

    def add(self, fragment: int, what: What, number: int, vector: Vector) -> None:
        """Add this process's rows of a vector that is read.

        ``vector``, float32 [size of the fragment], has them, and is given away.
        """
        incoming = self._expect(fragment, what, number, vector)
        if incoming is not None and incoming.vector is not vector:
            rows = self.rows(fragment, self.links.place, what)
            rows.put(rows.take(vector), incoming.vector)

    def release(self, fragment: int, what: What) -> Vector:
        """Return a vector that is read, float32 [size of the fragment], and forget it."""
        return self._incoming.pop((fragment, what)).vector

    def _expect(self, fragment: int, what: What, number: int, vector: Vector | None = None) -> _Incoming | None:
        """Return the vector of this number, which begins as ``vector`` if it is the first; None if there is a newer one."""
        newest = self._incoming.get((fragment, what))
        if newest is None or newest.number < number:
            begun = np.empty(self.sizes[fragment], np.float32) if vector is None else vector
            newest = self._incoming[fragment, what] = _Incoming(number, begun)
        return newest if newest.number == number else None

    def _cut(self, fragment: int, process: int, what: What) -> list[FragmentRows]:
        """Return the pieces in which a process's rows travel."""
        key = fragment, process, what in READ
        if key not in self._pieces:
            self._pieces[key] = list(self.rows(fragment, process, what).cut(PIECE_BYTES))
        return self._pieces[key]


def _contents(pieces: Sequence[FragmentRows], vector: Baseline | Vector) -> list[tuple[memoryview, bytes]]:
    """Return the bytes of each piece of a fragment's vector, float32 [its size], and their hash."""
    contents = [piece.take(vector).view(np.uint8).data for piece in pieces]
    return [(content, blake3(content).digest()) for content in contents]
