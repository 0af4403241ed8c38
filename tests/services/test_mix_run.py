"""A run on a mix of data, as a user has it: a learner is killed, and the training is replayed batch by batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.services.cluster import DEADLINE_S
from tests.services.conftest import Diloco

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


@pytest.mark.slow
def test_a_killed_learner_goes_on_exactly_and_its_training_is_replayed(diloco: Diloco, tmp_path: Path) -> None:
    for name, words in {"verse": "to be or not to be that is the question", "prose": "it was the best of times"}.items():
        (tmp_path / name).mkdir()
        for i in range(60):
            (tmp_path / name / f"{i:02}.txt").write_text(f"{words} {i}\n" * 40)
    (tmp_path / "mix.toml").write_text(MIX)
    directory = tmp_path / "run"
    arguments = [
        *("--run-dir", str(directory), "--data", str(tmp_path / "mix.toml"), "--learners", "2", "--shards", "1", "--plain"),
        *("--tokens", str(900 * TOKENS_PER_STEP), "--slow", "learner-1=3"),
        *(f"--set={key}={value}" for key, value in SETTINGS.items()),
    ]
    with subprocess.Popen([DILOCO, "up", *arguments], env=os.environ | {"DILOCO_CHECKPOINT_S": "0.5"}) as up:
        deadline_s = time.monotonic() + DEADLINE_S
        while not list((directory / "checkpoints").glob("learner-1*.safetensors")):
            assert time.monotonic() < deadline_s
            assert up.poll() is None
            time.sleep(0.2)
        victim = process_of(directory, "learner-1")
        assert victim is not None
        victim.kill()
        assert up.wait(2 * DEADLINE_S) == 0

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
