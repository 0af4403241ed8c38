"""Checkpoints of a whole run while it goes on, and going on from them in a new place."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.made.fixtures import Launch, MakeServer
from tests.made.run_checks import has_whole_rounds, save_directory
from tests.services.cluster import NEVER_S, Cluster, Folded, check_accounts, small, some_versions
from tests.services.toy import SAMPLES, Regression, Toy

from diloco.core.tensors.fragments import TensorSpec
from diloco.errors import DilocoError, RunError
from diloco.service.rundir import RunDirectory
from diloco.settings.presets import changed_settings
from diloco.wire import framing
from diloco.wire.control import SnapshotMarker
from diloco_ops.broker.server import Server
from diloco_ops.checkpoints import checkpoint
from diloco_ops.checkpoints.manifest import RunCheckpoint, load
from diloco_ops.operate import operate, rollback
from diloco_ops.reading import run_reader
from diloco_ops.up import resume

pytestmark = pytest.mark.usefixtures("patient_commands")
NAMES = ["toy-0", "toy-1", "toy-2"]


async def restored(
    source: RunCheckpoint, launch: Launch, server: Server, path: Path, *, at: int | None = None, **overrides: Any
) -> Cluster:
    """A cluster that goes on from a checkpoint, on another server."""
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    settings = resume.changed(source, dotted)
    await resume.prepare(source, RunDirectory(path, source.manifest.run, server.url, None, settings), at=at)
    cluster: Cluster = launch(settings, server.url, source.manifest.run, path)
    return cluster


async def checkpoint_of(run: Cluster) -> tuple[RunCheckpoint, list[str]]:
    """Take a checkpoint while learners go on, slowly: on a busy machine a marker comes late, and few rounds may pass."""
    with run.slowly():
        run.gate.open()
        return await checkpoint.take(save_directory(run))


async def go_on(cluster: Cluster, learners: int = 3, **behaviour: Any) -> list[Folded]:
    for share in range(learners):
        cluster.toy(share, **behaviour)
    await cluster.begin()
    await cluster.ended()
    return await whole(cluster)


@pytest.mark.parametrize("bits", [pytest.param(32, marks=pytest.mark.slow), 4])
@pytest.mark.promise("a run resumed from its checkpoint comes to the same bits")
async def test_a_run_goes_on_from_its_checkpoint_to_the_same_bits(
    make_server: MakeServer, launch: Launch, tmp_path: Path, bits: int
) -> None:
    # every learner answers every round and waits for its version, so that the bits do not depend on time; with four of them
    # a value, what rounding left over matters too: the learners', and the owner's
    codec = {"codec__offer_bits": bits, "codec__record_bits": bits, "codec__error_feedback": True}
    settings = small("diloco", tokens=3 * 90 * SAMPLES, liveness__dead_s=NEVER_S, **codec)
    unbroken = launch(settings)
    unbroken.learners(hands_over=has_whole_rounds, **unbroken.answers_held)
    await unbroken.begin(until_step=0)
    await unbroken.step_to_version(4)

    taken, problems = await checkpoint_of(unbroken)

    await unbroken.ended()
    [end] = await whole(unbroken)
    assert problems == []
    assert sorted(taken.manifest.learners) == NAMES
    [cut] = taken.manifest.fragments
    assert 4 <= cut.version < end.entries[-1].version
    resumed = await restored(taken, launch, make_server(), tmp_path / "resumed")
    [again] = await go_on(resumed, hands_over=has_whole_rounds)
    assert [record.version for record in again.versions] == [record.version for record in end.versions]
    assert [record.state_hash for record in again.versions] == [record.state_hash for record in end.versions]
    for before, after in zip(unbroken.toys, resumed.toys, strict=True):
        np.testing.assert_array_equal(before.thetas[0], after.thetas[0], strict=True)
        assert before.member is not None
        assert after.member is not None
        assert before.member.step == after.member.step


async def whole(run: Cluster) -> list[Folded]:
    """The folded log with all entries since genesis: checkpoints make keyframes, and folding begins at the newest."""
    store, _ = await run.store()
    folded = []
    for log in await run.folded():
        stop = await store.reader.head_sequence(log.index)
        entries = [entry.record async for entry in store.entries.follow([log.index], 1, lambda refusal: None, stop)]
        folded.append(replace(log, entries=entries, before={}))
    return folded


SEEN, RATES = "state/seen", np.array([1, 2, 4], np.float32)  # an array of state, and what each step adds to it


def seeing(run: Cluster) -> dict[str, Any]:
    """The behaviour of learners that have a state, which is merged, beside their parameters."""

    def begins(task: Regression) -> None:
        task.tensors[SEEN] = np.zeros(3, np.float32)

    def sees(toy: Toy) -> None:
        assert toy.task is not None
        toy.task.tensors[SEEN] += RATES

    def specs(task: Regression) -> list[TensorSpec]:
        return [TensorSpec(path, tensor.shape, path == "table", state=path == SEEN) for path, tensor in task.tensors.items()]

    return run.answers_held | {"initialise": begins, "before_step": sees, "specs": specs}


async def test_state_that_is_merged_goes_on_from_where_it_was_when_all_were_killed(
    make_server: MakeServer, launch: Launch, tmp_path: Path
) -> None:
    # without an overlap an offer's steps are those since the version that its learner holds, so its value follows from them
    server = make_server()
    run = launch(small(tokens=3 * 120 * SAMPLES, carry__overlap=False), server.url)
    run.learners(checkpoint_s=0.1, **seeing(run))
    await run.begin(until_step=0)
    await run.step_to_version(2)
    await run.until(lambda: len(run.events("checkpoint_saved")) > len(NAMES), "checkpoints")
    await stop(run)
    server.kill()
    (tmp_path / "nats-0").rename(run.directory / "nats")  # where the server of `diloco up` has its files

    found = await asyncio.to_thread(resume.find, save_directory(run))

    resumed = await restored(found.checkpoint, launch, make_server(), tmp_path / "resumed")
    again = await go_on(resumed, **seeing(resumed))
    assert len(resumed.events("checkpoint_restored")) == len(NAMES)
    _, fragments = await resumed.store()
    [log] = [again[fragment.index] for fragment in fragments.fragments if fragment.state]
    cut = found.checkpoint.manifest.fragments[log.index].version
    assert 0 < cut < log.versions[-1].version
    values = {0: np.zeros(3)}
    for record in log.versions:
        merged = [values[member.base_version] + member.steps * RATES for member in record.members]
        weights = [member.weight for member in record.members]
        values[record.version] = np.average(merged, axis=0, weights=weights)
    newest = log.versions[-1].version
    np.testing.assert_allclose(log.theta, values[newest], rtol=1e-5)
    assert (log.theta > values[cut] + RATES).all()
    for toy in resumed.toys:
        np.testing.assert_array_equal(toy.thetas[log.index], log.theta, strict=True)
    check_accounts(await resumed.finished_heartbeats(), again)


async def test_a_checkpoint_counts_on_from_marks_that_only_learners_know(launch: Launch) -> None:
    run = launch(small(tokens=10**9))
    await run.begin()
    await some_versions(run)
    store, _ = await run.store()
    marker = framing.pack(SnapshotMarker(50, [1] * run.settings.fragments.count), store.run)
    folder = run.directory / "checkpoints" / "50"
    while not folder.is_dir() or len(list(folder.glob("*.safetensors"))) < len(NAMES):
        await store.transport.publish(run.subjects.marker, marker)
        await asyncio.sleep(0.1)
    shutil.rmtree(folder)  # as if it had come to nothing

    taken, _ = await checkpoint.take(save_directory(run))

    # a learner that had answered number 50 answers none below it; that this run goes on meanwhile may cost a residual
    assert sorted(taken.manifest.learners) == NAMES
    assert all(learner.versions is not None for learner in taken.manifest.learners.values())


async def test_with_other_members_nothing_that_was_merged_is_lost(
    make_server: MakeServer, launch: Launch, tmp_path: Path
) -> None:
    run = launch(small(tokens=3 * 120 * SAMPLES))
    run.learners(**run.answers_held)
    await run.begin(until_step=0)
    await run.step_to_version(2)

    changes = ["outer.learning_rate=0.25", "liveness.dead_s=9.0"]
    await asyncio.to_thread(operate.set_, save_directory(run), changes)
    taken, _ = await checkpoint_of(run)

    await stop(run)
    resumed = await restored(taken, launch, make_server(), tmp_path / "resumed", shards=1, liveness__dead_s=8.0)
    async with run_reader.reached(resumed.directory) as reached:  # changes stay in force, but for what is given now
        now = reached.run.now
        assert (now.settings.outer.learning_rate, now.settings.liveness.dead_s, now.number) == (0.25, 8.0, 3)
    folded = await go_on(resumed, learners=2)  # the third one's share of the data is theirs in time
    assert len([service for service in resumed.services if service.name.startswith("syncer")]) == 1
    heartbeats = await resumed.finished_heartbeats()
    for log, cut in zip(folded, taken.manifest.fragments, strict=True):
        assert log.passed_over == 0
        assert log.versions[-1].version > cut.version > 0
        assert [record.version for record in log.versions] == list(range(1, len(log.versions) + 1))  # from the beginning
        # what each of the two has processed since the beginning of the run is merged, or lost and counted, or held
        for name, heartbeat in heartbeats.items():
            merged = sum(m.tokens for record in log.versions for m in record.members if m.learner == name)
            assert heartbeat.tokens == merged + heartbeat.lost_tokens[log.index] + heartbeat.fragment_tokens[log.index]
        assert any(member.learner == "toy-2" for record in log.versions[: cut.version] for member in record.members)
        assert not any(member.learner == "toy-2" for record in log.versions[cut.version :] for member in record.members)
    for name in ("toy-0", "toy-1"):
        assert resumed.events("checkpoint_restored", name)


async def test_a_run_begins_again_at_an_earlier_version(make_server: MakeServer, launch: Launch, tmp_path: Path) -> None:
    run = launch(small(tokens=3 * 160 * SAMPLES, log__keyframe_factor=0.2))
    run.learners(**run.answers_held)
    await run.begin(until_step=0)
    await run.step_to_version(3)
    # which at an earlier version is not ordered yet
    await asyncio.to_thread(rollback.rollback, save_directory(run), 1, "")
    await run.step_to_version(5)
    taken, _ = await checkpoint_of(run)
    run.hurry()
    await run.ended()
    before = await whole(run)
    last = min(cut.version for cut in taken.manifest.fragments)
    with pytest.raises(RunError, match=r"--resume-at 1000: the log has versions 0 to \d+ of fragment 0; .*log.keep_bytes"):
        await restored(taken, launch, server := make_server(), tmp_path / "no", at=1000)
    assert not (tmp_path / "no" / "run.json").exists()

    resumed = await restored(taken, launch, server, tmp_path / "resumed", at=2)

    assert last > 2
    store, _ = await resumed.store()
    genesis = await store.reader.genesis()
    assert genesis is not None
    for index in range(4):
        assert (await store.transport.last(resumed.subjects.log_stream, resumed.subjects.record(index))) is not None
        assert (await store.reader.load(index, *genesis)).replica.chain.version <= 2
    folded = await go_on(resumed)
    check_accounts(await resumed.finished_heartbeats(), folded)
    for old, new in zip(before, folded, strict=True):
        assert new.passed_over == 0
        assert [r.entry for log in (old, new) for r in log.entries if r.rolled_back] == ["rollback"]
        assert not any(r.rolled_back for r in new.entries)
        assert [r.state_hash for r in new.versions if r.version <= 2] == [r.state_hash for r in old.versions if r.version <= 2]
        assert new.versions[-1].version > 2
        assert next(r for r in new.versions if r.version == 3).state_hash not in {r.state_hash for r in old.versions}
        for toy in resumed.toys:
            np.testing.assert_array_equal(toy.thetas[new.index], new.theta, strict=True)


async def stop(run: Cluster) -> None:
    for service in run.services:
        service.kill()
    for toy in run.toys:
        await asyncio.to_thread(toy.stop)
    run.toys.clear()


async def two_checkpoints(run: Cluster) -> tuple[Path, list[Path]]:
    """Of a run that has just begun, whose learners are held; its directory and theirs."""
    run.learners(**run.answers_held)
    await run.begin(until_step=0)
    await run.step_to_version(1)
    directory = save_directory(run)
    return directory, [(await checkpoint.take(directory))[0].path for _ in range(2)]


async def test_damaged_checkpoints_are_named_and_an_older_whole_one_is_used(launch: Launch, tmp_path: Path) -> None:
    run = launch(small(tokens=10**9))
    directory, [older, newer] = await two_checkpoints(run)
    assert directory / "whole" == older.parent == newer.parent
    assert resume.find(directory).checkpoint.path == newer
    assert resume.find(directory).notes == []

    log, state, manifest = newer / "log.snapshot", newer / "learners" / "toy-1.safetensors", newer / "manifest.json"
    for file, said in ((log, "is damaged"), (state, "is damaged"), (manifest, "damaged")):
        whole = file.read_bytes()
        file.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
        found = resume.find(directory)
        assert found.checkpoint.path == older
        assert [str(file) in note and said in note for note in found.notes] == [True, False]
        assert str(older) in found.notes[1]
        assert resume.find(newer).checkpoint.path == older
        file.write_bytes(whole[:-1])  # truncated
        assert str(file) in resume.find(directory).notes[0]
        file.write_bytes(whole)
    state.unlink()
    assert f"{state}: missing" in resume.find(directory).notes[0]

    values = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(values | {"version": 1}))
    assert "(format 1); this is" in resume.find(directory).notes[0]
    manifest.write_text(json.dumps({"format": "something else"}))
    assert "is not a checkpoint's manifest" in resume.find(directory).notes[0]
    manifest.unlink()  # as if it had never been finished
    assert "is incomplete" in resume.find(directory).notes[0]
    (older / "manifest.json").write_text("{")
    with pytest.raises(RunError, match=rf"{newer}: is not a checkpoint.*; {older}/manifest.json: damaged"):
        resume.find(directory)
    with pytest.raises(RunError, match=f"{tmp_path}: is not a checkpoint"):
        resume.find(tmp_path)


def refused(source: RunCheckpoint, overrides: dict[str, Any]) -> str:
    with pytest.raises(DilocoError) as caught:
        resume.changed(source, overrides)
    return str(caught.value)


async def test_settings_that_would_break_the_run_are_refused_by_name(launch: Launch) -> None:
    run = launch(small(tokens=10**9))
    _, [older, _] = await two_checkpoints(run)
    source = load(older)
    for name, value in {
        "fragments.count": 5, "task.width": 16, "outer.momentum": 0.4, "codec.record_bits": 8, "tokens": 1, "seed": 4,
        "round.steps": 7,
    }.items():  # fmt: skip
        assert f"cannot go on with another setting: {name} is " in refused(source, {name: value})
    assert "no setting 'log.keep_byte' (did you mean 'log.keep_bytes'?)" in refused(source, {"log.keep_byte": 1})
    allowed = {"shards": 1, "log.keep_bytes": 5, "log.archive": True, "liveness.dead_s": 3.0}
    assert resume.changed(source, allowed) == changed_settings(run.settings, allowed, "test")


async def test_a_full_disk_leaves_the_old_checkpoint_and_the_run_as_they_were(launch: Launch) -> None:
    run = launch(small(task__context=40_000, fragments__count=3))
    directory, [older, newer] = await two_checkpoints(run)

    ended = await command("ulimit -f 64; exec ", ["checkpoint", str(directory)])  # 64 KiB: no file may be larger

    assert ended[0] == 5
    assert "no checkpoint was taken" in ended[1]
    assert "File too large" in ended[1]
    assert sorted((directory / "whole").iterdir()) == [older, newer]
    assert resume.find(directory).checkpoint.path == newer
    run.gate.open()
    await run.ended()
    check_accounts(await run.finished_heartbeats(), await whole(run))


async def command(before: str, arguments: Sequence[str]) -> tuple[int, str]:
    """``diloco`` in a shell of its own: its exit code, and all that it says."""
    diloco = Path(sys.executable).parent / "diloco"
    process = await asyncio.create_subprocess_exec(
        "/bin/bash",
        "-c",
        f"{before}{diloco} {' '.join(arguments)}",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    assert process.returncode is not None
    assert b"Traceback" not in said
    return process.returncode, said.decode()
