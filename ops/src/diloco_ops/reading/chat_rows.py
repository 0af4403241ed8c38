"""``diloco data`` of conversations: sources, lengths, and the first packed rows, in which what is learned stands out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from diloco_ops.up.run_summary import printable
from diloco_report.units import count, decimal, share

BAR = 40  # characters of the longest one
SHOWN = 400  # characters of a part of a row
LEARNED, OTHER, EDGE = "green", "dim", "bold"
MARKS = ("[[", "]]")  # around what is learned, where there are no colours


def show(found: dict[str, Any], console: Console) -> None:
    """Print what ``python -m diloco_learner.chats.describe`` says."""
    console.print(_sources(found["sources"]))
    for note in found["notes"]:
        console.print(Text(f"note: {printable(note)}"), soft_wrap=True)
    for source in found["sources"].values():
        for line in source["named"][1:]:
            console.print(Text(f"  also: {printable(line)}"), soft_wrap=True)
    console.print(f"\nconversations by their length in tokens; a row has {found['context']}")
    console.print(_lengths(found["lengths"], found["context"]))
    how = "what is learned is green" if console.color_system else f"what is learned is between {MARKS[0]} and {MARKS[1]}"
    console.print(f"\nthe first {len(found['rows'])} rows; {how}")
    for number, row in enumerate(found["rows"], 1):
        console.print(_row(row, number, found["context"], colours=console.color_system is not None), soft_wrap=True)


def _sources(sources: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("source")
    for name in sources:
        table.add_column(name, justify="right")
    figures: dict[str, tuple[str, Callable[[Any], str]]] = {
        "conversations to train on": ("conversations", count),
        "held out": ("held_out", count),
        "tokens to train on": ("tokens", count),
        "learned, in rows": ("trained", count),
        "rows": ("rows", count),
        "of a row filled": ("filled", lambda part: share(part, 1)),
        "longer than a row, and cut": ("cut", count),
        "left out, as nothing is learned": ("dropped", count),
        "tokens lost by both": ("lost", count),
        "texts divided among rows": ("divided", count),
        "lines that cannot be used": ("bad", count),
        "of a run's learned tokens": ("share", lambda part: share(part, 1)),
        "epochs": ("epochs", lambda number: decimal(number, 2)),
    }
    for label, (key, form) in figures.items():
        table.add_row(label, *(form(source[key]) for source in sources.values()))
    return table


def _lengths(lengths: Iterable[tuple[int, int]], context: int) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column()
    most = max(number for _, number in lengths)
    for upto, number in lengths:
        longer = "  longer than a row" if upto // 2 >= context and number else ""
        table.add_row(f"to {upto}", str(number), "#" * -(-BAR * number // most) + longer)
    return table


def _row(row: list[dict[str, Any]], number: int, context: int, *, colours: bool) -> Text:
    """Return a row's documents one below the other, with how many of each one's tokens are learned."""
    filled = sum(part["tokens"] for part in row)
    text = Text().append(f"\nrow {number}: {filled} of {context} tokens", EDGE)
    for document in dict.fromkeys(part["document"] for part in row):
        parts = [part for part in row if part["document"] == document]
        learned, tokens = (sum(part["tokens"] for part in parts if part["learned"] >= least) for least in (1, 0))
        text.append(f"\n  document {document}: {tokens} tokens, {learned} learned\n", EDGE)
        for part in parts:
            said = _shortened(printable(part["text"]))
            if part["learned"] and not colours:
                said = MARKS[0] + said + MARKS[1]
            text.append(said, LEARNED if part["learned"] else OTHER)
    return text


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ... ({len(text) - SHOWN} characters more)"
