"""The bytes of a Parquet file that hold one column: what a source with ``digest = "column"`` reads, and what its digest covers.

They are its metadata, at its end, and the chunk of the column in each row group. A copy of a file in which all other bytes are
holes gives the same texts and the same digest. So of a file at a place only these bytes need be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from blake3 import blake3

from diloco.errors import DataError

MAGIC_BYTES = 4  # at the beginning, and at the end behind the length of the metadata
LENGTH_BYTES = 4
READ_BYTES = 1 << 20


def ranges(file: BinaryIO, column: str) -> list[tuple[int, int]]:
    """Return where in a file the bytes are, as beginnings and ends in ascending order.

    Raises:
        DataError: it is no Parquet file, or its metadata name bytes that it does not have.
    """
    import pyarrow
    from pyarrow import parquet

    size = file.seek(0, 2)
    try:
        metadata = parquet.read_metadata(pyarrow.PythonFile(file, "r"))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"cannot be read as Parquet: {error}") from None
    end = MAGIC_BYTES + LENGTH_BYTES + metadata.serialized_size
    found = [(0, MAGIC_BYTES), (size - end, size)]
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        for number in range(row_group.num_columns):
            chunk = row_group.column(number)
            if chunk.path_in_schema == column:
                found.append(_chunk(chunk))
    if any(not 0 <= start <= stop <= size for start, stop in found):
        raise DataError(f"is damaged: its metadata name bytes that it does not have, of {size}")
    return sorted(found)


def _chunk(chunk: Any) -> tuple[int, int]:
    start = chunk.data_page_offset
    if chunk.has_dictionary_page and chunk.dictionary_page_offset:
        start = min(start, chunk.dictionary_page_offset)
    return start, start + chunk.total_compressed_size


def content(paths: Sequence[Path], root: Path | None, column: str) -> str:
    """Return a digest (hex) of the column's bytes in files, and of the files' names below ``root``.

    Raises:
        DataError: one is no Parquet file.
        OSError: one cannot be read.
    """
    whole = blake3()
    for path in paths:
        own = blake3()
        with path.open("rb") as file:
            try:
                found = ranges(file, column)
            except DataError as error:
                raise DataError(f"{path}: {error}") from None
            for start, stop in found:
                file.seek(start)
                while start < stop and (block := file.read(min(READ_BYTES, stop - start))):
                    own.update(block)
                    start += len(block)
        name = path.name if root is None else path.relative_to(root).as_posix()
        whole.update(f"{name} {own.hexdigest()}\n".encode())
    return whole.hexdigest(16)
