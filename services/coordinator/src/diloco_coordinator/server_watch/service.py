"""``diloco-server-watch`` as a process: looks at a server every few seconds, and serves what it saw to Prometheus."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.errors import DilocoError, FormatError
from diloco.process import observe
from diloco.process.observe import Counted, Logger
from diloco.service import skeleton as service
from diloco.service.metrics import SILENT_S, Exporter, Labelled, families
from diloco.settings.service import ServerWatchSettings, host_and_port
from diloco_coordinator.server_watch.figures import MAX_ANSWER_BYTES, figures, read_answer
from diloco_coordinator.server_watch.server_metrics import METRICS, ServerLook, StreamDisk
from diloco_coordinator.server_watch.violations import ViolationLog

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

LOOK_EVERY_S = 5.0  # at least twice between two scrapes
ANSWER_S = 4.0  # for all answers of one look


class ServerRestartedError(DilocoError):
    """The server was started again in another network namespace. Started again, this process is in that one."""


class ServerWatch:
    """The newest look at a server, as the exporter observes it."""

    quiet_s = SILENT_S
    refused: Counted | None = None

    def __init__(self, settings: ServerWatchSettings, log: Logger, labels: Mapping[str, str]) -> None:
        self.settings, self.log, self.labels = settings, log, labels
        self.newest = ServerLook(None, False, None, settings.memory_bytes or _machine_bytes())
        self._violations = None if settings.log_file is None else ViolationLog(settings.log_file, settings.lists_file)
        self._answers: bool | None = None  # as last logged
        self._missing_limits: Sequence[str] = ()  # likewise
        self._began_s = _process_began_s()
        self._looked_s: float | None = None

    async def work(self) -> None:
        """Look again and again, for ever.

        Raises:
            ServerRestartedError: the server does not answer, and was started again since this process began.
        """
        while True:
            await self.look()
            if self.newest.figures is None and self._server_began_s() > self._began_s:
                raise ServerRestartedError(
                    "the server was restarted in a network that this process cannot reach, so this process ends, to be "
                    "restarted there"
                )
            await asyncio.sleep(LOOK_EVERY_S)

    async def look(self) -> None:
        """Ask the server, and look at its disk."""
        found, healthy = None, False
        try:
            async with asyncio.timeout(ANSWER_S):
                found = figures(await self._ask("/varz"), await self._ask("/jsz"))
                healthy = await self._is_healthy()
            self._note(None)
            self._note_limits(found.missing_limits)
        except TimeoutError:
            self._note(f"no answer within {ANSWER_S:g} s")
        except OSError as error:
            self._note(os.strerror(error.errno) if error.errno else str(error))
        except FormatError as error:
            self._note(str(error))
        self.newest = ServerLook(found, healthy, self._disk(), self.newest.memory_limit_bytes, await self._violated())
        self._looked_s = asyncio.get_running_loop().time()
        if self.settings.alive_file is not None:
            with contextlib.suppress(OSError):  # no reason to be dead
                self.settings.alive_file.touch()

    # ---- what the exporter asks

    def waits_for(self) -> str | None:
        return None if self.newest.figures is not None else f"the server's monitoring port {self.settings.monitor_address}"

    def beat_s(self) -> float | None:
        return self._looked_s

    def families(self) -> Iterator[Family]:
        return families(METRICS, self.newest, self.labels)

    # ---- the server

    async def _is_healthy(self) -> bool:
        status, _ = await self._get("/healthz")
        return status == 200

    async def _ask(self, path: str) -> bytes:
        status, body = await self._get(path)
        if status != 200:
            raise FormatError(f"{path}: status {status}")
        return body

    async def _get(self, path: str) -> tuple[int, bytes]:
        host, port = host_and_port(self.settings.monitor_address)
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(f"GET {path} HTTP/1.0\r\nHost: {self.settings.monitor_address}\r\n\r\n".encode())
            answer = b""
            while len(answer) <= MAX_ANSWER_BYTES and (more := await reader.read(MAX_ANSWER_BYTES)):
                answer += more
        finally:
            writer.transport.abort()
        return read_answer(answer)

    async def _violated(self) -> Labelled:
        """Return the violations that the server's log has."""
        if self._violations is None:
            return {}
        await asyncio.to_thread(self._violations.read)
        return self._violations.counts()

    def _note(self, trouble: str | None) -> None:
        """Log once that the server does not answer, and once that it does again."""
        answers = trouble is None
        if answers != self._answers:
            self._answers = answers
            if answers:
                self.log.info("server_answers", address=self.settings.monitor_address)
            else:
                self.log.warning("server_silent", address=self.settings.monitor_address, reason=trouble)

    def _note_limits(self, missing: Sequence[str]) -> None:
        """Log which limits a server's configuration lacks: at the first look, and when they are others."""
        if missing != self._missing_limits:
            self._missing_limits = missing
            if missing:
                self.log.warning(
                    "server_without_limits",
                    reason=f"its configuration sets no {', '.join(missing)}; see deploy/datacenter/nats.conf",
                )

    def _disk(self) -> StreamDisk | None:
        try:
            found = os.statvfs(self.settings.store_dir)
        except OSError:
            return None
        return StreamDisk(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)

    def _server_began_s(self) -> float:
        """Return when the server wrote its PID file, at its start, as Unix time; -inf: there is none, or none is set."""
        if self.settings.pid_file is None:
            return -math.inf
        try:
            return self.settings.pid_file.stat().st_mtime
        except OSError:
            return -math.inf


def _process_began_s() -> float:
    """Return when this process began, as Unix time, to a second: long before its modules are imported on a busy machine.

    The server may be started again meanwhile, and be out of reach from the beginning.
    """
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        [boot_s] = re.findall(r"^btime (\d+)$", Path("/proc/stat").read_text(), re.MULTILINE)
    except (OSError, ValueError, IndexError):  # no Linux
        return time.time()
    return int(boot_s) + ticks / os.sysconf("SC_CLK_TCK")


def _machine_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


async def serve(settings: ServerWatchSettings) -> None:
    """Watch until a signal comes."""
    log = observe.get_logger()
    async with Exporter(settings, "server-watch", log, connects=False) as exporter:
        watch = exporter.observed = ServerWatch(settings, log, exporter.labels())
        await watch.work()


def _main() -> int:
    settings = service.read_settings(ServerWatchSettings, "diloco-server-watch")
    service.begin_logs(settings, "diloco-server-watch")
    asyncio.run(service.until_stopped(lambda: serve(settings), observe.get_logger()))
    return 0


def main() -> None:
    """Run the console script."""
    sys.exit(observe.run_main(_main, "diloco-server-watch"))


if __name__ == "__main__":
    main()
