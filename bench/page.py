"""The cost of a run's page: to open it, to be shown it, and to store its history; each number beside its bound.

    python bench/page.py [--learners 64] [--fragments 256] [--versions 1000000] [--viewers 50] [--seconds 20]

The monitor is given as much as it keeps of such a run, a heartbeat of every learner twice a second goes on, and the page is
served at a port of this machine to viewers that read, and to one that does not. A Chromium, where there is one, says when it
first paints the page: the leader's, and a standby's, which is made of the stored history. Before that the same is opened of a
small run, whose page moves twice a second, also beside a viewer that never reads. Prints JSON; processor time as shares of a
core. Takes three minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import random
import resource
import shutil
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any

from harness.console import Bench, Script
from msgspec.structs import replace
from playwright.async_api import async_playwright

from diloco.control.history import Past, unpack
from diloco.core.run.changes import Changes
from diloco.core.tensors.fragments import TensorSpec, build_map
from diloco.process import observe
from diloco.settings.presets import run_settings
from diloco.wire.control import Heartbeat
from diloco.wire.entries import Record
from diloco.wire.offers import MergeMember
from diloco_coordinator import history, overview
from diloco_coordinator.alerts import Alerts
from diloco_coordinator.merges import MAX_MERGES
from diloco_coordinator.monitor import MAX_POINTS, Monitor
from diloco_coordinator.page.drawing import Drawing
from diloco_coordinator.page.page_server import STALLED_S, PageServer
from diloco_report import page

WEEK_S = 604_800.0
HEARTBEAT_S = 0.5
SCRIPTS = ("page.js", "act.js", "enter.js")  # all that a server gives out
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def heartbeat(learner: str, step: int, loss: float) -> Heartbeat:
    """Return a heartbeat as a learner that steps sends it."""
    values: dict[str, Any] = dict.fromkeys(Heartbeat.__struct_fields__, 0)
    values |= {name: [] for name in ("versions", "steps", "fragment_tokens", "lost_tokens", "trained")}
    values |= {"learner": learner, "region": "", "role": "learner", "state": "stepping", "sending": False, "loss": loss}
    values["failure"] = None
    return Heartbeat(**values | {"step": step, "tokens": 2048 * step, "incarnation": 1, "software": "0.0.0"})


def filled(learners: int, fragments: int, versions: int) -> Monitor:
    """Return a coordinator's picture of a run of a week. Of long runs it hears of the versions alone that it keeps."""
    chance = random.Random(1)
    names = [f"learner-{number}" for number in range(learners)]
    specs = [TensorSpec(f"t{number}", (1000,)) for number in range(fragments)]
    settings = run_settings("decoupled", {"learners": learners, "tokens": 10**12})
    made = Monitor("run", settings, build_map(specs, fragments, "balanced"), "")
    for name in names:
        made.hear(heartbeat(name, 1, 5.0), 0.0)
        at = [WEEK_S * number / MAX_POINTS for number in range(MAX_POINTS)]
        made.learners[name].points = [(t, round(t * 9e5), round(t * 2), 2 + chance.random()) for t in at]
        made.learners[name].activity = [(t, t + 300, chance.choice(("stepping", "sending"))) for t in at]
    last, every = versions // fragments, 1
    while last // every * fragments > MAX_MERGES:
        every *= 2
    made.merges.every = every
    for version in range(every, last + 1, every):
        at_s = WEEK_S * version * fragments / versions
        members = [MergeMember(name, 1, version, version, version - 1, 24, 240, 0, 1.0, []) for name in names[version % 3 :]]
        for fragment in range(fragments):
            entry = Record(
                fragment, "version", version, 1, "syncer-0", bytes(32), members, [], 4, 0.3, 0.9, version * 10**6, 0,
                bytes(32), False, 0.0, 0.5, 1.0, None,
            )  # fmt: skip
            made.entry(entry, at_s)
    return made


