"""What is on disks and in logs gets damaged, cut off, mixed up: it is named and refused, and an older whole one serves."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from blake3 import blake3
from tests.made.fixtures import Diloco, Ended, Launch
from tests.made.run_checks import save_directory
from tests.made.up_command import TINY_GPT, Running, checkpoint_of_run, set_budget, some_text, wait_for_status
from tests.pace import DEADLINE_S, scaled_s
from tests.services.cluster import Cluster, small, some_versions
from tests.services.finished import Finished
from tests.services.toy import SAMPLES

from diloco import __version__
from diloco.core.run import tape
from diloco.core.tensors.fragments import TensorSpec, build_map
from diloco.nats import streams
from diloco.nats.transport import NatsTransport
from diloco.service import rundir
from diloco.states import state
from diloco.states.statefolder import StateFolder
from diloco.wire import framing
from diloco.wire.entries import Keyframe
from diloco_coordinator.monitor import Monitor
from diloco_ops.audit import verify
from diloco_ops.checkpoints.manifest import Manifest, load
from diloco_ops.up import resume

# ---- keyframes


@pytest.mark.promise("damaged keyframes are passed over and made again")
async def test_damaged_keyframes_are_passed_over_by_all_and_made_again(launch: Launch) -> None:
    # the table is large enough for keyframes in parts; who waits leaves something to be done when the syncer is back
    settings = small(
        shards=1, fragments__count=3, task__context=60_000, tokens=3 * 120 * SAMPLES, round__learners_wait=True,
        log__keyframe_factor=0.01, log__keep_bytes=0, liveness__dead_s=scaled_s(2.0),
    )  # fmt: skip
    run = launch(settings)
    await run.begin(until_step=30)
    await run.until(lambda: _keyframes_of(run) >= {0, 1, 2}, "keyframes of every fragment")
    await run.step_until(60)
    run.services[-1].kill()  # the only syncer
    assert run.services[-1].name == "syncer-0"
    link, (store, fragments) = await run.link(), await run.store()
    largest = max(fragments.fragments, key=lambda fragment: fragment.size).index
    other = next(index for index in range(3) if index != largest)
    bad = {largest: await _without_a_part(link, run, largest), other: await _altered(link, run, other)}

    verdict = await verify.check(save_directory(run))
    named = next(check for check in verdict.checks if check.name == "keyframes")
    assert named.state == "fails"
    assert all(f"fragment {index}: message {sequence}: " in named.found for index, sequence in bad.items())
    assert "is missing" in named.found

    before = len(run.events("keyframe_stored"))
    run.toys[0].stop()
    run.toys.pop(0)
    run.heartbeats.clear()
    late = run.toy_process(3)
    await run.until(lambda: bool(run.events("joined", late.name)), "a newcomer has loaded the log")  # before it is fixed
    run.syncer(0)
    run.gate.open()
    await run.ended()

    for name in ("syncer-0", late.name):
        refused = {(event["fragment"], event["sequence"]) for event in run.events("keyframe_refused", name)}
        assert refused == set(bad.items()), name
    stored = [event["fragment"] for event in run.events("keyframe_stored")[before:]]
    assert set(bad) <= set(stored)
    genesis = await store.reader.genesis()
    assert genesis is not None
    for log in await run.folded():
        assert log.passed_over == 0
        loaded = await store.reader.load(log.index, *genesis)
        assert loaded.refused == ()  # the newest is whole again
        assert bad.get(log.index) not in await store.reader.keyframe_sequences(log.index)  # the damaged one was not kept for it
        for toy in run.toys:
            assert toy.thetas[log.index].tobytes() == log.theta.tobytes()
        result = json.loads((run.directory / "toy-3.json").read_text())
        assert result["thetas"][str(log.index)] == blake3(log.theta.tobytes()).hexdigest()


def _keyframes_of(run: Cluster) -> set[int]:
    return {event["fragment"] for event in run.events("keyframe_stored")}


async def _newest(link: NatsTransport, run: Cluster, index: int) -> tuple[int, bytes, Keyframe]:
    stored = await link.last(run.subjects.log_stream, run.subjects.keyframe(index))
    assert stored is not None
    keyframe, _, _ = framing.unpack(stored.data, Keyframe, framing.run_id(run.name, run.settings.digest()))
    return stored.sequence, stored.data, keyframe


async def _without_a_part(link: NatsTransport, run: Cluster, index: int) -> int:
    """Drop a part of a fragment's newest keyframe; the keyframe's sequence."""
    sequence, _, keyframe = await _newest(link, run, index)
    assert keyframe.body.parts > 1
    await streams.drop(link, run.subjects.log_stream, [sequence - 1])
    return sequence


async def _altered(link: NatsTransport, run: Cluster, index: int) -> int:
    """Store a fragment's newest keyframe once more with another bit in it; its sequence."""
    _, raw, _ = await _newest(link, run, index)
    raw = raw[:70] + bytes([raw[70] ^ 1]) + raw[71:]
    return await link.append(run.subjects.keyframe(index), raw, message_id=uuid.uuid4().hex, fence=None, timeout_s=DEADLINE_S)


