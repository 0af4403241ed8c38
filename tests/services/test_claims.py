"""A learner with an identity of its own states work that cannot be, or sends values that no merge survives: it is left out."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from blake3 import blake3
from tests.made.fixtures import Launch
from tests.made.heartbeats import learner_heartbeat
from tests.pace import scaled_s
from tests.services.cluster import Cluster, check_accounts, check_all_merged, small, some_versions
from tests.services.secured import guest, make_keys, members, serving
from tests.services.toy import SAMPLES

from diloco.control import admission, creation
from diloco.control.creation import KnownRun
from diloco.core.tensors import quantise
from diloco.nats import identity
from diloco.nats.registry import Registry
from diloco.nats.transport import NatsTransport
from diloco.process.observe import get_logger
from diloco.process.retry import until_available
from diloco.process.tasks import end
from diloco.wire import framing
from diloco.wire.body import Body
from diloco.wire.entries import Record
from diloco.wire.offers import Offer
from diloco_ops.keys.folder import Folder

RUN = "claims"
FRAGMENTS = 4
LIAR = "toy-2"
HONEST = {"toy-0", "toy-1"}
BUDGET = 10**8  # tokens: the run ends when the test has seen all else
# the built-in task's batch is 16 * 8 tokens, so that by the settings a step would have 1,024 at most; the liar was granted 16
SETTINGS: dict[str, Any] = {
    "tokens": BUDGET,
    "shards": 1,
    "round__steps": 6,
    "task__name": "gpt",
    "task__batch": 16,
    "task__context": 8,
    "quarantine__factor": 0.0,  # the bounds of a merge hold without the others' norms
}
STEP, MIN_STEP_S = SAMPLES, 0.05
PROCESSED, FURTHEST = 2 * BUDGET + STEP, (2 * BUDGET + 1024) // SAMPLES

IMPOSSIBLE: dict[str, dict[str, Any]] = {
    "row 3: the budget, lost": {"lost_tokens": BUDGET},
    "row 3: lost tokens that no total can hold": {"lost_tokens": 2**62},
    "row 3: more tokens lost than a learner processes": {"lost_tokens": PROCESSED - SAMPLES + 1},
    "row 3: more tokens than steps can have, and lost": {"steps": 20, "tokens": PROCESSED, "lost_tokens": 1},
    "row 13: batches up to a thousand million": {"data": [(0, 10**9 - 1, 1)]},
    "row 13: batches beyond what a field holds": {"data": [(0, 2**62, 2**62)]},
    "row 13: the first batch behind all that can be": {"data": [(1, FURTHEST, 1)]},
    "row 13: more batches than tokens": {"data": [(0, 0, SAMPLES + 1)]},
    "row 13: a share that does not exist": {"data": [(2**14 - 1, 0, 1)]},
    "row 15: twenty million tokens in a step": {"tokens": 2 * 10**7},
    "row 15: one token more than it was granted": {"tokens": STEP + 1},
    "row 15: more steps than the time since genesis has": {"steps": 10**6, "tokens": 10**6, "data": []},
    "row 15: more steps than tokens": {"steps": SAMPLES + 1},
    "N9: no steps": {"steps": 0, "tokens": 0, "data": []},
}
OF_ANOTHER_LOG: dict[str, dict[str, Any]] = {
    "N9: a base that no log has": {"base_version": 10**6},
    "N9: another state of its base": {"base_hash": bytes(32)},
    "N9: a round far ahead": {"round": 10**6},
}
VALUES = {
    "row 16: values of 3e37": 3e37,
    "row 16: such whose merge is finite": 3e35,
    "row 16: a million million million": -1e18,
}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Keys of which two learners' were granted exactly what they do, and the other honest one's nothing in particular."""
    made = make_keys(tmp_path_factory.mktemp("keys") / "run", RUN, members(3, 1))
    for name in (LIAR, "toy-0"):
        entry = made.roster.identity(name)
        assert entry is not None
        made.grant(entry.model_copy(update={"batch_tokens": STEP, "min_step_s": MIN_STEP_S if name == LIAR else None}))
    return made


