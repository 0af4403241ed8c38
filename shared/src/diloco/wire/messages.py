"""Every message: its fields, types, units and bounds; how it is framed, checked and refused.

A frame is the msgpack array ``[magic, version, kind, run, fields, check, body]``: ``run`` is the run's identity (8 bytes),
``fields`` the message's fields as a msgpack array, ``check`` the BLAKE3 hash over all that stands before it, ``body`` a
zstd frame or nothing. A body larger than a part travels in messages of its own, stored before the head; each part starts
with the attempt (8 bytes) that the head names, so that parts of two attempts never mix. Hashes of bodies are over
uncompressed bytes, since zstd's output may differ between versions.

``docs/protocol.md`` is the same in prose, for someone who writes a member in another language.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from blake3 import blake3
from msgspec import Meta, Struct

from diloco.errors import FormatError, HashError

MAGIC = "DLC"
VERSION = 1  # the protocol that frames are of
OLDEST = 1  # a run of this one or a newer one, to VERSION, can be taken part in
PART_BYTES = 512 * 1024
ATTEMPT_BYTES = 8
MAX_MEMBERS = 4096
MAX_FRAGMENTS = 4096
MAX_SYNCERS = 1024
MAX_REGIONS = 64
MAX_SHARES = 1 << 14
MAX_RANGES = 64
MAX_FRAME_BYTES = 1 << 20
MAX_MEMBERS_BYTES = MAX_FRAME_BYTES - PART_BYTES - 1024  # of a record, beside a body in its head and its other fields

Count = Annotated[int, Meta(ge=0, le=2**62)]
FragmentIndex = Annotated[int, Meta(ge=0, lt=MAX_FRAGMENTS)]
MemberName = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_-]{0,47}\Z")]  # "$" would let a line break pass
Region = Annotated[str, Meta(pattern=r"^([a-z0-9][a-z0-9_]{0,15})?\Z")]  # empty: the run has no regions
Software = Annotated[str, Meta(pattern=r"^[0-9A-Za-z.+-]{0,32}\Z")]  # the version of diloco; empty: not said
Hash = Annotated[bytes, Meta(min_length=32, max_length=32)]
Attempt = Annotated[bytes, Meta(min_length=ATTEMPT_BYTES, max_length=ATTEMPT_BYTES)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Bits = Literal[4, 8, 16, 32]
Pace = Annotated[float, Meta(ge=1, le=16)]
RegionBits = Annotated[list[tuple[Region, Bits]], Meta(max_length=MAX_REGIONS)]  # of offers; of regions where they are fewer
Counts = Annotated[list[Count], Meta(max_length=MAX_FRAGMENTS)]
ShareId = Annotated[int, Meta(ge=0, lt=MAX_SHARES)]
Range = tuple[ShareId, Count, Annotated[int, Meta(ge=1, le=2**62)]]  # share, first batch, number of batches
Ranges = Annotated[list[Range], Meta(max_length=MAX_RANGES)]  # in order, none touching another


class Message(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Base of all messages; a field's place in the class is its place on the wire."""

    kind: ClassVar[str]

    def __post_init__(self) -> None:
        for name, value in zip(self.__struct_fields__, msgspec.structs.astuple(self), strict=True):
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name} is not finite")


