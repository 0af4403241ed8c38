"""Paths of what a ``mix.toml`` names: relative to it, or brought here from a place in object storage."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from diloco.settings import folders
from diloco.settings.places import is_remote, parse_place
from diloco.storage.fetching import Selection, fetched
from diloco_learner.mix import parquet_columns
from diloco_learner.mix.file import SourceTable


def find_path(data: str, key: str, given: str, cache_dir: Path, table: SourceTable | None = None) -> Path:
    """Return the path of what a ``key`` of the file ``data`` names; what lies at a place is kept in ``cache_dir``.

    ``table``: of a source, of which only some files may be needed, or parts of files.

    Raises:
        SettingsError: the path cannot be.
        ObjectStoreError: the place cannot be read.
    """
    if not is_remote(given):
        path = folders.expanded(Path(given), f"{data}: {key}")
        if path.is_absolute() or not is_remote(data):
            return (Path(data).parent / path).resolve()
        given = str(parse_place(data).parent.relative(given))
    if table is None or table.kind != "parquet":
        return fetched(given, cache_dir)
    column = Selection(f"column {table.column}", partial(parquet_columns.ranges, column=table.column))
    return fetched(given, cache_dir, only=("*.parquet",), select=column if table.digest == "column" else None)