# ---- checkpoints of a whole run, through the command

STEP_TOKENS = 64
ROUND_STEPS = 24  # so that a learner's marker comes before its next version


def up(directory: Path, *arguments: str) -> Running:
    return Running("up", "--plain", "--run-dir", str(directory), *arguments)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one learner, of which two checkpoints were taken while it went on, and which was stopped then.

    Both hold the learner's state and versions of every fragment, and the learner has saved its state itself.
    """
    folder = tmp_path_factory.mktemp("damage")
    (folder / "text.txt").write_text(some_text())
    directory = folder / "run"
    options = [text for name, value in TINY_GPT.items() for text in ("--set", f"{name}={value}")]
    options += ["--set", f"round.steps={ROUND_STEPS}", "--learners", "1", "--shards", "1", "--tokens", str(10**9)]
    running = up(directory, *options, "--data", str(folder / "text.txt"), "--slow", "learner-0=100")
    saved = StateFolder(directory, "learner-0").generations()[0]
    try:
        wait_for_status(
            running,
            directory,
            lambda status: min(fragment["version"] for fragment in status["fragments"]) >= 1 and saved.exists(),
            "versions of every fragment, and a state of the learner's own",
        )
        for number in (1, 2):
            assert checkpoint_of_run(directory).path == directory / "whole" / str(number)
        running.process.send_signal(signal.SIGINT)
        assert running.end().code == 130
    finally:
        running.kill()
    known = rundir.load(directory)
    state.load(saved, framing.run_id(known.name, known.settings.digest()), "learner-0")
    return directory


@pytest.fixture
def taken(source: Path, tmp_path: Path) -> Path:
    """The newer of its checkpoints, in a folder beside the older one, to be damaged."""
    shutil.copytree(source / "whole", tmp_path / "whole")
    return tmp_path / "whole" / "2"


@pytest.fixture(scope="module")
def resumed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run gone on with from its newest checkpoint, to its end, with an archive from there on."""
    directory = tmp_path_factory.mktemp("resumed") / "run"
    before = load(source / "whole" / "2").manifest.learners["learner-0"].step
    assert before is not None
    more = (before + 2 * ROUND_STEPS) * STEP_TOKENS
    running = up(directory, "--resume", str(source), "--archive", "--json", "--slow", "learner-0=50")
    ended = ended_after(running, directory, lambda status: status["tokens_merged"] > more)
    report = json.loads(ended.out)
    assert report["tokens_processed"] > more
    assert report["settings"]["log"]["archive"] is True
    return directory


def ended_after(running: Running, directory: Path, reached: Callable[[dict[str, Any]], bool]) -> Ended:
    """Let a run end some time after its status is so, which would go on for ever."""
    try:
        status = wait_for_status(running, directory, reached, "it goes on")
        # far ahead: an offer that holds more than twice the budget is refused, and learners go on until they know of it
        set_budget(directory, status["nats_url"], 2 * status["tokens_processed"] + 500 * STEP_TOKENS)
        ended = running.end()
    finally:
        running.kill()
    assert ended.code == 0, ended
    return ended


@pytest.mark.slow  # going on is tested with toys, and verifying with an archive in test_verify
def test_a_run_goes_on_from_its_newest_checkpoint_with_an_archive(resumed: Path, source: Path, diloco: Diloco) -> None:
    [restored] = events(diloco, resumed, "checkpoint_restored")
    manifest = load(source / "whole" / "2").manifest
    assert restored["step"] == manifest.learners["learner-0"].step
    verdict = json.loads(diloco("verify", str(resumed), "--json").out)
    states = {check["name"]: check for check in verdict["checks"]}
    assert verdict["holds"]
    assert (states["log"]["state"], states["report"]["state"]) == ("holds", "holds")
    again = states["merges"]  # those since the checkpoint are in the archive, those before are not
    assert again["state"] == "unchecked"
    assert int(again["found"].split()[0]) > 0


