"""``diloco serve``: the services of a run whose learners are training loops that join by themselves."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from diloco.errors import SettingsError
from diloco.service.rundir import RunDirectory
from diloco.settings.presets import run_settings
from diloco.settings.run import MAX_NAME, NAME_PATTERN
from diloco.settings.service import host_and_port
from diloco_ops.finetune import model_options
from diloco_ops.finetune.model_options import Lora, Model, ModelRequest, Qlora
from diloco_ops.prerequisites import check_installed
from diloco_ops.up import pages
from diloco_ops.up.environment import metrics_addresses
from diloco_ops.up.launch import Launcher, LaunchRequest, service_count
from diloco_ops.up.up import DEFAULT_PRESET, directory_of, locked_run, overrides_of, tell_end
from diloco_ops.up.up_options import Learners, Preset, RunFolder, Seed, Set, Shards, TaskOptions, TokenBudget


def serve(
    run: Annotated[str | None, typer.Option(help="Name of the run, and of its directory in runs/.")] = None,
    learners: Learners = None,
    tokens: TokenBudget = None,
    shards: Shards = None,
    run_dir: RunFolder = None,
    seed: Seed = None,
    preset: Preset = DEFAULT_PRESET,
    set_: Set = None,
    task: TaskOptions = None,
    model: Model = None,
    lora: Lora = None,
    qlora: Qlora = None,
    listen: Annotated[str | None, typer.Option(help="HOST:PORT of the server. Default: a free port, for this machine.")] = None,
    standbys: Annotated[int, typer.Option(min=0, help="Number of standby syncers, beyond the shards.")] = 0,
    coordinators: Annotated[int, typer.Option(min=1, help="Number of coordinators; one leads and the others stand by.")] = 1,
    plain: Annotated[bool, typer.Option("--plain", help="Plain lines instead of the live view.")] = False,
    page: Annotated[str | None, typer.Option(help=pages.HELP)] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open the run's page in a browser.")] = False,
) -> int:
    """Start the services of a run for your own training loops, or for learners of a model, and print how they join."""
    given = {"learners": learners, "shards": shards, "tokens": tokens, "seed": seed}
    chosen = model_options.choose(ModelRequest(model, lora, qlora))
    overrides = overrides_of(set_, task, chosen) | {key: value for key, value in given.items() if value is not None}
    settings, address = run_settings(preset, overrides, "diloco serve"), None if listen is None else _host_and_port(listen)
    if settings.regions.names:
        raise SettingsError("diloco serve: starts one server, and the run has regions: deploy the services (docs/deploy.md)")
    if settings.offers_gradients:
        raise SettingsError(f"diloco serve: loops take their own steps, and learners of the preset {preset} offer gradients")
    if run is not None and re.match(NAME_PATTERN, run) is None:
        raise SettingsError(f"--run {run}: expected lower-case letters, digits, - and _, at most {MAX_NAME} characters")
    path = run_dir or Path("runs") / (run or "loops")
    check_installed([])
    directory = replace(directory_of(path, settings, bool(overrides) or preset != DEFAULT_PRESET), learners=0)
    directory = directory if run is None else _named(directory, run)
    metrics = metrics_addresses(service_count(directory, standbys, coordinators))
    with locked_run(directory, None, None, None, quiet=False) as (directory, resumed):
        asked = LaunchRequest(
            standbys=standbys,
            coordinators=coordinators,
            embedded=True,
            quiet=False,
            plain=plain,
            pages=pages.addresses(page or pages.ANYWHERE, coordinators),
            open=open_,
            listen=address,
            metrics=metrics,
        )
        report = asyncio.run((launcher := Launcher(directory, {}, asked)).run(resumed))
    return tell_end(report, directory, False, launcher.services.failures.values())


def _named(directory: RunDirectory, run: str) -> RunDirectory:
    """Return the directory of a run of that name, which a run that is there already must have."""
    if (directory.path / "run.json").exists() and directory.name != run:
        raise SettingsError(
            f"--run {run}: {directory.path} has the run {directory.name}; go on with it without --run, "
            "or choose another --run-dir"
        )
    return replace(directory, name=run)


def _host_and_port(listen: str) -> tuple[str, int]:
    try:
        return host_and_port(listen, "listen")
    except ValueError:
        raise SettingsError(
            f"--listen {listen}: expected HOST:PORT, such as 0.0.0.0:4222 for all of this machine's addresses"
        ) from None
