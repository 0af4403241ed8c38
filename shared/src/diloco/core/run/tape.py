"""The event tape: all inputs to a run's bits beyond its settings, data and log. ``docs/tape.md`` is the format in prose.

Each process writes one tape. A learner's has its batches, the versions that it applied, and its offers, in order; the merges
themselves are in the log. A tape is a header and then blocks, each one or more whole events::

    header = MAGIC, varint VERSION, run (8 bytes), text name, checksum
    block  = varint n (1 to MAX_BLOCK_BYTES), n bytes of events, checksum
    event  = kind (1 byte), its fields in order

An int is a varint (LEB128), a text a varint length and UTF-8, a digest 8 bytes, a tuple a varint count and varints. A
``checksum`` is the first 4 bytes of the BLAKE3 hash over what stands before it: the header's bytes, or, for a block, the
header's whole hash, the block's place in the file (8 bytes, little endian) and its events. A block in another tape or at
another place is thus refused. A process that dies leaves at most one block that is not whole, at the end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_type_hints

from blake3 import blake3

from diloco.core.run.tape_values import MAX_TEXT_BYTES, pack_text, pack_varint, read_text, read_varint, read_varints
from diloco.errors import FormatError

MAGIC, VERSION, SUFFIX = b"DLCtape\n", 1, ".tape"
DIGEST_BYTES, RUN_BYTES, CHECK_BYTES = 8, 8, 4
MAX_BLOCK_BYTES = (1 << 14) - 1  # the largest length of two bytes
XLA_FLAGS, THREADS, CPU_DEVICES = "XLA_FLAGS", "PJRT_NPROC", "--xla_force_host_platform_device_count"
TORCH = "torch"  # how the machine of a learner begins that computes with PyTorch


class TapeEvent:
    """Base of all events; fields have the same order on the tape."""


@dataclass(frozen=True, slots=True)
class Start(TapeEvent):
    """A process began; a learner has joined the run and loaded its log. Steps are counted from here."""

    at_ms: int  # Unix time by its own clock: a label
    incarnation: int  # 0: not a learner
    versions: tuple[int, ...]  # that a learner loaded, by fragment; empty of others


@dataclass(frozen=True, slots=True)
class Machine(TapeEvent):
    """Processor and libraries, and their flags: the bits of a step depend on them besides the program."""

    text: str
    flags: str  # XLA_FLAGS, and in front of them PJRT_NPROC=N, the threads that sums are divided among

    @classmethod
    def of(cls, text: str, threads: str, xla_flags: str) -> Machine:
        """Return the machine of a process that computes with so many threads."""
        most = MAX_TEXT_BYTES // 4
        return cls(text[:most], f"{THREADS}={threads} {xla_flags}".rstrip()[:most])

    def environment(self, devices: int) -> dict[str, str]:
        """Return the environment of a process with a learner's ``devices``; older tapes have one process's, or no threads."""
        first, _, rest = self.flags.partition(" ")
        named = first.startswith(f"{THREADS}=")
        flags = re.sub(rf"{CPU_DEVICES}=\d+", f"{CPU_DEVICES}={devices}", rest if named else self.flags)
        return {XLA_FLAGS: flags} | ({THREADS: first.removeprefix(f"{THREADS}=")} if named else {})


@dataclass(frozen=True, slots=True)
class Mesh(TapeEvent):
    """A learner of several devices: so many along each axis of its mesh. The bits of a step depend on them, too."""

    data: int
    fsdp: int
    tensor: int

    @property
    def devices(self) -> int:
        """Their number."""
        return self.data * self.fsdp * self.tensor


@dataclass(frozen=True, slots=True)
class Processes(TapeEvent):
    """A learner of so many processes: the tape is its leader's, and has what all of them did."""

    count: int


@dataclass(frozen=True, slots=True)
class Apart(TapeEvent):
    """A step is two programs, one that makes the gradients and one that uses them: its bits may be others than those of one."""


