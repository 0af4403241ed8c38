"""Weights that a run begins with: a safetensors file whose tensors are those of the model, by their paths.

``diloco export`` writes such files. They are read by fragment, so a host has no more of them in memory than that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from diloco.core.arrangement import Arrangement
from diloco.core.fragments import Fragment, FragmentMap, Piece
from diloco.errors import SettingsError
from diloco.settings.validation import nearest
from diloco_learner.model import Carried

FLOATS = ("F64", "F32", "F16", "BF16")


def put(path: Path, model: Carried, fragments: FragmentMap, setting: str = "init = ") -> None:
    """Write a file's values into a model; its optimizer is not touched. Errors begin with the ``setting``.

    Raises:
        SettingsError: the file cannot be read, its tensors are not the model's, or hold NaN or infinity.
    """
    with _opened(path, setting) as file:
        _check(path, file, fragments, setting)
        arrangements = {tensor.path: tensor.arrangement for tensor in fragments.tensors}
        for fragment in fragments.fragments:
            model.write(fragment, _values(path, file, fragment, arrangements, setting), None, 0.0)


@contextmanager
def _opened(path: Path, setting: str) -> Iterator[Any]:
    try:
        with safe_open(path, "numpy") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise SettingsError(f"{setting}{path}: cannot be read as a safetensors file: {error}") from None


def _check(path: Path, file: Any, fragments: FragmentMap, setting: str) -> None:
    shapes = {tensor.path: tensor.model_shape for tensor in fragments.tensors}
    names = set(file.keys())
    for missing in sorted(shapes.keys() - names):
        raise SettingsError(
            f"{setting}{path}: it lacks tensor {missing!r} of shape {shapes[missing]}{nearest(missing, sorted(names))}"
        )
    for unknown in sorted(names - shapes.keys()):
        raise SettingsError(f"{setting}{path}: the model has no tensor {unknown!r}{nearest(unknown, sorted(shapes))}")
    for name, shape in shapes.items():
        found = file.get_slice(name)
        if tuple(found.get_shape()) != shape:
            raise SettingsError(
                f"{setting}{path}: tensor {name!r} has the shape {tuple(found.get_shape())}, the model's has {shape}"
            )
        if found.get_dtype() not in FLOATS:
            raise SettingsError(f"{setting}{path}: tensor {name!r} is {found.get_dtype()}, expected one of {', '.join(FLOATS)}")


def _rows(file: Any, piece: Piece, arrangement: Arrangement | None) -> Any:
    """Return a piece's values as the log has them, any dtype [the piece's shape]."""
    if not piece.shape:
        return file.get_tensor(piece.path)
    found = file.get_slice(piece.path)
    if arrangement is None:
        return found[piece.row_start : piece.row_stop]
    index, part, rows = arrangement.box(piece.row_start, piece.row_stop)
    return part.stored(found[index])[rows]


def _values(
    path: Path, file: Any, fragment: Fragment, arrangements: Mapping[str, Arrangement | None], setting: str
) -> NDArray[np.float32]:
    """Return a fragment's values, float32 [its size]."""
    vector = np.empty(fragment.size, np.float32)
    for piece in fragment.pieces:
        rows = _rows(file, piece, arrangements[piece.path])
        with np.errstate(over="ignore"):
            values = np.asarray(rows, np.float32).reshape(-1)
        if not np.isfinite(values).all():
            raise SettingsError(f"{setting}{path}: tensor {piece.path!r} holds NaN or infinity, or more than float32 can be")
        vector[piece.offset : piece.offset + piece.size] = values
    return vector
