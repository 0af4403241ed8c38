"""The smallest learner, written from ``docs/protocol.md`` alone.

Nothing of this project is imported but the golden messages' maker, which does not either. Its steps are those of the box "The
smallest learner" there. It knows no regions, checkpoints or changes of a run, and leaves out policies: ``apply.alpha``,
the learning rate, loans.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgpack
import nats
import numpy as np
import zstandard
from nats.js.api import ConsumerConfig, DeliverPolicy
from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError, NotFoundError
from numpy.typing import NDArray
from tests.protocol.make_golden import Floats, blocks_of, decode, digest, encode, fold, from_bfloat16, state_hash, to_bfloat16

PART_BYTES = 524280
ROUTE = ("shards", "log", "liveness", "regions", "quarantine")  # settings that the digest leaves out
Tensors = dict[str, NDArray[np.float32]]
Cursor = tuple[int, int, int, int]  # incarnation, number, tokens, lost tokens of this learner
Step = Callable[[Tensors, int, int], float]


@dataclass
class Pending:
    """An offer whose fate is unknown."""

    identity: tuple[int, int]
    displacement: Floats
    rest: Floats
    round: int
    steps: int
    tokens: int
    data: set[tuple[int, int]]
    dropped: bool = False


@dataclass
class Fragment:
    """Pieces (path, first row, row after the last, shape) of one fragment, its log as folded so far, and its delta state."""

    index: int
    pieces: list[tuple[str, int, int, tuple[int, ...]]]
    theta: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    momentum: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    head: bytes = b""  # hash of the newest entry
    version: int = 0
    epoch: int = 0
    sequence: int = 0
    closed: bool = False
    cursor: Cursor = (0, 0, 0, 0)
    stated: int = 0  # tokens merged and lost by all learners
    parts: dict[bytes, dict[int, bytes]] = field(default_factory=dict)
    folded: list[tuple[list[Any], Floats, Cursor]] = field(default_factory=list)  # versions that wait for a boundary
    base: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    base_version: int = 0
    base_hash: bytes = b""
    after: tuple[int, int] = (0, 0)
    steps: int = 0
    tokens: int = 0
    lost: int = 0
    data: set[tuple[int, int]] = field(default_factory=set)
    number: int = 0
    error: Any = 0.0
    pending: list[Pending] = field(default_factory=list)
    round: tuple[int, int, bool, int] = (0, 0, False, 0)  # version, epoch, closing, bits
    answered: int = 0

    @property
    def size(self) -> int:
        return sum(math.prod(shape) for _, _, _, shape in self.pieces)

    def read(self, tensors: Tensors) -> Floats:
        """Return the fragment's vector, float32 [size]."""
        rows = [tensors[path][start:stop] if shape else tensors[path] for path, start, stop, shape in self.pieces]
        return np.concatenate([values.reshape(-1) for values in rows])

    def write(self, tensors: Tensors, vector: Floats) -> None:
        """Write the fragment's vector, float32 [size], into the tensors."""
        at = 0
        for path, start, stop, shape in self.pieces:
            n = math.prod(shape)
            tensors[path][(slice(start, stop) if shape else ...)] = vector[at : at + n].reshape(shape)
            at += n

    def quantise(self, values: Floats, bits: int) -> bytes:
        """Return the content of an offer of 4, 16 or 32 bits."""
        if bits != 4:
            return encode(values, bits)
        blocks = blocks_of(values)
        halves = to_bfloat16(np.abs(blocks).max(axis=1) / np.float32(7))
        halves[(halves < 0x0080) | (halves > 0x7E80)] = 0
        scales = from_bfloat16(halves)
        inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)
        codes = (np.rint(np.clip(blocks * inverse[:, None], -7, 7)) + 8).astype(np.uint8)
        return halves.astype("<u2").tobytes() + (codes[:, :32] | (codes[:, 32:] << 4)).tobytes()


