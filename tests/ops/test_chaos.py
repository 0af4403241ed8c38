"""Chaos without a run: what its witness concludes, and that everything is put right whatever becomes of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from blake3 import blake3
from tests.made.heartbeats import learner_heartbeat, shard_heartbeat
from tests.made.log_entries import record_of
from tests.pace import DEADLINE_S

from diloco.core.log.chain import Chain
from diloco.errors import RunError
from diloco.process.logs import LogLine
from diloco.wire.body import Body
from diloco.wire.control import Heartbeat
from diloco.wire.entries import Record
from diloco.wire.offers import MergeMember
from diloco_ops import failures
from diloco_ops.chaos import revert
from diloco_ops.chaos.kinds import KINDS, Present, sources
from diloco_ops.chaos.refused_messages import RefusalCount
from diloco_ops.chaos.revert import JOURNAL, FaultJournal
from diloco_ops.chaos.witness import WatchedRecovery, Witness
from diloco_ops.failures import Failure

START = blake3(b"genesis").digest()


class Story:
    """One fragment's log, entry by entry, as a witness of two fragments sees it; the other one stays at version 0."""

    def __init__(self) -> None:
        self.witness = Witness([Chain(f, 0, 0, START, 0, bytes(32)) for f in range(2)], [3, 1])
        self.records: list[Record] = []
        self.head, self.epoch, self.number, self.tokens = START, 0, 0, 0

    def version(self, learner: str = "ann", tokens: int = 10, at_s: float = 0.0) -> None:
        self.number, self.tokens = self.number + 1, self.tokens + tokens
        member = MergeMember(learner, 1, self.number, 1, 0, 1, tokens, 0, 1.0, [])
        version = 1 + (self.records[-1].version if self.records else 0)
        self.add("version", version, [member], Body(1, bytes(32), 0, bytes(8)), at_s)

    def takeover(self, at_s: float = 0.0) -> None:
        self.epoch += 1
        self.add("takeover", self.records[-1].version if self.records else 0, [], None, at_s)

    def add(self, entry: str, version: int, members: list[MergeMember], body: Body | None, at_s: float) -> None:
        values: dict[str, Any] = {"entry": entry, "epoch": self.epoch, "previous": self.head, "body": body}
        values |= {"learning_rate": 0.7, "momentum": 0.5, "tokens_merged": self.tokens}
        record = record_of(version, *members, **values)
        self.records.append(record)
        self.head = self.check(record)
        self.witness.entry(record, self.head, len(self.records), at_s)

    @staticmethod
    def check(record: Record) -> bytes:
        return blake3(repr(record).encode()).digest()

    def stored(self) -> dict[tuple[int, int], set[bytes]]:
        return {(0, record.version): {self.check(record)} for record in self.records if record.entry == "version"}


def heartbeat(step: int = 1, *, learner: str = "ann", versions: tuple[int, int] = (0, 0), **values: Any) -> Heartbeat:
    """Of a learner that holds all that it processed, 10 tokens a step, unless it says otherwise."""
    usual = {"tokens": 10 * step, "fragment_tokens": [10 * step] * 2, "loss": 1.0, "batch_tokens": 10, "step_s": 0.0}
    return learner_heartbeat(learner, step, *versions, **usual | values)


def test_a_log_that_goes_on_as_it_was_is_found_whole() -> None:
    story = Story()
    story.version()
    story.takeover()
    story.version()
    witness = story.witness
    assert (len(witness.versions), witness.takeovers, witness.doubled, witness.passed_over) == (2, 1, 0, 0)
    assert witness.compare([story.stored()]) == (0, 0, 0)
    # versions below the oldest one kept were dropped on purpose
    assert witness.compare([{key: checks for key, checks in story.stored().items() if key != (0, 1)}]) == (0, 0, 0)


def test_versions_that_are_gone_or_others_are_counted() -> None:
    story = Story()
    for _ in range(4):
        story.version()
    stored = story.stored()
    del stored[0, 2]
    stored[0, 3] = {bytes(32)}
    assert story.witness.compare([stored]) == (1, 1, 0)


