"""A learner's state as files: chunks of its model's and of its accounts' arrays, and the accounts' plain values, all hashed.

Each process of a learner writes one file, of the chunks (:mod:`diloco.core.tensors.chunks`) that it holds: its *part*. A file
is a safetensors file, and a chunk is one tensor in it; an array that fits one chunk is there under its name, as anybody reads
such files (:mod:`diloco.states.statefile`).

Values are asked for chunk by chunk while the file is written, and read chunk by chunk: a host never holds more than a few.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco.core.run.tape import DIGEST_BYTES
from diloco.core.tensors.chunks import Chunk
from diloco.errors import DilocoError, RunError
from diloco.process import files
from diloco.states import statefile
from diloco.states.statefolder import FOLDER, StateFolder, generations, kept, states_before

# errors of a checkpoint that is none of this learner's
UNFIT = (DilocoError, LookupError, TypeError, ValueError, OverflowError)

Values = NDArray[Any]


@dataclass(frozen=True)
class Content:
    """Chunks, and their values, any dtype [lengths of the chunk], in the same order; values are asked for once each."""

    chunks: Sequence[Chunk]
    values: Iterable[Values]

    @classmethod
    def of(cls, arrays: Mapping[str, Values]) -> Content:
        """Return arrays of the host, any dtype [...] by name, in chunks."""
        wholes = [Chunk.whole(name, arrays[name].shape, arrays[name].dtype.name) for name in sorted(arrays)]
        chunks = [chunk for whole in wholes for chunk in whole.cut()]
        return cls(chunks, (arrays[chunk.name][chunk.where] for chunk in chunks))

    def __add__(self, other: Content) -> Content:
        return Content([*self.chunks, *other.chunks], itertools.chain(self.values, other.values))


@dataclass(frozen=True)
class StateFilePart:
    """Which part of which state a file is: part ``index`` of ``count``, whose files all have the same ``set_name``."""

    index: int = 0
    count: int = 1
    set_name: str = ""

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


@dataclass(frozen=True)
class Saved:
    """A state as written."""

    size_bytes: int
    state_hash: bytes

    @property
    def digest(self) -> bytes:
        """The first bytes of its hash: what tapes call it."""
        return self.state_hash[:DIGEST_BYTES]


class State:
    """A state as read: ``accounts`` and ``state_hash`` are those of the first file, chunks those of all."""

    def __init__(
        self, accounts: dict[str, Any], state_hash: bytes, stored: Iterable[statefile.StoredChunk], set_name: str = ""
    ) -> None:
        self.accounts, self.state_hash, self.set_name = accounts, state_hash, set_name
        self.files: list[Path] = []  # its parts that were found, in their order
        self.missing = 0  # those that were not
        self._stored: dict[str, list[statefile.StoredChunk]] = {}
        self._checked: set[statefile.StoredChunk] = set()
        self.add(stored)

    def add(self, stored: Iterable[statefile.StoredChunk]) -> None:
        """Take in the chunks of another part, but for those that are here: several processes have them."""
        for each in stored:
            known = self._stored.setdefault(each.chunk.name, [])
            if all(each.chunk != other.chunk for other in known):
                known.append(each)

    def check_all(self) -> None:
        """Check every chunk.

        Raises:
            RunError: one is damaged, or cannot be read.
        """
        for stored in itertools.chain(*self._stored.values()):
            stored.check()
            self._checked.add(stored)

    @property
    def digest(self) -> bytes:
        """The first bytes of its hash: what tapes call it."""
        return self.state_hash[:DIGEST_BYTES]

    def layout(self, prefix: str = "") -> dict[str, Chunk]:
        """Return the arrays whose names begin so: of each all of it, as a chunk."""
        firsts = {name: stored[0].chunk for name, stored in self._stored.items() if name.startswith(prefix)}
        return {name: Chunk.whole(name, first.shape, first.dtype) for name, first in sorted(firsts.items())}

    def has(self, wanted: Chunk) -> bool:
        """Whether the files have all values of a chunk: different chunks of one state do not overlap."""
        parts = [stored.chunk.overlap(wanted) for stored in self._stored.get(wanted.name, ())]
        return sum(part.size_bytes for part in parts if part is not None) == wanted.size_bytes

    def check(self, wanted: Chunk) -> None:
        """Find out that the files have a chunk, and that what is read for it is whole; nothing is checked twice.

        Raises:
            RunError: they have not all of it, or it is damaged, or cannot be read.
        """
        if not self.has(wanted):
            raise RunError(f"checkpoint: array {wanted.name!r} is not there from {wanted.start} to {wanted.stop}")
        for stored in self._stored.get(wanted.name, ()):
            if stored not in self._checked and stored.chunk.overlap(wanted) is not None:
                stored.check()
                self._checked.add(stored)

    def read(self, wanted: Chunk) -> Values:
        """Return the values of a chunk, any dtype [its lengths], put together from those chunks that overlap it.

        Raises:
            RunError: the files do not have all of it, or it is damaged, or cannot be read.
        """
        self.check(wanted)
        values = np.empty(wanted.lengths, wanted.dtype)
        for stored in self._stored.get(wanted.name, ()):
            part = stored.chunk.overlap(wanted)
            if part is not None:
                try:
                    values[part.within(wanted)] = stored.read(part)
                except (OSError, ValueError) as error:
                    raise RunError(f"{stored.path}: array {wanted.name!r} cannot be read: {error}") from None
        return values

    def arrays(self, prefix: str = "") -> dict[str, Values]:
        """Return the arrays whose names begin so, whole, any dtype [...] by name.

        Raises:
            RunError: the files do not have all of them, or cannot be read.
        """
        return {name: self.read(whole) for name, whole in self.layout(prefix).items()}


def ended_before(state_dir: Path, run: bytes) -> Iterator[tuple[str, Path]]:
    """Yield the name and the state's first file of each learner whose state is there, in order of name.

    ``run``: the identity of the run that this one continues; states of other runs are left out.
    """
    for path in sorted(states_before(state_dir).glob("*.safetensors")):
        name, _, part = path.name.removesuffix(".safetensors").partition(".")
        if not part and set_of(path, run, name) is not None:
            yield name, path


def save(
    path: Path,
    run: bytes,
    learner: str,
    accounts: Mapping[str, Any],
    content: Content,
    previous: Path | None = None,
    part: StateFilePart = StateFilePart(),
) -> Saved:
    """Write a state; the one that ``path`` was until then becomes ``previous``, if given. A crash leaves one of them whole.

    Raises:
        OSError: the disk is full, or the folder cannot be written; nothing has changed.
    """
    entries = {statefile.entry_name(chunk): chunk for chunk in content.chunks}
    metadata = {
        "format": statefile.FORMAT,
        "run": run.hex(),
        "learner": learner,
        "part": str(part),
        "set": part.set_name,
        "accounts": json.dumps(accounts),
        "chunks": json.dumps({name: [c.name, c.shape, c.start] for name, c in entries.items() if not c.is_whole}),
    }

    def header(hashes: Mapping[str, str]) -> tuple[bytes, bytes]:
        described = metadata | {"hashes": json.dumps(hashes)}
        state_hash = statefile.hash_metadata(described)
        return statefile.header(entries, described | {"hash": state_hash.hex()}), state_hash

    draft_header, digest = header(dict.fromkeys(entries, "0" * 64))  # as long as the one with the hashes

    def write(draft: Path) -> None:
        nonlocal digest
        values = iter(content.values)
        with draft.open("wb") as file:
            file.write(draft_header)
            hashes = {name: statefile.put(file, chunk, next(values)) for name, chunk in entries.items()}
            assert next(values, None) is None, "more values than chunks"
            file.seek(0)
            final, digest = header(hashes)
            file.write(final)

    files.replace(path, write, previous)
    size_bytes = len(draft_header) + sum(chunk.size_bytes for chunk in content.chunks)
    return Saved(size_bytes, digest)


def file_hash(path: Path) -> bytes:
    """Return the BLAKE3 hash of a file, read block by block.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return statefile.hash_of(file, path.stat().st_size)


