"""The cost of a run's page: to open it, to be shown it, and to store its history. A large run, drawn by the page's own code.

    python bench/page.py [--learners 64] [--fragments 256] [--versions 1000000] [--viewers 50]

The monitor is given as much as it keeps of such a run, a heartbeat of every learner twice a second goes on, and the page is
served at a port of this machine to viewers that read. Prints processor time as shares of a core.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import random
import resource
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from msgspec.structs import replace

from diloco.control.history import Past
from diloco.core.changes import Changes
from diloco.core.fragments import TensorSpec, build_map
from diloco.process import observe
from diloco.settings.presets import run_settings
from diloco.wire.control import Heartbeat
from diloco.wire.entries import Record
from diloco.wire.offers import Member
from diloco_coordinator import history, overview
from diloco_coordinator.alerts import Alerts
from diloco_coordinator.merges import MAX_MERGES
from diloco_coordinator.monitor import MAX_POINTS, Monitor
from diloco_coordinator.page.drawing import Drawing
from diloco_coordinator.page.server import PageServer
from diloco_report import page

WEEK_S = 604_800.0
HEARTBEAT_S = 0.5


def heartbeat(learner: str, step: int, loss: float) -> Heartbeat:
    """Return a heartbeat as a learner that steps sends it."""
    values: dict[str, Any] = dict.fromkeys(Heartbeat.__struct_fields__, 0)
    values |= {name: [] for name in ("versions", "steps", "fragment_tokens", "lost_tokens", "trained")}
    values |= {"learner": learner, "region": "", "role": "learner", "state": "stepping", "sending": False, "loss": loss}
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
        members = [Member(name, 1, version, version, version - 1, 24, 240, 0, 1.0, []) for name in names[version % 3 :]]
        for fragment in range(fragments):
            entry = Record(
                fragment, "version", version, 1, "syncer-0", bytes(32), members, [], 4, 0.3, 0.9, version * 10**6, 0,
                bytes(32), False, 0.0, 0.5, 1.0, None,
            )  # fmt: skip
            made.entry(entry, at_s)
    return made


class Bench:
    """A coordinator without a server, as its page sees it."""

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


async def beat(bench: Bench) -> None:
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


async def measure(asked: argparse.Namespace) -> dict[str, Any]:
    bench = Bench(filled(asked.learners, asked.fragments, asked.versions))
    found: dict[str, Any] = {"merges kept": len(bench.monitor.merges.kept)}
    script = page.asset("page.js")
    found["script, compressed, bytes"] = len(gzip.compress(script))
    began_s = time.thread_time()
    packed = history.pack(Past(1, 0.0, bench.picture(), bench.monitor.curves(WEEK_S)))
    found["history, bytes"], found["history, processor s"] = len(packed), round(time.thread_time() - began_s, 3)
    beating = asyncio.create_task(beat(bench))
    server = PageServer(Drawing(bench, "bench", observe.get_logger()), "127.0.0.1:0", None, observe.get_logger())
    await server.start()
    for number in ("first", "second"):
        began_s = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 26)
        writer.write(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nConnection: close\r\n\r\n".encode())
        size = len(await reader.read())
        writer.close()
        found[f"page, {number} opening, s"] = round(time.monotonic() - began_s, 3)
    found["page, bytes"], found["drawing, processor s"] = size, round(server.drawing.cost_s, 3)
    idle = await share(asked.seconds)
    found["core, no viewer"] = round(idle, 4)
    for viewers in (1, asked.viewers):
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", VIEWERS, str(server.port), str(viewers))
        await asyncio.sleep(3)
        found[f"core, {viewers} viewers more than none"] = round(await share(asked.seconds) - idle, 4)
        process.kill()
        await process.wait()
    beating.cancel()
    await server.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("learners", 64), ("fragments", 256), ("versions", 1_000_000), ("viewers", 50), ("seconds", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    print(json.dumps(asyncio.run(measure(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
