"""Insiders that use up a server's consumers, have others' offers thrown away, or claim the data of all.

Tried under real identities, and refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import nats.errors
import pytest
from tests.pace import DEADLINE_S, scaled_s
from tests.services.cluster import small
from tests.services.secured import Guest, guest, make_keys, members, put, serving

from diloco.control import creation
from diloco.control.shares import key_of
from diloco.core.run.leases import ClaimedShare, ShareClaim
from diloco.core.tensors.fragments import TensorSpec, build_map
from diloco.errors import AppendUncertainError, BrokerError, RunError
from diloco.log.offers import append_offer
from diloco.member.shares import LeaseClient
from diloco.nats import identity, streams
from diloco.nats.pull import Puller
from diloco.nats.streams import MAX_VALUE_BYTES
from diloco.nats.transport import NatsTransport
from diloco.process.observe import Counted, get_logger
from diloco.settings.service import LearnerSettings
from diloco.transport import Heard, Stored
from diloco.wire import subjects
from diloco.wire.body import Body
from diloco.wire.offers import Answer, Offer, RegionalOffer
from diloco.wire.refusals import refusals_key
from diloco.wire.subjects import Subjects
from diloco_coordinator.server_watch.violations import ViolationLog
from diloco_ops.broker import raw_messages
from diloco_ops.broker.server import Server
from diloco_ops.keys.folder import Folder
from diloco_ops.keys.permissions import COORDINATOR_PAYLOAD_BYTES, LEARNER_PAYLOAD_BYTES, READER_PAYLOAD_BYTES, Who
from diloco_ops.reading import runs

RUN = "limited"
NAMES = Subjects(RUN)
LOG, OFFERS = NAMES.log_stream, NAMES.offer_stream
LIAR, VICTIM = "toy-1", "toy-2"
ENTRIES = NAMES.record_tree("*")
NANOSECONDS = 10**9
THIRTY_ONE_YEARS = 31 * 365 * 86_400 * NANOSECONDS


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return make_keys(tmp_path_factory.mktemp("keys") / "run", RUN, [*members(3, 2), Who("judge", "evaluator")])


@pytest.fixture(scope="module")
def server(keys: Folder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(keys, tmp_path_factory.mktemp("limited")) as server:
        yield server


@pytest.fixture
async def syncer(server: Server, keys: Folder) -> AsyncIterator[Guest]:
    """A syncer's connection; the run is there, with one entry in its log."""
    async with guest(server, keys, "coordinator") as coordinator:
        await creation.create(coordinator.link, RUN, small())
    async with guest(server, keys, "syncer-0") as syncer:
        await syncer.link.append(NAMES.record(0), b"entry", message_id="entry", fence=None, timeout_s=DEADLINE_S)
        yield syncer


def config(**changes: Any) -> dict[str, Any]:
    """A consumer of the log that pulls, and that its server holds in memory."""
    return {"ack_policy": "none", "mem_storage": True, "num_replicas": 1} | changes


def consumer(keys: Folder, name: str, slot: int = 0) -> str:
    """The name of a consumer of an identity."""
    entry = keys.roster.identity(name)
    assert entry is not None
    return entry.who.consumers[slot]


async def send(liar: Guest, subject: str, wanted: dict[str, Any]) -> None:
    """Ask for a consumer of the log, and wait for no answer."""
    await liar.link.bulk.publish(f"$JS.API.{subject}", json.dumps({"stream_name": LOG, "config": wanted}).encode())


async def answer(visitor: Guest, name: str, wanted: dict[str, Any], subject: str = ENTRIES) -> dict[str, Any]:
    """Ask for a consumer of the log in a way that is allowed; what the server says."""
    request = json.dumps({"stream_name": LOG, "config": {"filter_subject": subject} | wanted}).encode()
    reply = await visitor.link.bulk.request(f"$JS.API.CONSUMER.CREATE.{LOG}.{name}.{subject}", request, timeout=DEADLINE_S)
    told: dict[str, Any] = json.loads(reply.data)
    return told


async def first(visitor: Guest, stream: str, subject: str) -> Stored:
    """The first message that a guest reads."""
    async with asyncio.timeout(DEADLINE_S):
        async for message in Puller(visitor.link, stream, [subject], 1):
            return message
    raise AssertionError


