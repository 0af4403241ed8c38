"""Every decoder of bytes from the wire and from disk, under bytes that this project does not write.

Each of ``DECODERS`` is given arbitrary bytes, valid ones mutated (also with their check made right again), and valid structures
with hostile values. It returns a value or raises one of the errors that it says; it takes no more memory than ``bound`` bytes,
beside ``PER_BYTE`` for each byte of its input; and it ends. ``make fuzz`` gives each of them many more examples than ``make
test`` does: ``DILOCO_FUZZ_EXAMPLES``.

Memory is what Python and NumPy allocate (tracemalloc). What zstd's own context takes is bounded by its largest window.
"""

from __future__ import annotations

import asyncio
import gc
import io
import json
import os
import signal
import struct
import tracemalloc
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
import pytest
import zstandard
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from tests.made.hostile_values import (
    Bytes,
    frames_of_zstd,
    hostile_json,
    hostile_msgpack,
    hostile_toml,
    mutated,
    packed,
    sources,
)
from tests.made.identity_texts import GOOD_IDENTITY, SEED
from tests.made.learner_delta import Delta
from tests.made.message_examples import EXAMPLES, MESSAGES
from tests.made.monitors import monitor, story
from tests.made.tapes import ANY_EVENT, HEADER, tape_of
from tests.pace import DEADLINE_S

from diloco.control import admission, creation, tables
from diloco.control.admission import Admission
from diloco.control.creation import KnownRun
from diloco.control.history import Past, unpack
from diloco.core.learner.refusals import Refusal, report
from diloco.core.log import fold
from diloco.core.log.chain import Chain
from diloco.core.run import changes, leases, tape
from diloco.core.run.changes import Changes, Quarantine, Set, in_force
from diloco.core.run.leases import ClaimedShare, ShareClaim
from diloco.core.syncer.claims import StepBounds
from diloco.core.syncer.ownership import OwnersTable
from diloco.core.tensors import codec, outer, quantise
from diloco.core.tensors.chunks import Chunk
from diloco.core.tensors.fragments import TensorSpec, build_map, unpack_map
from diloco.errors import (
    BrokerError,
    ChainError,
    ClaimError,
    DilocoError,
    FormatError,
    MessageError,
    NonFiniteError,
    RunError,
    SettingsError,
    WanError,
)
from diloco.log.stream import open_body
from diloco.member.peer import Borrower, Layout
from diloco.nats import append, grants, identity
from diloco.nats import clock as server_clock
from diloco.nats.nkey import NatsKey
from diloco.process import logs
from diloco.process import tape as tape_files
from diloco.service import rundir, volume
from diloco.settings.loading import load_service, parse_assignments
from diloco.settings.places import SCHEMES, parse_place
from diloco.settings.presets import run_settings
from diloco.settings.service import CoordinatorSettings, LearnerSettings, SyncerSettings
from diloco.states import state, statefile
from diloco.wire import framing
from diloco.wire.assemble import ChunkAssembler, part_index
from diloco.wire.body import PART_BYTES, Body
from diloco.wire.control import StateLoan, StatePart, StateRequest
from diloco.wire.entries import Keyframe
from diloco.wire.framing import Message
from diloco.wire.grants import Grant, SignedGrant
from diloco.wire.quarantines import OutlierStatement, SeenOutlier, unpack_outliers
from diloco.wire.refusals import unpack_refusals
from diloco.wire.subjects import Subjects
from diloco_coordinator import history
from diloco_coordinator import service as coordinator
from diloco_coordinator.series import SeriesFile
from diloco_coordinator.server_watch import figures as server_watch
from diloco_lab.planning import sites
from diloco_lab.simulator.cluster import ClusterLearner
from diloco_lab.traces import tapes, trace
from diloco_ops import failures
from diloco_ops.broker import probe, snapshot
from diloco_ops.chaos import revert
from diloco_ops.checkpoints import manifest
from diloco_ops.doctor import machine, reach
from diloco_ops.doctor import server_check as doctor
from diloco_ops.publish.owner import decode_owner
from diloco_ops.reading import inspect
from diloco_ops.report.build import load_json
from diloco_ops.wan import config, control

WANTED = os.environ.pop("DILOCO_FUZZ_EXAMPLES", None)  # services refuse variables that they do not know
EXAMPLES_EACH = int(WANTED or 30)
PER_BYTE = 256  # an empty list in JSON takes two bytes, and 56 of memory and a place in another one
SAID = 4000  # characters of an error, beside what it shows of the input
FIXED = 2 << 20  # errors with their texts, caches, and what a decoder has at hand