class Source:
    """A coordinator without a server, as its page sees it while it leads."""

    over = False

    def __init__(self, monitor: Monitor) -> None:
        self.monitor, self.alerts, self._began = monitor, Alerts(), time.monotonic()

    def now_s(self) -> float:
        return WEEK_S + time.monotonic() - self._began

    def picture(self) -> dict[str, Any]:
        return overview.picture(self.monitor, self.alerts, Changes(bytes(16)), self.now_s())

    async def report(self) -> Mapping[str, Any]:
        return overview.report(self.picture(), self.monitor.settings, None)

    async def series(self) -> Callable[[], Mapping[str, Any]]:
        return partial(lambda curves: overview.series(overview.thinned(curves)), self.monitor.curves(self.now_s()))


class Standby(Source):
    """The same, while another one leads: it has the history as the leader stored it."""

    def __init__(self, monitor: Monitor, packed: bytes) -> None:
        super().__init__(monitor)
        self.packed, self.curves = packed, dict[str, Any]()

    async def report(self) -> Mapping[str, Any]:
        past = unpack(self.packed)
        self.curves = overview.series(past.curves)
        return overview.report(past.picture, self.monitor.settings, 4.0)

    async def series(self) -> Callable[[], Mapping[str, Any]]:
        return lambda: self.curves


async def beat(bench: Source) -> None:
    step = 10**6
    while True:
        step += 1
        for name, learner in bench.monitor.learners.items():
            fresh = replace(learner.heartbeat, step=step, tokens=2048 * step, loss=2.0 + (step % 7) / 10)
            bench.monitor.hear(replace(fresh, learner=name), bench.now_s())
        bench.alerts.note(bench.monitor, bench.now_s())
        await asyncio.sleep(HEARTBEAT_S)


# in a process of its own, whose time is not the coordinator's
VIEWERS = """
import asyncio, sys
async def view(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET /events HTTP/1.1\\r\\nHost: 127.0.0.1:{port}\\r\\n\\r\\n".encode())
    while await reader.read(1 << 20):
        pass
async def main():
    await asyncio.gather(*(view(int(sys.argv[1])) for _ in range(int(sys.argv[2]))))
asyncio.run(main())
"""


def used_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def share(seconds: float) -> float:
    """Return the processor time of this process as a share of a core."""
    began_s, clock_s = used_s(), time.monotonic()
    await asyncio.sleep(seconds)
    return (used_s() - began_s) / (time.monotonic() - clock_s)


async def opened(port: int) -> tuple[float, int]:
    """Open the page as a program does; return seconds and bytes."""
    began_s = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 26)
    writer.write(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode())
    size = len(await reader.read())
    writer.close()
    return round(time.monotonic() - began_s, 3), size


async def painted(port: int) -> dict[str, float | None]:
    """Open the page in a Chromium that runs already; return when it first paints, and when all of it is there, in seconds."""
    if CHROMIUM is None:
        return {"paint": None, "loaded": None}
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        shown = await browser.new_page()
        await shown.goto("about:blank")
        await shown.goto(f"http://127.0.0.1:{port}/", wait_until="load")
        await shown.wait_for_selector("svg")
        read = "() => [performance.getEntriesByName('first-contentful-paint'), performance.getEntriesByType('navigation')]"
        [paint], [load] = await shown.evaluate(f"({read})().map(list => list.map(entry => entry.toJSON()))")
        await browser.close()
    return {"paint": round(paint["startTime"] / 1000, 3), "loaded": round(load["loadEventEnd"] / 1000, 3)}


async def late_s(seconds: float) -> float:
    """Return by how much the loop was late at most."""
    most_s, until_s = 0.0, time.monotonic() + seconds
    while time.monotonic() < until_s:
        began_s = time.monotonic()
        await asyncio.sleep(0.01)
        most_s = max(most_s, time.monotonic() - began_s - 0.01)
    return round(most_s, 3)


