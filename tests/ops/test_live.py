"""The live view, drawn into a recorded console."""

from __future__ import annotations

import io
import re
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from tests.made.statuses import fake_status

from diloco.service import rundir
from diloco.service.rundir import RunDirectory
from diloco.settings.presets import run_settings
from diloco_ops.live.parts import learner_colours
from diloco_ops.live.rows import WINDOWS, window_text
from diloco_ops.live.screen import LiveView, failure_lines, plain_line, render, render_whole
from diloco_ops.live.watched import Watched
from diloco_ops.up import pages


def drawn(status: dict[str, Any], width: int, height: int) -> list[str]:
    console = Console(record=True, file=io.StringIO(), width=width, height=height, color_system=None)
    console.print(render(status, width, height))
    return console.export_text(styles=False).splitlines()


def whole(status: dict[str, Any], width: int | None = None) -> list[str]:
    console = Console(record=True, file=io.StringIO(), width=width or 400, color_system=None)
    console.print(render_whole(status, width))
    return [line.rstrip() for line in console.export_text(styles=False).splitlines()]


EMPTY = {"run": "run", "state": "waiting", "wall_s": 0.0, "tokens_budget": 3_000_000, "learners": {}, "shards": {}}


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 32), (120, 30), (200, 60), (60, 20), (40, 16), (34, 8), (80, 5)])
@pytest.mark.parametrize(
    "status",
    [
        EMPTY,
        fake_status(),
        fake_status(learners=16, shards=8),
        fake_status(learners=1, shards=1, progress=0.02),
        fake_status(state="finished", progress=1.0, eta_s=None),
        fake_status(regions={f"region_{n}": {"away_s": None} for n in range(64)}),
    ],
    ids=["empty", "usual", "many", "first", "finished", "regions"],
)
def test_fits_the_terminal(status: dict[str, Any], width: int, height: int) -> None:
    lines = drawn(status, width, height)
    assert len(lines) <= height
    assert max(cell_len(line) for line in lines) <= width


def test_usual_run_in_80_by_24() -> None:
    text = "\n".join(drawn(fake_status(), 80, 24))
    assert "63 %" in text
    assert "1.89M / 3.00M tokens" in text
    assert "1:14  0:44 left" in text
    for part in ("learner-0", "learner-3", "stepping", "sending", "1.912", "461", "6.35k", "12.3 MB", "398/0", "395/3"):
        assert part in text
    assert "syncer-1" in text
    assert "f10 ●● 0.1s" in text
    assert "f9 ○ 0.0s" in text
    assert "loss, nats per byte" in text
    assert "nats per byte" not in "\n".join(drawn(fake_status(units=None), 80, 24))
    assert "22.1× less than data-parallel" in text


def in_regions(**changed: Any) -> dict[str, Any]:
    """Three regions, of which eu has been away for half a minute."""
    status = fake_status(learners=3, shards=3)
    for kind in ("learners", "shards"):
        for member, region in zip(status[kind].values(), ("us", "eu", "ap"), strict=True):
            member["region"] = region
    here = {"members": 2, "heard": 2, "away_s": None, "fragments": 12, "bytes_in": 1_230_000, "bytes_out": 4_560_000}
    away = here | {"heard": 0, "away_s": 34.2, "fragments": 0}
    return status | {"regions": {"us": here, "eu": away, "ap": here}} | changed


def test_regions_and_who_is_away() -> None:
    lines = drawn(in_regions(), 140, 40)
    said = "us 2/2 12 fragments ↑ 4.56 MB ↓ 1.23 MB   eu away 0:34 0 fragments ↑ 4.56 MB ↓ 1.23 MB   ap 2/2 12 fragments"
    assert any(said in line for line in lines)
    assert any(re.search(r"● learner-1 +stepping +eu ", line) for line in lines)
    assert any(re.search(r"● syncer-2 +ap ", line) for line in lines)
    assert " | eu away 0:34 | " in plain_line(in_regions())
    narrow = drawn(in_regions(), 80, 24)
    assert any("us 2/2 12 fragments   eu away 0:34 0 fragments   ap 2/2 12 fragments" in line for line in narrow)
    assert any("us 2/2   eu away 0:34   ap 2/2" in line for line in drawn(in_regions(), 50, 24))
    assert not any("region" in line for line in drawn(fake_status(), 140, 40))


