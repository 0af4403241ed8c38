"""The pictures of runs in ``docs/``, each made of a real run on this machine, in a terminal and in a Chromium.

    python bench/pictures.py [default] [regions] [compare] [even-rounds] [--out docs] [--runs FOLDER]

* ``default``: `diloco up`. ``live.svg``, ``top.svg``, ``page-charts.png``, ``page-phone.png`` and ``page-rollback.png`` in
  its middle, ``report.png`` at its end.
* ``regions``: three of them, one of which is cut off and healed. ``page-regions.png`` meanwhile, ``regions-cut.png`` at its
  end.
* ``compare``: three short runs, of which one is stopped. ``compare.png``.
* ``even-rounds``: by the simulator, without a Chromium, in two seconds. ``even-rounds.svg`` has the versions in each second
  of a run whose links are all cut for a minute, and their figures are printed. With ``--counts FILE`` the versions in each
  second are written as JSON instead.

The runs take a quarter of an hour on two cores. All other pictures there are drawn from results: those of docs/quality by
`diloco lab page`, those of the simulator by `diloco simulate report --svg`.

The run of ``even-rounds``: eight learners, ``--preset published`` (24 fragments, H = 24), steps of 1.00 to 1.07 s, 0.3 s one
way, a commit in 0.05 s. All links are cut from 120 s to 180 s. The upper panel has the rule of earlier versions: a fragment was
due H steps after its owner had heard that its last version was applied. Its counts are in ``even_rounds_before.json``, with the
commit whose modules made them by ``--counts``.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from harness.console import Bench, Script, folder
from harness.live_run import DILOCO, Up, up
from playwright.async_api import Browser, Page, ViewportSize, async_playwright
from rich.console import Console

from diloco.service import rundir
from diloco.settings.presets import run_settings
from diloco_lab.published.pictures import WIDTH, standalone
from diloco_lab.simulator import simulation
from diloco_lab.simulator.cluster import MICROS, ClusterLearner, LearnerLink, RoundTerms
from diloco_lab.simulator.outcome import MergedVersion, Scenario
from diloco_ops.broker.server import free_ports
from diloco_ops.live.screen import render
from diloco_ops.top.app import Top
from diloco_ops.top.feed import reached
from diloco_ops.wan import control
from diloco_report.drawing.charts import time_axis
from diloco_report.drawing.frame import across, nice_ticks, text_at

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
PARTS = ("default", "regions", "compare", "even-rounds")
DOCS = Path(__file__).parents[1] / "docs"
CUT = "eu"
DEADLINE_S = 1200.0
HISTORY_S = 12.0  # the leader stores it every ten seconds
CUT_FOR_S = 40.0  # from the cut to healing: rounds of the others go on meanwhile
TERMINAL = (113, 30)
SMOOTHING = "0.6"  # of the charts
SHORT_TOKENS = 1_500_000
RUNS = {"a": [], "b": ["task.width=128"], "stopped": ["round.steps=12"]}
FETCHED_FONT = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)  # a picture of ours fetches nothing

STOPPED = 0.6  # of the budget, then it is interrupted


class Shown:
    """A run with a page, by its address."""

    def __init__(self, run: Up, page: str) -> None:
        self.run, self.directory, self.page = run, run.directory, page

    def share(self) -> float:
        """Return how much of the budget is used up."""
        status = self.run.status()
        return float(status.get("tokens_processed", 0) / status["tokens_budget"]) if status.get("tokens_budget") else 0.0

    async def at(self, share: float) -> None:
        """Wait until so much of the budget is used up."""
        await self.run.reach(lambda: self.share() > share, f"{share:.0%} of its budget")

    async def end(self) -> None:
        """Wait until the run ends by itself."""
        await asyncio.to_thread(self.run.process.wait)


@contextlib.asynccontextmanager
async def running(directory: Path, *options: str, tokens: int | None = None, sets: Sequence[str] = ()) -> AsyncIterator[Shown]:
    """Begin a run with a page; interrupt it at the end if it goes on."""
    page = f"127.0.0.1:{free_ports(1)[0]}"
    with up(directory, "--page", page, *options, tokens=tokens, sets=sets, patience_s=DEADLINE_S) as run:
        await run.reach(run.status, "its first status")
        yield Shown(run, f"http://{page}/")


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
        await run.at(0.5)
        await terminal(run, camera.out)
        async with camera.opened(run.page, 1180, 900) as shown:
            await shown.locator("#part-course .smoothing input").fill(SMOOTHING)
            await camera.take(shown, "page-charts.png", "#part-course section")
        async with camera.opened(run.page, 390, 844) as shown:
            await shown.locator("#part-loss").scroll_into_view_if_needed()
            await camera.take(shown, "page-phone.png")
        await rollback(run, camera)
        await run.end()
    async with camera.opened((run.directory / "report.html").as_uri(), 1100, 1230) as shown:
        await camera.take(shown, "report.png")


async def terminal(run: Shown, out: Path) -> None:
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


async def rollback(run: Shown, camera: Camera) -> None:
    """Ask on the operator's page to roll back, and take a picture of the question."""
    given = (*DILOCO, "page", str(run.directory))
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
    options, sets = ("--learners", "3", "--shards", "3"), [f"regions.names={names}"]
    async with running(runs / "cut", *options, tokens=3_400_000, sets=sets) as run:
        await run.at(0.3)
        relay = str(rundir.load(run.directory).wan_control)
        await asyncio.to_thread(list, control.asked(relay, control.Cut([CUT])))
        await run.run.reach(lambda: run.run.status()["regions"][CUT]["away_s"], f"{CUT} is away")
        await asyncio.sleep(CUT_FOR_S / 2)
        async with camera.opened(run.page, 1180, 900, "dark") as shown:
            await camera.take(shown, "page-regions.png", "#part-islands section")
        await asyncio.sleep(CUT_FOR_S / 2)
        await asyncio.to_thread(list, control.asked(relay, control.Heal([CUT])))
        await run.end()
    async with camera.opened((run.directory / "report.html").as_uri(), 1180, 900) as shown:
        await camera.take(shown, "regions-cut.png", "#part-regions section")


