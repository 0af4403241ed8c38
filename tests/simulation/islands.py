"""Clusters one of whose learners is an island of several processes, or two are: what goes wrong inside them."""

from __future__ import annotations

import os
import random
import shutil
import socket
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.simulation.elastic import DRILLS_S, Drill, ElasticIsland
from tests.simulation.island import ADDRESS_PORT, Island, IslandProcess, exit_process, renew
from tests.simulation.part import News
from tests.simulation.world import SMALL, VARIANTS, Chaos, Process, World

import diloco.elastic.renewing
import diloco.elastic.rescue
import diloco.processes.meeting
import diloco.processes.part
from diloco.core.run import changes
from diloco.core.run.changes import Changes, Set
from diloco.process import observe
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings
from diloco.states import state
from diloco.states.state import Saved
from diloco.testing import threads
from diloco.testing.sockets import Network
from diloco.testing.virtual_transport import VirtualMessage

INSIDE = ("kill", "freeze", "stop", "host", "links")  # faults of an island's processes, besides the usual ones
LASTS_S = (5.0, 12.0)  # so long do things go wrong
WITHIN_S = 3.0  # of the first begin of an island something goes wrong inside it
AGAIN, AGAIN_S = 0.15, 2.0  # what follows from a loss goes wrong so often, and within so long
ELASTIC = 0.4  # share of schedules with islands that go on with fewer processes
DRILLS = 0.3  # share of these in which nothing else goes wrong
CHANGES = (Set("round.steps", 2), Set("round.steps", 4), Set("round.quorum", 1), Set("liveness.lease_s", 1.0))
TOKENS = 3 * 16 * 15


@cache
def _variant(number: int, tokens: int) -> RunSettings:
    return run_settings("decoupled", SMALL | VARIANTS[number] | {"learners": 2, "shards": 1, "tokens": tokens})


