"""``diloco simulate trace``: a record of failures becomes rates, a distribution of repairs, and a failure tape."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from diloco.errors import DataError, SettingsError
from diloco_lab.commands.files import write
from diloco_lab.traces.trace import (
    CLOCKS,
    MAX_LINE_CHARACTERS,
    Columns,
    Notation,
    Trace,
    cut,
    from_tape,
    own_names,
    read,
    slices,
)
from diloco_lab.traces.trace_fit import Fitted, fit
from diloco_ops import failures

_SPANS_S = (("days", 86400.0), ("h", 3600.0), ("min", 60.0))  # units in which times are shown


def _column(what: str) -> Any:
    return typer.Option(metavar="COLUMN", help=f"CSV column: {what}. Default: recognised by its name.")


def _edge(what: str) -> Any:
    return typer.Option(metavar="TIME", help=f"When the observation {what}, in the format of the times in the CSV.")


def trace(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="A CSV of interruptions or of states, or a failure tape.")],
    unit: Annotated[str | None, _column("what was interrupted")] = None,
    start: Annotated[str | None, _column("when it was")] = None,
    end: Annotated[str | None, _column("when it was back")] = None,
    duration: Annotated[str | None, _column("how long it was away")] = None,
    time: Annotated[str | None, _column("when its state changed")] = None,
    state: Annotated[str | None, _column("to up or down")] = None,
    where: Annotated[list[str] | None, typer.Option(metavar="COLUMN=VALUE", help="Only matching rows; repeatable.")] = None,
    time_format: Annotated[str | None, typer.Option(help="Like '%m/%d/%Y %H:%M' (strptime); default: ISO 8601.")] = None,
    clock: Annotated[str, typer.Option(help=f"Unit of times given as plain numbers: {', '.join(CLOCKS)}.")] = "seconds",
    open_: Annotated[str | None, typer.Option("--open", help="Text for an end not observed; '' is an empty field.")] = None,
    since: Annotated[str | None, _edge("began")] = None,
    until: Annotated[str | None, _edge("ended")] = None,
    units: Annotated[int | None, typer.Option(min=1, help="Units observed, including those that never failed.")] = None,
    chips_per_unit: Annotated[
        int | None, typer.Option(min=1, help="Chips per unit, for the interruptions of one chip.")
    ] = None,
    tape: Annotated[Path | None, typer.Option(help="Write the trace to this file as a failure tape.")] = None,
    learners: Annotated[int | None, typer.Option(min=1, help="In the tape, units are slices of so many learners.")] = None,
    slices_per_learner: Annotated[int | None, typer.Option(min=1, help="Slices of each learner on the tape.")] = None,
    from_: Annotated[float | None, typer.Option("--from", metavar="SECONDS", help="Start of the tape in the trace.")] = None,
    for_: Annotated[float | None, typer.Option("--for", metavar="SECONDS", help="Duration of the tape.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Fit rates and repairs to a record of failures, with 95 % intervals, and make a failure tape of it."""
    if tape is None and (learners, slices_per_learner, from_, for_) != (None, None, None, None):
        raise SettingsError(
            "--learners, --slices-per-learner, --from and --for describe the tape to write; give --tape as well"
        )
    columns = Columns(unit=unit, start=start, end=end, duration=duration, time=time, state=state)
    seen = _read(
        source,
        Notation(
            columns=columns, where=where or (), time_format=time_format, clock=clock, open=open_, since=since, until=until
        ),
    )
    notes = list(seen.notes)
    if tape is not None:
        targets = _targets(seen, learners, slices_per_learner)
        written = cut(seen, targets, from_ or 0.0, for_)
        write(tape, failures.encode(written))
        notes.append(f"{tape}: {len(written.failures)} failures in {_span(written.duration_s)}; {_mapping(targets)}")
    fitted: Fitted | None = None
    try:
        fitted = fit(seen, units, chips_per_unit)
        notes += fitted.notes
    except DataError as error:
        if tape is None:
            raise
        notes.append(f"no fit: {error}")
    if json_:
        values = {} if fitted is None else {name: value for name, value in asdict(fitted).items() if name != "notes"}
        print(json.dumps({"source": str(source), "duration_s": seen.duration_s, "fitted": values or None, "notes": notes}))
        return
    console = Console()
    if fitted is not None:
        console.print(table(fitted))
    for note in notes:
        console.print(f"* {note}", style="dim", markup=False, highlight=False)


def _read(path: Path, notation: Notation) -> Trace:
    try:
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            is_tape = file.read(1) == "{"
            file.seek(0)
            longest = failures.MAX_LINE_BYTES if is_tape else MAX_LINE_CHARACTERS
            lines = iter(lambda: file.readline(longest + 1), "")
            if not is_tape:
                return read(lines, str(path), notation)
            if notation != Notation():
                raise SettingsError(f"{path} is a failure tape; options for columns, times and rows are for CSV")
            return from_tape(lines, str(path))
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None


def _targets(seen: Trace, learners: int | None, slices_per_learner: int | None) -> dict[str, str]:
    if learners is None and slices_per_learner is None:
        return own_names(seen)
    if learners is None or slices_per_learner is None:
        raise SettingsError("--learners and --slices-per-learner go together")
    return slices(seen, learners, slices_per_learner)


def _mapping(targets: dict[str, str]) -> str:
    if all(unit == target for unit, target in targets.items()):
        return "units under their own names"
    first, last = next(iter(targets)), next(reversed(targets))
    return f"units in order of appearance, {first} as {targets[first]} to {last} as {targets[last]}"


def table(fitted: Fitted) -> Table:
    """Return a fit as a table."""
    shown = Table(
        box=None,
        padding=(0, 2, 0, 0),
        pad_edge=False,
        title=f"{fitted.interruptions} interruptions of {fitted.units} units in {_span(fitted.up_s)} of their time; "
        f"{fitted.repairs} repairs, and {fitted.open_repairs} unfinished ones",
        caption=f"The fit of repairs is {fitted.repair_distance:.3f} from the data at most (Kolmogorov-Smirnov).",
    )
    shown.add_column("")
    for heading in ("most likely", "95 % from", "to"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for name, estimate, said in (
        ("between interruptions of a unit", fitted.mean_between_s, _span),
        ("between interruptions of a chip", fitted.mean_between_chip_s, _span),
        ("their Weibull shape (1: a constant rate)", fitted.between_shape, _plain),
        ("repair, mean", fitted.mean_repair_s, _span),
        ("repair, exponent", fitted.repair_exponent, _plain),
        ("repair, shape", fitted.repair_shape, _plain),
        ("repair, scale", fitted.repair_scale_s, _span),
    ):
        if estimate is not None:
            shown.add_row(name, *(said(value) for value in (estimate.value, estimate.low, estimate.high)))
    return shown


def _plain(value: float) -> str:
    return f"{value:.3g}"


def _span(value_s: float) -> str:
    for name, size_s in _SPANS_S:
        if value_s >= 2 * size_s:
            return f"{value_s / size_s:.3g} {name}"
    return f"{value_s:.3g} s"
