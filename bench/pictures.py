"""The pictures of runs in ``docs/``, each made of a real run on this machine, in a terminal and in a Chromium.

    python bench/pictures.py [default] [regions] [compare] [--out docs] [--runs FOLDER]

* ``default``: `diloco up`. ``live.svg``, ``top.svg``, ``page-charts.png``, ``page-phone.png`` and ``page-rollback.png`` in its
  middle, ``report.png`` at its end.
* ``regions``: three of them, one of which is cut off and healed. ``page-regions.png`` meanwhile, ``regions-cut.png`` at
  its end.
* ``compare``: three short runs, of which one is stopped. ``compare.png``.

Takes a quarter of an hour on two cores. All other pictures there are drawn from results: those of docs/quality by `diloco lab
page`, those of the simulator by `diloco simulate report --svg` and ``bench/even_rounds.py``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import re
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import script
from playwright.async_api import Browser, Page, ViewportSize, async_playwright
from rich.console import Console

from diloco.service import rundir
from diloco_ops.broker.server import free_ports
from diloco_ops.live.screen import render
from diloco_ops.top.app import Top
from diloco_ops.top.feed import reached
from diloco_ops.wan import control

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
PARTS = ("default", "regions", "compare")
CUT = "eu"
DEADLINE_S = 1200.0
HISTORY_S = 12.0  # the leader stores it every ten seconds
POLL_S = 0.5
CUT_S = 40.0  # from the cut to healing: rounds of the others go on meanwhile
TERMINAL = (113, 30)
SMOOTHING = "0.6"  # of the charts
SHORT = ("--learners", "3", "--shards", "1", "--tokens", "1500000")
RUNS = {"a": (), "b": ("--set", "task.width=128"), "stopped": ("--set", "round.steps=12")}
FETCHED_FONT = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)  # a picture of ours fetches nothing
STOPPED = 0.6  # of the budget, then it is interrupted


class Running:
    """A run that `diloco up` has begun."""

    def __init__(self, directory: Path, process: asyncio.subprocess.Process, page: str) -> None:
        self.directory, self.process, self.page = directory, process, page

    def status(self) -> dict[str, Any]:
        """Return the last status that is known; empty before there is one, or while it is being written."""
        with contextlib.suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads((self.directory / "status.json").read_text())
            return found
        return {}

    def share(self) -> float:
        """Return how much of the budget is used up."""
        status = self.status()
        return float(status.get("tokens_processed", 0) / status["tokens_budget"]) if status.get("tokens_budget") else 0.0

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for something that this run is to do."""
        ends_s = time.monotonic() + DEADLINE_S
        while not holds():
            if self.process.returncode is not None or time.monotonic() > ends_s:
                raise SystemExit(f"bench/pictures.py: {self.directory}: it ended, or hangs; see {self.directory}.out")
            await asyncio.sleep(POLL_S)


@contextlib.asynccontextmanager
async def running(directory: Path, *options: str) -> AsyncIterator[Running]:
    """Begin a run with a page; interrupt it at the end if it goes on."""
    [port] = free_ports(1)
    given = ("up", "--plain", "--run-dir", str(directory), "--page", f"127.0.0.1:{port}", *options)
    with directory.with_suffix(".out").open("wb") as out:
        process = await asyncio.create_subprocess_exec(*script.DILOCO, *given, stdout=out, stderr=out)
    run = Running(directory, process, f"http://127.0.0.1:{port}/")
    try:
        await run.until(lambda: bool(run.status()))
        yield run
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        await process.wait()


class Camera:
    """A browser whose pages are put into files of a folder."""

    def __init__(self, browser: Browser, out: Path) -> None:
        self.browser, self.out = browser, out

    @contextlib.asynccontextmanager
    async def opened(self, url: str, width: int, height: int, scheme: Any = "light") -> AsyncIterator[Page]:
        """Open a page, with what it draws after it was loaded."""
        context = await self.browser.new_context(viewport=ViewportSize(width=width, height=height), color_scheme=scheme)
        shown = await context.new_page()
        await shown.goto(url)
        try:
            yield shown
        finally:
            await context.close()

    async def take(self, shown: Page, name: str, part: str | None = None) -> None:
        """Take a picture of what is seen of a page, or of one part of it."""
        file = self.out / name
        await (shown.screenshot(path=file) if part is None else shown.locator(part).screenshot(path=file))
        print(file, flush=True)


