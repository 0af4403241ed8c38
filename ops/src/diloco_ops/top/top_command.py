"""``diloco top``: any run in a terminal, with keys: one of this machine, by its directory, or any other by its server."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from diloco.errors import RunError, SettingsError
from diloco.nats.opening import checked
from diloco.service import rundir
from diloco.service.rundir import RunDirectory
from diloco.settings.run import RunSettings
from diloco_ops.live.rows import MIN_HEIGHT, MIN_WIDTH
from diloco_ops.reading import run_reader
from diloco_ops.reading.local_runs import newest_run
from diloco_ops.top.feed import reached
from diloco_ops.url_options import BulkUrl, IdentityFile, RunName, RunPlace


def top(
    place: RunPlace = None,
    run: RunName = "run",
    bulk_url: BulkUrl = None,
    identity: IdentityFile = None,
) -> None:
    """Watch a run in the terminal: what learners and fragments do, each in detail, what happens, logs."""
    place = place or str(newest_run("diloco top"))
    directory, local = _found(place, run, bulk_url, identity)
    _check_terminal(place)
    asyncio.run(_watch(directory, local=local))


async def _watch(directory: RunDirectory, *, local: bool) -> None:
    from diloco_ops.top.app import Top  # here: other commands need not load textual

    async with reached(directory, local=local) as feed:
        app = Top(feed)
        await app.run_async(mouse=False)  # a terminal's own selection goes on working
        if app.failure is not None:
            raise app.failure


def _found(place: str, run: str, bulk_url: str | None, identity: Path | None) -> tuple[RunDirectory, bool]:
    """Return the run's directory, or one of a run that is elsewhere, and whether it is here.

    Raises:
        RunError: there is no run in the directory, or it has not been started, or is stopped or finished.
        SettingsError: the URL is none; or what belongs to a URL is given beside a directory.
    """
    if "://" in place:
        for url in (place, bulk_url):
            if url is not None:
                checked(url)
        file = None if identity is None else str(identity.resolve())
        return RunDirectory(Path(), run, place, None, RunSettings(), nats_bulk_url=bulk_url, identity=file), False
    directory = rundir.load(Path(place))
    if directory.finished:
        raise RunError(f"{place}: run {directory.name!r} is finished: diloco status {place}; its report is {directory.report}")
    if not directory.nats_url:
        raise RunError(f"{place}: run {directory.name!r} has not been started yet")
    if (stopped := asyncio.run(run_reader.stopped_text(directory))) is not None:
        raise RunError(stopped)
    return directory, True


def _check_terminal(place: str) -> None:
    """Check that there is a terminal, and that it is large enough.

    Raises:
        SettingsError: with another command that does without.
    """
    other = (
        f"otherwise use diloco status {place}" if "://" not in place else ("otherwise use diloco attach, then diloco status")
    )
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM") in (None, "", "dumb"):
        raise SettingsError(f"diloco top: needs an interactive terminal; {other}")
    width, height = os.get_terminal_size(sys.stdout.fileno())
    if width < MIN_WIDTH or height < MIN_HEIGHT:
        raise SettingsError(f"diloco top: this terminal is {width} x {height}; at least {MIN_WIDTH} x {MIN_HEIGHT} is needed")
