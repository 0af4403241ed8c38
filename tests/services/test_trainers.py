"""The trainers that people have are learners of a run by one callback, against their own libraries."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.made.fixtures import Diloco, Launch
from tests.made.joining_processes import beside_services, ended
from tests.pace import DEADLINE_S
from tests.services.cluster import Cluster, check_accounts, small

from diloco.service.rundir import RunDirectory

PROGRAM, SAVE_STEPS = Path(__file__).with_name("trainers.py"), 10
OFFLINE = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}

pytest.importorskip("torch", reason="torch is not installed: make torch")
pytest.importorskip("accelerate", reason="accelerate is not installed: make torch")


class Training:
    """The trainings of a run, each in a process of its own; a folder has what they write."""

    def __init__(self, cluster: Cluster, folder: Path, started: list[asyncio.subprocess.Process]) -> None:
        self.cluster, self.folder, self.started = cluster, folder, started

    async def start(self, kind: str, *more: str) -> asyncio.subprocess.Process:
        pipe, out = asyncio.subprocess.PIPE, str(self.folder / "out.json")
        command = [sys.executable, str(PROGRAM), kind, self.cluster.url, self.cluster.name, "ann", out, *more]
        environment = os.environ | OFFLINE | {"HF_HOME": str(self.folder / "cache")}
        self.started.append(await asyncio.create_subprocess_exec(*command, env=environment, stdout=pipe, stderr=pipe))
        return self.started[-1]

    async def train(self, kind: str) -> dict[str, Any]:
        """Train to the end of the run; return what came of it."""
        [(code, err)] = await ended(await self.start(kind))
        assert code == 0, err
        await self.cluster.ended()
        found: dict[str, Any] = json.loads((self.folder / "out.json").read_text())
        last = (await self.cluster.finished_heartbeats())["ann"]
        booked = last.step - found.get("steps_before", 0)
        assert booked == found["steps"], "each step of the optimizer is booked, and no batch that is only accumulated"
        assert last.loss is not None
        for path, tensor in (await self.model()).items():
            np.testing.assert_array_equal(np.float32(found["values"][path]).reshape(tensor.shape), tensor)
        return found

    async def model(self) -> dict[str, Any]:
        return await self.cluster.tensors(await self.cluster.folded())


@asynccontextmanager
async def training_in(cluster: Cluster, folder: Path) -> AsyncIterator[Training]:
    """Begin the run's services, and yield what trains in it."""
    async with beside_services(cluster) as started:
        yield Training(cluster, folder, started)


@pytest.mark.parametrize("kind", ["lightning", "accelerate"])
async def test_a_trainer_trains_to_the_end_of_the_run_and_has_its_model(launch: Launch, tmp_path: Path, kind: str) -> None:
    async with training_in(launch(small(learners=1, tokens=64 * 60)), tmp_path) as training:
        await training.train(kind)


async def test_a_trainer_follows_the_schedule_of_the_run_and_saves_its_model(launch: Launch, tmp_path: Path) -> None:
    settings = small(learners=1, tokens=64 * 60, inner__warmup_fraction=0.1, inner__final_fraction=0.2)
    async with training_in(launch(settings), tmp_path) as training:
        found = await training.train("transformers")
        saved = load_file(tmp_path / "saved" / "model.safetensors")
        for path, tensor in (await training.model()).items():
            np.testing.assert_array_equal(saved[path.replace("/", ".")], tensor)
    progress, rates = zip(*found["rates"], strict=True)
    assert max(rates) == pytest.approx(1e-2, rel=0.05)
    assert progress[-1] > 0.9
    assert rates[-1] == pytest.approx(0.2e-2, rel=0.3), "the end of the run's cosine, and not of 100,000 steps"


@pytest.mark.parametrize("kind", ["transformers", "lightning", "accelerate"])
async def test_a_trainer_that_was_killed_goes_on_from_its_checkpoint_as_the_same_learner(
    launch: Launch, tmp_path: Path, kind: str
) -> None:
    cluster = launch(small(learners=1, tokens=64 * 200))
    async with training_in(cluster, tmp_path) as training:
        killed = await training.start(kind, "--stop")
        assert killed.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            while await killed.stdout.readline() != b"saved\n":
                assert not killed.stdout.at_eof(), (await killed.communicate())[1].decode()
        killed.kill()
        await killed.communicate()
        found = await training.train(kind)
        check_accounts(await cluster.finished_heartbeats(), await cluster.folded())
    assert found["steps_before"] == SAVE_STEPS, "it has counted on from its checkpoint"
    if kind == "transformers":
        assert found["steps"] < found["trainer_steps"] == found["adam_steps"], "its optimizer goes on, too"


async def test_a_trainer_that_fails_ends_though_no_callback_is_told(launch: Launch, tmp_path: Path) -> None:
    async with training_in(launch(small(learners=1, tokens=64 * 200)), tmp_path) as training:
        [(code, err)] = await ended(await training.start("failing"))
    assert code == 1
    assert "ValueError: the data are at fault" in err


async def test_an_adapter_that_trl_trains_is_exported_as_peft_saves_it(
    launch: Launch, tmp_path: Path, diloco: Diloco, recwarn: pytest.WarningsRecorder
) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: make torch")
    pytest.importorskip("trl", reason="trl is not installed: make torch")
    transformers = pytest.importorskip("transformers")
    cluster = launch(small(learners=1, tokens=64 * 60))
    async with training_in(cluster, tmp_path) as training:
        await training.train("trl")
    RunDirectory(cluster.directory, cluster.name, cluster.url, None, cluster.settings).save()
    theirs, folder, file = tmp_path / "adapter", tmp_path / "exported", tmp_path / "named.safetensors"

    async def export(*options: str | Path) -> Any:
        return await asyncio.to_thread(diloco, "export", str(cluster.directory), *map(str, options))

    done = await export(folder, "--format", "peft", "--config", theirs / "adapter_config.json")
    assert done.code == 0, done
    saved, written = (load_file(place / "adapter_model.safetensors") for place in (theirs, folder))
    assert written.keys() == saved.keys()
    for name, values in saved.items():
        np.testing.assert_array_equal(written[name], values)
    model = peft.PeftModel.from_pretrained(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base"), folder)
    loaded = peft.get_peft_model_state_dict(model)
    assert all(np.array_equal(loaded[name].numpy(), values) for name, values in saved.items())

    assert (await export(file, "--names", "torch")).code == 0
    from safetensors.torch import load_file as load_torch_file

    with_zeros = {name: 0 * value for name, value in loaded.items()}
    peft.set_peft_model_state_dict(model, with_zeros)
    assert model.load_state_dict(load_torch_file(file), strict=False).unexpected_keys == []
    again = peft.get_peft_model_state_dict(model)
    assert all(np.array_equal(again[name].numpy(), values) for name, values in saved.items())

    for options, said in (
        (["--format", "peft"], "--format peft: needs --config FILE, the adapter_config.json; model.peft_config['default']"),
        (["--format", "peft", "--config", "none"], "--config none: cannot be read"),
        (["--format", "peft", "--config", file, "--names", "torch"], "--names torch: leave it out with --format peft"),
        (["--config", theirs / "adapter_config.json"], "is for --format hf and peft"),
    ):
        refused = await export(tmp_path / "none", *options)
        assert (refused.code, said in refused.err) == (2, True), refused
    assert not (tmp_path / "none").exists()
