"""Documents into rows of ``context`` tokens: each row holds whole documents, and as few rows as possible are made.

Best fit, longest document first: a document goes into the row that it leaves least room in. That needs at most 11/9 of the
fewest rows, and of conversations, of which most are short, hardly more than those (D. S. Johnson, Near-Optimal Bin Packing
Algorithms, 1973). Rows follow from the documents' lengths alone, so all learners have the same.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Pieces:
    """Parts of documents, each of at most ``context`` tokens: where they begin, and their lengths; int64 [pieces].

    Counts of documents that are longer than a row: ``cut`` lost their end, ``divided`` lie in several rows. ``dropped`` have
    no learned token in what is left. ``lost`` is the number of tokens that no row has, ``trained`` of those that are learned.
    """

    begins: Numbers
    lengths: Numbers
    cut: int
    divided: int
    dropped: int
    lost: int
    trained: int


def pieces(ends: Numbers, learned: NDArray[np.bool_], divides: NDArray[np.bool_], context: int) -> Pieces:
    """Return the pieces of documents. ``ends``: int64 [documents], each begins where the one before ends.

    ``learned``: bool [tokens]. ``divides``: bool [documents], whether a document that is longer than a row may lie in several.
    A piece's first token is not learned, as nothing comes before it; so a piece needs another one.
    """
    begins = np.append(0, ends[:-1])
    lengths = ends - begins
    counts = np.where(divides, -(-lengths // context), 1)
    of = np.repeat(np.arange(len(ends)), counts)  # the document of each piece
    within = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = begins[of] + within * context
    sizes = np.minimum(context, ends[of] - starts)
    counted = _counted(learned, starts, sizes)
    is_learned = counted > 0
    kept = np.zeros(len(ends), np.int64)
    np.add.at(kept, of[is_learned], sizes[is_learned])
    is_long = (lengths > context) & (kept > 0)
    return Pieces(
        begins=starts[is_learned],
        lengths=sizes[is_learned],
        cut=int((is_long & ~divides).sum()),
        divided=int((is_long & divides).sum()),
        dropped=int((kept == 0).sum()),
        lost=int(lengths.sum() - kept.sum()),
        trained=int(counted.sum()),
    )


def _counted(learned: NDArray[np.bool_], starts: Numbers, sizes: Numbers) -> Numbers:
    """Return how many learned tokens each piece has behind its first token, int64 [pieces]."""
    counts = np.zeros(len(starts), np.int64)
    longer = np.flatnonzero(sizes > 1)
    if longer.size:
        edges = np.stack([starts[longer] + 1, (starts + sizes)[longer]], axis=1).ravel()
        inner = edges[:-1] if edges[-1] == learned.size else edges  # the end of all is no edge to add up from
        counts[longer] = np.add.reduceat(learned.view(np.uint8), inner, dtype=np.int64)[::2]
    return counts


def pack(lengths: Numbers, context: int) -> tuple[Numbers, Numbers]:
    """Return the order of pieces in rows, int64 [pieces], and where each row ends in it, int64 [rows].

    Raises:
        ValueError: a piece is longer than a row.
    """
    if lengths.size and int(lengths.max()) > context:
        raise ValueError(f"a piece of {int(lengths.max())} tokens does not fit into rows of {context}")
    rows: list[list[int]] = []
    free: list[int] = []  # numbers of tokens that some rows have room for, ascending
    having: dict[int, list[int]] = {}  # the rows that have room for so many
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        at = bisect.bisect_left(free, length)
        if at < len(free):
            room = free[at]
            row = having[room].pop()
            if not having[room]:
                del having[room]
                free.pop(at)
        else:
            room, row = context, len(rows)
            rows.append([])
        rows[row].append(piece)
        if left := room - length:
            if left not in having:
                having[left] = []
                bisect.insort(free, left)
            having[left].append(row)
    order = np.array([piece for row in rows for piece in row], np.int64)
    return order, np.cumsum([len(row) for row in rows], dtype=np.int64)
