"""How accurate emulated links are: rates, delays, jitter, the precedence of control, and how much a relay carries.

    python bench/link.py                                     # two and a half minutes
    python bench/link.py --seconds 2 --rates 5 50 --json

A relay (``diloco wan serve``) on loopback, as a process of its own; sender and receiver are this process, with one clock, and
for ``unlimited`` the sender is another process. *rate*: bytes that come out of a saturated link, against what it is set to.
*delay*: messages of 64 bytes, 50 a second, on an idle link; the time from send to receive, less the link's delay. *control*:
messages of 200 bytes, 50 a second, on a link without delay that bulk saturates; beside them the same as bulk. *direct*: the
same messages without a relay. CPU seconds are the relay's.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import script

RATES_MBIT_S = (1, 2, 5, 10, 20, 50, 100, 200)
DELAYS = ((0.0, 0.0), (0.030, 0.0), (0.070, 0.0), (0.030, 0.005), (0.070, 0.005))  # delay, jitter
SATURATED_MBIT_S = (5, 10)
MESSAGES_PER_S = 50
WARM_UP_S = 1.0
MB = 10**6
SHARES = {"p10": 0.10, "p50": 0.50, "p90": 0.90, "p99": 0.99}

Conditions = Mapping[str, float]  # of a link, as the relay's file has them
STAMP = struct.Struct("d")


class Relay:
    """A relay process with a link for each of the conditions, and a bulk and a control route over each."""

    def __init__(self, folder: Path, links: Sequence[Conditions]) -> None:
        self._target = socket.create_server(("127.0.0.1", 0))
        address = f"127.0.0.1:{self._target.getsockname()[1]}"
        lines = ['control = "127.0.0.1:0"']
        for i, conditions in enumerate(links):
            lines += [f"[links.from{i}-to]", *(f"{name} = {value}" for name, value in conditions.items())]
            for traffic in ("bulk", "control"):
                lines += ["[[routes]]", f'from = "from{i}"', 'to = "to"', 'listen = "127.0.0.1:0"', f'target = "{address}"']
                lines += [f'traffic = "{traffic}"']
        config = folder / "wan.toml"
        config.write_text("\n".join(lines))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "diloco_ops.cli", "wan", "serve", str(config)], stderr=subprocess.PIPE, text=True
        )
        assert self._process.stderr is not None
        self._ports: dict[tuple[int, str], int] = {}
        for line in self._process.stderr:
            event = json.loads(line)
            if event["event"] == "wan_started":
                break
            number = int(event["link"].removeprefix("from").removesuffix("-to"))
            self._ports[number, event["traffic"]] = int(event["listen"].rpartition(":")[2])

    def cpu_s(self) -> float:
        """Return the CPU time that the relay has used."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def port(self, link: int, traffic: str) -> int:
        """Return the port of a route's listener."""
        return self._ports[link, traffic]

    def accept(self) -> socket.socket:
        """Return the next connection at the target."""
        return self._target.accept()[0]

    def pair(self, link: int, traffic: str) -> tuple[socket.socket, socket.socket]:
        """Open a connection; return the client's end and the target's."""
        near = socket.create_connection(("127.0.0.1", self.port(link, traffic)))
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return near, self.accept()

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.communicate()
        self._target.close()


@contextlib.contextmanager
def relay(links: Sequence[Conditions]) -> Iterator[Relay]:
    """Run a relay with these links."""
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as folder:
        made = Relay(Path(folder), links)
        try:
            yield made
        finally:
            made.close()


def flood(sock: socket.socket) -> None:
    """Send until the connection ends."""
    block = bytes(1 << 18)
    with contextlib.suppress(OSError):
        while True:
            sock.sendall(block)


def flood_port(port: int) -> None:
    """Send to a port until the connection ends."""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        flood(sock)


def received(sock: socket.socket, seconds: float) -> tuple[int, float]:
    """Bytes and the seconds they took, from one arrival to another about so much later, after a warm-up."""
    buffer, began_s, count = bytearray(1 << 20), time.perf_counter(), 0
    while time.perf_counter() < began_s + min(WARM_UP_S, seconds):
        sock.recv_into(buffer)
    first_s = now_s = time.perf_counter()
    while now_s < first_s + seconds:
        count += sock.recv_into(buffer)
        now_s = time.perf_counter()
    return count, now_s - first_s


def drain(sock: socket.socket) -> None:
    """Receive until the connection ends."""
    buffer = bytearray(1 << 20)
    with contextlib.suppress(OSError):
        while sock.recv_into(buffer):
            pass


def measure_rate(made: Relay, link: int, rate_mbit_s: float, seconds: float) -> dict[str, float]:
    """Measure a saturated link."""
    near, far = made.pair(link, "bulk")
    with near, far:
        threading.Thread(target=flood, args=(near,), daemon=True).start()
        before_s, began_s = made.cpu_s(), time.perf_counter()
        count, took_s = received(far, seconds)
        relay_cpu = (made.cpu_s() - before_s) / (time.perf_counter() - began_s)
    achieved = count * 8 / took_s / 1e6
    return {
        "rate_mbit_s": rate_mbit_s,
        "achieved_mbit_s": achieved,
        "error": achieved / rate_mbit_s - 1,
        "relay_cpu": relay_cpu,
    }


