"""A model's weights as a safetensors file, written piece by piece: no more of them need be in memory than one fragment."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from diloco.core.arrangement import Arrangement
from diloco.core.fragments import Fragment, Piece, TensorSpec
from diloco.errors import RunError, SettingsError
from diloco.member.statefile import header_of
from diloco.settings.validation import nearest

Precision = Literal["float32", "bfloat16", "float16"]
Vector = NDArray[np.float32]

_TYPES: dict[Precision, tuple[str, int]] = {
    "float32": ("F32", 4),
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
}  # name, bytes
MAX_NAMES_BYTES = 64 << 20  # of a file of names: of as many tensors as a run may have


class WeightsFile:
    """A file that is being written; every fragment of the model is to be put into it once."""

    def __init__(
        self,
        path: Path,
        tensors: Sequence[TensorSpec],
        names: Mapping[str, str],
        precision: Precision,
        metadata: Mapping[str, str],
    ) -> None:
        """Begin a file of ``tensors``, each by its path or the name that ``names`` gives it.

        Raises:
            OSError: it cannot be written.
        """
        self.precision = precision
        kind, value_bytes = _TYPES[precision]
        entries: dict[str, tuple[str, Sequence[int], int]] = {}
        self._begins: dict[str, int] = {}
        self._arranged: dict[str, Arrangement] = {}
        at = 0
        for tensor in tensors:
            entries[names.get(tensor.path, tensor.path)] = kind, tensor.model_shape, value_bytes * tensor.size
            self._begins[tensor.path] = at
            if tensor.arrangement is not None:
                self._arranged[tensor.path] = tensor.arrangement
            at += value_bytes * tensor.size
        header = header_of(entries, metadata)
        self._data_at, self._value_bytes = len(header), value_bytes
        self._file = path.open("wb")
        try:
            self._file.write(header)
            self._file.truncate(len(header) + at)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def put(self, fragment: Fragment, values: Vector) -> None:
        """Write a fragment's values, float32 [its size].

        Raises:
            RunError: a value does not fit into float16.
        """
        for piece in fragment.pieces:
            data = self._converted(piece, values[piece.offset : piece.offset + piece.size])
            if piece.path in self._arranged:
                self._put_arranged(piece, data, self._arranged[piece.path])
                continue
            row_values = piece.size // (piece.row_stop - piece.row_start)
            self._file.seek(self._data_at + self._begins[piece.path] + self._value_bytes * row_values * piece.row_start)
            self._file.write(data)

    def _put_arranged(self, piece: Piece, data: bytes, arrangement: Arrangement) -> None:
        """Write rows of the log where they are in the model's tensor, through the system's cache of the file."""
        kind, begin = np.dtype(f"u{self._value_bytes}"), self._data_at + self._begins[piece.path]
        whole = np.memmap(self._file.name, kind, "r+", begin, arrangement.shape)
        index, part, rows = arrangement.box(piece.row_start, piece.row_stop)
        stored = part.stored(whole[index])
        stored[rows] = np.frombuffer(data, kind).reshape(piece.shape)
        whole[index] = part.restored(stored)

    def _converted(self, piece: Piece, values: Vector) -> bytes:
        if self.precision == "float32":
            return values.tobytes()
        if self.precision == "float16":
            with np.errstate(over="ignore"):
                halves = values.astype(np.float16)
            if not np.isfinite(halves).all():
                raise RunError(
                    f"tensor {piece.path!r}: {float(np.abs(values).max()):g} is more than float16 can be; export it as bfloat16"
                )
            return halves.tobytes()
        bits = values.view(np.uint32)  # to the nearest, half to even
        return (
            ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16).tobytes()
        )


def names_in(path: Path, tensors: Sequence[TensorSpec]) -> dict[str, str]:
    """Return the names that a JSON file gives to tensors: an object of path and name.

    Raises:
        SettingsError: it cannot be read; it names no tensor of the model, or two alike.
    """
    try:
        if path.stat().st_size > MAX_NAMES_BYTES:
            raise ValueError(f"more than {MAX_NAMES_BYTES >> 20} MiB")
        named = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"--names {path}: cannot be read: {error}") from None
    if not isinstance(named, dict) or not all(isinstance(name, str) and name for name in named.values()):
        raise SettingsError(f"--names {path}: expected an object of tensors' paths and their names")
    paths = [tensor.path for tensor in tensors]
    for unknown in named.keys() - set(paths):
        raise SettingsError(f"--names {path}: the model has no tensor {unknown!r}{nearest(unknown, paths)}")
    taken: dict[str, str] = {"__metadata__": "the file's own table"}
    for own in paths:
        name = named.get(own, own)
        if name in taken:
            raise SettingsError(f"--names {path}: {name!r} is the name of {taken[name]!r} and of {own!r}")
        taken[name] = own
    return named
