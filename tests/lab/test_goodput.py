"""Goodput: the published tables, by the fitted constants; and what the command prints and refuses."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.made.command_line import Command, commanding

from diloco.errors import SettingsError
from diloco_lab.published import comparison, fit, published
from diloco_lab.published.published import CHIPS, FITTED
from diloco_lab.simulate_command import simulate
from diloco_lab.simulator import goodput
from diloco_lab.simulator.cluster import YEAR_S, Cluster
from diloco_lab.simulator.goodput import (
    GoodputCell,
    GoodputRow,
    conditions,
    interval,
    mean_error,
    points,
    strategy_of,
    sweep,
    thumb,
)

DAY_S = 86400.0


def cell(strategy: str, learners: int, chips: int, share: float, known: float | None = None) -> GoodputRow:
    return GoodputRow(strategy, learners, chips, share, share, share, 1.0, 1.0, 1.0, known, None)


class TestPublishedTables:
    def test_fitted_constants_give_the_data_parallel_rows(self) -> None:
        found = fit.residuals(FITTED, (11,), 1.5 * DAY_S)
        assert len(found) == 20
        assert fit.mean_error(found) <= 0.015
        at_most = {(each.strategy, each.quantity): each.simulated for each in found if each.chips == 1_200_000}
        assert at_most["data-parallel", "goodput"] == pytest.approx(0.27, abs=0.02)
        assert at_most["data-parallel-elastic", "goodput"] == pytest.approx(0.58, abs=0.02)

    def test_they_predict_decoupled(self) -> None:
        """The row that nothing was fitted to: 88 % of 1.2 million chips' time with eight learners."""
        [row] = sweep([GoodputCell("decoupled", 8, 1_200_000)], goodput.FleetConditions(), range(1, 5), 3 * DAY_S, jobs=1)
        assert row.published_goodput == 0.88
        assert row.goodput == pytest.approx(0.88, abs=0.01)
        assert row.uptime > 0.9999

    def test_a_job_that_is_not_elastic_by_its_formula(self) -> None:
        """A renewal process: steps of s until one has a failure in it, then a restart of R: s / (s + (1 - e^(-rate s)) R)."""
        chips, days = 1_199_872, 12.0  # a whole number of slices
        [row] = sweep([GoodputCell("data-parallel", 1, chips)], goodput.FleetConditions(), (1,), days * DAY_S, jobs=1)
        rate_per_s, step_s = chips / YEAR_S, FITTED.step_s
        expected = step_s / (step_s + (1 - math.exp(-rate_per_s * step_s)) * FITTED.restart_s)
        assert row.uptime == pytest.approx(expected, abs=0.006)  # 14,000 restarts: three standard deviations

    def test_many_learners_behave_like_one_on_fewer_chips(self) -> None:
        rows = sweep(points(("decoupled",), (1, 4), (300_000, 1_200_000)), goodput.FleetConditions(), (1, 2), 2 * DAY_S, jobs=1)
        [(many, one, apart)] = thumb(rows)
        assert (many.learners, many.chips, one.learners, one.chips) == (4, 1_200_000, 1, 300_000)
        assert abs(apart) < 0.01
        assert many.uptime > one.uptime + 0.1

    def test_one_learner_that_nobody_waits_for_is_an_elastic_data_parallel_job(self) -> None:
        rows = sweep(
            [GoodputCell("decoupled", 1, 600_000), GoodputCell("data-parallel-elastic", 1, 600_000)],
            goodput.FleetConditions(),
            (3,),
            DAY_S,
            1,
        )
        assert rows[0].goodput == rows[1].goodput

    def test_learners_that_wait_for_all_lose_what_others_lose(self) -> None:
        wanted = [GoodputCell("diloco", 8, 1_200_000), GoodputCell("decoupled", 8, 1_200_000)]
        waiting, free = sweep(wanted, goodput.FleetConditions(), (1,), 0.25 * DAY_S, jobs=1)
        assert waiting.goodput < free.goodput - 0.01  # once in 500 steps they wait for the last one


