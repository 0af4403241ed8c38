"""Charts in a real browser: smoothed, zoomed, with a logarithmic axis, as CSV, beside another run, and on a phone."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page
from tests.made.browser import CHROMIUM, chromium, opened
from tests.made.reports import HOSTILE, fake_report

from diloco_report.page import write_html

pytestmark = [pytest.mark.services, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")]

PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


def small(**series: Any) -> dict[str, Any]:
    """A report of 100 s with one learner, whose loss halves every 10 s from 1024 on, and falls by 3 s of silence nowhere."""
    points = [[float(at_s), at_s * 1000, at_s, 1024 / 2 ** (at_s / 10)] for at_s in range(101)]
    learner = fake_report(learners=1)["learners"]
    return {
        "run": "small",
        "wall_s": 100.0,
        "learners": learner,
        "series": {"learners": {"learner-0": points}, "global": [[50.0, 50_000, 40.0], [100.0, 100_000, 2.0]]} | series,
    }


def at(report: dict[str, Any], folder: Path) -> str:
    file = folder / "report.html"
    write_html(report, file)
    return file.as_uri()


def remove_script(file: Path) -> None:
    """Take a page's scripts out, as a viewer of mail or of notebooks does: its browser could run them."""
    page = file.read_text()
    assert "<script>" in page
    file.write_text(re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL))


def plot(shown: Page, name: str) -> Locator:
    """The chart of this name, with its buttons."""
    return shown.locator(".plot", has=shown.locator(f'svg[data-chart*=\'"name":"{name}","axis"\']'))


def ticks(shown: Page, name: str, anchor: str) -> list[str]:
    return plot(shown, name).locator(f'text.tick[text-anchor="{anchor}"]').all_text_contents()


def pointed(shown: Page, name: str, share: float) -> str:
    """What the page says where a pointer is at a share of the chart's width."""
    box = plot(shown, name).locator("svg").bounding_box()
    assert box is not None
    shown.mouse.move(box["x"] + 48 + share * (box["width"] - 60), box["y"] + 100)
    return shown.locator("#tip").inner_text()


def drag(shown: Page, name: str, begin: float, end: float) -> None:
    svg = plot(shown, name).locator("svg")
    svg.scroll_into_view_if_needed()
    box = svg.bounding_box()
    assert box is not None
    place = [box["x"] + 48 + share * (box["width"] - 60) for share in (begin, end)]
    shown.mouse.move(place[0], box["y"] + 100)
    shown.mouse.down()
    shown.mouse.move(place[1], box["y"] + 120, steps=4)
    shown.mouse.up()


def test_smoothing_draws_exponential_means_beside_the_points(browser: Browser, tmp_path: Path) -> None:
    points = [[0.0, 0, 1, 2.0], [50.0, 10, 2, 4.0], [100.0, 20, 3, 4.0]]
    with opened(browser, at(small(learners={"learner-0": points}), tmp_path)) as shown:
        assert "learner-0  4.000" in pointed(shown, "time", 0.5)
        assert plot(shown, "time").locator(".raw").count() == 0
        shown.locator("#part-loss .smoothing input").fill("0.5")
        assert "learner-0  3.333" in pointed(shown, "time", 0.5)  # (2/4 + 4/2) / (1/4 + 1/2)
        assert "learner-0  3.714" in pointed(shown, "time", 1.0)  # (2/8 + 4/4 + 4/2) / (1/8 + 1/4 + 1/2)
        assert plot(shown, "time").locator("path.raw").count() == 2
        assert shown.locator("#part-course .smoothing input").input_value() == "0.5"


def test_a_drag_shows_a_stretch_and_a_button_all_of_it_again(browser: Browser, tmp_path: Path) -> None:
    with opened(browser, at(small(), tmp_path)) as shown:
        whole = ticks(shown, "time", "middle")
        assert whole[0] == "0:00"
        drag(shown, "time", 0.395, 0.605)
        assert ticks(shown, "time", "middle") == ["0:40", "0:45", "0:50", "0:55", "1:00"]
        assert float(ticks(shown, "time", "end")[-1]) < 80  # the losses of that stretch are below 64
        assert ticks(shown, "tokens", "middle")[0] == "0"  # another chart stays as it was
        shown.locator(".plot", has=shown.locator("text=0:55")).get_by_role("button", name="Whole").click()
        assert ticks(shown, "time", "middle") == whole
        plot(shown, "time").get_by_role("button", name="Newest half").click()
        assert ticks(shown, "time", "middle")[0] == "0:50"
        plot(shown, "time").locator("svg").dblclick(position={"x": 200, "y": 100})
        assert ticks(shown, "time", "middle") == whole


