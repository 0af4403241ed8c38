"""``diloco simulate report``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from diloco.settings.loading import parse_assignments
from diloco_lab.bandwidth import ModelJob
from diloco_lab.commands.files import read, ready, write
from diloco_lab.commands.goodput_command import DAY_S, Jobs, Set, progress
from diloco_lab.published import docs_page, mixed, pictures, published
from diloco_lab.published import published_page as page
from diloco_lab.simulator import storm
from diloco_lab.simulator.goodput import PUBLISHED, conditions, points, sweep


def report(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File of the page.")],
    days: Annotated[float, typer.Option(min=0.001, max=366, help="Simulated time.")] = 3.0,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Simulations of each cell.")] = 8,
    set_: Set = None,
    svg: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder into which its pictures are also written, one file each.")
    ] = None,
    page_: Annotated[
        Path | None,
        typer.Option(
            "--page", metavar="FILE", help="Page with `<!-- simulate: NAME -->` blocks, whose tables are regenerated."
        ),
    ] = None,
    jobs: Jobs = None,
) -> None:
    """Write all tables and pictures on one page, which opens without a network."""
    ready(file)
    if page_ is not None:
        text = read(page_)
        docs_page.fill(text, docs_page.blocks([], []))  # blocks that there are not are named before anything is simulated
    chosen = conditions(parse_assignments(set_ or []), "--set")
    wanted = points(PUBLISHED, published.LEARNERS, published.CHIPS)
    processes = jobs or os.cpu_count() or 1
    with progress("simulating", False) as bar:
        rows = sweep(wanted, chosen, range(1, seeds + 1), days * DAY_S, processes, bar)
    of_mixed = mixed.sweep(range(1, seeds + 1), processes)
    contents = page.Contents(
        rows=rows,
        conditions=chosen,
        seeds=seeds,
        days=days,
        by_quorum=of_mixed,
        storm=storm.simulate(chosen, seed=1),
        job=ModelJob(),
    )
    write(file, page.render(contents))
    if page_ is not None:
        write(page_, docs_page.fill(text, docs_page.blocks(rows, of_mixed)))
    if svg is not None:
        for name, picture in contents.pictures.items():
            write(svg / f"simulator-{name}.svg", pictures.standalone(picture))
