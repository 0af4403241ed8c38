"""Colours and short names of learners: each is told from the others."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tests.made.reports import fake_report

from diloco_report import facts
from diloco_report.colours import assigned, cut_middle, short_names, terminal
from diloco_report.drawing import charts
from diloco_report.page import render_html

PALETTE = ("#3b9eff", "#e5873a", "#2fae72", "#c66bd6", "#d9b02b", "#e2557a", "#24b3c2", "#8f8bff")


def report_of(*names: str, regions: dict[str, str] | None = None) -> dict[str, Any]:
    places = regions or {}
    return {
        "learners": {name: {"region": places.get(name)} for name in names},
        "regions": {region: {} for region in dict.fromkeys(places.values())},
    }


def test_learners_of_regions_have_shades_of_their_regions() -> None:
    regions = {f"learner-{region}-{number}": region for region in ("us", "eu", "ap") for number in range(2)}
    colours = facts.colours(report_of(*regions, regions=regions))
    assert colours["learner-us-0"] == "var(--s0)"
    assert colours["learner-eu-0"] == "var(--s1)"
    assert colours["learner-ap-0"] == "var(--s2)"
    assert colours["learner-us-1"] == "color-mix(in oklab, var(--s0) 55%, var(--ink))"
    assert len(set(colours.values())) == 6


@pytest.mark.parametrize("count", [4, 12, 64])
def test_no_two_of_many_learners_have_one_colour(count: int) -> None:
    names = [f"learner-{number}" for number in range(count)]
    colours = facts.colours(report_of(*names))
    assert len(set(colours.values())) == count
    assert [colours[name] for name in names[:2]] == ["var(--s0)", "var(--s1)"]
    places = assigned(names, {}, [])
    assert len({terminal(PALETTE, *place) for place in places.values()}) == count
    assert all(re.fullmatch(r"#[0-9a-f]{6}", terminal(PALETTE, *place)) for place in places.values())


def test_a_learner_keeps_its_colour_when_others_come() -> None:
    few = facts.colours(report_of("learner-2", "learner-10"))
    many = facts.colours(report_of("learner-2", "learner-10", "learner-11"))
    assert few == {name: many[name] for name in few}


@pytest.mark.parametrize(
    ("names", "room", "shown"),
    [
        (["learner-0", "learner-1"], 9, ["learner-0", "learner-1"]),
        (["learner-us-0", "learner-eu-0"], 9, ["us-0", "eu-0"]),
        (["learner-us-0", "learner-us-1"], 9, ["0", "1"]),
        (["learner-europe-west-12", "learner-us-0"], 9, ["euro…t-12", "us-0"]),
        (["learner-europe-west-12"], 9, ["lear…t-12"]),
        (["a", "learner-europe-0"], 9, ["a", "lear…pe-0"]),
        ([], 9, []),
    ],
)
def test_names_lose_what_all_have_or_their_middle(names: list[str], room: int, shown: list[str]) -> None:
    assert list(short_names(names, room).values()) == shown
    assert cut_middle("abcdef", 1) == "…"


def test_names_are_in_the_order_of_their_numbers_everywhere() -> None:
    report = fake_report()
    points, spans = [[1.0, 10, 1, 3.0]], [[0.0, 1.0, "stepping"]]
    learner = next(iter(report["learners"].values()))
    names = [f"learner-{number}" for number in (0, 1, 10, 11, 2)]
    report["learners"] = dict.fromkeys(names, learner)
    report["series"] |= {"learners": dict.fromkeys(names, points), "activity": dict.fromkeys(names, spans), "merges": []}
    page = render_html(report)
    found = [name for name in re.findall(r'data-toggle="([^"]*)"', page) if name != "global"]
    in_order = sorted(names, key=facts.natural)
    assert found == in_order + in_order
    assert (
        re.findall(r'<text class="label"[^>]*>(learner-\d+)</text>', charts.timeline(report["series"]["activity"], 1.0))
        == names
    )
    lanes = page[page.index("What each learner did") :]
    assert re.findall(r'<text class="label"[^>]*>(learner-\d+)</text>', lanes)[:5] == in_order