def test_a_logarithmic_axis_gives_each_factor_the_same_height(browser: Browser, tmp_path: Path) -> None:
    with opened(browser, at(small(), tmp_path)) as shown:
        button = plot(shown, "time").get_by_role("button", name="Log")
        button.click()
        assert button.get_attribute("aria-pressed") == "true"
        found = plot(shown, "time").locator('text.tick[text-anchor="end"]').all()
        places = {each.text_content() or "": float(each.get_attribute("y") or "nan") for each in found}
        assert {"1", "10", "100", "1000"} <= places.keys()
        decade = places["1"] - places["10"]
        assert places["10"] - places["100"] == pytest.approx(decade, rel=1e-6)
        assert places["1"] - places["2"] == pytest.approx(decade * math.log10(2), rel=1e-6)
        assert plot(shown, "time").locator("text=logarithmic").count() == 1


def test_values_that_have_no_logarithm_leave_a_gap(browser: Browser, tmp_path: Path) -> None:
    points = [[float(at_s), at_s, at_s, 0.0 if at_s == 50 else 10.0] for at_s in range(0, 101, 10)]
    with opened(browser, at(small(learners={"learner-0": points}, **{"global": []}), tmp_path)) as shown:
        plot(shown, "time").get_by_role("button", name="Log").click()
        path = plot(shown, "time").locator("path.line").get_attribute("d") or ""
        assert "NaN" not in path
        assert [len(piece.split("L")) for piece in path.split("M")[1:]] == [5, 5]


def test_each_chart_is_saved_as_csv_in_which_no_name_is_a_formula(browser: Browser, tmp_path: Path) -> None:
    report = json.loads(json.dumps(small()).replace("learner-0", '=1+1\\"x'))
    with opened(browser, at(report, tmp_path)) as shown:
        for chart in shown.locator(".plot").all():
            with shown.expect_download() as saving:
                chart.get_by_role("button", name="CSV").click()
            rows = list(csv.reader(saving.value.path().read_text().splitlines()))
            assert rows[0][1] in ("wall_s", "tokens")
            assert all(not row[0].startswith("=") and float(row[1]) >= 0 and math.isfinite(float(row[2])) for row in rows[1:])
            if saving.value.suggested_filename == "small-time.csv":
                assert rows[0] == ["line", "wall_s", "loss"]
                assert ["'=1+1\"x", "10", "512"] in rows
                assert ["global", "100", "2"] in rows


def test_the_loss_of_another_run_is_drawn_beside_it(browser: Browser, tmp_path: Path) -> None:
    other, none = tmp_path / "report.json", tmp_path / "none.json"
    other.write_text(
        json.dumps({"run": HOSTILE, "series": {"global": [[10.0, 1000, 30.0], [80.0, 9000, 3.5], ["x", None, 1]]}})
    )
    none.write_text('{"run": []}')
    with opened(browser, at(small(), tmp_path)) as shown:
        shown.locator("input[type=file]").set_input_files(none)
        shown.get_by_text("none.json: has no validation loss").wait_for()
        shown.locator("input[type=file]").set_input_files(other)
        toggle = shown.locator("#part-loss button[data-beside][data-toggle]")
        toggle.wait_for()
        assert toggle.inner_text() == HOSTILE[:60].strip()
        assert "3.500" in pointed(shown, "time", 0.9)
        assert plot(shown, "tokens").locator("path.line").count() == 3
        toggle.click()
        assert "3.500" not in pointed(shown, "time", 0.9)


def test_all_can_be_done_by_keyboard(browser: Browser, tmp_path: Path) -> None:
    with opened(browser, at(small(), tmp_path)) as shown:
        half = plot(shown, "time").get_by_role("button", name="Newest half")
        half.focus()
        shown.keyboard.press("Enter")
        assert ticks(shown, "time", "middle")[0] == "0:50"
        shown.locator("#part-loss .smoothing input").focus()
        shown.keyboard.press("ArrowRight")
        assert plot(shown, "time").locator("path.raw").count() == 2


@pytest.mark.parametrize("script", [True, False])
def test_on_a_phone_the_newest_is_in_sight_and_texts_are_readable(browser: Browser, tmp_path: Path, script: bool) -> None:
    report = fake_report(learners=4, fragments=4)
    with opened(browser, at(report, tmp_path), viewport=PHONE, java_script_enabled=script) as shown:
        assert shown.evaluate("document.documentElement.scrollWidth") <= 390
        for picture in shown.locator(".lanes svg.rows").all():
            box = picture.bounding_box()
            assert box is not None
            assert 300 < box["x"] + box["width"] <= 390  # its right end is within the screen
        for name in shown.locator(".lanes svg.names").all():
            box = name.bounding_box()
            assert box is not None
            assert box["x"] >= 0  # names stay in sight
        for picture in shown.locator("svg.chart, svg.rows").all():
            box, view = picture.bounding_box(), (picture.get_attribute("viewBox") or "").split()
            assert box is not None
            size = picture.locator("text.tick").first.evaluate("text => parseFloat(getComputedStyle(text).fontSize)")
            assert size * box["width"] / float(view[2]) >= 11  # pixels of a text