def cut(tensors: list[Any], count: int) -> list[Fragment]:
    """Return the fragments of a map whose strategy is ``balanced``: section 6."""
    embeddings, others = [t for t in tensors if t[2]], [t for t in tensors if not t[2]]
    groups = [(tensors, count)]
    if embeddings and others and count > 1:
        share = sum(math.prod(t[1]) for t in embeddings) / sum(math.prod(t[1]) for t in tensors)
        own = min(max(1, round(count * share)), count - 1)
        groups = [(embeddings, own), (others, count - own)]
    fragments: list[Fragment] = []
    for group, number in groups:
        share, pieces = sum(math.prod(t[1]) for t in group) / number, []
        for path, shape, _ in group:
            rows, size = (shape[0] if shape else 1), math.prod(shape)
            p = min(rows, math.ceil(size / share)) if size > share else 1
            for i in range(p):
                start, stop = rows * i // p, rows * (i + 1) // p
                pieces.append((path, start, stop, (stop - start, *shape[1:]) if shape else ()))
        bins: list[Fragment] = [Fragment(len(fragments) + i, []) for i in range(number)]
        for piece in sorted(pieces, key=lambda piece: (-math.prod(piece[3]), piece[0], piece[1])):
            min(bins, key=lambda fragment: (fragment.size, fragment.index)).pieces.append(piece)
        fragments += bins
    for fragment in fragments:
        fragment.pieces.sort()
    return fragments


