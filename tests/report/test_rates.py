"""Rates over a run's course: by hand from a few points, and bounded however long the run."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from tests.made.reports import fake_report, report_with_regions

from diloco_report import now, rates
from diloco_report.course import course
from diloco_report.page import parts, render_html


def report(**series: Any) -> dict[str, Any]:
    learners = {name: {"tokens_processed": 4000, "steps": 40} for name in ("a", "b")}  # 100 tokens a step
    return {"wall_s": 40.0, "learners": learners, "series": series}


def test_tokens_a_second_of_each_learner_by_its_steps_and_of_all() -> None:
    points = {
        "a": [[0.0, 0, 0, 1.0], [20.0, 3000, 20, 1.0], [40.0, 7000, 60, 1.0]],
        "b": [[0.0, 0, 0, 1.0], [20.0, 3000, 10, 1.0], [40.0, 7000, 10, 1.0]],
    }
    each, together = rates.tokens_per_s(report(learners=points))
    assert [at_s for at_s, _ in each["a"]] == [1.0 + 2 * n for n in range(20)]
    assert [rate for _, rate in each["a"]] == pytest.approx([100.0] * 10 + [200.0] * 10)
    assert [rate for _, rate in each["b"]] == pytest.approx([50.0] * 10 + [0.0] * 10)
    assert [rate for _, rate in together] == pytest.approx([150.0] * 10 + [200.0] * 10)


def test_steps_that_a_new_process_takes_again_are_no_negative_rate() -> None:
    points = {"a": [[0.0, 0, 0, 1.0], [10.0, 0, 100, 1.0], [20.0, 0, 60, 1.0], [30.0, 0, 160, 1.0]]}
    each, _ = rates.tokens_per_s(report(learners=points))
    assert [rate for _, rate in each["a"]] == pytest.approx([1000.0] * 5 + [0.0] * 5 + [1000.0] * 5)


def merged(at_s: float, **behind: int) -> dict[str, Any]:
    return {"wall_s": at_s, "fragment": 0, "version": 1, "members": [[name, 0.5, late, 24] for name, late in behind.items()]}


def test_versions_a_second_and_behind() -> None:
    merges = [merged(0.5, a=0, b=4), merged(1.5, a=0, b=2), merged(4.5, a=1)]
    known = report(merges=merges, merges_every=2)
    assert rates.versions_per_s(known)[:4] == [(1.0, 2.0), (3.0, 0.0), (5.0, 1.0), (7.0, 0.0)]
    assert rates.versions_behind(known) == {"a": [(1.0, 0.0), (5.0, 1.0)], "b": [(1.0, 3.0)]}


def test_a_long_run_has_as_many_points_as_a_short_one() -> None:
    chance = random.Random(1)
    merges = [merged(chance.uniform(0, 604_800), a=0, b=1) for _ in range(100_000)]
    known = report(merges=merges) | {"wall_s": 604_800.0}
    assert len(rates.versions_per_s(known)) <= rates.PARTS
    assert all(len(points) <= rates.PARTS + 1 for points in rates.versions_behind(known).values())
    assert len(rates.growth([(float(x), 2.0 * x) for x in range(604_800)], 604_800.0)) <= rates.PARTS + 1


def test_what_learners_say_of_themselves_is_drawn_where_they_say_it() -> None:
    assert "Learning rate" not in course(fake_report())
    assert course({"learners": {}, "series": {}}) == ""


@pytest.mark.parametrize(("wall_s", "clock"), [(118.0, "min:s"), (7200.0, "h:min:s")])
def test_every_chart_names_its_units(wall_s: float, clock: str) -> None:
    known = report_with_regions() | {"wall_s": wall_s, "units": "nats per byte"}
    known["series"]["gauges"] = {"learner-0": [[at_s, 1e-3, 1.0, 1.5, 1e9, 1e9] for at_s in (1.0, wall_s)]}
    known["series"]["learners"]["learner-0"] = [[at_s, at_s * 100, at_s, 2.0] for at_s in (0.0, wall_s / 2, wall_s)]
    drawn = parts(known)
    assert re.findall(r"<h3[^>]*>([^<]*)</h3><div class=\"plot\">", drawn["course"]) == [
        "Tokens a second",
        "Merges a second",
        "Lag (versions)",
        "Learning rate (no unit)",
        "Gradient norm (no unit)",
        "Processor (cores)",
        "Memory (bytes)",
        "Device memory (bytes)",
    ]
    assert re.findall(r"<h3[^>]*>([^<]*)</h3>", drawn["loss"]) == ["Nats per byte over tokens", "Nats per byte over wall time"]
    assert re.findall(r'<text class="axis"[^>]*>([^<]*)<', drawn["loss"]) == ["tokens", f"wall time ({clock})"]
    for part in ("activity", "merges", "regions"):
        assert f"Horizontal: wall time ({clock})." in drawn[part]
    assert ">Loss over tokens</h3>" in parts(known | {"units": None})["loss"]


def test_a_cut_stands_in_the_pictures_over_time() -> None:
    drawn = render_html(report_with_regions())
    assert drawn.count(">eu away</text>") == drawn.count(">eu back</text>") == 2  # losses and tokens a second, over time
    assert drawn.count(">ap away</text>") == 2


def test_how_a_run_began_stands_below_its_state() -> None:
    origin = {"command": "diloco up --set 'a=<b>'", "host": "node<7>", "began_at_s": 1_700_000_000, "version": "0.1.0"}
    drawn = now.state({"origin": origin, "wall_s": 1.0})
    said = (
        "began 2023-11-14 22:13:20 UTC · on node&lt;7&gt; · diloco 0.1.0 · <code>diloco up --set &#x27;a=&lt;b&gt;&#x27;</code>"
    )
    assert said in drawn
    assert "origin" not in now.state({"origin": {"command": None, "host": None}})
