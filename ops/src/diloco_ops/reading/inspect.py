"""``diloco status`` and ``diloco logs``: looking at a run from outside."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.console import Console

from diloco.core.log.chain import Chain
from diloco.errors import BrokerError, RunError
from diloco.nats import connection
from diloco.process import logs as run_logs
from diloco.service import rundir
from diloco.wire.plain import json_object
from diloco.wire.subjects import Subjects
from diloco_ops.live.screen import render, render_whole
from diloco_ops.reading import run_reader
from diloco_ops.reading.local_runs import NewestDirectory, newest_run
from diloco_ops.report.build import load_json
from diloco_ops.up import pages
from diloco_report.units import count

ANSWER_TIMEOUT_S = 3.0  # a person waits for it
WIDEST = 400  # cells of a line, which are more than any status takes


def status(
    directory: NewestDirectory = None,
    json_: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Show what a run is doing now, or how it ended."""
    directory = directory or newest_run("diloco status")
    run = rundir.load(directory)
    if not run.finished:
        _show_unfinished(run, json_)
        return
    try:
        current = json.loads((run.path / "status.json").read_text())
        if not current["learners"]:
            raise ValueError("it has no learners")
        _show(run, current, json_)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(
            f"{run.path / 'status.json'}: missing or damaged ({error!r}); the run is finished, its report is {run.report}"
        ) from None


def _show_unfinished(run: rundir.RunDirectory, json_: bool) -> None:
    if (stopped := asyncio.run(run_reader.stopped_text(run))) is not None:
        print(json.dumps({"run": run.name} | load_json(run.path / "status.json") | {"state": "stopped"}) if json_ else stopped)
        return
    try:
        current = asyncio.run(ask(run))
    except BrokerError:
        ended = asyncio.run(run_reader.read_end(run.path))  # the coordinator of a run that is over has ended
        if ended is None and rundir.is_locked(run.path):
            raise BrokerError(
                f"run {run.name!r}: no coordinator answers: diloco up is starting the run, or ending it; ask again in a few "
                "seconds"
            ) from None
        if ended is None:
            raise
        _show_end(run, ended, json_)
    else:
        _show(run, current, json_)


def _show(run: rundir.RunDirectory, current: dict[str, Any], json_: bool) -> None:
    if json_:
        print(json.dumps(current))
    elif "learners" not in current:
        print(f"run {run.name}: waiting for its first learner")
    else:
        console, shown = Console(), {**current, "page": pages.link_of(run)}
        if console.is_terminal:
            console.print(render(shown, console.width, max(console.height - 1, 28)))
        else:  # a pipe has no size; COLUMNS may give it one
            wanted = console.width if os.environ.get("COLUMNS", "").isdecimal() else None
            Console(width=wanted or WIDEST, height=console.height).print(render_whole(shown, wanted))
        for name, tokens in (current.get("own_data") or {}).items():
            console.print(f"{name} trains on its own data, so {count(tokens)} merged tokens are not accounted for")


def _show_end(run: rundir.RunDirectory, ended: Sequence[Chain], json_: bool) -> None:
    """Show how a run ended whose report is elsewhere: by its log."""
    if json_:
        fragments = [{"version": e.version, "tokens_merged": e.tokens_merged, "tokens_lost": e.tokens_lost} for e in ended]
        print(json.dumps({"run": run.name, "state": "finished", "fragments": fragments}))
        return
    versions, merged = [each.version for each in ended], min(each.tokens_merged for each in ended)
    learners = {name for each in ended for name in each.cursors}
    print(
        f"run {run.name} is over: {len(ended)} fragments at versions {min(versions)} to {max(versions)}; at least "
        f"{count(merged)} tokens merged in each, from {len(learners)} learner(s). Its report is in the coordinator's state_dir."
    )


def logs(
    directory: NewestDirectory = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the log: also show entries written from now on.")
    ] = False,
    service: Annotated[list[str] | None, typer.Option(help="Only this service, or a pattern (learner-*); repeatable.")] = None,
    level: Annotated[str, typer.Option(help="Least level to show: debug, info, warning or error.")] = "debug",
    json_: Annotated[bool, typer.Option("--json", help="As JSON lines.")] = False,
) -> None:
    """Show the logs of all services of a run, in order of time."""
    console = Console(soft_wrap=True)
    for entry in run_logs.merge(directory or newest_run("diloco logs"), service or [], level=level, follow=follow):
        if json_:
            print(entry.json(), flush=follow)
        else:
            console.print(run_logs.render(entry))


def answered(data: bytes, run: rundir.RunDirectory) -> dict[str, Any]:
    """Decode a coordinator's answer to a request for the status; with ``units``, those of the loss.

    Raises:
        BrokerError: it is no JSON object.
    """
    current = json_object(data)
    if current is None:
        raise BrokerError(
            f"run {run.name!r}: the answer for its status was {data[:40]!r}; another program answers in place of the "
            "coordinator"
        )
    return current | {"units": run.units}


async def ask(run: rundir.RunDirectory) -> dict[str, Any]:
    """Return the status of a live run, as its coordinator has it.

    Raises:
        RunError: it has not been started yet, or is stopped.
        BrokerError: its server, or its coordinator, does not answer.
    """
    if not run.nats_url:
        raise RunError(f"run {run.name!r} has not been started yet")
    # coordinators answer in the control store, whatever has become of a region's server
    link = await run_reader.connect(replace(run, nats_bulk_url=None), "status", ANSWER_TIMEOUT_S)
    try:
        answer = await connection.ask(link.control, link.name, Subjects(run.name).status, b"", ANSWER_TIMEOUT_S)
    finally:
        await link.close()
    if answer is None:
        raise BrokerError(
            f"run {run.name!r}: no coordinator answers at {run.nats_url}; learners and syncers may be running without it"
        )
    return answered(answer, run)