@dataclass(frozen=True, slots=True)
class Bare(TapeEvent):
    """The checkpoint at the start has no arrays of a fragment's accounts: they were a process's that is gone."""

    fragment: int


@dataclass(frozen=True, slots=True)
class ErrorBits(TapeEvent):
    """Quantisation errors are kept in so many bits from one offer to the next; without this event in 32."""

    bits: int


@dataclass(frozen=True, slots=True)
class SingleStepKept(TapeEvent):
    """A single step that no version merges stays in the learner's value; without this event it is lost."""


@dataclass(frozen=True, slots=True)
class Restored(TapeEvent):
    """Parameters, optimizer state and delta state are those of the own checkpoint with this digest."""

    digest: bytes


@dataclass(frozen=True, slots=True)
class Borrowed(TapeEvent):
    """The optimizer state is the one that ``peer`` lent, with this digest."""

    peer: str
    digest: bytes


@dataclass(frozen=True, slots=True)
class Fresh(TapeEvent):
    """The optimizer state is reset in a run under way: the learning rate rises over ``inner.restart_warmup_steps``."""


@dataclass(frozen=True, slots=True)
class Data(TapeEvent):
    """The next step takes this batch; each later one the next batch of the same share, until another such event."""

    share: int
    batch: int


@dataclass(frozen=True, slots=True)
class TokensCounted(TapeEvent):
    """The next step counts so many tokens, and each later one, until another such event; without it the most of a step."""

    tokens: int


@dataclass(frozen=True, slots=True)
class Step(TapeEvent):
    """One inner step."""


@dataclass(frozen=True, slots=True)
class Apply(TapeEvent):
    """A version was written into the model, after the step before and before the next."""

    fragment: int
    version: int


@dataclass(frozen=True, slots=True)
class Reload(TapeEvent):
    """The newest version of a fragment was loaded and written; ``invalid``: the learner's own value was invalid."""

    fragment: int
    version: int
    invalid: bool


@dataclass(frozen=True, slots=True)
class TapeOffer(TapeEvent):
    """A round was answered with the fragment as it was ``ago`` steps before; written before the offer is sent."""

    ago: int
    fragment: int
    number: int
    round: int
    bits: int
    digest: bytes  # of the body's content hash


@dataclass(frozen=True, slots=True)
class Copied(TapeEvent):
    """A copy of the state was begun here; the next Checkpoint or Lent, if any, is of the last such copy."""


@dataclass(frozen=True, slots=True)
class Changed(TapeEvent):
    """From here on the first ``changes`` of the run's changes are in force at the learner."""

    changes: int


@dataclass(frozen=True, slots=True)
class Elapsed(TapeEvent):
    """So much time since the Start or the last such event; one behind each Step: how long steps take, waits included."""

    ms: int


@dataclass(frozen=True, slots=True)
class Sent(TapeEvent):
    """The server has acknowledged the fragment's last offer, so many milliseconds after it was begun to be made."""

    fragment: int
    ms: int


@dataclass(frozen=True, slots=True)
class Checkpoint(TapeEvent):
    """The copy is on the disk; the digest names it."""

    digest: bytes


@dataclass(frozen=True, slots=True)
class Lent(TapeEvent):
    """The copy's optimizer state was lent to a peer; the digest is of its hash."""

    digest: bytes


@dataclass(frozen=True, slots=True)
class End(TapeEvent):
    """The process ends by itself: the run is ``finished``, or it leaves. ``digest`` is of the parameters."""

    finished: bool
    digest: bytes


@dataclass(frozen=True, slots=True)
class Gap(TapeEvent):
    """``events`` events could not be written."""

    events: int


@dataclass(frozen=True, slots=True)
class Owners(TapeEvent):
    """A syncer's share of the fragments, by a revision of the owners table."""

    at_ms: int
    revision: int
    fragments: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Gone(TapeEvent):
    """A member has not been heard for ``liveness.dead_s``."""

    at_ms: int
    member: str