async def compare(camera: Camera, runs: Path) -> None:
    for name, sets in RUNS.items():
        async with running(runs / name, "--learners", "3", "--shards", "1", tokens=SHORT_TOKENS, sets=sets) as run:
            if name == "stopped":
                await run.at(STOPPED)
            else:
                await run.end()
    file = runs / "compare.html"
    given = (*DILOCO, "compare", *(str(runs / name) for name in RUNS), "--out", str(file))
    compared = await asyncio.create_subprocess_exec(*given)
    await compared.wait()
    async with camera.opened(file.as_uri(), 1100, 1020) as shown:
        await shown.get_by_text("bytes, both ways").first.click()
        await camera.take(shown, "compare.png")


# ---- even rounds

BEFORE = Path(__file__).with_name("even_rounds_before.json")
LEARNERS, FRAGMENTS, H = 8, 24, 24
STEP_S, SLOWER_S, ONE_WAY_S, ANSWER_S, COMMIT_S = 1.0, 0.01, 0.3, 0.02, 0.05
CUT_S, HEALED_S, END_S = 120, 180, 420

BEGUN_S = 2 * H  # from then on rounds are in full swing
LEFT, TOP, HIGH, BETWEEN = 52, 34, 150, 56  # pixels: left margin, top margin, height of a panel, gap between two panels


