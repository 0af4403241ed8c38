"""A run whose servers accept no process without an identity, and refuse what is not its own to do: tried, and refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import ssl
import tomllib
import uuid
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import nats.aio.client
import nats.errors
import pytest
from tests.made.fixtures import Launch
from tests.made.run_checks import newest_applied, waiting_settings
from tests.pace import DEADLINE_S, scaled_s
from tests.services.cluster import NEVER_S, Cluster, Events, check_accounts, small
from tests.services.forking import Nursery
from tests.services.guarded import REGIONS, two_regions
from tests.services.secured import Guest, guest, make_keys, members, put, serving

from diloco.control import admission, creation
from diloco.control.changes import read_changes
from diloco.core.tensors.fragments import TensorSpec, build_map
from diloco.errors import BrokerError
from diloco.nats import identity, streams
from diloco.nats.nkey import NatsKey
from diloco.process.observe import Logger
from diloco.service import rundir
from diloco.service.rundir import RunDirectory
from diloco.wire.subjects import Subjects
from diloco_coordinator.server_watch.violations import MAX_SUBJECT, ViolationLog
from diloco_ops.audit import verify
from diloco_ops.broker.server import Server
from diloco_ops.checkpoints import checkpoint
from diloco_ops.keys.folder import Folder
from diloco_ops.keys.permissions import Who
from diloco_ops.operate import operate, rollback
from diloco_ops.reading import inspect, run_reader, runs
from diloco_syncer.sweeper import Sweeper

pytestmark = pytest.mark.usefixtures("patient_commands")
RUN = "guarded"
OTHER = "other"
NAMES = Subjects(RUN)
LOG, OFFERS, STORE = NAMES.log_stream, NAMES.offer_stream, f"KV_{NAMES.bucket}"
LEARNER = "toy-1"  # does not found


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return make_keys(tmp_path_factory.mktemp("keys") / "run", RUN, members(3, 2))


@pytest.fixture(scope="module")
def guarded(keys: Folder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(keys, tmp_path_factory.mktemp("guarded")) as server:
        yield server


@pytest.fixture
async def run(guarded: Server, keys: Folder) -> AsyncIterator[Guest]:
    """The run is there, as its coordinator has made it; a syncer's connection."""
    async with guest(guarded, keys, "coordinator") as coordinator:
        await creation.create(coordinator.link, RUN, small())
    async with guest(guarded, keys, "syncer-0") as syncer:
        yield syncer


# ---- what each may not do

NOBODYS = [
    f"$JS.API.STREAM.UPDATE.{LOG}",
    f"$JS.API.STREAM.CREATE.DILOCO_{OTHER}_LOG",
    f"$JS.API.STREAM.DELETE.DILOCO_{OTHER}_LOG",
    f"$JS.API.STREAM.INFO.DILOCO_{OTHER}_LOG",
    f"$JS.API.STREAM.MSG.GET.KV_DILOCO_{OTHER}",
    f"$JS.API.DIRECT.GET.DILOCO_{OTHER}_LOG",
    *(f"$JS.API.DIRECT.GET.{stream}" for stream in (LOG, STORE, NAMES.archive_stream)),
    f"$JS.API.CONSUMER.CREATE.DILOCO_{OTHER}_LOG",
    f"$JS.API.CONSUMER.CREATE.{LOG}",
    f"$JS.API.CONSUMER.CREATE.{LOG}.named",
    f"$JS.API.CONSUMER.CREATE.{LOG}.toy-2-0.{NAMES.record_tree('*')}",
    f"$JS.API.CONSUMER.CREATE.{STORE}.{LEARNER}-0.>",
    f"$JS.API.CONSUMER.DURABLE.CREATE.{LOG}.lasting",
    f"$JS.API.CONSUMER.MSG.NEXT.{LOG}.toy-2-0",
    f"$JS.API.CONSUMER.INFO.{LOG}.toy-2-0",
    f"$JS.API.CONSUMER.NAMES.{LOG}",
    f"diloco.{OTHER}.heartbeat.{LEARNER}",
    f"diloco.{OTHER}.round.0",
    f"$KV.DILOCO_{OTHER}.run",
    "$SYS.REQ.SERVER.PING",
    "_INBOX.anything",
    "_INBOX_toy-2.anything",
    "anything",
]
CONSUMERS = [
    f"$JS.API.CONSUMER.DELETE.{LOG}.toy-2-0",
    f"$JS.API.CONSUMER.LIST.{LOG}",
    f"$JS.API.CONSUMER.LIST.{STORE}",
]
STREAMS = [
    *(f"$JS.API.STREAM.{call}.{name}" for call in ("DELETE", "SNAPSHOT", "RESTORE") for name in (LOG, OFFERS, STORE)),
    f"$JS.API.STREAM.PURGE.{STORE}",
    f"$JS.API.STREAM.MSG.DELETE.{LOG}",
    f"$JS.API.STREAM.MSG.DELETE.{STORE}",
    "$JS.API.STREAM.NAMES",
    "$JS.API.STREAM.LIST",
]
VERSIONS = [
    NAMES.record(0),
    f"diloco.{RUN}.fragment.0.part.0011223344556677.0",
    NAMES.commit_notice(0),
    NAMES.keyframe(0),
    f"diloco.{RUN}.keyframe.0.part.0011223344556677.0",
    NAMES.genesis,
    NAMES.regional_offer(0, "syncer-0"),
    NAMES.archived(0, "toy-2", 1, 1, None),
    NAMES.archived(0, "toy-2", 1, 1, bytes(8)),
]
OFFERED = [NAMES.offer(0, "toy-2"), f"diloco.{RUN}.delta.0.toy-2.part.0"]
OTHERS_OFFERS = [
    f"$JS.API.{call}.{OFFERS}" for call in ("STREAM.INFO", "STREAM.MSG.GET", "DIRECT.GET", "CONSUMER.CREATE", "STREAM.PURGE")
]
SIGNS = [NAMES.shard("syncer-1"), NAMES.presence("syncer-1"), NAMES.heartbeat("toy-2"), NAMES.marker_answer("toy-2")]
DECIDING = [NAMES.round(0), NAMES.presence("syncer-0"), NAMES.shard("syncer-0"), NAMES.coordinator, NAMES.marker, NAMES.changed]

