"""A run on a mix of data, as a user has it: a learner is killed, and the training is replayed batch by batch."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tests.made.fixtures import Diloco, Launch
from tests.pace import DEADLINE_S
from tests.services.cluster import small

import diloco as api
from diloco.errors import AdmissionError
from diloco_learner.chats import tiny

pytest.importorskip("grain", reason="the extra `data` is not installed: make extras")

DILOCO = str(Path(sys.executable).parent / "diloco")
TOKENS_PER_STEP = 4 * 16
SETTINGS = {
    "task.layers": 1, "task.width": 16, "task.heads": 2, "task.context": 16, "task.batch": 4, "fragments.count": 4,
    "round.steps": 12, "inner.optimizer": "adamw", "liveness.heartbeat_s": 0.2,
}  # fmt: skip
MIX = """
[tokenizer]
train = { vocabulary = 300 }
[sources.verse]
kind = "text"
path = "verse"
weight = 3
[sources.prose]
kind = "text"
path = "prose"
"""


def process_of(directory: Path, name: str) -> psutil.Process | None:
    """The process of a service of a run."""
    for process in psutil.process_iter(["cmdline"]):
        if f"{directory}/services/{name}.toml" in (process.info["cmdline"] or []):
            return process
    return None


@contextmanager
def ended_process(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that does not outlive its test."""
    process = subprocess.Popen(command, env=environment)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(DEADLINE_S)


def waits_until(up: subprocess.Popen[bytes], so: Callable[[], bool]) -> None:
    """Wait until something is so of a run that goes on."""
    ends_s = time.monotonic() + DEADLINE_S
    while not so():
        assert time.monotonic() < ends_s
        assert up.poll() is None
        time.sleep(0.2)


TASK = """
import jax, jax.numpy as jnp
from diloco_learner.mix.mix import Mix

class Bigrams:
    def __init__(self, settings, data):
        self.mix = Mix(settings, data)
        self.batches, self.validation = self.mix.batches, self.mix.validation
        self.tokens_per_batch = settings.batch * settings.context
    def init(self, key): return {"table": jnp.zeros((self.mix.vocabulary, self.mix.vocabulary))}
    def loss(self, params, batch):
        scores = jax.nn.log_softmax(params["table"][batch[:, :-1]])
        return -jnp.mean(jnp.take_along_axis(scores, batch[:, 1:, None], -1))
    def is_embedding(self, path): return True

def make(settings, data): return Bigrams(settings, data)
"""


def write_mix(folder: Path) -> Path:
    """Write a mix of two sources, of words that differ."""
    for name, words in {"verse": "to be or not to be that is the question", "prose": "it was the best of times"}.items():
        (folder / name).mkdir()
        for i in range(60):
            (folder / name / f"{i:02}.txt").write_text(f"{words} {i}\n" * 40)
    (folder / "mix.toml").write_text(MIX)
    return folder / "mix.toml"


async def test_a_loop_of_one_s_own_has_the_run_s_mix(launch: Launch, tmp_path: Path) -> None:
    from diloco_learner.mix.mix import Mix

    file = str(write_mix(tmp_path))
    settings = small(learners=1, task__batch=4, task__context=16)
    mix = Mix(settings.task, file)
    cluster = launch(settings.with_mix(mix.settings))
    cluster.coordinator()
    cluster.syncers()
    await cluster.link()
    seen: list[np.ndarray] = []

    def train() -> None:
        params = {"weights": np.zeros((64, 8), np.float32)}
        with api.join(cluster.url, run=cluster.name, name="lab", params=params, tokens=64) as run:
            assert run.task.mix == mix.settings
            for batch in run.batches(Mix(run.task, file).batches):
                seen.append(batch)
                params = run.step(run.params)
            (tmp_path / "prose" / "00.txt").write_text("it was the worst of times\n")
            with pytest.raises(AdmissionError, match="the content of source 'prose' is"):
                Mix(run.task, file)

    await asyncio.to_thread(train)
    await cluster.ended()
    expected = list(islice(mix.batches(0, 1, settings.seed, 0), len(seen)))
    assert len(seen) >= settings.tokens // 64
    np.testing.assert_array_equal(np.stack(seen), np.stack(expected))


@pytest.mark.slow
def test_a_task_of_one_s_own_and_a_learner_of_two_processes_train_on_a_mix(tmp_path: Path) -> None:
    (tmp_path / "bigrams.py").write_text(TASK)
    settings = {"task.batch": 4, "task.context": 16, "fragments.count": 2, "round.steps": 4, "shards": 1}
    arguments = [
        *("--run-dir", str(tmp_path / "run"), "--data", str(write_mix(tmp_path)), "--plain", "--learners", "1"),
        *("--devices-per-learner", "2", "--processes-per-learner", "2", "--tokens", str(100 * TOKENS_PER_STEP)),
        *(f"--set={key}={value}" for key, value in (settings | {"task.name": "bigrams:make"}).items()),
    ]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    assert subprocess.run([DILOCO, "up", *arguments], env=environment, check=False).returncode == 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert set(report["values"]) == {"val_loss/verse", "val_loss/prose"}
    assert report["val_loss"] < report["val_loss_initial"]
    assert report["data"]["errors"] == []
    assert set(report["data"]["epochs"]) == {"verse", "prose"}


