"""One file of a learner's state: a safetensors file whose tensors are chunks (:mod:`diloco.states.state` has what it is for).

Its metadata hold ``format``, ``run`` (the run's identity), ``learner``, ``part`` and ``set`` (which part of which state),
``accounts`` (JSON), ``chunks`` (JSON: of each tensor that is a part of an array, its name, shape and place), ``hashes`` (JSON:
BLAKE3 of every chunk) and ``hash``, the BLAKE3 hash over the others, so that damage anywhere is noticed and named.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from diloco.core.tensors.chunks import Chunk
from diloco.errors import RunError

FORMAT = "diloco-learner-5"
PLAIN_ERRORS = "diloco-learner-4"  # the format before: quantisation errors are float32; still read
WHOLE_ARRAYS = "diloco-learner-3"  # and before that: one part, each array one chunk whatever its size; still read
BLOCK_BYTES = 1 << 20  # read at a time to hash
_PARTS = ("format", "run", "learner", "part", "set", "accounts", "chunks", "hashes")
_HASHED = {
    FORMAT: _PARTS,
    PLAIN_ERRORS: _PARTS,
    WHOLE_ARRAYS: ("format", "run", "learner", "accounts", "hashes"),
}
_TYPES = {
    "float32": "F32",
    "float16": "F16",
    "float64": "F64",
    "uint8": "U8",
    "uint32": "U32",
    "int32": "I32",
    "int64": "I64",
    "bool": "BOOL",
}
_NAMES = {short: name for name, short in _TYPES.items()}

Values = NDArray[Any]


class OpenFile:
    """A file that is the same while anything refers to it, though another one is put in its place.

    A learner's leader may save its next state while other processes still read the one that all begin from.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, path.open("rb")
        weakref.finalize(self, self.file.close)

    def header(self) -> tuple[dict[str, Any], int]:
        """Return what a safetensors file says of its tensors, and where the first one begins."""
        self.file.seek(0)
        length = int.from_bytes(self.file.read(8), "little")
        return json.loads(self.file.read(length)), 8 + length


@dataclass(frozen=True)
class StoredChunk:
    """A chunk in a file."""

    chunk: Chunk
    within: OpenFile
    offset: int
    content_hash: str

    @property
    def path(self) -> Path:
        return self.within.path

    def read(self, wanted: Chunk) -> Values:
        """Return the values of a part of it, any dtype [lengths of the part]: of the file that was checked.

        Raises:
            OSError, ValueError: the file cannot be read, or is cut short.
        """
        mapped = np.memmap(self.within.file, self.chunk.dtype, "r", self.offset, self.chunk.lengths)
        return np.array(mapped[wanted.within(self.chunk)])

    def check(self) -> None:
        """Compare its values' hash with the one that the file lists.

        Raises:
            RunError: it differs, or the file cannot be read.
        """
        try:
            found = hash_of(self.within.file, self.chunk.size_bytes, self.offset).hex()
        except OSError as error:
            raise RunError(f"{self.path}: array {self.chunk.name!r} cannot be read: {error}") from None
        if found != self.content_hash:
            raise RunError(f"{self.path}: not a whole state: array {self.chunk.name!r} does not have the hash that it lists")


def open_file(path: Path, run: bytes, learner: str) -> tuple[dict[str, str], list[StoredChunk]]:
    """Return metadata and chunks of a file; of the chunks it is only known where they are.

    Raises:
        RunError: it cannot be read, is damaged, of another format version, or of another run or learner.
    """
    try:
        file = OpenFile(path)
        with safe_open(path, "numpy"):
            described, begin = file.header()
        metadata = described.pop("__metadata__", {})
        _check_metadata(metadata, run, learner)
        stored = list(_chunks_in(file, described, begin, metadata))
        json.loads(metadata["accounts"])
        return metadata, stored
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise RunError(f"{path}: not a whole state of learner {learner}: {error}") from None


