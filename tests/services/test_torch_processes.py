"""A learner of several processes of PyTorch: started by ``diloco up``, beside one of one process, and killed in part."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from tests.made.up_command import DILOCO, Running, set_budget, wait_for_status
from tests.pace import DEADLINE_S

from diloco.core.run.tape import scan
from diloco.errors import SettingsError
from diloco.process import tape
from diloco.service import rundir
from diloco.service.rundir import RunDirectory
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings
from diloco_ops.up.supervise import ServiceFailed
from diloco_ops.up.task_check import check_task

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed: make torch")

ROWS = 6
TASK = f"""
import itertools, time
import numpy as np
import torch
from torch import nn

class Word(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(13, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(8, 13)

    def forward(self, tokens):
        x = self.words(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

class Words:
    tokens_per_batch = {ROWS}

    def module(self):
        return Word()

    def loss(self, module, batch):
        time.sleep(0.02)
        tokens = torch.from_numpy(batch)
        return nn.functional.cross_entropy(module(tokens[:, 0]), tokens[:, 1])

    def batches(self, share, shares, seed, start):
        for number in itertools.count(start):
            first = np.random.default_rng((seed, share, number)).integers(13, size=({ROWS}, 1))
            yield np.concatenate([first, (first + 3) % 13], axis=1)

    def validation(self):
        return [np.stack([np.arange(13), (np.arange(13) + 3) % 13], axis=1)]

def make(settings, data):
    return Words()
"""
SETTINGS = {
    "task.name": "spread_words:make",
    "fragments.count": 3,
    "round.steps": 10,
    "round.overlap_steps": 4,
    "liveness.heartbeat_s": 0.2,
    "log.keyframe_factor": 1000,
    "inner.learning_rate": 0.01,
}


def named(directory: Path, service: str, event: str) -> list[dict[str, Any]]:
    file = directory / "logs" / f"{service}.jsonl"
    found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [each for each in found if each["event"] == event]


def until(up: Running, reached: Any, what: str) -> None:
    deadline_s = time.monotonic() + 2 * DEADLINE_S
    while not reached():
        assert up.process.poll() is None, up.end()
        assert time.monotonic() < deadline_s, what
        time.sleep(0.1)


def merged(status: dict[str, Any], *learners: str) -> bool:
    return all(status["learners"].get(name, {}).get("tokens_merged") for name in learners)


def ended_with(directory: Path, learner: str) -> bytes:
    """Return the digest of the parameters with which a learner's last process has left the run."""
    file = directory / "tapes" / f"{learner}.tape"
    end = tape.load(file, scan(file.read_bytes()).header.run).lives()[-1].end
    assert end is not None
    assert end.finished
    return end.digest


def digest_of_log(directory: Path, settings: RunSettings) -> bytes:
    """Return the same of the model that the run has ended with, as it is exported."""
    from diloco_learner.api.model import parameters_digest
    from diloco_learner.pytorch.island import TorchIsland
    from diloco_learner.pytorch.task import load_task
    from diloco_learner.run import weights

    weights_file = directory.parent / "weights.safetensors"
    subprocess.run([DILOCO, "export", str(directory), str(weights_file)], check=True, capture_output=True)
    island = TorchIsland(load_task(settings.task, None), settings)
    fragments = island.fragments()
    weights.put(weights_file, island, fragments)
    return parameters_digest(island, fragments)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "spread_words.py").write_text(TASK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("DILOCO_CHECKPOINT_S", "0.5")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def started(directory: Path, *more: str, tokens: int = 10**9) -> Running:
    sets = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
    shape = "--learners", "1", "--shards", "1", "--tokens", str(tokens), "--run-dir", str(directory), "--json"
    return Running("up", *shape, *more, *sets)


def test_a_learner_of_two_processes_goes_on_after_a_kill_beside_another_and_both_end_as_the_log(project: Path) -> None:
    directory = project / "run"
    up = started(directory, "--torch-processes", "2")
    try:
        wait_for_status(up, directory, lambda status: merged(status, "learner-0"), "work of both processes is merged")
        own = tomllib.loads((directory / "services" / "learner-0.toml").read_text())
        config = project / "lone.toml"
        config.write_text(tomli_w.dumps({"name": "lone"} | {name: own[name] for name in ("nats_url", "run", "state_dir")}))
        lone = subprocess.Popen([sys.executable, "-m", "diloco_learner.pytorch", "--config", str(config)])
        try:
            wait_for_status(
                up, directory, lambda status: merged(status, "learner-0", "lone"), "work of both learners is merged"
            )
            until(
                up, lambda: (directory / "checkpoints" / "learner-0.part-1.previous.safetensors").exists(), "its state is saved"
            )
            os.kill(int((directory / "services" / "learner-0-p1.pid").read_text()), signal.SIGKILL)
            until(up, lambda: named(directory, "learner-0-p1", "checkpoint_restored"), "it begins again from its checkpoint")
            seen = wait_for_status(up, directory, lambda status: merged(status, "learner-0", "lone"), "all are there")
            set_budget(directory, own["nats_url"], int(seen["tokens_processed"]) + 300 * ROWS)
            ended = up.end()
            assert ended.code == 0, ended.err
            assert lone.wait(DEADLINE_S) == 0
        finally:
            lone.kill()
            lone.wait()
    finally:
        up.kill()
    subprocess.run([DILOCO, "verify", str(directory)], check=True, capture_output=True)
    assert len(named(directory, "learner-0", "processes_met")) == 2
    carried = [named(directory, service, "carries")[-1]["fragments"] for service in ("learner-0", "learner-0-p1")]
    assert sorted(carried[0] + carried[1]) == [0, 1, 2]
    assert all(carried)
    found = digest_of_log(directory, rundir.load(directory).settings)
    assert (ended_with(directory, "learner-0"), ended_with(directory, "lone")) == (found, found)


@pytest.mark.slow
def test_a_run_of_torch_processes_has_the_loss_of_its_task_and_is_not_trained_again(project: Path) -> None:
    directory = project / "run"
    ended = started(directory, "--torch-processes", "2", tokens=400 * ROWS).end()
    assert ended.code == 0, ended.err
    report = json.loads((directory / "report.json").read_text())
    assert report["val_loss"] < 0.8 * report["val_loss_initial"]
    learner = report["learners"]["learner-0"]
    assert learner["tokens_processed"] == learner["tokens_merged"] + learner["tokens_lost"]
    replayed = subprocess.run([DILOCO, "replay", str(directory), "--learners", "--json"], capture_output=True, text=True)
    [life] = json.loads(replayed.stdout.splitlines()[-1])["learners"]
    assert "replay supports only JAX learners" in life["unchecked"]


def test_what_processes_cannot_be_is_found_before_anything_starts(project: Path) -> None:
    torch = RunDirectory(project / "run", "run", "", None, run_settings(overrides=SETTINGS | {"learners": 1, "shards": 1}))
    with pytest.raises(
        ServiceFailed, match=f"a batch has {ROWS} rows .* and 7 processes of the learner each take some"
    ) as failed:
        check_task(replace(torch, torch_processes=7))
    assert failed.value.code == SettingsError.exit_code
    with pytest.raises(SettingsError, match=r"a learner of torch is a single process, .*\(--torch-processes starts several"):
        check_task(replace(torch, processes_per_learner=2))
    with pytest.raises(SettingsError, match="--least-processes: a learner of torch has a fixed number of processes"):
        check_task(replace(torch, torch_processes=2, least_processes=1))
    jax = RunDirectory(project / "run", "run", "", None, run_settings(overrides={"learners": 1, "shards": 1}))
    with pytest.raises(SettingsError, match="--torch-processes 2: no learner of this run computes with PyTorch"):
        check_task(replace(jax, torch_processes=2))


def test_a_check_says_what_a_process_has(project: Path) -> None:
    command = [DILOCO, "check", "spread_words.py", "--torch-processes", "2", "--set", "fragments.count=3"]
    said = subprocess.run(command, capture_output=True, text=True, cwd=project)
    assert said.returncode == 0, said.stderr
    assert "\n2 processes (fsdp 2): each has at most " in said.stdout
    assert f"takes 3 of {ROWS} rows of a batch" in said.stdout
    assert said.stdout.rstrip().endswith("--torch-processes 2")
