"""``diloco simulate goodput``."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from diloco.errors import SettingsError
from diloco.settings.loading import parse_assignments
from diloco_lab.commands import show
from diloco_lab.commands.files import Svg, open_tape, ready, write_picture
from diloco_lab.published import comparison, fit, mixed, pictures, published
from diloco_lab.simulator.goodput import (
    PUBLISHED,
    QUANTITIES,
    STRATEGIES,
    FleetConditions,
    GoodputCell,
    GoodputRow,
    conditions,
    constants_text,
    notes,
    points,
    strategy_of,
    sweep,
    table,
)
from diloco_report.units import count

DAY_S = 86400.0  # a day
MAX_DAYS = 366.0
MAX_SEEDS = 1000

_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([km]?)", re.IGNORECASE)

Jobs = Annotated[int | None, typer.Option(min=1, help="Processes; default: one for each core.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A constant (docs/simulator.md), such as restart_s=60.")
]


_ALL_LEARNERS, _ALL_CHIPS = ",".join(map(str, published.LEARNERS)), ",".join(map(count, published.CHIPS))


def goodput(
    strategy: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(STRATEGIES)}; may be repeated; default: {', '.join(PUBLISHED)}.")
    ] = None,
    learners: Annotated[str, typer.Option(help="M, for strategies with learners.")] = _ALL_LEARNERS,
    chips: Annotated[str, typer.Option(help="Chips of all learners together.")] = _ALL_CHIPS,
    days: Annotated[float, typer.Option(help="Simulated time.")] = 3.0,
    seeds: Annotated[int, typer.Option(help="Simulations of each cell.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 1,
    set_: Set = None,
    tape: Annotated[Path | None, typer.Option(help="Failures from a tape instead of random ones.")] = None,
    fitted: Annotated[bool, typer.Option("--fit", help="Fit the constants to the data-parallel rows first.")] = False,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="Show how much each cell depends on each constant.")
    ] = False,
    jobs: Jobs = None,
    svg: Svg = None,
    json_: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Simulate goodput and uptime by strategy, learners and chips, beside what is published."""
    if not 0 < days <= MAX_DAYS:
        raise SettingsError(f"--days {days:g}: expected a number above 0, at most {MAX_DAYS:g}")
    if not 1 <= seeds <= MAX_SEEDS:
        raise SettingsError(f"--seeds {seeds}: expected 1 to {MAX_SEEDS}")
    if svg is not None:
        ready(svg)
    all_seeds = range(seed, seed + seeds)
    chosen = conditions(parse_assignments(set_ or []), "--set")
    if fitted:
        chosen = replace(chosen, constants=_fit(chosen, json_))
    wanted = points(strategy or PUBLISHED, _numbers(learners, "--learners"), _numbers(chips, "--chips"))
    duration_s = days * DAY_S
    if tape is not None:
        wanted, duration_s = _taped(tape, wanted, chosen)
        all_seeds = range(seed, seed + 1)  # nothing is left to chance
    processes = jobs or os.cpu_count() or 1
    with progress("simulating", json_) as bar:
        rows = sweep(wanted, chosen, all_seeds, duration_s, processes, bar)
    if svg is not None:
        write_picture(svg, pictures.goodput(rows))
    if json_:
        print(json.dumps([asdict(each) for each in rows]))
    else:
        _show(rows, chosen, len(all_seeds), duration_s / DAY_S)
        if strategy is None and tape is None and (learners, chips) == (_ALL_LEARNERS, _ALL_CHIPS):
            _show_mixed(mixed.sweep(all_seeds, processes))
    if sensitivity and not json_:
        _show_sensitivity(wanted, chosen, all_seeds, duration_s, processes)


def _numbers(text: str, option: str) -> list[int]:
    """Read ``150k,1.2m`` as whole numbers."""
    found = []
    for part in text.split(","):
        match = _NUMBER.fullmatch(part.strip())
        value = float(match[1]) * {"": 1, "k": 1e3, "m": 1e6}[match[2].lower()] if match else 0.0
        if value < 1 or value != int(value) or value > 1e9:
            raise SettingsError(
                f"{option} {text}: {part.strip()!r}, expected whole numbers from 1 on, such as 8 or 150k or 1.2m"
            )
        found.append(int(value))
    return found


def _taped(path: Path, wanted: Sequence[GoodputCell], chosen: FleetConditions) -> tuple[list[GoodputCell], float]:
    """Return the points with a tape's failures, and how long the tape is."""
    found, duration_s = [], 0.0
    for point in wanted:
        played = open_tape(path, chosen.of(strategy_of(point.strategy), point.chips, point.learners).split(0))
        found.append(replace(point, faults=played.faults, cuts=played.cuts))
        duration_s = played.duration_s
    return found, duration_s


def _fit(chosen: FleetConditions, quiet: bool) -> published.Constants:
    if chosen.cluster:
        raise SettingsError(f"--set {next(iter(chosen.cluster))}: not with --fit, which fits to the published cluster")
    with progress("fitting", quiet) as bar:
        found = fit.fit(chosen.constants, fit.SEEDS, fit.DURATION_S, lambda trial, _, __: bar(trial, fit.MAX_TRIALS))
    if not quiet:
        typer.echo(f"fitted to the data-parallel rows: {constants_text(found)}")
    return found


@contextmanager
def progress(what: str, quiet: bool) -> Iterator:  # type: ignore[type-arg]
    """Show a bar on the terminal; yield a function for how many of how many are done."""
    with Progress(console=Console(stderr=True), transient=True, disable=quiet) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, all_: bars.update(task, completed=done, total=all_)


def _show(rows: Sequence[GoodputRow], chosen: FleetConditions, seeds: int, days: float) -> None:
    out = show.console()
    for quantity in QUANTITIES:
        out.print(show.table(*table(rows, quantity), words=1, title=f"{quantity}, %"), highlight=False)
        out.print()
    for note in (*notes(rows, chosen, seeds, days), *(each.sentence() for each in comparison.of_goodput(rows))):
        out.print(note, highlight=False)


def _show_mixed(found: Sequence[mixed.Found]) -> None:
    out = show.console()
    out.print()
    out.print(show.table(*mixed.table(found), words=1, title=mixed.TITLE), highlight=False)


def _show_sensitivity(
    wanted: Sequence[GoodputCell], chosen: FleetConditions, seeds: Sequence[int], duration_s: float, jobs: int
) -> None:
    names = [field.name for field in fields(published.Constants)]
    changed = {
        (name, sign): replace(chosen, constants=fit.changed(chosen.constants, name, sign)) for name in names for sign in (1, -1)
    }
    rows = {}
    for key, each in changed.items():
        with progress(f"{key[0]} {key[1]:+d}", False) as bar:
            rows[key] = sweep(wanted, each, seeds, duration_s, jobs, bar)
    cells = []
    for index, point in enumerate(wanted):
        changes = [100 * (rows[name, 1][index].goodput - rows[name, -1][index].goodput) / 2 for name in names]
        cells.append([point.strategy, str(point.learners), count(point.chips), *(f"{change:+.2f}" for change in changes)])
    title = f"goodput, change in points if a constant is {100 * fit.SENSITIVITY_STEP:.0f} % larger"
    shown = show.table(["strategy", "M", "chips", *names], cells, words=1, title=title)
    show.console().print(shown, highlight=False)
