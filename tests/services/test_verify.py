"""``diloco verify`` and ``diloco replay`` on a run of toys: all holds, until what is stored is tampered with."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.made.fixtures import Diloco, MakeServer
from tests.made.toy_replay import ToyModel, redo_toys
from tests.pace import DEADLINE_S
from tests.services.finished import Finished

from diloco.core.learner.delta import ERROR_BITS, PLAIN_BITS, DeltaValues, EncodedOffer
from diloco.core.learner.schedule import Moment
from diloco.core.run import tape as events
from diloco.core.tensors import codec
from diloco.process import tape
from diloco.service import rundir
from diloco.service.rundir import RunDirectory
from diloco.wire import framing
from diloco.wire.body import describe_body
from diloco.wire.entries import Record
from diloco_ops.audit import verify
from diloco_ops.broker.server import Server
from diloco_ops.reading.run_reader import opened

pytestmark = pytest.mark.usefixtures("patient_commands")


@pytest.fixture
def copy(finished: Finished, tmp_path: Path) -> Finished:
    """The run, to be tampered with."""
    shutil.copytree(finished.path, tmp_path / "run")
    return Finished(tmp_path / "run", finished.state_hashes)


def states(verdict: verify.Verification) -> dict[str, str]:
    return {check.name: check.state for check in verdict.checks}


def found(verdict: verify.Verification, name: str) -> str:
    return next(check.found for check in verdict.checks if check.name == name)


ALL_HOLD = dict.fromkeys(("log", "changes", "keyframes", "merges", "tapes", "offers", "data", "report"), "holds")


@pytest.mark.promise("verify confirms a sound run")
async def test_untouched_run_holds(finished: Finished) -> None:
    verdict = await verify.check(finished.path)

    assert states(verdict) == ALL_HOLD
    assert verdict.holds
    assert verdict.versions > 10
    assert not verdict.live


def test_tapes_of_services_say_who_owned_what_and_who_was_there(finished: Finished) -> None:
    run = rundir.load(finished.path)
    identity = framing.run_id(run.name, run.settings.digest())
    owners = [list(tape.load(finished.tape(f"syncer-{i}"), identity).events()) for i in range(2)]
    coordinator = list(tape.load(finished.tape("coordinator"), identity).events())

    owned = [[event for event in own if isinstance(event, events.Owners)][-1].fragments for own in owners]
    assert sorted(index for own in owned for index in own) == [0, 1, 2, 3]
    assert all(isinstance(own[0], events.Start) for own in [*owners, coordinator])
    came = {event.member for event in coordinator if isinstance(event, events.Back)}
    assert {"toy-0", "toy-1", "toy-2", "syncer-0", "syncer-1"} <= came


def test_command_says_so_and_changes_nothing(finished: Finished, diloco: Diloco) -> None:
    before = {file: file.read_bytes() for file in finished.path.rglob("*") if file.is_file()}

    ended, as_json = diloco("verify", str(finished.path)), diloco("verify", str(finished.path), "--json")

    assert (ended.code, as_json.code) == (0, 0)
    assert "everything checked holds" in ended.out
    assert json.loads(as_json.out)["holds"] is True
    assert {file: file.read_bytes() for file in finished.path.rglob("*") if file.is_file()} == before


async def test_offer_that_is_on_no_tape_is_found(copy: Finished) -> None:
    run = rundir.load(copy.path)
    identity = framing.run_id(run.name, run.settings.digest())
    write_tape(copy, "toy-0", [e for e in tape.load(copy.tape("toy-0"), identity).events() if not _is_offer_of(e, 0)])

    verdict = await verify.check(copy.path)

    assert states(verdict) == ALL_HOLD | {"offers": "fails"}
    assert "fragment 0, version" in found(verdict, "offers")
    assert "of toy-0" in found(verdict, "offers")


def write_tape(run: Finished, name: str, said: list[events.TapeEvent]) -> None:
    directory = rundir.load(run.path)
    header = events.Header(framing.run_id(directory.name, directory.settings.digest()), name)
    raw = header.pack()
    raw += b"".join(events.blocks(map(events.encode, said), header.hash, len(raw)))
    run.tape(name).write_bytes(raw)


def _is_offer_of(event: events.TapeEvent, fragment: int) -> bool:
    return isinstance(event, events.TapeOffer) and event.fragment == fragment


async def test_damaged_tape_is_named_and_what_it_would_show_is_unchecked(copy: Finished) -> None:
    raw = bytearray(copy.tape("toy-1").read_bytes())
    raw[len(raw) // 2] ^= 4
    copy.tape("toy-1").write_bytes(raw)
    copy.tape("toy-2").write_bytes(b"nothing")

    verdict = await verify.check(copy.path)

    assert states(verdict) == ALL_HOLD | dict.fromkeys(("tapes", "offers", "data"), "unchecked")
    assert verdict.holds
    damaged = (await redo_toys(copy.path))[1]
    assert (damaged.learner, damaged.wrong) == ("toy-1", "")
    assert "damaged at byte" in damaged.unchecked
    for name in ("toy-1.tape: damaged at byte", "toy-2.tape: not a tape"):
        assert name in found(verdict, "tapes")


async def test_report_with_other_sums_is_found(copy: Finished) -> None:
    report = json.loads((copy.path / "report.json").read_text())
    report["fragments"][2]["tokens_lost"] += 1
    rundir.write_json(copy.path / "report.json", report)

    verdict = await verify.check(copy.path)

    assert states(verdict) == ALL_HOLD | {"report": "fails"}
    assert "fragment 2: tokens_lost" in found(verdict, "report")


@pytest.fixture
async def served(copy: Finished) -> AsyncIterator[Finished]:
    """The tampered copy on a server of its own, as a run that is going on."""
    server = Server(copy.path / "nats")
    server.start()
    run = rundir.load(copy.path)
    RunDirectory(copy.path, run.name, server.url, None, run.settings).save()
    yield copy
    server.stop()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"state_hash": bytes(32)}, "the state before where it makes no version"),
        ({"epoch": 2**62}, f"epoch: expected 2, got {2**62}"),
    ],
)
async def test_entry_that_no_reader_goes_by_is_named(served: Finished, changes: dict[str, Any], says: str) -> None:
    async with opened(served.path) as outside:
        assert outside.live
        last = await outside.log.transport.last(outside.log.subjects.log_stream, outside.log.subjects.record(1))
        assert last is not None
        record, check, _ = framing.unpack(last.data, Record, outside.run.identity)
        # a takeover may follow a closed log; this one claims that the state has become another, or all epochs
        forged = replace(
            record,
            entry="takeover",
            epoch=record.epoch + 1,
            previous=check,
            members=[],
            body=None,
            closing=False,
        )
        forged = replace(forged, **changes)
        await outside.log.writer.append_record(forged, b"", [], last.sequence)

    verdict = await verify.check(served.path)

    assert verdict.live
    assert states(verdict) == ALL_HOLD
    assert "passed over as no entries: fragment 1, entry after version" in found(verdict, "log")
    assert says in found(verdict, "log")


async def test_keyframe_with_other_cursors_is_found(served: Finished) -> None:
    async with opened(served.path) as outside:
        loaded = await outside.log.reader.load(0, outside.genesis, outside.genesis_check)
        loaded.replica.chain.tokens_merged += 1
        await outside.log.writer.append_keyframe(loaded.replica, loaded.residual, fence=None)

    verdict = await verify.check(served.path)

    assert states(verdict) == ALL_HOLD | {"keyframes": "fails"}
    assert "fragment 0" in found(verdict, "keyframes")


@pytest.mark.promise("verify finds a merge that the stored offers do not give")
async def test_archived_offer_that_gives_another_merge_is_found(served: Finished) -> None:
    async with opened(served.path) as outside:
        entry = await anext(outside.log.entries.follow([0], 1, lambda refusal: None))
        while not entry.record.members:
            entry = await anext(outside.log.entries.follow([0], entry.sequence + 1, lambda refusal: None))
        member = entry.record.members[0]
        stored = await outside.log.archive.offer(entry.record, member)
        assert stored is not None
        offer, raw = stored
        raw = raw.copy()
        first = 2 * (raw.size // 34)  # behind the scales; its lower half is the code of the first value
        raw[first] = raw[first] & 0xF0 | (15 if raw[first] & 15 < 8 else 1)
        body, inline, _ = describe_body(codec.pack(raw, -1), codec.content_hash(raw), bytes(8))
        assert entry.record.body is not None
        names, attempt = outside.log.subjects, entry.record.body.attempt
        subject = names.archived(0, member.learner, member.incarnation, member.number, attempt)
        frame = framing.pack(replace(offer, body=body), outside.run.identity, inline)
        await outside.log.transport.purge(names.archive_stream, subject, 1 << 62)  # else the first one counts
        await outside.log.transport.append(subject, frame, message_id="forged", fence=None, timeout_s=DEADLINE_S)

    verdict = await verify.check(served.path)

    assert states(verdict) == ALL_HOLD | {"merges": "fails"}
    assert f"fragment 0, version {entry.record.version}" in found(verdict, "merges")


async def test_purged_log_is_checked_from_its_oldest_keyframe_on(served: Finished, diloco: Diloco) -> None:
    async with opened(served.path) as outside:
        newest = await outside.log.reader.newest_keyframe(0)
        assert newest is not None
        keyframe = newest[0]
        log = outside.log
        await log.transport.purge(log.subjects.log_stream, log.subjects.record_tree(0), keyframe.entry_sequence)

    verdict = await verify.check(served.path)
    learners = await asyncio.to_thread(diloco, "replay", str(served.path), "--learners")

    assert states(verdict) == ALL_HOLD
    assert f"what is before version {keyframe.version} was purged" in found(verdict, "log")
    assert learners.code == 5
    assert f"its log begins with version {keyframe.version}" in learners.err


async def test_missing_entries_are_found(served: Finished) -> None:
    async with opened(served.path) as outside:
        log = outside.log
        stop = await log.reader.head_sequence(2)
        second = [entry async for entry in log.entries.follow([2], 1, lambda refusal: None, stop)][2]
        delete = f"$JS.API.STREAM.MSG.DELETE.{log.subjects.log_stream}"
        assert await log.transport.request(delete, json.dumps({"seq": second.sequence}).encode(), DEADLINE_S)

    verdict = await verify.check(served.path)

    assert states(verdict)["log"] == "fails"
    assert "fragment 2" in found(verdict, "log")
    assert "entries are missing" in found(verdict, "log")


# ---- replay


@pytest.mark.promise("a run is replayed to the same bits")
async def test_training_done_again_from_the_tapes_has_the_same_bits(finished: Finished) -> None:
    redone = await redo_toys(finished.path)

    assert [life.learner for life in redone] == ["toy-0", "toy-1", "toy-2", "toy-2"]
    assert [(life.wrong, life.unchecked) for life in redone] == [("", "")] * 4
    assert [life.parameters for life in redone] == [True, True, None, True]  # the killed one did not live to tell
    assert all(life.steps > 5 for life in redone)
    assert sum(life.offers for life in redone) > 20


async def test_other_data_than_the_tape_says_is_noticed(finished: Finished) -> None:
    class Other(ToyModel):
        def step(self, share: int, batch: int, at: Moment) -> None:
            super().step(share, batch + (batch == 20), at)

    redone = await redo_toys(finished.path, Other)

    assert "offer" in redone[0].wrong
    assert not redone[0].holds


@pytest.mark.parametrize("began_with", [events.Restored(b"unknown!"), events.Borrowed("toy-9", b"unknown!")])
async def test_life_that_began_with_a_state_that_is_gone_is_said_to_be_unchecked(
    copy: Finished, began_with: events.TapeEvent
) -> None:
    run = rundir.load(copy.path)
    start, *rest = tape.load(copy.tape("toy-0"), framing.run_id(run.name, run.settings.digest())).events()
    write_tape(copy, "toy-0", [start, began_with, *rest])

    first, *others = await redo_toys(copy.path)

    assert b"unknown!".hex() in first.unchecked
    assert (first.wrong, first.steps) == ("", 0)
    assert not any(life.unchecked or life.wrong for life in others)


def write_error_bits(run: Finished, name: str, bits: int | None) -> None:
    """Have a tape say so of its learner's quantisation errors; None: nothing, as one of an earlier version."""
    directory = rundir.load(run.path)
    said: list[events.TapeEvent] = []
    for event in tape.load(run.tape(name), framing.run_id(directory.name, directory.settings.digest())).events():
        if not isinstance(event, events.ErrorBits):
            said.append(event)
        if isinstance(event, events.Start) and bits is not None:
            said.append(events.ErrorBits(bits))
    write_tape(run, name, said)


