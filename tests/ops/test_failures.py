"""The failure tape: what is written is read, what does not fit is refused with its line, what is drawn follows the seed."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.errors import FormatError
from diloco_ops.failures import MAX_LINE_BYTES, Failure, FailureKind, FailureTape, Spread, decode, draw, encode, only

HEADER: dict[str, Any] = {"format": "diloco-failures", "version": 1, "duration_s": 60.0}
FREEZE: dict[str, Any] = {"at_s": 1.5, "kind": "freeze", "target": "learner-1", "duration_s": 4}


def text(*lines: Any) -> list[str]:
    return [line if isinstance(line, str) else json.dumps(line) for line in lines]


def test_a_tape_written_by_hand_is_read() -> None:
    tape = decode(
        text(HEADER | {"seed": 7, "by": "hand"}, FREEZE, "", {"at_s": 2, "kind": "slow", "target": "link/us-eu", "factor": 3}),
        "tape",
    )
    assert tape.duration_s == 60
    assert tape.about == {"seed": 7.0, "by": "hand"}
    freeze, slow = tape.failures
    assert freeze == Failure(1.5, "freeze", "learner-1", 4.0)
    assert (slow.target, slow.duration_s, slow.number("factor", 1.0), slow.number("offset_s", 9.0)) == (
        "link/us-eu", 0.0, 3.0, 9.0,
    )  # fmt: skip


SECONDS = st.floats(0, 1e9)
FAILURES = st.builds(
    Failure,
    SECONDS,
    st.sampled_from(["kill", "chip_loss", "a0_b"]),
    st.sampled_from(["nats", "learner-*", "learner-[0-3]/slice-?", "link/us-eu"]),
    SECONDS,
    st.dictionaries(st.sampled_from(["factor", "offset_s", "note"]), st.floats(-1e9, 1e9) | st.text(max_size=20)),
)


@given(st.lists(FAILURES, max_size=8), SECONDS)
def test_what_is_written_is_read(failures: list[Failure], duration_s: float) -> None:
    tape = FailureTape(duration_s, sorted(failures, key=lambda failure: failure.at_s), {"seed": 3.0})
    assert decode(encode(tape).splitlines(), "tape") == tape


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "not a failure tape"),
        (text({"format": "other"}), "not a failure tape"),
        (text(HEADER | {"version": 2}), "version 2 of the failure tape, this reads 1"),
        (text(HEADER | {"duration_s": -1}), "line 1: duration_s = -1"),
        (text(HEADER, "{"), "line 2: not JSON"),
        (text(HEADER, "[" * 3000), "line 2: not JSON"),
        (text(HEADER, [1]), "line 2: expected a JSON object"),
        (text(HEADER, " " * (MAX_LINE_BYTES + 1)), "line 2: longer than"),
        (text(HEADER, FREEZE | {"kind": "Freeze!"}), "line 2: kind = 'Freeze!'"),
        (text(HEADER, FREEZE | {"target": "a b"}), "line 2: target = 'a b'"),
        (text(HEADER, FREEZE | {"target": 3}), "line 2: target = 3"),
        (text(HEADER, FREEZE | {"at_s": True}), "line 2: at_s = True"),
        (text(HEADER, '{"at_s": NaN, "kind": "kill", "target": "nats"}'), "line 2: at_s = nan"),
        (text(HEADER, FREEZE | {"duration_s": 1e10}), "line 2: duration_s = 10000000000.0"),
        (text(HEADER, FREEZE | {"factor": [1]}), "line 2: factor = [1]"),
        (text(HEADER, FREEZE | {"factor": 10**400}), "expected a finite number"),
        (text(HEADER, FREEZE | {f"v{i}": i for i in range(17)}), "line 2: 17 values"),
        (text(HEADER, FREEZE, FREEZE | {"at_s": 1}), "line 3: at_s = 1 comes after 1.5"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_line(lines: list[str], said: str) -> None:
    with pytest.raises(FormatError) as refused:
        decode(lines, "tape.jsonl")
    assert said in str(refused.value)
    assert str(refused.value).startswith("tape.jsonl")


@given(st.lists(st.text(max_size=200), max_size=5))
def test_no_text_does_worse_than_a_refusal(lines: list[str]) -> None:
    try:
        tape = decode([json.dumps(HEADER), *lines], "tape")
    except FormatError:
        return
    assert [failure.at_s for failure in tape.failures] == sorted(failure.at_s for failure in tape.failures)


def test_unknown_kinds_are_refused_or_left_out_as_the_reader_likes() -> None:
    lines = text(HEADER, FREEZE, FREEZE | {"kind": "chip_loss", "target": "learner-1/chip-3"})
    with pytest.raises(FormatError, match="line 3: kind 'chip_loss' is not known here; known are freeze, kill"):
        decode(lines, "tape", known={"kill", "freeze"})
    kept, left_out = only(decode(lines, "tape"), {"freeze"})
    assert [failure.kind for failure in kept.failures] == ["freeze"]
    assert left_out == {"chip_loss": 1}


def test_targets_are_names_or_patterns() -> None:
    names = ["learner-0", "learner-1", "syncer-0", "nats"]
    assert Failure(0, "kill", "learner-1").targets(names) == ["learner-1"]
    assert Failure(0, "kill", "*-0").targets(names) == ["learner-0", "syncer-0"]
    assert Failure(0, "kill", "learner-7").targets(names) == []


SOURCES = [
    FailureKind("kill", ["a", "b", "c"], weight=3.0),
    FailureKind("freeze", ["a"], duration_s=Spread(1, 3)),
    FailureKind("clock", ["b"], duration_s=Spread(2, 2), values={"offset_s": Spread(-100, 100)}),
    FailureKind("never", ["a"], weight=0.0),
    FailureKind("nothing_to_meet", []),
]


def test_a_drawn_tape_follows_its_seed() -> None:
    one, same, other = (draw(seed, SOURCES, 500, 0.5) for seed in (1, 1, 2))
    assert one == same
    assert one != other
    # Random(1).random() gives 0.13436424411240122, 0.8474337369372327 and 0.763774618976614 in every version of Python: the
    # first gap is -ln(1 - 0.134) / 0.5 s; 0.847 of the weights (3, 1, 1) falls on the third; which has one target
    assert (one.failures[0].at_s, one.failures[0].kind, one.failures[0].target) == (0.289, "clock", "b")


def test_a_drawn_tape_is_as_asked_for() -> None:
    tape = draw(5, SOURCES, 4000, 1.0)
    counts = Counter(failure.kind for failure in tape.failures)
    # a Poisson process of mean 4000, whose kinds come as 3 : 1 : 1; bounds are more than five deviations wide
    assert 3650 < len(tape.failures) < 4350
    assert 0.55 < counts["kill"] / len(tape.failures) < 0.65
    assert set(counts) == {"kill", "freeze", "clock"}
    gaps = [b.at_s - a.at_s for a, b in zip(tape.failures, tape.failures[1:], strict=False)]
    assert min(gaps) < 0.05 < 2 < max(gaps)
    for failure in tape.failures:
        if failure.kind == "freeze":
            assert 1 <= failure.duration_s <= 3
        if failure.kind == "clock":
            assert failure.duration_s == 2
            assert -100 <= failure.number("offset_s", 0.0) <= 100
    assert {failure.target for failure in tape.failures if failure.kind == "kill"} == {"a", "b", "c"}


def test_a_regular_tape_has_one_failure_every_so_often() -> None:
    tape = draw(5, SOURCES, 35, 0.1, regular=True)
    assert [failure.at_s for failure in tape.failures] == [10.0, 20.0, 30.0]


def test_exponential_lives_have_their_mean() -> None:
    tape = draw(3, [FailureKind("down", ["chip"], duration_s=Spread(mean=20.0))], 3000, 1.0)
    mean_s = sum(failure.duration_s for failure in tape.failures) / len(tape.failures)
    assert 18 < mean_s < 22


def test_more_failures_than_a_tape_holds_are_refused() -> None:
    with pytest.raises(FormatError, match="more than a tape's 500000"):
        draw(1, SOURCES, 1e9, 1.0)
