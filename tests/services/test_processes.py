"""A learner of several processes: trained by ``diloco up``, made again by ``diloco replay``, and killed in part."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from tests.made.span_collector import Collector, collecting
from tests.pace import DEADLINE_S, scaled_s

from diloco.processes.meeting import free_port

DILOCO = str(Path(sys.executable).parent / "diloco")
CONTEXT = 16
SETTINGS = {
    "task.layers": 1,
    "task.width": 64,  # so that tensors are large enough to be split
    "task.heads": 2,
    "task.context": CONTEXT,
    "fragments.count": 4,
    "round.steps": 8,
    "inner.optimizer": "adamw",  # which compiles three times as fast as Muon
    "liveness.heartbeat_s": 0.2,
    "log.keyframe_factor": 1000,
}
PATIENCE_S = 3 * DEADLINE_S  # for a whole run, whose processes import and compile first
LASTS = 10**6  # steps: the run goes on until it is ended
ENVIRONMENT = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}  # compiling is most of the work


def batch_of(processes: int) -> int:
    """Rows, which the processes divide, and one process less."""
    return 4 if processes < 3 else 6


def arguments(directory: Path, steps: int, *more: str, processes: int = 2) -> list[str]:
    batch = batch_of(processes)
    settings = SETTINGS | {"task.batch": batch}
    sets = [argument for name, value in settings.items() for argument in ("--set", f"{name}={value}")]
    devices = str(max(2, processes))
    shape = [
        "--learners",
        "1",
        "--shards",
        "1",
        "--processes-per-learner",
        str(processes),
        "--devices-per-learner",
        devices,
        *more,
    ]
    return [DILOCO, "up", *shape, "--tokens", str(steps * batch * CONTEXT), "--run-dir", str(directory), "--json", *sets]


def events(directory: Path, service: str) -> list[dict[str, Any]]:
    file = directory / "logs" / f"{service}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def named(directory: Path, service: str, event: str) -> list[dict[str, Any]]:
    return [found for found in events(directory, service) if found["event"] == event]


def stopped(directory: Path, service: str) -> bool:
    return bool(named(directory, service, "stopped"))


def report_of(directory: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((directory / "report.json").read_text())
    return report


def accounts_hold(directory: Path) -> None:
    """Each token is merged or lost, and the log is as its records say."""
    learner = report_of(directory)["learners"]["learner-0"]
    assert abs(learner["tokens_processed"] - learner["tokens_merged"] - learner["tokens_lost"]) <= 2
    ended = subprocess.run([DILOCO, "verify", str(directory), "--json"], capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def trained(directory: Path, steps: int, **environment: str) -> None:
    """Train a run to its end."""
    given, known = arguments(directory, steps), ENVIRONMENT | environment
    ended = subprocess.run(given, capture_output=True, text=True, timeout=PATIENCE_S, env=known)
    assert ended.returncode == 0, ended.stderr


def check_spans(collector: Collector) -> None:
    """The carriers of fragments tell of offers and reads as one learner."""
    reads = [span for span in collector.spans if span.name == "read" and span.member == "learner-0"]
    offers = {span.trace: span for span in collector.spans if span.name == "offer"}
    assert {span.about["diloco.fragment"] for span in reads} == {0, 1, 2, 3}
    assert len({span.span for span in reads}) == len(reads), "each version is read once"
    rounds = [span for span in collector.spans if span.name == "round" and span.links]
    assert rounds
    for round_ in rounds:
        [(offered, _)] = round_.links
        parts = {span.name for span in collector.spans if span.parent == offers[offered].span}
        assert (offers[offered].member, parts) == ("learner-0", {"snapshot", "encode", "upload"})


def test_two_processes_are_one_learner(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with collecting() as collector:
        trained(directory, 24, DILOCO_TELEMETRY=json.dumps({"endpoint": collector.url, "sample": 1}))
    check_spans(collector)
    report = report_of(directory)
    assert list(report["learners"]) == ["learner-0"]
    assert report["val_loss"] < report["val_loss_initial"]
    learner = report["learners"]["learner-0"]
    assert abs(learner["tokens_processed"] - learner["tokens_merged"] - learner["tokens_lost"]) <= 2
    services = ("learner-0", "learner-0-p1")
    carried = [named(directory, service, "carries")[0]["fragments"] for service in services]
    assert sorted(carried[0] + carried[1]) == [0, 1, 2, 3]
    assert all(carried)
    left = [named(directory, service, "island_left")[0] for service in services]
    assert left[0]["steps"] == left[1]["steps"] == learner["steps"]
    assert all(event["bytes_up"] > 0 for event in left), "each stores the offers of its fragments"
    problems = [event for service in services for event in events(directory, service)]
    assert [event for event in problems if event["level"] in ("error", "critical")] == []


@pytest.mark.slow
def test_one_process_on_the_same_mesh_makes_the_same_offers_to_the_last_bit(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    trained(directory, 100)
    accounts_hold(directory)
    replayed = subprocess.run(
        [DILOCO, "replay", str(directory), "--learners", "--json"], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    [life] = json.loads(replayed.stdout)["learners"]
    assert (life["parameters"], life["wrong"]) == (True, "")
    assert life["offers"] > 10


class Up:
    """``diloco up`` that goes on while its processes are killed."""

    def __init__(self, directory: Path, command: list[str], environment: dict[str, str], step_tokens: int) -> None:
        self.directory, self.step_tokens = directory, step_tokens
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)

    def pid(self, service: str) -> int:
        """Of the process that runs now."""
        while not (written := (self.directory / "services" / f"{service}.pid").read_text()):
            time.sleep(0.01)  # it is just being written
        return int(written)

    def until(self, reached: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not reached():
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < deadline_s
            time.sleep(0.1)

    def trains(self) -> None:
        """Wait until the present generation has had a version made."""
        versions = self.merged()
        self.until(lambda: self.merged() > versions + 4)

    def finish(self) -> None:
        """Give the run a budget that is soon used up, and wait for its end."""
        for steps in (1000, 10_000, 100_000):  # while the command begins, the run goes on
            budget = self.status()["tokens_processed"] + steps * self.step_tokens
            command = [DILOCO, "set", str(self.directory), f"tokens={budget}"]
            if subprocess.run(command, capture_output=True, timeout=PATIENCE_S).returncode == 0:
                break
        self.until(lambda: self.process.poll() is not None or (self.directory / "report.json").exists())

    def status(self) -> dict[str, Any]:
        """The run's status, as its directory has it."""
        status: dict[str, Any] = json.loads((self.directory / "status.json").read_text())
        return status

    def merged(self) -> int:
        file = self.directory / "status.json"
        return int(self.status()["versions"]) if file.exists() else 0


