"""Every message there and back, and nothing but a MessageError for whatever else comes from the wire."""

from __future__ import annotations

import math
import random
import struct
from typing import Any

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from tests.made.message_examples import EXAMPLES, MESSAGES

from diloco.errors import FormatError, HashError, MessageError
from diloco.wire import framing, subjects
from diloco.wire.body import ATTEMPT_BYTES, PART_BYTES, Body, body_pieces, check_body_size, describe_body
from diloco.wire.control import Announcement, CoordinatorHeartbeat, Heartbeat, PresenceSummary, ShardHeartbeat
from diloco.wire.entries import Claim, CommitNotice, Genesis, Keyframe, Record, Repaired, RolledBack
from diloco.wire.fields import Range
from diloco.wire.framing import MAX_FRAME_BYTES, Message
from diloco.wire.offers import Answer, Offer, RegionalOffer, answer_bytes, members_bytes

RUN = b"run-id.."
KINDS = list(MESSAGES)
ANY = st.sampled_from(KINDS).flatmap(lambda cls: MESSAGES[cls])


def framed(
    fields: bytes, kind: str, *, magic: object = "DLC", version: object = 2, run: bytes = RUN, inline: object = b""
) -> bytes:
    """A frame with a right check around any fields."""
    check = blake3(f"DLC2{kind}\0".encode() + run + fields).digest()
    return msgspec.msgpack.encode([magic, version, kind, run, fields, check, inline])


def fields_of(message: Message, **changes: Any) -> bytes:
    """The message's fields with some of them replaced by whatever, in or out of bounds."""
    values = [changes.pop(name, getattr(message, name)) for name in message.__struct_fields__]
    assert not changes
    return msgspec.msgpack.encode(values)


def test_all_kinds_are_covered() -> None:
    assert set(KINDS) == set(EXAMPLES) == set(Message.__subclasses__())
    assert len({cls.kind for cls in KINDS}) == len(KINDS)


@given(ANY, st.binary(max_size=50))
def test_there_and_back(message: Message, inline: bytes) -> None:
    frame = framing.pack(message, RUN, inline)
    again, check, body = framing.unpack(frame, type(message), RUN)
    assert again == message
    assert type(again) is type(message)
    assert body == inline
    assert check == framing.hash_of(message, RUN) == msgspec.msgpack.decode(frame)[5]


@pytest.mark.parametrize("cls", KINDS)
def test_a_frame_cut_anywhere_is_refused(cls: type[Message]) -> None:
    frame = framing.pack(EXAMPLES[cls], RUN, b"body")
    for length in range(len(frame)):
        with pytest.raises(MessageError):
            framing.unpack(frame[:length], cls, RUN)
    with pytest.raises(MessageError):
        framing.unpack(frame + b"\0", cls, RUN)


@pytest.mark.parametrize("cls", KINDS)
def test_a_flipped_bit_anywhere_before_the_body_is_refused(cls: type[Message]) -> None:
    frame = framing.pack(EXAMPLES[cls], RUN)
    for position in range(len(frame) - 2):  # the two last bytes are the empty body, which has a hash of its own
        for bit in range(8):
            damaged = bytearray(frame)
            damaged[position] ^= 1 << bit
            with pytest.raises(MessageError):
                framing.unpack(bytes(damaged), cls, RUN)


