"""A run of many learners without a framework, each a process, whose services are those of a deployed run.

A learner's step is asleep for a set time and changes nothing, so what its process takes is the protocol's. Learners talk to the
script over a pipe, syncers and the coordinator are ``python -m diloco_syncer`` and ``python -m diloco_coordinator``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from diloco.core.learner.accounts import StepDone
from diloco.core.run.leases import RoundRobin
from diloco.core.tensors.fragments import cut_model
from diloco.member.member import Member
from diloco.nats.connection import malloc_environment
from diloco.settings.run import RunSettings
from diloco.settings.service import LearnerSettings
from diloco_ops.broker.admin import administrator
from diloco_ops.broker.server import Server, free_port
from harness.host import cpu_s, rss_bytes
from harness.parties import RUN, STEP_TOKENS, Island, Party, create, joined, model, spawn

IDLE_S = 0.5
LOOK_S = 0.05
PATIENCE_S = 300.0  # only ends what hangs


class Traffic(NamedTuple):
    """Between a process and the server."""

    messages: int  # received by the process
    received_bytes: int
    sent_bytes: int


@dataclass(frozen=True)
class Figures:
    """Totals of processes so far, by name; ``messages`` and ``bytes``: those that the server has sent to each."""

    at_s: float
    cpu_s: dict[str, float]
    messages: dict[str, int]
    bytes: dict[str, int]
    versions: int  # of all fragments, that learner-0 has applied
    steps: int  # that learner-0 has taken
    step_cpu_s: float  # processor time of its thread that were in them


@dataclass
class Crowd:
    """The processes of a run."""

    server: Server
    folder: Path
    learners: list[Party]
    services: dict[str, subprocess.Popen[bytes]]
    page: str
    ends: contextlib.ExitStack  # ends all of them
    joined_s: list[float] = field(default_factory=list)  # that each learner took, all at once

    def spawn(self, target: Callable[..., None], name: str, *words: Any) -> Party:
        """Begin a process with a function of its own, as :func:`harness.parties.spawn` does."""
        party = spawn(target, name, *words)
        self.ends.callback(party.process.join, 10)
        self.ends.callback(party.process.kill)
        return party

    def join(self) -> None:
        """Have all learners join at once, with their imports behind them."""
        for party in self.learners:
            party.hear()
        for party in self.learners:
            party.pipe.send("join")
        self.joined_s = [float(party.hear()) for party in self.learners]

    def pids(self) -> dict[str, int]:
        """Return the number of each process by name."""
        found = {"server": self.server.pid} | {name: process.pid for name, process in self.services.items()}
        return found | {f"learner-{index}": party.pid for index, party in enumerate(self.learners)}

    def figures(self) -> Figures:
        """Return what everything has taken so far."""
        steps, step_cpu_s, versions = self.learners[0].ask("figures")
        traffic = self.traffic()
        return Figures(
            at_s=time.monotonic(),
            cpu_s={name: cpu_s(pid) for name, pid in self.pids().items()},
            messages={name: each.messages for name, each in traffic.items()},
            bytes={name: each.received_bytes for name, each in traffic.items()},
            versions=sum(versions),
            steps=steps,
            step_cpu_s=step_cpu_s,
        )

    def memory_bytes(self) -> dict[str, int]:
        """Return the resident memory of each process."""
        return {name: rss_bytes(pid) for name, pid in self.pids().items()}

    def opened_s(self) -> float:
        """Return how long the run's page takes to come, with its data."""
        began_s = time.monotonic()
        with urllib.request.urlopen(self.page, timeout=PATIENCE_S) as answer:
            answer.read()
        return time.monotonic() - began_s

    def traffic(self) -> dict[str, Traffic]:
        """Return by name of a process what has gone over its connections to the server."""
        return asyncio.run(self._traffic())

    async def _traffic(self) -> dict[str, Traffic]:
        async with administrator(self.server.admin_file.read_text().strip()) as admin:
            connections = await admin.of_connections(lambda answer: answer["data"]["connections"])
        found: dict[str, Traffic] = {}
        for each in connections:
            name = str(each.get("name", "")).removesuffix("-control").removesuffix("-bulk")
            before = found.get(name, Traffic(0, 0, 0))
            found[name] = Traffic(*map(sum, zip(before, (each["out_msgs"], each["out_bytes"], each["in_bytes"]), strict=True)))
        return found


@contextlib.contextmanager
def crowd(settings: RunSettings, *, learners: int, parameters: int, step_s: float) -> Iterator[Crowd]:
    """Begin a run with its services and learners, and wait until all have joined; ``step_s`` is 0 for learners at rest."""
    with services(settings) as begun:
        for index in range(learners):
            words = begun.server.url, settings.model_dump(), parameters, step_s, index
            begun.learners.append(begun.spawn(learner_main, f"learner-{index}", *words))
        begun.join()
        yield begun


