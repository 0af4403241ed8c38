"""Revert what chaos did: frozen processes, wrong clocks, cut links, lowered limits. Each fault is on disk before it is made.

``python -m diloco_ops.chaos.revert DIR`` waits until its standard input is closed, as it is however chaos ends, and then
reverts what is still in the journal. So a chaos that is killed leaves nothing frozen or lowered behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from diloco.errors import RunError, WanError
from diloco.nats.connection import NatsLink
from diloco.process import files, observe
from diloco.service import rundir
from diloco_ops.broker.admin import set_limit
from diloco_ops.wan import control

JOURNAL = "chaos-journal.json"
CONNECT_S = 30.0  # the server may just be starting again


class FaultJournal:
    """The faults to revert, numbered; the file is gone when there are none."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / JOURNAL
        self._entries = _read(self.file)
        self._next = max(map(int, self._entries), default=0) + 1

    @property
    def entries(self) -> list[tuple[str, dict[str, Any]]]:
        return list(self._entries.items())

    def add(self, **entry: Any) -> str:
        """Note a fault that is about to be brought about. Return the number to :meth:`drop` it by."""
        number, self._next = str(self._next), self._next + 1
        self._entries[number] = entry
        self._write()
        return number

    def drop(self, number: str) -> None:
        """Forget a fault that was reverted."""
        del self._entries[number]
        self._write()

    def _write(self) -> None:
        if self._entries:
            files.replace_text(self.file, json.dumps(self._entries))
        else:
            self.file.unlink(missing_ok=True)


def _read(file: Path) -> dict[str, dict[str, Any]]:
    try:
        entries = json.loads(file.read_text())
        return {str(int(number)): dict(entry) for number, entry in entries.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(
            f"{file}: damaged ({error}); resume all services that are stopped (kill -CONT), then delete the file"
        ) from None


def began(pid: int) -> str:
    """Return a mark that tells a process from a later one with the same pid; empty where the system has no ``/proc``."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def send(pid: int, since: str, number: signal.Signals) -> bool:
    """Send a signal to the process that began at ``since``. Return whether it is there."""
    if began(pid) != since:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def revert_here(entry: dict[str, Any]) -> bool:
    """Revert a fault that needs no server. Return whether it was one."""
    if entry["what"] == "frozen":
        send(entry["pid"], entry["began"], signal.SIGCONT)
    elif entry["what"] == "clock":
        Path(entry["file"]).unlink(missing_ok=True)
    elif entry["what"] == "links":
        command(entry["at"], control.Heal(entry["links"]))
    return bool(entry["what"] != "limit")


def command(at: str, request: control.Cut | control.Heal) -> None:
    """Command the relay between regions; one that is away carries nothing, and begins again with all links whole."""
    with contextlib.suppress(WanError):
        list(control.asked(at, request))


async def revert(entry: dict[str, Any], link: NatsLink | None) -> None:
    """Revert one fault; ``link``: to the server that has the stream of a limit.

    Raises:
        BrokerError: the server refuses, or is away for half a minute.
    """
    if not await asyncio.to_thread(revert_here, entry):
        assert link is not None
        await set_limit(link, entry["stream"], lambda _: int(entry["max_bytes"]))


async def revert_all(directory: Path) -> None:
    """Revert all faults in the journal: first those that need no server, since it may be the server that is frozen."""
    journal = FaultJournal(directory)
    for number, entry in journal.entries:
        if revert_here(entry):
            journal.drop(number)
    for number, entry in journal.entries:
        run = rundir.load(directory)
        url = (run.region_urls or {}).get(entry.get("region", ""), run.nats_url)
        link = await NatsLink.open(url, url, "chaos-revert", observe.get_logger(), CONNECT_S)
        try:
            await revert(entry, link)
            journal.drop(number)
        finally:
            await link.close()


def start_watchdog(directory: Path) -> subprocess.Popen[bytes]:
    """Start a process that reverts all faults when this one is gone."""
    return subprocess.Popen(
        [sys.executable, "-m", "diloco_ops.chaos.revert", str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _main() -> int:
    sys.stdin.buffer.read()
    asyncio.run(revert_all(Path(sys.argv[1])))
    return 0


if __name__ == "__main__":
    sys.exit(observe.run_main(_main, "diloco-chaos-revert"))
