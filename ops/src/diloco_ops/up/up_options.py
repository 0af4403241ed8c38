"""The options of ``diloco up``, which other commands that begin or check a run take, too."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from diloco.settings.counts import COUNT, parse_count
from diloco.settings.presets import PRESETS
from diloco_ops.default_text import default_of
from diloco_report.units import count

Learners = Annotated[int | None, typer.Option(help=f"Number of learners (M). {default_of('learners')}")]
Shards = Annotated[int | None, typer.Option(help=f"Syncers. {default_of('shards')}")]
RunFolder = Annotated[
    Path | None, typer.Option(help="Directory of the run; an unfinished one is resumed. Default: runs/ and the time.")
]
Seed = Annotated[int | None, typer.Option(help=f"Seed of the initial model and of the data's order. {default_of('seed')}")]
TokenBudget = Annotated[
    int | None,
    typer.Option(
        parser=parse_count,
        metavar=COUNT,
        help=f"Token budget, such as 600k; with --continue: number of further tokens, required. {default_of('tokens', count)}",
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        help="File or folder of text, conversations for --model, a place (s3://, gs://, az://, hf://, https://), or what "
        "your task reads; default: Python's standard library."
    ),
]
Preset = Annotated[str, typer.Option(help=f"{', '.join(PRESETS)}.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE, any setting; repeatable.")]
TaskOptions = Annotated[list[str] | None, typer.Option("--task", help="KEY=VALUE, an option of your own task; repeatable.")]
Init = Annotated[
    str | None,
    typer.Option(
        help="Weights to begin with: a safetensors file, or a folder as Hugging Face has them, or the place of either "
        "(s3://, gs://, az://, hf://, https://)."
    ),
]
Names = Annotated[Path | None, typer.Option(help="JSON file that maps the model's tensor names to those in the weights.")]
ResumeFrom = Annotated[
    str | None,
    typer.Option(
        "--resume", help="Continue from a checkpoint or its place, or from a run's directory, in a new directory (--run-dir)."
    ),
]
ResumeAt = Annotated[int | None, typer.Option(min=0, help="With --resume: start again from this version of every fragment.")]
DevicesPerLearner = Annotated[
    int | None, typer.Option(min=1, help="Devices of each learner, which form one mesh. Default: all that JAX finds.")
]
ProcessesPerLearner = Annotated[
    int | None, typer.Option(min=1, max=64, help="Processes per learner, which share its devices. Default: one.")
]
TorchProcesses = Annotated[
    int | None,
    typer.Option(min=1, max=64, help="Processes per learner that computes with PyTorch, one device each. Default: one."),
]
LeastProcesses = Annotated[
    int | None,
    typer.Option(
        min=1, help="Least number of a learner's processes that continue when others are lost. Default: all processes restart."
    ),
]