@pytest.mark.parametrize("cls", KINDS)
def test_damaged_fields_with_a_right_check_are_a_message_or_refused(cls: type[Message]) -> None:
    # a sender that computes the check over nonsense, rather than a damaged line
    draw = random.Random(cls.kind)
    fields = fields_of(EXAMPLES[cls])
    for _ in range(2000):
        damaged = bytearray(fields)
        for _ in range(draw.randint(1, 3)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        try:
            message, _, _ = framing.unpack(framed(bytes(damaged), cls.kind), cls, RUN)
        except MessageError:
            continue
        assert framing.unpack(framing.pack(message, RUN), cls, RUN)[0] == message


@given(st.sampled_from(KINDS), st.binary(max_size=100))
def test_any_bytes_are_refused(cls: type[Message], data: bytes) -> None:
    with pytest.raises(MessageError):
        framing.unpack(data, cls, RUN)
    with pytest.raises(MessageError):
        framing.unpack(framed(data, cls.kind), cls, RUN)


def test_no_flood_of_nesting_gets_through() -> None:
    nested = b"\x91" * 100_000 + b"\xc0"
    for data in (nested, framed(nested, "round")):
        with pytest.raises(MessageError):
            framing.unpack(data, Announcement, RUN)


@pytest.mark.parametrize(
    "claim", [b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff"]
)
def test_lengths_that_are_only_claimed_are_refused(claim: bytes) -> None:
    # as the frame, as its fields, as a list within them, and as the inline body
    with pytest.raises(FormatError):
        framing.unpack(claim, Genesis, RUN)
    with pytest.raises(FormatError):
        framing.unpack(framed(claim, "genesis"), Genesis, RUN)
    fields = fields_of(EXAMPLES[Genesis])
    at = fields.index(b"\x91\xc4\x200")  # its list of one fragment
    with pytest.raises(FormatError):
        framing.unpack(framed(fields[:at] + claim + fields[at + 1 :], "genesis"), Genesis, RUN)
    frame = framing.pack(EXAMPLES[Genesis], RUN)
    assert frame.endswith(b"\xc4\0")
    with pytest.raises(FormatError):
        framing.unpack(frame[:-2] + claim, Genesis, RUN)


def test_a_frame_has_a_largest_size() -> None:
    message = EXAMPLES[Announcement]
    overhead = len(framing.pack(message, RUN, bytes(100_000))) - 100_000
    fits = MAX_FRAME_BYTES - overhead
    assert len(framing.unpack(framing.pack(message, RUN, bytes(fits)), Announcement, RUN)[2]) == fits
    with pytest.raises(FormatError, match=f"{MAX_FRAME_BYTES + 1} bytes, more than a frame's {MAX_FRAME_BYTES}"):
        framing.unpack(framing.pack(message, RUN, bytes(fits + 1)), Announcement, RUN)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"magic": "XYZ"}, "magic 'XYZ', expected 'DLC'"),
        ({"version": 3}, "protocol version 3, expected 2; update the older member"),
        ({"version": "1"}, "Expected `int`"),
        ({"kind": "offer"}, "round: came as 'offer'"),
        ({"run": b"another."}, f"belongs to run {b'another.'.hex()}, expected {RUN.hex()}"),
        ({"inline": None}, "Expected `bytes`"),
    ],
)
def test_what_is_not_ours_is_refused_by_name(changes: dict[str, Any], expected: str) -> None:
    values = {"kind": "round"} | changes
    with pytest.raises(FormatError, match=expected):
        framing.unpack(framed(fields_of(EXAMPLES[Announcement]), **values), Announcement, RUN)


def test_a_message_of_another_run_does_not_pass_by_its_check() -> None:
    # the check binds the run: a frame cannot be re-labelled
    frame = bytearray(framing.pack(EXAMPLES[Announcement], b"another."))
    at = frame.index(b"another.")
    frame[at : at + 8] = RUN
    with pytest.raises(HashError, match="round: its fields do not have the hash"):
        framing.unpack(bytes(frame), Announcement, RUN)


