"""A model's weights as safetensors files, written piece by piece: no more of them need be in memory than one fragment."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from diloco.core.tensors.float_mode import exact
from diloco.core.tensors.fragments import Fragment
from diloco.errors import RunError
from diloco.states.statefile import header_of
from diloco.weights_files.naming import Naming, RowRange

Precision = Literal["float32", "bfloat16", "float16"]
Vector = NDArray[np.float32]

CHUNK = 1 << 20  # values rounded at a time
SHARD_BYTES = 5 * 10**9  # as transformers cut them for years; any size is read
_TYPES: dict[Precision, tuple[str, int]] = {
    "float32": ("F32", 4),
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
}  # name, bytes


class Weights(Protocol):
    """Weights that are being written; every fragment of the model is to be put into them once."""

    def put(self, fragment: Fragment, values: Vector) -> None:
        """Write a fragment's values, float32 [its size].

        Raises:
            RunError: a value does not fit into float16.
            OSError: it cannot be written.
        """


class WeightsFile:
    """A safetensors file that is being written: zeros, until parts of tensors are put into it."""

    def __init__(
        self, path: Path, shapes: Mapping[str, tuple[int, ...]], precision: Precision, metadata: Mapping[str, str]
    ) -> None:
        """Begin a file of tensors of these shapes, by name.

        Raises:
            OSError: it cannot be written.
        """
        self.precision = precision
        kind, self._value_bytes = _TYPES[precision]
        sizes = {name: size_bytes(shape, precision) for name, shape in shapes.items()}
        header = header_of({name: (kind, shape, sizes[name]) for name, shape in shapes.items()}, metadata)
        self._begins, at = dict[str, int](), len(header)
        for name, size in sizes.items():
            self._begins[name] = at
            at += size
        self._file = path.open("wb")
        try:
            self._file.write(header)
            self._file.truncate(at)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def put(self, part: RowRange, values: Vector) -> None:
        """Write a part of one of our tensors where it lies here, float32 [its size].

        Raises:
            RunError: a value does not fit into float16.
        """
        data, place = converted(values, self.precision, part.place.name), part.place
        begin = self._begins[place.name]
        if place.arrangement is not None:
            whole = np.memmap(self._file.name, data.dtype, "r+", begin, place.shape)  # the system's cache of the file
            index, its, rows = place.arrangement.box(part.first, part.stop)
            whole[index] = its.replaced(whole[index], rows, data.reshape(part.shape))
            return
        if not place.transposed:
            self._write(begin, (part.first - place.first) * (data.size // (part.stop - part.first)), data)
            return
        width = place.shape[1]
        for row, columns in enumerate(data.reshape(part.shape).T):
            self._write(begin, row * width + part.first, np.ascontiguousarray(columns))

    def _write(self, begin: int, values_before: int, data: NDArray[Any]) -> None:
        self._file.seek(begin + values_before * self._value_bytes)
        self._file.write(data.data)


class NamedWeights:
    """The weights of a model, in the files that have its tensors by the names that a ``naming`` gives them."""

    def __init__(self, naming: Naming, files: Mapping[str, WeightsFile]) -> None:
        self._naming, self._files = naming, files

    def put(self, fragment: Fragment, values: Vector) -> None:
        """Write a fragment, float32 [its size], as :meth:`Weights.put` does and raises."""
        for part in self._naming.parts(fragment):
            self._files[part.place.name].put(part, values[part.values])


@contextmanager
def one_file(path: Path, naming: Naming, precision: Precision, metadata: Mapping[str, str]) -> Iterator[NamedWeights]:
    """Write weights into one safetensors file.

    Raises:
        OSError: it cannot be written.
    """
    with WeightsFile(path, naming.shapes, precision, metadata) as file:
        yield NamedWeights(naming, dict.fromkeys(naming.shapes, file))


@contextmanager
def hugging_face(
    folder: Path,
    naming: Naming,
    precision: Precision,
    metadata: Mapping[str, str],
    config: Mapping[str, Any],
    shard_bytes: int = SHARD_BYTES,
) -> Iterator[NamedWeights]:
    """Write weights into a folder as Hugging Face's libraries load it: ``config.json`` and ``model.safetensors``.

    More than ``shard_bytes`` are written as several files, with their index; a tensor is in one of them.

    Raises:
        OSError: they cannot be written.
    """
    shards = list[dict[str, tuple[int, ...]]]([{}])
    room = shard_bytes
    for name, shape in naming.shapes.items():
        size = size_bytes(shape, precision)
        if size > room and shards[-1]:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = shape
        room -= size
    write_config(folder / "config.json", config)
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
        index = {
            "metadata": {"total_size": sum(size_bytes(shape, precision) for shape in naming.shapes.values())},
            "weight_map": {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    with contextlib.ExitStack() as stack:
        files = dict[str, WeightsFile]()
        for name, shard in zip(names, shards, strict=True):
            file = stack.enter_context(WeightsFile(folder / name, shard, precision, metadata))
            files |= dict.fromkeys(shard, file)
        yield NamedWeights(naming, files)


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    """Write a model's configuration as a file of Hugging Face's libraries.

    Raises:
        OSError: it cannot be written.
    """
    path.write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")


def size_bytes(shape: tuple[int, ...], precision: Precision) -> int:
    """Return the bytes that a tensor of a shape takes."""
    return int(np.prod(shape, dtype=np.int64)) * _TYPES[precision][1]


@exact
def converted(values: Vector, precision: Precision, name: str) -> NDArray[Any]:
    """Return values, float32 [any], in a precision: rounded to the nearest, half to even; bfloat16 as uint16 of its bits.

    Raises:
        RunError: a value does not fit into float16; ``name`` is that of its tensor.
    """
    if precision == "float32":
        return np.ascontiguousarray(values)
    if precision == "float16":
        with np.errstate(over="ignore"):
            halves = values.astype(np.float16)
        if not np.isfinite(halves).all():
            raise RunError(
                f"tensor {name!r}: {float(np.abs(values).max()):g} exceeds the range of float16; export it as bfloat16"
            )
        return halves
    bits = np.ascontiguousarray(values).view(np.uint32).reshape(-1)
    rounded = np.empty(bits.size, np.uint16)
    for start in range(0, bits.size, CHUNK):  # each line below makes an array of its own
        part = bits[start : start + CHUNK]
        to_even = (part >> np.uint32(16)) & np.uint32(1)
        rounded[start : start + CHUNK] = (part + np.uint32(0x7FFF) + to_even) >> np.uint32(16)
    return rounded.reshape(values.shape)