class IslandWorld(World):
    """A cluster with one island, or two."""

    def __init__(self, seed: int, *, verbose: bool = False) -> None:
        self.verbose = verbose
        self.folder = Path(tempfile.mkdtemp(prefix="islands-", dir=_memory()))
        self.drawing = random.Random(f"islands {seed}")
        elastic = random.Random(f"elastic, {seed}")  # its own, so that schedules of other islands mean what they did
        self.elastic = elastic if elastic.random() < ELASTIC else None
        self.drills = self.elastic is not None and elastic.random() < DRILLS
        self.late_s = self.drawing.choice((0.002, 0.02, 0.2))
        self.network = Network(self._between_s, self.drawing.choice((1 << 16, 3000)))
        self.disks_lost = self.drawing.choice((0.0, 0.0, 0.0, 0.2))
        self.disks_full = self.drawing.choice((0.0, 0.0, 0.2))
        self.islands: list[Island] = []
        super().__init__(seed, verbose=verbose)
        if self.drawing.random() < 0.4:
            self.later(self.drawing.uniform(0.5, self.chaos.until_s), self._change)
        if self.drills and self.elastic is not None:
            self._drills = [Drill(island, self.elastic) for island in self.islands if isinstance(island, ElasticIsland)]

    def _last_fault_s(self) -> float:
        return DRILLS_S if self.drills else super()._last_fault_s()

    def go_wrong_inside(self, island: Island) -> None:
        """An island has begun for the first time: have things happen to its processes."""
        elastic = isinstance(island, ElasticIsland)
        kinds = [kind for kind in INSIDE if self.drawing.random() < 0.5] or ["kill"]
        for _ in range(self.drawing.choice((1, 3, 5, 8) if elastic else (0, 1, 2, 3, 4))):
            within_s = self.chaos.until_s if elastic else WITHIN_S
            self._fault_inside(island, kinds, within_s)

    def go_wrong_soon(self, island: Island) -> None:
        """A process of an island is lost, or begins again: what follows from that may go wrong, too."""
        if not self.calm and self.drawing.random() < AGAIN:
            self._fault_inside(island, INSIDE, AGAIN_S)

    def _fault_inside(self, island: Island, kinds: Sequence[str], within_s: float) -> None:
        process, kind = self.drawing.choice(island.processes), self.drawing.choice(kinds)
        for_s = self.drawing.choice((0.3, 1.0, 3.0)) * self.drawing.random()
        self.later(within_s * self.drawing.random(), self._fault, kind, process, for_s)

    def go_wrong_at_the_end(self, island: Island) -> None:
        """The first process of an island has carried out its last decision: the others may be late for theirs."""
        if self.drawing.random() < 0.3:
            process = self.drawing.choice(island.processes)
            self.later(self.late_s * self.drawing.random(), self._fault, "freeze", process, 3.0 * self.drawing.random())

    def _between_s(self) -> float:
        """How long bytes take between two processes of an island."""
        return 0.001 if self.calm else self.late_s * self.drawing.random()

    def _draw_chaos(self, possible: Sequence[str]) -> Chaos:
        chaos = super()._draw_chaos(possible)
        if self.drills:
            return Chaos(0.0, 0.0, 0.0, 0.0, 0.0, {}, [])
        return replace(chaos, until_s=self.drawing.uniform(*LASTS_S))

    def _variant(self, number: int, regions: bool, merged: bool) -> RunSettings:
        return _variant(number, TOKENS if self.elastic is None else 2 * TOKENS)

    def _make_learners(self, make: Callable[..., list[Process]]) -> list[Process]:
        islands = self.drawing.choice((1, 1, 2))
        learners: list[Process] = []
        for number in range(islands):
            name, elastic = f"learner-{number}", self.elastic
            if elastic is not None and (number == 0 or elastic.random() < 0.5):
                island: Island = ElasticIsland(self, name, elastic)
            else:
                island = Island(self, name, self.drawing.choice((2, 2, 3, 4)), self.drawing)
            self.islands.append(island)
            learners.append(island.processes[0])
            self.parts += island.processes[1:]
        return learners + [Process(self, f"learner-{i}", "", self._learn) for i in range(islands, self.settings.learners)]

    def _more_constants(self) -> list[tuple[Any, str, Any]]:
        return [
            (diloco.processes.part, "threading", SimpleNamespace(Condition=News)),
            (diloco.processes.meeting, "free_port", lambda host: ADDRESS_PORT + 1),
            (socket, "has_dualstack_ipv6", lambda: False),
            (diloco.processes.group, "threading", threads),
            (diloco.elastic.renewing, "threading", threads),
            (diloco.elastic.renewing, "time", threads),
            (observe, "_in_words", False),
            (diloco.processes.group, "os", SimpleNamespace(urandom=os.urandom, _exit=exit_process)),
            (diloco.elastic.renewing, "renewal", SimpleNamespace(renew=renew)),
            (diloco.elastic.rescue, "threading", threads),
            (diloco.elastic.rescue, "asyncio", threads),
            (state, "save", partial(self._save, state.save)),
        ]

    def run(self) -> Any:
        try:
            return super().run()
        finally:
            self.network.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _save(self, save: Callable[..., Saved], path: Path, *others: Any, **named: Any) -> Saved:
        """Write a state, whose file has the time of this world."""
        saved = save(path, *others, **named)
        os.utime(path, ns=(int(1e9 * self.now_s),) * 2)
        return saved

    def is_ending(self, island: Island) -> bool:
        """Whether nothing is demanded any more of an island that has begun: its run comes to its end."""
        newest = next(reversed(island.generations.values()), None)
        return island.finished or self._is_ending() or (newest is not None and newest.draining)

    def _change(self) -> None:
        """Change a setting."""
        if self._is_ending() or self.subjects.bucket not in self.control.buckets:
            return
        bucket, run = self.control.buckets[self.subjects.bucket], self.reference.run
        stored = bucket.get("changes")
        listed = Changes(run) if stored is None else changes.unpack(stored[0], run)
        change = self.drawing.choice(CHANGES)
        bucket.write("changes", listed.then(change, at_s=0.0, author="somebody").pack(), None, self.drawing.getrandbits(64))
        self.stats["setting changed"] += 1
        self.note("world", f"{change}")
        self.publish(VirtualMessage(self.subjects.changed, b"", lambda answer: None), "")

    def _fault(self, kind: str, process: Process, for_s: float) -> None:
        if kind not in ("host", "links") or not isinstance(process, IslandProcess):
            super()._fault(kind, process, for_s)
            return
        if self.calm or process.ended:
            return
        self.stats[f"fault {kind}"] += 1
        self.note("world", f"{kind} {process.name} for {for_s:.2f} s")
        if kind == "host":
            process.vanishes = True
            process.crash("with its host")
        else:
            others = [other for other in process.island.processes if other is not process]
            pair = frozenset((process.name, self.rng.choice(others).name))
            self.network.cut.add(pair)
            self.later(for_s, self.network.cut.discard, pair)

    def _check_end(self) -> None:
        # a leader may be killed just before its last boundary, after another process has passed it
        told = [process for process in self.learners if not isinstance(process, IslandProcess) or process.finished]
        self.stats["leader lost at the end"] += len(self.learners) - len(told)
        self.learners = told
        super()._check_end()

    def _calm(self) -> None:
        super()._calm()
        self.network.cut.clear()
        for island in self.islands:
            for process in island.processes:
                process.thawed_s = self.now_s
            if isinstance(island, ElasticIsland) and not self.drills:
                island.look_later()


def _memory() -> str | None:
    """Return a folder that no disk slows."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