@pytest.mark.slow  # `resume.prepare` itself is tested with toys; this is the option's way to it
def test_a_run_begins_again_at_an_earlier_version_with_more_learners(source: Path, tmp_path: Path, diloco: Diloco) -> None:
    directory, older = tmp_path / "again", source / "whole" / "1"
    running = up(directory, "--resume", str(older), "--resume-at", "1", "--learners", "2", "--slow", "learner-0=50")
    ended_after(running, directory, lambda status: min(fragment["version"] for fragment in status["fragments"]) > 1)
    assert events(diloco, directory, "checkpoint_restored") == []  # states belong to later versions
    report = json.loads((directory / "report.json").read_text())
    assert (directory / "services" / "learner-1.toml").exists()  # it may come too late to take a step
    assert min(fragment["versions"] for fragment in report["fragments"]) > 1
    assert diloco("verify", str(directory)).code == 0


def events(diloco: Diloco, directory: Path, name: str) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in diloco("logs", str(directory), "--json").out.splitlines()]
    return [entry for entry in entries if entry["event"] == name]


def test_resume_refuses_what_it_cannot_go_on_with_and_leaves_nothing_behind(
    source: Path, taken: Path, diloco: Diloco, tmp_path: Path
) -> None:
    used, text = tmp_path / "used", tmp_path / "text.txt"
    used.mkdir()
    (used / "thesis.txt").write_text("all my work")
    text.write_text("text")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    good = str(taken)
    for arguments, code, says in (
        (["--resume", "no-such-place"], 5, "no-such-place: is not a checkpoint"),
        (["--resume", str(text)], 5, f"{text}: is not a checkpoint"),
        (["--resume", str(taken.parent)], 5, "is not a checkpoint"),
        (["--resume", good, "--run-dir", str(used)], 5, "exists and is not empty"),
        (["--resume", good, "--resume-at", "100000"], 5, "--resume-at 100000: the log has versions 0 to"),
        (["--resume", good, "--resume-at", "-1"], 2, "--resume-at"),
        (
            ["--resume", good, "--set", "round.steps=13"],
            5,
            "cannot go on with another setting: round.steps is 24 there, 13 here",
        ),
        (["--resume", good, "--tokens", "9"], 5, "cannot go on with another setting: tokens is"),
        (["--resume", good, "--seed", "9"], 5, "cannot go on with another setting: seed is"),
        (["--resume", good, "--preset", "diloco"], 5, "it cannot go on with --preset diloco"),
        (["--resume", good, "--learners", "0"], 2, "--learners 0: expected a number from 1"),
        (["--resume", good, "--shards", "0"], 2, "shards = 0"),
        (["--resume", good, "--set", "log.keep_keyframe=3"], 2, "did you mean 'log.keep_keyframes'"),
        (["--resume", good, "--slow", "learner-1=2"], 2, "no learner 'learner-1'"),
        (["--resume", good, "--slow", "learner-0"], 2, "LEARNER=FACTOR"),
        (["--resume", good, "--data", "nowhere.txt"], 3, "--data nowhere.txt"),
    ):
        ended = diloco("up", "--plain", *arguments)
        assert (ended.code, says in ended.err, ended.err.count("\n")) == (code, True, 1), (arguments, ended)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert not (tmp_path / "runs").exists() or list((tmp_path / "runs").iterdir()) == []


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def alter(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)


@pytest.mark.parametrize("name", ["log.snapshot", "bucket.snapshot", "learners/learner-0.safetensors", "manifest.json"])
@pytest.mark.parametrize(("harm", "says"), [(cut, ""), (alter, "damaged"), (Path.unlink, "")])
def test_damaged_checkpoint_is_named_by_the_command(
    taken: Path, name: str, harm: Callable[[Path], None], says: str, diloco: Diloco
) -> None:
    harm(taken / name)
    shutil.rmtree(taken.parent / "1")

    ended = diloco("up", "--resume", str(taken), "--run-dir", "new")

    assert (ended.code, ended.err.count("\n")) == (5, 1)
    assert str(taken if name == "manifest.json" else taken / name) in ended.err
    assert says in ended.err
    assert not Path("new").exists()


