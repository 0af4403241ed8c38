"""Time limits of a new run are checked against each other."""

from __future__ import annotations

from typing import Any

import pytest

from diloco.errors import SettingsError
from diloco.settings.presets import PRESETS, run_settings
from diloco.settings.time_limits import check_time_limits


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_free_of_contradictions(preset: str) -> None:
    check_time_limits(run_settings(preset, {"regions.names": ["us", "eu"]}), "here")


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ({"dead_s": 1, "heartbeat_s": 2}, ("liveness.dead_s = 1", "liveness.heartbeat_s = 2")),
        ({"lease_s": 3, "dead_s": 10}, ("liveness.lease_s = 3", "liveness.dead_s = 10")),
        ({"lease_s": 0.1, "heartbeat_s": 60, "dead_s": 120}, ("liveness.lease_s = 0.1", "liveness.heartbeat_s = 60")),
        ({"takeover_s": 0.001}, ("liveness.takeover_s = 0.001", "at least 0.1")),
        ({"takeover_s": 7}, ("liveness.takeover_s = 7", "regions.away_s = 6")),
    ],
)
def test_contradictions_are_refused_in_one_line_with_both_names(overrides: dict[str, Any], names: tuple[str, str]) -> None:
    settings = run_settings(overrides={f"liveness.{key}": value for key, value in overrides.items()})
    settings = settings.model_copy(update={"regions": settings.regions.model_copy(update={"names": ["us", "eu"]})})
    with pytest.raises(SettingsError) as refused:
        check_time_limits(settings, "here")
    assert all(name in str(refused.value) for name in names)
    assert "\n" not in str(refused.value)


def test_a_run_without_regions_has_no_limit_of_regions() -> None:
    check_time_limits(run_settings(overrides={"liveness.takeover_s": 7}), "here")