def counts() -> list[int]:
    """Simulate the run; return the versions in each second."""
    learners = [
        ClusterLearner(f"learner-{n}", 1, 1, STEP_S + n * SLOWER_S, link=LearnerLink(delay_s=ONE_WAY_S))
        for n in range(LEARNERS)
    ]
    settings = run_settings("published", {"learners": LEARNERS, "fragments.count": FRAGMENTS, "round.steps": H})
    rounds = RoundTerms(settings, [1] * FRAGMENTS, answer_s=ANSWER_S, commit_s=COMMIT_S)
    cut = (CUT_S * MICROS, HEALED_S * MICROS)
    versions: list[MergedVersion] = []
    cuts = {learner.name: [cut] for learner in learners}
    simulation.simulate(Scenario(learners, float(END_S), 1, rounds, {}, cuts, on_version=versions.append))
    each = Counter(version.committed_us // MICROS for version in versions)
    return [each[second] for second in range(END_S)]


def evenness(each: Sequence[int], begin: int, end: int) -> tuple[int, int]:
    """Return the most versions in a second, and how many seconds have none."""
    part = each[begin:end]
    return max(part), part.count(0)


def picture(panels: Sequence[tuple[str, Sequence[int]]]) -> str:
    """Draw the versions in each second, one panel for each named run."""
    scale = (WIDTH - 2 * LEFT) / END_S
    parts, top = [], TOP
    for name, each in panels:
        base = top + HIGH
        parts.append(text_at("region", LEFT, top - 12, "start", name))
        for tick in nice_ticks(0, FRAGMENTS, 5):
            y = base - HIGH * tick / FRAGMENTS
            parts += [across("grid", LEFT, WIDTH - LEFT, y), text_at("tick", LEFT - 8, y + 4, "end", f"{tick:g}")]
        x, wide = LEFT + CUT_S * scale, (HEALED_S - CUT_S) * scale
        parts.append(f'<rect x="{x:.1f}" y="{top}" width="{wide:.1f}" height="{HIGH}" style="fill:var(--soft);opacity:.13"/>')
        parts.append(text_at("label", x + wide / 2, top + 18, "middle", "all links are cut"))
        for second, versions in enumerate(each):
            if versions:
                begin, end = (round(LEFT + at_s * scale) for at_s in (second, second + 1))  # whole pixels: no gaps between
                tall = HIGH * versions / FRAGMENTS
                place = f'x="{begin}" y="{base - tall:.1f}" width="{end - begin}" height="{tall:.1f}"'
                parts.append(f'<rect {place} style="fill:var(--s0)"/>')
        top = base + BETWEEN
    high = top - BETWEEN
    parts.insert(0, time_axis(END_S, LEFT, scale, high))
    parts.append(text_at("axis", WIDTH / 2, high + 36, "middle", "time; upwards: versions of all fragments in a second"))
    body, label = "".join(parts), "Versions in each second, before and after all links were cut for a minute"
    return f'<svg class="rows" viewBox="0 0 {WIDTH} {high + 44}" role="img" aria-label="{label}">{body}</svg>'


def even_rounds(out: Path, counts_file: Path | None) -> None:
    """Print the figures of versions in each second, and draw them; or write the counts."""
    now = counts()
    if counts_file is not None:
        counts_file.write_text(json.dumps({"commit": "", "versions": now}) + "\n")
        return
    before = json.loads(BEFORE.read_text())
    panels = [
        (f"Due H steps after the last version (the earlier rule, commit {before['commit']})", before["versions"]),
        ("Due in a slot of the cycle", now),
    ]
    for name, each in panels:
        print(name)
        for what, begin, end in (
            ("undisturbed", BEGUN_S, CUT_S),
            ("two cycles after the cut", HEALED_S, HEALED_S + 2 * H),
            ("from then on", HEALED_S + 2 * H, END_S),
        ):
            most, without = evenness(each, begin, end)
            print(f"  {what:25} at most {most:2} versions in a second, {without:3} of {end - begin} seconds without one")
    (out / "even-rounds.svg").write_text(standalone(picture(panels)))


async def taken(parts: Sequence[str], out: Path, runs: Path) -> None:
    """Take the pictures of runs."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        for part in parts:
            await {"default": default, "regions": regions, "compare": compare}[part](Camera(browser, out), runs)
        await browser.close()


async def pictures(
    parts: Annotated[Sequence[str], PARTS, "all by default"] = PARTS,
    *,
    out: Annotated[Path, "folder of the pictures"] = DOCS,
    runs: Annotated[Path | None, "folder of the runs, which stay there"] = None,
    counts: Annotated[Path | None, "file for the versions in each second of even-rounds, of which nothing is drawn"] = None,
) -> None:
    """Make pictures."""
    out.mkdir(parents=True, exist_ok=True)
    if "even-rounds" in parts:
        even_rounds(out, counts)
    live = [part for part in parts if part != "even-rounds"]
    if live:
        with folder(runs) as place:
            await taken(live, out, place)


SCRIPT = Script(__doc__, Bench(pictures))

if __name__ == "__main__":
    SCRIPT.run()