def test_manifest_of_another_version_or_that_reaches_out_is_refused(taken: Path, diloco: Diloco) -> None:
    manifest = json.loads((taken / "manifest.json").read_text())
    shutil.rmtree(taken.parent / "1")
    learner = manifest["learners"]["learner-0"]
    outside = {"saved": learner["saved"] | {"file": "../1/log.snapshot"}, "step": 1, "versions": None}
    other_log = manifest["log"] | {"config": manifest["log"]["config"] | {"name": "ORDERS"}}
    for changes, says in (
        ({"version": 9}, f"made by version {__version__} of diloco (format 9)"),
        ({"format": "tar"}, "is not a checkpoint's manifest"),
        ({"settings": manifest["settings"] | {"warp": 9}}, "no setting 'warp'"),
        ({"learners": {"learner-0": outside}}, "outside of the checkpoint"),
        ({"learners": {"../../learner-0": learner}}, "damaged"),
        ({"log": other_log}, "of stream 'ORDERS'"),
        ({"log": manifest["log"] | {"state": {}}}, "damaged"),
        ({"fragments": None}, "damaged"),
    ):
        write_manifest(taken, manifest | changes)
        ended = diloco("up", "--resume", str(taken), "--run-dir", "new")
        assert (ended.code, says in ended.err, ended.err.count("\n")) == (5, True, 1), (changes, ended)
        assert not Path("new").exists()


def write_manifest(folder: Path, values: dict[str, Any]) -> None:
    """Write a manifest that has the hash which it states, where it can have one."""
    file = folder / "manifest.json"
    with contextlib.suppress(msgspec.ValidationError):
        manifest = msgspec.convert(values, Manifest)
        values = values | {"hash": manifest.right_hash()}
    file.write_text(json.dumps(values))