@pytest.mark.parametrize("script", ["removed", "disabled", "run"])
def test_on_a_phone_charts_fit_their_cards(browser: Browser, tmp_path: Path, script: str) -> None:
    url = at(fake_report(), tmp_path)
    if script == "removed":
        remove_script(tmp_path / "report.html")
    with opened(browser, url, viewport=PHONE, java_script_enabled=script != "disabled") as shown:
        cards = shown.locator("section:has(svg.chart)").all()
        assert len(cards) == 2  # losses, rates
        for card in cards:
            around = card.bounding_box()
            assert around is not None
            for part in card.locator("svg.chart, svg.chart text").all():
                box = part.bounding_box()
                assert box is not None
                assert around["x"] < box["x"]
                assert box["x"] + box["width"] < around["x"] + around["width"]


def test_without_a_script_the_charts_are_there_and_no_button_that_does_nothing(browser: Browser, tmp_path: Path) -> None:
    with opened(browser, at(fake_report(), tmp_path), java_script_enabled=False) as shown:
        assert shown.locator("svg.chart path.line").count() > 8
        assert shown.locator(".tools, .smoothing, input").count() == 0


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("script", ["removed", "disabled"])
def test_without_a_script_no_chart_lies_over_its_title(browser: Browser, tmp_path: Path, width: int, script: str) -> None:
    url, viewport = at(fake_report(), tmp_path), {"width": width, "height": 844}
    if script == "removed":
        remove_script(tmp_path / "report.html")
    with opened(browser, url, viewport=viewport, java_script_enabled=script != "disabled") as shown:
        titles = shown.locator("h3:has(+ .plot)").all()
        assert len(titles) == 5  # two of losses, three of rates
        for title in titles:
            above, below = title.bounding_box(), title.locator("+ .plot svg").bounding_box()
            assert above is not None
            assert below is not None
            assert above["y"] + above["height"] <= below["y"]


def test_buttons_of_a_chart_are_beside_its_title(browser: Browser, tmp_path: Path) -> None:
    with opened(browser, at(fake_report(), tmp_path)) as shown:
        for title in shown.locator("h3:has(+ .plot)").all():
            beside, button = title.bounding_box(), title.locator("+ .plot .tools button").first.bounding_box()
            assert beside is not None
            assert button is not None
            assert button["y"] < beside["y"] + beside["height"]


def test_64_learners_have_a_line_each_and_a_million_versions_a_page_of_bounded_size(browser: Browser, tmp_path: Path) -> None:
    report = fake_report(learners=64, fragments=24, wall_s=600.0)
    report |= {"versions": 1_000_000}
    report["series"]["merges_every"] = 64
    url = at(report, tmp_path)
    assert (tmp_path / "report.html").stat().st_size < 4_000_000
    with opened(browser, url) as shown:
        assert plot(shown, "time").locator("path.line").count() == 65
        names = [text for text in shown.locator("#part-loss .legend button").all_inner_texts() if text.startswith("learner-")]
        assert names == [f"learner-{n}" for n in range(64)]
        colours = shown.locator("#part-loss .legend button i").evaluate_all(
            "all => all.map((i) => getComputedStyle(i).background)"
        )
        assert len(set(colours)) == 65
        assert shown.locator("#part-learners tbody tr").count() == 64
        points = sum(
            len(line["x"])
            for line in json.loads(plot(shown, "merges-rate").locator("svg").get_attribute("data-chart") or "")["lines"]
        )
        assert 60 < points <= 121


def test_each_head_explains_its_term(browser: Browser, tmp_path: Path) -> None:
    with opened(browser, at(fake_report(), tmp_path)) as shown:
        heads = shown.locator("h2, section h3, .figure .name, th[scope=col]").all()
        silent = [each.inner_text() for each in heads if not each.get_attribute("title")]
        settings = [each.inner_text() for each in shown.locator("#part-settings h3").all()]
        assert set(silent) - set(settings) - {"At the end"} == set()
        assert re.match("Mean time of a step", shown.locator("th", has_text=re.compile("^step$")).get_attribute("title") or "")