@dataclass(frozen=True, slots=True)
class Back(TapeEvent):
    """A member is heard, for the first time or again."""

    at_ms: int
    member: str


KINDS: dict[int, type[TapeEvent]] = {
    1: Start, 2: Machine, 3: Restored, 4: Borrowed, 5: Data, 6: Step, 7: Apply, 8: Reload, 9: TapeOffer, 10: Checkpoint,
    11: Lent, 12: End, 13: Gap, 14: Fresh, 15: Copied, 16: Changed, 17: Elapsed, 18: Sent, 19: Mesh, 20: Processes,
    21: Apart, 22: Bare, 23: ErrorBits, 24: SingleStepKept, 25: TokensCounted, 32: Owners, 33: Gone, 34: Back,
}  # fmt: skip
_CODES = {cls: code for code, cls in KINDS.items()}


def fields_of(cls: type[TapeEvent]) -> list[tuple[str, Any]]:
    """Return names and types of an event's fields, in their order on the tape."""
    hints = get_type_hints(cls)
    return [(field.name, hints[field.name]) for field in fields(cls)] if is_dataclass(cls) else []


_TYPES = {cls: fields_of(cls) for cls in _CODES}
_STEP = Step()


@dataclass(frozen=True)
class Header:
    """The tape's owner: run identity and the process's name."""

    run: bytes
    name: str

    def pack(self) -> bytes:
        """Return the first bytes of a tape."""
        head = MAGIC + pack_varint(VERSION) + self.run + pack_text(self.name)
        return head + blake3(head).digest()[:CHECK_BYTES]

    @property
    def hash(self) -> bytes:
        """The hash with which every block's checksum begins."""
        return blake3(self.pack()[:-CHECK_BYTES]).digest()


@dataclass(frozen=True)
class Scan:
    """The whole blocks of a tape, and the place and reason of their end.

    ``torn_bytes`` at the end are a block that was never finished. ``damaged_at`` is the place of a damaged block; the rest of
    the tape is not read.
    """

    header: Header
    blocks: list[tuple[int, int]]  # first byte, byte after the last, of each block's events
    good_bytes: int
    torn_bytes: int = 0
    damaged_at: int | None = None


def encode(event: TapeEvent) -> bytes:
    """Return an event's bytes."""
    out = bytes([_CODES[type(event)]])
    for name, _ in _TYPES[type(event)]:
        value = getattr(event, name)
        if isinstance(value, bytes):
            out += value
        elif isinstance(value, str):
            out += pack_text(value)
        elif isinstance(value, tuple):
            out += pack_varint(len(value)) + b"".join(map(pack_varint, value))
        else:
            out += pack_varint(value)
    return out


def blocks(events: Iterable[bytes], header_hash: bytes, place: int) -> Iterator[bytes]:
    """Yield encoded events as blocks; the first one is for byte ``place`` of the tape."""
    waiting = b""
    for event in events:
        if len(waiting) + len(event) > MAX_BLOCK_BYTES:
            block = _block(waiting, header_hash, place)
            place += len(block)
            waiting = b""
            yield block
        waiting += event
    if waiting:
        yield _block(waiting, header_hash, place)


def scan(data: bytes | memoryview) -> Scan:
    """Check a whole tape, block by block.

    Raises:
        FormatError: this is no tape, of another format version, or its header is damaged.
    """
    data = memoryview(data)
    header, place = _header(data)
    header_hash = header.hash
    found: list[tuple[int, int]] = []
    while place < len(data):
        stop = _whole(data, place, header_hash)
        if stop is None:
            rest = len(data) - place
            lost = rest > MAX_BLOCK_BYTES + CHECK_BYTES or any(
                _whole(data, at, header_hash) is not None for at in range(place + 1, len(data))
            )
            return Scan(header, found, place, 0 if lost else rest, place if lost else None)
        length_bytes = 1 if data[place] < 0x80 else 2
        found.append((place + length_bytes, stop - CHECK_BYTES))
        place = stop
    return Scan(header, found, place)


