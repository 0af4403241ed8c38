"""What users get wrong: they are told what, where and what to do, by an exit code of its own, and never by a traceback."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.made.fixtures import Diloco, Launch, MakeServer
from tests.pace import DEADLINE_S
from tests.services.cluster import (
    NEVER_S,
    Cluster,
    check_accounts,
    check_all_merged,
    fill,
    newest_entries,
    small,
    some_versions,
)
from tests.services.toy import Regression

from diloco.core.tensors.fragments import TensorSpec
from diloco.errors import AdmissionError
from diloco.nats.registry import Registry
from diloco.service import rundir
from diloco.service.rundir import RunDirectory
from diloco.settings.presets import run_settings
from diloco.wire import framing
from diloco.wire.entries import Record
from diloco_ops.broker.server import find_binary, free_port
from diloco_ops.up.supervise import last_words

STORAGE_BYTES = 8 << 20


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--set", "round.step=5"], ["round.step", "did you mean 'round.steps'"]),
        (["--set", "codec.offer_bit=8"], ["codec.offer_bit", "did you mean 'codec.offer_bits'"]),
        (["--set", "round.quorum=5", "--learners", "4"], ["round.quorum = 5", "learners = 4"]),
        (["--set", "round.steps=0"], ["round.steps = 0", "greater than or equal to 1"]),
        (
            ["--set", "liveness.dead_s=1", "--set", "liveness.heartbeat_s=2", "--plain"],
            ["liveness.dead_s = 1", "liveness.heartbeat_s = 2"],
        ),
        (["--set", "liveness.lease_s=3", "--set", "liveness.dead_s=10"], ["liveness.lease_s = 3", "liveness.dead_s = 10"]),
        (["--set", "liveness.takeover_s=0.001"], ["liveness.takeover_s = 0.001"]),
        (["--set", "liveness.lease_s=0.1", "--set", "liveness.heartbeat_s=60"], ["liveness.heartbeat_s = 60"]),
        (["--set", "codec.offer_bits=5"], ["codec.offer_bits = 5", "4, 8, 16 or 32"]),
        (["--set", "codec.record_bits=0"], ["codec.record_bits = 0"]),
        (["--set", "round.steps"], ["round.steps", "KEY=VALUE"]),
        (["--set", "inner.learning_rate=nan"], ["inner.learning_rate"]),
        (["--tokens", "0"], ["tokens = 0"]),
        (["--learners", "0"], ["learners = 0"]),
        (["--shards", "25"], ["shards = 25", "fragments.count = 24"]),
        (["--preset", "publishd"], ["publishd", "did you mean 'published'"]),
        (["--slow", "learner-9=2"], ["learner-9", "learner-0 to learner-3"]),
        (["--slow", "learner-1=0.5"], ["learner-1=0.5", "at least 1"]),
        (["--slow", "nonsense"], ["--slow nonsense", "LEARNER=FACTOR"]),
        (["--slow", "learner-1=inf"], ["learner-1=inf", "LEARNER=FACTOR"]),
        (["--nats", "http://host:1"], ["http://host:1", "nats://HOST:PORT"]),
        (["--resume-at", "3"], ["--resume-at 3", "--resume PATH"]),
        (
            ["--nats", "nats://127.0.0.1:1", "--shards", "3", "--set", 'regions.names=["us","eu","ap"]'],
            ["--nats nats://127.0.0.1:1: is one server", "regions us, eu, ap"],
        ),
        (["--standbys", "-1"], ["--standbys"]),
        (["--devices-per-learner", "0"], ["--devices-per-learner"]),
        (["--tokens", "many"], ["--tokens", "expected a count, such as 600000, 600k", "(diloco up --help)"]),
        (["--tokens", "600k1"], ["--tokens", "600k, 7.5M or 1e6"]),
        (["--tokns", "3"], ["--tokns"]),
    ],
)
def test_wrong_settings_are_named_before_anything_is_started(
    diloco: Diloco, tmp_path: Path, arguments: list[str], says: list[str]
) -> None:
    ended = diloco("up", "--set", "fragments.count=24", *arguments)
    assert ended.code == 2
    for text in says:
        assert text in ended.err
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_is_not_named_is_shown_the_others(diloco: Diloco) -> None:
    ended = diloco()
    assert (ended.code, ended.err) == (2, "")
    assert "Train one model with several learners" in ended.out


def test_a_task_that_ends_its_process_is_named(diloco: Diloco, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "leaving.py").write_text("import sys\nsys.exit(print('usage: leaving.py DATA'))\n")
    ended = diloco("check", "leaving.py")
    said = f"task.name = 'leaving:make': leaving cannot be imported: SystemExit ({tmp_path}/leaving.py, line 2)"
    assert (ended.code, ended.err) == (2, f"diloco: {said}\n")
    (tmp_path / "leaving.py").write_text("import os\ndef make(settings, data):\n    print('[]', flush=True)\n    os._exit(0)\n")
    ended = diloco("check", "leaving.py")
    assert (ended.code, ended.err) == (
        1, "diloco: diloco_learner.examine ended without an answer: the task ended the process, for example by os._exit\n"
    )  # fmt: skip


def test_the_last_line_of_ours_is_told_of_a_process_that_goes_on_to_write() -> None:
    said = "a warning: of a library\ndiloco-learner: task: loss() returned a float: take the mean\ndone: bye\n"
    assert last_words(said, 2) == "task: loss() returned a float: take the mean"
    assert last_words("Killed: 9\n", 137) == "9"
    assert last_words("", 137) == "ended with code 137, see the logs of the run"


def test_data_that_is_not_there_is_named_before_anything_is_started(diloco: Diloco, tmp_path: Path) -> None:
    ended = diloco("up", "--data", "no-such-folder")
    assert (ended.code, ended.err) == (3, "diloco: --data no-such-folder: there is no such file or folder\n")
    assert list(tmp_path.iterdir()) == []


def test_a_task_that_cannot_be_trained_is_named_before_anything_is_started(diloco: Diloco, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("too few")
    for code, arguments, says in (
        (2, ["--task", "width=3"], "--task width: the built-in task has no options"),
        (2, ["--task", "width"], "--task width: expected KEY=VALUE, for example width=64"),
        (2, ["--set", "task.name=json:wrong", "--data", "hf://corpus"], "task.name = 'json:wrong': 'wrong' does not exist"),
        (3, ["--data", "text.txt"], "text.txt, share 0 of 4: 1 bytes of text, one batch of 16 windows"),
        (2, ["--devices-per-learner", "3"], "a batch has 16 rows (rows_per_batch, or the first axis of its"),
    ):
        ended = diloco("up", "--plain", "--run-dir", "mine", *arguments)
        assert (ended.code, says in ended.err) == (code, True), ended.err
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]  # so the corrected one can begin


def test_run_directory_of_something_else_is_left_alone(diloco: Diloco, tmp_path: Path) -> None:
    settings = run_settings(overrides={"round.steps": 24, "seed": 1})

    def directory(name: str) -> Path:
        RunDirectory(tmp_path / name, name, "", None, settings).save()
        return tmp_path / name

    finished, other, version, damaged = (directory(name) for name in ("finished", "other", "version", "damaged"))
    (finished / "report.json").write_text("{}")
    values = json.loads((version / "run.json").read_text())
    (version / "run.json").write_text(json.dumps(values | {"format": 99, "version": "9.9.9"}))
    (damaged / "run.json").write_text("{")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("all my work")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    for arguments, says in {
        ("up", "--run-dir", str(finished)): "finished",
        ("up", "--run-dir", str(other), "--set", "round.steps=12"): "round.steps is 12 there, 24 here",
        ("up", "--run-dir", str(other), "--data", str(mine)): "begun with data",
        ("up", "--run-dir", str(version)): "9.9.9",
        ("up", "--run-dir", str(damaged)): "damaged",
        ("up", "--run-dir", str(mine)): "not a run's directory",
        ("status", str(mine)): "not a run's directory",
        ("status", str(version)): "9.9.9",
        ("status", str(other)): "has not been started",
        ("logs", str(mine)): "no logs",
    }.items():
        ended = diloco(*arguments)
        assert (ended.code, says in ended.err) == (5, True), (arguments, ended)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


async def test_run_that_exists_with_other_settings_or_of_another_version_is_refused(launch: Launch) -> None:
    mine = launch(small())
    await mine.create()
    other = launch(small(round__steps=7), name=mine.name)
    coordinator = other.coordinator()
    newer = launch(small())
    await newer.create()
    registry = await Registry.open(await newer.link(), newer.subjects.bucket, create=False)
    await registry.put("run", json.dumps(small().model_dump() | {"warp": 9}).encode())
    syncer = newer.syncer(0)
    learner = newer.toy_process(0)

    ended = await mine.refused(coordinator, syncer, learner)

    expected = [
        (5, "round.steps is 6 there, 7 here"),
        (5, "was made by another version"),
        (5, "no setting 'warp'"),
    ]
    for (code, said), (expected_code, says) in zip(ended, expected, strict=True):
        assert (code, says in said) == (expected_code, True), said


async def test_a_run_whose_name_is_taken_is_not_begun(launch: Launch, diloco: Diloco, tmp_path: Path) -> None:
    cluster = launch(small(), name="taken")
    await cluster.create()
    arguments = ["up", "--plain", "--nats", cluster.url, "--run-dir", "elsewhere/taken"]
    ended = await asyncio.to_thread(diloco, *arguments)
    assert (ended.code, ended.err.count("\n")) == (5, 1)
    assert f"run 'taken' exists at {cluster.url}" in ended.err
    assert "choose another --run-dir" in ended.err
    assert not (tmp_path / "elsewhere").exists()


def test_a_run_is_at_work_once(diloco: Diloco, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "mine", "mine", "", None, small())
    directory.save()
    with rundir.locked(directory.path):
        ended = diloco("up", "--plain", "--run-dir", "mine")
    assert (ended.code, ended.err.count("\n")) == (5, 1)
    assert "another `diloco up` is at work on this run" in ended.err
    assert "diloco status" in ended.err


async def test_learner_with_another_model_is_told_the_first_tensor_that_differs(launch: Launch) -> None:
    def taller(task: Regression) -> list[TensorSpec]:
        return [replace(spec, shape=(9, 8)) if spec.path == "linear/weight" else spec for spec in task.specs]

    def one_more(task: Regression) -> list[TensorSpec]:
        return [*task.specs, TensorSpec("extra", (3,))]

    def no_embedding(task: Regression) -> list[TensorSpec]:
        return [TensorSpec(spec.path, spec.shape) for spec in task.specs]

    cluster = launch(small(learners=1))
    await cluster.create()
    cluster.toy(0)
    await cluster.link()
    await cluster.until(lambda: "toy-0" in cluster.heartbeats, "the first learner's model is the run's")
    for name, specs, says in (
        ("taller", taller, "tensor 'linear/weight' differs: the run has shape (8, 8), this learner's model has shape (9, 8)"),
        ("more", one_more, "tensor 'extra' differs: the run has no such tensor, this learner's model has shape (3,)"),
        ("plain", no_embedding, "tensor 'table' differs: the run has shape (8, 4), embedding-like"),
    ):
        toy = cluster.toy(0, name=name, specs=specs)
        cluster.toys.remove(toy)  # it is to fail
        await cluster.until(lambda toy=toy: not toy.running, "it is refused")  # type: ignore[misc]
        assert isinstance(toy.failure, AdmissionError)
        assert says in str(toy.failure)
        assert cluster.name in str(toy.failure)
        assert name not in cluster.heartbeats  # it never took part


@pytest.mark.promise("bad input ends with one clear line and an exit code of its own")
async def test_data_that_is_missing_empty_or_too_short_is_named(launch: Launch, tmp_path: Path) -> None:
    cluster = launch(small(task__name="gpt", task__context=64, task__batch=8))
    await cluster.create()
    empty, short = tmp_path / "empty", tmp_path / "short.txt"
    empty.mkdir()
    short.write_text("a few words\n" * 20)
    missing = tmp_path / "no-such-folder"
    wrong = {missing: "there is no such file or folder", empty: "holds no text", short: "one batch of 8 windows of 64 bytes"}
    learners = [cluster.start(path.stem, "diloco_learner", data=str(path)) for path in wrong]
    ended = await cluster.refused(*learners)
    for (code, said), (path, says) in zip(ended, wrong.items(), strict=True):
        assert (code, str(path) in said, says in said) == (3, True, True), said


@pytest.fixture
def without_jetstream(tmp_path: Path) -> Iterator[str]:
    """URL of a server that knows nothing of JetStream."""
    output, ends_s = tmp_path / "plain-nats.log", time.monotonic() + DEADLINE_S
    while True:
        port = free_port()
        with output.open("wb") as log:
            server = subprocess.Popen([find_binary(), "-a", "127.0.0.1", "-p", str(port)], stdout=log, stderr=log)
        while server.poll() is None and b"Server is ready" not in output.read_bytes():
            assert time.monotonic() < ends_s, output.read_text()
            time.sleep(0.02)
        if server.poll() is None:
            break
        assert b"address already in use" in output.read_bytes(), output.read_text()
    yield f"nats://127.0.0.1:{port}"
    server.kill()
    server.wait()


async def test_a_coordinator_makes_no_run_whose_time_limits_contradict_each_other(launch: Launch) -> None:
    cluster = launch(small(liveness__dead_s=1.0, liveness__heartbeat_s=2.0))
    [(code, said)] = await cluster.refused(cluster.coordinator())
    assert code == 2
    assert f"run '{cluster.name}': liveness.dead_s = 1 with liveness.heartbeat_s = 2: " in said


async def test_services_of_a_run_that_exists_warn_of_such_time_limits_and_go_on(launch: Launch) -> None:
    cluster = launch(small(liveness__lease_s=1.0))
    await cluster.begin(coordinator=False)
    await some_versions(cluster, 1)
    [warning] = cluster.events("time_limits_contradict", "syncer-0")
    assert str(warning["reason"]).startswith("liveness.lease_s = 1 with liveness.dead_s = 10: ")


async def test_server_without_jetstream_is_named(launch: Launch, without_jetstream: str) -> None:
    cluster = launch(small(), without_jetstream)
    [(code, said)] = await cluster.refused(cluster.syncer(0))
    assert code == 4
    assert f"NATS at {without_jetstream}: JetStream is not enabled; start nats-server with -js" in said


def test_up_at_a_server_without_jetstream_names_it(diloco: Diloco, without_jetstream: str) -> None:
    ended = diloco("up", "--plain", "--nats", without_jetstream, "--run-dir", "mine")
    assert ended.code == 4
    assert f"NATS at {without_jetstream}: JetStream is not enabled; start nats-server with -js" in ended.err


async def test_full_storage_delays_versions_and_loses_nothing(make_server: MakeServer, launch: Launch) -> None:
    server = make_server(max_file_bytes=STORAGE_BYTES)
    cluster = launch(small(shards=1, tokens=10**9, liveness__dead_s=NEVER_S), server.url)
    await cluster.begin(coordinator=False)
    await cluster.until(lambda: min(cluster.heartbeats["toy-0"][-1].versions) >= 2, "some versions")
    api = (await cluster.link()).bulk.jetstream(timeout=DEADLINE_S)
    await fill(api, STORAGE_BYTES)

    def met() -> list[Mapping[str, Any]]:
        return [*cluster.events("storage_full"), *cluster.events("offer_not_stored")]

    await cluster.until(lambda: bool(met()), "a process meets the limit")
    stepped, at = cluster.steps(), await logged(cluster)
    await cluster.until(lambda: cluster.steps() > stepped + 30, "learners go on stepping")
    assert await logged(cluster) - at <= 4  # what was under way
    assert all("storage is full" in str(values["reason"]) for values in met())
    await api.delete_stream("foreign")
    await some_versions(cluster)

    await cluster.use_up()

    heartbeats, folded = await cluster.finished_heartbeats(), await cluster.folded()
    check_accounts(heartbeats, folded)
    for log in folded:
        check_all_merged(heartbeats, log)
    # once for each offer or version that had to wait, however often it was tried
    for who in [toy.name for toy in cluster.toys]:
        waited = [(values["fragment"], values["number"]) for values in cluster.events("offer_not_stored", who)]
        assert len(waited) == len(set(waited))


async def logged(cluster: Cluster) -> int:
    """Versions of all fragments that the log has."""
    entries = [stored for stored in await newest_entries(cluster) if stored is not None]
    return sum(framing.unpack(stored.data, Record, cluster.run_id)[0].version for stored in entries)
