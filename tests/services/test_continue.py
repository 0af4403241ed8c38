"""``diloco up --continue``: a run that is over goes on with more tokens, as a new run that begins where it ended."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.made.fixtures import Diloco, Launch, MakeServer, Regions
from tests.made.run_checks import WAITS, save_directory
from tests.services.apart import apart
from tests.services.cluster import Cluster, Folded, small, some_versions
from tests.services.toy import SAMPLES, Toy

from diloco.control.creation import POLL_S, KnownRun
from diloco.control.genesis import await_genesis
from diloco.core.tensors.fragments import FragmentMap
from diloco.errors import RunError, SettingsError
from diloco.log.log import Log
from diloco.process import observe
from diloco.process.retry import until_available
from diloco.service.rundir import RunDirectory
from diloco.states import statefolder
from diloco_ops.audit import verify
from diloco_ops.checkpoints.manifest import MANIFEST
from diloco_ops.reading import run_reader
from diloco_ops.reading.run_reader import read_chains
from diloco_ops.up import continuing, resume

TOKENS = 3 * 30 * SAMPLES
NAMES = ["toy-0", "toy-1", "toy-2"]


def may_be_trained(directory: RunDirectory, fragments: FragmentMap) -> RunDirectory:
    """Toys have no task to look at."""
    return directory


async def prepared(source: continuing.ContinuationSource, new: RunDirectory, trained: Any = may_be_trained) -> RunDirectory:
    """Prepare the continuation, again where the connection is lost: of one that fails nothing is left."""
    return await until_available(lambda: continuing.prepare(source, new, trained), observe.get_logger())


async def continued(
    launch: Launch, run: Cluster, name: str, data: str | None = None, **overrides: Any
) -> tuple[Cluster, list[str]]:
    """A cluster on the same server that continues a run, and the notes for the user."""
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    source = continuing.find(save_directory(run), dotted)
    settings = source.changed(source.directory.settings)
    name = f"{run.name}-{name}"  # the server has other tests' runs, too
    new = RunDirectory(run.directory.parent / name, name, run.url, data, settings)
    made = await prepared(source, new)
    cluster: Cluster = launch(made.settings, run.url, name, made.path)
    return cluster, source.notes


async def to_its_end(run: Cluster, learners: int = 3) -> list[Folded]:
    for share in range(learners):
        run.toy(share)
    await run.begin()
    await run.ended()
    return await run.folded()


async def test_a_run_that_is_over_begins_again_at_an_earlier_version(
    make_server: MakeServer, launch: Launch, tmp_path: Path
) -> None:
    run = launch(small(tokens=TOKENS // 3, learners=1, **WAITS))
    [closed, *_] = await to_its_end(run, learners=1)
    directory = save_directory(run)
    (directory / "report.json").write_text("{}")
    with pytest.raises(RunError, match=f"for more tokens: diloco up --continue {directory} --tokens N; to begin again at an"):
        await asyncio.to_thread(resume.find, directory)
    assert closed.entries[-1].version > 1

    found = await asyncio.to_thread(resume.find, directory, 1)

    again = RunDirectory(tmp_path / "again", run.name, make_server().url, None, run.settings)
    await resume.prepare(found.checkpoint, again, at=1)
    begun = launch(run.settings, again.nats_url, run.name, again.path)
    log, _ = await begun.store()
    chains = await until_available(lambda: read_chains(log), observe.get_logger())
    assert [(chain.version, chain.closed) for chain in chains] == [(1, False)] * run.settings.fragments.count


async def test_a_run_in_regions_that_is_over_goes_on_in_each_of_them(regions: Regions, tmp_path: Path) -> None:
    run = await regions(apart(tokens=TOKENS))
    await run.begin()
    await run.ended()
    run.save()
    async with run_reader.opened(run.directory) as seen:
        ended = [chain.state_hash for chain in await read_chains(seen.log)]
    source = continuing.find(run.directory, {"tokens": TOKENS})
    new = RunDirectory(tmp_path / "on", "on", "", None, source.changed(run.settings))

    await prepared(source, new)

    async with run_reader.opened(new.path) as seen:  # a majority of regions has it, or that would be refused
        chains = await read_chains(seen.log)
    assert [(chain.version, chain.state_hash) for chain in chains] == [(0, state_hash) for state_hash in ended]


def batches_of(run: Cluster) -> list[tuple[int, int]]:
    """Share and index of every batch that its learners trained on."""
    lines = [line for name in NAMES for line in Toy.diary(run.directory, name).read_text().splitlines()]
    return [(int(share), int(batch)) for share, batch in (line.split() for line in lines)]


async def first_states(run: Cluster) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Parameters and momentum of version 0, by fragment."""
    store, fragments = await run.store()
    genesis = await until_available(store.reader.genesis, observe.get_logger())
    assert genesis is not None
    loading = [partial(store.reader.load_first, fragment.index, *genesis) for fragment in fragments.fragments]
    loaded = [await until_available(load, observe.get_logger()) for load in loading]
    return [(first.replica.theta, first.replica.momentum) for first in loaded]