def test_an_older_checkpoint_serves_and_it_is_said(source: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    shutil.copytree(source, directory)
    alter(directory / "whole" / "2" / "log.snapshot")
    (directory / "whole" / "3").mkdir()  # one that was begun, and never finished
    found = resume.find(directory)
    assert found.checkpoint.path == directory / "whole" / "1"
    assert [("is incomplete" in note, "is damaged" in note) for note in found.notes] == [
        (True, False), (False, True), (False, False)
    ]  # fmt: skip
    assert str(directory / "whole" / "1") in found.notes[2]


def test_a_stopped_learner_s_newest_whole_state_goes_into_a_checkpoint(source: Path, tmp_path: Path, diloco: Diloco) -> None:
    directory = tmp_path / "run"
    shutil.copytree(source, directory, ignore=shutil.ignore_patterns("whole"))
    newest, previous = StateFolder(directory, "learner-0").generations()
    good = newest.read_bytes()
    for new, old, whole, notes in (
        (good, good, True, []),
        (good[:-9], good, True, [newest]),  # damaged
        (None, good, True, []),  # its process died between the two renames
        (good[:-9], b"", False, [newest, previous]),
        (None, None, False, []),
    ):
        for path, raw in ((newest, new), (previous, old)):
            path.unlink(missing_ok=True)
            if raw is not None:
                path.write_bytes(raw)
        ended = diloco("checkpoint", str(directory))
        assert ended.code == 0, ended
        number = max(int(path.name) for path in (directory / "whole").iterdir())  # counts on where the run's bucket is
        manifest = load(directory / "whole" / str(number)).manifest
        assert set(manifest.learners) == ({"learner-0"} if whole else set())
        assert ended.out.count("note: ") == len(notes)
        for path in notes:
            assert f"note: {path}: not a whole state of learner learner-0" in ended.out


DIES = """
import os, signal, sys
from pathlib import Path
from diloco.process import files
from diloco_ops import cli
from diloco_ops.broker import snapshot
save, saved = snapshot.save, []

async def dying_save(link, stream, path):
    if len(saved) == int(os.environ["AFTER"]):
        path.write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    saved.append(stream)
    return await save(link, stream, path)

def dying_replace(path, write, previous=None):
    write(path.with_name(path.name + ".draft"))
    os.kill(os.getpid(), signal.SIGKILL)

snapshot.save, files.replace = dying_save, dying_replace
sys.argv = ["diloco", "checkpoint", os.environ["RUN"]]
cli.main()
"""


@pytest.mark.slow  # it takes two processes to be killed that import all there is
async def test_a_checkpoint_killed_in_the_middle_is_taken_for_none(launch: Launch) -> None:
    run = launch(small(tokens=10**9, round__steps=24))
    await run.begin()
    await some_versions(run)
    directory = save_directory(run)
    whole = (await asyncio.to_thread(checkpoint_of_run, directory)).path
    for number, saved in enumerate((1, 2), start=2):  # in the middle of the log's copy, and before the manifest is renamed
        environment = os.environ | {"AFTER": str(saved), "RUN": str(directory)}
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", DIES, env=environment)
        assert await process.wait() == -signal.SIGKILL
        left = directory / "whole" / str(number)
        assert left.is_dir()
        assert any(left.iterdir())
        found = resume.find(directory)
        assert found.checkpoint.path == whole
        assert f"{left}: is not a checkpoint, or is incomplete" in found.notes[0]
    again = await asyncio.to_thread(checkpoint_of_run, directory)
    assert again.path.name == "4"
    assert resume.find(directory).checkpoint.path == again.path


# ---- full disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB, where this process may mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(place)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("may not mount a file system here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


async def test_a_learner_whose_disk_is_full_trains_on_and_its_old_checkpoint_stays(launch: Launch, small_disk: Path) -> None:
    gpt: dict[str, Any] = {key.replace(".", "__"): value for key, value in TINY_GPT.items()}
    run = launch(small(learners=1, shards=1, task__name="gpt", tokens=10**9, **gpt))
    run.coordinator()
    run.syncer(0)
    text = run.directory / "text.txt"
    text.write_text(some_text())
    # the log has a disk of its own, so that it holds every complaint
    logs = run.directory / "learner-logs"
    logs.mkdir()
    (small_disk / "logs").symlink_to(logs)
    learner = run.start(
        "learner-0", "diloco_learner", data=str(text), state_dir=str(small_disk), checkpoint_s=0.3, slow=20.0, leave_s=2.0
    )
    await run.link()
    saved = small_disk / "checkpoints" / "learner-0.safetensors"
    await run.until(saved.exists, "a checkpoint")

    def attempts() -> list[str]:
        """How each attempt to save ended; of those that failed in a row, one is logged."""
        lines = (logs / "learner-0.jsonl").read_text().splitlines(keepends=True)
        events = [json.loads(line)["event"] for line in lines if line.endswith("\n")]
        return [event for event in events if event in ("checkpoint_saved", "checkpoint_not_saved")]

    def drafts() -> list[Path]:
        return list(saved.parent.glob("*.draft"))

    def fill() -> bool:
        """Write until there is no room; whether none comes back either, as that of a draft that is given up."""
        with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        return not drafts() and not os.statvfs(small_disk).f_bavail

    ballast = small_disk / "ballast"
    await run.until(fill, "the disk is full")
    kept = saved.read_bytes()
    await run.until(lambda: attempts()[-1] == "checkpoint_not_saved", "it says that it cannot save")
    stepped, versions = run.steps(), sum(run.heartbeats["learner-0"][-1].versions)
    await run.until(lambda: run.steps() > stepped + 200, "it trains on")
    await run.until(lambda: sum(run.heartbeats["learner-0"][-1].versions) > versions, "versions are made")
    assert saved.read_bytes() == kept
    await run.until(lambda: not drafts(), "no draft is left")
    ballast.unlink()

    def saved_again() -> bool:
        with contextlib.suppress(FileNotFoundError):  # between two renames
            return saved.read_bytes() != kept
        return False

    await run.until(saved_again, "it saves again")
    assert learner.process.poll() is None
    assert ("checkpoint_not_saved", "checkpoint_not_saved") not in itertools.pairwise(attempts())


# ---- run directories


@pytest.fixture
def copy(finished: Finished, tmp_path: Path) -> Path:
    """A finished run, to be damaged."""
    shutil.copytree(finished.path, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "damaged"),
        (b"", "damaged"),
        (b"\xff\xfe\x00", "damaged"),
        (b"[1]", "damaged"),
        ({"format": 9, "version": "7.7"}, "made by version 7.7 of diloco (format 9)"),
        ({"settings": {"warp": 9}}, "no setting 'warp'"),
        ({"settings": {"round": {"steps": 0}}}, "round.steps = 0"),
        ({"name": 3}, "damaged"),
        ({"nats_url": None}, "damaged"),
        ({"data": 3}, "damaged"),
    ],
)
def test_run_json_that_is_not_fit_ends_every_command_with_one_line(
    tmp_path: Path, diloco: Diloco, content: bytes | dict[str, Any], says: str
) -> None:
    directory = tmp_path / "run"
    rundir.RunDirectory(directory, "r", "", None, small()).save()
    (directory / "logs").mkdir()
    if isinstance(content, dict):
        content = json.dumps(json.loads((directory / "run.json").read_text()) | content).encode()
    (directory / "run.json").write_bytes(content)
    for command in ("status", "verify", "replay", "checkpoint", "up --run-dir", "up --resume", "chaos --for 1"):
        ended = diloco(*command.split(), str(directory))
        assert (ended.code, says in ended.err, ended.err.count("\n")) == (5, True, 1), (command, ended)
    assert (directory / "run.json").read_bytes() == content
    assert diloco("logs", str(directory)).code == 0  # needs none