def load(path: Path, run: bytes, learner: str) -> State:
    """Open a state and check all of it, or of a part all of this part; those beside it are checked as they are read.

    Raises:
        RunError: it cannot be read, is damaged, of another format version, or of another run or learner.
    """
    metadata, stored = statefile.open_file(path, run, learner)
    set_name = metadata.get("set", "")
    state = State(json.loads(metadata["accounts"]), bytes.fromhex(metadata["hash"]), stored, set_name)
    state.check_all()
    index, _, count = metadata.get("part", "0/1").partition("/")
    for other in range(int(count)):
        if other == int(index):
            state.files.append(path)
            continue
        for sibling in (kept(path.parent, learner, other), *generations(path.parent, learner, other)):
            part = _part_of(sibling, run, learner, set_name)
            if part is not None:
                state.files.append(sibling)
                state.add(part)
                break
        else:
            state.missing += 1
    return state


def load_set(state_dir: Path, run: bytes, learner: str, set_name: str, part: int) -> State:
    """Open a learner's own checkpoint by the name that all its parts have, as :func:`load` does, of any part that is here.

    That is ``part`` if it is here: most of what this process wants is in it.

    Raises:
        RunError: no part is here, or one is damaged.
    """
    folder = StateFolder(state_dir, learner)
    own = folder.kept(part), *folder.generations(part)
    others = sorted((state_dir / FOLDER).glob(f"{learner}.*safetensors"))
    for path in (*own, *(other for other in others if other not in own)):
        if set_of(path, run, learner) == set_name:
            return load(path, run, learner)
    raise RunError(f"{state_dir / FOLDER}: no part of checkpoint {set_name!r} of {learner} found")


def set_of(path: Path, run: bytes, learner: str) -> str | None:
    """Return the name that all parts of a file's state have; None if there is no such file, or it is none of the learner's."""
    try:
        metadata, _ = statefile.open_file(path, run, learner)
    except RunError:
        return None
    return metadata.get("set", "")


def _part_of(path: Path, run: bytes, learner: str, set_name: str) -> list[statefile.StoredChunk] | None:
    """Return the chunks of a file that is a part of a learner's state of that name; None if there is no such file."""
    try:
        metadata, stored = statefile.open_file(path, run, learner)
    except RunError:
        return None
    return stored if metadata.get("set", "") == set_name else None


def is_of(path: Path, run: bytes, learner: str, set_name: str) -> bool:
    """Whether a file is a part of a learner's state of that name."""
    return set_of(path, run, learner) == set_name
