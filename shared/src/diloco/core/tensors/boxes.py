"""Boxes: the parts of tensors that lie at the processes of one learner, and which rows of a fragment each of them has.

Frameworks shard a tensor along any of its axes, evenly or not, and keep replicas. What a process has of a tensor is a box.
:func:`row_layouts` says from the boxes of all processes which of them hands over which values when a fragment is read: each
value once, and where the fragment's carrier has it, the carrier, which then need not be sent anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeAlias

from diloco.core.tensors.fragments import Fragment, Piece, TensorSpec
from diloco.core.tensors.rows import FragmentRows, RowLayout, Where
from diloco.errors import SettingsError

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A part of a tensor: by axis, where it begins and how long it is. A scalar has no axes."""

    start: Shape
    lengths: Shape

    @classmethod
    def whole(cls, shape: Shape) -> Box:
        """Return the box that is all of a tensor."""
        return cls((0,) * len(shape), shape)

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.lengths)

    @property
    def where(self) -> Where:
        """Where it lies in its tensor."""
        return tuple(slice(first, first + length) for first, length in zip(self.start, self.lengths, strict=True))

    def stored(self, spec: TensorSpec) -> Box:
        """Return this box of the model's tensor as a box of the tensor in the log.

        Raises:
            SettingsError: it is none there.
        """
        kept = spec.arrangement
        if kept is None:
            return self
        axis = kept.outputs[0] if kept.outputs else None
        cut = [at for at, length in enumerate(self.lengths) if length != kept.shape[at] and at != axis]
        if cut and self.size:
            raise SettingsError(
                f"parameter {spec.path!r} is sharded along axis {cut[0]}, but the run's log has a row for each of its output "
                f"units (axis {axis}): shard it along that axis, or leave it whole"
            )
        rows, columns = kept.stored_shape
        if axis is None:
            return Box((0, 0), (rows if self.size else 0, columns))
        each = rows // kept.shape[axis]
        return Box((self.start[axis] * each, 0), (self.lengths[axis] * each if self.size else 0, columns))

    def overlap(self, piece: Piece) -> Where | None:
        """Return where the values of this box are in a piece of its tensor; None if it has none of them."""
        if not self.size:
            return None
        if not self.start:
            return ()
        first, stop = max(self.start[0], piece.row_start), min(self.start[0] + self.lengths[0], piece.row_stop)
        if first >= stop:
            return None
        rows = slice(first - piece.row_start, stop - piece.row_start)
        columns = zip(self.start[1:], self.lengths[1:], strict=True)
        return (rows, *(slice(begin, begin + length) for begin, length in columns))

    def rows(self, piece: Piece) -> slice:
        """Return the rows of this box that are in a piece of its tensor, counted from the first of the box."""
        first = max(0, piece.row_start - self.start[0])
        return slice(first, min(self.lengths[0], piece.row_stop - self.start[0]))


Boxes: TypeAlias = Mapping[str, Box]  # by path


@dataclass(frozen=True)
class _Part:
    """Values of a piece, and the processes that have them."""

    piece: Piece
    where: Where
    holders: list[int]

    @property
    def size(self) -> int:
        return math.prod(along.stop - along.start for along in self.where)

    def is_apart(self, other: _Part) -> bool:
        """Whether no value is in both; both are of one piece."""
        return any(a.stop <= b.start or b.stop <= a.start for a, b in zip(self.where, other.where, strict=True))


def row_layouts(fragments: Sequence[Fragment], boxes: Sequence[Boxes], carriers: Sequence[int]) -> list[RowLayout]:
    """Return by fragment which rows each process hands over and has. ``boxes``: by process, those of the tensors in the log.

    What the ``carriers``, by fragment, do not have is dealt so that each process hands over about as much.

    Raises:
        SettingsError: the boxes of a tensor overlap without being equal, or some of its values are nowhere.
    """
    handed_over = [0] * len(boxes)
    layouts = []
    for fragment, carrier in zip(fragments, carriers, strict=True):
        read: list[list[tuple[Piece, Where]]] = [[] for _ in boxes]
        held: list[list[tuple[Piece, Where]]] = [[] for _ in boxes]
        for piece in fragment.pieces:
            parts = list(_parts(piece, boxes))
            _check(piece, parts)
            for part in parts:
                reader = carrier if carrier in part.holders else min(part.holders, key=lambda at: (handed_over[at], at))
                handed_over[reader] += part.size
                read[reader].append((piece, part.where))
                for holder in part.holders:
                    held[holder].append((piece, part.where))
        layouts.append(RowLayout([FragmentRows(tuple(its)) for its in read], [FragmentRows(tuple(its)) for its in held]))
    return layouts


def _parts(piece: Piece, boxes: Sequence[Boxes]) -> Iterator[_Part]:
    found: dict[Box, _Part] = {}
    for process, its in enumerate(boxes):
        box = its.get(piece.path)
        where = None if box is None else box.overlap(piece)
        if box is None or where is None:
            continue
        if box not in found:
            found[box] = _Part(piece, where, [])
        found[box].holders.append(process)
    yield from found.values()


def _check(piece: Piece, parts: Sequence[_Part]) -> None:
    if sum(part.size for part in parts) == piece.size and all(a.is_apart(b) for a, b in combinations(parts, 2)):
        return
    where = ", ".join(f"process {part.holders[0]} has {_shown(part.where)}" for part in parts) or "no process has any"
    raise SettingsError(
        f"parameter {piece.path!r}, rows {piece.row_start} to {piece.row_stop - 1}: the learner's processes together must have "
        f"each value, in parts that are equal or apart: {where}"
    )


def _shown(where: Where) -> str:
    return "[" + ", ".join(f"{along.start}:{along.stop}" for along in where) + "]"
