"""Text as bytes: files, held-out parts, shares, and windows in a reproducible order.

A folder's files are sorted by path and every 20th is held out; a single file, or a folder of fewer, holds out its last 5 %.
Passages of the held-out text that the training text has too are left out of it (``repeats.py``).
Learner i of M trains on the files i, i + M, i + 2M, ...; with fewer files than learners, on the i-th of M equal parts of all
text. Paths relative to the folder decide, so a copy elsewhere gives the same shares.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from diloco.core.tensors.built_in import BYTES
from diloco.errors import DataError, SettingsError
from diloco.settings.run import TaskSettings
from diloco.storage.fetching import local_path
from diloco_learner.data.repeats import HeldOut, without_repeats

Bytes = NDArray[np.uint8]

UNITS = "nats per byte"  # of losses on text
HELD_OUT_EVERY = 20
VALIDATION_WINDOWS = 1024  # the same ones whatever the batch, or losses of different batches could not be compared
PROBE_BYTES = 8192  # a file with a zero byte in its first few is not text
# folders of the standard library that are third-party code or tests of it
LIBRARY_SKIPPED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class Corpus:
    """Files to train on and to validate on, and how many bytes at the end of the last are held out where no file is.

    Texts are read when they are asked for, and are then held in memory whole.
    """

    source: str
    training: tuple[Path, ...]
    held_out: tuple[Path, ...]
    training_bytes: int
    held_out_bytes: int

    def training_text(self) -> Bytes:
        """Return all bytes that the learners train on together, uint8 [bytes]."""
        return _read(self.training)[: self.training_bytes]

    @cached_property
    def to_evaluate(self) -> HeldOut:
        """Return the bytes that no learner trains on, without passages that the training text has too.

        Reads all text, and takes about 0.05 s a megabyte of it the first time.
        """
        everything = _read(self.training)
        held_out = _read(self.held_out) if self.held_out else everything[self.training_bytes :]
        return without_repeats(everything[: self.training_bytes], held_out)

    def digest(self) -> str:
        """Return BLAKE3 (hex) of all bytes to train on and to evaluate on: losses on texts of other digests do not compare."""
        training, held_out = self.training_text(), self.to_evaluate.text
        return blake3(f"{training.size} {held_out.size} ".encode() + training.tobytes() + held_out.tobytes()).hexdigest()

    def share(self, index: int, shares: int) -> Bytes:
        """Return the bytes that learner ``index`` of ``shares`` trains on, uint8 [bytes].

        Raises:
            SettingsError: there is no such share.
            DataError: a file cannot be read.
        """
        if not 0 <= index < shares:
            raise SettingsError(f"share {index}: the run's data has {shares} shares, counted from 0")
        if self.held_out and len(self.training) >= shares:
            return _read(self.training[index::shares])
        text = self.training_text()
        return text[text.size * index // shares : text.size * (index + 1) // shares]

    def describe(self) -> dict[str, int | str]:
        """Return the text's source, and files and bytes to train on and held out, for logs.

        Of the bytes held out the repeated ones are left out of those evaluated on, unless hardly any would be left.
        """
        return {
            "source": self.source,
            "training_files": len(self.training),
            "training_bytes": self.training_bytes,
            "held_out_files": len(self.held_out),
            "held_out_bytes": self.held_out_bytes,
            "repeated_bytes": self.to_evaluate.repeated_bytes,
            "evaluated_bytes": self.to_evaluate.text.size,
        }


def load_corpus(data: str | None, cache_dir: Path | None = None) -> Corpus:
    """Return the corpus of a file, a folder, a place of either, or (None) of the sources of this Python's standard library.

    ``cache_dir`` is where what lies at a place is kept.

    Hidden files and folders, and files that are not text, are left out.

    Raises:
        DataError: missing, unreadable, or nothing in it.
        ObjectStoreError: its place cannot be read.
    """
    sized = text_files(None if data is None else local_path(data, cache_dir))
    source = "Python standard library" if data is None else data
    if len(sized) < HELD_OUT_EVERY:
        total = sum(size for _, size in sized)
        kept = total - total // HELD_OUT_EVERY
        return Corpus(source, tuple(path for path, _ in sized), (), kept, total - kept)
    held_out = sized[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    training = [item for i, item in enumerate(sized) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
    return Corpus(
        source,
        tuple(path for path, _ in training),
        tuple(path for path, _ in held_out),
        sum(size for _, size in training),
        sum(size for _, size in held_out),
    )


def text_files(root: Path | None) -> list[tuple[Path, int]]:
    """Return the files of text that are a file or lie in a folder, in the order of their relative paths, with their sizes.

    None: the sources of this Python's standard library. Hidden files and folders, and files that are not text, are left out.

    Raises:
        DataError: missing, unreadable, or nothing in it.
    """
    library, root = root is None, root or Path(sysconfig.get_path("stdlib"))
    try:
        if not root.exists():
            raise DataError(f"{root}: there is no such file or folder")
        files = [root] if root.is_file() else list(_walk(root, library=library))
        sized = [(path, path.stat().st_size) for path in files if _is_text(path)]
    except OSError as error:
        raise unreadable(error, root) from None
    sized = [(path, size) for path, size in sized if size]
    if not sized:
        what = "is empty or not text" if root.is_file() else f"holds no text: {len(files)} files, all empty or not text"
        raise DataError(f"{root}: {what}; give a text file or a folder of them")
    return sized


class Windows:
    """Batches of windows of ``context + 1`` bytes of a text. Each epoch has its own order.

    Window starts are ``context`` apart, so that every byte is predicted once an epoch; an epoch's first start is drawn too,
    so that windows are cut differently each time.
    """

    def __init__(self, text: Bytes, context: int, batch: int, *, seed: int, share: int, what: str) -> None:
        needed = context * (batch + 1) + 1
        if text.size < needed:
            raise DataError(
                f"{what}: {text.size} bytes of text, one batch of {batch} windows of {context} bytes takes at least "
                f"{needed}; give more text, or a smaller task.batch or task.context"
            )
        self.text, self.context, self.batch, self.seed = text, context, batch, (seed, share)
        # one window less than fits without the random start
        self.batches_per_epoch = ((text.size - 1) // context - 1) // batch

    def __getitem__(self, index: int) -> NDArray[np.int32]:
        """Return the ``index``-th batch, int32 [batch, context + 1]: the same for the same text, seed and share."""
        epoch, at = divmod(index, self.batches_per_epoch)
        starts = self._starts(epoch)[at * self.batch : (at + 1) * self.batch]
        return self._cut(starts)

    def iterate(self, start: int, rows: range | None = None) -> Iterator[NDArray[np.int32]]:
        """Yield batches ``start``, ``start + 1``, ... without end, each int32 [batch, context + 1]; or ``rows`` of each."""
        own = slice(None) if rows is None else slice(rows.start, rows.stop)
        epoch, at = divmod(start, self.batches_per_epoch)
        while True:
            starts = self._starts(epoch)
            for i in range(at, self.batches_per_epoch):
                yield self._cut(starts[i * self.batch : (i + 1) * self.batch][own])
            epoch, at = epoch + 1, 0

    def _starts(self, epoch: int) -> NDArray[np.int64]:
        random = np.random.default_rng((*self.seed, epoch))
        windows = (self.text.size - 1) // self.context - 1
        return random.integers(self.context) + self.context * random.permutation(windows)

    def _cut(self, starts: NDArray[np.int64]) -> NDArray[np.int32]:
        return _windows(self.text, starts, self.context)


class TextData:
    """The built-in task's data: batches of windows int32 [batch, context + 1] of a corpus. Needs no JAX."""

    units, vocabulary = UNITS, BYTES

    def __init__(self, settings: TaskSettings, data: str | None, cache_dir: Path | None = None) -> None:
        self.batch, self.context = settings.batch, settings.context
        self.corpus = load_corpus(data, cache_dir)

    def batches(self, share: int, shares: int, seed: int, start: int, rows: range | None = None) -> Iterator[NDArray[np.int32]]:
        """Return the batches of a share from the ``start``-th on, without end: int32 [batch, context + 1], or ``rows`` of each.

        Raises:
            DataError: the share is too short for one batch.
        """
        what = f"{self.corpus.source}, share {share} of {shares}"
        windows = Windows(self.corpus.share(share, shares), self.context, self.batch, seed=seed, share=share, what=what)
        return windows.iterate(start, rows)

    def validation(self) -> list[NDArray[np.int32]]:
        """Return batches of windows, int32 [batch, context + 1], that are evenly spread over the held-out text.

        Raises:
            DataError: it is too short for one batch.
        """
        return validation_batches(self.corpus.to_evaluate, self.context, self.batch, VALIDATION_WINDOWS, self.corpus.source)

    def encode(self, text: str) -> NDArray[np.uint8]:
        """Return text as tokens, uint8 [bytes]."""
        return np.frombuffer(text.encode(), np.uint8)

    def decode(self, tokens: NDArray[np.int32]) -> str:
        """Return the text of tokens, int32 [bytes]; bytes that are no text become U+FFFD."""
        return tokens.astype(np.uint8).tobytes().decode("utf-8", errors="replace")


