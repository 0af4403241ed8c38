"""Messages of each kind: how to draw them, and an example with a value in every field."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st
from tests.made import island_messages

from diloco.core.tensors.ranges import normal
from diloco.wire.body import Body
from diloco.wire.control import (
    Announcement,
    CoordinatorHeartbeat,
    Gauges,
    Heartbeat,
    MarkerAnswer,
    MarkerDeclined,
    PresenceSummary,
    Sample,
    SenderReport,
    ShardHeartbeat,
    SnapshotMarker,
    StateLoan,
    StatePart,
    StateRequest,
    ValidationLoss,
)
from diloco.wire.entries import Claim, CommitNotice, Cursor, Genesis, Keyframe, Record, Repaired, RolledBack
from diloco.wire.framing import Message
from diloco.wire.offers import Answer, MergeMember, Offer, RegionalMembers, RegionalOffer

COUNT = st.integers(0, 2**62)
COUNTS = st.lists(COUNT, max_size=4)
AXES = st.lists(COUNT, max_size=4)
REGION = st.sampled_from(["", "us", "ap_2"])
FRAGMENT = st.integers(0, 4095)
NAME = st.from_regex(r"\A[a-z0-9][a-z0-9_-]{0,47}\Z")
HASH = st.binary(min_size=32, max_size=32)
SECONDS = st.floats(0, 1e12)
BITS = st.sampled_from([1, 2, 4, 8, 16, 32])
REGION_BITS = st.lists(st.tuples(st.sampled_from(["us", "ap_2"]), BITS), max_size=3)
BODY = st.builds(Body, st.integers(0, 2**40), HASH, st.integers(0, 2**22), st.binary(min_size=8, max_size=8))
SHARE = st.integers(0, 2**14 - 1)
RANGES = st.lists(st.tuples(SHARE, st.integers(0, 2**40), st.integers(1, 2**40)), max_size=4).map(normal)
MEMBER = st.builds(MergeMember, NAME, *[COUNT] * 7, st.floats(0, 1e300), RANGES)
CURSOR = st.builds(Cursor, NAME, *[COUNT] * 6)
NUMBER = st.integers(1, 2**62)
SOFTWARE = st.sampled_from(["", "0.1.0", "1.0rc1+local-2"])
ANSWER = st.builds(Answer, NAME, COUNT, NUMBER, st.tuples(COUNT, COUNT), NUMBER, COUNT, HASH, COUNT, COUNT, COUNT, RANGES)
ANSWERS = st.lists(ANSWER, min_size=1, max_size=3, unique_by=lambda answer: answer.learner).map(
    lambda answers: sorted(answers, key=lambda answer: answer.learner)
)


def some_combined(record: Record) -> st.SearchStrategy[Record]:
    """The record, or one of which some members came as one regional offer."""
    count = len(record.members)
    if not count:
        return st.just(record)
    places = st.tuples(st.permutations(range(count)), st.integers(1, count)).map(lambda drawn: drawn[0][: drawn[1]])
    combination = st.builds(RegionalMembers, NAME, COUNT, COUNT, places)
    return st.lists(combination, max_size=1).map(lambda combined: msgspec.structs.replace(record, regional_offers=combined))


ROLLED_BACK = st.builds(RolledBack, NUMBER, COUNT, NUMBER)


def some_rolled_back(record: Record) -> st.SearchStrategy[Record]:
    """The record, or a rollback that is otherwise like it."""
    back = st.builds(lambda made: msgspec.structs.replace(record, entry="rollback", bits=32, rolled_back=made), ROLLED_BACK)
    repaired = st.builds(Repaired, COUNT, st.lists(st.tuples(SHARE, COUNT), max_size=3))
    repair = st.builds(lambda one, two: msgspec.structs.replace(one, entry="repair", repaired=two), back, repaired)
    return st.just(record) | back | repair


MESSAGES: dict[type[Message], st.SearchStrategy[Any]] = {
    Heartbeat: st.builds(
        Heartbeat,
        NAME,
        REGION,
        COUNT,
        st.sampled_from(["learner", "evaluator"]),
        st.sampled_from(["starting", "stepping", "waiting", "recovering", "closing", "leaving", "left", "finished"]),
        st.booleans(),
        COUNT,
        COUNT,
        SECONDS,
        st.none() | st.floats(allow_nan=False, allow_infinity=False),
        COUNTS,
        COUNTS,
        COUNTS,
        COUNTS,
        RANGES,
        COUNT,
        SECONDS,
        SECONDS,
        COUNT,
        COUNT,
        COUNT,
        SOFTWARE,
        st.none() | st.text(max_size=500),
    ),
    SenderReport: st.builds(
        SenderReport,
        NAME,
        st.lists(
            st.tuples(
                st.text(max_size=64),
                st.sampled_from(["message", "offer", "missed", "heartbeat", "in_vain"]),
                st.text(max_size=32),
                NUMBER,
            ),
            max_size=3,
        ),
    ),
    ValidationLoss: st.builds(ValidationLoss, NAME, st.floats(allow_nan=False)),
    Gauges: st.builds(
        Gauges,
        NAME,
        st.none() | SECONDS,
        st.none() | SECONDS,
        SECONDS,
        COUNT,
        st.none() | COUNT,
        st.text(max_size=100),
        st.text(max_size=100),
    ),
    ShardHeartbeat: st.builds(
        ShardHeartbeat,
        NAME,
        REGION,
        COUNT,
        COUNT,
        st.sampled_from(["owner", "standby", "leaving", "unable"]),
        COUNT,
        COUNTS,
        COUNTS,
        COUNT,
        COUNT,
        st.lists(st.tuples(FRAGMENT, COUNT, COUNT, SECONDS), max_size=3),
        COUNT,
        COUNT,
        COUNT,
        st.lists(st.tuples(REGION, COUNT, COUNT), max_size=3),
        BITS,
        st.floats(1, 16),
        REGION_BITS,
        SOFTWARE,
    ),
    CoordinatorHeartbeat: st.builds(CoordinatorHeartbeat, NAME, COUNT, st.booleans(), SOFTWARE),
    Announcement: st.builds(
        Announcement, FRAGMENT, COUNT, COUNT, NAME, SECONDS, st.booleans(), COUNT, st.integers(1, 2**62), REGION_BITS
    ),
    Offer: st.builds(
        Offer,
        FRAGMENT,
        NAME,
        COUNT,
        st.integers(1, 2**62),
        st.tuples(COUNT, COUNT),
        st.integers(1, 2**62),
        COUNT,
        HASH,
        BITS,
        COUNT,
        COUNT,
        COUNT,
        RANGES,
        BODY,
    ),
    RegionalOffer: st.builds(RegionalOffer, FRAGMENT, NAME, COUNT, NUMBER, BITS, ANSWERS, BODY),
    Record: st.builds(
        Record,
        FRAGMENT,
        st.sampled_from(["version", "takeover", "close"]),
        COUNT,
        COUNT,
        NAME,
        HASH,
        st.lists(MEMBER, max_size=3),
        st.just([]),
        BITS,
        st.floats(0, 1e6),
        st.floats(0, 1),
        COUNT,
        COUNT,
        HASH,
        st.booleans(),
        SECONDS,
        SECONDS,
        SECONDS,
        st.none() | BODY,
    )
    .flatmap(some_combined)
    .flatmap(some_rolled_back),
    Keyframe: st.builds(
        Keyframe,
        FRAGMENT,
        COUNT,
        COUNT,
        HASH,
        COUNT,
        COUNT,
        COUNT,
        st.lists(CURSOR, max_size=3),
        st.lists(st.tuples(SHARE, COUNT), max_size=3),
        HASH,
        st.booleans(),
        BODY,
        st.none() | ROLLED_BACK,
    ),
    Genesis: st.builds(Genesis, NAME, HASH, HASH, st.lists(HASH, min_size=1, max_size=3), SECONDS),
    Claim: st.builds(Claim, FRAGMENT, st.integers(1, 2**62), NAME, COUNT, COUNT, st.booleans(), HASH, COUNT),
    CommitNotice: st.builds(CommitNotice, FRAGMENT, COUNT, COUNT, HASH, COUNT),
    PresenceSummary: st.builds(
        PresenceSummary, NAME, COUNT, NUMBER, st.booleans(), st.lists(st.tuples(NAME, SECONDS), max_size=4)
    ),
    Sample: st.builds(Sample, NAME, COUNTS, st.text(max_size=20)),
    SnapshotMarker: st.builds(SnapshotMarker, COUNT, COUNTS),
    MarkerDeclined: st.builds(MarkerDeclined, NAME, COUNT, st.sampled_from(["keeps_own", "not_saved"]), st.text(max_size=1000)),
    MarkerAnswer: st.builds(
        MarkerAnswer, NAME, COUNT, COUNT, COUNTS, COUNT, HASH, st.none() | st.lists(st.tuples(COUNT, HASH))
    ),
    StateRequest: st.builds(StateRequest, NAME, st.binary(max_size=8), COUNT, AXES, AXES),
    StateLoan: st.builds(StateLoan, NAME, st.binary(max_size=8), COUNT, COUNTS, HASH, st.integers(0, 2**40), HASH),
    StatePart: st.builds(StatePart, st.binary(min_size=8, max_size=8), COUNT, AXES, HASH),
}
MESSAGES |= island_messages.strategies(ANSWER, CURSOR, MESSAGES[Record], ROLLED_BACK)
# an example of each kind that has a value in every field
EXAMPLES: dict[type[Message], Message] = {
    Heartbeat: Heartbeat(
        "ann",
        "eu",
        1,
        "learner",
        "stepping",
        False,
        2,
        3,
        0.5,
        1.25,
        [1],
        [2],
        [3],
        [4],
        [(0, 8, 2)],
        3,
        5.0,
        6.0,
        7,
        8,
        9,
        "0.1.0",
        "OSError: gone",
    ),
    ShardHeartbeat: ShardHeartbeat(
        "syncer-0",
        "us",
        12,
        34,
        "owner",
        5,
        [0, 2],
        [1],
        3,
        4,
        [(2, 1, 2, 0.5)],
        5,
        6,
        7,
        [("eu", 4, 5)],
        8,
        1.5,
        [("eu", 4)],
        "0.1.0",
    ),
    CoordinatorHeartbeat: CoordinatorHeartbeat("coordinator", 1, False, "0.1.0"),
    Announcement: Announcement(3, 7, 1, "syncer-0", 0.25, False, 9, 24, [("eu", 8)]),
    Offer: Offer(3, "ann", 1, 2, (1, 1), 4, 3, b"b" * 32, 4, 5, 6, 7, [(2, 9, 5)], Body(8, b"c" * 32, 0, b"attempt.")),
    RegionalOffer: RegionalOffer(
        3,
        "syncer-0",
        1,
        2,
        4,
        [
            Answer("ann", 3, 4, (3, 3), 5, 4, b"b" * 32, 6, 7, 8, [(2, 9, 5)]),
            Answer("bob", 3, 4, (3, 3), 5, 4, b"b" * 32, 6, 7, 8, [(3, 9, 5)]),
        ],
        Body(8, b"c" * 32, 0, b"attempt."),
    ),
    Record: Record(
        fragment=3,
        entry="version",
        version=4,
        epoch=1,
        syncer="syncer-0",
        previous=b"p" * 32,
        members=[MergeMember("ann", 1, 2, 4, 3, 5, 6, 7, 8.5, [(2, 9, 5)])],
        regional_offers=[RegionalMembers("syncer-1", 5, 6, [0])],
        bits=4,
        learning_rate=0.5,
        momentum=0.9,
        tokens_merged=10,
        tokens_lost=11,
        state_hash=b"s" * 32,
        closing=False,
        committed_at_s=12.0,
        quorum_s=0.5,
        round_s=0.75,
        body=Body(8, b"c" * 32, 0, b"attempt."),
    ),
    Keyframe: Keyframe(
        3,
        4,
        1,
        b"e" * 32,
        9,
        10,
        11,
        [Cursor("ann", 1, 2, 3, 4, 5, 6)],
        [(2, 14)],
        b"s" * 32,
        False,
        Body(8, b"c" * 32, 0, b"attempt."),
    ),
    Genesis: Genesis("ann", b"s" * 32, b"m" * 32, [b"0" * 32], 2.0),
    Claim: Claim(3, 2, "syncer-1", 1, 4, False, b"e" * 32, 9),
    CommitNotice: CommitNotice(3, 4, 1, b"e" * 32, 9),
    SenderReport: SenderReport("syncer-1", [("ann", "offer", "claim", 3)]),
    ValidationLoss: ValidationLoss("ann", 2.125),
    Gauges: Gauges("ann", 0.0125, 1.5, 0.75, 2**30, 2**34, "NVIDIA H100", "node-7"),
    PresenceSummary: PresenceSummary("syncer-1", 1, 2, True, [("ann", 0.25), ("bob", 29.5)]),
    Sample: Sample("judge", [1, 2], "x\u00e9\n"),
    SnapshotMarker: SnapshotMarker(7, [1, 2]),
    MarkerDeclined: MarkerDeclined("ann", 7, "not_saved", "a full disk"),
    MarkerAnswer: MarkerAnswer("ann", 7, 8, [1, 2], 9, b"f" * 32),
    StateRequest: StateRequest("ann", b"copy....", 10, [11, 12], [13, 14]),
    StateLoan: StateLoan("bob", b"copy....", 11, [1, 2], b"l" * 32, 12, b"c" * 32),
    StatePart: StatePart(b"copy....", 13, [14, 15], b"c" * 32),
}
EXAMPLES |= island_messages.examples(EXAMPLES[Record])