class Liar:
    """Makes offers of fragment 0 as a learner that was admitted."""

    def __init__(self, cluster: Cluster, link: NatsTransport, run: KnownRun, size: int) -> None:
        self.cluster, self.link, self.run, self.size = cluster, link, run, size
        self.incarnation, self.number = time.time_ns() // 1_000_000, 0
        self.after, self._read = (0, 0), 0  # its offer that was merged last, as of this sequence of the log
        self.quorums_s: list[float] = []  # of the versions read so far: how long each waited for its quorum

    async def base(self) -> tuple[int, bytes]:
        """The newest version of fragment 0, and its state hash."""
        names = self.cluster.subjects
        head = await until_available(lambda: self.link.last(names.log_stream, names.record(0)), get_logger())
        assert head is not None
        record = framing.unpack(head.data, Record, self.run.identity)[0]
        return record.version, record.state_hash

    async def offer(self, value: float = 1.0, **changes: Any) -> None:
        """Store an offer that is fit but for ``changes``: a displacement of ``value`` in each parameter."""
        self.number += 1
        version, base_hash = await self.base()
        raw = quantise.quantise(np.full(self.size, value, np.float32), 4).tobytes()
        packed = zstandard.ZstdCompressor().compress(raw)
        values: dict[str, Any] = {
            "fragment": 0,
            "learner": LIAR,
            "incarnation": self.incarnation,
            "number": self.number,
            "after": self.after,
            "round": version + 1,
            "base_version": version,
            "base_hash": base_hash,
            "bits": 4,
            "steps": 1,
            "tokens": SAMPLES,
            "lost_tokens": 0,
            "data": [(2, 0, 1)],
            "body": Body(len(packed), blake3(raw).digest(), 0, bytes(8)),
        }
        frame = framing.pack(Offer(**(values | changes)), self.run.identity, packed)
        subject, identifier = self.cluster.subjects.offer(0, LIAR), uuid.uuid4().hex
        storing = partial(self.link.append, subject, frame, message_id=identifier, fence=None, timeout_s=10)
        await until_available(storing, get_logger())

    async def look_for_merges(self) -> None:
        """Find out which of its offers of fragment 0 was merged last."""
        names = self.cluster.subjects
        while entry := await self.link.first(names.log_stream, names.record(0), self._read + 1):
            self._read = entry.sequence
            record = framing.unpack(entry.data, Record, self.run.identity)[0]
            self.quorums_s.append(record.quorum_s)
            for member in record.members:
                if member.learner == LIAR:
                    self.after = member.incarnation, member.number

    async def say_that_it_steps(self) -> None:
        """Send heartbeats of a learner that steps, and has applied what the others have."""
        for step in itertools.count(1):
            versions = self.cluster.heartbeats["toy-0"][-1].versions if self.cluster.heartbeats["toy-0"] else [0] * FRAGMENTS
            said = learner_heartbeat(LIAR, step, *versions, incarnation=self.incarnation, batch_tokens=SAMPLES)
            await self.link.publish(self.cluster.subjects.heartbeat(LIAR), framing.pack(said, self.run.identity))
            await asyncio.sleep(scaled_s(0.05))


@contextlib.asynccontextmanager
async def lying(
    launch: Launch, keys: Folder, tmp_path: Path, **changes: Any
) -> AsyncIterator[tuple[Cluster, Liar, NatsTransport]]:
    """A run of two honest learners, held before their first step, a liar that was admitted, and an operator's connection."""
    with serving(keys, tmp_path / "nats") as server:
        cluster = launch(small(**SETTINGS | changes), server.url, RUN)
        cluster.identity = str(keys.path / "identities" / "{name}.identity")
        cluster.liars = {LIAR}
        cluster.coordinator()
        cluster.syncer(0)
        for share in range(2):
            cluster.toy(share)
        await cluster.link()
        await cluster.all_ready()
        own = identity.load(keys.identity_file(LIAR))
        async with guest(server, keys, LIAR) as stranger, guest(server, keys, "operator") as operator:
            link = stranger.link
            run = KnownRun(RUN, cluster.settings, await Registry.open(link, cluster.subjects.bucket, create=False))
            fragments = await creation.find_map(run)
            liar = Liar(cluster, link, run, fragments.fragments[0].size)
            digest = cluster.settings.digest()
            await admission.join(run, LIAR, liar.incarnation, fragments, digest, founds=False, grant=own.grant)
            yield cluster, liar, operator.link


async def honest_run(cluster: Cluster, operator: NatsTransport) -> None:
    """The run ends as if the liar were not there: its log is whole, of the honest alone, and what it holds was learned."""
    await cluster.until(lambda: min(cluster.heartbeats["toy-0"][-1].versions) >= 15, "versions to learn from")
    await cluster.use_up(operator)
    heartbeats, folded = await cluster.finished_heartbeats(), await cluster.folded()
    check_accounts(heartbeats, folded)
    for log in folded:
        assert log.passed_over == 0
        data = [held for record in log.versions for member in record.members for held in member.data]
        assert {m.learner for record in log.versions for m in record.members} <= HONEST
        assert max(first + count for _, first, count in data) <= BUDGET // SAMPLES
        check_all_merged(heartbeats, log)
    task = cluster.toys[0].task
    assert task is not None
    assert task.distance(await cluster.tensors(folded)) < 0.5


