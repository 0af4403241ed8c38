"""``diloco-coordinator``: creates the run, watches it, answers status requests. Training goes on without it."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from diloco import membership, observe, service
from diloco.errors import MessageError
from diloco.membership import Run
from diloco.nats.connection import Link
from diloco.nats.pull import Puller
from diloco.observe import Counted, Logger
from diloco.rundir import write_json
from diloco.settings import CoordinatorSettings
from diloco.wire import messages
from diloco.wire.messages import Pulse, Record, ShardPulse
from diloco.wire.subjects import Subjects
from diloco_coordinator.monitor import Monitor

SAVE_EVERY_S = 5.0
LAST_PULSES_S = 1.0


class Coordinator:
    """The service; ``await serve()`` returns when the run is finished."""

    def __init__(self, link: Link, run: Run, settings: CoordinatorSettings, log: Logger) -> None:
        self.link, self.run, self.settings, self.log = link, run, settings, log
        self.subjects = Subjects(run.name)
        self.refused = Counted(log)
        self.file = settings.state_dir / "series.json"
        self._clock = asyncio.get_running_loop().time
        self._began_s = self._clock()
        self._monitor: Monitor | None = None

    async def serve(self) -> None:
        """Watch the run until it is finished."""
        await self.link.control.subscribe(self.subjects.status, cb=self._answer)
        fragment_map = await membership.find_map(self.run)
        self._monitor = Monitor(self.run.name, self.run.settings, fragment_map, self.settings.nats_url)
        self._resume(self._monitor)
        await self.link.control.subscribe(self.subjects.pulse(), cb=self._hear)
        await self.link.control.subscribe(self.subjects.shard(), cb=self._hear_shard)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._follow(self._monitor)), group.create_task(self._save_regularly())]
            await self._until_finished(self._monitor)
            for task in tasks:
                task.cancel()
        self.save()
        self.log.info("run_finished", wall_s=round(self._now_s(), 1), versions=sum(self._monitor.versions))

    async def _until_finished(self, monitor: Monitor) -> None:
        while monitor.state != "finished":
            await asyncio.sleep(0.1)
        await asyncio.sleep(LAST_PULSES_S)

    def _now_s(self) -> float:
        return self._clock() - self._began_s

    def _resume(self, monitor: Monitor) -> None:
        try:
            series = json.loads(self.file.read_text())
            monitor.resume(series)
            self._began_s = self._clock() - float(series["wall_s"])
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.log.warning("series_unreadable", file=str(self.file), reason=str(error))

    async def _answer(self, message: Any) -> None:
        status = {"run": self.run.name, "state": "waiting"} if self._monitor is None else self._monitor.status(self._now_s())
        await message.respond(json.dumps(status).encode())

    async def _hear(self, message: Any) -> None:
        assert self._monitor is not None
        try:
            pulse, _, _ = messages.unpack(message.data, Pulse, self.run.identity)
        except MessageError as error:
            self.refused.note(message.subject, type(error).__name__, reason=str(error))
            return
        self._monitor.hear(pulse, self._now_s())

    async def _hear_shard(self, message: Any) -> None:
        assert self._monitor is not None
        try:
            pulse, _, _ = messages.unpack(message.data, ShardPulse, self.run.identity)
        except MessageError as error:
            self.refused.note(message.subject, type(error).__name__, reason=str(error))
            return
        self._monitor.hear_shard(pulse, self._now_s())

    async def _follow(self, monitor: Monitor) -> None:
        heads = [self.subjects.record("*")]
        async for message in Puller(self.link, self.subjects.log_stream, heads, 1):
            try:
                record, _, _ = messages.unpack(message.data, Record, self.run.identity)
            except MessageError as error:
                self.refused.note(message.subject, type(error).__name__, reason=str(error))
                continue
            if record.fragment < len(monitor.versions):
                monitor.entry(record, self._now_s())

    async def _save_regularly(self) -> None:
        while True:
            await asyncio.sleep(SAVE_EVERY_S)
            await asyncio.to_thread(self.save)

    def save(self) -> None:
        """Write the series to the state directory."""
        if self._monitor is not None:
            write_json(self.file, self._monitor.series(self._now_s()))


async def serve(settings: CoordinatorSettings) -> None:
    """Create or find the run, and watch it until it is over or a signal comes."""
    log = observe.get_logger()
    link = await service.connect(settings, log)
    coordinator: Coordinator | None = None
    try:
        run = await membership.create(link, settings.run, settings.settings)
        log.info("run_ready", preset=run.settings.preset, tokens=run.settings.tokens)
        coordinator = Coordinator(link, run, settings, log)
        await coordinator.serve()
    finally:
        if coordinator is not None:
            coordinator.save()
        await link.close()


def _main() -> int:
    settings = service.parse_settings(CoordinatorSettings, "diloco-coordinator")
    asyncio.run(service.until_stopped(lambda: serve(settings), observe.get_logger()))
    return 0


def main() -> None:
    """Console script."""
    sys.exit(observe.run_main(_main, "diloco-coordinator"))


if __name__ == "__main__":
    main()