@pytest.mark.parametrize(
    ("cls", "changes"),
    [
        (Announcement, {"fragment": -1}),
        (Announcement, {"fragment": 4096}),
        (Announcement, {"version": 2**62 + 1}),
        (Announcement, {"version": 2**63 + 5}),
        (Announcement, {"version": 1.5}),
        (Announcement, {"syncer": ""}),
        (Announcement, {"syncer": "Ann"}),
        (Announcement, {"syncer": "a.b"}),
        (Announcement, {"syncer": "a\n"}),
        (Announcement, {"syncer": "-a"}),
        (Announcement, {"syncer": "a" * 49}),
        (Announcement, {"remaining_s": -0.5}),
        (Announcement, {"remaining_s": 1e13}),
        (Announcement, {"remaining_s": math.nan}),
        (Announcement, {"remaining_s": math.inf}),
        (Announcement, {"closing": 1}),
        (Announcement, {"steps": 0}),
        (Announcement, {"offer_bits": [["us", 5]]}),
        (Announcement, {"offer_bits": [["Us", 4]]}),
        (Announcement, {"offer_bits": [["us", 4]] * 65}),
        (Heartbeat, {"loss": math.nan}),
        (Heartbeat, {"loss": -math.inf}),
        (Heartbeat, {"step_s": math.nan}),
        (Heartbeat, {"state": "asleep"}),
        (Heartbeat, {"versions": [0] * 4097}),
        (Heartbeat, {"steps": [-1]}),
        (Heartbeat, {"trained": [[0, 0]]}),
        (ShardHeartbeat, {"state": "asleep"}),
        (ShardHeartbeat, {"revision": -1}),
        (ShardHeartbeat, {"region": "Us"}),
        (ShardHeartbeat, {"region": "u" * 17}),
        (ShardHeartbeat, {"fragments": [0] * 4097}),
        (ShardHeartbeat, {"closed": [-1]}),
        (ShardHeartbeat, {"open": [[4096, 1, 1, 0.5]]}),
        (ShardHeartbeat, {"open": [[1, 1, 1]]}),
        (ShardHeartbeat, {"open": [[1, 1, 1, math.nan]]}),
        (ShardHeartbeat, {"open": [[1, 1, 1, math.inf]]}),
        (ShardHeartbeat, {"record_bits": 3}),
        (ShardHeartbeat, {"pace": 0.5}),
        (ShardHeartbeat, {"pace": 17.0}),
        (ShardHeartbeat, {"offer_bits": [["us", 4, 4]]}),
        (PresenceSummary, {"number": 0}),
        (PresenceSummary, {"whole": 1}),
        (PresenceSummary, {"learners": [["Ann", 0.5]]}),
        (PresenceSummary, {"learners": [["ann"]]}),
        (PresenceSummary, {"learners": [["ann", -0.5]]}),
        (PresenceSummary, {"learners": [["ann", 1e13]]}),
        (PresenceSummary, {"learners": [["ann", math.nan]]}),
        (PresenceSummary, {"learners": [["ann", math.inf]]}),
        (PresenceSummary, {"learners": [["ann", 0.5]] * 4097}),
        (CoordinatorHeartbeat, {"coordinator": "A"}),
        (CoordinatorHeartbeat, {"revision": -1}),
        (CoordinatorHeartbeat, {"finished": 1}),
        (Offer, {"number": 0}),
        (Offer, {"round": 0}),
        (Offer, {"after": [1]}),
        (Offer, {"base_hash": b"b" * 31}),
        (Offer, {"base_hash": b"b" * 33}),
        (Offer, {"base_hash": "b" * 32}),
        (Offer, {"bits": 5}),
        (Offer, {"body": None}),
        (Offer, {"data": [[2**14, 0, 1]]}),
        (Offer, {"data": [[0, 0, 0]]}),
        (Offer, {"data": [[0, 0, 4], [0, 4, 1]]}),
        (Offer, {"data": [[0, 0, 4], [0, 2, 1]]}),
        (Offer, {"data": [[1, 0, 4], [0, 9, 1]]}),
        (Offer, {"data": [[share, 0, 1] for share in range(65)]}),
        (Offer, {"body": [2**40 + 1, b"c" * 32, 0, b"attempt."]}),
        (Offer, {"body": [1, b"c" * 32, 2**22 + 1, b"attempt."]}),
        (Offer, {"body": [1, b"c" * 32, 0, b"attempt"]}),
        (Offer, {"body": [1, b"c" * 32, 0, b"attempt.", 1]}),
        (Record, {"entry": "erase"}),
        (Record, {"learning_rate": math.nan}),
        (Record, {"learning_rate": -0.1}),
        (Record, {"momentum": 1.1}),
        (Record, {"members": [["ann", 1, 2, 4, 3, 5, 6, 7, math.nan, []]]}),
        (Record, {"members": [["ann", 1, 2, 4, 3, 5, 6, 7, math.inf, []]]}),
        (Record, {"members": [["ann", 1, 2, 4, 3, 5, 6, 7, -1.0, []]]}),
        (Record, {"members": [["ann", 1, 2, 4, 3, 5, 6, 7, 1.0]]}),
        (Record, {"members": [["ann", 1, 2, 4, 3, 5, 6, 7, 1.0, [[0, 0, 4], [0, 4, 1]]]]}),
        (Record, {"members": [["ann", 1, 2, 4, 3, 5, 6, 7, 1.0, []]] * 4097}),
        (Keyframe, {"cursors": [["ann", 1, 2, 3, 4]]}),
        (Keyframe, {"cursors": [["ann", 1, 2, 3, 4, 5]] * 4097}),
        (Keyframe, {"ends": [[2**14, 1]]}),
        (Keyframe, {"ends": [[1, -1]]}),
        (Genesis, {"fragments": []}),
        (Genesis, {"fragments": [b"0" * 32] * 4097}),
        (Genesis, {"fragments": [b"0" * 31]}),
        (Claim, {"fragment": 4096}),
        (Claim, {"epoch": 0}),
        (Claim, {"entry_hash": b"short"}),
        (CommitNotice, {"sequence": -1}),
        (CommitNotice, {"entry_hash": b""}),
        (Genesis, {"founder": "ann\0"}),
    ],
)
def test_a_field_out_of_bounds_is_refused(cls: type[Message], changes: dict[str, Any]) -> None:
    framing.unpack(framed(fields_of(EXAMPLES[cls]), cls.kind), cls, RUN)
    with pytest.raises(FormatError, match=f"^{cls.kind}: "):
        framing.unpack(framed(fields_of(EXAMPLES[cls], **changes), cls.kind), cls, RUN)


