"""Cells of a table without a value: each says why to a pointer, and a note below the table says it to everyone."""

from __future__ import annotations

from html import escape

from diloco_report import html
from diloco_report.units import MISSING


class MissingCells:
    """The cells without a value of one table, collected by :meth:`cell`."""

    def __init__(self) -> None:
        self._columns: dict[tuple[str, str], list[str]] = {}  # by name and reason

    def cell(self, text: str, name: str, column: str, why: str) -> str:
        """Return a cell as HTML; ``why``: the reason, where its text is a dash. ``name``: of the entry that it is of."""
        if text != MISSING:
            return escape(text)
        self._columns.setdefault((name, why), []).append(column)
        return f'<span title="Not measured: {escape(why)}">{MISSING}</span>'

    def note(self) -> str:
        """Draw the note; nothing, if each cell has a value."""
        names: dict[tuple[tuple[str, ...], str], list[str]] = {}
        for (name, why), columns in self._columns.items():
            names.setdefault((tuple(columns), why), []).append(name)
        each = [f"{', '.join(those)}: {', '.join(columns)} ({why})." for (columns, why), those in names.items()]
        return html.note(" ".join([f"{MISSING} means that the value was not measured.", *each])) if each else ""
