"""Tables that are printed, and where."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

MIN_WIDTH = 110


def console() -> Console:
    """Return a console as wide as the terminal, but never so narrow that a table's cells are cut."""
    return Console(width=max(MIN_WIDTH, Console().width))


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    words: int = 0,
    title: str | None = None,
    padding: int = 2,
    no_wrap: bool = True,
) -> Table:
    """Return a table of texts: the first ``words`` columns are to the left, the others, which are numbers, to the right."""
    shown = Table(box=None, padding=(0, padding, 0, 0), pad_edge=False, title=title, title_justify="left")
    for column, heading in enumerate(head):
        shown.add_column(heading, justify="left" if column < words else "right", no_wrap=no_wrap)
    for each in rows:
        shown.add_row(*each)
    return shown
