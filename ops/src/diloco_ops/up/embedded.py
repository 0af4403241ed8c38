"""The servers that ``diloco up`` runs itself: one; or, in a run with regions, one a region, a control store, and links between.

On one machine the regions are apart because they know nothing of each other but the relay's ports (:mod:`diloco_ops.wan`). The
control store is a single server at a place of its own, so that no region's loss takes it away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

from diloco.errors import BrokerError
from diloco_ops.broker.server import Server, free_ports

CONTROL = "nats"  # the only server, or the control store; also its folder's name
CONTROL_REGION = "control"  # as links name the place of the control store
ATTEMPTS = 5

# Of one link, by the pair of places in order of name. The rate is that of a 12B model at 5 s a step over 2 Gbit/s, for the
# default model and its steps (docs/wan.md): what counts is model bytes / (rate x step time).
RATE_BITS_PER_S = 2.9e6  # of each link
ONE_WAY_S = {("ap", "eu"): 0.07, ("ap", "us"): 0.05, ("eu", "us"): 0.03}  # of cables between such places
OTHER_ONE_WAY_S = 0.05  # between any others
CONTROL_ONE_WAY_S = 0.03  # to the control store, which is near everybody
JITTER_S = 0.002  # of each link


def server_name(region: str) -> str:
    """Return the name of a region's server, and of its folder."""
    return f"{CONTROL}-{region}"


class Embedded:
    """Servers in folders below a run's directory. Ports are new at each start of a run.

    ``listen``: host and port of the only server of a run without regions, which members elsewhere reach.
    """

    def __init__(self, path: Path, regions: Sequence[str], listen: tuple[str, int] | None = None) -> None:
        names = [CONTROL, *map(server_name, regions)]
        self.path, self.regions = path, list(regions)
        pairs = list(permutations([*regions, CONTROL_REGION], 2)) if regions else []
        ports = iter(free_ports(len(names) + len(pairs) + 1))
        self.servers = {name: Server(path / name, next(ports)) for name in names}
        if listen is not None:
            host, port = listen
            self.servers[CONTROL] = Server(path / CONTROL, port or None, host=host)
        self.url = self.servers[CONTROL].url
        self.bulk_url = self.servers[server_name(regions[0])].url if regions else None
        self.wan_control = f"127.0.0.1:{next(ports)}" if regions else None
        self._ports = {pair: next(ports) for pair in pairs}

    @property
    def region_urls(self) -> dict[str, str]:
        """URL of each region's own server; none in a run without regions."""
        return {region: self.servers[server_name(region)].url for region in self.regions}

    def start(self, name: str) -> None:
        """Start a server; its pid is in a file beside the services'.

        Raises:
            BrokerError: it did not come up.
        """
        server = self.servers[name]
        server.start()
        pid = self._pid_file(name)
        pid.parent.mkdir(exist_ok=True)
        pid.write_text(f"{server.pid}\n")

    def restart_dead(self) -> list[str]:
        """Start servers again that have died. Return their names.

        Raises:
            BrokerError: one does not come up any more.
        """
        dead = [name for name, server in self.servers.items() if not server.running]
        for name in dead:
            self.servers[name].kill()  # what is left of it
            for attempt in range(ATTEMPTS):
                try:
                    self.start(name)
                    break
                except BrokerError:  # it may have been killed once more
                    if attempt == ATTEMPTS - 1:
                        raise
        return dead

    def stop(self) -> None:
        """End all of them in good order."""
        for name, server in self.servers.items():
            server.stop()
            self._pid_file(name).unlink(missing_ok=True)

    def _pid_file(self, name: str) -> Path:
        return self.path / "services" / f"{name}.pid"

    def place(self, number: int, *, reaches_others: bool = False) -> dict[str, Any]:
        """Return the settings that say where a service is, the ``number``-th of its kind, and how it reaches other regions."""
        if not self.regions:
            return {"nats_url": self.url}
        region = self.regions[number % len(self.regions)]
        ports = {name: self._ports[region, name] for name in [*self.regions, CONTROL_REGION] if name != region}
        values: dict[str, Any] = {
            "region": region,
            "nats_url": _url(ports.pop(CONTROL_REGION)),
            "nats_bulk_url": self.servers[server_name(region)].url,
        }
        return values | ({"region_urls": {name: _url(port) for name, port in ports.items()}} if reaches_others else {})

    def links(self) -> Mapping[str, Any]:
        """Return the relay's settings: every way between two regions, and to the control store."""
        links, routes = {}, []
        for source, target in permutations([*self.regions, CONTROL_REGION], 2):
            pair = source, target
            near = CONTROL_REGION in pair
            delay_s = CONTROL_ONE_WAY_S if near else ONE_WAY_S.get((min(pair), max(pair)), OTHER_ONE_WAY_S)
            links[f"{source}-{target}"] = {"rate_bits_per_s": RATE_BITS_PER_S, "delay_s": delay_s, "jitter_s": JITTER_S}
            if source == CONTROL_REGION:
                continue
            server = self.servers[CONTROL if target == CONTROL_REGION else server_name(target)]
            routes.append(
                {
                    "from": source,
                    "to": target,
                    "listen": f"127.0.0.1:{self._ports[pair]}",
                    "target": f"127.0.0.1:{server.port}",
                    "traffic": "control" if target == CONTROL_REGION else "bulk",
                }
            )
        return {"control": self.wan_control, "links": links, "routes": routes}


def _url(port: int) -> str:
    return f"nats://127.0.0.1:{port}"