RUN = b"run-id.."
ROOT = Path(__file__).parents[2]
SETTINGS = run_settings("decoupled", {"learners": 2})
T = TypeVar("T")


@dataclass(frozen=True)
class Decoder:
    """What is fuzzed: how it is called, what it is given, what it may raise, and how much memory it may take."""

    name: str
    decode: Callable[[bytes], object]
    given: Bytes
    raises: tuple[type[DilocoError], ...] = ()
    bound: int = 0


DECODERS: list[Decoder] = []


def decoder(name: str, given: Bytes, *raises: type[DilocoError], bound: int = 0) -> Callable[[T], T]:
    """Registers a function of bytes."""

    def register(decode: T) -> T:
        DECODERS.append(Decoder(name, cast(Callable[[bytes], object], decode), given, raises, bound))
        return decode

    return register


@cache
def folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="diloco-fuzz-")


def file(data: bytes, name: str = "file") -> Path:
    path = Path(folder().name) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def now(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as done:
        return cast(T, done.value)
    raise AssertionError("it waits")


class Held:
    """A bucket all of whose keys have one value."""

    def __init__(self, value: bytes) -> None:
        self.value = value

    async def get(self, key: str) -> tuple[bytes, int]:
        return self.value, 1


def run_with(data: bytes) -> KnownRun:
    return KnownRun("run", SETTINGS, cast(Any, Held(data)))


def just(value: bytes) -> Bytes:
    return st.just(value)


# ---- messages


def sealed(kind: str, fields: bytes, inline: bytes = b"") -> bytes:
    """A frame whose check is right, whatever its fields are."""
    check = blake3(f"{framing.MAGIC}{framing.VERSION}{kind}\0".encode() + RUN + fields).digest()
    return packed((framing.MAGIC, framing.VERSION, kind, RUN, fields, check, inline))


def message_decoder(cls: type[Message]) -> Decoder:
    fields = msgspec.msgpack.decode(packed(EXAMPLES[cls]))
    inner = st.one_of(
        hostile_msgpack(st.just(fields)),
        hostile_msgpack(MESSAGES[cls].map(packed).map(msgspec.msgpack.decode)),
        mutated(just(packed(fields))),
    )
    frame = [framing.MAGIC, framing.VERSION, cls.kind, RUN, packed(fields), bytes(32), b""]
    given = sources(
        st.one_of(just(framing.pack(EXAMPLES[cls], RUN)), MESSAGES[cls].map(lambda message: framing.pack(message, RUN))),
        inner.map(lambda fields: sealed(cls.kind, fields)),
        hostile_msgpack(st.just(frame)),
    )
    return Decoder(f"framing.unpack {cls.kind}", lambda data: framing.unpack(data, cls, RUN), given, (MessageError,))


DECODERS += map(message_decoder, EXAMPLES)


@decoder("framing.kind_of", DECODERS[0].given)
def _(data: bytes) -> None:
    framing.kind_of(data)


@decoder("assemble", st.binary(max_size=200))
def _(data: bytes) -> None:
    """Parts, at most ``limit_bytes`` of a source, whatever their subjects say."""
    parts = ChunkAssembler()
    part_index("diloco.r.part." + data.decode(errors="replace"))
    for at in range(0, len(data) - 12, 12):
        index = int.from_bytes(data[at : at + 4], "little")
        parts.add(at % 3, index, data[at + 4 :], 1 << 20)
        body = Body(index, bytes(32), index % 7, data[at + 4 : at + 12])
        parts.take(at % 3, body)


# ---- bodies

RAW = np.frombuffer(bytes(range(256)) * 16, np.uint8)
ZSTD = just(codec.pack(RAW, 1))


def one_frame(data: bytes) -> bool:
    reader = zstandard.ZstdDecompressor().decompressobj()
    reader.decompress(data)
    return reader.eof and not reader.unused_data


@decoder("codec.unpack", sources(ZSTD, frames_of_zstd(ZSTD)), FormatError, bound=RAW.size)
def _(data: bytes) -> None:
    pieces = [data[at : at + 7] for at in range(0, len(data), 7)]
    assert (codec.unpack(pieces, RAW.size).size, one_frame(data)) == (RAW.size, True)


@decoder("codec.Beginning", sources(ZSTD, frames_of_zstd(ZSTD)), FormatError, bound=2 * RAW.size)
def _(data: bytes) -> None:
    beginning = codec.ContentStart(
        RAW.size, [np.empty(RAW.size // 4, np.uint8) for _ in range(2)]
    )  # its reader checks the hash of the state
    for at in range(0, len(data), 20):
        beginning.feed([data[at : at + 20]])


@decoder("log.open_body", sources(ZSTD, frames_of_zstd(ZSTD)), MessageError, bound=2 * RAW.size)
def _(data: bytes) -> None:
    body = Body(len(data), codec.content_hash(RAW), 0, bytes(8))
    for claims in (body, Body(2**40, bytes(32), 2**22, bytes(8)), Body(len(data), bytes(32), 1, bytes(8))):
        try:
            opened = open_body(claims, data, [data], RAW.size, "body")
        except MessageError:
            continue
        assert (opened == RAW).all()


def _bodies(bits: int) -> Decoder:
    n = 200
    valid = just(quantise.quantise(np.linspace(-1, 1, n).astype(np.float32), cast(Any, bits)).tobytes())
    size = quantise.body_bytes(n, bits)
    words = st.sampled_from(
        [
            *[struct.pack("<H", half) for half in (0x7F7F, 0x7E12, 0x7E13, 0xFFFF, 0x8000, 0x0001)],
            *[struct.pack("<f", scale) for scale in (0.0, 3e38, 2.6e36, -0.0, -1.0, 1e-40)],
        ]
    )
    scales_bytes = {2: 8, 4: 8, 8: 16}.get(bits, size)
    runs = st.builds(
        lambda word, code: (word * size)[:scales_bytes] + code * (size - scales_bytes),
        words,
        st.sampled_from([b"\x7f", b"\xff", b"\x11", b"\x81"]),
    )

    def decode(data: bytes) -> None:
        body = np.frombuffer(data, np.uint8).copy()
        quantise.validate(body, n, bits)
        values = quantise.dequantise(body, n, bits)
        assert np.isfinite(values).all(), "a valid body has a value that is not finite"

    return Decoder(f"quantise {bits} bits", decode, sources(valid, runs), (FormatError, NonFiniteError), 1 << 16)


DECODERS += map(_bodies, (1, 2, 4, 8, 16, 32))


THETA = np.linspace(-1, 1, 24).astype(np.float32)


@decoder("fold.load_keyframe", sources(just(THETA.tobytes())), MessageError)
def _(data: bytes) -> None:
    raw = np.frombuffer((data + bytes(96))[:96], np.uint8)
    values = raw.view(np.float32)
    for stated in (bytes(32), outer.state_hash(values[:8].copy(), values[8:16].copy())):
        keyframe = msgspec.structs.replace(cast(Keyframe, EXAMPLES[Keyframe]), state_hash=stated)
        try:
            _, residual = fold.load_keyframe(keyframe, Chain(0, 0, 0, bytes(32), 0, stated), raw)
        except MessageError:
            continue
        assert np.isfinite(residual).all()


# ---- a peer's state

LENT = {"a": np.arange(8, dtype=np.float32), "b": np.arange(3, dtype=np.int32)}
LAYOUT = Layout.of(LENT)
LOAN = StateLoan("liar", b"the copy", 1, [0, 0], LAYOUT.digest, LAYOUT.size_bytes, bytes(32))


@decoder(
    "peer.Borrower",
    sources(
        st.builds(
            lambda part, copy, array, start: framing.pack(StatePart(copy, array, start, blake3(part).digest()), RUN, part),
            st.sampled_from([LENT["a"].tobytes(), LENT["b"].tobytes(), b"", bytes(PART_BYTES), LENT["a"].tobytes()[:-1]]),
            st.sampled_from([b"the copy", b"another."]),
            st.sampled_from([0, 1, 2**62]),
            st.sampled_from([[0], [], [1], [0, 0]]),
        ),
        DECODERS[[*EXAMPLES].index(StateLoan)].given,
    ),
    bound=4 * PART_BYTES,
)
def _(data: bytes) -> None:
    put: list[Chunk] = []
    wanted, silent = LAYOUT.wholes(), cast(Any, Silent())
    transport = cast(Any, Liar(data))
    borrower = Borrower(transport, RUN, Subjects("run"), "ann", LAYOUT, wanted, lambda chunk, _: put.append(chunk), silent)
    assert asyncio.run(borrower.borrow(["liar"])) is None  # one answer is none for both arrays
    assert len(put) <= 1


class Liar:
    """A transport with a peer that lends, but whose parts are something else."""

    def __init__(self, part: bytes) -> None:
        self.part = part

    async def request(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        request, _, _ = framing.unpack(data, StateRequest, RUN)
        return self.part if request.copy else framing.pack(LOAN, RUN)


class Silent:
    """A log that is not read."""

    def info(self, event: str, **values: object) -> None:
        repr(values)

    warning = info


# ---- values of the bucket

CLAIM = ShareClaim("ann", 1, [ClaimedShare(0, True, 2, 0, 0), ClaimedShare(1, False, 3, 1, 1)])


def _packed(value: object) -> Bytes:
    tree = msgspec.msgpack.decode(packed(value))
    return sources(just(packed(value)), hostile_msgpack(st.just(tree)), hostile_msgpack(st.just(tree)))


@decoder("leases.unpack", _packed(CLAIM), FormatError, ClaimError)
def _(data: bytes) -> None:
    leases.unpack(data, "ann", 9, SETTINGS, StepBounds())


REFUSED = report(None, [Refusal("ann", 7, 1, 3, "claim", "too many steps"), Refusal("ann", 7, 0, 4, "form", "no frame")])


@decoder("refusals.unpack_refusals", _packed(REFUSED))
def _(data: bytes) -> None:
    unpack_refusals(data, "ann")


STATED = OutlierStatement("ann", 7, 2, [0, 1], [SeenOutlier("bob", 3, 1, 9, 30.0, 5.0, 2, False)])


@decoder("quarantines.unpack_outliers", _packed(STATED))
def _(data: bytes) -> None:
    unpack_outliers(data, "ann")


CHANGES = (
    Changes(RUN)
    .then(Set("round.steps", 12), at_s=1.5, author="ann", reason="why")
    .then(Quarantine("bob", 1, 9.0, 3.0), at_s=2.0, author="syncer-0")
)


@decoder("changes.unpack", st.one_of(_packed(CHANGES.packed), just(CHANGES.pack())), FormatError, ChainError)
def _(data: bytes) -> None:
    changes.unpack(data, RUN)


@decoder("changes.readable", st.one_of(_packed(CHANGES.packed), just(CHANGES.pack())))
def _(data: bytes) -> None:
    changes.readable(data, RUN, SETTINGS)


@decoder("changes: a record and what follows from it", _packed(CHANGES.records[0]), FormatError, ChainError, SettingsError)
def _(data: bytes) -> None:
    in_force(SETTINGS, changes.unpack(packed([data]), RUN).records)


@decoder("tables.owners", _packed(OwnersTable(["s0", "s1"], ["s0", "s1", "s0"])))
def _(data: bytes) -> None:
    now(tables.owners(run_with(data), 3).read())


AUTHORITY = NatsKey.from_seed(SEED)
GRANT = grants.sign(Grant("run", "ann", AUTHORITY.public_key, 2048, 0.05), AUTHORITY)


@decoder("admission.admitted", _packed(Admission("ann", 3, SETTINGS.digest(), bytes(32), GRANT)))
def _(data: bytes) -> None:
    now(admission.admitted(replace(run_with(data), authority=AUTHORITY.public_key), "ann", bytes(32)))


@decoder("grants.from_text", just(grants.to_text(GRANT).encode()), FormatError)
def _(data: bytes) -> None:
    grants.from_text(data.decode("latin-1"))


@decoder("grants: what is signed", just(GRANT.content), FormatError)
def _(data: bytes) -> None:
    SignedGrant(data, bytes(64)).decode()


@decoder("coordinator: who leads", _packed(coordinator._Leader("coordinator", bytes(8))))
def _(data: bytes) -> None:
    coordinator._holder(data)


MAP = build_map([TensorSpec("emb", (16, 4), True), TensorSpec("w/0", (8, 8)), TensorSpec("w/1", (64,))], 3, "balanced")


# as many pieces and fragments as fit into a value of the bucket
MANY = packed([[[f"{i:05}", [1], False] for i in range(80_000)], 4096, "balanced"])


@decoder("fragments.unpack_map", _packed(msgspec.msgpack.decode(MAP.pack())), FormatError, bound=16 << 20)
@decoder("fragments.unpack_map, of a large one", just(MANY), FormatError, bound=16 << 20)
def _(data: bytes) -> None:
    unpack_map(data)


@decoder(
    "creation: the run's settings",
    sources(just(SETTINGS.model_dump_json().encode()), hostile_json(st.just(SETTINGS.model_dump(mode="json")))),
    RunError,
    SettingsError,
)
def _(data: bytes) -> None:
    now(creation.find(cast(Any, Buckets(data)), "run", cast(Any, None)))


class Buckets:
    """A transport that has one bucket."""

    def __init__(self, value: bytes) -> None:
        self.value = value

    async def bucket(self, name: str, *, create: bool) -> Held:
        return Held(self.value)


# ---- answers of servers and relays


def _json(value: object) -> Bytes:
    return sources(just(json.dumps(value).encode()), hostile_json(st.just(value)), hostile_json(st.just(value)))


@decoder(
    "append: an acknowledgement",
    _json({"stream": "S", "seq": 1, "error": {"code": 400, "err_code": 10071, "description": "x"}}),
    BrokerError,
)
def _(data: bytes) -> None:
    answer = append._parse("subject", data)
    if "error" in answer:
        raise append._translate("subject", answer["error"])


@decoder(
    "snapshot: an answer",
    _json({"config": {}, "error": {"code": 400, "err_code": 10071, "description": "x"}}),
    BrokerError,
    RunError,
)
def _(data: bytes) -> None:
    snapshot._parse("stream", data)


@decoder("creation.check_protocol", _json({"protocol": 2, "software": "0.1.0", "requires": ["sequences"]}), RunError)
def _(data: bytes) -> None:
    now(creation.check_protocol(run_with(data).registry, "run"))


INFO = {"version": "2.15.1", "max_payload": 1048576, "jetstream": True, "tls_required": True}


@decoder("doctor.server_info", _json(INFO).map(lambda info: b"INFO " + info + b"\r\n"), BrokerError)
def _(data: bytes) -> None:
    reach.server_info(data)


@decoder("doctor.answered", _json({"ts": "2026-11-22T08:00:00.123456789Z", "state": {"bytes": 1}}), BrokerError)
def _(data: bytes) -> None:
    answer = probe.answered(data, "INFO")
    server_clock.offset(answer, 1.0, 0.5)
    doctor.number(answer, "state", "bytes")


VARZ = {
    "version": "2.15.1",
    "start": "2026-11-28T06:31:58.594539748Z",
    "mem": 1,
    "connections": 1,
    "max_connections": 1,
    "slow_consumers": 1,
    "in_bytes": 1,
    "out_bytes": 1,
    "tls_cert_not_after": "2027-11-28T00:00:00Z",
}
JSZ = {"streams": 1, "messages": 1, "storage": 1, "api": {"errors": 1}, "config": {"max_storage": 1}}


@decoder("server_watch.varz", _json(VARZ).map(lambda answer: b"HTTP/1.0 200 OK\r\n\r\n" + answer), FormatError)
def _(data: bytes) -> None:
    server_watch.figures(server_watch.read_answer(data)[1], json.dumps(JSZ).encode())


@decoder("server_watch.jsz", _json(JSZ), FormatError)
def _(data: bytes) -> None:
    server_watch.figures(json.dumps(VARZ).encode(), data)


@decoder("doctor.foreign_files", sources(just(tape.Header(RUN, "a").pack())))
def _(data: bytes) -> None:
    assert machine.foreign_files(file(data, "state/tapes/a.tape").parents[1], RUN) in ([], ["tapes/a.tape"])


@decoder("volume.claim", _json({"format": 1, "run": "run", "software": "0.1.0"}), RunError)
def _(data: bytes) -> None:
    volume.claim(file(data, "volume/volume.json").parent, "run")


@decoder("inspect: a coordinator's status", _json({"learners": {}, "state": "running"}), BrokerError)
def _(data: bytes) -> None:
    assert isinstance(inspect.answered(data, rundir.RunDirectory(Path("run"), "run", "", None, run_settings())), dict)


@decoder("wan control: an answer", _json({"error": "x", "exit_code": 2}), WanError, SettingsError, FormatError)
def _(data: bytes) -> None:
    control._answered(data, "relay")


class Reader:
    """Of one line."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    async def readuntil(self, end: bytes) -> bytes:
        return self.data


@decoder(
    "wan control: a request",
    st.one_of(
        _json({"do": "set", "links": ["us-eu"], "rate_bits_per_s": 1e6, "delay_s": 0.1}),
        _json({"do": "play", "tape": "{}", "source": "x"}),
        _json({"do": "status", "links": []}),
    ),
    WanError,
)
def _(data: bytes) -> None:
    asyncio.run(control._request(cast(Any, Reader(data))))


# ---- files

RUN_JSON = {
    "format": 1,
    "version": "0.1.0",
    "name": "run",
    "nats_url": "nats://127.0.0.1:4222",
    "data": None,
    "settings": SETTINGS.model_dump(mode="json"),
    "learners": 2,
    "nats_bulk_url": None,
    "wan_control": None,
}


@decoder("rundir.load", _json(RUN_JSON), RunError)
def _(data: bytes) -> None:
    rundir.load(file(data, "run.json").parent)


@decoder(
    "chaos.revert.FaultJournal",
    _json({"1": {"what": "frozen", "pid": 1, "began": "7"}, "2": {"what": "limit", "stream": "S", "max_bytes": 5}}),
    RunError,
)
def _(data: bytes) -> None:
    for _, entry in revert.FaultJournal(file(data, revert.JOURNAL).parent).entries:
        assert isinstance(entry, dict)


@decoder("report.load_json", _json({"a": [1, {"b": 2}]}))
def _(data: bytes) -> None:
    assert isinstance(load_json(file(data)), dict)


@decoder("settings.places", sources(just(b"s3://bucket/key"), just(b"hf://datasets/org/name@main/a.txt")), SettingsError)
def _(data: bytes) -> None:
    assert parse_place(data.decode("utf-8", "replace")).scheme in SCHEMES


@decoder("publish: the owner", _json({"run": "one", "token": "0123456789abcdef", "host": "h", "claimed_at_s": 1.5}))
def _(data: bytes) -> None:
    assert isinstance(decode_owner(data), dict)


SERIES = json.loads(json.dumps(story().series(3.0)))


@decoder("coordinator: the series", _json(SERIES))
def _(data: bytes) -> None:
    SeriesFile(file(data, "series/series.json").parent, cast(Any, Silent())).resume(monitor("us", "eu"))


HISTORY = just(history.pack(Past(3, 1.0, {"facts": {}}, story().curves(33.0))))


@decoder("coordinator: the history", sources(HISTORY, _json(SERIES).map(zstandard.compress)), FormatError)
def _(data: bytes) -> None:
    past = unpack(data)
    SeriesFile(Path(folder().name) / "none", cast(Any, Silent())).resume(monitor("us", "eu"), past.curves)


DELTA = Delta("ann", 7, True, True, np.zeros(8, np.float32), 0, bytes(32))
DELTA.state.step(10, 0, 0)
DELTA.offer(np.ones(8, np.float32), 1, 10, [(0, 0, 1)], 1, 8)
PLAIN, ARRAYS = DELTA.dump()


def _state_file(data: bytes, **metadata: str) -> bytes:
    """A state with these bytes for its accounts, or other metadata, and the hash that belongs to them."""
    arrays = {name: np.ascontiguousarray(ARRAYS[name]) for name in sorted(ARRAYS)}
    chunks = {name: Chunk.whole(name, array.shape, array.dtype.name) for name, array in arrays.items()}
    hashes = json.dumps({name: blake3(array.tobytes()).hexdigest() for name, array in arrays.items()})
    named = {
        "format": statefile.FORMAT,
        "run": RUN.hex(),
        "learner": "ann",
        "part": "0/1",
        "set": "",
        "chunks": "{}",
        "accounts": data.decode(errors="replace"),
        "hashes": hashes,
    } | metadata
    header = statefile.header(chunks, named | {"hash": statefile.hash_metadata(named).hex()})
    return header + b"".join(array.tobytes() for array in arrays.values())


GOOD_STATE = json.dumps(PLAIN).encode()


@decoder(
    "state.load and delta.load",
    sources(
        just(_state_file(GOOD_STATE)),
        mutated(just(GOOD_STATE)).map(_state_file),
        hostile_json(st.just(json.loads(GOOD_STATE))).map(_state_file),
        _json({"base": "00"}).map(lambda hashes: _state_file(GOOD_STATE, hashes=hashes.decode(errors="replace"))),
        _json({"base": ["base", [8], [0]]}).map(lambda chunks: _state_file(GOOD_STATE, chunks=chunks.decode(errors="replace"))),
        st.sampled_from(["", "0", "0/", "7/2", "0/99999", "x/y", "1/2/3"]).map(lambda part: _state_file(GOOD_STATE, part=part)),
        st.sampled_from([b"\xff" * 8, (2**40).to_bytes(8, "little"), (100_000_001).to_bytes(8, "little") + b"{}"]),
        _json(
            {
                "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
                "b": {"dtype": "BF16", "shape": [], "data_offsets": [0, 2]},
            }
        ).map(lambda header: len(header).to_bytes(8, "little") + header + bytes(16)),
    ),
    RunError,
)
def _(data: bytes) -> None:
    saved = state.load(file(data), RUN, "ann")
    delta = Delta("ann", 8, True, True, np.zeros(8, np.float32), 0, bytes(32))
    try:
        delta.load(saved.accounts, saved.arrays())
    except (LookupError, TypeError, ValueError, OverflowError):  # as it says; services/learner takes them for a refusal
        return


FILE = {"file": "log.snapshot", "size_bytes": 1, "blake3": "00"}
MANIFEST = {
    "format": manifest.FORMAT,
    "version": manifest.VERSION,
    "made_by": "0.1.0",
    "run": "run",
    "settings": SETTINGS.model_dump(mode="json"),
    "data": None,
    "map_digest": "00",
    "created_at_s": 1.0,
    "fragments": [{"version": 1, "sequence": 2, "entry_hash": "00"}],
    "log": {"saved": FILE, "config": {"name": "diloco-run-log"}, "state": {"last_seq": 3}},
    "bucket": {"saved": FILE | {"file": "bucket.snapshot"}, "config": {"name": "KV_diloco-run"}, "state": {"last_seq": 3}},
    "learners": {"ann": {"saved": FILE | {"file": "learners/ann"}, "step": 1, "versions": [1]}},
    "hash": "",
}
for _stream, _name in (("log", Subjects("run").log_stream), ("bucket", f"KV_{Subjects('run').bucket}")):
    MANIFEST[_stream]["config"]["name"] = _name  # type: ignore[index]


def _manifest(data: bytes) -> bytes:
    """With its hash made right, where it can have one."""
    try:
        decoded = msgspec.json.decode(data, type=manifest.Manifest)
        return msgspec.json.encode(msgspec.structs.replace(decoded, hash=decoded.right_hash()))
    except (ValueError, RecursionError):
        return data


@decoder("manifest.load", _json(MANIFEST).map(_manifest), RunError)
def _(data: bytes) -> None:
    loaded = manifest.load(file(data, manifest.MANIFEST).parent)
    try:
        loaded.check()
    except RunError:
        return


@decoder(
    "tape.load, events and lives",
    sources(
        st.lists(st.lists(ANY_EVENT, max_size=6), max_size=3).map(lambda groups: tape_of(*groups)),
        mutated(st.lists(ANY_EVENT, min_size=1, max_size=6).map(lambda events: b"".join(map(tape.encode, events)))).map(
            lambda block: (
                HEADER.pack() + b"".join(tape.blocks([block[: tape.MAX_BLOCK_BYTES]], HEADER.hash, len(HEADER.pack())))
                if block
                else b""
            )
        ),
    ),
    RunError,
)
def _(data: bytes) -> None:
    loaded = tape_files.load(file(data, "tape"), RUN_OF_TAPES)
    for life in loaded.lives():
        life.ranges(), list(life.offers()), life.rewound
    _ = loaded.problem


RUN_OF_TAPES = HEADER.run
LINE = {
    "time": "2026-01-02T03:04:05.678Z",
    "level": "info",
    "service": "ann",
    "run": "r",
    "event": "e",
    "values": [1, {"a": "b"}],
}
TIMES = st.sampled_from(
    [
        "0001-01-01T00:00:00+14:00",
        "9999-12-31T23:59:59-14:00",
        "0001-01-01",
        "1969-12-31T23:59:59",
        "24:00",
        "2026-W53-9",
        "x" * 999,
    ]
).map(lambda time: json.dumps(LINE | {"time": time}).encode())


@decoder("logs.merge and render", st.one_of(_json(LINE), st.lists(_json(LINE), max_size=3).map(b"\n".join), TIMES))
def _(data: bytes) -> None:
    path = file(data, "logged/logs/learner-0.jsonl")
    console = Console(file=io.StringIO(), width=80)
    for entry in logs.merge(path.parent.parent):
        console.print(logs.render(entry))
        json.loads(entry.json().encode()) if not entry.damaged else None


def _toml(path: str) -> Bytes:
    text = (ROOT / path).read_text()
    return sources(just(text.encode()), hostile_toml(text), hostile_toml(text), hostile_toml(text))


@decoder(
    "settings.load_service",
    st.one_of(
        _toml("compose/run.toml"),
        _toml("tests/compose/run.toml"),
        hostile_toml(
            'name = "a"\nrun = "r"\nregion = "us"\nclock_file = "x"\ncheckpoint_s = 1\n[region_urls]\nus = "nats://a"'
        ),
    ),
    SettingsError,
)
def _(data: bytes) -> None:
    path = file(data, "service.toml")
    for cls in (CoordinatorSettings, LearnerSettings, SyncerSettings):
        try:
            load_service(cls, path)
        except SettingsError as error:
            str(error)


@decoder("settings.parse_assignments", hostile_toml("round.steps = 12"), SettingsError)
def _(data: bytes) -> None:
    assigned = parse_assignments([data.decode(errors="replace")])
    run_settings("decoupled", assigned)


@decoder("identity.load", sources(just(GOOD_IDENTITY.encode()), hostile_toml(GOOD_IDENTITY)), SettingsError)
def _(data: bytes) -> None:
    path = file(data, "ann.identity")
    path.chmod(0o600)
    identity.load(path)


@decoder("wan.config.load", _toml("compose/wan.toml"), SettingsError)
def _(data: bytes) -> None:
    config.load(file(data, "wan.toml"))


@decoder("lab: sites", _toml("examples/sites.toml"), SettingsError)
def _(data: bytes) -> None:
    sites.read(file(data, "sites.toml"))


TAPE_LINES = [
    {"format": failures.FORMAT, "version": failures.VERSION, "duration_s": 60.0, "seed": 1},
    {"at_s": 1.0, "kind": "slow", "target": "learner-*", "duration_s": 3.0, "factor": 2.0},
    {"at_s": 2.0, "kind": "chip_loss", "target": "learner-0/slice-0", "duration_s": 3.0},
]


@st.composite
def _failure_tapes(draw: st.DrawFn) -> bytes:
    lines = [json.dumps(line).encode() for line in TAPE_LINES]
    at = draw(st.integers(0, len(lines) - 1))
    lines[at] = draw(_json(TAPE_LINES[at]))
    return b"\n".join(lines)


LEARNERS = [ClusterLearner("learner-0", 2, 4, 1.0), ClusterLearner("learner-1", 1, 4, 1.0)]


@decoder("failures.decode", _failure_tapes(), FormatError)
def _(data: bytes) -> None:
    text = data.decode(errors="replace")
    read = failures.decode(text.split("\n"), "tape")
    assert failures.decode(failures.encode(read).split("\n"), "again") == read


@decoder("lab: failure tapes", _failure_tapes(), FormatError)
def _(data: bytes) -> None:
    tapes.read(data.decode(errors="replace").split("\n"), "tape", LEARNERS)


CSV = (ROOT / "examples/failures.csv").read_bytes()[:400]
CELLS = [
    "",
    "nan",
    "inf",
    "1e308",
    "-1e308",
    "9999-12-31T23:59:59-14:00",
    "0001-01-01T00:00:00+14:00",
    '"',
    "\0",
    "x" * 200_000,
    "٣",
    "1_0",
]


@st.composite
def _tables(draw: st.DrawFn) -> bytes:
    rows = [row.split(",") for row in CSV.decode().splitlines() if row.count(",") == 2]
    row = draw(st.integers(0, len(rows) - 1))
    rows[row][draw(st.integers(0, 2))] = draw(st.sampled_from(CELLS))
    return "\n".join(map(",".join, rows)).encode()


@decoder("lab: failure traces", sources(just(CSV), _tables(), _tables()), FormatError, SettingsError)
def _(data: bytes) -> None:
    for clock in ("seconds",):
        trace.read(io.StringIO(data.decode(errors="replace")), "trace", trace.Notation(clock=clock))


# ---- the property


@contextmanager
def watched(name: str) -> Iterator[None]:
    """An example that takes so much of the processor never ends; how much others take is no matter.

    Python drops an error that a signal raises within a callback of the garbage collector, so the signal comes again.
    """

    def hangs(number: int, frame: object) -> None:
        pytest.fail(f"{name}: not done within {DEADLINE_S} s of the processor")

    before = signal.signal(signal.SIGVTALRM, hangs)
    signal.setitimer(signal.ITIMER_VIRTUAL, DEADLINE_S, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@pytest.fixture(scope="module", autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    folder().cleanup()


def decoded(decoder: Decoder, raw: bytes) -> tuple[str, int]:
    """Return the text of the error by which bytes are refused, or none, and the memory that was taken at most, in bytes."""
    said = ""
    gc.disable()  # it would go through all that the tests before have left, again and again
    tracemalloc.start()  # not while examples are drawn, which takes several times as long with it
    try:
        with watched(decoder.name):
            decoder.decode(raw)
    except decoder.raises as error:
        said = str(error)
    finally:
        took = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        gc.enable()
    return said, took


@pytest.mark.parametrize("decoder", DECODERS, ids=lambda decoder: decoder.name)
# `make test` tries the same examples every time: what is found by chance is for `make fuzz`
@settings(
    max_examples=EXAMPLES_EACH,
    derandomize=WANTED is None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
)
@given(data=st.data())
def test_whatever_comes_is_read_or_refused(decoder: Decoder, data: st.DataObject) -> None:
    raw = data.draw(decoder.given)
    most = decoder.bound + FIXED + PER_BYTE * len(raw)
    said, took = decoded(decoder, raw)
    if took > most:  # so may another thread of this process have taken it meanwhile: a decoder takes it each time
        said, took = decoded(decoder, raw)
    assert len(said) <= SAID + 4 * len(raw)
    assert took <= most, f"{took} bytes of memory for {len(raw)} bytes"
