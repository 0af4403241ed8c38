"""Names of members in tables: short enough for their column, and still told apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.cells import cell_len, set_cell_size

from diloco_ops.live.parts import clean


def name_width(names: Iterable[str]) -> int:
    """Return the width of a column of names in full, with the dot before each."""
    return max((cell_len(clean(name)) for name in names), default=0) + 2


def least_name_width(names: Iterable[str]) -> int:
    """Return the least width of a column of names in which no two look alike."""
    known = list(names)
    return next((width for width in range(4, name_width(known)) if _distinct(short_names(known, width - 2))), name_width(known))


def _distinct(shown: Mapping[str, str]) -> bool:
    return len(set(shown.values())) == len(shown)


def short_names(names: Sequence[str], width: int) -> dict[str, str]:
    """Return each name as it fits into ``width`` cells.

    Names stand in full if all of them fit. Else they lose what all begin with, and those that are still too long their middle.
    """
    shown = {name: clean(name) for name in names}
    if all(cell_len(name) <= width for name in shown.values()):
        return shown
    begin = _common(list(shown.values())).rpartition("-")[0]  # up to a whole part of the names
    if begin and len(shown) > 1:
        shown = {name: f"…{text[len(begin) + 1 :]}" for name, text in shown.items()}
    return {name: _cut_in_the_middle(text, width) for name, text in shown.items()}


def _cut_in_the_middle(text: str, width: int) -> str:
    if cell_len(text) <= width or width < 3:
        return text
    end = text[-(width // 2) :]
    return set_cell_size(text, max(0, width - 1 - cell_len(end))) + "…" + end


def _common(texts: Sequence[str]) -> str:
    """Return what all texts begin with."""
    first, last = min(texts), max(texts)
    return first[: next((at for at, char in enumerate(first) if last[at : at + 1] != char), len(first))]
