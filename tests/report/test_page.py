"""The report as a page: whole, self-contained, and safe against what a run brings along."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.made.reports import HOSTILE, fake_report, report_with_regions

from diloco_report import now, units
from diloco_report.drawing import charts, curves, frame, lines
from diloco_report.page import render_html, write_html
from diloco_report.units import count, decimal, duration, share, size, times


class _Page(HTMLParser):
    """What a browser would make of the page, as far as the tests ask."""

    VOID = frozenset({"meta", "link", "img", "br", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.stack: list[str] = []
        self.scripts: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        inside = self.stack[-1] if self.stack else ""
        (self.scripts if inside == "script" else self.text).append(data)


def test_the_page_is_whole_and_says_the_headline() -> None:
    page = _Page(render_html(fake_report()))
    assert page.stack == []
    text = " ".join(page.text)
    for part in ("1.621", "10.0 % below", "4-gram (1.80)", "1:58", "95.3 %", "2.86M", "36.7×", "0.42 %", "77.6 MB up"):
        assert part in text
    assert "self.assertEqual(len(value), 2)" in text
    for title in ("Loss", "What each learner did", "Who was in each merge", "Learners", "Fragments", "Samples", "Settings"):
        assert title in page.text


def test_nothing_is_fetched_and_only_our_script_may_run() -> None:
    text = render_html(fake_report())
    page = _Page(text)
    addresses = [
        value for _, attributes in page.tags for name, value in attributes.items() if name in ("src", "href", "action", "data")
    ]
    assert addresses == ["data:,"]
    assert not re.search(r"https?:|url\((?!#)|@import", text)
    (script,) = page.scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(a["content"] for t, a in page.tags if t == "meta" and "http-equiv" in a)
    assert policy is not None
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy


def _poison(value: Any) -> Any:
    if isinstance(value, dict):
        return {(HOSTILE + key if key.startswith("learner-") else key): _poison(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_poison(inner) for inner in value]
    return HOSTILE + value if isinstance(value, str) else value


def test_what_comes_from_a_run_stays_text() -> None:
    clean, poisoned = _Page(render_html(fake_report())), _Page(render_html(_poison(fake_report())))
    assert poisoned.stack == []
    assert poisoned.scripts == clean.scripts
    assert [tag for tag, _ in poisoned.tags if tag in ("script", "img")] == ["script"]
    assert not any(name.startswith("on") for _, attributes in poisoned.tags for name in attributes)
    assert any(HOSTILE in text for text in poisoned.text)


@pytest.mark.parametrize(
    "report",
    [
        {},
        {"format": 1, "run": "r", "learners": {}, "fragments": [], "baselines": {}, "series": {}, "sample": None},
        fake_report(learners=1, fragments=1),
        fake_report(learners=16, fragments=80),
        fake_report(baselines={}, sample=None, val_loss=None, val_loss_initial=None, traffic={"ratio": None}),
        report_with_regions(series={}, together=[], learners={}),
        fake_report(tokens_processed=0, wall_s=0.0, series={"learners": {"learner-0": []}, "activity": {}, "merges": []}),
    ],
    ids=["nothing", "empty", "one", "many", "unknown", "regions", "zero"],
)
def test_odd_reports_still_make_a_page(report: dict[str, Any]) -> None:
    page = _Page(render_html(report))
    assert page.stack == []
    shown = " ".join(page.text).partition(" Settings ")[0]
    assert not re.search(r"\b(nan|inf|None)\b", shown)


def test_values_of_the_task_are_shown_beside_those_of_the_beginning() -> None:
    values = {"val_loss/code": 1.25, "val/code/accuracy": 0.5, "exact_match": None}
    page = _Page(render_html(fake_report(values=values, values_initial={"val_loss/code": 2.5, "val/code/accuracy": 0.125})))
    shown = " ".join(" ".join(page.text).split())
    assert "val_loss/code 1.2500 2.5000 val/code/accuracy 0.5000 0.1250 exact_match – –" in shown
    assert "val_loss/" not in " ".join(_Page(render_html(fake_report())).text)


def test_models_are_compared_where_another_one_is_known() -> None:
    alone = fake_report(baselines={}, val_loss_initial=None)
    for report, known in ((fake_report(), True), (fake_report(baselines={}), True), (alone, False)):
        page = render_html(report)
        assert ("Against other models" in page) == known
        assert "Bytes over each learner's link" in html.unescape(page)


def test_losses_that_are_not_finite_are_left_out() -> None:
    report = fake_report()
    report["series"]["learners"]["learner-0"][5][3] = float("nan")
    report["series"]["global"][2][2] = float("inf")
    charts_of = [a["data-chart"] for t, a in _Page(render_html(report)).tags if t == "svg" and "data-chart" in a]
    assert len(charts_of) == 5
    for chart in charts_of:
        assert chart is not None
        assert all(math.isfinite(y) for line in json.loads(chart)["lines"] for y in line["y"])


def test_the_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    write_html(fake_report(sample="\ud800"), path)
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [inner.name for inner in tmp_path.iterdir()] == ["report.html"]


def test_long_runs_make_pages_of_bounded_size() -> None:
    report = fake_report(fragments=200)
    merged = report["series"]["merges"]
    assert len(merged) > charts.MAX_MERGES
    spans = [[t / 100, (t + 1) / 100, "stepping" if t % 2 else "sending"] for t in range(11_800)]
    report["series"]["activity"]["learner-0"] = spans
    text = render_html(report)
    assert len(text) < 2_000_000
    assert re.search(r"\d+ of 5600 are drawn", text)


def test_a_merge_tells_members_weights_and_staleness() -> None:
    merged = {
        "wall_s": 61.25, "fragment": 3, "version": 7, "quorum_s": 0.061, "duration_s": 0.2,
        "members": [["learner-0", 0.75, 0, 24], ["learner-1", 0.25, 2, 24]],
    }  # fmt: skip
    svg, drawn = charts.merges([merged], {"learner-0": "red", "learner-1": "blue", "learner-2": "green"}, 100.0)
    assert drawn == 1
    log_heads = [attributes["data-tip"] for _, attributes in _Page(svg).tags if "data-tip" in attributes]
    assert log_heads == [
        "fragment 3, version 7\nat 1:01.2; quorum after 0.06 s, merged after 0.20 s\n"
        "learner-0  75.0 %\nlearner-1  25.0 %, 2 versions behind"
    ]
    assert "fill:red" in svg
    assert "fill:blue;opacity:.45" in svg
    assert "green" not in svg


def test_a_run_with_regions_shows_who_was_merged_with_whom_through_a_cut() -> None:
    page = _Page(render_html(report_with_regions()))
    assert page.stack == []
    text = " ".join(page.text)
    assert "Who was merged with whom" in page.text
    assert "0:40 to 1:00: eu away, 5 versions" in page.text
    assert "0:00 to 0:40: all here, 24 versions" in page.text
    assert "not heard, 0:40 to 1:00" in page.text
    assert not any("1:50 to" in part for part in page.text)  # too short a time for a text
    for part in ("Bytes between regions", "2.40 MB", "2.50 MB", "1.50 kB", "90.0 kB", "control"):
        assert part in text
    labels = [attributes.get("aria-label") or "" for tag, attributes in page.tags if tag == "svg"]
    said = (
        "Merged offers over time, by learner, in 3 regions; eu was not heard from 0:40 to 1:00; ap was not heard from 1:50 to "
    )
    assert any(label.startswith(said) for label in labels)
    assert "Who was merged with whom" not in _Page(render_html(fake_report())).text


def test_names_of_regions_stay_text_too() -> None:
    report = report_with_regions()
    evil = {HOSTILE + name: region for name, region in report["regions"].items()}
    page = _Page(render_html(report | {"regions": evil}))
    assert page.stack == []
    assert [tag for tag, _ in page.tags if tag in ("script", "img")] == ["script"]


def _marks(svg: str, css: str) -> list[tuple[float, float]]:
    """Where the marks of one colour begin, but for the long work of an offer."""
    [path] = re.findall(rf'<path d="([^"]*)" style="fill:{css}"/>', svg)
    return [(float(x), float(y)) for x, y in re.findall(r"M([\d.]+) ([\d.]+)h", path)]


def test_marks_stand_in_their_learners_lane_and_have_the_colour_of_the_owners_region() -> None:
    def merged(at_s: float, fragment: int, syncer: str, **steps: int) -> dict[str, Any]:
        members = [[name, 0.5, 0, held] for name, held in steps.items()]
        return {"wall_s": at_s, "fragment": fragment, "version": 1, "syncer": syncer, "members": members}

    # bob took 10 steps a second, but it was not heard while its region was away
    points = [(10.0, 100.0), (20.0, 200.0), (80.0, 800.0), (100.0, 1000.0)]
    groups = [
        charts.ChartRegion("us", "blue", {"ann": points}, []),
        charts.ChartRegion("eu", "red", {"bob": points}, [(20.0, 80.0)]),
    ]
    rounds = [
        merged(10, 0, "s-us", ann=24, bob=24),
        merged(10, 1, "s-eu", ann=24, bob=24),
        merged(50, 1, "s-us", ann=24),
        merged(90, 1, "s-us", ann=24, bob=400),
    ]
    svg = charts.regions(rounds, groups, {"s-us": "us", "s-eu": "eu"}, 100.0)
    # 1120 wide, 110 at the left, 16 at the right: 9.94 a second. Lanes of 72 below a title of 22; a row is 36
    ann, bob = 22.0, 22 + 77 + 22.0
    assert _marks(svg, "blue") == [
        (209.4, ann), (209.4, bob), (607.0, ann + 36), (1004.6, ann + 36), (1004.6, bob + 36)
    ]  # fmt: skip
    assert _marks(svg, "red") == [(209.4, ann + 36), (209.4, bob + 36)]
    # bob's last offer held 400 of 900 steps: those since 50 s
    assert re.findall(r'<path class="long" d="M([\d.]+) ([\d.]+)h([\d.]+)', svg) == [("607.0", "157.0", "397.6")]
    assert '<rect class="away" x="308.8" y="99.0" width="596.4" height="99.0" data-tip="eu: not heard, 0:20 to 1:20"/>' in svg


def test_timeline_joins_neighbours_and_keeps_gaps() -> None:
    svg = charts.timeline({"learner-0": [(0, 10, "stepping"), (10, 20, "stepping"), (50, 100, "stepping")]}, 100.0)
    log_heads = [attributes["data-tip"] for _, attributes in _Page(svg).tags if "data-tip" in attributes]
    assert log_heads == ["learner-0\nstepping\n0:00.0 to 0:20.0", "learner-0\nstepping\n0:50.0 to 1:40.0"]


def test_a_curve_has_a_gap_where_nothing_was_recorded() -> None:
    times = [0.0, 1.0, 2.0, 3.0, 33.0, 34.0, 35.0]
    assert curves.gaps(times) == [4]
    assert curves.gaps([0.0, 20.0, 40.0, 60.0, 90.0]) == []  # slow steps: five times as long as usual is a gap
    assert curves.gaps([0.0, 0.1, 0.2, 0.3, 2.0]) == []  # and at least 5 s
    assert curves.gaps([0.0, 30.0]) == []
    points = [(at_s, 3.0) for at_s in times]
    drawn = lines.line_chart([curves.CurveLine("a", "red", points, breaks=[4])], {}, axis="time", label="time", name="time")
    [path] = re.findall(r'class="line"[^>]* d="([^"]*)"', drawn)
    assert [len(piece.split("L")) for piece in path.split("M")[1:]] == [4, 3]


def test_a_thinned_curve_keeps_its_gap() -> None:
    points = [(float(x), 1.0) for x in range(1000)] + [(float(x), 3.0) for x in range(5000, 6000)]
    line = curves.thinned(curves.CurveLine("a", "red", points, breaks=[1000]), 100)
    assert (len(line.points), line.breaks) == (100, [50])
    assert line.points[49] == (989.5, 1.0)
    assert line.points[50] == (5009.5, 3.0)
    assert [len(piece) for piece in curves.pieces(line)] == [50, 50]


def test_how_long_something_lasts_is_no_time_of_the_run() -> None:
    lasting = [units.lasting(value) for value in (0, 10.4, 99, 100, 3590, 11_100, None)]
    assert lasting == ["0 s", "10 s", "99 s", "2 min", "1 h 0 min", "3 h 5 min", "–"]
    alert = {"text": "learner-1: not heard", "since_s": 10}
    assert "<li>learner-1: not heard, for 10 s</li>" in now.alerts({"now": {"alerts": [alert]}})


def test_the_last_validation_is_not_carried_on_while_a_run_goes_on() -> None:
    report = fake_report()
    points = len(report["series"]["global"])
    shown = [len(line["x"]) for chart in _charts(report) for line in chart["lines"] if line["name"] == "global"]
    live = [
        len(line["x"]) for chart in _charts(report | {"now": {"state": "training"}}) for line in chart["lines"]
        if line["name"] == "global"
    ]  # fmt: skip
    assert (shown, live) == ([points + 1] * 2, [points] * 2)


def _charts(report: dict[str, Any]) -> list[dict[str, Any]]:
    found = re.findall(r'data-chart="([^"]*)"', render_html(report))
    return [json.loads(html.unescape(chart)) for chart in found]


@pytest.mark.parametrize(
    ("report", "says"),
    [
        ({"wall_s": 338.0}, "finished after 5:38"),
        ({"now": {"state": "training", "eta_s": 200.0}, "wall_s": 40.0}, "training for 40 s, 3:20 left"),
        (
            {"now": {"state": "waiting"}},
            "starting: no learner is heard yet; they compile their first step",
        ),
        ({"now": {"state": "waiting"}, "learners": {"a": {}}}, "starting: 1 learners are heard"),
    ],
)
def test_the_state_stands_below_the_name(report: dict[str, Any], says: str) -> None:
    page = render_html({"run": "mine"} | report)
    assert 0 < page.index("<h1>mine</h1>") < page.index(says)
    assert page.index(says) < page.index('class="figures"')


def test_events_are_shown_while_a_run_goes_on_and_in_its_report() -> None:
    events = [{"at_s": 45.0, "text": "learner-1: was killed (SIGKILL) and is started again"}]
    for report in ({"now": {"state": "training", "events": events}}, {"events": events}):
        drawn = now.events(report)
        assert "<td>0:45</td><td>learner-1: was killed (SIGKILL) and is started again</td>" in drawn


def test_thinning_keeps_means() -> None:
    points = [(float(x), float(x % 2)) for x in range(1000)]
    thinned = curves.thin(points, 100)
    assert len(thinned) == 100
    assert all(y == pytest.approx(0.5, abs=0.05) for _, y in thinned)
    assert curves.thin(points[:5], 100) == points[:5]


@pytest.mark.parametrize(
    ("low", "high", "wanted", "ticks"),
    [(0, 3_000_000, 6, [0, 5e5, 1e6, 1.5e6, 2e6, 2.5e6, 3e6]), (1.5, 2.6, 6, [1.6, 1.8, 2.0, 2.2, 2.4, 2.6]), (5, 5, 6, [5])],
)
def test_nice_ticks(low: float, high: float, wanted: int, ticks: list[float]) -> None:
    assert frame.nice_ticks(low, high, wanted) == ticks


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(2, 12))
def test_ticks_are_few_and_inside(low: float, span: float, wanted: int) -> None:
    high = low + span
    slack = 1e-6 * (abs(low) + span)
    ticks = frame.nice_ticks(low, high, wanted)
    assert len(ticks) <= wanted + 1
    assert all(low - slack <= tick <= high + slack for tick in ticks)


@given(st.floats(0.01, 1e8))
def test_time_ticks_are_few_and_inside(end_s: float) -> None:
    ticks = frame.time_ticks(end_s, 6)
    assert 1 <= len(ticks) <= 7
    assert ticks[0] == 0
    assert ticks[-1] <= end_s * (1 + 1e-6)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (count(0), "0"), (count(999), "999"), (count(999.7), "1.00k"), (count(1_234_567), "1.23M"), (count(99_960), "100k"),
        (count(None), "–"), (count(float("nan")), "–"),
        (size(12), "12 B"), (size(999.9), "1.00 kB"), (size(5_600_000_000), "5.60 GB"),
        (duration(0), "0:00"), (duration(59.6), "1:00"), (duration(3_725), "1:02:05"), (duration(-1), "–"),
        (share(0.9412), "94 %"), (share(0.00416, 2), "0.42 %"), (decimal(1.62134), "1.621"), (decimal(None), "–"),
    ],
)  # fmt: skip
def test_units(text: str, expected: str) -> None:
    assert text == expected


@settings(max_examples=200)
@given(st.floats(-1e20, 1e20))
def test_counts_are_short(value: float) -> None:
    assert len(count(value)) <= 5 + (value < 0) or abs(value) >= 1e17


def test_a_rollback_is_marked_in_both_pictures_of_the_loss() -> None:
    report = fake_report()
    assert "back to" not in render_html(report)
    report["series"]["rollbacks"] = [{"wall_s": 30.0, "tokens": 700_000, "change": 2, "to_version": 9}]
    html = render_html(report)
    assert html.count(">back to 9</text>") == 2
    assert "Upright: the run was rolled back" in html


def test_more_traffic_than_data_parallel_is_not_called_less() -> None:
    assert [times(ratio) for ratio in (22.08, 1.0, 0.5)] == [("22.1", "less"), ("1.0", "less"), ("2.0", "more")]
    report = fake_report()
    report["traffic"]["ratio"] = 0.5
    assert "2.0×" in (page := render_html(report))
    assert "more</" in page


def test_the_loss_has_units_where_the_task_names_them() -> None:
    assert "nats" not in render_html(fake_report())
    page = render_html(fake_report(units="nats <per> byte"))
    assert "Validation loss in nats &lt;per&gt; byte; less is better." in page
    assert "Nats &lt;per&gt; byte. Learners" in page
