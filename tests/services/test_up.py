"""``diloco up``, ``status`` and ``logs`` on a tiny GPT: one run that is interrupted, looked at, resumed, and ends.

Its learners have two devices each.
"""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.made.fixtures import Diloco, Ended
from tests.made.up_command import TINY_GPT, Running, set_budget, some_text, wait_for_training
from tests.pace import DEADLINE_S
from tests.services.cluster import Cluster
from tests.services.forking import Nursery

from diloco.service import rundir
from diloco.states import state
from diloco.states.statefolder import StateFolder
from diloco.wire import framing
from diloco_learner.jax import gpt
from diloco_learner.task import GptTask
from diloco_ops.broker.server import Server
from diloco_report.units import count

LEARNERS = ["learner-0", "learner-1"]
TOKENS_PER_STEP = 4 * 16
MORE = 300 * TOKENS_PER_STEP  # that the run goes on for
IN_FLIGHT = 2 * TINY_GPT["round.steps"] * len(LEARNERS) * TOKENS_PER_STEP  # at most, beyond what is merged
BEGUN = ("state_taken_up", "state_from_peer")  # a learner's optimizer state
STORY = {
    "round.learners_wait": "true",  # so that the budget bounds what learners do, however late they hear that it is used up
    "inner.warmup_fraction": 0,  # of a budget that is never used up
    "liveness.dead_s": DEADLINE_S,
    "liveness.lease_s": DEADLINE_S,
}
REPORT_KEYS = {
    "wall_s", "val_loss", "val_loss_initial", "tokens_processed", "tokens_merged", "rounds", "versions", "learners",
    "fragments", "settings",
}  # fmt: skip
LEARNER_KEYS = {
    "steps", "tokens_processed", "tokens_merged", "busy_fraction", "blocked_fraction", "bytes_up", "bytes_down",
    "rounds_merged", "rounds_missed",
}  # fmt: skip


@dataclass
class Story:
    """What a user saw, from the beginning to the end."""

    directory: Path
    budget: int  # of the whole run
    up: Ended
    status: Ended
    status_json: Ended
    logs: Ended
    status_of_stopped: Ended
    resume: Ended


