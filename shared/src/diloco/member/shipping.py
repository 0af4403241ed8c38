"""Rows of fragments on their way between the processes of one learner, in pieces, each with its hash."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from diloco.core.rows import RowLayout, Rows
from diloco.errors import FormatError, HashError
from diloco.member.links import Links
from diloco.wire import island
from diloco.wire.island import PIECE_BYTES, What

Vector = NDArray[np.float32]
VALUE_BYTES = 4


@dataclass
class _Incoming:
    number: int
    values: Vector
    pieces: int
    came: int = 0


class Shipping:
    """Sends rows, and puts those together that come. All calls are the loop's."""

    def __init__(self, links: Links, layouts: Sequence[RowLayout]) -> None:
        self.links, self.layouts = links, layouts
        self._incoming: dict[tuple[int, int, What], _Incoming] = {}  # by source, fragment, kind: the newest

    def rows(self, fragment: int, process: int, what: What) -> Rows:
        """Return which rows of a fragment a process hands over, or has."""
        layout = self.layouts[fragment]
        return (layout.read if what in ("snapshot", "whole") else layout.held)[process]

    async def send(self, to: int, fragment: int, number: int, what: What, values: Vector) -> None:
        """Send values, float32 [size of the rows]; nothing where there are none."""
        content = values.view(np.uint8).data
        pieces = _pieces(values.size)
        for piece in range(pieces):
            part = content[piece * PIECE_BYTES : (piece + 1) * PIECE_BYTES]
            head = island.Rows(fragment, number, what, piece, pieces, blake3(part).digest())
            await self.links.send(to, head, part)

    def take(self, source: int, head: island.Rows, content: bytes) -> Vector | None:
        """Take in a piece; return the rows, float32 [their size], once all of them are there.

        Raises:
            FormatError, HashError: it does not fit.
        """
        if head.fragment >= len(self.layouts):
            raise FormatError(f"rows of fragment {head.fragment}, the run has {len(self.layouts)}")
        sender = source if head.what in ("snapshot", "whole") else self.links.place
        size = self.rows(head.fragment, sender, head.what).size
        what = f"fragment {head.fragment}, {head.what} {head.number} from process {source}"
        if head.pieces != _pieces(size) or head.piece >= head.pieces:
            raise FormatError(f"{what}: piece {head.piece} of {head.pieces}, expected {_pieces(size)} for {size} values")
        key = source, head.fragment, head.what
        incoming = self._incoming.get(key)
        if incoming is None or incoming.number != head.number:
            incoming = self._incoming[key] = _Incoming(head.number, np.empty(size, np.float32), head.pieces)
        buffer = incoming.values.view(np.uint8).data
        target = buffer[head.piece * PIECE_BYTES : (head.piece + 1) * PIECE_BYTES]
        if head.piece != incoming.came or len(content) != len(target):
            raise FormatError(f"{what}: piece {head.piece} of {len(content)} bytes, expected {incoming.came} of {len(target)}")
        if blake3(content).digest() != head.digest:
            raise HashError(f"{what}: piece {head.piece} does not have its hash")
        target[:] = content
        incoming.came += 1
        if incoming.came < incoming.pieces:
            return None
        del self._incoming[key]
        return incoming.values


def _pieces(values: int) -> int:
    return -(-values * VALUE_BYTES // PIECE_BYTES)
