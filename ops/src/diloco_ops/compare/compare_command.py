"""``diloco compare``: one page for several runs, and for experiments of the lab."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from diloco.errors import RunError, SettingsError
from diloco.process.logs import printable
from diloco.service.rundir import write_text
from diloco_ops.compare import reading
from diloco_report import side_by_side
from diloco_report.side_by_side import ENDS, MAX_RUNS, ComparedRun
from diloco_report.units import MISSING

RESULTS = (
    "diloco.results"  # entry points by the end of a file's name: functions that return its entries and their texts' hashes
)
SHOWN = ("loss", "tokens", "time_s", "bytes_up")  # of the end values, in a terminal's width
Read = Callable[[Path], list[tuple[ComparedRun, str | None]]]


def compare(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Directories of runs, or files NAME.results.json of diloco lab.")
    ],
    out: Annotated[Path, typer.Option(help="File of the page, which opens without a network.")] = Path("compare.html"),
) -> None:
    """Show several runs side by side: losses by tokens, time and bytes, final values, and the settings that differ."""
    entries = read_all(runs)
    try:
        write_text(out, side_by_side.render(entries).encode(errors="replace").decode())  # half a pair of UTF-16, in a name
    except OSError as error:
        raise SettingsError(f"--out {out}: cannot be written: {error.strerror}; name another file") from None
    _print(entries)
    print(f"page: {out}")


def read_all(paths: Sequence[Path]) -> list[ComparedRun]:
    """Read runs and experiments; entries have names of their own.

    Raises:
        RunError: one of them is neither, or is damaged.
        SettingsError: one is given twice, or there are too many.
    """
    twice = [path for path, times in Counter(path.resolve() for path in paths).items() if times > 1]
    if twice:
        raise SettingsError(f"{twice[0]}: given twice; give different runs")
    found = [entry for path in paths for entry in _read(reading.checked(path))]
    if len(found) > MAX_RUNS:
        raise SettingsError(f"{len(found)} runs and arms of experiments: at most {MAX_RUNS} fit on a page; give fewer")
    return _named(reading.settled(found))


def _read(path: Path) -> list[tuple[ComparedRun, str | None]]:
    if path.is_dir():
        return [(reading.read(path), reading.text_hash(path))]
    for point in entry_points(group=RESULTS):
        if path.name.endswith(f".{point.name}"):
            read: Read = point.load()
            return read(path)
    known = ", ".join(f"*.{point.name}" for point in entry_points(group=RESULTS)) or "none: diloco-lab is not installed"
    raise RunError(f"{path}: neither a run's directory nor a file of results ({known})")


def _named(entries: Sequence[ComparedRun]) -> list[ComparedRun]:
    """Return entries of which no two have one name: where they do, their sources are added, and numbers if need be."""
    times = Counter(entry.name for entry in entries)
    found = [replace(entry, name=f"{entry.name} ({entry.source})") if times[entry.name] > 1 else entry for entry in entries]
    times = Counter(entry.name for entry in found)
    return [
        replace(entry, name=f"{entry.name} {number}") if times[entry.name] > 1 else entry
        for number, entry in enumerate(found, 1)
    ]


def _print(entries: Sequence[ComparedRun]) -> None:
    known = [end for end in ENDS if end[0] in SHOWN]
    kinds, missing = side_by_side.groups(entries), False
    for kind, members in kinds.items():
        print(printable(f"losses in {kind[0]}, {kind[1]}"))
        table = Table(Column("run", overflow="fold"), "state", *(title for _, title, _ in known), box=None, pad_edge=False)
        for entry in members:
            cells = (entry.name, entry.state, *(form(entry.ends.get(key)) for key, _, form in known))
            table.add_row(*(Text(printable(cell)) for cell in cells))
            missing = missing or MISSING in cells
        Console().print(table)
    if missing:
        print(f"{MISSING} means that the value was not measured; the page says why")
    if len(kinds) > 1:
        print("losses in different units or of different texts cannot be compared: the page draws them separately")
    for note in side_by_side.notes(entries):
        print(printable(note))
