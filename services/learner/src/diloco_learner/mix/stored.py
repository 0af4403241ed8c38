"""A source's tokens in files, memory-mapped: made once from its texts, or an existing ``.bin``.

The tokens of training and of the held-out part lie apart. Every 20th document is held out, or the last 5 % of the tokens where
there are fewer than 20 documents, as of a ``.bin``, which has no documents.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from diloco.errors import DataError
from diloco_learner.mix import drafts, forms
from diloco_learner.mix.documents import Documents, content, seen
from diloco_learner.mix.file import SourceTable
from diloco_learner.mix.tokenizer import Tokenizer
from diloco_learner.text import HELD_OUT_EVERY, unreadable

TokenArray = NDArray[np.uint16] | NDArray[np.uint32]

FORMAT = 1  # grows with what makes other tokens of the same texts
STORED = "tokens"  # folder of the cache
PARTS = ("training.bin", "held_out.bin")
ABOUT = "about.json"
AT_ONCE = 1 << 20  # characters that are tokenised at once, by all cores
SCANNED = 1 << 24  # tokens looked at at once


@dataclass(frozen=True)
class StoredTokens:
    """A source's tokens: uint16 or uint32 [tokens], to train on and held out.

    ``digest`` is of what they were made from, ``documents`` and ``characters`` are counts; 0 where there are only tokens.
    """

    training: TokenArray
    held_out: TokenArray
    digest: str
    documents: int = 0
    characters: int = 0


def of_binary(name: str, table: SourceTable, path: Path, vocabulary: int, cache: Path) -> StoredTokens:
    """Return the tokens of a ``.bin``, as it lies on the disk.

    Raises:
        DataError: it is missing or empty, its size is no multiple of a token's, a token is none of the vocabulary, or it has
            another form than the table states (:mod:`diloco_learner.mix.forms`).
    """
    dtype = np.dtype(table.dtype).newbyteorder("<")
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"source {name!r}: {unreadable(error, path)}") from None
    if not size or size % dtype.itemsize:
        what = "is empty" if not size else (f"has {size} bytes, not a multiple of the {dtype.itemsize} bytes of {table.dtype}")
        raise DataError(f"source {name!r}: {path}: {what}; set sources.{name}.dtype, or write the file again")

    def look(paths: Sequence[Path], root: Path | None) -> dict[str, Any]:
        tokens = np.memmap(path, dtype, "r")
        return {"digest": content(paths, path), "largest": max(int(block.max()) for block in _blocks(tokens))}

    if fault := forms.fault(path, table.dtype, vocabulary):
        raise DataError(f"source {name!r}: {path}: {fault}")
    found = seen([path], path, cache, look, table.dtype)
    if found["largest"] >= vocabulary:
        raise DataError(
            f"source {name!r}: {path}: has the token {found['largest']}, and the vocabulary ends with {vocabulary - 1}: "
            f"it was made by another tokenizer, or not as {table.dtype}: name the right tokenizer, or set "
            f"sources.{name}.dtype"
        )
    return _split(np.memmap(path, dtype, "r"), f"{found['digest']} {table.dtype}")


def of_documents(documents: Documents, tokenizer: Tokenizer, cache: Path) -> StoredTokens:
    """Return the tokens of a source's texts, each document followed by the tokenizer's end; made if the cache has not got them.

    Raises:
        DataError: a file cannot be read or has no texts.
    """
    digest = documents.digest(cache)
    key = blake3(f"{FORMAT} {tokenizer.digest} {digest}".encode()).hexdigest(16)
    folder = cache / STORED / key
    dtype = np.dtype("<u2" if tokenizer.vocabulary <= 1 << 16 else "<u4")
    about = drafts.make_once(folder, _about, lambda draft: _fill(documents, tokenizer, draft, dtype))
    training, held_out = (_mapped(folder / part, dtype) for part in PARTS)
    if about.documents < HELD_OUT_EVERY:
        whole = _split(training, digest)
        training, held_out = whole.training, whole.held_out
    return StoredTokens(training, held_out, digest, about.documents, about.characters)


class _About(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Counts and sizes of a folder of tokens, in a file beside them."""

    documents: Annotated[int, msgspec.Meta(ge=1)]
    characters: Annotated[int, msgspec.Meta(ge=0)]
    sizes_bytes: list[int]


def _about(folder: Path) -> _About | None:
    """Return the counts and sizes of a folder of tokens; None if it is not there, or not whole."""
    try:
        about = msgspec.json.decode((folder / ABOUT).read_bytes(), type=_About)
        whole = about.sizes_bytes == [(folder / part).stat().st_size for part in PARTS]
    except (OSError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    return about if whole else None


def _fill(documents: Documents, tokenizer: Tokenizer, draft: Path, dtype: np.dtype[Any]) -> None:
    count = characters = 0
    with (draft / PARTS[0]).open("wb") as training, (draft / PARTS[1]).open("wb") as held_out:
        for batch in _batches(documents):
            characters += sum(len(piece) for _, piece, _ in batch)
            for (number, _, last), tokens in zip(batch, tokenizer.encode([piece for _, piece, _ in batch]), strict=True):
                file = held_out if number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 else training
                _write(file, tokens, dtype)
                if last:
                    _write(file, np.array([tokenizer.end]), dtype)
                count = number + 1
    if not count:
        raise DataError(f"source {documents.name!r}: {documents.root}: has no text: all rows are empty; name another column")
    about = _About(count, characters, [(draft / part).stat().st_size for part in PARTS])
    (draft / ABOUT).write_bytes(msgspec.json.encode(about))


def _batches(documents: Documents) -> Iterator[list[tuple[int, str, bool]]]:
    """Yield pieces of documents, about as many characters at a time: document's number, piece, whether it is its last."""
    batch: list[tuple[int, str, bool]] = []
    size = 0
    for number, document in enumerate(documents):
        for piece, following in itertools.pairwise(itertools.chain(document, [None])):
            assert piece is not None
            batch.append((number, piece, following is None))
            size += len(piece)
            if size >= AT_ONCE:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _write(file: BinaryIO, tokens: NDArray[Any], dtype: np.dtype[Any]) -> None:
    file.write(tokens.astype(dtype).tobytes())


def _mapped(path: Path, dtype: np.dtype[Any]) -> TokenArray:
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)


def _split(tokens: TokenArray, digest: str) -> StoredTokens:
    kept = tokens.size - tokens.size // HELD_OUT_EVERY
    return StoredTokens(tokens[:kept], tokens[kept:], digest)


def _blocks(tokens: TokenArray) -> Iterator[TokenArray]:
    return (tokens[at : at + SCANNED] for at in range(0, tokens.size, SCANNED))
