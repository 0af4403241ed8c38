"""The lines of chat files, one conversation each: bounded in size, decompressed as they are read, each with its place.

A ``.json`` file may be one array instead, of which each item is a conversation.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
import zstandard

from diloco.errors import DataError
from diloco_learner.text import unreadable

ARRAY = ".json"
SUFFIXES = tuple(form + packed for form in (".jsonl", ARRAY) for packed in ("", ".gz", ".zst"))
MOST_LINE_BYTES = 1 << 23  # a conversation of so many bytes has about two million tokens
MOST_ARRAY_BYTES = 1 << 28  # of a file that is one array: it is in memory whole
BLOCK_BYTES = 1 << 20
ZSTD_BLOCK_BYTES = 1 << 10  # compressed: four bytes unpack to 128 KiB at most, so these do to 32 MiB
MOST_WINDOW_BYTES = 1 << 27  # of zstd, as its command line allows
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

Line = tuple[str, bytes | None]  # its place, as "chats.jsonl, line 7", and its bytes; None: they are too many


def is_chat_file(path: Path) -> bool:
    """Return whether a file's name is that of a file of conversations."""
    return path.name.endswith(SUFFIXES)


def chat_files(root: Path) -> list[Path]:
    """Return the files of conversations that are a path or lie below it, in the order of their relative paths.

    Hidden files and folders are left out.

    Raises:
        DataError: there is none.
    """
    if root.is_file():
        if not is_chat_file(root):
            raise DataError(f"{root}: not a file of conversations: expected a name that ends with {_endings()}")
        return [root]
    if not root.is_dir():
        raise DataError(f"{root}: there is no such file or folder; expected a file of conversations, or a folder of them")
    try:
        found = [path for path in _walk(root) if is_chat_file(path)]
    except OSError as error:
        raise unreadable(error, root) from None
    if not found:
        raise DataError(f"{root}: holds no conversations: none of its files' names ends with {_endings()}")
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def is_chat_folder(root: Path) -> bool:
    """Return whether files of conversations are at least half of the bytes of a folder, without its hidden files.

    A folder of text may have a configuration in ``.json``, and a folder of conversations a description. A folder that cannot
    be read counts as text: the reader of text says why.
    """
    chats_bytes = others_bytes = 0
    try:
        for path in _walk(root):
            if is_chat_file(path):
                chats_bytes += path.stat().st_size
            else:
                others_bytes += path.stat().st_size
    except OSError:
        return False
    return chats_bytes > 0 and chats_bytes >= others_bytes


def read_lines(path: Path, name: str) -> Iterator[Line]:
    """Yield the lines of a file that are not blank; ``name`` is the file's in their places.

    Raises:
        DataError: it cannot be read or unpacked, or is an array that is too long or broken.
    """
    blocks = _blocks(path)
    first = next(blocks, b"").removeprefix(BYTE_ORDER_MARK)
    blocks = _chained(first, blocks)
    if ARRAY in path.suffixes and first.lstrip()[:1] == b"[":
        return _items(path, name, blocks)
    return _lines(name, blocks)


def _endings() -> str:
    return f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"


def _walk(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def _raise(error: OSError) -> None:
    raise error


def _chained(first: bytes, blocks: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from blocks


def _lines(name: str, blocks: Iterable[bytes]) -> Iterator[Line]:
    number, parts, size = 1, list[bytes](), 0

    def line() -> Line:
        return f"{name}, line {number}", b"".join(parts) if size <= MOST_LINE_BYTES else None

    for block in blocks:
        *ended, rest = block.split(b"\n")
        for part in ended:
            size += len(part)
            parts.append(part)
            if size > MOST_LINE_BYTES or any(not part.isspace() for part in parts if part):
                yield line()
            number, size = number + 1, 0
            parts.clear()
        size += len(rest)
        if size <= MOST_LINE_BYTES:
            parts.append(rest)
        else:
            parts.clear()
    if size > MOST_LINE_BYTES or any(not part.isspace() for part in parts if part):
        yield line()


def _items(path: Path, name: str, blocks: Iterable[bytes]) -> Iterator[Line]:
    whole = bytearray()
    for block in blocks:
        whole += block
        if len(whole) > MOST_ARRAY_BYTES:
            raise DataError(
                f"{path}: one JSON array of more than {MOST_ARRAY_BYTES >> 20} MiB: write each of its items on a line of its "
                "own (.jsonl), which is read piece by piece"
            )
    try:
        items = msgspec.json.decode(whole, type=list[msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path}: a JSON array that is broken: {error}") from None
    for number, item in enumerate(items, 1):
        yield f"{name}, item {number}", bytes(item) if len(item) <= MOST_LINE_BYTES else None


def _blocks(path: Path) -> Iterator[bytes]:
    """Yield a file's bytes, unpacked, none of them empty."""
    try:
        with path.open("rb") as file:
            if path.suffix == ".zst":
                yield from _unpacked(file)
            elif path.suffix == ".gz":
                with gzip.GzipFile(fileobj=file) as packed:
                    while block := packed.read(BLOCK_BYTES):
                        yield block
            else:
                while block := file.read(BLOCK_BYTES):
                    yield block
    except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
        kind = "zstd" if path.suffix == ".zst" else "gzip"
        raise DataError(f"{path}: cannot be unpacked as {kind}: {error}: copy the file again") from None
    except OSError as error:
        raise unreadable(error, path) from None


def _unpacked(file: BinaryIO) -> Iterator[bytes]:
    """Yield what frames of zstd hold."""
    maker = zstandard.ZstdDecompressor(max_window_size=MOST_WINDOW_BYTES)
    frame = maker.decompressobj()
    begun = False
    while packed := file.read(ZSTD_BLOCK_BYTES):
        while packed:
            begun = True
            if block := frame.decompress(packed):
                yield block
            packed = b""
            if frame.eof:
                packed, frame, begun = frame.unused_data, maker.decompressobj(), False
    if begun:
        raise zstandard.ZstdError("it ends in the middle of a frame")