def one_way(near: socket.socket, far: socket.socket, size: int, seconds: float) -> list[float]:
    """Seconds that messages take, one after another."""
    count = max(5, int(seconds * MESSAGES_PER_S))

    def send() -> None:
        for _ in range(count):
            near.sendall(STAMP.pack(time.perf_counter()) + bytes(size - STAMP.size))
            time.sleep(1 / MESSAGES_PER_S)

    sender = threading.Thread(target=send)
    sender.start()
    took_s = []
    for _ in range(count):
        message = b""
        while len(message) < size:
            message += far.recv(size - len(message))
        took_s.append(time.perf_counter() - STAMP.unpack_from(message)[0])
    sender.join()
    return took_s


def spread(values: list[float]) -> dict[str, float]:
    """Percentiles."""
    ordered = sorted(values)
    at = {name: ordered[min(len(ordered) - 1, int(len(ordered) * share))] for name, share in SHARES.items()}
    return {"least": ordered[0]} | at | {"most": ordered[-1]}


def measure_direct(seconds: float) -> dict[str, float]:
    """Measure the same messages without a relay."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        far = server.accept()[0]
        with near, far:
            return spread(one_way(near, far, 64, seconds))


def measure_delay(made: Relay, link: int, delay_s: float, jitter_s: float, seconds: float) -> dict[str, Any]:
    """Measure an idle link."""
    near, far = made.pair(link, "bulk")
    with near, far:
        off_s = [took_s - delay_s for took_s in one_way(near, far, 64, seconds)]
    return {"delay_s": delay_s, "jitter_s": jitter_s, "off_s": spread(off_s)}


def measure_control(made: Relay, link: int, rate_mbit_s: float, seconds: float) -> list[dict[str, Any]]:
    """Messages of both classes beside bulk that saturates the link."""
    rows = []
    bulk, sink = made.pair(link, "bulk")
    with bulk, sink:
        threading.Thread(target=flood, args=(bulk,), daemon=True).start()
        threading.Thread(target=drain, args=(sink,), daemon=True).start()
        time.sleep(min(WARM_UP_S, seconds))
        for traffic in ("control", "bulk"):
            near, far = made.pair(link, traffic)
            with near, far:
                took_s = one_way(near, far, 200, seconds)
            rows.append({"rate_mbit_s": rate_mbit_s, "sent_as": traffic, "took_s": spread(took_s)})
    return rows


def measure_unlimited(made: Relay, link: int, seconds: float) -> dict[str, float]:
    """As much as goes."""
    port = made.port(link, "bulk")
    sender = multiprocessing.get_context("spawn").Process(target=flood_port, args=(port,))
    sender.start()
    with made.accept() as far:
        before_s, began_s = made.cpu_s(), time.perf_counter()
        count, took_s = received(far, seconds)
        relay_cpu = (made.cpu_s() - before_s) / (time.perf_counter() - began_s)
    sender.join()
    return {"mb_s": count / MB / took_s, "relay_cpu_s_per_gb": relay_cpu * took_s / (count / 1e9)}


def measure(rates_mbit_s: list[float], seconds: float) -> dict[str, Any]:
    """Everything, one after the other."""
    rates = [{"rate_bits_per_s": rate * 1e6} for rate in (*rates_mbit_s, *SATURATED_MBIT_S)]
    delays = [{"delay_s": delay_s, "jitter_s": jitter_s} for delay_s, jitter_s in DELAYS]
    links: list[Conditions] = [*rates, *delays, {}]
    numbers = iter(range(len(links)))
    load = os.getloadavg()[0]
    with relay(links) as made:
        return {
            "machine": script.machine() | {"load_before": load},
            "seconds": seconds,
            "rates": [measure_rate(made, next(numbers), rate, seconds) for rate in rates_mbit_s],
            "control": [row for rate in SATURATED_MBIT_S for row in measure_control(made, next(numbers), rate, seconds)],
            "direct_s": measure_direct(seconds),
            "delays": [measure_delay(made, next(numbers), *conditions, seconds) for conditions in DELAYS],
            "unlimited": measure_unlimited(made, next(numbers), seconds),
        }


def show(result: dict[str, Any]) -> None:
    """Print a result as text."""
    about = result["machine"]
    print(
        f"{about['cpu']}, {about['cores']} cores, load {about['load_before']:.1f}, Python {about['python']}; "
        f"{result['seconds']:g} s each"
    )
    print(f"{'rate Mbit/s':>16}{'achieved':>10}{'error':>10}{'relay CPU':>11}")
    for row in result["rates"]:
        print(f"{row['rate_mbit_s']:16g}{row['achieved_mbit_s']:10.3f}{row['error']:10.2%}{row['relay_cpu']:11.1%}")
    print(f"{'ms':26}{'least':>9}" + "".join(f"{name:>9}" for name in SHARES) + f"{'most':>9}")
    print(_times("direct", result["direct_s"]))
    for row in result["delays"]:
        print(_times(f"beyond {row['delay_s'] * 1e3:g} ± {row['jitter_s'] * 1e3:g} ms", row["off_s"]))
    for row in result["control"]:
        print(_times(f"{row['sent_as']} at {row['rate_mbit_s']:g} Mbit/s", row["took_s"]))
    unlimited = result["unlimited"]
    print(f"unlimited: {unlimited['mb_s']:.0f} MB/s, {unlimited['relay_cpu_s_per_gb']:.2f} CPU-s/GB of the relay")


def _times(name: str, took_s: dict[str, float]) -> str:
    return f"{name:26}" + "".join(f"{value * 1e3:9.2f}" for value in took_s.values())


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES_MBIT_S), metavar="MBIT_S")
    arguments = parser.parse_args()
    script.print_result(measure(arguments.rates, arguments.seconds), arguments, show)


if __name__ == "__main__":
    main()
