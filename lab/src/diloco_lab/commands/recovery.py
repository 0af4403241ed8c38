"""``diloco simulate recovery``."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Annotated

import typer

from diloco.settings.counts import COUNT, parse_count
from diloco_lab.bandwidth import ModelJob
from diloco_lab.commands import show
from diloco_lab.commands.files import Svg, ready, write_picture
from diloco_lab.published import pictures
from diloco_lab.simulator import recovery

_NOTE = (
    "steps a copy: in which the link carries the model's parameters once, 16 bits each.\n"
    "published: parameters and two moments of 16 bits, as the paper counts them, and versions of 16.\n"
    "default run: value and outer momentum of the log and Muon's moment of a peer, of 32 bits, and versions of 4.\n"
    "The H steps of a cycle are free; what takes longer is downtime."
)


def recover(
    parameters: Annotated[
        float, typer.Option(parser=parse_count, metavar=COUNT, help="Parameters of the model.")
    ] = ModelJob.parameters,
    step_s: Annotated[float, typer.Option(help="Seconds that a step takes.")] = ModelJob.step_s,
    copy_steps: Annotated[
        list[float] | None,
        typer.Option(
            help="A link: the steps in which it carries the parameters once; may be repeated; "
            f"default: {', '.join(f'{steps:g}' for steps in recovery.COPY_STEPS)}."
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(help=f"H, of both; default: {', '.join(f'{name} {one.steps:g}' for name, one in recovery.NAMED)}."),
    ] = None,
    svg: Svg = None,
    json_: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Show how long a learner that recovers is away, by the link that it reads over (the paper's figure 12)."""
    named = [(name, one if steps is None else replace(one, steps=steps)) for name, one in recovery.NAMED]
    found = recovery.rows(named, parameters, step_s, copy_steps or recovery.COPY_STEPS)
    if svg is not None:
        ready(svg)
        write_picture(svg, pictures.recovery(named))
    if json_:
        print(json.dumps([asdict(row) for row in found]))
        return
    console = show.console()
    console.print(f"A recovering learner, {parameters:g} parameters, {step_s:g} s a step", highlight=False)
    console.print(show.table(*recovery.table(found), no_wrap=False), highlight=False)
    console.print(_NOTE, highlight=False)
    for name, one in named:
        free = f"{one.free_rate / step_s:.3g} bit/s a parameter, a copy in {recovery.COPY_BITS / one.free_rate:.3g} steps"
        console.print(f"{name}: no downtime from {free} on", highlight=False)