@pytest.mark.parametrize(("bits", "expected"), [(None, PLAIN_BITS), (32, 32), (8, 8)])
async def test_offers_are_made_again_with_errors_of_the_bits_on_the_tape(
    copy: Finished, monkeypatch: pytest.MonkeyPatch, bits: int | None, expected: int
) -> None:
    """An offer of another resolution differs here and there, or not: what the errors are kept in tells."""
    used: list[int] = []
    encode = DeltaValues.encode

    def noted(self: DeltaValues, *arguments: Any) -> EncodedOffer:
        used.append(self.error_bits)
        return encode(self, *arguments)

    monkeypatch.setattr(DeltaValues, "encode", noted)
    for name in ("toy-0", "toy-1", "toy-2"):
        write_error_bits(copy, name, bits)

    lives = await redo_toys(copy.path)

    assert set(used) == {expected}
    assert not any(life.unchecked for life in lives)
    if expected == ERROR_BITS:  # as the offers were made
        assert not any(life.wrong for life in lives)


async def test_a_tape_with_errors_of_unknown_bits_is_unchecked(copy: Finished) -> None:
    write_error_bits(copy, "toy-0", 5)

    first, *others = await redo_toys(copy.path)

    assert (first.wrong, first.unchecked) == ("", "its tape has quantisation errors of 5 bits")
    assert not any(life.unchecked or life.wrong for life in others)


def test_replay_folds_one_fragment_or_all(finished: Finished, diloco: Diloco) -> None:
    every, one = (
        diloco("replay", str(finished.path), "--json"),
        diloco("replay", str(finished.path), "--fragment", "2", "--json"),
    )
    none = diloco("replay", str(finished.path), "--fragment", "9")

    assert (every.code, one.code, none.code) == (0, 0, 2)
    assert 0 < json.loads(one.out)["log"]["versions"] < json.loads(every.out)["log"]["versions"]
    assert "fragments 0 to 3" in none.err


async def test_verify_refuses_what_is_no_run(tmp_path: Path, diloco: Diloco, make_server: MakeServer) -> None:
    (tmp_path / "empty").mkdir()
    ended = await asyncio.to_thread(diloco, "verify", str(tmp_path / "empty"))

    assert (ended.code, ended.err.count("\n")) == (5, 1)
    assert "not a run's directory" in ended.err
