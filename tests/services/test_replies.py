"""What a server can be made to send: answers, traces and deliveries go to subjects of the asker's choice, with its rights.

Every identity asks for all that it may, and names each subject that is anybody's for the answer.
Nothing changes but what it may change itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import uuid
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import nats.js.errors
import pytest
from tests.made.asking import asked
from tests.pace import DEADLINE_S, scaled_s
from tests.services.cluster import small
from tests.services.secured import Guest, guest, make_keys, members, serving

from diloco.control import creation
from diloco.process.observe import get_logger
from diloco.process.retry import until_available
from diloco.wire.subjects import Subjects
from diloco_ops.broker.server import Server
from diloco_ops.keys.folder import Folder
from diloco_ops.keys.permissions import Who, permissions

RUN = "answered"
NAMES = Subjects(RUN)
LOG, OFFERS, ARCHIVE, STORE = NAMES.log_stream, NAMES.offer_stream, NAMES.archive_stream, f"KV_{NAMES.bucket}"
STREAMS = (LOG, OFFERS, ARCHIVE, STORE)
PEOPLE = {who.name: who for who in [*members(3, 2), Who("judge", "evaluator")]}
NEVER = {"Nats-Expected-Last-Sequence": str(1 << 62)}  # the server refuses to store it, and says so
DELIVERED_S = scaled_s(0.3)  # three heartbeats of a consumer, which are sent every 100 ms at most
ANSWER_S = 10.0  # then the server is asked again


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return make_keys(tmp_path_factory.mktemp("keys") / "run", RUN, PEOPLE.values())


@pytest.fixture
def server(keys: Folder, tmp_path: Path) -> Iterator[Server]:
    with serving(keys, tmp_path / "nats") as server:
        yield server


def may(who: Who, what: str) -> tuple[str, ...]:
    """The subjects that an identity may publish, or hear. Its consumers are alike: one of a stream stands for all."""
    allowed: tuple[str, ...] = getattr(permissions(who, RUN, (), ()), what)
    more = {f".{name}" for name in who.consumers[1:]}
    return tuple(subject for subject in allowed if not any(subject.endswith((name, f"{name}.>")) for name in more))


def covered(subject: str, patterns: tuple[str, ...]) -> bool:
    given = subject.split(".")
    for pattern in patterns:
        wanted = pattern.split(".")
        rest = wanted[-1] == ">" and len(given) >= len(wanted)
        pairs = list(zip(wanted[:-1] if rest else wanted, given, strict=False))
        if (rest or len(wanted) == len(given)) and all(one in ("*", other) for one, other in pairs):
            return True
    return False


def one_of(pattern: str) -> str:
    """A subject that a pattern stands for."""
    if pattern.startswith(("$JS.API.DIRECT.GET.", f"$JS.API.CONSUMER.CREATE.{LOG}.")):
        return pattern.replace(">", NAMES.record(0))
    if pattern.startswith("$JS.API.CONSUMER.CREATE."):
        return pattern.replace(">", NAMES.offer(0, "toy-2"))
    return pattern.replace(">", "0.toy-2.1.1.head" if ".archive." in pattern else "0").replace("*", "0")


TARGETS = sorted(
    {one_of(subject) for who in PEOPLE.values() for what in ("publish", "subscribe") for subject in may(who, what)}
    | {f"$JS.ACK.{LOG}.0.1.1.1.1.0", f"$JS.API.STREAM.DELETE.{OFFERS}", f"$JS.API.STREAM.PURGE.{ARCHIVE}"}
    | {f"$KV.{NAMES.bucket}.{key}" for key in ("map", "member.toy-2", "unknown")}
    | {NAMES.offer(0, "toy-2"), NAMES.genesis, "sent." + NAMES.round(0), "heard." + NAMES.round(0), "sent." + NAMES.marker}
)


def payloads(subject: str) -> list[tuple[bytes, dict[str, str] | None]]:
    """Bodies and headers of a request that has no effect itself, as different as its answers."""
    if subject.startswith("$JS.API.") and any(f".{call}." in subject for call in ("DELETE", "PURGE", "RESTORE", "SNAPSHOT")):
        return [(b"x", None)]  # refused, with an answer
    if "GET." in subject:
        asked: list[dict[str, Any]] = [{"seq": 1}, {"seq": 1, "batch": 4}, {"last_by_subj": f"$KV.{NAMES.bucket}.run"}]
        return [(b"", None), *((json.dumps(body).encode(), None) for body in asked)]
    if ".MSG.NEXT." in subject:
        return [(b"", None), (b'{"batch": 1, "no_wait": true}', None)]
    if subject.startswith("$JS."):
        return [(b"", None)]
    return [(b"x", NEVER)]


def wanted(call: str, **more: Any) -> bytes:
    """A request for the consumer that a call names, which its asker may make."""
    stream, name, *filtered = call.removeprefix("$JS.API.CONSUMER.CREATE.").split(".")
    config = {"name": name, "ack_policy": "explicit", "mem_storage": True, "num_replicas": 1, **more}
    if filtered:
        config["filter_subject"] = ".".join(filtered)
    return json.dumps({"stream_name": stream, "config": config}).encode()


async def answered(visitor: Guest, call: str, data: bytes = b"") -> Any:
    """The server's answer to a request."""
    return json.loads((await asked(partial(visitor.link.bulk.request, call, data, timeout=ANSWER_S))).data)