async def test_one_learner_uses_up_nobodys_consumers(syncer: Guest, server: Server, keys: Folder) -> None:
    """1,000 of them is what a server grants a stream, unless told otherwise."""
    async with guest(server, keys, LIAR) as liar:
        for number in range(1000):
            wanted = config(inactive_threshold=THIRTY_ONE_YEARS - number)
            await send(liar, f"CONSUMER.CREATE.{LOG}", wanted)
            await send(liar, f"CONSUMER.CREATE.{LOG}.many-{number}", wanted | {"name": f"many-{number}"})
        await liar.flush()
        async with guest(server, keys, VICTIM) as newcomer, guest(server, keys, "syncer-0") as restarted:
            assert (await first(newcomer, LOG, ENTRIES)).data == b"entry"
            assert (await first(restarted, LOG, ENTRIES)).data == b"entry"
        async with guest(server, keys, "operator") as operator:
            assert [one["name"] for one in await streams.consumers(operator.link, LOG) if one["name"].startswith("many")] == []


async def test_a_consumer_is_given_no_more_than_a_reader_needs(syncer: Guest, server: Server, keys: Folder) -> None:
    """One filter, and a minute without a reader."""
    own = consumer(keys, LIAR)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"inactive_threshold": THIRTY_ONE_YEARS}, "inactive threshold exceeds"),
        ({"durable_name": own, "inactive_threshold": 61 * NANOSECONDS}, "inactive threshold exceeds"),
        ({"filter_subject": "", "filter_subjects": [NAMES.record(f) for f in range(5000)]}, "multiple subject filters"),
        ({"filter_subject": NAMES.genesis}, "did not match"),
        ({"durable_name": "other"}, "does not match"),
    ]
    async with guest(server, keys, LIAR) as liar:
        for wanted, said in refused:
            told = await answer(liar, own, config(name=own, **wanted))
            assert said in told.get("error", {}).get("description", ""), (wanted, told)
        for lasting in ({}, {"inactive_threshold": 0}, {"durable_name": own}, {"inactive_threshold": -1}):
            told = await answer(liar, own, config(name=own, **lasting))
            assert told["config"]["inactive_threshold"] == 60 * NANOSECONDS
            longer = config(name=own, **lasting | {"inactive_threshold": THIRTY_ONE_YEARS})
            assert "exceeds" in (await answer(liar, own, longer))["error"]["description"]
            await streams.remove_consumer(liar.link, LOG, own)
        assert liar.told == ""


@pytest.mark.parametrize("empty", [1, 2, 301])
async def test_empty_messages_of_a_learner_hide_nobodys_offers(syncer: Guest, server: Server, keys: Folder, empty: int) -> None:
    """A server drops the answers after an empty one, if the request came from another account: the reader notices."""
    offers = [NAMES.offer(fragment, VICTIM) for fragment in range(2)]
    part = NAMES.offer(0, LIAR).removesuffix("head") + "part.%d"
    async with guest(server, keys, LIAR) as liar, guest(server, keys, VICTIM) as victim:
        newest = part % (empty - 1)
        before = await syncer.link.last(OFFERS, newest)
        for index in range(empty):
            await raw_messages.publish(liar.link.bulk, (part % index).encode(), b"")
        await liar.flush()
        async with asyncio.timeout(DEADLINE_S):  # they are stored some time after the server has taken them
            while await syncer.link.last(OFFERS, newest) == before:
                await asyncio.sleep(0.01)
        stored = [
            await victim.link.append(offer, b"offer", message_id=f"{offer} {empty}", fence=None, timeout_s=DEADLINE_S)
            for offer in offers
        ]
    read = []
    async with asyncio.timeout(DEADLINE_S):
        async for message in Puller(syncer.link, OFFERS, [NAMES.offer_tree("*")], stored[0] - empty):
            read.append(message.subject)
            if message.subject == offers[-1]:
                break
    assert read == [part % index for index in range(empty)] + offers