def test_learners_of_three_regions_are_told_apart_in_80_columns() -> None:
    status = in_regions()
    learner = next(iter(status["learners"].values()))
    names = [f"learner-{region}-0" for region in ("us", "eu", "ap")]
    status["learners"] = {name: learner | {"region": name.split("-")[1]} for name in names}
    colours = learner_colours(status)
    assert len(set(colours.values())) == 3
    lines = drawn(status, 66, 24)
    shown = [line.split()[2] for line in lines if "● " in line and "stepping" in line]
    assert shown == ["ap-0", "eu-0", "us-0"]


def test_an_error_is_there_in_full() -> None:
    failure = "task.name = 'mine:make': ZeroDivisionError: division by zero (/home/ann/of/the/lab/projects/mine.py, line 7)"
    status = fake_status(failures={"evaluator": failure})
    assert failure_lines(status) == [f"evaluator: {failure}"]
    for width, height in ((80, 24), (140, 40)):
        text = " ".join(line.strip() for line in drawn(status, width, height))
        assert f"evaluator: {failure}" in text
    assert len(drawn(fake_status(failures={"evaluator": "x " * 250}), 40, 4)) <= 4


def test_no_learners_yet() -> None:
    text = "\n".join(drawn(EMPTY, 80, 24))
    assert "waiting for the first learner" in text
    assert "waiting for the first syncer" in text
    assert "no loss yet" in text


def test_unknown_loss_is_a_dash() -> None:
    status = fake_status(loss={}, validation=[])
    for learner in status["learners"].values():
        learner["loss"] = None
    lines = drawn(status, 80, 24)
    assert "–" in next(line for line in lines if "learner-1" in line)
    assert any("no loss yet" in line for line in lines)


def test_learners_that_do_not_fit_are_counted() -> None:
    lines = drawn(fake_status(learners=16), 80, 24)
    shown = sum("● learner-" in line for line in lines)
    assert any(f"+ {16 - shown} more: " in line for line in lines)
    assert all(f"learner-{m}" in "\n".join(drawn(fake_status(learners=16), 80, 48)) for m in range(16))


def test_narrow_terminals_keep_name_state_and_loss() -> None:
    line = next(line for line in drawn(fake_status(), 40, 20) if "learner-2" in line)
    assert "sending" in line
    assert "1.934" in line
    assert "MB" not in line


def in_three_regions(each: int = 2) -> dict[str, Any]:
    """Learners and syncers with the names that `docs/deploy.md` gives them."""
    status = fake_status(learners=3 * each, shards=3 * each)
    for kind, stem in (("learners", "learner"), ("shards", "syncer")):
        members = list(status[kind].values())
        places = [(region, number) for region in ("us", "eu", "ap") for number in range(each)]
        status[kind] = {f"{stem}-{at}-{n}": row | {"region": at} for (at, n), row in zip(places, members, strict=True)}
    return status


def named(lines: list[str]) -> list[str]:
    """Return what names are shown as; a learner's state stands between its name and its region."""
    return re.findall("│ ● (\\S+) +(?:[a-z]+ +)?(?:us|eu|ap) ", "\n".join(lines))


def test_names_can_be_told_apart_in_80_by_24() -> None:
    shown = named(drawn(in_three_regions(), 80, 24))
    assert {"us-0", "us-1", "eu-0", "ap-1"} <= set(shown)
    assert not any(name.endswith("…") for name in shown)
    wide = named(drawn(in_three_regions(), 200, 60))
    assert {"learner-us-0", "learner-ap-1", "syncer-us-0", "syncer-ap-1"} <= set(wide)


