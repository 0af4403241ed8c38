"""How ``diloco top`` hears of a run: its coordinator's answers, members' heartbeats, the log's heads, and the stored history.

Nothing is sent to the run but requests for its status, and reads of its bucket and of its log's heads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

import structlog

from diloco.control import creation
from diloco.control.creation import KnownRun
from diloco.control.gate import HeartbeatGate, check_owned
from diloco.control.hearing import hear
from diloco.control.history import KEY, unpack
from diloco.core.tensors.fragments import FragmentMap
from diloco.errors import BrokerError, FormatError, RewoundError
from diloco.log.log import Log
from diloco.log.stream import pass_over
from diloco.nats.connection import ask
from diloco.nats.transport import NatsTransport
from diloco.process import logs
from diloco.process.observe import Logger
from diloco.process.retry import until_available
from diloco.process.tasks import end
from diloco.service.rundir import RunDirectory
from diloco.transport import Heard
from diloco.wire.control import Heartbeat, ShardHeartbeat
from diloco.wire.subjects import Subjects
from diloco_ops.live.watched import Watched
from diloco_ops.reading import attach, inspect, run_reader

ASK_S = 0.5  # between two questions: a view moves twice a second
ANSWER_S = 2.0  # for one answer; across the world it comes within half a second
HISTORY_S = 10.0  # between two readings: the leader stores it as often at most
LOGS_S = 0.5  # between two looks at the logs of a directory
MAX_LINES = 2000  # of the logs that are kept


class RunFeed:
    """One run, as it is heard. ``watched`` and ``lines``, of the logs, are what is known of it so far."""

    def __init__(self, directory: RunDirectory, transport: NatsTransport, watched: Watched, local: bool) -> None:
        """``local``: the directory is the run's, and has its logs."""
        self.directory, self.transport, self.watched, self.local = directory, transport, watched, local
        self.lines: list[logs.LogLine] = []
        self._log = _teller(watched)

    async def listen(self) -> None:
        """Listen until cancelled; a server that is away is waited for."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._ask())
            group.create_task(self._hear())
            group.create_task(self._read_history())
            if self.local:
                group.create_task(self._read_logs())

    async def _ask(self) -> None:
        subject = Subjects(self.directory.name).status
        while True:
            began_s = time.monotonic()
            try:
                data = await ask(self.transport.control, self.transport.name, subject, b"", ANSWER_S)
                answer = None if data is None else inspect.answered(data, self.directory)
            except BrokerError:  # the server is away, or something else answers
                answer = None
            self.watched.answer(answer, time.monotonic())
            await asyncio.sleep(max(0.0, began_s + ASK_S - time.monotonic()))

    async def _hear(self) -> None:
        """Hear members, and follow the log, as soon as the run has a fragment map: until then it has none of both."""
        run = await until_available(
            lambda: creation.open_run(self.transport, self.directory.name, self.directory.settings), self._log
        )
        fragment_map = await until_available(partial(creation.find_map, run), self._log)
        gate = HeartbeatGate(run, fragment_map, None, self._learner)
        names = Subjects(run.name)

        async def shard(heartbeat: ShardHeartbeat, _: Heard) -> None:
            check_owned(heartbeat, len(fragment_map.fragments))
            self.watched.hear_shard(heartbeat, time.monotonic())

        await self.transport.subscribe(names.heartbeat(), gate.hear)
        await hear(self.transport, names.shard(), ShardHeartbeat, run.identity, shard, refused=None)
        async with asyncio.TaskGroup() as group:
            group.create_task(gate.work())
            if not run.regions or self.directory.nats_bulk_url is not None:
                group.create_task(self._follow(run, fragment_map))

    async def _learner(self, heartbeat: Heartbeat) -> None:
        self.watched.hear(heartbeat, time.monotonic())

    async def _follow(self, run: KnownRun, fragment_map: FragmentMap) -> None:
        """Follow the log's heads from now on; the history has those before."""
        log = Log(self.transport, run.name, run.identity, fragment_map, run.created)
        start = None
        while True:
            with suppress(RewoundError):  # its server lost what was read: it is read from its new end
                newest = await until_available(partial(log.stream.last, log.subjects.record("*")), self._log)
                start = 1 if newest is None else newest.sequence + 1
                async for head in log.entries.heads(pass_over, start):
                    self.watched.entry(head.record, time.monotonic())

    async def _read_history(self) -> None:
        while True:
            try:
                bucket = await self.transport.bucket(Subjects(self.directory.name).bucket, create=False)
                stored = await bucket.get(KEY)
                if stored is not None:
                    past = unpack(stored[0])
                    age_s = max(0.0, self.transport.wall_s() - past.at_s)
                    self.watched.past(past.picture, past.curves, age_s, time.monotonic())
            except (BrokerError, FormatError, KeyError, TypeError, ValueError, AttributeError) as error:
                self._log.warning("history_unreadable", reason=str(error) or repr(error))
            await asyncio.sleep(HISTORY_S)

    async def _read_logs(self) -> None:
        """Read the logs of the run's directory, and go on with what is written."""
        going = True

        def wait() -> bool:
            time.sleep(LOGS_S)
            return going

        def follow() -> None:
            for entry in logs.merge(self.directory.path, follow=True, level="info", wait=wait):
                self.lines.append(entry)
                del self.lines[:-MAX_LINES]

        reading = asyncio.ensure_future(asyncio.to_thread(follow))
        try:
            await asyncio.Event().wait()  # until cancelled
        finally:
            going = False
            await end(reading)


@asynccontextmanager
async def reached(directory: RunDirectory, *, local: bool) -> AsyncIterator[RunFeed]:
    """Reach a run on its server, by whose settings it is watched.

    Raises:
        BrokerError: the server does not answer, or turns us away.
        RunError, SettingsError: it does not have the run, or one that this version cannot read; the identity cannot be used.
    """
    watched = Watched(directory.name, directory.settings.liveness.dead_s)
    transport = await run_reader.connect(directory, "top", run_reader.ANSWER_TIMEOUT_S, _teller(watched))
    try:
        settings = await attach.stored_settings(transport, directory)
        watched.dead_s = settings.liveness.dead_s
        yield RunFeed(replace(directory, settings=settings), transport, watched, local and (directory.path / "logs").is_dir())
    finally:
        await transport.close()


def _teller(watched: Watched) -> Logger:
    """Return a logger whose warnings are events of the view: a terminal that is drawn on has no room for lines."""

    def tell(_: Any, __: str, event: MutableMapping[str, Any]) -> str:
        values = " ".join(f"{key}={value}" for key, value in event.items() if key not in ("event", "level"))
        watched.tell(time.monotonic(), "top", f"{event['event']} {values}".strip())
        raise structlog.DropEvent

    wrapper = structlog.make_filtering_bound_logger(logging.WARNING)
    return cast(Logger, structlog.wrap_logger(None, processors=[tell], wrapper_class=wrapper))
