"""The start of every service: arguments, settings, logs, connection, signals."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from diloco.control import creation
from diloco.control.creation import KnownRun
from diloco.core.tensors.compiled import kernels
from diloco.errors import DilocoError, RunError, SettingsError
from diloco.nats.identity import Role, identity_file, of_service
from diloco.nats.transport import NatsTransport
from diloco.process import kernel_cache, locks, observe, resolving
from diloco.process.observe import Logger
from diloco.service import volume
from diloco.settings import folders
from diloco.settings.loading import load_service, logging_settings
from diloco.settings.service import LearnerSettings, ProcessesSettings, ServiceSettings, check_region
from diloco.transport import Transport

S = TypeVar("S", bound=ServiceSettings)
MAX_NUMBERS = 4096
ALONE = ProcessesSettings()
NAMES = "names"  # folder of locks
ENDING_S = 5.0  # a process that was just killed may still have its name


class _Arguments(argparse.ArgumentParser):
    """A parser whose errors are ours, so that they are in the log."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message}; {' '.join(self.format_usage().split())}")


def parse_settings(cls: type[S], program: str) -> S:
    """Read ``--config FILE`` and the environment, and set up the process's logs.

    Raises:
        SettingsError: a setting is wrong.
        RunError: their state directory is another run's, or a newer version's.
        DilocoError: another process has the name, or one that ends in a star cannot be settled.
    """
    loaded = read_settings(cls, program)
    volume.claim(loaded.state_dir, loaded.run)
    settings = named(loaded)
    if settings is loaded:
        _hold_name(settings)
    begin_logs(settings, program)
    return settings


def read_settings(cls: type[S], program: str) -> S:
    """Read ``--config FILE`` and the environment.

    Raises:
        SettingsError: a setting is wrong.
    """
    parser = _Arguments(prog=program)
    parser.add_argument("--config", type=Path, help="TOML file; DILOCO_* variables in the environment override it")
    _log_errors_of_start(program, None)
    config: Path | None = parser.parse_args().config
    _log_errors_of_start(program, config)
    return load_service(cls, config)


def begin_logs(settings: ServiceSettings, program: str) -> None:
    """Set up the process's logs.

    Raises:
        DilocoError: their file cannot be written.
    """
    name = process_name(settings)
    to_file = settings.log_format == "json" and settings.log_to == "file"
    logs = settings.state_dir / "logs" / f"{name}.jsonl" if to_file else None
    role = settings.role if isinstance(settings, LearnerSettings) else _role(program)
    about: dict[str, Any] = {"role": role, "region": settings.region or ""}
    observe.configure(name, settings.run, **about, level=settings.log_level, fmt=settings.log_format, file=logs)


def _log_errors_of_start(program: str, config: Path | None) -> None:
    """Have an error of the settings logged where stderr is the log, with the names that they give, although they may be wrong.

    A log in a file is not there yet: the service's folder may be another run's. The error is a sentence on stderr then.
    """
    found = logging_settings(config)
    if found.get("log_to") != "stderr":
        return
    about: dict[str, Any] = {"role": found.get("role", _role(program)), "region": found.get("region", "")}
    fmt: Literal["json", "console"] = "console" if found.get("log_format") == "console" else "json"
    observe.configure(found.get("name", program), found.get("run", ""), **about, fmt=fmt)


def _role(program: str) -> str:
    return program.removeprefix("diloco-")


def process_name(settings: ServiceSettings) -> str:
    """Return how a process calls itself in events, and to NATS: a learner's further processes by their number, too."""
    index = settings.processes.index if isinstance(settings, LearnerSettings) else 0
    return f"{settings.name}-p{index}" if index else settings.name


def named(settings: S) -> S:
    """Settle a name that ends in a star: the first number whose lock no living process holds.

    A new container thus takes over the name, the checkpoint and the accounts of one that is gone. The lock is held as long as
    this process lives, frozen or not.

    Raises:
        SettingsError: there are identities and none of them has such a name, or they cannot be listed.
        RunError: the state directory cannot be written, or its file system has no locks.
        DilocoError: all numbers are taken.
    """
    if not settings.name.endswith("*"):
        return settings
    names = [f"{settings.name[:-1]}{number}" for number in range(MAX_NUMBERS)]
    if settings.identity is not None:
        names = _with_identity(names, settings.identity, settings.name)
    folder = settings.state_dir / NAMES
    for name in names:
        if locks.hold(folder / name, folders.STATE, patience_s=0.0):
            return settings.model_copy(update={"name": name})
    taken = f"all {MAX_NUMBERS} numbers" if settings.identity is None else f"all names with an identity ({settings.identity})"
    raise DilocoError(f"name = {settings.name!r}: {taken} are taken by processes that share {folder}")


def _hold_name(settings: ServiceSettings) -> None:
    """Hold this process's name in its ``state_dir`` as long as it lives: two processes would write the same files.

    Raises:
        RunError: another process has it; or the folder cannot be written, or its file system has no locks.
    """
    name = process_name(settings)
    if not locks.hold(settings.state_dir / NAMES / name, folders.STATE, ENDING_S):
        raise RunError(
            f"name = {name!r}: another process with this name uses {settings.state_dir} (state_dir): stop that one, or "
            "give this one another name or another folder"
        )


def _with_identity(names: Sequence[str], path: str, pattern: str) -> list[str]:
    """Return the names that have an identity."""
    try:
        found = [name for name in names if identity_file(path, name).exists()]
    except OSError as error:
        raise SettingsError(f"identity {path}: cannot be read by the user of this service: {error.strerror}") from None
    if not found:
        raise SettingsError(f"identity {path}: there is none for name = {pattern!r}: make it with 'diloco keys add'")
    return found


async def connect(
    settings: ServiceSettings,
    role: Role,
    log: Logger,
    processes: ProcessesSettings = ALONE,
    give_up_after_s: float | None = None,
) -> NatsTransport:
    """Connect to NATS, and wait for it, by default without limit; as one of a learner's ``processes``.

    The kernels are imported at the same time, in a thread of their own.

    Raises:
        SettingsError: the identity is not one for ``role`` and these settings.
        BrokerError: there is a limit, and no server within it.
    """
    resolving.use_own_threads(asyncio.get_running_loop())
    caches = [settings.cache_dir] if isinstance(settings, LearnerSettings) else []
    kernel_cache.choose(*caches, settings.state_dir)
    identity = None
    if settings.identity is not None:
        identity = of_service(settings.identity, settings.name, settings.run, settings.region, role, processes.count)
    name, index = process_name(settings), processes.index
    opening = NatsTransport.open(settings.nats_url, settings.bulk_url, name, log, give_up_after_s, identity, index)
    _, transport = await asyncio.gather(asyncio.to_thread(kernels.load), opening)
    transport.clock_file, transport.alive_file = settings.clock_file, settings.alive_file
    return transport


async def find_run(transport: Transport, settings: ServiceSettings, log: Logger) -> KnownRun:
    """Wait until the service's run exists.

    Raises:
        RunError: the stored settings are not of this version.
        SettingsError: the service is in none of the run's regions.
    """
    run = await creation.find(transport, settings.run, log)
    check_region(settings.region, run.created.regions.names, run.name)
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
