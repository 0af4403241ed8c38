"""``diloco page``: the page of any run on this machine, with the actions that the operator's identity may do."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Annotated

import typer

from diloco.errors import RunError, SettingsError
from diloco.nats.opening import checked
from diloco.process import observe
from diloco.service import rundir
from diloco.service.rundir import RunDirectory
from diloco.service.skeleton import until_stopped
from diloco.settings.service import host_and_port
from diloco_coordinator.page import guard
from diloco_coordinator.page.drawing import Drawing, nonce_of
from diloco_coordinator.page.page_server import PageServer
from diloco_ops.operate.changing import author
from diloco_ops.page.acting import OperatorActions
from diloco_ops.page.source import OperatorSource, ReportSource
from diloco_ops.reading import run_reader
from diloco_ops.reading.attach import attached
from diloco_ops.reading.local_runs import RUNS, newest_run
from diloco_ops.up.pages import ANYWHERE, link, show
from diloco_ops.url_options import BulkUrl, IdentityFile, RunName, RunPlace


def page(
    run_at: RunPlace = None,
    run: RunName = "run",
    bulk_url: BulkUrl = None,
    identity: IdentityFile = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="With a URL: folder for run.json and checkpoints; default: runs/NAME.")
    ] = None,
    address: Annotated[str, typer.Option(help="HOST:PORT of this machine at which the page is served.")] = ANYWHERE,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Serve a run's page on this machine, with actions: checkpoint, set, eject, readmit, rollback. Ctrl-C ends it.

    For a finished run, the page is its report.
    """
    _check_address(address)
    run_at = run_at or str(newest_run("diloco page"))
    if "://" in run_at:
        directory = run_dir or RUNS / run
        _attach(directory, run, run_at, bulk_url, identity)
    else:
        directory = Path(run_at)
        _refuse_given({"--bulk": bulk_url, "--identity": identity, "--run-dir": run_dir}, directory)
        if (found := rundir.load(directory)).finished:
            asyncio.run(until_stopped(lambda: _serve_report(found, address, open_), observe.get_logger()))
            return
    asyncio.run(until_stopped(lambda: _serve(directory, address, open_), observe.get_logger()))


async def _serve_report(directory: RunDirectory, address: str, open_: bool) -> None:
    """Serve the report of a finished run, and name its file, which is a page that needs no server."""
    log, token = observe.get_logger(), guard.new_token()
    report = (directory.path / "report.html").resolve()
    drawing = Drawing(ReportSource(directory.path), nonce_of(directory.name.encode(), secrets.token_bytes(6)), log)
    said = f"run {directory.name} is finished; its report: {report.as_uri()}, and until Ctrl-C"
    await _serve_until_ended(PageServer(drawing, address, token, log), address, token, said, open_)


def _check_address(address: str) -> None:
    try:
        host, _ = host_and_port(address, "--address")
    except ValueError:
        raise SettingsError(f"--address {address}: expected HOST:PORT, for example 127.0.0.1:8421") from None
    if not guard.is_loopback(host):
        raise SettingsError(
            f"--address {address}: other machines can reach this address, and the page acts in your name: give a local "
            "address such as 127.0.0.1:8421, and reach it from elsewhere through ssh -L"
        )


def _attach(directory: Path, run: str, url: str, bulk_url: str | None, identity: Path | None) -> None:
    if url.startswith(("http://", "https://")):
        raise SettingsError(f"{url}: give the run's NATS server (nats://HOST:4222), not its page: actions need it")
    checked(url)
    if (directory / "run.json").exists():
        there = rundir.load(directory)
        if (there.name, there.nats_url) != (run, url) or there.finished:
            raise RunError(
                f"{directory}: belongs to run {there.name!r} at {there.nats_url}: choose another --run-dir, or give that "
                "directory as DIR"
            )
    asyncio.run(
        attached(
            directory, run, url, () if bulk_url is None else (bulk_url,), None if identity is None else str(identity.resolve())
        )
    )


def _refuse_given(given: dict[str, object], directory: Path) -> None:
    for option, value in given.items():
        if value is not None:
            raise SettingsError(
                f"{option}: only with a URL; {directory / 'run.json'} already states it (diloco attach writes that file)"
            )


async def _serve(directory: Path, address: str, open_: bool) -> None:
    log, token = observe.get_logger(), guard.new_token()
    async with run_reader.reached(directory) as live:
        operator, identity = author(live.transport), live.transport.identity
        acting = OperatorActions(directory, live, operator, log)
        drawing = Drawing(OperatorSource(live, log), nonce_of(live.run.identity, secrets.token_bytes(6)), log)
        looks_only = identity is not None and identity.role != "operator"
        server = PageServer(drawing, address, token, log, acting=None if looks_only else acting)
        does = f"read-only, because {operator} is not an operator" if looks_only else f"with actions, as {operator}"
        await _serve_until_ended(server, address, token, f"page of run {live.run.name}, {does}", open_)


async def _serve_until_ended(server: PageServer, address: str, token: str, said: str, open_: bool) -> None:
    """Serve a page, and print its address behind what is said of it, until this process is asked to end."""
    await server.start()
    try:
        host, _ = host_and_port(address, "--address")
        place = f"{link(f'[{host}]:{server.port}' if ':' in host else f'{host}:{server.port}')}#{token}"
        print(f"{said}: {place}", flush=True)
        if open_:
            await asyncio.to_thread(show, place)
        await asyncio.Event().wait()
    finally:
        await server.close()
