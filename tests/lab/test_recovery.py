"""A recovering learner by its link: values by hand, and the two published statements about figure 12."""

from __future__ import annotations

import json
import math

import pytest
from typer.testing import CliRunner

from diloco.errors import SettingsError
from diloco_lab.simulate_command import simulate
from diloco_lab.simulator.recovery import PUBLISHED, RecoveryNeeds, default_run, rows


def test_up_to_six_steps_a_copy_are_free() -> None:
    # 16 bits of each parameter in six steps; 3N of state in 24 steps, and N of versions beside them
    assert PUBLISHED.took_steps(16 / 6) == pytest.approx(24)
    assert PUBLISHED.downtime_steps(16 / 5.9) == 0
    assert PUBLISHED.downtime_steps(16 / 6.1) > 0
    assert 16 / PUBLISHED.free_rate == 6


def test_3n_over_h_parameters_a_step_are_enough_beside_the_versions() -> None:
    state, versions = 3 * 16 / 24, 16 / 24
    assert PUBLISHED.free_rate == pytest.approx(state + versions)


def test_a_slower_link_by_hand() -> None:
    # 16 bits in 8 steps are 2 bits a step. Versions take 2/3 of a bit a step, so 48 bits take 36 steps: 12 more than H
    assert PUBLISHED.took_steps(2.0) == pytest.approx(36)
    assert PUBLISHED.downtime_steps(2.0) == pytest.approx(12)
    # 16 bits in 24 steps are the versions alone
    assert math.isinf(PUBLISHED.took_steps(16 / 24))


def test_a_default_run_by_hand() -> None:
    # value, outer momentum and Muon's moment of 32 bits, versions of 4, in 24 steps
    assert default_run() == RecoveryNeeds(values=3, value_bits=32, version_bits=4, steps=24)
    assert default_run().free_rate == pytest.approx(100 / 24)


def test_rows_are_in_the_units_that_they_say() -> None:
    [row] = rows([("published", PUBLISHED)], parameters=5e9, step_s=2.0, copy_steps=(4.0,))
    assert (row.bits_per_s, row.gbit_per_s) == (2.0, 10.0)  # 4 bits in a step of 2 s
    assert row.took_steps == pytest.approx(48 / (4 - 2 / 3))


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_a_link_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(SettingsError, match="expected a number above 0"):
        PUBLISHED.took_steps(rate)


def test_the_command() -> None:
    arguments = ["recovery", "--copy-steps", "8", "--copy-steps", "24", "--json"]
    told = json.loads(CliRunner().invoke(simulate, arguments, catch_exceptions=False).stdout)
    found = [(row["name"], row["copy_steps"], row["downtime_steps"]) for row in told][:2]
    assert found == [("published", 8.0, pytest.approx(12)), ("published", 24.0, None)]
    assert "a copy in 6 steps" in CliRunner().invoke(simulate, ["recovery"], catch_exceptions=False).stdout