class Body(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """A body's description: compressed size, hash of the uncompressed bytes, and its parts (0: it is in the head)."""

    size_bytes: Annotated[int, Meta(ge=0, le=2**40)]
    content_hash: Hash
    parts: Annotated[int, Meta(ge=0, le=2**22)]
    attempt: Attempt


class Pulse(Message, frozen=True):
    """A learner's sign of life, at every step and at least every ``liveness.pulse_s``. Not stored."""

    kind = "pulse"

    learner: MemberName
    region: Region
    incarnation: Count
    role: Literal["learner", "evaluator"]
    state: Literal["starting", "stepping", "waiting", "recovering", "closing", "leaving", "left", "finished"]
    sending: bool
    step: Count
    tokens: Count  # processed by this learner in this run, also before a restart
    step_s: Seconds  # moving average of the time of an inner step
    loss: float | None  # of the last step, nats per token; an evaluator's is the global model's validation loss
    versions: Counts  # by fragment: the version last applied
    steps: Counts  # by fragment: steps not yet merged
    fragment_tokens: Counts  # by fragment: tokens not yet merged
    lost_tokens: Counts  # by fragment: tokens that will never be merged
    trained: Ranges  # newest of the ranges that this incarnation has trained, each whole
    batch_tokens: Count  # of one batch: the same for all of a run
    busy_s: Seconds  # time with a step in flight
    blocked_s: Seconds  # time in which no step was in flight because of this system
    bytes_up: Count
    bytes_down: Count
    refused: Count
    software: Software


class ShardPulse(Message, frozen=True):
    """A syncer's sign of life, six times in ``liveness.takeover_s``. Not stored."""

    kind = "shard"

    syncer: MemberName
    region: Region
    incarnation: Count
    number: Count  # of this incarnation's pulses
    state: Literal["owner", "standby", "leaving", "unable"]
    revision: Count  # of the owners table that it goes by; 0 for none
    fragments: Counts  # that it owns, or is about to
    closed: Counts  # fragments whose log it knows to be closed
    rounds: Count
    versions: Count
    open: Annotated[list[tuple[FragmentIndex, Count, Count, Seconds]], Meta(max_length=MAX_FRAGMENTS)]
    # of open rounds: fragment, answers, quorum, waited_s
    refused: Count
    bytes_up: Count
    bytes_down: Count
    crossing: Annotated[list[tuple[Region, Count, Count]], Meta(max_length=MAX_REGIONS)]
    # of these bytes: sent to and received from the servers of other regions
    record_bits: Bits
    pace: Pace  # of its rounds: so many times round.steps lie between two of them
    offer_bits: RegionBits  # that it asks for
    software: Software


class CoordinatorPulse(Message, frozen=True):
    """The leading coordinator's sign of life, twice a second. Not stored."""

    kind = "coordinator"

    coordinator: MemberName
    revision: Count  # of the bucket's key `coordinator` that names it
    finished: bool  # the run is over: whoever stands by may end
    software: Software


class Announcement(Message, frozen=True):
    """A fragment's round is open; repeated until it closes, and idempotent. Not stored."""

    kind = "round"

    fragment: FragmentIndex
    version: Count  # that the round will make
    epoch: Count
    syncer: MemberName
    remaining_s: Seconds  # as the syncer expects it; clocks differ, so never a point in time
    closing: bool  # the budget is used up: offer everything
    tokens_processed: Count  # by all learners, as far as the syncer knows
    steps: Annotated[int, Meta(ge=1, le=2**62)]  # between two rounds, as things are
    offer_bits: RegionBits  # that answers are to have; elsewhere as the settings say


class Offer(Message, frozen=True):
    """A learner's answer to a round: the outer gradient of its displacement from its base, quantised."""

    kind = "offer"

    fragment: FragmentIndex
    learner: MemberName
    incarnation: Count
    number: Annotated[int, Meta(ge=1, le=2**62)]  # of this learner's offers of this fragment, in this incarnation
    after: tuple[Count, Count]  # incarnation and number of the last own offer it knows merged; (0, 0) for none
    round: Annotated[int, Meta(ge=1, le=2**62)]  # the version that the answered round will make
    base_version: Count
    base_hash: Hash  # state hash of the base
    bits: Bits
    steps: Count  # that the displacement holds
    tokens: Count
    lost_tokens: Count  # in this run so far, of this fragment
    data: Ranges  # that the displacement holds
    body: Body

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_order(self.data)

    @property
    def members(self) -> tuple[Offer]:
        """Whose work it is: one learner's."""
        return (self,)


class Answer(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """A learner's offer as part of a combined one: all that it states but for its body."""

    learner: MemberName
    incarnation: Count
    number: Annotated[int, Meta(ge=1, le=2**62)]
    after: tuple[Count, Count]
    round: Annotated[int, Meta(ge=1, le=2**62)]
    base_version: Count
    base_hash: Hash
    steps: Count
    tokens: Count
    lost_tokens: Count
    data: Ranges

    def __post_init__(self) -> None:
        _check_order(self.data)

    @classmethod
    def of(cls, offer: Offer) -> Answer:
        """What an offer states."""
        return cls(*(getattr(offer, name) for name in cls.__struct_fields__))


class Combined(Message, frozen=True):
    """Offers of one fragment by learners of one region, merged and quantised there (``regions.merge``)."""

    kind = "combined"

    fragment: FragmentIndex
    syncer: MemberName  # who combined them
    incarnation: Count  # of the syncer
    number: Annotated[int, Meta(ge=1, le=2**62)]  # of this syncer's of this fragment, in this incarnation
    bits: Bits
    members: Annotated[list[Answer], Meta(min_length=1, max_length=MAX_MEMBERS)]  # in order of merging, by name
    body: Body

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [member.learner for member in self.members]
        if names != sorted(set(names)):
            raise ValueError(f"members: expected in order, each once, got {names[:8]}")


class Member(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """One learner's part in a merge."""

    learner: MemberName
    incarnation: Count
    number: Count
    round: Count
    base_version: Count
    steps: Count
    tokens: Count
    lost_tokens: Count
    weight: Annotated[float, Meta(ge=0, le=1e300)]
    data: Ranges

    def __post_init__(self) -> None:
        _check_order(self.data)


class Combination(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Members of a merge whose offers came as one combined offer, and which one that was."""

    syncer: MemberName
    incarnation: Count
    number: Count
    members: Annotated[list[Annotated[int, Meta(ge=0, lt=MAX_MEMBERS)]], Meta(min_length=1, max_length=MAX_MEMBERS)]
    # places in the record's members


class RolledBack(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """That a fragment went back to the state of an earlier version."""

    change: Annotated[int, Meta(ge=1, le=2**62)]  # number of the run's change that asked for it
    to_version: Count
    version: Annotated[int, Meta(ge=1, le=2**62)]  # that it made


class Record(Message, frozen=True):
    """One entry of a fragment's log.

    ``version``: a committed version. ``takeover``: a new owner's first word, which raises the epoch and makes no version.
    ``close``: the budget is used up and there was nothing left to merge, so no version is made. ``rollback``: a version that
    merges nothing, and has the state of an earlier one.
    """

    kind = "record"

    fragment: FragmentIndex
    entry: Literal["version", "takeover", "close", "rollback"]
    version: Count
    epoch: Count
    syncer: MemberName
    previous: Hash  # check of the fragment's entry before; of the genesis record for the first
    members: Annotated[list[Member], Meta(max_length=MAX_MEMBERS)]  # in order, by name
    combined: Annotated[list[Combination], Meta(max_length=MAX_MEMBERS)]
    bits: Bits
    learning_rate: Annotated[float, Meta(ge=0, le=1e6)]
    momentum: Annotated[float, Meta(ge=0, le=1)]
    tokens_merged: Count  # of this fragment, by all versions so far
    tokens_lost: Count  # of this fragment, as the learners stated so far
    state_hash: Hash  # of Theta and momentum after this entry
    closing: bool  # the last entry but for takeovers: the run's budget is used up
    committed_at_s: Seconds  # Unix time at the syncer
    quorum_s: Seconds  # from opening the round to its quorum
    round_s: Seconds  # from opening the round to the merge
    body: Body | None  # of a version: the merged outer gradient; of a rollback, in 32 bits: Theta and momentum
    rolled_back: RolledBack | None = None  # of a rollback; of all others it is not on the wire

    @property
    def makes_version(self) -> bool:
        """Whether the state after it is a version of its own."""
        return self.entry in ("version", "rollback")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.entry == "rollback") != (self.rolled_back is not None) or (self.rolled_back is not None and self.bits != 32):
            raise ValueError(f"rolled_back: {self.rolled_back} in an entry {self.entry!r} of {self.bits} bits")
        places = [place for combination in self.combined for place in combination.members]
        if len(set(places)) < len(places) or max(places, default=-1) >= len(self.members):
            raise ValueError(f"combined: names places {places[:8]} of {len(self.members)} members, each may be named once")


class Cursor(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """What of a learner the log holds: its last merged offer, and its tokens."""

    learner: MemberName
    incarnation: Count
    number: Count
    versions: Count  # that it is a member of
    tokens: Count
    lost_tokens: Count


class Keyframe(Message, frozen=True):
    """Theta, momentum and residual of a fragment after an entry of its log, so that older entries may go."""

    kind = "keyframe"

    fragment: FragmentIndex
    version: Count
    epoch: Count
    entry_hash: Hash  # check of the entry it stands after; of nothing (zeros) before genesis
    entry_sequence: Count  # of that entry in the stream; 0 before genesis
    tokens_merged: Count
    tokens_lost: Count
    cursors: Annotated[list[Cursor], Meta(max_length=MAX_MEMBERS)]
    ends: Annotated[list[tuple[ShareId, Count]], Meta(max_length=MAX_SHARES)]
    # by share of the data, in order: the batch after the last one merged
    state_hash: Hash
    closing: bool
    body: Body  # float32: Theta, momentum, residual
    rolled_back: RolledBack | None = None  # the last time; it is not on the wire where there was none


class Genesis(Message, frozen=True):
    """The run begins: which keyframes are version 0. Stored once in each region's log, fenced."""

    kind = "genesis"

    founder: MemberName
    settings_digest: Hash
    map_digest: Hash
    fragments: Annotated[list[Hash], Meta(min_length=1, max_length=MAX_FRAGMENTS)]  # by fragment: state hash
    created_at_s: Seconds


class Claim(Message, frozen=True):
    """In a run with regions: from here on the fragment's log in this region is another owner's to write.

    It stands among the heads of the fragment's entries, so that it moves their fence, and says which entry is the last one.
    """

    kind = "claim"

    fragment: FragmentIndex
    epoch: Annotated[int, Meta(ge=1, le=2**62)]
    syncer: MemberName
    entry_epoch: Count
    entry_version: Count
    entry_closing: bool
    entry_check: Hash  # of the genesis record where there is no entry
    entry_sequence: Count  # in this stream; 0 where there is no entry


class Notice(Message, frozen=True):
    """In a run with regions: an entry, and with it all that leads up to it, is committed: a majority of them holds it."""

    kind = "notice"

    fragment: FragmentIndex
    version: Count
    epoch: Count
    check: Hash  # of the entry
    sequence: Count  # of the entry in this stream


class Mark(Message, frozen=True):
    """A checkpoint of the whole run is being taken: every learner saves its state. Repeated until all have. Not stored."""

    kind = "mark"

    number: Count  # of the checkpoint
    versions: Counts  # by fragment: a learner saves its state at its first step boundary with all of them applied


class Marked(Message, frozen=True):
    """A learner has saved its state for a checkpoint of the whole run; repeated with the mark. Not stored."""

    kind = "marked"

    learner: MemberName
    number: Count
    step: Count
    versions: Counts  # by fragment: applied when the state was saved
    size_bytes: Count  # of the file
    file_hash: Hash


class StateRequest(Message, frozen=True):
    """A learner asks a peer for its optimizer's state, or for a part of it. A request of NATS, answered at once."""

    kind = "state_request"

    learner: MemberName  # who asks
    copy: Annotated[bytes, Meta(max_length=ATTEMPT_BYTES)]  # of which a part is asked for; empty: a loan is asked for
    offset: Count


class StateLoan(Message, frozen=True):
    """What a peer lends: its optimizer's state as of one of its boundaries."""

    kind = "state_loan"

    peer: MemberName
    copy: Annotated[bytes, Meta(max_length=ATTEMPT_BYTES)]  # its name; empty: it is not made yet, ask again
    step: Count
    versions: Counts  # by fragment: applied when it was made
    layout: Hash  # of names, shapes and types of its arrays
    size_bytes: Annotated[int, Meta(ge=0, le=2**40)]
    content_hash: Hash


class StatePart(Message, frozen=True):
    """A part of a loan: the frame's body has its bytes from ``offset`` on, ``PART_BYTES`` or what is left."""

    kind = "state_part"

    copy: Attempt
    offset: Count


M = TypeVar("M", bound=Message)

_FRAME = msgspec.msgpack.Decoder(
    tuple[
        Annotated[str, Meta(max_length=8)],
        int,
        Annotated[str, Meta(max_length=16)],
        Annotated[bytes, Meta(max_length=8)],
        Annotated[bytes, Meta(max_length=MAX_FRAME_BYTES)],
        Annotated[bytes, Meta(max_length=32)],
        Annotated[bytes, Meta(max_length=MAX_FRAME_BYTES)],
    ]
)
KINDS: tuple[type[Message], ...] = (
    Pulse,
    ShardPulse,
    CoordinatorPulse,
    Announcement,
    Offer,
    Combined,
    Record,
    Keyframe,
    Genesis,
    Claim,
    Notice,
    Mark,
    Marked,
    StateRequest,
    StateLoan,
    StatePart,
)
_DECODERS: dict[type[Message], Any] = {cls: msgspec.msgpack.Decoder(cls) for cls in KINDS}
_ENCODER = msgspec.msgpack.Encoder()
_MEMBER_COUNTS = ("incarnation", "number", "round", "base_version", "steps", "tokens", "lost_tokens")


def run_id(run: str, settings_digest: bytes) -> bytes:
    """The run's identity in every frame: 8 bytes of BLAKE3 over its name and its settings' digest."""
    return blake3(run.encode() + b"\0" + settings_digest).digest()[:8]


def check_of(message: Message, run: bytes) -> bytes:
    """The hash (32 bytes) that a frame of ``message`` carries; for a record, the name of that log entry."""
    return _check(message.kind, run, _encode(message))


def pack(message: Message, run: bytes, inline: bytes = b"") -> bytes:
    """The frame of ``message``."""
    fields = _encode(message)
    return _ENCODER.encode((MAGIC, VERSION, message.kind, run, fields, _check(message.kind, run, fields), inline))


def unpack(data: bytes, cls: type[M], run: bytes) -> tuple[M, bytes, bytes]:
    """The message, its check, and the body bytes in the head.

    Raises:
        FormatError: no frame, another protocol version, kind or run, or a field out of bounds.
        HashError: the fields are not what the check says.
    """
    if len(data) > MAX_FRAME_BYTES:
        raise FormatError(f"{cls.kind}: {len(data)} bytes, more than a frame's {MAX_FRAME_BYTES}")
    try:
        magic, version, kind, its_run, fields, check, inline = _FRAME.decode(data)
        if magic != MAGIC:
            raise FormatError(f"{cls.kind}: not a message of this protocol (magic {magic!r}, expected {MAGIC!r})")
        if version != VERSION:
            raise FormatError(f"{cls.kind}: protocol version {version}, expected {VERSION}; update the older member")
        if kind != cls.kind:
            raise FormatError(f"{cls.kind}: came as {kind!r}")
        if its_run != run:
            raise FormatError(f"{cls.kind}: belongs to run {its_run.hex()}, expected {run.hex()}")
        if check != _check(kind, run, fields):
            raise HashError(f"{cls.kind}: its fields do not have the hash that it states")
        message: M = _DECODERS[cls].decode(fields)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise FormatError(f"{cls.kind}: {error}") from None
    return message, check, inline


def kind_of(data: bytes) -> str | None:
    """What a frame says that it is, without any check; None if it is no frame."""
    try:
        return _FRAME.decode(data)[2] if len(data) <= MAX_FRAME_BYTES else None
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None


def members_bytes(offer: Offer | Combined) -> int:
    """How much of a record is taken by members that are merged from ``offer``."""
    size = sum(
        len(_ENCODER.encode((m.learner, *(getattr(m, name) for name in _MEMBER_COUNTS), 0.0, m.data))) for m in offer.members
    )
    if isinstance(offer, Combined):
        places = [MAX_MEMBERS - 1] * len(offer.members)
        size += len(_ENCODER.encode((offer.syncer, offer.incarnation, offer.number, places)))
    return size


def answer_bytes(offer: Offer) -> int:
    """How much of a combined offer is taken by the member that is merged from ``offer``; more than it takes of a record."""
    return len(_ENCODER.encode(Answer.of(offer)))


def describe_body(packed: bytes, content_hash: bytes, attempt: bytes) -> tuple[Body, bytes, list[bytes]]:
    """How a zstd frame travels: its description, what goes into the head, and the parts that go before it."""
    if len(packed) <= PART_BYTES:
        return Body(len(packed), content_hash, 0, attempt), packed, []
    step = PART_BYTES - ATTEMPT_BYTES
    parts = [attempt + packed[at : at + step] for at in range(0, len(packed), step)]
    return Body(len(packed), content_hash, len(parts), attempt), b"", parts


def check_body_size(body: Body, limit_bytes: int, what: str) -> None:
    """Refuse a body whose stated size or number of parts cannot be, before anything is allocated for it.

    Raises:
        FormatError: naming ``what``, the limit and what was stated.
    """
    if body.size_bytes > limit_bytes:
        raise FormatError(f"{what}: body of {body.size_bytes} bytes, at most {limit_bytes} fit its fragment")
    expected = 0 if body.size_bytes <= PART_BYTES else -(-body.size_bytes // (PART_BYTES - ATTEMPT_BYTES))
    if body.parts != expected:
        raise FormatError(f"{what}: body of {body.size_bytes} bytes in {body.parts} parts, expected {expected}")


def join_parts(body: Body, inline: bytes, parts: Sequence[bytes], what: str) -> bytes:
    """The zstd frame from the head's bytes or the parts' (without their attempt).

    Raises:
        FormatError: the sizes do not add up to what the head says.
    """
    joined = b"".join(parts) if body.parts else inline
    if len(joined) != body.size_bytes:
        raise FormatError(f"{what}: body of {len(joined)} bytes, its head says {body.size_bytes}")
    return joined


def _check_order(ranges: Sequence[Range]) -> None:
    for (share, first, count), (next_share, next_first, _) in pairwise(ranges):
        if (share, first + count) >= (next_share, next_first):
            raise ValueError(f"data: range {next_first} of share {next_share} touches or precedes the one before")


def _encode(message: Message) -> bytes:
    if isinstance(message, Record | Keyframe) and message.rolled_back is None:
        return _ENCODER.encode(msgspec.structs.astuple(message)[:-1])
    return _ENCODER.encode(message)


def _check(kind: str, run: bytes, fields: bytes) -> bytes:
    return blake3(f"{MAGIC}{VERSION}{kind}\0".encode() + run + fields).digest()