def test_versions_must_be_in_a_majority_of_regions() -> None:
    story = Story()
    for _ in range(4):
        story.version()
    whole = story.stored()
    until_3 = {key: checks for key, checks in whole.items() if key[1] <= 3}
    jumped = {key: checks for key, checks in whole.items() if key[1] in (1, 4)}  # given a keyframe of version 4
    compare = story.witness.compare
    assert compare([whole, whole, until_3]) == compare([whole, {}, whole]) == compare([whole, jumped, {}]) == (0, 0, 0)
    assert compare([whole, until_3, until_3]) == (0, 0, 1)  # version 4 is one region's
    assert compare([until_3, until_3, until_3]) == (1, 0, 1)
    assert compare([whole, whole, {**whole, (0, 2): {bytes(32)}}]) == (0, 1, 0)  # a log of its own


def test_a_regions_recovery_is_work_of_its_learners_in_a_version() -> None:
    story = Story()
    for learner, region in (("ann", "us"), ("eve", "eu")):
        story.witness.heartbeat(heartbeat(learner=learner, region=region), 0.0)
    for region in ("eu", "ap"):  # there is no learner in ap
        story.witness.expect(WatchedRecovery("nats_kill", f"nats-{region}", 1.0, version=True, region=region))
    story.version("ann", at_s=3.0)
    story.version("eve", at_s=4.0)
    times = {recovery.target: recovery.took_s for recovery in story.witness.recoveries}
    assert times == {"nats-eu": 3.0, "nats-ap": 2.0}


def test_a_second_entry_after_the_same_one_is_a_doubled_version_and_a_copy_is_none() -> None:
    story = Story()
    story.version()
    [record] = story.records
    story.witness.entry(record, story.head, 2, 0.0)
    assert (story.witness.doubled, story.witness.passed_over) == (0, 1)
    story.witness.entry(record, bytes(32), 3, 0.0)
    assert (story.witness.doubled, story.witness.passed_over) == (1, 2)


def test_only_the_damage_that_chaos_made_excuses_a_refusal() -> None:
    def refused(sender: str, kind: str, at_s: float = 5.0, event: str = "message_refused", **more: int) -> LogLine:
        values = {"sender": sender, "kind": kind, "reason": f"no {sender}"} | more
        return LogLine(at_s, "syncer-0", "warning", event, values, "")

    made = [refused("ann", "HashError"), refused("diloco.run.heartbeat.bob", "FormatError")]
    made.append(refused("syncer-1", "ChainError", sequence=7))
    other = [
        refused("syncer-1", "ChainError", sequence=8),
        refused("ann", "ClaimError"),
        refused("cid", "FormatError"),
        refused("ann", "stray", event="offers_dropped"),
    ]
    before, else_ = refused("cid", "HashError", at_s=1.0), refused("cid", "HashError", event="state_fresh")
    found = RefusalCount.read([before, else_, *made, *other], 2.0, {"ann", "diloco.run.heartbeat.bob"}, {7})
    assert found.made == 3
    assert found.honest == [f"syncer-0 refused a message of {name}: no {name}" for name in ("syncer-1", "ann", "cid", "ann")]


def test_tokens_are_accounted_for_by_what_the_log_had_at_the_heartbeats_versions() -> None:
    story = Story()
    story.version(tokens=30)
    story.version(tokens=20)
    witness = story.witness
    # 60 processed: 30 merged by version 1, 5 lost, 25 held; all of the second fragment is held
    exact: dict[str, Any] = {"tokens": 60, "lost_tokens": [5, 0], "fragment_tokens": [25, 60]}
    assert witness.unaccounted(heartbeat(6, versions=(1, 0), **exact)) == {}
    # 20 more are merged in version 2: held 5
    assert witness.unaccounted(heartbeat(6, versions=(2, 0), **exact | {"fragment_tokens": [5, 60]})) == {}
    assert witness.unaccounted(heartbeat(6, versions=(2, 0), **exact)) == {0: -20}
    assert witness.unaccounted(heartbeat(6, versions=(3, 0), **exact)) is None
    assert witness.unaccounted(heartbeat(1, learner="bob", versions=(2, 0))) == {}