class SmallestLearner:
    """One learner of one run. ``step`` takes an inner step in place on tensors, a share and a batch, and returns its loss."""

    def __init__(self, url: str, run: str, name: str, share: int, step: Step, batch_tokens: int, step_s: float) -> None:
        self.url, self.run_name, self.name, self.share, self.take_step = url, run, name, share, step
        self.batch_tokens, self.step_s = batch_tokens, step_s
        self.tensors: Tensors = {}
        self.fragments: list[Fragment] = []
        self.steps = self.tokens = self.first = self.batch = 0
        self.loss: float | None = None
        self.announced = (0, 0)  # tokens of all learners, own tokens then
        self.closing = False
        self.failure: Exception | None = None

    async def train(self) -> None:
        """Take part in the run to its end."""
        client = await nats.connect(self.url)
        try:
            self.js, self.client = client.jetstream(), client
            await self.join()
            while await self.boundary():
                await asyncio.sleep(self.step_s)
        finally:
            await client.close()

    # ---- steps 1 to 7: join

    async def join(self) -> None:
        bucket = self.bucket = await self.js.key_value(f"DILOCO_{self.run_name}")
        protocol = json.loads((await bucket.get("protocol")).value)
        assert (protocol["protocol"], protocol["requires"]) == (2, [])
        self.settings = json.loads((await bucket.get("run")).value)
        hashed = {key: value for key, value in self.settings.items() if key not in ROUTE}
        self.digest = digest(json.dumps(hashed, sort_keys=True, separators=(",", ":")).encode())
        self.run = digest(self.run_name.encode() + b"\0" + self.digest)[:8]
        packed = await self.wait_for("map")
        tensors, count, strategy = msgpack.unpackb(packed)
        assert strategy == "balanced"
        self.tensors = {path: np.zeros(shape, np.float32) for path, shape, _ in tensors}
        self.fragments = cut(tensors, count)
        self.incarnation = int(time.time() * 1000)
        await self.change(f"member.{self.name}", lambda old: self.admission(old, digest(packed)))
        genesis = await self.genesis()
        for fragment in self.fragments:
            await self.load(fragment, *genesis)
        await self.follow()
        self.tokens = self.known = max(fragment.cursor[2] + fragment.cursor[3] for fragment in self.fragments)
        for fragment in self.fragments:
            fragment.after, fragment.lost = fragment.cursor[:2], self.tokens - fragment.cursor[2]
            fragment.base, fragment.base_version = fragment.theta, fragment.version
            fragment.base_hash = state_hash(fragment.theta, fragment.momentum)
            fragment.folded.clear()
            fragment.write(self.tensors, fragment.base)
        await self.lease()
        await self.client.subscribe(self.subject("round.*"), cb=self.hear_round)

    def subject(self, rest: str) -> str:
        return f"diloco.{self.run_name}.{rest}"

    @property
    def log(self) -> str:
        return f"DILOCO_{self.run_name}_LOG"

    async def wait_for(self, key: str) -> bytes:
        while True:
            try:
                return bytes((await self.bucket.get(key)).value)
            except KeyNotFoundError:
                await asyncio.sleep(0.05)

    async def change(self, key: str, decide: Callable[[Any], Any]) -> None:
        """Set a key by compare-and-set to what ``decide`` makes of its value."""
        while True:
            try:
                stored = await self.bucket.get(key)
            except KeyNotFoundError:
                stored = None
            value = msgpack.packb(decide(msgpack.unpackb(stored.value) if stored else None))
            try:
                if stored is None:
                    await self.bucket.create(key, value)
                else:
                    await self.bucket.update(key, value, last=stored.revision)
                return
            except KeyWrongLastSequenceError:
                continue

    def admission(self, old: Any, map_digest: bytes) -> Any:
        self.incarnation = max(self.incarnation, old[1] + 1 if old else 0)
        return [self.name, self.incarnation, self.digest, map_digest, None]  # no grant: the run has no identities

    async def lease(self) -> None:
        """Claim the own share again, the preferred one, any free one, or a new one, until it is held."""
        while True:
            leases, own = await self.leases()
            free = [share for share, lease in leases.items() if lease[0] is None]
            new = next(share for share in itertools.count(self.settings["learners"]) if share not in leases)
            held = [share for share, lease in leases.items() if lease[0] == self.name]
            share = min(held or free or [new], key=lambda share: (share != self.share, share))
            _, next_batch, newest = leases.get(share, (None, 0, 0))
            next_batch = max(next_batch, self.first)
            if held:
                self.share, self.batch, self.first = share, next_batch, next_batch
                return
            let_go = [entry for entry in own if not entry[1] and entry[0] != share]
            claimed = sorted([*let_go, [share, True, next_batch, 0, newest]])
            await self.change(f"share.{self.name}", lambda old: [self.name, self.incarnation, claimed])  # noqa: B023

    async def leases(self) -> tuple[dict[int, tuple[Any, int, int]], list[Any]]:
        """The holder, the next batch and the newest revision of each share, and what the own claim states."""
        stated: dict[int, list[Any]] = {share: [] for share in range(self.settings["learners"])}
        own: list[Any] = []
        revision, bucket = 0, f"DILOCO_{self.run_name}"
        while True:
            try:
                stored = await self.js.get_msg(f"KV_{bucket}", revision + 1, f"$KV.{bucket}.share.*", next=True)
            except NotFoundError:
                break
            revision = stored.seq
            name, _, entries = msgpack.unpackb(stored.data)
            for entry in entries:
                entry[3] = entry[3] or revision
                stated.setdefault(entry[0], []).append((name, *entry))
            own = entries if name == self.name else own
        leases: dict[int, tuple[Any, int, int]] = {}
        for share, entries in stated.items():
            over = max((entry[5] for entry in entries), default=0)
            standing = [(entry[4], entry[0]) for entry in entries if entry[2] and entry[4] > over]
            next_batch = max((entry[3] for entry in entries), default=0)
            newest = max([over, *(entry[4] for entry in entries if entry[2])])
            leases[share] = min(standing)[1] if standing else None, next_batch, newest
        return leases, own

    async def genesis(self) -> tuple[list[Any], bytes]:
        while True:
            try:
                stored = await self.js.get_msg(self.log, seq=1, subject=self.subject("genesis"), next=True)  # the first one
            except NotFoundError:
                await asyncio.sleep(0.05)
                continue
            fields, check, _ = self.unpack(stored.data, "genesis")
            return fields, check

    async def load(self, fragment: Fragment, genesis: list[Any], genesis_check: bytes) -> None:
        """Begin at the newest keyframe."""
        stored = await self.js.get_last_msg(self.log, self.subject(f"keyframe.{fragment.index}.head"))
        fields, _, inline = self.unpack(stored.data, "keyframe")
        _, version, epoch, entry_hash, sequence, merged, lost, cursors, ends, stated_hash, closing, body = fields[:12]
        names = [self.subject(f"keyframe.{fragment.index}.part.{body[3].hex()}.{i}") for i in range(body[2])]
        parts = [(await self.js.get_last_msg(self.log, name)).data[8:] for name in names]
        values = np.frombuffer(self.content(body, inline, parts), "<f4")
        fragment.theta, fragment.momentum, _ = np.split(values.astype(np.float32), 3)
        assert state_hash(fragment.theta, fragment.momentum) == stated_hash
        if version == 0 and entry_hash == bytes(32):
            assert stated_hash == genesis[3][fragment.index], "another founder's: look for the first one that genesis names"
            entry_hash = genesis_check
        fragment.version, fragment.epoch, fragment.head, fragment.sequence = version, epoch, entry_hash, sequence
        fragment.closed, fragment.stated = closing, merged + lost
        for cursor in cursors:
            if cursor[0] == self.name:
                fragment.cursor = cursor[1], cursor[2], cursor[4], cursor[5]
        self.first = max([self.first, *(end for share, end in ends if share == self.share)])

    async def follow(self) -> None:
        """Follow the log, and wait until its end as of now has been read."""
        ends = []
        for fragment in self.fragments:
            try:
                head = await self.js.get_last_msg(self.log, self.subject(f"fragment.{fragment.index}.head"))
                ends.append((fragment, head.seq or 0))
            except NotFoundError:
                continue
        start = min(fragment.sequence for fragment in self.fragments) + 1
        config = ConsumerConfig(deliver_policy=DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=start)
        await self.js.subscribe(
            self.subject("fragment.>"), stream=self.log, ordered_consumer=True, config=config, cb=self.hear_log
        )
        while any(fragment.sequence < end for fragment, end in ends):
            await asyncio.sleep(0.01)

    # ---- what comes in

    async def hear_log(self, message: Any) -> None:
        try:
            self.take_entry(message.subject.split("."), message.metadata.sequence.stream, message.data)
        except Exception as error:
            self.failure = error

    def take_entry(self, subject: list[str], sequence: int, data: bytes) -> None:
        """Fold an entry that follows the head, and pass over all else."""
        fragment = self.fragments[int(subject[3])]
        if sequence <= fragment.sequence:
            return
        if subject[4] == "part":
            fragment.parts.setdefault(data[:8], {})[int(subject[6])] = data[8:]
            return
        fields, check, inline = self.unpack(data, "record")
        entry, version, epoch, previous, members, bits = (fields[i] for i in (1, 2, 3, 5, 6, 8))
        body, parts = fields[18], {}
        if body is not None:
            parts, fragment.parts = fragment.parts.get(body[3], {}), {}
        makes_version = entry in ("version", "rollback", "repair")
        follows = previous == fragment.head and version == fragment.version + makes_version
        if not follows or epoch != fragment.epoch + (entry == "takeover"):
            return
        if body is not None:
            content = self.content(body, inline, [parts[i] for i in range(body[2])])
            if entry in ("rollback", "repair"):
                theta, momentum = np.split(np.frombuffer(content, "<f4").astype(np.float32), 2)
            else:
                delta = decode(content, fragment.size, bits)
                theta, momentum = fold(fragment.theta, fragment.momentum, delta, fields[9], fields[10])
            if state_hash(theta, momentum) != fields[13]:
                return  # it is wrong: a new owner goes on from before it
            fragment.theta, fragment.momentum = theta, momentum
        fragment.version, fragment.epoch, fragment.head, fragment.sequence = version, epoch, check, sequence
        fragment.closed, fragment.stated = fragment.closed or fields[14], fields[11] + fields[12]
        for member in members:
            if member[0] == self.name:
                fragment.cursor = member[1], member[2], fragment.cursor[2] + member[6], member[7]
            self.first = max([self.first, *(first + count for share, first, count in member[9] if share == self.share)])
        if makes_version:
            fragment.folded.append((fields, fragment.theta, fragment.cursor))

    async def hear_round(self, message: Any) -> None:
        index, version, epoch, _, _, closing, tokens, _, asked = self.unpack(message.data, "round")[0]
        fragment = self.fragments[index]
        if epoch < fragment.epoch:
            return
        known_version, known_epoch, known_closing, _ = fragment.round
        newly_closing = closing and not (known_closing and version == known_version)
        if epoch > known_epoch or newly_closing:
            fragment.answered = 0
        if version >= known_version or version == fragment.version + 1:
            bits = dict(asked).get("", self.settings["codec"]["offer_bits"])
            fragment.round = version, max(epoch, known_epoch), closing or (known_closing and version == known_version), bits
        self.closing = self.closing or closing
        if tokens > self.announced[0]:
            self.announced = tokens, self.tokens

    # ---- steps 8 to 10: step, apply, answer, stop

    async def boundary(self) -> bool:
        """Apply, answer and take a step; whether the run goes on."""
        if self.failure is not None:
            raise self.failure
        for fragment in self.fragments:
            while fragment.folded:
                self.apply(fragment, *fragment.folded.pop(0))
        used_up = self.announced[0] + self.tokens - self.announced[1] >= self.settings["tokens"]
        stop = self.closing or used_up or any(fragment.closed for fragment in self.fragments)
        for fragment in self.fragments:
            version, _, closing, _ = fragment.round
            due = version == fragment.base_version + 1 and fragment.answered < version and fragment.steps > 0
            if due and (stop or not closing):
                await self.answer(fragment)
        finished = all(fragment.closed and not fragment.folded for fragment in self.fragments)
        await self.heartbeat("finished" if finished else "closing" if stop else "stepping")
        if not stop:
            self.loss = self.take_step(self.tensors, self.share, self.batch)
            self.steps, self.tokens = self.steps + 1, self.tokens + self.batch_tokens
            for fragment in self.fragments:
                fragment.steps, fragment.tokens = fragment.steps + 1, fragment.tokens + self.batch_tokens
                fragment.data.add((self.share, self.batch))
            self.batch += 1
        return not finished

    def apply(self, fragment: Fragment, record: list[Any], theta: Floats, cursor: Cursor) -> None:
        """Take over a version, by the table of section 11."""
        mine = next((member for member in record[6] if member[0] == self.name), None)
        value, forgotten, keeps = theta, False, False
        if mine is not None:
            offer = next((offer for offer in fragment.pending if offer.identity == (mine[1], mine[2])), None)
            fragment.after, fragment.error, fragment.pending = (mine[1], mine[2]), 0.0, []
            forgotten = offer is None
            if offer is not None and offer.dropped:
                fragment.lost -= offer.tokens
            elif offer is not None:
                fragment.error = offer.rest if self.settings["codec"]["error_feedback"] else 0.0
                fragment.steps, fragment.tokens = fragment.steps - offer.steps, fragment.tokens - offer.tokens
                fragment.data -= offer.data
                keeps = self.settings["carry"]["overlap"] and offer.round == record[2] and fragment.tokens > 0
                if keeps:
                    value = theta + (fragment.read(self.tensors) - (fragment.base + offer.displacement))
        elif record[1] in ("rollback", "repair"):
            fragment.error, fragment.pending = 0.0, []
        else:
            for offer in fragment.pending:
                offer.dropped = True
        if not keeps:
            fragment.lost += fragment.tokens
            fragment.steps, fragment.tokens, fragment.data = 0, 0, set()
        fragment.base, fragment.base_version, fragment.base_hash = theta, record[2], record[13]
        fragment.write(self.tensors, value)
        if forgotten:
            self.square(fragment, cursor)

    def square(self, fragment: Fragment, cursor: Cursor) -> None:
        """Count the tokens of an own offer that is merged and not pending, unless this process has made it."""
        incarnation, _, merged, lost = cursor
        unknown = 0 if incarnation == self.incarnation else max(0, merged + lost - self.known)
        self.known, self.tokens = self.known + unknown, self.tokens + unknown
        for other in self.fragments:
            other.lost += unknown
        fragment.lost = self.tokens - merged - fragment.tokens

    async def answer(self, fragment: Fragment) -> None:
        """Offer the displacement."""
        version, _, _, bits = fragment.round
        displacement = fragment.read(self.tensors) - fragment.base
        gradient = fragment.error - displacement
        content = fragment.quantise(gradient, bits)
        rest = gradient - decode(content, fragment.size, bits)
        fragment.number, fragment.answered = fragment.number + 1, version
        identity = self.incarnation, fragment.number
        counts = fragment.steps, fragment.tokens
        fragment.pending.append(Pending(identity, displacement, rest, version, *counts, set(fragment.data)))
        attempt = os.urandom(8)
        body, inline, parts = self.pack_body(content, attempt)
        fields = [fragment.index, self.name, *identity, fragment.after, version, fragment.base_version, fragment.base_hash]
        frame = self.pack("offer", [*fields, bits, *counts, fragment.lost, ranges(fragment.data), body], inline)
        head, unique = self.subject(f"delta.{fragment.index}.{self.name}"), os.urandom(16).hex()
        for i, part in enumerate(parts):
            await self.js.publish(f"{head}.part.{i}", part, headers={"Nats-Msg-Id": f"{unique}/{i}"})
        await self.js.publish(f"{head}.head", frame, headers={"Nats-Msg-Id": unique})

    async def heartbeat(self, state: str) -> None:
        """Send a heartbeat."""
        each = self.fragments
        counts = [[f.base_version for f in each], [f.steps for f in each], [f.tokens for f in each], [f.lost for f in each]]
        trained = [[self.share, self.first, self.batch - self.first]] if self.batch > self.first else []
        about = [self.name, "", self.incarnation, "learner", state, False, self.steps, self.tokens, self.step_s, self.loss]
        fields = [*about, *counts, trained, self.batch_tokens, 0.0, 0.0, 0, 0, 0, ""]
        await self.client.publish(self.subject(f"heartbeat.{self.name}"), self.pack("heartbeat", fields, b""))

    # ---- frames and bodies

    def pack(self, kind: str, fields: list[Any], inline: bytes) -> bytes:
        packed = msgpack.packb(fields)
        check = digest(b"DLC2" + kind.encode() + b"\0" + self.run + packed)
        return bytes(msgpack.packb(["DLC", 2, kind, self.run, packed, check, inline]))

    def unpack(self, data: bytes, kind: str) -> tuple[list[Any], bytes, bytes]:
        magic, version, its_kind, run, packed, check, inline = msgpack.unpackb(data)
        assert (magic, version, its_kind, run) == ("DLC", 2, kind, self.run)
        assert check == digest(b"DLC2" + kind.encode() + b"\0" + run + packed)
        return msgpack.unpackb(packed), check, inline

    def pack_body(self, content: bytes, attempt: bytes) -> tuple[list[Any], bytes, list[bytes]]:
        packed = zstandard.ZstdCompressor().compress(content)
        if len(packed) <= 524288:
            return [len(packed), digest(content), 0, attempt], packed, []
        parts = [attempt + packed[at : at + PART_BYTES] for at in range(0, len(packed), PART_BYTES)]
        return [len(packed), digest(content), len(parts), attempt], b"", parts

    def content(self, body: list[Any], inline: bytes, parts: list[bytes]) -> bytes:
        content = zstandard.ZstdDecompressor().decompress(b"".join(parts) if body[2] else inline)
        assert digest(content) == body[1]
        return content


def ranges(batches: set[tuple[int, int]]) -> list[list[int]]:
    """Return a set of (share, batch) as ranges [share, first, count]."""
    found: list[list[int]] = []
    for share, batch in sorted(batches):
        if found and found[-1][0] == share and sum(found[-1][1:]) == batch:
            found[-1][2] += 1
        else:
            found.append([share, batch, 1])
    return found