@pytest.mark.parametrize("cls", KINDS)
def test_a_field_too_many_or_too_few_is_refused(cls: type[Message]) -> None:
    absent = ("rolled_back", "repaired", "parts", "failure")  # last fields that may be
    values = [getattr(EXAMPLES[cls], name) for name in EXAMPLES[cls].__struct_fields__ if name not in absent]
    for wrong in (values[:-1], [*values, 1]):
        with pytest.raises(FormatError):
            framing.unpack(framed(msgspec.msgpack.encode(wrong), cls.kind), cls, RUN)


def test_text_that_is_no_unicode_is_refused() -> None:
    fields = fields_of(EXAMPLES[Announcement]).replace(b"syncer-0", b"syncer-\xff")
    with pytest.raises(FormatError):
        framing.unpack(framed(fields, "round"), Announcement, RUN)
    frame = framing.pack(EXAMPLES[Announcement], RUN).replace(b"DLC", b"D\xffC")
    with pytest.raises(FormatError):
        framing.unpack(frame, Announcement, RUN)


def test_single_precision_is_not_finite_either() -> None:
    fields = fields_of(EXAMPLES[Announcement])
    at = fields.index(b"\xcb" + struct.pack(">d", 0.25))
    for value in (math.nan, math.inf):
        with pytest.raises(FormatError):
            framing.unpack(
                framed(fields[:at] + b"\xca" + struct.pack(">f", value) + fields[at + 9 :], "round"), Announcement, RUN
            )


def test_a_run_is_its_name_and_its_settings() -> None:
    assert framing.run_id("a", b"s" * 32) == blake3(b"a\0" + b"s" * 32).digest()[:8]
    assert len({framing.run_id(name, digest * 32) for name in ("a", "b") for digest in (b"s", b"t")}) == 4