async def beside_one_that_stalls(server: PageServer, seconds: float) -> dict[str, Any]:
    """Have a viewer that never reads; return how late the loop was with it and before, and the frames that it did not take."""
    reading, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 26)
    writer.write(f"GET /events HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n".encode())
    taking = asyncio.create_task(reading.read(-1))
    found = {"loop late at most before, s": await late_s(seconds)}
    with socket.socket() as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # or the two sockets' buffers take minutes of frames
        stalled.connect(("127.0.0.1", server.port or 0))
        stalled.sendall(f"GET /events HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n".encode())
        began = server.viewers.frames
        found["loop late at most with it, s"] = await late_s(seconds + STALLED_S)
    found |= {"frames drawn meanwhile": server.viewers.frames - began, "of them dropped": server.viewers.dropped}
    writer.close()
    await asyncio.wait([taking])
    return found


@contextlib.asynccontextmanager
async def serving(bench: Source) -> AsyncIterator[PageServer]:
    log = observe.get_logger()
    beating = asyncio.create_task(beat(bench))
    server = PageServer(Drawing(bench, "bench-1", log), "127.0.0.1:0", None, log)
    await server.start()
    try:
        yield server
    finally:
        beating.cancel()
        await server.close()


async def opening(bench: Source, bound_s: float) -> dict[str, Any]:
    """Measure what it takes to open the page of a run, the first time and again."""
    async with serving(bench) as server:
        assert server.port is not None
        first_s, size = await opened(server.port)
        again_s, _ = await opened(server.port)
        found = {"first, s": bounded(first_s, bound_s), "again, s": again_s, "bytes": size}
        found |= {"drawing, processor s": round(server.drawing.cost_s, 3)}
    async with serving(bench) as server:  # nothing is drawn yet
        assert server.port is not None
        seen = await painted(server.port)
    return found | {"Chromium's first paint, s": bounded(seen["paint"], bound_s), "Chromium has all, s": seen["loaded"]}


def bounded(value: float | None, most: float) -> dict[str, Any]:
    return {"value": value, "at most": most, "holds": None if value is None else value <= most}


async def measure(
    *, learners: int = 64, fragments: int = 256, versions: int = 1_000_000, viewers: int = 50, seconds: int = 20
) -> None:
    script = len(gzip.compress(b"".join(page.asset(name) for name in SCRIPTS)))
    found: dict[str, Any] = {"script, compressed, bytes": bounded(script, 60_000)}
    small = Source(filled(4, 24, 20_000))
    found["small run"] = await opening(small, 1.0)
    async with serving(small) as server:
        found["small run, a viewer that never reads"] = await beside_one_that_stalls(server, seconds)
    bench = Source(filled(learners, fragments, versions))
    found["merges kept"] = len(bench.monitor.merges.kept)
    began_s = time.thread_time()
    packed = history.pack(Past(1, 0.0, bench.picture(), bench.monitor.curves(WEEK_S)))
    found["history"] = {"bytes": len(packed), "processor s": round(time.thread_time() - began_s, 3)}
    found["large run"] = await opening(bench, 2.0)
    found["large run, a standby's page"] = await opening(Standby(bench.monitor, packed), 2.0)
    async with serving(bench) as server:
        idle = await share(seconds)
        found["core, no viewer"] = round(idle, 4)
        for count, most in ((1, 0.01), (viewers, 0.1)):
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", VIEWERS, str(server.port), str(count))
            await asyncio.sleep(3)
            more = round(await share(seconds) - idle, 4)
            found[f"core, {count} viewers more than none"] = bounded(more, most)
            process.kill()
            await process.wait()
        found["large run, a viewer that never reads"] = await beside_one_that_stalls(server, seconds)
    found["load"] = os.getloadavg()[0]
    print(json.dumps(found, indent=1))


SCRIPT = Script(__doc__, Bench(measure))

if __name__ == "__main__":
    SCRIPT.run()
