"""Damaged, foreign, repeated and poisonous messages in a live run: refused, counted, logged once, and never merged."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from blake3 import blake3
from numpy.typing import NDArray
from tests.made.fixtures import Launch
from tests.made.heartbeats import learner_heartbeat
from tests.made.log_entries import record_of
from tests.made.run_checks import merged_of
from tests.services.cluster import NEVER_S, Cluster, check_accounts, check_all_merged, small, some_versions
from tests.services.toy import SAMPLES, Toy

from diloco.control import admission
from diloco.control.creation import KnownRun
from diloco.core.tensors import quantise
from diloco.core.tensors.fragments import FragmentMap
from diloco.log.log import Log
from diloco.nats.registry import Registry
from diloco.process.observe import get_logger
from diloco.process.retry import until_available
from diloco.wire import framing
from diloco.wire.body import Body
from diloco.wire.control import Announcement, Heartbeat
from diloco.wire.entries import Record
from diloco.wire.framing import pack
from diloco.wire.offers import Offer

MALLORY = "mallory"  # is admitted: only what it sends is bad
EVE = "eve"  # is not admitted


@dataclass
class Forger:
    """Makes offers of fragment 0 at version 0, good but for what a test changes."""

    cluster: Cluster
    store: Log
    size: int
    base_hash: bytes
    incarnation: int

    @classmethod
    async def make(cls, cluster: Cluster) -> Forger:
        store, fragments = await cluster.store()
        genesis = await store.reader.genesis()
        assert genesis is not None
        base_hash = genesis[0].fragments[0]
        return cls(cluster, store, fragments.fragments[0].size, base_hash, time.time_ns() // 1_000_000)

    async def admit(self, fragments: FragmentMap) -> None:
        registry = await Registry.open(await self.cluster.link(), self.cluster.subjects.bucket, create=False)
        run = KnownRun(self.cluster.name, self.cluster.settings, registry)
        await admission.join(run, MALLORY, self.incarnation, fragments, self.cluster.settings.digest())

    def content(self) -> NDArray[np.uint8]:
        return quantise.quantise(np.linspace(-1, 1, self.size, dtype=np.float32), 4)

    def offer(self, number: int, raw: bytes | None = None, **changes: Any) -> tuple[Offer, bytes]:
        """An offer of mallory's and its zstd frame, which holds ``raw``."""
        raw = self.content().tobytes() if raw is None else raw
        packed = zstandard.ZstdCompressor().compress(raw)
        body = Body(len(packed), blake3(raw).digest(), 0, bytes(8))
        values: dict[str, Any] = {
            "fragment": 0,
            "learner": MALLORY,
            "incarnation": self.incarnation,
            "number": number,
            "after": (0, 0),
            "round": 1,
            "base_version": 0,
            "base_hash": self.base_hash,
            "bits": 4,
            "steps": 1,
            "tokens": SAMPLES,
            "lost_tokens": 0,
            "data": [(0, 0, 1)],
            "body": body,
        }
        return Offer(**(values | changes)), packed

    def frame(self, number: int, raw: bytes | None = None, **changes: Any) -> bytes:
        return pack(*self._ordered(self.offer(number, raw, **changes)))

    def _ordered(self, made: tuple[Offer, bytes]) -> tuple[Offer, bytes, bytes]:
        return made[0], self.store.run, made[1]

    async def publish(self, data: bytes, sender: str = MALLORY) -> None:
        await self.append(self.cluster.subjects.offer(0, sender), data)

    async def append(self, subject: str, data: bytes) -> None:
        """Store a message once, whatever becomes of the answer."""
        link, identifier = await self.cluster.link(), uuid.uuid4().hex
        storing = partial(link.append, subject, data, message_id=identifier, fence=None, timeout_s=10)
        await until_available(storing, get_logger())


