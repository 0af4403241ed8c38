"""torchtitan's model, parallelisms and container of optimizers on two ranks, in an environment of its own."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from tests.made.fixtures import Launch
from tests.made.rank_processes import rank_environments
from tests.pace import DEADLINE_S
from tests.services.cluster import small

PROGRAM = Path(__file__).with_name("torchtitan_ranks.py")
PYTHON = Path(__file__).parents[2] / ".venv-torchtitan/bin/python"
STEP_TOKENS = 2 * 4 * 16


@pytest.mark.slow  # imports PyTorch's compiler
@pytest.mark.skipif(not PYTHON.exists(), reason="torchtitan is not installed: make torchtitan")
async def test_two_ranks_of_torchtitan_are_a_learner_whose_optimizers_are_booked_once(launch: Launch, tmp_path: Path) -> None:
    cluster = launch(small(learners=1, tokens=60 * STEP_TOKENS, inner__warmup_fraction=0.1, inner__final_fraction=0.2))
    cluster.coordinator()
    cluster.syncers()
    await cluster.link()
    out, pipe = tmp_path / "out.json", asyncio.subprocess.PIPE
    command = [str(PYTHON), str(PROGRAM), cluster.url, cluster.name, "titan", str(out)]
    ranks = [await asyncio.create_subprocess_exec(*command, env=env, stderr=pipe) for env in rank_environments(2)]
    try:
        async with asyncio.timeout(2 * DEADLINE_S):
            said = await asyncio.gather(*(rank.communicate() for rank in ranks))
    finally:
        for rank in ranks:
            if rank.returncode is None:
                rank.kill()
            await rank.communicate()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(err.decode() for _, err in said)
    await cluster.ended()
    found, values = json.loads(out.read_text()), dict(np.load(out.with_suffix(".npz")))
    last = (await cluster.finished_heartbeats())["titan"]
    assert found["optimizers"] == 2
    assert last.step == found["booked"] == found["steps"], "a step of the container is one step"
    assert last.tokens == found["steps"] * STEP_TOKENS
    assert found["rates"][0] == 0.0
    assert max(found["rates"]) == pytest.approx(3e-3, rel=0.05), "the run's schedule, and not that of 10,000 steps"
    assert found["rates"][-1] < 0.4 * max(found["rates"])
    model = await cluster.tensors(await cluster.folded())
    assert values.keys() == model.keys()
    for path, tensor in model.items():
        np.testing.assert_array_equal(values[path], tensor.reshape(values[path].shape))
