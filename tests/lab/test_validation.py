"""What is seen of hand-made runs becomes a calibration and counts; and messages are as long as the simulator assumes."""

from __future__ import annotations

import pytest

from diloco.core.tensors.quantise import body_bytes
from diloco.errors import DataError
from diloco.settings.presets import run_settings
from diloco.wire import framing
from diloco.wire.body import Body
from diloco.wire.entries import Record
from diloco.wire.offers import MergeMember, Offer
from diloco_lab.published import validation
from diloco_lab.published.validation import RunObservations, SeenOffer, SeenVersion, ValidationRow
from diloco_lab.simulator.network import MEMBER_BYTES, OFFER_BYTES, RECORD_BYTES
from diloco_ops.failures import Failure, FailureTape

SETTINGS = run_settings(overrides={"fragments.count": 2, "round.steps": 4, "learners": 2})
HASH = bytes(range(32))


def seen() -> RunObservations:
    """Two learners of a step a second and one in two, since 100 s and 101 s; a round every 4 s, of both, since 110 s."""
    steps = {
        "learner-0": [(100.0 + step, step) for step in range(5, 41)],
        "learner-1": [(101.0 + 2 * step, step) for step in range(3, 20)],
    }
    made = RunObservations(SETTINGS, [64, 192], 10, steps)
    for number, at_s in enumerate(range(110, 140, 4), 3):
        made.announced[0, number] = float(at_s)
        made.offers += [SeenOffer(at_s + 0.25, 0, 251, 51), SeenOffer(at_s + 0.5, 0, 251, 51)]
        made.versions.append(SeenVersion(at_s + 0.75, 0, number, [40, 20], 500, 0.5))
    return made


def test_what_is_measured_before_the_tape() -> None:
    calibration = validation.calibrate(seen(), 110.0, 120.0)
    assert [learner.step_s for learner in calibration.learners] == [1.0, 2.0]
    assert [learner.present[0][0] for learner in calibration.learners] == [0.0, 1.0]
    assert calibration.lead_in_s == 20.0
    assert calibration.tokens_per_s == 15.0
    assert (calibration.rounds.answer_s, calibration.rounds.commit_s) == (0.5, 0.25)
    assert calibration.rounds.compression == 51 / body_bytes(64, 4)


def test_what_is_counted_while_the_tape_is_played() -> None:
    run = seen()
    counted = validation.live(run, validation.calibrate(run, 110.0, 120.0), 120.0, 130.0)
    assert counted == {
        "steps of learner-0": 10,
        "steps of learner-1": 5,
        "tokens processed": 150,
        "goodput": 1.0,
        "versions": 2,  # at 122.75 and 126.75
        "offers in a version": 2,
        "tokens merged": 2 * 60 / 4,  # of a quarter of the parameters
        "bytes of offers": 4 * 251,
        "bytes of versions to learners": 2 * 500 * 2,
    }


def test_the_simulator_freezes_whom_the_tape_freezes() -> None:
    calibration = validation.calibrate(seen(), 110.0, 120.0)
    quiet = validation.simulated(calibration, FailureTape(40.0, []))
    frozen = validation.simulated(calibration, FailureTape(40.0, [Failure(5.0, "freeze", "learner-0", 10.0)]))
    assert (quiet["steps of learner-0"], quiet["steps of learner-1"], quiet["goodput"]) == (40, 20, 1.0)
    assert (frozen["steps of learner-0"], frozen["steps of learner-1"]) == (30, 20)
    assert frozen["goodput"] == pytest.approx(50 / 60)
    assert frozen["versions"] < quiet["versions"]


def test_a_cut_lets_something_through_every_time_the_connections_are_made_again() -> None:
    calibration = validation.calibrate(seen(), 110.0, 120.0)
    assert validation._as_chaos_does(Failure(3.0, "freeze", "learner-0", 2.0)) == [Failure(3.0, "freeze", "learner-0", 2.0)]
    cuts = validation._as_chaos_does(Failure(3.0, "cut", "learner-0", 1.5))
    assert [(round(cut.at_s, 6), cut.duration_s) for cut in cuts] == [(3.0, 0.5), (3.6, 0.5), (4.2, 0.5)]
    cut = validation.simulated(calibration, FailureTape(40.0, [Failure(5.0, "cut", "learner-0", 1.5)]))
    assert cut["goodput"] == 1.0


@pytest.mark.parametrize(("begin_s", "end_s", "complaint"), [(200.0, 210.0, "learner-0: 0 steps"), (102.0, 110.0, "no round")])
def test_a_lead_in_in_which_too_little_happened_is_named(begin_s: float, end_s: float, complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        validation.calibrate(seen(), begin_s, end_s)


def test_differences_are_relative_to_the_live_run() -> None:
    assert [row.difference for row in validation.compared({"a": 80.0, "b": 1.0}, {"a": 84.0, "b": 0.5})] == [
        pytest.approx(0.05),
        -0.5,
    ]
    assert ValidationRow("c", 0.0, 1.0).difference == float("inf")


def test_messages_are_as_long_as_the_simulator_assumes() -> None:
    """In the middle of a run: after 1000 versions, and 20 million tokens of each learner."""
    incarnation, body = 1_790_000_000_000, Body(8714, HASH, 0, bytes(8))
    offer = Offer(
        fragment=3,
        learner="learner-1",
        incarnation=incarnation,
        number=1000,
        after=(incarnation, 999),
        round=1001,
        base_version=1000,
        base_hash=HASH,
        bits=4,
        steps=24,
        tokens=24 * 1024,
        lost_tokens=1_000_000,
        data=[(1, 24_000, 24)],
        body=body,
    )
    assert len(framing.pack(offer, HASH[:8], b"")) == pytest.approx(OFFER_BYTES, rel=0.05)
    for count in (1, 3, 8):
        member = [
            MergeMember(f"learner-{i}", incarnation, 1000, 1001, 1000, 24, 24 * 1024, 1_000_000, 1e6, [(1, 24_000, 24)])
            for i in range(count)
        ]
        record = Record(
            fragment=3,
            entry="version",
            version=1001,
            epoch=1,
            syncer="syncer-0",
            previous=HASH,
            members=member,
            regional_offers=[],
            bits=4,
            learning_rate=0.7,
            momentum=0.5,
            tokens_merged=60_000_000,
            tokens_lost=3_000_000,
            state_hash=HASH,
            closing=False,
            committed_at_s=1.79e9,
            quorum_s=0.01,
            round_s=0.01,
            body=body,
        )
        assert len(framing.pack(record, HASH[:8], b"")) == pytest.approx(RECORD_BYTES + count * MEMBER_BYTES, rel=0.05)


def test_drift_is_that_of_the_usual_step() -> None:
    """Steps of 1 s, then of 1.1 s but for one of 5 s, in which it was frozen."""
    times = [0.0, 1.0, 2.0, 3.0, 4.1, 5.2, 10.2, 11.3, 12.4]
    seen = validation.RunObservations(run_settings(), [1], 1, {"learner-0": [(at_s, step) for step, at_s in enumerate(times)]})
    assert validation.drift(seen, 0.0, 3.05, 20.0) == {"learner-0": pytest.approx(0.1)}
