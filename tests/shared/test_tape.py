"""Tapes: what is written is read, whatever happens to the file; and what a learner's tape says of its lives."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from tests.made.tapes import ANY_EVENT, HEADER, RUN, tape_of
from tests.services.cluster import Events

from diloco.core.learner.accounts import StepDone
from diloco.core.run import tape
from diloco.core.run.lives import read_lives
from diloco.core.run.tape import Apply, Data, Header, Machine, Reload, Sent, Start, Step, TapeEvent, TapeOffer
from diloco.errors import FormatError, RunError
from diloco.member.taping import LearnerTape
from diloco.process import tape as files
from diloco.process.observe import Logger
from diloco.process.tape import TapeFile

DIGEST = bytes(range(8))


def read(raw: bytes) -> list[TapeEvent]:
    return list(tape.events(raw, tape.scan(raw)))


def log() -> tuple[Events, Logger]:
    events = Events()
    return events, cast(Logger, events)


def test_bytes_of_a_tape_are_those_that_the_documentation_has() -> None:
    # by hand, from docs/tape.md: magic, version 1, run, name; then one block with an offer and a step
    head = b"DLCtape\n" + b"\x01" + RUN + b"\x09learner-0"
    head_hash = blake3(head).digest()
    header = head + head_hash[:4]
    offer = (
        b"\x09" + b"\x02" + b"\x05" + b"\x81\x01" + b"\xac\x02" + b"\x04" + DIGEST
    )  # ago 2, fragment 5, number 129, round 300, 4 bits
    block = offer + b"\x06"
    check = blake3(head_hash + len(header).to_bytes(8, "little") + block).digest()[:4]

    assert tape_of([TapeOffer(2, 5, 129, 300, 4, DIGEST), Step()]) == header + bytes([len(block)]) + block + check


@given(st.lists(st.lists(ANY_EVENT, max_size=4), max_size=5))
def test_what_is_written_is_read(groups: list[list[TapeEvent]]) -> None:
    assert read(tape_of(*groups)) == [event for group in groups for event in group]


def test_more_than_a_block_holds_becomes_several() -> None:
    many: list[TapeEvent] = [TapeOffer(0, 1, 2, 3, 4, DIGEST)] * 3000

    assert read(tape_of(many)) == many


EXAMPLE: list[list[TapeEvent]] = [
    [Start(10, 11, (3, 4))],
    [Data(0, 7), Step(), Apply(1, 2)],
    [TapeOffer(1, 2, 3, 4, 4, DIGEST)],
    [Step()],
]


def test_torn_tape_keeps_all_whole_blocks() -> None:
    raw, whole = tape_of(*EXAMPLE), [len(tape_of(*EXAMPLE[:count])) for count in range(len(EXAMPLE) + 1)]
    for size in range(whole[0], len(raw)):
        found = tape.scan(raw[:size])
        blocks = sum(end <= size for end in whole) - 1
        assert (len(found.blocks), found.good_bytes, found.torn_bytes) == (blocks, whole[blocks], size - whole[blocks])
        assert found.damaged_at is None


@given(st.data())
def test_damaged_byte_never_changes_what_is_read_before_it(data: st.DataObject) -> None:
    raw = bytearray(tape_of(*EXAMPLE))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    ends = [len(tape_of(*EXAMPLE[:count])) for count in range(len(EXAMPLE) + 1)]
    if at < ends[0]:
        with pytest.raises(FormatError):
            tape.scan(bytes(raw))
        return
    block = sum(end <= at for end in ends) - 1  # the damaged one

    found = tape.scan(bytes(raw))

    assert read(bytes(raw)) == [event for group in EXAMPLE[:block] for event in group]
    last = block == len(EXAMPLE) - 1  # the end may as well have been torn
    assert (found.damaged_at, found.torn_bytes > 0) == ((None, True) if last else (ends[block], False))


def test_block_of_another_place_or_tape_is_refused() -> None:
    raw = tape_of(*EXAMPLE)
    ends = [len(tape_of(*EXAMPLE[:count])) for count in range(len(EXAMPLE) + 1)]
    without_second = raw[: ends[1]] + raw[ends[2] :]
    other = Header(RUN, "learner-1").pack() + raw[ends[0] :]

    assert len(tape.scan(without_second).blocks) == 1
    assert not tape.scan(other).blocks


def test_other_format_version_is_refused_by_its_number() -> None:
    raw = bytearray(tape_of())
    raw[len(tape.MAGIC)] = 2

    with pytest.raises(FormatError, match="format version 2, expected 1"):
        tape.scan(bytes(raw))


@given(st.binary(max_size=300))
def test_any_bytes_are_refused_or_read(raw: bytes) -> None:
    for start in (b"", tape.MAGIC, HEADER.pack()):
        try:
            found = read(start + raw)
        except FormatError:
            continue
        assert isinstance(found, list)


@given(st.binary(min_size=1, max_size=60))
def test_any_events_are_refused_or_read_back_the_same(raw: bytes) -> None:
    try:
        events = list(tape.decode(raw))
    except FormatError:
        return
    assert list(tape.decode(b"".join(map(tape.encode, events)))) == events


def test_lives_of_a_learner() -> None:
    first = [
        Start(5, 100, (3, 4)),
        Reload(0, 0, False),
        Data(2, 40),
        Step(),
        Step(),
        Apply(0, 1),
        Step(),
        TapeOffer(2, 0, 1, 2, 4, DIGEST),
    ]
    second = [Start(9, 200, (3, 4)), tape.Restored(DIGEST), Data(2, 42), Step(), Data(5, 0), Step(), tape.End(True, DIGEST)]

    one, two = read_lives([*first, *second])

    assert (one.start.incarnation, one.steps, one.ranges(), one.end) == (100, 3, [(2, 40, 3)], None)
    # the offer is of the model as it was two steps before it was noted
    assert one.at == {0: [Reload(0, 0, False)], 2: [Apply(0, 1)], 1: [TapeOffer(2, 0, 1, 2, 4, DIGEST)]}
    assert (two.restored, two.steps, two.ranges()) == (DIGEST, 2, [(2, 42, 1), (5, 0, 1)])
    assert two.end == tape.End(True, DIGEST)


def test_a_life_has_the_lengths_of_its_steps_and_of_the_ways_of_its_offers(tmp_path: Path) -> None:
    writer = TapeFile(tmp_path, "learner-0", RUN, log()[1])
    taped = LearnerTape(writer)
    taped.start(Start(5, 100, (3, 4)), 8, 50.0)
    for number, now_s in enumerate([50.1004, 50.3008, 50.4004]):
        taped.step(StepDone(64, 0, number, None, 0.1, 0.0), now_s)
    writer.record(Sent(1, 30))
    writer.close()
    (life,) = read_lives(files.load(writer.path, RUN).events())
    # whole milliseconds since the start: 100, 300 and 400, so that what is cut off does not add up
    assert (life.steps, life.step_ms, life.sent_ms, life.at) == (3, [100, 200, 100], [30], {})


def test_a_life_has_the_tokens_of_its_steps_where_they_are_fewer_than_the_most(tmp_path: Path) -> None:
    writer = TapeFile(tmp_path, "learner-0", RUN, log()[1])
    taped = LearnerTape(writer)
    taped.start(Start(5, 100, (3, 4)), 8, 50.0)
    for number, tokens in enumerate([64, 64, 10, 10, 1, 64]):
        taped.step(StepDone(tokens, 0, number, None, 0.1, 0.0, most=64), 51.0)
    writer.close()
    events = list(files.load(writer.path, RUN).events())
    assert [event for event in events if isinstance(event, tape.TokensCounted)] == [
        tape.TokensCounted(10),
        tape.TokensCounted(1),
        tape.TokensCounted(64),
    ]
    (life,) = read_lives([*events, Start(9, 200, (3, 4)), Data(0, 6), Step()])[:1]
    assert list(life.step_tokens(64)) == [64, 64, 10, 10, 1, 64]
    assert b"".join(map(tape.encode, [tape.TokensCounted(300), Step()])) == bytes.fromhex(
        "19ac0206"
    )  # by hand, from docs/tape.md


def test_a_tape_of_steps_that_all_have_as_many_tokens_says_nothing_of_them(tmp_path: Path) -> None:
    writer = TapeFile(tmp_path, "learner-0", RUN, log()[1])
    taped = LearnerTape(writer)
    taped.start(Start(5, 100, (3, 4)), 8, 50.0)
    for done in (StepDone(64, 0, 0, None, 0.1, 0.0), StepDone(64, 0, 1, None, 0.1, 0.0, most=64)):
        taped.step(done, 51.0)
    writer.close()
    (life,) = read_lives(files.load(writer.path, RUN).events())
    assert (life.counted, list(life.step_tokens(64))) == ({}, [64, 64])


def test_copy_of_the_state_stands_where_it_was_begun() -> None:
    lent, saved = bytes(8), DIGEST
    own = [Start(5, 100, (3, 4)), Data(0, 0), Step(), Apply(0, 1), tape.Copied(), Apply(1, 1), tape.Lent(lent)]
    own += [tape.Copied(), Step(), tape.Copied(), tape.Checkpoint(saved), Step(), tape.Fresh()]

    (life,) = read_lives(own)

    # the second copy came to nothing: the disk was full
    assert life.copies == {(1, 1): lent, (2, 0): saved}
    assert life.fresh
    with pytest.raises(FormatError, match="of no copy"):
        read_lives([Start(5, 100, (3, 4)), tape.Checkpoint(saved)])


def test_a_life_says_its_mesh() -> None:
    mesh = tape.Mesh(2, 4, 1)
    one, two = read_lives([Start(5, 100, ()), mesh, Data(0, 0), Step(), Start(6, 101, ()), Data(0, 1), Step()])
    assert (one.mesh, one.at, one.steps) == (mesh, {}, 1)
    assert two.mesh is None  # it came back with one device


def test_life_that_went_back_says_so() -> None:
    on: list[TapeEvent] = [Start(5, 100, (3, 4)), Reload(0, 3, False), Reload(1, 4, False), Apply(1, 5), Data(0, 0), Step()]

    assert not read_lives([*on, Reload(1, 5, True)])[0].rewound
    assert read_lives([*on, Reload(1, 4, False)])[0].rewound


def test_life_ends_where_events_are_missing() -> None:
    (life,) = read_lives([Start(5, 100, (3, 4)), Data(2, 40), Step(), tape.Gap(7), Step(), tape.End(True, DIGEST)])

    assert (life.steps, life.gap, life.end) == (1, 7, None)


@pytest.mark.parametrize(
    "events",
    [[Step()], [Start(1, 1, (3, 4)), Step()], [Start(1, 1, (3, 4)), Data(0, 0), Step(), TapeOffer(2, 0, 1, 1, 4, DIGEST)]],
)
def test_events_that_make_no_sense_are_refused(events: list[TapeEvent]) -> None:
    with pytest.raises(FormatError):
        read_lives(events)


def test_process_begun_again_goes_on_after_the_last_whole_block(tmp_path: Path) -> None:
    _, logger = log()
    first = TapeFile(tmp_path, "learner-0", RUN, logger)
    for event in EXAMPLE[0] + EXAMPLE[1]:
        first.record(event)
        first.flush()
    first.close()
    raw = first.path.read_bytes()
    first.path.write_bytes(raw[:-1])  # it died as it wrote the last event

    second = TapeFile(tmp_path, "learner-0", RUN, logger)
    second.record(Start(20, 21, (3, 4)))
    second.close()

    assert list(files.load(second.path, RUN).events()) == [*EXAMPLE[0], *EXAMPLE[1][:-1], Start(20, 21, (3, 4))]


@pytest.mark.parametrize("what", ["damaged", "foreign", "no tape"])
def test_tape_that_cannot_be_read_is_put_aside_and_named(tmp_path: Path, what: str) -> None:
    events, logger = log()
    old = TapeFile(tmp_path, "learner-0", b"otherrun" if what == "foreign" else RUN, logger)
    for event in EXAMPLE[1]:
        old.record(event)
        old.flush()
    old.close()
    raw = bytearray(old.path.read_bytes())
    if what == "damaged":
        raw[len(HEADER.pack()) + 1] ^= 1
    old.path.write_bytes(b"something else" if what == "no tape" else raw)

    new = TapeFile(tmp_path, "learner-0", RUN, logger)
    new.record(Start(20, 21, (3, 4)))
    new.close()

    tapes, problems = files.load_all(tmp_path, RUN)
    assert [list(read.events()) for read in tapes] == [[Start(20, 21, (3, 4))]]
    assert len(problems) == 1
    assert "learner-0.tape.1.refused" in problems[0]
    assert [name for _, name, _ in events.entries] == ["tape_refused"]


def test_two_processes_of_one_name_do_not_write_into_each_other(tmp_path: Path) -> None:
    events, logger = log()
    one, two = (TapeFile(tmp_path, "learner-0", RUN, logger) for _ in range(2))
    for writer in (one, two, one, two):
        writer.record(Start(1, 1, ()))
        writer.flush()
    assert [name for _, name, _ in events.entries] == ["tape_not_written"]
    one.close()
    two.close()

    assert list(files.load(one.path, RUN).events()) == [Start(1, 1, ())] * 4


def test_full_disk_loses_nothing_while_little_waits_and_says_how_much_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, logger = log()
    writer = TapeFile(tmp_path, "learner-0", RUN, logger)
    room = 60
    write = os.write

    def full(file: int, raw: bytes) -> int:
        return write(file, raw[:room])

    writer.record(Start(1, 1, (3, 4)))
    writer.flush()
    monkeypatch.setattr(os, "write", full)
    for event in [Data(0, 0)] + [Step()] * 100:
        writer.record(event)
    writer.flush()
    writer.flush()
    monkeypatch.undo()
    assert [name for _, name, _ in events.entries] == ["tape_not_written"]
    writer.flush()
    assert list(files.load(writer.path, RUN).events()) == [Start(1, 1, (3, 4)), Data(0, 0)] + [Step()] * 100

    monkeypatch.setattr(files, "MAX_WAITING_BYTES", 50)
    for _ in range(120):
        writer.record(Step())
    writer.close()
    assert list(files.load(writer.path, RUN).events())[102:] == [tape.Gap(100)] + [Step()] * 20


def test_files_of_other_runs_and_versions_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.tape"
    for raw, reason in [
        (b"", "its first bytes are not those of a tape"),
        (Header(b"otherrun", "x").pack(), f"belongs to run {b'otherrun'.hex()}"),
        (tape.MAGIC + b"\x07" + RUN, "format version 7"),
    ]:
        path.write_bytes(raw)
        with pytest.raises(RunError, match=reason):
            files.load(path, RUN)


def test_a_replay_computes_with_the_threads_and_flags_of_the_tape() -> None:
    flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    made = Machine.of("cpu", "4", flags)
    assert made.flags == f"PJRT_NPROC=4 {flags}"
    assert made.environment(1) == {"PJRT_NPROC": "4", "XLA_FLAGS": flags}
    assert Machine.of("cpu", "16", "").environment(1) == {"PJRT_NPROC": "16", "XLA_FLAGS": ""}
    # tapes written before name no threads, and leave them to the environment
    assert Machine("cpu", flags).environment(1) == {"XLA_FLAGS": flags}
    assert Machine("cpu", "").environment(1) == {"XLA_FLAGS": ""}
    # and those of several processes may have the devices of one
    one = Machine.of("cpu", "4", f"{tape.CPU_DEVICES}=2 {flags}")
    assert one.environment(6) == {"PJRT_NPROC": "4", "XLA_FLAGS": f"{tape.CPU_DEVICES}=6 {flags}"}