async def test_one_learner_keeps_eight_consumers_and_no_other_from_its_own(syncer: Guest, server: Server, keys: Folder) -> None:
    names = sorted(consumer(keys, LIAR, slot) for slot in range(8))
    calls = [
        f"$JS.API.CONSUMER.{call}.{LOG}.{consumer(keys, VICTIM)}" for call in ("DELETE", "MSG.NEXT", "RESET", "PAUSE", "UNPIN")
    ]
    async with (
        guest(server, keys, LIAR) as liar,
        guest(server, keys, VICTIM) as victim,
        guest(server, keys, "operator") as operator,
    ):
        for name in names:
            await streams.remove_consumer(liar.link, LOG, name)
            assert "error" not in await answer(liar, name, config(name=name, max_waiting=10**9))
        made = [one["name"] for one in await streams.consumers(operator.link, LOG)]
        assert sorted(name for name in made if subjects.reader_of(name) == LIAR) == names
        assert (await first(liar, LOG, ENTRIES)).data == b"entry"  # as when a process before has left them
        reading = aiter(Puller(victim.link, LOG, [ENTRIES], 1))
        assert (await anext(reading)).data == b"entry"
        for subject in calls:
            await liar.link.bulk.publish(subject)
        assert await liar.refused(*calls) == []
        await syncer.link.append(NAMES.record(0), b"next", message_id="next", fence=None, timeout_s=DEADLINE_S)
        async with asyncio.timeout(DEADLINE_S):
            assert (await anext(reading)).data == b"next"
        assert "permissions violation" not in victim.told