def train_and_kill(diloco: Diloco, directory: Path, data: Path, settings: Mapping[str, Any], *, step_tokens: int) -> None:
    """Train two learners until the run is over; one is killed once it has saved itself, and goes on from there."""
    arguments = [
        *("--run-dir", str(directory), "--data", str(data), "--learners", "2", "--shards", "1", "--plain"),
        *("--tokens", str(10**9), "--slow", "learner-1=3"),
        *(f"--set={key}={value}" for key, value in settings.items()),
    ]
    with ended_process([DILOCO, "up", *arguments], os.environ | {"DILOCO_CHECKPOINT_S": "0.5"}) as up:
        waits_until(up, lambda: any((directory / "checkpoints").glob("learner-1*.safetensors")))
        victim = process_of(directory, "learner-1")
        assert victim is not None
        victim.kill()
        waits_until(up, lambda: '"checkpoint_restored"' in (directory / "logs" / "learner-1.jsonl").read_text())
        taken = json.loads((directory / "status.json").read_text())["tokens_processed"]
        for steps in (1000, 10_000, 100_000):  # the run goes on while the command begins
            if diloco("set", str(directory), f"tokens={taken + steps * step_tokens}").code == 0:
                break
        assert up.wait(2 * DEADLINE_S) == 0  # the run, and its report


@pytest.mark.slow
def test_a_killed_learner_goes_on_exactly_and_its_training_is_replayed(diloco: Diloco, tmp_path: Path) -> None:
    write_mix(tmp_path)
    directory = tmp_path / "run"
    train_and_kill(diloco, directory, tmp_path / "mix.toml", SETTINGS, step_tokens=TOKENS_PER_STEP)

    report = json.loads((directory / "report.json").read_text())
    assert report["units"] == "nats per token"
    assert set(report["values"]) == {"val_loss/verse", "val_loss/prose"}
    assert report["val_loss"] < report["val_loss_initial"]
    mix = report["settings"]["task"]["mix"]
    for name, part in {"verse": 0.75, "prose": 0.25}.items():
        epochs = part * report["tokens_merged"] / mix["sources"][name]["tokens"]
        assert report["data"]["epochs"][name] == pytest.approx(epochs, abs=1e-4)
    assert report["data"]["errors"] == []
    assert diloco("verify", str(directory)).code == 0
    replayed = diloco("replay", str(directory), "--learners")
    assert replayed.code == 0
    assert "differ" not in replayed.out
    status = diloco("status", str(directory), "--json")
    assert set(json.loads(status.out)["epochs"]) == {"verse", "prose"}

    (tmp_path / "prose" / "00.txt").write_text("it was the worst of times\n")
    more = diloco("up", "--continue", str(directory), "--tokens", "5000", "--run-dir", str(tmp_path / "more"))
    assert more.code == 6
    assert "the content of source 'prose' is" in more.err
    assert not (tmp_path / "more").exists()


CHATS_TASK = """
import jax, jax.numpy as jnp
from pathlib import Path
from diloco_learner.chats.chats import Chats

class Answers:
    def __init__(self, settings, data):
        tokenizer = Path(data).parent / "tokenizer"
        self.mix = Chats(settings, data, tokenizer=tokenizer, context=settings.context, batch=settings.batch)
        self.batches, self.validation = self.mix.batches, self.mix.validation
        self.tokens_per_batch = settings.batch * settings.context
    def init(self, key): return {"table": jnp.zeros((self.mix.vocabulary, self.mix.vocabulary))}
    def loss(self, params, batch):
        labels = batch["labels"][:, 1:]
        scores = jax.nn.log_softmax(params["table"][batch["input_ids"][:, :-1]])
        found = jnp.take_along_axis(scores, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
        return -jnp.sum(jnp.where(labels >= 0, found, 0)) / jnp.sum(labels >= 0)
    def is_embedding(self, path): return True

def make(settings, data): return Answers(settings, data)
"""


@pytest.mark.slow
def test_a_killed_learner_goes_on_in_conversations_and_its_training_is_replayed(
    diloco: Diloco, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers", reason="PyTorch and transformers are not installed: make torch")
    (tmp_path / "answers.py").write_text(CHATS_TASK)
    tiny.write_tokenizer(tmp_path / "tokenizer")
    tiny.write_chats(tmp_path / "chats.jsonl", 500)
    directory = tmp_path / "run"
    settings = {key: value for key, value in SETTINGS.items() if key.startswith(("fragments", "round", "inner", "liveness"))}
    settings |= {"task.name": "answers:make", "task.context": 64, "task.batch": 4}
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(str(tmp_path))  # the command repeats the training in this process
    train_and_kill(diloco, directory, tmp_path / "chats.jsonl", settings, step_tokens=4 * 64)

    report = json.loads((directory / "report.json").read_text())
    assert set(report["values"]) == {"val_loss/chats"}
    assert report["val_loss"] < report["val_loss_initial"]
    assert report["data"]["errors"] == []
    replayed = diloco("replay", str(directory), "--learners")
    assert replayed.code == 0, replayed.err
    assert "differ" not in replayed.out
    tiny.write_chats(tmp_path / "chats.jsonl", 501)
    more = diloco("up", "--continue", str(directory), "--tokens", "5000", "--run-dir", str(tmp_path / "more"))
    assert more.code == 6
    assert "the content of source 'chats' is" in more.err
