"""What chaos must put right again: frozen processes, wrong clocks, lowered limits. It is on disk before it is done.

``python -m diloco.chaos.undo DIR`` waits until its standard input is closed, as it is when chaos ends in whatever way, and then
puts right what is still in the journal. So a chaos that is killed leaves nothing frozen or lowered behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nats.errors
import nats.js.errors

from diloco import files, observe, rundir
from diloco.errors import BrokerError, RunError
from diloco.nats.transport import NatsTransport

JOURNAL = "chaos-undo.json"
ATTEMPTS_S = 30.0
RETRY_S = 0.5


class Journal:
    """What has to be put right, by a number each; the file is gone when there is nothing."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / JOURNAL
        self._entries = _read(self.file)
        self._next = max(map(int, self._entries), default=0) + 1

    @property
    def entries(self) -> list[tuple[str, dict[str, Any]]]:
        return list(self._entries.items())

    def add(self, **entry: Any) -> str:
        """Note something that is about to be done; the number to :meth:`drop` it by."""
        number, self._next = str(self._next), self._next + 1
        self._entries[number] = entry
        self._write()
        return number

    def drop(self, number: str) -> None:
        """It has been put right."""
        del self._entries[number]
        self._write()

    def _write(self) -> None:
        if self._entries:
            text = json.dumps(self._entries)
            files.replace_text(self.file, text)
        else:
            self.file.unlink(missing_ok=True)


def _read(file: Path) -> dict[str, dict[str, Any]]:
    try:
        entries = json.loads(file.read_text())
        return {str(int(number)): dict(entry) for number, entry in entries.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(f"{file}: damaged ({error}); see that no service is stopped (kill -CONT), then delete it") from None


def began(pid: int) -> str:
    """Something that tells a process from a later one with the same pid; empty where the system has no ``/proc``."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def send(pid: int, since: str, number: signal.Signals) -> bool:
    """Send a signal to the process that began then; whether it is there."""
    if began(pid) != since:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


async def set_limit(transport: NatsTransport, stream: str, limit: Callable[[int], int]) -> int:
    """Set a stream's ``max_bytes`` to what ``limit`` makes of the bytes it holds now; the limit that it had.

    Raises:
        BrokerError: the server does not do so for half a minute.
    """
    give_up_s = time.monotonic() + ATTEMPTS_S
    while True:
        try:
            api = transport.control.jetstream(timeout=5)
            info = await api.stream_info(stream)
            before = int(info.config.max_bytes or -1)
            info.config.max_bytes = limit(int(info.state.bytes))
            await api.update_stream(info.config)
            return before
        except nats.js.errors.APIError as error:
            raise BrokerError(f"stream {stream}: its limit cannot be set: {error.description}") from None
        except (nats.errors.Error, TimeoutError):
            if time.monotonic() > give_up_s:
                raise BrokerError(f"stream {stream}: its limit cannot be set: no answer for {ATTEMPTS_S:g} s") from None
            await asyncio.sleep(RETRY_S)


def put_right_here(entry: dict[str, Any]) -> bool:
    """Undo what needs no server; whether that was all."""
    if entry["what"] == "frozen":
        send(entry["pid"], entry["began"], signal.SIGCONT)
    elif entry["what"] == "clock":
        Path(entry["file"]).unlink(missing_ok=True)
    return bool(entry["what"] != "limit")


async def put_right(entry: dict[str, Any], transport: NatsTransport) -> None:
    """Undo one thing."""
    if not put_right_here(entry):
        await set_limit(transport, entry["stream"], lambda _: int(entry["max_bytes"]))


async def put_all_right(directory: Path) -> None:
    """Undo all that is in the journal: first what needs no server, since it may be the server that is frozen."""
    journal = Journal(directory)
    for number, entry in journal.entries:
        if put_right_here(entry):
            journal.drop(number)
    if journal.entries:
        url = rundir.load(directory).nats_url
        transport = await NatsTransport.open(url, url, "chaos-undo", observe.get_logger(), ATTEMPTS_S)
        try:
            for number, entry in journal.entries:
                await put_right(entry, transport)
                journal.drop(number)
        finally:
            await transport.close()


def start_guardian(directory: Path) -> subprocess.Popen[bytes]:
    """A process that puts all right when this one is gone."""
    return subprocess.Popen(
        [sys.executable, "-m", "diloco.chaos.undo", str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _main() -> int:
    sys.stdin.buffer.read()
    asyncio.run(put_all_right(Path(sys.argv[1])))
    return 0


if __name__ == "__main__":
    sys.exit(observe.run_main(_main, "diloco-chaos-undo"))