def test_recoveries_end_when_what_broke_does_its_work_again() -> None:
    story = Story()
    witness = story.witness
    story.version()
    witness.shard(shard_heartbeat("syncer-0", fragments=[0], revision=1))
    assert witness.owned("syncer-0") == {0}
    assert witness.owned("syncer-7") == set()
    witness.expect(WatchedRecovery("kill", "learner-1", 10.0, learner="ann"))
    witness.expect(WatchedRecovery("kill", "syncer-0", 10.0, fragments={0}))
    witness.expect(WatchedRecovery("kill", "coordinator", 10.0, status=True))
    witness.expect(WatchedRecovery("full", "log", 12.0, version=True))
    story.version(at_s=9.0)  # too early for all
    witness.heartbeat(heartbeat(50), 9.5)
    assert len(witness.open) == 4
    story.takeover(at_s=11.5)
    witness.heartbeat(heartbeat(3, incarnation=2), 13.0)  # the first word is no step yet
    witness.answered(asked_s=9.9, now_s=10.5)  # asked before
    witness.answered(asked_s=10.2, now_s=10.3)
    assert [recovery.target for recovery in witness.open] == ["learner-1", "log"]
    witness.heartbeat(heartbeat(4, incarnation=2), 14.0)
    story.version(at_s=12.25)
    assert witness.open == []
    assert witness.recovery_times() == {
        "full log": {"count": 1, "median_s": 0.25, "max_s": 0.25},
        "kill coordinator": {"count": 1, "median_s": 0.3, "max_s": 0.3},
        "kill learner": {"count": 1, "median_s": 4.0, "max_s": 4.0},
        "kill syncer": {"count": 1, "median_s": 1.5, "max_s": 1.5},
    }


def test_a_server_that_was_killed_is_back_when_a_version_comes_after_it_was_away() -> None:
    story = Story()
    story.witness.expect(WatchedRecovery("nats_kill", "nats", 1.0, version=True, server=True))
    story.version(at_s=1.5)  # was on its way
    story.witness.away(now_s=2.0)
    story.version(at_s=3.5)
    assert story.witness.recovery_times() == {"nats_kill nats": {"count": 1, "median_s": 2.5, "max_s": 2.5}}


def test_lost_tokens_are_a_mean_by_parameters() -> None:
    witness = Story().witness
    witness.heartbeat(heartbeat(9, lost_tokens=[8, 0]), 0.0)
    witness.heartbeat(heartbeat(9, learner="bob", lost_tokens=[0, 4]), 0.0)
    assert witness.lost() == (8 * 3 + 4 * 1) / 4


def test_every_kind_of_failure_is_drawn_for_what_is_there() -> None:
    services = ["coordinator", "evaluator", "learner-0", "syncer-0", "syncer-1"]
    present = Present([*services, "nats", "wan"])
    possible = [name for name, kind in KINDS.items() if present.is_possible(kind)]
    tape = failures.draw(3, sources(possible, present), 1000, 1.0)
    met = {(failure.kind, failure.target) for failure in tape.failures}
    assert {kind for kind, _ in met} == set(possible) == set(KINDS) - {"link_cut"}
    assert {target for kind, target in met if kind == "kill"} == set(services)
    assert {target for kind, target in met if kind.startswith("nats")} == {"nats"}
    assert {target for kind, target in met if kind == "full"} == {"log", "offers"}
    assert failures.decode(failures.encode(tape).splitlines(), "tape", known=KINDS).failures == tape.failures


