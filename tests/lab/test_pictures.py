"""Pictures of what was simulated: what is drawn stands where its numbers say."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.pace import DEADLINE_S

from diloco.errors import SettingsError
from diloco_lab import bandwidth
from diloco_lab.bandwidth import Curve, ModelJob
from diloco_lab.commands.files import ready
from diloco_lab.published import pictures
from diloco_lab.published import published_page as page
from diloco_lab.published.pictures import PicturedFault
from diloco_lab.simulator import storm
from diloco_lab.simulator.cluster import ClusterLearner
from diloco_lab.simulator.goodput import FleetConditions, GoodputRow
from diloco_lab.simulator.lifetime import Stretch
from diloco_lab.simulator.outcome import MergedVersion
from diloco_report.drawing.frame import spread

S = 1_000_000
SVG = "{http://www.w3.org/2000/svg}"


def row(strategy: str, learners: int, chips: int, share: float, known: float | None = None) -> GoodputRow:
    return GoodputRow(strategy, learners, chips, share, share - 0.01, share + 0.01, share, share, share, known, None)


ROWS = [
    row("data-parallel", 1, 100_000, 0.5, 0.6),
    row("data-parallel", 1, 400_000, 0.25),
    row("decoupled", 8, 100_000, 1.0),
    row("decoupled", 8, 400_000, 0.75),
]


def parsed(picture: str) -> ElementTree.Element:
    return ElementTree.fromstring(pictures.standalone(picture))


def dots(tree: ElementTree.Element, kind: str) -> list[tuple[float, float]]:
    found = [dot for dot in tree.iter(f"{SVG}circle") if dot.get("class") == kind]
    return [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in found]


def test_goodput_is_drawn_where_it_is() -> None:
    """The plot is 818 by 370 pixels in the picture of 454, and begins at 52 and 38; both ends keep 16 from its edges."""
    tree = parsed(pictures.goodput(ROWS))
    left, right, top, bottom = 68.0, 854.0, 38.0, 408.0
    assert dots(tree, "mean") == [(left, 223.0), (right, 315.5), (left, top), (right, 130.5)]  # 50, 25, 100 and 75 %
    assert dots(tree, "published") == [(left, bottom - 0.6 * (bottom - top))]
    words = [text.text for text in tree.iter(f"{SVG}text")]
    assert {"data-parallel: 25.0 %", "decoupled, M = 8: 75.0 %", "100k", "400k"} <= set(words)


def test_a_timeline_has_a_lane_for_each_learner_and_every_name_is_escaped() -> None:
    learners = [ClusterLearner("learner-0", 4, 2, 1.0), ClusterLearner("<b>&1", 4, 2, 1.0)]
    stretches = {
        "learner-0": [
            Stretch("stepping", 0, 10 * S, 10, S, 4, 3),
            Stretch("reconfiguring", 10 * S, 20 * S, silent_us=(10 * S, 20 * S)),
        ],
        "<b>&1": [Stretch("stepping", 0, 20 * S, 10, 2 * S, 4, 4)],
    }
    events = [PicturedFault(5 * S, "<b>&1", "slow & <late>")]
    tree = parsed(
        pictures.timeline(learners, stretches, [MergedVersion(0, 1, 0, 15 * S, (("learner-0", 1, 1),))], 0, 20 * S, events)
    )
    lanes = [rect for rect in tree.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
    said = [rect.findtext(f"{SVG}title") for rect in lanes]
    assert said == [
        "learner-0: stepping, 0:00.0 to 0:10.0",
        "learner-0: reconfiguring, 0:10.0 to 0:20.0",
        "<b>&1: stepping slowly, 0:00.0 to 0:20.0",
    ]
    assert [float(lane.attrib["width"]) for lane in lanes] == [493.0, 493.0, 986.0]
    words = {text.text for text in tree.iter(f"{SVG}text")}
    assert {"<b>&1", "slow & <late>"} <= words


def test_slices_at_work_by_hand() -> None:
    """Four slices, three in the last of ten steps; the other learner's two from 5 s on."""
    learners = [ClusterLearner("a", 4, 1, 1.0), ClusterLearner("b", 2, 1, 1.0)]
    stretches = {
        "a": [Stretch("stepping", 0, 10 * S, 10, S, 4, 3), Stretch("reconfiguring", 10 * S, 20 * S)],
        "b": [Stretch("absent", 0, 5 * S), Stretch("stepping", 5 * S, 20 * S, 15, S, 2, 2)],
    }
    assert pictures.working(learners, stretches, 0, 20 * S) == [(0, 4), (5 * S, 6), (9 * S, 5), (10 * S, 2)]


