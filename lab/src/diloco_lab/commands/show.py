"""Where tables are printed."""

from __future__ import annotations

from rich.console import Console

MIN_WIDTH = 110


def console() -> Console:
    """Return a console as wide as the terminal, but never so narrow that a table's cells are cut."""
    return Console(width=max(MIN_WIDTH, Console().width))