def check_begins(states: Sequence[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]], ended: Sequence[Folded]) -> None:
    for (theta, momentum), log in zip(states, ended, strict=True):
        np.testing.assert_array_equal(theta, log.theta, strict=True)
        np.testing.assert_array_equal(momentum, log.momentum, strict=True)
        assert np.any(momentum)


@pytest.mark.promise("a run that is over continues with more tokens")
async def test_a_run_that_is_over_goes_on_twice_with_its_model_momentum_and_data(launch: Launch) -> None:
    first = launch(small(tokens=TOKENS, log__keep_bytes=0, log__keyframe_factor=0.1, **WAITS))  # its old versions are dropped
    ended = await to_its_end(first)

    second, notes = await continued(launch, first, "second", tokens=2 * TOKENS, round__steps=5)

    assert notes == [f"{first.directory / 'checkpoints'}: has no learner's last state: learners' optimizers begin afresh"]
    states, (_, fragments) = await first_states(second), await second.store()
    check_begins(states, ended)
    weights = load_file(statefolder.weights_before(second.directory))
    for fragment, log in zip(fragments.fragments, ended, strict=True):
        np.testing.assert_array_equal(fragment.gather(weights), log.theta, strict=True)
    assert second.settings.tokens == 2 * TOKENS
    assert second.settings.round.steps == 5
    ended_again = await to_its_end(second)
    checked = await until_available(lambda: verify.check(save_directory(second)), observe.get_logger())
    assert checked.holds, checked
    assert {check.name for check in checked.checks if check.state == "unchecked"} == {"merges", "report"}

    third, _ = await continued(launch, second, "third", tokens=TOKENS)

    check_begins(await first_states(third), ended_again)
    before = third.settings.continues
    assert before is not None
    assert (before.run, before.identity) == (second.name, (await second.store())[0].run.hex())
    merged = [log.tokens_merged for log in ended], [log.tokens_merged for log in ended_again]
    assert sum(map(min, merged)) <= before.tokens <= sum(map(max, merged))
    trained = [set(batches_of(run)) for run in (first, second)]
    assert not trained[0] & trained[1]
    for share in range(3):  # and none is left out
        own = sorted(batch for each in trained for of, batch in each if of == share)
        assert own == list(range(before.batches[share]))


@pytest.mark.slow
async def test_an_outer_adamw_goes_on_with_the_parameters_alone(launch: Launch) -> None:
    first = launch(small("data-parallel", tokens=3 * 20 * SAMPLES))
    ended = await to_its_end(first)
    second, notes = await continued(launch, first, "second", tokens=3 * 20 * SAMPLES)

    assert "outer.optimizer = adamw counts its versions from 0: its moments begin afresh" in notes
    for (theta, moments), log in zip(await first_states(second), ended, strict=True):
        np.testing.assert_array_equal(theta, log.theta, strict=True)
        assert not np.any(moments)
    after = await to_its_end(second)
    assert all(not np.array_equal(before.theta, log.theta) for before, log in zip(ended, after, strict=True))
    assert (await verify.check(save_directory(second))).holds


async def test_a_run_that_is_not_over_is_not_continued(launch: Launch, tmp_path: Path) -> None:
    run = launch(small(tokens=10**9))
    await run.begin()
    await some_versions(run)
    source = continuing.find(save_directory(run), {"tokens": 1000})
    new = RunDirectory(tmp_path / "new", "new", run.url, None, run.settings)
    count = run.settings.fragments.count
    said = f"run '{run.name}' is not finished, it is going on: {count} of the {count} logs"
    with pytest.raises(RunError, match=said):
        await prepared(source, new)
    assert not new.path.exists()


