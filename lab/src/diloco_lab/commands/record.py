"""``diloco lab record``: a live run's pace as a file."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from diloco_lab.commands.files import ready, write
from diloco_lab.paces import recorder


def record(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a live run.")],
    out: Annotated[Path, typer.Option(help="The recording's file.")],
    about: Annotated[str, typer.Option(help="A note: which run, and what else ran on the machine.")] = "a run",
) -> None:
    """Record a run's pace, for arms with pace = { recorded = FILE }."""
    ready(out)
    recording = asyncio.run(recorder.record(directory, about))
    write(out, recording.encode())
    table = Table(box=None)
    for column in ("learner", "of the versions in", "joined", "steps", "mean step", "mean way of an offer"):
        table.add_column(column)
    for learner in recording.learners:
        step_s, offer_s = (sum(times) / len(times) / 1000 for times in (learner.steps_ms, learner.offers_ms))
        begins_s, steps = learner.begins_ms / 1000, len(learner.steps_ms)
        row = [f"{learner.versions:.0%}", f"{begins_s:.1f} s", str(steps), f"{step_s:.3f} s", f"{offer_s:.3f} s"]
        table.add_row(learner.name, *row)
    Console(stderr=True).print(table)
