"""Runs side by side: what is comparable is on one axis, all else apart; the page is whole and safe."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_report import side_by_side
from diloco_report.side_by_side import AXES, MAX_MEANS, MAX_RUNS, ComparedRun, LossSample, curve, differing, loss_at, render

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&"


def entry(name: str, **changed: Any) -> ComparedRun:
    falling = [LossSample(4.0 - at / 10, 1000.0 * at, float(at), 50.0 * at) for at in range(1, 11)]
    ends = {"loss": 3.0, "tokens": 10_000, "time_s": 10.0, "bytes_up": 200, "bytes_down": 300}
    made = ComparedRun(name, f"runs/{name}", "over", "nats per byte", "the same text", 1000, falling, falling, ends)
    return replace(made, settings={"seed": 0, "round.steps": 24}, **changed)


def drawn(page: str) -> list[dict[str, Any]]:
    """The data of all charts of a page."""
    return [json.loads(unescape(data)) for data in re.findall(r'data-chart="([^"]*)"', page)]


def names(chart: dict[str, Any]) -> set[str]:
    return {line["name"] for line in chart["lines"]}


class Tree(HTMLParser):
    """Counts elements, and fails where they are not closed in order."""

    void = frozenset(("meta", "link", "input", "br"))

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(page: str) -> Tree:
    tree = Tree()
    tree.feed(page)
    tree.close()
    assert tree.open == []
    return tree


def test_curves_of_one_kind_are_drawn_together_on_each_axis() -> None:
    charts = drawn(render([entry("a"), entry("b")]))
    assert [chart["axis"] for chart in charts] == ["tokens", "time", "bytes"] * 2  # validation, training
    assert all(names(chart) == {"a", "b"} for chart in charts)
    by_axis = {chart["axis"]: chart["lines"][0] for chart in charts[:3]}
    assert by_axis["tokens"]["x"] == [1000 * at for at in range(1, 11)]
    assert by_axis["time"]["x"] == list(range(1, 11))
    assert by_axis["bytes"]["x"] == [50 * at for at in range(1, 11)]
    assert by_axis["bytes"]["y"] == pytest.approx([4 - at / 10 for at in range(1, 11)])


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"units": "nats per token"}, "nats per token, the same text: b"),
        ({"text": "another text"}, "nats per byte, another text: b"),
        ({"units": None}, "units not known, the same text: b"),
    ],
)
def test_losses_of_another_kind_are_drawn_apart_and_the_page_says_so(other: dict[str, Any], said: str) -> None:
    page = render([entry("a"), entry("b", **other), entry("c")])
    charts = drawn(page)
    assert len(charts) == 12
    assert {frozenset(names(chart)) for chart in charts} == {frozenset("ac"), frozenset("b")}
    assert (
        f"Losses of 2 kinds, which cannot be compared and are drawn separately. nats per byte, the same text: a, c; {said}."
        in page
    )
    # no loss is compared with b's where all have come
    together = page.partition("As far as all have come")[2].partition("</section>")[0]
    assert re.findall(r"<td>([abc])</td>", together) == ["a", "c"]


def test_other_models_share_the_axis_and_the_page_says_so() -> None:
    page = render([entry("a"), entry("b", parameters=2_000_000)])
    assert "The models differ. Parameters: a 1.00k, b 2.00M." in page
    assert all(names(chart) == {"a", "b"} for chart in drawn(page))
    wider = replace(entry("b"), settings={"task.width": 48})
    assert "The tasks differ, in task.width." in render([replace(entry("a"), settings={"task.width": 32}), wider])
    assert "differ." not in render([entry("a"), entry("b")]).partition("Settings that differ")[0]


def test_bytes_that_are_not_known_are_said_and_not_guessed() -> None:
    ended = [sample._replace(bytes=None) for sample in entry("a").validation]
    never = entry("never", validation=ended, training=())
    at_end = entry("end", validation=[*ended[:-1], ended[-1]._replace(bytes=77.0)], training=())
    page = render([entry("a"), never, at_end])
    chart = next(chart for chart in drawn(page) if chart["axis"] == "bytes")
    assert names(chart) == {"a", "end"}
    assert next(line for line in chart["lines"] if line["name"] == "end")["x"] == [77.0]
    assert "Not known, and left out: never. Known only at the end: end." in page


def test_losses_are_compared_as_far_as_all_have_come() -> None:
    shorter = entry("b", validation=[LossSample(5.0, 500.0, 1.0, None), LossSample(4.0, 2500.0, 8.5, None)])
    page = render([entry("a"), shorter])
    table = page.partition("As far as all have come")[2].partition("</section>")[0]
    assert re.findall(r"<th[^>]*>([^<]*)</th>", table) == ["run", "at 2.50k tokens", "at 0:08"]
    # at 2500 tokens a is halfway between 3.8 and 3.7; at 8.5 s between 3.2 and 3.1
    assert re.findall(r"<td>([^<]*)</td>", table) == ["a", "3.7500", "3.1500", "b", "4.0000", "4.0000"]


def test_settings_that_differ_are_listed_and_the_others_counted() -> None:
    one, other = entry("a"), entry("b")
    other = replace(other, settings={"seed": 3, "round.steps": 24, "codec.offer_bits": 2})
    assert differing([one, other]) == {"seed": [0, 3], "codec.offer_bits": [None, 2]}
    page = render([one, other])
    assert "1 others are the same" in page
    assert "<td>seed</td><td>0</td><td>3</td>" in page
    assert "<td>codec.offer_bits</td><td>–</td><td>2</td>" in page
    assert "None: all 2 are the same." in render([one, entry("c")])


@pytest.mark.parametrize(
    ("arms", "said"),
    [
        ([False, False], "2 runs"),
        ([False], "1 run"),
        ([True, True], "2 arms of experiments"),
        ([False, True], "1 run and 1 arm of an experiment"),
        ([False, False, True, True, True], "2 runs and 3 arms of experiments"),
    ],
)
def test_the_page_counts_runs_and_arms(arms: list[bool], said: str) -> None:
    page = render([entry(f"e{number}", arm=arm) for number, arm in enumerate(arms)])
    assert f'<span class="preset">{said}</span>' in page


def test_each_dash_says_why_there_is_no_value() -> None:
    ends = {"loss": 3.0, "loss_initial": 5.0, "tokens": 9000, "bytes_up": 10_700_000, "spread": None}
    over = entry("over", state="finished", ends=ends, values={"val/a": 1.0, "val/b": float("nan")})
    on = entry("on", state="going on", ends=ends | {"loss_initial": None, "bytes_up": None})
    arm = entry("arm", state="experiment, 2 seeds", arm=True, ends={"loss": 3.0, "tokens": 9000, "spread": 0.25})
    page = render([over, on, arm])
    part = page.partition("<h2>End values")[2].partition("</section>")[0]
    assert re.findall(r"<td>([^<]*)</td>|<td><span[^>]*>([^<]*)<", part)[:5] == [
        ("3.0000", ""), ("", "–"), ("5.0000", ""), ("9.00k", ""), ("10.7 MB", ""),
    ]  # fmt: skip
    assert part.count(">–<") == 6
    assert (
        "– means that the value was not measured. over, on: spread (only an arm of an experiment has it). "
        "on: at first (known when the run is over). on: sent (not recorded yet). "
        "arm: at first, sent (its experiment did not record it)."
    ) in part
    values = page.partition(">Values</h2>")[2].partition("</section>")[0]
    assert (
        "on: val/a, val/b (known when the run is over). arm: val/a, val/b (its experiment did not record it). "
        "over: val/b (not a finite number)."
    ) in values
    assert "not measured" not in render([entry("a"), entry("b")])


def test_a_dash_where_all_have_come_says_why() -> None:
    late = entry("late", validation=[LossSample(5.0, 500.0, 6.0, 900.0), LossSample(4.0, 2500.0, 8.5, 950.0)])
    never = entry("never", validation=[sample._replace(bytes=None) for sample in late.validation])
    part = render([entry("a"), late, never]).partition("<h2>As far as all have come")[2].partition("</section>")[0]
    assert re.findall(r"<th[^>]*>([^<]*)</th>", part) == ["run", "at 2.50k tokens", "at 0:08", "at 500 B"]
    assert part.count(">–<") == 2
    assert (
        "– means that the value was not measured. late: at 500 B (its first loss is at 900 B). "
        "never: at 500 B (its losses are not known by bytes)."
    ) in part


def test_a_run_without_losses_yet_has_its_place_and_its_note() -> None:
    new = ComparedRun("new", "runs/new", "not begun", notes=("no losses yet",))
    page = render([entry("a"), new])
    assert "new: no losses yet." in page
    assert all(names(chart) == {"a"} for chart in drawn(page))
    assert "No loss was recorded yet." in render([new, replace(new, name="newer")])


def test_each_run_has_one_look_everywhere_and_no_two_have_the_same() -> None:
    page = render([entry(f"r{number}") for number in range(MAX_RUNS)])
    looks: dict[str, set[str]] = {}
    for style, name in re.findall(r'style="(stroke:[^"]*)" data-name="([^"]*)"', page):
        looks.setdefault(name, set()).add(style)
    assert len(looks) == MAX_RUNS
    assert all(len(styles) == 1 for styles in looks.values())
    assert len({style for styles in looks.values() for style in styles}) == MAX_RUNS


def test_a_training_curve_is_of_means() -> None:
    noisy = [LossSample(3.0 + (-1) ** at, 10.0 * at, float(at), None) for at in range(1000)]
    chart = next(c for c in drawn(render([entry("a", training=noisy)])) if len(c["lines"][0]["x"]) > 10)
    [line] = chart["lines"]
    assert len(line["x"]) <= MAX_MEANS
    assert all(2.9 < y < 3.1 for y in line["y"])


def test_the_axis_is_chosen_without_a_script_and_by_keyboard() -> None:
    tree = parsed(render([entry("a"), entry("b", units="nats per token")]))
    radios = [attrs for tag, attrs in tree.seen if tag == "input"]
    groups = {attrs["name"] for attrs in radios}
    assert len(groups) == 4  # validation and training, of two kinds
    assert len(radios) == 4 * len(AXES)
    assert len([attrs for attrs in radios if "checked" in attrs]) == 4
    assert {attrs["for"] for tag, attrs in tree.seen if tag == "label"} == {attrs["id"] for attrs in radios}


def test_the_page_asks_for_nothing_and_runs_its_own_script_alone() -> None:
    page = render([entry("a"), entry("b")])
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    [script] = re.findall(r"<script>(.*)</script>", page, re.DOTALL)
    assert policy is not None
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy[1].startswith("default-src 'none'")
    assert f"script-src 'sha256-{digest}'" in policy[1]
    tree = parsed(page)
    ids = [attrs["id"] for _, attrs in tree.seen if attrs.get("id")]
    assert len(ids) == len(set(ids))
    for _, attrs in tree.seen:
        assert not any(name.startswith("on") for name in attrs)
        assert "src" not in attrs
        assert attrs.get("href", "data:,") == "data:,"


def test_all_that_a_run_brings_along_is_escaped() -> None:
    hostile = ComparedRun(
        HOSTILE,
        HOSTILE,
        HOSTILE,
        HOSTILE,
        HOSTILE,
        validation=entry("a").validation,
        training=entry("a").training,
        values={HOSTILE: 1.0},
        settings={HOSTILE: HOSTILE},
        changes=[HOSTILE],
        notes=[HOSTILE],
    )
    page = render([entry("a"), hostile])
    tree = parsed(page)
    assert [tag for tag, _ in tree.seen if tag in ("script", "img")] == ["script"]
    assert {HOSTILE} < {name for chart in drawn(page) for name in names(chart)} | {"a"}


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 10)), min_size=1, max_size=20), st.floats(0, 1e6))
def test_the_loss_at_a_place_lies_between_its_neighbours(points: list[tuple[float, float]], x: float) -> None:
    samples = [LossSample(loss, at, None, None) for at, loss in points]
    ordered = curve(samples, "tokens")
    found = loss_at(ordered, x)
    if x < ordered[0][0] or x > ordered[-1][0]:
        assert found is None
    else:
        before = max((p for p in ordered if p[0] <= x), key=lambda p: p[0])
        after = min((p for p in ordered if p[0] >= x), key=lambda p: p[0])
        near = [p[1] for p in ordered if before[0] <= p[0] <= after[0]]
        assert found is not None
        assert min(near) - 1e-6 <= found <= max(near) + 1e-6


def test_every_end_value_has_a_title_of_its_own() -> None:
    titles = [title for _, title, _ in side_by_side.ENDS]
    assert len(set(titles)) == len(titles)