@pytest.fixture(scope="module", autouse=True)
def gives_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, str]]:
    """``diloco up`` with a server that is not there: begun before all others, since it is to try for a while."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # so that no other test's server comes to be there
        url = f"nats://127.0.0.1:{held.getsockname()[1]}"
        running = Running("up", "--plain", "--nats", url, "--run-dir", str(tmp_path_factory.mktemp("gives-up") / "run"))
        yield running, url
        running.kill()


@pytest.fixture(scope="module")
def story(gives_up: tuple[Running, str], tmp_path_factory: pytest.TempPathFactory) -> Story:
    """Everything happens once; the tests look at what came of it.

    The run goes on until it is stopped, and is given a budget then: however long it took to look at it, there is time.
    """
    folder = tmp_path_factory.mktemp("up")
    text, directory = folder / "text.txt", folder / "mine"
    text.write_text(some_text())
    begin = ["up", "--learners", "2", "--shards", "1", "--tokens", str(10**9), "--plain", "--data", str(text)]
    begin += ["--devices-per-learner", "2", "--run-dir", str(directory), *slow(20)]
    for name, value in (TINY_GPT | STORY).items():
        begin += ["--set", f"{name}={value}"]
    up = Running(*begin)
    try:
        wait_for_training(up, directory, len(LEARNERS))
        looks = [Running("status", str(directory)), Running("status", str(directory), "--json")]
        looks.append(Running("logs", str(directory), "--json"))
        status, status_json, logs = [look.end() for look in looks]
        up.process.send_signal(signal.SIGINT)
    except BaseException:
        up.process.terminate()
        raise
    finally:
        ended = up.end()
    status_of_stopped = Running("status", str(directory)).end()
    budget = tokens_in_checkpoints(directory) + MORE
    server = Server(directory / "nats")
    server.start()
    try:
        set_budget(directory, server.url, budget)
    finally:
        server.stop()
    # slow enough for both to take part, and to be over soon where two runs of tests share the cores
    resume = Running("up", "--plain", "--run-dir", str(directory), *slow(15)).end()
    return Story(directory, budget, ended, status, status_json, logs, status_of_stopped, resume)


def tokens_in_checkpoints(directory: Path) -> int:
    """Return what all learners had processed when they saved their states last."""
    known = rundir.load(directory)
    identity = framing.run_id(known.name, known.settings.digest())
    saved = [state.load(StateFolder(directory, name).generations()[0], identity, name) for name in LEARNERS]
    return sum(int(each.accounts["step"]) for each in saved) * TOKENS_PER_STEP


def slow(factor: int) -> list[str]:
    """Options that stretch the steps, which take less than a millisecond: what a run does between them becomes little."""
    return [text for name in LEARNERS for text in ("--slow", f"{name}={factor}")]


def test_up_shows_progress_and_stops_in_order(story: Story) -> None:
    ended = story.up
    assert ended.code == 130
    assert f"go on with: diloco up --run-dir {story.directory}" in ended.out
    assert ended.err == ""
    # each learner wrote its checkpoint, and may have kept the one before
    assert sorted({path.stem.split(".")[0] for path in (story.directory / "checkpoints").iterdir()}) == LEARNERS


def test_run_is_verified_and_its_training_replayed_to_the_same_bits(story: Story) -> None:
    verified, replayed = (
        Running("verify", str(story.directory), "--json"),
        Running("replay", str(story.directory), "--learners", "--json"),
    )
    verdict, again = json.loads(verified.end().out), json.loads(replayed.end().out)

    assert verdict["holds"]
    assert {check["name"]: check["state"] for check in verdict["checks"]} == {
        "log": "holds",
        "keyframes": "holds",
        "merges": "unchecked",  # the run has no archive
        "changes": "holds",
        "tapes": "holds",
        "offers": "holds",
        "data": "holds",
        "report": "holds",
    }
    assert again["holds"]
    lives = again["learners"]
    # both stopped, and began again from their checkpoints
    assert [life["learner"] for life in lives] == [name for name in LEARNERS for _ in range(2)]
    assert [(life["parameters"], life["wrong"], life["unchecked"]) for life in lives] == [(True, "", "")] * 4
    assert sum(life["steps"] for life in lives) * TOKENS_PER_STEP == read_report(story)["tokens_processed"]
    assert sum(life["offers"] for life in lives) > 20


def test_status_of_a_live_run(story: Story) -> None:
    text, status = story.status, json.loads(story.status_json.out)
    assert text.code == 0
    assert all(name in text.out for name in [*LEARNERS, "syncer-0"])
    assert status["state"] == "training"
    assert sorted(status["learners"]) == LEARNERS
    assert 0 < status["tokens_merged"] <= status["tokens_processed"]
    live = [json.loads(line) for line in story.logs.out.splitlines()]
    assert {"joined", "serving"} <= {entry["event"] for entry in live}
    assert {values["state"] for values in status["learners"].values()} <= {"stepping", "sending", "waiting"}


def test_status_of_a_stopped_run_says_how_it_goes_on(story: Story) -> None:
    ended = story.status_of_stopped
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == f"run 'mine' is stopped at 0 %; go on with: diloco up --run-dir {story.directory}\n"


@pytest.mark.promise("diloco up trains a real model, is interrupted, resumes and ends with a report")
def test_resumed_run_goes_on_and_ends(story: Story, diloco: Diloco) -> None:
    ended, report = story.resume, read_report(story)
    assert ended.code == 0, ended.err
    assert ended.err == ""
    before = json.loads(story.status_json.out)
    shown = json.loads(diloco("status", str(story.directory), "--json").out)
    assert shown["state"] == "finished"
    assert shown["validation"][-1][2] == round(report["val_loss"], 5)
    assert [shown[name] for name in ("tokens_processed", "tokens_merged")] == [
        report[name] for name in ("tokens_processed", "tokens_merged")
    ]
    assert "validation loss" in ended.out
    assert "the best model that only counts bytes" in ended.out
    sizes = " ".join(f"--set {name}={value}" for name, value in TINY_GPT.items() if name.startswith("task"))
    command = f"diloco lab run search --set tokens={story.budget} --set learners=2 {sizes}"
    assert f"not measured yet with these settings; this does it: {command} --data" in ended.out
    assert str(story.directory / "report.html") in ended.out
    events = [json.loads(line) for line in diloco("logs", str(story.directory), "--json").out.splitlines()]
    meshes = [(event["service"], event["devices"], event["fsdp"]) for event in events if event["event"] == "island_ready"]
    assert sorted(meshes) == [(name, 2, 2) for name in ("evaluator", *LEARNERS) for _ in range(2)]
    restored = [event for event in events if event["event"] == "checkpoint_restored"]
    assert sorted(event["service"] for event in restored) == LEARNERS
    first_restored = next(index for index, event in enumerate(events) if event["event"] == "checkpoint_restored")
    saves = [event for event in events[:first_restored] if event["event"] == "checkpoint_saved"]
    saved = list({event["service"]: event for event in saves}.values())  # the last of each
    for event in saved:  # counters go on from where they were
        assert event["step"] == next(e["step"] for e in restored if e["service"] == event["service"])
        assert event["step"] >= before["learners"][event["service"]]["step"] > 0
        assert report["learners"][event["service"]]["steps"] >= event["step"]
    # a learner that takes long to begin again may find the budget used up; both cannot
    steps = {name: learner["steps"] for name, learner in report["learners"].items()}
    assert sum(steps.values()) > sum(event["step"] for event in saved)
    # the budget is that of the whole run, not of its second part
    assert story.budget <= report["tokens_processed"] <= story.budget + IN_FLIGHT
    for learner in report["learners"].values():
        assert learner["tokens_processed"] == learner["steps"] * TOKENS_PER_STEP
    assert [event for event in events if event["level"] in ("error", "critical")] == []


def test_report_has_what_it_promises(story: Story) -> None:
    report = read_report(story)
    assert report.keys() >= REPORT_KEYS
    assert sorted(report["learners"]) == LEARNERS
    assert all(learner.keys() >= LEARNER_KEYS for learner in report["learners"].values())
    assert report["settings"]["task"]["width"] == 16
    assert report["tokens_budget"] == story.budget
    assert len(report["fragments"]) == 4
    assert report["versions"] == sum(fragment["versions"] for fragment in report["fragments"])
    assert report["val_loss"] < report["val_loss_initial"]
    merged = sum(learner["tokens_merged"] for learner in report["learners"].values())
    assert abs(report["tokens_merged"] - merged) <= len(LEARNERS)  # means, each rounded
    for learner in report["learners"].values():
        lost = learner["tokens_processed"] - learner["tokens_merged"] - learner["tokens_lost"]
        assert abs(lost) <= 2  # nothing is outstanding at the end
    gauges = report["series"]["gauges"]  # what each learner said of its own process
    assert sorted(gauges) == LEARNERS
    assert all(gauges.values())
    assert {learner["host"] for learner in report["learners"].values()} == {socket.gethostname()}
    assert all(learner["device"].endswith("cpu") for learner in report["learners"].values())  # "2 x cpu"
    page = (story.directory / "report.html").read_text()
    assert "<svg" in page or "<canvas" in page
    assert "report_follows = true" in (story.directory / "services" / "coordinator.toml").read_text()
    assert "Preliminary" not in page
    assert 'src="http' not in page


async def test_validation_loss_is_that_of_the_model_folded_from_the_log(nursery: Nursery, story: Story) -> None:
    directory, report = rundir.load(story.directory), read_report(story)
    server = Server(story.directory / "nats")
    server.start()
    cluster = Cluster(nursery, story.directory / "test", server.url, directory.name, directory.settings)
    try:
        folded = await cluster.folded()
        tensors = await cluster.tensors(folded)
    finally:
        await cluster.close()
        server.stop()
    assert [log.state_hash.hex() for log in folded] == [fragment["state_hash"] for fragment in report["fragments"]]
    task = GptTask(directory.settings.task, directory.data)
    params: dict[str, Any] = {}
    for path, value in tensors.items():
        *sections, name = path.split("/")
        place = params
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = jnp.asarray(value)
    losses = [float(gpt.loss(params, jnp.asarray(batch), task.shape)) for batch in task.validation()]
    assert np.mean(losses) == pytest.approx(report["val_loss"], rel=1e-4)


@pytest.mark.slow
def test_a_new_run_begins_with_the_weights_of_one_that_is_over(story: Story, diloco: Diloco, tmp_path: Path) -> None:
    own, theirs, again = (tmp_path / f"{name}.safetensors" for name in ("own", "theirs", "again"))
    assert diloco("export", str(story.directory), str(own)).code == 0
    before = load_file(own)
    one, other = sorted(path for path, values in before.items() if values.ndim == 2)[:2]
    rows = len(before[other])
    entries = {one: {"transposed": "one.weight"}, other: {"rows": {"upper.weight": 1, "lower.weight": rows - 1}}}
    names = tmp_path / "names.json"
    names.write_text(json.dumps(entries, indent=1))
    named = ("--names", str(names))
    assert diloco("export", str(story.directory), str(theirs), *named).code == 0
    assert np.array_equal(load_file(theirs)["one.weight"], before[one].T)
    options = ["--learners", "2", "--tokens", str(MORE), "--plain", "--data", str(story.directory.parent / "text.txt")]
    options += [text for name, value in TINY_GPT.items() for text in ("--set", f"{name}={value}")]

    to_wrong = ("--run-dir", str(tmp_path / "wrong"))
    for wrong, said in (
        (("--init", str(own), "--set", "task.width=32"), "the model's has"),
        (("--init", str(own), *named), f"it lacks tensor 'lower.weight' of shape {(rows - 1, before[other].shape[1])}"),
        (("--init", str(own), *named), f"{names}, line 5: it is the model's {other!r}"),
    ):
        ended = Running("up", *options, *to_wrong, *wrong).end()
        assert ended.code == 2
        assert said in ended.err.replace("\n", " ")
        assert not (tmp_path / "wrong").exists()
    ended = Running("up", *options, "--run-dir", str(tmp_path / "on"), "--init", str(theirs), *named, *slow(15)).end()

    assert ended.code == 0, ended.err
    report = json.loads((tmp_path / "on" / "report.json").read_text())
    assert report["val_loss_initial"] == pytest.approx(read_report(story)["val_loss"], rel=1e-6)
    assert diloco("export", str(tmp_path / "on"), str(again), "--version", "0").code == 0
    after = load_file(again)
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_a_run_that_is_over_goes_on_with_more_tokens(story: Story, diloco: Diloco, tmp_path: Path) -> None:
    new, tokens = tmp_path / "on", MORE
    options = ["--tokens", str(tokens), "--run-dir", str(new), "--plain", *slow(15)]
    ended = Running("up", "--continue", str(story.directory), *options).end()

    assert ended.code == 0, ended.err
    assert ended.err == ""
    before, report = read_report(story), json.loads((new / "report.json").read_text())
    assert report["val_loss_initial"] == before["val_loss"]
    assert report["tokens_before"] == before["tokens_merged"]
    assert report["settings"]["continues"]["run"] == "mine"
    assert tokens <= report["tokens_processed"] <= tokens + IN_FLIGHT
    had = count(before["tokens_merged"])
    assert f"{new}, continues run mine after {had} tokens\n" in ended.out
    assert (
        f"it continues run mine, whose model had {had}: {count(before['tokens_merged'] + report['tokens_merged'])}" in ended.out
    )
    events = [json.loads(line) for line in diloco("logs", str(new), "--json").out.splitlines()]
    begun = {(event["service"], event["event"]): event["learner"] for event in events if event["event"] in BEGUN}
    taken_up = {service: learner for (service, event), learner in begun.items() if event == "state_taken_up"}
    assert taken_up  # of the first that comes
    assert all(service == learner for service, learner in taken_up.items())
    # one that comes when the other has had something merged already, borrows that one's, which is newer
    assert {service for service, _ in begun} == set(LEARNERS)
    ended = diloco("replay", str(new), "--learners", "--json")
    lives = json.loads(ended.out)["learners"]
    assert ended.code == 0
    assert [(life["learner"], life["parameters"], life["unchecked"]) for life in lives] == [(n, True, "") for n in LEARNERS]
    finished = diloco("up", "--run-dir", str(new))
    assert finished.code == 5
    assert f"for more tokens continue it in a new one: diloco up --continue {new} --tokens N" in finished.err


def test_status_and_logs_of_an_ended_run(story: Story, diloco: Diloco) -> None:
    text, as_json = diloco("status", str(story.directory)), diloco("status", str(story.directory), "--json")
    assert (text.code, as_json.code) == (0, 0)
    assert all(name in text.out for name in LEARNERS), text.out
    assert json.loads(as_json.out)["tokens_processed"] > 0
    lines = diloco("logs", str(story.directory), "--service", "learner-*")
    assert lines.code == 0
    assert "checkpoint_restored" in lines.out
    assert "syncer-0" not in lines.out
    entries = [json.loads(line) for line in diloco("logs", str(story.directory), "--json").out.splitlines()]
    assert {entry["service"] for entry in entries} == {*LEARNERS, "coordinator", "evaluator", "syncer-0", "up"}
    assert [entry["time"] for entry in entries] == sorted(entry["time"] for entry in entries)


def test_up_without_a_server_gives_up_and_says_where_it_looked(gives_up: tuple[Running, str]) -> None:
    running, url = gives_up
    ended = running.end()
    assert ended.code == 4
    assert f"no connection to {url}" in ended.err
    assert "start a server there, or give another URL" in ended.err


def read_report(story: Story) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((story.directory / "report.json").read_text())
    return report