def validation_batches(held_out: HeldOut, context: int, batch: int, most: int, source: str) -> list[NDArray[np.int32]]:
    """Return batches int32 [batch, context + 1] of about ``most`` windows evenly spread over the held-out text.

    They are fewer where the text is short, and one batch where that is larger.

    Raises:
        DataError: the text is too short for one batch.
    """
    text = held_out.text
    windows = (text.size - 1) // context
    if windows < batch:
        less = (
            ""
            if held_out.all_kept or not held_out.repeated_bytes
            else (f" without {held_out.repeated_bytes} bytes of passages that the training text also contains")
        )
        raise DataError(
            f"{source}: {text.size} bytes are held out for validation{less}, one batch of {batch} windows of {context} "
            f"bytes takes {batch * context + 1}; give more text, or a smaller task.batch or task.context"
        )
    return list(_windows(text, evenly(windows, batch, most, context), context).reshape(-1, batch, context + 1))


def evenly(windows: int, batch: int, most: int, context: int) -> NDArray[np.int64]:
    """Return the starts of about ``most`` of so many windows, evenly spread: int64 [a multiple of ``batch``]."""
    count = min(max(most // batch, 1), windows // batch) * batch
    return context * (np.arange(count) * windows // count)


def _windows(text: Bytes, starts: NDArray[np.int64], context: int) -> NDArray[np.int32]:
    cut: Bytes = text[starts[:, None] + np.arange(context + 1)]
    return cut.astype(np.int32)


def _walk(root: Path, *, library: bool) -> Iterator[Path]:
    """Yield the files below ``root`` in the order of their relative paths."""
    found = []
    for folder, folders, names in os.walk(root, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith(".") and not (library and name in LIBRARY_SKIPPED)]
        found += [Path(folder, name) for name in names if not name.startswith(".") and (not library or name.endswith(".py"))]
    yield from sorted((path for path in found if path.is_file()), key=lambda path: path.relative_to(root).as_posix())


def _raise(error: OSError) -> None:
    raise error


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" not in file.read(PROBE_BYTES)


def _read(paths: tuple[Path, ...]) -> Bytes:
    try:
        return np.concatenate([np.fromfile(path, np.uint8) for path in paths])
    except OSError as error:
        raise unreadable(error, paths[0]) from None


def unreadable(error: OSError, path: Path) -> DataError:
    """Return the error of a file that cannot be read; ``path`` is where the operating system names none."""
    return DataError(f"{error.filename or path}: cannot be read: {error.strerror}")