@pytest.mark.parametrize("size", [0, 1, PART_BYTES])
def test_a_body_up_to_a_part_goes_into_the_head(size: int) -> None:
    packed = bytes(size)
    body, inline, parts = describe_body(packed, b"h" * 32, b"attempt.")
    assert (body, inline, parts) == (Body(size, b"h" * 32, 0, b"attempt."), packed, [])
    check_body_size(body, size, "test")
    assert body_pieces(body, inline, [], "test") == [packed]


@pytest.mark.parametrize(
    ("size", "count"),
    [
        (PART_BYTES + 1, 2),
        (2 * (PART_BYTES - ATTEMPT_BYTES), 2),
        (2 * (PART_BYTES - ATTEMPT_BYTES) + 1, 3),
    ],
)
def test_a_larger_body_goes_in_parts_that_name_their_attempt(size: int, count: int) -> None:
    packed = random.Random(size).randbytes(size)
    body, inline, parts = describe_body(packed, b"h" * 32, b"attempt.")
    assert (body.size_bytes, body.parts, inline, len(parts)) == (size, count, b"", count)
    assert all(part.startswith(b"attempt.") and len(part) <= PART_BYTES for part in parts)
    check_body_size(body, size, "test")
    contents = [part[ATTEMPT_BYTES:] for part in parts]
    assert b"".join(body_pieces(body, b"ignored", contents, "test")) == packed
    with pytest.raises(FormatError, match=f"test: body of {size - len(contents[-1])} bytes, its head says {size}"):
        body_pieces(body, b"", contents[:-1], "test")


@pytest.mark.parametrize(
    ("size", "parts", "expected"),
    [
        (101, 0, "test: body of 101 bytes, at most 100 fit its fragment"),
        (2**40, 0, "at most 100 fit"),
        (100, 1, "test: body of 100 bytes in 1 parts, expected 0"),
        (100, 2**22, "expected 0"),
    ],
)
def test_a_size_that_cannot_be_is_refused_before_anything_is_allocated(size: int, parts: int, expected: str) -> None:
    with pytest.raises(FormatError, match=expected):
        check_body_size(Body(size, b"h" * 32, parts, b"attempt."), 100, "test")


@pytest.mark.parametrize("parts", [0, 1, 3])
def test_a_number_of_parts_that_cannot_be_is_refused(parts: int) -> None:
    body = Body(PART_BYTES + 1, b"h" * 32, parts, b"attempt.")
    with pytest.raises(FormatError, match=f"in {parts} parts, expected 2"):
        check_body_size(body, 10 * PART_BYTES, "test")


def test_an_inline_body_of_another_size_is_refused() -> None:
    with pytest.raises(FormatError, match="test: body of 2 bytes, its head says 3"):
        body_pieces(Body(3, b"h" * 32, 0, b"attempt."), b"ab", [], "test")


def test_members_of_a_combined_offer_are_named_in_order_and_once() -> None:
    combined = EXAMPLES[RegionalOffer]
    assert isinstance(combined, RegionalOffer)
    ann, bob = combined.members
    for members in ([bob, ann], [ann, ann], []):
        with pytest.raises(FormatError, match=r"members|length >= 1"):
            framing.unpack(framed(fields_of(combined, members=members), "regional_offer"), RegionalOffer, RUN)


@pytest.mark.parametrize("places", [[1], [0, 0], []])
def test_a_record_says_once_at_most_of_each_of_its_members_how_it_came(places: list[int]) -> None:
    combination = ("syncer-1", 5, 6, places)
    with pytest.raises(FormatError, match=r"regional_offers|length >= 1"):
        framing.unpack(framed(fields_of(EXAMPLES[Record], regional_offers=[combination]), "record"), Record, RUN)


def large_offer(learner: str, data: list[Range]) -> Offer:
    body = Body(0, bytes(32), 0, bytes(8))
    return Offer(0, learner, 2**62, 2**62, (0, 0), 1, 0, bytes(32), 4, 2**62, 2**62, 2**62, data, body)