@contextmanager
def up(directory: Path, *more: str, processes: int = 2, checkpoint_s: float = 10.0) -> Iterator[Up]:
    environment = ENVIRONMENT | {"DILOCO_CHECKPOINT_S": str(checkpoint_s)}
    command = arguments(directory, LASTS, *more, processes=processes)
    running = Up(directory, command, environment, batch_of(processes) * CONTEXT)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.send_signal(signal.SIGINT)
        running.process.communicate(timeout=PATIENCE_S)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "survivor", "number"),
    [
        ("learner-0-p1", "learner-0", signal.SIGKILL),
        ("learner-0", "learner-0-p1", signal.SIGKILL),
        ("learner-0-p1", "learner-0", signal.SIGSTOP),
    ],
)
def test_when_one_process_is_lost_all_end_and_come_back_as_a_new_generation(
    tmp_path: Path, lost: str, survivor: str, number: signal.Signals
) -> None:
    with up(tmp_path / "run") as running:
        directory = running.directory
        running.trains()
        pid = running.pid(survivor)
        os.kill(running.pid(lost), number)
        running.until(lambda: running.pid(survivor) != pid or bool(named(directory, survivor, "island_ended")))
        running.until(lambda: len(named(directory, "learner-0", "processes_met")) == 2)
        running.trains()
        first, second = (event["generation"] for event in named(directory, "learner-0", "processes_met"))
        assert first < second
        running.finish()
    accounts_hold(directory)


@pytest.mark.slow
def test_where_a_process_is_killed_at_most_two_steps_are_lost_and_tokens_add_up(tmp_path: Path) -> None:
    """Again and again, without any checkpoint, with fragments of which the killed process had all but the values."""
    with up(tmp_path / "run", "--least-processes", "1", checkpoint_s=10**6) as running:
        directory = running.directory
        for times in (1, 2):
            running.until(lambda: len(named(directory, "learner-0", "processes_met")) == len(restored(directory)) + 1)
            running.until(lambda: named(directory, "learner-0", "processes_met")[-1]["processes"] == 2)
            running.trains()
            last = restored(directory)[-1:]
            os.kill(running.pid("learner-0-p1"), signal.SIGKILL)
            running.until(lambda times=times: len(named(directory, "learner-0", "state_kept")) == times)  # type: ignore[misc]
            running.until(lambda last=last: restored(directory)[-1:] != last)  # type: ignore[misc]
        running.finish()
    accounts_hold(directory)
    begun = 0  # with so many steps did the generation begin
    for event in events(directory, "learner-0"):
        if event["event"] == "state_kept":
            taken = begun + event["steps"]
        elif event["event"] == "checkpoint_restored":
            if event["file"] == "learner-0.kept.safetensors":
                assert taken - 2 <= event["step"] <= taken
            begun = event["step"]


