"""A trial is a run: the services train real models in virtual time, the same each time, and as a live run does."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.made.tiny_trials import STEP_TOKENS, TINY_TRIAL, play_tiny
from tests.made.up_command import Running

from diloco.settings.presets import run_settings
from diloco.wire import framing
from diloco.wire.entries import Record
from diloco_lab.experiment import runner
from diloco_lab.paces import recorder
from diloco_lab.paces.times import Paces, steady
from diloco_lab.trial import Trial
from diloco_learner.task import load_task
from diloco_ops.reading.run_reader import opened

LOCKSTEP: dict[str, dict[str, Any]] = {
    "decoupled": {"round.learners_wait": True, "round.quorum": 2, "round.grace_factor": 0.0},
    "data-parallel": {"round.steps": 1, "round.quorum": 2},
}


@pytest.mark.slow
def test_an_interval_that_changes_in_the_middle_makes_other_numbers_of_versions(text: str) -> None:
    """128 steps of both, 69 of them before the change. A cycle lasts as many steps as it is asked for."""
    settings = run_settings("decoupled", TINY_TRIAL | {"tokens": 256 * STEP_TOKENS})
    paces, task = Paces([steady(0.1), steady(0.1)]), load_task(settings.task, text)
    plain, changed = (Trial(settings, task, paces, changes).play().versions for changes in ((), [(0.5, {"round.steps": 14})]))
    assert all(abs(versions - 128 / 4) < 1.5 for versions in plain)
    assert all(abs(versions - (69 / 4 + 59 / 14)) < 1.5 for versions in changed)


@pytest.mark.slow
def test_a_trial_trains_accounts_for_its_tokens_and_is_the_same_each_time(text: str) -> None:
    first, again = (play_tiny(text, 60 * STEP_TOKENS, Paces([steady(0.1), steady(0.3)])) for _ in range(2))
    assert first.state_hashes == again.state_hashes
    assert first.loss == again.loss < np.log(256) - 1  # it begins at ln 256
    # 60 steps of both together, and what a learner does before it hears that the budget is used up
    assert 60 * STEP_TOKENS <= first.tokens <= 64 * STEP_TOKENS
    assert first.tokens % STEP_TOKENS == 0
    # the fast learner takes three steps where the slow one takes one: 45 steps of 0.1 s
    assert 4.5 <= first.virtual_s <= 10.0
    assert 0.5 < first.merged <= 1
    assert 1 < first.members <= 2


@pytest.mark.slow
@pytest.mark.services
@pytest.mark.parametrize("preset", LOCKSTEP)
async def test_in_lockstep_a_trial_makes_the_versions_of_a_live_run_bit_for_bit(preset: str, text: str, tmp_path: Path) -> None:
    tokens, changes = 48 * STEP_TOKENS, LOCKSTEP[preset]
    options = [f"{name}={value}".replace("True", "true") for name, value in (TINY_TRIAL | changes).items()]
    sets = [word for option in options for word in ("--set", option)]
    directory = tmp_path / "run"
    arguments = ["--plain", "--preset", preset, "--data", text, "--run-dir", str(directory), "--tokens", str(tokens)]
    arguments += ["--learners", "2"]
    ended = await asyncio.to_thread(Running("up", *arguments, "--shards", "1", *sets).end)
    assert ended.code == 0, ended.err

    live: list[list[bytes]] = []
    async with opened(directory) as reader:
        for fragment in reader.map.fragments:
            subject, end = reader.log.subjects.record(fragment.index), await reader.log.reader.end_sequence(fragment.index)
            live.append([])
            async for stored in reader.transport.pull(reader.log.subjects.log_stream, [subject], 1):
                record = framing.unpack(stored.data, Record, reader.run.identity)[0]
                if record.makes_version:
                    live[-1].append(record.state_hash)
                if stored.sequence >= end:
                    break

    recorded = await recorder.record(directory, "a test")
    steps = tokens // (2 * 4 * 16)
    assert [(learner.name, learner.versions, len(learner.steps_ms)) for learner in recorded.learners] == [
        ("learner-0", 1.0, steps),
        ("learner-1", 1.0, steps),
    ]
    assert len(recorded.commits_ms) == sum(len(hashes) for hashes in live)
    assert min(learner.begins_ms for learner in recorded.learners) == 0
    # in each version is an offer of each learner; the last ones may be acknowledged after the end
    assert all(len(learner.offers_ms) >= len(recorded.commits_ms) - 2 for learner in recorded.learners)
    assert min(len(hashes) for hashes in live) >= 5
    replayed = await asyncio.to_thread(Running("replay", str(directory), "--learners", "--json").end)
    lives = json.loads(replayed.out)["learners"]
    assert [(life["parameters"], life["wrong"], life["unchecked"]) for life in lives] == [(True, "", "")] * 2
    assert sum(life["offers"] for life in lives) >= 2 * sum(len(hashes) for hashes in live)

    settings = run_settings(preset, TINY_TRIAL | {"tokens": tokens} | changes)
    trial = Trial(settings, load_task(settings.task, text), Paces([steady(0.1), steady(0.1)]))
    with runner.pool(1) as pool:  # of one thread each, as `up` begins its learners: bits depend on it
        assert (await asyncio.to_thread(pool.submit(trial.play).result)).state_hashes == live
