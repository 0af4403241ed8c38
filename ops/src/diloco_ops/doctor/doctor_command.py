"""``diloco doctor``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console
from rich.text import Text

from diloco.errors import SettingsError
from diloco.process import observe
from diloco.process.logs import printable
from diloco.settings.loading import load_service, names_service
from diloco_ops.doctor import this_machine
from diloco_ops.doctor.check import Check, Role, Verdict
from diloco_ops.doctor.examination import DoctorSettings, ServiceExamination

EXIT_FAILED = 1
_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim"}
_VERDICT_WIDTH, _NAME_WIDTH = 8, 16


def doctor(
    config: Annotated[
        Path | None, typer.Option(help="The service's TOML file; DILOCO_* variables in the environment override it.")
    ] = None,
    role: Annotated[
        Role | None,
        typer.Option(help="learner, evaluator, syncer or coordinator; default: the role in its identity, or learner."),
    ] = None,
    step_s: Annotated[float | None, typer.Option(help="Seconds that a step takes; default: as reported by learners.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="As JSON lines.")] = False,
) -> int:
    """Examine this machine, the servers and the links, before a service joins a run.

    Without --config, --role and DILOCO_NAME, examine this machine for `diloco up`.
    """
    if config is None and role is None and step_s is None and not names_service():
        return asyncio.run(_print_checks(_each(this_machine.checks()), json_))
    if step_s is not None and not 0 < step_s < 1e6:
        raise SettingsError(f"--step-s {step_s:g}: expected a number of seconds above 0")
    settings = load_service(DoctorSettings, config)
    observe.configure(settings.name, settings.run, level="error", fmt="console")
    return asyncio.run(_print_checks(ServiceExamination(settings, role, step_s).checks(), json_))


async def _each(checks: Iterable[Check]) -> AsyncIterator[Check]:
    for check in checks:
        yield check


async def _print_checks(checks: AsyncIterator[Check], json_: bool) -> int:
    console, counts = Console(soft_wrap=True, highlight=False), dict.fromkeys(get_args(Verdict), 0)
    async for check in checks:
        counts[check.verdict] += 1
        if json_:
            values = asdict(check)
            print(json.dumps(values), flush=True)
        else:
            console.print(_line(check))
    if not json_:
        console.print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return EXIT_FAILED if counts["failed"] else 0


def _line(check: Check) -> Text:
    line = Text(f"{check.verdict:<{_VERDICT_WIDTH}}", _STYLES[check.verdict])
    return line.append(f"{check.name:<{_NAME_WIDTH}} ", "bold").append(printable(check.text()), "")