def met(directory: Path, service: str) -> list[list[int]]:
    """Return the processes of the generations that a process of the learner was in."""
    return [event["members"] for event in named(directory, service, "processes_met")]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_another_process_leads_where_process_0_is_lost_and_it_is_taken_back(tmp_path: Path, number: signal.Signals) -> None:
    """Killed, it is held away by stopping the one that is begun in its place; stopped, it goes on itself where it was."""
    with up(tmp_path / "run", "--least-processes", "2", processes=3, checkpoint_s=1.0) as running:
        directory = running.directory
        running.trains()
        running.until(lambda: len(list((directory / "checkpoints").glob("*.safetensors"))) == 6)
        lost = running.pid("learner-0")
        os.kill(lost, number)
        if number == signal.SIGKILL:
            running.until(lambda: running.pid("learner-0") != lost)
            os.kill(running.pid("learner-0"), signal.SIGSTOP)
        running.until(lambda: met(directory, "learner-0-p1") == [[0, 1, 2], [1, 2]])
        running.trains()
        os.kill(running.pid("learner-0"), signal.SIGCONT)
        running.until(lambda: len(met(directory, "learner-0")) > 1 and met(directory, "learner-0")[-1] == [0, 1, 2])
        running.trains()
        running.finish()
    accounts_hold(directory)
    alone = named(directory, "learner-0-p1", "island_regroups")[0]
    began, after = (
        next(event["step"] for event in restored(directory, service) if "step" in event)
        for service in ("learner-0-p1", "learner-0")
    )
    assert began > 0, "of the newest checkpoint of all three"
    assert after == began + alone["steps"], "process 0 goes on from all that the others have trained"
    assert not named(directory, "learner-0", "state_kept")
    assert not named(directory, "learner-0", "state_fresh")


@pytest.mark.slow
def test_a_process_that_is_asked_to_end_takes_all_with_it_and_their_work_is_merged(tmp_path: Path) -> None:
    with up(tmp_path / "run") as running:
        running.trains()
        os.kill(running.pid("learner-0-p1"), signal.SIGTERM)
        for service in ("learner-0", "learner-0-p1"):
            running.until(partial(stopped, running.directory, service))
        [asked] = named(running.directory, "learner-0", "process_asked_to_end")
        assert asked["process"] == 1
        assert not named(running.directory, "learner-0", "island_ended")


@contextmanager
def island(run: Up, count: int) -> Iterator[Callable[[int], subprocess.Popen[bytes]]]:
    """Give a function that begins a process of a learner beside those of ``up``: any one process of it may be left."""
    own = tomllib.loads((run.directory / "services" / "learner-0.toml").read_text())
    shown = {name: own[name] for name in ("nats_url", "run", "state_dir")}
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    begun: list[subprocess.Popen[bytes]] = []

    def begin(index: int) -> subprocess.Popen[bytes]:
        config = run.directory / f"island-{index}.toml"
        processes = {"count": count, "index": index, "address": address, "least": 1, "regroup_s": 1.0}
        processes["silent_s"] = scaled_s(10.0)
        more = {"name": "island", "mesh": {"data": count}, "processes": processes, "checkpoint_s": 1.0}
        config.write_text(tomli_w.dumps(shown | more))
        command = [sys.executable, "-m", "diloco_learner", "--config", str(config)]
        begun.append(subprocess.Popen(command, stderr=subprocess.DEVNULL, env=ENVIRONMENT | {"JAX_NUM_CPU_DEVICES": "1"}))
        return begun[-1]

    try:
        yield begin
    finally:
        for process in begun:
            process.terminate()
        for process in begun:
            process.wait(PATIENCE_S)


def island_met(directory: Path) -> list[list[int]]:
    return [event["members"] for event in named(directory, "island", "processes_met")]


def island_steps(directory: Path) -> int:
    """Steps of the island, as its last heartbeat in the run's status says."""
    found = json.loads((directory / "status.json").read_text())["learners"].get("island")
    return 0 if found is None else int(found["step"])