def test_a_pipe_gets_all_members_and_their_names_in_full() -> None:
    text = "\n".join(whole(in_three_regions(5)))
    assert "more" not in text
    for name in ("learner-us-0", "learner-eu-4", "syncer-ap-4", "merg/miss", "loss, nats per byte"):
        assert name in text
    assert len(named(whole(in_three_regions(5)))) == 30 == len(set(named(whole(in_three_regions(5)))))
    narrow = whole(in_three_regions(5), 80)
    assert max(map(cell_len, narrow)) == 80
    assert len(set(named(narrow))) == 30
    long = in_three_regions()
    long["learners"] = {f"learner-of-the-department-number-{n}": row for n, row in enumerate(long["learners"].values())}
    assert "learner-of-the-department-number-3 " in "\n".join(whole(long))


def test_names_from_outside_cannot_disturb_the_terminal() -> None:
    status = fake_status()
    status["learners"] = {"\x1b[31mevil\n" + "x" * 200: status["learners"]["learner-0"], "[bold]b[/]": {"state": "stepping"}}
    lines = drawn(status, 80, 24)
    assert all("\x1b" not in line and cell_len(line) <= 80 for line in lines)
    assert any("[bold]b" in line for line in lines)


def test_finished_shows_no_time_left() -> None:
    text = "\n".join(drawn(fake_status(state="finished", progress=1.0), 80, 24))
    assert "100 %" in text
    assert "finished" in text
    assert "left" not in text


def test_progress_reads_100_only_when_it_is() -> None:
    assert " 99 %" in "\n".join(drawn(fake_status(progress=0.99999), 80, 24))


def test_long_quorums_become_numbers() -> None:
    status = fake_status()
    status["shards"]["syncer-0"]["open"] = [{"fragment": 5, "answers": 11, "quorum": 16, "waited_s": 1.25}]
    assert any("f5 11/16" in line for line in drawn(status, 80, 24))


def test_curve_has_a_line_that_falls() -> None:
    status = fake_status(loss={}, validation=[[float(t), t, 5.0 - t / 5] for t in range(20)])
    lines = [line for line in drawn(status, 80, 24) if "│" in line or "┤" in line]
    braille = [(row, column) for row, line in enumerate(lines) for column, char in enumerate(line) if "⠀" < char <= "⣿"]
    assert min(braille, key=lambda cell: cell[1])[0] < max(braille, key=lambda cell: cell[1])[0]


def test_curve_has_a_gap_where_its_learner_was_not_heard_and_round_labels() -> None:
    heard = [*range(10), *range(40, 50)]
    status = fake_status(loss={"learner-0": [[float(t), t, 3.1 - t / 50] for t in heard]}, validation=[])
    lines = [line for line in drawn(status, 80, 24) if "│" in line or "┤" in line]
    columns = {column for line in lines for column, char in enumerate(line) if "⠀" < char <= "⣿"}
    widest = max(later - earlier for earlier, later in pairwise(sorted(columns)))
    assert widest > 0.5 * (max(columns) - min(columns))  # 31 of 49 s
    labels = [float(line.split("┤")[0].strip("│ ")) for line in lines if "┤" in line]
    assert labels == [3.0, 2.5]


def test_a_finished_run_shows_the_rate_of_the_whole_run() -> None:
    status = fake_status(state="finished", progress=1.0, wall_s=100.0, tokens_processed=3_000_000)
    assert " | 30.0k tokens/s | " in plain_line(status)


def test_lanes_of_a_young_run_show_the_whole_run() -> None:
    assert [window_text(each, 24.0) for each in WINDOWS] == ["whole run"] * 4
    assert window_text(60.0, 61.0) == "last 1:00"


def test_plain_line() -> None:
    assert plain_line(fake_status()) == (
        "1:14 | training | 1.89M of 3.00M tokens (63 %) | 25.5k tokens/s | loss 1.929 | validation "
        f"{fake_status()['validation'][-1][2]:.3f} | 402 versions | up 49.3 MB, down 127 MB | 3 stepping, 1 sending | 0:44 left"
    )
    assert "left" not in plain_line(fake_status(state="finished", progress=1.0))
    assert "no learner yet" in plain_line(EMPTY)
    assert "\n" not in plain_line(EMPTY | {"state": "a\nb"})


