"""The options of commands that take a run's directory or the NATS server that has the run: they go with the server's URL."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunPlace = Annotated[
    str | None,
    typer.Argument(
        metavar="[DIR|URL]",
        help="The run's directory, or its NATS server (nats://HOST:PORT). Default: the newest directory in runs/.",
        show_default=False,
    ),
]
RunName = Annotated[str, typer.Option(envvar="DILOCO_RUN", help="With a URL: the run's name.")]
BulkUrl = Annotated[
    str | None,
    typer.Option("--bulk", envvar="DILOCO_NATS_BULK_URL", help="With a URL, in a run with regions: the server of one region."),
]
IdentityFile = Annotated[
    Path | None,
    typer.Option(envvar="DILOCO_IDENTITY", help="With a URL: file that `diloco keys` made, an observer's or operator's."),
]
