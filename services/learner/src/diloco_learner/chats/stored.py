"""Tokens of conversations on the disk: made once of a source's lines, memory-mapped by every process, packed once a context."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from diloco.errors import DataError
from diloco_learner.chats import lines, packing
from diloco_learner.chats.chat_tokenizer import ChatTokenizer, EncodedLine
from diloco_learner.chats.conversations import BadLineError, Conversation, PlainText, parse
from diloco_learner.chats.lines import read_lines
from diloco_learner.mix import drafts
from diloco_learner.mix.documents import content, seen
from diloco_learner.text import HELD_OUT_EVERY

FORMAT = 1  # grows with what makes other tokens or rows of the same files
TOKENS, ROWS = "chats", "rows"  # folders of the cache
ABOUT = "about.json"
SIDES = ("training", "held_out")
AT_ONCE = 1 << 20  # bytes of lines that are tokenised at once
MOST_BAD = 0.01  # of a source's lines, where its table does not say
NAMED = 20  # bad lines of which place and reason are kept

TokenArray = NDArray[np.uint16] | NDArray[np.uint32]
Count = Annotated[int, msgspec.Meta(ge=0)]


class SideCounts(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Counts of the documents to train on, or held out, and a digest (hex) of their tokens and of which are learned."""

    documents: Count
    tokens: Count
    learned: Count
    digest: str