async def default(camera: Camera, runs: Path) -> None:
    async with running(runs / "run") as run:
        await run.until(lambda: run.share() > 0.5)
        await terminal(run, camera.out)
        async with camera.opened(run.page, 1180, 900) as shown:
            await shown.locator("#part-course .smoothing input").fill(SMOOTHING)
            await camera.take(shown, "page-charts.png", "#part-course section")
        async with camera.opened(run.page, 390, 844) as shown:
            await shown.locator("#part-loss").scroll_into_view_if_needed()
            await camera.take(shown, "page-phone.png")
        await rollback(run, camera)
        await run.process.wait()
    async with camera.opened((run.directory / "report.html").as_uri(), 1100, 1230) as shown:
        await camera.take(shown, "report.png")


async def terminal(run: Running, out: Path) -> None:
    """Draw `diloco top` and the live view of `diloco up`, of the same run at the same time."""
    async with reached(rundir.load(run.directory), local=True) as feed:
        app = Top(feed)
        async with app.run_test(size=(80, 24)):
            await asyncio.sleep(HISTORY_S)
            top = app.export_screenshot(title=f"diloco top {run.directory.name}")
        status = feed.watched.status(time.monotonic())
        console = Console(record=True, file=io.StringIO(), width=TERMINAL[0], height=TERMINAL[1], force_terminal=True)
        console.print(render(status, *TERMINAL, feed.watched))
        drawn = {"top.svg": top, "live.svg": console.export_svg(title="diloco up")}
    for name, svg in drawn.items():
        (out / name).write_text(FETCHED_FONT.sub("", svg))
        print(out / name, flush=True)


async def rollback(run: Running, camera: Camera) -> None:
    """Ask on the operator's page to roll back, and take a picture of the question."""
    given = (*script.DILOCO, "page", str(run.directory))
    server = await asyncio.create_subprocess_exec(*given, stdout=asyncio.subprocess.PIPE)
    assert server.stdout is not None
    try:
        said = ""
        while "http://" not in said:  # behind lines of its log
            said = (await server.stdout.readline()).decode()
        async with camera.opened(said.split()[-1], 1280, 900) as shown:
            await shown.locator("#actions summary").click()
            await shown.locator("form[data-act=rollback] [name=version]").fill("3")
            await shown.locator("form[data-act=rollback] button").click()
            await shown.locator("#confirm").get_by_text("lost in all").wait_for()
            await camera.take(shown, "page-rollback.png")
    finally:
        server.send_signal(signal.SIGINT)
        await server.wait()


async def regions(camera: Camera, runs: Path) -> None:
    names = json.dumps(["us", "eu", "ap"])
    options = ("--learners", "3", "--shards", "3", "--set", f"regions.names={names}", "--tokens", "3400000")
    async with running(runs / "cut", *options) as run:
        await run.until(lambda: run.share() > 0.3)
        relay = str(rundir.load(run.directory).wan_control)
        await asyncio.to_thread(list, control.asked(relay, control.Cut([CUT])))
        await run.until(lambda: bool(run.status()["regions"][CUT]["away_s"]))
        await asyncio.sleep(CUT_S / 2)
        async with camera.opened(run.page, 1180, 900, "dark") as shown:
            await camera.take(shown, "page-regions.png", "#part-islands section")
        await asyncio.sleep(CUT_S / 2)
        await asyncio.to_thread(list, control.asked(relay, control.Heal([CUT])))
        await run.process.wait()
    async with camera.opened((run.directory / "report.html").as_uri(), 1180, 900) as shown:
        await camera.take(shown, "regions-cut.png", "#part-regions section")


async def compare(camera: Camera, runs: Path) -> None:
    for name, options in RUNS.items():
        async with running(runs / name, *SHORT, *options) as run:
            if name == "stopped":
                await run.until(lambda run=run: run.share() > STOPPED)  # type: ignore[misc]
            else:
                await run.process.wait()
    file = runs / "compare.html"
    given = (*script.DILOCO, "compare", *(str(runs / name) for name in RUNS), "--out", str(file))
    compared = await asyncio.create_subprocess_exec(*given)
    await compared.wait()
    async with camera.opened(file.as_uri(), 1100, 1020) as shown:
        await shown.get_by_text("bytes, both ways").first.click()
        await camera.take(shown, "compare.png")


async def main(arguments: argparse.Namespace, runs: Path) -> None:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        camera = Camera(browser, arguments.out)
        for part in arguments.parts or PARTS:
            await {"default": default, "regions": regions, "compare": compare}[part](camera, runs)
        await browser.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs", help="folder of the pictures")
    parser.add_argument("--runs", type=Path, help="folder of the runs, which stay there")
    given = parser.parse_args()
    with script.folder(given.runs) as folder:
        asyncio.run(main(given, folder))
