"""What a learner's or an evaluator's identity can say in messages that are not stored, and what comes of it: nothing.

Rows 4 to 8 and 18 of issue 16's table, at a real server with real identities: a run under quorum ``all`` beside a liar.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.made.fixtures import Launch
from tests.made.heartbeats import learner_heartbeat
from tests.made.up_command import checkpoint_of_run
from tests.pace import DEADLINE_S, scaled_s
from tests.services.cluster import Cluster, check_accounts, small, some_versions
from tests.services.secured import make_keys, members, serving
from tests.services.toy import SAMPLES

from diloco.control import admission, creation
from diloco.control.creation import KnownRun
from diloco.control.gate import HEARTBEATS_AT_ONCE
from diloco.core.learner.accounts import MemberTraffic
from diloco.nats import identity
from diloco.nats.transport import NatsTransport
from diloco.process.observe import get_logger
from diloco.process.tasks import end
from diloco.service.rundir import RunDirectory
from diloco.transport import Heard
from diloco.wire import framing
from diloco.wire.control import Announcement, Heartbeat, MarkerAnswer, SnapshotMarker
from diloco.wire.subjects import Subjects
from diloco_ops.broker.server import Server
from diloco_ops.keys.folder import Folder
from diloco_ops.keys.permissions import READER_PAYLOAD_BYTES, Who

RUN = "heard"
NAMES = Subjects(RUN)
LIAR, EVALUATOR = "mallory", "eva"
TOYS = ("toy-0", "toy-1")
EVERY_S = scaled_s(0.05)  # so often a lie is told: not faster than a slow machine can listen
FRAGMENTS = 4
BUDGET = 2 * 400 * SAMPLES  # of a minute of slow steps
LARGEST = 2**62
LARGE, LARGE_BYTES = 30, READER_PAYLOAD_BYTES - 4096  # heartbeats, and what each has beside its fields


def heartbeat(learner: str, incarnation: int, **changes: Any) -> Heartbeat:
    """A heartbeat in full swing, but for what a test changes."""
    values: dict[str, Any] = {
        "incarnation": incarnation, "tokens": 5 * SAMPLES, "step_s": 0.02, "loss": 1.0,
        "fragment_tokens": [80] * FRAGMENTS, "batch_tokens": SAMPLES, "busy_s": 1.0,
    }  # fmt: skip
    return learner_heartbeat(learner, 5, *[0] * FRAGMENTS, **(values | changes))


class Liar:
    """A connection under an identity that says on its own subject what it likes."""

    def __init__(self, link: NatsTransport, name: str, run: KnownRun) -> None:
        self.link, self.name, self.run = link, name, run
        self.incarnation = 1

    @classmethod
    @contextlib.asynccontextmanager
    async def connected(cls, cluster: Cluster, keys: Folder, name: str) -> AsyncIterator[Liar]:
        own = identity.load(keys.identity_file(name))
        link = await NatsTransport.open(cluster.url, cluster.url, name, get_logger(), DEADLINE_S, identity=own)
        try:
            yield cls(link, name, await creation.open_run(link, cluster.name, cluster.settings))
        finally:
            await link.close()

    async def join(self) -> None:
        fragments = await creation.find_map(self.run)
        self.incarnation = await admission.join(
            self.run, self.name, self.incarnation, fragments, self.run.created.digest(), founds=False, grant=self.link.grant
        )

    async def say(self, learner: str, incarnation: int = 1, **changes: Any) -> None:
        frame = framing.pack(heartbeat(learner, incarnation, **changes), self.run.identity)
        await self.link.publish(NAMES.heartbeat(self.name), frame)

    async def lie_on(self, rows: Sequence[str]) -> None:
        for number in itertools.count():
            for row in rows:
                for learner, incarnation, changes in LIES[row](self, number):
                    await self.say(learner, incarnation, **changes)
            await asyncio.sleep(EVERY_S)

    async def answer_markers(self, learners: list[str]) -> None:
        """Row 18: say in the names of others that their states are saved."""

        async def answer(heard: Heard) -> None:
            marker, _, _ = framing.unpack(heard.data, SnapshotMarker, self.run.identity)
            for learner in learners:
                lie = MarkerAnswer(learner, marker.number, 1, marker.versions, 1, bytes(32))
                await self.link.publish(NAMES.marker_answer(self.name), framing.pack(lie, self.run.identity))

        await self.link.subscribe(NAMES.marker, answer)


Lie = tuple[str, int, dict[str, Any]]  # the learner and incarnation that it states, and what it says
LIES: dict[str, Callable[[Liar, int], list[Lie]]] = {
    "4": lambda liar, n: [(liar.name, liar.incarnation, {"tokens": BUDGET})],
    "4, the largest counts": lambda liar, n: [
        (liar.name, liar.incarnation, {"tokens": LARGEST, "step": LARGEST, "steps": [LARGEST] * FRAGMENTS})
    ],
    "4, having stopped": lambda liar, n: [
        (liar.name, liar.incarnation, {"tokens": BUDGET, "state": "closing", "steps": [0] * FRAGMENTS})
    ],
    "5": lambda liar, n: [(f"ghost-{n}", 1, {"tokens": LARGEST})],
    "5, one name in many incarnations": lambda liar, n: [("ghost", 2**40 + n, {"tokens": LARGEST})],
    "5, in a syncer's name": lambda liar, n: [("syncer-0", 1, {"tokens": LARGEST}), ("coordinator", 1, {"tokens": LARGEST})],
    "6": lambda liar, n: [(toy, LARGEST, {"state": "left"}) for toy in TOYS],
    "6, of its own": lambda liar, n: [(liar.name, LARGEST, {"step": LARGEST})],
    "6, in one incarnation after another": lambda liar, n: [(toy, n, {"state": "left"}) for toy in TOYS],
    "7": lambda liar, n: [("ghost", 1, {"step": n})],
    "7, itself": lambda liar, n: [(liar.name, liar.incarnation, {"step": 6, "step_s": 1e12})],
    "7, leaving for ever": lambda liar, n: [(liar.name, liar.incarnation, {"state": "leaving", "step": 6 + n})],
    "8": lambda liar, n: [(f"ghost-{n}-{i}", 1, {}) for i in range(500 * (n < 3))],
    "8, each in many incarnations": lambda liar, n: [(f"ghost-{i}", n * 500 + i, {}) for i in range(500 * (n < 3))],
    "8, in members' names": lambda liar, n: [(toy, 2**40 + n * 500 + i, {}) for toy in TOYS for i in range(250 * (n < 3))],
    "in another role": lambda liar, n: [
        (liar.name, liar.incarnation, changes) for changes in ({"step": 5 + n}, {"role": "evaluator", "loss": 0.0})
    ],
}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    who = [*members(2, 2), Who(LIAR, "learner"), Who(EVALUATOR, "evaluator")]
    return make_keys(tmp_path_factory.mktemp("keys") / "run", RUN, who)


@pytest.fixture
def server(keys: Folder, tmp_path: Path) -> Iterator[Server]:
    with serving(keys, tmp_path / "server") as server:
        yield server


@pytest.mark.parametrize("rows", [[*LIES], *(pytest.param([row], id=row, marks=pytest.mark.slow) for row in LIES)])
async def test_nobody_ends_steers_or_stops_a_run_by_what_it_says(
    launch: Launch, keys: Folder, server: Server, rows: list[str]
) -> None:
    # a single syncer, whose fragments are not taken over for want of processor time; a liar is waited for four times dead_s
    cluster = launch(small(learners=2, shards=1, tokens=BUDGET, round__quorum="all", liveness__dead_s=1.0), server.url, RUN)
    cluster.identity, cluster.liars = str(keys.path / "identities" / "{name}.identity"), {LIAR, EVALUATOR}
    cluster.learners()
    with cluster.slowly():
        await cluster.begin()
        async with Liar.connected(cluster, keys, LIAR) as liar, Liar.connected(cluster, keys, EVALUATOR) as evaluator:
            await some_versions(cluster, 1, TOYS)
            await liar.join()
            lying = [asyncio.create_task(who.lie_on(rows)) for who in (liar, evaluator)]
            await cluster.until(lambda: bool(refused_liars(cluster)), "lies are heard, and refused")
            await some_versions(cluster, 2, TOYS)
            cluster.hurry()
            await cluster.ended()
            await end(*lying)
    # asked, not heard: the flood may have cost this test's own connection their last words
    members = [toy.member for toy in cluster.toys if toy.member is not None]
    toys = {member.settings.name: member.learner.heartbeat([], SAMPLES, MemberTraffic(0, 0, 0)) for member in members}
    assert toys.keys() == set(TOYS)
    folded = await cluster.folded()
    check_accounts(toys, folded)
    assert sum(own.tokens for own in toys.values()) >= BUDGET
    assert {member.learner for log in folded for record in log.versions for member in record.members} == set(TOYS)
    assert not cluster.events("version_fenced") + cluster.events("ownership_lost")


def refused_liars(cluster: Cluster) -> set[str]:
    refused = {str(values["sender"]) for values in cluster.events("message_refused")}
    return refused & {NAMES.heartbeat(LIAR), NAMES.heartbeat(EVALUATOR), EVALUATOR}


async def test_large_heartbeats_are_refused_undecoded_and_a_flood_of_small_ones_is_thinned(
    launch: Launch, keys: Folder, server: Server
) -> None:
    """N7: the syncer counts each of them by sender, and the run goes on."""
    cluster = launch(small(learners=2, shards=1, tokens=10**9), server.url, RUN)
    cluster.identity, cluster.liars = str(keys.path / "identities" / "{name}.identity"), {EVALUATOR}
    cluster.learners()
    await cluster.begin()
    async with Liar.connected(cluster, keys, EVALUATOR) as liar:
        said = heartbeat(EVALUATOR, 1, role="evaluator")
        large = framing.pack(said, liar.run.identity, bytes(LARGE_BYTES))  # as large as an evaluator's messages may be
        for _ in range(LARGE):
            await liar.link.publish(NAMES.heartbeat(EVALUATOR), large)
        await cluster.until(lambda: cluster.shard_heartbeats["syncer-0"].refused >= LARGE, "each of them is refused")
        assert cluster.shard_heartbeats["syncer-0"].refused == LARGE
        [told] = cluster.events("message_refused", "syncer-0")
        assert told["sender"] == NAMES.heartbeat(EVALUATOR)
        assert "expected at most" in str(told["reason"])
        small_one = framing.pack(said, liar.run.identity)
        for _ in range(10 * HEARTBEATS_AT_ONCE):
            await liar.link.publish(NAMES.heartbeat(EVALUATOR), small_one)
        await some_versions(cluster, 2, TOYS)


async def test_no_announcement_ends_a_run(launch: Launch, keys: Folder, server: Server) -> None:
    """With a stolen syncer's identity: that the rounds are the last ones, and that all tokens are processed."""
    cluster = launch(small(learners=2, tokens=BUDGET), server.url, RUN)
    cluster.identity = str(keys.path / "identities" / "{name}.identity")
    cluster.forged = True  # learners refuse versions and epochs that no log is so far behind
    cluster.learners(**cluster.answers_held)
    await cluster.begin(until_step=0)
    await cluster.step_to_version(1)
    async with Liar.connected(cluster, keys, "syncer-1") as liar:
        newest = cluster.heartbeats[TOYS[0]][-1].versions
        for ahead, (index, version) in itertools.product(range(1, 6), enumerate(newest)):
            lie = Announcement(index, version + ahead, LARGEST, "syncer-1", 0.0, True, LARGEST, 6, [])
            await liar.link.publish(NAMES.round(index), framing.pack(lie, liar.run.identity))
        await cluster.step_to_version(max(newest) + 2)
    cluster.gate.open()
    cluster.hurry()
    await cluster.ended()
    finished = await cluster.finished_heartbeats()
    check_accounts(finished, await cluster.folded())
    assert sum(own.tokens for own in finished.values()) >= BUDGET  # logs know of losses as far as later offers state them


async def test_nobody_answers_a_marker_in_anothers_name(launch: Launch, keys: Folder, server: Server) -> None:
    """Row 18: with a hash that is none, so that the others' states would be thrown away."""
    cluster = launch(small(learners=2, tokens=10**9), server.url, RUN)
    cluster.identity = str(keys.path / "identities" / "{name}.identity")
    cluster.learners(**cluster.answers_held)
    await cluster.begin(until_step=0)
    async with Liar.connected(cluster, keys, LIAR) as liar:
        await liar.answer_markers([*TOYS, "ghost"])
        await cluster.step_to_version(1)
        operator = str(keys.identity_file("operator"))
        RunDirectory(cluster.directory, RUN, cluster.url, None, cluster.settings, identity=operator).save()
        taken = await asyncio.to_thread(checkpoint_of_run, cluster.directory)
        assert sorted(taken.manifest.learners) == [*TOYS]