async def push(visitor: Guest, call: str, target: str) -> bool:
    """Have a consumer send the messages of a stream, and heartbeats, to a subject; whether there is such a consumer."""
    removing = ".".join(call.replace("CREATE", "DELETE", 1).split(".")[:6])
    await answered(visitor, removing)
    told = await answered(visitor, call, wanted(call, deliver_subject=target, idle_heartbeat=100_000_000))
    if told.get("push_bound"):  # else it sends nothing
        await asyncio.sleep(DELIVERED_S)
    return "error" not in told


class Witness:
    """All that is stored, and all that is heard, as far as an asker may not change it or say it."""

    def __init__(self, reader: Guest, operator: Guest) -> None:
        self.reader, self.operator = reader, operator
        self.heard: list[str] = []

    async def listen(self, visitor: Guest, who: Who) -> None:
        """Hear all that an identity may, but for its inbox, whose names are random. Consumers push to exact names alone."""

        def noting(subject: str) -> Any:
            async def note(message: Any) -> None:
                self.heard.append(subject)

            return note

        for subject in [one_of(subject) for subject in may(who, "subscribe") if not subject.startswith("_INBOX")]:
            await visitor.link.bulk.subscribe(subject, cb=noting(subject))
        await visitor.flush()

    async def stored(self, own: tuple[str, ...]) -> dict[tuple[str, str], list[bytes]]:
        """Return messages by stream and subject, and the streams' settings, but for all that ``own`` rights may change."""
        api = self.reader.link.bulk.jetstream()
        found: dict[tuple[str, str], list[bytes]] = {}
        emptied = {call.rpartition(".")[2] for call in own if re.match(r"\$JS\.API\.STREAM\.(PURGE|DELETE|RESTORE)\.", call)}
        for stream in sorted(set(STREAMS) - emptied):
            info = await asked(partial(api.stream_info, stream))
            found[stream, ""] = [repr(info.config).encode()]
            for sequence in range(info.state.first_seq, info.state.last_seq + 1):
                with contextlib.suppress(nats.js.errors.NotFoundError):
                    message = await asked(partial(api.get_msg, stream, sequence))
                    subject = str(message.subject)
                    if not covered(subject, own):
                        found.setdefault((stream, subject), []).append(bytes(message.data or b""))
        names = await answered(self.operator, "$JS.API.STREAM.LIST")
        found["", ""] = sorted(stream["config"]["name"].encode() for stream in names["streams"])
        return found


async def fill(people: dict[str, Guest]) -> None:
    """Store something on all that is stored."""
    writers = {
        "toy-0": [f"$KV.{NAMES.bucket}.{key}" for key in ("map", "founder", "genesis", "member.toy-0", "share.toy-0")],
        "toy-1": [NAMES.offer(0, "toy-1"), f"$KV.{NAMES.bucket}.member.toy-1"],
        "toy-2": [NAMES.offer(0, "toy-2"), f"$KV.{NAMES.bucket}.member.toy-2"],
        "syncer-0": [NAMES.record(0), NAMES.keyframe(0), NAMES.archived(0, "toy-2", 1, 1, None), f"$KV.{NAMES.bucket}.owners"],
        "operator": [f"$KV.{NAMES.bucket}.changes"],
    }
    for name, subjects in writers.items():
        for subject in subjects:
            once: dict[str, Any] = {"message_id": uuid.uuid4().hex, "fence": None, "timeout_s": DEADLINE_S}
            await until_available(partial(people[name].link.append, subject, b"true", **once), get_logger())


@pytest.fixture
async def people(server: Server, keys: Folder) -> AsyncIterator[dict[str, Guest]]:
    async with contextlib.AsyncExitStack() as opened:
        made = {name: await opened.enter_async_context(guest(server, keys, name)) for name in PEOPLE}
        creating = partial(creation.create, made["coordinator"].link, RUN, small(log__archive=True))
        await until_available(creating, get_logger())
        await fill(made)
        yield made


# what remains (docs/security.md): a consumer of the offers pushes empty messages to the log's one subject without wildcards
PUSHED = {"syncer-0": (NAMES.genesis,)}
ASKERS = ("toy-1", "toy-0", "judge", "test", "syncer-0", "coordinator", "operator")


@pytest.mark.parametrize("name", ASKERS)
async def test_no_answer_lands_where_the_asker_may_not_write(people: dict[str, Guest], keys: Folder, name: str) -> None:
    entry = keys.roster.identity(name)
    assert entry is not None
    own = may(entry.who, "publish")
    witness, asker = Witness(people["syncer-1"], people["operator"]), people[name].link.bulk
    for other in people.keys() - {name}:
        await witness.listen(people[other], PEOPLE[other])
    creating = [one_of(subject) for subject in own if ".CONSUMER.CREATE." in subject]
    for call in creating:
        await answered(people[name], call, wanted(call))  # for requests of its next messages
    stored = partial(witness.stored, own + PUSHED.get(name, ()))
    before = await stored()
    assert len(before) > (0 if name == "operator" else 8)
    asked = 0
    for subject in {one_of(subject) for subject in own if not subject.startswith(("_INBOX", "_R_"))}:
        for target in TARGETS:
            for data, headers in payloads(subject):
                await asker.publish(subject, data, reply=target, headers=headers)
            traced = {"Nats-Trace-Dest": target, "Nats-Trace-Only": "true"}
            await asker.publish(subject, payloads(subject)[0][0], headers=traced | NEVER)
            asked += 1
        await people[name].flush()
    assert asked > 1000
    assert sum([await push(people[name], call, target) for call in creating for target in TARGETS]) > 50
    await asyncio.sleep(DELIVERED_S)
    for visitor in people.values():
        await visitor.flush()
    assert await stored() == before
    assert {subject for subject in witness.heard if not covered(subject, own)} == set()
