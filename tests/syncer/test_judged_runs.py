"""Whole runs in virtual time: a learner that lies cannot ruin the model, and no sound learner is quarantined."""

from __future__ import annotations

from typing import Any

import pytest
from tests.made.judged_runs import JudgedRun, Kind, play

from diloco.control.quarantines import write_outliers

NAMES = ("ann", "bob", "cat", "dan")
CLEAN = {name: Kind() for name in NAMES}
SOUND = 0.001  # distance of the model of a sound run, of four bits, from the truth; of an untrained one: 1
SOUND_2_BITS = 0.01


@pytest.mark.parametrize("lie", [-4.0, -15.0, -60.0])
def test_one_of_four_that_sends_its_displacement_reversed_does_not_move_the_model_away(lie: float) -> None:
    outcome = play(CLEAN | {"dan": Kind(lie=lie)})
    assert outcome.distance < SOUND
    assert outcome.quarantined == ["dan"]
    assert outcome.left_out >= 3  # in more than half of the five fragments that count


def test_without_the_rule_it_does() -> None:
    assert play(CLEAN | {"dan": Kind(lie=-15.0)}, quarantine__factor=0.0).distance > 1
    assert play(CLEAN | {"dan": Kind(lie=-4.0)}, quarantine__factor=20.0).distance > 1


@pytest.mark.parametrize(
    ("kinds", "changes"),
    [
        (CLEAN, {}),
        (CLEAN | {"bob": Kind(step_s=0.13), "cat": Kind(step_s=0.25), "dan": Kind(step_s=0.5)}, {}),
        ({"ann": Kind(), "bob": Kind(), "cat": Kind(step_s=2.0)}, {}),
        (CLEAN | {"cat": Kind(begins_s=4.0), "dan": Kind(begins_s=12.0)}, {}),
        (CLEAN, {"round__quorum": "all"}),
        (CLEAN, {"codec__offer_bits": 2, "codec__record_bits": 2}),
    ],
    ids=["alike", "mixed", "one of three 20 times slower", "late", "quorum of all", "2 bits"],
)
def test_sound_learners_are_never_outliers(kinds: dict[str, Kind], changes: dict[str, Any]) -> None:
    outcome = play(kinds, **changes)
    assert (outcome.quarantined, outcome.left_out, outcome.cut) == ([], 0, [])
    assert outcome.distance < (SOUND_2_BITS if changes.get("codec__offer_bits") else SOUND)
    assert all((merged > 0).all() for merged in outcome.merged.values())


@pytest.mark.parametrize("bits", [2, 4])
def test_a_learner_with_rows_that_no_other_has_is_merged_and_its_rows_are_learnt(bits: int) -> None:
    codec: dict[str, Any] = {"codec__offer_bits": bits, "codec__record_bits": bits}
    outcome = play(CLEAN | {"dan": Kind(alone=True)}, **codec)
    assert (outcome.quarantined, outcome.left_out) == ([], 0)
    assert outcome.own_rows < SOUND_2_BITS


def test_a_learner_that_no_longer_lies_comes_back_by_itself() -> None:
    outcome = play(CLEAN | {"dan": Kind(lie=-1000.0, until_step=100)})
    assert (outcome.quarantined, outcome.over) == (["dan"], ["dan"])
    assert (outcome.merged["dan"] > 0).all()
    assert outcome.distance < SOUND


def test_a_quarantine_outlives_the_syncer_that_stated_half_of_it() -> None:
    def kill(run: JudgedRun) -> None:
        run.advance(until=lambda: run.of("learner_quarantined") == ["dan"])
        run.kill("syncer-0")

    outcome = play(CLEAN | {"dan": Kind(lie=-1e6)}, meanwhile=kill)
    assert (outcome.quarantined, outcome.over) == (["dan"], [])
    assert (outcome.merged["dan"] == 0).all()
    assert outcome.distance < SOUND


def test_beside_a_syncer_of_an_earlier_version_outliers_are_left_out_and_no_learner_is_quarantined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def only_one_does(run: Any, statement: Any) -> None:
        if statement.syncer != "syncer-1":
            await write_outliers(run, statement)

    monkeypatch.setattr("diloco_syncer.offers.quarantine.write_outliers", only_one_does)
    outcome = play(CLEAN | {"dan": Kind(lie=-1e6)})
    assert (outcome.quarantined, outcome.suspected) == ([], ["dan"])
    assert outcome.distance < SOUND