def test_utilisation_marks_what_is_published() -> None:
    curves = [Curve("decoupled", "table", [(0.1, 0.2), (1.0, 0.95), (10.0, 1.0)], [(1.0, 0.5)])]
    tree = parsed(pictures.utilisation(curves))
    [(x, y)] = dots(tree, "published")
    assert x == pytest.approx((52 + 1096) / 2)  # the middle of the logarithmic scale from 0.1 to 10
    assert y == pytest.approx((64 + 374) / 2)


@pytest.mark.parametrize(
    "empty", [pictures.goodput([]), pictures.uptime([]), pictures.timeline([], {}, [], 0, S), pictures.utilisation([])]
)
def test_nothing_to_draw_is_a_sentence(empty: str) -> None:
    assert re.fullmatch(r'<p class="empty">[^<>]+\.</p>', empty)


@given(st.lists(st.floats(0, 400), min_size=1, max_size=30))
def test_labels_keep_their_order_and_their_distance(wanted: list[float]) -> None:
    wanted.sort()
    places = spread(wanted, 15.0, 0.0, 400.0)
    gap = min(15.0, 400.0 / max(1, len(wanted) - 1))
    assert all(after - before >= gap - 1e-6 for before, after in pairwise(places))
    assert all(-1e-6 <= place <= 400 + 1e-6 for place in places)
    if all(after - before >= gap for before, after in pairwise(wanted)):
        assert places == pytest.approx(wanted)  # no label is moved without need


def test_a_page_needs_nothing_from_elsewhere() -> None:
    contents = page.Contents(ROWS, FleetConditions(), 2, 1.0, [], storm.simulate(FleetConditions(), 1), ModelJob())
    text = page.render(contents)
    assert "http:" not in text
    assert "https:" not in text
    assert "<script" not in text
    assert "data-parallel" in text
    for picture in contents.pictures.values():
        tree = parsed(picture)
        assert not [value for element in tree.iter() for value in element.attrib.values() if "url(" in value or "var(" in value]
    assert [len(rows) for rows in bandwidth.needed(ModelJob(), bandwidth.all_schedules()[:2], (0.5, 0.9))] == [2, 2]


def test_a_file_that_cannot_be_written_is_named_before_anything_is_simulated(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="it is a folder"):
        ready(tmp_path)
    with pytest.raises(SettingsError, match="its folder cannot be made"):
        ready(tmp_path / "file" / "page.html")


@pytest.mark.services
def test_the_command_writes_page_and_pictures(tmp_path: Path) -> None:
    line = [sys.executable, "-c", "from diloco_ops.cli import main; main()", "simulate", "report", str(tmp_path / "page.html")]
    line += ["--days", "0.01", "--seeds", "1", "--jobs", "1", "--svg", str(tmp_path / "svg")]
    subprocess.run(line, check=True, capture_output=True, timeout=2 * DEADLINE_S)
    assert "Simulated" in (tmp_path / "page.html").read_text()
    names = sorted(path.name for path in (tmp_path / "svg").iterdir())
    assert names == [f"simulator-{name}.svg" for name in ("bandwidth", "goodput", "recovery", "storm", "uptime")]