def events(data: bytes | memoryview, whole: Scan) -> Iterator[TapeEvent]:
    """Yield the events of a tape that :func:`scan` has checked.

    Raises:
        FormatError: a block holds bytes that no writer of this version writes.
    """
    data = memoryview(data)
    for start, stop in whole.blocks:
        yield from decode(bytes(data[start:stop]))


def decode(block: bytes) -> Iterator[TapeEvent]:
    """Yield the events of one block.

    Raises:
        FormatError: an unknown kind, a value out of bounds, or a torn event.
    """
    at = 0
    while at < len(block):
        cls = KINDS.get(block[at])
        if cls is None:
            raise FormatError(f"tape: event of kind {block[at]}, which version {VERSION} does not have")
        at += 1
        if cls is Step:
            yield _STEP
            continue
        values: list[object] = []
        for name, kind in _TYPES[cls]:
            what = f"tape: {cls.__name__}.{name}"
            if kind is bytes:
                value: object = block[at : at + DIGEST_BYTES]
                at += DIGEST_BYTES
            elif kind is str:
                value, at = read_text(block, at, what)
            elif kind is int or kind is bool:
                value, at = read_varint(block, at, what)
                if kind is bool and value not in (0, 1):
                    raise FormatError(f"{what} is {value}, expected 0 or 1")
                value = kind(value)
            else:
                value, at = read_varints(block, at, what)
            if at > len(block):
                raise FormatError(f"{what}: ends in the middle")
            values.append(value)
        yield cls(*values)


def state_digest(hashes: Mapping[str, bytes]) -> bytes:
    """Return the digest of arrays by their names and BLAKE3 hashes."""
    digest = blake3()
    for name in sorted(hashes):
        digest.update(pack_text(name) + hashes[name])
    return digest.digest()[:DIGEST_BYTES]


def _block(payload: bytes, header_hash: bytes, place: int) -> bytes:
    return pack_varint(len(payload)) + payload + _check(header_hash, place, payload)


def _check(header_hash: bytes, place: int, payload: bytes | memoryview) -> bytes:
    return blake3(header_hash + place.to_bytes(8, "little") + payload).digest()[:CHECK_BYTES]


def _whole(data: memoryview, place: int, header_hash: bytes) -> int | None:
    """Return the end of the block at ``place``, or None if there is no whole one."""
    length, start = data[place], place + 1
    if length >= 0x80:
        if start >= len(data) or data[start] >= 0x80:
            return None
        length, start = (length & 0x7F) | data[start] << 7, start + 1
    stop = start + length
    if not length or stop + CHECK_BYTES > len(data):
        return None
    return stop + CHECK_BYTES if data[stop : stop + CHECK_BYTES] == _check(header_hash, place, data[start:stop]) else None


def _header(data: memoryview) -> tuple[Header, int]:
    head = bytes(data[: len(MAGIC) + 1 + RUN_BYTES + 2 + MAX_TEXT_BYTES + CHECK_BYTES])
    if not head.startswith(MAGIC):
        raise FormatError("not a tape: its first bytes are not those of a tape")
    version, at = read_varint(head, len(MAGIC), "tape: format version")
    if version != VERSION:
        raise FormatError(
            f"tape: format version {version}, expected {VERSION}; read it with the version of diloco that wrote it"
        )
    run = head[at : at + RUN_BYTES]
    name, at = read_text(head, at + RUN_BYTES, "tape: name")
    if head[at : at + CHECK_BYTES] != blake3(head[:at]).digest()[:CHECK_BYTES]:
        raise FormatError("tape: its header is damaged")
    return Header(run, name), at + CHECK_BYTES