FORBIDDEN: dict[str, list[str]] = {
    LEARNER: [
        *(NOBODYS + CONSUMERS + STREAMS + VERSIONS + OFFERED + OTHERS_OFFERS + SIGNS + DECIDING),
        f"$JS.API.CONSUMER.CREATE.{LOG}.{LEARNER}-0",  # without a filter in the subject: with any number of them
        f"$JS.API.CONSUMER.CREATE.{LOG}.{LEARNER}-8.{NAMES.record_tree('*')}",
        f"$JS.API.CONSUMER.CREATE.{OFFERS}.{LEARNER}-0.>",
        f"$JS.API.STREAM.CREATE.{LOG}",
        f"$JS.API.STREAM.PURGE.{LOG}",
        *(f"$KV.{NAMES.bucket}.{key}" for key in ("run", "map", "founder", "genesis", "owners", "coordinator", "changes")),
        *(f"$KV.{NAMES.bucket}.{key}" for key in ("member.toy-2", "share.toy-2")),
    ],
    "syncer-0": [
        *(NOBODYS + CONSUMERS + STREAMS + OFFERED + SIGNS),
        *(
            f"$KV.{NAMES.bucket}.{key}"
            for key in ("run", "map", "founder", "genesis", "coordinator", "changes", "member.toy-2", "share.toy-2")
        ),
        NAMES.coordinator,
        NAMES.marker,
        f"$JS.API.STREAM.PURGE.{LOG}",
    ],
    "coordinator": [
        *(NOBODYS + CONSUMERS + STREAMS + OFFERED + VERSIONS + SIGNS),
        *(f"$KV.{NAMES.bucket}.{key}" for key in ("map", "founder", "genesis", "owners", "member.toy-2", "share.toy-2")),
        f"$JS.API.STREAM.PURGE.{OFFERS}",
        *OTHERS_OFFERS[1:],
        NAMES.round(0),
    ],
    "operator": [
        *(["$JS.API.STREAM.NAMES", *NOBODYS, *OFFERED, *VERSIONS, *SIGNS]),
        NAMES.round(0),
        NAMES.coordinator,
        *OTHERS_OFFERS[1:],
    ],
    "test": [
        *(NOBODYS + CONSUMERS + STREAMS + OFFERED + VERSIONS + SIGNS + OTHERS_OFFERS + DECIDING),
        f"$KV.{NAMES.bucket}.share.toy-2",
    ],
}


@pytest.mark.parametrize("name", FORBIDDEN)
@pytest.mark.promise("a member can do only what its role allows")
async def test_what_is_not_ones_own_is_refused_by_the_server(run: Guest, guarded: Server, keys: Folder, name: str) -> None:
    violations = ViolationLog(guarded.log_file, keys.server_folder("nats") / "auth.conf")
    async with guest(guarded, keys, name) as visitor:
        for subject in FORBIDDEN[name]:
            await visitor.link.bulk.publish(subject, b"x")
        assert await visitor.refused(*FORBIDDEN[name]) == []
        assert visitor.told.count("permissions violation for publish to") == len(FORBIDDEN[name])
    violations.read()  # the server has counted each of them under the identity's name
    counts = violations.counts()
    denied = {subject for identity, action, subject in counts if (identity, action) == (name, "publish")}
    assert denied == {subject[:MAX_SUBJECT] for subject in FORBIDDEN[name]}


