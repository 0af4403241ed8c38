"""A learner's state as a file: the arrays of its model and of its accounts, and the accounts' plain values, all hashed.

The file is a safetensors file. Its metadata hold ``format``, ``run`` (the run's identity), ``learner``, ``accounts`` (JSON),
``hashes`` (JSON: BLAKE3 of every array) and ``hash``, the BLAKE3 hash over the others, so that damage anywhere is noticed and
named. It is written array by array, straight from where the arrays are: nothing is copied again while training goes on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from diloco.core.tape import DIGEST_BYTES
from diloco.errors import RunError
from diloco.process import files

FORMAT = "diloco-learner-3"
FOLDER = "checkpoints"
_HASHED = ("format", "run", "learner", "accounts", "hashes")
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

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Saved:
    """A state as written."""

    size_bytes: int
    file_hash: bytes  # BLAKE3 of the whole file
    digest: bytes  # the first bytes of its hash: what tapes call it


@dataclass(frozen=True)
class State:
    """A state as read."""

    accounts: dict[str, Any]
    arrays: dict[str, NDArray[Any]]
    digest: bytes


def generations(state_dir: Path, learner: str) -> tuple[Path, Path]:
    """Return the paths of a learner's own checkpoint, and of the one before it."""
    folder = state_dir / FOLDER
    return folder / f"{learner}.safetensors", folder / f"{learner}.previous.safetensors"


def snapshot(state_dir: Path, number: int, learner: str) -> Path:
    """Return the path of a learner's state for a checkpoint of the whole run."""
    return state_dir / FOLDER / str(number) / f"{learner}.safetensors"


def save(
    path: Path, run: bytes, learner: str, accounts: Mapping[str, Any], arrays: Arrays, previous: Path | None = None
) -> Saved:
    """Write a state; the one that ``path`` was until then becomes ``previous``, if given. A crash leaves one of them whole.

    Raises:
        OSError: the disk is full, or the folder cannot be written; nothing has changed.
    """
    arrays = {name: np.ascontiguousarray(arrays[name]).reshape(np.shape(arrays[name])) for name in sorted(arrays)}
    metadata = {
        "format": FORMAT,
        "run": run.hex(),
        "learner": learner,
        "accounts": json.dumps(accounts),
        "hashes": json.dumps({name: blake3(_bytes(array)).hexdigest() for name, array in arrays.items()}),
    }
    state_hash = _hash(metadata)
    header = _header(arrays, metadata | {"hash": state_hash.hex()})
    hasher = blake3()

    def write(draft: Path) -> None:
        with draft.open("wb") as file:
            _put(file, hasher, len(header).to_bytes(8, "little") + header)
            for array in arrays.values():
                _put(file, hasher, _bytes(array))

    files.replace(path, write, previous)
    size_bytes = 8 + len(header) + sum(array.nbytes for array in arrays.values())
    return Saved(size_bytes, hasher.digest(), state_hash[:DIGEST_BYTES])


def load(path: Path, run: bytes, learner: str) -> State:
    """Read a state.

    Raises:
        RunError: it cannot be read, is damaged, of another format version, or of another run or learner.
    """
    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            _check_metadata(metadata, run, learner)
            hashes = json.loads(metadata["hashes"])
            names = sorted(file.keys())
            if names != sorted(hashes):
                raise ValueError("its arrays are not those that it lists")
            arrays = {name: file.get_tensor(name) for name in names}
        for name, array in arrays.items():
            if blake3(_bytes(array)).hexdigest() != hashes[name]:
                raise ValueError(f"array {name!r} does not have the hash that it lists")
        return State(json.loads(metadata["accounts"]), arrays, bytes.fromhex(metadata["hash"])[:DIGEST_BYTES])
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunError(f"{path}: not a whole state of learner {learner}: {error}") from None


def _check_metadata(metadata: Mapping[str, str], run: bytes, learner: str) -> None:
    for key, expected in (("format", FORMAT), ("run", run.hex()), ("learner", learner)):
        if metadata.get(key) != expected:
            raise ValueError(f"its {key} is {metadata.get(key)!r}, expected {expected!r}")
    if _hash(metadata).hex() != metadata.get("hash"):
        raise ValueError("its accounts do not have the hash that it states")


def _hash(metadata: Mapping[str, str]) -> bytes:
    return blake3(json.dumps([metadata[key] for key in _HASHED]).encode()).digest()


def _header(arrays: Arrays, metadata: Mapping[str, str]) -> bytes:
    """Return the header of a safetensors file, padded so that the arrays begin at a multiple of eight bytes."""
    described: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, array in arrays.items():
        described[name] = {"dtype": _TYPES[array.dtype.name], "shape": array.shape, "data_offsets": (at, at + array.nbytes)}
        at += array.nbytes
    header = json.dumps(described).encode()
    return header + b" " * (-len(header) % 8)


def _bytes(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _put(file: BinaryIO, hasher: Any, data: bytes | memoryview) -> None:
    hasher.update(data)
    file.write(data)
