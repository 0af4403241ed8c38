"""The names that a model's tensors have in files of others, and where their values lie there.

A *names map* is a JSON object of our paths. A tensor that it does not have keeps its path as its name. An entry is

* ``"NAME"``: the same tensor
* ``{"transposed": "NAME"}``: a matrix [rows, columns]; theirs is [columns, rows]
* ``{"rows": {"NAME": 64, "OTHER": 32}}``: theirs one below the other, of so many rows of the first axis each
* ``{"stacked": ["NAME", "OTHER"]}``: theirs are the entries along the first axis, which they do not have

Shapes, rows and columns are those of the model. The log may have a tensor's axes in another order
(:mod:`diloco.core.arrangement`); such a tensor keeps its place as a whole, or, a matrix, is transposed.

Writers and readers go piece by piece, so that no tensor need be in memory as a whole.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.core.arrangement import Arrangement
from diloco.core.fragments import Piece, TensorSpec
from diloco.errors import SettingsError
from diloco.settings.validation import nearest

MAX_BYTES = 64 << 20  # of a file of names: of as many tensors as a run may have
KINDS = '"NAME", {"transposed": "NAME"}, {"rows": {"NAME": ROWS, ...}} or {"stacked": ["NAME", ...]}'


@dataclass(frozen=True)
class Place:
    """A tensor of theirs, of this ``shape``, that has rows ``first`` to ``stop`` of one of ours, as the log has it."""

    name: str
    shape: tuple[int, ...]
    first: int
    stop: int
    transposed: bool = False  # rows of ours are columns of theirs
    arrangement: Arrangement | None = None  # of ours in theirs, where rows of ours are neither rows nor columns there


@dataclass(frozen=True)
class Part:
    """Rows ``first`` to ``stop`` of one of our tensors, which lie in one place."""

    place: Place
    first: int
    stop: int
    values: slice  # of the fragment's vector
    shape: tuple[int, ...]  # of these rows


class Naming:
    """Where the values of a model's tensors lie in files of others.

    Raises:
        SettingsError: the map names no tensor of the model, two alike, or does not fit a tensor's shape; ``source`` begins the
            sentence.
    """

    def __init__(self, tensors: Sequence[TensorSpec], names: Mapping[str, Any], source: str) -> None:
        paths = [tensor.path for tensor in tensors]
        for unknown in names.keys() - set(paths):
            raise SettingsError(f"{source}: the model has no tensor {unknown!r}{nearest(unknown, paths)}")
        self._places = {tensor.path: _places(tensor, names.get(tensor.path, tensor.path), source) for tensor in tensors}
        self.shapes: dict[str, tuple[int, ...]] = {}  # of each of their tensors, by name
        taken: dict[str, str] = {"__metadata__": "the file's own table"}
        for path, place in ((path, place) for path, places in self._places.items() for place in places):
            if place.name in taken:
                raise SettingsError(f"{source}: {place.name!r} is the name of {taken[place.name]!r} and of {path!r}")
            taken[place.name] = path
            self.shapes[place.name] = place.shape

    def parts(self, piece: Piece) -> Iterator[Part]:
        """Yield the parts of a piece, place by place."""
        row_size = piece.size // (piece.row_stop - piece.row_start)
        for place in self._places[piece.path]:
            first, stop = max(place.first, piece.row_start), min(place.stop, piece.row_stop)
            if first < stop:
                begin, end = (piece.offset + (row - piece.row_start) * row_size for row in (first, stop))
                yield Part(place, first, stop, slice(begin, end), (stop - first, *piece.shape[1:]))


def read(path: Path, source: str) -> dict[str, Any]:
    """Return the names map in a file.

    Raises:
        SettingsError: it cannot be read, or is no JSON object; ``source`` begins the sentence.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES >> 20} MiB")
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"{source}: cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise SettingsError(f"{source}: expected an object of tensors' paths and their names")
    return found


def _places(tensor: TensorSpec, entry: Any, source: str) -> list[Place]:
    about = f"{source}: tensor {tensor.path!r} of shape {tensor.model_shape}"
    rows = tensor.shape[0] if tensor.shape else 1
    if tensor.arrangement is not None:
        return [_arranged(tensor, tensor.arrangement, entry, about)]
    match entry:
        case str() if entry:
            return [Place(entry, tensor.shape, 0, rows)]
        case {"transposed": str(name)} if name and len(entry) == 1:
            if len(tensor.shape) != 2:
                raise SettingsError(f"{about}: only a tensor of two axes can be transposed")
            return [Place(name, tensor.shape[::-1], 0, rows, transposed=True)]
        case {"rows": dict(parts)} if _are_rows(parts) and tensor.shape and len(entry) == 1:
            if sum(parts.values()) != rows:
                raise SettingsError(f"{about}: its parts have {sum(parts.values())} rows together, expected {rows}")
            stops = list(itertools.accumulate(parts.values()))
            given = zip(parts.items(), stops, strict=True)
            return [Place(name, (count, *tensor.shape[1:]), stop - count, stop) for (name, count), stop in given]
        case {"stacked": list(names)} if all(isinstance(name, str) and name for name in names) and len(entry) == 1:
            if len(names) != rows or not tensor.shape:
                raise SettingsError(f"{about}: {len(names)} are stacked in it, expected {rows if tensor.shape else 'an axis'}")
            return [Place(name, tensor.shape[1:], row, row + 1) for row, name in enumerate(names)]
    raise SettingsError(f"{about}: its entry is {json.dumps(entry)[:80]}, expected {KINDS}")


def _arranged(tensor: TensorSpec, arrangement: Arrangement, entry: Any, about: str) -> Place:
    rows, is_matrix = tensor.shape[0], tensor.shape == arrangement.shape[::-1] and arrangement.outputs == (1,)
    match entry:
        case str() if entry and is_matrix:
            return Place(entry, arrangement.shape, 0, rows, transposed=True)
        case str() if entry:
            return Place(entry, arrangement.shape, 0, rows, arrangement=arrangement)
        case {"transposed": str(name)} if name and len(entry) == 1 and is_matrix:
            return Place(name, tensor.shape, 0, rows)
    also = ' or {"transposed": "NAME"}' if is_matrix else ""
    raise SettingsError(
        f'{about}: its entry is {json.dumps(entry)[:80]}, expected "NAME"{also}: its output axes are not its first ones'
    )


def _are_rows(parts: Mapping[str, Any]) -> bool:
    return bool(parts) and all(name and type(count) is int and count > 0 for name, count in parts.items())
