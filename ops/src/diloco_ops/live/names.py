"""How wide a table's column of names must be."""

from __future__ import annotations

from collections.abc import Iterable

from rich.cells import cell_len

from diloco_ops.live.parts import DOT, clean
from diloco_report.colours import short_names


def name_width(names: Iterable[str]) -> int:
    """Return the width of a column of names in full, with the dot before each."""
    return max((cell_len(clean(name)) for name in names), default=0) + len(DOT)


def least_name_width(names: Iterable[str]) -> int:
    """Return the least width of a column of names in which no two look alike."""
    known = [clean(name) for name in names]
    widths = range(4, name_width(known))
    return next((width for width in widths if _told_apart(known, width - len(DOT))), name_width(known))


def _told_apart(names: list[str], width: int) -> bool:
    return len(set(short_names(names, width).values())) == len(names)
