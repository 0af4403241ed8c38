"""A relay of links between regions (``diloco wan serve``), as a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diloco_ops.wan import control
from harness.host import cpu_s

Conditions = Mapping[str, float]  # of a link, as the relay's file has them
Route = tuple[str, str, str, int, int]  # from, to, kind of traffic, the port to listen at (0: any) and the port to lead to


class Relay:
    """A relay with these routes; ``links`` are the conditions by source and target, ``defaults`` those of all others."""

    def __init__(
        self,
        folder: Path,
        routes: Sequence[Route],
        links: Mapping[tuple[str, str], Conditions] | None = None,
        defaults: Conditions | None = None,
    ) -> None:
        lines = ['control = "127.0.0.1:0"']
        sections = {"defaults": defaults or {}} | {f"links.{a}-{b}": each for (a, b), each in (links or {}).items()}
        for name, conditions in sections.items():
            lines += [f"[{name}]", *(f"{key} = {value}" for key, value in conditions.items())]
        for source, target, traffic, listen, port in routes:
            lines += ["[[routes]]", f'from = "{source}"', f'to = "{target}"', f'traffic = "{traffic}"']
            lines += [f'listen = "127.0.0.1:{listen}"', f'target = "127.0.0.1:{port}"']
        folder.mkdir(exist_ok=True)
        config = folder / "wan.toml"
        config.write_text("\n".join(lines))
        command = [sys.executable, "-m", "diloco_ops.cli", "wan", "serve", str(config)]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
        self._ports: dict[tuple[str, str], int] = {}
        assert self._process.stderr is not None
        for line in self._process.stderr:
            event = json.loads(line)
            if event["event"] == "wan_started":
                self._control = event["control"]
                return
            self._ports[event["link"], event["traffic"]] = int(event["listen"].rpartition(":")[2])
        raise SystemExit("the relay did not come up")

    def port(self, source: str, target: str, traffic: str = "bulk") -> int:
        """Return the port at which a route listens."""
        return self._ports[f"{source}-{target}", traffic]

    def cpu_s(self) -> float:
        """Return the processor time that the relay has used."""
        return cpu_s(self._process.pid)

    def ask(self, request: control.Request) -> dict[str, Any]:
        """Command the relay; return its last answer."""
        return list(control.asked(self._control, request))[-1]

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.communicate()