def test_live_view_leaves_the_last_picture() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, height=24, legacy_windows=False)
    with LiveView(console, Watched("run", 5.0)) as view:
        view.update(fake_status(progress=0.1))
        view.update(fake_status(progress=0.5))
    after = out.getvalue().rpartition("\x1b[?1049l")[2]
    assert "50 %" in after
    assert "10 %" not in after


def test_the_view_shows_what_is_started_from_the_first_moment_and_the_pages_address() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, height=24, legacy_windows=False)
    with LiveView(console, Watched("mine", 5.0), "http://127.0.0.1:8420/") as view:
        view.wait("starting: 4 learners compile their first step", 7.0)
        first = out.getvalue()
        view.update(fake_status())
    assert [text in first for text in ("mine", "0:07", "http://127.0.0.1:8420/", "4 learners compile their first")] == [
        True
    ] * 4
    after = out.getvalue().rpartition("\x1b[?1049l")[2]
    assert "http://127.0.0.1:8420/" in after


def test_what_is_started_is_read_to_its_end_in_a_terminal_of_80_columns() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, height=24, legacy_windows=False)
    with LiveView(console, Watched("mine", 5.0)) as view:
        view.wait("starting: 4 learners compile their first step, which usually takes 20 s to a minute", 7.0)
    told = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    assert re.search(r"4 learners compile their first step, which usually takes 20 s to a[\s│]+minute", told)


def test_the_view_says_what_is_done_after_the_end_and_leaves_it_out_of_its_last_picture() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, height=24, legacy_windows=False)
    with LiveView(console, Watched("mine", 5.0)) as view:
        view.update(fake_status(state="finished", progress=1.0, eta_s=None))
    shown, _, after = out.getvalue().rpartition("\x1b[?1049l")
    assert ("the report is made" in shown, "the report is made" in after) == (True, False)


def test_what_happened_last_stands_in_the_head_for_a_while() -> None:
    out, watched = io.StringIO(), Watched("mine", 5.0)
    console = Console(file=out, force_terminal=True, width=80, height=24, legacy_windows=False)
    with LiveView(console, watched) as view:
        view.update(fake_status(wall_s=45.0))
        watched.tell(time.monotonic(), "learner-1", "was killed (SIGKILL) and is started again")
        view.update(fake_status(wall_s=45.0))
    assert re.search(r"0:4[5-9]  learner-1: was killed \(SIGKILL\) and is started again", out.getvalue())


def test_a_page_that_a_running_run_serves_is_known_by_its_directory(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, "mine", "nats://127.0.0.1:1", None, run_settings())
    directory.save()
    (tmp_path / "services").mkdir()
    assert pages.link_of(directory) is None
    (tmp_path / "services" / "coordinator.toml").write_text('page_address = "127.0.0.1:8420"\n')
    assert pages.link_of(directory) is None
    with rundir.locked(tmp_path):
        assert pages.link_of(directory) == "http://127.0.0.1:8420/"


@settings(max_examples=60, deadline=None)
@given(
    learners=st.integers(0, 20),
    shards=st.integers(0, 9),
    progress=st.floats(0.0, 1.0),
    width=st.integers(32, 220),
    height=st.integers(4, 70),
)
def test_any_size_fits(learners: int, shards: int, progress: float, width: int, height: int) -> None:
    lines = drawn(fake_status(learners, shards, progress), width, height)
    assert len(lines) <= height
    assert max(cell_len(line) for line in lines) <= width


def test_the_frozen_base_of_an_adapter_is_shown_by_name_and_hash() -> None:
    frozen = {"model": "/home/ann/models/small", "tensors": 3, "values": 2_000_000, "hash": "ab" * 32}
    lines = "\n".join(whole(fake_status(frozen=frozen)))
    assert f"frozen small   2.00M values   hash {'ab' * 8}" in lines
    assert "/home/ann" not in lines
    assert "frozen" not in "\n".join(whole(fake_status(frozen=None)))