@pytest.mark.parametrize("content", [None, "{", "[]", "3", "{}", '{"learners": 3}'])
def test_status_of_a_finished_run_that_is_damaged_is_named(copy: Path, diloco: Diloco, content: str | None) -> None:
    file = copy / "status.json"  # `up` leaves one
    if content is not None:
        file.write_text(content)
    ended = diloco("status", str(copy))
    assert (ended.code, ended.err.count("\n")) == (5, 1), ended
    assert f"{file}: missing or damaged" in ended.err
    assert str(copy / "report.json") in ended.err


def test_damaged_tapes_and_reports_are_named_and_never_a_traceback(copy: Path, diloco: Diloco) -> None:
    own = copy / "tapes" / "toy-0.tape"
    good = own.read_bytes()
    middle, foreign = len(good) // 2, tape.Header(b"another!", "toy-0").pack()
    for raw, says in (
        (good[:middle] + bytes([good[middle] ^ 0xFF]) + good[middle + 1 :], "damaged at byte"),
        (good[:25], "header is damaged"),
        (foreign, f"belongs to run {b'another!'.hex()}"),
        (good[:8] + b"\x09" + good[9:], "format version 9, expected 1; read it with the version of diloco that wrote it"),
        (b"not a tape at all", "not a tape: its"),
    ):
        own.write_bytes(raw)
        ended, again = diloco("verify", str(copy), "--json"), diloco("replay", str(copy), "--json")
        tapes = next(check for check in json.loads(ended.out)["checks"] if check["name"] == "tapes")
        assert (ended.code, tapes["state"]) == (0, "unchecked"), (says, ended)
        assert f"{own}: " in tapes["found"]
        assert says in tapes["found"]
        assert (again.code, json.loads(again.out)["holds"]) == (0, True)
    own.write_bytes(good[:-3])  # its process died while it wrote
    assert "1 end in the middle of a block" in diloco("verify", str(copy), "--json").out
    for content in ("{", "[]", "null", '{"fragments": 3}', '{"fragments": []}'):
        (copy / "report.json").write_text(content)
        ended = diloco("verify", str(copy), "--json")
        report = next(check for check in json.loads(ended.out)["checks"] if check["name"] == "report")
        assert (ended.code, report["state"]) == (1, "fails")
        assert "report.json: damaged" in report["found"]


def test_damaged_files_of_the_server_are_noticed(copy: Path, diloco: Diloco) -> None:
    block = max((copy / "nats").rglob("DILOCO_*_LOG/msgs/*.blk"), key=lambda path: path.stat().st_size)
    alter(block)
    (block.parent / "index.db").unlink(missing_ok=True)  # or the server would not look at it
    ended = diloco("verify", str(copy), "--json")
    report = next(check for check in json.loads(ended.out)["checks"] if check["name"] == "report")
    assert (ended.code, report["state"]) == (1, "fails")  # the server goes on with what is whole before it
    assert "versions is" in report["found"]


def test_series_that_are_damaged_are_not_taken_over() -> None:
    fragments = build_map([TensorSpec("w", (8,))], 1)
    first = Monitor("r", small(), fragments, "")
    whole = first.series(12.0)
    learner = {"points": [[1.0, 2, 3, 4.0]], "activity": [[0.0, 1.0, "stepping"]], "tokens": 32}
    second = Monitor("r", small(), fragments, "")
    changes: dict[str, Any]
    for changes in (
        {"ledger": None}, {"ledger": {}}, {"validation": [[1]]}, {"learners": 3}, {"learners": {"a": 3}}, {"merges": [3]},
        {"learners": {"a": learner | {"points": [[1]]}}}, {"learners": {"a": learner | {"activity": None}}},
        {"learners": {"a": learner | {"tokens": "many"}}},
    ):  # fmt: skip
        with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
            second.resume(json.loads(json.dumps(whole | {"validation": [[1.0, 2, 3.0]]} | changes)))
        assert second.series(12.0) == whole, changes
    second.resume(json.loads(json.dumps(whole | {"learners": {"a": learner}})))
    assert second.tokens_processed() == 32
