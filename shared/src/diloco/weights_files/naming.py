"""The names that a model's tensors have in files of others, and where their values lie there.

A *names map* is a JSON object of our paths. A tensor that it does not have keeps its path as its name. An entry is

* ``"NAME"``: the same tensor
* ``{"transposed": "NAME"}``: a matrix [rows, columns]; theirs is [columns, rows]
* ``{"rows": {"NAME": 64, "OTHER": 32}}``: theirs one below the other, of so many rows of the first axis each
* ``{"stacked": ["NAME", "OTHER"]}``: theirs are the entries along the first axis, which they do not have

Shapes, rows and columns are those of the model. The log may have a tensor's axes in another order
(:mod:`diloco.core.tensors.arrangement`); such a tensor keeps its place as a whole, or, a matrix, is transposed.

Writers and readers go piece by piece, so that no tensor need be in memory as a whole.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from diloco.core.tensors.arrangement import Arrangement
from diloco.core.tensors.fragments import STATE_PATH, Fragment, Piece, TensorSpec
from diloco.errors import SettingsError
from diloco.settings.validation import nearest

SPACE = re.compile(r"[ \t\n\r]*")
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
class RowRange:
    """Rows ``first`` to ``stop`` of one of our tensors, which lie in one place."""

    place: Place
    first: int
    stop: int
    values: slice  # of the fragment's vector
    shape: tuple[int, ...]  # of these rows

    @property
    def index(self) -> tuple[slice, ...]:
        """Where the rows lie in the tensor of a place that has no arrangement; empty: they are all of it."""
        place = self.place
        if place.transposed:
            return slice(None), slice(self.first, self.stop)
        if len(place.shape) < max(1, len(self.shape)):
            return ()
        return (slice(self.first - place.first, self.stop - place.first),)

    def theirs(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Return the rows as they lie there, any dtype [their shape at :attr:`index`], from [:attr:`shape`]."""
        if self.place.transposed:
            return rows.T
        return rows if self.index else rows.reshape(self.place.shape)


@dataclass(frozen=True)
class Names:
    """A names map, and where it is from: ``source`` begins the sentences about it."""

    entries: Mapping[str, Any]
    source: str
    lines: Mapping[str, int] = field(default_factory=dict)  # of the entries of a file

    def at(self, path: str) -> str:
        """Return where the entry of a path is: the source, and the line in it."""
        return f"{self.source}, line {self.lines[path]}" if path in self.lines else self.source


class Naming:
    """Where the values of a model's tensors lie in files of others.

    Raises:
        SettingsError: the map names no tensor of the model, two alike, or does not fit a tensor's shape; the line is named.
    """

    def __init__(self, tensors: Sequence[TensorSpec], names: Names) -> None:
        paths = [tensor.path for tensor in tensors]
        for unknown in sorted(names.entries.keys() - set(paths)):
            raise SettingsError(f"{names.at(unknown)}: the model has no tensor {unknown!r}{nearest(unknown, paths)}")
        self._names, self._places = names, {tensor.path: _places(tensor, names) for tensor in tensors}
        self.shapes: dict[str, tuple[int, ...]] = {}  # of each of their tensors, by name
        embeddings = {tensor.path for tensor in tensors if tensor.embedding}
        self.embeddings = {place.name for path in embeddings for place in self._places[path]}  # by their names
        self._of: dict[str, str] = {"__metadata__": "the file's own table"}  # by their name the path that it is of
        for path, place in ((path, place) for path, places in self._places.items() for place in places):
            if place.name in self._of:
                raise SettingsError(f"{names.at(path)}: {place.name!r} is the name of {self._of[place.name]!r} and of {path!r}")
            self._of[place.name] = path
            self.shapes[place.name] = place.shape

    def origin(self, name: str) -> str:
        """Return, for the end of a sentence, which entry of the map gives a tensor of theirs its name; empty if none does."""
        path = self._of[name]
        return f"; {self._names.at(path)}: it is the model's {path!r}" if path in self._names.entries else ""

    def parts(self, fragment: Fragment) -> Iterator[RowRange]:
        """Yield the parts of a fragment, place by place."""
        for piece in fragment.pieces:
            yield from self._parts(piece)

    def _parts(self, piece: Piece) -> Iterator[RowRange]:
        row_size = piece.size // (piece.row_stop - piece.row_start)
        for place in self._places[piece.path]:
            first, stop = max(place.first, piece.row_start), min(place.stop, piece.row_stop)
            if first < stop:
                begin, end = (piece.offset + (row - piece.row_start) * row_size for row in (first, stop))
                yield RowRange(place, first, stop, slice(begin, end), (stop - first, *piece.shape[1:]))


def read_names(path: Path, source: str) -> Names:
    """Return the names map in a file.

    Raises:
        SettingsError: it cannot be read, is no JSON object, or has a path twice; ``source`` begins the sentence.
    """
    found, text = read_object(path, source)
    lines = dict[str, int]()
    for key, line in _keys(text):
        if key in lines:
            raise SettingsError(f"{source}, line {line}: {key!r} is already in line {lines[key]}")
        lines[key] = line
    return Names(found, source, lines)


def torch_names(tensors: Sequence[TensorSpec], source: str) -> Names:
    """Return the names that tensors have in the ``state_dict()`` of PyTorch's module, whose names became their paths."""
    paths = {tensor.path: tensor.path.removeprefix(STATE_PATH) if tensor.state else tensor.path for tensor in tensors}
    return Names({path: name.replace("/", ".") for path, name in paths.items()}, source)


def read_object(path: Path, source: str) -> tuple[dict[str, Any], str]:
    """Return the JSON object in a file, and its text.

    Raises:
        SettingsError: it cannot be read, or is none; ``source`` begins the sentence.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES >> 20} MiB")
        text = path.read_text(encoding="utf-8")
        found = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"{source}: cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise SettingsError(f"{source}: expected a JSON object")
    return found, text


def _keys(text: str) -> Iterator[tuple[str, int]]:
    """Yield the keys of the JSON object in a text, and their lines."""
    decoder, at, line, counted = json.JSONDecoder(), _behind(text, text.index("{") + 1), 1, 0
    while text[at] != "}":
        key, after = decoder.raw_decode(text, at)
        line, counted = line + text.count("\n", counted, at), at
        yield key, line
        _, after = decoder.raw_decode(text, _behind(text, _behind(text, after) + 1))
        at = _behind(text, after)
        at = _behind(text, at + 1) if text[at] == "," else at


def _behind(text: str, at: int) -> int:
    """Return the place behind the white space that begins at ``at``."""
    found = SPACE.match(text, at)
    assert found is not None  # it matches nothing, too
    return found.end()


def _places(tensor: TensorSpec, names: Names) -> list[Place]:
    entry = names.entries.get(tensor.path, tensor.path)
    about = f"{names.at(tensor.path)}: tensor {tensor.path!r} of shape {tensor.model_shape}"
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
                raise SettingsError(f"{about}: its parts have {sum(parts.values())} rows in all, expected {rows}")
            stops = list(itertools.accumulate(parts.values()))
            given = zip(parts.items(), stops, strict=True)
            return [Place(name, (count, *tensor.shape[1:]), stop - count, stop) for (name, count), stop in given]
        case {"stacked": list(each)} if all(isinstance(name, str) and name for name in each) and len(entry) == 1:
            if len(each) != rows or not tensor.shape:
                raise SettingsError(f"{about}: {len(each)} are stacked in it, expected {rows if tensor.shape else 'an axis'}")
            return [Place(name, tensor.shape[1:], row, row + 1) for row, name in enumerate(each)]
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
