"""``diloco simulate plan``."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from diloco_lab.commands import show
from diloco_lab.planning import plan as planning
from diloco_lab.planning.candidates import PlanCandidate, SeedMean
from diloco_lab.planning.plan import Plan
from diloco_lab.planning.sites import Default, Sites, read
from diloco_report.units import count, share, size

SHOWN = 8  # candidates


def plan(
    sites: Annotated[Path, typer.Argument(help="A TOML file of your sites, such as examples/sites.toml.")],
    cheapest: Annotated[bool, typer.Option("--cheapest", help="The cheapest plan instead of the fastest.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Plan a run on your own sites: learners, settings, time, cost, and the bottleneck."""
    given = read(sites)
    found = planning.plan(given, cheapest=cheapest)
    if json_:
        print(json.dumps(_finite(asdict(found))))
        return
    _show(given, found, "cheapest" if cheapest else "fastest")


def _finite(value: Any) -> Any:
    """JSON has no infinity: null."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _show(given: Sites, found: Plan, which: str) -> None:
    chosen, model = found.chosen, given.model
    out = show.console()

    def put(title: str, *parts: str | Table) -> None:
        out.print(f"\n[bold]{title}[/bold]", highlight=False)
        for part in parts:
            out.print(escape(part) if isinstance(part, str) else part, highlight=False)

    what = f"{count(model.parameters)} parameters, {count(model.tokens)} tokens, {count(model.tokens_per_step)} a step"
    put(
        f"{what}: the {which} plan",
        f"time        {_between(chosen.days)} days",
        f"cost        {_between(chosen.cost)}",
        f"goodput     {_between(chosen.goodput, 100)} %",
        f"uptime      {_between(found.uptime, 100)} %",
        f"utilisation {100 * chosen.utilisation:.1f} %, as far as links go",
        f"bottleneck  {found.bottleneck.kind} ({found.bottleneck.name}): {found.bottleneck.why}",
    )
    put("settings, beside the preset decoupled", _settings(found))
    put("candidates", _candidates(found.candidates, chosen))
    put("data-parallel, one elastic job", _data_parallel(found))
    if found.links:
        put("links", _links(found))
    put("regions", _regions(found))
    put("learners, each", _islands(found))
    put("defaults used, because the file does not set these", _defaults(found.defaults))
    put("notes", *(f"* {note}" for note in found.notes))
    put("the coordinator's file", planning.toml(found.settings).rstrip())


def _table(left: Sequence[str], right: Sequence[str] = ()) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading in left:
        table.add_column(heading)
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _settings(found: Plan) -> Table:
    table = _table(("setting", "value", "why"))
    for one in found.settings:
        table.add_row(one.name, escape(json.dumps(one.value)), escape(one.why))
    return table


def _candidates(candidates: Sequence[PlanCandidate], chosen: PlanCandidate) -> Table:
    table = _table(("learners",), ("M", "H", "tau", "P", "bits", "merged", "goodput", "days", "cost"))
    for one in [each for i, each in enumerate(candidates) if i < SHOWN or each == chosen]:
        choice = one.choice
        cells = (
            _learners(one) + (" (this plan)" if one == chosen else ""),
            str(one.total),
            str(choice.steps),
            f"{choice.overlap_steps:g}",
            str(choice.fragments),
            str(choice.bits),
            "yes" if choice.merge else "no",
            share(one.goodput.mean, 1),
            _number(one.days.mean),
            _number(one.cost.mean),
        )
        table.add_row(*cells)
    return table


def _learners(one: PlanCandidate) -> str:
    return ", ".join(f"{name} {learners}" for name, learners in one.learners.items())


def _data_parallel(found: Plan) -> Table:
    table = _table(("sites",), ("utilisation", "goodput", "uptime", "days", "cost"))
    for one in found.data_parallel:
        shares = (one.utilisation, one.goodput.mean, one.uptime.mean)
        table.add_row(
            ", ".join(one.sites), *(share(each, 1) for each in shares), _number(one.days.mean), _number(one.cost.mean)
        )
    return table


def _links(found: Plan) -> Table:
    table = _table(("from", "to"), ("a day", "in all", "full"))
    for one in found.links:
        total = size(one.bytes_per_day * found.chosen.days.mean)
        table.add_row(one.source, one.target, size(one.bytes_per_day), total, share(one.load))
    return table


def _regions(found: Plan) -> Table:
    headings = (
        "learners",
        "s a step",
        "syncers",
        "their cores",
        "memory each",
        "server's cores",
        "its storage",
    )
    table = _table(("region",), headings)
    for one in found.regions:
        cells = (
            one.name,
            str(found.chosen.learners[one.name]),
            f"{found.chosen.step_s[one.name]:.3g}",
            str(one.syncers),
            f"{one.syncer_cores:.2g}",
            size(one.syncer_memory_bytes),
            f"{one.server_cores:.2g}",
            size(one.storage_bytes),
        )
        table.add_row(*cells)
    return table


def _islands(found: Plan) -> Table:
    headings = (
        "chips",
        "hosts",
        "mesh.data, mesh.fsdp",
        "state of a chip",
        "a host: in turn, all rounds at once",
        "a cycle: to NATS, back",
        "to other hosts",
    )
    table = _table(("region",), headings)
    for one in found.islands:
        cells = (
            one.site,
            str(one.chips),
            str(one.hosts),
            f"{one.data}, {one.fsdp}",
            f"{size(one.state_bytes)}, {share(one.state_share)}",
            f"{size(one.host_bytes)}, {size(one.host_most_bytes)}",
            size(one.sent_bytes),
            size(one.rows_bytes) if one.rows_bytes else "-",
        )
        table.add_row(*cells)
    return table


def _defaults(defaults: Sequence[Default]) -> Table:
    """Return the defaults as a table; those that several tables have alike are in one row."""
    table = _table(("of", "default", "what it is"))
    alike: dict[tuple[str, float, str], list[str]] = {}
    for one in defaults:
        where, _, key = one.name.rpartition(".")
        alike.setdefault((key, one.value, one.why), []).append(where)
    for (key, value, why), tables in alike.items():
        table.add_row(escape(", ".join(tables)), f"{key} = {value:g}", escape(why))
    return table


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _between(estimate: SeedMean, times: float = 1.0) -> str:
    mean, low, high = (times * value for value in (estimate.mean, estimate.low, estimate.high))
    return f"{mean:,.2f} ({low:,.2f} to {high:,.2f})"
