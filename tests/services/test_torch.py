"""Learners that compute with PyTorch, beside others, over a real server."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from tests.made.fixtures import Launch
from tests.pace import DEADLINE_S
from tests.services.cluster import Cluster, Service, small
from tests.services.toy import SAMPLES, SLOW, STEP_S

import diloco
from diloco.errors import AdmissionError, SettingsError
from diloco.wire.control import Heartbeat
from diloco_learner.tensors import tensor_of

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed: make torch")

TASK = "tests.services.torch_toy:make"
RATE: dict[str, Any] = {"inner__learning_rate": 0.1, "inner__warmup_fraction": 0.0}


def _start(cluster: Cluster, **values: Any) -> Service:
    shared = {"task": TASK, "share": 1, "checkpoint_s": 0.1, "slow": SLOW} | values
    return cluster.start("torch", "diloco_learner.pytorch", **shared)


async def test_a_torch_learner_is_merged_beside_another_and_goes_on_from_its_checkpoint_after_a_kill(launch: Launch) -> None:
    cluster = launch(small(learners=2, tokens=10**9, **RATE))
    cluster.toy(0)
    killed = _start(cluster)
    await cluster.begin()

    def heard() -> list[Heartbeat]:
        return cluster.heartbeats.get("torch", [])

    def saved() -> int:
        """The step of the newest checkpoint, which the run may know before it hears the learner."""
        return max((event["step"] for event in cluster.events("checkpoint_saved", "torch")), default=0)

    await cluster.until(lambda: saved() > 0, "it has saved its state")
    killed.kill()
    kept = saved()
    again = _start(cluster)
    await cluster.until(lambda: bool(cluster.events("checkpoint_restored", "torch")), "it has taken its state up")
    [restored] = cluster.events("checkpoint_restored", "torch")
    assert restored["step"] >= kept
    before = len(heard())  # nothing more comes of the one that was killed
    await cluster.until(lambda: any(beat.step > restored["step"] + 5 for beat in heard()[before:]), "it steps again")

    again.process.terminate()
    await cluster.until(lambda: again.process.poll() == 0, "it has left")
    merged = {name: learner["tokens_merged"] for name, learner in (await cluster.status())["learners"].items()}
    assert merged.keys() == {"toy-0", "torch"}
    assert all(merged.values())
    # the other learner was there from the first step on; this one may come to a model that is trained already
    first = next(beat.loss for beat in cluster.heartbeats["toy-0"] if beat.loss is not None)
    last = next(beat.loss for beat in reversed(heard()) if beat.loss is not None)
    assert last < 0.5 * first


@pytest.mark.slow
async def test_a_torch_learner_founds_a_run_and_ends_with_it(launch: Launch) -> None:
    cluster = launch(small(learners=1, tokens=40 * SAMPLES, task__name=TASK, **RATE))
    cluster.coordinator()
    cluster.syncers()
    cluster.start("torch", "diloco_learner.pytorch", share=0)
    await cluster.link()
    await cluster.ended()
    heard = await cluster.finished_heartbeats()
    assert heard["torch"].step == 40
    assert heard["torch"].lost_tokens == [0] * cluster.settings.fragments.count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"task": "tests.services.toy:make"}, "task.name = 'tests.services.toy:make': 'make' does not exist"),
        ({"task": None}, "name a torch task of the same model with the setting task"),
        ({"mesh": {"tensor": 2}}, "are 2 processes, and a torch learner of 1"),
    ],
)
async def test_what_no_torch_learner_can_be_is_refused(launch: Launch, values: dict[str, Any], said: str) -> None:
    cluster = launch(small(learners=1, task__name="gpt", task__options={}))
    await cluster.create()
    given = {key: value for key, value in ({"task": TASK} | values).items() if value is not None}
    service = cluster.start("torch", "diloco_learner.pytorch", **given)
    assert await asyncio.to_thread(service.process.wait) == SettingsError.exit_code
    assert said in service.said
    cluster.services.remove(service)


class _Loop:
    """A user's loop of PyTorch, with a module of the toy's tensors."""

    def __init__(self, cluster: Cluster, **given: Any) -> None:
        from tests.services.torch_toy import make

        self.cluster, self.given = cluster, given
        self.task = make(cluster.settings.task, None)
        self.module = self.task.module()
        self.optimizer = self.task.optimizer(list(self.module.parameters()), 0.1)

    def train(self) -> None:
        own: dict[str, Any] = {"run": self.cluster.name, "tokens": SAMPLES, "tensor": partial(tensor_of, self.task)}
        own["within_s"] = DEADLINE_S
        [toy] = self.cluster.toys
        with diloco.join(self.cluster.url, params=self.module, **own | self.given) as run:
            for batch in run.batches(self.task.batches):
                self.cluster.gate.open()
                while toy.member is None or toy.member.step < min(run.steps, 12):
                    time.sleep(STEP_S)
                loss = self.task.loss(self.module, batch)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                time.sleep(STEP_S)
                assert run.step(self.module, loss=loss) is self.module


@pytest.mark.slow  # imports PyTorch once more
async def test_a_loop_of_pytorch_joins_by_its_module(launch: Launch) -> None:
    cluster = launch(small(learners=2))
    cluster.toy(0)
    cluster.coordinator()
    cluster.syncers()
    await cluster.link()
    loop = _Loop(cluster, name="loop", share=1)
    await asyncio.to_thread(loop.train)
    await cluster.ended()
    folded = await cluster.folded()
    for path, tensor in (await cluster.tensors(folded)).items():  # all is merged: it has the run's last version
        mine = dict(loop.module.named_parameters())[path.replace("/", ".")].detach().numpy()
        np.testing.assert_allclose(mine, tensor, atol=1e-6)
    assert {member.learner for log in folded for record in log.versions for member in record.members} == {"toy-0", "loop"}


@pytest.mark.slow  # imports PyTorch once more
async def test_a_module_that_is_none_of_the_run_is_refused_by_name(launch: Launch) -> None:
    import torch

    cluster = launch(small(learners=1))
    cluster.toy(0)
    await cluster.begin()
    module = torch.nn.ModuleDict({"linear": torch.nn.Linear(8, 9)})
    run = diloco.join(cluster.url, run=cluster.name, params=module, tokens=SAMPLES, within_s=DEADLINE_S)
    with pytest.raises(AdmissionError, match="linear/bias"):
        await asyncio.to_thread(run.__enter__)