async def test_an_operator_removes_the_consumers_of_one_who_was_revoked(
    syncer: Guest, server: Server, keys: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    who = Who("leaver", "learner")
    put(keys, who)
    server.reload()
    entry = keys.roster.identity("leaver")
    assert entry is not None
    async with guest(server, keys, "leaver") as leaver, guest(server, keys, "toy-0") as staying:
        leavers, others = consumer(keys, "leaver", 3), consumer(keys, "toy-0", 3)
        for visitor, name in ((leaver, leavers), (staying, others)):
            assert "error" not in await answer(visitor, name, config(name=name))
        keys.replace(entry.model_copy(update={"revoked": True}))
        server.reload()
        command = partial(runs.consumers, RUN, nats_url=server.url, identity=keys.identity_file("operator"))
        await asyncio.to_thread(command, json_=True)
        there = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
        assert {(there[name]["stream"], there[name]["idle_s"]) for name in (leavers, others)} == {(LOG, 60.0)}
        await asyncio.to_thread(command, remove=["leaver"], json_=True)
        left = {one["name"] for one in json.loads(capsys.readouterr().out)}
        assert leavers not in left
        assert others in left
        with pytest.raises(RunError, match=rf"run '{RUN}': leaver has no consumer at 127.0.0.1"):
            await asyncio.to_thread(command, remove=["leaver"])


async def test_a_reader_whose_rights_are_of_another_version_says_so_and_waits_for_its_own(
    syncer: Guest, server: Server, keys: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "TIMEOUT_S", scaled_s(0.5))
    file = keys.server_folder("nats") / "auth.conf"
    own = file.read_text()
    file.write_text(own.replace(f"{LOG}.{VICTIM}-", f"{LOG}.older-"))
    server.reload()
    async with guest(server, keys, VICTIM) as reader:
        reading = asyncio.create_task(first(reader, LOG, ENTRIES))
        async with asyncio.timeout(DEADLINE_S):
            while f'publish to "$js.api.consumer.create.{LOG}.{consumer(keys, VICTIM)}.'.lower() not in reader.told:
                await asyncio.sleep(0.05)
        assert not reading.done()
        file.write_text(own)
        server.reload()
        assert (await reading).data == b"entry"


# ---- requests for very many messages


@pytest.mark.parametrize("name", ["test", "judge", LIAR, "syncer-0", "coordinator", "operator"])
async def test_one_request_reads_one_message(syncer: Guest, server: Server, keys: Folder, name: str) -> None:
    """40,000 filters in requests of 800 KB slowed a run to a fifteenth."""
    filters = {"multi_last": [NAMES.record(0)] * 200}
    batch = {"seq": 1, "batch": 1000, "next_by_subj": ENTRIES}
    direct = f"$JS.API.DIRECT.GET.{LOG}"
    async with guest(server, keys, name) as visitor:
        client, newest = visitor.link.bulk, await visitor.link.last(LOG, NAMES.record(0))
        assert newest is not None
        for request in (filters, batch):
            told = await client.request(f"{direct}.{NAMES.record(0)}", json.dumps(request).encode(), timeout=DEADLINE_S)
            assert (told.headers or {}).get("Status") == "408"
            assert told.data == b""
        assert visitor.told == ""
        for request in (filters, batch):
            await client.publish(direct, json.dumps(request).encode(), reply=client.new_inbox())
        assert await visitor.refused(direct) == []
        assert await visitor.link.get(LOG, newest.sequence) == newest
        assert await visitor.link.first(LOG, NAMES.record(0), newest.sequence) == newest


async def test_requests_that_wait_in_a_server_are_few(syncer: Guest, server: Server, keys: Folder) -> None:
    """By its default a server keeps 10,000, of any size: 1,500 requests of 800 KB took 2.2 GiB."""
    request = json.dumps({"last_by_subj": NAMES.record(0)}).encode()
    async with guest(server, keys, "test") as observer:
        client = observer.link.bulk
        async with asyncio.timeout(DEADLINE_S):
            while not (dropped := re.findall(r"limit reached, dropping (\d+) requests", server.log_file.read_text())):
                for _ in range(4000):
                    await client.publish(f"$JS.API.STREAM.MSG.GET.{LOG}", request, reply=client.new_inbox())
                await observer.flush()
        assert max(map(int, dropped)) < 1000
        assert await syncer.link.get(LOG, 1) is not None


# ---- offers that the server takes for copies


def an_offer(parts: int) -> Offer:
    return Offer(0, VICTIM, 7, 1, (0, 0), 1, 0, bytes(32), 4, 1, 1, 0, [], Body(5, bytes(32), parts, b"attempt."))


@pytest.mark.parametrize("parts", [[], [b"part 0", b"part 1"]])
async def test_an_offer_is_stored_whatever_ids_another_learner_has_used(
    syncer: Guest, server: Server, keys: Folder, parts: list[bytes]
) -> None:
    """A stream holds one message of an id, on whatever subject it came."""
    offer = an_offer(len(parts))
    guessed = f"{VICTIM}/{offer.incarnation}/{offer.fragment}/{offer.number}"
    async with guest(server, keys, LIAR) as liar, guest(server, keys, VICTIM) as victim:
        for identifier in (guessed, f"{guessed}/0", f"{guessed}/1"):
            own = NAMES.offer(offer.fragment, LIAR)
            await liar.link.append(own, b"x", message_id=identifier, fence=None, timeout_s=DEADLINE_S)
        sequence = await store(victim, offer, parts)
        stored = await syncer.link.last(OFFERS, NAMES.offer(offer.fragment, VICTIM))
        assert stored is not None, "acknowledged, and thrown away"
        assert stored.sequence == sequence
        for index, part in enumerate(parts):
            found = await syncer.link.last(OFFERS, subjects.offer_part(stored.subject, index))
            assert found is not None
            assert found.data == part


async def test_a_combined_offer_is_stored_whatever_ids_a_learner_has_used(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """In a run with regions a syncer's offers are in the stream that the region's learners write to."""
    path = tmp_path_factory.mktemp("regional")
    known = [Who("coordinator", "coordinator", "eu", True), Who(LIAR, "learner", "eu"), Who("syncer-0", "syncer", "eu")]
    keys = make_keys(path / "keys", RUN, known, regions=["eu", "us"], servers={"nats": ["eu", "control"]})
    server = Server(path / "server", keys=keys.server_folder("nats"))
    server.start()
    answer = Answer(LIAR, 7, 1, (0, 0), 1, 0, bytes(32), 1, 1, 0, [])
    offer = RegionalOffer(0, "syncer-0", 7, 1, 4, [answer], Body(5, bytes(32), 0, b"attempt."))
    try:
        async with guest(server, keys, "coordinator") as coordinator:
            await creation.create(coordinator.link, RUN, small(regions__names=["eu", "us"]))
        async with guest(server, keys, LIAR) as liar, guest(server, keys, "syncer-0") as combining:
            own = NAMES.offer(0, LIAR)
            await liar.link.append(own, b"x", message_id="regional/syncer-0/7/0/1", fence=None, timeout_s=DEADLINE_S)
            sequence = await store(combining, offer, [])
            stored = await combining.link.last(OFFERS, NAMES.regional_offer(0, "syncer-0"))
            assert stored is not None, "acknowledged, and thrown away"
            assert stored.sequence == sequence
    finally:
        server.kill()


@pytest.mark.parametrize("parts", [[], [b"part 0", b"part 1"]])
async def test_an_offer_whose_answer_was_lost_is_stored_once(
    syncer: Guest, server: Server, keys: Folder, parts: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with guest(server, keys, VICTIM) as victim:
        before = await last_sequence(syncer)
        lost: list[str] = []
        real = victim.link.append

        async def append(subject: str, *args: Any, **named: Any) -> int:
            stored = await real(subject, *args, **named)
            if len(lost) < 2:
                lost.append(subject)
                raise AppendUncertainError(f"{subject}: the answer was lost")
            return stored

        monkeypatch.setattr(victim.link, "append", append)
        assert await store(victim, an_offer(len(parts)), parts) == before + len(parts) + 1
        assert len(lost) == 2
        assert await last_sequence(syncer) == before + len(parts) + 1


async def store(sender: Guest, offer: Offer | RegionalOffer, parts: list[bytes]) -> int | None:
    """Store an offer as a learner or a syncer does."""
    return await append_offer(
        sender.link, NAMES, b"identity", offer, b"", parts, timeout_s=DEADLINE_S, failed=lambda error: None
    )


async def last_sequence(syncer: Guest) -> int:
    """Of the stream of offers."""
    return int((await syncer.link.bulk.jetstream().stream_info(OFFERS)).state.last_seq)


# ---- sizes


async def test_a_key_that_readers_would_refuse_is_refused_by_the_server(syncer: Guest, server: Server, keys: Folder) -> None:
    key = refusals_key("nobody")  # a syncer's: a learner's messages are smaller than the largest value
    for size, fits in ((MAX_VALUE_BYTES + 1, False), (syncer.link.control.max_payload, False), (MAX_VALUE_BYTES, True)):
        answered = await syncer.link.control.request(f"$KV.{NAMES.bucket}.{key}", bytes(size), timeout=DEADLINE_S)
        told = json.loads(answered.data)
        assert ("error" not in told) == fits, told
    registry = await syncer.link.bucket(NAMES.bucket, create=False)
    found = await registry.get(key)
    assert found is not None
    assert len(found[0]) == MAX_VALUE_BYTES


@pytest.mark.parametrize(
    ("name", "most_bytes"),
    [
        ("judge", READER_PAYLOAD_BYTES),
        ("test", READER_PAYLOAD_BYTES),
        ("coordinator", COORDINATOR_PAYLOAD_BYTES),
        (LIAR, LEARNER_PAYLOAD_BYTES),
    ],
)
async def test_who_never_sends_large_messages_is_cut_off_when_it_does(
    syncer: Guest, server: Server, keys: Folder, name: str, most_bytes: int
) -> None:
    """15 heartbeats of 1 MiB a second, by an evaluator, left a run a quarter of its versions."""
    own = NAMES.heartbeat(name) if name in ("judge", LIAR) else {"test": NAMES.status, "coordinator": NAMES.changed}[name]
    violations = ViolationLog(server.log_file, keys.server_folder("nats") / "auth.conf")
    heard: list[int] = []
    told = asyncio.Event()

    async def hear(message: Any) -> None:
        heard.append(len(message.data))
        told.set()

    hearer = {"judge": LIAR, "test": "coordinator", "coordinator": LIAR, LIAR: VICTIM}[name]
    async with guest(server, keys, hearer) as listening, guest(server, keys, name) as visitor:
        await listening.link.control.subscribe(own, cb=hear)
        await listening.flush()
        await visitor.flush()
        client = visitor.link.control
        assert (client.max_payload, client.largest_bytes) == (most_bytes, 1 << 20)
        with pytest.raises(nats.errors.MaxPayloadError):
            await client.publish(own, bytes(most_bytes + 1))
        bucket = await visitor.link.bucket(NAMES.bucket, create=False)
        with pytest.raises(BrokerError, match=f"max_payload is {most_bytes} for this process"):
            await bucket.put("any", bytes(most_bytes))
        await client.publish(own, bytes(most_bytes))
        async with asyncio.timeout(DEADLINE_S):
            await told.wait()
        raw: Any = client
        raw._max_payload = 1 << 20  # as one that does not go by it
        await raw.publish(own, bytes(most_bytes + 1))
        async with asyncio.timeout(DEADLINE_S):
            while not client.is_closed:
                await asyncio.sleep(0.05)
        await listening.flush()
    assert heard == [most_bytes]
    violations.read()
    assert violations.counts() == {(name, "payload", ""): 1.0}


async def left(operator: Guest, name: str) -> int:
    """How many messages a consumer of the log has not delivered yet."""
    return sum(one["num_pending"] for one in await streams.consumers(operator.link, LOG) if one["name"] == name)


@pytest.mark.parametrize("knows_the_name", [False, True])
async def test_messages_of_anothers_consumer(syncer: Guest, server: Server, keys: Folder, knows_the_name: bool) -> None:
    """A server has consumers deliver to the requests of others: who knew a name took what its owner was to read."""
    own, name = consumer(keys, LIAR), consumer(keys, VICTIM)
    deliveries = f"$JS.API.CONSUMER.MSG.NEXT.{LOG}.{name if knows_the_name else f'{VICTIM}-0'}"
    async with (
        guest(server, keys, LIAR) as liar,
        guest(server, keys, VICTIM) as victim,
        guest(server, keys, "operator") as operator,
    ):
        for visitor, old in ((liar, own), (victim, name)):
            await streams.remove_consumer(visitor.link, LOG, old)
        assert "error" not in await answer(victim, name, config(name=name))
        thief = {"name": own, "deliver_subject": deliveries, "headers_only": True, "ack_policy": "explicit"}
        told = await answer(liar, own, config() | thief)
        assert told.get("push_bound", False) == knows_the_name
        async with asyncio.timeout(DEADLINE_S):
            while knows_the_name and await left(operator, name):
                await asyncio.sleep(0.05)
        waited = await victim.link.bulk.subscribe(victim.link.bulk.new_inbox())
        request = json.dumps({"batch": 1, "no_wait": True}).encode()
        await victim.link.bulk.publish(f"$JS.API.CONSUMER.MSG.NEXT.{LOG}.{name}", request, reply=waited.subject)
        read = await waited.next_msg(DEADLINE_S)
        assert (read.data, (read.headers or {}).get("Status")) == ((b"", "404") if knows_the_name else (b"entry", None))


@pytest.mark.parametrize(("name", "most"), [(LIAR, 32), ("test", 8), ("judge", 8)])
async def test_one_member_takes_nobodys_connections(server: Server, keys: Folder, name: str, most: int) -> None:
    async with contextlib.AsyncExitStack() as opened:
        last = [await opened.enter_async_context(guest(server, keys, name)) for _ in range(most // 2)][-1]
        own = identity.load(keys.identity_file(name))
        with pytest.raises(BrokerError, match="no connection to"):
            await NatsTransport.open(server.url, server.url, name, get_logger(), 1.0, identity=own)
        async with guest(server, keys, VICTIM):
            pass
        await last.link.close()
        async with guest(server, keys, name):  # those that are gone do not count
            pass


# ---- claims to shares of the data


async def test_a_claim_that_cannot_be_keeps_no_other_learner_from_its_share(
    syncer: Guest, server: Server, keys: Folder
) -> None:
    far = ShareClaim(LIAR, 1, [ClaimedShare(share, True, 2**62, 0, 0) for share in range(3)])
    as_victim = ShareClaim(VICTIM, 2**62, [ClaimedShare(0, False, 9, 0, 0)])
    fragments = build_map([TensorSpec("w", (1,))], 1)  # no member is admitted with it
    async with guest(server, keys, LIAR) as liar, guest(server, keys, VICTIM) as victim:
        run = await creation.find(victim.link, RUN, get_logger())
        for forged in (bytes(MAX_VALUE_BYTES // 2), far.pack(), as_victim.pack(), b"no claim"):
            await (await liar.link.bucket(NAMES.bucket, create=False)).put(key_of(LIAR), forged)
            settings = LearnerSettings(name=VICTIM, share=0)
            honest = LeaseClient(run, settings, 1, fragments, Counted(get_logger()), get_logger())
            await honest.take({})
            assert honest.leased() == {0: 0}
            await honest.leave()
            assert [sender for sender, _ in honest.refused.counts()] == [key_of(LIAR)]


async def test_a_learner_hears_the_others_heartbeats_and_its_own(syncer: Guest, server: Server, keys: Folder) -> None:
    """By them it knows who is gone, and that it is not deaf itself."""
    async with guest(server, keys, LIAR) as one, guest(server, keys, VICTIM) as other:
        heard: set[str] = set()

        async def hear(message: Heard) -> None:
            heard.add(message.subject)

        await one.link.subscribe(NAMES.heartbeat(), hear)
        async with asyncio.timeout(DEADLINE_S):
            while heard != {NAMES.heartbeat(LIAR), NAMES.heartbeat(VICTIM)}:
                await one.link.publish(NAMES.heartbeat(LIAR), b"alive")
                await other.link.publish(NAMES.heartbeat(VICTIM), b"alive")
                await asyncio.sleep(0.05)