def test_what_fits_a_combined_offer_fits_a_record() -> None:
    # so that no regional offer is too large to be merged
    data = [(share, 2**62 - 2**32, 2**32) for share in range(2**14 - 64, 2**14)]
    for count in (1, 3, 300):
        for ranges in ([], data):
            offers = [large_offer(f"{i:048}", ranges) for i in range(count)]
            combined = RegionalOffer(0, "s" * 48, 2**62, 2**62, 4, [Answer.of(offer) for offer in offers], offers[0].body)
            assert members_bytes(combined) <= sum(map(answer_bytes, offers)) + 128


def test_subjects_say_what_they_name() -> None:
    run = subjects.Subjects("r")
    for head in (run.record(12), run.keyframe(12), run.offer(12, "ann"), run.regional_offer(12, "syncer-0")):
        assert subjects.is_head(head)
        assert subjects.fragment_of(head) == 12
    assert subjects.sender_of(run.offer(12, "ann")) == "ann"
    assert subjects.sender_of(run.regional_offer(12, "syncer-0")) == "syncer-0"
    assert subjects.sender_of(run.record(12)) is None
    parts = [
        subjects.log_part(run.record(12), b"attempt.", 3),
        subjects.log_part(run.keyframe(12), b"attempt.", 3),
        subjects.offer_part(run.offer(12, "ann"), 3),
        subjects.offer_part(run.regional_offer(12, "ann"), 3),
    ]
    for part in parts:
        assert not subjects.is_head(part)
        assert subjects.fragment_of(part) == 12
        assert part.endswith(".3")
    assert len(set(parts)) == 4


@pytest.mark.parametrize("index", ["", "x", "-1", "01", "1e3", "1234567890", "٣"])
def test_a_fragment_is_named_in_plain_decimal_only(index: str) -> None:
    assert subjects.fragment_of(subjects.Subjects("r").record(index)) is None


@pytest.mark.parametrize("subject", ["diloco.r.fragment.1.head.head", "diloco.r.fragment.1.x.head", "diloco.r.delta.1.head"])
def test_a_head_beside_the_exact_subject_is_none(subject: str) -> None:
    assert not subjects.is_head(subject)


BACK = RolledBack(5, 2, 4)


@pytest.mark.parametrize("cls", [Record, Keyframe])
def test_where_nothing_went_back_nothing_of_it_travels(cls: type[Message]) -> None:
    plain: Any = EXAMPLES[cls]
    changes = {"rolled_back": BACK} | ({"entry": "rollback", "bits": 32} if cls is Record else {})
    back = msgspec.structs.replace(plain, **changes)
    lengths = [len(msgspec.msgpack.decode(msgspec.msgpack.decode(framing.pack(m, RUN))[4])) for m in (plain, back)]
    assert [length - lengths[0] for length in lengths] == [0, 1]
    if cls is Record:
        repaired = msgspec.structs.replace(back, entry="repair", repaired=Repaired(9, [(0, 7)]))
        assert framing.unpack(framing.pack(repaired, RUN), cls, RUN)[0] == repaired
    for message in (plain, back):
        assert framing.unpack(framing.pack(message, RUN), cls, RUN)[0] == message


@pytest.mark.parametrize("changes", [{"entry": "rollback", "bits": 32}, {"rolled_back": BACK, "bits": 32},
                                     {"entry": "rollback", "rolled_back": BACK},
                                     {"entry": "repair", "rolled_back": BACK, "bits": 32},
                                     {"entry": "repair", "repaired": Repaired(1, []), "bits": 32},
                                     {"entry": "rollback", "rolled_back": BACK, "repaired": Repaired(1, []),
                                      "bits": 32}])  # fmt: skip
def test_a_rollback_says_what_it_came_to_in_32_bits_and_nothing_else_does(changes: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match=r"rolled_back: |repaired: "):
        framing.unpack(framed(fields_of(EXAMPLES[Record], **changes), "record"), Record, RUN)