@pytest.mark.slow
def test_a_learner_goes_on_without_a_lost_process_and_takes_it_back(tmp_path: Path) -> None:
    with up(tmp_path / "run", processes=1) as running:
        directory = running.directory
        running.trains()
        with island(running, 2) as begin:

            def steps_in(*generations: list[int]) -> None:
                """Wait until the last one steps; what was heard of the one before may come when all have met already."""
                running.until(lambda: island_met(directory) == list(generations))
                running.until(lambda: len(restored(directory, "island")) == len(generations) - 1)
                taken = island_steps(directory)
                running.until(lambda: island_steps(directory) > taken + 20)

            leader, other = begin(0), begin(1)
            steps_in([0, 1])
            other.kill()
            other.wait(PATIENCE_S)
            steps_in([0, 1], [0])
            again = begin(1)
            steps_in([0, 1], [0], [0, 1])
            assert [leader.poll(), again.poll()] == [None, None]  # the leader is the same process still
        [planned] = named(directory, "island", "island_regroups")
        [kept] = named(directory, "island", "state_kept")
        before, after = (event["step"] for event in restored(directory, "island"))
        assert kept["steps"] - before in (0, 1)  # all that it took, but for the one in flight
        assert after == before + planned["steps"]  # nothing of it is lost
        assert not named(directory, "island", "state_fresh")
    assert json.loads(ran("verify", str(directory), "--json"))["holds"]
    lives = json.loads(ran("replay", str(directory), "--learners", "--json").splitlines()[-1])["learners"]
    of_island = [life for life in lives if life["learner"] == "island"]
    assert [life["wrong"] + life["unchecked"] for life in of_island] == ["", "", ""]
    assert of_island[-1]["parameters"] is True


def restored(directory: Path, service: str = "learner-0") -> list[dict[str, Any]]:
    return named(directory, service, "checkpoint_restored")


def began_again(directory: Path, times: int) -> bool:
    """Whether so many generations have begun from a checkpoint."""
    return all(len(restored(directory, service)) == times for service in ("learner-0", "learner-0-p1"))


def ran(*command: str) -> str:
    ended = subprocess.run([DILOCO, *command], capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_a_new_generation_begins_from_the_parts_of_the_last_and_so_does_another_number_of_processes(
    tmp_path: Path,
) -> None:
    with up(tmp_path / "run", checkpoint_s=1.0) as running:
        directory = running.directory
        for times, lost in enumerate(("learner-0-p1", "learner-0"), start=1):
            running.trains()
            running.until(lambda: len(list((directory / "checkpoints").glob("*.safetensors"))) == 4)
            os.kill(running.pid(lost), signal.SIGKILL)
            running.until(partial(began_again, directory, times))
        running.trains()
    assert all(event["step"] > 0 for event in restored(directory))
    assert not named(directory, "learner-0", "state_fresh")
    with up(directory, processes=1) as running:  # it saved as it left
        running.until(lambda: len(restored(directory)) == 3)
        running.trains()
    with up(directory) as running:
        running.until(lambda: len(restored(directory)) == 4)
        running.trains()
    steps = [event["step"] for event in restored(directory)]
    assert steps == sorted(set(steps))
    assert json.loads(ran("verify", str(directory), "--json"))["holds"]
    lives = json.loads(ran("replay", str(directory), "--learners", "--json").splitlines()[-1])["learners"]
    assert [life["wrong"] + life["unchecked"] for life in lives] == [""] * 5


@pytest.mark.slow
def test_a_learner_that_joins_borrows_from_several_processes(tmp_path: Path) -> None:
    with up(tmp_path / "run") as running:
        running.trains()
        own = tomllib.loads((running.directory / "services" / "learner-0.toml").read_text())
        config = tmp_path / "joiner.toml"
        shown = {name: own[name] for name in ("nats_url", "run", "state_dir")}
        config.write_text(tomli_w.dumps(shown | {"name": "joiner"}))
        command = [sys.executable, "-m", "diloco_learner", "--config", str(config)]
        joiner = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=ENVIRONMENT)
        try:
            running.until(lambda: bool(named(running.directory, "joiner", "state_from_peer")))
        finally:
            joiner.terminate()
            joiner.wait(PATIENCE_S)
        [borrowed] = named(running.directory, "joiner", "state_from_peer")
        assert borrowed["learner"] == "learner-0"
        assert named(running.directory, "learner-0", "state_lent")
    lives = json.loads(ran("replay", str(running.directory), "--learners", "--json").splitlines()[-1])["learners"]
    assert [life["wrong"] + life["unchecked"] for life in lives] == ["", ""]


@pytest.mark.slow
def test_a_whole_runs_checkpoint_has_the_parts_of_all_processes(tmp_path: Path) -> None:
    with up(tmp_path / "run") as running:
        running.trains()
        assert "note:" not in ran("checkpoint", str(running.directory))
        running.trains()
    folder = running.directory / "whole" / "1"
    manifest = json.loads((folder / "manifest.json").read_text())
    saved = manifest["learners"]["learner-0"]
    assert [part["file"] for part in saved["parts"]] == ["learners/learner-0.part-1.safetensors"]
    with up(tmp_path / "again", "--resume", str(folder)) as resumed:
        resumed.until(lambda: bool(restored(resumed.directory)))
        assert restored(resumed.directory)[0]["step"] == saved["step"]
        resumed.trains()
    assert json.loads(ran("verify", str(resumed.directory), "--json"))["holds"]
