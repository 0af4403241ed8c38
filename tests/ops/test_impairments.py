"""What disturbs links: which ones are meant, what is refused, and what several failures leave together."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.errors import FormatError, SettingsError
from diloco_ops import failures
from diloco_ops.failures import Failure, FailureTape
from diloco_ops.wan.impairments import KINDS, Turn, changed, complaint, is_cut, left, meant, timeline
from diloco_ops.wan.link import LinkConditions

LINKS = ["us-eu", "eu-us", "us-ap", "ap-us", "eu-ap", "ap-eu"]
HEADER: dict[str, Any] = {"format": "diloco-failures", "version": 1, "duration_s": 60.0}


@pytest.mark.parametrize(
    ("words", "links"),
    [
        (["eu"], ["us-eu", "eu-us", "eu-ap", "ap-eu"]),
        (["us-eu"], ["us-eu"]),
        (["eu-us", "us-eu"], ["us-eu", "eu-us"]),
        (["us-*"], ["us-eu", "us-ap"]),
        (["*-ap", "eu-us"], ["eu-us", "us-ap", "eu-ap"]),
        (["*"], LINKS),
        ([], []),
    ],
)
def test_a_region_a_link_or_a_pattern_means_links(words: list[str], links: list[str]) -> None:
    assert meant(words, LINKS) == links


@pytest.mark.parametrize(
    ("word", "hint"), [("ue", ""), ("eu-uss", "'eu-us'"), ("euu", "'eu'"), ("mars-*", ""), ("us-us", "'us-")]
)
def test_an_unknown_region_or_link_is_refused_with_the_nearest(word: str, hint: str) -> None:
    with pytest.raises(SettingsError) as refused:
        meant(["us", word], LINKS)
    message = str(refused.value)
    assert message.startswith(f"{word}: no such region or link")
    assert f"did you mean {hint}" in message or not hint
    assert "regions: ap, eu, us; links: us-eu, " in message


def failure(kind: str, target: str = "link/us-eu", at_s: float = 0.0, duration_s: float = 1.0, **values: Any) -> Failure:
    return Failure(at_s, kind, target, duration_s, values)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (failure("link_cut", "link/us-mars"), "target 'link/us-mars' matches no link (did you mean 'link/us-"),
        (failure("link_cut", "us-eu"), "target 'us-eu' matches no link"),
        (failure("link_cut", duration_s=0), "link_cut needs a duration_s above 0"),
        (failure("link_cut", factor=2.0), "link_cut has no value 'factor'; its values are none"),
        (failure("link_slow", duration_s=0, factor=2.0), "link_slow needs a duration_s above 0"),
        (failure("link_slow"), "link_slow changes nothing: it needs factor"),
        (failure("link_slow", factor=0.5), "factor = 0.5, expected a number from 1 to"),
        (failure("link_slow", factr=2.0), "link_slow has no value 'factr' (did you mean 'factor'?)"),
        (failure("link_set"), "link_set changes nothing: it needs rate_bits_per_s or delay_s or jitter_s"),
        (
            failure("link_set", rate_bits_per_s=3.0),
            "rate_bits_per_s = 3.0, expected a number from 1000 to 1e+12, or 'unlimited'",
        ),
        (failure("link_set", rate_bits_per_s="5mbit"), "rate_bits_per_s = '5mbit', expected a number"),
        (failure("link_set", delay_s="unlimited"), "delay_s = 'unlimited', expected a number from 0 to 10"),
        (failure("link_set", jitter_s=11.0), "jitter_s = 11.0, expected a number from 0 to 10"),
    ],
)
def test_what_cannot_be_brought_about_is_said(wrong: Failure, says: str) -> None:
    assert says in (complaint(wrong, LINKS) or "")


@pytest.mark.parametrize(
    "right",
    [
        failure("link_cut", "link/*-eu"),
        failure("link_slow", factor=4.0),
        failure("link_set", duration_s=0, rate_bits_per_s="unlimited", delay_s=0.0),
    ],
)
def test_what_can_be_brought_about_is_let_through(right: Failure) -> None:
    assert complaint(right, LINKS) is None


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            {"at_s": 3, "kind": "link_cut", "target": "link/us-mars", "duration_s": 1},
            "wan.jsonl, line 3: target 'link/us-mars'",
        ),
        ({"at_s": 1, "kind": "link_cut", "target": "link/us-eu", "duration_s": 1}, "wan.jsonl, line 3: at_s = 1 comes after 2"),
        ({"at_s": 3, "kind": "kill", "target": "nats"}, "wan.jsonl, line 3: kind 'kill' is not known here"),
    ],
)
def test_a_tape_is_refused_by_its_line(line: dict[str, Any], says: str) -> None:
    good = {"at_s": 2, "kind": "link_cut", "target": "link/us-*", "duration_s": 1}
    lines = [json.dumps(each) for each in (HEADER, good, line)]
    with pytest.raises(FormatError) as refused:
        failures.decode(lines, "wan.jsonl", KINDS, lambda failure: complaint(failure, LINKS))
    assert says in str(refused.value)


def test_failures_begin_and_end_in_the_order_of_time() -> None:
    cut = failure("link_cut", at_s=1.0, duration_s=10.0)
    slow = failure("link_slow", at_s=2.0, duration_s=3.0, factor=2.0)
    stays = failure("link_set", at_s=4.0, duration_s=0.0, delay_s=0.1)
    turns = timeline(FailureTape(20.0, [cut, slow, stays]))
    assert turns == [Turn(1, cut, True), Turn(2, slow, True), Turn(4, stays, True), Turn(5, slow, False), Turn(11, cut, False)]


def test_overlapping_failures_compose() -> None:
    base = LinkConditions(8e6, 0.05, 0.001, 9000)
    thin = failure("link_set", rate_bits_per_s=4e6)
    far = failure("link_set", rate_bits_per_s=2e6, delay_s=0.2)
    slow, slower, cut = failure("link_slow", factor=2.0), failure("link_slow", factor=5.0), failure("link_cut")
    assert left(base, []) == base
    assert left(base, [slow, cut, slower]) == LinkConditions(8e5, 0.05, 0.001, 9000)
    assert left(base, [thin, slow, far]) == LinkConditions(1e6, 0.2, 0.001, 9000)  # the setting that began last, and the factor
    assert left(base, [thin, slow]) == LinkConditions(2e6, 0.05, 0.001, 9000)  # it has ended: the earlier one holds again
    assert left(LinkConditions(), [slow]).rate_bits_per_s is None
    assert changed(base, failure("link_set", rate_bits_per_s="unlimited")) == LinkConditions(None, 0.05, 0.001, 9000)


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.01, 10)), max_size=8), st.floats(0, 20))
def test_a_link_is_cut_exactly_while_a_cut_lasts(cuts: list[tuple[float, float]], at_s: float) -> None:
    tape = FailureTape(20.0, [failure("link_cut", at_s=begins_s, duration_s=lasts_s) for begins_s, lasts_s in sorted(cuts)])
    lasting: list[Failure] = []
    for turn in timeline(tape):
        if turn.at_s > at_s:
            break
        lasting = [*lasting, turn.failure] if turn.begins else [each for each in lasting if each is not turn.failure]
    assert is_cut(lasting) == any(begins_s <= at_s < begins_s + lasts_s for begins_s, lasts_s in cuts)
