"""Every time limit of a run that must be below another one, and the check of settings against the table.

A new run and a change of settings are refused. A run that exists goes on, with a warning, so that its log stays readable.
"""

from __future__ import annotations

from typing import NamedTuple

from diloco.errors import SettingsError
from diloco.settings.run import RunSettings
from diloco.settings.validation import value_of

TAKEOVER_MIN_S = 0.1  # a syncer sends six heartbeats in takeover_s: with less, a late timer is a dead syncer


class TimeLimitRow(NamedTuple):
    """A rule: ``larger`` is at least ``times`` as long as ``smaller``."""

    smaller: str
    times: float
    larger: str
    why: str


TIME_LIMITS = (
    TimeLimitRow("liveness.heartbeat_s", 2, "liveness.dead_s", "a learner would count as dead after one late heartbeat"),
    TimeLimitRow("liveness.heartbeat_s", 2, "liveness.lease_s", "a learner would lose its data after one late heartbeat"),
    TimeLimitRow("liveness.dead_s", 1, "liveness.lease_s", "a learner that is alive would lose its data to others"),
)
REGION_TIME_LIMITS = (
    TimeLimitRow("liveness.takeover_s", 1, "regions.away_s", "a region would count as lost before one of its syncers does"),
)


def check_time_limits(settings: RunSettings, source: str) -> None:
    """Refuse settings whose time limits contradict each other.

    Raises:
        SettingsError: the first contradiction, with both settings and their values.
    """
    found = contradiction(settings)
    if found is not None:
        raise SettingsError(f"{source}: {found}")


def contradiction(settings: RunSettings) -> str | None:
    """Return what the first contradiction is, with both settings and their values; None if there is none."""
    for row in (*TIME_LIMITS, *(REGION_TIME_LIMITS if settings.regions.names else ())):
        small, large = value_of(settings, row.smaller), value_of(settings, row.larger)
        if large < row.times * small:
            least = row.smaller if row.times == 1 else f"{row.times:g} times {row.smaller}"
            return f"{row.larger} = {large:g} with {row.smaller} = {small:g}: {row.why}; {row.larger} must be at least {least}"
    if settings.liveness.takeover_s < TAKEOVER_MIN_S:
        return (
            f"liveness.takeover_s = {settings.liveness.takeover_s:g}: a syncer with a late heartbeat would lose its "
            f"fragments; expected at least {TAKEOVER_MIN_S:g}"
        )
    return None
