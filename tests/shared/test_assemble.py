"""Bodies from parts: whole, in any order, and never of two attempts."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.wire.assemble import ChunkAssembler, part_index
from diloco.wire.body import ATTEMPT_BYTES, PART_BYTES, Body, body_pieces, describe_body

LIMIT = 10 * PART_BYTES
OLD, NEW = b"attempt1", b"attempt2"
CONTENT_BYTES = PART_BYTES - ATTEMPT_BYTES


def body_of(attempt: bytes, parts: int) -> Body:
    return Body(parts * CONTENT_BYTES, b"h" * 32, parts, attempt)


def test_parts_in_any_order_make_the_body() -> None:
    packed = random.Random(1).randbytes(2 * CONTENT_BYTES + 5)
    body, inline, parts = describe_body(packed, b"h" * 32, NEW)
    store = ChunkAssembler()
    for index in (2, 0, 1):
        assert store.add(7, index, parts[index], LIMIT)
    taken = store.take(7, body)
    assert taken is not None
    assert b"".join(body_pieces(body, inline, taken, "test")) == packed


def test_a_missing_part_is_no_body_and_is_forgotten() -> None:
    store = ChunkAssembler()
    store.add(7, 0, NEW + b"a", LIMIT)
    store.add(7, 2, NEW + b"c", LIMIT)
    assert store.take(7, body_of(NEW, 3)) is None
    store.add(7, 1, NEW + b"b", LIMIT)
    assert store.take(7, body_of(NEW, 3)) is None


def test_orphans_of_an_older_attempt_never_mix() -> None:
    store = ChunkAssembler()
    store.add(7, 0, OLD + b"old", LIMIT)
    store.add(7, 1, OLD + b"old", LIMIT)
    store.add(7, 0, NEW + b"new", LIMIT)
    assert store.take(7, body_of(NEW, 2)) is None  # part 1 is only there of the old attempt
    store.add(7, 0, OLD + b"old", LIMIT)
    store.add(7, 0, NEW + b"a", LIMIT)
    store.add(7, 1, NEW + b"b", LIMIT)
    assert store.take(7, body_of(NEW, 2)) == [b"a", b"b"]


def test_a_head_takes_no_parts_of_another_attempt() -> None:
    store = ChunkAssembler()
    store.add(7, 0, OLD + b"old", LIMIT)
    assert store.take(7, body_of(NEW, 1)) is None
    assert store.take(7, body_of(OLD, 1)) is None  # the head was the end of all parts before it


def test_parts_beyond_the_body_are_left_out() -> None:
    store = ChunkAssembler()
    for index in range(3):
        store.add(7, index, NEW + b"abc"[index : index + 1], LIMIT)
    assert store.take(7, body_of(NEW, 2)) == [b"a", b"b"]


def test_sources_do_not_share_parts() -> None:
    store = ChunkAssembler()
    store.add((1, "ann"), 0, NEW + b"a", LIMIT)
    store.add((1, "bob"), 0, NEW + b"b", LIMIT)
    assert store.take((1, "cat"), body_of(NEW, 1)) is None
    assert store.take((1, "ann"), body_of(NEW, 1)) == [b"a"]
    assert store.take((1, "bob"), body_of(NEW, 1)) == [b"b"]


def test_a_body_in_its_head_has_no_parts() -> None:
    store = ChunkAssembler()
    assert store.take(7, Body(3, b"h" * 32, 0, NEW)) == []
    store.add(7, 0, OLD + b"orphan", LIMIT)
    assert store.take(7, Body(3, b"h" * 32, 0, NEW)) == []
    assert store.take(7, body_of(OLD, 1)) is None


@pytest.mark.parametrize("data", [b"", NEW[:-1], NEW, NEW + bytes(CONTENT_BYTES + 1)])
def test_what_cannot_be_a_part_is_refused(data: bytes) -> None:
    store = ChunkAssembler()
    assert not store.add(7, 0, data, LIMIT)
    assert store.take(7, body_of(data[:ATTEMPT_BYTES], 1)) is None


def test_a_refused_part_leaves_the_others() -> None:
    store = ChunkAssembler()
    store.add(7, 0, NEW + b"a", LIMIT)
    assert not store.add(7, 1, OLD + bytes(PART_BYTES), LIMIT)
    assert store.take(7, body_of(NEW, 1)) == [b"a"]


def test_a_source_cannot_make_others_keep_more_than_a_body() -> None:
    store = ChunkAssembler()
    limit = 2 * CONTENT_BYTES + 1
    assert [store.add(7, index, NEW + b"x", limit) for index in (0, 1, 2, 3, 10**8)] == [True, True, True, False, False]


def test_all_sources_together_keep_no_more_than_what_they_may() -> None:
    store = ChunkAssembler(10)
    for source, attempt, index, content in [(1, OLD, 0, b"aaa"), (2, OLD, 0, b"bbb"), (1, OLD, 1, b"aa"), (3, NEW, 0, b"cccc")]:
        assert store.add(source, index, attempt + content, LIMIT)
    assert store.kept_bytes == 9  # 1 got a part after 2, which had to go
    assert store.take(2, body_of(OLD, 1)) is None
    assert store.take(1, body_of(OLD, 2)) == [b"aaa", b"aa"]
    assert store.take(3, body_of(NEW, 1)) == [b"cccc"]
    assert store.kept_bytes == 0
    assert store.add(4, 0, NEW + b"more than all", LIMIT)
    assert store.take(4, body_of(NEW, 1)) is None


@given(st.lists(st.tuples(st.sampled_from([OLD, NEW]), st.integers(0, 3), st.booleans()), max_size=20))
def test_what_is_taken_is_whole_and_of_one_attempt(events: list[tuple[bytes, int, bool]]) -> None:
    store = ChunkAssembler()
    for attempt, index, is_head in events:
        if is_head:
            taken = store.take(7, body_of(attempt, index))
            assert taken is None or taken == [attempt + bytes([i]) for i in range(index)]
        else:
            store.add(7, index, attempt + attempt + bytes([index]), LIMIT)


@pytest.mark.parametrize(
    ("subject", "index"),
    [
        ("diloco.r.fragment.1.part.6174.0", 0),
        ("diloco.r.delta.1.ann.part.12", 12),
        ("diloco.r.fragment.1.head", None),
        ("diloco.r.fragment.1.part.-1", None),
        ("diloco.r.fragment.1.part.1234567890", None),
        ("", None),
    ],
)
def test_the_index_of_a_part(subject: str, index: int | None) -> None:
    assert part_index(subject) == index