@contextlib.contextmanager
def services(settings: RunSettings) -> Iterator[Crowd]:
    """Begin a run with its services, and without learners."""
    os.environ.update(malloc_environment())
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as name, contextlib.ExitStack() as ends:
        server = Server(Path(name))
        server.start()
        ends.callback(server.kill)
        asyncio.run(create(server.url, settings))
        port = free_port()
        begun = Crowd(server, Path(name), [], {}, f"http://127.0.0.1:{port}/", ends)
        for index in range(settings.shards):
            begun.services[f"syncer-{index}"] = _service(begun, "syncer", f"syncer-{index}", {})
        page = {"settings": settings.model_dump(mode="json", exclude_defaults=True), "page_address": f"127.0.0.1:{port}"}
        begun.services["coordinator"] = _service(begun, "coordinator", "coordinator", page)
        yield begun


def _service(begun: Crowd, kind: str, name: str, settings: Mapping[str, Any]) -> subprocess.Popen[bytes]:
    folder = begun.folder / name
    folder.mkdir()
    file = folder / "service.toml"
    common = {"run": RUN, "name": name, "nats_url": begun.server.url, "state_dir": str(folder)}
    file.write_text(tomli_w.dumps(common | {"log_to": "file", "log_format": "json"} | dict(settings)))
    with (folder / "output").open("wb") as output:
        command = [sys.executable, "-m", f"diloco_{kind}", "--config", str(file)]
        process = subprocess.Popen(command, stdout=output, stderr=output)
    begun.ends.callback(process.wait, 10)
    begun.ends.callback(process.kill)
    return process


def learner_main(pipe: Any, url: str, settings: Mapping[str, Any], parameters: int, step_s: float, index: int) -> None:
    """Run a learner in a process of its own.

    It says that it is there, joins when it is told to, says how long that took, and trains. It answers each word with its
    steps, the processor time of its training thread, and the versions that it has applied.
    """
    run_settings = RunSettings.model_validate(dict(settings))
    fragment_map = cut_model(model(parameters), run_settings.fragments)
    island, name = Island.make(fragment_map), f"learner-{index}"

    async def main() -> None:
        pipe.send("here")
        await asyncio.to_thread(pipe.recv)
        async with joined(url, name) as (link, run, log):
            began_s = time.monotonic()
            member = Member(link, run, fragment_map, LearnerSettings(name=name, run=RUN), log)
            await member.join(island.initial)
            pipe.send(time.monotonic() - began_s)
            trainer = Trainer(member, island, step_s)
            threading.Thread(target=trainer.train, name="trainer", daemon=True).start()
            while True:
                await asyncio.to_thread(pipe.recv)
                pipe.send((member.step, trainer.cpu_s, member.versions()))

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(main())


class Trainer:
    """The thread of a learner that takes steps; ``cpu_s``: its processor time."""

    def __init__(self, member: Member, island: Island, step_s: float) -> None:
        self.member, self.island, self.step_s, self.cpu_s = member, island, step_s, 0.0

    def train(self) -> None:
        """Take steps; without a time of a step, apply what has come and rest."""
        dealt, done = RoundRobin(), None
        while True:
            boundary = self.member.boundary(done)
            done = None
            self.island.write(boundary)
            for fragment in boundary.reads:
                values = self.island.reader(self.island.map.fragments[fragment])()
                self.member.submit(fragment, lambda values=values: values)  # type: ignore[misc]
            leased = self.member.leased()
            if not self.step_s:
                time.sleep(PATIENCE_S)
            elif boundary.stop or boundary.wait or not leased:
                self.member.wait(IDLE_S)
            else:
                batch = dealt.next(leased)
                time.sleep(self.step_s)
                done = StepDone(STEP_TOKENS, *batch, 1.0, self.step_s, 0.0)
            self.cpu_s = time.thread_time()


def wait_until(true: Callable[[], bool], what: str) -> float:
    """Wait for something, and return how long that took."""
    began_s = time.monotonic()
    while not true():
        if time.monotonic() - began_s > PATIENCE_S:
            raise TimeoutError(f"{what}: not within {PATIENCE_S:.0f} s")
        time.sleep(LOOK_S)
    return time.monotonic() - began_s


def of_kind(values: Mapping[str, float], kind: str) -> list[float]:
    """Return the values of all syncers, of all learners, or of the processes of another kind, by its name."""
    return [value for name, value in values.items() if name.rstrip("0123456789").rstrip("-") == kind]


def difference(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """Return by how much each value has grown."""
    return {name: value - before.get(name, 0) for name, value in after.items()}