def bad_offers(forger: Forger) -> dict[str, tuple[str, str, bytes]]:
    """By what is wrong: sender, kind of refusal, and the message."""
    content = forger.content()
    not_a_number = content.copy()
    not_a_number[:2] = np.array([0x7FC0], "<u2").view(np.uint8)  # the first block's scale is NaN
    good = forger.frame(1)
    fields = list(msgspec.msgpack.decode(good))
    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    body = forger.offer(1)[0].body

    def with_body(packed: bytes, **changes: Any) -> bytes:
        described = msgspec.structs.replace(body, size_bytes=len(packed))
        offer = msgspec.structs.replace(forger.offer(1)[0], body=msgspec.structs.replace(described, **changes))
        return pack(offer, forger.store.run, packed)

    def element(index: int, value: Any) -> bytes:
        return msgspec.msgpack.encode([*fields[:index], value, *fields[index + 1 :]])

    packed = forger.offer(1)[1]
    return {
        "nothing of ours": (MALLORY, "FormatError", b"hello"),
        "truncated": (MALLORY, "FormatError", good[:-10]),
        "another protocol version": (MALLORY, "FormatError", element(1, framing.VERSION + 1)),
        "another run": (MALLORY, "FormatError", element(3, bytes(8))),
        "fields changed on the way": (MALLORY, "HashError", element(4, fields[4][:-1] + bytes([fields[4][-1] ^ 1]))),
        "check changed on the way": (MALLORY, "HashError", element(5, bytes(32))),
        "a frame too long": (MALLORY, "FormatError", bytes((1 << 20) - 1024)),
        "another fragment than its subject": (MALLORY, "FormatError", forger.frame(1, fragment=1)),
        "another learner than its subject": (MALLORY, "FormatError", forger.frame(1, learner="toy-0")),
        "bits that are not the run's": (MALLORY, "FormatError", forger.frame(1, bits=8)),
        "more tokens than the run has": (MALLORY, "FormatError", forger.frame(1, tokens=3 * forger.cluster.settings.tokens)),
        "an incarnation not admitted": (MALLORY, "NotAdmittedError", forger.frame(1, incarnation=forger.incarnation + 1)),
        "a learner not admitted": (EVE, "NotAdmittedError", forger.frame(1, learner=EVE)),
        "content that is not what its hash says": (MALLORY, "HashError", with_body(packed, content_hash=bytes(32))),
        "a body shorter than it says": (MALLORY, "FormatError", with_body(packed, size_bytes=len(packed) + 1)),
        "a body that cannot be so large": (MALLORY, "FormatError", with_body(packed, size_bytes=500_000)),
        "zstd that opens to 64 MiB": (MALLORY, "FormatError", with_body(bomb)),
        "zstd damaged": (MALLORY, "FormatError", with_body(packed[:-3] + b"abc")),
        "too few values": (MALLORY, "FormatError", forger.frame(1, content[:-1].tobytes())),
        "not a number": (MALLORY, "FormatError", forger.frame(1, not_a_number.tobytes())),
    }


@pytest.mark.promise("damaged and foreign messages are refused and counted, never merged")
async def test_bad_messages_are_refused_counted_logged_once_and_never_merged(launch: Launch) -> None:
    cluster = launch(small(shards=1, tokens=10**9, liveness__dead_s=NEVER_S))
    cluster.coordinator()
    cluster.syncer(0)
    toys = cluster.learners()
    await cluster.link()
    cluster.liars = {MALLORY, "eve", "log", cluster.subjects.record(0), cluster.subjects.round(0)}  # whose names are used
    await cluster.all_ready()
    store, fragments = await cluster.store()
    forger = await Forger.make(cluster)
    await forger.admit(fragments)

    def refused() -> int:
        return cluster.shard_heartbeats["syncer-0"].refused if cluster.shard_heartbeats else 0

    # offers, while the learners are held at version 0; one after the other, since a subject keeps its newest only
    bad = bad_offers(forger)
    for count, (what, (sender, _, data)) in enumerate(bad.items(), 1):
        await forger.publish(data, sender)
        await cluster.until(lambda count=count: refused() >= count, f"refused: {what}")  # type: ignore[misc]
        assert refused() == count, what
    # messages that are not stored
    control = (await cluster.link()).control
    await control.publish(cluster.subjects.heartbeat(MALLORY), b"hello")
    await control.publish(cluster.subjects.heartbeat(MALLORY), pack(_heartbeat_of_two_fragments(forger), store.run))
    await control.publish(cluster.subjects.round(0), b"hello")
    await control.publish(cluster.subjects.round(0), pack(Announcement(99, 1, 1, MALLORY, 0.0, False, 0, 6, []), store.run))
    asked = Announcement(0, 1, 1, MALLORY, 0.0, False, 0, 6, [("us", 8)])  # nothing adapts in a run without regions
    await control.publish(cluster.subjects.round(0), pack(asked, store.run))
    await cluster.until(lambda: refused() == len(bad) + 2, "heartbeats refused")
    await cluster.until(lambda: all(toy.member and toy.member.refused.total == 3 for toy in toys), "announcements refused")
    # entries that do not follow, and no entries at all, in the midst of the log; and an old offer once more
    honest = [toy.name for toy in toys]
    cluster.gate.open()
    await some_versions(cluster, of=honest)
    again = await until_available(
        lambda: store.transport.last(cluster.subjects.offer_stream, cluster.subjects.offer(0, "toy-0")), get_logger()
    )
    assert again is not None
    for data in (b"hello", pack(_foreign_record(), store.run)):
        await forger.append(cluster.subjects.record(0), data)
        await forger.publish(again.data, "toy-0")
    await some_versions(cluster, of=honest)

    await cluster.use_up()

    del cluster.heartbeats[MALLORY]
    heartbeats, folded = await cluster.finished_heartbeats(), await cluster.folded()
    check_accounts(heartbeats, folded)
    assert {m.learner for log in folded for record in log.versions for m in record.members} == {toy.name for toy in toys}
    for log in folded:
        assert log.passed_over == (2 if log.index == 0 else 0)
        check_all_merged(heartbeats, log)
        for toy in toys:
            np.testing.assert_array_equal(toy.thetas[log.index], log.theta, strict=True)
    # once for each sender and kind, with the reason
    logged = [(values["sender"], values["kind"]) for values in cluster.events("message_refused", "syncer-0")]
    assert len(logged) == len(set(logged))
    assert {(sender, kind) for sender, kind, _ in bad.values()} <= set(logged)
    assert all(values["reason"] for values in cluster.events("message_refused"))
    for toy in toys:
        assert toy.member is not None
        assert toy.member.refused.counts()[("log", "FormatError")] == 1
        assert toy.member.refused.counts()[(MALLORY, "ChainError")] == 1
    # nonsense where the owner's next entry should be takes no ownership away
    assert [e.epoch for e in folded[0].entries if e.entry == "takeover"] == [1]
    assert not cluster.events("version_fenced")