def _chunks_in(file: OpenFile, described: Mapping[str, Any], begin: int, metadata: Mapping[str, str]) -> Iterator[StoredChunk]:
    """Yield the chunks of a file of which is known that the others described them, and where the first one begins."""
    hashes, partial = json.loads(metadata["hashes"]), json.loads(metadata.get("chunks", "{}"))
    if sorted(described) != sorted(hashes) or not partial.keys() <= described.keys():
        raise ValueError("its arrays are not those that it lists")
    for entry, about in described.items():
        lengths, dtype = tuple(about["shape"]), _NAMES[about["dtype"]]
        name, shape, start = partial.get(entry, (entry, lengths, [0] * len(lengths)))
        if not len(shape) == len(start) == len(lengths) or not all(type(n) is int and 0 <= n < 2**62 for n in (*shape, *start)):
            raise ValueError(f"array {entry!r} lies nowhere in one of shape {shape}")
        stop = tuple(first + count for first, count in zip(start, lengths, strict=True))
        if not isinstance(name, str) or any(last > whole for last, whole in zip(stop, shape, strict=True)):
            raise ValueError(f"array {entry!r} lies nowhere in one of shape {shape}")
        chunk = Chunk(name, tuple(shape), dtype, tuple(start), stop)
        yield StoredChunk(chunk, file, begin + about["data_offsets"][0], hashes[entry])


def _check_metadata(metadata: Mapping[str, str], run: bytes, learner: str) -> None:
    if metadata.get("format") not in _HASHED:
        raise ValueError(f"its format is {metadata.get('format')!r}, expected {FORMAT!r}")
    for key, expected in (("run", run.hex()), ("learner", learner)):
        if metadata.get(key) != expected:
            raise ValueError(f"its {key} is {metadata.get(key)!r}, expected {expected!r}")
    if hash_metadata(metadata).hex() != metadata.get("hash"):
        raise ValueError("its accounts do not have the hash that it states")
    part = metadata.get("part", "0/1").split("/")
    if len(part) != 2 or not all(text.isascii() and text.isdigit() and len(text) < 6 for text in part):
        raise ValueError(f"its part is {metadata['part']!r}, expected INDEX/COUNT such as 0/2")


def hash_metadata(metadata: Mapping[str, str]) -> bytes:
    """Return the hash of a file's metadata, 32 bytes."""
    return blake3(json.dumps([metadata[key] for key in _HASHED[metadata["format"]]]).encode()).digest()


def put(file: BinaryIO, chunk: Chunk, values: Values) -> str:
    """Write a chunk, any dtype [its lengths]; return its hash.

    Nothing holds its values any more when the next one is asked for.
    """
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
    assert data.nbytes == chunk.size_bytes, f"{chunk.name} has {data.nbytes} bytes, expected {chunk.size_bytes}"
    file.write(data)
    return blake3(data).hexdigest()


def hash_of(file: BinaryIO, size_bytes: int, begin: int = 0) -> bytes:
    """Return the hash of a file's bytes from ``begin`` on, or of as many as there are. Other threads may read it, too."""
    hasher, end = blake3(), begin + size_bytes
    while begin < end and (block := os.pread(file.fileno(), min(end - begin, BLOCK_BYTES), begin)):
        hasher.update(block)
        begin += len(block)
    return hasher.digest()


def entry_name(chunk: Chunk) -> str:
    """Return a chunk's name in a file."""
    if chunk.is_whole:
        return chunk.name
    return f"{chunk.name}[{','.join(f'{start}:{stop}' for start, stop in zip(chunk.start, chunk.stop, strict=True))}]"


def header(entries: Mapping[str, Chunk], metadata: Mapping[str, str]) -> bytes:
    """Return the first bytes of a file of chunks, by their names in it."""
    return header_of(
        {name: (_TYPES[chunk.dtype], chunk.lengths, chunk.size_bytes) for name, chunk in entries.items()}, metadata
    )


def header_of(entries: Mapping[str, tuple[str, Sequence[int], int]], metadata: Mapping[str, str]) -> bytes:
    """Return the first bytes of a safetensors file, padded so that the arrays begin at a multiple of eight bytes.

    ``entries``: by name the type, as the format calls it, the shape, and the bytes, one array after another.
    """
    described: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, (kind, shape, size_bytes) in entries.items():
        described[name] = {"dtype": kind, "shape": shape, "data_offsets": (at, at + size_bytes)}
        at += size_bytes
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