async def test_a_founder_writes_keyframes_and_genesis_and_no_versions(run: Guest, guarded: Server, keys: Folder) -> None:
    async with guest(guarded, keys, "toy-0") as founder:
        forbidden = [subject for subject in VERSIONS if "keyframe" not in subject and "genesis" not in subject]
        for subject in forbidden:
            await founder.link.bulk.publish(subject, b"x")
        assert await founder.refused(*forbidden) == []


async def test_a_coordinator_creates_a_run_and_sets_nothing_of_it_later(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys", RUN, members(1, 0))
    with serving(keys, tmp_path / "nats") as server:
        async with guest(server, keys, "coordinator") as coordinator:
            await creation.create(coordinator.link, RUN, small())
        keys.replace(*(entry.model_copy(update={"founder": False}) for entry in keys.roster.identities))  # diloco keys founded
        server.reload()
        own = [f"$KV.{NAMES.bucket}.{key}" for key in ("run", "protocol")]
        async with guest(server, keys, "coordinator") as coordinator:
            await creation.create(coordinator.link, RUN, small())  # as one that begins again
            assert coordinator.told == ""
            for subject in own:
                await coordinator.link.control.publish(subject, b"{}")
            assert await coordinator.refused(*own) == []
            assert await creation.stored_settings(await coordinator.link.bucket(NAMES.bucket, create=False), RUN) == small()


async def test_a_founder_starts_again_once_the_run_is_founded(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys", RUN, members(1, 1))
    fragment_map = build_map([TensorSpec("w", (64,))], 1)

    async def join(learner: Guest, incarnation: int) -> int:
        run = await creation.open_run(learner.link, RUN, small())
        founds, digest = learner.link.founds, small().digest()
        assert founds  # its identity says so, before and after
        joining = admission.join(run, "toy-0", incarnation, fragment_map, digest, founds=founds, grant=learner.link.grant)
        return await asyncio.wait_for(joining, DEADLINE_S)

    with serving(keys, tmp_path / "nats") as server:
        async with guest(server, keys, "coordinator") as coordinator:
            await creation.create(coordinator.link, RUN, small())
        async with guest(server, keys, "toy-0") as founder:
            assert await join(founder, 1) == 1
        keys.replace(*(entry.model_copy(update={"founder": False}) for entry in keys.roster.identities))  # diloco keys founded
        server.reload()
        async with guest(server, keys, "toy-0") as founder:
            assert await join(founder, 2) == 2
            assert founder.told == ""
            await founder.link.control.publish(f"$KV.{NAMES.bucket}.map", b"x")
            assert await founder.refused(f"$KV.{NAMES.bucket}.map") == []
            assert "diloco keys founded" in founder.told


@pytest.mark.parametrize(
    "subject",
    [
        "_INBOX_toy-2.>",
        "_INBOX.>",
        ">",
        "*.>",
        f"diloco.{RUN}.>",
        f"diloco.{OTHER}.>",
        f"diloco.{RUN}.delta.>",
        NAMES.answers("toy-2"),
        NAMES.state("toy-2"),
        NAMES.shard(),
        f"$KV.{NAMES.bucket}.>",
        "$JS.EVENT.>",
        "$JS.API.>",
        "$SYS.>",
    ],
)
async def test_what_is_said_to_others_is_not_heard(run: Guest, guarded: Server, keys: Folder, subject: str) -> None:
    async with guest(guarded, keys, LEARNER) as learner:
        await learner.link.bulk.subscribe(subject)
        assert await learner.refused(subject) == []
        assert "permissions violation for subscription" in learner.told


async def test_what_is_ones_own_is_allowed(run: Guest, guarded: Server, keys: Folder) -> None:
    own = NAMES.offer(0, LEARNER)
    async with guest(guarded, keys, LEARNER) as learner:
        stored = await learner.link.append(own, b"offer", message_id="1", fence=None, timeout_s=DEADLINE_S)
        assert await learner.link.last_sequence(own) == stored
        found = await run.link.get(OFFERS, stored)
        assert found is not None
        assert (found.subject, found.data) == (own, b"offer")
        assert learner.told == ""


async def test_an_operator_sees_what_there_is(run: Guest, guarded: Server, keys: Folder) -> None:
    async with guest(guarded, keys, "operator") as operator:
        found = {stream["config"]["name"] for stream in await streams.listed(operator.link)}
        assert found == {LOG, OFFERS, STORE}
        assert operator.told == ""


# ---- what a server could be made to do for one who may not


async def holds(run: Guest) -> dict[str, int]:
    api = run.link.bulk.jetstream(timeout=DEADLINE_S)
    return {name: (await api.stream_info(name)).state.messages for name in (LOG, OFFERS, STORE)}


async def test_answers_of_the_server_are_sent_to_nobody_but_who_asked(run: Guest, guarded: Server, keys: Folder) -> None:
    """nats-server answers to any subject that it is told, with the rights of its own."""
    theirs = NAMES.offer(0, "toy-2")
    async with guest(guarded, keys, "toy-2") as other, guest(guarded, keys, LEARNER) as learner:
        await other.link.append(theirs, b"their offer", message_id="a", fence=None, timeout_s=DEADLINE_S)
        await run.link.append(NAMES.record(0), b"an entry", message_id="b", fence=None, timeout_s=DEADLINE_S)
        await learner.link.append(NAMES.offer(0, LEARNER), b"x", message_id="c", fence=None, timeout_s=DEADLINE_S)
        before = await holds(run)
        assert all(before.values())
        asked = {
            f"$JS.API.DIRECT.GET.{LOG}.nothing": b"",  # whose answer is empty, as a request to delete is
            f"$JS.API.DIRECT.GET.{LOG}.{NAMES.record(0)}": b"",
            f"$JS.API.STREAM.INFO.{LOG}": b"",
            f"$JS.API.STREAM.MSG.GET.{STORE}": json.dumps({"last_by_subj": f"$KV.{NAMES.bucket}.run"}).encode(),
            NAMES.offer(0, LEARNER): b"x",
        }
        targets = [*(f"$JS.API.STREAM.{call}.{name}" for call in ("DELETE", "PURGE") for name in (LOG, OFFERS, STORE))]
        for target in [*targets, NAMES.record(0), theirs, f"$KV.{NAMES.bucket}.run", NAMES.round(0)]:
            for subject, data in asked.items():
                await learner.link.bulk.publish(subject, data, reply=target)
        for target in (targets[0], theirs):
            config = {"ack_policy": "none", "deliver_subject": target, "idle_heartbeat": 100_000_000}
            request = json.dumps({"stream_name": LOG, "config": config}).encode()
            await learner.link.bulk.publish(f"$JS.API.CONSUMER.CREATE.{LOG}", request)
        # so that no consumer's heartbeat, which is empty, comes
        assert await learner.refused(f"$JS.API.CONSUMER.CREATE.{LOG}") == []
        await answered(learner)
        assert await holds(run) == before
        stored = await run.link.last(OFFERS, theirs)
        assert stored is not None
        assert stored.data == b"their offer"


async def answered(learner: Guest) -> None:
    """Wait until the server has answered all that a learner has asked: an answer of each kind comes after those before."""
    bucket = await learner.link.bucket(NAMES.bucket, create=False)
    assert await bucket.get("run") is not None
    assert await learner.link.last(LOG, NAMES.record(0)) is not None
    assert await learner.link.append(NAMES.offer(0, LEARNER), b"x", message_id="last", fence=None, timeout_s=DEADLINE_S)


@pytest.mark.parametrize(
    ("header", "value"),
    [("Nats-Rollup", "all"), ("Nats-Rollup", "sub"), ("Nats-TTL", "1s"), ("Nats-Schedule", "@every 1s")],
)
async def test_headers_that_would_empty_a_stream_are_refused(
    run: Guest, guarded: Server, keys: Folder, header: str, value: str
) -> None:
    before = await holds(run)
    async with guest(guarded, keys, LEARNER) as learner:
        for subject in (NAMES.offer(0, LEARNER), f"$KV.{NAMES.bucket}.share.{LEARNER}"):
            asked = learner.link.bulk.request(subject, b"x", timeout=DEADLINE_S, headers={header: value})
            answer = json.loads((await asked).data)
            assert "error" in answer, (subject, answer)
    assert await holds(run) == before


async def test_what_no_offer_is_made_of_is_dropped_with_all_of_its_sender(run: Guest, guarded: Server, keys: Folder) -> None:
    """Two fragments of 10 and 200,000 values: of one part and of two at most."""
    specs = [TensorSpec("a", (10,), False), TensorSpec("b", (20_000, 10), True)]
    fragments = build_map(specs, 2, "balanced")
    sizes = [fragment.size for fragment in fragments.fragments]
    small_, large = sizes.index(10), sizes.index(200_000)
    events = Events()
    sweeper = Sweeper(run.link, RUN, fragments, cast(Logger, events))
    async with guest(guarded, keys, LEARNER) as liar, guest(guarded, keys, "toy-2") as honest:

        async def stored(visitor: Guest, name: str, *rest: str) -> None:
            for tail in rest:
                subject = f"diloco.{RUN}.delta.{tail.replace('NAME', name)}"
                await visitor.link.append(subject, b"x", message_id=uuid.uuid4().hex, fence=None, timeout_s=DEADLINE_S)

        real = [f"{small_}.NAME.head", f"{small_}.NAME.part.0", f"{large}.NAME.head", f"{large}.NAME.part.1"]
        await stored(honest, "toy-2", *real)
        await stored(liar, LEARNER, *real)
        for stray in (f"{small_}.NAME.part.1", f"{large}.NAME.part.2", "2.NAME.head", "x.NAME.part.0", f"{large}.NAME.part.01"):
            await sweeper.sweep()
            assert len(await streams.subjects(run.link, OFFERS, f"diloco.{RUN}.delta.*.{LEARNER}.>")) >= 3
            await stored(liar, LEARNER, stray)
            await sweeper.sweep()
            assert await streams.subjects(run.link, OFFERS, f"diloco.{RUN}.delta.*.{LEARNER}.>") == []
            await stored(liar, LEARNER, *real)
        kept = await streams.subjects(run.link, OFFERS, f"diloco.{RUN}.delta.*.toy-2.>")
        assert kept.count(f"diloco.{RUN}.delta.{small_}.toy-2.head") == 1
        assert len(kept) >= 4
    assert sweeper.swept.counts() == {(LEARNER, "stray"): 5}
    assert [event for _, event, _ in events.entries] == ["offers_dropped"]  # said once


# ---- who is let in


async def comes_in(url: str, file: Path | None, seed: str = "", **changes: Any) -> str:
    """Connect with what an identity file holds, not checked here; what goes wrong, or nothing."""
    options: dict[str, Any] = {}
    if file is not None:
        values = tomllib.loads(file.read_text())  # noqa: ASYNC240
        context = ssl.create_default_context(cadata=changes.pop("trusted", values["ca"]))
        if changes.pop("certificate", True):
            context.load_cert_chain(file)
        options, seed = {"tls": context}, seed or values["seed"]
    client = nats.aio.client.Client()
    if seed:
        key = NatsKey.from_seed(seed)
        client._public_nkey, options["signature_cb"] = key.public_key, key.sign
    errors: list[str] = []

    async def note(error: Exception) -> None:
        errors.append(repr(error))

    try:
        await client.connect(url, allow_reconnect=False, connect_timeout=DEADLINE_S, error_cb=note, **options | changes)
        await client.flush()
        await client.close()
    except (nats.errors.Error, OSError, asyncio.IncompleteReadError) as error:
        errors.append(repr(error))
    return " ".join(errors)


@pytest.mark.promise("a connection without an identity is refused")
async def test_strangers_are_turned_away(guarded: Server, keys: Folder, tmp_path: Path) -> None:
    strangers = make_keys(tmp_path / "strangers", RUN, [Who(LEARNER, "learner")])
    own, theirs = keys.identity_file(LEARNER), strangers.identity_file(LEARNER)
    old = put(keys, Who("old", "learner"), timedelta(minutes=-5))
    guarded.reload()  # its key is known; its certificate has ended
    seed = tomllib.loads(own.read_text())["seed"]
    trusted = tomllib.loads(own.read_text())["ca"]
    tls = guarded.url
    assert await comes_in(tls, own) == ""
    assert await comes_in(tls, None)  # no TLS
    assert await comes_in(tls, None, seed)  # no TLS, and a good key
    assert await comes_in(tls, own, certificate=False)
    assert await comes_in(tls, theirs, seed, trusted=trusted)  # a certificate of another authority, and a good key
    assert await comes_in(tls, old)
    assert "authorization" in (await comes_in(tls, own, tomllib.loads(theirs.read_text())["seed"])).lower()
    assert "certificate" in (await comes_in(tls, theirs)).lower()  # it knows a server of another authority when it sees one
    said = guarded.log_file.read_text()
    for reason in (
        "didn't provide a certificate",
        "unknown authority",
        "expired",
        "Authentication Failure|authentication error",
    ):
        assert re.search(reason, said, re.IGNORECASE), (reason, said[-3000:])


async def test_nothing_is_read_by_one_who_only_listens(guarded: Server) -> None:
    """All that is said in plain text is the greeting."""
    reader, writer = await asyncio.open_connection("127.0.0.1", guarded.port)
    greeting = await reader.readline()
    assert json.loads(greeting.removeprefix(b"INFO "))["tls_required"] is True
    writer.write(b'CONNECT {"verbose":true}\r\nPING\r\n')
    assert b"PONG" not in await reader.read()
    writer.close()


async def test_who_is_revoked_is_cut_off_and_not_let_in_again(keys: Folder, guarded: Server) -> None:
    put(keys, Who("leaver", "learner"))
    guarded.reload()
    file = keys.identity_file("leaver")
    kept = file.read_bytes()
    async with guest(guarded, keys, "leaver") as leaver:
        entry = keys.roster.identity("leaver")
        assert entry is not None
        keys.replace(entry.model_copy(update={"revoked": True}))
        guarded.reload()
        async with asyncio.timeout(DEADLINE_S):
            while leaver.count("nats_turns_away") < 2:  # both connections have been cut, and refused since
                await asyncio.sleep(0.05)
        assert not leaver.link.connected
    assert file.read_bytes() == kept  # it still has its file
    with pytest.raises(BrokerError, match=r"(?i)authorization.*is revoked"):
        async with guest(guarded, keys, "leaver"):
            pass


@pytest.mark.parametrize("how", ["revoked", "refreshed"])
async def test_who_is_connected_when_its_certificate_ends_is_cut_off_by_the_next_list(
    keys: Folder, guarded: Server, how: str
) -> None:
    """The server looks at a certificate when a connection is made, and at its list whenever it is reloaded."""
    name, left = f"ending-{how}", timedelta(seconds=scaled_s(6))  # long enough to connect
    put(keys, Who(name, "learner"), left)
    guarded.reload()
    entry = keys.roster.identity(name)
    assert entry is not None
    async with guest(guarded, keys, name) as visitor:
        await asyncio.sleep((entry.expires - datetime.now(UTC)).total_seconds() + 0.5)
        assert visitor.link.connected
        await visitor.flush()
        assert visitor.count("nats_disconnected") == 0  # it is still there
        if how == "revoked":
            keys.replace(entry.model_copy(update={"revoked": True}))
        else:
            keys.refresh()
        guarded.reload()
        async with asyncio.timeout(DEADLINE_S):  # it takes milliseconds; by its pings a server would notice in minutes
            while visitor.link.bulk.is_connected or visitor.link.control.is_connected:
                await asyncio.sleep(0.01)


async def test_a_certificate_lets_in_and_the_key_says_who_comes(
    run: Guest, guarded: Server, keys: Folder, tmp_path: Path
) -> None:
    """A certificate of another member adds nothing to a key: there is nothing that it gives a right to."""
    values = tomllib.loads(keys.identity_file(LEARNER).read_text())
    others = tomllib.loads(keys.identity_file("coordinator").read_text())
    mixed = tmp_path / "mixed.pem"
    mixed.write_text(others["certificate"] + others["private_key"])
    context = ssl.create_default_context(cadata=values["ca"])
    context.load_cert_chain(mixed)
    key, told = NatsKey.from_seed(values["seed"]), []
    client = nats.aio.client.Client()
    client._public_nkey = key.public_key

    async def note(error: Exception) -> None:
        told.append(str(error).lower())

    await client.connect(
        guarded.url, connect_timeout=DEADLINE_S, tls=context, signature_cb=key.sign, allow_reconnect=False, error_cb=note
    )
    try:
        await client.publish(NAMES.heartbeat(LEARNER), b"x")
        await client.publish(NAMES.coordinator, b"x")
        for _ in range(2):
            await client.flush(DEADLINE_S)
    finally:
        await client.close()
    assert len(told) == 1
    assert f'publish to "{NAMES.coordinator}"' in told[0]


# ---- what is asked of others


async def test_a_peer_answers_the_one_who_asks_and_nobody_else(run: Guest, guarded: Server, keys: Folder) -> None:
    """A request that names the asked one's own admission, or its offer, for the answer does not have it stored there."""
    state = NAMES.state("toy-2")
    targets = [
        f"$KV.{NAMES.bucket}.member.toy-2",
        NAMES.offer(0, "toy-2"),
        NAMES.answers("toy-0", "x"),
        f"$KV.{NAMES.bucket}.map",
    ]
    async with (
        guest(guarded, keys, "toy-2") as lender,
        guest(guarded, keys, "toy-0") as other,
        guest(guarded, keys, LEARNER) as asker,
    ):
        heard: list[str] = []

        async def answer(message: Any) -> None:
            heard.append(message.reply)
            await message.respond(b"the state")

        async def overhear(message: Any) -> None:
            heard.append("overheard")

        await lender.link.serve(state, answer)
        await other.link.bulk.subscribe(NAMES.answers("toy-0"), cb=overhear)
        await other.flush()
        before = [await run.link.bulk.jetstream().stream_info(name) for name in (OFFERS, STORE)]
        for target in targets:
            await asker.link.bulk.publish(state, b"?", reply=target)
        assert await asker.link.request(state, b"?", DEADLINE_S) == b"the state"
        assert len(heard) == len(targets) + 1
        assert all(reply.startswith("_R_.") for reply in heard)
        for visitor in (lender, other, asker):
            assert await visitor.refused() == []
            assert visitor.told == ""
        after = [await run.link.bulk.jetstream().stream_info(name) for name in (OFFERS, STORE)]
        assert [info.state.last_seq for info in after] == [info.state.last_seq for info in before]


async def test_one_who_is_added_later_hears_and_is_heard_after_one_reload(run: Guest, guarded: Server, keys: Folder) -> None:
    """The server does not connect an account that it did not know before; there are always some to spare."""
    put(keys, Who("late", "learner"))
    guarded.reload()
    heard: list[str] = []

    async def note(message: Any) -> None:
        heard.append(message.subject)

    async def answer(message: Any) -> None:
        await message.respond(b"here")

    async with guest(guarded, keys, "late") as late, guest(guarded, keys, "toy-2") as peer:
        await run.link.subscribe(NAMES.heartbeat(), note)
        await late.link.subscribe(NAMES.round(), note)
        await late.link.serve(NAMES.state("late"), answer)
        await late.link.publish(NAMES.heartbeat("late"), b"x")
        await run.link.publish(NAMES.round(3), b"x")
        assert await peer.link.request(NAMES.state("late"), b"?", DEADLINE_S) == b"here"
        async with asyncio.timeout(DEADLINE_S):
            while len(heard) < 2:
                await asyncio.sleep(0.01)
    assert sorted(heard) == [NAMES.heartbeat("late"), NAMES.round(3)]


# ---- whole runs


def violations(server: Server, cluster: Cluster) -> list[str]:
    """What a server refused, as it says, and what services were told."""
    lines = server.log_file.read_text().splitlines()
    # a member that gets no processor time while it connects tries again
    said = [line for line in lines if re.search("violation|authentication(?! timeout)", line, re.IGNORECASE)]
    return said + [str(values) for values in cluster.events("permission_denied")]


@contextlib.contextmanager
def empty(keys: Folder, tmp_path: Path) -> Iterator[Server]:
    """A server without any run yet."""
    server = Server(tmp_path / "nats", keys=keys.server_folder("nats"))
    server.start()
    try:
        yield server
    finally:
        server.kill()


@pytest.mark.promise("a run under identities needs no right that its members lack")
async def test_a_whole_run_needs_nothing_that_it_may_not(launch: Launch, keys: Folder, tmp_path: Path) -> None:
    settings = small(tokens=3 * 80 * 16, log__archive=True, log__keyframe_factor=1.0)
    with empty(keys, tmp_path) as server:
        cluster = launch(settings, server.url, RUN)
        cluster.identity = str(keys.path / "identities" / "{name}.identity")
        cluster.learners(**cluster.answers_held)
        await cluster.begin(until_step=0)
        await cluster.step_to_version(2)
        server.reload()  # as when an identity is added, or revoked: no other one is disturbed
        as_whom(cluster, keys, "test")
        assert (await inspect.ask(rundir.load(cluster.directory)))["run"] == RUN
        as_whom(cluster, keys, "operator")
        taken, problems = await checkpoint.take(cluster.directory)
        assert sorted(taken.manifest.learners) == ["toy-0", "toy-1", "toy-2"], problems
        await operate.apply_settings(cluster.directory, {"round.grace_factor": 0.5}, "tried")
        await rollback.go_back(cluster.directory, 1, "tried too")
        [listed] = await runs._found(server.url, [], identity.load(keys.identity_file("operator")), RUN)
        assert (listed.state, listed.facts["changes"]) == ("going on", 2)
        cluster.gate.open()
        await cluster.ended()
        as_whom(cluster, keys, "test")
        assert (await verify.check(cluster.directory)).holds
        async with run_reader.opened(cluster.directory) as seen:
            changes = await read_changes(seen.run)
        assert [(change.author, change.reason) for change in changes.records] == [
            ("operator", "tried"),
            ("operator", "tried too"),
        ]
        assert violations(server, cluster) == []
        assert told_secrets(keys, cluster.directory) == []


SHORT: dict[str, Any] = {"log__keyframe_factor": 0.1, "log__keep_bytes": 0, "log__keep_keyframes": 3}


@pytest.mark.parametrize("older", [False, True], ids=["lists of this version", "lists of before"])
async def test_a_coordinator_shortens_the_log_and_where_it_may_not_the_run_goes_on(
    launch: Launch, tmp_path: Path, older: bool
) -> None:
    keys = make_keys(tmp_path / "keys", RUN, members(3, 2))
    file, right = keys.server_folder("nats") / "auth.conf", f"$JS.API.STREAM.PURGE.{LOG}"
    if older:
        file.write_text("".join(line for line in file.read_text().splitlines(keepends=True) if right not in line))
    with empty(keys, tmp_path) as server:
        cluster = launch(waiting_settings(steps=90, liveness__dead_s=NEVER_S, **SHORT), server.url, RUN)
        cluster.identity = str(keys.path / "identities" / "{name}.identity")
        await cluster.begin()
        await cluster.ended()
        store, _ = await cluster.store()
        for log in await cluster.folded():
            left = len(await store.reader.keyframe_sequences(log.index))
            assert left == 3 or (older and left > 3)
        denied = [str(values["reason"]).lower() for values in cluster.events("permission_denied")]
        assert [right.lower() in reason for reason in denied] == [True] * len(denied)
        assert bool(denied) == older


async def test_members_wait_for_the_rights_that_an_older_file_lacks(launch: Launch, tmp_path: Path) -> None:
    """One of version 1, say, which knows no claims to shares: no process takes part by half, and each says what it lacks."""
    keys = make_keys(tmp_path / "keys", RUN, members(2, 2))
    file = keys.server_folder("nats") / "auth.conf"
    newest = file.read_text()
    file.write_text("".join(line for line in newest.splitlines(keepends=True) if f"$KV.{NAMES.bucket}.share." not in line))
    with empty(keys, tmp_path) as server:
        cluster = launch(small(learners=2, tokens=2 * 60 * 16), server.url, RUN)
        cluster.identity = str(keys.path / "identities" / "{name}.identity")
        cluster.coordinator()
        cluster.syncers()
        cluster.learners()
        cluster.gate.open()
        await cluster.link()

        def lacks(name: str) -> bool:
            told = " ".join(str(values["reason"]) for values in cluster.events("permission_denied", name))
            return f'"$kv.diloco_{RUN}.share.{name}"' in told.lower() and f"auth.conf does not permit this to {name}" in told

        await cluster.until(lambda: all(lacks(toy.name) for toy in cluster.toys), "learners say what they lack")
        assert cluster.tokens() == 0
        file.write_text(newest)
        server.reload()
        await cluster.ended()
        check_accounts(await cluster.finished_heartbeats(), await cluster.folded())


def told_secrets(keys: Folder, folder: Path) -> list[Path]:
    """Files that services have written, with a secret: a seed, or a line of a private key."""
    files = [tomllib.loads(file.read_text()) for file in (keys.path / "identities").iterdir()]
    lines = [line for values in files for line in values["private_key"].splitlines()[1:3]]
    secrets = [text.encode() for text in (*(values["seed"] for values in files), *lines)]
    assert all(len(secret) > 40 for secret in secrets)
    written = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size < 1 << 24]
    assert any(path.suffix == ".jsonl" for path in written)
    return [path for path in written if any(secret in path.read_bytes() for secret in secrets)]


def as_whom(cluster: Cluster, keys: Folder, name: str) -> None:
    """Have commands connect to the run under an identity."""
    own = str(keys.identity_file(name))
    RunDirectory(cluster.directory, RUN, cluster.url, None, cluster.settings, identity=own).save()


async def test_what_was_sent_before_and_is_sent_again_is_merged_once(launch: Launch, keys: Folder, tmp_path: Path) -> None:
    """A learner that lies stores its own old offers once more, and those of another learner as its own."""
    settings = small(tokens=3 * 120 * 16)
    with empty(keys, tmp_path) as server:
        cluster = launch(settings, server.url, RUN)
        cluster.identity, cluster.liars = str(keys.path / "identities" / "{name}.identity"), {LEARNER}
        cluster.learners(**cluster.answers_held)
        await cluster.begin(until_step=0)
        await cluster.step_to_version(2)
        async with guest(server, keys, "syncer-0") as syncer, guest(server, keys, LEARNER) as liar:
            own, others = NAMES.offer(0, LEARNER), NAMES.offer(0, "toy-2")
            old, theirs = [await syncer.link.last(OFFERS, subject) for subject in (own, others)]
            assert old is not None
            assert theirs is not None
            await cluster.step_to_version(min(newest_applied(cluster)) + 2)  # both have been merged

            def refused() -> list[str]:
                return [str(values["reason"]) for values in cluster.events("message_refused")]

            def passed_over() -> list[Any]:
                return [
                    v["number"] for v in cluster.events("offer_passed_over") if (v["fragment"], v["sender"]) == (0, LEARNER)
                ]

            known = len(passed_over())
            for data, is_seen in ((theirs.data, refused), (old.data, lambda: passed_over()[known:])):
                while not is_seen():  # an honest offer that was on its way may have taken its place
                    await liar.link.append(own, data, message_id=uuid.uuid4().hex, fence=None, timeout_s=DEADLINE_S)
                    await asyncio.sleep(0.1)
                    cluster.check_alive()
            cluster.gate.open()
            assert liar.told == ""  # the server has nothing against it
        await cluster.ended()
        heartbeats, folded = (
            await cluster.finished_heartbeats(),
            await cluster.folded(),
        )  # which asserts that nothing is merged twice
        check_accounts(heartbeats, folded)
        assert {log.passed_over for log in folded} == {0}
        assert all("its content names fragment 0, learner toy-2" in reason for reason in refused())


async def test_a_whole_run_in_regions_needs_nothing_that_it_may_not(nursery: Nursery, tmp_path: Path) -> None:
    settings = small(shards=2, learners=2, tokens=2 * 40 * 16, regions__names=list(REGIONS), regions__merge=True)
    async with two_regions(nursery, tmp_path, RUN, settings) as cluster:
        cluster.coordinator()
        cluster.syncers()
        for share in range(settings.learners):
            cluster.toy_process(share)
        await cluster.ended()
        assert [violations(server, cluster) for server in cluster.servers.values()] == [[]] * 3
        assert cluster.events("version_committed")


async def test_a_connection_is_closed_while_its_server_is_gone(keys: Folder, tmp_path: Path) -> None:
    """With something still to be sent: services that are asked to end then say nothing of it."""
    with serving(keys, tmp_path) as server:
        async with guest(server, keys, LEARNER) as learner:
            server.kill()
            async with asyncio.timeout(DEADLINE_S):
                while not (learner.link.control.is_reconnecting and learner.link.bulk.is_reconnecting):
                    await asyncio.sleep(0.01)
            await learner.link.control.publish(NAMES.heartbeat(LEARNER), b"alive")
