"""How every service starts: arguments, settings, logs, connection, signals."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from diloco import membership, observe
from diloco.membership import Run
from diloco.nats.transport import NatsTransport
from diloco.observe import Logger
from diloco.settings import ServiceSettings, check_region, load_service

S = TypeVar("S", bound=ServiceSettings)


def parse_settings(cls: type[S], program: str) -> S:
    """Read ``--config FILE`` and the environment, and set up the process's logs.

    Raises:
        SettingsError: something in them is wrong.
    """
    parser = argparse.ArgumentParser(prog=program)
    parser.add_argument("--config", type=Path, help="TOML file; DILOCO_* variables in the environment win over it")
    settings = load_service(cls, parser.parse_args().config)
    logs = settings.state_dir / "logs" / f"{settings.name}.jsonl" if settings.log_format == "json" else None
    observe.configure(settings.name, settings.run, level=settings.log_level, fmt=settings.log_format, file=logs)
    return settings


async def connect(settings: ServiceSettings, log: Logger) -> NatsTransport:
    """Connect to NATS, however long it takes to be there."""
    transport = await NatsTransport.open(settings.nats_url, settings.bulk_url, settings.name, log, give_up_after_s=None)
    transport.clock_file = settings.clock_file
    return transport


async def find_run(transport: NatsTransport, settings: ServiceSettings, log: Logger) -> Run:
    """Wait until the service's run exists.

    Raises:
        RunError: what is stored are no settings of this version.
        SettingsError: the service is in none of the run's regions.
    """
    run = await membership.find(transport, settings.run, log)
    check_region(settings.region, run.settings.regions.names, run.name)
    return run


async def until_stopped(work: Callable[[], Awaitable[None]], log: Logger) -> None:
    """Run ``work`` to its end, or until SIGTERM or SIGINT cancels it."""
    task = asyncio.ensure_future(work())
    loop = asyncio.get_running_loop()
    stopped = False

    def stop(number: int) -> None:
        nonlocal stopped
        stopped = True
        log.info("stopping", signal=signal.Signals(number).name, pid=os.getpid())
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    try:
        await task
    except asyncio.CancelledError:
        if not stopped:
            raise
