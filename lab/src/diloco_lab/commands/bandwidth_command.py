"""``diloco simulate bandwidth``."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from diloco.errors import SettingsError
from diloco.settings.counts import COUNT, parse_count
from diloco_lab.bandwidth import (
    BITS_PER_GBIT,
    CHANGEABLE,
    HEAD,
    PRECISIONS,
    STRATEGIES,
    ModelJob,
    Named,
    cells,
    curves,
    least_settings,
    needed,
    of,
    percent,
    row,
    schedules,
    table,
    utilisation,
)
from diloco_lab.commands import show
from diloco_lab.commands.files import Svg, ready, write_picture
from diloco_lab.published import comparison, pictures
from diloco_lab.published.published import UTILISATIONS

WANTED = 0.95

_NOTE = (
    "table: the schedule behind the published figures, as far as it is known.\n"
    "training: that of the product's preset. bits: the mean of both ways.\n"
    "Gbit/s: of a datacenter's link to all others, out and as much in; in brackets what is published."
)


def _default(field: str) -> str:
    """Return the training schedule's value in each strategy, for the help of an option that changes it."""
    values = {name: getattr(schedules(name)["training"], field) for name in STRATEGIES if field in CHANGEABLE[name]}
    return "; default: " + ", ".join(f"{name} {value:g}" for name, value in values.items()) + "."


def bandwidth(
    parameters: Annotated[
        float, typer.Option(parser=parse_count, metavar=COUNT, help="Parameters of the model.")
    ] = ModelJob.parameters,
    step_s: Annotated[float, typer.Option(help="Seconds that a step takes by itself.")] = ModelJob.step_s,
    datacenters: Annotated[int, typer.Option(help="Number of datacenters, each with one learner.")] = ModelJob.datacenters,
    strategy: Annotated[list[str] | None, typer.Option(help=f"{', '.join(STRATEGIES)}; may be repeated; default: all.")] = None,
    bits: Annotated[int | None, typer.Option(help=f"Bits per value, in both directions{_default('bits')}")] = None,
    steps: Annotated[int | None, typer.Option(help=f"H of the training schedule{_default('steps')}")] = None,
    fragments: Annotated[int | None, typer.Option(help=f"P of the training schedule{_default('fragments')}")] = None,
    overlap_steps: Annotated[
        float | None, typer.Option(help=f"tau of the training schedule{_default('overlap_steps')}")
    ] = None,
    utilisations: Annotated[
        list[float] | None,
        typer.Option("--utilisation", help=f"A share of 1; may be repeated; default: {', '.join(map(str, UTILISATIONS))}."),
    ] = None,
    link_gbit: Annotated[
        float | None, typer.Option(help="Compute the utilisations that a link of this many Gbit/s allows.")
    ] = None,
    wanted: Annotated[
        float | None,
        typer.Option(help=f"With --link-gbit: the utilisation that settings of Decoupled are to keep; default: {WANTED:g}."),
    ] = None,
    published: Annotated[
        bool, typer.Option("--published", help="Only show all 60 cells of the paper's Table 13 beside ours.")
    ] = False,
    svg: Svg = None,
    json_: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Show the rate that a datacenter's link needs for a compute utilisation, or the utilisation that a rate allows."""
    job = ModelJob(parameters, step_s, datacenters)
    if published:
        if job != ModelJob() or any((strategy, bits, steps, fragments, overlap_steps, utilisations, link_gbit, wanted, svg)):
            raise SettingsError("--published shows the paper's cells unchanged: leave out all other options except --json")
        _published(json_)
        return
    given = {"bits": bits, "steps": steps, "fragments": fragments, "overlap_steps": overlap_steps}
    changes = {name: value for name, value in given.items() if value is not None}
    named: list[Named] = []
    for each in strategy or STRATEGIES:
        # of all strategies, those that have no such setting stay as they are
        fit = changes if strategy else {name: value for name, value in changes.items() if name in CHANGEABLE[each]}
        named += [(each, name, schedule) for name, schedule in schedules(each, fit).items()]
    if svg is not None:
        ready(svg)
        write_picture(svg, pictures.utilisation(curves(job, named)))
    if link_gbit is None:
        if wanted is not None:
            raise SettingsError(f"--wanted {wanted:g}: only with --link-gbit; otherwise give --utilisation")
        _needed(job, named, utilisations or UTILISATIONS, json_)
    else:
        if not (math.isfinite(link_gbit) and link_gbit > 0):
            raise SettingsError(f"--link-gbit {link_gbit:g}: expected a number above 0")
        if utilisations:
            raise SettingsError(
                f"--utilisation {utilisations[0]:g}: not with --link-gbit, which computes the utilisation; set --wanted"
            )
        _reached(job, named, link_gbit, WANTED if wanted is None else wanted, PRECISIONS if bits is None else (bits,), json_)


def _needed(job: ModelJob, named: Sequence[Named], utilisations: Sequence[float], json_: bool) -> None:
    found = needed(job, named, utilisations)
    if json_:
        print(json.dumps([asdict(each) for rows in found for each in rows]))
        return
    errors = [each.sentence() for each in comparison.of_links(row for each in found for row in each)]
    _show(f"Gbit/s for a compute utilisation, {of(job)}", _table(*table(named, found)), _NOTE, *errors)


def _published(json_: bool) -> None:
    """Show all cells of Table 13 beside ours."""
    found = comparison.links()
    rows = comparison.link_rows(found)
    if json_:
        print(json.dumps([asdict(each) for each in rows]))
        return
    for job, named, rates in found:
        _show(f"Gbit/s for a compute utilisation, {of(job)}", _table(*table(named, rates)), "")
    _show(_NOTE, *(each.sentence() for each in comparison.of_links(rows)))


def _reached(job: ModelJob, named: Sequence[Named], gbit: float, wanted: float, bits: Sequence[int], json_: bool) -> None:
    rate_bits_per_s = gbit * BITS_PER_GBIT
    found = [row(job, *one, utilisation(job, one[2], rate_bits_per_s), rate_bits_per_s) for one in named]
    training = [schedule for strategy, name, schedule in named if (strategy, name) == ("decoupled", "training")]
    kept = [least for schedule in training for least in least_settings(job, schedule, rate_bits_per_s, wanted, bits)]
    reached = [utilisation(job, schedule, rate_bits_per_s) for schedule in kept]
    if json_:
        fields = CHANGEABLE["decoupled"]
        settings = [
            {name: getattr(one, name) for name in fields} | {"utilisation": share}
            for one, share in zip(kept, reached, strict=True)
        ]
        print(json.dumps({"reached": [asdict(each) for each in found], "wanted": wanted, "settings": settings}))
        return
    shown = [[*cells(one), percent(each.utilisation)] for one, each in zip(named, found, strict=True)]
    _show(f"Compute utilisation on {gbit:g} Gbit/s, {of(job)}", _table([*HEAD, "utilisation"], shown), _NOTE)
    if not training:
        return
    settled = [
        [*cells(("decoupled", "training", schedule)), percent(share)] for schedule, share in zip(kept, reached, strict=True)
    ]
    keeps = "by precision the smallest H, the least disturbing first" if kept else "no H is long enough"
    tables = [_table([*HEAD, "utilisation"], settled)] if kept else []
    _show(f"\nDecoupled, at least {percent(wanted)}: {keeps}", *tables)


def _show(*parts: str | Table) -> None:
    console = show.console()
    for part in parts:
        console.print(part, highlight=False)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    return show.table(headings, rows, words=2, padding=1)  # strategy and schedule
