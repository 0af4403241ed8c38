"""Each service killed before and after its n-th durable action, for every n of a short run, and started again."""

from __future__ import annotations

import asyncio
import json
import signal
import uuid
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import pytest
from blake3 import blake3
from tests.services.cluster import NEVER_S, Cluster, Folded, Service, check_accounts, check_all_merged, small
from tests.services.forking import Forked, Nursery, When
from tests.services.toy import SAMPLES

from diloco.settings.run import RunSettings
from diloco_ops.broker.server import Server

AT_ONCE = 3  # runs; they sleep most of their time
LEARNERS = 2
DEAD_S = 5.0  # then another learner makes version 0 in the place of a dead one
PROMISE = pytest.mark.promise("a process killed before or after any durable action loses nothing and merges nothing twice")


class CrashCluster(Cluster):
    """A cluster whose processes note their durable actions; ``crash`` says who dies: (name, before or after, its n-th one)."""

    def __init__(self, nursery: Nursery, crash: tuple[str, When, int] | None, directory: Path, url: str) -> None:
        super().__init__(nursery, directory, url, f"crash-{uuid.uuid4().hex[:8]}", short(crash[0] if crash else ""))
        self.crash = crash

    def _fork(self, name: str, module: str, config: Path, output: Path, environment: Mapping[str, str]) -> Forked:
        kill_at: tuple[When, int] = ("before", 0)
        if self.crash is not None and self.crash[0] == name:
            kill_at = self.crash[1:]
            self.crash = None  # once
        return self.nursery.start(module, config, output, environment, self.notes(name), kill_at)

    def check_alive(self) -> None:
        """One that was killed is no failure: anyone who runs this cluster starts it again."""
        for service in self.services:
            if service.process.poll() not in (None, 0, -signal.SIGKILL):
                raise AssertionError(f"{service.name} ended with {service.process.returncode}: {service.said}")

    def notes(self, name: str) -> Path:
        """Where a service's durable actions are noted, a line each."""
        return self.directory / f"{name}.actions"


def short(dies: str) -> RunSettings:
    """Two learners, two fragments, some four versions each, and keyframes with purges in between.

    Unless a learner ``dies``, no run ends without one that is only slow: it would hold work that is in no version.
    """
    return small(
        learners=LEARNERS,
        shards=1,
        fragments__count=2,
        round__steps=5,
        tokens=LEARNERS * 22 * SAMPLES,
        log__keyframe_factor=0.3,
        liveness__dead_s=DEAD_S if dies.startswith("toy") else NEVER_S,
    )


async def run(cluster: CrashCluster) -> int:
    """Run to the end, starting again what dies; how many died, which is at most one."""
    await cluster.link()
    begin: dict[str, Callable[[], Service]] = {  # who makes the run comes last: the others wait for it
        "toy-0": lambda: cluster.toy_process(0),
        "toy-1": lambda: cluster.toy_process(1),
        "syncer-0": lambda: cluster.syncer(0),
        "coordinator": cluster.coordinator,
    }
    for start in begin.values():
        start()
    died = 0

    def ended() -> bool:
        nonlocal died
        for service in list(cluster.services):
            if not service.killed and service.process.poll() == -9:
                service.killed = True
                died += 1
                begin[service.name]()
        return all(service.killed or service.process.poll() == 0 for service in cluster.services)

    await cluster.until(ended, "the run ends by itself")
    return died


async def crash(nursery: Nursery, url: str, folder: Path, name: str, when: When, number: int) -> list[str]:
    """One case: all that is wrong, in words."""
    cluster = CrashCluster(nursery, (name, when, number), folder, url)
    wrong: list[str] = []
    judges: list[Callable[[], Awaitable[None]]] = [lambda: outcome(cluster, name, number), cluster.close]
    for judge in judges:
        try:
            await judge()
        except AssertionError as error:
            wrong.append(str(error)[:600])
    actions = cluster.notes(name).read_text().splitlines()
    action = actions[number - 1] if number <= len(actions) else "none"
    return [f"{name} killed {when} action {number} ({action}): {error}" for error in wrong]


async def outcome(cluster: CrashCluster, name: str, number: int) -> None:
    """Run one case; the log is checked by the reference, whose asserts speak for themselves."""
    died = await run(cluster)
    heartbeats, folded = await cluster.finished_heartbeats(), await cluster.folded()
    for log in folded:
        assert log.passed_over == 0, f"fragment {log.index}: {log.passed_over} entries do not follow"
    # runs differ by an action or two: the last ones may not come
    assert died == 1 or len(cluster.notes(name).read_text().splitlines()) < number, "no process died"
    check_results(cluster, folded)
    check_accounts(heartbeats, folded)
    if not name.startswith("toy"):  # one that has not died has lost only work that came late
        for log in folded:
            check_all_merged(heartbeats, log)


def check_results(cluster: CrashCluster, folded: list[Folded]) -> None:
    """Every learner has finished, and holds what the logs say."""
    hashes = {str(log.index): blake3(log.theta.tobytes()).hexdigest() for log in folded}
    for share in range(LEARNERS):
        result = json.loads((cluster.directory / f"toy-{share}.json").read_text())
        assert result["finished"], f"toy-{share} has not finished"
        assert result["thetas"] == hashes, f"toy-{share} holds other values than the logs"


# after an action the others know of it and the dead one does not, which is the harder case
@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.slow), "after"])
@pytest.mark.parametrize("name", ["coordinator", pytest.param("syncer-0", marks=PROMISE), "toy-0"])
async def test_every_action(nursery: Nursery, nats_server: Server, tmp_path: Path, name: str, when: When) -> None:
    whole = CrashCluster(nursery, None, tmp_path / "whole", nats_server.url)
    try:
        assert await run(whole) == 0
        heartbeats, folded = await whole.finished_heartbeats(), await whole.folded()
        check_results(whole, folded)
        check_accounts(heartbeats, folded)
        for log in folded:
            check_all_merged(heartbeats, log)
    finally:
        await whole.close()
    count = len(whole.notes(name).read_text().splitlines())
    assert count > 2
    limit, wrong = asyncio.Semaphore(AT_ONCE), list[str]()

    async def case(number: int) -> None:
        async with limit:
            wrong.extend(await crash(nursery, nats_server.url, tmp_path / f"{number}", name, when, number))

    await asyncio.gather(*(case(number) for number in range(1, count + 1)))
    assert not wrong, "\n".join(wrong)
