"""``diloco track``: a run's values for TensorBoard or Weights & Biases, of a live or finished run."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from diloco.errors import BrokerError, RunError
from diloco.nats import connection
from diloco.process import observe
from diloco.process.retry import Complaint
from diloco.service import rundir
from diloco.service.rundir import RunDirectory
from diloco.wire.subjects import Subjects
from diloco_ops.reading import inspect, run_reader
from diloco_ops.track import trackers
from diloco_ops.track.trackers import TRACKERS, Tracker
from diloco_ops.track.tracking import FOLDER, Tracking
from diloco_ops.track.values import of_report


def track(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The run's directory.")],
    to: Annotated[list[str], typer.Option(help=f"{', '.join(TRACKERS)}; repeatable.")],
    out: Annotated[
        Path | None, typer.Option(help=f"Folder for the trackers' files; default: {FOLDER} in the run's directory.")
    ] = None,
    every_s: Annotated[float, typer.Option(min=0.1, help="Seconds between two values of a running run.")] = 2.0,
) -> None:
    """Send a run's losses, rates and bytes to TensorBoard or W&B until it ends; for a finished run, its losses."""
    run = rundir.load(directory)
    trackers.check(to, "--to")
    folder = out or run.path / FOLDER
    if run.finished:
        _track_finished(run, to, folder)
    else:
        if not run.nats_url:
            raise RunError(f"run {run.name!r} has not been started yet")
        asyncio.run(_follow(run, to, folder, every_s))


def _begin(run: RunDirectory, to: list[str], folder: Path) -> list[Tracker]:
    begun = trackers.begin(to, folder, run.name, run.settings.model_dump())
    print(f"run {run.name}: tracked in {folder}")
    return begun


def _track_finished(run: RunDirectory, to: list[str], folder: Path) -> None:
    try:
        report = json.loads(run.report.read_text())
        values, began_s = of_report(report), run.report.stat().st_mtime - float(report["wall_s"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(f"{run.report}: damaged ({error!r}); a finished run is tracked from this file") from None
    for tracker in _begin(run, to, folder):
        try:
            tracker.write(values, began_s)
            tracker.close()
        except OSError as error:
            raise RunError(f"{folder}: cannot be written to: {error}") from None
    print(f"{len(values)} losses")


async def _follow(run: RunDirectory, to: list[str], folder: Path, every_s: float) -> None:
    """Track a run until it is finished. A coordinator that does not answer is asked again."""
    log, subject = observe.get_logger(), Subjects(run.name).status
    complaint = Complaint(log)
    link = await run_reader.connect(replace(run, nats_bulk_url=None), "track", run_reader.ANSWER_TIMEOUT_S)
    try:
        async with Tracking(_begin(run, to, folder), log) as tracking:
            state = ""
            while state != "finished" and not run.finished:
                with suppress(BrokerError):
                    answer = await connection.ask(link.control, link.name, subject, b"", run_reader.ANSWER_TIMEOUT_S)
                    if answer is None:
                        complaint.warn("no_answer", nats_url=run.nats_url)
                    else:
                        status = inspect.answered(answer, run)
                        state = str(status.get("state"))
                        if "learners" in status:
                            tracking.note(status)
                await asyncio.sleep(every_s)
    finally:
        await link.close()