def refused(cluster: Cluster) -> int:
    """How many messages the syncer has refused."""
    return cluster.shard_heartbeats["syncer-0"].refused if cluster.shard_heartbeats else 0


@pytest.mark.promise("impossible claims are refused, and destructive values are left out")
async def test_what_cannot_be_is_refused_and_values_that_no_merge_survives_are_left_out(
    launch: Launch, keys: Folder, tmp_path: Path
) -> None:
    async with lying(launch, keys, tmp_path) as (cluster, liar, operator):
        for count, (what, changes) in enumerate(IMPOSSIBLE.items(), 1):
            await liar.offer(**changes)
            await cluster.until(lambda count=count: refused(cluster) >= count, what)  # type: ignore[misc]
            assert refused(cluster) == count, what
        [told] = cluster.events("message_refused", "syncer-0")  # the first of its kind
        assert (told["sender"], told["kind"]) == (LIAR, "ClaimError")
        assert "lost" in told["reason"]
        for count, what in enumerate(("N9: a base that no log has", "N9: another state of its base"), 1):
            await liar.offer(**OF_ANOTHER_LOG[what])
            await cluster.until(
                lambda count=count: len(cluster.events("offer_of_another_log", "syncer-0")) >= count,  # type: ignore[misc]
                what,
            )
        assert {told["sender"] for told in cluster.events("offer_of_another_log", "syncer-0")} == {LIAR}
        for value, event in ((3e37, "merge_not_finite"), (1e9, "merge_too_far")):  # both are held: they may be a learner's
            cluster.gate.close()
            await liar.offer(value)
            cluster.gate.open()
            await cluster.until(lambda event=event: bool(cluster.events(event, "syncer-0")), "it is named")  # type: ignore[misc]
            await some_versions(cluster, 2)
        named = [cluster.events(event, "syncer-0")[0] for event in ("merge_not_finite", "merge_too_far")]
        assert [values["learners"] for values in named] == [[LIAR], [LIAR]]
        await cluster.until(lambda: refused(cluster) >= len(IMPOSSIBLE) + 1, "its offers are refused")
        await honest_run(cluster, operator)


async def test_a_learner_that_answers_and_fails_in_turn_is_waited_for_once_and_is_named(
    launch: Launch, keys: Folder, tmp_path: Path
) -> None:
    """N3: with the quorum ``all`` it says that it steps, answers no round, and delivers an offer whenever it is given up."""
    dead_s = scaled_s(1.0)
    changes = {"round__quorum": "all", "liveness__dead_s": dead_s}
    async with lying(launch, keys, tmp_path, **changes) as (cluster, liar, operator):
        stepping = asyncio.create_task(liar.say_that_it_steps())
        cluster.gate.open()
        await cluster.until(lambda: bool(cluster.events("waited_in_vain", "syncer-0")), "it is given up")
        [given_up] = cluster.events("waited_in_vain", "syncer-0")  # all fragments at once: repeated lines are counted
        assert given_up["learner"] == LIAR
        assert given_up["waited_s"] >= 3 * dead_s  # of 4 in all: rounds of other fragments may have waited from earlier on
        await some_versions(cluster, 1, of=sorted(HONEST))
        await liar.look_for_merges()
        waits_before = len(liar.quorums_s)
        merged = 0
        while merged < 5:  # each time it is waited for again, and answers nothing
            before = liar.after
            await liar.offer(0.0, steps=1, tokens=1, data=[])
            await some_versions(cluster, 1, of=sorted(HONEST))
            await liar.look_for_merges()
            merged += liar.after != before
        await some_versions(cluster, 2, of=sorted(HONEST))
        await liar.look_for_merges()
        await end(stepping)
        assert max(liar.quorums_s[:waits_before]) >= 4 * dead_s - 1.0
        assert max(liar.quorums_s[waits_before:]) < 2 * dead_s
        await cluster.use_up(operator)


@pytest.mark.slow
@pytest.mark.parametrize("what", [*IMPOSSIBLE, *OF_ANOTHER_LOG, *VALUES])
async def test_a_run_goes_on_as_if_the_liar_were_not_there(launch: Launch, keys: Folder, tmp_path: Path, what: str) -> None:
    async with lying(launch, keys, tmp_path) as (cluster, liar, operator):
        await liar.offer(VALUES.get(what, 1.0), **(IMPOSSIBLE | OF_ANOTHER_LOG).get(what, {}))
        cluster.gate.open()
        await some_versions(cluster, 2, of=sorted(HONEST))
        await honest_run(cluster, operator)