async def test_nothing_is_left_of_a_continuation_that_fails(make_server: MakeServer, launch: Launch, tmp_path: Path) -> None:
    first = launch(small(tokens=TOKENS // 3, learners=1, **WAITS))
    await to_its_end(first, learners=1)
    source = continuing.find(save_directory(first), {"tokens": TOKENS})
    taken = RunDirectory(tmp_path / "x", first.name, first.url, None, first.settings)
    with pytest.raises(RunError, match=f"run '{first.name}' already exists at its server; choose another --run-dir"):
        await prepared(source, taken)

    def refused(directory: RunDirectory, fragments: FragmentMap) -> RunDirectory:
        raise SettingsError("the task's model is another one")

    name = f"{first.name}-new"
    new = RunDirectory(tmp_path / name, name, first.url, "/elsewhere", first.settings)
    with pytest.raises(SettingsError, match="another one"):
        await prepared(source, new, refused)
    assert not new.path.exists()
    statefolder.weights_before(new.path).mkdir(parents=True)  # a folder in the place of the file
    with pytest.raises(OSError, match="weights"):
        await prepared(source, new)
    statefolder.weights_before(new.path).rmdir()
    made = await prepared(source, new)  # of the failed one nothing is at the server
    said = "other data: its shares begin at their beginning, and losses cannot be compared with those before"
    assert said in source.notes
    kept = json.loads((made.path / "run.json").read_text())["settings"]["continues"]
    assert (kept["run"], kept["batches"]) == (first.name, [])
    # at a server that has not the version 0 that was stored for it, it has none: no learner makes another one
    elsewhere = launch(made.settings, make_server().url, name, tmp_path / "elsewhere")
    await elsewhere.create()
    link = await elsewhere.link()
    run = KnownRun(name, made.settings, await link.bucket(elsewhere.subjects.bucket, create=False))
    log = Log(link, name, run.identity, (await first.store())[1], made.settings)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(await_genesis(run, log, "toy-0", None, observe.get_logger()), 2 * POLL_S)
    assert await run.registry.get("founder") is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "needs --tokens N"),
        (("--tokens", "0"), "tokens = 0"),
        (("--tokens", "9", "--seed", "77"), "there, 77 here; seed, learners, fragments, task"),
        (("--tokens", "9", "--set", "task.width=32"), "task.width is 8 there, 32 here; seed, learners, fragments, task"),
        (("--tokens", "9", "--preset", "diloco"), "has preset decoupled; it cannot go on with --preset diloco"),
        (("--tokens", "9", "--resume", "old"), "leave one of them out"),
        (("--tokens", "9", "--init", "file"), "a run of --continue already has weights"),
        (("--tokens", "9", "--set", "continues.run=x"), "names the run that is continued; use --continue RUN"),
        (("--tokens", "9", "--run-dir", "old"), "exists and is not empty; a run that is over goes on in a new directory"),
        (("--tokens", "9", "--learners", "0"), "expected a number from 1 to"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_made(diloco: Diloco, options: Sequence[str], said: str) -> None:
    RunDirectory(Path("old"), "old", "", None, small(tokens=1000)).save()
    (Path("old") / "services").mkdir()
    new = () if "--run-dir" in options else ("--run-dir", "new")
    ended = diloco("up", "--continue", "old", *new, *options)
    assert ended.code in (2, 5)
    assert said in ended.err
    assert not Path("new").exists()


def test_the_data_of_a_run_that_was_begun_elsewhere_are_asked_for(diloco: Diloco) -> None:
    RunDirectory(Path("seen"), "seen", "nats://127.0.0.1:1", None, small(tokens=1000)).save()  # as diloco attach makes it
    ended = diloco("up", "--continue", "seen", "--tokens", "9", "--run-dir", "new")
    assert ended.code == 5
    assert "does not say which data the run's learners had; give them with --data" in ended.err


def test_a_checkpoint_and_a_folder_are_no_runs(diloco: Diloco) -> None:
    Path("checkpoint").mkdir()
    (Path("checkpoint") / MANIFEST).write_text("{}")
    ended = diloco("up", "--continue", "checkpoint", "--tokens", "9", "--run-dir", "new")
    assert ended.code == 5
    assert "continues with its own token budget: diloco up --resume checkpoint" in ended.err
    ended = diloco("up", "--continue", "nowhere", "--tokens", "9", "--run-dir", "new")
    assert ended.code == 5
    assert "not a run's directory" in ended.err