def test_in_regions_each_ones_server_streams_and_links_are_met() -> None:
    present = Present(["learner-0", "nats", "nats-eu", "nats-us", "wan"], ["us", "eu"])
    tape = failures.draw(3, sources(list(KINDS), present), 1000, 1.0)
    met = {(failure.kind, failure.target) for failure in tape.failures}
    assert {target for kind, target in met if kind.startswith("nats")} == {"nats", "nats-us", "nats-eu"}
    assert {target for kind, target in met if kind == "full"} == {"log/us", "log/eu", "offers/us", "offers/eu"}
    assert {target for kind, target in met if kind == "link_cut"} == {"link/us", "link/eu"}
    assert {target for kind, target in met if kind == "kill"} == {"learner-0"}
    assert present.meant(Failure(0, "link_cut", "link/us-eu", 1.0)) == ["link/us-eu"]  # one direction
    assert present.meant(Failure(0, "nats_kill", "nats-*", 0.0)) == ["nats-us", "nats-eu"]
    assert [present.region_of(target) for target in ("nats-eu", "log/us", "link/eu", "link/us-eu", "learner-0", "nats")] == [
        "eu", "us", "eu", None, None, None,
    ]  # fmt: skip


# ---- putting right


@pytest.fixture
def sleeper() -> Iterator[psutil.Process]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    yield psutil.Process(process.pid)
    process.kill()
    process.wait()


def wait_for(process: psutil.Process, *, stopped: bool) -> None:
    ends_s = time.monotonic() + DEADLINE_S
    while (process.status() == psutil.STATUS_STOPPED) != stopped:
        assert time.monotonic() < ends_s
        time.sleep(0.01)


@pytest.mark.services
async def test_what_an_earlier_chaos_left_is_put_right(tmp_path: Path, sleeper: psutil.Process) -> None:
    clock = tmp_path / "learner-0.clock"
    clock.write_text("3600")
    journal = FaultJournal(tmp_path)
    journal.add(what="clock", file=str(clock))
    journal.add(what="frozen", pid=sleeper.pid, began=revert.began(sleeper.pid))
    sleeper.suspend()
    wait_for(sleeper, stopped=True)

    await revert.revert_all(tmp_path)

    wait_for(sleeper, stopped=False)
    assert not clock.exists()
    assert not (tmp_path / JOURNAL).exists()


CHAOS = """
import signal, sys, time
from pathlib import Path
from diloco_ops.chaos import revert
directory, pid = Path(sys.argv[1]), int(sys.argv[2])
watchdog = revert.start_watchdog(directory)
revert.FaultJournal(directory).add(what="frozen", pid=pid, began=revert.began(pid))
revert.send(pid, revert.began(pid), signal.SIGSTOP)
print("frozen", flush=True)
time.sleep(3600)
"""


@pytest.mark.services
def test_a_chaos_that_is_killed_leaves_nothing_frozen(tmp_path: Path, sleeper: psutil.Process) -> None:
    chaos = subprocess.Popen([sys.executable, "-c", CHAOS, str(tmp_path), str(sleeper.pid)], stdout=subprocess.PIPE)
    try:
        assert chaos.stdout is not None
        assert chaos.stdout.readline() == b"frozen\n"
        wait_for(sleeper, stopped=True)
    finally:
        chaos.kill()
        chaos.communicate()
    wait_for(sleeper, stopped=False)


@pytest.mark.services
def test_no_signal_reaches_a_process_that_has_the_pid_of_another_one(sleeper: psutil.Process) -> None:
    assert not revert.send(sleeper.pid, "another", signal.SIGKILL)
    assert sleeper.status() != psutil.STATUS_ZOMBIE
    os.kill(sleeper.pid, 0)


def test_the_journal_keeps_what_was_not_put_right_and_goes_when_all_was(tmp_path: Path) -> None:
    journal = FaultJournal(tmp_path)
    first, second = journal.add(what="clock", file="a"), journal.add(what="clock", file="b")
    journal.drop(first)
    assert [entry["file"] for _, entry in FaultJournal(tmp_path).entries] == ["b"]
    assert FaultJournal(tmp_path).add(what="clock", file="c") not in (first, second)
    journal.drop(second)
    assert not (tmp_path / JOURNAL).exists()


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000, json.dumps({"x": {}}), json.dumps({"1": 2})])
def test_a_damaged_journal_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / JOURNAL).write_text(text)
    with pytest.raises(RunError, match=JOURNAL):
        FaultJournal(tmp_path)