def _heartbeat_of_two_fragments(forger: Forger) -> Heartbeat:
    return learner_heartbeat(MALLORY, 1, 0, 0, incarnation=forger.incarnation, tokens=16, step_s=0.1, loss=1.0, steps=[0, 0])


def _foreign_record() -> Record:
    """An entry by a writer that does not know what stands before it."""
    return record_of(0, entry="takeover", epoch=1, syncer=MALLORY, body=None)


async def test_learner_that_diverges_sends_nothing_of_it_and_goes_on_from_the_global_model(launch: Launch) -> None:
    def diverge(toy: Toy) -> None:
        cluster.gate(toy)
        if toy.member is not None and toy.member.step == 20 and toy.task is not None:
            for tensor in toy.task.tensors.values():
                tensor[...] = np.nan

    cluster = launch(small(shards=1, tokens=10**9, round__learners_wait=True))
    cluster.toy(0)
    cluster.toy(1, before_step=diverge)
    cluster.toy(2)
    await cluster.begin(coordinator=False)
    told = partial(cluster.events, "displacement_not_finite", "toy-1")
    await cluster.until(lambda: {values["fragment"] for values in told()} == {0, 1, 2, 3}, "nothing of it is sent")
    merged_before = merged_of(cluster.heartbeats["toy-1"][-1])
    await cluster.until(
        lambda: bool(np.all(np.greater(merged_of(cluster.heartbeats["toy-1"][-1]), merged_before))), "it is merged again"
    )
    lost = cluster.heartbeats["toy-1"][-1].lost_tokens
    await some_versions(cluster, 8)

    await cluster.use_up()

    heartbeats, folded = await cluster.finished_heartbeats(), await cluster.folded()
    check_accounts(heartbeats, folded)
    assert all(np.isfinite(log.theta).all() and np.isfinite(log.momentum).all() for log in folded)
    assert min(heartbeats["toy-1"].lost_tokens) > 0
    for log in folded:
        # it is in versions again after what it lost
        members = [m for record in log.versions for m in record.members if m.learner == "toy-1"]
        assert sum(member.steps for member in members) < heartbeats["toy-1"].step
        assert members[-1].lost_tokens >= lost[log.index] > 0
        np.testing.assert_array_equal(cluster.toys[1].thetas[log.index], log.theta, strict=True)
    task = cluster.toys[1].task
    assert task is not None
    assert task.distance(task.tensors) < 0.5  # its own model, too
    assert not cluster.events("message_refused")