class SourceCounts(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Counts of a source's lines. ``bad``: lines of which no tokens were made; the first ones are ``named``.

    ``longest``: the place of the longest conversation, which has ``longest_tokens``.
    """

    lines: Count
    bad: Count
    named: list[str]
    longest: str
    longest_tokens: Count
    training: SideCounts
    held_out: SideCounts


@dataclass(frozen=True)
class StoredChats:
    """Documents of a source, to train on or held out, one behind the other.

    ``tokens`` are uint16 or uint32 [tokens], ``learned`` and ``divides`` bool, ``ends`` int64 [documents].
    """

    counts: SideCounts
    tokens: TokenArray
    learned: NDArray[np.bool_]
    ends: NDArray[np.int64]
    divides: NDArray[np.bool_]


class RowCounts(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Counts of rows: their number, the tokens in them, those trained on, and what is not in them (``packing.Pieces``)."""

    rows: Count
    tokens: Count
    trained: Count
    cut: Count
    divided: Count
    dropped: Count
    lost: Count


@dataclass(frozen=True)
class StoredRows:
    """Rows of documents' pieces: ``pieces`` int64 [pieces, 2] are begin and length, row r has those up to ``ends[r]``."""

    counts: RowCounts
    pieces: NDArray[np.int64]
    ends: NDArray[np.int64]


def of_files(
    name: str, root: Path, files: Sequence[Path], tokenizer: ChatTokenizer, *, most_bad: float, cache: Path
) -> tuple[SourceCounts, dict[str, StoredChats]]:
    """Return a source's documents by side, made if the cache has not got them; ``name`` is the source's for errors.

    Raises:
        DataError: a file cannot be read, too many lines are bad, or too few conversations are left; or as ``encode_all``.
    """
    digest = str(seen(files, root, cache, _content)["digest"])
    made_by = " ".join(metadata.version(each) for each in ("tokenizers", "transformers"))
    folder = cache / TOKENS / blake3(f"{FORMAT} {made_by} {tokenizer.digest} {digest}".encode()).hexdigest(16)
    dtype = np.dtype("<u2" if tokenizer.vocabulary <= 1 << 16 else "<u4")
    counts = drafts.make_once(folder, _about, lambda draft: _Making(name, tokenizer, draft, dtype).make(root, files))
    _check_counts(name, root, counts, most_bad)
    return counts, {side: _opened(folder / side, getattr(counts, side), dtype) for side in SIDES}


def rows_of(chats: StoredChats, context: int, cache: Path) -> StoredRows:
    """Return the rows of documents, packed if the cache has not got them."""
    folder = cache / ROWS / blake3(f"{FORMAT} {chats.counts.digest} {context}".encode()).hexdigest(16)
    counts = drafts.make_once(folder, _about_rows, lambda draft: _pack(chats, context, draft))
    found = {each: _mapped(folder / f"{each}.bin", np.dtype("<i8")) for each in ("pieces", "ends")}
    return StoredRows(counts, found["pieces"].reshape(-1, 2), found["ends"])


def _content(paths: Sequence[Path], root: Path | None) -> dict[str, Any]:
    return {"digest": content(paths, root)}


def _check_counts(name: str, root: Path, counts: SourceCounts, most_bad: float) -> None:
    first = "; ".join(counts.named[:3])
    if counts.bad > max(1, most_bad * counts.lines):
        raise DataError(
            f"source {name!r}: {first}: {counts.bad} of {counts.lines} lines of {root} cannot be used, more than "
            f"{100 * most_bad:g} %: repair or remove them, or allow more by most_bad in a mix.toml"
        )
    if not counts.training.documents or not counts.held_out.documents:
        good = counts.training.documents + counts.held_out.documents
        reason = f": {first}" if first else ""
        raise DataError(
            f"source {name!r}: {root}: {good} conversations can be used, and two are needed, of which one is held out{reason}"
        )


class _Making:
    """The making of a source's tokens in a draft of its folder."""

    def __init__(self, name: str, tokenizer: ChatTokenizer, draft: Path, dtype: np.dtype[Any]) -> None:
        self.name, self.tokenizer, self.draft, self.dtype = name, tokenizer, draft, dtype
        self.lines = self.bad = self.documents = 0
        self.named: list[str] = []
        self.longest, self.longest_tokens = "", 0

    def make(self, root: Path, files: Sequence[Path]) -> None:
        sides = {side: _Side(self.draft / side, self.dtype) for side in SIDES}
        last: EncodedLine | None = None  # held out, if there are too few to hold out every so many
        for document in self._documents(root, files):
            if last is not None:
                sides[self._side(self.documents - 1)].write(last)
            last = document
            self.documents += 1
        if last is not None:
            few = self.documents < HELD_OUT_EVERY
            sides["held_out" if few and self.documents > 1 else self._side(self.documents - 1)].write(last)
        training, held_out = (sides[side].close() for side in SIDES)
        about = SourceCounts(
            self.lines, self.bad, self.named, self.longest, self.longest_tokens, training=training, held_out=held_out
        )
        (self.draft / ABOUT).write_bytes(msgspec.json.encode(about))

    def _side(self, number: int) -> str:
        return "held_out" if number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 else "training"

    def _documents(self, root: Path, files: Sequence[Path]) -> Iterator[EncodedLine]:
        places, parsed, size = list[str](), list[Conversation | PlainText](), 0
        for path in files:
            name = path.name if path == root else path.relative_to(root).as_posix()
            for place, line in read_lines(path, name):
                self.lines += 1
                try:
                    if line is None:
                        raise BadLineError(f"is longer than {lines.MOST_LINE_BYTES:,} bytes")
                    parsed.append(parse(line, templated=self.tokenizer.has_template))
                except BadLineError as error:
                    self._leave_out(place, error)
                    continue
                places.append(place)
                size += len(line)
                if size >= AT_ONCE:
                    yield from self._encoded(places, parsed)
                    places, parsed, size = [], [], 0
        yield from self._encoded(places, parsed)

    def _encoded(self, places: list[str], parsed: list[Conversation | PlainText]) -> Iterator[EncodedLine]:
        for place, found in zip(places, self.tokenizer.encode_all(parsed, places), strict=True):
            if isinstance(found, EncodedLine):
                if found.tokens.size > self.longest_tokens:
                    self.longest, self.longest_tokens = place, found.tokens.size
                yield found
            else:
                self._leave_out(place, found)

    def _leave_out(self, place: str, error: BadLineError) -> None:
        self.bad += 1
        if len(self.named) < NAMED:
            self.named.append(f"{place}: {error}")


class _Side:
    """The files of documents to train on, or held out, as they are written."""

    def __init__(self, folder: Path, dtype: np.dtype[Any]) -> None:
        folder.mkdir()
        self.dtype, self.documents, self.size, self.learned = dtype, 0, 0, 0
        self.hash = blake3()
        self.files: dict[str, BinaryIO] = {each: (folder / f"{each}.bin").open("wb") for each in _types(dtype)}

    def write(self, document: EncodedLine) -> None:
        self.documents += 1
        self.size += document.tokens.size
        self.learned += int(document.learned.sum())
        values = {"tokens": document.tokens, "learned": document.learned, "ends": self.size, "divides": document.divides}
        for each, dtype in _types(self.dtype).items():
            data = np.asarray(values[each], dtype).tobytes()
            self.hash.update(data)
            self.files[each].write(data)

    def close(self) -> SideCounts:
        for file in self.files.values():
            file.close()
        return SideCounts(self.documents, self.size, self.learned, self.hash.hexdigest(16))


def _types(dtype: np.dtype[Any]) -> dict[str, np.dtype[Any]]:
    return {"tokens": dtype, "learned": np.dtype(np.bool_), "ends": np.dtype("<i8"), "divides": np.dtype(np.bool_)}


def _about(folder: Path) -> SourceCounts | None:
    """Return the counts of a folder of tokens; None if it is not there, or not whole."""
    try:
        about = msgspec.json.decode((folder / ABOUT).read_bytes(), type=SourceCounts)
        for side in SIDES:
            counts: SideCounts = getattr(about, side)
            expected = {"learned": counts.tokens, "ends": 8 * counts.documents, "divides": counts.documents}
            sizes = {each: (folder / side / f"{each}.bin").stat().st_size for each in _types(np.dtype("<u2"))}
            if sizes.pop("tokens") not in (2 * counts.tokens, 4 * counts.tokens) or sizes != expected:
                return None
    except (OSError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    return about


def _opened(folder: Path, counts: SideCounts, dtype: np.dtype[Any]) -> StoredChats:
    return StoredChats(counts, **{each: _mapped(folder / f"{each}.bin", kind) for each, kind in _types(dtype).items()})


def _mapped(path: Path, dtype: np.dtype[Any]) -> Any:
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)


def _pack(chats: StoredChats, context: int, draft: Path) -> None:
    found = packing.pieces(chats.ends, chats.learned, chats.divides, context)
    order, ends = packing.pack(found.lengths, context)
    (draft / "pieces.bin").write_bytes(np.stack([found.begins[order], found.lengths[order]], axis=1).astype("<i8").tobytes())
    (draft / "ends.bin").write_bytes(ends.astype("<i8").tobytes())
    about = RowCounts(
        rows=len(ends),
        tokens=int(found.lengths.sum()),
        trained=found.trained,
        cut=found.cut,
        divided=found.divided,
        dropped=found.dropped,
        lost=found.lost,
    )
    (draft / ABOUT).write_bytes(msgspec.json.encode(about))


def _about_rows(folder: Path) -> RowCounts | None:
    try:
        about = msgspec.json.decode((folder / ABOUT).read_bytes(), type=RowCounts)
        is_whole = (folder / "ends.bin").stat().st_size == 8 * about.rows
        return about if is_whole and (folder / "pieces.bin").stat().st_size % 16 == 0 else None
    except (OSError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None


def lengths(chats: Iterable[StoredChats]) -> NDArray[np.int64]:
    """Return the tokens of each document, int64 [documents]."""
    return np.concatenate([np.diff(each.ends, prepend=0) for each in chats])
