"""The documents of a source, and the digest of their content.

A document is a file of text, or a row of a Parquet file or of a Hugging Face dataset.
"""

from __future__ import annotations

import codecs
import functools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from diloco.errors import DataError
from diloco.process import files
from diloco_learner.mix import parquet_columns
from diloco_learner.mix.file import SourceTable
from diloco_learner.text import text_files, unreadable

PIECE_CHARACTERS = 1 << 20  # of a document, tokenised at once: a document may be larger than memory
ROWS = 1024  # of a table, read at once
SEEN = "seen"  # folder of the cache: what files that have not changed contain


@dataclass(frozen=True)
class Documents:
    """The documents of a source. ``root`` is absolute; None: Python's standard library. ``name`` is for errors."""

    name: str
    table: SourceTable
    root: Path | None
    files: tuple[Path, ...]

    def digest(self, cache: Path) -> str:
        """Return a digest (hex) of all files, by their names below the root: equal in copies elsewhere."""
        column = self.table.column
        if self.table.digest == "column":
            found = seen(self.files, self.root, cache, functools.partial(_column_content, column=column), column)
            return f"{found['digest']} {column} alone"
        return str(seen(self.files, self.root, cache, _content)["digest"]) + f" {column}"

    def __iter__(self) -> Iterator[Iterable[str]]:
        """Yield documents, each as pieces of text.

        Raises:
            DataError: a file cannot be read, or has no such texts.
        """
        if self.table.kind == "text":
            return (_pieces_of_file(path) for path in self.files)
        rows = self._parquet() if self.table.kind == "parquet" else self._huggingface()
        return ((text,) for text in rows)

    def _parquet(self) -> Iterator[str]:
        import pyarrow
        from pyarrow import parquet

        for path in self.files:
            try:
                with parquet.ParquetFile(path) as table:
                    self._check_column(path, {field.name: str(field.type) for field in table.schema_arrow})
                    for batch in table.iter_batches(ROWS, columns=[self.table.column]):
                        yield from self._texts(path, batch.column(0).to_pylist())
            except (pyarrow.ArrowException, OSError) as error:
                raise DataError(f"source {self.name!r}: {path}: cannot be read as Parquet: {error}") from None

    def _huggingface(self) -> Iterator[str]:
        import datasets

        assert self.root is not None
        try:
            table = datasets.load_from_disk(str(self.root))
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"source {self.name!r}: {self.root}: not a dataset written by save_to_disk: {str(error).splitlines()[0]}"
            ) from None
        if not isinstance(table, datasets.Dataset):
            raise DataError(f"source {self.name!r}: {self.root}: has splits; give one of them: {self.root}/{min(table)}")
        self._check_column(self.root, {name: str(getattr(kind, "dtype", kind)) for name, kind in table.features.items()})
        for batch in table.select_columns([self.table.column]).iter(ROWS):
            yield from self._texts(self.root, batch[self.table.column])

    def _check_column(self, path: Path, columns: dict[str, str]) -> None:
        found = columns.get(self.table.column)
        if found is None:
            raise DataError(
                f"source {self.name!r}: {path}: has no column {self.table.column!r}; it has {', '.join(columns)}: set "
                f"sources.{self.name}.column"
            )
        if found not in ("string", "large_string", "string_view"):
            raise DataError(
                f"source {self.name!r}: {path}: column {self.table.column!r} is of type {found}, expected string: set "
                f"sources.{self.name}.column"
            )

    def _texts(self, path: Path, texts: Sequence[str | None]) -> Iterator[str]:
        return (text for text in texts if text)


def documents(name: str, table: SourceTable, root: Path | None) -> Documents:
    """Find the files of a source of texts.

    Raises:
        DataError: there is none; ``name`` is the source's.
    """
    if table.kind == "text":
        try:
            return Documents(name, table, root, tuple(path for path, _ in text_files(root)))
        except DataError as error:
            raise DataError(f"source {name!r}: {error}") from None
    assert root is not None
    pattern = "*.parquet" if table.kind == "parquet" else "*.arrow"
    found = [root] if root.is_file() and table.kind == "parquet" else sorted(root.glob(pattern))
    if table.kind == "huggingface" and not found and (root / "dataset_dict.json").exists():
        splits = json.loads((root / "dataset_dict.json").read_text()).get("splits", [])
        raise DataError(f"source {name!r}: {root}: has splits; give one of them: {root}/{min(splits, default='train')}")
    if not found:
        wanted = "a Parquet file, or a folder of *.parquet" if table.kind == "parquet" else ("a folder written by save_to_disk")
        raise DataError(f"source {name!r}: {root}: {'has no files' if root.is_dir() else 'does not exist'}; expected {wanted}")
    return Documents(name, table, root, tuple(found))


def seen(paths: Sequence[Path], root: Path | None, cache: Path, look: Any, about: str = "") -> dict[str, Any]:
    """Return what ``look`` finds of files; what it found before, if size and time of all files are what they were then.

    ``about`` is all else that the finding depends on. A note that is damaged is made again.
    """
    try:
        stats = [(path, path.stat()) for path in paths]
    except OSError as error:
        raise unreadable(error, paths[0]) from None
    state = "".join(f"{path}\0{stat.st_size} {stat.st_mtime_ns} {stat.st_ino}\n" for path, stat in stats)
    note = cache / SEEN / f"{blake3((_name_of(look) + about + state).encode()).hexdigest(16)}.json"
    found: dict[str, Any] | None = _note(note)
    if found is None:
        try:
            found = look(paths, root)
        except OSError as error:
            raise unreadable(error, paths[0]) from None
        assert found is not None
        files.replace_text(note, json.dumps(found))
    return found


def _name_of(look: Any) -> str:
    return str(getattr(look, "func", look).__name__)


def _note(path: Path) -> Any:
    """Return what a note says; None if there is none, or it is damaged."""
    try:
        found = json.loads(path.read_text())
        whole = isinstance(found["digest"], str) and isinstance(found.get("largest", 0), int)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return found if whole else None


def content(paths: Sequence[Path], root: Path | None) -> str:
    """Return a digest (hex) of files and of their names below ``root``, if that is given."""
    whole = blake3()
    for path in paths:
        name = path.name if root is None else path.relative_to(root).as_posix()  # "." of a file that is the source
        whole.update(f"{name} {blake3().update_mmap(path).hexdigest()}\n".encode())
    return whole.hexdigest(16)


def _column_content(paths: Sequence[Path], root: Path | None, column: str) -> dict[str, Any]:
    return {"digest": parquet_columns.content(paths, root, column)}


def _content(paths: Sequence[Path], root: Path | None) -> dict[str, Any]:
    return {"digest": content(paths, root)}


def _pieces_of_file(path: Path) -> Iterator[str]:
    """Yield a file's text in pieces that end with a line, where there are lines."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    rest = ""
    try:
        with path.open("rb") as file:
            while block := file.read(PIECE_CHARACTERS):
                text = rest + decoder.decode(block)
                cut = text.rfind("\n") + 1 or len(text)
                rest = text[cut:]
                yield text[:cut]
            yield rest + decoder.decode(b"", final=True)
    except OSError as error:
        raise unreadable(error, path) from None