class TestFit:
    def test_finds_constants_again_that_made_the_rows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Rows that the simulator made itself: the constants that a job which is not elastic depends on come back."""
        monkeypatch.setattr(fit, "CHIPS", (600_000, 2_400_000))
        truth = replace(FITTED, restart_s=60.0)
        made = fit.residuals(truth, (1,), 0.1 * DAY_S)
        rows: dict[tuple[str, int], dict[int, published.Cell]] = {}
        for each in made:
            row = rows.setdefault((each.strategy, 1), {})
            row[each.chips] = replace(row.get(each.chips, published.Cell()), **{each.quantity: each.simulated})
        monkeypatch.setattr(fit, "CELLS", rows)
        monkeypatch.setattr(fit, "MAX_TRIALS", 100)
        begun = replace(FITTED, restart_s=80.0)
        found = fit.fit(begun, (1,), 0.1 * DAY_S)
        assert found.restart_s == pytest.approx(60.0, rel=0.04)
        before, after = (fit.mean_error(fit.residuals(each, (1,), 0.1 * DAY_S)) for each in (begun, found))
        assert after < before / 2

    def test_uses_the_data_parallel_rows_alone(self) -> None:
        assert {each.strategy for each in fit.residuals(FITTED, (1,), 0.01 * DAY_S)} == {
            "data-parallel",
            "data-parallel-elastic",
        }

    def test_a_changed_constant_is_the_only_one(self) -> None:
        larger = fit.changed(FITTED, "restart_s", 1)
        assert larger == replace(FITTED, restart_s=FITTED.restart_s * 1.1)


class TestNumbers:
    def test_interval_by_hand(self) -> None:
        """Mean 0.2, standard deviation 0.1 of three: 4.303 x 0.1 / sqrt(3) = 0.2484 to each side, and no share below 0."""
        assert interval([0.1, 0.2, 0.3]) == pytest.approx((0.2, 0.0, 0.4484), abs=1e-4)
        assert interval([0.4]) == (0.4, 0.4, 0.4)

    def test_mean_error_by_hand(self) -> None:
        rows = [cell("decoupled", 8, 1_200_000, 0.87, 0.88), cell("decoupled", 4, 1_200_000, 0.5), cell("x", 1, 1, 0.4, 0.43)]
        assert mean_error(rows) == pytest.approx(0.02)
        assert mean_error(rows[1:2]) is None

    def test_thumb_pairs_what_has_as_many_chips_a_learner(self) -> None:
        rows = [cell("decoupled", 1, 150, 0.75), cell("decoupled", 2, 300, 0.5), cell("decoupled", 2, 150, 0.875)]
        assert thumb(rows) == [(rows[1], rows[0], -0.25)]

    def test_points_of_one_learner_stand_once(self) -> None:
        made = points(("data-parallel", "decoupled"), (2, 4), (10_000,))
        assert [(p.strategy, p.learners) for p in made] == [("data-parallel", 1), ("decoupled", 2), ("decoupled", 4)]


class TestBadInput:
    @pytest.mark.parametrize(
        ("values", "words"),
        [
            ({"restart": 3}, "--set restart: unknown \\(did you mean 'restart_s'"),
            ({"step_s": "fast"}, "step_s = 'fast': expected a number"),
            ({"restart_s": -1}, "restart_s = -1: expected a number, 0 or more"),
        ],
    )
    def test_constants(self, values: dict[str, object], words: str) -> None:
        with pytest.raises(SettingsError, match=words):
            conditions(values, "--set")

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ((0,), "chips = 0, expected a whole number, 1 or more"),
            ((1000, 1, 2000), "chips_per_slice = 2000 is more than all chips = 1000"),
            ((1000, 5, 250), "learners = 5 is more than the slices: 1000 chips are 4 slices of 250"),
            ((1000, 1, 250, 1.0, -1.0), "between_s = -1.0, expected seconds, above 0"),
            ((1000, 1, 250, 0.0), "step_s = 0.0, expected seconds, from 0.001 on"),
        ],
    )
    def test_clusters(self, arguments: tuple[float, ...], words: str) -> None:
        with pytest.raises(SettingsError, match=words):
            Cluster(*arguments).split(1)  # type: ignore[arg-type]

    def test_strategies(self) -> None:
        with pytest.raises(SettingsError, match="did you mean 'decoupled'"):
            strategy_of("decuopled")
        with pytest.raises(SettingsError, match="strategy data-parallel is a single one"):
            sweep([GoodputCell("data-parallel", 2, 1000)], goodput.FleetConditions(), (1,), 1.0, jobs=1)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Command]:
    with commanding(simulate, ("simulate", "goodput"), 200, tmp_path, monkeypatch, capfd) as made:
        yield made


class TestCommand:
    @pytest.mark.services
    def test_json_has_a_row_for_each_cell_however_many_processes_make_them(self, command: Command) -> None:
        arguments = ("--chips", "600k,1.2m", "--learners", "8", "--days", "0.02", "--seeds", "2", "--json")
        alone, together = command(*arguments, "--jobs", "1"), command(*arguments, "--jobs", "2")
        rows = json.loads(alone.out)
        assert rows == json.loads(together.out)
        assert [(row["strategy"], row["learners"], row["chips"]) for row in rows] == [
            ("data-parallel", 1, 600_000),
            ("data-parallel", 1, 1_200_000),
            ("data-parallel-elastic", 1, 600_000),
            ("data-parallel-elastic", 1, 1_200_000),
            ("decoupled", 8, 600_000),
            ("decoupled", 8, 1_200_000),
        ]
        assert set(rows[0]) == {
            *("strategy", "learners", "chips", "goodput", "goodput_low", "goodput_high", "uptime", "uptime_low", "uptime_high"),
            *("published_goodput", "published_uptime"),
        }
        assert rows[-1]["published_goodput"] == 0.88
        assert rows[-1]["published_uptime"] == 1.0
        assert 0 < rows[-1]["goodput_low"] <= rows[-1]["goodput"] <= rows[-1]["goodput_high"] <= 1

    def test_a_tape_takes_the_place_of_chance(self, command: Command, tmp_path: Path) -> None:
        """Eight learners of 16 slices; one slice is away from 100 s on: 20 s of reconfiguring, and then a sixteenth less."""
        tape = tmp_path / "tape.jsonl"
        tape.write_text(
            '{"format": "diloco-failures", "version": 1, "duration_s": 1000}\n'
            '{"at_s": 97, "kind": "chip_loss", "target": "learner-2/slice-3", "duration_s": 5000}\n'
        )
        settings = ("--set", "step_s=5", "--set", "downscale_s=20", "--set", "chips_per_slice=1", "--tape", str(tape), "--json")
        [row] = json.loads(command("--strategy", "decoupled", "--chips", "128", "--learners", "8", *settings).out)
        # until 1005 s; the slice is gone since 95 s, and the other 15 reconfigure from 100 s to 120 s
        useful = 7 * 16 * 1005 + 16 * 1005 - (1005 - 95) - 15 * 20
        assert row["goodput"] == pytest.approx(useful / (8 * 16 * 1005), abs=1e-12)
        assert row["published_goodput"] is None

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (("--chips", "many"), "--chips many: 'many', expected whole numbers"),
            (("--days", "-1"), "--days -1: expected a number above 0"),
            (("--seeds", "0"), "--seeds 0: expected 1 to 1000"),
            (("--tape", "nowhere.jsonl"), "--tape nowhere.jsonl"),
            (("--chips", "1000", "--learners", "16"), "learners = 16 is more than the slices"),
        ],
    )
    def test_says_what_is_wrong(self, command: Command, arguments: tuple[str, ...], words: str) -> None:
        done = command(*arguments)
        assert done.code == 2
        assert words in done.err


def test_every_published_row_is_complete() -> None:
    assert all(set(row) == set(CHIPS) for row in published.CELLS.values())
    assert (
        sum(cell.goodput is not None and cell.uptime is not None for row in published.CELLS.values() for cell in row.values())
        == 30
    )


def test_errors_of_published_cells_by_hand() -> None:
    rows = [
        cell("data-parallel", 1, 600_000, 0.40, 0.38),
        cell("decoupled", 8, 1_200_000, 0.87, 0.88),
        cell("decoupled", 4, 2_400_000, 0.70, 0.73),
        cell("decoupled", 1, 600_000, 0.9),
    ]
    fitted, predicted = comparison.of_goodput(rows)  # no uptime is known of these
    assert fitted.sentence() == (
        "goodput, data-parallel, fitted, 1 published cells: "
        "mean error 2.00 points, bias +2.00 points, worst +2.0 points (data-parallel, 600k chips)"
    )
    assert (predicted.cells, predicted.cell) == (2, "M = 4, 2.40M chips")
    assert (predicted.mean, predicted.bias, predicted.worst) == pytest.approx((2.0, -2.0, -3.0))
